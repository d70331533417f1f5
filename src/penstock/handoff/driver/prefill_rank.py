"""The driver of a prefill rank: parts go out as soon as they are computed, wanted and have room.

    events = LayerEvents(StreamEvent)
    …  the kernels of a layer are launched  …
    events.record({"request-1": 512}, layer, stream)      # an event behind them
    events.poll()                                         # what has been passed, never waits
    events.drive(until)                                   # waits for the next one

No thread waits for events. The engine looks at them at step boundaries, and while it waits for
its step's result anyway. Events of one stream are passed in order, so only the oldest is asked.

    progress ─→ machine ─→ Write ─→ packed into the berth, summed ─→ notice ─→ observed

For the landing area of each target there is a link, a queue of parts and the writes that have not
ended. In a step, areas take turns, so that a target which takes nothing holds up no other.

The rules:

- Progress is reported for bytes that *are* there. On a CUDA device that is when the event recorded
  behind the layer's last kernel has passed, not when the kernel was launched.
- A write is begun only in the very area that it was meant for; one whose area was left ends as
  failed, and nothing of it is moved after its link was closed. Once `_abandon` returns, the blocks
  of that write are not read any more.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.errors import CapacityError, UnavailableError
from penstock.handoff.driver.party_driver import (
    PartyDriver,
    block_keys,
    handoff_name,
    seal,
    slot_numbers,
    whole_number,
)
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.effects import AbandonWrite, Write, notice_of
from penstock.handoff.protocol.grid import PART_BYTES_MIN
from penstock.handoff.protocol.prefill_rank import PrefillRank, join_notices, writes_of
from penstock.transport.remote import WriteDone

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.handoff.driver.directory import Directory
    from penstock.handoff.driver.lines import Lines
    from penstock.handoff.driver.parts import PartReader, RouteParts
    from penstock.handoff.protocol.effects import AnyEffect
    from penstock.handoff.protocol.identity import Life, WriteId
    from penstock.handoff.protocol.settings import HandoffSettings
    from penstock.transport.remote import WriteEnd, WriterLink


SPARE_MAX = 1024
"""Events that are kept for the next steps."""


class Progress(NamedTuple):
    """The KV of a prompt's first `tokens` tokens is there in one layer of this rank."""

    handoff: str
    layer: int | None
    """`None`: in all layers."""
    tokens: int


class DeviceEvent(Protocol):
    """A point in the work of a stream: `StreamEvent` of `movers.cuda.streams`, or a fake of it."""

    def record(self, stream: object) -> None:
        """Marks what was submitted to the stream so far."""
        ...

    @property
    def reached(self) -> bool:
        """Whether the CPU can see that the device has got there."""
        ...

    def close(self) -> None:
        """Gives the event back."""
        ...


class _Recorded(NamedTuple):
    event: DeviceEvent
    tokens: dict[str, int]
    layer: int | None


