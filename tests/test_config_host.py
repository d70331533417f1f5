"""What the configuration file may say about a host tier."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config import TierKind, parse_config
from penstock.config.values import UNSIZED_BLOCKS
from penstock.errors import ConfigError
from tests.test_config import refusal

HEAD = 'version = 1\nmodel.name = "m"\n'
HOST = """
[[tiers]]
name = "host"
kind = "host"
blocks = 400
"""


def test_a_host_tier_has_the_defaults_of_its_kind() -> None:
    config = parse_config(HEAD + HOST)

    (kind,) = config.tier_kinds
    assert kind == TierKind(
        name="host", options={"gib": 0.0, "huge_pages": "auto", "numa_node": -1}
    )
    assert kind.gib == 0
    assert config.cache.tiers[0].slot_count == 400


def test_a_host_tier_may_have_a_size_instead_of_blocks() -> None:
    text = HEAD + HOST.replace("blocks = 400", "gib = 1.5")

    config = parse_config(text)

    assert config.tier_kinds[0].gib == 1.5
    assert config.cache.tiers[0].slot_count == UNSIZED_BLOCKS
    assert "blocks =" not in config.to_toml().partition("[[tiers]]")[2]
    assert parse_config(config.to_toml()) == config


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("", "blocks: is missing; give blocks, or gib more than 0"),
        ("gib = 0", "blocks: is missing; give blocks, or gib more than 0"),
        (
            "blocks = 4\ngib = 2",
            "blocks: has no effect while gib is 2.0; give one of the two",
        ),
        (
            "gib = -1",
            "gib: is -1, must be a number of GiB from 0 to 65536, or a size with its unit, "
            'such as "512MiB" or "10GiB"',
        ),
        (
            "gib = '2'",
            "gib: is '2', must be a number of GiB from 0 to 65536, or a size with its unit, "
            'such as "512MiB" or "10GiB"',
        ),
        ("blocks = 4\nhuge_pages = true", "huge_pages: is True, must be one of auto, never"),
        ("blocks = 4\nnuma_node = -2", "numa_node: is -2, must be a whole number from -1 to 1023"),
    ],
)
def test_a_host_tier_that_is_wrong_is_refused(size: str, message: str) -> None:
    assert refusal(HEAD + HOST.replace("blocks = 400", size)) == f"tiers[0].{message}"


@pytest.mark.parametrize(("written", "gib"), [("2", 2.0), ("'2GiB'", 2.0), ("'512 MiB'", 0.5)])
def test_the_size_of_a_host_tier_may_have_its_unit(written: str, gib: float) -> None:
    config = parse_config(HEAD + HOST.replace("blocks = 400", f"gib = {written}"))

    assert config.tier_kinds[0].gib == gib


def test_a_memory_tier_has_no_size_in_gib() -> None:
    message = refusal(HEAD + HOST.replace('"host"', '"memory"') + "gib = 2")

    assert message.startswith("tiers[0].gib: unknown; known here: name, kind, blocks")


def test_a_size_and_a_number_of_slots_at_once_are_refused() -> None:
    config = parse_config(HEAD + HOST.replace("blocks = 400", "gib = 1.5"))
    sized = replace(config.cache, tiers=(replace(config.cache.tiers[0], slot_count=7),))

    with pytest.raises(
        ConfigError, match=r"tier 'host': slot_count: is 7, must be \d+ \(not known"
    ):
        replace(config, cache=sized)
