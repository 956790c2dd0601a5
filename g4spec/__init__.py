"""g4spec: convert, validate, verify and run speculative-decoding drafts for Gemma 4."""

__version__ = "0.1.0"
