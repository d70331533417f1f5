"""Two of `penstock serve` that read each other's host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.serve.conftest import eventually, serving
from tests.serve.test_roles import SIZES, reported, require_same
from tests.serve.test_shared_store import (
    BLOCK_TOKENS,
    GENERATED,
    PAIR,
    PROMPT,
    shared_config,
    tier_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.store.redis_server import RedisServer

TEXT = "What one server has computed, the other one finds in its memory. " * 3
SOON_S = 240.0


def peer_options(folder: Path, peers: str = "") -> list[tuple[str, str]]:
    """Those of two servers, which list each other unless they find each other otherwise."""
    places = [f"unix:{folder}/{number}" for number in range(2)]
    options = []
    for number, place in enumerate(places):
        text = shared_config("").replace('kind = "redis"\nurl = ""', 'kind = "peers"')
        file = folder / f"{number}.toml"
        file.write_text(f'{text}listen = "{place}"\npeers = "{peers or ",".join(places)}"\n')
        options.append(("--config", str(file)))
    return options


def test_a_server_answers_from_the_host_memory_of_another_one_that_a_redis_names(
    model_folder: Path, tmp_path: Path, redis: RedisServer
) -> None:
    options = peer_options(tmp_path, redis.url)

    with serving(model_folder, *options[0]) as one, serving(model_folder, *options[1]) as other:
        for each in (one, other):
            eventually(lambda: each.cache()["cache"]["tiers"][-1]["on"], wanted=True)  # noqa: B023
        first = one.complete(TEXT, max_tokens=4)
        # The last token of a prompt is always computed.
        tokens = (first["usage"]["prompt_tokens"] - 1) // 8 * 8

        def listed() -> int:
            return int(other.cache()["cache"]["tiers"][-1]["store"]["blocks"])

        eventually(lambda: listed() >= tokens // 8, wanted=True, within_s=SOON_S)
        second = other.complete(TEXT, max_tokens=4)

    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert first["usage"]["cached_by_tier"] == {"device": 0, "host": 0, "shared": 0}
    assert second["usage"]["cached_by_tier"] == {"device": 0, "host": 0, "shared": tokens}


def test_a_prefill_instance_finds_what_decode_has_generated_elsewhere_without_a_store(
    model_folder: Path, tmp_path: Path
) -> None:
    options = [(*PAIR, *each, *SIZES) for each in peer_options(tmp_path)]

    with serving(model_folder, *options[0]) as one, serving(model_folder, *options[1]) as other:
        for each in (one, other):
            for instance in ("prefill-0", "decode-0"):
                eventually(lambda: tier_of(each.client, instance)["on"], wanted=True)  # noqa: B023
        first = reported(one, PROMPT, max_tokens=GENERATED, logprobs=1)
        told = PROMPT + first["choices"][0]["logprobs"]["token_ids"]
        whole = (len(told) - 1) // BLOCK_TOKENS

        def listed() -> int:
            return int(tier_of(other.client, "prefill-0")["store"]["blocks"])

        # Prefill has the prompt in its host memory, and decode has it with the answer.
        blocks = len(PROMPT) // BLOCK_TOKENS + whole
        eventually(lambda: listed() >= blocks, wanted=True, within_s=SOON_S)
        second = reported(other, told + PROMPT[:12], logprobs=5)
        found = tier_of(other.client, "prefill-0")["tokens_cached"]
        expected = reported(other, told + PROMPT[:12], logprobs=5, cache="off")

    assert found == whole * BLOCK_TOKENS
    require_same(second, expected)
