"""Reads and writes of runs of slots, straight out of mapped arenas and into them.

Block, trailer, block, trailer, … are read or written by one system call, with the blocks where
they lie in the arena and the trailers in scratch memory of the thread. Blocks of less than a page,
whose arena slots are not aligned to pages, and encrypted ones go through the scratch memory whole.

Compiled code does all of a run in one call, without the lock of the interpreter: it reads a piece
and sums it while it is in the cache. Where `DiskCalls` has other calls than the kernel's, those
read and write, and compiled code does the rest.

The one rule: a block that `read_run` does not name as bad has the bytes that were saved under its
key, and its sums stand in the arena.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import struct
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cache.operations import BlockFault
from penstock.movers.packing import PARTS
from penstock.store.base import key_fields
from penstock.store.disk.format import (
    ASSOCIATED_BYTES,
    FILE_MODE,
    PAGE_BYTES,
    TRAILER_HEAD,
    TRAILER_HEAD_BYTES,
)
from penstock.vocabulary.checksums import SUM_BYTES, key_seeds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.movers.packing import PackedSums
    from penstock.store.base import MappedArena, Space
    from penstock.store.disk.format import DiskCipher, Geometry
    from penstock.store.disk.index import DiskSegment, Stretch
    from penstock.vocabulary.keys import Key

RUN_BYTES_MIN, RUN_BYTES_MAX = 1 << 20, 8 << 20
"""Of one operation, as far as a job allows: from 1 MiB on a drive is at its rate, and longer ones
keep others waiting."""
RUN_SLOTS_MAX = 512
"""Two buffers a slot; Linux takes 1024 in one call."""
PROBE_NAME = "probe"
NONCE_BYTES = TRAILER_HEAD["nonce"].itemsize
SUM_AT = TRAILER_HEAD_BYTES - SUM_BYTES
assert TRAILER_HEAD.fields is not None
assert TRAILER_HEAD.fields["sum"][1] == SUM_AT
_NAMED = struct.Struct("<Q32s16sQQII")
"""The fields of a trailer that say whose block it is; the fifth is the salt of the sums."""
_BLOCKS = struct.Struct("=QqQQqQqqqqQqqQ")
_STRETCH = struct.Struct("=qqQqq")
"""`blocks_t` and `stretch_t` of compiled code."""
_TRAILERS, _REST = 1, 2
"""What it is to do: both at once, unless blocks are encrypted in between."""
_RIGHT, _ANOTHER, _CORRUPT = range(3)
"""What compiled code says. Another: it is whole, but two keys have one digest, and the index has
the other's."""
_FAULTS = {_ANOTHER: BlockFault.MISSING, _CORRUPT: BlockFault.CORRUPT}


