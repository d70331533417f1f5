"""Penstock as the storage backend of HiCache: what one engine stored, the next one finds."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from penstock.store.disk.inspect import inspect_folder

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Results, Run

pytestmark = pytest.mark.sglang

PAGE = 16
PROMPTS = {"lengths": [200, 260, 330], "alone": True}
PAGES = sum((length + 11) // PAGE for length in PROMPTS["lengths"])
"""Of prompts and answers; the last token of an answer is never computed."""
HITS = [192, 256, 320]
OTHERS = {"lengths": [180, 210], "alone": True, "seed": 4}
PAGE_BYTES = 2 * 4 * 2 * 32 * 4 * PAGE
"""Of K and V in 4 layers with 2 heads of 32 numbers in float32."""
CONFIG = """
version = 1
model.name = "tiny"
model.weights_version = "{weights}"
[[tiers]]
name = "host"
kind = "host"
blocks = {host}
[[tiers]]
name = "disk"
kind = "disk"
path = "{path}"
gib = 0.25
write = "write_through"
"""


def hicache(**more: Any) -> dict[str, Any]:
    """SGLang's options for HiCache without storage."""
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
        "hicache_storage_prefetch_policy": "wait_complete",
        **more,
    }


def stored(path: Path, *, weights: str = "v1", host: int = 64, **more: Any) -> dict[str, Any]:
    """The same, with Penstock below it."""
    extra = {
        "backend_name": "penstock",
        "class_name": "PenstockStorage",
        "module_path": "penstock.connectors.sglang",
        "interface_v1": 1,
        "config": CONFIG.format(path=path, weights=weights, host=host),
        "prefetch_threshold": PAGE,
    }
    return hicache(
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(extra),
        **more,
    )


@pytest.fixture(scope="module")
def plain(run: Run) -> Results:
    """What SGLang answers alone."""
    return run([PROMPTS, OTHERS], options={"disable_radix_cache": True})[0]


@pytest.fixture(scope="module")
def left(run: Run, plain: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk with all pages of the prompts. SGLang ends by killing all of its processes."""
    disk = tmp_path_factory.mktemp("left") / "disk"
    acts = [PROMPTS, {"do": "wait_until_stored", "disk": str(disk), "pages": PAGES}]
    (computed, kept), _ = run(acts, options=stored(disk))
    assert cached(computed) == [0, 0, 0]
    assert kept["pages"] == PAGES
    assert_same(computed, plain[0])
    return disk


@pytest.fixture
def disk(left: Path, tmp_path: Path) -> Path:
    """A copy of that disk."""
    copy = tmp_path / "disk"
    shutil.copytree(left, copy, ignore=shutil.ignore_patterns("socket*", "lock"))
    copy.chmod(0o700)
    return copy


def cached(result: dict[str, Any]) -> list[int]:
    return [row["cached"] for row in result["rows"]]


def from_storage(result: dict[str, Any]) -> list[int]:
    return [(row["where"] or {}).get("storage", 0) for row in result["rows"]]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Both gave the same tokens, with the same probabilities but for rounding; none failed."""
    for mine, plain in zip(one["rows"], other["rows"], strict=True):
        assert mine["tokens"] == plain["tokens"]
        assert mine["logprobs"] == pytest.approx(plain["logprobs"], abs=2e-4)
        assert mine["ended"]["type"] == "length"


def test_the_next_engine_answers_from_the_disk_and_goes_on_without_its_store_process(
    run: Run, plain: Results, disk: Path
) -> None:
    def store(name: str) -> dict[str, Any]:
        return {"do": "signal_store", "signal": name}

    flush = {"do": "flush"}
    acts = [PROMPTS, store("SIGSTOP"), OTHERS, store("SIGCONT"), flush]
    acts += [store("SIGKILL"), PROMPTS]
    (found, _, stopped, *_, killed), output = run(acts, options=stored(disk, host=16))

    assert from_storage(found) == HITS
    assert_same(found, plain[0])
    assert cached(stopped) == [0, 0]
    assert_same(stopped, plain[1])
    assert_same(killed, plain[0])
    assert "the store process has ended: signal 9" in output


def test_a_damaged_page_is_counted_and_computed_again(run: Run, plain: Results, disk: Path) -> None:
    (segment,) = disk.glob("*.segment")
    report = inspect_folder(disk)
    assert report.verify().damaged == 0
    written = bytearray(segment.read_bytes())
    # Pages are written in order: somewhere in the middle of the last prompt's.
    place = len(written.rstrip(b"\0")) - 6 * PAGE_BYTES
    written[place : place + 8] = bytes(each ^ 1 for each in written[place : place + 8])
    segment.write_bytes(written)
    assert inspect_folder(disk).verify().damaged == 1

    (found,), output = run([PROMPTS], options=stored(disk))

    assert from_storage(found)[:2] == HITS[:2]
    assert 0 < from_storage(found)[2] < HITS[2]
    assert_same(found, plain[0])
    assert "1 page with wrong sums, computed again: damaged_pages=1" in output


def test_pages_of_other_weights_are_not_found_and_a_cleared_storage_is_empty(
    run: Run, plain: Results, disk: Path
) -> None:
    wait = {"do": "wait_until_stored", "disk": str(disk), "pages": 2 * PAGES}
    acts = [PROMPTS, wait, {"do": "clear"}, {"do": "flush"}, PROMPTS]
    (others, *_, cleared), _ = run(acts, options=stored(disk, weights="v2"))

    assert cached(others) == [0, 0, 0]
    assert cached(cleared) == [0, 0, 0]
    assert_same(cleared, plain[0])


def test_two_ranks_find_their_parts(run: Run, plain: Results, tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    disk = tmp_path / "disk"
    ranks = {
        "options": stored(disk, tp_size=2),
        # Without it SGLang wants a NUMA node for each rank.
        "environment": {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
    }
    run([PROMPTS, {"do": "wait_until_stored", "disk": str(disk), "pages": 2 * PAGES}], **ranks)

    (found,), _ = run([PROMPTS], **ranks)

    assert from_storage(found) == HITS
    assert_same(found, plain[0])
