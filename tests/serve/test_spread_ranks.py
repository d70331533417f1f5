"""Options of an instance whose ranks are on several machines, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import ConfigError, UnavailableError
from penstock.transport.machine_keys import MachineKeys
from penstock_serve.server.plan import ServeOptions, instances_of, serves_http, settle
from penstock_serve.server.processes import processes_of

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.config import Config

AT = "tcp://10.0.0.1:7300"


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    keys = MachineKeys.new()
    keys.with_peer("10.0.0.1", keys.public).write(tmp_path / "machine.keys")
    return str(tmp_path / "machine.keys")


def settled(model: Path, **wishes: Any) -> Config:
    return settle(None, ServeOptions(model=str(model), **{"tp": 3, "ranks_at": AT, **wishes}))


@pytest.mark.parametrize(
    ("role", "here", "started"),
    [
        ("both", "0", ["instance-4-rank-0", "instance-4"]),
        ("rank", "1-2", ["instance-4-rank-1", "instance-4-rank-2"]),
    ],
)
def test_a_command_starts_its_own_ranks(
    model_folder: Path, keys_file: str, role: str, here: str, started: list[str]
) -> None:
    config = settled(model_folder, role=role, ranks_here=here, number=4, keys_file=keys_file)

    [spec] = instances_of(config)

    assert [process.name for process, _ in processes_of(spec)] == started
    assert (spec.scheduler, spec.rank_host, spec.ranks) == (AT, "10.0.0.1", 3)


def test_only_the_command_with_the_scheduler_serves_http(model_folder: Path) -> None:
    found = {
        role: serves_http(None, ServeOptions(model=str(model_folder), role=role, ranks_at=AT))
        for role in ("both", "rank")
    }

    assert found == {"both": True, "rank": False}


@pytest.mark.parametrize(
    ("wishes", "problem"),
    [
        ({"ranks_here": ""}, "engine.ranks_here: is '' with engine.ranks_at"),
        ({"ranks_here": "2-1"}, "engine.ranks_here: is '2-1', must be a rank or the first and"),
        ({"ranks_here": "some"}, "engine.ranks_here: is 'some', must be a rank or the first and"),
        ({"ranks_here": "3"}, "engine.ranks_here: is '3', must be of the ranks 0 to 2"),
        ({"tp": 1, "ranks_here": "0"}, "must be at least 2"),
        (
            {"ranks_at": "10.0.0.1", "ranks_here": "0"},
            "engine.ranks_at: is '10.0.0.1', must be tcp",
        ),
        ({"ranks_at": "", "role": "rank"}, "engine.ranks_at: is '', must be where the instance"),
        ({"ranks_here": "0", "device": "cuda"}, "engine.device: is 'cuda', must be 'cpu'"),
        ({"ranks_here": "0", "instances": 2}, "serve.instances: is 2, must be 1"),
        ({"ranks_here": "0", "prefill_tp": 1}, "engine.ranks_at: .* must be '' for prefill"),
        (
            {"ranks_here": "0", "handoff_host": "10.0.0.1"},
            "engine.handoff_host: is '10.0.0.1', must",
        ),
        ({"ranks_here": "0", "disk": "/tmp/d", "disk_gib": 1.0}, "tiers: has kind 'disk'"),
        ({"ranks_here": "0", "keys_file": ""}, "serve.keys_file: is '', must be a file with the"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    model_folder: Path, keys_file: str, wishes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        settled(model_folder, **{"keys_file": keys_file, **wishes})


def test_a_machine_must_know_by_which_host_it_is_dialled() -> None:
    keys = MachineKeys.new()

    with pytest.raises(UnavailableError, match=r"is listed for \[\], must be listed for one host"):
        _ = keys.own_host
    assert keys.with_peer("10.0.0.9", keys.public).own_host == "10.0.0.9"
