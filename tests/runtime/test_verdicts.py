"""A step that computes on loads which have not ended: what is held, kept, and rolled back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import penstock
from penstock.cache.states import LeaseState
from penstock.errors import LeaseError
from penstock.runtime.cache import Verdict
from tests.runtime.conftest import make_engine
from tests.runtime.test_engine_steps import PROMPT, swapped_out

if TYPE_CHECKING:
    from tests.runtime.conftest import Engine


@pytest.fixture
def engine() -> Engine:
    return swapped_out()


def test_what_was_computed_is_held_until_its_loads_are_verified(engine: Engine) -> None:
    lease = engine.cache.acquire(PROMPT)
    lease.join()

    held = lease.take_verdict()
    with pytest.raises(LeaseError):
        lease.commit(PROMPT[12:])  # Nothing leaves the step.
    engine.wait(lease)

    assert held is Verdict.HOLD
    assert lease.take_verdict() is Verdict.KEEP
    lease.commit(PROMPT[12:])
    lease.release()


def test_what_was_computed_on_a_corrupt_block_is_rolled_back(engine: Engine) -> None:
    engine.spoil_block(1, PROMPT, 1)
    lease = engine.cache.acquire(PROMPT)
    lease.join()
    promised = lease.cached_tokens

    engine.wait(lease)

    assert lease.take_verdict() is Verdict.ROLL_BACK
    assert (promised, lease.cached_tokens) == (12, 4)
    # It goes on from there, and is asked nothing more.
    assert lease.take_verdict() is Verdict.KEEP
    engine.run(lease, PROMPT)
    lease.release()


def test_a_lease_that_is_lost_rolls_back_everything(engine: Engine) -> None:
    lease = engine.cache.acquire(PROMPT)
    lease.join()

    engine.cache._deliver(engine.driver.lose_rank(0, "it is gone"))

    assert lease.state is LeaseState.LOST
    assert lease.take_verdict() is Verdict.ROLL_BACK


def test_there_is_nothing_to_join_where_nothing_is_loaded(engine: Engine) -> None:
    lease = engine.cache.acquire(PROMPT)
    engine.wait(lease)

    with pytest.raises(LeaseError, match="is READY, must be LOADING and wait for loads alone"):
        lease.join()

    assert lease.take_verdict() is Verdict.KEEP


@pytest.mark.parametrize("wish", ["auto", "off"])
def test_the_wish_for_layers_changes_nothing_on_a_cpu(wish: str) -> None:
    engine = make_engine(blocks=4, settings=f'layer_wise = "{wish}"')
    engine.turn(PROMPT)
    engine.turn([*range(100, 113)])
    lease = engine.cache.acquire(PROMPT)

    assert not engine.cache.steps.joinable(lease.loads, step_s=1e9)
    engine.wait(lease)
    assert lease.cached_tokens == 12


def test_another_wish_is_refused() -> None:
    with pytest.raises(penstock.ConfigError, match=r"cache\.layer_wise: is 'on', must be one of"):
        penstock.parse_config(
            'version = 1\nmodel.name = "m"\ncache = { blocks = 4, layer_wise = "on" }'
        )
