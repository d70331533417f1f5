"""The driver of a decode rank: landing areas, notices, and parts that are verified and put away.

    notice ─→ machine ─→ Take ─→ copied out of its berth, verified, into the slots ─→ machine

The one rule: memory of an area goes back to the transport only when the machine asks for it, and
the machine learns that a fence holds only from the transport.
"""

from __future__ import annotations

import math
import time
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ConfigError, PeerError, UnavailableError
from penstock.handoff.driver.party_driver import Content, PartyDriver, decode_content, unseal
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.decode_rank import DecodeRank
from penstock.handoff.protocol.effects import Fence, FreeArea, OpenArea, Take
from penstock.transport.remote import Fenced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.handoff.driver.directory import Directory
    from penstock.handoff.driver.lines import Lines
    from penstock.handoff.driver.parts import PartTaker, RouteParts
    from penstock.handoff.protocol.effects import AnyEffect
    from penstock.handoff.protocol.identity import Life
    from penstock.handoff.protocol.settings import HandoffSettings
    from penstock.transport.remote import Area, Notice, Target

BUDGET_BYTES = 32 << 20
"""About this much is verified and put away in one step: some milliseconds of a core."""
FENCE_S = 0.05
"""A fence that nothing wakes us for is looked at again after this."""
CLAIM_S = 0.05
"""The end of a part may wait this long for the next notice, and its berth for others to be returned
in the same claim; but no longer than a quarter of the time after which its source asks again."""
KEPT_BACK = 2
"""At most one in this many berths of a source is kept back: it has enough to go on with."""


class _KeptBack(NamedTuple):
    """Free berths of a source that were not returned to it yet."""

    berths: int
    since: float


class _Expected(NamedTuple):
    """What is known of a handoff that this rank collects."""

    content: Content
    slots: tuple[int, ...]
    block_first: int
    """The first missing block, in blocks of the target."""
    key_first: int
    """The same in blocks of the source."""
    routes: dict[str, RouteParts]
    """From each source, by its name."""


