"""A device that ends none of its copies: waits have a deadline, and the health says so."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from penstock.errors import UnavailableError
from penstock.machine import effects as ef
from penstock.movers.table import mover_between
from penstock.runtime import copy_executor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.machine.effects import Copy
    from penstock.movers.base import Moved, Mover
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.keys import OperationId

CONFIG = penstock.parse_config(
    'version = 1\nmodel.name = "none"\n'
    "cache = { block_tokens = 4, device_wait_s = 0.2, operation_timeout_s = 600.0 }\n"
    'tiers = [{ name = "host", kind = "memory", blocks = 16 }]\n'
)


class Device:
    """Copies blocks by itself, unless it is stuck: a GPU as a mover sees it."""

    stuck = True

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    @property
    def busy(self) -> bool:
        return self._mover.busy

    def submit(self, copy: Copy) -> None:
        self._mover.submit(copy)

    def abandon(self, operation: OperationId) -> None:
        if not Device.stuck:
            self._mover.abandon(operation)

    def poll(self, *, budget_bytes: int) -> tuple[list[Moved], int]:
        return ([], 0) if Device.stuck else self._mover.poll(budget_bytes=budget_bytes)

    def wait(self, timeout_s: float = 30.0) -> None:
        if Device.stuck and self._mover.busy:
            give_up_at = time.monotonic() + timeout_s
            while time.monotonic() < give_up_at:
                pass
            raise UnavailableError("1 batch has not ended")

    wait_for_room = wait


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def between(read: SlotStore, write: SlotStore, algorithm: Algorithm) -> Device:
        return Device(mover_between(read, write, algorithm))

    monkeypatch.setattr(copy_executor, "mover_between", between)
    Device.stuck = True
    yield
    Device.stuck = False


def busy_offload() -> penstock.Offload:
    offload = penstock.open_offload(CONFIG, kv=np.zeros((8, 4, 16)))
    offload.save(CONFIG.key_chain().extend(range(8)), [0, 1], cause="save")
    return offload


def test_a_wait_ends_with_an_error_and_the_health_says_why() -> None:
    offload = busy_offload()
    offload.step()
    began = time.monotonic()

    with pytest.raises(UnavailableError, match=r"the device has ended none of 1 copy for 0\.2 s"):
        offload.wait(time.monotonic() + 1200)

    assert time.monotonic() - began < 600
    (reason,) = offload.health().reasons
    assert reason.startswith("the device is stuck: the device has ended none of 1 copy")


def test_short_waits_add_up() -> None:
    offload = busy_offload()
    began = time.monotonic()
    waited_well = []

    def wait_a_little() -> None:
        for _ in range(10_000):
            busy = offload.wait(time.monotonic() + 0.002)
            # There is something under way, and for a while nothing to complain of.
            waited_well.append(busy and offload.health().ok)

    with pytest.raises(UnavailableError, match="the device has ended none"):
        wait_a_little()

    # No single wait was long enough; how many it took is a matter of how busy the machine is.
    assert time.monotonic() - began >= 0.2
    assert all(waited_well)


def test_a_device_that_goes_on_is_in_good_health_again() -> None:
    offload = busy_offload()
    with pytest.raises(UnavailableError):
        offload.wait(time.monotonic() + 1200)

    Device.stuck = False
    while offload.busy:
        offload.step()

    assert offload.health().ok
    (ended,) = offload.poll()
    assert isinstance(ended, ef.Ended)
    assert ended.outcome.value == "done"


def test_a_close_gives_nothing_back_that_the_device_may_still_touch() -> None:
    offload = busy_offload()
    began = time.monotonic()

    drained = offload.close(timeout_s=0.1)

    assert time.monotonic() - began < 600
    assert (drained.cancelled, drained.unsettled) == (1, 1)
    assert not drained.clean
    assert not offload.health().ok
    local = offload._driver.links
    assert local.executor.stores != ()  # type: ignore[attr-defined]


def test_a_rank_whose_device_is_stuck_ends_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    rank = penstock.open_rank(CONFIG, rank=0, kv=np.zeros((8, 4, 16)))
    owner = penstock.open_offload(CONFIG, ranks=[rank.facts])
    owner.save(CONFIG.key_chain().extend(range(8)), [0, 1], cause="save")
    plan = owner.ranks.take_plan()
    assert plan is not None
    rank.take(plan)

    with pytest.raises(UnavailableError, match="the device has ended none of 1 copy"):
        rank.wait(time.monotonic() + 60)
    drained = rank.close(timeout_s=0.1)

    assert drained.unsettled == 1
    assert "rank not released: rank=0 cause=the device has ended none" in caplog.text
