"""A berth that others change while a part is packed or put away: what was summed is what is used.

Memory is mapped twice, so that what one step writes in one place changes another place too: the
damage comes between two steps of compiled code as surely as between two of NumPy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.handoff.driver.parts import PartGather, PartScatter, RouteParts
from penstock.movers.packing import Packing
from penstock.testing.tier_suite import draw_blocks, read_slots, write_slots
from penstock.tiers.arena import Arena
from penstock.tiers.arrays import ArrayTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import HeadRange, Layout
from penstock.vocabulary.planes import Axis, DType
from penstock.vocabulary.reshard import plan_reshard
from tests.movers.flipping import flipped_bits, rounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.handoff.driver.parts import PartForm

PAGE = mmap.PAGESIZE
BLOCKS = 4
KEYS = [b"key %d" % number for number in range(BLOCKS)]
SLOTS, TARGETS = [2, 0, 3, 1], [1, 3, 0, 2]
ORDERS = {
    "head major": (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CHANNEL),
    "token major": (Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL),
}
CHANNELS = {"whole lines": 64, "odd rows": 63}


def not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for layouts that compiled code does not know: NumPy copies and sums."""
    monkeypatch.setattr(Packing, "of", classmethod(lambda *_, **__: None))


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How blocks are copied."""
    if request.param == "numpy":
        not_packed(monkeypatch)


def layout_of(order: str, *, channels: int = 64, block_tokens: int = 32) -> Layout:
    """Each plane of a block has two pages, or a little less."""
    return Layout.split(
        layers=range(1),
        heads=HeadRange.all_of(2),
        channels=channels,
        dtype=DType.BF16,
        block_tokens=block_tokens,
        block_count=BLOCKS * 32 // block_tokens,
        order=ORDERS[order],
    )


def engine_of(layout: Layout, *first: NDArray[np.uint8]) -> ArrayTier:
    sizes = [size for _, size in sorted(layout.buffer_bytes.items())][len(first) :]
    return ArrayTier(layout, [*first, *(np.zeros(size, dtype=np.uint8) for size in sizes)])


def filled(layout: Layout) -> tuple[ArrayTier, NDArray[np.uint8]]:
    engine, content = engine_of(layout), draw_blocks(layout, BLOCKS, seed=1)
    write_slots(engine, SLOTS, content)
    return engine, content


def route_of(source: Layout, target: Layout) -> tuple[RouteParts, PartForm]:
    forms = Form(layout=source), Form(layout=target)
    plan = plan_reshard([forms[0]], [forms[1]])
    parts = RouteParts(plan, plan.routes[0], *forms)
    return parts, parts.form_of(0, 1)


class Mapped:
    """Pages of one file, mapped one after the other in any order, any of them several times."""

    def __init__(self, fd: int, pages: Sequence[int]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        kinds = ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long
        self._libc.mmap.argtypes = kinds
        self._libc.munmap.argtypes = kinds[:2]
        size = len(pages) * PAGE
        both = mmap.PROT_READ | mmap.PROT_WRITE
        self._address = self._libc.mmap(None, size, both, mmap.MAP_SHARED, fd, 0)
        fixed = mmap.MAP_SHARED | 0x10
        for number, page in enumerate(pages):
            place = self._address + number * PAGE
            assert self._libc.mmap(place, PAGE, both, fixed, fd, page * PAGE) == place
        memory = (ctypes.c_uint8 * size).from_address(self._address)
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array(memory)

    def close(self) -> None:
        self._libc.munmap(self._address, len(self.bytes))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("channels", CHANNELS.values(), ids=list(CHANNELS))
@pytest.mark.parametrize("order", ORDERS)
def test_sums_are_of_what_was_read_from_slots_whatever_becomes_of_the_berth(
    order: str, channels: int
) -> None:
    layout = layout_of(order, channels=channels)
    engine, _ = filled(layout)
    _, form = route_of(layout, layout)
    gather = PartGather(form, engine, Algorithm.XXH3)
    wanted = gather.gather(SLOTS, KEYS, np.zeros(BLOCKS * form.block_bytes, dtype=np.uint8))
    fd = os.memfd_create("berth")
    os.truncate(fd, PAGE)
    # Every page of the berth is the same memory: each overwrites those before it.
    berth = Mapped(fd, [0] * -(-BLOCKS * form.block_bytes // PAGE))

    sums = gather.gather(SLOTS, KEYS, berth.bytes[: BLOCKS * form.block_bytes])

    assert sums == wanted
    berth.close()
    os.close(fd)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("order", ORDERS)
def test_bytes_that_were_verified_are_put_away_whatever_becomes_of_the_berth(order: str) -> None:
    layout = layout_of(order)
    engine, content = filled(layout)
    parts, form = route_of(layout, layout)
    size = form.block_bytes
    pages = -(-BLOCKS * size // PAGE)
    fd = os.memfd_create("berth")
    os.truncate(fd, 2 * pages * PAGE)
    berth = Mapped(fd, range(pages))
    sums = PartGather(form, engine, Algorithm.XXH3).gather(SLOTS, KEYS, berth.bytes)
    # The first plane of every slot is the memory in which the last block still lies.
    under = Mapped(fd, [pages - size // PAGE + page for page in range(size // PAGE // 2)] * BLOCKS)
    target = engine_of(layout, under.bytes)
    last = slice(BLOCKS - 1, BLOCKS)

    intact = PartScatter(parts, form, target, Algorithm.XXH3).scatter(
        berth.bytes[last.start * size :], KEYS[last], sums[-len(sums) // BLOCKS :], [1]
    )

    assert intact
    np.testing.assert_array_equal(read_slots(target, [1])[0], content[last.start])
    del target
    berth.close()
    under.close()
    os.close(fd)


@pytest.mark.parametrize("tokens", [32, 16, 64], ids=["alike", "smaller", "larger"])
@pytest.mark.usefixtures("way")
def test_no_part_is_taken_for_intact_that_another_process_changed(tokens: int) -> None:
    layout, other = layout_of("token major"), layout_of("token major", block_tokens=tokens)
    engine, _ = filled(layout)
    target = engine_of(other)
    numbers = list(range(other.block_count))
    parts, form = route_of(layout, other)
    size = BLOCKS * form.block_bytes
    gather = PartGather(form, engine, Algorithm.XXH3)
    scatter = PartScatter(parts, form, target, Algorithm.XXH3)
    wanted = engine_of(other)
    plain = np.zeros(size, dtype=np.uint8)
    assert PartScatter(parts, form, wanted, Algorithm.XXH3).scatter(
        plain, KEYS, gather.gather(SLOTS, KEYS, plain), numbers
    )
    damaged: list[int] = []
    arena = Arena.create(size, name="berths", huge_pages=False)
    with flipped_bits(arena.fd, 0, size):
        for number in rounds(damaged):
            for buffer in target.blocks(()).buffers.values():
                buffer[:] = 0
            sums = gather.gather(SLOTS, KEYS, arena.bytes[:size])
            if scatter.scatter(arena.bytes[:size], KEYS, sums, numbers):
                for buffer, right in zip(
                    target.blocks(()).buffers.values(),
                    wanted.blocks(()).buffers.values(),
                    strict=True,
                ):
                    np.testing.assert_array_equal(buffer, right)
            else:
                damaged.append(number)
    arena.close()
