"""Write and read checkpoints in the published formats: config.json, bf16 model.safetensors."""

import json
from pathlib import Path

import torch
from data import write_json
from drafts import SPECULATORS, ZLAB, Assistant, AssistantConfig, DFlash, DFlashConfig
from safetensors.torch import load_file, save_file
from target import Target, TargetConfig

GENERATION = {
    "bos_token_id": 2,
    "eos_token_id": [1, 106, 50],
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 64,
    "top_p": 0.95,
}
ROPE = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
PREFIX = "model.language_model."


def text_config(c: TargetConfig) -> dict:
    """Return the target's `text_config`, with the keys of Google's checkpoints."""
    return {
        "model_type": "gemma4_text",
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "intermediate_size": c.mlp,
        "num_hidden_layers": len(c.layers),
        "num_attention_heads": c.heads,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": 1,
        "head_dim": c.head_dim["S"],
        "global_head_dim": c.head_dim["F"],
        "attention_k_eq_v": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": c.window,
        "layer_types": [{"S": "sliding_attention", "F": "full_attention"}[k] for k in c.layers],
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": c.softcap,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": c.max_position,
        "rope_parameters": ROPE,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": c.vocab,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }


def target_config(c: TargetConfig) -> dict:
    """Return the target's config.json."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "text_config": text_config(c),
        "vision_config": None,
        "audio_config": None,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": [1, 106],
        "pad_token_id": 0,
        "initializer_range": 0.02,
    }


def layer_names(kind: str, prefix: str) -> dict[str, str]:
    """Return parameter -> tensor name in the checkpoint, for one Gemma 4 layer."""
    names = {f"norms.{i}": f"{n}.weight" for i, n in enumerate(NORMS)}
    names |= {f"{p}.weight": f"self_attn.{p}_proj.weight" for p in ("q", "k", "v", "o")}
    names |= {f"{p}_norm": f"self_attn.{p}_norm.weight" for p in ("q", "k")}
    names |= {f"{p}.weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    names["scalar"] = "layer_scalar"
    if kind == "F":
        del names["v.weight"]
    return {k: prefix + v for k, v in names.items()}


def target_names(c: TargetConfig) -> dict[str, str]:
    """Return parameter -> tensor name in the checkpoint, for the target."""
    names = {"embed.weight": PREFIX + "embed_tokens.weight", "norm": PREFIX + "norm.weight"}
    for i, kind in enumerate(c.layers):
        names |= {
            f"layers.{i}.{k}": v for k, v in layer_names(kind, f"{PREFIX}layers.{i}.").items()
        }
    return names


def save(
    state: dict[str, torch.Tensor],
    names: dict[str, str],
    folder: Path,
    config: dict,
    extra: dict | None = None,
) -> None:
    """Write a checkpoint; every tensor of the state must have a name."""
    assert set(state) == set(names), set(state) ^ set(names)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {names[k]: v.detach().cpu().to(torch.bfloat16).contiguous() for k, v in state.items()}
    save_file(
        dict(sorted((tensors | (extra or {})).items())),
        str(folder / "model.safetensors"),
        {"format": "pt"},
    )
    write_json(folder / "config.json", config)


def load(module: torch.nn.Module, names: dict[str, str], folder: Path) -> None:
    """Load a checkpoint's tensors into a module, in float32."""
    tensors = load_file(str(folder / "model.safetensors"))
    module.load_state_dict({k: tensors[n].float() for k, n in names.items()})


def write_target(model: Target, folder: Path) -> None:
    """Write the target's checkpoint and generation config (the tokenizer exists already)."""
    save(dict(model.state_dict()), target_names(model.c), folder, target_config(model.c))
    write_json(folder / "generation_config.json", GENERATION)


def read_target(folder: Path) -> Target:
    """Load the target from its checkpoint, in float32."""
    model = Target()
    load(model, target_names(model.c), folder)
    return model


def dflash_names(c: DFlashConfig) -> dict[str, str]:
    """Return parameter -> tensor name in the checkpoint, for a DFlash draft."""
    names = {"fc.weight": "fc.weight", "hidden_norm": "hidden_norm.weight", "norm": "norm.weight"}
    for i in range(len(c.layers)):
        at = f"layers.{i}."
        names |= {
            at + "norms.0": at + "input_layernorm.weight",
            at + "norms.1": at + "post_attention_layernorm.weight",
        }
        names |= {f"{at}{p}.weight": f"{at}self_attn.{p}_proj.weight" for p in "qkvo"}
        names |= {f"{at}{p}_norm": f"{at}self_attn.{p}_norm.weight" for p in "qk"}
        names |= {f"{at}{p}.weight": f"{at}mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    if c.own_head:
        names |= {"embed.weight": "embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    return names


def dflash_layers(c: DFlashConfig, t: TargetConfig) -> dict:
    """Return the keys that both formats share (flat in one, nested in the other)."""
    return {
        "model_type": "qwen3",
        "vocab_size": t.vocab,
        "hidden_size": c.hidden,
        "intermediate_size": c.mlp,
        "num_hidden_layers": len(c.layers),
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": t.max_position,
        "layer_types": [{"S": "sliding_attention", "F": "full_attention"}[k] for k in c.layers],
        "use_sliding_window": True,
        "sliding_window": c.window,
        "max_window_layers": len(c.layers),
        "use_cache": True,
    }


def zlab_config(c: DFlashConfig, t: TargetConfig) -> dict:
    """Return the flat config of a z-lab draft."""
    return {
        "architectures": ["DFlashDraftModel"],
        **dflash_layers(c, t),
        "block_size": c.block,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": list(c.taps)},
        "num_target_layers": len(t.layers),
        "final_logit_softcapping": t.softcap,
        "rope_theta": c.theta,
        "rope_scaling": None,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def speculators_config(c: DFlashConfig, t: TargetConfig) -> dict:
    """Return the nested config of a speculators draft."""
    layers = dflash_layers(c, t) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": c.theta},
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": c.block - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": "examples/tiny/target",
                "architectures": ["Gemma4ForConditionalGeneration"],
            },
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": c.own_head,
        "block_size": c.block,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [i + 1 for i in c.taps],
        "mask_token_id": 4,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def assistant_names(c: AssistantConfig) -> dict[str, str]:
    """Return parameter -> tensor name in the checkpoint, for the assistant."""
    names = {
        "embed.weight": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "pre.weight": "pre_projection.weight",
        "post.weight": "post_projection.weight",
        "centroids.weight": "masked_embedding.centroids.weight",
    }
    for i, kind in enumerate(c.layers):
        ours = layer_names(kind, f"model.layers.{i}.")
        names |= {
            f"layers.{i}.{k}": v
            for k, v in ours.items()
            if k not in ("k.weight", "v.weight", "k_norm")
        }
    return names


def assistant_config(c: AssistantConfig, t: TargetConfig) -> dict:
    """Return the assistant's config."""
    text = text_config(
        TargetConfig(hidden=c.hidden, mlp=c.mlp, heads=c.heads, layers=c.layers, window=t.window)
    )
    text |= {
        "num_kv_shared_layers": len(c.layers),
        "final_logit_softcapping": None,
        "vocab_size_per_layer_input": 0,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "dtype": "bfloat16",
        "text_config": text,
        "backbone_hidden_size": t.hidden,
        "use_ordered_embeddings": True,
        "num_centroids": c.centroids,
        "centroid_intermediate_top_k": c.top_k,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": [1, 106],
        "pad_token_id": 0,
    }


def write_drafts(drafts: dict[str, torch.nn.Module], target: Target, out: Path) -> None:
    """Write every draft in its format, into the folder of its name."""
    for name, draft in drafts.items():
        state = dict(draft.state_dict())
        if isinstance(draft, Assistant):
            save(
                state,
                assistant_names(draft.c),
                out / name,
                assistant_config(draft.c, target.c),
                {"masked_embedding.token_ordering": draft.ordering.cpu().long().contiguous()},
            )
            write_json(
                out / name / "generation_config.json",
                GENERATION
                | {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"},
            )
        elif draft.c.own_head:
            ids = draft.draft_ids.cpu()
            chosen = torch.zeros(target.c.vocab, dtype=torch.bool)
            chosen[ids] = True
            save(
                state,
                dflash_names(draft.c),
                out / name,
                speculators_config(draft.c, target.c),
                {"d2t": ids - torch.arange(len(ids)), "t2d": chosen},
            )
        else:
            save(state, dflash_names(draft.c), out / name, zlab_config(draft.c, target.c))


def read_draft(name: str, target: Target, out: Path) -> torch.nn.Module:
    """Load a draft from its checkpoint, in float32."""
    folder = out / name
    config, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(str(folder / "model.safetensors")),
    )
    embed = target.embed.weight.detach().cpu()
    if config["architectures"] == ["Gemma4AssistantForCausalLM"]:
        draft = Assistant(AssistantConfig(), target.c, tensors["masked_embedding.token_ordering"])
        names = assistant_names(draft.c)
    elif "d2t" in tensors:
        draft = DFlash(SPECULATORS, tensors["d2t"] + torch.arange(len(tensors["d2t"])), embed)
        names = dflash_names(draft.c)
    else:
        draft = DFlash(ZLAB)
        names = dflash_names(draft.c)
    load(draft, names, folder)
    return draft.eval()
