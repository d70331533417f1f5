"""The toy engine: it runs requests as an engine should, and notices bytes that are wrong."""

from __future__ import annotations

import pytest

import penstock
from lab.demo.engine import Request, ToyEngine
from lab.demo.toy_model import ToyModel, device_arrays, device_layout

BLOCK_TOKENS = 16


@pytest.fixture
def engine() -> ToyEngine:
    """An engine with room for sixteen blocks on the device and as many below."""
    config = penstock.parse_config(
        """
        version = 1
        model.name = "toy"
        cache = { block_tokens = 16, blocks = 16 }
        tiers = [{ name = "host", kind = "memory", blocks = 16 }]
        """
    )
    kv = device_arrays(16, BLOCK_TOKENS)
    cache = penstock.open(config, kv=list(kv), layout=device_layout(16, BLOCK_TOKENS))
    return ToyEngine(cache, kv, ToyModel(weights=1))


def request(name: str, token_count: int, *, first: int = 0, reply_count: int = 4) -> Request:
    tokens = list(range(first, first + token_count))
    return Request(name=name, tenant="", tokens=tokens, reply_count=reply_count)


def run(engine: ToyEngine, *requests: Request) -> None:
    for each in requests:
        engine.submit(each)
    engine.finish(*requests)


def test_a_prompt_that_was_computed_is_found_and_compared(engine: ToyEngine) -> None:
    run(engine, request("first", 70))

    again = request("again", 70)
    run(engine, again)

    assert again.cached_tokens == 64
    assert engine.tally.tokens_verified == 74 + 64 + 74
    assert not engine.tally.differences


def test_a_byte_that_changed_on_the_device_is_noticed(engine: ToyEngine) -> None:
    run(engine, request("first", 70))
    engine.kv[1, 1, :, 5, 1, 3] ^= 1

    run(engine, request("again", 70))

    # Token 5 of each of the four blocks that were found.
    assert engine.tally.differences[0].startswith("again: the KV of 4 of 64 tokens is not")
    assert "found in the cache" in engine.tally.differences[0]


def test_weights_that_changed_without_a_reset_are_noticed(engine: ToyEngine) -> None:
    run(engine, request("first", 70))
    engine.model = ToyModel(weights=2)

    run(engine, request("again", 70))

    assert engine.tally.differences


def test_requests_beyond_the_room_make_way_and_all_end(engine: ToyEngine) -> None:
    requests = [request(f"{n}", 60, first=1000 * n, reply_count=60) for n in range(6)]

    run(engine, *requests)

    assert all(each.done for each in requests)
    assert engine.tally.preemptions > 0
    assert engine.tally.refusals > 0
    assert not engine.tally.differences


def test_a_fork_answers_otherwise_from_the_same_prompt(engine: ToyEngine) -> None:
    first = request("first", 40)
    engine.submit(first)
    engine.run_until_prefilled(first)

    second = engine.fork(first, "second")
    engine.finish(first, second)

    assert first.tokens[:40] == second.tokens[:40]
    assert first.tokens[40:] != second.tokens[40:]
    assert not engine.tally.differences


def test_an_aborted_request_gives_everything_back(engine: ToyEngine) -> None:
    running, waiting = request("running", 200), request("waiting", 200, first=5000)
    engine.submit(running)
    engine.submit(waiting)
    engine.step()

    engine.abort(running)
    engine.abort(waiting)

    assert engine.cache.statistics().leases == 0
    engine.cache.audit()
