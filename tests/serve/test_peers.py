"""Two `penstock serve` that read each other's host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.serve.conftest import eventually, serving
from tests.serve.test_shared_store import shared_config

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "What one server has computed, the other one finds in its memory. " * 3
SOON_S = 600.0


def test_a_server_answers_from_the_host_memory_of_another_one(
    model_folder: Path, tmp_path: Path
) -> None:
    places = [f"unix:{tmp_path}/{number}" for number in range(2)]
    options = []
    for number, place in enumerate(places):
        text = shared_config("").replace('kind = "redis"\nurl = ""', 'kind = "peers"')
        file = tmp_path / f"{number}.toml"
        file.write_text(f'{text}listen = "{place}"\npeers = "{",".join(places)}"\n')
        options.append(("--config", str(file)))

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
