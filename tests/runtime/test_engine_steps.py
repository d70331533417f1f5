"""What an engine says around its steps: on the CPU every call is there, and none is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import penstock
from penstock.cache.states import LeaseState
from tests.runtime.conftest import make_engine

if TYPE_CHECKING:
    from tests.runtime.conftest import Engine

PROMPT = list(range(13))


def swapped_out() -> Engine:
    """An engine that has the prompt below its device alone."""
    engine = make_engine(blocks=4)
    engine.turn(PROMPT)
    engine.turn([*range(100, 113)])
    return engine


def test_a_lease_tells_the_loads_it_waits_for() -> None:
    engine = swapped_out()

    lease = engine.cache.acquire(PROMPT)
    waiting, loads = lease.state, lease.loads
    engine.wait(lease)

    assert waiting is LeaseState.LOADING
    assert len(loads) == 1
    assert lease.loads == ()
    lease.release()
    assert lease.loads == ()


def test_a_load_by_the_cpu_is_never_joined() -> None:
    engine = swapped_out()
    lease = engine.cache.acquire(PROMPT)

    joinable = engine.cache.steps.joinable(lease.loads, step_s=1e9)
    engine.cache.steps.join(lease.loads)
    for layer in range(2):
        engine.cache.steps.wait_layer(layer, 0)
    engine.wait(lease)

    assert not joinable
    engine.run(lease, PROMPT)


def test_blocks_may_be_written_again_once_no_copy_is_under_way() -> None:
    engine = swapped_out()
    steps = engine.cache.steps
    lease = engine.cache.acquire(PROMPT)

    before = steps.guard(0, lease.block_table)
    steps.submitted(0, lease.block_table)
    engine.wait(lease)
    engine.settle()

    assert not before
    assert steps.guard(0, lease.block_table)


def test_an_owner_without_a_rank_here_has_no_steps() -> None:
    config = penstock.parse_config(
        'version = 1\nmodel.name = "none"\ncache = { block_tokens = 4, blocks = 8 }\n'
    )
    rank = penstock.open_rank(config, rank=0, kv=np.zeros((8, 16), dtype=np.uint8))
    owner = penstock.open(config, ranks=[rank.facts])

    assert owner.steps is None
    rank.steps.submitted(0)