def open_within(name: str, flags: int, mode: int, folder: int) -> int:
    """Opens a file of a folder, given by its descriptor.

    No link is followed, and a pipe that somebody put there does not block.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(name, flags, mode, dir_fd=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCalls:
    """What a disk tier asks of the kernel. A test may answer in its place."""

    open: Callable[[str, int, int, int], int] = open_within
    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    sync: Callable[[int], None] = os.fdatasync
    statvfs: Callable[[int], os.statvfs_result] = os.fstatvfs
    clock: Callable[[], float] = time.monotonic


class AlignedMemory:
    """Aligned memory of one thread."""

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def room(self, size: int) -> NDArray[np.uint8]:
        if len(self._memory) < size:
            self._memory = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
        return self._memory[:size]


class Run(NamedTuple):
    """Blocks for one call: where they lie on the disk, and from or to which arena slots they go."""

    stretches: Sequence[Stretch]
    """In the order of the blocks; all have slots of one kind."""
    flags: int
    """With which files are opened, besides the access."""
    arena: MappedArena
    space: Space
    keys: Sequence[Key]
    slots: NDArray[np.int32]
    """Of the arena."""
    salt: int
    cipher: DiskCipher | None

    @property
    def geometry(self) -> Geometry:
        geometry = self.stretches[0].segment.geometry
        assert geometry is not None
        return geometry

    @property
    def is_in_place(self) -> bool:
        """Whether arena slots are what lies on the disk, padding included."""
        is_page_sized = self.arena.host.slot_bytes == self.geometry.trailer_offset
        return self.cipher is None and is_page_sized


def probe_direct(folder: int, calls: DiskCalls) -> bool:
    """Whether the file system of a folder takes direct I/O.

    Raises `OSError`: nothing can be written there at all.
    """
    memory = memoryview(mmap.mmap(-1, PAGE_BYTES))
    with suppress(FileNotFoundError):
        os.unlink(PROBE_NAME, dir_fd=folder)  # Of a process that was killed.
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        fd = calls.open(PROBE_NAME, flags, FILE_MODE, folder)
        try:
            calls.pwritev(fd, [memory], 0)
            calls.preadv(fd, [memory], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
        return False
    finally:
        with suppress(FileNotFoundError):
            os.unlink(PROBE_NAME, dir_fd=folder)
    return True


def write_run(run: Run, calls: DiskCalls, scratch: AlignedMemory) -> NDArray[np.uint64]:
    """Writes blocks and trailers; returns the sums of the trailers, which go into the rows.

    Raises `OSError`: not all of it was written.
    """
    room = _room_of(run, scratch)
    itself = calls.pwritev is os.pwritev
    with _opened(run, os.O_WRONLY, calls) as files:
        call = _CompiledCall(run, room, files if itself else None)
        if run.cipher is None:
            trailer_sums = call.write(_TRAILERS | _REST)
        else:
            call.write(_TRAILERS)
            _encrypt_blocks(run, run.cipher, room)
            trailer_sums = call.write(_REST)
        if itself:
            return trailer_sums
        done = 0
        for fd, (segment, first, count) in zip(files, run.stretches, strict=True):
            buffers = _buffers_of(run, room, done, count)
            write_all(fd, buffers, _offset(segment, first), calls)
            done += count
    return trailer_sums


def read_run(
    run: Run, sums: PackedSums, calls: DiskCalls, scratch: AlignedMemory
) -> dict[int, BlockFault]:
    """Reads blocks into their arena slots, verifies them and writes their sums there.

    Returns:
        What is wrong with which block of the run, by position.
    Raises `OSError`: it could not be read.
    """
    room = _room_of(run, scratch)
    itself = calls.preadv is os.preadv
    with _opened(run, os.O_RDONLY, calls) as files:
        done = 0
        for fd, (segment, first, count) in zip(files, run.stretches, strict=True):
            if itself:
                break
            buffers = _buffers_of(run, room, done, count)
            got = read_all(fd, buffers, _offset(segment, first), calls)
            # A file that ends early has no trailers from there on.
            room[done + got // run.geometry.slot_bytes : done + count] = 0
            done += count
        call = _CompiledCall(run, room, files if itself else None, sums)
        if run.cipher is None:
            return _faults(call.read(_TRAILERS | _REST))
        bad = _faults(call.read(_TRAILERS))
        _decrypt_blocks(run, run.cipher, room, bad)
        return _faults(call.read(_REST, bad)) | bad


def _room_of(run: Run, scratch: AlignedMemory) -> NDArray[np.uint8]:
    """For each block its trailer, or its whole slot if need be."""
    geometry, count = run.geometry, len(run.keys)
    step = geometry.trailer_bytes if run.is_in_place else geometry.slot_bytes
    return scratch.room(count * step).reshape(count, step)


@contextmanager
def _opened(run: Run, access: int, calls: DiskCalls) -> Iterator[list[int]]:
    """A descriptor for each stretch.

    Raises `OSError`: one cannot be opened.
    """
    with ExitStack() as stack:
        files: dict[int, int] = {}
        for segment, _, _ in run.stretches:
            if segment.number not in files:
                opened = segment.open(access | run.flags, calls)
                files[segment.number] = stack.enter_context(opened)
        yield [files[segment.number] for segment, _, _ in run.stretches]


def _buffers_of(run: Run, room: NDArray[np.uint8], done: int, count: int) -> list[memoryview]:
    """Where blocks and trailers of a stretch lie in memory."""
    room = room[done : done + count]
    if not run.is_in_place:
        return [room.reshape(-1).data]
    blocks = run.arena.blocks(run.slots[done : done + count], run.arena.host.slot_bytes)
    return [each.data for pair in zip(blocks, room, strict=True) for each in pair]


def _offset(segment: DiskSegment, slot: int) -> int:
    assert segment.geometry is not None
    return segment.geometry.offset(slot)


class _CompiledCall:
    """What compiled code is told of a run; it makes the calls of the kernel if it gets `files`."""

    def __init__(
        self,
        run: Run,
        room: NDArray[np.uint8],
        files: list[int] | None,
        sums: PackedSums | None = None,
    ) -> None:
        host, geometry, count = run.arena.host, run.geometry, len(run.keys)
        if not 0 <= run.slots.min() <= run.slots.max() < host.slot_count:
            raise ValueError(f"slots are {run.slots}, must be below {host.slot_count}")
        self._run, self._count = run, count
        # It has addresses alone, and an arena may be closed while a disk hangs.
        self._memory = host.arena.bytes
        self._scratch = np.empty(SUM_AT + 2 * geometry.cell_count * SUM_BYTES, dtype=np.uint8)
        self._wrong = np.zeros(count, dtype=np.uint8)
        stretches = b"".join(
            _STRETCH.pack(fd, _offset(segment, first), segment.life, first, slot_count)
            for fd, (segment, first, slot_count) in zip(
                files or repeat(-1), run.stretches, strict=False
            )
        )
        blocks = _BLOCKS.pack(
            *(host.arena.address + host.blocks_offset, host.slot_bytes, host.arena.address),
            *(room.ctypes.data, room.shape[1], self._scratch.ctypes.data),
            *(geometry.block_bytes, geometry.trailer_offset, geometry.trailer_bytes),
            geometry.cell_count,
            *((0, 0, 0) if sums is None else (*sums.table, sums.is_mix64)),
            run.salt,
        )
        self._told = (
            *(blocks, stretches, len(run.stretches), run.slots.tobytes()),
            *(_names(run), key_fields(run.keys).tobytes()),
        )

    def write(self, steps: int) -> NDArray[np.uint64]:
        """Raises `OSError`: not all of it was written."""
        trailer_sums = np.empty(self._count, dtype=np.uint64)
        self._check(PARTS.write_blocks(*self._told, trailer_sums.ctypes.data, steps))
        return trailer_sums

    def read(self, steps: int, bad: Iterable[int] = ()) -> list[int]:
        """What is wrong with each block; those that are known to be `bad` are not looked at.

        Raises `OSError`: they cannot be read.
        """
        for position in bad:
            self._wrong[position] = _CORRUPT
        seeds = np.array(key_seeds(self._run.keys), dtype=np.uint64).tobytes()
        self._check(PARTS.read_blocks(*self._told, seeds, self._wrong.ctypes.data, steps))
        return self._wrong.tolist()

    @staticmethod
    def _check(number: int) -> None:
        if number:
            raise OSError(number, os.strerror(number))


def write_all(fd: int, buffers: list[memoryview], offset: int, calls: DiskCalls) -> None:
    """Writes all of the buffers.

    Raises `OSError`: the kernel did not.
    """
    left = sum(each.nbytes for each in buffers)
    while left:
        done = calls.pwritev(fd, buffers, offset)
        if done <= 0:
            raise OSError(errno.EIO, "nothing was written")
        left, offset = left - done, offset + done
        buffers = _after(buffers, done) if left else []


def read_all(fd: int, buffers: list[memoryview], offset: int, calls: DiskCalls) -> int:
    """Fills the buffers as far as the file goes; returns how many bytes it had.

    Raises `OSError`: the kernel could not.
    """
    left, got = sum(each.nbytes for each in buffers), 0
    while left:
        done = calls.preadv(fd, buffers, offset + got)
        if done <= 0:
            break
        left, got = left - done, got + done
        buffers = _after(buffers, done) if left else []
    return got


def read_bytes(fd: int, size: int, offset: int, calls: DiskCalls) -> bytes:
    """Up to `size` bytes; fewer only where the file ends.

    Raises `OSError`: the kernel could not read them.
    """
    raw = bytearray(size)
    return bytes(raw[: read_all(fd, [memoryview(raw)], offset, calls)])


def expect_read(segment: DiskSegment, offset: int, length: int, calls: DiskCalls) -> None:
    """Has the kernel read what is asked for soon, so that the disk does not wait meanwhile."""
    # An error is left to the read itself.
    with suppress(OSError), segment.open(os.O_RDONLY, calls) as fd:
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers after so many bytes."""
    for number, each in enumerate(buffers):
        if done < each.nbytes:
            return [each[done:], *buffers[number + 1 :]]
        done -= each.nbytes
    return []


