"""Layers that draft tokens have KV in the blocks of the model: it comes back as it was, too.

What is drafted does not change an answer, so answers alone would not show drafts that were computed
on wrong KV: the drafts of each request are compared, token by token.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from comparing import BLOCK, HITS, LENGTHS, agree, cached, counted, generate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Results, Run

pytestmark = pytest.mark.vllm

CONNECTOR = ["DraftingConnector", "drafting_connector"]
KINDS = ("eagle", "mtp")
SHARED = 3 * BLOCK
OTHERS = generate(lengths=[9 * BLOCK + 5] * 8, seed=9, max_tokens=1)
ONE = {"shared": SHARED, "seed": 5, "lengths": [40]}
TWO = {**ONE, "lengths": [40, 3]}
"""The second prompt goes on otherwise after the blocks that it shares with the first."""
ACTS = {
    "cold": generate(),
    "cached": generate(),
    "from host": generate(forget=True),
    "others": OTHERS,
    "evicted": generate(),
    "two cold": generate(**TWO, skip_reading=True),
    "reset": {"act": "reset"},
    "first": generate(**ONE, forget=True),
    "two": generate(**TWO, forget=True),
}
WEIGHTS = "random, seed 7"


def speculating(kind: str, model: Callable[[str], Path]) -> dict[str, Any]:
    told: dict[str, Any] = {"method": kind, "num_speculative_tokens": 3}
    if kind == "eagle":
        told["model"] = str(model(kind) / "draft")
    return {"speculative_config": told}


def drafts_of(output: str) -> list[list[list[int]]]:
    """What was drafted for each request of an engine, step by step; requests in their order."""
    found: dict[str, list[list[int]]] = {}
    for line in output.splitlines():
        if line.startswith("DRAFTED "):
            request, drafted = json.loads(line.removeprefix("DRAFTED "))
            found.setdefault(request, []).append(drafted)
    return [found[name] for name in sorted(found, key=lambda name: int(name.partition("-")[0]))]


def accepted(act: dict[str, Any], before: dict[str, Any] | None = None) -> tuple[float, ...]:
    """How many tokens were drafted and how many accepted in an act."""
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    began = before["metrics"] if before is not None else {}
    return tuple(act["metrics"][name] - began.get(name, 0) for name in names)


@pytest.fixture(scope="module", params=KINDS)
def drafting(
    request: pytest.FixtureRequest, run: Run, model: Callable[[str], Path]
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """What an engine answered in each act, and what was drafted in each that drafts."""
    kind = request.param
    how = {"pool": 64, "options": speculating(kind, model)}
    results, output = run(kind, list(ACTS.values()), connector=CONNECTOR, **how)
    drafts, per_act = iter(drafts_of(output)), {}
    for name, act in ACTS.items():
        if act["act"] == "generate" and act.get("max_tokens") != 1:
            per_act[name] = [next(drafts) for _ in act["lengths"]]
    assert not list(drafts)
    return dict(zip(ACTS, results, strict=True)), per_act


def test_hits_have_the_answers_and_the_drafts_of_what_was_computed(drafting: Any) -> None:
    results, drafts = drafting

    assert cached(results["cold"]) == [0, 0, 0]
    assert 0 < accepted(results["cold"])[1] < accepted(results["cold"])[0]
    # vLLM itself does not trust the last block that it has; the connector brings it.
    for hit in ("cached", "from host", "evicted"):
        assert cached(results[hit]) == HITS, hit
        assert agree(results[hit], results["cold"]), hit
        assert drafts[hit] == drafts["cold"], hit
    assert counted(results["cached"], "tokens_loaded") == BLOCK * len(HITS)


def test_a_block_that_another_token_follows_is_not_taken(drafting: Any) -> None:
    """The KV of its last token depends on that token, in the layers that draft."""
    results, drafts = drafting

    assert cached(results["two"]) == [SHARED + BLOCK, SHARED - BLOCK]
    assert agree(results["two"], results["two cold"])
    assert drafts["two"] == drafts["two cold"]


@pytest.mark.parametrize("kind", KINDS)
def test_another_engine_has_the_same_drafts_from_the_disk(
    run: Run, model: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    how: dict[str, Any] = {
        "connector": CONNECTOR,
        "disk": str(tmp_path),
        "weights": WEIGHTS,
        "options": speculating(kind, model),
    }
    on, saved = {"act": "store", "on": 1}, {"act": "store", "blocks": sum(HITS) // BLOCK}

    (_, computed, _), output = run(kind, [on, generate(), saved, {"act": "die"}], dies=True, **how)
    (_, again), output_again = run(kind, [on, generate()], **how)

    assert cached(again) == HITS
    assert counted(again, "disk_blocks_loaded") == sum(HITS) / BLOCK
    assert agree(again, computed)
    count = len(LENGTHS)
    assert drafts_of(output_again)[-count:] == drafts_of(output)[:count]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_handed_over_with_what_drafts_need(
    run: Run, model: Callable[[str], Path], kind: str
) -> None:
    acts = [
        {"act": "in_turn", "lengths": LENGTHS},
        {"act": "forget"},
        {"act": "at_once", "lengths": LENGTHS},
        {"act": "forget"},
        {"act": "alone", "lengths": LENGTHS},
    ]
    both = {"connector": CONNECTOR, "options": speculating(kind, model)}
    pieces = {"max_num_batched_tokens": 2 * BLOCK}

    results: Results = run(kind, acts, both=both, prefill=pieces, decode={})[0]

    in_turn, _, at_once, before, alone = results
    assert counted(in_turn, "prompts_received") == len(LENGTHS)
    assert counted(at_once, "prompts_received") == 2 * len(LENGTHS)
    assert agree(in_turn, alone)
    assert agree(at_once, alone)
    # vLLM fills the first step of a received prompt up with drafts that nobody made. It may take
    # one by chance, and then all later drafts begin at other tokens.
    made = accepted(alone, before)[1]
    assert accepted(in_turn)[1] > 0.7 * made
    assert accepted(at_once, in_turn)[1] > 0.7 * made
