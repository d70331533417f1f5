"""CUDA tests are collected where there is a CUDA device and what drives it."""

from __future__ import annotations

try:
    import cuda.bindings
    import torch
    import triton
except ImportError:
    FOUND = False
else:
    FOUND = bool(cuda.bindings and triton) and torch.cuda.is_available()

collect_ignore_glob = [] if FOUND else ["test_*.py"]
