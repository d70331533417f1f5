"""One of two engines is killed: the other learns it before its deadline, and nothing leaks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.transport import zmq_link
from tests.handoff.conftest import BLOCK, LAYERS, SETTINGS, a_pair, memory, open_files

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = list(range(100, 110))
TIMEOUT_S = 6.0
"""Of a handoff: longer than another process needs to start. A peer that was met and is silent is
suspected after one second, so most handoffs fail earlier."""
SLOW_S = 600.0
"""A deadline that only failures meet."""
QUICK = replace(SETTINGS, times=replace(SETTINGS.times, suspect_s=1.0))
LIVES = 10
"""So many lives of a living engine are not all taken for dead because a busy machine stops them."""

PROGRAM = """
import sys, time
from tests.handoff.test_killed_engines import run_decode, run_prefill
side, point, prefill, decode = sys.argv[1:]
(run_prefill if side == "prefill" else run_decode)(point, prefill, decode)
"""
long = partial(pytest.param, marks=pytest.mark.long)
PREFILL_POINTS = ("layer 2", *map(long, ("opened", "offered", "layer 0", "sampled")))
DECODE_POINTS = ("landed", *map(long, ("opened", "claimed", "connected")))


def reach(point: str, wanted: str, handoff: penstock.Handoff) -> None:
    """Says that a point is reached, and goes no further than the one where it is killed."""
    if point != wanted:
        return
    sys.stdout.write(f"{point}\n")
    sys.stdout.flush()
    while True:
        handoff.step()
        handoff.wait(time.monotonic() + 1.0)


def the_pair(prefill: str, decode: str) -> penstock.HandoffPair:
    return a_pair(
        prefill=penstock.HandoffEngine(name="prefill", address=prefill),
        decode=penstock.HandoffEngine(name="decode", address=decode),
    )


def run_prefill(wanted: str, *addresses: str) -> None:
    kv = memory()
    with penstock.open_prefill(
        the_pair(*addresses), kv=kv, block_tokens=BLOCK, settings=QUICK
    ) as handoff:
        reach("opened", wanted, handoff)
        handoff.offer("r", PROMPT, slots=[0, 1, 2])
        reach("offered", wanted, handoff)
        for layer in range(LAYERS):
            kv[layer][:3] = layer + 1
            handoff.computed({"r": len(PROMPT)}, layer=layer)
            reach(f"layer {layer}", wanted, handoff)
        handoff.first_token("r", 42)
        reach("sampled", wanted, handoff)
        while not handoff.step():
            handoff.wait(time.monotonic() + 1.0)


def run_decode(wanted: str, *addresses: str) -> None:
    with penstock.open_decode(
        the_pair(*addresses), kv=memory(), block_tokens=BLOCK, settings=QUICK
    ) as handoff:
        reach("opened", wanted, handoff)
        handoff.claim("r", PROMPT, slots=[5, 6, 7])
        reach("claimed", wanted, handoff)
        while not handoff.statistics().landing_bytes:
            handoff.step()
            handoff.wait(time.monotonic() + 1.0)
        reach("connected", wanted, handoff)
        while not handoff.statistics().parts:
            handoff.step()
            handoff.wait(time.monotonic() + 1.0)
        reach("landed", wanted, handoff)


@contextmanager
def another_process(side: str, point: str, pair: penstock.HandoffPair) -> Iterator[Any]:
    addresses = (pair.prefill.address, pair.decode.address)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, side, point, *addresses], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def results_until(
    handoff: penstock.Handoff, process: Any, deadline: float
) -> list[penstock.HandoffResult]:
    """Runs an engine; the other one is killed as soon as it says that it is where it should be."""
    results: list[penstock.HandoffResult] = []
    said = [process.stdout.fileno()]
    while not results and time.monotonic() < deadline:
        results = handoff.step()
        if not results:
            handoff.wait(deadline, descriptors=said)
        if said and _can_be_read(process):
            process.kill()
            process.wait()
            said = []
    return results


def _can_be_read(process: Any) -> bool:
    os.set_blocking(process.stdout.fileno(), False)
    return bool(process.stdout.read(1))


@pytest.fixture(autouse=True)
def require_no_leak(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files, sockets and shared memory are closed, whatever the test did."""
    contexts: dict[int, Any] = {}
    monkeypatch.setattr(zmq_link, "_contexts", contexts)
    penstock.open_decode(a_pair(), kv=memory(), block_tokens=BLOCK).close()  # Opens libzmq's own.
    end_zeromq(contexts)
    before = open_files()
    yield
    end_zeromq(contexts)
    assert open_files() <= before


