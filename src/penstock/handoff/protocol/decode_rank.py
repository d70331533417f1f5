"""The decode rank: claims parts, takes them out of landing areas, and reports when all are there.

P11: a part is in `have` only after its bytes were verified and moved, and a handoff is complete
only when the set of every source is.

A claim carries all that the rank wants of a source and all that it has of it. It is sent when a
handoff begins, whenever a part was taken, and again when no answer came. So it is request,
acknowledgement and return of credit in one, and losing it costs only time (P3, P9).

Each life of each source rank writes into a landing area of its own, so that a late write of one
cannot hurt another. An area is *retired* when its writer is silent, started again or reports that
a write failed. Nothing that comes from it is used any more, but its memory is kept: a timeout here
does not stop the writer. It is given back when the transport's fence holds.

Invariants:

- A part counts when its bytes were verified and moved, not when a message says so (P11).
- Nothing of a handoff that was dropped touches its slots any more; and a scheduler that started
  again gets no answer while a move for its earlier life goes on (P13).
- What a rank does for one source does not depend on another (P1, P20).
- The memory of an area is given back only when it is fenced and none of our own moves reads it;
  all areas together stay within `landing_bytes_max` (P18, P19).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import InvariantViolation
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.effects import Fence, FreeArea, OpenArea, Send, Take
from penstock.handoff.protocol.grid import to_bytes
from penstock.handoff.protocol.party import Party
from penstock.handoff.protocol.states import (
    TARGET_MOVES,
    ReportStatus,
    Role,
    TargetMove,
    TargetState,
    advance,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.handoff.protocol.effects import AnyEffect
    from penstock.handoff.protocol.grid import Grid
    from penstock.handoff.protocol.identity import Identity, Life
    from penstock.handoff.protocol.party import TimerKey
    from penstock.handoff.protocol.settings import HandoffSettings


class LandingArea(NamedTuple):
    """The landing area of one life of one source; `open` until it is retired."""

    peer: Life
    generation: int
    """Counted per life, and never given twice."""
    open: bool


class Berth(NamedTuple):
    """One place in an area."""

    peer: Life
    generation: int
    berth: int


class SourceState(NamedTuple):
    """What is wanted of one source rank, and what is there."""

    name: str
    grid: Grid
    claimed: int = 0
    """The incarnation that parts were claimed from; 0 when nothing was, or it has stopped."""
    have: int = 0
    """The set of parts that are verified and in their slots."""
    under_way: int = 0
    """The set of parts that our mover is at work on."""
    bad: tuple[int, ...] = ()
    """Parts whose first attempt was not intact; then their second; and so on."""

    @property
    def is_complete(self) -> bool:
        """Whether every part is there."""
        return self.have == self.grid.everything

    def waits_for(self, part: int, attempt: int) -> bool:
        """Whether a part is missing, and this is the attempt at it that we wait for."""
        failed = sum([bad >> part & 1 for bad in self.bad]) if self.bad else 0
        return not self.have >> part & 1 and attempt == failed

    def with_parts(self, more: int, under_way: int) -> SourceState:
        """The source with more parts, and others under way."""
        # Written out because it is done for every part: `_replace` takes four times as long.
        have = self.have | more
        return SourceState(self.name, self.grid, self.claimed, have, under_way, self.bad)

    def with_spoiled(self, part: int, attempt: int) -> SourceState:
        """The source after an attempt at a part was not intact."""
        bad = [*self.bad, *(0 for _ in range(attempt + 1 - len(self.bad)))]
        bad[attempt] |= 1 << part
        return self._replace(bad=tuple(bad), under_way=self.under_way & ~(1 << part))


class Collection(NamedTuple):
    """One handoff with one decode rank."""

    state: TargetState
    sources: tuple[SourceState, ...]
    scheduler: int
    """The incarnation of the scheduler whose slots these are."""
    why: str = ""
    poison_count: int = 0
    """How many areas failed under it."""

    @property
    def is_complete(self) -> bool:
        """Whether every part of every source is there."""
        return all(source.is_complete for source in self.sources)

    @property
    def is_moving(self) -> bool:
        """Whether our mover is at work on a part of it."""
        return any(source.under_way for source in self.sources)

    @property
    def waits_for_moves(self) -> bool:
        """Whether it goes on only when a move has ended: no notice is still to come."""
        collecting = self.state is TargetState.COLLECTING
        moving = 0
        for source in self.sources:
            moving |= source.under_way
            if collecting and source.have | source.under_way != source.grid.everything:
                return False
        return moving != 0

    def source(self, name: str) -> SourceState | None:
        """One source, if it is one."""
        for source in self.sources:
            if source.name == name:
                return source
        return None

    def source_named(self, name: str) -> SourceState:
        """One source that there is."""
        for source in self.sources:
            if source.name == name:
                return source
        raise InvariantViolation(f"{name} is not one of the sources")

    def lacks(self, name: str) -> bool:
        """Whether something of this source is missing."""
        source = self.source(name)
        return source is not None and not source.is_complete

    def with_source(self, changed: SourceState) -> Collection:
        """After something of a source has changed."""
        sources: tuple[SourceState, ...] = (changed,)
        if len(self.sources) > 1:
            sources = tuple(
                [changed if each.name == changed.name else each for each in self.sources]
            )
        return Collection(self.state, sources, self.scheduler, self.why, self.poison_count)


Key = tuple[str, int]
"""A handoff and an epoch."""


class DecodeRank(Party):
    """One rank of a decode engine."""

    role = Role.DECODE_RANK

    def __init__(self, identity: Identity, settings: HandoffSettings, *, scheduler: str) -> None:
        super().__init__(identity, settings)
        self.scheduler = scheduler
        self.collections: dict[Key, Collection] = {}
        self.areas: dict[str, LandingArea] = {}
        """The latest area of each source, by its name."""
        self.retired: dict[tuple[Life, int], bool] = {}
        """Areas that are not used any more, and whether the fence holds."""
        self.takes: dict[Berth, Take] = {}
        """Our own moves out of berths."""

    # The local world.

    def parts_taken(self, takes: Sequence[Take], now: float) -> list[AnyEffect]:
        """Parts were verified and are in their slots: one claim answers all those of a source.

        Raises `ValueError`: one of them is not under way, or is named twice; nothing has changed
        then.
        """
        berths = [*map(self._berth_under_way, takes)]
        if len({*berths}) < len(berths):
            raise ValueError(f"{len(berths)} takes name a berth twice")
        self._start(now)
        together: dict[tuple[Key, str], list[Take]] = {}
        for berth, take in zip(berths, takes, strict=True):
            del self.takes[berth]
            place = (take.handoff, take.epoch), take.source.name
            together.setdefault(place, []).append(take)
        self._count("parts taken", len(berths))
        if self.retired:
            for area in dict.fromkeys((berth.peer, berth.generation) for berth in berths):
                self._free_if_unused(*area)
        for (key, name), some in together.items():
            parts = 0
            for take in some:
                parts |= 1 << take.part
            collection = self.collections[key]
            source = collection.source_named(name)
            source = source.with_parts(parts, source.under_way & ~parts)
            self.collections[key] = collection.with_source(source)
            self._after_takes(key, name, len(some), complete=source.is_complete)
        return self.effects

    def part_spoiled(self, take: Take, now: float) -> list[AnyEffect]:
        """A part was not intact: it is asked for again, or the handoff fails.

        Raises `ValueError`: that is not under way.
        """
        self._end_take(take, now)
        self._count("parts spoiled")
        key = (take.handoff, take.epoch)
        collection = self.collections[key]
        source = collection.source_named(take.source.name)
        collection = collection.with_source(source.with_spoiled(take.part, take.attempt))
        self.collections[key] = collection
        attempts = self.settings.bounds.attempt_count_max
        if collection.state is TargetState.COLLECTING and take.attempt + 1 >= attempts:
            self._fail(
                key, f"part {take.part} of {take.source.name} was not intact {attempts} times"
            )
        self._after_takes(key, take.source.name)
        return self.effects

    def take_failed(self, take: Take, now: float, *, why: str) -> list[AnyEffect]:
        """Our mover could not take a part, whatever its bytes are: the handoff fails (P11).

        Raises `ValueError`: that is not under way.
        """
        self._end_take(take, now)
        self._count("parts not taken")
        key = (take.handoff, take.epoch)
        collection = self.collections[key]
        source = collection.source_named(take.source.name)
        source = source.with_parts(0, source.under_way & ~(1 << take.part))
        self.collections[key] = collection.with_source(source)
        self._fail_if_collecting(
            key, f"part {take.part} of {take.source.name} could not be taken: {why}"
        )
        self._after_takes(key, take.source.name)
        return self.effects

    def reject(self, expect: msg.Expect, now: float, *, why: str) -> list[AnyEffect]:
        """Answers an `Expect` that this rank cannot carry out: the handoff fails at once.

        Nothing is kept of it, so a repeated `Expect` gets the same answer.
        """
        self._start(now)
        if self._acceptable(expect) and expect.sender.name == self.scheduler:
            self._count("claims rejected")
            self._report((expect.handoff, expect.epoch), ReportStatus.FAILED, why)
        return self.effects

    def area_failed(self, peer: Life, generation: int, now: float, *, why: str) -> list[AnyEffect]:
        """There was no memory for an area: the handoffs that need it fail over (P18).

        Nothing was given away, so its fence holds at once; the next handoff tries another area.
        Raises `ValueError`: no such area is open.
        """
        area = self.areas.get(peer.name)
        if area is None or not area.open or (area.peer, area.generation) != (peer, generation):
            raise ValueError(f"area {generation} of {peer} is not open")
        self._start(now)
        self._count("areas failed")
        self._retire(peer.name)
        for key in self._waiting_for(peer.name):
            self._fail(key, f"no landing area for {peer.name}: {why}")
        return self.effects

    def fenced(self, peer: Life, generation: int, now: float) -> list[AnyEffect]:
        """The transport's fence holds: this life can write to this area no more.

        Raises `ValueError`: no such area is retired.
        """
        if (peer, generation) not in self.retired:
            raise ValueError(f"area {generation} of {peer} is not retired")
        self._start(now)
        self.retired[peer, generation] = True
        self._free_if_unused(peer, generation)
        return self.effects

    @property
    def open_bytes(self) -> int:
        """Bytes of areas that are in use."""
        return sum(area.open for area in self.areas.values()) * self.settings.bounds.area_bytes

    @property
    def retired_bytes(self) -> int:
        """Bytes of areas that wait for a fence."""
        return len(self.retired) * self.settings.bounds.area_bytes

    # Messages.

    def _on_message(self, message: msg.AnyMessage) -> None:
        from_scheduler = message.sender.name == self.scheduler
        match message:
            case msg.Expect() | msg.DropHandoff() if (
                from_scheduler and self._moves_for_an_earlier_life()
            ):
                self._refuse("moves for an earlier life")
            case msg.Expect() if from_scheduler:
                self._on_expect(message)
            case msg.DropHandoff() if from_scheduler:
                self._on_drop(message)
            case msg.Landed() if not from_scheduler:
                self._on_landed(message)
            case msg.Stopped() if not from_scheduler:
                self._on_stopped(message)
            case msg.Poisoned() if not from_scheduler:
                self._poisoned(message.sender.name, message.generation)
            case _:
                self._refuse("not for this role")

    def _moves_for_an_earlier_life(self) -> bool:
        """Whether a move touches slots that the scheduler's present life thinks are free.

        It may have given them away again, so it gets no answer until the move has ended. It
        resends.
        """
        present = self.life_of(self.scheduler).incarnation
        return any(
            collection.scheduler != present and collection.is_moving
            for collection in self.collections.values()
        )

    def _on_expect(self, expect: msg.Expect) -> None:
        key = (expect.handoff, expect.epoch)
        if key in self.collections:
            self._repeat_report(key)
        elif expect.epoch <= self._dropped_epoch(expect.handoff):
            # Its own drop overtook it, and the report of that may be lost.
            self._report(key, ReportStatus.DROPPED)
        elif len(self.collections) >= self.settings.bounds.handoff_count_max:
            self._refuse("too many handoffs")
        else:
            sources = tuple(SourceState(name, grid) for name, grid in expect.sources)
            self.collections[key] = Collection(
                TargetState.COLLECTING, sources, expect.sender.incarnation
            )
            problem = self._problem_of(sources)
            if problem:
                self._fail(key, problem)
            else:
                self._begin(key)

    def _problem_of(self, sources: tuple[SourceState, ...]) -> str:
        """Why parts cannot be collected like this, if they cannot."""
        berth_bytes = self.settings.bounds.berth_bytes
        if len({source.name for source in sources}) < len(sources):
            return "a source is named twice"
        for source in sources:
            if source.grid.problem():
                return source.grid.problem()
            if source.grid.part_bytes > berth_bytes:
                return f"parts have {source.grid.part_bytes} bytes, a berth has {berth_bytes}"
        return ""

    def _on_drop(self, drop: msg.DropHandoff) -> None:
        key = (drop.handoff, drop.epoch)
        self._remember_drop(key)
        collection = self.collections.get(key)
        if collection is None or collection.state is TargetState.STOPPING:
            self._report(key, ReportStatus.DROPPED)
        elif collection.state is not TargetState.DROPPING:
            self._drop(key)

    def _on_landed(self, landed: msg.Landed) -> None:
        name = landed.sender.name
        key = (landed.handoff, landed.epoch)
        collection = self.collections.get(key)
        source = collection.source(name) if collection is not None else None
        if collection is None or source is None or collection.state is TargetState.STOPPING:
            # Nothing of ours reads it, so its berth can be the writer's again.
            self._stop(key, name)
        elif not self._is_open_area(name, landed.generation):
            self._refuse("into an area that is not open")
            if collection.state is TargetState.COLLECTING:
                self._claim(key, name)
            elif collection.state is TargetState.COMPLETE:
                self._stop(key, name)
        else:
            known = 0
            for part in landed.parts:
                known += self._on_part(key, landed, part)
            if known:
                self._claim(key, name)

    def _is_open_area(self, name: str, generation: int) -> bool:
        area = self.areas.get(name)
        return area is not None and area.open and area.generation == generation

    def _on_part(self, key: Key, landed: msg.Landed, part: msg.LandedPart) -> bool:
        """Takes a part that is missing, unless its notice is here for the second time.

        Whether its writer is to be told that this attempt at it is not waited for.
        """
        collection, name = self.collections[key], landed.sender.name
        source = collection.source_named(name)
        berth = Berth(landed.sender, landed.generation, part.berth)
        if not source.grid.everything >> part.part & 1:
            self._refuse("of a part that is not in the grid")
        elif not 0 <= part.berth < self.settings.bounds.berth_count:
            self._refuse("into a berth that is not in the area")
        elif not source.waits_for(part.part, part.attempt):
            return True
        elif collection.state is not TargetState.COLLECTING:
            pass
        elif source.under_way >> part.part & 1:
            self._count("notices repeated")
        elif berth in self.takes:
            self._refuse("into a berth that is in use")
        else:
            source = source.with_parts(0, source.under_way | 1 << part.part)
            self.collections[key] = collection.with_source(source)
            take = Take(
                handoff=landed.handoff,
                epoch=landed.epoch,
                source=landed.sender,
                generation=landed.generation,
                berth=part.berth,
                grid=source.grid,
                part=part.part,
                attempt=part.attempt,
                sums=part.sums,
            )
            self.takes[berth] = take
            self.effects.append(take)
        return False

    def _on_stopped(self, stopped: msg.Stopped) -> None:
        key, name = (stopped.handoff, stopped.epoch), stopped.sender.name
        if stopped.poisoned and self._is_open_area(name, stopped.generation):
            self._poisoned(name, stopped.generation)
        self._answered(name, ("stop", key))
        self._source_stopped(key, name)

    # Collecting.

    def _begin(self, key: Key) -> None:
        self._claim_missing(key)
        self._check_complete(key)
        self._keep_asking(key)

    def _claim_missing(self, key: Key) -> None:
        """Asks every source for what it still owes, unless one of them cannot be asked."""
        for source in self.collections[key].sources:
            if self.collections[key].state is TargetState.COLLECTING and not source.is_complete:
                self._claim(key, source.name)

    def _claim(self, key: Key, name: str) -> None:
        """Sends a source what is wanted of it and what is there."""
        if not self.is_open(name):
            if self.collections[key].state is TargetState.COLLECTING:
                self._greet(self.life_of(name))
            return
        area = self._area_of(name)
        if area is None:
            self._fail_if_collecting(
                key, f"no landing area for {name}: {self.retired_bytes} bytes are retired"
            )
            return
        collection = self.collections[key]
        source = collection.source_named(name)
        if source.claimed != area.peer.incarnation:
            source = source._replace(claimed=area.peer.incarnation)
            self.collections[key] = collection.with_source(source)
        bounds = self.settings.bounds
        claim = msg.Claim(
            sender=self.life,
            target=area.peer,
            handoff=key[0],
            epoch=key[1],
            generation=area.generation,
            berth_count=bounds.berth_count,
            berth_bytes=bounds.berth_bytes,
            grid=source.grid,
            have=to_bytes(source.have),
            spoiled=tuple([to_bytes(each) for each in source.bad]) if source.bad else (),
        )
        self.effects.append(Send(message=claim))

    def _after_takes(self, key: Key, name: str, count: int = 1, *, complete: bool = False) -> None:
        """Moves have ended: the source gets its credit back, and we see how far we are."""
        collection = self.collections[key]
        match collection.state:
            case TargetState.COLLECTING:
                timer = _resend(key)
                self._claim(key, name)
                self._hasten(timer, count)
                if complete:
                    self._check_complete(key)
                if complete or timer not in self.timers:
                    self._keep_asking(key)
            case TargetState.DROPPING:
                self._stop_if_still(key)
            case _:
                pass

    def _check_complete(self, key: Key) -> None:
        collection = self.collections[key]
        if collection.state is TargetState.COLLECTING and collection.is_complete:
            self._move(key, TargetMove.LAST_PART)
            self._count("completed")
            self._report(key, ReportStatus.COMPLETE)

    def _fail(self, key: Key, why: str) -> None:
        """Gives a handoff up; the scheduler will drop it on every rank."""
        self._move(key, TargetMove.FAIL)
        self.collections[key] = self.collections[key]._replace(why=why[:512])
        self._count("failed")
        self._disarm(_resend(key))
        self._report(key, ReportStatus.FAILED, why)

    def _fail_if_collecting(self, key: Key, why: str) -> None:
        if self.collections[key].state is TargetState.COLLECTING:
            self._fail(key, why)

    # Dropping.

    def _drop(self, key: Key) -> None:
        collection = self.collections[key]
        self._disarm(_resend(key))
        self._move(key, TargetMove.DROP)
        if collection.state is TargetState.COMPLETE:
            del self.collections[key]
            self._report(key, ReportStatus.DROPPED)
        else:
            self._stop_if_still(key)

    def _stop_if_still(self, key: Key) -> None:
        """Once none of our moves touches its slots: reports so, and stops the sources."""
        collection = self.collections[key]
        if collection.is_moving:
            return
        self._move(key, TargetMove.LAST_MOVE)
        self._report(key, ReportStatus.DROPPED)
        for source in collection.sources:
            if source.is_complete or not source.claimed or not self.is_open(source.name):
                self._source_stopped(key, source.name)
            else:
                self._stop(key, source.name)
                self._asked(source.name, ("stop", key))
        if not collection.sources:
            self._source_stopped(key, "")
        self._keep_asking(key)

    def _stop(self, key: Key, name: str) -> None:
        self._send(
            msg.Stop(sender=self.life, target=self.life_of(name), handoff=key[0], epoch=key[1])
        )

    def _source_stopped(self, key: Key, name: str) -> None:
        """A source writes nothing more for it; after the last one it is forgotten."""
        collection = self.collections.get(key)
        if collection is None or collection.state is not TargetState.STOPPING:
            return
        source = collection.source(name)
        if source is not None:
            collection = collection.with_source(source._replace(claimed=0))
            self.collections[key] = collection
        self._hasten(_resend(key))
        if not any(source.claimed for source in collection.sources):
            self._move(key, TargetMove.ALL_STOPPED)
            del self.collections[key]
            self._disarm(_resend(key))

    # Landing areas.

    def _area_of(self, name: str) -> LandingArea | None:
        """The area that a source's current life writes to; a new one, if there is room."""
        known, area = self.peers.get(name), self.areas.get(name)
        if (
            area is not None
            and area.open
            and known is not None
            and area.peer.incarnation == known.incarnation
        ):
            return area
        peer = self.life_of(name)
        bounds = self.settings.bounds
        if not self._has_room_for(name):
            return None
        before = area.generation if area is not None and area.peer == peer else 0
        area = LandingArea(peer, before + 1, open=True)
        self.areas[name] = area
        self._count("areas opened")
        self.effects.append(
            OpenArea(
                peer=peer,
                generation=area.generation,
                berth_count=bounds.berth_count,
                berth_bytes=bounds.berth_bytes,
            )
        )
        return area

    def _has_room_for(self, name: str) -> bool:
        """Whether one more area of a peer may be opened: not while much is retired."""
        bounds = self.settings.bounds
        retired = sum(peer.name == name for peer, _ in self.retired)
        every_bytes = self.open_bytes + self.retired_bytes
        return (
            retired < bounds.retired_count_max
            and self.retired_bytes + bounds.area_bytes <= bounds.retired_bytes_max
            and every_bytes + bounds.area_bytes <= bounds.landing_bytes_max
        )

    def _retire(self, name: str) -> None:
        """Stops using an area, without giving its memory back."""
        area = self.areas.get(name)
        if area is None or not area.open:
            return
        self.areas[name] = area._replace(open=False)
        self.retired[area.peer, area.generation] = False
        self._count("areas retired")
        self.effects.append(Fence(peer=area.peer, generation=area.generation))

    def _free_if_unused(self, peer: Life, generation: int) -> None:
        """Gives memory back that nobody can write to and that we do not read."""
        if not self.retired.get((peer, generation), False):
            return
        if any((berth.peer, berth.generation) == (peer, generation) for berth in self.takes):
            return
        del self.retired[peer, generation]
        self._count("areas freed")
        self.effects.append(FreeArea(peer=peer, generation=generation))

    def _end_take(self, take: Take, now: float) -> None:
        """One of our moves has ended.

        Raises `ValueError`: it is not under way.
        """
        berth = self._berth_under_way(take)
        self._start(now)
        del self.takes[berth]
        self._free_if_unused(take.source, take.generation)

    def _berth_under_way(self, take: Take) -> Berth:
        """The berth that a move reads; `ValueError` if it is not under way."""
        berth = Berth(take.source, take.generation, take.berth)
        known = self.takes.get(berth)
        if known is not take and known != take:
            raise ValueError(f"take of part {take.part} out of {berth} is not under way")
        return berth

    # Areas that went wrong, peers that are not there.

    def _poisoned(self, name: str, generation: int) -> None:
        """A write into an area failed: what is missing goes into another one, if that helps."""
        if not self._is_open_area(name, generation):
            self._refuse("about an area that is not open")
            return
        self._retire(name)
        for key in self._waiting_for(name):
            collection = self.collections[key]
            collection = collection._replace(poison_count=collection.poison_count + 1)
            self.collections[key] = collection
            if collection.poison_count > self.settings.bounds.poison_count_max:
                self._fail(key, f"writes of {name} failed in {collection.poison_count} areas")
            else:
                self._claim(key, name)

    def _waiting_for(self, name: str) -> list[Key]:
        """Handoffs that lack something from a source, in order."""
        return [
            key
            for key, collection in sorted(self.collections.items())
            if collection.state is TargetState.COLLECTING and collection.lacks(name)
        ]

    def _peer_open(self, name: str) -> None:
        for key in self._waiting_for(name):
            self._claim(key, name)

    def _peer_silent(self, name: str) -> None:
        self._give_up_on(name, f"{name} is silent")

    def _give_up_on(self, name: str, why: str) -> None:
        self._retire(name)
        for key in self._waiting_for(name):
            source = self.collections[key].source(name)
            # One that has not claimed anything of that life can wait for the next.
            if source is not None and source.claimed:
                self._fail(key, why)
        for key in sorted(self.collections):
            self._source_stopped(key, name)

    def _peer_gone(self, name: str) -> None:
        if name == self.scheduler:
            for key, collection in sorted(self.collections.items()):
                self._remember_drop(key)
                if collection.state not in (TargetState.DROPPING, TargetState.STOPPING):
                    self._drop(key)
        else:
            self._give_up_on(name, f"{name} is gone")

    def _peer_refused(self, name: str, *, why: str) -> None:
        for key in self._waiting_for(name):
            self._fail(key, why)

    # Timers, reports.

    def _on_timer(self, timer: TimerKey) -> None:
        key = (timer[1], int(timer[2]))
        collection = self.collections[key]
        if collection.state is TargetState.STOPPING:
            for source in collection.sources:
                if source.claimed:
                    self._stop(key, source.name)
                    self._asked_again(source.name, ("stop", key))
        else:
            self._claim_missing(key)
        self._keep_asking(key)

    def _asked_by(self, timer: TimerKey) -> list[str]:
        collection = self.collections[timer[1], int(timer[2])]
        if collection.state is TargetState.STOPPING:
            return [source.name for source in collection.sources if source.claimed]
        return [source.name for source in collection.sources if not source.is_complete]

    def _keep_asking(self, key: Key) -> None:
        """Lets a timer run while a source owes us something."""
        collection = self.collections.get(key)
        if collection is None:
            return
        timer = _resend(key)
        if collection.state in (TargetState.COLLECTING, TargetState.STOPPING):
            if timer not in self.timers:
                self._arm_resend(timer)
        else:
            self._disarm(timer)

    def _repeat_report(self, key: Key) -> None:
        """Repeats the last report: the scheduler asked again."""
        collection = self.collections[key]
        match collection.state:
            case TargetState.COMPLETE:
                self._report(key, ReportStatus.COMPLETE)
            case TargetState.FAILED:
                self._report(key, ReportStatus.FAILED, collection.why)
            case TargetState.STOPPING:
                self._report(key, ReportStatus.DROPPED)
            case _:
                pass

    def _report(self, key: Key, report: ReportStatus, why: str = "") -> None:
        if not self.is_open(self.scheduler):
            return
        self._send(
            msg.HandoffReport(
                sender=self.life,
                target=self.life_of(self.scheduler),
                handoff=key[0],
                epoch=key[1],
                report=report,
                why=why[:512],
            )
        )

    def _move(self, key: Key, move: TargetMove) -> None:
        collection = self.collections[key]
        state = advance(TARGET_MOVES, collection.state, move)
        self.collections[key] = collection._replace(state=state)

    def _remember_drop(self, key: Key) -> None:
        epoch = max(key[1], self._dropped_epoch(key[0]))
        self._remember(("dropped", key[0]), epoch)

    def _dropped_epoch(self, handoff: str) -> int:
        """The last epoch of a handoff that was dropped here."""
        return self.remembered.get(("dropped", handoff), (0, ""))[0]


def _resend(key: Key) -> TimerKey:
    return ("resend", key[0], str(key[1]))
