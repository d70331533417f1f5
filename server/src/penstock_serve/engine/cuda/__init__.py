"""The engine on a GPU: attention kernels, streams, and graphs of decode steps.

Public: nothing. The engine loads it where there is a GPU.
"""
