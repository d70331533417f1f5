"""In a vLLM that the connector was not tested with it is off, and says so; vLLM starts."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from penstock.connectors.vllm.versions import is_tested
from tests.connectors.stub_vllm import make_vllm

if TYPE_CHECKING:
    from pathlib import Path

# As vLLM's factory does it: the class first, by its name, and an object of it then.
PROGRAM = """
import inspect
import logging
import pickle
import sys
from types import SimpleNamespace

import penstock.connectors.vllm as module
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA

logging.basicConfig(format="%(message)s", stream=sys.stdout)
transfer = SimpleNamespace(
    kv_connector_extra_config={"any_version": True} if "any_version" in sys.argv else {},
    kv_load_failure_policy="fail",
    kv_role="kv_both",
)
config = SimpleNamespace(kv_transfer_config=transfer)
made = getattr(module, "PenstockConnector")
print("CLASS", made.__module__)
assert "kv_cache_config" in inspect.signature(made).parameters
assert issubclass(made, SupportsHMA)
connector = made(config, KVConnectorRole[sys.argv[1]], object())
assert made.build_prom_metrics(config, {}, [], {}) is None
assert "penstock.connectors.vllm.adapter" not in sys.modules

assert connector.get_num_new_matched_tokens("request", 0) == (0, False)
connector.update_state_after_alloc("request", "blocks", 0)
pickle.loads(pickle.dumps(connector.build_connector_meta("output")))
connector.start_load_kv("context", more=1)
connector.wait_for_layer_load("layer")
connector.save_kv_layer("layer", "tensor", "metadata", more=1)
connector.wait_for_save()
assert connector.request_finished("request", [1]) == (False, None)
assert connector.request_finished_all_groups("request", ([1], [2])) == (False, None)
assert connector.reset_cache()
assert not connector.requires_kv_delivery
print("SERVED")
"""
EARLIER = """
from types import SimpleNamespace

from penstock.connectors.vllm import PenstockConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

transfer = SimpleNamespace(kv_connector_extra_config={})
config = SimpleNamespace(kv_transfer_config=transfer)
connector = PenstockConnector(config, KVConnectorRole.WORKER)
assert connector.get_num_new_matched_tokens("request", 0) == (0, False)
print("SERVED")
"""
FOUND = "this is vLLM 0.31.2, the connector is tested with 0.32 and 0.33"
OFF = f"Penstock is off, vLLM runs without it: {FOUND}; "
LACKING = "CacheHitSource"


def connect(folder: Path, *words: str) -> tuple[int, str]:
    """Has the connector made and called in a process that has this vLLM: all that was printed."""
    return run_with(folder, PROGRAM, *words)


def run_with(folder: Path, program: str, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_vllm_that_lacks_a_name_starts_without_penstock(tmp_path: Path) -> None:
    make_vllm(tmp_path, "0.31.2", without=LACKING)

    status, printed = connect(tmp_path, "SCHEDULER")

    assert status == 0, printed
    assert printed.count(OFF) == 1
    assert printed.endswith("SERVED\n")


def test_ranks_that_are_off_leave_it_to_the_scheduler_to_say_so(tmp_path: Path) -> None:
    make_vllm(tmp_path, "0.34.0", without=LACKING)

    status, printed = connect(tmp_path, "WORKER")

    assert status == 0, printed
    assert "Penstock is off" not in printed


def test_what_a_later_vllm_wants_of_every_connector_is_answered_with_nothing(
    tmp_path: Path,
) -> None:
    make_vllm(tmp_path, "0.31.2", wanted=("prepare_for_rain",))

    status, printed = connect(tmp_path, "SCHEDULER")

    assert status == 0, printed
    assert printed.count(OFF) == 1


def test_an_earlier_vllm_that_knows_no_kv_groups_starts_likewise(tmp_path: Path) -> None:
    make_vllm(tmp_path, "0.9.1", without="SupportsHMA", given="vllm_config, role")

    status, printed = run_with(tmp_path, EARLIER)

    assert (status, printed) == (0, "SERVED\n")


def test_any_version_makes_the_connector_itself(tmp_path: Path) -> None:
    make_vllm(tmp_path, "0.31.2")

    status, printed = connect(tmp_path, "SCHEDULER", "any_version")

    # It read its settings, and found what is wrong with these.
    assert status == 1
    assert "ConfigError: kv_load_failure_policy: is 'fail'" in printed
    assert "Penstock is off" not in printed


def test_any_version_says_which_name_is_missing(tmp_path: Path) -> None:
    make_vllm(tmp_path, "0.31.2", without=LACKING)

    status, printed = connect(tmp_path, "SCHEDULER", "any_version")

    assert status == 1
    assert f"UnavailableError: {FOUND}, and cannot run in this one: " in printed
    assert f"cannot import name '{LACKING}' from 'vllm." in printed


@pytest.mark.long
def test_any_version_says_which_method_is_missing(tmp_path: Path) -> None:
    make_vllm(tmp_path, "0.31.2", wanted=("prepare_for_rain",))

    status, printed = connect(tmp_path, "SCHEDULER", "any_version")

    assert status == 1
    assert f"{FOUND}, and cannot run in this one: it has no method prepare_for_rain" in printed


@pytest.mark.parametrize("version", ["0.31.2", "0.32.0"])
def test_a_vllm_without_the_base_of_connectors_is_named(tmp_path: Path, version: str) -> None:
    make_vllm(tmp_path, version, without="KVConnectorBase_V1")

    status, printed = connect(tmp_path, "SCHEDULER")

    assert status == 1
    said = f"UnavailableError: this is vLLM {version}, the connector is tested with 0.32 and 0.33, "
    assert f"{said}and cannot run in this one: cannot import name 'KVConnectorBase_V1'" in printed


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_a_tested_version_gets_the_connector(tmp_path: Path, version: str) -> None:
    make_vllm(tmp_path, version)

    _, printed = connect(tmp_path, "SCHEDULER")

    assert printed.startswith("CLASS penstock.connectors.vllm.adapter\n")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.2.dev7+gabc", "0.32", "0.33.0"])
def test_corrections_of_tested_versions_are_tested(version: str) -> None:
    assert is_tested(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.320.0", "1.32.0", "dev", ""])
def test_other_versions_are_not(version: str) -> None:
    assert not is_tested(version)
