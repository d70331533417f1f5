"""Reads and writes of runs of neighbouring slots, straight out of mapped arenas and into them.

A run is one system call: block, trailer, block, trailer, … with the blocks where they lie in the
arena and the trailers in scratch memory of the thread. Blocks of less than a page, whose arena
slots are not aligned to pages, and encrypted ones go through the scratch memory whole.

The one rule: a block that `read_run` does not name as bad has the bytes that were saved under its
key, and its sums stand in the arena.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cache.operations import BlockFault
from penstock.store.disk.format import (
    ASSOCIATED_BYTES,
    FILE_MODE,
    PAGE_BYTES,
    TRAILER_HEAD,
    TRAILER_HEAD_BYTES,
)
from penstock.store.disk.trailers import (
    begin_trailers,
    check_blocks,
    check_trailers,
    end_trailers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.movers.packing import PackedSums
    from penstock.store.base import MappedArena, Space
    from penstock.store.disk.format import DiskCipher, Geometry
    from penstock.store.disk.index import DiskSegment
    from penstock.vocabulary.keys import Key

RUN_BYTES_MIN, RUN_BYTES_MAX = 1 << 20, 8 << 20
"""Of one operation, as far as a job allows: from 1 MiB on a drive is at its rate, and longer ones
keep others waiting."""
RUN_SLOTS_MAX = 512
"""Two buffers a slot; Linux takes 1024 in one call."""
PROBE_NAME = "probe"
NONCE_BYTES = TRAILER_HEAD["nonce"].itemsize


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
    """Neighbouring slots of a segment, and the arena slots they come from or go to."""

    segment: DiskSegment
    """To open it. What is in it now is in the fields after it."""
    flags: int
    """With which the file is opened, besides the access."""
    geometry: Geometry
    life: int
    first: int
    arena: MappedArena
    space: Space
    keys: Sequence[Key]
    slots: NDArray[np.int32]
    """Of the arena."""
    salt: int
    cipher: DiskCipher | None


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
    geometry, count = run.geometry, len(run.keys)
    in_place = run.cipher is None and _is_page_sized(run)
    step = geometry.trailer_bytes if in_place else geometry.slot_bytes
    room = scratch.room(count * step).reshape(count, step)
    trailers = room[:, -geometry.trailer_bytes :]
    trailers[:] = 0
    begin_trailers(run, trailers)
    if not in_place:
        _fill_blocks(run, room, trailers)
    trailer_sums = end_trailers(trailers, geometry.cell_count)
    if in_place:
        blocks = run.arena.blocks(run.slots, run.arena.host.slot_bytes)
        buffers = [each.data for pair in zip(blocks, room, strict=True) for each in pair]
    else:
        buffers = [room.reshape(-1).data]
    fd = run.segment.open(os.O_WRONLY | run.flags, calls)
    try:
        write_all(fd, buffers, geometry.offset(run.first), calls)
    finally:
        os.close(fd)
    return trailer_sums


def read_run(
    run: Run, sums: PackedSums, calls: DiskCalls, scratch: AlignedMemory
) -> dict[int, BlockFault]:
    """Reads blocks into their arena slots, verifies them and writes their sums there.

    Returns:
        What is wrong with which block of the run, by position.
    Raises `OSError`: it could not be read.
    """
    geometry, count = run.geometry, len(run.keys)
    in_place = run.cipher is None and _is_page_sized(run)
    step = geometry.trailer_bytes if in_place else geometry.slot_bytes
    room = scratch.room(count * step).reshape(count, step)
    if in_place:
        blocks = run.arena.blocks(run.slots, run.arena.host.slot_bytes)
        buffers = [each.data for pair in zip(blocks, room, strict=True) for each in pair]
    else:
        buffers = [room.reshape(-1).data]
    fd = run.segment.open(os.O_RDONLY | run.flags, calls)
    try:
        got = read_all(fd, buffers, geometry.offset(run.first), calls)
    finally:
        os.close(fd)
    room[got // geometry.slot_bytes :] = 0  # A file that ends early has no trailers from there on.
    trailers = room[:, -geometry.trailer_bytes :]
    bad = check_trailers(run, trailers)
    if not in_place:
        _take_blocks(run, room, bad)
    check_blocks(run, sums, trailers, bad)
    return bad


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
    with suppress(OSError):  # The read itself will tell.
        fd = segment.open(os.O_RDONLY, calls)
        try:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers after so many bytes."""
    for number, each in enumerate(buffers):
        if done < each.nbytes:
            return [each[done:], *buffers[number + 1 :]]
        done -= each.nbytes
    return []


def _is_page_sized(run: Run) -> bool:
    """Whether arena slots are what lies on the disk, padding included."""
    return run.arena.host.slot_bytes == run.geometry.trailer_offset


def _fill_blocks(run: Run, room: NDArray[np.uint8], trailers: NDArray[np.uint8]) -> None:
    """Copies blocks into whole slots, encrypted if need be."""
    size = run.geometry.block_bytes
    room[:, size : run.geometry.trailer_offset] = 0
    for position, block in enumerate(run.arena.blocks(run.slots, run.arena.host.slot_bytes)):
        if run.cipher is None:
            room[position, :size] = block[:size]
            continue
        nonce = secrets.token_bytes(NONCE_BYTES)
        bound_to = trailers[position, :ASSOCIATED_BYTES].tobytes()
        tag = run.cipher.seal(nonce, block[:size].data, bound_to, room[position, :size].data)
        head = trailers[position, :TRAILER_HEAD_BYTES].view(TRAILER_HEAD)
        head["nonce"], head["tag"] = nonce, tag


def _take_blocks(run: Run, room: NDArray[np.uint8], bad: dict[int, BlockFault]) -> None:
    """Copies blocks out of whole slots, decrypted if need be."""
    size = run.geometry.block_bytes
    heads = room[:, run.geometry.trailer_offset :][:, :TRAILER_HEAD_BYTES]
    for position, block in enumerate(run.arena.blocks(run.slots, run.arena.host.slot_bytes)):
        if position in bad:
            continue
        if run.cipher is None:
            block[:size] = room[position, :size]
            continue
        raw = np.ascontiguousarray(heads[position])
        head = raw.view(TRAILER_HEAD)[0]
        is_right = run.cipher.open(
            head["nonce"].tobytes(),
            room[position, :size].data,
            head["tag"].tobytes(),
            raw[:ASSOCIATED_BYTES].tobytes(),
            block[:size].data,
        )
        if not is_right:
            bad[position] = BlockFault.CORRUPT
