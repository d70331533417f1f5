"""Who may call a cache, and when: one thread of one process, until it is closed or broken off."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from lab.fixtures.frozen import freeze
from penstock.errors import AccessError, UnavailableError
from penstock.testing.writer_process import peer_process
from tests.runtime.conftest import Engine, Fleet, configure

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


OPEN = """
import numpy as np, os, penstock
config = penstock.parse_config(
    'version = 1\\nmodel.name = "none"\\ncache = { block_tokens = 4, blocks = 8 }\\n'
    'tiers = [{ name = "host", kind = "host", blocks = 16 }]\\n'
)
cache = penstock.open(config, kv=np.ones((8, 4, 3)))
"""


def open_cache() -> penstock.Cache:
    config = penstock.parse_config(
        'version = 1\nmodel.name = "none"\ncache = { block_tokens = 4, blocks = 8 }\n'
        'tiers = [{ name = "host", kind = "memory", blocks = 16 }]\n'
    )
    return penstock.open(config, kv=np.zeros((8, 4, 3)))


def open_offload() -> penstock.Offload:
    config = penstock.parse_config(
        'version = 1\nmodel.name = "none"\ncache = { block_tokens = 4 }\n'
        'tiers = [{ name = "host", kind = "memory", blocks = 16 }]\n'
    )
    return penstock.open_offload(config, kv=np.zeros((8, 4, 3)))


def in_thread(call: Callable[[], object]) -> BaseException | None:
    """What a call raises in another thread."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it is handed on
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0]


def calls_of(cache: penstock.Cache, lease: penstock.Lease) -> dict[str, Callable[[], object]]:
    return {
        "acquire": lambda: cache.acquire([1]),
        "pin": lambda: cache.pin([1]),
        "reset": lambda: cache.reset("x"),
        "change_weights": lambda: cache.change_weights("x"),
        "steps": lambda: cache.steps,
        "statistics": cache.statistics,
        "story": lambda: cache.story("x"),
        "copies": cache.copies,
        "take_kv_events": cache.take_kv_events,
        "kv_snapshot": cache.kv_snapshot,
        "audit": cache.audit,
        "step": cache.step,
        "computed": lambda: cache.computed(1, 1.0),
        "wait": lambda: cache.wait(0.0),
        "take_plan": cache.ranks.take_plan,
        "hear": lambda: cache.ranks.receive(b""),
        "drain": cache.drain,
        "grow": lambda: lease.grow(5),
        "commit": lambda: lease.commit([1]),
        "commit_prompt": lambda: lease.commit_prompt(1),
        "fork": lambda: lease.fork("x"),
        "join": lease.join,
        "loads": lambda: lease.loads,
        "take_verdict": lease.take_verdict,
        "preempt": lease.preempt,
        "release": lease.release,
    }


# ---------------------------------------------------------------- threads and processes


def test_a_call_from_another_thread_is_refused_and_changes_nothing() -> None:
    cache = open_cache()
    lease = cache.acquire([1, 2, 3])
    before = (freeze(cache._driver.machine), cache.statistics())

    for call in (*calls_of(cache, lease).values(), cache.health, cache.close):
        error = in_thread(call)
        assert isinstance(error, AccessError)
        assert f"is used by thread {threading.get_ident()}, and was called by" in str(error)
        assert "adopt_thread()" in str(error)

    assert (freeze(cache._driver.machine), cache.statistics()) == before
    lease.release()
    cache.close()


def test_a_thread_that_adopts_a_cache_makes_the_calls_from_then_on() -> None:
    cache = open_cache()
    lease = cache.acquire([1, 2, 3])

    def go_on() -> None:
        cache.adopt_thread()
        lease.grow(9)
        lease.release()
        cache.step()

    assert in_thread(go_on) is None
    with pytest.raises(AccessError, match="was called by thread"):
        cache.step()
    cache.adopt_thread()
    cache.close()


def test_a_rank_is_used_by_one_thread_too() -> None:
    fleet = Fleet()
    rank = fleet.ranks[0]

    assert isinstance(in_thread(rank.step), AccessError)
    assert in_thread(lambda: (rank.adopt_thread(), rank.step())) is None
    with pytest.raises(AccessError, match="rank 0 is used by thread"):
        rank.step()


FORKED = """
lease = cache.acquire([1, 2, 3], request="parent's")
inwards, outwards = os.pipe()
with cache:
    child = os.fork()
    if child == 0:
        said = []
        for call in (lambda: cache.acquire([1]), cache.step, lease.release, cache.adopt_thread,
                     cache.close, cache.statistics):
            try:
                call()
                said.append("accepted")
            except penstock.AccessError as error:
                said.append(str(error))
        with lease:
            pass
        os.write(outwards, "\\n".join(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(inwards, 1 << 16).decode().split("\\n")
    print(len(said), all(f"process {child} was forked" in each for each in said), flush=True)
    lease.release()
    cache.audit()
print(cache, flush=True)
"""


