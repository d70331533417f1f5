"""A disk below host memory: the first request after a restart is answered from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from oracle import HITS, OTHERS, PAGE, PENSTOCK, SIX, host_hits, same

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.sglang

ONE = {"lengths": [400], "seed": 9}
PAGE_BYTES = PAGE * 2 * 2 * 32 * 4 * 4
"""K and V of two heads of 32 numbers of four bytes, in four layers."""


def test_after_kill_9_the_next_engine_answers_from_the_disk_and_without_a_store(
    run: Run, tmp_path: Path
) -> None:
    disk = str(tmp_path / "disk")
    saved = sum(length // PAGE for length in SIX["lengths"])
    computed = run(
        [{"do": "store"}, SIX, {"do": "store", "blocks": saved}, {"do": "die"}],
        **PENSTOCK,
        disk=disk,
        dies=True,
    )[0][1]

    results, printed = run(
        [
            {"do": "store"},
            SIX,
            {"do": "counts"},
            OTHERS,
            {"do": "signal_store", "signal": "SIGSTOP"},
            {"do": "abort", **ONE},
            ONE,
            {"do": "signal_store", "signal": "SIGKILL"},
            SIX,
            {"do": "store"},
            ONE,
        ],
        **PENSTOCK,
        disk=disk,
    )

    _, again, counts, _, _, aborted, stopped, _, killed, _, later = results
    assert host_hits(again) == HITS, "the first request, without being asked twice"
    assert same(again, computed)
    assert counts["counts"]["disk_blocks_loaded"] == sum(HITS) // PAGE
    assert aborted["ended"]["type"] == "abort"
    assert stopped["rows"][0]["ended"]["type"] == "length", "it waited, and was computed"
    assert host_hits(killed) == HITS, "host memory does not depend on the store"
    assert same(killed, computed)
    assert same(later, stopped)
    assert "the store process has ended: signal 9" in printed


def test_damage_on_the_disk_is_counted_and_computed(run: Run, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    first = run(
        [{"do": "store"}, ONE, {"do": "store", "blocks": 25}, {"do": "die"}],
        **PENSTOCK,
        disk=str(disk),
        dies=True,
    )[0][1]
    [segment] = disk.rglob("*.segment")
    content = bytearray(segment.read_bytes())
    end = len(content.rstrip(b"\0"))
    # The last that was written are the pages, with a trailer each: of every one a bit is flipped.
    for place in range(end - 25 * (PAGE_BYTES + 4096) + PAGE_BYTES // 2, end, PAGE_BYTES + 4096):
        content[place] ^= 1
    segment.write_bytes(content)

    _, again, counts = run([{"do": "store"}, ONE, {"do": "counts"}], **PENSTOCK, disk=str(disk))[0]

    assert host_hits(again) == [0]
    assert same(again, first)
    assert counts["counts"]["disk_failures"] >= 1


def test_with_other_weights_nothing_of_the_disk_is_found(run: Run, tmp_path: Path) -> None:
    disk = str(tmp_path / "disk")
    run(
        [{"do": "store"}, ONE, {"do": "store", "blocks": 25}, {"do": "die"}],
        **PENSTOCK,
        disk=disk,
        dies=True,
    )

    _, other = run([{"do": "store"}, ONE], **PENSTOCK, disk=disk, weights="v2")[0]

    assert host_hits(other) == [0]


def test_another_engine_finds_in_a_shared_store_what_one_has_saved(
    run: Run, tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    Path(store).mkdir()
    first = run(
        [{"do": "store"}, ONE, {"do": "store", "blocks": 25}, {"do": "die"}],
        **PENSTOCK,
        shared=store,
        dies=True,
    )[0][1]

    _, found = run([{"do": "store"}, ONE], **PENSTOCK, shared=store)[0]

    assert host_hits(found) == [384]
    assert same(found, first)