class DecodeRankDriver(PartyDriver[DecodeRank]):
    """One rank of a decode engine.

    Args:
        directory: who takes part.
        name: which rank this is.
        lines: its lines.
        taker: verifies parts and puts them into its slots.
        target: where areas come from: the data transport in use.
        incarnation: of this life.
        settings: patience and bounds.
        clock: the time.
        budget_bytes: about how much is put away in one step, at most.
    """

    def __init__(
        self,
        directory: Directory,
        name: str,
        lines: Lines,
        *,
        taker: PartTaker,
        target: Target,
        incarnation: int,
        settings: HandoffSettings,
        clock: Callable[[], float] = time.monotonic,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        identity = directory.identity(name, incarnation)
        machine = DecodeRank(identity, settings, scheduler=directory.decode.scheduler)
        super().__init__(machine, lines, clock=clock)
        self._directory = directory
        self._taker = taker
        self._target = target
        self._budget_bytes = budget_bytes
        self._expected: dict[tuple[str, int], _Expected] = {}
        self._areas: dict[tuple[Life, int], Area] = {}
        self._owners: dict[int, tuple[Life, int]] = {}
        """Whose an area of the transport is, by its identity."""
        self._fences: list[Fence] = []
        self._takes: deque[Take] = deque()
        self._taking_since = 0.0
        """Since when no end of a part was collected, or none is under way."""
        self._watches_taker = False
        """Whether the end of a part wakes us up."""
        self._claim_s = min(CLAIM_S, settings.times.resend_s / 4)
        self._kept_back: dict[str, _KeptBack] = {}
        self._unopened: deque[tuple[Life, int, str]] = deque()
        """Areas for which there was no memory, and why."""

    @property
    def landing_bytes(self) -> int:
        """Bytes of landing areas, open and retired ones."""
        return self._target.open_bytes + self._target.retired_bytes

    @property
    def has_work(self) -> bool:
        """Whether the next step has something to do."""
        if self._ended or self._claims:
            return True
        return bool(self._takes) and self._taker.has_room

    def next_deadline(self) -> float | None:
        """When `step` should be called although nothing came."""
        known = super().next_deadline()
        due = math.inf if known is None else known
        if self._is_taking and not self._watches_taker:
            due = min(due, self._taking_since + self._claim_s)
        if self._fences and not self._target.watches_fences:
            due = min(due, self._clock() + FENCE_S)
        if self._held and self._kept_back:
            for kept in self._kept_back.values():
                due = min(due, self._claim_s + kept.since)
        return None if due == math.inf else due

    # A step.

    def _work(self, now: float) -> None:
        for notice in self._target.notices():
            self._on_notice(notice, now)
        if len(self.machine.takes) == len(self._takes):
            self._taking_since = now
        elif ended := self._taker.ended():
            self._taken([take for take, intact in ended if intact])
            for take, intact in ended:
                if not intact:
                    self._spoiled(take)
            self._taking_since = now
        left_bytes = self._budget_bytes
        while self._takes and left_bytes > 0 and self._taker.has_room:
            left_bytes -= self._begin(self._takes.popleft())
        if self._fences:
            self._look_at_fences(now)
        if len(self._expected) > len(self.machine.collections):
            for key in [key for key in self._expected if key not in self.machine.collections]:
                del self._expected[key]

    def _on_notice(self, notice: Notice, now: float) -> None:
        peer, generation = self._owners[id(notice.area)]
        try:
            message = unseal(notice.payload).message
        except PeerError as error:
            self._refuse("garbage", peer.name, str(error))
            return
        if not isinstance(message, msg.Landed):
            self._refuse("notice", peer.name, f"{type(message).__name__} is none")
        elif message.sender != peer or message.generation != generation:
            self._refuse("notice", peer.name, f"of {message.sender}, area {message.generation}")
        else:
            self._liveness.record_message(peer.name, now)
            self._carry_out(self.machine.receive(message, now))

    def _begin(self, take: Take) -> int:
        """Verifies a part and puts it away; its size."""
        expected = self._expected[take.handoff, take.epoch]
        route = expected.routes[take.source.name]
        place = route.place(take.grid, take.part, expected.content.token_count)
        area = self._areas[take.source, take.generation]
        first = take.berth * self.machine.settings.bounds.berth_bytes
        memory = area.memory[first : first + place.size]
        sources, targets = place.source_blocks, place.target_blocks
        at, slot = expected.key_first, expected.block_first
        keys = expected.content.keys[sources.start - at : sources.stop - at]
        slots = expected.slots[targets.start - slot : targets.stop - slot]
        try:
            intact = self._taker.take(take, route, place.form, memory, keys, slots)
        except Exception as error:  # noqa: BLE001 - see tests/test_tidy.py
            # One part must not end the rank and with it every other handoff.
            self._fault("taker", take.source.name, take.handoff, error)
            why = f"{type(error).__name__}: {error}"
            self._carry_out(self.machine.take_failed(take, self._clock(), why=why))
        else:
            if intact:
                self._taken([take])
            elif intact is not None:
                self._spoiled(take)
        self.bytes_moved += place.size
        return max(place.size, 1)

    @property
    def _is_taking(self) -> bool:
        """Whether a part was begun and has not ended."""
        return len(self.machine.takes) > len(self._takes)

    def _waits_for_takes(self) -> bool:
        """Whether something goes on when a part is put away.

        While other parts of its handoff are on their way and their source has berths enough, its
        end waits for the next of them, and the engine's thread is not woken up twice for each.
        """
        machine = self.machine
        if (
            machine.retired
            or self._takes
            or self._clock() >= self._taking_since + self._claim_s
            or len(machine.takes) * KEPT_BACK >= machine.settings.bounds.berth_count
        ):
            return True
        seen = set()
        for take in machine.takes.values():
            key = (take.handoff, take.epoch)
            if key not in seen and machine.collections[key].waits_for_moves:
                return True
            seen.add(key)
        return False

    def _taken(self, takes: list[Take]) -> None:
        """Parts are in their slots: their sources get the berths back, in one claim each."""
        self.parts_moved += len(takes)
        for take in takes:
            kept = self._kept_back.get(take.source.name, _KeptBack(0, self._taking_since))
            self._kept_back[take.source.name] = _KeptBack(kept.berths + 1, kept.since)
        self._carry_out(self.machine.parts_taken(takes, self._clock()))

    def _spoiled(self, take: Take) -> None:
        self._kept_back.pop(take.source.name, None)  # It is asked for again at once.
        self._carry_out(self.machine.part_spoiled(take, self._clock()))

    def _can_wait(self, claim: msg.Claim) -> bool:
        """Whether a claim does nothing but return some berths, of which the source has enough.

        A claim that reports the last part does not wait, nor one that asks for something. All
        claims wait for an area of which the transport has no description yet.
        """
        area = self._areas.get((claim.target, claim.generation))
        if area is not None and not area.ready:
            return True
        name = claim.target.name
        kept = self._kept_back.get(name)
        collection = self.machine.collections.get((claim.handoff, claim.epoch))
        source = None if collection is None else collection.source(name)
        return (
            kept is not None
            and source is not None
            and not source.is_complete
            and kept.berths * KEPT_BACK < claim.berth_count
            and self._clock() < kept.since + self._claim_s
        )

    def _send_claims(self) -> None:
        for key, broken in self._areas.items():
            if broken.failure:
                self._unopened.append((*key, broken.failure))
        while self._unopened:
            peer, generation, why = self._unopened.popleft()
            area = self.machine.areas.get(peer.name)
            if (
                area is not None
                and area.open
                and (area.peer, area.generation) == (peer, generation)
            ):
                effects = self.machine.area_failed(peer, generation, self._clock(), why=why)
                self._carry_out(effects)
        for at, claim in [*self._claims.items()]:
            if (claim.target, claim.generation) not in self._areas:
                del self._claims[at]  # Nobody can write to an area that is not there.
        super()._send_claims()
        if self._kept_back:
            for name in self._kept_back.keys() - map(itemgetter(0), self._held):
                del self._kept_back[name]

    # What is expected.

    def _admits(self, message: msg.AnyMessage, attachment: bytes) -> bool:
        if not isinstance(message, msg.Expect):
            return True
        key = (message.handoff, message.epoch)
        if key in self.machine.collections:
            return True
        try:
            expected = self._read(message, attachment)
        except PeerError as error:
            self._refuse("expect", message.sender.name, str(error))
            self._carry_out(self.machine.reject(message, self._clock(), why=str(error)))
            return False
        self._expected[key] = expected
        return True

    def _read(self, expect: msg.Expect, attachment: bytes) -> _Expected:
        """What is expected, if it makes sense."""
        content = decode_content(attachment)
        plan = self._directory.plan
        firsts = {grid.block_first for _, grid in expect.sources}
        routes = {}
        for source, grid in expect.sources:
            route = self._directory.route(source, self.life.name)
            if route is None:
                raise PeerError(f"{source!r} owes nothing to {self.life.name!r}")
            routes[source] = route
            berth_bytes = self.machine.settings.bounds.berth_bytes
            problem = route.problem_of(grid, berth_bytes=berth_bytes)
            units = -(-content.token_count // plan.unit_tokens)
            if not problem and grid.block_first + grid.block_count != units:
                problem = f"blocks up to {grid.block_first + grid.block_count}, must be {units}"
            if problem:
                raise PeerError(f"grid of {source!r}: {problem}")
        if len(firsts) > 1:
            raise PeerError(f"grids begin with blocks {sorted(firsts)}, must be one")
        first_token = min(firsts, default=0) * plan.unit_tokens
        block_first = first_token // plan.target_tokens
        key_first = first_token // plan.source_tokens
        if expect.sources:
            slots = -(-content.token_count // plan.target_tokens) - block_first
            keys = -(-content.token_count // plan.source_tokens) - key_first
            if len(expect.slots) != slots or len(content.keys) != keys:
                raise PeerError(
                    f"{len(expect.slots)} slots and {len(content.keys)} keys, must be {slots} "
                    f"and {keys}"
                )
        last = self._taker.slot_count - 1
        if any(slot > last for slot in expect.slots):
            raise PeerError(
                f"slot is {max(expect.slots)}, must be from 0 to {last} on {self.life.name!r}"
            )
        return _Expected(content, expect.slots, block_first, key_first, routes)

    def _attach(self, message: msg.AnyMessage) -> bytes:
        if not isinstance(message, msg.Claim):
            return b""
        area = self._areas.get((message.target, message.generation))
        return b"" if area is None else area.description

    # Areas.

    def _act(self, effect: AnyEffect) -> None:
        match effect:
            case Take():
                self._takes.append(effect)
            case OpenArea():
                self._open(effect)
            case Fence():
                self._retire(effect)
            case FreeArea():
                self._free(effect)
            case _:
                super()._act(effect)

    def _open(self, effect: OpenArea) -> None:
        size = effect.berth_count * effect.berth_bytes
        try:
            area = self._target.open_area(str(effect.peer), size)
        except (UnavailableError, ConfigError, OSError, MemoryError) as error:
            # The machine gets it after the effects of its last input were carried out.
            self._refuse("no memory", effect.peer.name, str(error))
            self._unopened.append((effect.peer, effect.generation, str(error)))
            return
        self._areas[effect.peer, effect.generation] = area
        self._owners[id(area)] = (effect.peer, effect.generation)

    def _retire(self, fence: Fence) -> None:
        area = self._areas.get((fence.peer, fence.generation))
        if area is not None:
            self._target.retire(area)
        self._fences.append(fence)

    def _look_at_fences(self, now: float) -> None:
        waiting, self._fences = self._fences, []
        for fence in waiting:
            area = self._areas.get((fence.peer, fence.generation))
            if area is None or isinstance(self._target.fence(area), Fenced):
                self._carry_out(self.machine.fenced(fence.peer, fence.generation, now))
            else:
                self._fences.append(fence)

    def _free(self, effect: FreeArea) -> None:
        area = self._areas.pop((effect.peer, effect.generation), None)
        if area is not None:
            del self._owners[id(area)]
            self._target.free(area)

    def _descriptors(self) -> Sequence[int]:
        """Notices that arrive, and writers that die."""
        own = self._target.descriptor
        found = [] if own is None else [own]
        self._watches_taker = self._is_taking and self._waits_for_takes()
        if self._watches_taker:
            found.append(self._taker.descriptor)
        for fence in self._fences:
            area = self._areas.get((fence.peer, fence.generation))
            pidfd = None if area is None else self._target.fence_descriptor(area)
            if pidfd is not None:
                found.append(pidfd)
        return found
