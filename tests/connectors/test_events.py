"""KV events: what happens in the tiers, under vLLM's names for the blocks."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import pytest

from penstock.connectors.base.keys import (
    AnnouncedBlock,
    EventAnnouncer,
    Medium,
    RemovedEvent,
    StoredEvent,
)
from penstock.machine.kv_events import EventLog, Snapshot
from tests.connectors.conftest import FakeEngine, FakeRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT = list(range(100, 126))
CPU, STORAGE = Medium("CPU", "LOCAL"), Medium("STORAGE", "LOCAL")
REMOTE = Medium("STORAGE", "REMOTE")


def describe(request: Any, number: int) -> AnnouncedBlock:
    return AnnouncedBlock(
        hash=bytes([number]) * 8,
        parent=bytes([number - 1]) * 8 if number else None,
        tokens=array("I", request.all_token_ids[number * 4 : (number + 1) * 4]),
    )


def engine_with() -> tuple[Any, EventAnnouncer]:
    announcer = EventAnnouncer({"host": CPU}, describe=describe)
    return FakeEngine(announcer=announcer, host=8), announcer


def test_blocks_are_announced_when_they_can_be_loaded() -> None:
    engine, announcer = engine_with()

    engine.run(FakeRequest("first", PROMPT))
    stored = announcer.take()

    assert [event.block.hash[0] for event in stored if isinstance(event, StoredEvent)] == [
        *range(6)
    ]
    first, second = stored[0].block, stored[1].block
    assert (first.parent, second.parent) == (None, first.hash)
    assert list(second.tokens) == PROMPT[4:8]
    assert announcer.take() == []


def test_blocks_that_make_room_are_taken_back() -> None:
    engine, announcer = engine_with()
    engine.run(FakeRequest("first", PROMPT))
    engine.scheduler.finish_request("first")
    announcer.take()

    engine.run(FakeRequest("second", [token + 500 for token in PROMPT]))
    events = announcer.take()

    removed = [each for event in events if isinstance(event, RemovedEvent) for each in event.hashes]
    assert len(removed) == 4
    assert len([event for event in events if isinstance(event, StoredEvent)]) == 6


def test_only_blocks_that_are_being_written_are_remembered() -> None:
    """What finds no room would otherwise be remembered for good."""
    described = []

    def note(request: Any, number: int) -> AnnouncedBlock:
        described.append(number)
        return describe(request, number)

    announcer = EventAnnouncer({"host": CPU}, describe=note)
    engine = FakeEngine(announcer=announcer, host=4)

    engine.run(FakeRequest("too long", PROMPT))

    stored = [event.block.hash[0] for event in announcer.take() if isinstance(event, StoredEvent)]
    assert 0 < len(stored) <= 4
    assert described == stored


def test_a_reset_takes_back_what_lies_here_and_nothing_else() -> None:
    engine, announcer = engine_with()
    engine.run(FakeRequest("first", PROMPT))
    announcer.take()

    engine.scheduler.reset("new weights")
    engine.step()
    (removed,) = announcer.take()

    assert isinstance(removed, RemovedEvent)
    assert len(removed.hashes) == 6


class Tiers:
    """Tiers as their KV events show them, with an announcer that follows."""

    def __init__(
        self, *, held_max: int = 100, event_count: int = 100, shared: Medium = STORAGE
    ) -> None:
        media = {"host": CPU, "disk": STORAGE, "shared": shared}
        self.announcer = EventAnnouncer(media, describe=describe, held_max=held_max)
        self._log = EventLog(event_count)
        self._blocks: dict[str, dict[bytes, None]] = {tier: {} for tier in media}

    def expect(self, numbers: Sequence[int]) -> None:
        self.announcer.expect(FakeRequest("any", range(400)), [(n, b"%d" % n) for n in numbers])

    def store(self, tier: str, *numbers: int) -> None:
        keys = [b"%d" % number for number in numbers]
        self._blocks[tier].update(dict.fromkeys(keys))
        self._log.stored(tier, keys, None)

    def remove(self, tier: str, *numbers: int) -> None:
        keys = [b"%d" % number for number in numbers]
        for key in keys:
            del self._blocks[tier][key]
        self._log.removed(tier, keys)

    def clear(self) -> None:
        for blocks in self._blocks.values():
            blocks.clear()
        self._log.cleared(1)

    def announced(self) -> list[tuple[str, str, list[int]]]:
        """What is announced of what has happened since the last call."""
        self.announcer.note(self._log.take(), self._snapshot)
        found = []
        for event in self.announcer.take():
            kind = "stored" if isinstance(event, StoredEvent) else "removed"
            hashes = [event.block.hash] if isinstance(event, StoredEvent) else event.hashes
            local = event.medium.locality == "LOCAL"
            where = event.medium.name if local else f"REMOTE {event.medium.name}"
            found.append((kind, where, [each[0] for each in hashes]))
        return found

    def _snapshot(self) -> Snapshot:
        blocks: dict[str, list[tuple[bytes, bytes | None]]] = {
            tier: [(key, None) for key in keys] for tier, keys in self._blocks.items()
        }
        return Snapshot(sequence=self._log.sequence, epoch=0, blocks=blocks)


def test_a_block_that_leaves_host_memory_is_still_announced_below_it() -> None:
    tiers = Tiers()
    tiers.expect([1])
    tiers.store("host", 1)
    tiers.store("disk", 1)
    tiers.remove("host", 1)
    down = tiers.announced()
    tiers.store("host", 1)
    up = tiers.announced()
    tiers.remove("host", 1)
    tiers.remove("disk", 1)

    assert down == [("stored", "CPU", [1]), ("stored", "STORAGE", [1]), ("removed", "CPU", [1])]
    assert up == [("stored", "CPU", [1])]
    assert tiers.announced() == [("removed", "CPU", [1]), ("removed", "STORAGE", [1])]


def test_of_two_tiers_of_one_medium_the_first_and_the_last_copy_is_announced() -> None:
    tiers = Tiers()
    tiers.expect([1])
    tiers.store("host", 1)
    tiers.announced()

    tiers.store("disk", 1)
    tiers.store("shared", 1)
    tiers.remove("disk", 1)
    while_shared = tiers.announced()
    tiers.remove("shared", 1)

    assert while_shared == [("stored", "STORAGE", [1])]
    assert tiers.announced() == [("removed", "STORAGE", [1])]


def test_of_a_disk_and_a_store_that_others_reach_each_copy_is_announced() -> None:
    tiers = Tiers(shared=REMOTE)
    tiers.expect([1])
    tiers.store("host", 1)
    tiers.announced()

    tiers.store("disk", 1)
    tiers.store("shared", 1)
    stored = tiers.announced()
    tiers.remove("disk", 1)
    tiers.clear()

    assert stored == [("stored", "STORAGE", [1]), ("stored", "REMOTE STORAGE", [1])]
    assert tiers.announced() == [
        ("removed", "STORAGE", [1]),
        ("removed", "CPU", [1]),
        ("removed", "REMOTE STORAGE", [1]),
    ]


def test_blocks_that_no_request_described_are_announced_with_the_first_that_does() -> None:
    tiers = Tiers()
    tiers.store("shared", 1, 2, 3)
    tiers.store("host", 2)
    before = tiers.announced()

    tiers.expect([1])
    tiers.announcer.describe(FakeRequest("any", range(400)), [(1, b"1"), (2, b"2"), (9, b"9")])
    tiers.store("host", 1)

    assert before == []
    assert tiers.announced() == [
        ("stored", "STORAGE", [1]),
        ("stored", "CPU", [2]),
        ("stored", "STORAGE", [2]),
        ("stored", "CPU", [1]),
    ]


def test_after_a_reset_every_medium_is_taken_back() -> None:
    tiers = Tiers()
    tiers.expect([1, 2])
    tiers.store("host", 1, 2)
    tiers.store("disk", 2)
    tiers.announced()

    tiers.clear()

    assert tiers.announced() == [("removed", "CPU", [1, 2]), ("removed", "STORAGE", [2])]
    tiers.store("disk", 2)
    assert tiers.announced() == [], "it is another block, which nobody has described"


def test_a_full_memory_keeps_blocks_of_host_memory_rather_than_those_below() -> None:
    tiers = Tiers(held_max=3)
    tiers.expect([1, 2, 3])
    tiers.store("host", 1, 2, 3)
    tiers.store("disk", 1, 2)
    tiers.remove("host", 2)
    tiers.announced()

    tiers.store("disk", 7)
    tiers.expect([4])
    tiers.expect([5])
    tiers.store("host", 4, 5)

    assert tiers.announced() == [("removed", "STORAGE", [2]), ("stored", "CPU", [4])]


@pytest.mark.parametrize("before", [0, 3])
def test_when_events_were_dropped_what_is_announced_is_what_is_there(before: int) -> None:
    tiers = Tiers(event_count=2)
    tiers.expect([1, 2, 3])
    for number in range(1, before + 1):
        tiers.store("host", number)
        tiers.announced()

    for number in range(before + 1, 4):
        tiers.store("host", number)
    tiers.store("disk", 1)
    tiers.remove("host", 1)
    tiers.store("disk", 3)

    found: dict[str, set[int]] = {"CPU": {*range(1, before + 1)}, "STORAGE": set()}
    for kind, medium, numbers in tiers.announced():
        change = found[medium].update if kind == "stored" else found[medium].difference_update
        change(numbers)
    assert found == {"CPU": {2, 3}, "STORAGE": {1, 3}}
