"""What goes wrong with one handoff, on whichever side, ends that handoff and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lab.fixtures.handoff_machines import freeze, sizes
from lab.fixtures.handoff_pair import keys_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.handoff.driver.conftest import World


class FailsFor:
    """A reader or taker that raises for one handoff, and does its work for all others."""

    def __init__(self, inner: Any, verb: str, handoff: str, error: Exception) -> None:
        self._inner = inner
        self._verb = verb
        self._handoff = handoff
        self._error = error

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._checked(found) if name == self._verb else found

    def _checked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(what: Any, *more: Any) -> Any:
            if what.handoff == self._handoff:
                raise self._error
            return call(what, *more)

        return checked


def hand_off_two(world: World) -> tuple[list[int], list[int]]:
    """Two handoffs at once: the first is the one that goes wrong."""
    slots = {}
    for n, name in enumerate(("bad", "good")):
        slots[name] = world.submit(name, 40, first=32 * n)
    world.settle()
    for name in ("bad", "good"):
        world.compute(name, slots[name][0], range(40))
        world.prefill.first_token(name, tokens=(1,))
        world.settle()
    return slots["good"]


@pytest.mark.parametrize("error", [ValueError("shapes"), IndexError("slot"), MemoryError("no")])
def test_a_part_that_cannot_be_taken_fails_its_handoff_alone(
    world: World, error: Exception
) -> None:
    rank = world.taking["decode/1"]
    rank._taker = FailsFor(rank._taker, "take", "bad", error)

    _, here = hand_off_two(world)

    assert world.outcomes("decode") == {"bad": "failed_over", "good": "delivered"}
    (bad,) = [each for each in world.ended["decode"] if each.handoff == "bad"]
    assert f"could not be taken: {type(error).__name__}: {error}" in bad.why
    assert world.is_right("good", here, range(40))
    assert not any(each.machine.collections for each in world.taking.values())


@pytest.mark.parametrize("error", [ValueError("shapes"), KeyError("gone"), TypeError("no")])
def test_a_part_that_cannot_be_read_fails_its_handoff_alone(world: World, error: Exception) -> None:
    rank = world.sending["prefill/0"]
    rank._reader = FailsFor(rank._reader, "read", "bad", error)

    _, here = hand_off_two(world)

    assert world.outcomes("decode") == {"bad": "failed_over", "good": "delivered"}
    assert world.outcomes("prefill") == {"bad": "failed_over", "good": "delivered"}
    assert world.is_right("good", here, range(40))
    assert not any(sizes(each.machine)["areas poisoned"] for each in world.sending.values())


def states_of(world: World) -> list[object]:
    return [freeze(party.machine) for party in world.parties.values()]


KEYS = keys_of("a", 16, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": [0, 1, 2, 64]},
        {"slots": [0, 1, 2, -1]},
        {"slots": [0, 1, 2, 3.0]},
        {"slots": [0, 1, 2, "3"]},
        {"slots": [0, 1, 2, 3, 4]},
        {"keys": [*KEYS[:3], "text"]},
        {"keys": [*KEYS[:3], b""]},
        {"keys": [*KEYS[:3], b"x" * 65]},
        {"token_count": 16.0},
        {"token_count": -16},
        {"handoff": ""},
        {"handoff": "x" * 129},
        {"handoff": b"a"},
    ],
    ids=str,
)
def test_what_cannot_be_read_is_not_admitted(world: World, wrong: dict[str, Any]) -> None:
    before = states_of(world)
    right: dict[str, Any] = {"handoff": "a", "token_count": 16, "slots": range(4), "keys": KEYS}

    with pytest.raises((ValueError, TypeError)):
        world.sending["prefill/0"].admit(**{**right, **wrong})

    assert states_of(world) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": [0, 1, 2, 2**31 + 1]},
        {"slots": [0, 1, 2, -1]},
        {"slots": [0, 1, 2, 2]},
        {"slots": [0, 1, 2, 3.0]},
        {"slots": [0, 1, 2, 3, 4]},
        {"keys": [*KEYS[:3], "text"]},
        {"keys": [*KEYS[:3], b"x" * 65]},
        {"token_count": 16.0},
        {"token_count": 0},
        {"cached_tokens": -4},
        {"cached_tokens": 4.0},
        {"epoch": 0},
        {"epoch": 2**32},
        {"epoch": 1.5},
        {"handoff": "x" * 129},
        {"handoff": 7},
    ],
    ids=str,
)
def test_what_no_message_can_carry_is_not_submitted(world: World, wrong: dict[str, Any]) -> None:
    before = states_of(world)
    changed: dict[str, Any] = {"handoff": "a", "token_count": 16, "keys": KEYS, **wrong}
    slots = dict.fromkeys(world.taking, changed.pop("slots", range(4)))

    with pytest.raises((ValueError, TypeError)):
        world.decode.submit(slots=slots, **changed)

    assert states_of(world) == before
    world.settle()


@pytest.mark.parametrize("tokens", [(-1,), (2**40,), ("7",), (7.0,), ()], ids=str)
def test_what_is_no_token_is_not_told(world: World, tokens: Any) -> None:
    world.submit("a", 16)
    world.settle()
    before = states_of(world)

    with pytest.raises((ValueError, TypeError)):
        world.prefill.first_token("a", tokens)

    assert states_of(world) == before


def test_numbers_of_numpy_are_taken_as_what_they_are(world: World) -> None:
    slots = np.arange(4)
    world.decode.submit(
        "a", token_count=np.int64(16), slots=dict.fromkeys(world.taking, slots), keys=KEYS
    )
    world.prefill.submit("a")
    for rank in world.sending.values():
        rank.admit("a", token_count=np.int64(16), slots=slots, keys=KEYS)
    world.compute("a", [*range(4)], range(16))
    world.prefill.first_token("a", tuple(np.array([7])))
    world.settle()

    assert world.outcomes("decode") == {"a": "delivered"}
    assert world.ended["decode"][0].tokens == (7,)
