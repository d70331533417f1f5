"""The processes of an instance, as the supervisor is asked to start them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.serve.processes import WAIT_VARIABLES, processes_of
from tests.engine.test_spec import SPEC

if TYPE_CHECKING:
    from penstock.engine.spec import InstanceSpec

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
