"""What a shared store is to Penstock: values by name, on other machines, in nobody's hands.

`SharedTier` makes blocks of values; a client of this protocol speaks to one kind of store:

    redis_blobs      RedisBlobs     Redis and Valkey        penstock[redis]
    mooncake_blobs   MooncakeBlobs  Mooncake Store          penstock[mooncake]
    object_blobs     ObjectBlobs    S3, GCS, Azure, folder  penstock[objects]

and those of other distributions, by their entry points (`penstock.stores`).

The rules of a client:

- Several threads call it at once (`threads` of them), and each call waits, no longer than its
  `timeout_s`: then it raises `BlobStoreError`, as it does where the store cannot be reached. After
  any such error the next call works again as soon as the store does.
- When a call has returned or raised, the client does not touch the memory that it was given any
  more. A client that cannot promise that reads into memory of its own.
- A value is written once: who writes a name that is there succeeds and changes nothing. A value may
  vanish at any time, by the store's own eviction.
- Nothing that a store returns is believed: the tier verifies every byte. A client need not. What
  is wrong with one value is the outcome of that one, and no error of the store.
- A name, range or time limit that breaks a rule of this file is a `ValueError`, before the store is
  asked: `check_names`, `check_reads` and `check_record`.

`BlobStoreSuite` in `penstock.testing` has these rules as tests.
"""

from __future__ import annotations

import re
import reprlib
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from penstock.errors import UnavailableError
from penstock.vocabulary.arguments import as_int, as_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.store.base import NearBlocks, Space
    from penstock.vocabulary.keys import Key

Answer = TypeVar("Answer")

NAME_BYTES_MAX = 256
"""Names are ASCII: letters, digits, `/`, `-`, `_` and `.`; between slashes is something that does
not begin with `.`: a name can be the path of a file."""
ASKERS = 2
"""Callers beside the threads that copy: a tier asks what is there, and reads its records, however
long copies take."""
RECORD_BYTES_MAX = 64 << 10
OFFSET_MAX = 1 << 48
TIMEOUT_S_MAX = 3_600.0
"""Longer than any load is worth waiting for; what is meant as "for ever" is a mistake."""
_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
_NAME = re.compile(rf"{_SEGMENT}(/{_SEGMENT})*", re.ASCII)


class BlobStoreError(UnavailableError):
    """The store did not do what it was asked, for a reason that is not in the request."""


class NotKeptError(BlobStoreError):
    """A record was written, but may be lost with one server: no replica has acknowledged it."""


class BlobRange(NamedTuple):
    """Bytes of a value, and where they go."""

    offset: int
    target: memoryview
    """Writable, contiguous, of bytes; its length is how many are wanted."""


class BlobRead(NamedTuple):
    """One value to read; its ranges ascend and do not overlap."""

    name: str
    ranges: Sequence[BlobRange]
    whole: bool = False
    """All of the value is wanted, which may be shorter than the one range, from 0 on: then it is
    `READ`, and memory behind its end stays as it was."""

    @property
    def end(self) -> int:
        """Where the last range ends."""
        return max((offset + target.nbytes for offset, target in self.ranges), default=0)

    @property
    def shows_size(self) -> bool:
        """Whether bytes that came show that the value is there and long enough."""
        return bool(self.ranges) and all(each.target.nbytes for each in self.ranges)


class BlobOutcome(Enum):
    """What came of reading one value."""

    READ = "read"
    MISSING = "missing"
    """There is no value of this name."""
    SHORT = "short"
    """There is one, and it ends before a range does; or what is there is no value."""


class BlobWrite(NamedTuple):
    """One value to write."""

    name: str
    buffers: Sequence[memoryview]
    """Contiguous, of bytes; the value is all of them, one after the other."""


