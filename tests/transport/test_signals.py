"""A signal ends a wait, whichever thread the kernel gives it to."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.transport.waiting import SignalDescriptor, wait_readable
from tests.descriptors import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

SOON_S = 600.0


@contextmanager
def another_thread() -> Iterator[int]:
    """One that does nothing, by what a signal can be sent to."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(2 * SOON_S,))
    thread.start()
    assert thread.ident is not None
    try:
        yield thread.ident
    finally:
        end.set()
        thread.join()


def send_soon(thread: int, number: signal.Signals) -> threading.Thread:
    """Sends a signal to a thread as soon as the main thread waits."""

    def send() -> None:
        slept = ""
        for _ in range(1000):
            last, slept = slept, _sleep_of_main_thread()
            if slept and slept == last:
                break
            threading.Event().wait(0.02)
        signal.pthread_kill(thread, number)

    sending = threading.Thread(target=send)
    sending.start()
    return sending


def _sleep_of_main_thread() -> str:
    """Which sleep the main thread is in, if it is in one; one that wants to run wakes up often."""
    task = threading.main_thread().native_id
    status = Path(f"/proc/self/task/{task}/status").read_text(encoding="ascii")
    found = re.search(r"State:\tS.*\nvoluntary_ctxt_switches:\t(\d+)", status, re.DOTALL)
    return found[1] if found else ""


def test_a_signal_that_another_thread_gets_ends_a_wait_of_the_main_thread() -> None:
    with another_thread() as other, SignalDescriptor([signal.SIGUSR1]) as signals:
        for turn in range(1, 4):
            sending = send_soon(other, signal.SIGUSR1)

            woken = wait_readable(signals.descriptor, time.monotonic() + SOON_S)

            sending.join()
            assert woken, turn
            with suppress(BlockingIOError):
                while os.read(signals.descriptor, 1):
                    pass


def test_it_stays_readable_and_each_signal_is_told() -> None:
    told: list[int] = []
    with SignalDescriptor([signal.SIGUSR1, signal.SIGUSR2], told.append) as signals:
        assert not wait_readable(signals.descriptor, 0.0)

        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.raise_signal(number)

        assert told == [signal.SIGUSR1, signal.SIGUSR2]
        for _ in range(2):
            assert wait_readable(signals.descriptor, time.monotonic() + SOON_S)


def test_other_signals_do_not_make_it_readable() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: came.append(number))
    try:
        with SignalDescriptor([signal.SIGUSR1]) as signals:
            signal.raise_signal(signal.SIGUSR2)
            readable = wait_readable(signals.descriptor, 0.0)
            signal.raise_signal(signal.SIGUSR1)

            assert (readable, wait_readable(signals.descriptor, 0.0)) == (False, True)
        assert came == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_another_thread_cannot_take_signals() -> None:
    refused: list[str] = []

    def take() -> None:
        try:
            SignalDescriptor([signal.SIGUSR1])
        except ValueError as error:
            refused.append(str(error))

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()

    assert len(refused) == 1
    assert "main thread" in refused[0]


def test_afterwards_everything_is_as_it_was() -> None:
    handler = signal.getsignal(signal.SIGUSR1)
    with SignalDescriptor([signal.SIGUSR1]):
        pass
    files = open_descriptors()
    read, write = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(write)
    try:
        with SignalDescriptor([signal.SIGUSR1]) as signals:
            # Whoever has had the signals told to it is told them still.
            signal.raise_signal(signal.SIGUSR1)
            assert os.read(read, 9) == bytes([signal.SIGUSR1])
            assert wait_readable(signals.descriptor, time.monotonic() + SOON_S)
    finally:
        assert signal.set_wakeup_fd(-1) == write
        os.close(read)
        os.close(write)

    assert signal.getsignal(signal.SIGUSR1) is handler
    assert open_descriptors() <= files
