"""Blocks between the memory of a GPU and pinned host memory, driven by the engine's own thread.

Public: nothing. `penstock.movers.table` loads it where there is a GPU.
"""
