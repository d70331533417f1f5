"""Handoffs between engines of random shapes: ranks, block sizes, prompts, berths and slots."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from lab.fixtures.handoff_pair import SLOTS, Shape
from penstock.handoff.protocol.settings import HandoffBounds, HandoffSettings
from tests.handoff.driver.conftest import World

SEEDS = 200
QUICK = 60
"""So many of them in every test run."""


class Request(NamedTuple):
    name: str
    token_count: int
    cached_tokens: int


class Case(NamedTuple):
    """Two engines, and what is handed from one to the other."""

    shape: Shape
    settings: HandoffSettings
    requests: tuple[Request, ...]


def case_of(seed: int) -> Case:
    chance = random.Random(seed)
    larger = chance.choice([1, 2, 3, 4, 8, 16, 32])
    smaller = chance.choice([size for size in range(1, larger + 1) if larger % size == 0])
    tokens = [larger, smaller]
    chance.shuffle(tokens)
    shape = Shape(
        prefill_ranks=chance.choice([1, 2, 3, 6]),
        decode_ranks=chance.choice([1, 2, 3, 6]),
        prefill_tokens=tokens[0],
        decode_tokens=tokens[1],
        latent=chance.random() < 0.25,
    )
    berth_bytes = chance.choice(
        [4096, 1 << 14, 1 << 16]
    )  # A block has 3,072 bytes a layer at most.
    berth_count = chance.choice([1, 2, 5])
    bounds = HandoffBounds(
        berth_bytes=berth_bytes,
        berth_count=berth_count,
        landing_bytes_max=6 * berth_bytes * berth_count,
        retired_bytes_max=berth_bytes * berth_count,
    )
    longest = SLOTS * smaller
    requests = []
    for n in range(chance.choice([1, 2])):
        token_count = min(longest, chance.randint(1, 6 * larger + 3))
        cached = chance.randrange(0, token_count) // larger * larger
        requests.append(Request(f"r{n}", token_count, chance.choice([0, cached])))
    return Case(shape, HandoffSettings(bounds=bounds), tuple(requests))


@pytest.mark.parametrize(
    "seed",
    [
        *range(QUICK),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(QUICK, SEEDS)),
    ],
)
def test_every_shape_of_handoff_is_delivered_byte_for_byte(seed: int) -> None:
    shape, settings, requests = case_of(seed)
    world = World(shape, settings=settings, seed=seed)

    for name, token_count, cached in requests:
        there, here = world.submit(name, token_count, cached_tokens=cached, scattered=True)
        world.compute(name, there, range(token_count))
        world.prefill.first_token(name, tokens=(1,))
        world.settle()

        # Asked before the next request may take the same slots.
        assert world.is_right(name, here, range(cached, token_count)), (name, token_count, cached)
    assert world.outcomes("decode") == dict.fromkeys((each.name for each in requests), "delivered")
