"""Frames: a mark if the protocol has one, a version byte, then one message in MessagePack.

    frames = FrameCodec(msgspec.msgpack.Decoder(AnyMessage), version=1, bytes_max=1 << 20)
    frames.decode(frames.encode(message)) == message

Every protocol between processes of Penstock is written this way: the handoff, server and
instance, scheduler and ranks, owner and ranks, engine and supervisor, and the greetings of
channels. Each has its own union of messages, its own version and its own limit.

The one rule: whatever bytes arrive, they become a message that is well formed in every field, or
a `PeerError`; never another exception.
"""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

import msgspec

from penstock.errors import PeerError

MessageT = TypeVar("MessageT")

TEXT_MAX = 1000
"""Causes and failures are for people to read, and are cut to this many characters."""
Count = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]

_encoder = msgspec.msgpack.Encoder()


def short(text: str) -> str:
    """A text as it may travel: cut to `TEXT_MAX`, without what cannot be encoded."""
    return text[:TEXT_MAX].encode("utf-8", "replace").decode("utf-8")


class FrameVersionError(PeerError):
    """A frame of another version: nothing else of it can be understood."""

    def __init__(self, problem: str, theirs: int) -> None:
        super().__init__(problem)
        self.theirs = theirs


class FrameCodec(Generic[MessageT]):
    """Encodes and decodes the messages of one protocol, in one direction or in both."""

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[MessageT],
        *,
        version: int,
        bytes_max: int,
        mark: bytes = b"",
        name: str = "a frame",
    ) -> None:
        """Describes the frames of a protocol.

        Args:
            decoder: Accepts the messages that may arrive, and nothing else.
            version: The byte that follows the mark.
            bytes_max: The longest frame, its head included.
            mark: Opens every frame; other protocols have other marks.
            name: What error messages call a frame.
        """
        self._decoder = decoder
        self._version = version
        self._bytes_max = bytes_max
        self._mark = mark
        self._name = name
        self._head = mark + bytes((version,))

    def encode(self, message: object) -> bytes:
        """The frame of a message.

        Raises:
            ValueError: it would be longer than `bytes_max`.
        """
        frame = self._head + _encoder.encode(message)
        if len(frame) > self._bytes_max:
            raise ValueError(
                f"{type(message).__name__} has {len(frame)} bytes, "
                f"must have at most {self._bytes_max}"
            )
        return frame

    def decode(self, frame: bytes) -> MessageT:
        """The message of a frame.

        Raises:
            FrameVersionError: the frame is of another version.
            PeerError: the frame is something else, too long, or damaged.
        """
        name, head_bytes = self._name, len(self._head)
        if len(frame) > self._bytes_max:
            raise PeerError(f"{name} has {len(frame)} bytes, must have at most {self._bytes_max}")
        if not frame.startswith(self._mark):
            raise PeerError(
                f"{name} begins with {frame[: len(self._mark)]!r}, must begin with {self._mark!r}"
            )
        if len(frame) < head_bytes:
            raise PeerError(f"{name} has no version, must have version {self._version}")
        if frame[head_bytes - 1] != self._version:
            theirs = frame[head_bytes - 1]
            raise FrameVersionError(
                f"{name} has version {theirs}, must have version {self._version}: "
                "both sides must be of one release",
                theirs,
            )
        try:
            return self._decoder.decode(memoryview(frame)[head_bytes:])
        # A decoder also raises the last two: for text that is not UTF-8, and for deep nesting.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise PeerError(f"{name} cannot be read: {error}") from error
