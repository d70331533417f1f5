"""A rank that ends tells its owner what became of its copies, before its channel closes."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from lab.fixtures.inproc import channel_pair
from lab.fixtures.rank_channels import CarryingEngine, meet, serve
from penstock.errors import UnavailableError
from penstock.machine import effects as ef
from penstock.runtime.rank import STEP_BUDGET_BYTES
from tests.runtime.conftest import Fleet

if TYPE_CHECKING:
    from collections.abc import Iterator


BLOCK_BYTES = STEP_BUDGET_BYTES // 4
"""Eight of them take more than a step."""


@pytest.fixture
def stopping() -> Iterator[int]:
    """A descriptor that says stop from the beginning."""
    told = os.eventfd(1)
    yield told
    os.close(told)


def outcome_of(owner: penstock.Offload) -> tuple[str, str, bool]:
    (ended,) = (each for each in owner.poll() if isinstance(each, ef.Ended))
    return ended.outcome.value, ended.failure, ended.settled


@pytest.mark.parametrize(
    ("timeout_s", "outcome"), [(60.0, "done"), (0.0, "failed")], ids=["drained", "cut short"]
)
def test_the_last_report_says_how_copies_ended(timeout_s: float, outcome: str) -> None:
    fleet = Fleet(ranks=1)
    (rank,) = fleet.ranks
    fleet.owner.save(fleet.keys(4), [0, 1, 2, 3], cause="last")
    plan = fleet.plan()

    report = rank.finish(timeout_s)
    assert report is not None
    fleet.owner.ranks.receive(report)

    told, failure, settled = outcome_of(fleet.owner)
    assert (told, bool(failure), settled) == (outcome, outcome == "failed", True)
    assert not fleet.owner.busy
    with pytest.raises(UnavailableError, match="rank 0 takes no plan: it comes to its end"):
        rank.take(plan or b"")
    assert rank.close() == penstock.Drained(
        finished=int(outcome == "done"), cancelled=int(outcome != "done"), unsettled=0
    )


def test_a_rank_with_nothing_in_hand_has_nothing_to_say() -> None:
    fleet = Fleet(ranks=1)

    assert fleet.ranks[0].finish(60.0) is None
    assert fleet.ranks[0].close().clean


@pytest.mark.parametrize(
    ("drain_s", "outcome"), [(60.0, "done"), (0.0, "failed")], ids=["drained", "cut short"]
)
def test_a_served_rank_that_is_asked_to_stop_is_heard_before_its_channel_ends(
    stopping: int, drain_s: float, outcome: str
) -> None:
    config = penstock.parse_config(
        'version = 1\nmodel.name = "none"\ncache = { block_tokens = 4 }\n'
        'tiers = [{ name = "host", kind = "memory", blocks = 8 }]\n'
    )
    rank = penstock.open_rank(config, rank=0, kv=np.zeros((8, BLOCK_BYTES), dtype=np.uint8))
    near, far = channel_pair("owner", "rank 0")
    owner = penstock.open_offload(config, ranks=[rank.facts])
    engine = CarryingEngine(owner, [rank.facts], [near])
    owner.save(config.key_chain().extend(range(32)), list(range(8)), cause="last")
    engine.step()

    until = time.monotonic() + 60
    why = serve(far, rank, until=until, descriptors=[stopping], drain_s=drain_s)
    far.close()
    assert meet(near, deadline=until) == rank.facts
    engine.step()

    assert why == "it was asked to stop"
    told, _, settled = outcome_of(owner)
    assert (told, settled) == (outcome, True)
    assert owner.health().reasons == ("rank 0 is lost: it closed its channel",)
