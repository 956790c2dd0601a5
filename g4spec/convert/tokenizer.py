"""Tokenizer of a target as GGUF metadata, in the form that upstream's Gemma 4 converter writes.

Source: llama.cpp `conversion/gemma.py` (set_vocab), `gguf-py/gguf/vocab.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from g4spec.convert.safetensors import load_json
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF, KV, ValueType, array, boolean, regular_files, string, u32
from g4spec.models import ollama
from g4spec.models.spec import BYTE, CONTROL, NORMAL, USER_DEFINED, VISIBLE

STOP_IDS = "g4spec.stop_ids"
TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
SUPPRESS = "tokenizer.ggml.suppress_tokens"
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # upstream's spelling
DEFAULTS = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")}
"""Special tokens that Gemma's tokenizer class uses if the configuration does not set them."""
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def from_gguf(gguf: GGUF) -> KV:
    """Return the tokenizer keys of a target GGUF. Raises InputError if it has no tokenizer."""
    for key in (TOKENS, "tokenizer.ggml.merges"):
        if gguf.array_type(key) is not ValueType.STRING:
            raise InputError(
                f"{gguf.path}: the target has no tokenizer, which its draft needs",
                expected=f"{key}, a list of texts",
            )
    kept = [k for k in gguf if k.startswith("tokenizer.") or k == STOP_IDS]
    kv = {key: gguf.value(key) for key in kept}
    return kv | usual_keys(gguf)


def usual_keys(gguf: GGUF) -> KV:
    """Return the keys of a file's tokenizer that Ollama writes otherwise than upstream, as upstream
    does; none for other files. A prompt always begins with BOS."""
    if not ollama.has_tokenizer(gguf) or None in map(gguf.array_type, (TOKENS, TYPES)):
        return {}
    tokens, types = gguf[TOKENS], gguf.number_array(TYPES)
    return {
        ollama.MODEL: string("gemma4"),
        TYPES: array(ValueType.I32, ollama.token_types(tokens, types)),
        "tokenizer.ggml.add_bos_token": boolean(True),
    }


