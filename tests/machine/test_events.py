"""Events are values, and the machine knows them all."""

from __future__ import annotations

import pytest

from penstock.machine import events as ev
from penstock.machine import machine

KINDS = [
    kind
    for kind in vars(ev).values()
    if isinstance(kind, type) and issubclass(kind, ev.Event) and kind is not ev.Event
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_event_is_dealt_with(kind: type[ev.Event]) -> None:
    assert kind in machine._HANDLERS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_table_of_events_names_every_kind(kind: type[ev.Event]) -> None:
    assert ev.__doc__ is not None
    assert kind.__name__ in ev.__doc__


def test_an_event_cannot_be_changed() -> None:
    event = ev.Reset(why="operator")

    with pytest.raises(AttributeError):
        event.why = "nobody"  # type: ignore[misc]


def test_equal_events_are_equal() -> None:
    assert ev.RankLost(rank=1) == ev.RankLost(rank=1) != ev.RankLost(rank=2)
