"""Mixtures of quant types. A file here that defines MIX is one that can be asked for."""
