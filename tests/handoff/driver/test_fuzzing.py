"""Messages of the other engine, replayed and changed at random: refused, or harmless.

Every one of them is well formed, so that it gets as far as it can; garbage does not come so far
(`test_refusing`, `tests/handoff/protocol/test_framing`).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lab.fixtures.handoff_pair import Shape
from penstock.errors import PeerError
from penstock.handoff.driver.party_driver import Envelope, seal, unseal
from penstock.handoff.protocol.grid import Grid
from penstock.handoff.protocol.identity import Life
from penstock.handoff.protocol.settings import HandoffBounds, HandoffSettings, HandoffTimes
from tests.handoff.driver.conftest import World

if TYPE_CHECKING:
    from penstock.handoff.driver.party_driver import PartyDriver

    Heard = tuple[PartyDriver[Any], str, bytes]

SHORT = HandoffSettings(
    times=HandoffTimes(handoff_s=6.0, lease_s=6.0, park_s=6.0, ping_s=0.5, suspect_s=2.0),
    bounds=HandoffBounds(
        berth_bytes=4096, berth_count=4, landing_bytes_max=1 << 20, retired_bytes_max=1 << 19
    ),
)
TOKENS = 16
CHANGED = 200


def changed(value: Any, chance: random.Random) -> Any:
    """A field's value, or something like it."""
    match value:
        case Grid():
            name = chance.choice(Grid._fields)
            return value._replace(**{name: changed(getattr(value, name), chance)})
        case Life():
            return Life(value.name, chance.getrandbits(63) + 1)
        case bool():
            return not value
        case int():
            others = [0, 1, value + 1, max(0, value - 1), chance.randrange(1 << 10), 1 << 30]
            return chance.choice(others)
        case bytes():
            return chance.randbytes(chance.randrange(1 + 2 * len(value)))
        case str():
            return chance.choice(["", "a", "b", "nobody", value + "x"])
        case tuple():
            kept = [each for each in value if chance.random() < 0.8]
            return tuple(changed(each, chance) if chance.random() < 0.2 else each for each in kept)
        case _:
            return value


def spoiled(envelope: Envelope, chance: random.Random) -> bytes | None:
    """The frame of a message with one field or its attachment changed; of some, the same again."""
    message, attachment = envelope
    name = chance.choice(message.__struct_fields__)
    if chance.random() < 0.8:
        value = changed(getattr(message, name), chance)
        message = msgspec.structs.replace(message, **{name: value})
    if attachment and chance.random() < 0.2:
        attachment = changed(attachment, chance)
    frame = seal(message, attachment)
    try:
        unseal(frame)
    except PeerError:
        return None
    return frame


def overhear(world: World) -> list[Heard]:
    """What parties hear from those of the other engine, from now on."""
    heard: list[Heard] = []

    def listen(driver: PartyDriver[Any]) -> None:
        hear = driver._on_frame

        def listening(name: str, frame: bytes, now: float) -> None:
            if name.split("/", maxsplit=1)[0] != driver.life.name.split("/")[0]:
                heard.append((driver, name, frame))
            hear(name, frame, now)

        driver._on_frame = listening  # type: ignore[method-assign]

    for party in world.parties.values():
        listen(party)
    return heard


def finish(world: World, slots: dict[str, list[int]]) -> None:
    """Lets both engines do their part, and every deadline pass."""
    for name, there in slots.items():
        world.compute(name, there, range(TOKENS))
        if name not in world.outcomes("prefill"):
            world.prefill.first_token(name, (1,))
    world.pass_time(15.0, step_s=0.5)


@pytest.mark.parametrize("seed", range(12))
def test_changed_and_repeated_messages_break_nothing(seed: int) -> None:
    chance = random.Random(seed)
    ranks = {"prefill_ranks": chance.randint(1, 3), "decode_ranks": chance.randint(1, 3)}
    world = World(Shape(**ranks), settings=SHORT, seed=seed)
    heard = overhear(world)
    slots = {name: world.submit(name, TOKENS, first=16 * at) for at, name in enumerate("abc")}
    world.settle()
    world.compute("a", slots["a"][0], range(TOKENS), range(1))
    world.settle()

    said = 0
    while said < CHANGED:
        driver, name, frame = chance.choice(heard)
        told = spoiled(unseal(frame), chance)
        if told is not None:
            said += 1
            driver._on_frame(name, told, world.now)
            world.ended.get(driver.life.name, []).extend(driver.step())
    finish(world, {name: there for name, (there, _) in slots.items()})

    for side in ("prefill", "decode"):
        assert sorted(each.handoff for each in world.ended[side]) == ["a", "b", "c"]
    for name, outcome in world.outcomes("decode").items():
        assert outcome != "delivered" or world.is_right(name, slots[name][1], range(TOKENS))
    for rank in world.taking.values():
        assert not rank.machine.collections
