"""A queue of copies, which are submitted in batches: the base of all movers of a GPU.

`poll` checks which batches have ended, reports finished copies, and submits as much as the budget
and the queue allow. It never waits. After a step that follows another one within `REST_S` it does
nothing: a poll every millisecond would cost such an engine more than it gains.

The one rule: batches end in the order of their numbers, so waiting for one is waiting for all
before it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.cache.operations import Purpose
from penstock.errors import UnavailableError
from penstock.movers.base import WAIT_S, Moved
from penstock.movers.cuda.streams import Bell, Steps, Stream, stream_waits
from penstock.vocabulary.checksums import Algorithm, life_salt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

    from penstock.cache.operations import BlockFault
    from penstock.machine.effects import Copy
    from penstock.movers.cuda.buffers import Manifest
    from penstock.movers.cuda.calls import Calls
    from penstock.movers.cuda.streams import StreamEvent
    from penstock.movers.cuda.tables import Road
    from penstock.vocabulary.keys import OperationId
    from penstock.vocabulary.layout import Layout

REST_S = 0.003
"""The shortest time between polls while copies are in flight. It bounds the delay of a report, and
is a seventh of the time that the copies in flight can take."""
LISTEN_S = 0.02
"""An engine that waits for copies hears of new requests this late, at most."""


class DeviceSlots(Protocol):
    """A tier whose buffers a kernel can address."""

    layout: Layout
    slot_count: int

    @property
    def addresses(self) -> Mapping[int, int]:
        """Where each buffer of the layout starts."""
        ...


class Job:
    """A copy and its progress."""

    __slots__ = ("copy", "faults", "flying", "next", "number", "road", "step", "wanted")

    def __init__(self, copy: Copy, number: int, step: int) -> None:
        self.copy = copy
        self.number = number
        """The number of the copy in its mover."""
        self.step = step
        """The last step that may use its device slots."""
        self.next = 0
        self.flying = 0
        self.wanted = True
        self.faults: list[tuple[int, BlockFault]] = []
        self.road: Road | None = None
        """Where its blocks lie in host memory, once it was computed."""

    @property
    def left(self) -> int:
        """Blocks that have not been submitted to the device."""
        return len(self.copy.keys) - self.next if self.wanted else 0

    @property
    def ended(self) -> bool:
        """Whether nothing of it is left or in flight."""
        return self.flying == 0 and self.left == 0

    def report(self) -> Moved:
        return Moved(self.copy.operation, tuple(sorted(self.faults, key=lambda fault: fault[0])))


class CopyBatch:
    """Some blocks of a job, in flight."""

    __slots__ = ("first", "job", "manifest", "number")

    def __init__(self, job: Job, manifest: Manifest, *, count: int, number: int) -> None:
        self.job = job
        self.manifest = manifest
        self.first = job.next
        self.number = number
        manifest.count = count

    @property
    def part(self) -> slice:
        """The blocks of the job, as a slice."""
        return slice(self.first, self.first + self.manifest.count)


class QueuedMover(ABC):
    """Copies in order, in batches; subclasses define the work of a batch."""

    _calls: Calls
    """Makes the calls to the device; set by the subclass, which has the kernels."""

    def __init__(self, device: DeviceSlots, algorithm: Algorithm, steps: Steps | None) -> None:
        if algorithm is not Algorithm.MIX64:
            raise ValueError(f"algorithm is {algorithm.value}, must be mix64 on a GPU")
        slot_count = slots_of_any(device.layout)
        self.steps = Steps(slot_count) if steps is None else steps
        self._layout = device.layout
        self._block_bytes = device.layout.block_bytes
        self._kernels = Stream()
        self._bell = Bell()
        self._rests_until = 0.0
        self._polled_step = 0
        self._jobs: deque[Job] = deque()
        self._flying: deque[CopyBatch] = deque()
        self._launched = 0
        self._taken = 0
        self._idle = False
        """Whether the engine waits, and computes nothing: then more may be in flight."""
        self._begun = 0
        """All copies up to this number were submitted to the device completely."""
        self._abandoned = False
        """Whether a copy may have ended out of order."""
        # One more, for `NOWHERE`.
        self._last_batch = np.zeros(slot_count + 1, dtype=np.int64)
        """The number of the last batch that uses each device slot."""
        self._last_job = np.zeros(slot_count + 1, dtype=np.int64)
        """The number of the last copy that uses or will use each device slot."""

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    @property
    def in_flight(self) -> int:
        """Batches that were submitted to the device and have not ended."""
        return len(self._flying)

    def step_submitted(self, stream: int, slots: ArrayLike | None = None) -> None:
        """The engine has submitted a step to its stream; see `Steps.submitted`."""
        self.steps.submitted(stream, slots)

    def submit(self, copy: Copy) -> None:
        self._taken += 1
        slots = self._device_slots(copy)
        self._jobs.append(Job(copy, self._taken, self.steps.last_of(slots)))
        self._last_job[slots] = self._taken

    def abandon(self, operation: OperationId) -> None:
        """Drops the blocks that are not in flight; the copy is reported when the rest has ended."""
        for job in self._jobs:
            if job.copy.operation == operation:
                job.wanted = False
                self._abandoned = True
                return

    def poll(self, *, budget_bytes: int) -> tuple[list[Moved], int]:
        """Reports what ended and submits at most `budget_bytes`, but at least one block.

        Nothing is submitted while the queue is full, which bounds the bytes in flight.
        """
        now = time.monotonic()
        if self._flying and now < self._rests_until and self.steps.newest != self._polled_step:
            return [], 0
        self._rests_until = now + REST_S
        self._polled_step = self.steps.newest
        moved, spent = self.collect(), self._submit_jobs(budget_bytes)
        self._idle = False
        return moved, spent

    def _submit_jobs(self, budget_bytes: int) -> int:
        spent = 0
        for job in self._jobs:
            while job.left:
                allowed = (budget_bytes - spent) // self._block_bytes
                room = min(self._room, allowed if spent else max(1, allowed))
                if room < 1:
                    return spent
                count = min(job.left, room)
                self._submit_batch(job, count)
                spent += count * self._block_bytes
            self._begun = max(self._begun, job.number)
        return spent

    def collect(self) -> list[Moved]:
        """Reports what ended, without submitting anything."""
        ended_count = 0
        if self._flying:
            ended_count = self._calls.reached([batch.manifest.ended for batch in self._flying])
        for _ in range(ended_count):
            batch = self._flying.popleft()
            self._land(batch)
            batch.job.flying -= 1
            self._give_back(batch)
        ended: list[Job] = []
        # Batches end in the order they were submitted, and so do the copies they belong to.
        while self._jobs and self._jobs[0].ended:
            ended.append(self._jobs.popleft())
        if self._abandoned:
            ended += [job for job in self._jobs if job.ended]
            self._jobs = deque(job for job in self._jobs if not job.ended)
            self._abandoned = any(not job.wanted for job in self._jobs)
        return [job.report() for job in ended]

    def wait(self, timeout_s: float = WAIT_S) -> None:
        if self._flying:
            self._wait_for(self._flying[-1], timeout_s)

    def wait_for_room(self, timeout_s: float = WAIT_S) -> None:
        """See `WaitsForDevice`; returns after `LISTEN_S` in any case."""
        if not self._flying:
            return
        self._idle, self._rests_until = True, 0.0
        more = any(job.left for job in self._jobs)
        if more and self._room:
            return
        # Half of them are on their way while the next ones are submitted: the link never runs dry.
        batch = self._flying[(len(self._flying) - 1) // 2 if more else -1]
        if timeout_s <= LISTEN_S:
            self._wait_for(batch, timeout_s)
        else:
            self._bell.wait(batch.manifest.ended, LISTEN_S)

    def _wait_for(self, batch: CopyBatch, timeout_s: float) -> None:
        self._rests_until = 0.0
        if not self._bell.wait(batch.manifest.ended, timeout_s):
            raise UnavailableError(
                f"{len(self._flying)} batches have not ended on the device after {timeout_s:g} s"
            )

    def guard(self, stream: int, slots: ArrayLike) -> bool:
        """Makes an engine's stream wait for the copies that read or write these device slots.

        Returns False if such a copy was not submitted to the device yet: then the stream cannot
        wait for it, and the slot must not be used until the copy is reported.
        """
        if not self._jobs:
            return True
        wanted = [slot for slot in np.asarray(slots).tolist() if slot >= 0]
        if not wanted:
            return True
        # They are few: a loop takes a fraction of the time of NumPy calls.
        last = max(map(self._last_batch.item, wanted))
        if self._flying and last >= self._flying[0].number:
            # Batches finish with the device's slots in the order of their numbers.
            batch = self._flying[last - self._flying[0].number]
            stream_waits(stream, self._device_done(batch))
        if max(map(self._last_job.item, wanted)) <= self._begun:
            return True
        waiting = (self._device_slots(job.copy)[..., job.next :] for job in self._jobs if job.left)
        return not any(np.isin(touched, wanted).any() for touched in waiting)

    def _submit_batch(self, job: Job, count: int) -> None:
        self._launched += 1
        batch = CopyBatch(job, self._take_manifest(), count=count, number=self._launched)
        job.next += count
        job.flying += 1
        self._flying.append(batch)
        copy, manifest = job.copy, batch.manifest
        manifest.slots[:, :count] = copy.source_slots[..., batch.part]
        manifest.targets[:, :count] = copy.target_slots[..., batch.part]
        if copy.purpose is not Purpose.DUPLICATE:
            salt = life_salt(copy.operation.incarnation, copy.operation.epoch)
            self._calls.write_seeds(copy.keys[batch.part], manifest, salt)
        self._last_batch[self._device_slots(copy)[..., batch.part]] = batch.number
        self._launch(batch, self.steps.event_of(job.step))
        self._calls.make()

    @property
    @abstractmethod
    def _room(self) -> int:
        """How many blocks the next batch may have; 0 while the queue is full."""

    @abstractmethod
    def _take_manifest(self) -> Manifest:
        """A manifest for the next batch."""

    @abstractmethod
    def _give_back(self, batch: CopyBatch) -> None:
        """Frees the manifest of a batch that has ended."""

    @abstractmethod
    def _device_slots(self, copy: Copy) -> NDArray[np.int32]:
        """The slots of the device that a copy reads or writes."""

    @abstractmethod
    def _launch(self, batch: CopyBatch, step: StreamEvent | None) -> None:
        """Records the calls of a batch, with a wait for `step` before slots are used."""

    @abstractmethod
    def _land(self, batch: CopyBatch) -> None:
        """Called when a batch has ended."""

    def _device_done(self, batch: CopyBatch) -> StreamEvent:
        """The event after which the device's slots are not used any more."""
        return batch.manifest.ended


def slots_of_any(layout: Layout) -> int:
    """The slots of the largest KV group; a layout's own count is that of the smallest."""
    return max(group.block_count for group in layout.groups)
