"""When copies began and ended, as the cache's driver saw it."""

from __future__ import annotations

import time

import numpy as np

import penstock
from penstock.cache.operations import Purpose
from penstock.machine.effects import Copy
from penstock.runtime.status import COPIES_KEPT, CopyLog
from penstock.vocabulary.keys import Key, OperationId

BLOCK = 4


def open_cache(blocks: int = 4) -> penstock.Cache:
    config = penstock.parse_config(
        f"""
        version = 1
        model.name = "toy"
        cache = {{ block_tokens = {BLOCK}, blocks = {blocks}, load_gate = "off" }}
        tiers = [{{ name = "host", kind = "memory", blocks = 64 }}]
        """
    )
    return penstock.open(config, kv=np.zeros((blocks, BLOCK, 8), dtype=np.float32))


def use(cache: penstock.Cache, tokens: list[int], name: str) -> int:
    with cache.acquire(tokens, request=name) as lease:
        while lease.state is penstock.LeaseState.LOADING:
            cache.step()
        cached = lease.cached_tokens
        lease.commit(tokens[lease.token_count :])
    while cache.busy:
        cache.step()
    cache.step()
    return cached


def test_every_copy_is_told_with_its_times_and_its_cause() -> None:
    cache = open_cache()
    began = time.monotonic()
    prompts = [list(range(first, first + 3 * BLOCK)) for first in (0, 100)]

    for number in (0, 1, 0):
        use(cache, prompts[number], f"request {number}")

    copies = cache.copies()
    assert {(each.purpose, each.source, each.target) for each in copies} >= {
        ("load", "host", "device")
    }
    assert all(began <= each.began <= each.ended <= time.monotonic() for each in copies)
    [load] = [each for each in copies if each.purpose == "load"]
    assert (load.blocks >= 1, load.cause) == (True, "request 0")
    assert sum(each.blocks for each in copies if each.target == "host") >= 6


def test_only_the_last_ones_are_kept() -> None:
    log = CopyLog(("device", "host"))

    for number in range(COPIES_KEPT + 5):
        log.begin(a_copy(number), now=float(number))
        log.end_all_but((), now=number + 0.5)

    kept = log.ended()
    assert len(kept) == COPIES_KEPT
    assert (kept[0].began, kept[-1].ended) == (5.0, COPIES_KEPT + 4.5)
    assert not log.has_running


def a_copy(number: int) -> Copy:
    slots = np.zeros(1, dtype=np.int32)
    return Copy(
        operation=OperationId(1, 0, number),
        purpose=Purpose.SAVE,
        source=0,
        target=1,
        keys=[Key(b"key")],
        source_slots=slots,
        target_slots=slots,
        deadline=1.0,
        cause="somebody",
    )
