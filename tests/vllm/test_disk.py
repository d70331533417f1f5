"""A disk below host memory: engines are killed, and the next ones load what was on the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from comparing import BLOCK, HITS, PENSTOCK, agree, cached, counted, generate

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Plain, Results, Run

pytestmark = pytest.mark.vllm

BLOCKS = sum(HITS) // BLOCK + 1
"""Full blocks of the three prompts: of the last one, the block that ends it as well."""
WEIGHTS = "random, seed 0"


def save_and_die(run: Run, folder: Path, **how: Any) -> Results:
    """The answers of an engine all of whose processes were killed when its blocks were saved."""
    acts = [{"act": "store", "on": 1}, generate(), {"act": "store", "blocks": BLOCKS}]
    results, _ = run(
        "llama",
        [*acts, {"act": "die"}],
        connector=PENSTOCK,
        disk=str(folder),
        weights=WEIGHTS,
        dies=True,
        **how,
    )
    return results


def test_after_kill_9_of_everything_the_next_engine_answers_from_the_disk(
    run: Run, plain_vllm: Plain, tmp_path: Path
) -> None:
    _, computed, _ = save_and_die(run, tmp_path / "disk")

    (_, again, _, without, _, later), output = run(
        "llama",
        [
            {"act": "store", "on": 1},
            generate(),
            {"act": "kill_store"},
            generate(forget=True),
            {"act": "store", "on": 1},
            generate(seed=4, forget=True),
        ],
        connector=PENSTOCK,
        disk=str(tmp_path / "disk"),
        weights=WEIGHTS,
    )

    plain = plain_vllm("llama")["cold"]
    assert agree(computed, plain)
    assert cached(again) == HITS
    assert counted(again, "disk_blocks_loaded") == sum(HITS) / BLOCK
    assert counted(again, "tokens_loaded") == sum(HITS)
    assert agree(again, plain)
    assert cached(without) == HITS, "host memory does not depend on the store"
    assert agree(without, plain)
    assert cached(later) == [0, 0, 0]
    assert "the store process has ended: signal 9" in output


def test_two_ranks_find_their_parts_again_after_kill_9(
    run: Run, plain_vllm: Plain, tmp_path: Path
) -> None:
    save_and_die(run, tmp_path / "disk", ranks=2)

    (_, again), _ = run(
        "llama",
        [{"act": "store", "on": 1}, generate()],
        connector=PENSTOCK,
        disk=str(tmp_path / "disk"),
        weights=WEIGHTS,
        ranks=2,
    )

    assert cached(again) == HITS
    assert agree(again, plain_vllm("llama")["cold"])
