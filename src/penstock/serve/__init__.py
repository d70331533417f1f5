"""The OpenAI-compatible server and router in front of the engine.

Public: nothing. `penstock serve` is the interface.
"""
