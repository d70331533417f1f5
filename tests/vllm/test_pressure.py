"""Many requests at once, a pool far too small for them, two ranks: the same output always."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from comparing import BLOCK, HITS, PENSTOCK, agree, cached, counted, generate

if TYPE_CHECKING:
    from conftest import Run, Told

pytestmark = pytest.mark.vllm

CONCURRENCY = 32
DRAWN = random.Random(11)
CROWD = generate(
    lengths=[DRAWN.randrange(40, 160) for _ in range(CONCURRENCY)], max_tokens=48, seed=5
)
SHARED = 8 * BLOCK
FOLLOWERS = generate(lengths=[20 + number for number in range(24)], shared=SHARED, seed=6)
SMALL_POOL: dict[str, Any] = {"pool": 20, "max_model_len": 416, "max_num_batched_tokens": 416}


@pytest.fixture(scope="module")
def plain(run: Run) -> Told:
    """Plain vLLM with room for all of it."""
    return run("llama", [CROWD, FOLLOWERS, generate()])[0]


@pytest.fixture(scope="module")
def cramped(run: Run) -> Told:
    """A pool of 20 blocks, of which one may be pinned, and host memory for 64."""
    acts = [CROWD, CROWD, FOLLOWERS]
    return run("llama", acts, connector=PENSTOCK, host_blocks=64, **SMALL_POOL)[0]


@pytest.fixture(scope="module")
def roomy(run: Run) -> Told:
    """The connector with room for all of it; requests are aborted while their loads run."""
    acts = [
        CROWD,
        {**CROWD, "forget": True},
        FOLLOWERS,
        {**FOLLOWERS, "forget": True},
        *({**FOLLOWERS, "act": "abort", "steps": steps} for steps in (1, 2, 3)),
        {**FOLLOWERS, "forget": True},
        generate(),
        generate(forget=True, params={"penstock": False}),
        generate(forget=True, params={"penstock": {"load": False}}),
        generate(forget=True, skip_reading=True),
        generate(forget=True, salt="somebody else"),
        generate(forget=True, salt="somebody else"),
    ]
    return run("llama", acts, connector=PENSTOCK)[0]


def test_a_pool_of_twenty_blocks_is_enough(plain: Told, cramped: Told) -> None:
    assert cramped[1]["metrics"]["vllm:num_preemptions"] > 0
    assert agree(cramped[0], plain[0])
    assert agree(cramped[1], plain[0])
    assert agree(cramped[2], plain[1])
    assert counted(cramped[2], "tokens_loaded") > 0


def test_57841_the_scheduler_does_not_deadlock_under_kv_pressure(cramped: Told) -> None:
    """It ended at all: more requests than fit wait for blocks, loads and pins at once."""
    assert [len(act["rows"]) for act in cramped] == [CONCURRENCY, CONCURRENCY, 24]
    assert counted(cramped[-1], "pinned_blocks") <= 1


def test_concurrent_requests_from_host_memory_give_the_same(plain: Told, roomy: Told) -> None:
    assert agree(roomy[0], plain[0])
    assert agree(roomy[1], plain[0])
    assert sum(cached(roomy[1])) > 0
    assert counted(roomy[1], "loads_failed") == 0


def test_44294_requests_on_a_prefix_that_is_being_loaded_do_not_wait(
    plain: Told, roomy: Told
) -> None:
    """All of them are served from below in one go, each by its own load."""
    assert agree(roomy[2], plain[1])
    assert agree(roomy[3], plain[1])
    assert min(cached(roomy[3])) >= SHARED
    # Each was looked up once: none was put off and asked about again.
    looked_up = counted(roomy[3], "lookups") - counted(roomy[2], "lookups")
    assert looked_up == len(FOLLOWERS["lengths"])


def test_an_abort_while_blocks_are_loaded_leaves_nothing_stale(plain: Told, roomy: Told) -> None:
    aborted = roomy[4:7]

    assert counted(aborted[-1], "pinned_blocks") == 0
    assert agree(roomy[7], plain[1])


def test_a_request_may_opt_out(plain: Told, roomy: Told) -> None:
    opted_out, without_load, skipping = roomy[9:12]

    assert [cached(act) for act in (opted_out, without_load, skipping)] == [[0, 0, 0]] * 3
    for act in (opted_out, without_load, skipping):
        assert agree(act, plain[2])
    saved = counted(opted_out, "blocks_saved") - counted(roomy[8], "blocks_saved")
    assert saved == 0


def test_another_salt_finds_nothing_of_others(plain: Told, roomy: Told) -> None:
    first, second = roomy[12:]

    assert cached(first) == [0, 0, 0]
    assert cached(second) == HITS
    assert agree(second, plain[2])


@pytest.fixture(scope="module")
def two_ranks(run: Run) -> Told:
    acts = [generate(), {"act": "events"}, generate(forget=True), {"act": "reset"}]
    acts += [generate(max_tokens=1), {"act": "events"}]
    return run("llama", acts, connector=PENSTOCK, ranks=2, events=True)[0]


def test_two_ranks_load_what_each_of_them_saved(two_ranks: Told, plain: Told) -> None:
    assert cached(two_ranks[2]) == HITS
    assert agree(two_ranks[0], plain[2])
    assert agree(two_ranks[2], plain[2])


def test_events_name_blocks_in_host_memory_as_vllm_names_its_own(two_ranks: Told) -> None:
    first, later = two_ranks[1]["events"], two_ranks[5]["events"]

    stored = first["BlockStored CPU"]
    assert len(stored) == counted(two_ranks[1], "blocks_saved")
    assert set(stored) <= set(first["BlockStored GPU"])
    assert set(later["BlockRemoved CPU"]) == set(stored)


def test_an_engine_whose_machine_has_no_memory_for_the_tier_runs_without(
    run: Run, plain: Told
) -> None:
    told, output = run("llama", [generate()], connector=PENSTOCK, host_blocks=10**9)

    assert agree(told[0], plain[2])
    assert output.count("Penstock is off, vLLM runs without it") == 1


def test_two_ranks_with_latent_attention_share_one_copy(run: Run) -> None:
    acts = [generate(), generate(), generate(forget=True)]
    setup: dict[str, Any] = {"dtype": "bfloat16", "options": {"max_num_seqs": 1}}

    told, _ = run("latent", acts, connector=PENSTOCK, ranks=2, **setup)

    assert cached(told[1]) == cached(told[2]) == HITS
    assert agree(told[2], told[1])
