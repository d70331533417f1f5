"""Waiting for several channels and descriptors at once, until a deadline.

    ready = wait_any([store, *ranks], [pidfd], deadline=now + 0.5)

The one rule: a channel is asked before it is polled. Its descriptor shows only what happened
since it was last found empty, so a frame that came in earlier would otherwise be slept through.
"""

from __future__ import annotations

import math
import select
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.transport.base import Waitable

_POLL_MS_MAX = 2**31 - 1
"""What the kernel takes; a longer wait is made of several."""


class ReadyWaitable(NamedTuple):
    """What a wait found: both empty if its deadline passed first."""

    channels: tuple[Waitable, ...] = ()
    """They answer `receive` with something else than `Empty`; a listener has a channel."""
    descriptors: tuple[int, ...] = ()
    """They are readable, or a read of them fails."""


def wait_any(
    channels: Sequence[Waitable], descriptors: Sequence[int] = (), *, deadline: float | None
) -> ReadyWaitable:
    """Waits until a channel or a descriptor is ready, or `deadline` on the monotonic clock.

    Without a deadline it looks once and does not wait.
    """
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    watched = False
    while True:
        ready = tuple(channel for channel in channels if channel.ready)
        if not ready and not watched:
            for channel in channels:
                poll.register(channel.descriptor, select.POLLIN)
            watched = True
        until = min((at for channel in channels if (at := channel.alarm)), default=deadline)
        if until is not None and deadline is not None:
            until = min(until, deadline)
        timeout_ms = 0 if ready or deadline is None else _left_ms(until)
        readable = {fd for fd, _ in poll.poll(timeout_ms)}
        if not ready:
            ready = tuple(channel for channel in channels if channel.ready)
        found = tuple(fd for fd in descriptors if fd in readable)
        if ready or found or _left_ms(deadline) == 0:
            return ReadyWaitable(ready, found)


def wait_readable(fd: int, deadline: float) -> bool:
    """Whether a descriptor became readable before `deadline` on the monotonic clock."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(_left_ms(deadline)))


def _left_ms(deadline: float | None) -> int:
    """Rounded up: a wait that ends early would be repeated, with nothing left to wait for."""
    if deadline is None:
        return 0
    left_s = max(0.0, deadline - time.monotonic())
    return math.ceil(min(left_s * 1000, _POLL_MS_MAX))
