"""What a shared store is to Penstock: values by name, on other machines, in nobody's hands.

`SharedTier` makes blocks of values; a client of this protocol speaks to one kind of store:

    redis_blobs      Redis and Valkey        penstock[redis]
    mooncake_blobs   Mooncake Store          penstock[mooncake]
    object_blobs     S3, GCS, Azure, folder  penstock[objects]

The rules of a client:

- Several threads call it at once (`threads` of them), and each call waits, no longer than its
  `timeout_s`: then it raises `BlobStoreError`, as it does where the store cannot be reached. After
  any such error the next call works again as soon as the store does.
- When a call has returned or raised, the client does not touch the memory that it was given any
  more. A client that cannot promise that reads into memory of its own.
- A value is written once: who writes a name that is there succeeds and changes nothing. A value may
  vanish at any time, by the store's own eviction.
- Nothing that a store returns is believed: the tier verifies every byte. A client need not.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME_BYTES_MAX = 256
"""Names are ASCII: letters, digits, `/`, `-`, `_` and `.`."""


class BlobStoreError(UnavailableError):
    """The store did not do what it was asked, for a reason that is not in the request."""


class BlobRange(NamedTuple):
    """Bytes of a value, and where they go."""

    offset: int
    target: memoryview
    """Writable, contiguous, of bytes; its length is how many are wanted."""


class BlobRead(NamedTuple):
    """One value to read; its ranges ascend and do not overlap."""

    name: str
    ranges: Sequence[BlobRange]


class BlobOutcome(Enum):
    """What came of reading one value."""

    READ = "read"
    MISSING = "missing"
    """There is no value of this name."""
    SHORT = "short"
    """There is one, and it ends before a range does."""


class BlobWrite(NamedTuple):
    """One value to write."""

    name: str
    buffers: Sequence[memoryview]
    """Contiguous, of bytes; the value is all of them, one after the other."""


class BlobStore(Protocol):
    """A client of one store."""

    @property
    def threads(self) -> int:
        """How many threads should call at once."""
        ...

    def register(self, memory: memoryview) -> None:
        """Memory that buffers and targets will lie in, for clients that register memory."""
        ...

    def unregister(self, memory: memoryview) -> None:
        """The memory will not be used any more; no call uses it."""
        ...

    def exists(self, names: Sequence[str], *, timeout_s: float) -> list[bool]:
        """Which values are there, in one round trip if the store allows it."""
        ...

    def read(self, reads: Sequence[BlobRead], *, timeout_s: float) -> list[BlobOutcome]:
        """Reads values, or ranges of them, straight into memory where the store allows it."""
        ...

    def write(self, writes: Sequence[BlobWrite], *, timeout_s: float) -> list[str]:
        """Writes values: why one could not be written, or an empty text.

        The values of one call are neighbours of one chain: they are read together.
        """
        ...

    def forget(self, names: Sequence[str], *, timeout_s: float) -> None:
        """Removes values that are there and should not be."""
        ...

    def get(self, name: str, *, timeout_s: float) -> bytes | None:
        """A small record (up to 64 KiB), or `None`. It is what was created or replaced last."""
        ...

    def create(self, name: str, record: bytes, *, timeout_s: float) -> bool:
        """Writes a small record if there is none; whether it did. Two who try: one does."""
        ...

    def replace(self, name: str, record: bytes, *, timeout_s: float) -> None:
        """Writes a small record, whatever was there."""
        ...

    def close(self) -> None:
        """Gives everything back; no call is under way."""
        ...
