"""Which data transport two engines use follows from where they are."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.extensions import DataTransport
from penstock.handoff import pair
from penstock.handoff.pair import choose_transport

HERE = ["ipc:///run/a", "tcp://127.0.0.1:5", "tcp://localhost:6"]
THERE = ["tcp://10.0.0.1:5", "tcp://10.0.0.2:5"]


@pytest.mark.parametrize(
    ("name", "addresses", "chosen"),
    [
        ("auto", HERE, "shared_memory"),
        ("auto", ["tcp://10.0.0.1:5", "tcp://10.0.0.1:6"], "shared_memory"),
        ("auto", THERE, "nixl"),
        ("auto", [*HERE, "tcp://10.0.0.1:5"], "nixl"),
        ("nixl", HERE, "nixl"),
        ("shared_memory", THERE, "shared_memory"),
    ],
)
def test_engines_on_one_machine_share_memory_and_others_use_nixl(
    name: str, addresses: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "is_installed", lambda: True)

    assert choose_transport(name, addresses) == chosen


@pytest.mark.parametrize(
    ("name", "addresses", "chosen"),
    [
        ("auto", HERE, "gpu"),
        ("auto", THERE, "nixl"),
        ("shared_memory", HERE, "shared_memory"),
        ("gpu", HERE, "gpu"),
    ],
)
def test_kv_on_gpus_of_one_machine_lands_in_their_memory_unless_told_otherwise(
    name: str, addresses: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "is_installed", lambda: True)

    assert choose_transport(name, addresses, on_gpu=True) == chosen


def test_engines_on_two_machines_without_nixl_are_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair, "is_installed", lambda: False)

    with pytest.raises(ConfigError) as refused:
        choose_transport("auto", THERE)

    assert str(refused.value) == (
        "transport: is 'auto', and the engines are on different machines (10.0.0.1, 10.0.0.2), "
        "which needs NIXL on each: "
        'pip install ".[nixl]" in a clone of the repository'
    )


def test_a_transport_has_one_way_to_connect() -> None:
    with pytest.raises(ValueError, match="one of connect and open_writer"):
        DataTransport(open_target=print)
