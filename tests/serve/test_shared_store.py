"""`penstock serve` with a store that other servers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.serve.conftest import eventually, serving
from tests.store.redis_server import RedisServer, require_redis

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = "What one server has computed, the next one finds in the store of both. " * 3
SOON_S = 120.0
TOML = """
version = 1
model.name = "small-model"
cache = {{ blocks = 64, block_tokens = 8, load_gate = "off" }}
[[tiers]]
name = "host"
kind = "host"
gib = 0.01
[[tiers]]
name = "shared"
kind = "redis"
url = "{url}"
write = "write_through"
"""


def test_a_server_answers_from_the_store_what_another_one_computed(
    model_folder: Path, tmp_path: Path
) -> None:
    require_redis()
    redis = RedisServer(tmp_path / "redis")
    file = tmp_path / "penstock.toml"
    file.write_text(TOML.format(url=redis.url))
    options = ("--config", str(file))
    try:
        with serving(model_folder, *options) as running:
            first = running.complete(PROMPT, max_tokens=4)
            # The last token of a prompt is always computed.
            tokens = (first["usage"]["prompt_tokens"] - 1) // 8 * 8

            def stored() -> int:
                return int(running.cache()["cache"]["tiers"][-1]["ready"])

            eventually(lambda: stored() >= tokens // 8, wanted=True, within_s=SOON_S)
        with serving(model_folder, *options) as running:
            second = running.complete(PROMPT, max_tokens=4)
            tiers = running.cache()["cache"]["tiers"]
    finally:
        redis.kill()

    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert first["usage"]["cached_by_tier"] == {"device": 0, "host": 0, "shared": 0}
    assert second["usage"]["cached_by_tier"] == {"device": 0, "host": 0, "shared": tokens}
    assert [tier["tokens_cached"] for tier in tiers] == [0, 0, tokens]
