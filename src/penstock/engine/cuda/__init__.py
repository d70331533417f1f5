"""The engine on a GPU: attention kernels, streams, and graphs of decode steps."""
