"""KV events: what happens in host memory, under vLLM's names for the blocks."""

from __future__ import annotations

from typing import Any

from penstock.connectors.base.events import (
    AnnouncedBlock,
    EventAnnouncer,
    RemovedEvent,
    StoredEvent,
)

PROMPT = list(range(100, 126))


def describe(request: Any, number: int) -> AnnouncedBlock:
    return AnnouncedBlock(
        hash=bytes([number]) * 8,
        parent=bytes([number - 1]) * 8 if number else None,
        tokens=tuple(request.all_token_ids[number * 4 : (number + 1) * 4]),
    )


def engine_with(make_engine: Any) -> tuple[Any, EventAnnouncer]:
    announcer = EventAnnouncer("host", describe=describe)
    return make_engine(announcer=announcer, host=8), announcer


def test_blocks_are_announced_when_they_can_be_loaded(make_engine: Any, make_request: Any) -> None:
    engine, announcer = engine_with(make_engine)

    engine.run(make_request("first", PROMPT))
    stored = announcer.take()

    assert [event.block.hash[0] for event in stored if isinstance(event, StoredEvent)] == [
        *range(6)
    ]
    first, second = stored[0].block, stored[1].block
    assert (first.parent, second.parent) == (None, first.hash)
    assert second.tokens == tuple(PROMPT[4:8])
    assert announcer.take() == []


def test_blocks_that_make_room_are_taken_back(make_engine: Any, make_request: Any) -> None:
    engine, announcer = engine_with(make_engine)
    engine.run(make_request("first", PROMPT))
    engine.scheduler.finish_request("first")
    announcer.take()

    engine.run(make_request("second", [token + 500 for token in PROMPT]))
    events = announcer.take()

    removed = [each for event in events if isinstance(event, RemovedEvent) for each in event.hashes]
    assert len(removed) == 4
    assert len([event for event in events if isinstance(event, StoredEvent)]) == 6


def test_only_blocks_that_are_being_written_are_remembered(
    make_engine: Any, make_request: Any
) -> None:
    """What finds no room would otherwise be remembered for good."""
    described = []

    def note(request: Any, number: int) -> AnnouncedBlock:
        described.append(number)
        return describe(request, number)

    announcer = EventAnnouncer("host", describe=note)
    engine = make_engine(announcer=announcer, host=4)

    engine.run(make_request("too long", PROMPT))

    stored = [event.block.hash[0] for event in announcer.take() if isinstance(event, StoredEvent)]
    assert 0 < len(stored) <= 4
    assert described == stored


def test_a_reset_takes_back_what_lies_here_and_nothing_else(
    make_engine: Any, make_request: Any
) -> None:
    engine, announcer = engine_with(make_engine)
    engine.run(make_request("first", PROMPT))
    announcer.take()

    engine.scheduler.reset("new weights")
    engine.step()
    (removed,) = announcer.take()

    assert isinstance(removed, RemovedEvent)
    assert len(removed.hashes) == 6