class LayerEvents:
    """The progress of a device whose steps run in one stream.

    Args:
        event: makes an event.
        clock: the time that `drive` is given.
    """

    def __init__(
        self, event: Callable[[], DeviceEvent], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = event
        self._clock = clock
        self._recorded: deque[_Recorded] = deque()
        self._spare: list[DeviceEvent] = []

    def record(self, tokens: Mapping[str, int], layer: int | None, stream: object) -> None:
        """What was submitted to the stream computes so many tokens of each prompt in a layer."""
        event = self._spare.pop() if self._spare else self._make()
        event.record(stream)
        self._recorded.append(_Recorded(event, dict(tokens), layer))

    def forget(self, handoff: str) -> None:
        """What was submitted for a prompt is not reported any more: its blocks are lost."""
        for recorded in self._recorded:
            recorded.tokens.pop(handoff, None)

    @property
    def busy(self) -> bool:
        """Whether an event was recorded and not reported."""
        return bool(self._recorded)

    def poll(self) -> list[Progress]:
        """What was computed since the last call; never waits."""
        found: list[Progress] = []
        while self._recorded and self._recorded[0].event.reached:
            event, tokens, layer = self._recorded.popleft()
            if len(self._spare) < SPARE_MAX:
                self._spare.append(event)
            else:
                event.close()
            found += [Progress(handoff, layer, count) for handoff, count in tokens.items()]
        return found

    def drive(self, until: float) -> list[Progress]:
        """Looks at the next event until it has been passed, at most until then on the clock.

        It looks without pause: a layer takes a fraction of a millisecond, less than a sleeping
        thread needs to be woken, and this thread waits for the step's result anyway.
        """
        found = self.poll()
        while not found and self._recorded and self._clock() < until:
            found = self.poll()
        return found

    def close(self) -> None:
        """Gives the events back."""
        for event in (*(each.event for each in self._recorded), *self._spare):
            event.close()
        self._recorded.clear()
        self._spare.clear()


BUDGET_BYTES = 32 << 20
"""About this much is packed in one step: some milliseconds of a core."""
DRIVE_S = 200e-6
"""Only events are polled this long; then lines are, since a claim may return a berth."""
FULL_S = 0.01
"""A target that takes no notices at the moment is tried again after this."""


class _PromptBlocks(NamedTuple):
    """What the driver knows of a prompt that is computed here."""

    token_count: int
    slots: tuple[int, ...]
    """Where its blocks lie on this rank, from `first_block` on, as far as that is known."""
    keys: tuple[bytes, ...]
    first_block: int
    """Blocks before it are not here any more, or never read."""

    @property
    def known_blocks(self) -> int:
        """Leading blocks of the prompt whose place is known, or that are not here."""
        return self.first_block + len(self.slots)


class _Packed(NamedTuple):
    """A part that is in its berth."""

    name: WriteId
    sums: bytes
    notice: msg.Landed
    size: int


class _TargetArea:
    """The landing area of one target: its link, and the writes into it."""

    def __init__(self, target: Life, claim: msg.Claim, link: WriterLink, route: RouteParts) -> None:
        self.target = target
        self.route = route
        self.generation = claim.generation
        self.berth_bytes = claim.berth_bytes
        self.link = link
        self.queue: deque[Write] = deque()
        self.reading: dict[WriteId, tuple[Write, int]] = {}
        """Writes whose parts are being packed, and the bytes of each part."""
        self.packed: list[_Packed] = []
        """Parts that are in their berths: their notices are given before the step ends."""
        self.posted: dict[int, list[tuple[WriteId, bytes]]] = {}
        self.stuck = False
        """It is not connected yet, or takes no notices at the moment."""

    def holds(self, write: WriteId) -> bool:
        return self.target == write.target and self.generation == write.generation


class PrefillRankDriver(PartyDriver[PrefillRank]):
    """One rank of a prefill engine.

    Args:
        directory: who takes part.
        name: which rank this is.
        lines: its lines.
        reader: packs parts out of its slots.
        connect: makes a link to a landing area of the data transport in use.
        incarnation: of this life.
        settings: patience and bounds.
        clock: the time.
        progress: reports what the device has computed; `step` and `drive` ask it.
        budget_bytes: about how much is packed in one step, at most.
    """

    def __init__(
        self,
        directory: Directory,
        name: str,
        lines: Lines,
        *,
        reader: PartReader,
        connect: Callable[[bytes], WriterLink],
        incarnation: int,
        settings: HandoffSettings,
        clock: Callable[[], float] = time.monotonic,
        progress: LayerEvents | None = None,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        identity = directory.identity(name, incarnation)
        machine = PrefillRank(identity, settings, scheduler=directory.prefill.scheduler)
        super().__init__(machine, lines, clock=clock)
        self._directory = directory
        self._layers = _layers_of(directory, name)
        self._reader = reader
        self._connect = connect
        self._progress = progress
        self._budget_bytes = budget_bytes
        self.early_bytes = 0
        """Of `bytes_moved`, what was moved before the place of a prompt's last block was known."""
        self._prompts: dict[str, _PromptBlocks] = {}
        self._areas: dict[str, _TargetArea] = {}
        self._left: list[_TargetArea] = []
        """Areas that their targets have left."""
        self._unplaced: list[Write] = []
        """Writes into areas that this rank is not connected to."""
        self._dropped: list[WriteId] = []
        """Writes that were abandoned before their bytes were read."""

    # The engine.

    def admit(
        self,
        handoff: str,
        *,
        token_count: int,
        slots: Sequence[int],
        keys: Sequence[bytes],
        scheduler: int | None = None,
        first_block: int = 0,
    ) -> None:
        """The rank is going to compute a prompt; its blocks will lie in these slots.

        Raises `TypeError` or `ValueError`.
        """
        handoff, token_count = handoff_name(handoff), whole_number("token_count", token_count)
        numbers = slot_numbers("slots", slots, end=self._reader.slot_count)
        names = block_keys(keys)
        block_count = -(-token_count // self._directory.plan.source_tokens)
        first = whole_number("first_block", first_block, end=block_count + 1)
        if len(numbers) > block_count - first or len(names) != block_count:
            raise ValueError(
                f"slots and keys are {len(numbers)} and {len(names)}, must be at most "
                f"{block_count - first} and {block_count}: one for each block"
            )
        effects = self.machine.admit(
            handoff,
            token_count=token_count,
            layers=self._layers,
            now=self._clock(),
            scheduler=scheduler,
        )
        if handoff in self.machine.prompts:
            self._prompts[handoff] = _PromptBlocks(token_count, numbers, names, first)
        self._carry_out(effects)

    def extend(self, handoff: str, slots: Sequence[int]) -> None:
        """The next blocks of a prompt will lie in these slots.

        Raises `TypeError`: an argument is of another kind; `ValueError`: the prompt was never
        admitted, or has fewer blocks; or a slot is not one of this rank.
        """
        numbers = slot_numbers("slots", slots, end=self._reader.slot_count)
        if self.machine.require_progress(handoff, layer=None, tokens=0) is None:
            return
        prompt = self._prompts[handoff]
        missing = len(prompt.keys) - prompt.known_blocks
        if len(numbers) > missing:
            raise ValueError(f"slots are {len(numbers)}, must be at most {missing}: one a block")
        self._prompts[handoff] = prompt._replace(slots=prompt.slots + numbers)

    def restart(self, handoff: str) -> None:
        """The prompt has lost its blocks; where they lie anew, `extend` tells.

        When this returns, the blocks that it had are not read any more.
        Raises `ValueError`: the prompt was never admitted.
        """
        self._carry_out(self.machine.restart(handoff, self._clock()))
        if self._progress is not None:
            self._progress.forget(handoff)
        if handoff in self.machine.prompts:
            self._prompts[handoff] = self._prompts[handoff]._replace(slots=())

    def progress(self, handoff: str, *, layer: int, tokens: int) -> None:
        """The KV of the first `tokens` tokens *is* there in one layer.

        Raises `ValueError`: see `PrefillRank.progress`; or it is not known where these blocks lie.
        """
        now = self._clock()
        self._require_known(handoff, tokens)
        self._carry_out(self.machine.progress(handoff, layer=layer, tokens=tokens, now=now))

    def chunk_progress(self, handoff: str, *, tokens: int) -> None:
        """The KV of the first `tokens` tokens *is* there in every layer.

        Raises `ValueError`: as for `progress`.
        """
        self._require_known(handoff, tokens)
        self._carry_out(self.machine.chunk_progress(handoff, tokens=tokens, now=self._clock()))

    def submitted(self, tokens: Mapping[str, int], *, layer: int | None, stream: int) -> None:
        """What was submitted to the stream computes so many tokens of each prompt in a layer.

        Raises `ValueError`: see `PrefillRank.progress`; or the rank has no device.
        """
        if self._progress is None:
            raise ValueError(f"stream is {stream}, must be left out: the KV is not on a GPU")
        for handoff, count in tokens.items():
            self.machine.require_progress(handoff, layer=layer, tokens=count)
            self._require_known(handoff, count)
        self._progress.record(tokens, layer, stream)

    def _require_known(self, handoff: str, tokens: int) -> None:
        prompt, size = self._prompts.get(handoff), self._directory.plan.source_tokens
        if prompt is None:
            return
        known = prompt.first_block + len(prompt.slots)
        if tokens > known * size:
            raise ValueError(
                f"tokens is {tokens}, must be at most {known * size}: slots of later "
                f"blocks of {handoff!r} are not known yet"
            )

    def drive(self, until: float) -> None:
        """Sends while the engine waits for its step's result anyway.

        Returns when every event of the device has been passed, or at `until`.
        """
        source = self._progress
        if source is None:
            return
        # Parts of the last layer, too: the device packs one in less than a wait would take.
        while (source.busy or self._reader.busy) and (now := self._clock()) < until:
            self._report(source.drive(min(until, now + DRIVE_S)))
            self.step()

    @property
    def has_work(self) -> bool:
        """Whether the next step has something to do."""
        if self._ended or self._claims or self._left or self._unplaced or self._dropped:
            return True
        for area in self._areas.values():
            if (area.queue or area.posted) and not area.stuck:
                return self._reader.has_room
        return False

    def next_deadline(self) -> float | None:
        """When `step` should be called although nothing came."""
        due = super().next_deadline()
        if any(area.stuck and area.posted for area in self._areas.values()):
            soon = self._clock() + FULL_S
            return soon if due is None else min(soon, due)
        return due

    def close(self) -> None:
        """Ends lines and links: nothing is written after this returns."""
        for area in (*self._areas.values(), *self._left):
            for write in area.reading:
                self._reader.forget(write)
            area.link.close()
        self._areas.clear()
        self._left.clear()
        super().close()

    # A step.

    def _work(self, now: float) -> None:  # noqa: ARG002 - every end has its own time
        if self._progress is not None and self._progress.busy:
            self._report(self._progress.poll())
        self._pump()
        if len(self._prompts) != len(self.machine.prompts):
            self._forget_prompts()

    def _report(self, found: list[Progress]) -> None:
        for handoff, layer, tokens in found:
            if layer is None:
                self.chunk_progress(handoff, tokens=tokens)
            else:
                self.progress(handoff, layer=layer, tokens=tokens)

    def _pump(self) -> None:
        """Writes what there is to write, as far as a step goes."""
        if self._left or self._unplaced or self._dropped:
            self._leave()
        left_bytes = self._budget_bytes
        if self._reader.busy:
            for write, sums in self._reader.ended():
                self._packed(write, sums)
            for area in self._areas.values():
                if area.packed:
                    self._give_notices(area)
        moved = 1
        while moved and left_bytes > 0:
            moved = 0
            for area in [*self._areas.values()]:
                if area.queue or area.posted:
                    moved += self._advance(area, min(left_bytes, PART_BYTES_MIN))
            if self._left or self._unplaced or self._dropped:
                self._leave()
            left_bytes -= moved

    def _advance(self, area: _TargetArea, share_bytes: int) -> int:
        """Begins about so many bytes in an area, and observes those before; how many it moved."""
        moved = 0
        while area.queue and moved < share_bytes and self._reader.has_room:
            began = self._begin(area)
            moved += began
            if not began:
                break
        if area.packed:
            self._give_notices(area)
        if not area.posted:
            return moved
        ends, _ = area.link.observe(budget_bytes=self._budget_bytes)
        area.stuck = not ends
        for end in ends:
            self._end(area, end)
        return moved + len(ends)

    def _begin(self, area: _TargetArea) -> int:
        write = area.queue[0]
        name, prompt = write.write, self._prompts[write.write.handoff]
        place = area.route.place(write.grid, name.part, prompt.token_count)
        try:
            # An array, for readers on the CPU and for those of a device alike.
            window: Any = area.link.window(name.berth * area.berth_bytes, place.size)
        except UnavailableError:
            area.queue.popleft()
            self._fail(name)
            return 1
        area.stuck = window is None
        if window is None:
            return 0
        area.queue.popleft()
        blocks, first = place.source_blocks, prompt.first_block
        area.reading[name] = write, place.size
        if blocks.start < first:
            why = f"{name.handoff!r} has blocks from {first} on, {blocks.start} is wanted"
            self._refuse("block", name.target.name, why)
            # Without sums it is never found intact: its target gives the handoff up.
            self._packed(name, b"")
            return 1
        slots = prompt.slots[blocks.start - first : blocks.stop - first]
        keys = prompt.keys[blocks.start : blocks.stop]
        try:
            sums = self._reader.read(name, place.form, slots, keys, window)
        except UnavailableError as error:  # Of a device that is lost, or cannot do it.
            self._refuse("reader", name.target.name, str(error))
            del area.reading[name]
            self._fail(name)
            return 1
        except Exception as error:  # noqa: BLE001 - see tests/test_tidy.py
            # One part must not end the rank. Without sums it is never found intact, so that its
            # target asks again, and then fails this handoff and no other.
            self._fault("reader", name.target.name, name.handoff, error)
            sums = b""
        if sums is not None:
            self._packed(name, sums)
        self.bytes_moved += place.size
        if first + len(prompt.slots) < len(prompt.keys):
            self.early_bytes += place.size
        return max(place.size, 1)

    def _packed(self, name: WriteId, sums: bytes) -> None:
        """The bytes of a part are in its berth: its notice follows."""
        area = self._areas[name.target.name]
        write, size = area.reading.pop(name)
        notice = notice_of(write.source, name, sums)
        area.packed.append(_Packed(name, sums, notice, size))

    def _give_notices(self, area: _TargetArea) -> None:
        """Posts what was packed in this step: small parts share a notice."""
        packed, area.packed = area.packed, []
        if len(packed) == 1:
            name, sums, notice, size = packed[0]
            self._post(area, notice, [(name, sums)], [(name.berth * area.berth_bytes, size)])
            return
        sizes = {each.name.berth: each.size for each in packed}
        some = [(each.notice, each.size) for each in packed]
        for notice in join_notices(some, bytes_max=area.berth_bytes):
            berths = [part.berth for part in notice.parts]
            windows = [(berth * area.berth_bytes, sizes[berth]) for berth in berths]
            self._post(area, notice, writes_of(notice), windows)

    def _post(
        self,
        area: _TargetArea,
        notice: msg.Landed,
        writes: list[tuple[WriteId, bytes]],
        windows: list[tuple[int, int]],
    ) -> None:
        try:
            number = area.link.post((), seal(notice), packed=windows)
        except (UnavailableError, CapacityError):
            for name, _ in writes:
                self._fail(name)
        else:
            area.posted[number] = writes

    def _end(self, area: _TargetArea, end: WriteEnd) -> None:
        writes = area.posted.pop(end.number)
        if isinstance(end, WriteDone):
            self.parts_moved += len(writes)
            self._carry_out(self.machine.writes_done(writes, self._clock()))
        else:
            for name, _ in writes:
                self._fail(name)

    def _fail(self, name: WriteId) -> None:
        self._carry_out(self.machine.write_failed(name, self._clock()))

    # Landing areas.

    def _act(self, effect: AnyEffect) -> None:
        match effect:
            case Write(write=write):
                area = self._areas.get(write.target.name)
                if area is not None and area.holds(write):
                    area.queue.append(effect)
                else:
                    self._unplaced.append(effect)
            case AbandonWrite(write=write):
                self._abandon(write)
            case _:
                super()._act(effect)

    def _abandon(self, write: WriteId) -> None:
        """Reads nothing more for a write; one that is packed goes on.

        One in an area that was left fails in this very step, and is not read either.
        """
        area = self._areas.get(write.target.name)
        if area is None:
            return
        if write in area.reading:
            self._reader.forget(write)
            del area.reading[write]
            self._dropped.append(write)
        elif any(each.write == write for each in area.queue):
            area.queue = deque(each for each in area.queue if each.write != write)
            self._dropped.append(write)

    def _admits(self, message: msg.AnyMessage, attachment: bytes) -> bool:
        if not isinstance(message, msg.Claim):
            return True
        name = message.sender.name
        if self.machine.life_of(name) != message.sender:
            return True  # The machine refuses it, and greets.
        route = self._directory.route(self.life.name, name)
        problem = (
            "nothing is owed to it"
            if route is None
            else route.problem_of(message.grid, berth_bytes=message.berth_bytes)
        )
        if route is None or problem:
            self._refuse("claim", name, problem)
            return False
        return self._enter(message, attachment, route)

    def _enter(self, claim: msg.Claim, description: bytes, route: RouteParts) -> bool:
        """Connects to the area that a claim names, if that is a new one."""
        name = claim.sender.name
        area = self._areas.get(name)
        if area is not None and area.target == claim.sender and claim.generation <= area.generation:
            return True
        try:
            link = self._connect(description)
        except (ValueError, UnavailableError) as error:
            self._refuse("area", name, str(error))
            return False
        try:
            link.window(0, claim.berth_count * claim.berth_bytes)
        except (ValueError, UnavailableError) as error:
            link.close()
            self._refuse("area", name, str(error))
            return False
        if area is not None:
            self._left.append(area)
        self._areas[name] = _TargetArea(claim.sender, claim, link, route)
        return True

    def _leave(self) -> None:
        """Closes the areas that their targets left, and fails the writes into them."""
        while self._dropped:
            self._carry_out(self.machine.write_dropped(self._dropped.pop(), self._clock()))
        while self._left or self._unplaced:
            areas, self._left = self._left, []
            writes, self._unplaced = [each.write for each in self._unplaced], []
            for area in areas:
                for name in area.reading:
                    self._reader.forget(name)
                area.link.close()
                writes += [*area.reading, *(each.write for each in area.queue)]
                writes += [name for each in area.posted.values() for name, _ in each]
            for name in writes:
                self._fail(name)

    def _forget_prompts(self) -> None:
        """Forgets prompts that were released and are not read any more."""
        read = {each.write.handoff for area in self._areas.values() for each in area.queue}
        for handoff in [*self._prompts]:
            if handoff not in self.machine.prompts and handoff not in read:
                del self._prompts[handoff]

    def _descriptors(self) -> Sequence[int]:
        """Links that wait for their memory, and parts that the device packs."""
        found = [area.link.descriptor for area in self._areas.values() if area.stuck]
        if self._reader.busy:
            found.append(self._reader.descriptor)
        return [each for each in found if each is not None]


def _layers_of(directory: Directory, name: str) -> range:
    numbers = [layer.number for layer in directory.place_of(name).form.layout.layers]
    return range(min(numbers), max(numbers) + 1)
