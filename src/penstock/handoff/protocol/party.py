"""What all four machines have in common: peers and their lives, timers, silence, ends.

A question that is sent again before its answer can have come costs a slow link what it has least
of. So a party measures, for each peer, how long questions that have an immediate answer take, and
resends nothing sooner than that. As in TCP, one question of a peer is measured at a time.

Karn's rule: a question that was sent twice is not measured, because nobody knows which of the two
was answered. What it shows is that the wait was too short, or that a message was lost: the wait
doubles and stays so until a question that was sent once has had its answer.

Where messages are lost and the link is not slow, most questions are sent twice and would keep waits
long. So an answer that comes within a measured wait of the last resend is taken for the answer to
that one, and the wait is as measured again. On a link that has become slow, this is wrong: the
answer to an earlier one came just then. Therefore it happens once, and again only when a question
that was sent once has shown that what was measured still holds.

Any message is a sign of life. A peer that was silent for `ping_s` gets a `Ping`; one that was
silent for `suspect_s` is suspected, and the driver calls the machine's `suspect`. The machines
do not know this class, so that an explorer can let any peer be suspected at any time.

P20: suspicion depends on time alone. It is no proof of death: it fails requests over and retires
memory, and never frees any.

P4: a message acts only when it comes from the life of the sender that we know, and is meant for
the life that we are. Everything else is refused and counted. No message raises an exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.effects import Send
from penstock.handoff.protocol.identity import COLLEAGUES, Identity, Life, Misfit, misfit
from penstock.handoff.protocol.states import Role

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from penstock.handoff.protocol.effects import AnyEffect
    from penstock.handoff.protocol.settings import HandoffSettings, HandoffTimes


# The weights of a new sample in the mean and in the deviation, and how many deviations a wait
# allows for: RFC 6298, section 2.
_MEAN_WEIGHT = 1 / 8
_DEVIATION_WEIGHT = 1 / 4
_DEVIATIONS = 4.0


class RoundTrip(NamedTuple):
    """What is known of the round trips to one peer."""

    wait_s: float = 0.0
    """A question is sent again no sooner; 0 when nothing is known."""
    mean_s: float | None = None
    """Smoothed; none before the first sample."""
    deviation_s: float = 0.0
    doubled_at: float = float("-inf")
    heard: bool = False
    """Whether some message came since then, an answer or not: its link is not cut."""
    overdue: Hashable = None
    """The question whose resend made the wait longer, at `doubled_at`."""
    shortened: bool = False
    """Whether the wait was made as measured without a sample."""
    question: Hashable = None
    """What is being measured; none if nothing is."""
    asked_at: float = 0.0

    def asked(self, question: Hashable, now: float, *, patience_s: float) -> RoundTrip:
        """After a question was sent for the first time.

        It is measured, unless another one is: one that has waited for `patience_s` may never be
        answered, and gives way.
        """
        if self.question is not None and now < self.asked_at + patience_s:
            return self
        return self._replace(question=question, asked_at=now)

    def answered(self, question: Hashable, now: float, times: HandoffTimes) -> RoundTrip:
        """After the answer to a question came."""
        if self.question is None or question != self.question:
            if self.heard and question != self.overdue:
                return self  # As most: it says nothing about the wait.
            return self._answered_unmeasured(question, now, times)
        sample_s = now - self.asked_at
        if self.mean_s is None:
            mean_s, deviation_s = sample_s, sample_s / 2
        else:
            error_s = sample_s - self.mean_s
            mean_s = self.mean_s + _MEAN_WEIGHT * error_s
            deviation_s = self.deviation_s + _DEVIATION_WEIGHT * (abs(error_s) - self.deviation_s)
        return RoundTrip(mean_s + _DEVIATIONS * deviation_s, mean_s, deviation_s)

    def heard_from(self) -> RoundTrip:
        """After any message came, though it may answer nothing."""
        return self if self.heard else self._replace(heard=True)

    def _answered_unmeasured(
        self, question: Hashable, now: float, times: HandoffTimes
    ) -> RoundTrip:
        trip = self.heard_from()
        if self.mean_s is None or self.shortened or question != self.overdue:
            return trip
        measured_s = self.mean_s + _DEVIATIONS * self.deviation_s
        if now > self.doubled_at + max(measured_s, times.resend_s):
            return trip
        return trip._replace(wait_s=measured_s, overdue=None, shortened=True)

    def asked_again(self, question: Hashable, now: float, times: HandoffTimes) -> RoundTrip:
        """After a question that waited in vain was sent once more.

        Several may wait at a time, each with a timer of its own: the wait doubles once for all of
        them, not once for each. Beyond the cap it doubles only while messages come, and the answer
        does not: it waits behind others. A peer that is silent, because its link is cut, is asked
        as soon as the link may be healed.
        """
        trip = self._replace(question=None) if question == self.question else self
        wait_s = max(self.wait_s, times.resend_s)
        if now < self.doubled_at + wait_s:
            return trip
        most_s = times.resend_limit_s if self.heard else max(wait_s, times.resend_cap_s)
        return trip._replace(
            wait_s=min(2 * wait_s, most_s), doubled_at=now, overdue=question, heard=False
        )


class Pulse(NamedTuple):
    """When a peer last sent something, and was last asked."""

    last_message: float
    last_ping: float
    suspected: bool = False


class SilentPeers(NamedTuple):
    """The peers that have been silent."""

    ask: tuple[str, ...]
    """Send these a `Ping`."""
    suspect: tuple[str, ...]
    """Call the machine's `suspect` for these."""


