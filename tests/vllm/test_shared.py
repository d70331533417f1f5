"""A store that engines share: what one vLLM has computed, another one loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from comparing import BLOCK, HITS, PENSTOCK, agree, announced, cached, generate

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Plain, Run

pytestmark = pytest.mark.vllm

BLOCKS = sum(HITS) // BLOCK + 1
WEIGHTS = "random, seed 0"


def test_a_replica_answers_from_the_store_that_it_shares_with_another(
    run: Run, plain_vllm: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: dict[str, Any] = {
        "connector": PENSTOCK,
        "shared": str(tmp_path / "store"),
        "weights": WEIGHTS,
    }
    store["events"] = True
    acts = [{"act": "store", "on": 1}, generate(), {"act": "store", "blocks": BLOCKS}]
    acts += [{"act": "events"}]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "one"))
    (_, computed, _, written), _ = run("llama", acts, **store)

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "other"))
    acts = [{"act": "store", "on": 1}, generate(), {"act": "events"}]
    (_, again, read), _ = run("llama", acts, **store)

    plain = plain_vllm("llama")["cold"]
    assert agree(computed, plain)
    assert cached(again) == HITS
    assert agree(again, plain)
    # Routers learn where the blocks lie, in the store as in host memory: from who stored them,
    # and from who has loaded them.
    in_store, loaded = announced(written, "STORAGE"), announced(read, "STORAGE")
    assert len(in_store) >= BLOCKS
    assert in_store.items() <= announced(written).items()
    assert len(in_store.keys() & loaded.keys()) >= sum(HITS) // BLOCK
    assert written["localities"] == {
        "BlockStored GPU": ["None"],
        "BlockStored CPU": ["LOCAL"],
        "BlockStored STORAGE": ["REMOTE"],
    }