def test_a_forked_child_is_refused_and_its_parent_goes_on() -> None:
    with peer_process(OPEN + FORKED) as process:
        assert process.hear() == "6 True"
        assert process.hear().endswith("closed>")
        assert process.wait() == 0


LEAVES_BY_EXIT = """
with cache:
    if os.fork() == 0:
        raise SystemExit(7)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    cache.acquire([1]).release()
"""


def test_a_forked_child_leaves_a_with_block_without_closing_what_is_its_parents() -> None:
    with peer_process(OPEN + LEAVES_BY_EXIT) as process:
        assert process.hear() == "7"
        assert process.wait() == 0


# ---------------------------------------------------------------- the end


def test_after_close_every_call_says_so() -> None:
    cache = open_cache()
    lease, pin = cache.acquire([1, 2, 3]), cache.pin([1])
    with pytest.warns(ResourceWarning, match="closed with open leases: 'request-1'"):
        drained = cache.close()

    for call in (*calls_of(cache, lease).values(), pin.unpin):
        with pytest.raises(UnavailableError, match="the cache is closed"):
            call()
    assert cache.close() is drained
    assert not cache.busy
    assert cache.health() == penstock.Health(ok=False, reasons=("the cache is closed",))
    with lease, pin:
        pass  # Nothing is left to release.


def test_after_close_every_call_of_an_offload_says_so() -> None:
    offload = open_offload()
    keys = [bytes(16)]
    offload.close()

    calls: list[Callable[[], object]] = [
        lambda: offload.lookup(keys),
        lambda: offload.load(keys, [0], cause="x"),
        lambda: offload.save(keys, [0], cause="x"),
        lambda: offload.prefetch(keys, cause="x"),
        lambda: offload.reset("x"),
        offload.poll,
        offload.step,
    ]
    for call in calls:
        with pytest.raises(UnavailableError, match="the cache is closed"):
            call()
    assert not offload.health().ok


def test_a_lease_that_is_dropped_is_named_in_a_warning() -> None:
    cache = open_cache()

    with pytest.warns(ResourceWarning, match="of request 'forgotten' was dropped without release"):
        cache.acquire([1, 2, 3], request="forgotten")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cache.acquire([1, 2, 3]):
            pass
    with pytest.warns(ResourceWarning, match="closed with open leases: 'forgotten'"):
        cache.close()


def test_many_open_leases_are_counted_and_some_of_them_named() -> None:
    engine = Engine(configure(blocks=32))
    leases = [engine.cache.acquire([n], request=f"r{n}") for n in range(10)]

    with pytest.warns(ResourceWarning, match="'r0', 'r1', .*'r7' and 2 more"):
        engine.cache.close()

    assert len(leases) == 10


def test_everything_says_what_it_is() -> None:
    cache = open_cache()
    lease, pin = cache.acquire([1, 2, 3, 4, 5], request="ann"), cache.pin([1, 2, 3, 4])

    assert (
        repr(cache)
        == "<penstock.Cache of 'none': 1 leases, 1 pins, blocks: device 8, host 16; open>"
    )
    assert repr(lease) == (
        "<penstock.Lease 1 of 'ann': READY, 0 tokens computed, 0 of them cached, 2 blocks>"
    )
    assert repr(pin) == "<penstock.Pin 1: 1 block, pinned>"
    lease.release()
    pin.unpin()
    cache.close()
    assert "RELEASED" in repr(lease)
    assert "unpinned" in repr(pin)
    assert repr(cache).endswith("; closed>")
    assert repr(open_offload()) == "<penstock.Offload: 0 copies under way, blocks: host 16; open>"
    assert repr(Fleet().ranks[1]) == "<penstock.Rank 1: blocks: device 8, host 16; open>"


# ---------------------------------------------------------------- what is handed out


def test_a_block_table_can_be_read_and_not_written() -> None:
    engine = Engine(configure())
    lease = engine.cache.acquire(range(10))
    table = lease.block_table

    with pytest.raises(ValueError, match="read-only"):
        table *= 4
    with pytest.raises(ValueError, match="read-only"):
        lease.block_table[0] = 7

    engine.run(lease, list(range(10)))
    lease.release()
    engine.expect_at_rest()


def test_what_is_done_to_a_block_table_by_force_does_not_reach_the_cache() -> None:
    engine = Engine(configure())
    first, second = engine.cache.acquire(range(8)), engine.cache.acquire(range(100, 108))
    lent = first.block_table.copy()

    first.block_table.flags.writeable = True
    first.block_table[:] = second.block_table
    first.commit(range(8))

    published = engine.driver.machine._books.leases[first.id].table
    assert published.tolist() == lent.tolist()
    engine.cache.audit()
    first.release()
    second.release()
    engine.expect_at_rest()


# ---------------------------------------------------------------- interrupts


