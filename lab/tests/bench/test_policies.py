"""What eviction policies cost: counted in calls, which do not depend on the machine's load."""

from __future__ import annotations

import pytest

from lab.bench.index import POLICY_METRICS, _count_calls, run_round
from penstock.cache.eviction import POLICIES
from penstock.cache.settings import CacheSettings, TierSettings
from penstock.machine.effects import Granted, answer
from penstock.machine.events import Acquire, Commit, ReleaseLease
from penstock.machine.machine import CacheMachine

BLOCKS = 512


def serve(machine: CacheMachine, name: str) -> None:
    keys = [f"{name}{number:04}".encode() for number in range(BLOCKS)]
    acquire = Acquire(request=name, keys=keys, token_count=BLOCKS)
    granted = answer(machine.handle(acquire, 0.0), Granted)
    new = keys[granted.cached_tokens :]
    machine.handle(Commit(lease=granted.lease, token_count=BLOCKS, keys=new), 0.0)
    machine.handle(ReleaseLease(lease=granted.lease), 0.0)


def calls_to_evict(eviction: str, *, hits: int) -> int:
    """The calls of a miss that evicts a chain as long as its own, which was hit before."""
    device = TierSettings(name="device", slot_count=2 * BLOCKS, eviction=eviction)
    machine = CacheMachine(CacheSettings(device=device, block_tokens=1), incarnation=1)
    for name in ("a", "b"):
        for _ in range(1 + hits):
            serve(machine, name)
    calls = _count_calls(lambda: serve(machine, "c"))
    assert machine.statistics().blocks_evicted >= BLOCKS
    return calls


@pytest.mark.parametrize(
    "hits", [1, *(pytest.param(each, marks=pytest.mark.long) for each in (0, 4))]
)
@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_evicting_a_long_chain_takes_about_as_many_calls_as_with_lru(
    eviction: str, hits: int
) -> None:
    assert calls_to_evict(eviction, hits=hits) < 1.3 * calls_to_evict("lru", hits=hits)


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_a_round_of_the_benchmark_runs_with_every_policy(eviction: str) -> None:
    timings = run_round(tokens=256, block=16, source="buffer", seed=1, eviction=eviction)

    assert all(getattr(timings, metric) > 0 for metric in POLICY_METRICS)
