"""Clients that read long answers, one after the other, until their server is gone."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx

from tests.serve.conftest import ONE_EACH

if TYPE_CHECKING:
    from collections.abc import Iterator

HANG_S = 600.0
"""A line that takes longer on the busiest machine will never come."""


class Stream:
    """One client, in a thread of its own."""

    def __init__(self, address: str, number: int) -> None:
        self.received = 0
        """Lines of the answer that broke off."""
        self.begun = threading.Event()
        self._address = address
        self._number = number
        self._stop = threading.Event()

    def read(self) -> None:
        with httpx.Client(base_url=self._address, timeout=HANG_S, limits=ONE_EACH) as client:
            for turn in itertools.count():
                if self._stop.is_set():
                    return
                try:
                    self._read_answer(client, turn)
                except httpx.TimeoutException:
                    raise  # Whoever waits in vain hangs.
                except httpx.TransportError:
                    return
                self.received = 0

    def stop(self) -> None:
        """Has it ask no more."""
        self._stop.set()

    def _read_answer(self, client: httpx.Client, turn: int) -> None:
        # Long enough to be handed over, and another one each time: none is found in the cache.
        prompt = f"{self._number} {turn} " + "What is under way is told or ended. " * 4
        body = {"prompt": prompt, "max_tokens": 100, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                assert '{"error"' not in line, line
                self.received += bool(line)
                self.begun.set()


@contextmanager
def streams_until_killed(address: str, clients: int) -> Iterator[list[Stream]]:
    """Streams that have all begun; the body has to kill the server, which ends them."""
    streams = [Stream(address, number) for number in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        reading: list[Future[None]] = [pool.submit(stream.read) for stream in streams]
        try:
            for stream in streams:
                assert stream.begun.wait(HANG_S), "a client gets nothing"
            yield streams
        finally:
            for stream in streams:
                stream.stop()
        for each in reading:
            each.result(timeout=2 * HANG_S)
