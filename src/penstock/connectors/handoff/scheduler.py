"""The scheduler's pairs: who is introduced, which prompts are offered, which are claimed.

As the prefill side it is called by decode engines, and offers a prompt when two things have
happened, in whatever order: its request is queued, and a decode engine wants it. Where its blocks
lie, the steps of the engine say to its ranks. As the decode side it calls the engine whose address
came with a request, and claims.

| a channel to another engine | the pair                                                        |
|-----------------------------|-----------------------------------------------------------------|
| is introduced               | own ranks open their sides; then the scheduler opens its own    |
| ends                        | handoffs are cancelled; it is closed when they have ended       |

Nothing here waits, but for own ranks that have opened their sides already.

The one rule: each prompt that was given ends with one `PromptReleased`, each claim with one
`ClaimEnded`, and afterwards nothing touches their blocks.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict, deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from penstock.config.values import AUTO
from penstock.connectors.handoff.messages import (
    WITHIN_ENGINE,
    AdmitOffer,
    CloseSide,
    EngineCard,
    ForgetPrompt,
    Introduce,
    Introduced,
    IntroductionRefused,
    OpenSide,
    PairCard,
    SideAnswer,
    SparePrompt,
    WantPrompt,
    WithholdPrompt,
    receive,
    send,
)
from penstock.errors import CapacityError, PeerError, PenstockError, UnavailableError
from penstock.handoff import (
    DecodeHandoff,
    PrefillHandoff,
    SharedListener,
    open_decode,
    open_prefill,
)
from penstock.transport.zeromq import IPC, Listener, connect, dial, require_listener
from penstock.transport.zmq_link import ChannelSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.connectors.handoff.messages import AnyMessage, PairNames
    from penstock.connectors.handoff.rank import RankAddresses
    from penstock.handoff import HandoffResult, HandoffSettings
    from penstock.transport.base import Waitable
    from penstock.transport.zmq_channel import ZmqChannel

log = logging.getLogger(__name__)

WANTS_MAX = 4096
"""Prompts that are wanted and not known yet, and those that were dropped and may be wanted."""


class GivenPrompt(NamedTuple):
    """A prompt that a decode engine may have."""

    handoff: str
    tokens: Sequence[int]
    first_blocks: Sequence[int]
    """For each KV group the first block that may be sent; those before it are out of the group's
    window when the prompt is computed."""
    origin: str
    """What its KV depends on besides the model and the tokens."""


class PromptClaim(NamedTuple):
    """A prompt that another engine computes, or has computed."""

    handoff: str
    address: str
    """Of the prefill engine's scheduler."""
    tokens: Sequence[int]
    slots: Sequence[Sequence[int]]
    """For each KV group where its last blocks are to lie, on every rank; those before them are
    there, or never read."""
    origin: str


class PromptReleased(NamedTuple):
    """The blocks of a prompt are not read any more."""

    handoff: str
    outcome: str
    """`delivered`, or why not."""


class ClaimEnded(NamedTuple):
    """The blocks of a claim hold the prompt's KV, or are free."""

    handoff: str
    delivered: bool = False
    why: str = ""
    lost: bool = False
    """Whether it failed because the prefill engine is gone."""


HandoffEvent = PromptReleased | ClaimEnded


@dataclass(slots=True, eq=False)
class _Peer:
    """Another engine, and the pair with it."""

    channel: ZmqChannel
    prefills: bool
    """Whether the other engine is the prefill side."""
    address: str = ""
    introduced: bool = False
    """Whether this engine has introduced itself."""
    pair: PairCard | None = None
    missing: set[int] = field(default_factory=set)
    """Own ranks that have not opened their sides."""
    door: PrefillHandoff | DecodeHandoff | None = None
    deadline: float = 0.0
    """When it must be open."""
    lost: str = ""
    """Why it is being closed."""
    gone: bool = False
    """Whether it is being closed because the other engine is gone."""
    spared: list[str] = field(default_factory=list)
    """Prompts that are not needed, to be said when the channel is open."""
    queued: list[PromptClaim] = field(default_factory=list)
    """Claims that wait for it to open."""
    handoffs: set[str] = field(default_factory=set)
    """Offered or claimed in this pair, and not ended."""


@dataclass(slots=True, eq=False)
class _Given:
    """A prompt of this engine."""

    prompt: GivenPrompt
    deadline: float = math.inf
    """When somebody must have asked for it, once it is computed."""
    peer: _Peer | None = None
    """Whom it was offered to."""
    first_token: int | None = None


