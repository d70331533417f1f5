"""A store process that an engine starts for itself, and that others may use."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.store.process.client import EmbeddedStore
from penstock.store.process.link import StoreBack, StoreLost
from penstock.store.process.sessions import StoreListener, connect_store
from penstock.transport.waiting import wait_readable
from tests.descriptors import open_descriptors
from tests.store.store_lab import PATIENCE_S, SPACE, StoreEngine, StoreProcess, is_readable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.store.process.messages import StoreConfig
    from tests.store.store_lab import MakeEngine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return StoreProcess(tmp_path / "store").config


@pytest.fixture
def make_engine(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    wanted = {"embedded": True, "module": "tests.store.memory_tier"}
    with ExitStack() as stack:
        yield lambda **wishes: stack.enter_context(
            closing(StoreEngine(config, **{**wanted, **wishes}))
        )


def pid_of(config: StoreConfig) -> int:
    """The process that listens now; 0 if none does."""
    connection = connect_store(Path(config.socket))
    if connection is None:
        return 0
    connection.channel.close()
    os.close(connection.pidfd)
    return connection.pid


def test_it_is_started_where_nobody_listens_and_ends_with_its_engine(
    config: StoreConfig, make_engine: MakeEngine
) -> None:
    engine = make_engine().up()
    engine.save([1])
    assert pid_of(config)

    engine.close()

    assert not pid_of(config)
    assert not Path(config.socket).exists()


def test_one_that_finds_another_process_serving_ends_without_a_warning(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two engines have lost a store process, and both start one."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with closing(StoreListener.open(Path(config.socket))):
        store = EmbeddedStore(config, "tests.store.memory_tier")
        store.start(time.monotonic())
        deadline = time.monotonic() + PATIENCE_S
        while store._runs or store._asked_at is not None:  # Until it has ended.
            assert wait_readable(store.descriptor, deadline)
            store.poll()
        store.close(time.monotonic() + PATIENCE_S)

    assert store.why == ""
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == []


def test_it_is_started_again_whenever_it_was_killed(
    config: StoreConfig, make_engine: MakeEngine
) -> None:
    engine = make_engine().up()
    for _ in range(2):
        killed = pid_of(config)
        os.kill(killed, signal.SIGKILL)
        engine.until(
            lambda: any(isinstance(each, StoreLost) and each.fenced for each in engine.results)
        )

        engine.take(StoreBack)
        engine.up()

        assert pid_of(config) not in {0, killed}
        engine.save([1])
        engine.load([1])
        assert engine.holds(32, 1)
        engine.results.clear()


def test_engines_that_start_at_once_share_one_process(
    config: StoreConfig, make_engine: MakeEngine
) -> None:
    engines = [make_engine(life=life) for life in (1, 2, 3)]

    for engine in engines:
        engine.up()

    engines[0].save([7])
    for engine in engines:
        engine.load([7])
        assert engine.holds(32, 7)
    assert pid_of(config)


def test_it_ends_with_the_engine_that_started_it_and_another_one_goes_on(
    config: StoreConfig, make_engine: MakeEngine
) -> None:
    first, second = make_engine(life=1).up(), make_engine(life=2).up()
    before = pid_of(config)

    first.close()

    second.take(StoreLost)
    second.take(StoreBack)
    second.up()
    assert pid_of(config) not in {0, before}
    second.save([1])


def test_an_engine_that_did_not_start_it_leaves_it_alone(
    config: StoreConfig, make_engine: MakeEngine
) -> None:
    first, second = make_engine(life=1).up(), make_engine(life=2).up()
    before = pid_of(config)

    second.close()

    assert pid_of(config) == before
    first.save([1])


def test_a_process_that_cannot_run_is_tried_again_and_the_reason_is_told(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(module="tests.store.no_such_module")

    engine.until(lambda: "no_such_module" in engine.load([1])[0].failure)

    assert not engine.link.is_up


def test_a_process_that_always_dies_is_started_less_and_less_often(
    config: StoreConfig, make_engine: MakeEngine
) -> None:
    dies = Path(config.socket).with_name("dies")
    dies.touch()
    engine = make_engine()
    engine.until(lambda: dies.stat().st_size >= 3)
    began, before = time.monotonic(), dies.stat().st_size

    engine.until(lambda: dies.stat().st_size >= before + 3)

    assert time.monotonic() - began >= 0.8 + 1.6  # The pause before the first may be over by now.
    dies.unlink()
    engine.up()


def supervisor_of(config: StoreConfig) -> int:
    stat = Path(f"/proc/{pid_of(config)}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def test_a_supervisor_that_was_killed_is_replaced_and_starts_the_store_again(
    config: StoreConfig, make_engine: MakeEngine
) -> None:
    engine = make_engine().up()
    for _ in range(2):
        killed = supervisor_of(config)
        os.kill(killed, signal.SIGKILL)
        engine.until(
            lambda: any(isinstance(each, StoreLost) and each.fenced for each in engine.results)
        )
        engine.results.clear()

        engine.up()

        assert supervisor_of(config) not in {1, killed}
        engine.save([1])
        engine.until(lambda: not is_readable(engine.link.descriptor))
        engine.results.clear()
    engine.close()
    assert not pid_of(config)


def test_a_process_whose_socket_was_removed_is_found_by_the_next_session(
    config: StoreConfig, make_engine: MakeEngine
) -> None:
    engine = make_engine().up()
    before = pid_of(config)
    shutil.rmtree(Path(config.socket).parent)

    engine.link.enter_space(bytes(len(SPACE)))
    engine.take(StoreLost)
    engine.take(StoreBack)

    assert pid_of(config) == before
    engine.save([1])


def test_a_process_that_nobody_is_connected_to_listens_again_where_its_socket_was(
    config: StoreConfig, make_engine: MakeEngine
) -> None:
    with closing(StoreProcess(Path(config.socket).parent)) as store:
        store.start()
        make_engine(embedded=False).up().close()
        shutil.rmtree(store.folder)

        make_engine(embedded=False).up()


def test_no_descriptor_is_left_and_no_call_waits(make_engine: MakeEngine) -> None:
    make_engine().up().close()
    before = open_descriptors()
    engine = make_engine()
    longest_s = 0.0

    def is_up() -> bool:
        nonlocal longest_s
        began = time.thread_time()
        engine.link.dispatch()
        engine.results += engine.link.collect()
        longest_s = max(longest_s, time.thread_time() - began)
        return engine.link.is_up

    engine.until(is_up, PATIENCE_S)
    engine.close()

    assert open_descriptors() <= before
    assert longest_s < 0.5
