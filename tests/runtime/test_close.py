"""Drain, fence, release: how a cache ends, by itself or by a signal."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from penstock.cache.operations import Outcome
from penstock.cache.states import LeaseState
from penstock.errors import UnavailableError
from penstock.machine import effects as ef
from penstock.testing.writer_process import PATIENCE_S, peer_process
from tests.runtime.conftest import Fleet, make_engine
from tests.transport.test_signals import another_thread, send_soon

if TYPE_CHECKING:
    from tests.runtime.conftest import Engine

MODEL = 'version = 1\nmodel.name = "none"\n'
HOST = 'tiers = [{ name = "host", kind = "host", blocks = 16 }]\n'


def open_offload(kind: str = HOST) -> tuple[penstock.Offload, list[bytes]]:
    config = penstock.parse_config(f"{MODEL}cache = {{ block_tokens = 4 }}\n{kind}")
    kv = np.random.default_rng(1).random((8, 4, 3))
    return penstock.open_offload(config, kv=kv), config.key_chain().extend(range(16))


def test_saves_may_end_until_the_deadline() -> None:
    engine: Engine = make_engine(blocks=16)
    with engine.cache.acquire(range(32)) as lease:
        engine.run(lease, list(range(32)))

    drained = engine.cache.close(timeout_s=60)

    assert drained == penstock.Drained(finished=1, cancelled=0, unsettled=0)
    assert drained.clean


def test_saves_without_time_are_cut_short_and_counted() -> None:
    offload, keys = open_offload()
    offload.save(keys, [0, 1, 2, 3], cause="save")

    drained = offload.close()

    assert drained == penstock.Drained(finished=0, cancelled=1, unsettled=0)
    assert not drained.clean


def test_loads_are_cancelled_at_once_for_nobody_will_use_them() -> None:
    engine: Engine = make_engine()
    engine.turn(list(range(14)))
    engine.forget_device()
    lease = engine.cache.acquire(list(range(14)))
    assert lease.state is LeaseState.LOADING

    engine.cache.drain()

    assert lease.state is not LeaseState.LOADING
    assert engine.cache.statistics().operations_running == 0
    lease.release()
    assert engine.cache.close(timeout_s=60).clean


def test_closing_does_not_wait_for_loads() -> None:
    offload, keys = open_offload()
    offload.save(keys, [0, 1, 2, 3], cause="save")
    while offload.busy:
        offload.step()
    offload.poll()
    offload.load(keys, [4, 5, 6, 7], cause="load")

    began = time.monotonic()

    drained = offload.close(timeout_s=3600)

    assert time.monotonic() - began < 1800
    assert drained == penstock.Drained(finished=0, cancelled=0, unsettled=0)


def test_closing_twice_changes_nothing() -> None:
    offload, keys = open_offload()
    offload.save(keys, [0, 1, 2, 3], cause="save")

    first = offload.close(timeout_s=60)

    assert offload.close() is first


def test_a_closed_cache_is_told_from_one_that_has_nothing() -> None:
    offload, keys = open_offload()

    with offload:
        offload.step()

    for call in (offload.step, lambda: offload.lookup(keys), lambda: offload.reset("x")):
        with pytest.raises(UnavailableError, match="the cache is closed"):
            call()
    assert not offload.busy


def test_the_memory_of_the_tiers_is_given_back() -> None:
    def arenas() -> list[str]:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return [line for line in maps if "memfd:penstock-given-back" in line]

    offload, _ = open_offload(HOST.replace('"host"', '"given-back"', 1))
    during = arenas()

    offload.close()

    assert len(during) == 1
    assert arenas() == []


def test_an_engine_that_carries_the_plans_drains_by_stepping_on() -> None:
    fleet = Fleet(ranks=2)
    keys = fleet.keys(2)
    fleet.owner.save(keys, [0, 1], cause="save")
    fleet.settle()
    fleet.owner.save(fleet.keys(2, first=100), [2, 3], cause="save")
    fleet.owner.load(keys, [5, 6], cause="load")

    fleet.owner.drain()
    ended = fleet.settle()
    drained = fleet.owner.close()

    outcomes = {each.purpose.value: each.outcome for each in ended if isinstance(each, ef.Ended)}
    assert outcomes == {"save": Outcome.DONE, "load": Outcome.CANCELLED}
    assert drained == penstock.Drained(finished=0, cancelled=0, unsettled=0)


def test_closing_with_plans_still_to_be_carried_says_what_is_open() -> None:
    fleet = Fleet(ranks=2)
    fleet.owner.save(fleet.keys(2), [0, 1], cause="save")

    drained = fleet.owner.close(timeout_s=60)

    assert drained == penstock.Drained(finished=0, cancelled=1, unsettled=1)


# ---------------------------------------------------------------- waiting


def test_copies_of_the_cpu_are_something_to_do() -> None:
    offload, keys = open_offload()
    offload.save(keys, [0, 1, 2, 3], cause="save")

    assert offload.wait(time.monotonic() + PATIENCE_S)


def test_nothing_to_do_lasts_until_the_deadline_and_costs_nothing() -> None:
    offload, _ = open_offload()
    started, used = time.monotonic(), time.process_time()

    woken = offload.wait(started + 1.0)

    assert not woken
    assert time.monotonic() - started >= 1.0
    # Whoever asks over and over uses all of it; the garbage collector may have its turn.
    assert time.process_time() - used < 0.5


def test_a_descriptor_of_the_engine_ends_a_wait() -> None:
    offload, _ = open_offload()
    readable = os.eventfd(1)

    woken = offload.wait(time.monotonic() + PATIENCE_S, descriptors=[readable])

    os.close(readable)
    assert woken


def test_a_plan_that_nobody_took_is_something_to_do() -> None:
    fleet = Fleet()
    fleet.owner.save(fleet.keys(2), [0, 1], cause="save")

    waiting = fleet.owner.wait(time.monotonic() + PATIENCE_S)
    fleet.owner.ranks.take_plan()

    assert waiting
    assert not fleet.owner.wait(time.monotonic() + 0.01)


def test_an_operation_whose_time_is_over_is_something_to_do() -> None:
    fleet = Fleet(settings="operation_timeout_s = 0.05")
    fleet.owner.save(fleet.keys(2), [0, 1], cause="save")
    fleet.owner.ranks.take_plan()

    woken = fleet.owner.wait(time.monotonic() + PATIENCE_S)
    fleet.owner.step()

    assert woken
    (ended,) = fleet.owner.poll()
    assert isinstance(ended, ef.Ended)
    assert ended.outcome is Outcome.EXPIRED


# ---------------------------------------------------------------- signals

# It is in the middle of a save of three steps, and of a long computation, when the signal comes.
ENGINE = """
import select, sys
import numpy as np, penstock

