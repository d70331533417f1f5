"""TOML → `Config`, or one refusal that lists everything that is wrong.

A refusal is a `ConfigError` whose field is the key as the file spells it, such as
`cache.block_tokens` or `tiers[1].write` (tiers are counted from 0), behind the name of the
file when there is one. Reading goes on past a wrong key, so that `further` has the others.

The one rule that must not break: every key of the text is either used or refused.
"""

from __future__ import annotations

import reprlib
import tomllib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from penstock.cache.settings import CacheSettings, Gate, TierSettings, WriteKind, WritePolicy
from penstock.config.schema import (
    CACHE_KEYS,
    ENGINE_KEYS,
    MODEL_KEYS,
    RESERVED_TABLES,
    ROOM_KEYS,
    SERVE_KEYS,
    TABLES,
    TIER_KEYS,
    TIER_KINDS,
    UNSIZED_BLOCKS,
    VERSION,
    Flag,
    Number,
    Shares,
    Whole,
    Word,
    nearest,
    unknown,
)
from penstock.config.serving import EngineTable, ServeTable
from penstock.config.values import DEVICE_NAME, Config, ModelSettings, TierKind
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from penstock.config.schema import Key, Option, Value


def load_config(path: str | Path) -> Config:
    """Reads a configuration file.

    Raises:
        ConfigError: the file cannot be read, or `parse_config` refuses what it says.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(
            "path", f"is {reprlib.repr(path)}, must be the path of a TOML file, a str or a Path"
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), "cannot be read: is not UTF-8 text") from error
    except ValueError as error:  # A path with a null byte, or with half a character.
        raise ConfigError(reprlib.repr(path), f"cannot be read: {error}") from error
    return parse_config(text, source=str(path))


def parse_config(text: str, *, source: str = "") -> Config:
    """Reads a configuration from its text.

    Args:
        text: the TOML document.
        source: where it came from; every refusal begins with it.

    Raises:
        ConfigError: the text is no TOML, or says something that has no meaning here.
    """
    if not isinstance(text, str):
        raise ConfigError("text", f"is {reprlib.repr(text)}, must be a TOML document, as a str")
    if not isinstance(source, str):
        raise ConfigError("source", f"is {reprlib.repr(source)}, must be a str")
    try:
        return _read_config(_read_toml(text))
    except ConfigError as error:
        if not source:
            raise
        raise _from_source(error, source) from error


def _from_source(error: ConfigError, source: str) -> ConfigError:
    further = [_from_source(each, source) for each in error.further]
    return ConfigError(f"{source}: {error.field}", error.problem, further=further)


def _read_toml(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("TOML", f"cannot be read: {error}") from error
    except RecursionError:
        raise ConfigError(
            "TOML", "cannot be read: its arrays or tables are nested too deeply; four levels do"
        ) from None


class _Problems:
    """Everything that was found wrong so far."""

    def __init__(self) -> None:
        self._found: list[ConfigError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Reading goes on after the block, also where it was refused."""
        try:
            yield
        except ConfigError as error:
            self._found += [ConfigError(error.field, error.problem), *error.further]

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
        with problems.collect():
            _check_table_name(name, document)
    model, engine, serve, table, device = None, None, None, None, None
    with problems.collect():
        model = _read_model(document)
    with problems.collect():
        table = _Table("cache", document.get("cache", {}), CACHE_KEYS)
        device = _read_device(table)
    tiers, kinds = _read_tiers(document.get("tiers", []), problems)
    with problems.collect():
        engine = _read_engine(document)
    with problems.collect():
        serve = _read_serve(document)
    # What concerns all tiers together can be judged only where each of them is in order.
    problems.refuse_if_any()
    assert model is not None, "read, or refused"
    assert table is not None, "read, or refused"
    return Config(
        model=model,
        cache=_read_cache(table, device, tiers),
        hash=table.word("hash"),
        tier_kinds=kinds,
        equal_ranks=table.flag("equal_ranks"),
        layer_wise=table.word("layer_wise"),
        device_wait_s=table.number("device_wait_s"),
        engine=engine,
        serve=serve,
    )


