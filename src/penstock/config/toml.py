"""TOML → `Config`, or one refusal that lists everything that is wrong; `Config` → TOML; its keys.

Settings declare the keys that they are made of, and `KEYS` has them by their tables: a new key is a
field of its settings, and nothing else. `penstock config keys` and the documentation site show the
tables; a key means what the first paragraph of the text under its field says.

A refusal is a `ConfigError` whose field is the key as the file spells it, such as
`cache.block_tokens` or `tiers[1].write` (tiers are counted from 0), behind the name of the
file when there is one. Reading goes on past a wrong key, so that `further` has the others.

Two rules. Every key of the text is either used or refused. What is printed reads back as an equal
`Config`, but for the API key, which is never printed; so a setting that would be refused for having
no effect (room on a device that the engine owns, `hits` without `selective`, `blocks` beside `gib`)
is left out.
"""

from __future__ import annotations

import json
import re
import reprlib
import tomllib
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cache.settings import BLOCKS_MAX, CacheSettings, TierSettings, WriteKind, WritePolicy
from penstock.config.values import (
    DEVICE_NAME,
    NOT_COMPRESSED,
    PEERS,
    STORED_KINDS,
    TIER_KIND,
    TIER_KINDS,
    UNSIZED_BLOCKS,
    Config,
    EngineTable,
    HandoffTable,
    ModelSettings,
    RoutingTable,
    ServeTable,
    TierKind,
    tier_options,
)
from penstock.errors import ConfigError
from penstock.vocabulary.schema import (
    Setting,
    Shares,
    Whole,
    nearest,
    settings_of,
    shown,
    texts_under,
    unknown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from typing import Any

    from penstock.vocabulary.schema import TierOption, Value


VERSION = 1
TEXT_MAX = 1 << 20
"""Characters of a file: more are read of a device or by mistake."""
NUMBER_BITS = 64
OPTIONAL_TABLES: Mapping[str, type] = {
    "handoff": HandoffTable,
    "engine": EngineTable,
    "serve": ServeTable,
    "routing": RoutingTable,
}
"""Each is a field of `Config`, `None` without it."""
TABLES = ("version", "model", "cache", "tiers", *OPTIONAL_TABLES)

# The keys of several settings make up a table; it names those first that are not in their order.
_CACHE = {**settings_of(CacheSettings), **settings_of(Config)}
_TIER = {**settings_of(TierSettings), **settings_of(TierKind), **settings_of(WritePolicy)}
ROOM_KEYS = ("eviction", "low_watermark", "high_watermark", "quotas")
"""How a tier's slots are given away: in `[cache]` for the device, in `[[tiers]]` for each."""
TIER_KEYS: Mapping[str, Setting] = {
    name: _TIER[name] for name in ("name", "kind", "blocks", "write", "required", "hits", *_TIER)
}
CACHE_KEYS: Mapping[str, Setting] = {
    **{
        name: _CACHE[name]
        for name in ("block_tokens", "hash", "salt", "ranks", "equal_ranks", *_CACHE)
    },
    "blocks": replace(
        TIER_KEYS["blocks"],
        key=Whole(minimum=0, maximum=BLOCKS_MAX),
        default=0,
        meaning="device blocks to manage; 0: the engine manages them, and the four keys below are "
        "refused",
    ),
    **{name: TIER_KEYS[name] for name in ROOM_KEYS},
}
KEYS: Mapping[str, Mapping[str, Setting | TierOption]] = {
    "model": settings_of(ModelSettings),
    "cache": CACHE_KEYS,
    "tiers": TIER_KEYS,
    **{f"tiers of kind {kind}": keys for kind, keys in TIER_KINDS.items() if keys},
    "engine": settings_of(EngineTable),
    "serve": settings_of(ServeTable),
    "handoff": settings_of(HandoffTable),
    "routing": settings_of(RoutingTable),
}
"""The keys of each table of the file, as they are printed."""
_ON_ONE_MACHINE = (
    "must be left out: all ranks of an instance are on one machine, and each machine has instances "
    "of its own"
)
REMOVED_KEYS = {"engine.ranks_at": _ON_ONE_MACHINE, "engine.ranks_here": _ON_ONE_MACHINE}
"""Keys of earlier versions, with what to do instead."""

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
kind = "memory"  # To try it. To serve: "host", shared memory that a GPU copies from directly.
blocks = 8192
"""
"""A configuration to begin with: managed device blocks over one memory tier."""


def load_config(path: str | Path) -> Config:
    """Reads a configuration file.

    Raises `ConfigError`: the file cannot be read, or `parse_config` refuses what it says.
    """
    return load_completed(path, lambda _: None)


def load_completed(path: str | Path, complete: Callable[[dict[str, object]], None]) -> Config:
    """Reads a configuration file that may leave out what `complete` adds to its document.

    Raises `ConfigError`: as `load_config`.
    """
    return _completed(read_text(path), complete, source=str(path))


def parse_completed(text: str, complete: Callable[[dict[str, object]], None]) -> Config:
    """Reads a configuration from its text, after `complete` has changed its document.

    Raises `ConfigError`: as `parse_config`.
    """
    return _completed(text, complete, source="")


def read_text(path: str | Path) -> str:
    """The text of a configuration file.

    Raises `ConfigError`: it cannot be read, or is none.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(
            "path", f"is {reprlib.repr(path)}, must be the path of a TOML file, a str or a Path"
        )
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(TEXT_MAX + 1)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), "cannot be read: is not UTF-8 text") from error
    except ValueError as error:  # A path with a null byte, or with half a character.
        raise ConfigError(reprlib.repr(path), f"cannot be read: {error}") from error
    if len(text) > TEXT_MAX:
        problem = f"has more than {TEXT_MAX} characters, which no configuration needs"
        raise ConfigError(str(path), problem)
    return text


