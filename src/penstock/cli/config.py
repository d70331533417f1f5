"""`penstock config`, `vllm-config`, `sglang-config` and `doctor`: are file and machine in order?

The one rule of `vllm-config`: every key that the connector reads has an option here, and the flag
holds only what was given.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from penstock import __version__
from penstock.cli.conventions import (
    ConfigOption,
    ExitStatus,
    JsonOption,
    name_model,
    show_result,
    with_options,
)
from penstock.config import STARTER_TOML, load_completed, load_config, parse_config
from penstock.config.toml import key_tables, read_text
from penstock.config.values import NOT_PERSISTED
from penstock.connectors.vllm.versions import FAIL, RECOMPUTE, ROLE, ROLES
from penstock.doctor.checks import FindingStatus, examine
from penstock.doctor.facts import MachineFacts
from penstock.errors import ConfigError, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.config import Config
    from penstock.doctor.checks import DoctorFinding


commands = typer.Typer(no_args_is_help=True)
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A configuration in TOML.")]


@commands.command()
def check(file: FileArgument) -> None:
    """Say whether a configuration file is in order, and what it describes.

    A file that is not ends the command with status 2 and one line that names the key, its
    value and what would be right.
    """
    config = load_config(file)
    print(f"{file}: in order: {_described(config)}")
    stored = any(tier.stored for tier in config.cache.tiers)
    if stored and not config.persists and config.engine is None:  # The engine knows its weights.
        print(f"{file}: note: model.weights_version: {NOT_PERSISTED}")


@commands.command()
def show(config: ConfigOption = None) -> None:
    """Print every setting with the value in effect, as TOML.

    Without `--config`, print a configuration to begin with.
    """
    effective = load_config(config) if config else parse_config(STARTER_TOML)
    print(effective.to_toml(), end="")


@commands.command()
def keys() -> None:
    """Print every key of a configuration file: its type, default and meaning."""
    print(key_tables(), end="")


def _described(config: Config) -> str:
    device = config.cache.device
    own = "the engine's own device blocks"
    parts = [counted(device.slot_count, "device block") if device else own]
    for tier, kind in zip(config.cache.tiers, config.tier_kinds, strict=True):
        size = f"{kind.gib:g} GiB" if kind.gib else counted(tier.slot_count, "block")
        parts.append(f"{tier.name} ({kind.name}, {size})")
    return f"{counted(config.cache.block_tokens, 'token')} a block; {' → '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine is told, and how it is printed."""

    inline: bool = False
    """Put the content of FILE into what is printed, not its path."""
    bare: bool = False
    """Print the JSON alone, for a file or for Python."""
    any_version: bool = False
    """Try a version of the engine with which Penstock was not tested, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions(EngineOptions):
    """Those of `vllm-config`; flags are keys that the connector reads."""

    layerwise: bool = False
    """Steps compute on loads while they arrive, where that is safe."""
    role: str = ROLE
    """kv_producer computes prompts for other engines, kv_consumer takes them."""
    handoff: bool = False
    """With the role kv_both, prompts go in both directions."""
    allow_fail: bool = False
    """A block that fails its checksum fails its request, in place of being computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions(EngineOptions):
    """Those of `sglang-config`."""

    hicache: bool = False
    """Keep HiCache, and put disk or shared store below it."""


@with_options(VllmOptions)
def print_vllm_flag(file: FileArgument, **given: Any) -> None:  # noqa: ANN401  (see `VllmOptions`)
    """Print the flag that makes vLLM keep KV in the tiers of a configuration file.

    What the file says about device blocks, tokens a block, ranks and KV groups is left to vLLM.
    """
    options = VllmOptions(**given)
    if options.role not in ROLES:
        raise typer.BadParameter(f"{options.role!r} is no role, must be one of {', '.join(ROLES)}")
    told = {"config": _for_engine(file, "vLLM", inline=options.inline)}
    flags = ("layerwise", "handoff", "allow_fail", "any_version")
    transfer = {
        "kv_connector": "PenstockConnector",
        "kv_connector_module_path": "penstock.connectors.vllm",
        "kv_role": options.role,
        "kv_load_failure_policy": FAIL if options.allow_fail else RECOMPUTE,
        "kv_connector_extra_config": told | {name: True for name in flags if given[name]},
    }
    text = json.dumps(transfer)
    print(text if options.bare else f"--kv-transfer-config {shlex.quote(text)}")