class SchedulerHandoffs:
    """The pairs of one scheduler."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[RankAddresses],
        *,
        model: str,
        weights: str,
        version: str,
        step_tokens: int,
        settings: HandoffSettings,
        transport: str = AUTO,
    ) -> None:
        """Listens for other engines from now on.

        Raises `UnavailableError`: a rank does not answer.
        """
        self._settings = settings
        self._open_s = settings.times.handoff_s
        """How long a pair may take to open; then its claims fail, and their prompts are computed.
        The first step of a peer may take many seconds."""
        self.events: deque[HandoffEvent] = deque()
        """What has ended; another thread may take from its left end."""
        self.on_event: Callable[[], object] = object
        """Called, by the thread of handoffs, when something was added to `events`."""
        with ExitStack() as undo:
            self._door = Listener(name)
            undo.callback(self._door.close)
            self._listener = SharedListener(name, [IPC])
            undo.callback(self._listener.close)
            deadline = _soon(self._open_s)
            self._ranks: list[ZmqChannel] = []
            for rank in ranks:
                channel = connect(
                    rank.scheduler, name=name, deadline=deadline, settings=WITHIN_ENGINE
                )
                undo.callback(channel.close)
                self._ranks.append(channel)
            undo.pop_all()
        self._card = EngineCard(
            name=name,
            address=self._listener.address,
            rank_addresses=[rank.pairs for rank in ranks for _ in rank.forms],
            forms=[form for rank in ranks for form in rank.forms],
            layers=ranks[0].layers,
            model=model,
            weights=weights,
            version=version,
            transport=transport,
            step_tokens=step_tokens,
        )
        self._peers: list[_Peer] = []
        self._prompts: dict[str, _Given] = {}
        self._wants: OrderedDict[str, _Peer] = OrderedDict()
        """Who wants a prompt that has not been given yet."""
        self._dropped: OrderedDict[str, str] = OrderedDict()
        """Why prompts were dropped that may still be wanted, or given."""
        self._claims: dict[str, _Peer] = {}

    @property
    def address(self) -> str:
        """Where decode engines introduce themselves."""
        return self._door.address

    # ---------------------------------------------------------------- as the prefill side

    def give(self, prompt: GivenPrompt) -> None:
        """A prompt is going to be computed: it is offered to the engine that wants it.

        No other prompt has its name until its `PromptReleased`.
        """
        given = _Given(prompt)
        self._prompts[prompt.handoff] = given
        if why := self._dropped.pop(prompt.handoff, ""):
            self._release(given, why)
            return
        wanted_by = self._wants.pop(prompt.handoff, None)
        if wanted_by is not None and not wanted_by.lost:
            self._offer(given, wanted_by)

    def first_token(self, handoff: str, token: int) -> None:
        """The prompt is computed, and this token follows it."""
        given = self._prompts.get(handoff)
        if given is None:
            return
        given.first_token = token
        given.deadline = _soon(self._settings.times.lease_s)
        if given.peer is not None and isinstance(given.peer.door, PrefillHandoff):
            given.peer.door.first_token(handoff, token)

    def drop(self, handoff: str, why: str) -> None:
        """The prompt is not computed to its end, or its blocks are needed."""
        given = self._prompts.get(handoff)
        if given is None:
            self._remember_dropped(handoff, why)
            wanted_by = self._wants.pop(handoff, None)
            if wanted_by is not None:
                self._withhold(wanted_by, handoff, why)
        elif given.peer is None:
            self._remember_dropped(handoff, why)
            self._release(given, why)
        elif isinstance(given.peer.door, PrefillHandoff):
            given.peer.door.cancel(handoff, why)

    # ---------------------------------------------------------------- as the decode side

    def meet(self, address: str) -> _Peer | None:
        """The prefill engine at an address; this one introduces itself if it has not done that."""
        for peer in self._peers:
            if peer.prefills and peer.address == address and not peer.lost:
                return peer
        patience = ChannelSettings(open_s=self._settings.times.suspect_s)
        try:
            require_listener(address)
            channel = dial(address, name=self._card.name, settings=patience)
        except (UnavailableError, ValueError) as error:
            log.warning("cannot dial a prefill engine: address=%s cause=%s", address, error)
            return None
        peer = _Peer(channel, prefills=True, address=address, deadline=_soon(self._open_s))
        self._peers.append(peer)
        return peer

    def claim(self, claim: PromptClaim) -> None:
        """Claims a prompt; it ends with one `ClaimEnded`."""
        if claim.handoff in self._claims:
            self._report(ClaimEnded(claim.handoff, why="its name is in use"))
            return
        peer = self.meet(claim.address)
        if peer is None:
            self._report(ClaimEnded(claim.handoff, why=f"cannot dial {claim.address!r}"))
            return
        self._claims[claim.handoff] = peer
        if peer.door is None:
            peer.queued.append(claim)
        else:
            self._begin(peer, claim)

    def cancel_claim(self, handoff: str) -> None:
        """The request was aborted; its `ClaimEnded` follows."""
        peer = self._claims.get(handoff)
        if peer is None:
            return
        queued = [each for each in peer.queued if each.handoff != handoff]
        if len(queued) < len(peer.queued):
            peer.queued = queued
            self._end_claim(handoff, why="cancelled")
        elif peer.door is not None:
            peer.door.cancel(handoff)

    def spare(self, address: str, handoff: str) -> None:
        """A prompt at a prefill engine is not needed."""
        for peer in self._peers:
            if peer.prefills and peer.address == address:
                self._spare(peer, handoff)

    # ---------------------------------------------------------------- what the thread calls

    def step(self) -> None:
        while (channel := self._door.accept()) is not None:
            self._peers.append(_Peer(channel, prefills=False, deadline=_soon(self._open_s)))
        # Also a caller whose pair is not open: otherwise the descriptor stays readable.
        self._listener.look(frozenset())
        for rank, channel in enumerate(self._ranks):
            for message in receive(channel)[0]:
                self._on_rank(rank, message)
        for peer in list(self._peers):
            if not peer.lost:
                self._hear(peer)
            if peer.door is not None:
                for result in peer.door.step():
                    self._on_result(peer, result)
        self._look_at_clock(time.monotonic())
        for peer in [each for each in self._peers if each.lost and not each.handoffs]:
            self._close(peer)

    @property
    def has_work(self) -> bool:
        return any(door.has_work for door in self._doors)

    @property
    def waitables(self) -> list[Waitable]:
        lines = [each for door in self._doors for each in door.waitables]
        channels = [peer.channel for peer in self._peers if not peer.lost]
        # A rank that has ended is no longer waited for: it would be ready for ever.
        ranks = [channel for channel in self._ranks if channel.is_open]
        return [self._door, *ranks, *channels, *lines]

    @property
    def descriptors(self) -> list[int]:
        # A channel that opens has nothing to receive, but has to be spoken to.
        opening = [
            peer.channel.descriptor for peer in self._peers if not peer.pair and not peer.lost
        ]
        doors = [fd for door in self._doors for fd in door.descriptors]
        return [self._listener.descriptor, *opening, *doors]

    def next_deadline(self) -> float | None:
        dues = [door.next_deadline() for door in self._doors]
        dues += [peer.deadline for peer in self._peers if peer.door is None]
        dues += [given.deadline for given in self._prompts.values() if given.peer is None]
        return min((due for due in dues if due is not None), default=None)

    def close(self) -> None:
        for peer in self._peers:
            if peer.door is not None:
                peer.door.close()
            peer.channel.close()
        for channel in self._ranks:
            channel.close()
        self._listener.close()
        self._door.close()

    # ---------------------------------------------------------------- peers

    @property
    def _doors(self) -> list[PrefillHandoff | DecodeHandoff]:
        return [peer.door for peer in self._peers if peer.door is not None]

    def _hear(self, peer: _Peer) -> None:
        if peer.prefills and not peer.introduced and peer.channel.is_open:
            peer.introduced = True
            send(peer.channel, Introduce(card=self._card))
            for handoff in peer.spared:
                send(peer.channel, SparePrompt(handoff=handoff))
            peer.spared.clear()
        try:
            messages, end = receive(peer.channel)
        except PeerError as error:
            self._lose(peer, str(error))
            return
        for message in messages:
            if not peer.lost:
                self._on_peer(peer, message)
        if end:
            peer.gone = not peer.lost
            self._lose(peer, end)

    def _on_peer(self, peer: _Peer, message: AnyMessage) -> None:
        match message:
            case Introduce(card=card) if not peer.prefills and peer.pair is None:
                self._admit(peer, card)
            case Introduced(card=card) if peer.prefills and peer.pair is None:
                self._open_pair(peer, PairCard(prefill=card, decode=self._card))
            case IntroductionRefused(why=why) if peer.prefills:
                self._lose(peer, why)
            case WantPrompt(handoff=handoff) if not peer.prefills and peer.door is not None:
                self._want(peer, handoff)
            case SparePrompt(handoff=handoff) if not peer.prefills:
                self._wants.pop(handoff, None)
                given = self._prompts.get(handoff)
                if given is None or given.peer in {None, peer}:
                    self.drop(handoff, "not needed")
            case WithholdPrompt(handoff=handoff, why=why) if peer.prefills:
                if handoff in peer.handoffs and peer.door is not None:
                    peer.door.cancel(handoff, why)
            case _:
                self._lose(peer, f"{type(message).__name__} is not for now")

    def _admit(self, peer: _Peer, card: EngineCard) -> None:
        if why := self._card.difference(card):
            send(peer.channel, IntroductionRefused(why=why))
            self._lose(peer, why)
            return
        for other in self._peers:
            if other is not peer and other.pair is not None and other.pair.decode == card:
                # It has called again, so its earlier channel is gone.
                self._lose(other, "introduced anew")
        self._open_pair(peer, PairCard(prefill=self._card, decode=card))

    def _open_pair(self, peer: _Peer, pair: PairCard) -> None:
        if any(other.pair is not None and other.pair.names == pair.names for other in self._peers):
            self._lose(peer, "an earlier pair of these engines is being closed")
            return
        peer.pair = pair
        peer.missing = set(range(len(self._ranks)))
        for channel in self._ranks:
            send(channel, OpenSide(pair=pair))

    def _on_rank(self, rank: int, message: AnyMessage) -> None:
        if not isinstance(message, SideAnswer):
            return
        peer = self._peer_of(message.names)
        if peer is None:
            return
        if message.why:
            self._refuse(peer, f"rank {rank}: {message.why}")
        elif rank in peer.missing:
            peer.missing.discard(rank)
            if not peer.missing:
                self._open_door(peer)

    def _peer_of(self, names: PairNames) -> _Peer | None:
        for peer in self._peers:
            if peer.pair is not None and not peer.lost and peer.pair.names == names:
                return peer
        return None

    def _open_door(self, peer: _Peer) -> None:
        assert peer.pair is not None
        open_side = open_decode if peer.prefills else open_prefill
        try:
            peer.door = open_side(
                peer.pair.to_pair(),
                settings=self._settings,
                timeout_s=self._open_s,
                listener=self._listener,
            )
        except (PenstockError, ValueError) as error:
            self._refuse(peer, str(error))
            return
        log.info("a pair is open: prefill=%s decode=%s", *peer.pair.names)
        if not peer.prefills:
            send(peer.channel, Introduced(card=self._card))
            return
        queued, peer.queued = peer.queued, []
        for claim in queued:
            self._begin(peer, claim)

    def _refuse(self, peer: _Peer, why: str) -> None:
        if not peer.prefills:
            send(peer.channel, IntroductionRefused(why=why))
        self._lose(peer, why)

    def _lose(self, peer: _Peer, why: str) -> None:
        """The other engine is gone or refused: what is under way ends, then the pair closes."""
        if peer.lost:
            return
        peer.lost = why
        log.warning(
            "a pair is closed: prefill=%s decode=%s cause=%s",
            *(peer.pair.names if peer.pair is not None else ("", "")),
            why,
        )
        for claim in peer.queued:
            self._end_claim(claim.handoff, why=why)
        peer.queued.clear()
        for handoff in [name for name, wanted in self._wants.items() if wanted is peer]:
            del self._wants[handoff]
        if peer.door is not None:
            for handoff in list(peer.handoffs):
                peer.door.cancel(handoff, why)

    def _close(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        if peer.door is not None:
            peer.door.close()
        if peer.pair is not None:
            for channel in self._ranks:
                send(channel, CloseSide(names=peer.pair.names))
        peer.channel.close()

    # ---------------------------------------------------------------- handoffs

    def _want(self, peer: _Peer, handoff: str) -> None:
        given = self._prompts.get(handoff)
        if given is None and handoff in self._dropped:
            self._withhold(peer, handoff, self._dropped[handoff])
        elif given is None:
            self._wants[handoff] = peer
            if len(self._wants) > WANTS_MAX:
                oldest, wanted_by = self._wants.popitem(last=False)
                self._withhold(wanted_by, oldest, "too many prompts are wanted")
        elif given.peer is None:
            self._offer(given, peer)
        else:
            self._withhold(peer, handoff, "it was offered to another engine")

    def _remember_dropped(self, handoff: str, why: str) -> None:
        self._dropped[handoff] = why
        if len(self._dropped) > WANTS_MAX:
            self._dropped.popitem(last=False)

    def _offer(self, given: _Given, peer: _Peer) -> None:
        assert isinstance(peer.door, PrefillHandoff)
        prompt, ranks = given.prompt, len(self._ranks)
        groups = len(prompt.first_blocks)
        try:
            offers = peer.door.offer_by_rank(
                prompt.handoff,
                prompt.tokens,
                slots=[()] * groups * ranks,
                first_blocks=[*prompt.first_blocks] * ranks,
                origin=prompt.origin,
                timeout_s=self._settings.times.lease_s,
            )
        except (UnavailableError, CapacityError, ValueError) as error:
            self._withhold(peer, prompt.handoff, str(error))
            self._release(given, str(error))
            return
        given.peer = peer
        peer.handoffs.add(prompt.handoff)
        assert peer.pair is not None
        for rank, channel in enumerate(self._ranks):
            own = offers[rank * groups : (rank + 1) * groups]
            send(channel, AdmitOffer(decode=peer.pair.decode.name, offers=own))
        if given.first_token is not None:
            peer.door.first_token(prompt.handoff, given.first_token)

    def _withhold(self, peer: _Peer, handoff: str, why: str) -> None:
        if not peer.lost:
            send(peer.channel, WithholdPrompt(handoff=handoff, why=why))

    def _release(self, given: _Given, outcome: str) -> None:
        handoff = given.prompt.handoff
        del self._prompts[handoff]
        for channel in self._ranks:
            send(channel, ForgetPrompt(handoff=handoff))
        self._report(PromptReleased(handoff, outcome))

    def _begin(self, peer: _Peer, claim: PromptClaim) -> None:
        assert isinstance(peer.door, DecodeHandoff)
        assert peer.pair is not None
        try:
            peer.door.claim_by_rank(
                claim.handoff,
                claim.tokens,
                slots=[*claim.slots] * len(self._ranks),
                origin=claim.origin,
                timeout_s=self._settings.times.handoff_s,
                part_tokens=peer.pair.prefill.step_tokens,
            )
        except (UnavailableError, CapacityError, ValueError) as error:
            self._end_claim(claim.handoff, why=str(error))
            return
        peer.handoffs.add(claim.handoff)
        send(peer.channel, WantPrompt(handoff=claim.handoff))

    def _spare(self, peer: _Peer, handoff: str) -> None:
        if peer.introduced and not peer.lost:
            send(peer.channel, SparePrompt(handoff=handoff))
        else:
            peer.spared.append(handoff)

    def _on_result(self, peer: _Peer, result: HandoffResult) -> None:
        peer.handoffs.discard(result.handoff)
        if peer.prefills:
            self._end_claim(result.handoff, delivered=result.delivered, why=result.why)
        elif (given := self._prompts.get(result.handoff)) is not None:
            if not result.delivered:
                # Another engine may ask for it, while it is still being computed.
                self._remember_dropped(result.handoff, result.why or result.outcome.value)
            self._release(given, result.outcome.value)

    def _end_claim(self, handoff: str, *, delivered: bool = False, why: str = "") -> None:
        peer = self._claims.pop(handoff)
        if not delivered:
            self._spare(peer, handoff)
        lost = peer.gone and not delivered
        self._report(ClaimEnded(handoff, delivered=delivered, why=why, lost=lost))

    def _report(self, event: HandoffEvent) -> None:
        self.events.append(event)
        self.on_event()

    def _look_at_clock(self, now: float) -> None:
        for peer in self._peers:
            if peer.door is None and not peer.lost and now >= peer.deadline:
                self._lose(peer, f"it did not open within {self._open_s:g} s")
        late = [each for each in self._prompts.values() if each.peer is None]
        for given in late:
            if now >= given.deadline:
                self.drop(given.prompt.handoff, "nobody asked for it in time")


def _soon(seconds: float) -> float:
    return time.monotonic() + seconds