def parse_config(text: str, *, source: str = "") -> Config:
    """Reads a configuration from its text.

    Raises `ConfigError`: the text is not TOML, or says something that has no meaning here.
    """
    if not isinstance(text, str):
        raise ConfigError("text", f"is {reprlib.repr(text)}, must be a TOML document, as a str")
    if not isinstance(source, str):
        raise ConfigError("source", f"is {reprlib.repr(source)}, must be a str")
    return _completed(text, lambda _: None, source=source)


def _completed(text: str, complete: Callable[[dict[str, object]], None], *, source: str) -> Config:
    try:
        document = _read_toml(text)
        complete(document)
        return _read_config(document)
    except ConfigError as error:
        if not source:
            raise
        raise _from_source(error, source) from error


def _from_source(error: ConfigError, source: str) -> ConfigError:
    further = [_from_source(each, source) for each in error.further]
    return ConfigError(f"{source}: {error.field}", error.problem, further=further)


def _read_toml(text: str) -> dict[str, object]:
    problem = f"it has a whole number of more than {NUMBER_BITS} bits"
    try:
        document = tomllib.loads(text)
        if not _has_long_number(document):
            return document
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("TOML", f"cannot be read: {error}") from error
    except RecursionError:
        problem = "its arrays or tables are nested too deeply; four levels do"
    except ValueError:
        pass  # Python reads no number of more than 4,300 digits.
    raise ConfigError("TOML", f"cannot be read: {problem}")


