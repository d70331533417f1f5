"""Who takes part in a handoff, what the prompts are, and what has to travel.

What must not break: of every prompt, each target rank gets each (layer, block) of its heads
from exactly one source rank, whatever the two numbers of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING

from penstock.handoff.protocol.grid import Grid
from penstock.handoff.protocol.identity import Identity, Life
from penstock.handoff.protocol.settings import HandoffSettings
from penstock.handoff.protocol.states import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFILL = "P"
DECODE = "D"
FACTS = (("model", "toy"), ("form", "plain"))

Sources = tuple[tuple[str, Grid], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request that both engines were given."""

    handoff: str
    token_count: int
    layer_count: int
    wanted: Mapping[str, Sources]
    """For each decode rank, which source ranks owe it which grid."""
    chunk_tokens: int = 1 << 20
    """The engine computes so many tokens of all layers before it goes on with the next."""
    patience_s: float | None = None
    lease_s: float | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The first token: it is different for every prompt."""
        return (sum(self.handoff.encode()),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """When a fence of landing memory holds, and what it does to writes into that memory."""

    name: str
    waits_for_posted: bool
    """Whether it holds only when the writer knows of no write that may still land."""
    waits_for_ghosts: bool
    """The same for writes that the writer does not know any more: it died, or was told that they
    failed."""
    ends_writes: bool
    """Whether nothing lands behind it, not even what was posted before."""
    recalls: bool
    """Whether a write that was posted can be taken back. If not, to release its handle ends
    nothing: it may land at any later time."""
    has_relays: bool = False
    """Whether a process beside each rank carries its writes out, and may die."""
    own_memory: bool = False
    """Whether memory of an area is never that of anything else, and parts are taken although late
    writes may reach their berths: sums find those that they spoiled."""


SHARED_MEMORY = Transport(
    name="shared memory",
    waits_for_posted=True,
    waits_for_ghosts=True,
    ends_writes=True,
    recalls=True,
)
"""The writer copies by itself; the fence is its death, with all that it had posted."""
NIXL = Transport(
    name="nixl",
    waits_for_posted=False,
    waits_for_ghosts=False,
    ends_writes=True,
    recalls=False,
    has_relays=True,
)
"""The fence is the destruction of the target's agent, whatever the writer does. An area has an
agent of its own; all of them end at once with the relay that has them."""

GPU_MEMORY = Transport(
    name="gpu memory",
    waits_for_posted=False,
    waits_for_ghosts=False,
    ends_writes=False,
    recalls=False,
    own_memory=True,
)
"""Nothing keeps a late write out, not even the fence, which is there to count memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Two engines and their prompts."""

    prefill_count: int
    decode_count: int
    prompts: Mapping[str, Prompt]
    settings: HandoffSettings = field(default_factory=HandoffSettings)
    batched: bool = False
    """Whether the engines begin with, compute and claim all prompts in the same steps."""
    room: int = 1 << 20
    """How many requests each engine can have open at a time."""
    doubtful: tuple[str, ...] | None = None
    """The prompts that engines may cancel or withdraw, where that is a fault; all when `None`."""
    insistent: bool = False
    """Whether the decode engine claims a second time whatever became of its first claim."""
    stages: int = 1
    """Groups of prefill ranks, each with its share of the layers."""
    transport: Transport = SHARED_MEMORY

    def is_doubtful(self, handoff: str) -> bool:
        """Whether an engine may change its mind about a prompt."""
        return self.doubtful is None or handoff in self.doubtful

    def layers_of(self, name: str, handoff: str) -> range:
        """The layers of a prompt that a prefill rank computes."""
        stage = int(name.removeprefix(PREFILL)) * self.stages // self.prefill_count
        return layer_shares(self.prompts[handoff].layer_count, self.stages)[stage]

    @property
    def prefill_ranks(self) -> tuple[str, ...]:
        """Names."""
        return tuple(f"{PREFILL}{rank}" for rank in range(self.prefill_count))

    @property
    def decode_ranks(self) -> tuple[str, ...]:
        """Names."""
        return tuple(f"{DECODE}{rank}" for rank in range(self.decode_count))

    @property
    def names(self) -> tuple[str, ...]:
        """All parties, schedulers before their ranks."""
        return (PREFILL, *self.prefill_ranks, DECODE, *self.decode_ranks)

    def peers_of(self, name: str) -> tuple[str, ...]:
        """Those that a party speaks with."""
        if name == PREFILL:
            return (*self.prefill_ranks, DECODE)
        if name == DECODE:
            return (*self.decode_ranks, PREFILL)
        if name.startswith(PREFILL):
            return (PREFILL, *self.decode_ranks)
        return (DECODE, *self.prefill_ranks)


def role_of(name: str) -> Role:
    """What a name stands for."""
    if name == PREFILL:
        return Role.PREFILL_SCHEDULER
    if name == DECODE:
        return Role.DECODE_SCHEDULER
    return Role.PREFILL_RANK if name.startswith(PREFILL) else Role.DECODE_RANK


def identity_of(name: str, incarnation: int = 1) -> Identity:
    """A party in one of its lives."""
    return Identity(life=Life(name, incarnation), role=role_of(name), facts=FACTS)


def shares(tensor: int, decode_count: int, grid: Grid, *, stages: int = 1) -> dict[str, Sources]:
    """Who owes whom what of this grid, when heads are split evenly on both sides.

    Args:
        tensor: prefill ranks that share the heads of a layer.
        decode_count: decode ranks; they have all layers.
        grid: what each target lacks, all layers of it.
        stages: groups of prefill ranks, each with its share of the layers.
    """
    heads = lcm(tensor, decode_count)
    source_heads, target_heads = heads // tensor, heads // decode_count
    wanted: dict[str, Sources] = {}
    for target in range(decode_count):
        first = target * target_heads // source_heads
        last = ((target + 1) * target_heads - 1) // source_heads
        wanted[f"{DECODE}{target}"] = tuple(
            (f"{PREFILL}{stage * tensor + source}", _slice(grid, stage_layers))
            for stage, stage_layers in enumerate(layer_shares(grid.layer_count, stages))
            for source in range(first, last + 1)
        )
    return wanted


def layer_shares(layer_count: int, stages: int) -> list[range]:
    """The layers of each stage."""
    edges = [layer_count * stage // stages for stage in range(stages + 1)]
    return [range(first, end) for first, end in pairwise(edges)]


def _slice(grid: Grid, layers: range) -> Grid:
    return grid._replace(layer_first=layers.start, layer_count=len(layers))