class BlobStore(ABC):
    """A client of one store."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        """How many threads should call at once."""

    def register(self, memory: memoryview) -> None:  # noqa: B027 - most need not know it
        """Memory that buffers and targets will lie in; most clients can use any."""

    def unregister(self, memory: memoryview) -> None:  # noqa: B027
        """The memory will not be used any more; no call uses it."""

    def near(
        self,
        space: Space,  # noqa: ARG002 - Most stores have nothing there.
        piece: bytes,  # noqa: ARG002
        keys: Sequence[Key],  # noqa: ARG002
    ) -> Sequence[NearBlocks]:
        """Blocks in memory that is mapped here, to be copied from there instead of read."""
        return ()

    @abstractmethod
    def exists(self, names: Sequence[str], *, timeout_s: float) -> list[bool]:
        """Which values are there, in one round trip if the store allows it."""

    @abstractmethod
    def read(self, reads: Sequence[BlobRead], *, timeout_s: float) -> list[BlobOutcome]:
        """Reads values, or ranges of them, straight into memory where the store allows it."""

    @abstractmethod
    def write(self, writes: Sequence[BlobWrite], *, timeout_s: float) -> list[str]:
        """Writes values: why one could not be written, or an empty text. Empty values may be such.

        The values of one call are neighbours of one chain: they are read together.
        """

    @abstractmethod
    def forget(self, names: Sequence[str], *, timeout_s: float) -> None:
        """Removes values that are there and should not be."""

    @abstractmethod
    def get(self, name: str, *, timeout_s: float) -> bytes | None:
        """A small record (up to 64 KiB), or `None`. It is what was created or replaced last.

        Records do not age: `ttl_s` of a client is for values. What is there and can be no record is
        an empty one: it is replaced, and is no error of the store.
        """

    @abstractmethod
    def create(self, name: str, record: bytes, *, timeout_s: float) -> bool:
        """Writes a small record if there is none; whether it did. Two who try: one does."""

    @abstractmethod
    def replace(self, name: str, record: bytes, *, timeout_s: float) -> None:
        """Writes a small record, whatever was there.

        Raises:
            NotKeptError: it is written; the store has replicas, and none has it in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives everything back; no call is under way."""


def check_names(names: Sequence[object], *, timeout_s: float) -> float:
    """Refuses names that not every store can have; the time at most, as a number.

    Raises:
        ValueError: with the first such name.
    """
    for name in names:
        if not isinstance(name, str) or len(name) > NAME_BYTES_MAX or not _NAME.fullmatch(name):
            raise ValueError(
                f"name is {reprlib.repr(name)}, must be 1 to {NAME_BYTES_MAX} ASCII letters, "
                "digits, '-', '_', '.' and '/', where no part between slashes is empty or begins "
                "with '.'"
            )
    return min(as_seconds("timeout_s", timeout_s), TIMEOUT_S_MAX)


def check_reads(reads: Sequence[BlobRead], *, timeout_s: float) -> float:
    """Refuses reads that no store could do; the time at most, as a number.

    Raises:
        ValueError: a name is wrong, ranges do not ascend, or are not those of a whole value.
    """
    for name, ranges, whole in reads:
        if whole and [offset for offset, _ in ranges] != [0]:
            raise ValueError(f"{name!r} is read whole, must have one range, from 0 on")
        end = 0
        for offset, target in ranges:
            if type(offset) is not int or not end <= offset <= OFFSET_MAX:
                as_int("offset", offset, 0, OFFSET_MAX)
                raise ValueError(
                    f"a range of {name!r} begins at {offset}, must not begin before {end}, where "
                    "the one before it ends"
                )
            if target.readonly:
                raise ValueError(f"the target of a range of {name!r} is read-only memory")
            end = offset + target.nbytes
    return check_names([read.name for read in reads], timeout_s=timeout_s)


def check_record(name: str, record: bytes, *, timeout_s: float) -> float:
    """Refuses a record that is too large, or its name; the time at most, as a number."""
    if len(record) > RECORD_BYTES_MAX:
        raise ValueError(
            f"record {name!r} has {len(record)} bytes, must have at most {RECORD_BYTES_MAX}"
        )
    return check_names([name], timeout_s=timeout_s)


def answer_call(answer: Future[Answer], call: Callable[[], Answer]) -> None:
    """Makes a call that nobody can end; who waits for the answer does as long as it has time."""
    try:
        answer.set_result(call())
    except Exception as problem:  # noqa: BLE001 - See `BROAD_EXCEPTS` of the tests.
        answer.set_exception(problem)


def call_in_thread(call: Callable[[], Answer], name: str) -> Future[Answer]:
    """The answer of such a call, which a thread of its own makes."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer_call(answer, call)
        finally:
            if not answer.done():  # An exit, or a panic of compiled code, which the thread reports.
                answer.set_exception(UnavailableError("it failed, and the log says why"))

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer
