"""Parts that are put away beside the driver's thread: what wakes it up, and what waits for them."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

from lab.fixtures.handoff_pair import LAYERS, Shape
from penstock.handoff.driver.decode_rank import CLAIM_S
from penstock.transport.waiting import wait_readable
from tests.handoff.driver.conftest import SyncTaker, World

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.handoff.driver.decode_rank import DecodeRankDriver
    from penstock.handoff.driver.parts import PartForm, RouteParts
    from penstock.handoff.protocol.effects import Take
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm

TOKENS = 16


class LateTaker(SyncTaker):
    """Puts parts away when the test says so."""

    made: LateTaker

    def __init__(self, tier: SlotStore, algorithm: Algorithm) -> None:
        super().__init__(tier, algorithm)
        self.begun: deque[tuple[Take, bool]] = deque()
        self.done: list[tuple[Take, bool]] = []
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        LateTaker.made = self

    def take(
        self,
        take: Take,
        route: RouteParts,
        form: PartForm,
        memory: NDArray[np.uint8],
        keys: Sequence[bytes],
        slots: Sequence[int],
    ) -> bool | None:
        intact = super().take(take, route, form, memory, keys, slots)
        self.begun.append((take, bool(intact)))
        return None

    def finish(self) -> None:
        self.done.append(self.begun.popleft())
        os.eventfd_write(self.bell, 1)

    def ended(self) -> list[tuple[Take, bool]]:
        done, self.done = self.done, []
        if done:
            os.eventfd_read(self.bell)
        return done

    @property
    def busy(self) -> bool:
        return bool(self.begun or self.done)

    @property
    def descriptor(self) -> int:
        return self.bell


def begin(layers: range) -> tuple[World, DecodeRankDriver, LateTaker]:
    """A world whose decode rank has got these layers of a prompt, and has put none away."""
    world = World(Shape(prefill_ranks=1, decode_ranks=1), taker=LateTaker)
    there, _ = world.submit("a prompt", TOKENS)
    world.compute("a prompt", there, range(TOKENS), layers)
    world.settle()
    (driver,) = world.taking.values()
    return world, driver, LateTaker.made


def test_the_end_of_a_part_wakes_nobody_while_others_are_to_come() -> None:
    _, driver, taker = begin(range(1))
    assert len(taker.begun) == 1

    taker.finish()

    assert taker.descriptor not in driver.descriptors


def test_the_end_of_a_part_waits_for_the_next_one_but_not_for_long() -> None:
    world, driver, taker = begin(range(1))
    due = driver.next_deadline()
    assert due is not None
    assert world.now < due <= world.now + CLAIM_S

    world.now = due
    assert taker.descriptor in driver.descriptors
    taker.finish()
    driver.step()

    assert driver.parts_moved == 1
    assert taker.descriptor not in driver.descriptors


def test_the_end_of_the_last_part_wakes_the_driver() -> None:
    world, driver, taker = begin(range(LAYERS))
    world.prefill.first_token("a prompt", (1,))
    while taker.begun:
        world.settle()
        assert not world.outcomes("decode")
        assert taker.descriptor in driver.descriptors
        taker.finish()
    world.settle()

    assert world.outcomes("decode") == {"a prompt": "delivered"}


def test_a_handoff_that_is_cancelled_ends_when_its_parts_were_put_away() -> None:
    world, driver, taker = begin(range(1))
    world.decode.cancel("a prompt")
    world.settle()
    assert not world.outcomes("decode")
    assert taker.descriptor in driver.descriptors

    taker.finish()
    assert wait_readable(taker.descriptor, 0.0)
    world.settle()

    assert world.outcomes("decode") == {"a prompt": "cancelled"}
