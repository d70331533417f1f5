"""One end of a ZeroMQ channel: frames in order, bounded by what the other end takes.

    dialling ──welcome──→ open ──→ closed (orderly) or failed (cause)
    awaited  ──open─────→

Each frame carries the incarnation of its sender and a sequence. A frame of another life, a
repetition and garbage are thrown away and counted; a gap fails the channel, because a frame was
lost. An end sends at most a *window* of frames and bytes before the other end has taken some;
the other end says how much it took by *credit*. So neither end keeps more than a window for the
other, and a slow one is not mistaken for a dead one.

The one rule: an end is reported after everything that came before it, and stays.
"""

from __future__ import annotations

import select
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.transport.base import (
    BacklogError,
    ChannelClosed,
    ChannelFailed,
    Empty,
    Received,
    ReceivedFrame,
    require_frame_fits,
)
from penstock.transport.waiting import wait_readable
from penstock.transport.zmq_link import (
    ChannelRefusal,
    ChannelWelcome,
    Frame,
    Kind,
    RefusalReason,
    Window,
    WireError,
    decode_credit,
    decode_frame,
    encode_credit,
    encode_frame,
)

if TYPE_CHECKING:
    from penstock.transport.zmq_link import ChannelSettings, Dialling, ZmqLink, ZmqPulse


REFUSED_MAX = 4096
"""How much garbage a peer may send before it is dropped; less is thrown away and counted."""


