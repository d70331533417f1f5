"""The loop of the store process: it serves engines and moves their blocks with the tiers.

    serve_store(config, stop=descriptor)        # until the descriptor is readable

One thread waits in one epoll, for the socket, its sessions, the tiers and the next deadline; an
idle process uses no CPU. Tiers have threads of their own.

| session | begins with    | while it lasts                                              |
|---------|----------------|-------------------------------------------------------------|
| arena   | `ArenaOffered` | the hub of a rank is mapped                                 |
| owner   | `OwnerHello`   | an engine saves, loads, finds and voids blocks of its space |

The one rule: a job is reported when its tier has reported it, and at no other time. An arena is
unmapped when its session has ended and no job uses it; a session that an owner lost and opens
again is welcome when no job of the old one is under way.
"""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cache.operations import BlockFault
from penstock.errors import PeerError, UnavailableError
from penstock.store.base import LentBlocks, LoadJob, MappedArena, NewGeneration, SaveJob, Space
from penstock.store.process.messages import (
    BUSY,
    PAGE_KEYS_MAX,
    AbandonRequest,
    AnyStoreRequest,
    ArenaMapped,
    ArenaOffered,
    FindRequest,
    GenerationNotice,
    GoneNotice,
    HubChanged,
    JobReport,
    LoadRequest,
    OwnerHello,
    OwnerWaiting,
    OwnerWelcome,
    PageRequest,
    SaveRequest,
    StorePing,
    StorePong,
    StoreState,
    VoidRequest,
    VoidSeen,
    arena_name,
    requests,
    split_keys,
    split_parents,
    split_slots,
)
from penstock.store.process.sessions import (
    VOIDING,
    ClientSession,
    OfferedArena,
    OwnerState,
    StoreBusyError,
    StoreListener,
    StoreQuestions,
    tell_known,
)
from penstock.store.process.tier_slots import TIER_KINDS, TierSlot
from penstock.supervisor.descriptors import close_all
from penstock.tiers.host import HostTier
from penstock.transport.base import Empty
from penstock.transport.unix_sockets import Packet
from penstock.vocabulary.form import Form
from penstock.vocabulary.frames import short

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.store.base import EndedJob, TierState
    from penstock.store.process.messages import JobRequest, StoreConfig
    from penstock.store.process.tier_slots import OpenTier
    from penstock.vocabulary.keys import Key

logger = logging.getLogger(__name__)

SESSIONS_MAX = 256
"""Every rank of a machine and its engines; each has a descriptor or three of 1,024."""
TICKETS_MAX = 4096
"""Jobs in hand of one owner; more are reported as failed at once."""
JOB_S_MAX = 3600.0
"""No job takes longer, whatever its deadline is."""
GREETING_S = 3.0
"""How long a client may take to say what it is for."""
READS_MAX = 16
"""Packets that are read of one session before the others have their turn."""
UNATTENDED_S = 5.0
"""How often a process that nobody is connected to looks whether its socket is still there."""
CLOSE_S = 5.0
"""How long the tiers may take to end what is in hand when the process is to end."""

ENDED = 0


def serve_store(
    config: StoreConfig, *, stop: int, kinds: Mapping[str, OpenTier] = TIER_KINDS
) -> int:
    """Serves until the descriptor `stop` is readable; returns the exit status.

    Raises `ConfigError`: a tier is of a kind that there is not; `UnavailableError`: the socket
    cannot be opened.
    """
    slots = [TierSlot(each, kinds) for each in config.tiers]
    try:
        listener = StoreListener.open(Path(config.socket))
    except StoreBusyError as error:
        logger.info("store ends: cause=%s", error)
        return BUSY
    logger.info("store serves: socket=%s pid=%d", config.socket, os.getpid())
    server = StoreServer(listener, slots)
    server.run(stop)
    logger.info("store ends: socket=%s cause=asked to stop", config.socket)
    return ENDED


@dataclass(slots=True, eq=False)
class _Job:
    """One tier's job: a ticket of an owner, for the ranks that share an arena."""

    session: ClientSession
    owner: OwnerState
    ticket: int
    arena: OfferedArena
    slot: TierSlot
    generation: int
    ranks: list[int]
    cancelled: str = ""
    """Why it was cancelled, if it was."""
    void: bool = False
    """Whether it has failed, whatever its tier reports."""


