"""The configuration file: what it becomes, what it refuses, and that it prints what it reads."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.reference_pages import completed
from penstock.cache.settings import CacheSettings, TierSettings, WriteKind, WritePolicy
from penstock.cli.app import run
from penstock.config import (
    STARTER_TOML,
    Config,
    ModelSettings,
    TierKind,
    load_config,
    parse_config,
)
from penstock.config.toml import KEYS, key_table, meaning_of
from penstock.config.values import HandoffTable
from penstock.errors import ConfigError
from penstock.vocabulary.planes import DTYPE_NAMES

HEAD = """
version = 1
[model]
name = "m"
"""
DEVICE = """
[cache]
blocks = 100
low_watermark = 0.1
high_watermark = 0.2
"""
TIER = """
[[tiers]]
name = "host"
kind = "memory"
blocks = 400
"""
FULL = """
version = 1
[model]
name = "m"
weights_version = "w"
kv_dtype = "float8_e4m3"
kv_scales = "s"
rotary = "r"
[cache]
block_tokens = 64
hash = "xxh3_128"
ranks = 8
groups = 2
operation_timeout_s = 5
operation_blocks_max = 32
departed_count = 10
story_count = 20
event_count = 30
pin_share = 0.25
blocks = 100
eviction = "adaptive"
low_watermark = 0.1
high_watermark = 0.2
quotas = { a = 0.5 }
[[tiers]]
name = "host"
kind = "memory"
blocks = 400
write = "selective"
hits = 3
eviction = "adaptive"
low_watermark = 0.3
high_watermark = 0.4
quotas = { b = 1 }
"""


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    return str(caught.value)


# What a file becomes.


def test_a_file_that_says_the_least_has_the_defaults_of_the_settings() -> None:
    config = parse_config(HEAD + "[cache]\nblocks = 8" + TIER)

    assert config == Config(
        model=ModelSettings(name="m"),
        cache=CacheSettings(
            device=TierSettings(name="device", slot_count=8),
            tiers=(TierSettings(name="host", slot_count=400),),
        ),
        tier_kinds=(TierKind(name="memory"),),
    )


def test_every_key_reaches_its_setting() -> None:
    config = parse_config(FULL)

    assert config.hash == "xxh3_128"
    assert config.model == ModelSettings(
        name="m", weights_version="w", kv_dtype="float8_e4m3", kv_scales="s", rotary="r"
    )
    assert config.cache == CacheSettings(
        device=TierSettings(
            name="device",
            slot_count=100,
            eviction="adaptive",
            low_watermark=0.1,
            high_watermark=0.2,
            quotas={"a": 0.5},
        ),
        tiers=(
            TierSettings(
                name="host",
                slot_count=400,
                write=WritePolicy(kind=WriteKind.SELECTIVE, hits=3),
                eviction="adaptive",
                low_watermark=0.3,
                high_watermark=0.4,
                quotas={"b": 1.0},
            ),
        ),
        block_tokens=64,
        rank_count=8,
        group_count=2,
        operation_timeout_s=5.0,
        operation_blocks_max=32,
        departed_count=10,
        story_count=20,
        event_count=30,
        pin_share=0.25,
    )


@pytest.mark.parametrize("cache", ["", "[cache]", "[cache]\nblocks = 0"])
def test_without_device_blocks_the_engine_keeps_its_own(cache: str) -> None:
    config = parse_config(HEAD + cache + TIER)

    assert config.cache.device is None


def test_the_data_transport_is_chosen_by_place_unless_the_file_says_otherwise() -> None:
    assert parse_config(HEAD + DEVICE).handoff is None
    assert parse_config(HEAD + "[handoff]" + DEVICE).handoff == HandoffTable()
    assert HandoffTable().transport == "auto"


def test_the_model_fixes_its_part_of_every_namespace() -> None:
    model = ModelSettings(name="m", weights_version="w", kv_dtype="fp16", kv_scales="s", rotary="r")

    namespace = model.namespace(tenant="t", adapter="a", kv_group="g")

    assert (namespace.model, namespace.weights_version, namespace.kv_dtype) == ("m", "w", "fp16")
    assert (namespace.kv_scales, namespace.rotary, namespace.kv_group) == ("s", "r", "g")
    assert (namespace.adapter, namespace.tenant) == ("a", "t")


def test_weights_that_nobody_named_are_unknown_in_the_namespace() -> None:
    assert ModelSettings(name="m").namespace().weights_version == "unknown"


# What it refuses.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "version: is missing; must be 1"),
        ("version = 2", "version: is 2, must be 1: no other is known here"),
        ("version = true", "version: is True, must be 1: no other is known here"),
        ("version = 1", "model: is missing; must be a table with the name of the model"),
        ("version = 1\n[model]", "model.name: is missing; must be a string"),
        (
            'version = 1\nmodel.name = ""\ncache.blocks = 1',
            "model.name: is '', must name the model: keys are made from it",
        ),
        ("version = 1\nmodel = 3", "model: is 3, must be a table"),
        (HEAD, "cache.blocks: is 0 and there are no [[tiers]]: nothing to keep; give one or both"),
    ],
)
def test_a_file_without_what_it_must_have_is_refused(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "[tier]", "tier: unknown; did you mean tiers?"),
        (HEAD + "nam = 3", "model.nam: unknown; did you mean name?"),
        (
            HEAD + DEVICE + "block_token = 3",
            "cache.block_token: unknown; did you mean block_tokens?",
        ),
        (
            HEAD + TIER + "low_water = 0.1",
            "tiers[0].low_water: unknown; did you mean low_watermark?",
        ),
        (HEAD + TIER.replace("kind", "kinds"), "tiers[0].kinds: unknown; did you mean kind?"),
        (HEAD + "[serve]\nprt = 80" + DEVICE, "serve.prt: unknown; did you mean port?"),
        (HEAD + "[handoff]\nlease = 1", "handoff.lease: unknown; did you mean lease_s?"),
        (
            HEAD + '[engine]\nranks_at = "tcp://10.0.0.1:7300"' + DEVICE,
            "engine.ranks_at: is 'tcp://10.0.0.1:7300', must be left out: all ranks of an instance "
            "are on one machine, and each machine has instances of its own",
        ),
        (
            HEAD + "[engine]\nranks_here = '0'" + DEVICE,
            "engine.ranks_here: is '0', must be left out: all ranks of an instance are on one "
            "machine, and each machine has instances of its own",
        ),
        (
            HEAD + "[engine]\nrole = 'rank'" + DEVICE,
            "engine.role: is 'rank', must be one of both, prefill, decode, router",
        ),
        (
            HEAD + "[handoff]\ntransport = 1",
            "handoff.transport: is 1, must be one of auto, shared_memory, gpu, nixl",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(text: str, message: str) -> None:
    assert refusal(text) == message


def test_an_unknown_key_that_is_near_to_none_is_refused_with_all_known_ones() -> None:
    message = refusal(HEAD + "qqq = 3")

    assert message == f"model.qqq: unknown; known here: {', '.join(KEYS['model'])}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("block_tokens = 0", "block_tokens: is 0, must be a whole number from 1 to 65536"),
        ("block_tokens = true", "block_tokens: is True, must be a whole number from 1 to 65536"),
        ("block_tokens = 1.5", "block_tokens: is 1.5, must be a whole number from 1 to 65536"),
        ("ranks = '2'", "ranks: is '2', must be a whole number from 1 to 4096"),
        ("operation_timeout_s = nan", "operation_timeout_s: is nan, must be a number from 0.001"),
        ("operation_timeout_s = inf", "operation_timeout_s: is inf, must be a number from 0.001"),
        ("pin_share = '1'", "pin_share: is '1', must be a number from 0 to 1"),
        ("pin_share = false", "pin_share: is False, must be a number from 0 to 1"),
        ("hash = 1", "hash: is 1, must be one of sha256, xxh3_128"),
        (
            "hash = 'xxh3'",
            "hash: is 'xxh3', must be one of sha256, xxh3_128; did you mean xxh3_128?",
        ),
        (
            "eviction = 'adaptiv'",
            "eviction: is 'adaptiv', must be one of lru, adaptive; did you mean adaptive?",
        ),
        (
            "eviction = 'learned'",
            "eviction: is 'learned', must be 'adaptive', which took its place",
        ),
        ("quotas = 1", "quotas: is 1, must be a table of tenants, each with a number from 0 to 1"),
        ("quotas.batch = 2", "quotas.batch: is 2, must be a number from 0 to 1"),
    ],
)
def test_a_value_of_the_wrong_type_or_out_of_range_is_refused(line: str, message: str) -> None:
    assert refusal(HEAD + DEVICE + line).startswith(f"cache.{message}")


@pytest.mark.parametrize("key", ["eviction = 'lru'", "low_watermark = 0.1", "quotas.a = 1"])
def test_room_on_a_device_that_the_engine_keeps_is_refused(key: str) -> None:
    message = refusal(HEAD + f"[cache]\n{key}" + TIER)

    assert message.startswith(f"cache.{re.split('[ .]', key)[0]}: has no effect while cache.blocks")


def test_hits_without_selective_are_refused() -> None:
    message = refusal(HEAD + TIER + "hits = 3")

    assert message == "tiers[0].hits: has no effect while write is 'write_through'"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("memory", "memroy"),
            "kind: is 'memroy', must be one of memory, host, disk, redis, mooncake, objects, "
            "shared, peers; did you mean memory?",
        ),
        (('kind = "memory"', ""), "kind: is missing; must be one of memory"),
        (('name = "host"', ""), "name: is missing; must be a string"),
        (('"host"', '"a b"'), "name: is 'a b', must be letters, digits, '-' and '_'"),
        (('"host"', '"device"'), "name: is 'device', the name of another tier"),
        (("blocks = 400", ""), "blocks: is missing; must be a whole number from 1 to 2147483647"),
        (("400", "0"), "blocks: is 0, must be a whole number from 1 to 2147483647"),
        (("400", "400\nlow_watermark = 0.5"), "low_watermark: is 0.5 with high_watermark 0.0;"),
        (("400", '400\nwrite = "none"'), "write: is 'none': nothing would ever be written into it"),
        (("400", '400\nwrite = "write_back"'), "write: is 'write_back', but the engine evicts its"),
    ],
)
def test_a_tier_that_is_wrong_is_refused_in_the_words_of_the_file(
    change: tuple[str, str], message: str
) -> None:
    assert refusal(HEAD + TIER.replace(*change)).startswith(f"tiers[0].{message}")


@pytest.mark.parametrize("value", ["1", "true", '""', '"gzip"', '"ZSTD"', "nan", "[]"])
@pytest.mark.parametrize("kind", ["redis", "objects"])
def test_a_compression_that_is_none_is_refused(kind: str, value: str) -> None:
    tier = f'[[tiers]]\nname = "s"\nkind = "{kind}"\nurl = "file:///kv"\ncompression = {value}'

    assert "tiers[0].compression: is " in (message := refusal(HEAD + tier))
    assert "must be one of off, zstd" in message


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("disk", "slots of its files"),
        ("mooncake", "its links"),
        ("host", "its blocks are in memory"),
    ],
)
def test_compression_is_refused_where_it_is_not_offered(kind: str, why: str) -> None:
    tier = f'[[tiers]]\nname = "s"\nkind = "{kind}"\ngib = 1\ncompression = "zstd"'

    message = refusal(HEAD + tier)

    assert message.startswith(f"tiers[0].compression: is not offered for kind '{kind}': {why}")


def test_two_tiers_with_one_name_are_refused() -> None:
    assert refusal(HEAD + TIER + TIER) == "tiers[1].name: is 'host', the name of another tier"


def test_a_lower_tier_that_can_never_fill_is_refused_by_its_own_place() -> None:
    lower = TIER.replace("host", "archive") + 'write = "write_back"'

    message = refusal(HEAD + TIER + lower)

    assert message.startswith("tiers[1].write: is 'write_back', but low_watermark of tier 'host'")


@pytest.mark.parametrize("tiers", ["[tiers]\nname = 'host'", "tiers = 3"])
def test_tiers_that_are_no_array_are_refused(tiers: str) -> None:
    message = refusal(f"version = 1\nmodel.name = 'm'\n{tiers}")

    assert message == "tiers: is no array of tables; each tier must begin with [[tiers]]"


def test_text_that_is_no_toml_is_refused_with_its_line() -> None:
    message = refusal("version = 1\n[cache\n")

    assert message.startswith("TOML: cannot be read: ")
    assert "line 2" in message


def test_a_name_that_no_key_can_hold_is_refused() -> None:
    message = refusal(f"version = 1\nmodel.name = '{'m' * 5000}'\ncache.blocks = 1")

    assert message == "model.name: is 5000 bytes long, must be at most 4096"


# Files.


def test_a_refusal_begins_with_the_file_it_is_about(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(HEAD + DEVICE + "block_token = 3", encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        load_config(path)

    assert caught.value.field == f"{path}: cache.block_token"
    assert caught.value.problem == "unknown; did you mean block_tokens?"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "missing.toml"

    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        load_config(path)


def test_a_file_may_begin_with_the_mark_that_some_editors_write(tmp_path: Path) -> None:
    path = tmp_path / "marked.toml"
    path.write_text('version = 1\nmodel.name = "m"\ncache.blocks = 8\n', encoding="utf-8-sig")

    assert load_config(path).model.name == "m"


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe")

    with pytest.raises(ConfigError, match="cannot be read: is not UTF-8 text"):
        load_config(path)


# Values that are built in Python.


def test_a_config_with_a_hash_nobody_knows_is_refused() -> None:
    config = parse_config(STARTER_TOML)

    with pytest.raises(ConfigError, match=r"^hash: is 'md5', must be one of sha256, xxh3_128$"):
        replace(config, hash="md5")


def test_a_config_needs_a_kind_for_each_tier() -> None:
    config = parse_config(STARTER_TOML)

    with pytest.raises(ConfigError, match="tier_kinds: has 0 entries for 1 tiers"):
        replace(config, tier_kinds=())


def test_a_config_calls_its_device_tier_device() -> None:
    config = parse_config(STARTER_TOML)
    cache = replace(config.cache, device=TierSettings(name="gpu", slot_count=8))

    with pytest.raises(ConfigError, match=r"cache\.device\.name: is 'gpu', must be 'device'"):
        replace(config, cache=cache)


def test_a_kind_of_tier_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="kind: is 'tape', must be one of memory"):
        TierKind(name="tape")


def test_a_kind_of_tier_has_its_own_options_and_no_others() -> None:
    with pytest.raises(ConfigError, match=r"options: are \['path'\], must be \[\] for kind"):
        TierKind(name="memory", options={"path": "x"})


# Printing.

shares = st.floats(0, 1)
watermarks = st.lists(st.floats(0, 0.99), min_size=2, max_size=2).map(sorted)
quotas = st.dictionaries(st.text(), shares, max_size=3)
words = st.text(max_size=20)


@st.composite
def tiers(draw: st.DrawFn, name: str) -> TierSettings:
    low, high = draw(watermarks)
    kinds = [WriteKind.WRITE_THROUGH, WriteKind.SELECTIVE, WriteKind.EXCLUSIVE]
    kind = draw(st.sampled_from(kinds))
    hits = draw(st.integers(1, 65_535)) if kind is WriteKind.SELECTIVE else WritePolicy().hits
    return TierSettings(
        name=name,
        slot_count=draw(st.integers(1, 2**31 - 1)),
        # The device ignores how blocks enter it, so a file does not say it.
        write=WritePolicy() if name == "device" else WritePolicy(kind=kind, hits=hits),
        eviction=draw(st.sampled_from(["lru", "adaptive"])),
        low_watermark=low,
        high_watermark=high,
        quotas=draw(quotas.filter(lambda shares: "*" not in shares)),
    )


@st.composite
def configs(draw: st.DrawFn) -> Config:
    below = tuple(draw(tiers(name)) for name in draw(st.sampled_from([["a"], ["a", "b-c_1"]])))
    model = ModelSettings(
        name=draw(st.text(min_size=1, max_size=20)),
        weights_version=draw(words),
        kv_dtype=draw(st.sampled_from(["", *DTYPE_NAMES])),
        kv_scales=draw(words),
        rotary=draw(words),
    )
    cache = CacheSettings(
        device=draw(st.none() | tiers("device")),
        tiers=below,
        block_tokens=draw(st.integers(1, 65_536)),
        rank_count=draw(st.integers(1, 4_096)),
        group_count=draw(st.integers(1, 256)),
        operation_timeout_s=draw(st.floats(0.001, 86_400)),
        operation_blocks_max=draw(st.integers(1, 65_536)),
        departed_count=draw(st.integers(1, 2**24)),
        story_count=draw(st.integers(1, 2**24)),
        event_count=draw(st.integers(1, 2**24)),
        pin_share=draw(shares),
    )
    return Config(
        model=model,
        cache=cache,
        hash=draw(st.sampled_from(["sha256", "xxh3_128"])),
        tier_kinds=tuple(TierKind(name="memory") for _ in below),
    )


@settings(derandomize=True, deadline=None)
@given(config=configs())
def test_what_is_printed_reads_back_equal(config: Config) -> None:
    assert parse_config(config.to_toml()) == config


@settings(derandomize=True, deadline=None)
@given(config=configs())
def test_a_config_travels_as_a_value(config: Config) -> None:
    class Spec(msgspec.Struct):
        config: Config

    frame = msgspec.msgpack.encode(Spec(config))

    assert Config.from_builtins(config.to_builtins()) == config
    assert msgspec.msgpack.decode(frame, type=Spec).config == config
    assert msgspec.json.decode(msgspec.json.encode(Spec(config)), type=Spec).config == config


def test_a_config_that_travelled_is_checked_where_it_arrives() -> None:
    tree = parse_config(STARTER_TOML).to_builtins()
    tree["cache"]["block_tokens"] = 0

    with pytest.raises(ConfigError, match="config: cannot be read: block_tokens: is 0, must be"):
        Config.from_builtins(tree)


def test_every_key_is_printed_with_the_value_in_effect() -> None:
    text = parse_config(HEAD + DEVICE + TIER + 'write = "selective"').to_toml()

    printed = set(re.findall(r"^(\w+) =", text, re.MULTILINE))
    assert printed == {"version", *KEYS["model"], *KEYS["cache"], *KEYS["tiers"]} - {"quotas"}


# The page.


def test_the_page_has_a_row_for_every_key_with_its_default() -> None:
    text = (Path(__file__).parent.parent / "docs" / "config.md").read_text(encoding="utf-8")
    page = completed(text)
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", page, re.MULTILINE)
    documented = {(name, default.strip("` ")) for name, default in rows}

    wanted = set()
    for keys in KEYS.values():
        for name, key in keys.items():
            default = f'"{key.default}"' if isinstance(key.default, str) else str(key.default)
            default = default.lower() if isinstance(key.default, bool) else default
            wanted.add((name, "required" if key.default is None else default))

    assert documented == wanted


def test_every_key_has_a_meaning() -> None:
    assert all(meaning_of(key) for keys in KEYS.values() for key in keys.values())


def test_the_command_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "keys"]) == 0

    printed = capsys.readouterr().out
    assert [table for table in KEYS if key_table(table) not in printed] == []
