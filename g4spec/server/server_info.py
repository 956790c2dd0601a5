"""Descriptions of the server: the model, /props and /slots."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from g4spec.server import response_parts
from g4spec.server.engine_client import EngineLike
from g4spec.server.service import Service

ARCHITECTURE = {"input_modalities": ["text"], "output_modalities": ["text"]}
"""The `architecture` of models in llama.cpp's list of several."""


VOCAB_TYPE = 2
"""Kind of Gemma 4's tokenizer in llama.cpp (llama.h, `enum llama_vocab_type`): BPE."""


def models(service: Service) -> dict[str, Any]:
    """Return the response of /v1/models; `models` is llama.cpp's, for clients of Ollama."""
    name = service.settings.model
    entry = {"name": name, "model": name, "type": "model", "capabilities": ["completion"]}
    return {"models": [entry], "object": "list", "data": [model(service)]}


def meta(engine: EngineLike) -> dict[str, Any]:
    """Return `meta` of a loaded model in /v1/models."""
    return {
        "vocab_type": VOCAB_TYPE,
        "n_ctx": engine.n_ctx,
        "n_ctx_train": engine.config.n_ctx,
        "n_vocab": engine.config.n_vocab,
        "n_embd": engine.config.n_embd,
        **engine.described,
    }


def model(service: Service) -> dict[str, Any]:
    """Return the entry of /v1/models."""
    return {
        "id": service.settings.model,
        "object": "model",
        "created": service.started,
        "owned_by": "g4spec",
        "tags": list(service.settings.tags),
        "aliases": [service.settings.model, *service.settings.aliases],
        "meta": meta(service.engine),
    }


def props(service: Service, disabled: Container[str]) -> dict[str, Any]:
    """Return the response of /props; `disabled`: paths that the server does not answer."""
    tokenizer, engine, sampler = service.tokenizer, service.engine, service.settings.sampler
    ftype = engine.described.get("ftype")
    return {
        "default_generation_settings": {
            "n_ctx": engine.n_ctx,
            "params": {
                "temperature": sampler.temperature,
                "top_k": sampler.top_k,
                "top_p": sampler.top_p,
                "min_p": sampler.min_p,
                "top_n_sigma": sampler.top_n_sigma,
                "n_predict": service.settings.n_predict or -1,
                "seed": -1 if service.settings.seed is None else service.settings.seed,
            },
        },
        "total_slots": engine.n_slots,
        "model_alias": service.settings.model,
        **({} if ftype is None else {"model_ftype": ftype}),
        "model_path": Path(tokenizer.source).name,  # not the path on this machine
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": "/slots" not in disabled,
        "endpoint_props": False,  # POST /props
        "endpoint_metrics": "/metrics" not in disabled,
        "chat_template": tokenizer.template or "",
        "bos_token": tokenizer.piece(tokenizer.bos, special=True).decode(),
        "eos_token": tokenizer.piece(min(tokenizer.stop_ids), special=True).decode(),
        "build_info": response_parts.SYSTEM_FINGERPRINT,
        "is_sleeping": service.is_sleeping,
        "speculative": engine.draft_name,
    }


def slots(service: Service) -> list[dict[str, Any]]:
    """Return the response of /slots, without any text."""
    engine = service.engine
    live = {slot.slot: slot for slot in engine.stats().slots}
    out = []
    for i in range(engine.n_slots):
        slot: dict[str, Any] = {
            "id": i,
            "n_ctx": engine.n_ctx,
            "is_processing": i in live,
            "speculative": engine.draft_name is not None,
        }
        if (text := live.get(i)) is not None:
            counts = {"n_decoded": text.tokens, "n_remain": text.left}
            slot |= {
                "id_task": text.number,
                "n_prompt_tokens": text.prompt_tokens,
                "n_prompt_tokens_cache": text.cached_tokens,
                **counts,
                "next_token": [{"has_next_token": True, **counts}],  # as in llama.cpp
                "draft_n": text.drafted,
                "draft_n_accepted": text.accepted,
            }
        out.append(slot)
    return out
