"""Effects are values, told by kind."""

from __future__ import annotations

import pytest

from penstock.errors import InvariantViolation
from penstock.machine import effects as ef
from penstock.vocabulary.keys import OperationId, PinId

KINDS = [
    kind
    for kind in vars(ef).values()
    if isinstance(kind, type) and issubclass(kind, ef.Effect) and kind is not ef.Effect
]
ABANDON = ef.Abandon(operation=OperationId(1, 2, 3))
PINNED = ef.Pinned(pin=PinId(1), present=2)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_table_of_effects_names_every_kind(kind: type[ef.Effect]) -> None:
    assert ef.__doc__ is not None
    assert kind.__name__ in ef.__doc__


def test_an_effect_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        PINNED.present = 3  # type: ignore[misc]


def test_the_answer_is_found_among_the_effects_of_an_event() -> None:
    assert ef.answer([ABANDON, PINNED], ef.Pinned) is PINNED


def test_an_event_without_its_answer_is_our_defect() -> None:
    with pytest.raises(InvariantViolation, match="no Granted among the effects"):
        ef.answer([ABANDON], ef.Granted)
