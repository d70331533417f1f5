"""Where the machine meets the world: steps, budgets, deadlines, late results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.cache.explain import MissReason
from penstock.cache.states import LeaseState
from penstock.machine import effects as ef
from penstock.machine.events import Acquire, CopyReport, ReleaseLease, Tick
from penstock.vocabulary.keys import KeyChain, OperationId
from tests.runtime.conftest import make_engine

if TYPE_CHECKING:
    from tests.runtime.conftest import Engine


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_a_step_spends_its_budget_on_loads_before_saves() -> None:
    engine = make_engine(blocks=16)
    prompt = tokens(14)
    engine.turn(prompt)
    engine.forget_device()
    block_bytes = engine.device.layout.block_bytes
    with engine.cache.acquire(tokens(12, 500)) as saving:
        engine.run(saving, tokens(12, 500))
        waiting = engine.cache.acquire(prompt)

        engine.cache.step(budget_bytes=3 * block_bytes)

        # The save was there first, but nobody waits for it; it gets on by a block at least.
        assert waiting.state is LeaseState.READY
        assert engine.cache.busy
        engine.step_a_block()
        assert engine.cache.busy
        engine.step_a_block()
        assert not engine.cache.busy
        engine.check(waiting, prompt)
        waiting.release()
    engine.expect_at_rest()


def test_loads_do_not_hold_up_saves_for_ever() -> None:
    engine = make_engine(blocks=24, tiers={"host": 64})
    engine.turn(tokens(41))
    engine.forget_device()
    with (
        engine.cache.acquire(tokens(8, 500)) as saving,
        engine.cache.acquire(tokens(41)) as loading,
    ):
        engine.run(saving, tokens(8, 500))

        for _ in range(2):
            engine.step_a_block()

        assert loading.state is LeaseState.LOADING
        saved = {key for key, _ in engine.cache.kv_snapshot().blocks["host"]}
        assert len(saved) == 10 + 2
        engine.wait(loading)


@pytest.mark.parametrize("budget_blocks", [0, 1, 2, 5])
def test_a_load_takes_as_many_steps_as_its_budget_says(engine: Engine, budget_blocks: int) -> None:
    prompt = tokens(22)
    engine.turn(prompt)
    engine.forget_device()
    lease = engine.cache.acquire(prompt)
    budget_bytes = budget_blocks * engine.device.layout.block_bytes

    steps = 0
    while lease.state is LeaseState.LOADING:
        engine.cache.step(budget_bytes=budget_bytes)
        steps += 1

    assert steps == -(-5 // max(1, budget_blocks))
    engine.check(lease, prompt)
    lease.release()


def test_a_driver_is_busy_until_the_last_copy_has_ended(engine: Engine) -> None:
    idle = engine.driver.busy
    with engine.cache.acquire(tokens(8)) as lease:
        engine.run(lease, tokens(8))
    saving = engine.driver.busy

    engine.settle()

    assert (idle, saving, engine.driver.busy) == (False, True, False)
    assert engine.cache.statistics().operations_running == 0


def test_the_engine_hears_only_what_is_meant_for_it() -> None:
    engine = make_engine(blocks=8, tiers={"host": 8})
    engine.turn(tokens(12))
    engine.forget_device()
    chain = KeyChain(engine.config.model.namespace(), block_tokens=4)
    chain.extend(tokens(29))

    # A load begins and is abandoned; then the host tier drops blocks to make room for others.
    told = engine.driver.handle(Acquire(request="raw", keys=chain.keys, token_count=29))
    (granted,) = told
    assert isinstance(granted, ef.Granted)
    told += engine.driver.handle(ReleaseLease(lease=granted.lease))
    told += engine.driver.step()
    with engine.cache.acquire(tokens(32, 500)) as lease:
        engine.compute(lease, tokens(32, 500))
        lease.commit(tokens(32, 500))
    told += engine.driver.step()

    assert granted.state is LeaseState.LOADING
    assert {type(each) for each in told} <= {ef.Granted, ef.Ended, ef.Settled, ef.LeaseChanged}
    assert engine.cache.statistics().operations_ended["cancelled"] == 1
    engine.expect_at_rest()


def test_a_load_that_takes_too_long_is_computed_instead() -> None:
    engine = make_engine(settings="operation_timeout_s = 2.0")
    prompt = tokens(14)
    engine.turn(prompt)
    engine.forget_device()
    lease = engine.cache.acquire(prompt)
    engine.step_a_block()

    engine.now = 3.0
    engine.cache.step()

    assert lease.state is LeaseState.READY
    assert lease.cached_tokens == 0
    assert lease.miss.reason is MissReason.FAILED
    engine.run(lease, prompt)
    lease.release()
    assert engine.cache.statistics().operations_ended["expired"] == 1
    engine.expect_at_rest()
    assert engine.turn(prompt).cached_tokens == 12


def test_results_from_before_a_reset_change_nothing_and_give_their_slots_back(
    engine: Engine,
) -> None:
    with engine.cache.acquire(tokens(16)) as lease:
        engine.run(lease, tokens(16))
    engine.step_a_block()

    engine.cache.reset("new weights")
    ending = engine.cache.statistics().operations_ending
    engine.settle()

    assert ending == 1
    assert engine.cache.statistics().blocks_known == 0
    engine.expect_at_rest()
    assert [tier.free for tier in engine.cache.statistics().tiers] == [8, 64]


def test_reports_of_an_earlier_life_are_counted_and_dropped(engine: Engine) -> None:
    engine.turn(tokens(8))
    stranger = OperationId(engine.driver.machine.incarnation ^ 1, 0, 1)

    told = engine.driver.handle(CopyReport(operation=stranger, rank=0))

    assert told == []
    assert engine.cache.statistics().reports_late == 1
    engine.expect_at_rest()


def test_every_start_is_another_incarnation() -> None:
    engines = [make_engine() for _ in range(3)]

    incarnations = {engine.driver.machine.incarnation for engine in engines}

    assert len(incarnations) == 3


def test_a_tick_without_work_asks_for_nothing(engine: Engine) -> None:
    assert engine.driver.handle(Tick()) == []
    assert engine.driver.step() == []