def _check_table_name(name: str, document: dict[str, object]) -> None:
    if name not in TABLES:
        raise ConfigError(name, unknown(name, TABLES))
    if name in RESERVED_TABLES:
        for key in _table_at(name, document[name]):
            raise ConfigError(f"{name}.{key}", f"unknown; [{name}] has no settings yet")


def _read_engine(document: dict[str, object]) -> EngineTable | None:
    if "engine" not in document:
        return None
    table = _Table("engine", document["engine"], ENGINE_KEYS)
    return EngineTable(
        model=table.word("model"),
        role=table.word("role"),
        prefill_tp=table.whole("prefill_tp"),
        decode_tp=table.whole("decode_tp"),
        prefill_at=table.word("prefill_at"),
        decode_at=table.word("decode_at"),
        dtype=table.word("dtype"),
        device=table.word("device"),
        graphs=table.flag("graphs"),
        threads=table.whole("threads"),
        step_tokens=table.whole("step_tokens"),
        step_requests=table.whole("step_requests"),
        waiting_max=table.whole("waiting_max"),
    )


def _read_serve(document: dict[str, object]) -> ServeTable | None:
    if "serve" not in document:
        return None
    table = _Table("serve", document["serve"], SERVE_KEYS)
    return ServeTable(
        host=table.word("host"),
        port=table.whole("port"),
        api_key=table.word("api_key"),
        api_key_file=table.word("api_key_file"),
        instances=table.whole("instances"),
        body_bytes_max=table.whole("body_bytes_max"),
        requests_max=table.whole("requests_max"),
        connections_max=table.whole("connections_max"),
        header_s=table.number("header_s"),
        body_s=table.number("body_s"),
        drain_s=table.number("drain_s"),
        log_level=table.word("log_level"),
        log_json=table.flag("log_json"),
        router=table.word("router"),
        number=table.whole("number"),
        secret_file=table.word("secret_file"),
        insecure=table.flag("insecure"),
    )


def _check_version(document: dict[str, object]) -> None:
    if "version" not in document:
        raise ConfigError("version", f"is missing; must be {VERSION}")
    version = document["version"]
    if type(version) is not int or version != VERSION:
        raise ConfigError("version", f"is {version!r}, must be {VERSION}: no other is known here")


def _read_model(document: dict[str, object]) -> ModelSettings:
    if "model" not in document:
        raise ConfigError("model", "is missing; must be a table with the name of the model")
    table = _Table("model", document["model"], MODEL_KEYS)
    return ModelSettings(
        name=table.word("name"),
        weights_version=table.word("weights_version"),
        kv_dtype=table.word("kv_dtype"),
        kv_scales=table.word("kv_scales"),
        rotary=table.word("rotary"),
    )


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
    return replace(
        cache,
        block_tokens=table.whole("block_tokens"),
        rank_count=table.whole("ranks"),
        group_count=table.whole("groups"),
        operation_timeout_s=table.number("operation_timeout_s"),
        operation_blocks_max=table.whole("operation_blocks_max"),
        departed_count=table.whole("departed_count"),
        story_count=table.whole("story_count"),
        event_count=table.whole("event_count"),
        pin_share=table.number("pin_share"),
        load_gate=Gate(table.word("load_gate")),
        load_tokens_min=table.whole("load_tokens_min"),
        rate_age_s=table.number("rate_age_s"),
    )


def _read_device(table: _Table) -> TierSettings | None:
    blocks = table.whole("blocks")
    if blocks == 0:
        table.refuse(
            ROOM_KEYS,
            "has no effect while cache.blocks is 0: the engine keeps its own device blocks",
        )
        return None
    room = _read_room(table)
    with _spelled_as_in_the_file({DEVICE_NAME: "cache"}):
        return TierSettings(name=DEVICE_NAME, slot_count=blocks, **room)


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
    table = _Table(place, given, {**TIER_KEYS, **TIER_KINDS[kind]}, optional=["blocks"])
    options = table.options(TIER_KINDS[kind])
    return _read_tier(table), TierKind(name=kind, options=options, required=table.flag("required"))


