"""Mixes of quant types. Each file defines one as MIX; `--type` offers it."""
