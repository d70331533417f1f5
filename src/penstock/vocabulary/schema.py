"""What a configuration file may say: kinds of values, and settings that declare their keys.

A field of settings is declared in one place, with its type, bounds, default and meaning:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class RoutingTable:
        attempts_max: Annotated[int, Whole(minimum=1, maximum=16)] = 3
        "How many instances a request is sent to."

What reads and prints a file, and the tables of its keys, are made from that. A name behind the
kind is that of the key where the field has another one: `Annotated[int, Whole(…), "blocks"]`. A
field without a kind is no key. Modules of settings do without `from __future__ import annotations`,
so that a field has its type and not the text of it.

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
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeAlias, TypeVar

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from penstock.extensions import ExtensionGroup


T = TypeVar("T")


SHOWN_MAX = 200
"""Characters of a value in a message."""


def shown(value: object) -> str:
    """A value as messages have it."""
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}… ({len(text)} characters)"


def _refused(place: str, value: object, must_be: object) -> ConfigError:
    return ConfigError(place, f"is {shown(value)}, must be {must_be}")


class ValueKind(Generic[T]):
    """What all kinds have in common; others use `taken`, for messages of their own."""

    __slots__ = ()

    def taken(self, value: object) -> T | None:
        """The value as it is used; `None`: it is not of this kind."""
        raise NotImplementedError

    def plain(self, value: object) -> object:
        """What a value of a file stands for."""
        return value

    def read(self, place: str, value: object) -> T:
        """Returns the value, or refuses it in the name of `place`."""
        value = self.plain(value)
        taken = self.taken(value)
        if taken is None:
            raise _refused(place, value, self)
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(ValueKind[int]):
    """A whole number within bounds."""

    minimum: int
    maximum: int

    def taken(self, value: object) -> int | None:
        if isinstance(value, bool) or not isinstance(value, int):
            return None
        return value if self.minimum <= value <= self.maximum else None

    def __str__(self) -> str:
        return f"a whole number from {self.minimum} to {self.maximum}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(ValueKind[float]):
    """A number within bounds, with or without a fraction."""

    minimum: float
    maximum: float

    def taken(self, value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        # Written so that `nan`, which compares with nothing, is refused too.
        return float(value) if self.minimum <= value <= self.maximum else None

    def __str__(self) -> str:
        return f"a number from {self.minimum:g} to {self.maximum:g}"


_UNITS: Mapping[str, int] = {
    "b": 1,
    **{f"{prefix}ib": 1 << 10 * power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}b": 10 ** (3 * power) for power, prefix in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"\s*(?P<number>[0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?P<unit>[A-Za-z]+)\s*")
_OR_A_SIZE = 'or a size with its unit, such as "512MiB" or "10GiB"'


def size_bytes(text: str) -> float | None:
    """The bytes that a size such as `"10GiB"` or `"1.5 GB"` names; `None` if it names none.

    Units are those of a thousand (`KB`) and of 1,024 (`KiB`), in any case of letters.
    """
    found = _SIZE.fullmatch(text)
    factor = _UNITS.get(found["unit"].lower()) if found else None
    return float(found["number"]) * factor if found and factor else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes(Whole):
    """A number of bytes: a whole number, or a size with its unit."""

    def plain(self, value: object) -> object:
        size = size_bytes(value) if isinstance(value, str) else None
        return int(size) if size is not None and size.is_integer() else value

    def __str__(self) -> str:
        return f"a number of bytes from {self.minimum} to {self.maximum}, {_OR_A_SIZE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gib(Number):
    """A number of GiB, or a size with its unit."""

    def plain(self, value: object) -> object:
        size = size_bytes(value) if isinstance(value, str) else None
        return value if size is None else size / (1 << 30)

    def __str__(self) -> str:
        return f"a number of GiB from {self.minimum:g} to {self.maximum:g}, {_OR_A_SIZE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class String(ValueKind[str]):
    """A string, any or one of `choices`."""

    choices: tuple[str, ...] = ()
    others: ExtensionGroup[Any] | None = None
    """Entry points that add choices."""
    replaced: Mapping[str, str] | None = None
    """Names of earlier versions, with what took their place."""

    def taken(self, value: object) -> str | None:
        is_known = isinstance(value, str) and (not self.choices or value in self.choices)
        return value if is_known else None  # type: ignore[return-value]

    def read(self, place: str, value: object) -> str:
        """Returns the value, or refuses it in the name of `place`."""
        if not isinstance(value, str):
            raise _refused(place, value, self)
        if self.taken(value) is not None:
            return value
        if self.others is not None and self.others.find(value, place) is not None:
            return value
        if self.replaced is not None and value in self.replaced:
            raise _refused(place, value, f"{self.replaced[value]!r}, which took its place")
        known = (*self.choices, *(self.others.names() if self.others else ()))
        raise _refused(place, value, f"{String(choices=known)}{nearest(value, known)}")

    def __str__(self) -> str:
        return f"one of {', '.join(filter(None, self.choices))}" if self.choices else "a string"


@dataclass(frozen=True, slots=True)
class EnumChoice(ValueKind[Enum]):
    """A member of an enum, by its value."""

    members: type[Enum]

    def read(self, place: str, value: object) -> Enum:
        """Returns the member, or refuses the value in the name of `place`."""
        return self.members(self._names().read(place, value))

    def _names(self) -> String:
        return String(choices=tuple(str(member.value) for member in self.members))

    def __str__(self) -> str:
        return str(self._names())


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag(ValueKind[bool]):
    """Yes or no."""

    def taken(self, value: object) -> bool | None:
        return value if isinstance(value, bool) else None

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares(ValueKind[dict[str, float]]):
    """A table that gives tenants their share of a tier's slots."""

    def read(self, place: str, value: object) -> dict[str, float]:
        """Returns the value, or refuses it in the name of `place`."""
        if not isinstance(value, dict):
            raise _refused(place, value, self)
        share = Number(minimum=0, maximum=1)
        return {tenant: share.read(f"{place}.{tenant}", given) for tenant, given in value.items()}

    def __str__(self) -> str:
        return "a table of tenants, each with a number from 0 to 1"


