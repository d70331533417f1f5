"""A rank whose owner is lost in the middle of a turn says so, whatever it was about to send."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

import penstock
from lab.fixtures.inproc import channel_pair
from lab.fixtures.rank_channels import serve

if TYPE_CHECKING:
    import pytest


def test_an_owner_that_is_lost_before_a_report_was_sent_ends_the_service_with_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = penstock.parse_config("""
        version = 1
        model.name = "none"
        cache = { block_tokens = 4, blocks = 8 }
        tiers = [{ name = "host", kind = "memory", blocks = 16 }]
    """)
    rank = penstock.open_rank(config, rank=0, kv=np.zeros((8, 4, 16), dtype=np.float32))
    near, far = channel_pair()

    def lose_the_owner() -> bytes:
        near.fail("its process ended")
        return b"a report"

    monkeypatch.setattr(rank, "step", lose_the_owner)

    ended = serve(far, rank, until=math.inf)

    assert ended == "the owner is lost: its process ended"
