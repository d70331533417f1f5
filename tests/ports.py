"""Ports for servers that tests start, which nobody takes between the choice and the start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

PORTS = range(10_000, 30_000, 4)
"""Below those that the kernel gives to whoever asks for any."""


def free_ports(count: int) -> list[int]:
    """The first of four ports each that nobody has now."""
    with ExitStack() as taken:
        found: list[int] = []
        for first in random.SystemRandom().sample(PORTS, len(PORTS)):
            with suppress(OSError):
                for port in range(first, first + 4):
                    taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(first)
            if len(found) == count:
                return found
    raise AssertionError(f"there are no {count} times 4 free ports, but only {found}")
