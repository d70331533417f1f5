"""The kinds of values that a configuration file may hold.

| kind     | TOML                                                     |
|----------|----------------------------------------------------------|
| `Whole`  | integer                                                  |
| `Bytes`  | integer, or a size with its unit, such as `"1MiB"`       |
| `Number` | integer or float                                         |
| `Gib`    | integer or float (of GiB), or a size with its unit       |
| `String` | string                                                   |
| `EnumChoice` | string, the value of an enum's member                    |
| `Flag`   | boolean                                                  |
| `Shares` | table of numbers 0…1                                     |

A kind has bounds but no default: defaults are those of the settings that a file becomes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from enum import Enum

    from penstock.extensions import ExtensionGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A whole number within bounds."""

    minimum: int
    maximum: int

    def read(self, place: str, value: object) -> int:
        """Returns the value, or refuses it in the name of `place`."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(place, f"is {value!r}, must be {self}")
        if not self.minimum <= value <= self.maximum:
            raise ConfigError(place, f"is {value}, must be {self}")
        return value

    def __str__(self) -> str:
        return f"a whole number from {self.minimum} to {self.maximum}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number within bounds, with or without a fraction."""

    minimum: float
    maximum: float

    def read(self, place: str, value: object) -> float:
        """Returns the value, or refuses it in the name of `place`."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(place, f"is {value!r}, must be {self}")
        # Written so that `nan`, which compares with nothing, is refused too.
        if not self.minimum <= value <= self.maximum:
            raise ConfigError(place, f"is {value}, must be {self}")
        return float(value)

    def __str__(self) -> str:
        return f"a number from {self.minimum:g} to {self.maximum:g}"


_UNITS: Mapping[str, int] = {
    "B": 1,
    **{f"{prefix}iB": 1 << 10 * power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"\s*(?P<number>[0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?P<unit>[A-Za-z]+)\s*")
SIZE_EXAMPLES = '"512MiB" or "10GiB"'


def size_bytes(text: str) -> float | None:
    """The bytes that a size such as `"10GiB"` or `"1.5 GB"` names; `None` if it names none.

    Units are those of a thousand (`KB`) and of 1,024 (`KiB`), in any case of letters.
    """
    found = _SIZE.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if found is None or found["unit"].lower() not in units:
        return None
    return float(found["number"]) * units[found["unit"].lower()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes(Whole):
    """A number of bytes: a whole number, or a size with its unit."""

    def read(self, place: str, value: object) -> int:
        """Returns the number of bytes, or refuses the value in the name of `place`."""
        if isinstance(value, str):
            size = size_bytes(value)
            if size is None or not size.is_integer():
                raise ConfigError(place, f"is {value!r}, must be {self}")
            value = int(size)
        return Whole.read(self, place, value)

    def __str__(self) -> str:
        return (
            f"a number of bytes from {self.minimum} to {self.maximum}, or a size with its unit, "
            f"such as {SIZE_EXAMPLES}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gib(Number):
    """A number of GiB, or a size with its unit."""

    def read(self, place: str, value: object) -> float:
        """Returns the number of GiB, or refuses the value in the name of `place`."""
        if isinstance(value, str):
            size = size_bytes(value)
            if size is None:
                raise ConfigError(place, f"is {value!r}, must be {self}")
            value = size / (1 << 30)
        return Number.read(self, place, value)

    def __str__(self) -> str:
        return (
            f"a number of GiB from {self.minimum:g} to {self.maximum:g}, or a size with its unit, "
            f"such as {SIZE_EXAMPLES}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class String:
    """A string, any or one of `choices`."""

    choices: tuple[str, ...] = ()
    others: ExtensionGroup[Any] | None = None
    """Entry points that add choices."""

    def read(self, place: str, value: object) -> str:
        """Returns the value, or refuses it in the name of `place`."""
        if not isinstance(value, str):
            raise ConfigError(place, f"is {value!r}, must be {self}")
        if not self.choices or value in self.choices:
            return value
        if self.others is None:
            raise ConfigError(place, f"is {value!r}, must be {self}{nearest(value, self.choices)}")
        if self.others.find(value, place) is None:
            known = String(choices=(*self.choices, *self.others.names()))
            raise ConfigError(
                place, f"is {value!r}, must be {known}{nearest(value, known.choices)}"
            )
        return value

    def __str__(self) -> str:
        return f"one of {', '.join(filter(None, self.choices))}" if self.choices else "a string"


@dataclass(frozen=True, slots=True)
class EnumChoice:
    """A member of an enum, by its value."""

    members: type[Enum]

    def read(self, place: str, value: object) -> Enum:
        """Returns the member, or refuses the value in the name of `place`."""
        names = tuple(str(member.value) for member in self.members)
        return self.members(String(choices=names).read(place, value))

    def __str__(self) -> str:
        return f"one of {', '.join(str(member.value) for member in self.members)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """Yes or no."""

    def read(self, place: str, value: object) -> bool:
        """Returns the value, or refuses it in the name of `place`."""
        if not isinstance(value, bool):
            raise ConfigError(place, f"is {value!r}, must be {self}")
        return value

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """A table that gives tenants their share of a tier's slots."""

    def read(self, place: str, value: object) -> dict[str, float]:
        """Returns the value, or refuses it in the name of `place`."""
        if not isinstance(value, dict):
            raise ConfigError(place, f"is {value!r}, must be {self}")
        share = Number(minimum=0, maximum=1)
        return {tenant: share.read(f"{place}.{tenant}", given) for tenant, given in value.items()}

    def __str__(self) -> str:
        return "a table of tenants, each with a number from 0 to 1"


Key: TypeAlias = Whole | Number | String | EnumChoice | Flag | Shares
Value: TypeAlias = bool | int | float | str


@dataclass(frozen=True, slots=True)
class TierOption:
    """A key that only one kind of tier has, with its default."""

    key: Whole | Number | String | Flag
    default: Value | None
    """`None`: the key must be given."""


def unknown(name: str, known: Collection[str]) -> str:
    """The problem with a name that is none of `known`."""
    return f"unknown{nearest(name, known) or '; known here: ' + ', '.join(known)}"


def nearest(name: str, known: Collection[str]) -> str:
    """Which of `known` was probably meant, as the end of a sentence; empty if none is near."""
    matches = get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
