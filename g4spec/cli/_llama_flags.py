"""Flags of llama.cpp: the name of the same option here, or why there is none."""

from __future__ import annotations

SAME = {
    "-hf": "--model",
    "-hfr": "--model",
    "--hf-repo": "--model",
    "-md": "--model-draft",
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
    "--n-predict": "--predict",  # of `serve`
    "-l": "--logit-bias",
    "--temperature": "--temp",
    "--top-nsigma": "--top-n-sigma",
    "--draft": "--draft-max",
    "--draft-n": "--draft-max",
    "--cors-origins": "--cors-origin",
    "--models-dir": "--models",
    "-rea": "--reasoning",
    "-cram": "--prefix-cache",
    "--cache-ram": "--prefix-cache",
    "--webui": "--ui",
    "--no-webui": "--no-ui",
}
"""Flag of llama.cpp -> the same option here."""

_MOVED = "a model is not split across devices: choose one with --device, see `g4spec doctor`"
_SAMPLER = "this sampler does not exist here; use --temp, --top-k, --top-p, --min-p or penalties"
_DRAFT = "a draft runs on its target's device; --draft-window limits its context"
_REFUSED = {
    "-ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu -dev "
    "--device-draft -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -fit --fit": _MOVED,
    "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl -devd -cd --ctx-size-draft -td "
    "--threads-draft": _DRAFT,
    "-ctkd --cache-type-k-draft -ctvd --cache-type-v-draft": (
        "a draft's KV cache has the target's type: use --cache-type"
    ),
    "-fa --flash-attn": "not needed: attention is always computed in tiles",
    "-nkvo --no-kv-offload -kvo --kv-offload": (
        "the KV cache is on the model's device; make it smaller with -c or --cache-type"
    ),
    "-kvu --kv-unified -no-kvu --no-kv-unified --swa-full --cache-reuse": (
        "not needed: all texts share the KV cache, and whole blocks of prefixes are reused"
    ),
    "--embedding --embeddings --rerank --reranking --pooling": "only text is generated",
    "--slot-save-path": "slots cannot be saved; --prefix-cache keeps prefixes in memory",
    "--offline": "set the environment variable HF_HUB_OFFLINE=1",
    "--jinja --no-jinja": "chat templates are always Jinja",
    "-cnv --conversation -i --interactive -if --interactive-first -st --single-turn": (
        "use `g4spec chat` for a conversation, or `generate --chat` for one question"
    ),
    "-no-cnv --no-conversation": "`generate` uses no chat template unless --chat is given",
    "--chat-template": "the template of the file is used; `serve` has --chat-template-file",
    "--chat-template-kwargs": "requests have the field chat_template_kwargs",
    "-sysf --system-prompt-file": "give the text with --system",
    "-b --batch-size -ub --ubatch-size": "prefill chunk sizes are chosen for the device",
    "-tb --threads-batch": "use -t; it applies to prefill, too",
    "--mlock --mmap --no-mmap -dio --direct-io --no-host --numa --prio --poll --cpu-mask -C": (
        "not needed: weights are copied to the device once"
    ),
    "-np --parallel": "one text at a time here; `serve`, `bench` and `verify` have --parallel",
    "-cb --cont-batching": "`serve` always uses continuous batching",
    "--warmup --no-warmup": "`bench` and `serve` always warm up",
    "-v --verbose -lv --verbosity --log-verbosity --log-disable --log-file --verbose-prompt "
    "--no-perf --perf": "figures and notices go to stderr; turn them off with -q",
    "--no-display-prompt --display-prompt": "the prompt is never printed",
    "-co --color": "a terminal gets colours unless NO_COLOR is set",
    "-e --escape --no-escape": "-p has no escapes; for line breaks give a file with -f",
    "--samplers --sampling-seq --sampler-seq --mirostat --mirostat-lr --mirostat-ent --typical "
    "--typical-p --xtc-probability --xtc-threshold --dry-multiplier --dry-base "
    "--dry-allowed-length --dry-penalty-last-n --dynatemp-range --dynatemp-exp": _SAMPLER,
    "--repeat-last-n": "penalties apply to the whole text",
    "--grammar --grammar-file -j --json-schema -jf --json-schema-file": (
        "`serve` takes a grammar or schema in the request"
    ),
    "--reasoning-format --reasoning-budget -rea --reasoning": (
        "use --thinking; `g4spec chat` has --think, `g4spec serve` --reasoning, and the field "
        "thinking_budget_tokens of requests"
    ),
    "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
    "--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --override-kv": (
        "the value in the file is used; convert again to change it"
    ),
    "--keep --context-shift --no-context-shift -gan --grp-attn-n": (
        "generation ends when the context is full"
    ),
    "-mm --mmproj --mmproj-auto --no-mmproj --image --audio": "only text input is supported",
    "--lora --lora-scaled --control-vector": "adapters are not supported: merge them first",
    "--draft-min --draft-n-min --spec-draft-n-min": (
        "there is no minimum draft length; --draft-max sets the maximum"
    ),
    "--spec-type": "the file of a draft contains its kind; commands with -md take `-md ngram`",
    "-hff --hf-file": "name the file after the repository: -m org/name:FILE.gguf",
    "-mu --model-url": "download the file, or give its hub id with -m",
    "-hft --hf-token": "set the environment variable HF_TOKEN",
    "--props": "`serve` always has this endpoint; it cannot be changed by POST",
    "-sys --system-prompt": "use --system of `chat` or `generate --chat`",
}
REFUSED = {flag: why for flags, why in _REFUSED.items() for flag in flags.split()}
"""Flag of llama.cpp -> why it does not exist here, or what to use instead."""
IMPLIED = {"chat": ("-cnv", "--conversation", "-i", "--interactive", "--jinja")}
"""Command -> flags of llama.cpp that say what the command does anyway."""
