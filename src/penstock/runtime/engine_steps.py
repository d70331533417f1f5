"""What an engine says and asks around its own steps, on the rank that computes them.

    steps.join(lease.loads)                   # loads that the next step computes on, if any
    ... the forward pass: steps.wait_layer(i, stream) before layer i ...
    steps.submitted(stream, slots)            # after the step was submitted to the device

| call         | on a GPU                                               | on the CPU            |
|--------------|--------------------------------------------------------|-----------------------|
| `submitted`  | copies of these slots wait for the step, on the device | steps have ended      |
| `guard`      | a stream waits for copies that still touch slots       | whether none are left |
| `joinable`   | whether a load's layers will be there in time          | no: loads have ended  |
| `join`       | the next step's layers wait for these loads            | nothing               |
| `wait_layer` | a stream waits for one layer of them                   | nothing               |

The one rule: a request that joined a step with its loads keeps its token, and commits nothing,
until its lease is `READY`. If `cached_tokens` has become less by then, a block was not what its
key names: all that was computed beyond is rolled back and computed again.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from penstock.cache.settings import DEVICE
from penstock.vocabulary.arguments import as_array, as_int, as_seconds, as_tuple
from penstock.vocabulary.ids import OperationId

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import ArrayLike

    from penstock.movers.base import Mover


@runtime_checkable
class KnowsSteps(Protocol):
    """A mover whose copies are in order with the engine's steps, on the device."""

    def step_submitted(self, stream: int, slots: ArrayLike | None = None) -> None:
        """The engine has submitted a step; the movers of one device share what they know."""
        ...

    def guard(self, stream: int, slots: ArrayLike) -> bool:
        """Has a stream wait for copies of these slots; False if one has not begun yet."""
        ...


@runtime_checkable
class FillsLayers(Protocol):
    """A mover whose loads can be joined before they have ended."""

    def joinable(self, operation: OperationId, *, step_s: float) -> bool:
        """Whether a step of this length that begins now would hardly have to wait for it."""
        ...

    def join(self, operations: Collection[OperationId]) -> None:
        """The layers of the next step wait for theirs."""
        ...

    def wait_layer(self, layer: int, stream: int) -> None:
        """Has a stream wait for one layer of what was joined."""
        ...


@runtime_checkable
class CallsDevice(Protocol):
    """A mover that submits work to a device, by compiled calls where there are any."""

    @property
    def without(self) -> str:
        """Why the calls are made from Python; empty where they are compiled."""
        ...


class EngineSteps:
    """The engine's steps, as the movers of its device have to know them."""

    def __init__(self, movers: Mapping[tuple[int, int], Mover]) -> None:
        near = [mover for pair, mover in movers.items() if DEVICE in pair]
        # Asked once: whether something is of such a kind takes longer to find out than to use.
        self._knowing = [mover for mover in near if isinstance(mover, KnowsSteps)]
        self._unaware = [mover for mover in near if not isinstance(mover, KnowsSteps)]
        self._calling = [mover for mover in near if isinstance(mover, CallsDevice)]
        filling = (mover for mover in near if isinstance(mover, FillsLayers))
        self._filling: FillsLayers | None = next(filling, None)

    def submitted(self, stream: int, slots: ArrayLike | None = None) -> None:
        """The engine has submitted a step to its stream.

        Args:
            stream: The CUDA stream, as a number.
            slots: The device blocks that it reads or writes; without them, it may be any.
        """
        stream = as_int("stream", stream)
        if slots is not None:
            slots = as_array("slots", slots)
        for mover in self._knowing[:1]:  # The movers of one device share it.
            mover.step_submitted(stream, slots)

    @property
    def without(self) -> str:
        """Why the device's copies are submitted from Python, which takes longer; else empty."""
        return next((mover.without for mover in self._calling if mover.without), "")

    @property
    def fills_layers(self) -> bool:
        """Whether loads arrive layer by layer, so that steps can join them."""
        return self._filling is not None

    def guard(self, stream: int, slots: ArrayLike) -> bool:
        """What is submitted to the stream from now on may write these device blocks again.

        Returns False where it may not yet: a copy of them has not begun. For engines that
        reuse a block before its copy is reported.
        """
        stream, slots = as_int("stream", stream), as_array("slots", slots)
        begun = [mover.guard(stream, slots) for mover in self._knowing]  # Each has its own waits.
        return all(begun) and not any(mover.busy for mover in self._unaware)

    def joinable(self, loads: Collection[OperationId], *, step_s: float) -> bool:
        """Whether the next step may compute on what these loads bring, while they bring it.

        Args:
            loads: All that a request waits for; see `Lease.loads`. With none of them there is
                nothing to join.
            step_s: How long the step will take.
        """
        loads = _as_operations(loads)
        step_s = as_seconds("step_s", step_s, zero=True)
        mover = self._filling
        if mover is None or not loads:
            return False
        return all(mover.joinable(operation, step_s=step_s) for operation in loads)

    def join(self, loads: Collection[OperationId]) -> None:
        """The next step computes on what these loads bring: all of them, in one call."""
        loads = _as_operations(loads)
        mover = self._filling
        if mover is not None:
            mover.join(loads)

    def wait_layer(self, layer: int, stream: int) -> None:
        """In the forward pass, before a layer's KV is read; may be captured in a CUDA graph.

        Args:
            layer: Its number in the model.
            stream: The CUDA stream that computes, as a number.
        """
        layer, stream = as_int("layer", layer), as_int("stream", stream)
        mover = self._filling
        if mover is not None:
            mover.wait_layer(layer, stream)

    def close(self) -> None:
        """Lets go of the movers, which have come to their end: nothing is under way."""
        self._knowing, self._unaware, self._calling = [], [], []
        self._filling = None


def _as_operations(loads: Collection[OperationId]) -> tuple[OperationId, ...]:
    found = as_tuple("loads", loads)
    if not set(map(type, found)) <= {OperationId}:
        raise ValueError(
            f"loads is {reprlib.repr(loads)}, must be names of operations: Lease.loads"
        )
    return found