@with_options(SglangOptions)
def print_sglang_options(file: FileArgument, **given: Any) -> None:  # noqa: ANN401  (the same)
    """Print the options that make SGLang keep KV in the tiers of a configuration file.

    What the file says about device blocks, tokens a block, ranks and KV groups is left to SGLang.
    """
    options = SglangOptions(**given)
    extra: dict[str, object] = {"config": _for_engine(file, "SGLang", inline=options.inline)}
    if options.any_version:
        extra["any_version"] = True
    module = "penstock.connectors.sglang"
    if options.hicache:
        enable, flag = "--enable-hierarchical-cache", "--hicache-storage-backend"
        named = {"backend_name": "penstock", "module_path": module, "class_name": "PenstockStorage"}
        text = json.dumps({**named, "interface_v1": 1, **extra})
        line = f"{enable} {flag} dynamic {flag}-extra-config {shlex.quote(text)}"
    else:
        flag = "--unified-cache-external-linker"
        named = {"linker": "PenstockLinker", "linker_module_path": module}
        text = json.dumps({**named, "linker_extra_config": extra})
        line = f"--enable{flag[1:]} {flag}-backend dynamic {flag}-config {shlex.quote(text)}"
    print(text if options.bare else line)


def _for_engine(file: Path, engine: str, *, inline: bool) -> str:
    """What an engine is told of a configuration file, which must be one that is of use to it."""
    text = read_text(file)  # Once: it may be a pipe.
    if not parse_config(text, source=str(file)).cache.tiers:
        raise ConfigError(f"{file}: tiers", f"is missing: {engine} would get no tier below its own")
    if inline:
        return text
    given = str(file.resolve())
    if "\n" in given:
        # What has a line break in it is the content of a file.
        raise ConfigError(f"{given!r}", "has a line break in its path, must be given --inline")
    return given


COLOURS = {FindingStatus.OK: 32, FindingStatus.WARNING: 33, FindingStatus.PROBLEM: 31}
"""Of a terminal: green, yellow, red."""


def doctor(*, config: ConfigOption = None, json: JsonOption = None) -> None:
    """Check this machine and a configuration, and say what to change.

    Nothing is changed. With a disk tier, 64 MiB are written to its folder and removed. The status
    is 1 if there is a problem; warnings do not count.
    """
    loaded = None if config is None else load_completed(config, name_model)
    findings = examine(MachineFacts(config=loaded))
    problems = sum(each.status is FindingStatus.PROBLEM for each in findings)
    show_result(
        json,
        _described_findings(findings, coloured=sys.stdout.isatty()),
        {
            "penstock": __version__,
            "problems": problems,
            "findings": msgspec.to_builtins(findings),
        },
    )
    if problems:
        raise typer.Exit(ExitStatus.FINDING)


def _counted(status: FindingStatus, number: int) -> str:
    return f"{number} ok" if status is FindingStatus.OK else counted(number, status.value)


def _described_findings(findings: Sequence[DoctorFinding], *, coloured: bool) -> str:
    lines = []
    for each in findings:
        status = f"{each.status.value:7}"
        if coloured:
            status = f"\x1b[{COLOURS[each.status]}m{status}\x1b[0m"
        lines.append(f"{status}  {each.check}: {each.seen}")
        if each.remedy:
            lines.append(f"{'':9}→ {each.remedy}")
    counts = {status: sum(each.status is status for each in findings) for status in FindingStatus}
    lines += ["", ", ".join(_counted(each, number) for each, number in counts.items())]
    return "\n".join(lines)
