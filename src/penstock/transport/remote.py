"""Remote writes: bytes land in another rank's memory, with a notice; what all ways share.

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

`PostedWrites` carries writes out by copying, some bytes at a time, then the notice. There is no
thread: bytes move while somebody observes, in bounded pieces. A notice is given after the last
byte of its write, and a write is done after its notice.

`AreaBooks` knows which areas of a target are open and which are retired. An area goes this way
once, and is not freed before its fence holds:

    open ──retire──→ retired ──free, once fenced──→ (forgotten)

`ArenaPool` makes the memory of areas that other processes map, and keeps some of it for later ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from penstock.errors import CapacityError
from penstock.tiers.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Iterable

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


class MappedMemory(Protocol):
    """Memory of a device behind addresses of this process."""

    @property
    def bytes(self) -> Any:  # noqa: ANN401 - of its own kind: see `Memory`
        """All of it."""
        ...

    def close(self) -> None:
        """Takes it from its addresses. It is free when no process has it any more."""
        ...


class ExportedMemory(MappedMemory, Protocol):
    """The same, made here for one more process."""

    @property
    def fd(self) -> int:
        """What the other process maps it by; closed with the rest."""
        ...


class DeviceMemory(Protocol):
    """Makes memory of a device for areas, and maps that of others."""

    def create(self, size: int) -> ExportedMemory:
        """Memory of at least `size` bytes that was never given to anybody.

        Raises `UnavailableError`: the device has not so much, or cannot share it.
        """
        ...

    def map(self, fd: int, size: int) -> MappedMemory:
        """What another process has made; `fd` stays the caller's.

        Raises `UnavailableError`: this process cannot write to it.
        """
        ...


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


SPARE_MAX = 8
"""How many freed arenas are kept for the next areas; the memory of others goes back."""
PIECE_BYTES = 1 << 20
"""How many bytes are copied at a time: about a tenth of a millisecond."""


class Delivery(Enum):
    """What became of a notice."""

    GIVEN = "given"
    FULL = "full"
    """Too many wait for the target; try again later."""
    GONE = "gone"
    """Nobody is there to take it."""


class PostedFullError(CapacityError):
    """A link takes no more writes before some of them have ended; nothing was posted."""

    def __init__(self, *, link: str, posted: int) -> None:
        super().__init__(tier=link, wanted=1, available=0)
        self.args = (
            f"link to {link!r} has {posted} writes that have not ended, and takes no more",
        )


@dataclass(slots=True)
class _Posted:
    number: int
    spans: deque[Span]
    notice: bytes
    moved: int = field(default=0)
    """Bytes of the first span that are there."""


class PostedWrites:
    """The writes of one link, in the order in which they were posted."""

    def __init__(
        self, link: str, area_bytes: int, *, notice_bytes_max: int = NOTICE_BYTES_MAX
    ) -> None:
        self._link = link
        self._area_bytes = area_bytes
        self._notice_bytes_max = notice_bytes_max
        self._posted: deque[_Posted] = deque()
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._posted)

    def post(self, spans: Sequence[Span], notice: bytes) -> int:
        """Begins a write; see `WriterLink`."""
        for span in spans:
            self._require_within(span)
        require_notice_fits(notice, self._notice_bytes_max)
        if len(self._posted) >= POSTED_MAX:
            raise PostedFullError(link=self._link, posted=len(self._posted))
        number = self._next_number
        self._next_number += 1
        self._posted.append(_Posted(number, deque(spans), bytes(notice)))
        return number

    def advance(
        self,
        memory: NDArray[np.uint8],
        budget_bytes: int,
        deliver: Callable[[bytes], Delivery],
    ) -> tuple[list[WriteEnd], int]:
        """Moves about `budget_bytes`, and at least one piece, into `memory`."""
        ends: list[WriteEnd] = []
        spent = 0
        while self._posted:
            write = self._posted[0]
            if write.spans:
                if spent and spent >= budget_bytes:
                    break
                room = max(budget_bytes - spent, 0) or PIECE_BYTES
                spent += _move_piece(write, memory, min(room, PIECE_BYTES))
                continue
            match deliver(write.notice):
                case Delivery.GIVEN:
                    ends.append(WriteDone(write.number))
                    self._posted.popleft()
                case Delivery.FULL:
                    break
                case Delivery.GONE:
                    ends += self.fail(f"{self._link} is gone")
        return ends, spent

    def fail(self, cause: str) -> list[WriteEnd]:
        """Ends all writes that have not ended."""
        ends: list[WriteEnd] = [WriteFailed(write.number, cause) for write in self._posted]
        self._posted.clear()
        return ends

    def _require_within(self, span: Span) -> None:
        source = span.source
        if source.dtype != np.uint8 or source.ndim != 1 or not source.flags.c_contiguous:
            raise ValueError(
                f"source is an array {list(source.shape)} of {source.dtype}, must be bytes along "
                "one axis without gaps"
            )
        require_within(span.offset, len(source), self._area_bytes)


def require_notice_fits(notice: bytes, bytes_max: int = NOTICE_BYTES_MAX) -> None:
    """Refuses a notice that is too long."""
    if len(notice) > bytes_max:
        raise ValueError(f"notice has {len(notice)} bytes, must have at most {bytes_max}")


def require_within(offset: int, length: int, area_bytes: int) -> None:
    """Refuses bytes that are not in the area."""
    if offset < 0 or length < 0 or offset + length > area_bytes:
        raise ValueError(
            f"span is {length} bytes from {offset} on, must be within the {area_bytes} of the area"
        )


def _move_piece(write: _Posted, memory: NDArray[np.uint8], room: int) -> int:
    span = write.spans[0]
    count = min(room, len(span.source) - write.moved)
    start = span.offset + write.moved
    memory[start : start + count] = span.source[write.moved : write.moved + count]
    write.moved += count
    if write.moved == len(span.source):
        write.spans.popleft()
        write.moved = 0
    return count


SomeArea = TypeVar("SomeArea", bound=Area)


class AreaBooks(Generic[SomeArea]):
    """The areas of one target, which is a child of this."""

    def __init__(self) -> None:
        self._open: dict[int, SomeArea] = {}
        self._retired: dict[int, SomeArea] = {}

    @property
    def open_areas(self) -> tuple[SomeArea, ...]:
        """Areas that are in use."""
        return tuple(self._open.values())

    @property
    def retired_areas(self) -> tuple[SomeArea, ...]:
        """Areas that are not used any more, but still ours to keep."""
        return tuple(self._retired.values())

    @property
    def open_bytes(self) -> int:
        """Bytes of areas that are in use."""
        return _total(self._open.values())

    @property
    def retired_bytes(self) -> int:
        """Bytes of areas that wait for a fence, or to be freed."""
        return _total(self._retired.values())

    def _add(self, area: SomeArea) -> SomeArea:
        """Takes a new area into the books."""
        self._open[id(area)] = area
        return area

    def _mark_retired(self, area: Area) -> SomeArea | None:
        """The area as it is retired, or nothing if it was before."""
        if id(area) in self._retired:
            return None
        if id(area) not in self._open:
            raise ValueError(f"area of {area.peer!r} is not of this target, or was freed")
        known = self._open.pop(id(area))
        self._retired[id(area)] = known
        return known

    def _require_retired(self, area: Area) -> SomeArea:
        """The area, which must be retired."""
        if id(area) not in self._retired:
            raise ValueError(f"area of {area.peer!r} is not retired")
        return self._retired[id(area)]

    def _forget(self, area: Area, fence: Fenced | NotYet) -> SomeArea:
        """The area as it leaves the books."""
        known = self._require_retired(area)
        match fence:
            case NotYet(cause):
                raise ValueError(f"area of {area.peer!r} cannot be freed: {cause}")
            case Fenced():
                pass
        del self._retired[id(area)]
        return known


def _total(areas: Iterable[Area]) -> int:
    return sum(len(area.memory) for area in areas)


class ArenaPool:
    """Memory for the areas of one target.

    Args:
        huge_pages: whether to look for huge pages.
        pin: makes the memory fit for a device; see `PinMemory`.
    """

    def __init__(self, *, huge_pages: bool, pin: PinMemory | None) -> None:
        self._huge_pages = huge_pages
        self._pin = pin
        self._unpin: dict[int, Callable[[], None]] = {}
        """How to undo it, by the descriptor of an arena."""
        self._spare: list[Arena] = []

    def take(self, size: int) -> Arena:
        """An arena of at least `size` bytes; one that was given back, if one fits.

        Raises `ValueError`: `size` is less than 1.
        """
        if size < 1:
            raise ValueError(f"size is {size}, must be at least 1")
        for arena in self._spare:
            if size <= arena.size <= 2 * size:
                self._spare.remove(arena)
                return arena
        arena = Arena.create(size, name="landing", huge_pages=self._huge_pages)
        if self._pin is not None:
            self._unpin[arena.fd] = self._pin(arena.bytes)
        return arena

    def give_back(self, arena: Arena) -> None:
        """Keeps an arena that nobody can write to any more for `take`."""
        self._spare.append(arena)
        if len(self._spare) > SPARE_MAX:
            self._close_arena(self._spare.pop(0))

    def close(self, taken: Iterable[Arena]) -> None:
        """Closes all arenas: those that are `taken`, too."""
        for arena in (*taken, *self._spare):
            self._close_arena(arena)
        self._spare.clear()

    def _close_arena(self, arena: Arena) -> None:
        unpin = self._unpin.pop(arena.fd, None)
        if unpin is not None:
            unpin()
        arena.close()