class Liveness:
    """The heartbeats of one party."""

    def __init__(self, times: HandoffTimes) -> None:
        self.times = times
        self.pulses: dict[str, Pulse] = {}

    def watch(self, names: Iterable[str], now: float) -> None:
        """Names all peers that matter now; others are not asked, and forgotten."""
        before = self.pulses
        self.pulses = {name: before.get(name, Pulse(now, now)) for name in names}

    def record_message(self, name: str, now: float) -> None:
        """A message from a peer came."""
        if name in self.pulses:
            self.pulses[name] = Pulse(now, now)

    def handle_timer(self, now: float) -> SilentPeers:
        """Who is to be asked, and who is suspected now; each silence is reported once."""
        times = self.times
        suspect = tuple(
            name
            for name, pulse in self.pulses.items()
            if not pulse.suspected and now - pulse.last_message >= times.suspect_s
        )
        ask = tuple(
            name for name, pulse in self.pulses.items() if now - pulse.last_ping >= times.ping_s
        )
        for name in suspect:
            self.pulses[name] = self.pulses[name]._replace(suspected=True)
        for name in ask:
            self.pulses[name] = self.pulses[name]._replace(last_ping=now)
        return SilentPeers(ask, suspect)

    def next_deadline(self) -> float | None:
        """When `handle_timer` should be called at the latest."""
        times = self.times
        return min(
            (
                pulse.last_ping + times.ping_s
                if pulse.suspected
                else min(pulse.last_ping + times.ping_s, pulse.last_message + times.suspect_s)
                for pulse in self.pulses.values()
            ),
            default=None,
        )


TimerKey = tuple[str, ...]
"""What a timer is for, e.g. `("resend", handoff)`."""

BURIED_COUNT = 8
"""Earlier lives of each peer that are remembered; no message of an older one can still arrive."""
BACKOFF_DOUBLINGS_MAX = 16
"""How often the wait of a resend doubles at most; the cap cuts it off long before."""


class Standing(Enum):
    """What we think of a peer's life."""

    OPEN = "open"
    SUSPECTED = "suspected"
    """Silent. One message from it, and it is open again."""
    LOST = "lost"
    """Seen dead: a colleague of the same engine. Only messages of its next life count."""


class Peer(NamedTuple):
    """The life of a peer that we know, and what we think of it."""

    incarnation: int
    role: Role
    standing: Standing
    buried: tuple[int, ...] = ()
    """Its earlier lives, the latest last."""


