"""`kind = "disk"` in a configuration file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.cli.app import run
from penstock.config import parse_config
from penstock.errors import ConfigError
from penstock.runtime.tiers import build_lower_tiers
from penstock.tiers.arena import MemoryCalls
from penstock.vocabulary.layout import Layout
from tests.test_config import refusal

if TYPE_CHECKING:
    from pathlib import Path

TOML = """
version = 1
[model]
name = "m"
weights_version = "v1"
[cache]
blocks = 64
[[tiers]]
name = "host"
kind = "host"
gib = 1
[[tiers]]
name = "disk"
kind = "disk"
path = "/var/cache/penstock"
gib = "2TiB"
write = "selective"
"""


def test_a_disk_below_host_memory_is_a_stored_tier() -> None:
    config = parse_config(TOML)

    host, disk = config.cache.tiers
    assert (host.stored, disk.stored) == (False, True)
    assert config.tier_kinds[1].gib == 2048
    assert config.persists


def test_what_is_printed_reads_back_equal() -> None:
    config = parse_config(TOML)

    assert parse_config(config.to_toml()) == config


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('path = "/var/cache/penstock"\n', "", "tiers[1].path: is missing"),
        ('"/var/cache/penstock"', '""', "tiers[1].path: is '', must be the absolute path"),
        ('"/var/cache/penstock"', '"//"', "tiers[1].path: is '//', must be the absolute path of"),
        (
            '"/var/cache/penstock"',
            '"cache"',
            "tiers[1].path: is 'cache', must be an absolute path",
        ),
        ('gib = "2TiB"\n', "", "tiers[1].gib: is missing"),
        ('gib = "2TiB"', "gib = 0", "tiers[1].gib: is 0, must be a number of GiB"),
        ('gib = "2TiB"', "gib = 2\nblocks = 9", "tiers[1].blocks: has no effect while gib is 2"),
        ('gib = "2TiB"', "gib = 2\nrequired = true", "tiers[1].required: is true, must be false"),
        ('gib = "2TiB"', 'gib = 2\nkey_file = "k"', "tiers[1].key_file: is 'k', must be an abs"),
        ('gib = "2TiB"', "gib = 2\nthreads = 3", "tiers[1].threads: is 3, must be a whole"),
        ('gib = "2TiB"', "gib = 2\nthreads = 9", "tiers[1].threads: is 9, must be a whole"),
        (
            'gib = "2TiB"',
            'gib = 2\nother_versions = "drop"',
            "tiers[1].other_versions: is 'drop', must be one of refuse, reclaim",
        ),
        (
            'kind = "host"\ngib = 1',
            'kind = "memory"\nblocks = 9',
            "tiers[1].kind: is 'disk' below tiers[0].kind 'memory', must be below 'host'",
        ),
    ],
)
def test_a_disk_that_makes_no_sense_is_refused(old: str, new: str, message: str) -> None:
    assert old in TOML
    assert refusal(TOML.replace(old, new)).startswith(message)


def test_a_disk_alone_is_refused() -> None:
    head, _, rest = TOML.partition("[[tiers]]")
    alone = f"{head}[[tiers]]{rest.partition('[[tiers]]')[2]}"

    assert refusal(alone).startswith("tiers[0]")


def test_unknown_weights_are_said_when_the_file_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(TOML.replace('weights_version = "v1"\n', ""))

    status = run(["config", "check", str(file)])

    said = capsys.readouterr().out.splitlines()
    assert status == 0
    assert said[1].startswith(f"{file}: note: model.weights_version: is not given: nothing is kept")


GIANT = Layout.opaque(
    layers=[0], block_bytes=(1 << 30) + 1, encoding="bytes", block_tokens=16, block_count=2
)
SMALL_MACHINE = MemoryCalls(
    read=lambda path: "MemAvailable: 2048 kB\n" if path == "/proc/meminfo" else ""
)


@pytest.mark.parametrize(
    ("ranks", "gib", "message"),
    [
        (1, "2", "tiers[1].gib: is 2.0, must be at least 2.00003 for blocks of 1073741825 bytes"),
        (2, "3", "tiers[1].gib: is 3.0, must be at least 4.00006 for blocks of 1073741825 bytes"),
        # Large enough: host memory, which is made next, is what is too small here.
        (1, "4", "tiers[0].blocks: is 1, needs 1.00 GiB, must be at most the 2.0 MiB"),
    ],
)
def test_a_disk_takes_blocks_that_are_larger_than_a_segment_if_it_has_room_for_them(
    ranks: int, gib: str, message: str
) -> None:
    text = TOML.replace('"2TiB"', gib).replace("gib = 1\n", "blocks = 1\n")
    config = parse_config(text.replace("blocks = 64", f"blocks = 64\nranks = {ranks}"))

    with pytest.raises(ConfigError) as refused:
        build_lower_tiers(config, GIANT, kernel=SMALL_MACHINE)

    assert str(refused.value).startswith(message)


def test_copies_that_no_message_to_the_store_can_hold_are_refused() -> None:
    text = TOML.replace("blocks = 64", "blocks = 64\noperation_blocks_max = 4096")
    config = parse_config(text.replace("gib = 1\n", "blocks = 1\n"))

    with pytest.raises(ConfigError) as refused:
        build_lower_tiers(config, GIANT, kernel=SMALL_MACHINE)

    assert str(refused.value) == (
        "cache.operation_blocks_max: is 4096, must be at most 1818 with a tier of kind 'disk'"
    )
