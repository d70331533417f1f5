"""Arguments of an engine's calls, checked before anything changes.

A value that a message cannot carry would be found when it is sent, and again at every resend:
inside `step()`, long after the call that brought it.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING

from penstock.handoff.driver.envelope import KEY_BYTES_MAX, KEY_COUNT_MAX
from penstock.handoff.protocol.identity import NAME_CHARS_MAX
from penstock.handoff.protocol.messages import INDEX_MAX, SLOT_COUNT_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def handoff_name(handoff: object) -> str:
    """The name of a handoff.

    Raises:
        TypeError: it is no text.
        ValueError: it is empty or too long.
    """
    if not isinstance(handoff, str):
        raise TypeError(f"handoff is {handoff!r}, must be a str")
    if not 0 < len(handoff) <= NAME_CHARS_MAX:
        raise ValueError(
            f"handoff has {len(handoff)} characters, must have from 1 to {NAME_CHARS_MAX}"
        )
    return handoff


def numbers(name: str, values: Iterable[object], *, end: int = INDEX_MAX + 1) -> tuple[int, ...]:
    """Whole numbers from 0 up to `end`, as plain `int`.

    Raises:
        TypeError: one of them is no whole number.
        ValueError: one of them is out of range.
    """
    try:
        found = tuple(index(value) for value in values)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"{name} must be whole numbers: {error}") from error
    wrong = [number for number in found if not 0 <= number < end]
    if wrong:
        raise ValueError(f"{name} has {wrong[0]}, must be from 0 to {end - 1}")
    return found


def slot_numbers(
    name: str, values: Iterable[object], *, end: int = INDEX_MAX + 1
) -> tuple[int, ...]:
    """Slots of one rank.

    Raises:
        TypeError, ValueError: as `numbers`; or there are too many.
    """
    found = numbers(name, values, end=end)
    if len(found) > SLOT_COUNT_MAX:
        raise ValueError(f"{name} are {len(found)}, must be at most {SLOT_COUNT_MAX}")
    return found


def block_keys(keys: Sequence[object]) -> tuple[bytes, ...]:
    """Keys of blocks.

    Raises:
        TypeError: one of them is not bytes.
        ValueError: one of them is empty or too long, or there are too many.
    """
    for key in keys:
        if not isinstance(key, bytes):
            raise TypeError(f"keys has {key!r}, must be bytes")
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise ValueError(f"keys has one of {len(key)} bytes, must have 1 to {KEY_BYTES_MAX}")
    if len(keys) > KEY_COUNT_MAX:
        raise ValueError(f"keys are {len(keys)}, must be at most {KEY_COUNT_MAX}")
    return tuple(keys)  # type: ignore[arg-type]


def whole_number(name: str, value: object, *, first: int = 0, end: int = INDEX_MAX + 1) -> int:
    """One whole number from `first` up to `end`, as a plain `int`.

    Raises:
        TypeError: it is none.
        ValueError: it is out of range.
    """
    (number,) = numbers(name, [value], end=end)
    if number < first:
        raise ValueError(f"{name} is {number}, must be from {first} to {end - 1}")
    return number
