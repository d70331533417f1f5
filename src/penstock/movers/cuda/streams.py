"""CUDA streams and events, waiting for them with a timeout, and the two streams of a link.

These are raw calls of the CUDA runtime: a copy through torch costs several times as much of the
engine's time. Nothing here blocks the CPU except functions with `wait` or `hear` in their names.

`Bell` waits for the device with a timeout. CUDA waits for an event for ever or not at all, so the
device's callback thread calls `sem_post` of the C library, and this thread waits for the semaphore:
no CPU time is used, and no Python runs in another thread. A ring must be requested before more work
is submitted: streams share hardware queues, so a ring requested later may come only after that work
(on an H200, every tenth step was reported only when the next one ended). The semaphore must outlive
every call that may post it: a bell is closed only after its stream has ended, and one that is never
closed is kept until the process ends.

`CudaLink` is one direction of the link between GPU and host. A copy engine serves one stream until
that stream has to wait. Copies in one stream, or in two independent ones, delayed a 4 KiB copy of
the engine by all of them (9.5 ms and 4.6 ms of 512 MiB on an H200). So copies alternate between two
streams, each turn behind the one before, and other streams get the copy engine between turns. Turns
stay in order: the end of one is the end of all before it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from cuda.bindings import runtime

from penstock.cache.nodes import NOWHERE
from penstock.errors import UnavailableError
from penstock.movers.cuda.library import DRIVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

STEPS_KEPT = 16
"""Steps whose events are remembered; engines have two in flight."""
_NOT_READY = runtime.cudaError_t.cudaErrorNotReady
_SUCCESS = runtime.cudaError_t.cudaSuccess
_ANY_WAY = runtime.cudaMemcpyKind.cudaMemcpyDefault


class StreamPiece(NamedTuple):
    """One DMA."""

    source: int
    target: int
    length: int


def _in_stream_order() -> tuple[list[Any], list[int], int]:
    """The attributes of a batch of copies whose sources are written earlier in its stream."""
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    return [attributes], [0], 1


_IN_STREAM_ORDER = _in_stream_order()


def checked(answer: tuple[Any, ...]) -> Any:  # noqa: ANN401 - what the call returns
    """The result of a call of the CUDA runtime.

    Raises:
        UnavailableError: the call failed; the device may be lost.
    """
    status = answer[0]
    if status != _SUCCESS:
        _, text = runtime.cudaGetErrorString(status)
        words = text.decode() if isinstance(text, bytes) else str(text)
        raise UnavailableError(f"CUDA: {words} ({status.name})")
    return answer[1] if len(answer) > 1 else None


class StreamEvent:
    """A point in a stream's work."""

    __slots__ = ("handle", "number")

    flags: ClassVar[int] = runtime.cudaEventDisableTiming

    def __init__(self) -> None:
        self.handle = checked(runtime.cudaEventCreateWithFlags(self.flags))
        self.number = int(self.handle)

    def record(self, stream: object) -> None:
        """Marks what was submitted to the stream so far."""
        checked(runtime.cudaEventRecord(self.handle, stream))

    @property
    def reached(self) -> bool:
        """Whether the CPU can see that the device has got there."""
        (status,) = runtime.cudaEventQuery(self.handle)
        if status == _NOT_READY:
            return False
        checked((status,))
        return True

    def hold(self, stream: int) -> None:
        """Has any stream wait on the device; while it is captured, every replay will."""
        status = checked(runtime.cudaStreamIsCapturing(stream))
        active = status == runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
        flags = runtime.cudaEventWaitExternal if active else 0
        checked(runtime.cudaStreamWaitEvent(stream, self.handle, flags))

    def close(self) -> None:
        """Gives the event back."""
        checked(runtime.cudaEventDestroy(self.handle))


class TimedEvent(StreamEvent):
    """A point in a stream's work, and when it was reached."""

    __slots__ = ()

    flags: ClassVar[int] = runtime.cudaEventDefault


def elapsed_s(first: TimedEvent, second: TimedEvent) -> float:
    """Seconds between two points that were reached."""
    milliseconds: float = checked(runtime.cudaEventElapsedTime(first.handle, second.handle))
    return milliseconds / 1e3


