"""The processes of an instance, as the supervisor is asked to start them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.errors import UnavailableError
from penstock.supervisor.client import Supervisor
from penstock.supervisor.messages import OnFailure
from penstock_serve.server import processes
from penstock_serve.server.processes import WAIT_VARIABLES, Processes, processes_of
from tests.engine.test_spec import SPEC
from tests.serve.conftest import READY_S, STATE

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.errors import PenstockError
    from penstock_serve.engine.spec import InstanceSpec

TWO_RANKS = msgspec.structs.replace(SPEC, ranks=2)


@pytest.fixture(autouse=True)
def _without_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def environments(spec: InstanceSpec) -> list[dict[str, str]]:
    return [dict(process.environment) for process, _ in processes_of(spec)]


@pytest.mark.parametrize("spec", [SPEC, TWO_RANKS])
def test_threads_that_compute_together_wait_for_each_other_asleep(spec: InstanceSpec) -> None:
    assert {found["OMP_WAIT_POLICY"] for found in environments(spec)} == {"PASSIVE"}


@pytest.mark.parametrize("name", WAIT_VARIABLES)
def test_how_they_wait_is_left_to_a_user_who_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "ACTIVE")

    assert all("OMP_WAIT_POLICY" not in found for found in environments(TWO_RANKS))


@pytest.mark.parametrize(
    "ranks", [(), pytest.param(("--tp", "3"), marks=pytest.mark.long)], ids=["one rank", "three"]
)
def test_a_host_tier_that_does_not_fit_ends_the_command_with_one_line(
    model_folder: Path, ranks: tuple[str, ...]
) -> None:
    options = ("--model", str(model_folder), "--port", "0", "--host-gib", "4000", *ranks)

    ended = subprocess.run(
        [sys.executable, "-m", "penstock.cli.entry", "serve", *options, "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=READY_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": STATE.name},
    )

    assert ended.returncode == 2, ended.stderr
    *before, last = ended.stderr.splitlines()
    assert last.startswith("penstock: tiers[0].gib: is 4000.0, needs ")
    # With several ranks, those that are left log that they lost one.
    assert not before if not ranks else "Traceback" not in ended.stderr


def test_the_limit_of_restarts_holds_for_instances_that_take_long_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window that each start outlasts, as one of minutes would that of a large model."""
    restart = OnFailure(limit=2, window_s=0.000001, delay_s=0.0, delay_max_s=0.0)
    monkeypatch.setattr(processes, "RESTART", restart)
    # It does not understand what an instance is started with, and ends.
    monkeypatch.setattr(processes, "INSTANCE_MODULE", "json.tool")

    async def end(supervisor: Supervisor) -> PenstockError:
        found = Processes(supervisor, [msgspec.structs.replace(SPEC, name="instance-0")])
        found.start("ipc:///nowhere", b"secret")
        try:
            return await asyncio.wait_for(found.failed, READY_S)
        finally:
            found.stop()

    with Supervisor.start() as supervisor:
        why = asyncio.run(end(supervisor))

    assert isinstance(why, UnavailableError)
    assert str(why) == (
        "process 'instance-0' ended 3 times before it was ready; no instance is left"
    )