def _encrypt_blocks(run: Run, cipher: DiskCipher, room: NDArray[np.uint8]) -> None:
    """Encrypts blocks into whole slots, and notes how in their trailers."""
    size = run.geometry.block_bytes
    trailers = room[:, run.geometry.trailer_offset :]
    room[:, size : run.geometry.trailer_offset] = 0
    for position, block in enumerate(run.arena.blocks(run.slots, run.arena.host.slot_bytes)):
        nonce = secrets.token_bytes(NONCE_BYTES)
        bound_to = trailers[position, :ASSOCIATED_BYTES].tobytes()
        tag = cipher.seal(nonce, block[:size].data, bound_to, room[position, :size].data)
        head = trailers[position, :TRAILER_HEAD_BYTES].view(TRAILER_HEAD)
        head["nonce"], head["tag"] = nonce, tag


def _decrypt_blocks(
    run: Run, cipher: DiskCipher, room: NDArray[np.uint8], bad: dict[int, BlockFault]
) -> None:
    """Decrypts blocks out of whole slots; those that are not intact are `bad` then."""
    size = run.geometry.block_bytes
    trailers = room[:, run.geometry.trailer_offset :]
    for position, block in enumerate(run.arena.blocks(run.slots, run.arena.host.slot_bytes)):
        if position in bad:
            continue
        raw = trailers[position, :TRAILER_HEAD_BYTES].copy()
        head = raw.view(TRAILER_HEAD)[0]
        is_right = cipher.open(
            head["nonce"].tobytes(),
            room[position, :size].data,
            head["tag"].tobytes(),
            raw[:ASSOCIATED_BYTES].tobytes(),
            block[:size].data,
        )
        if not is_right:
            bad[position] = BlockFault.CORRUPT


def _names(run: Run) -> bytes:
    """How the trailer of the first block begins."""
    segment, slot, _ = run.stretches[0]
    (space, generation), cells = run.space, run.geometry.cell_count
    return _NAMED.pack(segment.life, run.keys[0], space, generation, run.salt, slot, cells)


def _faults(wrong: list[int]) -> dict[int, BlockFault]:
    if not any(wrong):
        return {}
    return {position: _FAULTS[what] for position, what in enumerate(wrong) if what}