def _has_long_number(value: object) -> bool:
    """Whether there is a number that TOML does not know, and that no message could show."""
    if isinstance(value, dict | list):
        return any(map(_has_long_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and value.bit_length() > NUMBER_BITS


class _Problems:
    """Everything that was found wrong so far."""

    def __init__(self) -> None:
        self._found: list[ConfigError] = []

    def add(self, error: ConfigError) -> None:
        self._found += [ConfigError(error.field, error.problem), *error.further]

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Reading goes on after the block, also where it was refused."""
        try:
            yield
        except ConfigError as error:
            self.add(error)

    def refuse_if_any(self) -> None:
        """Raises one error for all of them."""
        if self._found:
            first, *further = self._found
            raise ConfigError(first.field, first.problem, further=further)


def _read_config(document: dict[str, object]) -> Config:
    # Another version may mean anything by the rest, so the version comes first.
    _check_version(document)
    problems = _Problems()
    for name in document:
        if name not in TABLES:
            problems.add(ConfigError(name, unknown(name, TABLES)))
    if "model" not in document:
        problem = "is missing; must be a table with the name of the model"
        problems.add(ConfigError("model", problem))
    model = _read_table("model", document, ModelSettings, problems)
    table, device = None, None
    with problems.collect():
        table = _Table("cache", document.get("cache", {}), CACHE_KEYS)
        device = _read_device(table)
    tiers, kinds = _read_tiers(document.get("tiers", []), problems)
    tables = {
        name: _read_table(name, document, owner, problems)
        for name, owner in OPTIONAL_TABLES.items()
    }
    # What concerns all tiers together can be judged only where each of them is in order.
    problems.refuse_if_any()
    assert table is not None, "read, or refused"
    cache = _read_cache(table, device, tiers)
    return Config(model=model, cache=cache, tier_kinds=kinds, **tables, **table.fields_of(Config))


def _read_table(name: str, document: dict[str, object], owner: type, problems: _Problems) -> Any:  # noqa: ANN401  (the owner)
    """The settings of a table; `None` if it is left out or was refused."""
    with problems.collect():
        if name in document:
            return owner(**_Table(name, document[name], settings_of(owner)).fields_of(owner))
    return None


def _check_version(document: dict[str, object]) -> None:
    if "version" not in document:
        raise ConfigError("version", f"is missing; must be {VERSION}")
    version = document["version"]
    if type(version) is not int or version != VERSION:
        problem = f"is {shown(version)}, must be {VERSION}: no other is known here"
        raise ConfigError("version", problem)


def _read_cache(
    table: _Table, device: TierSettings | None, tiers: tuple[TierSettings, ...]
) -> CacheSettings:
    if device is None and not tiers:
        raise ConfigError(
            "cache.blocks", "is 0 and there are no [[tiers]]: nothing to keep; give one or both"
        )
    places = {tier.name: f"tiers[{index}]" for index, tier in enumerate(tiers)}
    with _spelled_as_in_the_file({DEVICE_NAME: "cache", **places}):
        cache = CacheSettings(device=device, tiers=tiers)
    return replace(cache, **table.fields_of(CacheSettings))


def _read_device(table: _Table) -> TierSettings | None:
    if not table.values["blocks"]:
        table.refuse(
            ROOM_KEYS,
            "has no effect while cache.blocks is 0: the engine keeps its own device blocks",
        )
        return None
    with _spelled_as_in_the_file({DEVICE_NAME: "cache"}):
        return TierSettings(name=DEVICE_NAME, **table.fields_of(TierSettings))


def _read_tiers(
    given: object, problems: _Problems
) -> tuple[tuple[TierSettings, ...], tuple[TierKind, ...]]:
    tiers: list[TierSettings] = []
    kinds: list[TierKind] = []
    with problems.collect():
        if not isinstance(given, list):
            raise ConfigError("tiers", "is no array of tables; each tier must begin with [[tiers]]")
        for index, entry in enumerate(given):
            with problems.collect():
                tier, kind = _read_tier_and_kind(f"tiers[{index}]", entry, problems)
                if tier.name in {DEVICE_NAME, *(earlier.name for earlier in tiers)}:
                    raise ConfigError(
                        f"tiers[{index}].name", f"is {tier.name!r}, the name of another tier"
                    )
                tiers.append(tier)
                kinds.append(kind)
    return tuple(tiers), tuple(kinds)


def _read_tier_and_kind(
    place: str, entry: object, problems: _Problems
) -> tuple[TierSettings, TierKind]:
    given = _table_at(place, entry)
    try:
        kind = _read_kind(place, given)
    except ConfigError:
        # Its own keys are not known, but what every tier has can be judged.
        with problems.collect():
            known = {name: given[name] for name in given if name in TIER_KEYS and name != "kind"}
            _Table(place, known, TIER_KEYS, optional=TIER_KEYS)
        raise
    own = tier_options(kind)
    if "compression" in given and kind in NOT_COMPRESSED:
        raise ConfigError(
            f"{place}.compression",
            f"is not offered for kind {kind!r}: {NOT_COMPRESSED[kind]}. Kinds 'redis' and "
            "'objects' have it",
        )
    table = _Table(place, given, {**TIER_KEYS, **own}, optional=["blocks"])
    if kind == PEERS and "write" not in given:
        table.values["write"] = WriteKind.NONE
    options = {name: table.values[name] for name in own}
    with _spelled_as_in_the_file({"": place}):
        made_of = TierKind(options=options, **table.fields_of(TierKind))
    return _read_tier(table, stored=kind in STORED_KINDS), made_of


def _read_kind(place: str, given: Mapping[str, object]) -> str:
    # The kind decides which keys the table may have, so it is read before the table is.
    if "kind" in given:
        return TIER_KIND.read(f"{place}.kind", given["kind"])
    for name in given:
        if name not in TIER_KEYS and nearest(name, ["kind"]):
            raise ConfigError(f"{place}.{name}", unknown(name, ["kind"]))
    raise ConfigError(f"{place}.kind", f"is missing; must be {TIER_KIND}")


def _read_tier(table: _Table, *, stored: bool) -> TierSettings:
    write = WritePolicy(**table.fields_of(WritePolicy))
    if write.kind is not WriteKind.SELECTIVE:
        table.refuse(["hits"], f"has no effect while write is {write.kind.value!r}")
    _choose_size(table)
    given = table.fields_of(TierSettings)
    with _spelled_as_in_the_file({given["name"]: table.place, "": table.place}):
        return TierSettings(write=write, stored=stored, **given)


def _choose_size(table: _Table) -> None:
    """A tier with `gib` has no `blocks`: how many it has is known later."""
    size_gib = table.values.get("gib")
    if not size_gib and "blocks" not in table.given:
        either = "; give blocks, or gib more than 0" if "gib" in table.keys else ""
        must_be = either or f"; must be {TIER_KEYS['blocks'].key}"
        raise ConfigError(f"{table.place}.blocks", f"is missing{must_be}")
    if size_gib:
        default = ", its default here; give gib in its place"
        what = "; give one of the two" if "gib" in table.given else default
        table.refuse(["blocks"], f"has no effect while gib is {size_gib}{what}")
        table.values["blocks"] = UNSIZED_BLOCKS


@contextmanager
def _spelled_as_in_the_file(places: Mapping[str, str]) -> Iterator[None]:
    """Settings name a field as `tier 'host': write`; a reader of the file wants its table.

    `places` maps names of tiers to their tables, and "" to that of a field without a tier.
    """
    try:
        yield
    except ConfigError as error:
        tier, _, field = error.field.rpartition(": ")
        place = places[tier.removeprefix("tier ").strip("'")]
        raise ConfigError(f"{place}.{field}", error.problem) from error


class _Table:
    """One table of the file. To open it is to refuse all keys that are not as they should be.

    Args:
        place: What the file calls it.
        given: What the file says.
        keys: Which keys it may have.
        optional: Keys without a default that need not be there.
    """

    def __init__(
        self,
        place: str,
        given: object,
        keys: Mapping[str, Setting | TierOption],
        *,
        optional: Collection[str] = (),
    ) -> None:
        self.place = place
        self.given = _table_at(place, given)
        self.keys = keys
        self.values: dict[str, Any] = {}
        """Of the keys that are given or have a default."""
        problems = _Problems()
        for name in [*self.given, *(name for name in keys if name not in self.given)]:
            if name in self.given or name not in optional:
                with problems.collect():
                    self.values[name] = self._read(name)
        problems.refuse_if_any()

    def _read(self, name: str) -> Any:  # noqa: ANN401  (as its key says)
        place = f"{self.place}.{name}"
        if place in REMOVED_KEYS:
            raise ConfigError(place, f"is {shown(self.given[name])}, {REMOVED_KEYS[place]}")
        if name not in self.keys:
            raise ConfigError(place, unknown(name, self.keys))
        setting = self.keys[name]
        value = self.given.get(name, setting.default)
        if value is None:
            raise ConfigError(place, f"is missing; must be {setting.key}")
        return setting.key.read(place, value)

    def fields_of(self, owner: type) -> dict[str, Any]:
        """The fields of some settings, from those keys of the table that become them."""
        return {
            setting.field: self.values[name]
            for name, setting in self.keys.items()
            if isinstance(setting, Setting) and setting.owner is owner
        }

    def refuse(self, names: Collection[str], problem: str) -> None:
        """Refuses those of `names` that are given, although the schema knows them."""
        for name in names:
            if name in self.given:
                raise ConfigError(f"{self.place}.{name}", problem)


def _table_at(place: str, given: object) -> dict[str, object]:
    if not isinstance(given, dict):
        raise ConfigError(place, f"is {shown(given)}, must be a table")
    return given


def print_toml(config: Config) -> str:
    """The text of a configuration file that says what `config` says."""
    device = config.cache.device
    parts = [
        f"version = {VERSION}\n",
        _table("[model]", _values(settings_of(ModelSettings), config.model)),
        _table("[cache]", _cache(config)),
        _quotas("[cache.quotas]", device.quotas if device else {}),
    ]
    for tier, kind in zip(config.cache.tiers, config.tier_kinds, strict=True):
        parts.append(_table("[[tiers]]", _tier(tier, kind)))
        parts.append(_quotas("[tiers.quotas]", tier.quotas))
    for name, owner in OPTIONAL_TABLES.items():
        if (settings := getattr(config, name)) is not None:
            parts.append(_table(f"[{name}]", _values(settings_of(owner), settings)))
    return "\n".join(part for part in parts if part)


def _values(keys: Mapping[str, Setting], *owners: object) -> dict[str, Value]:
    """The values of those keys whose settings are given; quotas have a table of their own."""
    of_type = {type(owner): owner for owner in owners}
    found = {}
    for name, setting in keys.items():
        if setting.owner in of_type and not isinstance(setting.key, Shares):
            value = getattr(of_type[setting.owner], setting.field)
            found[name] = value.value if isinstance(value, Enum) else value
    # Printed text ends up in terminals, logs and bug reports, where no key belongs.
    if found.get("api_key"):
        del found["api_key"]
    return found


def _cache(config: Config) -> dict[str, Value]:
    if config.cache.device is None:
        return {**_values(CACHE_KEYS, config, config.cache), "blocks": 0}
    return _values(CACHE_KEYS, config, config.cache, config.cache.device)


def _tier(tier: TierSettings, kind: TierKind) -> dict[str, Value]:
    values = _values(TIER_KEYS, tier, kind, tier.write)
    if kind.gib:
        del values["blocks"]
    if tier.write.kind is not WriteKind.SELECTIVE:
        del values["hits"]
    return {**values, **kind.options}


def _quotas(heading: str, quotas: Mapping[str, float]) -> str:
    return _table(heading, quotas) if quotas else ""


def _table(heading: str, values: Mapping[str, Value]) -> str:
    lines = [f"{_name(name)} = {_value(value)}\n" for name, value in values.items()]
    return f"{heading}\n{''.join(lines)}"


def _name(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def _value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _string(value) if isinstance(value, str) else repr(value)


def _string(text: str) -> str:
    # JSON escapes a string as TOML does, but for DEL, which TOML wants escaped as well.
    # Characters beyond ASCII stay themselves: TOML has no surrogate pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def key_tables() -> str:
    """Every key with its type, default and meaning, as tables in Markdown."""
    return "\n".join(f"### {name}\n\n{key_table(name)}" for name in KEYS)


def key_table(name: str) -> str:
    """The keys of one table of the file."""
    head = "| key | type | default | meaning |\n|---|---|---|---|\n"
    return head + "".join(_row(key, setting) for key, setting in KEYS[name].items())


def _row(name: str, setting: Setting | TierOption) -> str:
    kind = str(setting.key).partition(", such as ")[0]
    default = "required" if setting.default is None else f"`{_value(setting.default)}`"
    return f"| `{name}` | {kind} | {default} | {meaning_of(setting)} |\n"


def meaning_of(setting: Setting | TierOption) -> str:
    """What a key of ours means."""
    assert isinstance(setting, Setting), "an option of another distribution"
    return setting.meaning or _as_meaning(texts_under(setting.owner)[setting.field])


def _as_meaning(text: str) -> str:
    """A text as the cell of a table has it: without its capital and full stop."""
    found = text.removesuffix(".")
    return found if found[1:2].isupper() else f"{found[:1].lower()}{found[1:]}"
