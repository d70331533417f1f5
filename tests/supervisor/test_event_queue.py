"""Events that nobody takes are dropped in the end, but never unnoticed."""

from __future__ import annotations

from penstock.supervisor.messages import EventQueue, EventsLost, ProcessStarted


def taken(queue: EventQueue) -> list[object]:
    events: list[object] = []
    while (event := queue.next()) is not None:
        events.append(event)
        queue.drop()
    return events


def test_events_come_in_their_order() -> None:
    queue = EventQueue()
    events = [ProcessStarted(name="a", pid=number) for number in range(3)]

    for event in events:
        queue.add(event)

    assert len(queue) == 3
    assert taken(queue) == events
    assert len(queue) == 0


def test_the_oldest_make_room_and_are_counted() -> None:
    queue = EventQueue(limit=2)
    events = [ProcessStarted(name="a", pid=number) for number in range(5)]

    for event in events:
        queue.add(event)

    assert taken(queue) == [EventsLost(count=3), *events[3:]]


def test_what_was_lost_elsewhere_is_added_to_the_count() -> None:
    queue = EventQueue(limit=1)

    queue.add(EventsLost(count=4))
    queue.add(ProcessStarted(name="a", pid=1))
    queue.add(ProcessStarted(name="a", pid=2))

    assert taken(queue) == [EventsLost(count=5), ProcessStarted(name="a", pid=2)]
