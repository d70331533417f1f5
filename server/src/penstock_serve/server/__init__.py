"""The OpenAI-compatible server and router in front of the engine, and a router for vLLM servers.

Public: nothing. `penstock serve` and `penstock router` are the interfaces.
"""