def _read_kind(place: str, given: Mapping[str, object]) -> str:
    # The kind decides which keys the table may have, so it is read before the table is.
    kinds = Word(choices=tuple(TIER_KINDS))
    if "kind" in given:
        return kinds.read(f"{place}.kind", given["kind"])
    for name in given:
        if name not in TIER_KEYS and nearest(name, ["kind"]):
            raise ConfigError(f"{place}.{name}", unknown(name, ["kind"]))
    raise ConfigError(f"{place}.kind", f"is missing; must be {kinds}")


def _read_tier(table: _Table) -> TierSettings:
    write = WriteKind(table.word("write"))
    if write is not WriteKind.SELECTIVE:
        table.refuse(["hits"], f"has no effect while write is {write.value!r}")
    name, blocks = table.word("name"), _read_blocks(table)
    policy = WritePolicy(kind=write, hits=table.whole("hits"))
    room = _read_room(table)
    with _spelled_as_in_the_file({name: table.place, "": table.place}):
        return TierSettings(name=name, slot_count=blocks, write=policy, **room)


def _read_blocks(table: _Table) -> int:
    if not table.knows("gib"):
        return table.whole("blocks")
    size_gib = table.number("gib")
    if size_gib == 0 and not table.gives("blocks"):
        raise ConfigError(f"{table.place}.blocks", "is missing; give blocks, or gib more than 0")
    if size_gib == 0:
        return table.whole("blocks")
    table.refuse(["blocks"], f"has no effect while gib is {size_gib}; give one of the two")
    return UNSIZED_BLOCKS


class _Room(TypedDict):
    eviction: str
    low_watermark: float
    high_watermark: float
    quotas: Mapping[str, float]


def _read_room(table: _Table) -> _Room:
    return {
        "eviction": table.word("eviction"),
        "low_watermark": table.number("low_watermark"),
        "high_watermark": table.number("high_watermark"),
        "quotas": table.shares("quotas"),
    }


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
        keys: Mapping[str, Key],
        *,
        optional: Collection[str] = (),
    ) -> None:
        self.place = place
        self._given = _table_at(place, given)
        self._keys = keys
        problems = _Problems()
        for name, value in self._given.items():
            with problems.collect():
                if name not in keys:
                    raise ConfigError(f"{place}.{name}", unknown(name, keys))
                keys[name].read(f"{place}.{name}", value)
        for name in keys:
            if name not in self._given and name not in optional:
                with problems.collect():
                    self._value(name, keys[name])
        problems.refuse_if_any()

    def knows(self, name: str) -> bool:
        """Whether it may have this key."""
        return name in self._keys

    def gives(self, name: str) -> bool:
        """Whether it has this key."""
        return name in self._given

    def whole(self, name: str) -> int:
        key = self._keys[name]
        assert isinstance(key, Whole), name
        return key.read(f"{self.place}.{name}", self._value(name, key))

    def number(self, name: str) -> float:
        key = self._keys[name]
        assert isinstance(key, Number), name
        return key.read(f"{self.place}.{name}", self._value(name, key))

    def word(self, name: str) -> str:
        key = self._keys[name]
        assert isinstance(key, Word), name
        return key.read(f"{self.place}.{name}", self._value(name, key))

    def flag(self, name: str) -> bool:
        key = self._keys[name]
        assert isinstance(key, Flag), name
        return key.read(f"{self.place}.{name}", self._value(name, key))

    def shares(self, name: str) -> dict[str, float]:
        key = self._keys[name]
        assert isinstance(key, Shares), name
        return key.read(f"{self.place}.{name}", self._value(name, key))

    def options(self, keys: Mapping[str, Option]) -> dict[str, Value]:
        """The values of the keys that the tier's kind brings along."""
        return {
            name: key.read(f"{self.place}.{name}", self._value(name, key))
            for name, key in keys.items()
        }

    def refuse(self, names: Collection[str], problem: str) -> None:
        """Refuses those of `names` that are given, although the schema knows them."""
        for name in names:
            if name in self._given:
                raise ConfigError(f"{self.place}.{name}", problem)

    def _value(self, name: str, key: Key) -> object:
        value = self._given.get(name, key.default)
        if value is None:
            raise ConfigError(f"{self.place}.{name}", f"is missing; must be {key}")
        return value


def _table_at(place: str, given: object) -> dict[str, object]:
    if not isinstance(given, dict):
        raise ConfigError(place, f"is {given!r}, must be a table")
    return given