Value: TypeAlias = bool | int | float | str

Text: TypeAlias = Annotated[str, String()]
YesNo: TypeAlias = Annotated[bool, Flag()]


@dataclass(frozen=True, slots=True)
class TierOption:
    """A key that only one kind of tier has, with its default."""

    key: ValueKind[Any]
    default: Value | None
    """`None`: the key must be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(TierOption):
    """A key of the file, and the field that it becomes; the default is as the file spells it."""

    owner: type
    """The settings that have the field."""
    field: str
    meaning: str = ""
    """Empty: that of the field."""


def settings_of(owner: type) -> Mapping[str, Setting]:
    """The keys that become fields of some settings; those of a base class come last."""
    return _settings_of(owner)


@cache
def _settings_of(owner: type) -> Mapping[str, Setting]:
    of_base = {name for base in owner.__bases__ for name in getattr(base, "__annotations__", ())}
    found = {}
    for each in sorted(fields(owner), key=lambda each: each.name in of_base):
        assert not isinstance(each.type, str), "annotations of settings are evaluated"
        kind, *names = getattr(each.type, "__metadata__", [None])
        if kind is not None:
            default: Any = None if each.default is MISSING else each.default
            if each.default_factory is not MISSING:
                default = each.default_factory()
            default = default.value if isinstance(default, Enum) else default
            name = names[0] if names else each.name
            found[name] = Setting(key=kind, default=default, owner=owner, field=each.name)
    return found


@cache
def texts_under(owner: type) -> Mapping[str, str]:
    """The first paragraph under each field of a class and of its bases."""
    found = {}
    for each in reversed(owner.__mro__[:-1]):
        try:
            source = inspect.getsource(each)
        except OSError:  # Only compiled files were installed.
            continue
        (node,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(node, ast.ClassDef)
        for field, below in pairwise(node.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.partition("\n\n")[0].split())
                case _:
                    pass
    return found


def read_fields(settings: object) -> None:
    """Reads the fields of settings that are being built as if a file had given them.

    Raises `ConfigError`: one is not what it is declared to be.
    """
    for name, setting in settings_of(type(settings)).items():
        value = setting.key.read(name, getattr(settings, setting.field))
        object.__setattr__(settings, setting.field, value)


def unknown(name: str, known: Collection[str]) -> str:
    """The problem with a name that is none of `known`."""
    return f"unknown{nearest(name, known) or '; known here: ' + ', '.join(known)}"


def nearest(name: str, known: Collection[str]) -> str:
    """Which of `known` was probably meant, as the end of a sentence; empty if none is near."""
    matches = get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
