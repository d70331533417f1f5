"""`penstock serve` with a store that other servers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.conftest import eventually, serving
from tests.serve.test_roles import SIZES, reported, require_same

if TYPE_CHECKING:
    from pathlib import Path

    from tests.store.redis_server import RedisServer

TEXT = "What one server has computed, the next one finds in the store of both. " * 3
PROMPT = [3 + each * 7 % 300 for each in range(112)]
BLOCK_TOKENS = 8
PAIR = ("--prefill-tp", "1", "--decode-tp", "1")
GENERATED = 40
"""Tokens of an answer: five blocks."""
SOON_S = 600.0


# The next test but for the prompt's own words.
@pytest.mark.long
def test_a_server_answers_from_the_store_what_another_one_computed(
    model_folder: Path, tmp_path: Path, redis: RedisServer
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(shared_config(redis.url))
    options = ("--config", str(file))
    with serving(model_folder, *options) as running:
        eventually(lambda: running.cache()["cache"]["tiers"][-1]["on"], wanted=True)
        first = running.complete(TEXT, max_tokens=4)
        # The last token of a prompt is always computed.
        tokens = (first["usage"]["prompt_tokens"] - 1) // 8 * 8

        def stored() -> int:
            return int(running.cache()["cache"]["tiers"][-1]["ready"])

        eventually(lambda: stored() >= tokens // 8, wanted=True, within_s=SOON_S)
    with serving(model_folder, *options) as running:
        eventually(lambda: running.cache()["cache"]["tiers"][-1]["on"], wanted=True)
        second = running.complete(TEXT, max_tokens=4)
        tiers = running.cache()["cache"]["tiers"]

    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert first["usage"]["cached_by_tier"] == {"device": 0, "host": 0, "shared": 0}
    assert second["usage"]["cached_by_tier"] == {"device": 0, "host": 0, "shared": tokens}
    assert [tier["tokens_cached"] for tier in tiers] == [0, 0, tokens]


def shared_config(redis_url: str) -> str:
    """Blocks are in the store as soon as they are computed, and are always loaded."""
    return f"""
version = 1
model.name = "small-model"
cache = {{ blocks = 96, block_tokens = 8, load_gate = "off" }}
[[tiers]]
name = "host"
kind = "host"
gib = 0.01
[[tiers]]
name = "shared"
kind = "redis"
url = "{redis_url}"
ask_ms = 10000
timeout_s = 60
"""


def tier_of(client: Any, instance: str) -> Any:
    """The shared tier as an instance reports it."""
    instances = client.get("/cache").json()["instances"]
    [tiers] = [each["cache"]["tiers"] for each in instances if each["instance"] == instance]
    return tiers[-1]


# What a single instance looks for, a prefill instance does, too.
@pytest.mark.parametrize(
    ("reader", "options"),
    [("instance-0", ()), pytest.param("prefill-0", PAIR, marks=pytest.mark.long)],
)
def test_the_next_turn_on_another_server_finds_what_decode_has_generated(
    model_folder: Path, tmp_path: Path, redis: RedisServer, reader: str, options: tuple[str, ...]
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(shared_config(redis.url))
    shared = ("--config", str(file), *SIZES)
    with serving(model_folder, *PAIR, *shared) as one:
        eventually(lambda: tier_of(one.client, "prefill-0")["on"], wanted=True)
        eventually(lambda: tier_of(one.client, "decode-0")["on"], wanted=True)
        first = reported(one, PROMPT, max_tokens=GENERATED, logprobs=1)
        told = PROMPT + first["choices"][0]["logprobs"]["token_ids"]
        whole = (len(told) - 1) // BLOCK_TOKENS
        eventually(lambda: tier_of(one.client, "decode-0")["ready"] >= whole, wanted=True)

    with serving(model_folder, *options, *shared) as other:
        eventually(lambda: tier_of(other.client, reader)["on"], wanted=True)
        second = reported(other, told + PROMPT[:12], logprobs=5)
        found = tier_of(other.client, reader)["tokens_cached"]
        by_tier = second["usage"]["cached_by_tier"]
        expected = reported(other, told + PROMPT[:12], logprobs=5, cache="off")

    # Decode asks the store as well: on a busy machine, what prefill has just saved may be there.
    shared_by_prefill = len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
    assert first["usage"]["cached_by_tier"].pop("shared") in range(shared_by_prefill + 1)
    assert first["usage"]["cached_by_tier"] == {"device": 0, "host": 0}
    assert found == whole * BLOCK_TOKENS
    if reader == "instance-0":
        assert by_tier == {"device": 0, "host": 0, "shared": found}
    require_same(second, expected)
