"""The pages of metrics of several engines: what is read of them, and what is refused."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from penstock_serve.observe.engine_pages import PageError, PageTier, TimeBuckets, read_page
from penstock_serve.observe.metrics import ServerMetrics

PAGES = Path(__file__).parent / "pages"
SGLANG = (PAGES / "sglang.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"]
)
def test_times_between_tokens_are_read_under_the_name_of_each_version(name: str) -> None:
    counts = {"0.01": 0, "0.02": 90, "+Inf": 100}
    rows = [f'{name}_bucket{{le="{le}",model_name="model"}} {n}' for le, n in counts.items()]
    page = read_page("\n".join([f"# TYPE {name} histogram", *rows, ""]))

    assert page.between.count == 100
    assert page.between.quantile(0.45) == pytest.approx(0.015)


def test_a_page_of_vllm_with_our_connector_is_read() -> None:
    page = read_page((PAGES / "vllm-later.txt").read_text(encoding="utf-8"))
    earlier = read_page((PAGES / "vllm.txt").read_text(encoding="utf-8"))

    assert (page.engine, page.model) == ("vLLM", "model")
    assert (page.running, page.waiting) == (0, 0)
    # Four prompts of 500 tokens and eight generated ones, then ten more.
    assert (earlier.prompt_tokens, earlier.generated_tokens) == (2000, 32)
    assert (page.prompt_tokens, page.generated_tokens) == (7000, 112)
    assert earlier.found == {"device": 0, "host": 0, "handed over": 0}
    assert page.found["host"] == 480
    assert page.found["device"] == 480
    assert page.kv_used is not None
    assert 0 <= page.kv_used <= 1
    sizes = [(tier.name, tier.tokens) for tier in page.tiers]
    assert sizes == [("device", 80 * 32), ("host", 200 * 32)]
    assert page.tiers[1].used == 180 * 32
    assert page.first_token.since(earlier.first_token).count == 10
    assert page.whole.count == 14
    half, most = page.first_token.quantile(0.5), page.first_token.quantile(0.95)
    assert half is not None
    assert most is not None
    assert 0 < half <= most


def test_a_page_of_vllm_without_it_says_connector() -> None:
    text = (
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 2.0\n'
        'vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
        "# TYPE vllm:external_prefix_cache_hits counter\n"
        'vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 64.0\n'
    )

    page = read_page(text)

    assert page.running == 5
    assert page.kv_used == 0.25
    assert page.found == {"device": 0, "connector": 64}
    assert page.tiers == ()
    assert page.first_token.quantile(0.5) is None


def test_a_page_of_sglang_counts_each_rank_once() -> None:
    page = read_page(SGLANG)

    assert (page.engine, page.model) == ("SGLang", "meta-llama/Llama-3.1-8B-Instruct")
    assert (page.running, page.waiting) == (7, 2)
    assert page.found == {"device": 4096, "host": 1024}
    assert page.kv_used == 0.28
    assert page.tiers == (PageTier("device", 1000, 280),)
    assert page.first_token.quantile(0.5) == pytest.approx(0.3)


def test_a_page_of_sglang_with_replicas_counts_each_replica_once() -> None:
    """Two replicas of two ranks each, with the names and labels of SGLang's source (016d860).

    The first rank of the second replica is rank 2. Ranks repeat what their replica says, and
    priorities what is in the sum.
    """
    page = read_page((PAGES / "sglang-replicas.txt").read_text(encoding="utf-8"))

    assert (page.running, page.waiting, page.preemptions) == (8, 3, 3)
    assert (page.prompt_tokens, page.generated_tokens) == (8000, 1000)
    assert page.found == {"device": 3040, "host": 1000, "storage_file": 500}
    assert page.kv_used == pytest.approx(0.3)
    device, host = page.tiers
    assert (device.tokens, device.used) == (20000, pytest.approx(6000))
    assert host == PageTier("host", 160000, 40000)
    assert (page.first_token.count, page.whole.count) == (10, 10)
    assert page.first_token.quantile(0.3) == pytest.approx(0.15)


def test_a_page_of_our_own_server_is_read() -> None:
    metrics = ServerMetrics()
    metrics.prompt_tokens.inc(90)
    metrics.first_token_s.observe(0.2)

    page = read_page(metrics.text([], retries=0).decode())

    assert (page.engine, page.prompt_tokens, page.first_token.count) == ("Penstock", 90, 1)


@pytest.mark.parametrize("text", ["", "up 1\n", "<html>not found</html>", "vllm:a{b 1\n", "\0"])
def test_a_page_that_is_no_engines_is_refused(text: str) -> None:
    with pytest.raises(PageError, match="page"):
        read_page(text)


def test_times_are_read_between_the_bounds_of_a_histogram() -> None:
    buckets = TimeBuckets({0.1: 10.0, 1.0: 20.0, inf: 20.0})

    assert buckets.quantile(0.5) == pytest.approx(0.1)
    assert buckets.quantile(0.75) == pytest.approx(0.55)
    # Beyond the last bound nothing is known.
    assert TimeBuckets({0.1: 0.0, inf: 5.0}).quantile(0.5) == 0.1
    assert TimeBuckets().quantile(0.5) is None


def test_an_engine_that_began_anew_counts_from_nothing() -> None:
    before, now = TimeBuckets({1.0: 10.0, inf: 10.0}), TimeBuckets({1.0: 2.0, inf: 3.0})

    assert now.since(before) == now
    assert before.plus(TimeBuckets()) == TimeBuckets().plus(before) == before


def test_engines_with_other_bounds_are_added_up() -> None:
    one, other = TimeBuckets({1.0: 10.0, inf: 10.0}), TimeBuckets({2.0: 4.0, inf: 8.0})

    both = one.plus(other)

    # Half of the four lie below 1 s, if they are spread evenly; of the last four nothing is known.
    assert both.counts == {1.0: 12.0, 2.0: 14.0, inf: 18.0}
    assert one.plus(TimeBuckets({3.0: 0.0, inf: 0.0})) == one
