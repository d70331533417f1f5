"""A small inference engine on the managed cache: the example that integrators read.

Public: `llm.LLM`, which `penstock` exports.
"""
