"""Flags of llama.cpp that people paste: what they are called here, or why they are not needed."""

from __future__ import annotations

SAME = {
    "-hf": "--model",
    "-hfr": "--model",
    "--hf-repo": "--model",
    "-hfd": "--model-draft",
    "-hfrd": "--model-draft",
    "--hf-repo-draft": "--model-draft",
    "--spec-draft-model": "--model-draft",
    "--spec-draft-hf": "--model-draft",
    "-ctk": "--cache-type",
    "--cache-type-k": "--cache-type",
    "-ctv": "--cache-type",
    "--cache-type-v": "--cache-type",
    "-s": "--seed",
    "-sys": "--system",
    "--system-prompt": "--system",
    "--predict": "--n-predict",
    "-l": "--logit-bias",
    "--temperature": "--temp",
    "--draft": "--draft-max",
    "--draft-n": "--draft-max",
}
"""Other spellings of options: flag -> ours."""

_MOVED = "whole models run on one device: choose it with --device, and see `g4spec doctor`"
_SAMPLER = "no such sampler; there are --temp, --top-k, --top-p, --min-p and penalties"
_DRAFT = "a draft runs on its target's device; --draft-window bounds its context"
_REFUSED = {
    "-ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu -dev "
    "--device-draft -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -fit --fit": _MOVED,
    "-ngld --gpu-layers-draft --n-gpu-layers-draft -devd -cd --ctx-size-draft -td "
    "--threads-draft": _DRAFT,
    "-ctkd --cache-type-k-draft -ctvd --cache-type-v-draft": (
        "a draft's cache has its target's type: --cache-type"
    ),
    "-fa --flash-attn": "attention always works in blocks, with nothing to switch on",
    "-nkvo --no-kv-offload -kvo --kv-offload": (
        "keys and values lie where the model runs; -c and --cache-type make them smaller"
    ),
    "--jinja --no-jinja": "chat templates are always read as Jinja",
    "-cnv --conversation -i --interactive -if --interactive-first -st --single-turn": (
        "`g4spec chat` is a conversation, and `generate --chat` one question"
    ),
    "-no-cnv --no-conversation": "`generate` continues a prompt as it stands unless told --chat",
    "--chat-template": "the file's own template is used; `serve` takes --chat-template-file",
    "-sysf --system-prompt-file": "give the text with --system",
    "-b --batch-size -ub --ubatch-size": "the device decides how many rows are read at a time",
    "-tb --threads-batch": "prompts are read with the same threads: -t",
    "--mlock --mmap --no-mmap -dio --direct-io --no-host --numa --prio --poll --cpu-mask -C": (
        "nothing here to set: weights are copied to the device once"
    ),
    "-np --parallel": "one text at a time; `serve`, `bench` and `verify` take --parallel",
    "-cb --cont-batching": "`serve` always adds texts to a running batch",
    "--warmup --no-warmup": "`bench` warms up by itself",
    "-v --verbose -lv --verbosity --log-verbosity --log-disable --log-file --verbose-prompt "
    "--no-perf --perf": "figures and notices go to stderr; -q leaves them out",
    "--no-display-prompt --display-prompt": "only the new text is printed",
    "-co --color": "a terminal gets colours by itself, unless NO_COLOR is set",
    "-e --escape --no-escape": "-p is taken as it stands; line breaks come from a file (-f)",
    "--samplers --sampling-seq --sampler-seq --mirostat --mirostat-lr --mirostat-ent --typical "
    "--typical-p --xtc-probability --xtc-threshold --dry-multiplier --dry-base "
    "--dry-allowed-length --dry-penalty-last-n --dynatemp-range --dynatemp-exp --top-nsigma "
    "--top-n-sigma": _SAMPLER,
    "--repeat-last-n": "penalties count the whole text",
    "--grammar --grammar-file -j --json-schema -jf --json-schema-file": (
        "`serve` holds an answer to a grammar or schema if the request asks for it"
    ),
    "--reasoning-format --reasoning-budget -rea --reasoning": (
        "--thinking (`chat`: --think) lets the model think first"
    ),
    "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
    "--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --override-kv": (
        "the file says it; convert it again to change that"
    ),
    "--keep --context-shift --no-context-shift -gan --grp-attn-n": (
        "a text ends where its context does"
    ),
    "-mm --mmproj --mmproj-auto --no-mmproj --image --audio": "only text is read",
    "--lora --lora-scaled --control-vector": "no adapters: merge them into the checkpoint first",
    "--draft-min --draft-n-min --spec-draft-n-min": (
        "a proposal may have any length up to --draft-max"
    ),
    "--spec-type": "-md names the draft, and its file says its kind; `-md ngram` needs no file",
    "-hff --hf-file": "the file stands behind the repository: -m org/name:FILE.gguf",
    "-mu --model-url": "download it, or name its hub id with -m",
    "-hft --hf-token": "set HF_TOKEN",
    "--metrics --props --slots": "`serve` always offers that",
    "-sys --system-prompt": "`chat` and `generate --chat` take a system message",
}
REFUSED = {flag: why for flags, why in _REFUSED.items() for flag in flags.split()}
"""Flag -> why it is not needed, or what to use."""