class ZmqChannel:
    """One end of a channel over ZeroMQ; `dial` and `Listener.accept` make them."""

    def __init__(self, name: str, *, incarnation: int, settings: ChannelSettings) -> None:
        self.name = name
        self.incarnation = incarnation
        """Of this end."""
        self.peer_incarnation: int | None = None
        """Of the other end, once it is known."""
        self.refused: Counter[RefusalReason] = Counter()
        """What arrived and was thrown away, by reason."""
        self.name_taken = False
        """Whether it was refused because a peer of its name is there and alive."""
        self._settings = settings
        self._epoll = select.epoll()
        self._link: ZmqLink | None = None
        self._pulse: ZmqPulse | None = None
        self._lost_at: float | None = None
        self._dialling: Dialling | None = None
        self._open = False
        self._opened_at = 0.0
        self._open_deadline = time.monotonic() + settings.open_s
        self._closed = False
        self._end: ChannelClosed | ChannelFailed | None = None
        self._window = Window(settings.window_frames, settings.window_bytes)
        self._sent = _Tally()
        self._sent_taken = _Tally()
        self._sequence = 0
        self._arrived: deque[bytes] = deque()
        self._arrived_tally = _Tally()
        self._taken = _Tally()
        self._credited = _Tally()
        self._expected = 0

    # The four verbs of a channel.

    def send(self, frame: bytes) -> None:
        require_frame_fits(frame)
        if self._hand_over(frame):
            return
        # Credit that was looked at wakes up nobody any more: it is used at once, or not looked at.
        self._pump()
        if self._hand_over(frame):
            return
        if not self.is_open:
            raise UnavailableError(f"channel {self.name!r} can take no frame: it {self._story()}")
        frames, frame_bytes = self._sent.minus(self._sent_taken)
        raise BacklogError(channel=self.name, frames=frames, frame_bytes=frame_bytes)

    def receive(self, *, deadline: float | None = None) -> Received:
        while True:
            answer = self._next()
            if not isinstance(answer, Empty) or deadline is None or time.monotonic() >= deadline:
                return answer
            wait_readable(self.descriptor, self._until(deadline))

    @property
    def ready(self) -> bool:
        """Whether there is anything but `Empty` to receive."""
        if not self._arrived:
            self._pump()
        return bool(self._arrived) or self._closed or self._end is not None

    def close(self) -> None:
        if self._closed:
            return
        self._post(Kind.CLOSE)
        self._closed = True
        self._arrived.clear()
        self._drop_link(linger=True)
        self._epoll.close()

    @property
    def descriptor(self) -> int:
        return self._epoll.fileno()

    @property
    def alarm(self) -> float | None:
        """When the peer will have been waited for long enough, if it is being waited for."""
        if self._closed or self._end is not None:
            return None
        if not self._open:
            return self._open_deadline
        if self._lost_at is not None:
            return self._lost_at + self._settings.settle_s
        if self._pulse is not None and not self._pulse.greeted:
            return self._opened_at + self._settings.silence_s
        return None

    @property
    def is_open(self) -> bool:
        """Whether the other end has answered, and the channel has not ended."""
        return self._open and not self._closed and self._end is None

    @property
    def was_open(self) -> bool:
        """Whether the other end has ever answered."""
        return self._open

    @property
    def failure(self) -> str | None:
        """Why the channel failed, if it did."""
        return self._end.cause if isinstance(self._end, ChannelFailed) else None

    def wait_open(self, *, deadline: float) -> bool:
        """Whether the channel is open by `deadline` on the monotonic clock; waits for that."""
        while True:
            self._pump()
            if self._open or self._end is not None or time.monotonic() >= deadline:
                return self.is_open
            wait_readable(self.descriptor, self._until(deadline))

    # What a listener and a dialling end do with it.

    def begin_dialling(self, dialling: Dialling) -> None:
        """Waits for the answer of a listener before anything else."""
        self._dialling = dialling
        dialling.watch(self._epoll)

    def begin_awaiting(
        self, link: ZmqLink, pulse: ZmqPulse, peer_incarnation: int, window: Window
    ) -> None:
        """Waits on a link for a peer that said who it is and how much it takes."""
        self._link, self._pulse = link, pulse
        self.peer_incarnation = peer_incarnation
        self._window = window
        link.watch(self._epoll)
        pulse.watch(self._epoll)

    def is_alive(self) -> bool:
        """Whether the other end is there, as far as can be known now; takes no frames in."""
        if self._link is None or self._pulse is None:
            return False
        self._link.look()
        self._pulse.look()
        lost = self._link.lost or self._pulse.lost or self._is_missing(self._pulse)
        return self.is_open and not lost

    def fail(self, cause: str) -> None:
        """Ends the channel at this end, as lost."""
        self._finish(ChannelFailed(cause))

    # What happens inside.

    def _next(self) -> Received:
        if self._closed:
            return ChannelClosed()
        if not self._arrived:
            self._pump()
        if self._arrived:
            frame = self._arrived.popleft()
            self._taken.add(frame)
            self._give_credit()
            return ReceivedFrame(frame)
        return Empty() if self._end is None else self._end

    def _pump(self) -> None:
        """Takes in all that has happened."""
        if self._closed or self._end is not None:
            return
        if self._dialling is not None:
            self._pump_dialling(self._dialling)
        if self._link is not None:
            self._pump_link(self._link)
        if self._pulse is not None:
            self._feel(self._pulse)
        if not self._open and time.monotonic() >= self._open_deadline:
            self.fail(f"no answer from {self.name} in {self._settings.open_s} s{self.hint}")

    def _pump_dialling(self, dialling: Dialling) -> None:
        match dialling.answer(self.refused):
            case None:
                return
            case ChannelRefusal(cause=cause, taken=taken):
                self.name_taken = taken
                self.fail(f"{self.name} refused: {cause}")
            case ChannelWelcome() as welcome:
                self.name = welcome.name
                link, pulse = dialling.connect(welcome)
                self.begin_awaiting(link, pulse, welcome.incarnation, welcome.window)
                self._post(Kind.OPEN)
                self._begin()
                dialling.close(self._epoll)
                self._dialling = None

    def _feel(self, pulse: ZmqPulse) -> None:
        """Gives a peer up whose pulse is lost, once nothing of it arrives any more.

        The pulse of one that closed the channel, or died, may be lost a little before its last
        frames are here and the link is lost, too. Of a peer that was stopped right after its first
        frame no pulse was ever felt: heartbeats begin when both ends have answered.
        """
        pulse.look()
        if pulse.spoke:
            self.fail(f"{self.name} sent a message where only heartbeats belong")
            return
        if not pulse.lost and not pulse.refused and not self._is_missing(pulse):
            return
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        elif now >= self._lost_at + self._settings.settle_s:
            self.fail(f"{self.name} has not answered for {self._settings.silence_s} s")

    def _is_missing(self, pulse: ZmqPulse) -> bool:
        """Whether a pulse that should have been felt by now never was."""
        if pulse.greeted or not self._open:
            return False
        return time.monotonic() >= self._opened_at + self._settings.silence_s

    @property
    def hint(self) -> str:
        """What may be wrong when there is no answer, if there is a sign of it."""
        if self._dialling is not None and self._dialling.broken_off:
            lacks = self._dialling.may_lack
            return f": it breaks off every connection, so it and this end may not {lacks}"
        return ""

    def _begin(self) -> None:
        self._open = True
        self._opened_at = time.monotonic()

    def _pump_link(self, link: ZmqLink) -> None:
        link.look()
        for parts in link.messages():
            self._lost_at = None
            try:
                self._take(parts)
            except WireError as error:
                self._refuse(error.reason)
            if self._end is not None:
                return
        # Whoever left before the channel was open may not have been its peer.
        if link.lost and (self._open or not link.binds):
            self.fail(f"the connection to {self.name} was lost")
        elif link.refused:
            self.fail(f"{self.name} was gone before the connection was made")

    def _refuse(self, reason: RefusalReason) -> None:
        self.refused[reason] += 1
        if self.refused.total() >= REFUSED_MAX:
            self.fail(f"{self.name} sent {REFUSED_MAX} messages that are none of ours")

    def _take(self, parts: list[bytes]) -> None:
        if len(parts) != 1:
            raise WireError(RefusalReason.GARBAGE, f"message has {len(parts)} parts, must have 1")
        frame = decode_frame(parts[0])
        if frame.incarnation != self.peer_incarnation:
            raise WireError(
                RefusalReason.STALE,
                f"frame is of incarnation {frame.incarnation:016x}, the channel goes to "
                f"{self.peer_incarnation or 0:016x}",
            )
        if frame.sequence < self._expected:
            raise WireError(RefusalReason.REPLAYED, f"frame {frame.sequence} was here before")
        if frame.sequence > self._expected:
            self.fail(f"frames {self._expected} to {frame.sequence - 1} of {self.name} were lost")
            return
        if self._open == (frame.kind is Kind.OPEN):
            raise WireError(RefusalReason.GARBAGE, f"{frame.kind.name} is not for now")
        self._act_on(frame)
        self._expected += 1

    def _act_on(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.OPEN:
                self._begin()
            case Kind.FRAME:
                self._arrived.append(frame.payload)
                self._arrived_tally.add(frame.payload)
                self._require_within_window()
            case Kind.CREDIT:
                self._note_credit(*decode_credit(frame.payload))
            case Kind.CLOSE:
                self._finish(ChannelClosed())

    def _require_within_window(self) -> None:
        frames, frame_bytes = self._arrived_tally.minus(self._credited)
        if frames > self._settings.window_frames or frame_bytes > self._settings.window_bytes:
            self.fail(
                f"{self.name} sent {frames} frames of {frame_bytes} bytes ahead of its credit of "
                f"{self._settings.window_frames} frames and {self._settings.window_bytes} bytes"
            )

    def _note_credit(self, frames: int, frame_bytes: int) -> None:
        known, sent = self._sent_taken, self._sent
        if not known.frames <= frames <= sent.frames:
            raise WireError(
                RefusalReason.GARBAGE, f"credit for {frames} frames, {sent.frames} were sent"
            )
        if not known.frame_bytes <= frame_bytes <= sent.frame_bytes:
            raise WireError(
                RefusalReason.GARBAGE,
                f"credit for {frame_bytes} bytes, {sent.frame_bytes} were sent",
            )
        self._sent_taken = _Tally(frames, frame_bytes)

    def _give_credit(self) -> None:
        """Gives credit for what was taken once it is a good part of the window, not per frame."""
        frames, frame_bytes = self._taken.minus(self._credited)
        due = (
            2 * frames >= self._settings.window_frames
            or 2 * frame_bytes >= self._settings.window_bytes
        )
        if not due or self._link is None or self._end is not None:
            return
        if self._post(Kind.CREDIT, encode_credit(self._taken.frames, self._taken.frame_bytes)):
            self._credited = _Tally(self._taken.frames, self._taken.frame_bytes)

    def _hand_over(self, frame: bytes) -> bool:
        if self.is_open and self._has_room(frame) and self._post(Kind.FRAME, frame):
            self._sent.add(frame)
            return True
        return False

    def _has_room(self, frame: bytes) -> bool:
        frames, frame_bytes = self._sent.minus(self._sent_taken)
        return frames < self._window.frames and frame_bytes + len(frame) <= self._window.frame_bytes

    def _post(self, kind: Kind, payload: bytes = b"") -> bool:
        if self._link is None:
            return False
        posted = self._link.send(encode_frame(kind, self.incarnation, self._sequence, payload))
        self._sequence += posted
        return posted

    def _finish(self, end: ChannelClosed | ChannelFailed) -> None:
        if self._closed or self._end is not None:
            return
        self._end = end
        self._drop_link(linger=False)

    def _drop_link(self, *, linger: bool) -> None:
        if self._link is not None:
            self._link.close(self._epoll, linger_s=self._settings.linger_s if linger else 0.0)
            self._link = None
        if self._pulse is not None:
            self._pulse.close(self._epoll)
            self._pulse = None
        if self._dialling is not None:
            self._dialling.close(self._epoll)
            self._dialling = None

    def _until(self, deadline: float) -> float:
        alarm = self.alarm
        return deadline if alarm is None else min(deadline, alarm)

    def _story(self) -> str:
        if self._closed:
            return "was closed here"
        match self._end:
            case ChannelFailed(cause):
                return f"failed: {cause}"
            case ChannelClosed():
                return "was closed there"
            case None:
                return "is not open yet"


class _Tally:
    """A count of frames and of their bytes."""

    __slots__ = ("frame_bytes", "frames")

    def __init__(self, frames: int = 0, frame_bytes: int = 0) -> None:
        self.frames = frames
        self.frame_bytes = frame_bytes

    def add(self, frame: bytes) -> None:
        self.frames += 1
        self.frame_bytes += len(frame)

    def minus(self, other: _Tally) -> tuple[int, int]:
        return self.frames - other.frames, self.frame_bytes - other.frame_bytes
