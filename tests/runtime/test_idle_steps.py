"""What a step costs that has nothing to do, in Python calls: most steps of an engine are such."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from tests.runtime.stored_engine import SOON_S, Engine, all_but_the_last_block, on_disk, prompt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

CALLS_MAX = 12
"""They were 72, in 27 files."""


def calls_of(run: Callable[[], object]) -> list[str]:
    """The Python functions that something calls."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


def idle_calls(cache: penstock.Cache) -> list[str]:
    """Of an idle step; once a second one looks at everything."""
    return min((calls_of(cache.step) for _ in range(8)), key=len)


def test_an_idle_step_with_a_disk_makes_a_handful_of_calls(tmp_path: Path) -> None:
    with Engine(tmp_path / "disk", wait_for_tiers_s=SOON_S) as engine:
        engine.save(prompt(1))
        engine.run_until(lambda: on_disk(engine) == 8)

        calls = idle_calls(engine.cache)

        assert len(calls) <= CALLS_MAX, calls
        # And it finds what happens all the same.
        engine.save(prompt(2))
        assert engine.save(prompt(1)) == all_but_the_last_block(prompt(1))


def opened() -> penstock.Cache:
    config = penstock.parse_config(
        'version = 1\nmodel = { name = "toy", weights_version = "v1" }\n'
        "cache = { block_tokens = 16, blocks = 64 }\n"
        'tiers = [{ name = "host", kind = "memory", blocks = 64 }]\n'
    )
    return penstock.open(config, kv=np.zeros((64, 16, 8), dtype=np.float32))


def test_a_step_after_idle_ones_does_what_was_asked_for_since() -> None:
    with opened() as cache:
        for _ in range(4):
            cache.step()

        with cache.acquire(range(64)) as lease:
            lease.commit(range(64))
        deadline = time.monotonic() + SOON_S
        while cache.busy and time.monotonic() < deadline:
            cache.step()

        assert cache.statistics().tiers[1].ready == 4


def test_blocks_whose_time_has_passed_leave_first_also_in_an_idle_cache() -> None:
    with opened() as cache:
        with cache.acquire(range(64), ttl_s=0.01) as lease:
            lease.commit(range(64))
        while cache.busy:
            cache.step()
        until = time.monotonic() + 0.02

        while time.monotonic() < until:
            cache.wait(until)
            cache.step()
        cache.step()

        assert cache._driver.machine._books.next_expiry() is None


@pytest.mark.parametrize("tenant", ["", "somebody"])
def test_an_acquire_does_not_encode_its_namespace_anew(tenant: str) -> None:
    with opened() as cache:
        cache.acquire(range(320), tenant=tenant).release()

        calls = calls_of(lambda: cache.acquire(range(320), tenant=tenant).release())

        assert not [each for each in calls if "_encode_field" in each or "frame" in each]
