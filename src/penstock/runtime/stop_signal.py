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

import signal
from typing import TYPE_CHECKING

from penstock.transport.signals import SignalDescriptor
from penstock.vocabulary.arguments import as_int, as_tuple

if TYPE_CHECKING:
    from collections.abc import Iterable
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
        self.last = 0
        """The number of the last one."""
        # Here, not on entering: there the signals before a wrong one would have been taken.
        self._signals = tuple(
            _require_signal(f"signals[{index}]", each)
            for index, each in enumerate(as_tuple("signals", signals))
        )
        self._taken: SignalDescriptor | None = None

    @property
    def descriptor(self) -> int:
        """Readable from the first signal on: give it to `wait`."""
        if self._taken is None:
            raise ValueError("a StopSignal has a descriptor inside its `with` block alone")
        return self._taken.descriptor

    def __enter__(self) -> Self:
        self._taken = SignalDescriptor(self._signals, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._taken is not None
        self._taken.close()
        self._taken = None

    def _remember(self, number: int) -> None:
        self.stopping = True
        self.last = number
        self.times += 1


def _require_signal(name: str, value: object) -> int:
    number = as_int(name, value, 1, signal.NSIG - 1)
    if number in {signal.SIGKILL, signal.SIGSTOP} or number not in signal.valid_signals():
        raise ValueError(f"{name} is {number}, must be a signal that a process can catch")
    return number