def from_folder(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> tuple[KV, list[str]]:
    """Return the tokenizer keys made from tokenizer.json and the other files of a checkpoint, and a
    note for the user if chat templates are left out: a GGUF file has one without a name.

    Args:
        config, generation: parsed config.json and generation_config.json.
    """
    path, expected = folder / "tokenizer.json", "the target's tokenizer.json"
    if not path.exists() and (folder / "tokenizer.model").exists():
        raise InputError(
            f"{path}: no such file",
            expected=expected,
            found="only tokenizer.model",
            fix="download it from the original model, or write it with `save_pretrained` of "
            "transformers' AutoTokenizer",
        )
    raw = load_json(path, expected)
    settings = _settings(folder)
    model = raw.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not model.get("byte_fallback"):
        raise Unsupported(
            f"{folder}/tokenizer.json: tokenizer model",
            expected="BPE with byte fallback, as Gemma 4 has",
            found=model.get("type") if isinstance(model, dict) else model,
        )
    listed = raw.get("added_tokens") or []
    if not isinstance(listed, list):
        raise InputError(f"{folder}/tokenizer.json: added_tokens", expected="a list")
    added = [a for a in listed if isinstance(a, dict)]
    ids = {str(a.get("content")): a.get("id") for a in added}
    tokens = _tokens(model.get("vocab"), ids, folder)
    kv: KV = {
        "tokenizer.ggml.model": string("gemma4"),
        TOKENS: array(ValueType.STRING, tokens),
        "tokenizer.ggml.scores": array(ValueType.F32, np.full(len(tokens), -1000, np.float32)),
        TYPES: array(ValueType.I32, _types(tokens, settings, len(model["vocab"]), set(ids))),
        "tokenizer.ggml.merges": array(ValueType.STRING, _merges(model.get("merges"), folder)),
    }
    for name, number in _special_ids(settings, ids, config).items():
        kv[f"tokenizer.ggml.{KEYS.get(name, name)}_token_id"] = u32(number)
    kv["tokenizer.ggml.add_space_prefix"] = boolean(False)
    kv["tokenizer.ggml.add_bos_token"] = boolean(True)
    for name in ("eos", "sep"):
        if isinstance(settings.get(f"add_{name}_token"), bool):
            kv[f"tokenizer.ggml.add_{name}_token"] = boolean(settings[f"add_{name}_token"])
    template, others = _templates(folder, settings)
    if template:
        kv["tokenizer.chat_template"] = string(template)
    if suppressed := generation.get("suppress_tokens"):
        kv[SUPPRESS] = array(ValueType.I32, _ids(suppressed, len(tokens), folder))
    kv[STOP_IDS] = array(ValueType.I32, _stop_ids(config, generation))
    if not others:
        return kv, []
    missing = "" if template else "; none is called default, so the file has no chat template"
    return kv, [f"chat templates that are not written: {', '.join(others)}{missing}"]


def _settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, empty if the checkpoint has none."""
    path = folder / "tokenizer_config.json"
    return load_json(path) if path.is_file() else {}


def _tokens(vocab: Any, added: dict[str, Any], folder: Path) -> list[str]:
    """Return all tokens in order of their ids: vocabulary, then added tokens."""
    where = f"{folder}/tokenizer.json"
    if not isinstance(vocab, dict) or not vocab:
        raise InputError(f"{where}: model.vocab", expected="token -> id")
    by_id = {i: text for text, i in (*vocab.items(), *added.items()) if isinstance(i, int)}
    missing = next((i for i in range(len(by_id)) if i not in by_id), None)
    if missing is not None or len(set(by_id.values())) != len(by_id):
        found = "a duplicate token" if missing is None else f"no id {missing}"
        raise InputError(f"{where}: ids", expected="0, 1, 2, ... once each", found=found)
    return [by_id[i] for i in range(len(by_id))]


def _types(
    tokens: list[str], settings: Mapping[str, Any], n_base: int, added: set[str]
) -> list[int]:
    """Return the GGUF type of each token. `n_base`: size of the vocabulary. `added`: texts that are
    recognised as a whole; unlike llama.cpp's converter, also those that the vocabulary has, as an
    unused token that a fine-tuned model uses."""
    special = _control_tokens(settings)

    def kind(number: int, text: str) -> int:
        if text in VISIBLE:
            return USER_DEFINED
        if number < n_base and BYTE_TOKEN.fullmatch(text):
            return BYTE
        if text in special:
            return CONTROL
        return USER_DEFINED if number >= n_base or text in added else NORMAL

    return [kind(i, text) for i, text in enumerate(tokens)]


def _control_tokens(settings: Mapping[str, Any]) -> set[str]:
    """Return the special tokens of tokenizer_config.json, as transformers collects them."""
    named = [v for k, v in {**DEFAULTS, **settings}.items() if k.endswith("_token")]
    for key in ("extra_special_tokens", "additional_special_tokens"):
        more = settings.get(key) or []
        named += more.values() if isinstance(more, dict) else more
    return {_content(v) for v in named} - {""}


def _content(entry: Any) -> str:
    """Return the text of a token given as a string or as {"content": ...}; "" for others."""
    got = entry.get("content") if isinstance(entry, dict) else entry
    return got if isinstance(got, str) else ""


def _merges(merges: Any, folder: Path) -> list[str]:
    """Return merges as "left right"; a space inside a half becomes U+0120."""
    try:
        return [
            m if isinstance(m, str) else " ".join(half.replace(" ", "\u0120") for half in m)
            for m in merges
        ]
    except (TypeError, AttributeError) as e:
        raise InputError(
            f"{folder}/tokenizer.json: model.merges", expected="pairs of strings"
        ) from e


def _special_ids(
    settings: Mapping[str, Any], added: dict[str, Any], config: Mapping[str, Any]
) -> dict[str, int]:
    """Return role -> id of special tokens; the tokenizer's configuration precedes the model's."""
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else {}
    out = {}
    for name in SPECIAL:
        number = added.get(_content(settings.get(f"{name}_token")))
        if isinstance(number, int):
            out[name] = number
    for name in SPECIAL:
        key = f"{name}_token_id"
        number = config.get(key) if config.get(key) is not None else text.get(key)
        if name not in out and isinstance(number, int) and number >= 0:
            out[name] = number
    return out


def _templates(folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """Return the chat template, or None, and the names of others.

    As in transformers, chat_template.jinja precedes tokenizer_config.json, whose template may be
    outdated. chat_template.json is the old form of processors.
    """
    path, old = folder / "chat_template.jinja", folder / "chat_template.json"
    got: Any = settings.get("chat_template")
    if path.exists():
        try:
            got = regular_files.read_regular(regular_files.check_link(path)).decode()
        except UnicodeDecodeError as e:
            raise InputError(f"{path}: not UTF-8") from e
    elif got is None and old.exists():
        got = load_json(old).get("chat_template")
    others = sorted(p.stem for p in (folder / "additional_chat_templates").glob("*.jinja"))
    if isinstance(got, list):
        named = {str(t.get("name")): t.get("template") for t in got if isinstance(t, dict)}
        got = named.pop("default", None)
        others += named
    return got if isinstance(got, str) else None, others


def _ids(found: Any, n_tokens: int, folder: Path) -> list[int]:
    """Check and return `suppress_tokens`: ids that must never be sampled."""
    if not isinstance(found, list) or not all(type(i) is int and 0 <= i < n_tokens for i in found):
        raise InputError(
            f"{folder}/generation_config.json: suppress_tokens",
            expected=f"a list of token ids below {n_tokens}",
            found=f"{found!r:.80}",
        )
    return found


def _stop_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> list[int]:
    """Return all ids that end a turn according to the model's configurations, sorted."""
    found: set[int] = set()
    for source in (config, config.get("text_config") or {}, generation):
        ids = source.get("eos_token_id")
        found.update(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))
    return sorted(found)
