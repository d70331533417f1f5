"""The physical orders in which vLLM keeps the KV of a group; content is always innermost.

vLLM's names: layer, block, head, token (n), content. `tests/vllm/test_translation.py` compares them
with vLLM's own list.
"""

from __future__ import annotations

ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
LOGICAL = "LBHNC"
"""The order of the axes of every view that vLLM gives to connectors."""
