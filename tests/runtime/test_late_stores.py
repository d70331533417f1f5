"""A store process, or the supervisor that starts it, that comes late: the disk comes on with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.runtime.stored_engine import (
    SOON_S,
    Engine,
    all_but_the_last_block,
    on_disk,
    prompt,
    store_pid,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.machine.statistics import TierStatistics


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Engine]:
    return lambda **given: Engine(tmp_path / "disk", **given)


@pytest.fixture
def let_supervisors_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], object]]:
    """Supervisors of this test do not begin before this is called."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'penstock.supervisor' in sys.orig_argv:\n"
        f"    open({str(gate)!r}, 'rb', buffering=0).read(1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    opener = os.open(gate, os.O_RDWR)
    yield lambda: os.write(opener, bytes(64))
    os.close(opener)


def disk(engine: Engine) -> TierStatistics:
    return engine.cache.statistics().tiers[-1]


def test_a_cache_is_opened_at_once_and_its_disk_comes_on_with_a_supervisor_that_is_late(
    opened: Callable[..., Engine], let_supervisors_begin: Callable[[], object]
) -> None:
    with opened() as engine:
        engine.cache.step()
        assert engine.cache.health().reasons == ("tier disk is off: the store process is starting",)
        assert engine.answer(prompt(1)) == 0

        let_supervisors_begin()

        engine.wait_until_on()
        engine.save(prompt(2))
        engine.run_until(lambda: on_disk(engine) >= 8)


def test_a_disk_comes_on_although_no_supervisor_could_be_started_at_first(
    opened: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with opened() as engine:
        engine.run_until(lambda: "cannot be started: No such" in engine.cache.health().reasons[0])
        monkeypatch.undo()

        engine.wait_until_on()
        engine.save(prompt(1))
        engine.run_until(lambda: on_disk(engine) == 8)


def test_a_supervisor_that_never_answers_is_replaced(
    opened: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import signal; signal.pause()")
    monkeypatch.setattr("penstock.supervisor.client.EMBEDDED_ANSWER_S", 0.2)
    with monkeypatch.context() as late:
        late.setenv("PYTHONPATH", str(tmp_path))
        engine = opened()
    with engine:
        engine.cache.step()  # Asks the one that hangs; the next one begins as usual.

        engine.wait_until_on()


def test_a_cache_whose_supervisor_has_not_begun_is_closed_at_once(
    opened: Callable[..., Engine],
    let_supervisors_begin: Callable[[], object],  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.runtime.driver.STORE_CLOSE_S", 2 * SOON_S)
    with opened() as engine:
        engine.cache.step()
        began = time.monotonic()

        engine.cache.close()

        assert time.monotonic() - began < SOON_S  # And not what a store process may take.


def test_what_is_computed_right_after_open_is_on_the_disk_soon(
    opened: Callable[..., Engine],
) -> None:
    with opened() as engine:
        for number in range(4):  # 32 blocks; host memory holds 16.
            engine.save(prompt(number))

        engine.wait_until_on()
        engine.run_until(lambda: on_disk(engine) + disk(engine).saves_dropped >= 32)

        engine.run_until(lambda: not engine.cache.busy)
        assert disk(engine).saves_waiting == 0
        engine.cache.audit()


def test_what_left_host_memory_while_the_disk_was_away_is_counted(
    opened: Callable[..., Engine], let_supervisors_begin: Callable[[], object]
) -> None:
    with opened() as engine:
        for number in range(4):
            engine.save(prompt(number))
        assert (disk(engine).saves_waiting, disk(engine).saves_dropped) == (16, 16)

        let_supervisors_begin()

        assert engine.cache.wait_for_tiers(SOON_S)
        engine.run_until(lambda: on_disk(engine) == 16)
        status = engine.cache.store_status()
        assert status is not None
        assert status.saves_dropped == 16


def test_a_disk_that_was_killed_gets_what_it_missed_and_the_next_cache_finds_it(
    opened: Callable[..., Engine],
) -> None:
    with opened() as engine:
        assert engine.cache.wait_for_tiers(SOON_S)
        os.kill(store_pid(engine), signal.SIGKILL)
        engine.run_until(lambda: not engine.cache.health().ok)
        for number in range(2):
            engine.save(prompt(number))

        assert engine.cache.wait_for_tiers(SOON_S)
        engine.run_until(lambda: on_disk(engine) == 16)
    with opened(wait_for_tiers_s=SOON_S) as engine:
        assert on_disk(engine) == 16
        for number in range(2):
            assert engine.answer(prompt(number)) == all_but_the_last_block(prompt(number))


def test_waiting_for_tiers_ends_in_time_and_the_cache_works_without_them(
    opened: Callable[..., Engine], tmp_path: Path
) -> None:
    (tmp_path / "disk").symlink_to(tmp_path / "nowhere")
    with opened(wait_for_tiers_s=0.05) as engine:
        assert not engine.cache.wait_for_tiers(0)
        assert engine.save(prompt(1)) == 0


def test_a_time_to_wait_for_tiers_that_is_none_is_refused(opened: Callable[..., Engine]) -> None:
    with pytest.raises(ValueError, match="wait_for_tiers_s is -1"):
        opened(wait_for_tiers_s=-1)
