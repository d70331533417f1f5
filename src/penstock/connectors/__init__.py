"""Connectors for other engines: `base` has what they share, `vllm` is the adapter for vLLM.

Public: `base`, `vllm`.
"""
