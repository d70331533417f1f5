"""The secret salt: what keys depend on it, and that nothing tells it."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from penstock.config import Config, parse_config
from penstock.errors import ConfigError
from penstock.runtime.stored_tiers import space_name

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "9b1f4c0d7a2e8356f1c04b7d9e6a2358"


def config_with(salt: str, *, more: str = "") -> Config:
    return parse_config(
        f"version = 1\n[model]\nname = 'm'\n[cache]\nblocks = 8\nsalt = '{salt}'\n{more}"
    )


@pytest.fixture
def place(tmp_path: Path) -> str:
    file = tmp_path / "salt"
    file.write_text(f"{SECRET}\n")
    return f"file:{file}"


def keys_of(config: Config, tenant: str = "") -> list[bytes]:
    return config.key_chain(tenant=tenant).extend(range(64))


def test_a_tenants_part_of_the_namespace_is_derived_from_the_secret(place: str) -> None:
    message = b"\x10\0\0\0penstock.salt.v1\4\0\0\0acme"

    tenant = config_with(place).namespace(tenant="acme").tenant

    assert tenant == f"salted:{hmac.digest(SECRET.encode(), message, hashlib.sha256).hex()}"


def test_the_same_secret_gives_the_same_keys_wherever_it_lies(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALT_OF_THIS_TEST", SECRET)

    from_file, from_variable = config_with(place), config_with("env:SALT_OF_THIS_TEST")

    assert keys_of(from_file, "acme") == keys_of(from_variable, "acme")
    assert space_name(from_file) == space_name(from_variable)


def test_without_the_secret_no_key_can_be_computed(place: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("another secret of a good length")
    salted = config_with(place)
    guessing = [replace(salted, salt=""), config_with(f"file:{other}")]

    mine = set(keys_of(salted, "acme"))

    for config in guessing:
        assert not mine & set(keys_of(config, "acme"))
        assert space_name(config) != space_name(salted)
    assert not mine & set(keys_of(salted, "other"))
    assert not mine & set(keys_of(salted))


def test_the_secret_is_in_no_text_of_the_configuration(place: str) -> None:
    config = config_with(place)
    config.namespace()

    texts = (config.to_toml(), repr(config), str(config.to_builtins()))

    assert not any(SECRET in text for text in texts)
    assert all(place in text for text in texts)
    assert parse_config(config.to_toml()) == config


@pytest.mark.parametrize(
    "salt", [SECRET, "file:relative", "file:", "env:", "env:1", "env:A B", "vault:/x", "file:/\0"]
)
def test_a_salt_that_names_no_place_is_refused_and_not_shown(salt: str) -> None:
    with pytest.raises(ConfigError, match=r"^cache\.salt: is \d+ characters that") as refusal:
        replace(config_with("env:X"), salt=salt)

    right = '"file:/ABSOLUTE/PATH" or "env:NAME"'
    assert right in str(refusal.value)
    assert salt not in str(refusal.value).replace(right, "")


def test_a_salt_needs_a_cryptographic_hash() -> None:
    with pytest.raises(ConfigError, match=r"cache\.hash is 'xxh3_128', must be 'sha256'"):
        config_with("env:X", more="hash = 'xxh3_128'")


@pytest.mark.parametrize("content", ["", "too short", "x" * 4097])
def test_a_secret_of_a_wrong_length_is_refused_when_a_cache_is_opened(
    content: str, tmp_path: Path
) -> None:
    file = tmp_path / "salt"
    file.write_text(content)
    kv = np.zeros((8, 16, 4), dtype=np.float32)

    with pytest.raises(ConfigError, match=r"bytes are, must be from 16 to 4096") as refusal:
        penstock.open(config_with(f"file:{file}"), kv=kv)

    assert not content or content not in str(refusal.value)


def test_a_secret_that_is_not_there_is_refused_when_a_cache_is_opened(tmp_path: Path) -> None:
    kv = np.zeros((8, 16, 4), dtype=np.float32)

    with pytest.raises(ConfigError, match="nowhere', which cannot be read: No such file"):
        penstock.open(config_with(f"file:{tmp_path}/nowhere"), kv=kv)
    with pytest.raises(ConfigError, match="'env:SALT_THAT_NOBODY_SETS', a variable that is not"):
        penstock.open(config_with("env:SALT_THAT_NOBODY_SETS"), kv=kv)


def test_a_salted_cache_finds_what_it_has_computed_and_tenants_share_nothing(place: str) -> None:
    config = config_with(place, more="block_tokens = 4")
    kv = np.zeros((8, 4, 4), dtype=np.float32)

    with penstock.open(config, kv=kv) as cache:
        with cache.acquire(range(12), tenant="acme") as first:
            first.commit(range(12))
        with cache.acquire(range(12), tenant="acme") as again:
            cached_again = again.cached_tokens
        with cache.acquire(range(12), tenant="other") as other:
            cached_other = other.cached_tokens

    assert cached_again == 8
    assert cached_other == 0
