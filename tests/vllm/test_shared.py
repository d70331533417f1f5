"""A store that engines share: what one vLLM has computed, another one loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from comparing import BLOCK, HITS, PENSTOCK, agree, cached, generate

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Plain, Run

pytestmark = pytest.mark.vllm

BLOCKS = sum(HITS) // BLOCK + 1
WEIGHTS = "random, seed 0"


def test_a_replica_answers_from_the_store_that_it_shares_with_another(
    run: Run, plain_vllm: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = {"connector": PENSTOCK, "shared": str(tmp_path / "store"), "weights": WEIGHTS}
    acts = [{"act": "store", "on": 1}, generate(), {"act": "store", "blocks": BLOCKS}]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "one"))
    (_, computed, _), _ = run("llama", acts, **store)

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "other"))
    (_, again), _ = run("llama", [{"act": "store", "on": 1}, generate()], **store)

    plain = plain_vllm("llama")["cold"]
    assert agree(computed, plain)
    assert cached(again) == HITS
    assert agree(again, plain)
