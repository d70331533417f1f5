"""What the tests here say to engines, and how they compare what engines say."""

from __future__ import annotations

from typing import Any

import pytest

PENSTOCK = ["PenstockConnector", "penstock.connectors.vllm"]
TAMPERED = ["TamperedConnector", "tampered_connector"]
BLOCK = 32
LENGTHS = [9 * BLOCK + 5, 6 * BLOCK + 17, 4 * BLOCK + 2]
HITS = [9 * BLOCK, 6 * BLOCK, 4 * BLOCK]
"""What of each prompt can be reused; prompts of whole blocks are those of `WHOLE`."""
WHOLE = [4 * BLOCK]
DETECTED = ["flip", "exchange", "older", "layers", "tail", "sums"]
"""What `tampered_connector` does to blocks in host memory, and must be found."""


def generate(**how: Any) -> dict[str, Any]:
    return {"act": "generate", "lengths": LENGTHS, **how}


def cached(act: dict[str, Any]) -> list[int]:
    return [row["cached"] for row in act["rows"]]


def counted(act: dict[str, Any], name: str) -> float:
    found: float = act["metrics"][f"vllm:penstock_{name}"]
    return found


def agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether tokens are the same, and log-probabilities to four digits."""
    return all(
        a["tokens"] == b["tokens"] and a["logprobs"] == pytest.approx(b["logprobs"], abs=5e-5)
        for a, b in zip(one["rows"], other["rows"], strict=True)
    )


def announced(act: dict[str, Any], medium: str = "CPU") -> dict[str, Any]:
    """What events say of blocks below the device: all of it is what vLLM says of its own."""
    stored, on_device = (act["events"][f"BlockStored {each}"] for each in (medium, "GPU"))
    assert stored == {name: on_device[name] for name in stored}
    return dict(stored)
