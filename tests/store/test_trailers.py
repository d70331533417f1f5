"""Blocks and trailers in one compiled call, or in parts: the same bytes and faults."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from penstock.cache.operations import BlockFault
from penstock.movers.packing import PackedSums
from penstock.store.base import MappedArena, Space, part_name
from penstock.store.disk import io as disk_io
from penstock.store.disk.format import TRAILER_HEAD, Geometry, read_trailer
from penstock.store.disk.index import DiskSegment, Stretch
from penstock.store.disk.io import AlignedMemory, DiskCalls, Run, open_within, read_run, write_run
from penstock.tiers.host import HostTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import KEY_BYTES, Key
from penstock.vocabulary.layout import Layout
from tests.store.segments import seal_trailer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

COUNT, LAYERS = 5, 4
PLACES = (7, 8, 9, 20, 21)
"""Of the blocks, in two stretches."""
EARLIER_LIFE, THIS_LIFE = 11, 12
"""Salts."""
IN_MEMORY, IN_PIECES, THROUGH_SCRATCH = 4096, 768 << 10, 2048
"""Bytes of a block: all of them are one piece, each is one, and slots are not whole pages."""


def _read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    return os.preadv(fd, buffers, offset)


def _write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    return os.pwritev(fd, buffers, offset)


IN_PARTS = DiskCalls(preadv=_read, pwritev=_write)
"""Compiled code reads and writes itself only with the kernel's own calls."""


@pytest.fixture(params=[DiskCalls(), IN_PARTS], ids=["one call", "parts"])
def calls(request: pytest.FixtureRequest) -> DiskCalls:
    return cast("DiskCalls", request.param)


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    folder = os.open(tmp_path, os.O_RDONLY)
    hosts: list[HostTier] = []

    def make(block_bytes: int = IN_MEMORY, layers: int = LAYERS) -> Run:
        layout = Layout.opaque(
            layers=range(layers),
            block_bytes=block_bytes // layers,
            encoding="test",
            block_tokens=16,
            block_count=8,
        )
        host = HostTier.create(layout, 8)
        hosts.append(host)
        form = Form(layout=layout, checksum=Algorithm.XXH3)
        arena = MappedArena(host, form, part_name(form, rank=0, rank_count=1, equal=False))
        keys = [Key(bytes([number + 1]) * KEY_BYTES) for number in range(COUNT)]
        slots = np.array([3, 1, 7, 0, 4], dtype=np.int32)
        fill(arena, slots, keys)
        segment = DiskSegment(0, "segment", 64 << 20, folder)
        geometry = Geometry(segment_bytes=64 << 20, block_bytes=block_bytes, cell_count=layers)
        segment.begin_life(geometry, life=77, age=1, part=arena.part)
        (tmp_path / "segment").touch()
        stretches = [Stretch(segment, PLACES[0], 3), Stretch(segment, PLACES[3], 2)]
        return Run(stretches, 0, arena, Space(bytes(range(16)), 9), keys, slots, EARLIER_LIFE, None)

    yield make
    os.close(folder)
    for each in hosts:
        each.close()


def fill(arena: MappedArena, slots: NDArray[np.int32], keys: Sequence[Key]) -> None:
    """Blocks with their sums, as an engine saves them."""
    size = arena.span.length
    content = np.random.default_rng(1).integers(0, 256, (COUNT, size), dtype=np.uint8)
    for block, place in zip(content, arena.blocks(slots, size), strict=True):
        place[:] = block
    sums = arena.span.sum_blocks(content, keys, Algorithm.XXH3, salt=EARLIER_LIFE)
    arena.host.keep_sums(slots, sums)


def write(run: Run, calls: DiskCalls) -> NDArray[np.uint64]:
    memory = AlignedMemory()
    memory.room(1 << 20)[:] = 0xEE  # What was there before must not be written.
    return write_run(run, calls, memory)


def read(run: Run, calls: DiskCalls) -> dict[int, BlockFault]:
    sums = PackedSums(run.arena.host.layout, Algorithm.XXH3)
    return read_run(run, sums, calls, AlignedMemory())