def end_zeromq(contexts: dict[int, Any]) -> None:
    """Waits until ZeroMQ's thread has closed every connection: then `term` returns."""
    while contexts:
        _, context = contexts.popitem()
        end = threading.Thread(target=context.term, daemon=True)
        end.start()
        end.join(SLOW_S)
        assert not end.is_alive(), "a ZeroMQ socket was left open"


def settle(handoff: penstock.Handoff) -> None:
    """Until the memory that the dead process could write to is back."""
    deadline = time.monotonic() + SLOW_S
    while handoff.statistics().landing_bytes:
        assert time.monotonic() < deadline, handoff.statistics()
        handoff.step()
        handoff.wait(time.monotonic() + 0.5)


def connect(handoff: penstock.Handoff) -> None:
    deadline = time.monotonic() + SLOW_S
    while not handoff.connected:
        assert time.monotonic() < deadline
        handoff.step()
        handoff.wait(time.monotonic() + 0.5)


@pytest.mark.parametrize("point", PREFILL_POINTS)
def test_decode_learns_that_prefill_was_killed(point: str) -> None:
    pair, kv = a_pair(), memory()
    with penstock.open_decode(pair, kv=kv, block_tokens=BLOCK, settings=QUICK) as decode:
        with another_process("prefill", point, pair) as process:
            claimed = time.monotonic()
            decode.claim("r", PROMPT, slots=[5, 6, 7], timeout_s=TIMEOUT_S)
            results = results_until(decode, process, claimed + SLOW_S)
        settle(decode)

        assert [each.handoff for each in results] == ["r"]
        if point == "sampled":  # All of it may have arrived before.
            assert results[0].delivered or results[0].why
        else:
            assert not results[0].delivered
            assert results[0].why
        assert decode.statistics().under_way == 0

        # The next life of the same engine is served, into the same blocks.
        for epoch in range(2, 2 + LIVES):
            with another_process("prefill", "", pair) as process:
                connect(decode)
                decode.claim("r", PROMPT, slots=[5, 6, 7], epoch=epoch, timeout_s=SLOW_S)
                results = results_until(decode, process, time.monotonic() + SLOW_S)
            if " is silent" not in results[0].why:
                break
            settle(decode)
        assert [each.delivered for each in results] == [True], results
        assert [float(layer[6, 0, 0]) for layer in kv] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("point", DECODE_POINTS)
def test_prefill_learns_that_decode_was_killed(point: str) -> None:
    pair, kv = a_pair(), memory()
    with penstock.open_prefill(pair, kv=kv, block_tokens=BLOCK, settings=QUICK) as prefill:
        with another_process("decode", point, pair) as process:
            offered = time.monotonic()
            prefill.offer("r", PROMPT, slots=[0, 1, 2], timeout_s=TIMEOUT_S)
            prefill.computed({"r": len(PROMPT)})
            results = results_until(prefill, process, offered + SLOW_S)

        assert [each.handoff for each in results] == ["r"]
        assert not results[0].delivered
        assert results[0].why
        assert prefill.statistics().under_way == 0


def test_an_engine_alone_is_not_kept_from_closing() -> None:
    pair = a_pair()
    decode = penstock.open_decode(pair, kv=memory(), block_tokens=BLOCK, settings=QUICK)
    with another_process("prefill", "layer 0", pair) as process:
        decode.claim("r", PROMPT, slots=[5, 6, 7], timeout_s=SLOW_S)
        deadline = time.monotonic() + SLOW_S
        while not decode.statistics().landing_bytes:
            assert time.monotonic() < deadline
            decode.step()
            decode.wait(time.monotonic() + 0.5)
        began = time.monotonic()

        decode.close()

        assert process.poll() is None
    assert time.monotonic() - began < SLOW_S
