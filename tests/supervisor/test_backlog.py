"""Events that nobody takes are dropped in the end, but never unnoticed."""

from __future__ import annotations

from penstock.supervisor.backlog import Backlog
from penstock.supervisor.messages import Missed, Started


def taken(backlog: Backlog) -> list[object]:
    events: list[object] = []
    while (event := backlog.next()) is not None:
        events.append(event)
        backlog.drop()
    return events


def test_events_come_in_their_order() -> None:
    backlog = Backlog()
    events = [Started(name="a", pid=number) for number in range(3)]

    for event in events:
        backlog.add(event)

    assert len(backlog) == 3
    assert taken(backlog) == events
    assert len(backlog) == 0


def test_the_oldest_make_room_and_are_counted() -> None:
    backlog = Backlog(limit=2)
    events = [Started(name="a", pid=number) for number in range(5)]

    for event in events:
        backlog.add(event)

    assert taken(backlog) == [Missed(count=3), *events[3:]]


def test_what_was_lost_elsewhere_is_added_to_the_count() -> None:
    backlog = Backlog(limit=1)

    backlog.add(Missed(count=4))
    backlog.add(Started(name="a", pid=1))
    backlog.add(Started(name="a", pid=2))

    assert taken(backlog) == [Missed(count=5), Started(name="a", pid=2)]
