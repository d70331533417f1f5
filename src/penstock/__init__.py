"""Penstock keeps the KV cache of LLM serving."""

__version__ = "0.1.0"