def blocks_of(run: Run) -> list[bytes]:
    return [each.tobytes() for each in run.arena.blocks(run.slots, run.geometry.block_bytes)]


def change(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def slots_of(run: Run) -> list[bytes]:
    """Each slot of the disk, as the format has it."""
    geometry, sums = run.geometry, run.arena.host.sums(run.slots)
    found = []
    for number, block in enumerate(blocks_of(run)):
        head = np.zeros((), dtype=TRAILER_HEAD)
        head["life"], head["slot"] = run.stretches[0].segment.life, PLACES[number]
        head["key"] = np.void(run.keys[number].ljust(32, b"\0"))
        head["space"], head["generation"] = np.void(run.space.name), run.space.generation
        head["salt"], head["cell_count"] = run.salt, geometry.cell_count
        trailer = seal_trailer(head, sums[number])
        padded = block.ljust(geometry.trailer_offset, b"\0")
        found.append(padded + trailer.ljust(geometry.trailer_bytes, b"\0"))
    return found


@pytest.mark.parametrize("block_bytes", [IN_MEMORY, IN_PIECES, THROUGH_SCRATCH])
@pytest.mark.parametrize("layers", [1, LAYERS])
def test_slots_are_written_as_the_format_says(
    make_run: Callable[..., Run], tmp_path: Path, calls: DiskCalls, block_bytes: int, layers: int
) -> None:
    run = make_run(block_bytes, layers)

    sums = write(run, calls)

    raw, size = (tmp_path / "segment").read_bytes(), run.geometry.slot_bytes
    written = [raw[run.geometry.offset(place) :][:size] for place in PLACES]
    trailers = [read_trailer(slot[run.geometry.trailer_offset :]) for slot in written]
    assert written == slots_of(run)
    assert sums.tolist() == [trailer[0]["sum"] for trailer in trailers if trailer]


@pytest.mark.parametrize("block_bytes", [IN_MEMORY, IN_PIECES, THROUGH_SCRATCH])
def test_blocks_come_back_with_the_sums_of_this_life(
    make_run: Callable[..., Run], calls: DiskCalls, block_bytes: int
) -> None:
    run = make_run(block_bytes)
    write(run, calls)
    expected = blocks_of(run)
    content = np.stack([np.frombuffer(each, dtype=np.uint8) for each in expected])
    sums = run.arena.span.sum_blocks(content, run.keys, Algorithm.XXH3, salt=THIS_LIFE)
    run.arena.host.arena.bytes[:] = 0

    assert read(run._replace(salt=THIS_LIFE), calls) == {}

    assert blocks_of(run) == expected
    np.testing.assert_array_equal(run.arena.host.sums(run.slots), sums)


@pytest.mark.parametrize("field", [*(TRAILER_HEAD.names or ()), "table"])
def test_a_byte_that_changed_in_a_trailer_is_found(
    make_run: Callable[..., Run], calls: DiskCalls, tmp_path: Path, field: str
) -> None:
    run = make_run()
    write(run, calls)
    places = TRAILER_HEAD.fields or {}
    at = 256 + 8 * LAYERS - 1 if field == "table" else places[field][1]
    change(tmp_path / "segment", run.geometry.offset(PLACES[3]) + run.geometry.trailer_offset + at)

    assert read(run, calls) == {3: BlockFault.CORRUPT}


def test_a_whole_trailer_of_another_block_means_that_this_one_is_missing(
    make_run: Callable[..., Run], calls: DiskCalls
) -> None:
    run = make_run()
    write(run, calls)
    others = [*run.keys[:3], Key(b"\xff" * KEY_BYTES), run.keys[4]]

    assert read(run._replace(keys=others), calls) == {3: BlockFault.MISSING}
    elsewhere = run._replace(space=Space(bytes(16), 9))
    assert read(elsewhere, calls) == dict.fromkeys(range(COUNT), BlockFault.MISSING)


def test_whole_trailers_of_another_time_are_corrupt(
    make_run: Callable[..., Run], calls: DiskCalls
) -> None:
    run = make_run()
    write(run, calls)
    all_corrupt = dict.fromkeys(range(COUNT), BlockFault.CORRUPT)

    assert read(run._replace(space=Space(run.space.name, 8)), calls) == all_corrupt
    run.stretches[0].segment.life += 1
    assert read(run, calls) == all_corrupt


def test_a_whole_slot_at_another_place_is_corrupt(
    make_run: Callable[..., Run], calls: DiskCalls, tmp_path: Path
) -> None:
    run = make_run()
    write(run, calls)
    geometry = run.geometry
    with open(tmp_path / "segment", "r+b") as file:
        file.seek(geometry.offset(PLACES[0]))
        slot = file.read(geometry.slot_bytes)
        file.seek(geometry.offset(PLACES[4]))
        file.write(slot)

    assert read(run, calls) == {4: BlockFault.CORRUPT}


@pytest.mark.parametrize("block_bytes", [IN_MEMORY, IN_PIECES, THROUGH_SCRATCH])
def test_blocks_are_compared_under_the_salt_of_the_life_that_saved_each(
    make_run: Callable[..., Run], calls: DiskCalls, tmp_path: Path, block_bytes: int
) -> None:
    run = make_run(block_bytes)
    write(run, calls)
    # The second stretch is saved again in this life.
    content = np.stack([np.frombuffer(each, dtype=np.uint8) for each in blocks_of(run)])
    now = run.arena.span.sum_blocks(content, run.keys, Algorithm.XXH3, salt=THIS_LIFE)
    run.arena.host.keep_sums(run.slots, now)
    newer = run._replace(salt=THIS_LIFE)
    write(
        newer._replace(stretches=run.stretches[1:], keys=run.keys[3:], slots=run.slots[3:]), calls
    )
    change(tmp_path / "segment", run.geometry.offset(PLACES[1]) + 100)
    run.arena.host.keep_sums(run.slots, np.zeros_like(now))

    assert read(newer, calls) == {1: BlockFault.CORRUPT}

    kept = run.arena.host.sums(run.slots)
    np.testing.assert_array_equal(kept[[0, 2, 3, 4]], now[[0, 2, 3, 4]])
    assert not kept[1].any()


@pytest.mark.parametrize("block_bytes", [IN_MEMORY, IN_PIECES])
def test_blocks_after_the_end_of_the_file_are_corrupt_and_those_before_it_right(
    make_run: Callable[..., Run], calls: DiskCalls, tmp_path: Path, block_bytes: int
) -> None:
    run = make_run(block_bytes)
    write(run, calls)
    os.truncate(tmp_path / "segment", run.geometry.offset(PLACES[1]) + 100)

    assert read(run, calls) == dict.fromkeys(range(1, COUNT), BlockFault.CORRUPT)


def test_what_the_kernel_refuses_is_an_error(
    make_run: Callable[..., Run], calls: DiskCalls
) -> None:
    run = make_run()
    write(run, calls)

    for access, use in ((os.O_WRONLY, read), (os.O_RDONLY, write)):

        def open_for(name: str, _: int, mode: int, folder: int, access: int = access) -> int:
            return open_within(name, access, mode, folder)

        with pytest.raises(OSError, match="Bad file descriptor"):
            use(run, replace(calls, open=open_for))


def test_a_slot_that_the_arena_does_not_have_is_refused(make_run: Callable[..., Run]) -> None:
    run = make_run()
    beyond = np.array([3, 1, 8, 0, 4], dtype=np.int32)

    for use in (read, write):
        with pytest.raises(ValueError, match="slots are"):
            use(run._replace(slots=beyond), DiskCalls())


def test_memory_of_an_arena_that_is_closed_stays_until_a_call_has_ended(
    make_run: Callable[..., Run],
) -> None:
    """A store process that stops does not wait for a disk that hangs."""
    run = make_run()
    call = disk_io._CompiledCall(run, np.zeros((COUNT, 4096), dtype=np.uint8), None)
    first = run.arena.host.arena.address

    run.arena.host.close()

    assert is_mapped(first)
    del call
    assert not is_mapped(first)


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (line.split()[0].split("-") for line in lines)
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)
