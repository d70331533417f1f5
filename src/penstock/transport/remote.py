"""What every way of remote writing does: bytes land in another rank's memory, with a notice.

    target                                        writer
    area = target.open_area(peer, size)
    area.description ──── control channel ────→   link = connect(area.description)
                                                  link.post([Span(…)], notice)
    target.notices() ←──── bytes, then notice ──  link.observe(budget_bytes=…) → WriteDone
    target.retire(area)
    target.fence(area) → NotYet … Fenced
    target.free(area)

The writer alone decides when its bytes move, as with RDMA: the target is not asked, and does
not have to be awake. So the interface fits engines that write by hardware: `post` submits,
`observe` looks at completions (and does a bounded share of the work where no hardware does it),
a notice travels with the write.

The one rule: memory that somebody else may still write to is never given to anybody.
Retiring an area ends our interest in it, not the writer's ability to write; only the transport's
own *fence* does, and `free` refuses before it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

NOTICE_BYTES_MAX = 128 << 10
"""A notice is refused when it is longer: the sums of sixteen thousand cells fit."""
POSTED_MAX = 4096
"""A link takes no more writes than this before some of them have ended."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of the writer, and where in the area they go."""

    source: NDArray[np.uint8]
    """One axis, without gaps. It must not change until its write has ended."""
    offset: int


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The bytes of a write are there, and its notice was given."""

    number: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A write has ended; which of its bytes are there is unknown."""

    number: int
    cause: str


WriteEnd = WriteDone | WriteFailed


@dataclass(frozen=True, slots=True)
class Fenced:
    """Nothing can write to the area any more."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """Something may still write to the area."""

    cause: str


@dataclass(frozen=True, slots=True)
class Notice:
    """What a writer said with a write: `area` holds its bytes."""

    area: Area
    payload: bytes


PinMemory = Callable[[Any], Callable[[], None]]
"""Makes memory, an array of bytes, fit for the copies of a device; what it returns undoes that.
It is undone before the memory goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffAddresses:
    """Where a rank is, and whom it hands KV to or gets it from: `tcp://HOST:PORT`, `ipc://PATH`.

    A transport that listens on a network does so on the interface of the own ones.
    """

    own: Sequence[str] = ()
    """Of the rank, if it listens, and of its engine's scheduler."""
    peers: Sequence[str] = ()
    """Of the other engine and its ranks."""


class Memory(Protocol):
    """Bytes of an area: an array, or a tensor of bytes where they lie on a device."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, at: slice, /) -> Any:  # noqa: ANN401 - of its own kind
        """Some of them, where they are."""
        ...


class Area(Protocol):
    """Memory of a target that one peer can write to."""

    @property
    def peer(self) -> str:
        """Whose it is, for messages."""
        ...

    @property
    def memory(self) -> Any:  # noqa: ANN401 - an array, or a tensor where it lies on a device
        """Its bytes, as they are at this moment: see `Memory`."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it has its description; some transports need a moment for that."""
        ...

    @property
    def failure(self) -> str:
        """Why it is of no use any more, where the transport knows; otherwise empty."""
        ...

    @property
    def description(self) -> bytes:
        """What its writer needs to connect; whoever has it can."""
        ...


class Target(Protocol):
    """The side that is written to."""

    def open_area(self, peer: str, size: int) -> Area:
        """Memory of at least `size` bytes for one writer. What it holds is of no meaning."""
        ...

    def notices(self) -> list[Notice]:
        """Takes the notices that arrived, and lets writers connect; never waits.

        Notices of one link come in the order of its writes here; callers that want to use
        engines without that order do not rely on it.
        """
        ...

    def retire(self, area: Area) -> None:
        """Ends our interest in an area: no notice of it is taken any more.

        Its description is of no use from then on, to who has not connected. Twice does no harm.
        """
        ...

    def fence(self, area: Area) -> Fenced | NotYet:
        """Whether nothing can write to a retired area any more.

        Raises:
            ValueError: the area is not retired, or was freed.
        """
        ...

    def free(self, area: Area) -> None:
        """Gives the memory of an area back, for others.

        Raises:
            ValueError: the area is not retired and fenced, or was freed before.
        """
        ...

    @property
    def descriptor(self) -> int | None:
        """Readable while there are notices to take or writers to let in, or an area became ready.

        Nothing where the transport has no such descriptor: then its owner has to ask `notices`.
        """
        ...

    @property
    def watches_fences(self) -> bool:
        """Whether `fence_descriptor` shows when a fence holds; otherwise ask `fence` again."""
        ...

    def fence_descriptor(self, area: Area) -> int | None:
        """Becomes readable when the fence of a retired area holds.

        Nothing if the fence holds already, or if fences cannot be watched.
        """
        ...

    @property
    def open_bytes(self) -> int:
        """Bytes of areas that are in use."""
        ...

    @property
    def retired_bytes(self) -> int:
        """Bytes of areas that are retired and not freed."""
        ...

    def close(self) -> None:
        """Gives everything back; nothing else is called after this."""
        ...


class WriterLink(Protocol):
    """The way of one writer to one area."""

    def post(
        self, spans: Sequence[Span], notice: bytes, *, packed: Sequence[tuple[int, int]] = ()
    ) -> int:
        """Begins a write: the bytes of all spans, then the notice. Returns its number.

        Args:
            spans: bytes of the writer.
            notice: what the target gets with them.
            packed: offset and length of the windows that were packed for this write.

        Raises:
            ValueError: a span is not within the area, or the notice is too long.
            CapacityError: `POSTED_MAX` writes have not ended yet.
            UnavailableError: the link was closed.
        """
        ...

    def window(self, offset: int, length: int) -> Memory | None:
        """These bytes of the area, for who packs into them and then posts a write of them.

        Nothing where the area cannot be reached like this, or not yet. The window is not to be
        used after `close`.

        Raises:
            ValueError: it is not within the area.
            UnavailableError: the link was closed or has failed.
        """
        ...

    def observe(self, *, budget_bytes: int) -> tuple[list[WriteEnd], int]:
        """Which writes have ended since, and how many bytes this call moved itself.

        Every posted write ends exactly once. A call moves about `budget_bytes` at most, and
        something as long as something can be moved.
        """
        ...

    @property
    def descriptor(self) -> int | None:
        """Readable when a link that waits for its target may go on; nothing if none ever waits."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a posted write has not ended."""
        ...

    def close(self) -> None:
        """Gives the way back: this process writes nothing after this returns.

        Writes that have not ended are given up. Where something else moves their bytes, some may
        still land; the target's fence is for that.
        """
        ...
