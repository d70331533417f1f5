"""A prompt that was saved on a disk is found by others and after restarts, or is a miss."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import penstock
from tests.connectors.transformers import another_process
from tests.connectors.transformers.conftest import (
    CONFIGS,
    Compared,
    answer,
    compare,
    config_with_disk,
    new_model,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.connectors.base.report import PromptReport
    from penstock.connectors.transformers.cache import PromptCache


def checkpoint(folder: Path, *, name: str = "Llama", seed: int = 0) -> Any:
    """A model that was read from a folder."""
    new_model(CONFIGS[name], seed=seed).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def answered(
    model: Any, config: penstock.Config, *counts: int
) -> tuple[list[Compared], PromptReport]:
    """What a cache that is opened and closed for it finds of prompts of these lengths."""
    with penstock.transformers.open(model, config) as cache:
        return [compare(cache, model, tokens_of(count)) for count in counts], cache.report()


def test_another_process_at_the_same_time_and_one_after_a_kill_find_each_others_prompts(
    tmp_path: Path,
) -> None:
    model, disk = checkpoint(tmp_path / "model"), tmp_path / "disk"
    config = config_with_disk(disk, weights="")
    with penstock.transformers.open(model, config) as cache:
        mine = compare(cache, model, tokens_of(100))

        other = subprocess.run(
            [sys.executable, another_process.__file__, tmp_path / "model", disk, "150"],
            env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=300,
        ).stdout.split()
        theirs = compare(cache, model, tokens_of(160))
    (restarted,), _ = answered(model, config, 160)

    assert mine.right
    assert other == ["96", "True"]
    assert theirs.right
    # What the other process has computed of its prompt, and had saved when it was killed.
    assert theirs.cached == (144,)
    assert restarted.right
    assert restarted.cached == (152,)


def test_a_disk_has_more_than_host_memory_has_room_for(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", name="Gemma 3")
    config = penstock.parse_config(
        config_with_disk(tmp_path / "disk").to_toml().replace("gib = 0.01", "blocks = 14", 1)
    )
    first, other = tokens_of(100), tokens_of(60, seed=2)
    with penstock.transformers.open(model, config) as cache:
        found = [compare(cache, model, each) for each in (first, other, first, other)]
    with penstock.transformers.open(model, config) as cache:
        found += [compare(cache, model, each) for each in (other, first)]
        # A single prompt that is longer than host memory is kept as far as there is room.
        found += [compare(cache, model, tokens_of(150, seed=3)) for _ in range(2)]
        unused = cache.report().unused

    assert all(each.right for each in found)
    assert [each.cached[0] for each in found[:6]] == [0, 0, 96, 56, 56, 96]
    assert found[7].cached[0] > 0
    assert unused == {"not saved: the tiers took no more: no room": 2}


def test_other_weights_of_the_same_name_find_nothing(tmp_path: Path) -> None:
    config = config_with_disk(tmp_path / "disk", weights="by hand")
    first, _ = answered(checkpoint(tmp_path / "model"), config, 60)
    trained, report = answered(checkpoint(tmp_path / "model", seed=1), config, 60)
    other, _ = answered(checkpoint(tmp_path / "other", name="SmolLM2"), config, 60)
    again, _ = answered(checkpoint(tmp_path / "model"), config, 60)

    assert [each.right for each in (*first, *trained, *other, *again)] == [True] * 4
    assert (trained[0].cached, other[0].cached, again[0].cached) == ((0,), (0,), (56,))
    assert report.misses == {"never seen": 1}


def test_a_model_made_in_memory_is_kept_in_host_memory_only(tmp_path: Path) -> None:
    model = new_model(CONFIGS["Llama"])
    with penstock.transformers.open(
        model, config_with_disk(tmp_path / "disk", weights="")
    ) as cache:
        compare(cache, model, tokens_of(60))
        again = compare(cache, model, tokens_of(60))
        tiers = cache.report().tiers

    assert again.cached == (56,)
    assert "tier disk: off: " in tiers[1]
    assert "model.weights_version is not given" in tiers[1]
    assert not (tmp_path / "disk").exists()


def damage(disk: Path, pattern: bytes) -> int:
    """Changes a bit behind each place in the files of a disk where these bytes are."""
    found = 0
    for path in disk.rglob("*"):
        content = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        at = content.find(pattern)
        while at >= 0:
            content[at + len(pattern) - 1] ^= 1
            found += 1
            at = content.find(pattern, at + 1)
        if content:
            path.write_bytes(content)
    return found


def test_a_damaged_block_on_the_disk_is_a_counted_miss(tmp_path: Path) -> None:
    model, prompt = checkpoint(tmp_path / "model"), tokens_of(100)
    config = config_with_disk(tmp_path / "disk")
    with penstock.transformers.open(model, config) as cache, cache.prompt(prompt) as kv:
        answer(model, prompt, torch.ones_like(prompt), kv)
        assert kv is not None
        sixth_block = kv.layers[2].keys[0, 0, 40:44].numpy().tobytes()
    assert damage(tmp_path / "disk", sixth_block) == 1

    (found,), report = answered(model, config, 100)

    assert found.right
    assert found.cached == (40,)
    assert report.misses == {"corrupt": 1}


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    disk.chmod(0o777)
    (found,), report = answered(checkpoint(tmp_path / "model"), config_with_disk(disk), 60)

    assert found.right
    assert "tier disk: off: " in report.tiers[1]
    assert "0777" in report.tiers[1]


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process, or of one that it starts, may grow beyond host memory's size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (11 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_a_line_of_the_report(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    (first, again), report = answered(model, config_with_disk(tmp_path / "disk", gib=0.5), 60, 60)

    assert first.right
    assert again.right
    assert again.cached == (56,)
    assert report.tiers[1].startswith("tier disk: off: ")


def test_answers_that_are_kept_are_found_after_a_restart(tmp_path: Path) -> None:
    model, prompt = checkpoint(tmp_path / "model"), tokens_of(60)
    config = config_with_disk(tmp_path / "disk")

    def open_cache() -> PromptCache:
        return penstock.transformers.open(model, config)

    with open_cache() as cache:
        compare(cache, model, prompt, keep=True, max_new_tokens=30)
    after = answer(model, prompt, torch.ones_like(prompt), max_new_tokens=30).sequences
    with open_cache() as cache:
        found = compare(cache, model, torch.cat([after, tokens_of(4, seed=2)], dim=1))

    assert found.right
    assert found.cached == (88,)
