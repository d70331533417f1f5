"""Two vLLMs that read each other's host memory: what one has computed, the other one loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from comparing import BLOCK, HITS, PENSTOCK, agree, cached, generate

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Plain, Run

pytestmark = pytest.mark.vllm

BLOCKS = sum(HITS) // BLOCK


def test_a_replica_answers_from_the_host_memory_of_another(
    run: Run, plain_vllm: Plain, tmp_path: Path
) -> None:
    places = [f"unix:{tmp_path}/{number}" for number in range(2)]
    one, other = ({"peers": {"listen": each, "peers": ",".join(places)}} for each in places)
    both = {"connector": PENSTOCK, "weights": "random, seed 0", "role": "kv_both"}
    act = {**generate(), "act": "from_peer", "blocks": BLOCKS}

    [[found], _] = run("llama", [act], both=both, prefill=one, decode=other)

    plain = plain_vllm("llama")["cold"]
    assert agree({"rows": found["computed"]}, plain)
    assert cached(found) == HITS
    assert agree(found, plain)
