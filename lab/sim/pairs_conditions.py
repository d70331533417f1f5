"""What kind of world a seed of the scenario `pairs` is: instances, requests, and what befalls them.

The network and the faults of one pair are drawn as in the scenario `handoff`. In a *calm* world
no process dies and nobody changes his mind: instances join, leave and change their roles, and
every request must be handed over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lab.sim.handoff_conditions import (
    AMPLE_S,
    HandoffConditions,
    draw_grid,
    draw_handoff_conditions,
)
from lab.worlds.scene import Prompt, Scene, shares
from penstock_serve.engine.peers import bounds_of_pair

if TYPE_CHECKING:
    from random import Random

    from penstock.handoff import HandoffBounds
    from penstock.handoff.protocol.grid import Grid

LAYER_COUNT = 2
IDLE_LONG_S = {False: 300.0, True: 5 * AMPLE_S}
"""By then every message of a pair was sent again so often that it came: it must hold nothing.

In calm worlds nobody gives up, and resends wait longer.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one request needs."""

    grid: Grid
    token_count: int
    chunk_tokens: int
    patience_s: float
    lease_s: float
    arrives_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsConditions:
    """All parameters of one world."""

    calm: bool
    base: HandoffConditions
    """The network and the faults of each pair; its scene is not used, but for its settings."""
    prefill_ranks: tuple[int, ...]
    """The numbers of ranks of the instances that begin as prefill instances."""
    decode_ranks: tuple[int, ...]
    late_count: int
    """So many of each kind join while requests are under way."""
    requests: tuple[Asked, ...]
    peers_max: int
    idle_s: float
    landing_bytes_max: int
    """Of a decode rank, for all pairs together."""
    span_s: float
    """Requests arrive and things befall the world within this."""

    # What befalls the world, so often.
    death_count: int
    leave_count: int
    role_change_count: int
    cut_count: int
    suspicion_count: int

    def bounds_of(self, prefill_ranks: int) -> HandoffBounds:
        """What one pair gets of a decode rank's landing memory."""
        bounds = replace(self.base.scene.settings.bounds, landing_bytes_max=self.landing_bytes_max)
        return bounds_of_pair(bounds, prefill_ranks=prefill_ranks, peers_max=self.peers_max)

    def pair_conditions(
        self, rng: Random, *, prefill_ranks: int, decode_ranks: int, prompts: dict[str, Prompt]
    ) -> HandoffConditions:
        """The conditions of one pair of instances."""
        settings = self.base.scene.settings
        scene = Scene(
            prefill_count=prefill_ranks,
            decode_count=decode_ranks,
            prompts=prompts,
            settings=replace(settings, bounds=self.bounds_of(prefill_ranks)),
            transport=self.base.scene.transport,
        )
        ranks = (*scene.prefill_ranks, *scene.decode_ranks)
        slow = tuple(rank for rank in ranks if rng.random() < 0.08)
        return replace(self.base, scene=scene, slow=slow)


def prompt_of(asked: Asked, handoff: str, *, prefill_ranks: int, decode_ranks: int) -> Prompt:
    """A request's prompt, for two instances with so many ranks."""
    return Prompt(
        handoff=handoff,
        token_count=asked.token_count,
        layer_count=LAYER_COUNT,
        wanted=shares(prefill_ranks, decode_ranks, asked.grid),
        chunk_tokens=asked.chunk_tokens,
        patience_s=asked.patience_s,
        lease_s=asked.lease_s,
    )


def draw_pairs_conditions(rng: Random) -> PairsConditions:
    """The conditions of one seed."""
    drawn = draw_handoff_conditions(rng)
    calm = drawn.calm
    base = replace(drawn, withdraw=0.0, insistence=0.0, misrouting=0.0, preempt=0.0)

    def count(chance: float, most: int, *, also_calm: bool = False) -> int:
        number = rng.randint(1, most) if rng.random() < chance else 0
        return number if also_calm or not calm else 0

    instance_counts = [rng.choice((1, 2, 2, 2)) for _ in range(2)]
    ranks = [tuple(rng.choice((1, 1, 2)) for _ in range(number)) for number in instance_counts]
    span_s = rng.choice((1.0, 5.0, 20.0))
    peers_max = rng.choice((1, 2, 4))
    area_bytes = base.scene.settings.bounds.area_bytes
    # What is tight may not do for a pair with a prefill instance of two ranks.
    tightness = 4 if calm else rng.choice((1, 2, 4))
    return PairsConditions(
        calm=calm,
        base=base,
        prefill_ranks=ranks[0],
        decode_ranks=ranks[1],
        late_count=rng.choice((0, 0, 1)),
        requests=tuple(
            _draw_request(rng, span_s, calm=calm) for _ in range(rng.choice((2, 3, 4, 6)))
        ),
        peers_max=peers_max,
        idle_s=rng.choice((0.2, 2.0, IDLE_LONG_S[calm])),
        landing_bytes_max=area_bytes * peers_max * tightness,
        span_s=span_s,
        death_count=count(0.6, 3),
        leave_count=count(0.3, 1, also_calm=True),
        role_change_count=count(0.4, 2, also_calm=True),
        cut_count=count(0.3, 2),
        suspicion_count=count(0.3, 3),
    )


def _draw_request(rng: Random, span_s: float, *, calm: bool) -> Asked:
    grid, token_count = draw_grid(rng, LAYER_COUNT)
    return Asked(
        grid=grid,
        token_count=token_count,
        chunk_tokens=rng.randint(1, token_count),
        patience_s=AMPLE_S if calm else rng.uniform(1.0, 8.0),
        lease_s=AMPLE_S if calm else rng.uniform(2.0, 12.0),
        arrives_s=rng.uniform(0.0, span_s),
    )
