"""Many requests at once, a pool far too small for them, two ranks: the same output always."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from comparing import (
    BLOCK,
    HITS,
    PENSTOCK,
    TAMPERED,
    agree,
    announced,
    cached,
    counted,
    generate,
)
from references import CROWD, FOLLOWERS, LATENT, SHARED, STRANGERS

from penstock.cli.app import run as replay

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Plain, Results, Run

pytestmark = pytest.mark.vllm

RECORDED = ["RecordedConnector", "recorded_connector"]
CONCURRENCY = len(CROWD["lengths"])
FOUND = SHARED * len(FOLLOWERS["lengths"])
# Ten blocks for each follower, and not as many again.
ROOMY_POOL = 280
SMALL_POOL: dict[str, Any] = {"pool": 20, "max_model_len": 416, "max_num_batched_tokens": 416}
HOST_BLOCKS = 64
# Twice as much as fits into host memory, one after the other. Each is saved before it has ended.
DOCUMENTS = generate(
    lengths=[11] * 60, shared=8 * BLOCK, documents=16, alone=True, max_tokens=8, seed=21
)
REPLAYED = f"""
version = 1
model.name = "tiny"
cache = {{ block_tokens = {BLOCK}, load_tokens_min = 1 }}
tiers = [{{ name = "host", kind = "host", blocks = {HOST_BLOCKS} }}]
"""


@pytest.fixture(scope="module")
def plain(plain_vllm: Plain) -> dict[str, Any]:
    """Plain vLLM with room for all of it."""
    return plain_vllm("llama")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recording") / "day.jsonl"


@pytest.fixture(scope="module")
def recorded_and_printed(run: Run, recording: Path) -> tuple[Results, str]:
    """A pool of 20 blocks, of which one may be pinned when it is full, and host memory for 64.

    First one request after the other, then all at once; then slow copies.
    """
    acts = [DOCUMENTS, {"act": "reset"}]
    acts += [CROWD, CROWD, FOLLOWERS, {**CROWD, "seed": 7, "tamper": "slow"}]
    acts += [{**FOLLOWERS, "tamper": "slow"}]
    how = {"asynchronous": True, "record": str(recording), **SMALL_POOL}
    return run("llama", acts, connector=TAMPERED, host_blocks=HOST_BLOCKS, **how)


@pytest.fixture(scope="module")
def cramped_and_printed(recorded_and_printed: tuple[Results, str]) -> tuple[Results, str]:
    """What was done after the reset."""
    results, printed = recorded_and_printed
    return results[2:], printed


@pytest.fixture(scope="module")
def cramped(cramped_and_printed: tuple[Results, str]) -> Results:
    return cramped_and_printed[0]


@pytest.fixture(scope="module")
def roomy(run: Run) -> Results:
    """The connector with room for all of it; requests are aborted while their loads run.

    The pool has so little room beside them that others get the same blocks.
    """
    acts = [
        CROWD,
        {**CROWD, "forget": True},
        FOLLOWERS,
        {**FOLLOWERS, "forget": True},
        {**FOLLOWERS, "act": "abort", "forget": True, "tamper": "hold", "found": FOUND},
        STRANGERS,
        {**FOLLOWERS, "forget": True, "tamper": ""},
        generate(),
        generate(forget=True, params={"penstock": False}),
        generate(forget=True, params={"penstock": {"load": False}}),
        generate(forget=True, skip_reading=True),
        generate(forget=True, salt="somebody else"),
        generate(forget=True, salt="somebody else"),
        generate(forget=True, seed=4, params={"penstock": {"save": False}}),
        generate(forget=True, seed=4),
        generate(forget=True, seed=31, params={"penstock": {"over": True}}),
        generate(forget=True, seed=31),
        generate(forget=True, seed=31, params={"penstock": {"priority": 1, "ttl_s": 60}}),
        generate(forget=True, seed=32, params={"penstock": {"ttl_s": -1}}),
        {"act": "update"},
        generate(),
    ]
    return run("llama", acts, connector=TAMPERED, pool=ROOMY_POOL)[0]


def test_a_pool_of_twenty_blocks_is_enough(plain: dict[str, Any], cramped: Results) -> None:
    assert cramped[1]["metrics"]["vllm:num_preemptions"] > 0
    assert agree(cramped[0], plain["crowd"])
    assert agree(cramped[1], plain["crowd"])
    assert agree(cramped[2], plain["followers"])
    assert counted(cramped[2], "tokens_loaded") > 0


def test_what_an_engine_records_predicts_the_hits_that_it_has(
    recorded_and_printed: tuple[Results, str], recording: Path, tmp_path: Path
) -> None:
    act = recorded_and_printed[0][0]
    found = cached(act)
    lines = recording.read_text("ascii").splitlines(keepends=True)[: len(found)]
    asked = len(found) * (DOCUMENTS["shared"] + DOCUMENTS["lengths"][0])
    trace, config, report = (tmp_path / name for name in ("day.jsonl", "t.toml", "report.json"))
    trace.write_text("".join(lines), "ascii")
    config.write_text(REPLAYED, "ascii")

    # vLLM keeps one block of its pool for itself.
    words = ["replay", str(trace), "--config", str(config), "--json", str(report), "--no-best"]
    assert replay([*words, "--device-blocks", str(SMALL_POOL["pool"] - 1)]) == 0
    told = json.loads(report.read_text("utf-8"))

    assert told["tokens"] == asked
    assert counted(act, "blocks_dropped_pinned") == 0
    assert 0.2 < sum(found) / asked < 0.8
    assert abs(told["token_rate"] - sum(found) / asked) < 0.02


def test_57841_the_scheduler_does_not_deadlock_under_kv_pressure(cramped: Results) -> None:
    """It ended at all: more requests than fit wait for blocks, loads and pins at once."""
    assert [len(act["rows"]) for act in cramped] == [CONCURRENCY, CONCURRENCY, 24, CONCURRENCY, 24]
    assert counted(cramped[-1], "pinned_blocks") <= SMALL_POOL["pool"] // 2


def test_no_more_than_half_of_what_is_free_or_a_twentieth_of_the_pool_is_ever_pinned(
    cramped_and_printed: tuple[Results, str], plain: dict[str, Any]
) -> None:
    """Copies are so slow that requests end before their blocks were read."""
    results, printed = cramped_and_printed
    found = re.findall(r"PINNED (\d+) (\d+)", printed)
    pinned = [(int(count), int(limit)) for count, limit in found]

    assert pinned
    assert all(count <= limit for count, limit in pinned)
    # A full pool lends a twentieth, and one that nobody else uses half.
    assert {limit for _, limit in pinned} <= set(range(1, SMALL_POOL["pool"] // 2 + 1))
    # What found no room was given up, and nobody waited for it.
    dropped = [counted(act, "blocks_dropped_pinned") for act in results]
    assert dropped[3] > dropped[2]
    assert agree(results[4], plain["followers"])


def test_concurrent_requests_from_host_memory_give_the_same(
    plain: dict[str, Any], roomy: Results
) -> None:
    assert agree(roomy[0], plain["crowd"])
    assert agree(roomy[1], plain["crowd"])
    assert sum(cached(roomy[1])) > 0
    assert counted(roomy[1], "loads_failed") == 0


def test_44294_requests_on_a_prefix_that_is_being_loaded_do_not_wait(
    plain: dict[str, Any], roomy: Results
) -> None:
    """All of them are served from below in one go, each by its own load."""
    assert agree(roomy[2], plain["followers"])
    assert agree(roomy[3], plain["followers"])
    assert min(cached(roomy[3])) >= SHARED
    # Each was looked up once: none was put off and asked about again.
    looked_up = counted(roomy[3], "lookups") - counted(roomy[2], "lookups")
    assert looked_up == len(FOLLOWERS["lengths"])


def test_an_abort_while_blocks_are_loaded_leaves_nothing_stale(
    plain: dict[str, Any], roomy: Results
) -> None:
    """Loads write when their requests are long gone, and others want the blocks."""
    before, aborted, strangers, again = roomy[3:7]

    assert aborted["aborted"] == len(FOLLOWERS["lengths"])
    assert agree(strangers, plain["strangers"])
    # What requests save at their end is pinned until the next step; those of this act save nothing.
    assert counted(roomy[8], "pinned_blocks") == 0
    # Nothing failed: nobody wanted them any more.
    assert counted(strangers, "loads_failed") == counted(before, "loads_failed") == 0
    assert min(cached(again)) >= SHARED
    assert agree(again, plain["followers"])


def test_a_request_may_opt_out(plain: dict[str, Any], roomy: Results) -> None:
    opted_out, without_load, skipping = roomy[8:11]

    assert [cached(act) for act in (opted_out, without_load, skipping)] == [[0, 0, 0]] * 3
    for act in (opted_out, without_load, skipping):
        assert agree(act, plain["cold"])
    saved = counted(opted_out, "blocks_saved") - counted(roomy[7], "blocks_saved")
    assert saved == 0


def test_another_salt_finds_nothing_of_others(plain: dict[str, Any], roomy: Results) -> None:
    first, second = roomy[11:13]

    assert cached(first) == [0, 0, 0]
    assert cached(second) == HITS
    assert agree(second, plain["cold"])


def test_a_request_may_leave_nothing_behind(roomy: Results) -> None:
    before, unsaved, again = roomy[12:15]

    assert counted(unsaved, "blocks_saved") == counted(before, "blocks_saved")
    assert cached(again) == [0, 0, 0]
    assert agree(again, unsaved)


def test_hints_are_obeyed_and_wrong_ones_keep_a_request_out(roomy: Results) -> None:
    before, over, again, kept, wrong = roomy[14:19]
    saved = [counted(act, "blocks_saved") for act in (before, over, again, kept, wrong)]

    # What its client does not need again is not saved, so the next one finds nothing.
    assert saved[1] == saved[0]
    assert cached(again) == [0, 0, 0]
    assert saved[2] > saved[1]
    assert cached(kept) == HITS
    assert counted(wrong, "requests_refused") == len(HITS)
    assert saved[4] == saved[3]


def test_a_weight_update_voids_what_the_old_weights_computed(
    plain: dict[str, Any], roomy: Results
) -> None:
    assert cached(roomy[-1]) == [0, 0, 0]
    assert agree(roomy[-1], plain["new weights"])
    # The control: what the old weights computed gives another answer.
    assert not agree(plain["new weights"], plain["cold"])


@pytest.fixture(scope="module")
def two_ranks(run: Run) -> Results:
    acts = [generate(), {"act": "events"}, generate(forget=True)]
    acts += [generate(forget=True, tamper="flip"), {"act": "arenas"}, {"act": "events"}]
    acts += [{"act": "reset"}, generate(max_tokens=1, tamper=""), {"act": "events"}]
    how = {"ranks": 2, "events": True, "asynchronous": True}
    return run("llama", acts, connector=TAMPERED, **how)[0]


def test_two_ranks_load_what_each_of_them_saved(two_ranks: Results, plain: dict[str, Any]) -> None:
    assert cached(two_ranks[2]) == HITS
    assert agree(two_ranks[0], plain["cold"])
    assert agree(two_ranks[2], plain["cold"])
    # Each has memory of its own: they hold different heads.
    first, second = two_ranks[4]["arenas"]
    assert not set(first) & set(second)


def test_a_block_that_one_rank_finds_damaged_is_computed_by_both(
    two_ranks: Results, plain: dict[str, Any]
) -> None:
    assert counted(two_ranks[3], "loads_failed") == len(HITS)
    assert agree(two_ranks[3], plain["cold"])


def test_events_name_blocks_in_host_memory_as_vllm_names_its_own(two_ranks: Results) -> None:
    stored = announced(two_ranks[1])

    assert len(stored) == counted(two_ranks[1], "blocks_saved")
    assert set(two_ranks[8]["events"]["BlockRemoved CPU"]) == set(stored)


def test_an_engine_whose_machine_has_no_memory_for_the_tier_runs_without(
    run: Run, plain: dict[str, Any]
) -> None:
    results, output = run("llama", [generate()], connector=PENSTOCK, host_blocks=10**9)

    assert agree(results[0], plain["cold"])
    assert output.count("Penstock is off, vLLM runs without it") == 1


def test_an_engine_whose_machine_cannot_pin_the_tier_runs_degraded(
    run: Run, plain: dict[str, Any]
) -> None:
    unpinned = ["UnpinnedConnector", "unpinned_connector"]

    results, printed = run("llama", [generate(), generate(forget=True)], connector=unpinned)

    assert agree(results[0], plain["cold"])
    assert agree(results[1], plain["cold"])
    assert cached(results[1]) == [0, 0, 0]
    assert printed.count("Penstock: degraded: tier host is off cause=rank 0: ") == 1
    assert printed.count("its memory cannot be pinned") == 1


def test_an_engine_of_a_version_that_was_not_tested_runs_without(
    run: Run, plain: dict[str, Any]
) -> None:
    strange = ["StrangeConnector", "strange_connector"]

    results, printed = run("llama", [generate()], connector=strange, extra={"any_version": False})

    assert agree(results[0], plain["cold"])
    said = "Penstock is off, vLLM runs without it: this is vLLM"
    assert printed.count(said) == 1
    assert "the connector is tested with 0.1; kv_connector_extra_config.any_version" in printed


@pytest.fixture(scope="module")
def sharing(run: Run) -> tuple[Results, Results, str]:
    """Latent attention on two ranks, without the connector and with one that tells its calls."""
    setup: dict[str, Any] = {"ranks": 2, **LATENT}
    plain, _ = run("latent", [generate(), generate()], **setup)
    acts = [generate(), generate(), generate(forget=True), {"act": "arenas"}]
    results, printed = run("latent", acts, connector=RECORDED, **setup)
    return plain, results, printed


def test_two_ranks_with_latent_attention_share_one_copy(
    sharing: tuple[Results, Results, str],
) -> None:
    plain, results, _ = sharing

    assert cached(results[1]) == cached(results[2]) == HITS
    assert agree(results[0], plain[0])
    assert agree(results[1], plain[1])
    assert agree(results[2], plain[1])
    first, second = results[3]["arenas"]
    assert first == second


def test_vllm_calls_a_worker_in_the_order_that_is_replayed_without_it(
    sharing: tuple[Results, Results, str],
) -> None:
    """`test_vllm_replay.py` does, also where there is a GPU and no vLLM."""
    steps = {tuple(line.split()) for line in re.findall(r"STEP (.*)", sharing[2])}
    layers = ("wait_for_layer_load", "save_kv_layer")
    after = ("start_load_kv", "wait_for_save", "get_transfer_results")
    after += ("get_block_ids_with_load_errors", "build_connector_worker_meta")
    first, last = "bind_connector_metadata", "clear_connector_metadata"

    # A step that computes, and one that only takes loads on. Loads are asynchronous: vLLM starts
    # them when the step was submitted.
    assert steps == {(first, *layers, *after, last), (first, *after, last)}


TIGHT_POOL: dict[str, Any] = {"pool": 60, "max_model_len": 1280, "max_num_batched_tokens": 1280}
"""Room for the longest prompt below, and not for it twice."""
LONGEST = 32 * BLOCK + 5


@pytest.mark.parametrize(
    ("lengths", "offers_again"), [([LONGEST, 9 * BLOCK + 5, 8 * BLOCK + 5], ""), ([LONGEST], "1")]
)
def test_loads_that_fail_in_a_small_pool_do_not_stop_the_engine(
    run: Run, lengths: list[int], offers_again: str
) -> None:
    """vLLM keeps the room of a failed load reserved: the same load never fits beside it.

    If it is offered all the same, as in the second case, that is found out and taken back.
    """
    prompts = generate(lengths=lengths, max_tokens=4)
    acts = [prompts, {**prompts, "forget": True, "tamper": "fail"}]

    (computed, again), output = run(
        "llama",
        acts,
        connector=TAMPERED,
        environment={"PENSTOCK_OFFERS_AGAIN": offers_again},
        **TIGHT_POOL,
    )

    assert counted(again, "loads_failed") == len(lengths)
    assert cached(again) == [0] * len(lengths)
    assert agree(again, computed)
    assert counted(again, "loads_not_started") == bool(offers_again)
    assert ("the engine has no room to load it" in output) == bool(offers_again)
