"""`penstock config`: check a configuration file, and show what it comes to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.conventions import ConfigOption
from penstock.config import STARTER_TOML, load_config, parse_config

if TYPE_CHECKING:
    from penstock.config import Config

commands = typer.Typer(no_args_is_help=True)


@commands.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A configuration in TOML.")],
) -> None:
    """Say whether a configuration file is in order, and what it describes.

    A file that is not ends the command with status 2 and one line that names the key, its
    value and what would be right.
    """
    print(f"{file}: in order: {_described(load_config(file))}")


@commands.command()
def show(config: ConfigOption = None) -> None:
    """Print every setting with the value in effect, as TOML.

    Without `--config`, print a configuration to begin with.
    """
    effective = load_config(config) if config else parse_config(STARTER_TOML)
    print(effective.to_toml(), end="")


def _described(config: Config) -> str:
    device = config.cache.device
    parts = [f"{device.slot_count} device blocks" if device else "the engine's own device blocks"]
    for tier, kind in zip(config.cache.tiers, config.tier_kinds, strict=True):
        size = f"{kind.gib:g} GiB" if kind.gib else f"{tier.slot_count} blocks"
        parts.append(f"{tier.name} ({kind.name}, {size})")
    return f"{config.cache.block_tokens} tokens a block; {' → '.join(parts)}"
