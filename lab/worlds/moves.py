"""What one party of a small world can do next, by itself, in each of its local states."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from lab.worlds import actions as do
from lab.worlds.decode import DecodeRankActor
from lab.worlds.faults import Fault
from lab.worlds.prefill import Phase, PrefillRankActor
from lab.worlds.schedulers import DecodeSchedulerActor, PrefillSchedulerActor
from penstock.handoff.protocol.states import HandoffOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lab.worlds.parties import AnyActor, Parties
    from lab.worlds.scene import Scene


class MoveKind(IntEnum):
    """How a move is carried out."""

    DELIVER = 0
    DO = 1
    """A action that concerns nobody else."""
    POST = 2
    """A write is posted; it ends at once where its target is gone or behind a fence."""
    LAND = 3
    SPOIL = 4
    """Lands with the wrong bytes."""
    HAUNT = 5
    """A ghost lands."""
    FENCE = 6
    PREFILL = 7
    TOKEN = 8
    HEAR = 9
    """A new life is heard of."""
    LOSE = 10
    REPEAT = 11
    OVERTAKE = 12
    CRASH = 13
    RECONNECT = 14
    """The messages between two parties are lost; then both greet each other."""
    GREET = 15


NO_FAULT = -1


class Move(NamedTuple):
    """Something that can happen."""

    kind: MoveKind
    place: int
    """The party, or the channel."""
    action: int = 0
    """Its number."""
    fault: int = NO_FAULT
    """Which budget it is paid from."""


class LocalMoves(NamedTuple):
    """What a party can do in a local state."""

    usual: tuple[Move, ...]
    conditional: tuple[Move, ...]
    """Possible when others allow it: to begin with a prompt, its first token, fences."""
    timers: tuple[Move, ...]
    early: tuple[Move, ...]
    """The same timers, as faults."""
    faults: tuple[Move, ...]


def local_moves(parties: Parties, place: int, actor: AnyActor) -> LocalMoves:
    """What a party can do in this local state."""

    def move(kind: MoveKind, action: do.Action, fault: int = NO_FAULT) -> Move:
        return Move(kind, place, parties.actions.of(action), fault)

    timers = [do.Expire(timer) for timer in actor.machine.armed()]
    parts = _parts_of(actor)
    return LocalMoves(
        usual=tuple(move(kind, action) for kind, action in parts.usual),
        conditional=(
            *(move(MoveKind.PREFILL, action) for action in parts.starts),
            *(move(MoveKind.TOKEN, action) for action in parts.tokens),
            *(move(MoveKind.FENCE, action) for action in parts.fences),
        ),
        timers=tuple(move(MoveKind.DO, action) for action in timers),
        early=tuple(move(MoveKind.DO, action, Fault.TIMER) for action in timers),
        faults=tuple(move(kind, action, fault) for kind, action, fault in parts.faults),
    )


class _Parts(NamedTuple):
    usual: list[tuple[MoveKind, do.Action]]
    faults: list[tuple[MoveKind, do.Action, Fault]]
    fences: list[do.Fenced]
    tokens: list[do.Action]
    starts: list[do.Action]


def _parts_of(actor: AnyActor) -> _Parts:
    match actor:
        case PrefillRankActor():
            return _of_prefill_rank(actor)
        case DecodeRankActor():
            return _of_decode_rank(actor)
        case PrefillSchedulerActor():
            return _of_prefill_scheduler(actor)
        case DecodeSchedulerActor():
            return _of_decode_scheduler(actor)
        case _:
            raise TypeError(f"{actor!r} is no party of a handoff")


def _of_prefill_rank(actor: PrefillRankActor) -> _Parts:
    parts = _Parts([*_writes_of(actor)], [], [], [], [])
    progress = [actor.next_progress(handoff) for handoff in sorted(actor.computed)]
    steps = _in_steps(actor.scene, [action for action in progress if action is not None])
    parts.usual.extend((MoveKind.DO, step) for step in steps)
    for write, posting in sorted(actor.writes.items()):
        if posting.phase is Phase.POSTED:
            parts.faults.append((MoveKind.DO, do.Fail(write), Fault.WRITE))
            parts.faults.append((MoveKind.SPOIL, do.Leave(write), Fault.SPOIL))
    if actor.writes and actor.scene.transport.has_relays:
        parts.faults.append((MoveKind.DO, do.RelayDeath(), Fault.RELAY))
    return parts


def _of_decode_rank(actor: DecodeRankActor) -> _Parts:
    takes = sorted(actor.takes, key=lambda take: (take.source, take.berth, take.part))
    finishes = [(MoveKind.DO, do.Finish(take)) for take in takes]
    has_relay = bool(actor.berths) and actor.scene.transport.has_relays
    relay = [(MoveKind.DO, do.RelayDeath(), Fault.RELAY)] if has_relay else []
    return _Parts(
        [*finishes], [*relay], [do.Fenced(*area) for area in sorted(actor.fences)], [], []
    )


def _of_prefill_scheduler(actor: PrefillSchedulerActor) -> _Parts:
    prompts = actor.scene.prompts
    life = actor.identity.life.incarnation
    new = [handoff for handoff in prompts if not actor.knows((handoff, 0))]
    starts = [do.Prefill(handoff, life) for handoff in new if _has_ranks(actor)]
    starts = starts[: actor.scene.room - len(actor.open)]
    running = [handoff for handoff in prompts if (handoff, 0) in actor.open]
    tokens = [do.FirstToken(handoff) for handoff in running if handoff not in actor.tokens]
    return _Parts(
        usual=[],
        faults=[
            (MoveKind.DO, do.Cancel(handoff), Fault.CANCEL)
            for handoff in running
            if actor.scene.is_doubtful(handoff)
        ],
        fences=[],
        tokens=_in_steps(actor.scene, tokens),
        starts=_in_steps(actor.scene, starts),
    )


def _in_steps(scene: Scene, actions: Sequence[do.Action]) -> list[do.Action]:
    """The actions as an engine does them: each in its own step, or all in one."""
    if scene.batched and len(actions) > 1:
        return [do.Many(tuple(actions))]
    return [*actions]


def _has_ranks(actor: PrefillSchedulerActor | DecodeSchedulerActor) -> bool:
    """Whether the engine would submit anything now: with a rank missing, it would be refused."""
    return all(actor.machine.is_open(rank) for rank in actor.machine.ranks)


def _of_decode_scheduler(actor: DecodeSchedulerActor) -> _Parts:
    claims = _in_steps(actor.scene, [*_claims_of(actor)][: actor.scene.room - len(actor.open)])
    parts = _Parts([(MoveKind.DO, action) for action in claims], [], [], [], [])
    for handoff in sorted(name for name, _ in actor.open if actor.scene.is_doubtful(name)):
        parts.faults.append((MoveKind.DO, do.Cancel(handoff), Fault.CANCEL))
        parts.faults.append((MoveKind.DO, do.Withdraw(handoff), Fault.WITHDRAW))
    return parts


def _writes_of(actor: PrefillRankActor) -> Iterator[tuple[MoveKind, do.Action]]:
    recalls, own = actor.scene.transport.recalls, actor.scene.transport.own_memory
    for write, posting in sorted(actor.writes.items()):
        # Into an area of its own memory, what its driver takes for over may land yet.
        if posting.abandoned and posting.phase <= (Phase.POSTED if recalls or own else Phase.ASKED):
            yield MoveKind.DO, do.GiveUp(write)
        if posting.phase is Phase.POSTED and not recalls and actor.is_left(write):
            # The driver has closed its link to the area.
            yield MoveKind.DO, do.Fail(write)
        match posting.phase:
            case Phase.ASKED:
                if not posting.abandoned:
                    yield MoveKind.POST, do.Submit(write)
            case Phase.POSTED:
                yield MoveKind.LAND, do.Leave(write)
            case Phase.LANDED:
                yield MoveKind.DO, do.Observe(write)
    for source, write in sorted(actor.ghosts):
        yield MoveKind.HAUNT, do.Fade(source, write)
        yield MoveKind.DO, do.Fade(source, write)


def _claims_of(actor: DecodeSchedulerActor) -> Iterator[do.Claim]:
    for handoff in actor.scene.prompts if _has_ranks(actor) else ():
        epochs = [
            epoch for name, epoch in (*actor.open, *actor.ended, *actor.died) if name == handoff
        ]
        last = max(epochs, default=0)
        outcome = actor.ended.get((handoff, last))
        if (
            last == 0
            or outcome is HandoffOutcome.WITHDRAWN
            or (last == 1 and _insists(actor, handoff))
        ):
            yield do.Claim(handoff, last + 1)


def _insists(actor: DecodeSchedulerActor, handoff: str) -> bool:
    """Whether the engine tries again after a failure, and may: nothing is left of the first try."""
    failed = actor.ended.get((handoff, 1)) not in (None, HandoffOutcome.DELIVERED)
    return actor.scene.insistent and failed and handoff not in actor.machine.claimed
