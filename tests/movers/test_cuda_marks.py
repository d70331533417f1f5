"""Points in a stream's work that are waited for with a deadline, on a device that is made up.

What a real one does is tested in `tests/gpu`.
"""

from __future__ import annotations

from typing import Any

from penstock.movers.cuda.marks import Marks


class Device:
    """A stream, its events and a bell: the test decides how far it gets."""

    def __init__(self) -> None:
        self.reached = False
        self.recorded: list[tuple[int, object]] = []
        self.rung: list[tuple[int, int]] = []
        """Events, each with how many had been recorded when its ring was asked for."""
        self.waited: list[tuple[int, float]] = []
        self.events: list[int] = []
        self.closed: list[int] = []

    def new_event(self) -> Any:
        self.events.append(len(self.events))
        return Event(self, self.events[-1])

    def ring_behind(self, event: Event) -> None:
        self.rung.append((event.number, len(self.recorded)))

    def wait_for_ring(self, event: Event, seconds: float) -> bool:
        self.waited.append((event.number, seconds))
        return self.reached


class Event:
    def __init__(self, device: Device, number: int) -> None:
        self._device = device
        self.number = number

    def record(self, stream: object) -> None:
        self._device.recorded.append((self.number, stream))

    def close(self) -> None:
        self._device.closed.append(self.number)


def marks_of(device: Device) -> Marks:
    bell: Any = device
    return Marks(7, bell, device.new_event)


def test_a_mark_that_was_reached_leaves_its_event_to_the_next_one() -> None:
    device = Device()
    marks = marks_of(device)
    device.reached = True

    reached = [marks.make().wait(30.0) for _ in range(3)]

    assert reached == [True] * 3
    assert device.recorded == [(0, 7)] * 3
    assert device.waited == [(0, 30.0)] * 3


def test_a_ring_is_asked_for_before_more_work_is_submitted() -> None:
    device = Device()
    marks = marks_of(device)

    first, second = marks.make(), marks.make()
    device.reached = True
    first.wait(1.0)
    second.wait(1.0)

    assert device.rung == [(0, 1), (1, 2)]


def test_marks_of_steps_in_flight_have_events_of_their_own() -> None:
    device = Device()
    marks = marks_of(device)

    first, second = marks.make(), marks.make()
    device.reached = True
    first.wait(1.0)
    second.wait(1.0)
    marks.make()

    assert [event for event, _ in device.waited] == [0, 1]
    assert device.events == [0, 1]


def test_an_event_that_was_given_up_on_is_not_used_again() -> None:
    device = Device()
    marks = marks_of(device)

    stuck = marks.make()
    in_time = stuck.wait(0.25)
    marks.make()
    marks.close()

    assert not in_time
    assert device.recorded == [(0, 7), (1, 7)]
    assert device.closed == []


def test_a_mark_can_be_waited_for_again() -> None:
    device = Device()
    marks = marks_of(device)

    mark = marks.make()
    found = [mark.wait(0.25)]
    device.reached = True
    found += [mark.wait(0.25), mark.wait(0.25)]
    marks.close()

    assert found == [False, True, True]
    assert device.closed == [0]