class StoreServer:
    """Serves the sessions of one socket with the tiers in `slots`."""

    def __init__(
        self,
        listener: StoreListener,
        slots: Sequence[TierSlot],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._slots = slots
        self._clock = clock
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._sessions: dict[int, ClientSession] = {}
        self._owners: dict[ClientSession, OwnerState] = {}
        self._arenas: dict[str, list[OfferedArena]] = {}
        """By name; the last is used."""
        self._offers: dict[ClientSession, OfferedArena] = {}
        self._jobs: dict[int, _Job] = {}
        """By the ticket of their jobs."""
        self._questions = StoreQuestions()
        self._strays: Counter[int | str] = Counter()
        """Jobs under way of sessions that have ended: by the life of their owner, and by the
        name of their arena, which may have a new owner by now."""
        self._deadlines: list[tuple[float, int]] = []
        self._number = 0
        self._why_unreachable = ""
        self._looks_at = -math.inf
        """When it looks whether its socket is still there, unless somebody is connected."""
        self._lost_a_client = False

    def run(self, stop: int) -> None:
        """Serves until the descriptor is readable, then ends everything."""
        stopping: list[int] = []
        with ExitStack() as undo:
            undo.callback(self._epoll.close)
            undo.callback(self._listener.close)
            self._watch(stop, stopping.append)
            self._watch(self._listener.descriptor, self._accept)
            for slot in self._slots:
                self._watch(slot.descriptor, lambda _events: None)  # `_advance` takes it.
            while not stopping:
                self._advance(self._clock())
                self._wait()
            self._end_all()

    def _watch(self, fd: int, callback: Callable[[int], None]) -> None:
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def _wait(self) -> None:
        left_s = self._alarm() - self._clock()
        timeout = None if left_s == math.inf else max(0.0, left_s)
        for fd, events in self._epoll.poll(timeout):
            if callback := self._callbacks.get(fd):
                callback(events)

    def _alarm(self) -> float:
        at = min((slot.alarm() for slot in self._slots), default=math.inf)
        greeting = min(
            (each.opened_at for each in self._sessions.values() if not each.greeted),
            default=math.inf,
        )
        if self._deadlines:
            at = min(at, self._deadlines[0][0])
        if not self._sessions:
            at = min(at, self._looks_at)
        return min(at, greeting + GREETING_S)

    def _advance(self, now: float) -> None:
        """What time alone brings, and what is to be sent."""
        for slot in self._slots:
            if slot.open(now):
                self._begin_tier(slot)
            for space, generation in slot.settle_voids():
                self._tell_void(slot, NewGeneration(space, generation), voided=True)
            if (state := slot.news(now)) is not None:
                self._send_state(slot, state)
                if state.on:
                    self._stay_reachable()
        if self._lost_a_client or (now >= self._looks_at and not self._sessions):
            self._lost_a_client = False
            self._looks_at = now + UNATTENDED_S
            self._stay_reachable()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heappop(self._deadlines)
            self._cancel(number, "its deadline has passed")
        for session in list(self._sessions.values()):
            if not session.greeted and now >= session.opened_at + GREETING_S:
                self._end(session, f"it did not say what it is for within {GREETING_S:g} s")
            else:
                self._flush(session)

    # Sessions.

    def _stay_reachable(self) -> None:
        """Listens again if the socket was removed with the folder: the tier is in the new one."""
        if self._listener.is_in_place:
            return
        before = self._listener.descriptor
        try:
            self._listener.listen_again()
        except UnavailableError as error:
            if str(error) != self._why_unreachable:
                self._why_unreachable = str(error)
                logger.warning("store cannot be reached by new engines: cause=%s", error)
            return
        self._why_unreachable = ""
        # The kernel forgot the old one when it was closed; its number may be in use already.
        self._callbacks.pop(before, None)
        self._watch(self._listener.descriptor, self._accept)
        logger.warning("store listens again: socket=%s was removed", self._listener.path)

    def _accept(self, _events: int) -> None:
        for channel, peer in self._listener.accept():
            session = ClientSession(channel, pid=peer.pid, opened_at=self._clock())
            if peer.uid not in {os.getuid(), 0}:
                problem = f"it is of user {peer.uid}, must be of user {os.getuid()} or root"
            elif len(self._sessions) >= SESSIONS_MAX:
                problem = f"there are {SESSIONS_MAX} sessions, which is the most"
            else:
                fd = channel.fileno()
                self._sessions[fd] = session
                self._watch(fd, lambda events, session=session: self._serve(session, events))  # type: ignore[misc]
                continue
            logger.warning("store refuses a client: pid=%d cause=%s", peer.pid, problem)
            session.refuse(problem)

    def _serve(self, session: ClientSession, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush(session)
        for _ in range(READS_MAX):
            if not session.is_open:
                return
            packet = session.receive()
            if isinstance(packet, Empty):
                return
            if not isinstance(packet, Packet):
                self._end(session, "")
                return
            try:
                self._read(session, packet)
            except PeerError as error:
                self._end(session, str(error))
            finally:
                close_all(packet.descriptors)

    def _read(self, session: ClientSession, packet: Packet) -> None:
        if packet.problem:
            raise PeerError(packet.problem)
        for request in requests.decode(packet.frame):
            if not session.is_open:
                return
            if isinstance(request, ArenaOffered):
                self._map_arena(session, request, packet.descriptors)
            elif isinstance(request, OwnerHello):
                self._greet(session, request)
            else:
                owner = self._owners.get(session)
                if owner is None:
                    raise PeerError(f"{type(request).__name__} came before OwnerHello")
                self._carry_out(session, owner, request)

    def _carry_out(
        self, session: ClientSession, owner: OwnerState, request: AnyStoreRequest
    ) -> None:
        match request:
            case SaveRequest() | LoadRequest():
                self._start(session, owner, request)
            case AbandonRequest():
                for number in list(owner.tickets.get(request.ticket, ())):
                    self._cancel(number, "it was abandoned")
            case FindRequest():
                self._number += 1
                self._questions.find(session, owner, request, self._mapped(owner), self._number)
            case PageRequest():
                self._questions.page(session, owner, request, self._mapped(owner))
            case VoidRequest():
                self._void(owner, request)
            case VoidSeen():
                owner.note_seen(request)
            case HubChanged():
                self._lend(owner, request)
            case StorePing():
                session.answer(StorePong())
            case _:
                raise PeerError(f"{type(request).__name__} came twice")

    def _flush(self, session: ClientSession) -> None:
        if not session.is_open or not session.has_output:
            return
        try:
            left = session.flush()
        except PeerError as error:
            self._end(session, str(error))
            return
        except OSError:
            self._end(session, "")
            return
        if left != session.waits_for_room:
            session.waits_for_room = left
            events = select.EPOLLIN | select.EPOLLOUT if left else select.EPOLLIN
            self._epoll.modify(session.descriptor, events)

    def _end(self, session: ClientSession, problem: str) -> None:
        """Ends a session: its jobs are cancelled, and an arena of its own is not used again."""
        if not session.is_open:
            return
        fd = session.descriptor
        self._epoll.unregister(fd)
        del self._callbacks[fd], self._sessions[fd]
        self._lost_a_client = True  # It may come back, by the path.
        if problem:
            logger.warning("store ends a session: pid=%d cause=%s", session.pid, problem)
        session.refuse(problem)
        owner = self._owners.pop(session, None)
        if owner is not None:
            for number in [each for jobs in owner.tickets.values() for each in jobs]:
                self._strays.update((owner.hello.life, self._jobs[number].arena.name))
                self._cancel(number, "its owner has gone")
            for slot in owner.tiers:
                if slot.tier is not None:
                    slot.tier.end_lending(owner.hello.life)
        arena = self._offers.pop(session, None)
        if arena is not None:
            self._withdraw(arena)

    # Arenas.

    def _map_arena(
        self, session: ClientSession, offer: ArenaOffered, descriptors: Sequence[int]
    ) -> None:
        if session.greeted:
            raise PeerError("ArenaOffered must be the first message of a session")
        if len(descriptors) != 1:
            raise PeerError(f"ArenaOffered came with {len(descriptors)} descriptors, must be one")
        name = arena_name(descriptors[0])
        if offer.name != name:
            raise PeerError(f"an arena is offered as {offer.name!r}, must be {name!r}")
        try:
            form = Form.from_bytes(offer.form)
            host = HostTier.attach(descriptors[0], form.layout, offer.slot_count)
        except (ValueError, UnavailableError) as error:
            raise PeerError(f"the arena of process {session.pid}: {error}") from error
        arena = OfferedArena(name, MappedArena(host, form, offer.part))
        self._offers[session] = arena
        self._arenas.setdefault(name, []).append(arena)
        session.greeted = True
        session.answer(ArenaMapped())
        self._check_owners()

    def _withdraw(self, arena: OfferedArena) -> None:
        arena.offered = False
        offered = self._arenas[arena.name]
        offered.remove(arena)
        if not offered:
            del self._arenas[arena.name]
        for number in list(arena.jobs):
            self._cancel(number, "the process of its rank has gone")
        arena.jobs.intersection_update(self._jobs)
        self._close_if_idle(arena)
        self._check_owners()

    def _close_if_idle(self, arena: OfferedArena) -> None:
        if arena.offered or arena.jobs:
            return
        for slot in self._slots:
            if slot.tier is not None:
                slot.tier.detach(arena.mapped)
        arena.mapped.host.close()

    # Owners.

    def _greet(self, session: ClientSession, hello: OwnerHello) -> None:
        before = self._owners.get(session)
        if before is None and session.greeted:
            raise PeerError("OwnerHello came in a session of an arena")
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(hello.arenas):
            ranks.setdefault(name, []).append(rank)
        if before is not None:
            old = before.hello
            if (old.life, old.space, old.tiers) != (hello.life, hello.space, hello.tiers):
                raise PeerError("OwnerHello came again, and from another owner")
            before.hello, before.ranks, before.ready, before.why = hello, ranks, False, ""
            self._check_owner(session, before)
            return
        for other, owner in list(self._owners.items()):
            if owner.hello.life == hello.life:
                self._end(other, "its owner has opened another session")
        tiers = [self._slot_named(name) for name in hello.tiers]
        for slot, terms in zip(tiers, hello.terms, strict=False):
            if terms != slot.terms:
                raise PeerError(
                    f"tier {slot.name!r} has another kind, path, url or key_file in the process "
                    "that serves it here: engines that share one need the same"
                )
        tell_known(hello, tiers)
        generations = [slot.generation(hello.space) for slot in tiers]
        owner = OwnerState(hello=hello, tiers=tiers, ranks=ranks, generations=generations)
        self._owners[session] = owner
        session.greeted = True
        for number, slot in enumerate(tiers):
            session.answer(StoreState(number, slot.state()))
            self._tell_generation(session, owner, number)
        self._check_owner(session, owner)

    def _tell_generation(self, session: ClientSession, owner: OwnerState, tier: int) -> None:
        generation = owner.generations[tier]
        if generation is not None and generation != VOIDING:
            session.answer(GenerationNotice(tier, generation))

    def _slot_named(self, name: str) -> TierSlot:
        for slot in self._slots:
            if slot.name == name:
                return slot
        known = ", ".join(slot.name for slot in self._slots)
        raise PeerError(f"there is no tier {name!r} here, must be one of: {known}")

    def _check_owners(self) -> None:
        for session, owner in self._owners.items():
            self._check_owner(session, owner)

    def _check_owner(self, session: ClientSession, owner: OwnerState) -> None:
        """Welcomes an owner that everything is there for, or says what it waits for."""
        missing = [rank for rank, name in enumerate(owner.hello.arenas) if name not in self._arenas]
        why = ""
        if missing:
            why = f"the arenas of these ranks are not there: {', '.join(map(str, missing))}"
        elif self._has_strays(owner):
            why = "jobs of the last session are under way"
        if not why and not owner.ready:
            owner.ready, owner.why = True, ""
            for slot in owner.tiers:
                self._attach(owner, slot)
            session.answer(OwnerWelcome())
        elif why != owner.why:
            owner.ready, owner.why = False, why
            session.answer(OwnerWaiting(short(why)))

    def _attach(self, owner: OwnerState, slot: TierSlot) -> None:
        if slot.tier is not None:
            slot.tier.attach(owner.hello.space, self._mapped(owner))

    def _mapped(self, owner: OwnerState) -> list[MappedArena]:
        """The arenas of an owner's ranks, each part of a block once."""
        arenas = (self._arenas[name][-1].mapped for name in owner.ranks if name in self._arenas)
        return list({arena.part: arena for arena in arenas}.values())

    def _has_strays(self, owner: OwnerState) -> bool:
        """Whether jobs of a session that has ended use its slots."""
        names: list[int | str] = [owner.hello.life, *owner.ranks]
        return any(self._strays[name] for name in names)

    def _lend(self, owner: OwnerState, notice: HubChanged) -> None:
        """Passes on what an engine has in its hub; it says all again once the tier is usable."""
        keys, gone = split_keys(notice.keys), split_keys(notice.gone)
        slots, slot = split_slots(notice.slots, len(keys)), owner.slot(notice.tier)
        if slot.tier is None or owner.why_not(notice.tier):
            return
        arenas = self._mapped(owner)
        self._require_slots(arenas, slots)
        generation = slot.tier.generation(owner.hello.space)
        assert generation is not None
        space = Space(owner.hello.space, generation)
        lent = LentBlocks(owner.hello.life, arenas, space, keys, slots, notice.salt)
        slot.tier.lend(lent, gone)

    def _require_slots(self, arenas: Sequence[MappedArena], slots: Sequence[int]) -> None:
        for arena in arenas:
            if max(slots, default=0) >= arena.host.slot_count:
                raise PeerError(f"slot is {max(slots)}, must be below {arena.host.slot_count}")

    # Jobs.

    def _start(self, session: ClientSession, owner: OwnerState, request: JobRequest) -> None:
        keys = split_keys(request.keys)
        slots = split_slots(request.slots, len(keys))
        parents = (
            split_parents(request.parents, len(keys)) if isinstance(request, SaveRequest) else []
        )
        slot = owner.slot(request.tier)
        if request.ticket in owner.tickets:
            raise PeerError(f"ticket {request.ticket} is in use")
        if math.isnan(request.remaining_s):
            raise PeerError("remaining_s is nan, must be a number of seconds")
        problem = owner.why_not(request.tier)
        if len(owner.tickets) >= TICKETS_MAX:
            problem = f"there are {TICKETS_MAX} jobs in hand, which is the most"
        if problem or slot.tier is None:
            for rank in range(len(owner.hello.arenas)):
                session.answer(JobReport(request.ticket, rank, [], short(problem)))
            return
        places = [(self._arenas[name][-1], ranks) for name, ranks in owner.ranks.items()]
        generation = slot.tier.generation(owner.hello.space)
        assert generation is not None
        self._require_slots([arena.mapped for arena, _ in places], slots)
        space = Space(owner.hello.space, generation)
        deadline = self._clock() + min(request.remaining_s, JOB_S_MAX)
        numbers = owner.tickets[request.ticket] = set()
        for arena, ranks in places:
            self._number += 1
            number = self._number
            numbers.add(number)
            arena.jobs.add(number)
            job = _Job(session, owner, request.ticket, arena, slot, generation, ranks)
            self._jobs[number] = job
            heappush(self._deadlines, (deadline, number))
            if isinstance(request, SaveRequest):
                slot.tier.save(
                    SaveJob(number, arena.mapped, space, keys, parents, slots, request.salt)
                )
            else:
                slot.tier.load(LoadJob(number, arena.mapped, space, keys, slots, request.salt))

    def _cancel(self, number: int, why: str) -> None:
        """Ends a job early, if its tier can."""
        job = self._jobs.get(number)
        if job is not None and job.slot.tier is not None:
            job.cancelled = job.cancelled or why
            job.slot.tier.cancel(number)

    def _take_results(self, slot: TierSlot) -> None:
        if slot.tier is None:
            return
        for ended in slot.tier.collect():
            self._report_job(ended)
        for gone in slot.tier.take_gone():
            for session, owner in self._owners.items():
                self._tell_gone(session, owner, slot, gone.space, gone.part, gone.keys)
        for new in slot.tier.take_generations():
            self._learn_generation(slot, new)
        self._questions.answer(slot.tier.take_found())

    def _report_job(self, ended: EndedJob) -> None:
        job = self._jobs.pop(ended.ticket)
        job.arena.jobs.discard(ended.ticket)
        self._close_if_idle(job.arena)
        left = job.owner.tickets[job.ticket]
        left.discard(ended.ticket)
        if not left:
            del job.owner.tickets[job.ticket]
        if not job.session.is_open:
            self._strays.subtract((job.owner.hello.life, job.arena.name))
            self._strays += Counter()  # Drops what is at 0.
            self._check_owners()
            return
        faults = list(ended.faults)
        unread = any(fault is BlockFault.UNREADABLE for _, fault in ended.faults)
        failed = job.void or bool(ended.failure) or (bool(job.cancelled) and unread)
        failure = short((job.cancelled or ended.failure) if failed else "")
        for rank in job.ranks:
            job.session.answer(JobReport(job.ticket, rank, faults, failure))

    def _tell_gone(
        self,
        session: ClientSession,
        owner: OwnerState,
        slot: TierSlot,
        space: Space,
        part: bytes,
        keys: Sequence[Key],
    ) -> None:
        if slot not in owner.tiers or space.name != owner.hello.space:
            return
        tier = owner.tiers.index(slot)
        parts = [arena.part for arena in self._mapped(owner)]
        if owner.generations[tier] == space.generation and part in parts:
            for at in range(0, len(keys), PAGE_KEYS_MAX):
                session.answer(GoneNotice(tier, b"".join(keys[at : at + PAGE_KEYS_MAX])))

    # Resets.

    def _void(self, owner: OwnerState, request: VoidRequest) -> None:
        slot = owner.slot(request.tier)
        owner.voids[request.tier, request.space] += 1
        if request.space == owner.hello.space:
            owner.generations[request.tier] = VOIDING
        generation = slot.void(request.space)
        if generation is not None:
            self._tell_void(slot, NewGeneration(request.space, generation), voided=True)

    def _learn_generation(self, slot: TierSlot, new: NewGeneration) -> None:
        """A tier knows which generation counts: for the first time, or it has changed."""
        told = bool(new.unkept)
        for session, owner in self._owners.items():
            if slot in owner.tiers and owner.hello.space == new.name:
                tier = owner.tiers.index(slot)
                if owner.generations[tier] is None:
                    owner.generations[tier] = new.generation
                    self._tell_generation(session, owner, tier)
                told = told or owner.generations[tier] != new.generation
        if told:
            self._tell_void(slot, new, voided=bool(new.unkept))
        self._ask_pages_again()

    def _tell_void(self, slot: TierSlot, new: NewGeneration, *, voided: bool) -> None:
        """Fails the jobs of earlier generations, and tells who has asked or has the space.

        `voided` says that requests to void the space have begun this generation.
        """
        for number, job in list(self._jobs.items()):
            of_before = job.owner.hello.space == new.name and job.generation != new.generation
            if job.slot is slot and of_before:
                job.void = True
                self._cancel(number, "a new generation was begun")
        for session, owner in self._owners.items():
            if slot not in owner.tiers:
                continue
            notice = owner.take_void(owner.tiers.index(slot), new, voided=voided)
            if notice is not None:
                session.answer(notice)
        self._ask_pages_again()

    def _ask_pages_again(self) -> None:
        """Answers pages that wait for a generation."""
        for session, request in self._questions.take_pages():
            asking = self._owners.get(session)
            if asking is not None:
                self._questions.page(session, asking, request, self._mapped(asking))

    # Tiers.

    def _begin_tier(self, slot: TierSlot) -> None:
        assert slot.tier is not None
        self._watch(slot.tier.descriptor, lambda _events: self._take_results(slot))
        for session, owner in self._owners.items():
            if slot in owner.tiers:
                tell_known(owner.hello, owner.tiers)
                tier = owner.tiers.index(slot)
                if owner.generations[tier] != VOIDING:
                    owner.generations[tier] = slot.tier.generation(owner.hello.space)
                    self._tell_generation(session, owner, tier)
                if owner.ready:
                    self._attach(owner, slot)

    def _send_state(self, slot: TierSlot, state: TierState) -> None:
        for session, owner in self._owners.items():
            if slot in owner.tiers:
                session.answer(StoreState(owner.tiers.index(slot), state))

    def _end_all(self) -> None:
        """Cancels what is in hand, lets the tiers end, and closes every session."""
        for number in list(self._jobs):
            self._cancel(number, "the store process ends")
        deadline = self._clock() + CLOSE_S
        for slot in self._slots:
            slot.close(deadline)
        # Jobs that were cut short are not reported: their owners see this process end.
        self._jobs.clear()
        for owner in self._owners.values():
            owner.tickets.clear()
        for session in list(self._sessions.values()):
            self._flush(session)
            self._end(session, "")
