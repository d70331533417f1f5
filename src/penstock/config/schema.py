"""Which keys a configuration file may have, with their types, ranges and defaults, as data.

A key is a value of one of seven kinds, which reads what the file gives or refuses it:

| kind     | TOML                                                     |
|----------|----------------------------------------------------------|
| `Whole`  | integer                                                  |
| `Bytes`  | integer, or a size with its unit, such as `"1MiB"`       |
| `Number` | integer or float                                         |
| `Gib`    | integer or float (of GiB), or a size with its unit       |
| `Word`   | string                                                   |
| `Flag`   | boolean                                                  |
| `Shares` | table of numbers 0…1                                     |

The one rule that must not break: a default here equals the default of the setting it
becomes, so that a file and a program that say nothing get the same cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeAlias

from penstock.cache.settings import EVICTION_POLICIES, Gate, WriteKind
from penstock.errors import ConfigError
from penstock.vocabulary.dtypes import DTYPE_NAMES
from penstock.vocabulary.keys import ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

VERSION = 1
TABLES = ("version", "model", "cache", "tiers", "handoff", "engine", "serve")
RESERVED_TABLES = ("handoff",)
"""They may be there, so that a file can be prepared; they have no settings yet."""

LAYER_WISE = ("auto", "off")
"""Whether a step may compute on loads that are still arriving, layer by layer."""
LOG_LEVELS = ("debug", "info", "warning", "error")
BLOCKS_MAX = 2**31 - 1
"""Slot numbers are kept in 32-bit integers."""
UNSIZED_BLOCKS = BLOCKS_MAX
"""The slots of a tier that is given a size in GiB, until it is known how large a block is."""
COUNT_MAX = 2**24
"""Departures, happenings and events are remembered in memory: more than this is a slip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A whole number within bounds; without a default it must be given."""

    minimum: int
    maximum: int
    default: int | None = None

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
    """A number within bounds, with or without a fraction; without a default it must be given."""

    minimum: float
    maximum: float
    default: float | None = None

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
class Word:
    """A string, any or one of `choices`; without a default it must be given."""

    choices: tuple[str, ...] = ()
    default: str | None = None

    def read(self, place: str, value: object) -> str:
        """Returns the value, or refuses it in the name of `place`."""
        if not isinstance(value, str):
            raise ConfigError(place, f"is {value!r}, must be {self}")
        if self.choices and value not in self.choices:
            raise ConfigError(place, f"is {value!r}, must be {self}{nearest(value, self.choices)}")
        return value

    def __str__(self) -> str:
        return f"one of {', '.join(filter(None, self.choices))}" if self.choices else "a string"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """Yes or no."""

    default: bool

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

    default: Mapping[str, float] = field(default_factory=dict)

    def read(self, place: str, value: object) -> dict[str, float]:
        """Returns the value, or refuses it in the name of `place`."""
        if not isinstance(value, dict):
            raise ConfigError(place, f"is {value!r}, must be {self}")
        share = Number(minimum=0, maximum=1)
        return {tenant: share.read(f"{place}.{tenant}", given) for tenant, given in value.items()}

    def __str__(self) -> str:
        return "a table of tenants, each with a number from 0 to 1"


Key: TypeAlias = Whole | Number | Word | Flag | Shares
Option: TypeAlias = Whole | Number | Word
"""A key that a kind of tier brings along."""
Value: TypeAlias = int | float | str

MODEL_KEYS: Mapping[str, Key] = {
    "name": Word(),
    "weights_version": Word(default=""),
    "kv_dtype": Word(default="", choices=("", *DTYPE_NAMES)),
    "kv_scales": Word(default=""),
    "rotary": Word(default=""),
}

ROOM_KEYS: Mapping[str, Key] = {
    "eviction": Word(default="lru", choices=EVICTION_POLICIES),
    "low_watermark": Number(minimum=0, maximum=0.99, default=0.0),
    "high_watermark": Number(minimum=0, maximum=0.99, default=0.0),
    "quotas": Shares(),
}
"""How a tier's slots are given away: in `[cache]` for the device, in `[[tiers]]` for each."""