config = penstock.parse_config(
    'version = 1\\nmodel.name = "none"\\ncache = { block_tokens = 4 }\\n'
    'tiers = [{ name = "host", kind = "memory", blocks = 160 }]\\n'
)
kv = np.ones((160, 1 << 20), dtype=np.uint8)
offload = penstock.open_offload(config, kv=kv)
keys = config.key_chain().extend(range(640))
with penstock.StopSignal() as stop:
    offload.save(keys, range(160), cause="save")
    offload.step()
    print("saving", offload.busy, flush=True)
    select.select([stop.descriptor], [], [], 60)
    assert stop.stopping
drained = offload.close(timeout_s=float(sys.argv[1]))
print(drained.finished, drained.cancelled, drained.unsettled, flush=True)
sys.exit(0 if drained.clean else 1)
"""


@pytest.mark.parametrize(
    ("timeout_s", "told", "status"),
    [("60", "1 0 0", 0), ("0.000001", "0 1 0", 1)],
    ids=["in time", "too late"],
)
def test_a_terminated_engine_drains_and_says_whether_it_could(
    timeout_s: str, told: str, status: int
) -> None:
    with peer_process(ENGINE, timeout_s) as engine:
        saving = engine.hear()

        os.kill(engine.pid, signal.SIGTERM)

        assert saving == "saving True"
        assert engine.hear() == told
        assert engine.wait() == status


def test_a_stop_signal_that_another_thread_gets_ends_a_wait() -> None:
    with another_thread() as other, penstock.StopSignal([signal.SIGUSR1]) as stop:
        offload, _ = open_offload()
        sending = send_soon(other, signal.SIGUSR1)

        woken = offload.wait(time.monotonic() + PATIENCE_S, descriptors=[stop.descriptor])

        sending.join()
        assert (stop.stopping, stop.times, woken) == (True, 1, True)


@pytest.mark.parametrize("wrong", [signal.SIGKILL, 0, 65, True, "x", 2.0, None])
def test_what_is_no_signal_is_refused_before_any_is_taken(wrong: Any) -> None:
    before = signal.getsignal(signal.SIGUSR1)

    with pytest.raises(ValueError, match=r"signals\[1\] is .*, must be"):
        penstock.StopSignal([signal.SIGUSR1, wrong])

    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_stop_signal_is_heard_by_a_wait_and_undone_at_the_end() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with penstock.StopSignal([signal.SIGUSR1]) as stop:
        quiet = stop.stopping
        offload, _ = open_offload()
        os.kill(os.getpid(), signal.SIGUSR1)

        woken = offload.wait(time.monotonic() + PATIENCE_S, descriptors=[stop.descriptor])

        assert (quiet, stop.stopping, woken) == (False, True, True)
    assert signal.getsignal(signal.SIGUSR1) is before
    with pytest.raises(ValueError, match="inside its `with` block alone"):
        _ = stop.descriptor
