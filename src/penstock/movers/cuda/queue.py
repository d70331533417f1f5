"""Copies in a queue, in batches: what all movers of a GPU have in common.

`poll` asks which batches have ended, reports the copies that have, and submits as much as the
budget and the queue allow. It never waits. Between steps that follow each other quickly it
rests: a poll a millisecond would cost such an engine more than it brings.

The one rule: batches end in the order of their numbers, so that waiting for one is waiting for
all before it.
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
    from penstock.movers.cuda.calls import Calls
    from penstock.movers.cuda.runs import Road
    from penstock.movers.cuda.staging import Manifest
    from penstock.movers.cuda.streams import StreamEvent
    from penstock.vocabulary.ids import OperationId
    from penstock.vocabulary.layout import Layout

REST_S = 0.003
"""While copies are on their way, steps shorter than this are not polled one by one. It bounds by
how much later a copy is reported, and is a seventh of what can be in flight."""


class DeviceSlots(Protocol):
    """A tier whose buffers a kernel can address."""

    layout: Layout
    slot_count: int

    @property
    def addresses(self) -> Mapping[int, int]:
        """Where each buffer of the layout starts."""
        ...


class Job:
    """A copy and how far it is."""

    __slots__ = ("copy", "faults", "flying", "next", "number", "road", "step", "wanted")

    def __init__(self, copy: Copy, number: int, step: int) -> None:
        self.copy = copy
        self.number = number
        """Counts the copies of a mover."""
        self.step = step
        """The last step that could have touched its device slots."""
        self.next = 0
        self.flying = 0
        self.wanted = True
        self.faults: list[tuple[int, BlockFault]] = []
        self.road: Road | None = None
        """Where its blocks lie in host memory, once a mover has looked."""

    @property
    def left(self) -> int:
        """Blocks that have not been submitted to the device."""
        return len(self.copy.keys) - self.next if self.wanted else 0

    @property
    def ended(self) -> bool:
        """Whether nothing of it is left or on its way."""
        return self.flying == 0 and self.left == 0

    def report(self) -> Moved:
        """What the owner is told."""
        return Moved(self.copy.operation, tuple(sorted(self.faults, key=lambda fault: fault[0])))


class CopyBatch:
    """Some blocks of a job, on their way."""

    __slots__ = ("first", "job", "manifest", "number")

    def __init__(self, job: Job, manifest: Manifest, *, count: int, number: int) -> None:
        self.job = job
        self.manifest = manifest
        self.first = job.next
        self.number = number
        manifest.count = count

    @property
    def part(self) -> slice:
        """Which blocks of the job."""
        return slice(self.first, self.first + self.manifest.count)


class QueuedMover(ABC):
    """Copies in order, in batches; its subclasses say what a batch is."""

    _calls: Calls
    """How the device is told what to do: set by the subclass, which has the kernels."""

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
        self._begun = 0
        """Of all copies up to this number, nothing is left to be submitted to the device."""
        self._abandoned = False
        """Whether a copy may have ended out of its turn."""
        # One more, for `NOWHERE`.
        self._last_batch = np.zeros(slot_count + 1, dtype=np.int64)
        """The number of the last batch that touches each device slot."""
        self._last_job = np.zeros(slot_count + 1, dtype=np.int64)
        """The number of the last copy that does or will touch each device slot."""

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return bool(self._jobs)

    @property
    def without(self) -> str:
        """Why the calls to the device are made from Python; empty where they are compiled."""
        return self._calls.without

    @property
    def in_flight(self) -> int:
        """Batches that were submitted to the device and not seen to have ended."""
        return len(self._flying)

    def step_submitted(self, stream: int, slots: ArrayLike | None = None) -> None:
        """The engine has submitted a step to its stream; see `Steps.submitted`."""
        self.steps.submitted(stream, slots)

    def submit(self, copy: Copy) -> None:
        """Takes a copy in; its work is submitted to the device in `poll`."""
        self._taken += 1
        slots = self._device_slots(copy)
        self._jobs.append(Job(copy, self._taken, self.steps.last_of(slots)))
        self._last_job[slots] = self._taken

    def abandon(self, operation: OperationId) -> None:
        """What is not on its way is left out; the copy is reported when the rest has ended."""
        for job in self._jobs:
            if job.copy.operation == operation:
                job.wanted = False
                self._abandoned = True
                return

    def poll(self, *, budget_bytes: int) -> tuple[list[Moved], int]:
        """Reports what ended and submits at most `budget_bytes`, but at least one block.

        Nothing is submitted while the queue is full: that bounds the bytes in flight. After
        another step within `REST_S`, and with copies on their way, nothing is done at all.
        """
        now = time.monotonic()
        if self._flying and now < self._rests_until and self.steps.newest != self._polled_step:
            return [], 0
        self._rests_until = now + REST_S
        self._polled_step = self.steps.newest
        moved = self.collect()
        spent = 0
        for job in self._jobs:
            while job.left:
                allowed = (budget_bytes - spent) // self._block_bytes
                room = min(self._room, allowed if spent else max(1, allowed))
                if room < 1:
                    return moved, spent
                count = min(job.left, room)
                self._submit_batch(job, count)
                spent += count * self._block_bytes
            self._begun = max(self._begun, job.number)
        return moved, spent

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
        """Blocks this thread until all that was submitted to the device has ended.

        Raises:
            UnavailableError: it has not within `timeout_s` seconds; it may still touch its slots.
        """
        self._rests_until = 0.0
        if self._flying and not self._bell.wait(self._flying[-1].manifest.ended, timeout_s):
            raise UnavailableError(
                f"{len(self._flying)} batches have not ended on the device after {timeout_s:g} s"
            )

    def guard(self, stream: int, slots: ArrayLike) -> bool:
        """Has an engine's stream wait for the copies that read or write these device slots.

        Returns False where such a copy has not been submitted to the device yet: then there is
        nothing to wait for on the device, and the slot must be left alone until its report.
        """
        if not self._jobs:
            return True
        wanted = [slot for slot in np.asarray(slots).tolist() if slot >= 0]
        if not wanted:
            return True
        # Few as a rule: a loop takes a fraction of the calls of NumPy.
        last = max(map(self._last_batch.item, wanted))
        if self._flying and last >= self._flying[0].number:
            # They leave the device's slots in the order of their numbers.
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
        """Which slots of the device a copy reads or writes."""

    @abstractmethod
    def _launch(self, batch: CopyBatch, step: StreamEvent | None) -> None:
        """Writes down the work of a batch, behind a step where the device's slots are touched."""

    @abstractmethod
    def _land(self, batch: CopyBatch) -> None:
        """The CPU has seen the end of a batch."""

    def _device_done(self, batch: CopyBatch) -> StreamEvent:
        """When the device's slots are no longer touched."""
        return batch.manifest.ended


def slots_of_any(layout: Layout) -> int:
    """So many slots the largest KV group has; a layout's own count is that of the smallest."""
    return max(group.block_count for group in layout.groups)