CACHE_KEYS: Mapping[str, Key] = {
    "block_tokens": Whole(minimum=1, maximum=65_536, default=16),
    "hash": Word(default="sha256", choices=tuple(ALGORITHMS)),
    "ranks": Whole(minimum=1, maximum=4_096, default=1),
    "equal_ranks": Flag(default=False),
    "groups": Whole(minimum=1, maximum=256, default=1),
    "operation_timeout_s": Number(minimum=0.001, maximum=86_400, default=30.0),
    "operation_blocks_max": Whole(minimum=1, maximum=65_536, default=256),
    "departed_count": Whole(minimum=1, maximum=COUNT_MAX, default=65_536),
    "story_count": Whole(minimum=1, maximum=COUNT_MAX, default=4_096),
    "event_count": Whole(minimum=1, maximum=COUNT_MAX, default=8_192),
    "pin_share": Number(minimum=0, maximum=1, default=0.5),
    "load_gate": Word(default="measured", choices=tuple(gate.value for gate in Gate)),
    "load_tokens_min": Whole(minimum=0, maximum=COUNT_MAX, default=0),
    "rate_age_s": Number(minimum=0.001, maximum=86_400, default=60.0),
    "layer_wise": Word(default="off", choices=LAYER_WISE),
    "device_wait_s": Number(minimum=0.001, maximum=3_600, default=30.0),
    "blocks": Whole(minimum=0, maximum=BLOCKS_MAX, default=0),
    **ROOM_KEYS,
}

TIER_KEYS: Mapping[str, Key] = {
    "name": Word(),
    "kind": Word(),
    "blocks": Whole(minimum=1, maximum=BLOCKS_MAX),
    "write": Word(default="write_through", choices=tuple(kind.value for kind in WriteKind)),
    "hits": Whole(minimum=1, maximum=65_535, default=2),
    "required": Flag(default=False),
    **ROOM_KEYS,
}

TIER_KINDS: Mapping[str, Mapping[str, Option]] = {
    "memory": {},
    "host": {
        "gib": Gib(minimum=0, maximum=65_536, default=0.0),
        "huge_pages": Word(default="auto", choices=("auto", "never")),
        "numa_node": Whole(minimum=-1, maximum=1_023, default=-1),
    },
}
"""What `kind` can be, with the keys that a tier of this kind has besides `TIER_KEYS`."""

ENGINE_KEYS: Mapping[str, Key] = {
    "model": Word(default=""),
    "role": Word(default="both", choices=("both", "prefill", "decode", "router")),
    "prefill_tp": Whole(minimum=0, maximum=1_024, default=0),
    "decode_tp": Whole(minimum=0, maximum=1_024, default=0),
    "prefill_at": Word(default=""),
    "decode_at": Word(default=""),
    "dtype": Word(default="float32", choices=("float32", "bfloat16", "float16")),
    "device": Word(default="cpu"),
    "graphs": Flag(default=True),
    "threads": Whole(minimum=0, maximum=1_024, default=0),
    "step_tokens": Whole(minimum=1, maximum=65_536, default=512),
    "step_requests": Whole(minimum=1, maximum=4_096, default=64),
    "waiting_max": Whole(minimum=1, maximum=COUNT_MAX, default=1_024),
}

SERVE_KEYS: Mapping[str, Key] = {
    "host": Word(default="127.0.0.1"),
    "port": Whole(minimum=0, maximum=65_535, default=8_000),
    "api_key": Word(default=""),
    "api_key_file": Word(default=""),
    "instances": Whole(minimum=1, maximum=16, default=1),
    "body_bytes_max": Bytes(minimum=1_024, maximum=1 << 30, default=1 << 20),
    "requests_max": Whole(minimum=1, maximum=65_536, default=512),
    "connections_max": Whole(minimum=1, maximum=65_536, default=1_024),
    "header_s": Number(minimum=0.1, maximum=3_600, default=10.0),
    "body_s": Number(minimum=0.1, maximum=3_600, default=60.0),
    "drain_s": Number(minimum=0, maximum=86_400, default=20.0),
    "log_level": Word(default="info", choices=LOG_LEVELS),
    "log_json": Flag(default=False),
    "router": Word(default=""),
    "number": Whole(minimum=0, maximum=1_023, default=0),
    "secret_file": Word(default=""),
    "insecure": Flag(default=False),
}

STARTER_TOML = """\
version = 1

[model]
name = "example/model"

[cache]
blocks = 1024
low_watermark = 0.05
high_watermark = 0.1

[[tiers]]
name = "host"
kind = "memory"
blocks = 8192
"""
"""A configuration to begin with: managed device blocks over one memory tier."""


def unknown(name: str, known: Collection[str]) -> str:
    """The problem with a name that is none of `known`."""
    return f"unknown{nearest(name, known) or '; known here: ' + ', '.join(known)}"


def nearest(name: str, known: Collection[str]) -> str:
    """Which of `known` was probably meant, as the end of a sentence; empty if none is near."""
    matches = get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
