"""The settings that an engine hands to a connector, and versions of engines.

The one rule: a key that is not known is refused, never ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config import Flag, load_config, parse_config
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.config import Config


def require_known(extra: Mapping[str, object], known: Sequence[str], where: str) -> None:
    """Refuses settings with other names than these.

    Raises `ConfigError`: there is one.
    """
    for key in extra:
        if key not in known:
            raise ConfigError(f"{where}.{key}", f"is unknown, must be one of {', '.join(known)}")


def read_config(extra: Mapping[str, object], where: str) -> Config:
    """The configuration that the setting `config` names or holds.

    Raises `ConfigError`: it is missing or wrong.
    """
    given = extra.get("config")
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(
            f"{where}.config",
            f"is {given!r}, must be the path of a Penstock configuration file, or its content",
        )
    # A configuration has a version and tiers, so at least two lines; a path may have a "=" in it.
    if "\n" in given:
        return parse_config(given, source=f"{where}.config")
    return load_config(given)


def read_flag(extra: Mapping[str, object], name: str, where: str) -> bool:
    """A setting that is true or false; false where it is left out.

    Raises `ConfigError`: it is neither.
    """
    return Flag().read(f"{where}.{name}", extra.get(name, False))


def is_version(version: str, tested: Sequence[tuple[int, ...]]) -> bool:
    """Whether a version begins with one of these, part by part."""
    parts = version.partition("+")[0].split(".")
    return any(parts[: len(each)] == [str(part) for part in each] for each in tested)


def name_versions(tested: Sequence[tuple[int, ...]]) -> str:
    """Those versions, for messages."""
    return " and ".join(".".join(map(str, each)) for each in tested)
