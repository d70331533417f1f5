"""A request to stop, as something an engine's loop can look at and wait for.

    with StopSignal() as stop:
        while not stop.stopping:
            cache.step()
            cache.wait(deadline, descriptors=[stop.descriptor])
        drained = cache.close(timeout_s=20.0)

The signal's handler does nothing but remember it. The one rule: whatever is to be done about it
happens in the engine's own loop, between two steps, never in the middle of one.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from penstock.vocabulary.arguments import as_int, as_tuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType
    from typing import Self


class StopSignal:
    """Turns signals that would end the process into a flag and a readable descriptor.

    For the main thread, which is where Python takes signals. At the end of the `with` block the
    signals mean again what they meant before.
    """

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM,)) -> None:
        self.stopping = False
        """Whether one of the signals has come."""
        self.times = 0
        """How many have come: who asks twice does not want to wait."""
        # Here, not on entering: there the signals before a wrong one would have been taken.
        self._signals = tuple(
            _require_signal(f"signals[{index}]", each)
            for index, each in enumerate(as_tuple("signals", signals))
        )
        self._before: dict[int, object] = {}
        self._fd = -1

    @property
    def descriptor(self) -> int:
        """Readable from the first signal on: give it to `wait`."""
        if self._fd < 0:
            raise ValueError("a StopSignal has a descriptor inside its `with` block alone")
        return self._fd

    def __enter__(self) -> Self:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for each in self._signals:
            self._before[each] = signal.signal(each, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for each, before in self._before.items():
            # `None`: it was not Python that had set it, and Python cannot set it again.
            signal.signal(each, signal.SIG_DFL if before is None else before)  # type: ignore[arg-type]
        self._before = {}
        os.close(self._fd)
        self._fd = -1

    def _remember(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True
        self.times += 1
        # A wait that the signal interrupted goes on, and finds this.
        os.eventfd_write(self._fd, 1)


def _require_signal(name: str, value: object) -> int:
    number = as_int(name, value, 1, signal.NSIG - 1)
    if number in {signal.SIGKILL, signal.SIGSTOP} or number not in signal.valid_signals():
        raise ValueError(f"{name} is {number}, must be a signal that a process can catch")
    return number