class Party(ABC):
    """One party of handoffs; the four machines are its children."""

    role: ClassVar[Role]

    def __init__(self, identity: Identity, settings: HandoffSettings) -> None:
        if identity.role is not self.role:
            raise ValueError(f"role is {identity.role.value!r}, must be {self.role.value!r}")
        if not 0 < identity.life.incarnation < 2**64:
            raise ValueError(f"incarnation is {identity.life.incarnation}, must be 64 bits, not 0")
        self.identity = identity
        self.life = identity.life
        self.settings = settings
        self.peers: dict[str, Peer] = {}
        self.timers: dict[TimerKey, float] = {}
        self.tries: dict[TimerKey, int] = {}
        """How often each timer expired, less what came meanwhile; it makes waits longer or shorter,
        and nothing else."""
        self.round_trips: dict[str, RoundTrip] = {}
        """How long each peer takes to answer; it makes waits longer, and nothing else."""
        self.remembered: dict[tuple[str, ...], tuple[int, str]] = {}
        """The ends of handoffs that are over: an epoch, and why."""
        self.counts: dict[str, int] = {}
        """What happened how often since the start; refused messages as `refused: …`, by reason."""
        self.now = 0.0
        """The time of the input that is being dealt with."""
        self.effects: list[AnyEffect] = []

    # Calls of the driver.

    def receive(self, message: msg.AnyMessage, now: float) -> list[AnyEffect]:
        """Handles a message of another party. Never raises, whatever it is."""
        self._start(now)
        match message:
            case msg.Hello():
                self._on_hello(message)
            case msg.Welcome():
                self._on_welcome(message)
            case msg.Refused():
                self._on_refused(message)
            case _ if not self._acceptable(message):
                pass
            case msg.Ping():
                self._send(msg.Pong(sender=self.life, target=message.sender))
            case msg.Pong():
                pass
            case _:
                self._on_message(message)
        return self.effects

    def handle_timer(self, now: float) -> list[AnyEffect]:
        """Deals with every timer that is due."""
        self._start(now)
        due = sorted((due, key) for key, due in self.timers.items() if due <= now)
        for _, key in due:
            if self.timers.get(key, now + 1) <= now:
                self._expire(key)
        return self.effects

    def next_deadline(self) -> float | None:
        """When `handle_timer` should be called at the latest."""
        return min(self.timers.values(), default=None)

    def armed(self) -> tuple[TimerKey, ...]:
        """The timers that run."""
        return tuple(sorted(self.timers))

    def expire(self, timer: TimerKey, now: float) -> list[AnyEffect]:
        """Lets one timer expire, due or not: for explorers, to whom time is just another order.

        Raises `ValueError`: it does not run.
        """
        if timer not in self.timers:
            raise ValueError(f"timer {timer} does not run, only {self.armed()}")
        self._start(now)
        self._expire(timer)
        return self.effects

    def suspect(self, name: str, now: float) -> list[AnyEffect]:
        """A peer has been silent for too long, or a colleague was seen dead.

        Raises `ValueError`: nobody of this name is known.
        """
        peer = self.peers.get(name)
        if peer is None:
            raise ValueError(f"name is {name!r}, must be one of {sorted(self.peers)}")
        self._start(now)
        if peer.standing is Standing.OPEN:
            colleague = (self.role, peer.role) in COLLEAGUES
            standing = Standing.LOST if colleague else Standing.SUSPECTED
            self.peers[name] = peer._replace(standing=standing)
            self._count("suspected")
            if colleague:
                self._peer_gone(name)
            else:
                self._peer_silent(name)
        return self.effects

    def refuse_version(self, name: str, now: float, *, version: int) -> list[AnyEffect]:
        """A party speaks another version of the protocol: what needs it fails, at once (P5).

        A life that is open speaks ours, so that one such frame of it is nothing but garbage.
        """
        self._start(now)
        self._refuse("misfit")
        if not self.is_open(name):
            problem = Misfit("version", str(self.identity.version), str(version))
            self._peer_refused(name, why=f"refused: {problem}")
        return self.effects

    def is_open(self, name: str) -> bool:
        """Whether this party is known, fits, and is thought to be there."""
        peer = self.peers.get(name)
        return peer is not None and peer.standing is Standing.OPEN

    def life_of(self, name: str) -> Life:
        """The life of a party that we know; incarnation 0 when we know none."""
        peer = self.peers.get(name)
        return Life(name, peer.incarnation if peer is not None else 0)

    def hello_to(self, who: Life) -> msg.Hello:
        """How we greet another party, whose life we may not know."""
        identity = self.identity
        return msg.Hello(
            sender=self.life,
            target=who,
            version=identity.version,
            role=self.role.value,
            facts=identity.facts,
            known=self.life_of(who.name).incarnation,
        )

    # What each machine implements.

    @abstractmethod
    def _on_message(self, message: msg.AnyMessage) -> None: ...

    @abstractmethod
    def _on_timer(self, timer: TimerKey) -> None: ...

    @abstractmethod
    def _asked_by(self, timer: TimerKey) -> Iterable[str]:
        """The peers that a resend asks."""

    @abstractmethod
    def _peer_open(self, name: str) -> None:
        """A peer was met, or answers again."""

    @abstractmethod
    def _peer_silent(self, name: str) -> None:
        """A peer is suspected: it may be dead, or slow, or come back."""

    @abstractmethod
    def _peer_gone(self, name: str) -> None:
        """A life of a peer is over: seen dead, or followed by another."""

    @abstractmethod
    def _peer_refused(self, name: str, *, why: str) -> None:
        """A peer refused us, or does not fit us."""

    # Lives.

    def _acceptable(self, message: msg.AnyMessage) -> bool:
        """Whether a message comes from the life that we know, and is for the life that we are."""
        name, incarnation = message.sender
        peer = self.peers.get(name)
        if message.target.name != self.life.name:
            return self._refuse("for another party")
        if message.target.incarnation != self.life.incarnation:
            self._greet(message.sender)
            return self._refuse("for an earlier life")
        if peer is None:
            self._greet(message.sender)
            return self._refuse("from a stranger")
        if peer.incarnation != incarnation:
            if incarnation not in peer.buried:
                self._greet(message.sender)
            return self._refuse("from another life")
        if peer.standing is Standing.LOST:
            return self._refuse("from the dead")
        if peer.standing is Standing.SUSPECTED:
            self.peers[name] = peer._replace(standing=Standing.OPEN)
            self._peer_open(name)
        trip = self.round_trips.get(name)
        if trip is not None and not trip.heard:
            # Its link is not cut, however late its answers are.
            self.round_trips[name] = trip.heard_from()
        return True

    def _on_hello(self, hello: msg.Hello) -> None:
        if hello.target.name != self.life.name:
            self._refuse("for another party")
            return
        peer = _identity(hello)
        problem = misfit(self.identity, peer) if peer is not None else None
        if peer is None or problem is not None:
            fact, ours, theirs = problem or ("role", self.role.value, hello.role)
            self._refuse("misfit")
            self._send(
                msg.Refused(
                    sender=self.life, target=hello.sender, fact=fact, ours=ours, theirs=theirs
                )
            )
        elif self._is_another_life(peer.life):
            # It may be a late message of a life that is over: only an answer shows that it is not.
            self._welcome(hello)
            self._greet(peer.life)
        elif self._meet(peer):
            self._welcome(hello)

    def _on_welcome(self, welcome: msg.Welcome) -> None:
        if welcome.target != self.life:
            self._refuse("for an earlier life")
            return
        peer = _identity(welcome)
        problem = misfit(self.identity, peer) if peer is not None else None
        if peer is None or problem is not None:
            self._refuse("misfit")
            self._peer_refused(welcome.sender.name, why=f"refused: {problem or 'role'}")
        elif self._is_another_life(peer.life) and not self._follows_the_known(welcome):
            self._refuse("answers an earlier question")
            self._greet(peer.life)
        else:
            self._meet(peer)

    def _is_another_life(self, life: Life) -> bool:
        """Whether we know a life of this party, and this is one that we never knew."""
        known = self.peers.get(life.name)
        return known is not None and life.incarnation not in (known.incarnation, *known.buried)

    def _follows_the_known(self, welcome: msg.Welcome) -> bool:
        """Whether a life is later than the one that we know.

        It answers what we asked while we knew that one. Lives of a party do not overlap, so
        whoever answers lives after it; incarnations alone have no order.
        """
        return welcome.known == self.life_of(welcome.sender.name).incarnation

    def _on_refused(self, refused: msg.Refused) -> None:
        if refused.target != self.life:
            self._refuse("for an earlier life")
        elif refused.sender.incarnation in self._buried(refused.sender.name):
            self._refuse("from another life")
        else:
            why = f"refused: {refused.fact} is {refused.theirs!r} here and {refused.ours!r} there"
            self._count("refused by a peer")
            self._peer_refused(refused.sender.name, why=why)

    def _buried(self, name: str) -> tuple[int, ...]:
        peer = self.peers.get(name)
        return peer.buried if peer is not None else ()

    def _meet(self, peer: Identity) -> bool:
        """Opens a life that fits; an earlier life of the same party is over thereby."""
        name, incarnation = peer.life
        known = self.peers.get(name)
        buried: tuple[int, ...] = ()
        if known is None and len(self.peers) >= self.settings.bounds.peer_count_max:
            return self._refuse("too many peers")
        if known is not None:
            if incarnation in known.buried:
                return self._refuse("from another life")
            if incarnation == known.incarnation:
                if known.standing is Standing.LOST:
                    return self._refuse("from the dead")
                if known.standing is Standing.OPEN:
                    return True
                buried = known.buried
            else:
                buried = (*known.buried, known.incarnation)[-BURIED_COUNT:]
                self._peer_gone(name)
        self.peers[name] = Peer(incarnation, peer.role, Standing.OPEN, buried)
        self._peer_open(name)
        return True

    def _greet(self, who: Life) -> None:
        """Sends another party who we are; its answer says who it is."""
        self._send(self.hello_to(who))

    def _welcome(self, hello: msg.Hello) -> None:
        """Answers a greeting: we are here, after whatever its sender knew of us."""
        identity = self.identity
        self._send(
            msg.Welcome(
                sender=self.life,
                target=hello.sender,
                version=identity.version,
                role=self.role.value,
                facts=identity.facts,
                known=hello.known,
            )
        )

    # Timers.

    def _arm(self, timer: TimerKey, delay_s: float) -> None:
        """Starts a timer, unless it runs already."""
        if timer not in self.timers:
            self.timers[timer] = self.now + delay_s

    def _arm_resend(self, timer: TimerKey) -> None:
        """Starts a timer that waits twice as long each time it expired.

        It waits no less than the peers that it asks take to answer.
        """
        if timer not in self.timers:
            self._arm(timer, self._resend_wait_s(timer))

    def _resend_wait_s(self, timer: TimerKey) -> float:
        times = self.settings.times
        doublings = min(self.tries.get(timer, 0), BACKOFF_DOUBLINGS_MAX)
        wait_s = min(times.resend_s * 2.0**doublings, times.resend_cap_s)
        for name in self._asked_by(timer):
            trip = self.round_trips.get(name)
            if trip is not None and trip.wait_s > wait_s:
                wait_s = min(trip.wait_s, times.resend_limit_s)
        return wait_s

    def _hasten(self, timer: TimerKey, count: int = 1) -> None:
        """Something that a resend asks for has come: from now on it waits half as long.

        `count` says how many times that happened at once.

        A timer that runs is set earlier, never later: what comes from one peer must not put off
        what another one is asked for. So there are no more resends than things that came, but
        for those in which the wait grew.
        """
        tries = self.tries.pop(timer, 0) - count
        if tries > 0:
            self.tries[timer] = tries
        due = self.timers.get(timer)
        # No wait is shorter than `resend_s`, so that most need not be computed.
        if due is not None and due > self.now + self.settings.times.resend_s:
            self.timers[timer] = min(due, self.now + self._resend_wait_s(timer))

    def _asked(self, name: str, question: Hashable) -> None:
        """A peer was asked for the first time something that it answers at once."""
        trip = self.round_trips.get(name) or RoundTrip()
        self.round_trips[name] = trip.asked(
            question, self.now, patience_s=self.settings.times.resend_limit_s
        )

    def _answered(self, name: str, question: Hashable) -> None:
        trip = self.round_trips.get(name)
        if trip is not None:
            self.round_trips[name] = trip.answered(question, self.now, self.settings.times)

    def _asked_again(self, name: str, question: Hashable) -> None:
        """A peer that should have answered by now is asked once more."""
        trip = self.round_trips.get(name) or RoundTrip()
        self.round_trips[name] = trip.asked_again(question, self.now, self.settings.times)

    def _disarm(self, timer: TimerKey) -> None:
        self.timers.pop(timer, None)
        self.tries.pop(timer, None)

    def _expire(self, timer: TimerKey) -> None:
        del self.timers[timer]
        self.tries[timer] = self.tries.get(timer, 0) + 1
        self._on_timer(timer)
        if timer not in self.timers:
            self.tries.pop(timer, None)

    # Memory, counts, effects.

    def _start(self, now: float) -> None:
        """Begins to deal with an input; from here on it can change things."""
        self.now = now
        self.effects = []

    def _remember(self, name: tuple[str, ...], epoch: int, why: str = "") -> None:
        """Keeps the end of something in mind; the oldest such memory makes room."""
        self.remembered.pop(name, None)
        self.remembered[name] = (epoch, why)
        if len(self.remembered) > self.settings.bounds.remembered_count:
            del self.remembered[next(iter(self.remembered))]

    def _count(self, what: str, times: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + times

    def _refuse(self, reason: str) -> bool:
        """Counts a message that did not make sense; `False`, for the caller to return."""
        self._count(f"refused: {reason}")
        return False

    def _send(self, message: msg.AnyMessage) -> None:
        self.effects.append(Send(message=message))


def _identity(greeting: msg.Hello | msg.Welcome) -> Identity | None:
    """The sender; `None` when its role is unknown."""
    try:
        role = Role(greeting.role)
    except ValueError:
        return None
    return Identity(greeting.sender, role, greeting.facts, greeting.version)
