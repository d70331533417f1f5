"""Trailers by compiled code and by NumPy: the same bytes, and the same faults found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache.operations import BlockFault
from penstock.movers import packing
from penstock.movers.packing import PackedSums
from penstock.store.base import MappedArena, Space, part_name
from penstock.store.disk import io as disk_io
from penstock.store.disk.format import TRAILER_HEAD, Geometry
from penstock.store.disk.index import DiskSegment
from penstock.store.disk.io import (
    Run,
    begin_trailers,
    check_blocks,
    check_trailers,
    end_trailers,
)
from penstock.tiers.host import HostTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import KEY_BYTES, Key
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

COUNT, FIRST, BLOCK_BYTES, LAYERS = 5, 7, 4096, 4
EARLIER_LIFE, THIS_LIFE = 11, 12
"""Salts."""


@pytest.fixture(params=["compiled", "plain"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(disk_io, "load_parts_library", lambda: None)
        monkeypatch.setattr(packing, "load_parts_library", lambda: None)
    return str(request.param)


@pytest.fixture
def run() -> Iterator[Run]:
    layout = Layout.opaque(
        layers=range(LAYERS),
        block_bytes=BLOCK_BYTES // LAYERS,
        encoding="test",
        block_tokens=16,
        block_count=8,
    )
    host = HostTier.create(layout, 8)
    form = Form(layout=layout, checksum=Algorithm.XXH3)
    arena = MappedArena(host, form, part_name(form, rank=0, rank_count=1, equal=False))
    keys = [Key(bytes([number + 1]) * KEY_BYTES) for number in range(COUNT)]
    slots = np.array([3, 1, 7, 0, 4], dtype=np.int32)
    content = np.random.default_rng(1).integers(0, 256, (COUNT, BLOCK_BYTES), dtype=np.uint8)
    for block, place in zip(content, arena.blocks(slots, BLOCK_BYTES), strict=True):
        place[:] = block
    sums = arena.span.sum_blocks(content, keys, Algorithm.XXH3, salt=EARLIER_LIFE)
    host.keep_sums(slots, sums)
    geometry = Geometry(segment_bytes=1 << 20, block_bytes=BLOCK_BYTES, cell_count=LAYERS)
    space = Space(bytes(range(16)), 9)
    segment = DiskSegment(0, "", 0)
    yield Run(
        *(segment, 0, geometry, 77, FIRST, arena, space, keys, slots, EARLIER_LIFE, None),
    )
    host.close()


def written(run: Run) -> NDArray[np.uint8]:
    trailers = np.zeros((COUNT, run.geometry.trailer_bytes), dtype=np.uint8)
    begin_trailers(run, trailers)
    end_trailers(trailers, run.geometry.cell_count)
    return trailers


def test_both_write_the_same_trailers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = written(run)
    monkeypatch.setattr(disk_io, "load_parts_library", lambda: None)

    np.testing.assert_array_equal(compiled, written(run))


@pytest.mark.usefixtures("code")
def test_trailers_that_were_written_are_right(run: Run) -> None:
    assert check_trailers(run, written(run)) == {}


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("field", [*(TRAILER_HEAD.names or ()), "table"])
def test_a_byte_that_changed_in_a_trailer_is_found(run: Run, field: str) -> None:
    trailers = written(run)
    places = TRAILER_HEAD.fields or {}
    at = 256 + 8 * LAYERS - 1 if field == "table" else places[field][1]
    trailers[2, at] ^= 1

    assert check_trailers(run, trailers) == {2: BlockFault.CORRUPT}


@pytest.mark.usefixtures("code")
def test_a_whole_trailer_of_another_block_means_that_this_one_is_missing(run: Run) -> None:
    trailers = written(run)
    others = [*run.keys[:3], Key(b"\xff" * KEY_BYTES), run.keys[4]]

    assert check_trailers(run._replace(keys=others), trailers) == {3: BlockFault.MISSING}
    elsewhere = run._replace(space=Space(bytes(16), 9))
    assert check_trailers(elsewhere, trailers) == dict.fromkeys(range(COUNT), BlockFault.MISSING)


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("change", [{"life": 78}, {"first": 8}, {"space": Space(bytes(16), 8)}])
def test_whole_trailers_of_another_time_or_place_are_corrupt(
    run: Run, change: dict[str, object]
) -> None:
    trailers = written(run)

    found = check_trailers(run._replace(**change), trailers)  # type: ignore[arg-type]

    assert found == dict.fromkeys(range(COUNT), BlockFault.CORRUPT)


@pytest.mark.usefixtures("code")
def test_blocks_are_compared_under_the_salt_of_the_life_that_saved_each(run: Run) -> None:
    trailers = written(run)
    # Two of the blocks were saved in this life.
    newer = run._replace(salt=THIS_LIFE)
    content = np.stack([np.array(each) for each in run.arena.blocks(run.slots, BLOCK_BYTES)])
    now = run.arena.span.sum_blocks(content, run.keys, Algorithm.XXH3, salt=THIS_LIFE)
    run.arena.host.keep_sums(run.slots, now)
    trailers[3:] = written(newer)[3:]
    run.arena.blocks(run.slots, BLOCK_BYTES)[1][100] ^= 1
    run.arena.host.keep_sums(run.slots, np.zeros_like(now))
    bad = {0: BlockFault.MISSING}

    check_blocks(newer, PackedSums(run.arena.host.layout, Algorithm.XXH3), trailers, bad)

    assert bad == {0: BlockFault.MISSING, 1: BlockFault.CORRUPT}
    kept = run.arena.host.sums(run.slots)
    np.testing.assert_array_equal(kept[2:], now[2:])
    assert not kept[:2].any()
