#!/usr/bin/env bash
# Install a wheel or sdist into a clean environment and use it: check_install.sh PYTHON FILE [EXTRA]
# Without EXTRA, what does without torch; with `serve`, the whole demo. Run from the repository.
set -euo pipefail
python=$1 file=$(realpath "$2") extra=${3:-} family=$(realpath examples/tiny)
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
cd "$place"
"$python" -m venv venv
venv/bin/pip install -q --disable-pip-version-check "$file${extra:+[$extra]}"
g4spec=venv/bin/g4spec
"$g4spec" --version
if [ -n "$extra" ]; then
    OMP_NUM_THREADS=1 "$g4spec" demo --family "$family"
    exit
fi
"$g4spec" convert "$family/target" -o target.gguf --quiet
"$g4spec" convert "$family/dflash" --target target.gguf -o draft.gguf --quiet
"$g4spec" convert "$family/dflash" --target target.gguf -o wide.gguf --type bf16 --quiet
"$g4spec" quantize wide.gguf small.gguf --type q4_0 --quiet
"$g4spec" validate draft.gguf --target target.gguf --against "$family/dflash"
"$g4spec" inspect small.gguf
"$g4spec" doctor --assume "RTX 3090" -m 31b -md zlab-dflash
# What needs torch says how to get it, and ends with "environment".
if "$g4spec" generate -m target.gguf -p hi 2> error; then echo 'ran without torch?'; exit 1; fi
grep "pip install 'g4spec\[run\]'" error
