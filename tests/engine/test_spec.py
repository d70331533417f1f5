"""The specs that processes of an instance get."""

from __future__ import annotations

import os

import msgspec
import pytest

from penstock.config import STARTER_TOML, EngineTable, parse_config
from penstock_serve.engine.spec import (
    InstanceRole,
    InstanceSpec,
    RankSpec,
    read_sealed,
    sealed,
)

SECRET = b"a secret of thirty-two bytes, no"
SPEC = InstanceSpec(
    name="decode-0",
    engine=EngineTable(handoff_host="192.0.2.1"),
    config=parse_config(STARTER_TOML),
    server="ipc:///server",
    server_secret=SECRET,
    secret=SECRET,
    role=InstanceRole.DECODE,
    hands_over=True,
    handoff_secret=SECRET,
)
ABOVE = """
version = 1
model = { name = "example/model", weights_version = "1" }
[[tiers]]
name = "host"
kind = "host"
gib = 1
[[tiers]]
name = "shared"
"""
SHARED_TIERS = {
    "redis": 'kind = "redis"\nurl = "redis://192.0.2.1:6379"\ncluster = true',
    "mooncake": 'kind = "mooncake"\nmaster = "192.0.2.1:50051"',
    "objects": 'kind = "objects"\nurl = "s3://bucket/prefix"',
}


def test_a_printed_spec_shows_no_secret() -> None:
    printed = repr(RankSpec(instance=SPEC, rank=1))

    assert "a secret" not in printed
    assert printed.count("secret=<32 bytes>") == 3
    assert "name='decode-0'" in printed
    assert "handoff_host='192.0.2.1'" in printed


def test_a_spec_that_travels_keeps_its_secrets() -> None:
    fd = sealed(SPEC)
    try:
        assert read_sealed(str(fd), InstanceSpec) == SPEC
    finally:
        os.close(fd)


@pytest.mark.parametrize("kind", SHARED_TIERS)
def test_a_spec_with_a_shared_store_travels(kind: str) -> None:
    spec = msgspec.structs.replace(SPEC, config=parse_config(ABOVE + SHARED_TIERS[kind]))
    fd = sealed(spec)
    try:
        assert read_sealed(str(fd), InstanceSpec) == spec
    finally:
        os.close(fd)
