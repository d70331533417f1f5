"""What the drivers of all four parties share: messages, timers, effects, waiting.

    length of the message (4 bytes, little-endian), the message, the attachment

| message  | attachment                                                                        |
|----------|-----------------------------------------------------------------------------------|
| `Claim`  | the description of the landing area, for the writer to connect                     |
| `Expect` | `Content`: how long the prompt is, and the keys that its sums are bound to          |

An attachment travels with every repetition of its message, so that losing one costs no more
than losing the message.

    step()   takes what came, lets timers expire, does a bounded share of the work: never waits
    wait()   one poll over lines, notices and fences, until a deadline

A driver belongs to one thread, that of its engine. With lines and a data transport of one
process and a clock of the test's own it is deterministic; production uses ZeroMQ, shared memory
and the monotonic clock.

The rules:

- What arrives is read as exactly what was sent, or it raises `PeerError`.
- The machine decides. A driver carries out its effects in their order, and gives every end back to
  it exactly once.
"""

from __future__ import annotations

import logging
import math
import select
import time
from collections import Counter, deque
from operator import index
from typing import TYPE_CHECKING, Annotated, Generic, NamedTuple, TypeVar

import msgspec

from penstock.errors import InvariantViolation, PeerError
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.effects import HandoffEnded, Send
from penstock.handoff.protocol.identity import COLLEAGUES, NAME_CHARS_MAX, Life
from penstock.handoff.protocol.messages import (
    INDEX_MAX,
    MESSAGE_BYTES_MAX,
    SLOT_COUNT_MAX,
    decode,
    encode,
)
from penstock.handoff.protocol.party import Liveness, Party, Standing
from penstock.transport.base import FRAME_BYTES_MAX
from penstock.transport.waiting import wait_any
from penstock.vocabulary.frames import FrameVersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.handoff.driver.lines import Lines
    from penstock.handoff.protocol.effects import AnyEffect
    from penstock.handoff.protocol.messages import AnyMessage
    from penstock.handoff.protocol.party import Peer


_LENGTH_BYTES = 4
_POLL_MS_MAX = 3_600_000
"""One wait is no longer: who waits looks again."""
KEY_BYTES_MAX = 64
KEY_COUNT_MAX = 1 << 18
TOKEN_COUNT_MAX = 1 << 31
CONTENT_BYTES_MAX = FRAME_BYTES_MAX - MESSAGE_BYTES_MAX - _LENGTH_BYTES
"""An encoded content of this size fits a frame with any message."""


class Envelope(NamedTuple):
    """A message and its attachment, empty for most."""

    message: AnyMessage
    attachment: bytes = b""