class Stream:
    """Work of the device in order, behind the engine's where both compete."""

    __slots__ = ("handle", "number")

    def __init__(self) -> None:
        least, _ = _priorities()
        created = runtime.cudaStreamCreateWithPriority(runtime.cudaStreamNonBlocking, least)
        self.handle = checked(created)
        self.number = int(self.handle)

    def wait_for(self, event: StreamEvent) -> None:
        """Has the stream wait on the device for an event; the CPU does not."""
        checked(runtime.cudaStreamWaitEvent(self.handle, event.handle, 0))

    def clear(self, address: int, length: int) -> None:
        """Writes zeros."""
        checked(runtime.cudaMemsetAsync(address, 0, length, self.handle))

    def copy(self, pieces: Sequence[StreamPiece]) -> None:
        """Copies between the memories of host and device, in one call."""
        self.copy_extents(*zip(*pieces, strict=True))

    def copy_extents(
        self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Copies between the memories of host and device, in one call."""
        if len(lengths) == 1:  # Half the cost of a batch of one.
            checked(
                runtime.cudaMemcpyAsync(targets[0], sources[0], lengths[0], _ANY_WAY, self.handle)
            )
            return
        checked(
            runtime.cudaMemcpyBatchAsync(
                *(targets, sources, lengths, len(lengths)), *_IN_STREAM_ORDER, self.handle
            )
        )

    def copy_after(
        self, before: StreamEvent, target: int, source: int, length: int, end: StreamEvent
    ) -> None:
        """Waits for one event, copies, records another: a turn on a link, with little ado."""
        handle = self.handle
        status = (
            runtime.cudaStreamWaitEvent(handle, before.handle, 0)[0]
            or runtime.cudaMemcpyAsync(target, source, length, _ANY_WAY, handle)[0]
            or runtime.cudaEventRecord(end.handle, handle)[0]
        )
        if status:
            checked((status,))

    def copy_batch_after(
        self,
        before: StreamEvent,
        targets: Sequence[int],
        sources: Sequence[int],
        lengths: Sequence[int],
        end: StreamEvent,
    ) -> None:
        """The same for many extents."""
        self.wait_for(before)
        self.copy_extents(sources, targets, lengths)
        end.record(self.handle)

    def wait(self) -> None:
        """Blocks this thread until the stream has done all its work."""
        checked(runtime.cudaStreamSynchronize(self.handle))

    def close(self) -> None:
        """Gives the stream back."""
        checked(runtime.cudaStreamDestroy(self.handle))


def stream_waits(stream: object, event: StreamEvent) -> None:
    """Has any stream wait on the device for an event."""
    checked(runtime.cudaStreamWaitEvent(stream, event.handle, 0))


def _priorities() -> tuple[int, int]:
    status, least, greatest = runtime.cudaDeviceGetStreamPriorityRange()
    checked((status,))
    return least, greatest


class _Step(NamedTuple):
    number: int
    event: StreamEvent


class Steps:
    """The engine's steps, and which of them last touched each device slot.

    Call `submitted` after each step, with the slots it reads or writes if they are known: a
    slot that no step touched lately need not be waited for. Without them, a step may have
    touched any slot. Steps end in the order in which they were submitted, as the work of one
    stream does.
    """

    def __init__(self, slot_count: int) -> None:
        # One more, for `NOWHERE`, which no step touches.
        self._last = np.zeros(slot_count + 1, dtype=np.int64)
        self._floor = 0
        self._number = 0
        self._in_flight: deque[_Step] = deque()
        self._spare: list[StreamEvent] = []

    def submitted(self, stream: int, slots: ArrayLike | None = None) -> int:
        """A step was submitted to the stream; returns its number, from 1 on."""
        self._number += 1
        while self._in_flight and self._in_flight[0].event.reached:
            self._spare.append(self._in_flight.popleft().event)
        if len(self._in_flight) >= STEPS_KEPT:
            # Whoever wants this step waits for the next one, which ends after it.
            self._spare.append(self._in_flight.popleft().event)
        event = self._spare.pop() if self._spare else StreamEvent()
        event.record(stream)
        self._in_flight.append(_Step(self._number, event))
        if slots is None:
            self._floor = self._number
        else:
            self._last[np.asarray(slots)] = self._number
            self._last[NOWHERE] = 0
        return self._number

    @property
    def newest(self) -> int:
        """The number of the last step that was submitted."""
        return self._number

    def last_of(self, slots: NDArray[np.int32]) -> int:
        """The last step that could have touched any of the slots; 0 if none could."""
        if not slots.size:
            return 0
        return max(self._floor, int(self._last[slots].max()))

    def event_of(self, step: int) -> StreamEvent | None:
        """What to wait for to be behind a step; `None` once it has ended."""
        if step == 0:
            return None
        for kept in self._in_flight:
            if kept.number >= step:
                return kept.event
        return None

    def close(self) -> None:
        """Gives the events back."""
        for event in (*(step.event for step in self._in_flight), *self._spare):
            event.close()
        self._in_flight.clear()
        self._spare.clear()


_SEMAPHORE_BYTES = 64
"""More than any C library of Linux needs."""


_MAY_RING: set[Bell] = set()
"""Bells that are not closed: the device may post their semaphores."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """A stream in which the device rings, and a semaphore that a thread waits for."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._driver = ctypes.CDLL(DRIVER)
        self._stream = Stream()
        self._semaphore = (ctypes.c_char * _SEMAPHORE_BYTES)()
        self._library.sem_init(self._semaphore, 0, 0)
        _MAY_RING.add(self)
        # What CUDA takes at the first call, it takes now: later that would wait for the device.
        self._ring()
        self._stream.wait()

    def ring_behind(self, event: StreamEvent) -> None:
        """Has the device ring when it reaches an event, which `hear` then waits for."""
        self._stream.wait_for(event)
        self._ring()

    def hear(self, event: StreamEvent, seconds: float) -> bool:
        """Blocks this thread until an event is reached; returns False if it takes too long."""
        give_up = time.monotonic() + seconds
        while not event.reached:
            # Rings for other events wake us early, and each is heard once.
            if not self._heard_before(give_up):
                return event.reached
        self._forget_rings()
        return True

    def wait(self, event: StreamEvent, seconds: float) -> bool:
        """The same where nobody has asked for a ring."""
        if not event.reached:
            self.ring_behind(event)
        return self.hear(event, seconds)

    def close(self) -> None:
        """Gives the stream back, once it has rung for all that was asked for."""
        self._stream.wait()
        self._stream.close()
        _MAY_RING.discard(self)

    def _ring(self) -> None:
        """Has the semaphore posted when the stream has got there."""
        post = ctypes.cast(self._library.sem_post, ctypes.c_void_p)
        stream = ctypes.c_void_p(self._stream.number)
        status = self._driver.cuLaunchHostFunc(stream, post, ctypes.byref(self._semaphore))
        if status:
            raise UnavailableError(f"CUDA: error {status} of cuLaunchHostFunc")

    def _heard_before(self, give_up: float) -> bool:
        """Waits for the semaphore; returns False when the time is over."""
        until = _Timespec(int(give_up), int(give_up % 1 * 1e9))
        clock = ctypes.c_int(time.CLOCK_MONOTONIC)
        if self._library.sem_clockwait(self._semaphore, clock, ctypes.byref(until)) == 0:
            return True
        why = ctypes.get_errno()
        if why == errno.EINTR:  # By a signal, which Python has seen to by now.
            return True
        if why == errno.ETIMEDOUT:
            return False
        raise OSError(why, os.strerror(why))

    def _forget_rings(self) -> None:
        """Takes back what was posted for events that were reached before anybody waited."""
        while self._library.sem_trywait(self._semaphore) == 0:
            pass


class CudaLink:
    """Whose turn it is between staging and host memory, one way.

    `calls.c` keeps that in memory of its own, at `address`: a link is used by one kind of calls
    from its making on.
    """

    def __init__(self) -> None:
        self._streams = (Stream(), Stream())
        self._ends = (StreamEvent(), StreamEvent())
        self._words = array("q", [each.number for each in (*self._streams, *self._ends)])
        self.address = self._words.buffer_info()[0]
        """Both streams, that of the last turn first, and the events of their turns likewise."""

    @property
    def stream(self) -> Stream:
        """Where the last turn was taken: what is recorded there comes after all turns."""
        return self._streams[0]

    @property
    def next_stream(self) -> Stream:
        """Where the next turn is taken, which every later one follows."""
        return self._streams[1]

    def take_turn(
        self, targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Copies extents behind the turn before."""
        one, other = self._streams
        before, end = self._ends
        self._streams, self._ends = (other, one), (end, before)
        if len(lengths) == 1:
            other.copy_after(before, targets[0], sources[0], lengths[0], end)
        else:
            other.copy_batch_after(before, targets, sources, lengths, end)

    def wait(self) -> None:
        """Blocks this thread until all copies have ended."""
        for stream in self._streams:
            stream.wait()

    def close(self) -> None:
        """Gives streams and events back; nothing may be in flight."""
        for each in (*self._streams, *self._ends):
            each.close()
