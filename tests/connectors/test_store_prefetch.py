"""A disk below the host memory of a connector: a real store process, but no vLLM."""

from __future__ import annotations

import os
import shutil
import signal
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache.explain import Miss, MissReason
from penstock.connectors.base.keys import AnnouncedBlock, EventAnnouncer, Medium, StoredEvent
from penstock.connectors.base.requests import (
    START_S,
    WAIT_S,
    StorePrefetch,
    StoreWait,
)
from penstock.connectors.base.statistics import TransferCounts
from penstock.machine.effects import Found
from penstock.machine.statistics import HubCounts
from penstock.runtime.stored_tiers import StoreStatus
from tests.connectors.conftest import Clock, FakeEngine, FakeRequest
from tests.runtime.stored_engine import SOON_S, process_of
from tests.stopped import stop_process

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 4
PROMPT = list(range(100, 126))  # six blocks and two tokens
OTHER = list(range(500, 526))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines wait for a store as long as it takes: a busy machine is no failure."""
    monkeypatch.setattr("penstock.store.process.link.SILENT_S", SOON_S)


def make_engine(**wishes: Any) -> FakeEngine:
    return FakeEngine(**{"counts": TransferCounts(clock=Clock()), **wishes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("left") / "disk"
    with pytest.MonkeyPatch.context() as patch, closing(FakeEngine(disk=folder)) as engine:
        patch.setattr("penstock.store.process.link.SILENT_S", SOON_S)
        start(engine)
        engine.run(FakeRequest("first", PROMPT))
    return folder


@pytest.fixture
def filled(left: Path, folder: Path) -> Path:
    """A folder with the blocks of a prompt, which an engine has left."""
    shutil.copytree(left, folder, ignore=shutil.ignore_patterns("socket"))
    return folder


def start(engine: Any) -> None:
    engine.run_until(lambda: engine.offload.health().ok and not engine.scheduler.pending)


def test_what_an_engine_has_computed_the_next_one_loads_from_the_disk(filled: Path) -> None:
    again = FakeRequest("again", PROMPT)
    with closing(make_engine(disk=filled)) as engine:
        start(engine)
        first_answer = engine.scheduler.find_tokens(again, 0)
        engine.run_until(lambda: engine.scheduler.find_tokens(again, 0) is not None)
        matched = engine.scheduler.find_tokens(again, 0)
        (row,) = engine.allocate(again, 7)
        engine.scheduler.start_load(again, [row], matched)
        engine.run_until(lambda: not engine.scheduler.pending)
        counted = engine.scheduler.take_statistics()

    assert first_answer is None
    assert matched == 24
    expected = np.array(PROMPT[:24]).reshape(6, TOKENS)
    assert (engine.kv[0, row[:6], :, 0] == expected).all()
    assert counted["disk_blocks_loaded"] == 6
    assert counted["disk_on"] == 1
    assert counted["disk_blocks"] == 6
    assert len(counted["disk_wait_seconds"]) == 1


def test_a_queued_request_finds_its_blocks_in_host_memory_when_it_is_its_turn(filled: Path) -> None:
    again = FakeRequest("again", PROMPT)
    with closing(make_engine(disk=filled)) as engine:
        start(engine)
        engine.scheduler.expect_request(again, lambda: 0)
        engine.run_until(lambda: not engine.offload.busy)

        assert engine.scheduler.find_tokens(again, 0) == 24
        assert "disk_wait_seconds" not in engine.scheduler.take_statistics()


def test_what_the_engine_has_on_its_device_is_not_brought_up(filled: Path) -> None:
    again = FakeRequest("again", PROMPT)
    with closing(make_engine(disk=filled)) as engine:
        start(engine)
        engine.scheduler.expect_request(again, lambda: 24)

        assert not engine.offload.busy
        assert engine.scheduler.find_tokens(again, 24) == 0


def test_requests_that_share_a_prefix_wait_for_one_copy_of_it(filled: Path) -> None:
    requests = [FakeRequest(name, PROMPT) for name in ("one", "two")]
    with closing(make_engine(disk=filled)) as engine:
        start(engine)
        first = [engine.scheduler.find_tokens(each, 0) for each in requests]
        engine.run_until(lambda: engine.scheduler.find_tokens(requests[0], 0) is not None)
        then = [engine.scheduler.find_tokens(each, 0) for each in requests]
        engine.step()
        counted = engine.scheduler.take_statistics()

    assert first == [None, None]
    assert then == [24, 24]
    assert counted["disk_blocks_loaded"] == 6


def test_a_prompt_that_nobody_has_computed_does_not_wait(filled: Path) -> None:
    with closing(make_engine(disk=filled)) as engine:
        start(engine)

        assert engine.scheduler.find_tokens(FakeRequest("new", OTHER), 0) == 0


def test_a_store_that_does_not_answer_delays_a_request_for_a_bounded_time(filled: Path) -> None:
    clock = Clock()
    again = FakeRequest("again", PROMPT)
    with closing(make_engine(disk=filled, counts=TransferCounts(clock=clock))) as engine:
        start(engine)
        store = process_of(filled)
        stop_process(store)
        try:
            deferred = engine.scheduler.find_tokens(again, 0)
            engine.step()
            clock.now += WAIT_S - 0.01
            still_deferred = engine.scheduler.find_tokens(again, 0)
            clock.now += 0.02
            given_up = engine.scheduler.find_tokens(again, 0)
        finally:
            os.kill(store, signal.SIGCONT)
        engine.run_until(lambda: not engine.offload.busy)
        waited = engine.scheduler.take_statistics()["disk_wait_seconds"]

    assert deferred is None
    assert still_deferred is None
    assert given_up == 0
    assert waited == [pytest.approx(WAIT_S + 0.01)]


def test_a_killed_store_delays_nobody_and_comes_again(filled: Path) -> None:
    with closing(make_engine(disk=filled)) as engine:
        start(engine)
        os.kill(process_of(filled), signal.SIGKILL)
        engine.run_until(lambda: not engine.offload.health().ok)
        without = engine.scheduler.find_tokens(FakeRequest("without", PROMPT), 0)
        steps_on = engine.scheduler.pending
        engine.run(FakeRequest("computed", OTHER))

        engine.run_until(lambda: engine.offload.health().ok)
        again = FakeRequest("again", PROMPT)
        engine.run_until(lambda: engine.scheduler.find_tokens(again, 0) is not None)

        assert without == 0
        assert steps_on
        assert engine.scheduler.find_tokens(again, 0) == 24
        engine.run_until(lambda: not engine.scheduler.pending)


def test_an_engine_without_work_does_not_step_for_ever_for_a_disk_that_cannot_come(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("not a folder")
    clock = Clock()
    counts = TransferCounts(clock=clock)
    with closing(make_engine(disk=tmp_path / "file" / "disk", counts=counts)) as engine:
        early = FakeRequest("early", PROMPT)
        waits = engine.scheduler.find_tokens(early, 0)
        steps = engine.scheduler.pending
        clock.now += WAIT_S
        computes = engine.scheduler.find_tokens(early, 0)
        clock.now += START_S
        late = engine.scheduler.find_tokens(FakeRequest("late", PROMPT), 0)

        assert waits is None
        assert steps
        assert computes == 0
        assert late == 0
        assert not engine.scheduler.pending
        assert "disk" in engine.offload.health().reasons[0]


def test_without_a_weights_version_nothing_is_persisted_and_the_log_says_so_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(make_engine(disk=folder, weights="")) as engine:
        engine.run(FakeRequest("first", PROMPT))

        assert engine.scheduler.find_tokens(FakeRequest("again", PROMPT), 0) == 24
        assert "weights_version" in engine.offload.health().reasons[0]
    assert not folder.exists()
    assert caplog.text.count("model.weights_version is not given") == 1


def announcer_of_both() -> EventAnnouncer:
    return EventAnnouncer(
        {"host": Medium("CPU", "LOCAL"), "disk": Medium("STORAGE", "LOCAL")},
        describe=lambda request, number: AnnouncedBlock(
            hash=bytes([number]), parent=None, tokens=array("I", request.all_token_ids[:1])
        ),
    )


def announced(announcer: EventAnnouncer) -> dict[str, list[int]]:
    """The numbers of the blocks that were announced, by kind of event and medium."""
    found: dict[str, list[int]] = {}
    for event in announcer.take():
        hashes = [event.block.hash] if isinstance(event, StoredEvent) else event.hashes
        name = f"{type(event).__name__} {event.medium.name}"
        found.setdefault(name, []).extend(each[0] for each in hashes)
    return found


def test_blocks_are_announced_on_the_disk_when_they_are_there_and_until_a_reset(
    folder: Path,
) -> None:
    announcer = announcer_of_both()
    with closing(make_engine(disk=folder, announcer=announcer)) as engine:
        start(engine)
        engine.run(FakeRequest("first", PROMPT))
        engine.run_until(lambda: not engine.scheduler.pending)
        saved = announced(announcer)
        engine.scheduler.reset("new weights")
        engine.step()
        cleared = announced(announcer)

    both = [*range(6)]
    assert saved == {"StoredEvent CPU": both, "StoredEvent STORAGE": both}
    assert cleared == {"RemovedEvent CPU": both, "RemovedEvent STORAGE": both}


def test_blocks_of_an_earlier_life_are_announced_when_a_request_describes_them(
    filled: Path,
) -> None:
    again = FakeRequest("again", PROMPT)
    announcer = announcer_of_both()
    with closing(make_engine(disk=filled, announcer=announcer)) as engine:
        start(engine)
        before = announced(announcer)
        engine.scheduler.expect_request(again, lambda: 0)
        described = announced(announcer)
        engine.run_until(lambda: not engine.offload.busy)
        engine.step()
        arrived = announced(announcer)

    assert before == {}
    assert described == {"StoredEvent STORAGE": [*range(6)]}
    assert arrived == {"StoredEvent CPU": [*range(6)]}


def test_another_thread_may_end_the_engine(filled: Path) -> None:
    engine = make_engine(disk=filled)
    start(engine)
    store = process_of(filled)
    engine.worker.close()
    with ThreadPoolExecutor(1) as other:
        other.submit(engine.scheduler.close).result(SOON_S)

    with pytest.raises(ProcessLookupError):
        os.kill(store, 0)


def test_after_a_reset_the_next_engine_finds_nothing_of_this_one(filled: Path) -> None:
    """Blocks from before it are void, and the weights of those after it are not known."""
    with closing(make_engine(disk=filled)) as engine:
        start(engine)
        engine.scheduler.reset("new weights")
        engine.run(FakeRequest("after", OTHER))
        within = engine.scheduler.find_tokens(FakeRequest("within", OTHER), 0)
        engine.run_until(lambda: not engine.scheduler.pending)
    with closing(make_engine(disk=filled)) as engine:
        start(engine)
        found = [
            engine.scheduler.find_tokens(FakeRequest(str(tokens[0]), tokens), 0)
            for tokens in (PROMPT, OTHER)
        ]

    assert within == 24
    assert found == [0, 0]


def test_a_request_that_runs_during_a_reset_saves_nothing_under_its_old_keys(filled: Path) -> None:
    with closing(make_engine(disk=filled)) as engine:
        start(engine)
        running = FakeRequest("running", OTHER)
        engine.scheduler.find_tokens(running, 0)
        engine.scheduler.reset("new weights")
        engine.run(running)  # It was preempted, and starts anew with the new weights.
        engine.run_until(lambda: not engine.scheduler.pending)
    with closing(make_engine(disk=filled)) as engine:
        start(engine)
        assert engine.scheduler.find_tokens(FakeRequest("again", OTHER), 0) == 0


KEYS = [bytes([number]) * 16 for number in range(6)]
LISTED = StoreStatus(
    due=False,
    settled=True,
    searching=False,
    asked=False,
    on=True,
    blocks=0,
    saves_dropped=0,
    failed=False,
)


class FakeOffload:
    """A store that says what it is told to."""

    def __init__(self) -> None:
        self.status = LISTED
        self.asked: list[int] = []

    def store_status(self, cause: str) -> StoreStatus:
        assert cause in {"", "request"}
        return self.status

    def prefetch(self, keys: list[bytes], *, cause: str) -> object:
        assert cause == "request"
        self.asked.append(len(keys))
        return object()

    def hub_counts(self) -> HubCounts:
        return HubCounts(slots=20)

    def step(self) -> None:
        """Nothing to do."""


def found(*, ready: int = 0, below: int = 0, rising: int = 0, worth: int | None = None) -> Found:
    known = ready + below + rising
    return Found(
        ready=ready,
        pending=below + rising,
        below=below,
        rising=rising,
        worth=known if worth is None else worth,
        miss=Miss(reason=MissReason.NONE),
        losses=0,
    )


@pytest.fixture
def store() -> tuple[StorePrefetch, FakeOffload]:
    offload = FakeOffload()
    prefetch = StorePrefetch(offload, TransferCounts(clock=Clock()))  # type: ignore[arg-type]
    prefetch.watch()
    return prefetch, offload


@pytest.mark.parametrize(
    ("why", "answer", "held", "waits"),
    [
        ("they are on their way", found(rising=6), 0, True),
        ("some are there, others on their way", found(ready=2, rising=4), 0, True),
        ("all are there", found(ready=6), 0, False),
        ("the device has all that are on their way", found(rising=4), 4, False),
        ("computing is quicker", found(rising=6, worth=0), 0, False),
        ("host memory has no room", found(below=6), 0, False),
        ("there are none", found(), 0, False),
    ],
)
def test_a_request_waits_for_blocks_that_are_on_their_way_and_worth_it(
    store: tuple[StorePrefetch, FakeOffload], why: str, answer: Found, held: int, *, waits: bool
) -> None:
    prefetch, _ = store
    wait = StoreWait()
    prefetch.begin_turn(wait)

    assert prefetch.defers(wait, KEYS, answer, held=held, cause="request") is waits, why


def test_while_the_store_reads_its_tables_a_request_waits_for_its_answer(
    store: tuple[StorePrefetch, FakeOffload],
) -> None:
    prefetch, offload = store
    wait = StoreWait()
    prefetch.begin_turn(wait)
    asked = prefetch.bring_up(wait, KEYS, found(), held=0, cause="request")
    offload.status = LISTED._replace(searching=True)
    waits = prefetch.defers(wait, KEYS, found(), held=0, cause="request")
    offload.status = LISTED

    assert asked is not None
    assert waits
    assert not prefetch.defers(wait, KEYS, found(), held=0, cause="request")


def test_the_store_is_asked_once_for_what_is_worth_loading(
    store: tuple[StorePrefetch, FakeOffload],
) -> None:
    prefetch, offload = store
    wait, slow = StoreWait(), found(ready=1, below=5, worth=3)
    for _ in range(3):
        prefetch.bring_up(wait, KEYS, slow, held=0, cause="request")
    prefetch.bring_up(StoreWait(), KEYS, found(below=6, worth=0), held=0, cause="request")
    offload.status = LISTED._replace(on=False)
    prefetch.bring_up(StoreWait(), KEYS, found(below=6), held=0, cause="request")

    assert offload.asked == [3]


def test_a_long_queue_takes_half_of_host_memory_and_the_rest_is_asked_for_in_turn(
    store: tuple[StorePrefetch, FakeOffload],
) -> None:
    prefetch, _ = store
    queue = [StoreWait() for _ in range(3)]
    answer = found(below=5)

    def ask(wait: StoreWait) -> bool:
        return prefetch.bring_up(wait, KEYS, answer, held=0, cause="request") is not None

    queued = [ask(wait) for wait in queue]
    prefetch.begin_turn(queue[2])
    in_turn = ask(queue[2])
    prefetch.begin_turn(queue[0])
    again = ask(queue[0])

    assert queued == [True, True, False]
    assert in_turn
    assert again, "others may have pushed its blocks out"
    assert ask(StoreWait()), "there is room for the next one"


def test_nobody_waits_for_a_last_block_that_the_engine_computes_again(filled: Path) -> None:
    with closing(make_engine(disk=filled, window_groups=())) as engine:
        start(engine)
        again = FakeRequest("again", PROMPT[: 6 * TOKENS])

        engine.scheduler.expect_request(again, lambda: 5 * TOKENS)

        assert engine.scheduler.find_tokens(again, 5 * TOKENS) == 0
        assert "disk_wait_seconds" not in engine.scheduler.counters.take()