class Interrupt:
    """Raises `KeyboardInterrupt` at the n-th line that the package runs; as Ctrl-C might."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.fired = False

    def __enter__(self) -> None:
        sys.settrace(self.trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        # What is raised in `__del__` reaches nobody: Python prints it and goes on.
        if "/penstock/" not in frame.f_code.co_filename or frame.f_code.co_name == "__del__":
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.fired = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


def acquire(engine: Engine, _: penstock.Lease) -> None:
    engine.cache.acquire([*range(12), 77, 78], request="late").release()


def commit(_: Engine, lease: penstock.Lease) -> None:
    lease.commit(list(range(lease.token_count, 14)))


def grow(_: Engine, lease: penstock.Lease) -> None:
    lease.grow(24)


def release(_: Engine, lease: penstock.Lease) -> None:
    lease.release()


def preempt(_: Engine, lease: penstock.Lease) -> None:
    lease.preempt()


def step(engine: Engine, _: penstock.Lease) -> None:
    engine.cache.step()


def fork(_: Engine, lease: penstock.Lease) -> None:
    lease.fork("second").release()


def close(engine: Engine, _: penstock.Lease) -> None:
    engine.cache.close()


WORK = [acquire, commit, grow, release, preempt, step, fork, close]


def expect_whole_or_refused(engine: Engine, lease: penstock.Lease) -> bool:
    """Whether the cache goes on; if it does not, every call says why."""
    try:
        engine.cache.step()
    except UnavailableError:
        for call in calls_of(engine.cache, lease).values():
            with pytest.raises(UnavailableError, match=r"interrupted|KeyboardInterrupt|closed"):
                call()
        assert not engine.cache.health().ok
        return False
    engine.cache.audit()
    if lease.state is not penstock.LeaseState.RELEASED:
        lease.release()
    engine.turn([*range(10), 55, 56])
    return True


@pytest.mark.filterwarnings("ignore:the cache was closed with open leases:ResourceWarning")
@pytest.mark.parametrize(
    ("each_of", "stride"), [(16, 13), pytest.param(40, 7, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("work", WORK)
def test_an_interrupt_leaves_the_books_right_or_every_later_call_says_why(
    work: Callable[[Engine, penstock.Lease], None], each_of: int, stride: int
) -> None:
    """In each of the first lines, and in some of those after them."""
    outcomes: list[bool] = []
    line = 1
    while True:
        engine = Engine(configure())
        engine.turn(list(range(9)))
        engine.forget_device()
        lease = engine.cache.acquire(list(range(14)), request="running")
        engine.wait(lease)
        engine.compute(lease, list(range(14)))
        if work is step:
            lease.commit(list(range(lease.token_count, 14)))
        interrupt = Interrupt(line)
        try:
            with interrupt:
                work(engine, lease)
        except KeyboardInterrupt:
            pass
        if not interrupt.fired:
            break
        outcomes.append(expect_whole_or_refused(engine, lease))
        engine.cache.close()
        # Memory is given back whatever happened, and nothing is left to copy.
        assert not engine.driver.links.executor.busy  # type: ignore[attr-defined]
        line += 1 if line < each_of else stride
    assert len(outcomes) > 10


def test_an_interrupt_is_not_hidden_by_what_follows_from_it() -> None:
    engine = Engine(configure())

    with (
        pytest.raises(KeyboardInterrupt),
        engine.cache,
        engine.cache.acquire([1, 2, 3]) as lease,
        Interrupt(30),
    ):
        lease.commit([1, 2, 3])

    assert engine.cache.health().reasons == ("the cache is closed",)


def test_a_wait_that_is_interrupted_breaks_nothing() -> None:
    cache = open_cache()
    lines = 1
    while True:
        interrupt = Interrupt(lines)
        try:
            with interrupt:
                cache.wait(time.monotonic())
        except KeyboardInterrupt:
            pass
        cache.acquire([1]).release()
        if not interrupt.fired:
            break
        lines += 1
    cache.close()


def test_a_signal_handler_that_calls_the_cache_is_refused_while_a_call_is_under_way() -> None:
    cache = open_cache()
    lease = cache.acquire([1, 2, 3])
    said: list[str] = []

    def handler(_number: int, _frame: FrameType | None) -> None:
        try:
            cache.close()
        except AccessError as error:
            said.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    original = cache._driver.handle

    def handle(event: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return original(event)

    cache._driver.handle = handle  # type: ignore[method-assign]
    try:
        lease.grow(9)
    finally:
        cache._driver.handle = original  # type: ignore[method-assign]
        signal.signal(signal.SIGUSR1, before)

    assert len(said) == 1
    assert "from within another of its calls" in said[0]
    cache.audit()
    lease.release()
    cache.close()


def test_an_error_of_ours_is_no_refusal_either() -> None:
    cache = open_cache()
    lease = cache.acquire([1, 2, 3])
    cache._driver.machine._books.device.pool.holders[lease.block_table[0]] = 0

    with pytest.raises(penstock.InvariantViolation):
        lease.release()

    with pytest.raises(UnavailableError, match="broken off by InvariantViolation"):
        cache.acquire([1])
