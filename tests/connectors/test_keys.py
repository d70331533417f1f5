"""From a request to keys: everything that decides its KV is in them, each in its own place."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.connectors.base.keys import (
    CHAINS_KEPT,
    Drafts,
    KeyChains,
    RequestKeys,
    read_options,
    tenant_of,
)
from penstock.vocabulary.hints import RetentionHints
from tests.connectors.conftest import FakeRequest

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = penstock.parse_config(
    'version = 1\nmodel.name = "toy"\n[cache]\nblock_tokens = 4\n'
    '[[tiers]]\nname = "host"\nkind = "memory"\nblocks = 8'
)
CHAINS = KeyChains(CONFIG)
TOKENS = list(range(50, 63))


def keys_of(request: Any) -> list[bytes]:
    return list(RequestKeys(CHAINS, request).upto(100))


def lora(name: str, path: str) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=1)


def image(identifier: str, offset: int, modality: str = "image") -> Any:
    return SimpleNamespace(
        modality=modality,
        identifier=identifier,
        mm_position=SimpleNamespace(offset=offset, length=2),
    )


def test_the_same_request_has_the_same_keys() -> None:
    assert keys_of(FakeRequest("a", TOKENS)) == keys_of(FakeRequest("b", TOKENS))
    assert len(keys_of(FakeRequest("a", TOKENS))) == 3


def test_keys_come_as_tokens_become_known() -> None:
    request = FakeRequest("a", TOKENS[:6])
    keys = RequestKeys(CHAINS, request)

    assert len(keys.upto(100)) == 1
    request.all_token_ids += TOKENS[6:]
    assert keys.upto(100) == keys_of(FakeRequest("b", TOKENS))


def test_no_token_is_hashed_twice() -> None:
    class Once(list[int]):
        asked = 0

        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            Once.asked += len(found)
            return found

    request = FakeRequest("a", TOKENS)
    request.all_token_ids = Once(TOKENS)
    keys = RequestKeys(CHAINS, request)

    for count in (1, 2, 3, 3):
        keys.upto(count)

    assert Once.asked == len(TOKENS)


def drafted_keys(request: Any, *, name: str = "eagle:a", ahead: int = 1) -> list[bytes]:
    chains = KeyChains(CONFIG, drafts=Drafts(name=name, ahead=ahead))
    return list(RequestKeys(chains, request).upto(100))


def test_with_layers_that_draft_a_key_names_the_tokens_behind_its_block() -> None:
    request = FakeRequest("a", TOKENS)
    other = FakeRequest("a", [*TOKENS[:8], 7, *TOKENS[9:]])

    keys = drafted_keys(request)

    assert len(keys) == 3
    assert not {*keys} & {*keys_of(request)}
    # The second block is followed by another token; all of the first, and what follows, is equal.
    assert [a == b for a, b in zip(keys, drafted_keys(other), strict=True)] == [True, False, False]
    assert not {*keys} & {*drafted_keys(request, name="eagle:b")}
    assert len({keys[0], drafted_keys(request, ahead=0)[0], drafted_keys(request, ahead=2)[0]}) == 3


def test_with_layers_that_draft_a_key_comes_with_the_tokens_behind_its_block() -> None:
    request = FakeRequest("a", TOKENS[:8])
    chains = KeyChains(CONFIG, drafts=Drafts(name="mtp", ahead=2))
    keys = RequestKeys(chains, request)
    counts = []

    for token in [*TOKENS[8:], 1]:
        counts.append(len(keys.upto(100)))
        request.all_token_ids.append(token)

    assert counts == [1, 1, 2, 2, 2, 2]
    assert len(keys.upto(100)) == 3
    assert keys.upto(100) == list(RequestKeys(chains, request).upto(100))


def test_with_layers_that_draft_an_image_behind_a_block_is_in_its_key() -> None:
    plain = drafted_keys(FakeRequest("a", TOKENS))
    found = [drafted_keys(FakeRequest("a", TOKENS, mm_features=[image(name, 4)])) for name in "xy"]

    assert len({plain[0], found[0][0], found[1][0]}) == 3


def test_a_salt_is_not_an_adapter() -> None:
    """vLLM mixes the two in one list of extra keys."""
    plain = keys_of(FakeRequest("a", TOKENS))
    salted = keys_of(FakeRequest("a", TOKENS, cache_salt="x"))
    adapted = keys_of(FakeRequest("a", TOKENS, lora_request=lora("x", "")))

    assert len({plain[0], salted[0], adapted[0]}) == 3


def test_a_name_given_to_another_adapter_is_another_adapter() -> None:
    one = keys_of(FakeRequest("a", TOKENS, lora_request=lora("x", "/one")))
    two = keys_of(FakeRequest("a", TOKENS, lora_request=lora("x", "/two")))
    moved = keys_of(FakeRequest("a", TOKENS, lora_request=lora("x:", "/one")))

    assert len({one[0], two[0], moved[0]}) == 3


def keys_after_a_restart(request: Any) -> bytes:
    """The first key of a request in an engine that was just started, with a disk."""
    text = CONFIG.to_toml().replace('kind = "memory"', 'kind = "host"')
    disk = '\n[[tiers]]\nname = "disk"\nkind = "disk"\npath = "/nowhere"\ngib = 1\n'
    config = penstock.parse_config(text + disk)
    model = replace(config.model, weights_version="v1")
    return RequestKeys(KeyChains(replace(config, model=model)), request).upto(1)[0]


def test_an_adapter_whose_files_were_replaced_has_other_keys_after_a_restart(
    tmp_path: Path,
) -> None:
    """The engine before may have left blocks of the old adapter on a disk."""
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"old")
    os.utime(weights, ns=(1, 1))
    request = FakeRequest("a", TOKENS, lora_request=lora("x", str(tmp_path)))
    before, unchanged = keys_after_a_restart(request), keys_after_a_restart(request)
    weights.write_bytes(b"new")
    os.utime(weights, ns=(2, 2))

    assert before == unchanged
    assert keys_after_a_restart(request) != before


def test_an_adapter_without_a_folder_of_files_is_found_in_one_engine_only() -> None:
    request = FakeRequest("a", TOKENS, lora_request=lora("x", "someone/adapter"))

    assert keys_after_a_restart(request) != keys_after_a_restart(request)
    assert keys_of(request) == keys_of(request)


@pytest.mark.parametrize("salt", ["x" * 100_000, "\ud800", "a\x00b"])
def test_any_salt_a_client_sends_makes_keys(salt: str) -> None:
    assert keys_of(FakeRequest("a", TOKENS, cache_salt=salt)) != keys_of(
        FakeRequest("a", TOKENS, cache_salt=salt + "y")
    )


def test_media_count_from_the_block_they_begin_in() -> None:
    plain = keys_of(FakeRequest("a", TOKENS))
    one = keys_of(FakeRequest("a", TOKENS, mm_features=[image("i", 5)]))
    other = keys_of(FakeRequest("a", TOKENS, mm_features=[image("j", 5)]))
    later = keys_of(FakeRequest("a", TOKENS, mm_features=[image("i", 6)]))
    sound = keys_of(FakeRequest("a", TOKENS, mm_features=[image("i", 5, "audio")]))

    assert plain[0] == one[0] == other[0] == later[0]
    assert len({keys[1] for keys in (plain, one, other, later, sound)}) == 5


def test_media_in_any_order_are_taken_by_position() -> None:
    there, here = image("i", 9), image("j", 1)

    assert keys_of(FakeRequest("a", TOKENS, mm_features=[there, here])) == keys_of(
        FakeRequest("a", TOKENS, mm_features=[here, there])
    )


@pytest.mark.parametrize(
    ("how", "load", "save"),
    [
        ({}, True, True),
        ({"prompt_embeds": object()}, False, False),
        ({"resumable": True}, False, False),
        ({"skip_reading_prefix_cache": True}, False, True),
        ({"kv_transfer_params": {"penstock": False}}, False, False),
        ({"kv_transfer_params": {"penstock": {"load": False}}}, False, True),
        ({"kv_transfer_params": {"penstock": {"save": False}}}, True, False),
        ({"kv_transfer_params": {"other": 1}}, True, True),
        ({"kv_transfer_params": {}}, True, True),
        ({"kv_transfer_params": {"penstock": True}}, True, True),
        ({"kv_transfer_params": {"penstock": {}}}, True, True),
        ({"kv_transfer_params": {"penstock": {"load": True, "save": True}}}, True, True),
        ({"kv_transfer_params": {"penstock": {"load": False, "save": False}}}, False, False),
    ],
)
def test_a_request_may_stay_out(how: dict[str, Any], *, load: bool, save: bool) -> None:
    options = read_options(FakeRequest("a", TOKENS, **how))

    assert (options.load, options.save) == (load, save)
    assert not options.error


def test_a_salt_is_a_tenant_where_a_quota_names_it_or_is_for_everybody() -> None:
    def tenants(quotas: dict[str, float]) -> list[str]:
        salts = ("acme", "another", None, "x" * 1000)
        return [tenant_of(FakeRequest("a", [1], cache_salt=salt), quotas) for salt in salts]

    assert tenants({}) == ["", "", "", ""]
    assert tenants({"acme": 0.5}) == ["acme", "", "", ""]
    acme, another, nobody, long = tenants({"acme": 0.5, "*": 0.1})
    assert (acme, another, nobody) == ("acme", "salt:another", "")
    # A client may choose a salt of a megabyte, or one that looks like another's name.
    assert long.startswith("salt-sha256:")
    assert len(long) < 100


@pytest.mark.parametrize("name", ["over", "keep_tokens", "ttl_s", "priority"])
@pytest.mark.parametrize(
    "value", [-101, 10**400, math.nan, math.inf, "", "x" * (1 << 20), "\ud800", [], {}]
)
def test_a_hostile_hint_keeps_its_request_out_and_says_so_shortly(name: str, value: object) -> None:
    options = read_options(FakeRequest("a", [1], kv_transfer_params={"penstock": {name: value}}))

    assert not options.load
    assert not options.save
    assert options.error.startswith(f"kv_transfer_params.penstock.{name} is ")
    assert len(options.error) < 300


def test_a_request_may_have_hints() -> None:
    hints = {"over": True, "ttl_s": 30, "priority": 5}
    told = {"kv_transfer_params": {"penstock": {"save": False, **hints}}}

    options = read_options(FakeRequest("a", TOKENS, **told))

    assert (options.load, options.save) == (True, False)
    assert options.hints == RetentionHints(priority=5, ttl_s=30.0, keep_tokens=0)


def nested(depth: int) -> list[object]:
    """As deep as a client can make it."""
    inner: list[object] = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"penstock": {"save": "false"}}, "kv_transfer_params.penstock.save is 'false', must be"),
        ({"penstock": {"save": 0}}, "penstock.save is 0, must be true or false"),
        ({"penstock": {"save": None}}, "penstock.save is None, must be true or false"),
        ({"penstock": {"load": 1.0}}, "penstock.load is 1.0, must be true or false"),
        ({"penstock": {"Save": False}}, "penstock['Save'] is False, must be left out"),
        ({"penstock": {"save": False, "store": True}}, "penstock['store'] is True"),
        ({"penstock": {"save ": False}}, "penstock['save '] is False"),
        ({"penstock": {1: False}}, "penstock[1] is False"),
        ({"penstock": {"ttl_s": -1}}, "kv_transfer_params.penstock.ttl_s is -1, must be a number"),
        ({"penstock": {"over": 1}}, "kv_transfer_params.penstock.over is 1, must be true or false"),
        ({"penstock": "false"}, "kv_transfer_params.penstock is 'false', must be true, false"),
        ({"penstock": 0}, "kv_transfer_params.penstock is 0"),
        ({"penstock": None}, "kv_transfer_params.penstock is None"),
        ({"penstock": []}, "kv_transfer_params.penstock is []"),
        ({"penstock": ["save"]}, "kv_transfer_params.penstock is ['save']"),
        ({"Penstock": False}, "kv_transfer_params['Penstock'] is False, must be under the key"),
        ({" penstock": False}, "kv_transfer_params[' penstock'] is False"),
        ({"penstock.save": False}, "kv_transfer_params['penstock.save'] is False"),
        ({"save": False}, "kv_transfer_params['save'] is False"),
        ({"penstock": True, "SAVE": False}, "kv_transfer_params['SAVE'] is False"),
        ([], "kv_transfer_params is [], must be an object"),
        (0, "kv_transfer_params is 0, must be an object"),
        (False, "kv_transfer_params is False, must be an object"),
        ("", "kv_transfer_params is '', must be an object"),
        ("penstock", "kv_transfer_params is 'penstock', must be an object"),
        ({"penstock": nested(1_000)}, "kv_transfer_params.penstock is [[[["),
        ({"penstock": {"x" * 10**6: False}}, "kv_transfer_params.penstock['xxxx"),
        ({"penstock": "line\nbreak"}, "kv_transfer_params.penstock is 'line\\nbreak'"),
    ],
)
def test_what_is_not_exactly_right_keeps_a_request_out(parameters: Any, said: str) -> None:
    options = read_options(FakeRequest("a", TOKENS, kv_transfer_params=parameters))

    assert (options.load, options.save) == (False, False)
    assert said in options.error
    assert len(options.error) < 300
    assert "\n" not in options.error


def test_a_prompt_of_embeddings_with_wrong_parameters_is_reported_as_well() -> None:
    how = {"prompt_embeds": object(), "kv_transfer_params": {"penstock": None}}

    options = read_options(FakeRequest("a", TOKENS, **how))

    assert (options.load, options.save) == (False, False)
    assert options.error


def test_chains_of_many_salts_are_bounded_and_the_same_again() -> None:
    chains = KeyChains(CONFIG)

    def keys(salt: str) -> list[bytes]:
        request = FakeRequest("one", range(16), cache_salt=salt)
        return list(RequestKeys(chains, request).upto(4))

    first = keys("salt 0")
    others = [keys(f"salt {number}") for number in range(1, CHAINS_KEPT + 5)]

    assert keys("salt 0") == first
    assert first not in others
    assert len(chains._empty) == CHAINS_KEPT