class Content(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a decode rank has to know of a prompt beside its grids."""

    token_count: Annotated[int, msgspec.Meta(ge=1, le=TOKEN_COUNT_MAX)]
    keys: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(min_length=1, max_length=KEY_BYTES_MAX)], ...],
        msgspec.Meta(max_length=KEY_COUNT_MAX),
    ]
    """Of the blocks that travel, in blocks of the *source*, the first missing one first."""


_ENCODER = msgspec.msgpack.Encoder()
_CONTENTS = msgspec.msgpack.Decoder(Content)


def seal(message: AnyMessage, attachment: bytes = b"") -> bytes:
    """The frame of a message with its attachment.

    Raises `ValueError`: the frame would be longer than `FRAME_BYTES_MAX`.
    """
    inner = encode(message)
    frame = b"".join((len(inner).to_bytes(_LENGTH_BYTES, "little"), inner, attachment))
    if len(frame) > FRAME_BYTES_MAX:
        kind = type(message).__name__
        raise ValueError(f"a {kind} has {len(frame)} bytes, at most {FRAME_BYTES_MAX} may travel")
    return frame


def unseal(frame: bytes) -> Envelope:
    """What `seal` put into a frame.

    Raises `PeerError`: the frame makes no sense here.
    """
    length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if len(frame) < end or len(frame) < _LENGTH_BYTES:
        raise PeerError(f"a frame of {len(frame)} bytes has no message of {length}")
    return Envelope(decode(frame[_LENGTH_BYTES:end]), frame[end:])


def encode_content(content: Content) -> bytes:
    """As it is attached."""
    return _ENCODER.encode(content)


def decode_content(attachment: bytes) -> Content:
    """The content that was attached.

    Raises `PeerError`: it is none.
    """
    try:
        return _CONTENTS.decode(attachment)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerError(f"an attachment of {len(attachment)} bytes is no content: {error}") from (
            error
        )


# Arguments of an engine's calls. A value that no message can carry must be found here, before
# anything changes: at the send it would be found in `step()`, and again at every resend.


def handoff_name(handoff: object) -> str:
    """The name of a handoff.

    Raises `TypeError`: it is no text; `ValueError`: it is empty or too long.
    """
    if not isinstance(handoff, str):
        raise TypeError(f"handoff is {handoff!r}, must be a str")
    if not 0 < len(handoff) <= NAME_CHARS_MAX:
        raise ValueError(
            f"handoff has {len(handoff)} characters, must have from 1 to {NAME_CHARS_MAX}"
        )
    return handoff


def numbers(name: str, values: Iterable[object], *, end: int = INDEX_MAX + 1) -> tuple[int, ...]:
    """Whole numbers from 0 up to `end`, as plain `int`.

    Raises `TypeError`: one of them is no whole number; `ValueError`: one of them is out of range.
    """
    try:
        found = tuple(index(value) for value in values)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"{name} must be whole numbers: {error}") from error
    wrong = [number for number in found if not 0 <= number < end]
    if wrong:
        raise ValueError(f"{name} has {wrong[0]}, must be from 0 to {end - 1}")
    return found


def slot_numbers(
    name: str, values: Iterable[object], *, end: int = INDEX_MAX + 1
) -> tuple[int, ...]:
    """Slots of one rank."""
    found = numbers(name, values, end=end)
    if len(found) > SLOT_COUNT_MAX:
        raise ValueError(f"{name} are {len(found)}, must be at most {SLOT_COUNT_MAX}")
    return found


def block_keys(keys: Sequence[object]) -> tuple[bytes, ...]:
    """Keys of blocks.

    Raises `TypeError`: one of them is not bytes; `ValueError`: one of them is empty or too long, or
    there are too many.
    """
    for key in keys:
        if not isinstance(key, bytes):
            raise TypeError(f"keys has {key!r}, must be bytes")
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise ValueError(f"keys has one of {len(key)} bytes, must have 1 to {KEY_BYTES_MAX}")
    if len(keys) > KEY_COUNT_MAX:
        raise ValueError(f"keys are {len(keys)}, must be at most {KEY_COUNT_MAX}")
    return tuple(keys)  # type: ignore[arg-type]


def whole_number(name: str, value: object, *, first: int = 0, end: int = INDEX_MAX + 1) -> int:
    """One whole number from `first` up to `end`, as a plain `int`.

    Raises `TypeError`: it is none; `ValueError`: it is out of range.
    """
    (number,) = numbers(name, [value], end=end)
    if number < first:
        raise ValueError(f"{name} is {number}, must be from {first} to {end - 1}")
    return number


def _poll(descriptors: Sequence[int], deadline: float) -> bool:
    """Waits until one of them is readable or the deadline has passed; whether one is."""
    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    left_ms = 1000 * (deadline - time.monotonic())
    # Rounded up: a wait that ends early would be repeated, with nothing left to wait for.
    return bool(poll.poll(math.ceil(min(max(0.0, left_ms), _POLL_MS_MAX))))


_log = logging.getLogger(__name__)

MachineT = TypeVar("MachineT", bound=Party)


class PartyDriver(Generic[MachineT]):
    """One party with its lines; the drivers of the four roles are its children."""

    def __init__(
        self, machine: MachineT, lines: Lines, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.machine = machine
        self.lines = lines
        self.refused: Counter[str] = Counter()
        """What came and was not given to the machine, by reason."""
        self.parts_moved = 0
        """Parts of KV that were written and notified, or verified and put away."""
        self.bytes_moved = 0
        self.unsent = 0
        """Messages for which there was no line, or no room on it."""
        self._clock = clock
        self._liveness = Liveness(machine.settings.times)
        self._peers: list[tuple[str, Peer]] = []
        """As they stood when it was last decided whom to watch."""
        self._watch_until = 0.0
        """Nothing is due before; messages only put it off."""
        self._ended: deque[HandoffEnded] = deque()
        self._claims: dict[tuple[str, str], msg.Claim] = {}
        """Claims to send at the end of the step."""
        self._held: dict[tuple[str, str], msg.Claim] = {}
        """Claims to send later, together with those of the steps until then."""
        self._closed = False

    @property
    def life(self) -> Life:
        """Which life of which party this is."""
        return self.machine.life

    def step(self) -> list[HandoffEnded]:
        """Does what there is to do, as far as a step goes; returns the handoffs that ended."""
        now = self._clock()
        came = self.lines.receive()
        # After it: a line that opened just now is not shown by any descriptor.
        for name in self.lines.opened():
            self._greet(name)
        for name, frame in came:
            self._on_frame(name, frame, now)
        self._work(now)
        due = self.machine.next_deadline()
        if due is not None and due <= now:
            self._carry_out(self.machine.handle_timer(now))
        self._keep_watch(now)
        self._send_claims()
        return self.take_ended() if self._ended else []

    def take_ended(self) -> list[HandoffEnded]:
        """The handoffs that ended since the last call: an engine's own call may end one, too."""
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def wait(self, deadline: float, descriptors: Sequence[int] = ()) -> None:
        """Waits for something to do, at most until `deadline` on the driver's clock.

        `descriptors` are the engine's own: it wakes up for them, too.
        """
        if self.has_work:
            return
        own, asked = self._descriptors(), self.lines.waitables
        # Asking the lines takes longer than this look, and `step` asks them anyway.
        if own and asked and _poll(own, 0.0):
            return
        until = self.next_deadline()
        until = deadline if until is None else min(until, deadline)
        watched = [*self.lines.descriptors, *own, *descriptors]
        if asked:
            wait_any(asked, watched, deadline=until)
        else:
            _poll(watched, until)

    @property
    def descriptors(self) -> list[int]:
        """What to wait for beside `lines.waitables`, for who does not use `wait`."""
        return [*self.lines.descriptors, *self._descriptors()]

    @property
    def landing_bytes(self) -> int:
        """Bytes of landing areas, open and retired ones; decode ranks have them."""
        return 0

    def drive(self, until: float) -> None:
        """Looks at a device until then; see `PrefillRankDriver.drive`. Others have none."""

    @property
    def has_work(self) -> bool:
        """Whether the next step has something to do, whatever comes."""
        return bool(self._ended or self._claims)

    def next_deadline(self) -> float | None:
        """When `step` should be called although nothing came."""
        # What was last known of silent peers will do: a wake-up too early finds out more.
        silent = self._watch_until or self._liveness.next_deadline()
        own, line = self.machine.next_deadline(), self.lines.next_deadline()
        due = min(
            math.inf if own is None else own,
            math.inf if line is None else line,
            math.inf if silent is None else silent,
        )
        return None if due == math.inf else due

    def colleague_died(self, name: str) -> None:
        """The supervisor has *seen* a colleague's process dead.

        One that was never met is left alone.
        """
        if name in self.machine.peers:
            self._carry_out(self.machine.suspect(name, self._clock()))

    def close(self) -> None:
        """Ends the lines. Twice does no harm."""
        if not self._closed:
            self._closed = True
            self.lines.close()

    # What the roles bring.

    def _work(self, now: float) -> None:
        """The role's own share of a step."""

    def _act(self, effect: AnyEffect) -> None:
        """Carries out an effect that only this role has; the schedulers have none."""
        raise InvariantViolation(f"{effect} is not an effect of {type(self.machine).__name__}")

    def _attach(self, message: msg.AnyMessage) -> bytes:  # noqa: ARG002 - for the roles
        """What goes with a message."""
        return b""

    def _admits(
        self,
        message: msg.AnyMessage,  # noqa: ARG002 - for the roles
        attachment: bytes,  # noqa: ARG002
    ) -> bool:
        """Takes what came with a message; `False` keeps it from the machine."""
        return True

    def _descriptors(self) -> Sequence[int]:
        """What becomes readable when the role has something to do."""
        return ()

    # Messages.

    def _on_frame(self, name: str, frame: bytes, now: float) -> None:
        try:
            envelope = unseal(frame)
        except FrameVersionError as error:
            self._refuse("version", name, str(error))
            self._carry_out(self.machine.refuse_version(name, now, version=error.theirs))
            return
        except PeerError as error:
            self._refuse("garbage", name, str(error))
            return
        message = envelope.message
        if message.sender.name != name:
            self._refuse("in another's name", name, str(message.sender))
            return
        if message.sender == self.machine.life_of(name):
            self._liveness.record_message(name, now)
        if self._admits(message, envelope.attachment):
            self._carry_out(self.machine.receive(message, now))

    def _greet(self, name: str) -> None:
        self._send(self.machine.hello_to(Life(name, 0)))

    def _send(self, message: msg.AnyMessage) -> None:
        if not self.lines.send(message.target.name, seal(message, self._attach(message))):
            self.unsent += 1

    def _refuse(self, reason: str, name: str, what: str) -> None:
        self.refused[reason] += 1
        _log.debug("refused party=%s from=%s cause=%s: %s", self.life.name, name, reason, what)

    def _fault(self, reason: str, name: str, handoff: str, error: Exception) -> None:
        """Counts and logs what should not happen; the caller fails that handoff."""
        self.refused[reason] += 1
        _log.error(
            "failed party=%s peer=%s handoff=%s cause=%s",
            *(self.life.name, name, handoff, reason),
            exc_info=error,
        )

    # Effects.

    def _carry_out(self, effects: Sequence[AnyEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(message=msg.Claim() as claim):
                    # A claim carries the whole state: the last one of a step replaces those before.
                    self._claims[claim.target.name, claim.handoff] = claim
                case Send(message=message):
                    self._send(message)
                case HandoffEnded():
                    self._ended.append(effect)
                    self._over(effect)
                case _:
                    self._act(effect)

    def _send_claims(self) -> None:
        if not self._claims and not self._held:
            return
        claims, self._claims = {**self._held, **self._claims}, {}
        urgent = set()
        for at, claim in claims.items():
            if at[0] not in urgent and not self._can_wait(claim):
                urgent.add(at[0])
        self._held = {}
        for at, claim in claims.items():
            if at[0] in urgent:
                self._send(claim)
            else:
                self._held[at] = claim

    def _can_wait(self, claim: msg.Claim) -> bool:  # noqa: ARG002 - for the roles
        """Whether a claim can wait for one that will follow soon."""
        return False

    def _over(self, ended: HandoffEnded) -> None:
        """A handoff is over on this side."""

    # Silence.

    def _keep_watch(self, now: float) -> None:
        """Asks peers of the other engine that are silent, and suspects them in the end.

        Colleagues are not watched: their death is seen, not suspected (P21).
        """
        role = self.machine.role
        peers = [*self.machine.peers.items()]
        if peers != self._peers:
            self._peers = peers
            names = tuple(
                name
                for name, peer in peers
                if (role, peer.role) not in COLLEAGUES and peer.standing is not Standing.LOST
            )
            self._liveness.watch(names, now)
            self._watch_until = 0.0
        if now < self._watch_until:
            return
        due = self._liveness.next_deadline()
        self._watch_until = math.inf if due is None else due
        if now < self._watch_until:
            return
        verdict = self._liveness.handle_timer(now)
        for name in verdict.ask:
            self._send(msg.Ping(sender=self.life, target=self.machine.life_of(name)))
        for name in verdict.suspect:
            _log.info("peer silent party=%s peer=%s cause=silence", self.life.name, name)
            self._carry_out(self.machine.suspect(name, now))
