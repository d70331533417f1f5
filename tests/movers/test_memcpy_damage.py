"""Memory that others change while blocks are copied: damage is found, or was never there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.cache.operations import BlockFault, Purpose
from penstock.movers.memcpy import MemcpyMover
from penstock.movers.packing import Packing
from penstock.testing.mover_suite import keys_of, make_copy, poll_until_idle
from penstock.testing.tier_suite import draw_blocks, read_slots, write_slots
from penstock.tiers.arrays import ArrayTier
from penstock.tiers.host import HostTier
from penstock.vocabulary.checksums import Algorithm, CellSpan
from penstock.vocabulary.keys import OperationId
from penstock.vocabulary.layout import HeadRange, Layout
from penstock.vocabulary.planes import DType
from tests.movers.flipping import flipped_bits, rounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


BLOCKS = 6
LAYOUT = Layout.split(
    layers=range(4),
    heads=HeadRange.all_of(2),
    channels=64,
    dtype=DType.BF16,
    block_tokens=16,
    block_count=BLOCKS,
)


def not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for layouts that compiled code does not know: NumPy copies and sums."""
    monkeypatch.setattr(Packing, "of", classmethod(lambda *_, **__: None))


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How blocks are copied."""
    if request.param == "numpy":
        not_packed(monkeypatch)


def engine_of(layout: Layout) -> ArrayTier:
    sizes = layout.buffer_bytes.values()
    return ArrayTier(layout, [np.zeros(size, dtype=np.uint8) for size in sizes])


def test_damage_of_the_arena_while_its_sums_are_made_is_found_by_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    not_packed(monkeypatch)
    engine, slots = engine_of(LAYOUT), range(BLOCKS)
    content = draw_blocks(LAYOUT, BLOCKS, seed=1)
    write_slots(engine, slots, content)
    with HostTier.create(LAYOUT, BLOCKS, huge_pages=False) as host:
        sum_blocks = CellSpan.sum_blocks

        def damage_and_sum(
            span: CellSpan,
            blocks: NDArray[np.uint8],
            keys: Sequence[bytes],
            how: Algorithm,
            *,
            salt: int,
        ) -> NDArray[np.uint64]:
            host.blocks(()).buffers[0][:: host.slot_bytes] ^= 1
            return sum_blocks(span, blocks, keys, how, salt=salt)

        save = MemcpyMover(engine, host, Algorithm.XXH3)
        load = MemcpyMover(host, engine, Algorithm.XXH3)
        with monkeypatch.context() as patched:
            patched.setattr(CellSpan, "sum_blocks", damage_and_sum)
            save.submit(make_copy(1, slots, slots, purpose=Purpose.SAVE, keys=keys_of(BLOCKS)))
            poll_until_idle(save)
        write_slots(engine, slots, np.zeros_like(content))

        load.submit(make_copy(2, slots, slots, purpose=Purpose.LOAD, keys=keys_of(BLOCKS)))
        (moved,) = poll_until_idle(load)

    # What was damaged before it was written is whole; what was damaged later is a fault.
    damaged = {position for position, _ in moved.faults}
    for position, block in enumerate(read_slots(engine, slots)):
        assert position in damaged or np.array_equal(block, content[position])


@pytest.mark.usefixtures("way")
def test_no_load_delivers_what_another_process_changed_while_saving_or_loading() -> None:
    engine, slots, keys = engine_of(LAYOUT), range(BLOCKS), keys_of(BLOCKS)
    found: list[int] = []
    with HostTier.create(LAYOUT, BLOCKS, huge_pages=False) as host:
        save = MemcpyMover(engine, host, Algorithm.XXH3)
        load = MemcpyMover(host, engine, Algorithm.XXH3)
        end = host.blocks_offset + BLOCKS * host.slot_bytes
        with flipped_bits(host.arena.fd, 0, end):
            for number in rounds(found):
                content = draw_blocks(LAYOUT, BLOCKS, seed=number)
                write_slots(engine, slots, content)
                save.submit(make_copy(number, slots, slots, purpose=Purpose.SAVE, keys=keys))
                poll_until_idle(save)
                write_slots(engine, slots, np.zeros_like(content))
                load.submit(make_copy(number, slots, slots, purpose=Purpose.LOAD, keys=keys))
                (moved,) = poll_until_idle(load)

                damaged = {position for position, _ in moved.faults}
                found += sorted(damaged)
                wanted = content.copy()
                wanted[sorted(damaged)] = 0
                np.testing.assert_array_equal(read_slots(engine, slots), wanted)


@pytest.mark.usefixtures("way")
def test_blocks_whose_groups_lie_in_slots_of_their_own_come_back_whole() -> None:
    half: dict[str, Any] = {"channels": 64, "dtype": DType.BF16, "block_tokens": 16}
    heads = HeadRange.all_of(2)
    first, second = (
        Layout.split(layers=layers, heads=heads, block_count=BLOCKS, **half)
        for layers in (range(2), range(2, 4))
    )
    layout = Layout.join(first, second)
    engine = engine_of(layout)
    content = draw_blocks(layout, BLOCKS, seed=3)
    write_slots(engine, range(BLOCKS), content)
    apart = np.array([[0, 1, 2], [5, 4, 3]], dtype=np.int32)
    with HostTier.create(layout, BLOCKS, huge_pages=False) as host:
        save = MemcpyMover(engine, host, Algorithm.XXH3)
        load = MemcpyMover(host, engine, Algorithm.XXH3)
        save.submit(make_copy(1, apart, range(3), purpose=Purpose.SAVE, keys=keys_of(3)))
        poll_until_idle(save)
        load.submit(make_copy(2, range(3), apart[:, ::-1], purpose=Purpose.LOAD, keys=keys_of(3)))
        (moved,) = poll_until_idle(load)

    assert not moved.faults
    wanted, half_bytes = content.copy(), layout.block_bytes // 2
    wanted[:3, :half_bytes] = content[[2, 1, 0], :half_bytes]
    wanted[3:, half_bytes:] = content[[5, 4, 3], half_bytes:]
    np.testing.assert_array_equal(read_slots(engine, range(BLOCKS)), wanted)


@pytest.mark.parametrize("later", [(7, 1), (8, 0)], ids=["a reset", "another start"])
@pytest.mark.usefixtures("way")
def test_an_older_copy_of_the_same_key_that_comes_back_whole_is_found(
    later: tuple[int, int],
) -> None:
    engine, slots, keys = engine_of(LAYOUT), range(BLOCKS), keys_of(BLOCKS)
    older, newer = (draw_blocks(LAYOUT, BLOCKS, seed=seed) for seed in (1, 2))
    everywhere = np.arange(BLOCKS, dtype=np.int32)
    with HostTier.create(LAYOUT, BLOCKS, huge_pages=False) as host:
        save = MemcpyMover(engine, host, Algorithm.XXH3)
        load = MemcpyMover(host, engine, Algorithm.XXH3)
        kept = []
        for life, content in (((7, 0), older), (later, newer)):
            write_slots(engine, slots, content)
            copy = make_copy(1, slots, slots, purpose=Purpose.SAVE, keys=keys)
            save.submit(replace(copy, operation=OperationId(*life, 1)))
            poll_until_idle(save)
            kept.append((read_slots(host, slots), host.sums(everywhere).copy()))
        write_slots(host, slots[:3], kept[0][0][:3])
        host.keep_sums(everywhere[:3], kept[0][1][:3])

        copy = make_copy(2, slots, slots, purpose=Purpose.LOAD, keys=keys)
        load.submit(replace(copy, operation=OperationId(*later, 2)))
        (moved,) = poll_until_idle(load)

    assert moved.faults == tuple((number, BlockFault.CORRUPT) for number in range(3))
