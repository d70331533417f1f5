"""Who takes part in the handoffs of two engines: names, addresses, forms, and what follows.

Both engines are given the same directory. They compare it when they meet, field by field of the
forms of all ranks, so that two sides never cut a transfer differently.

The one rule: what one rank owes another is computed here alone, from the forms of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.handoff.driver.parts import CELLS_MAX, RouteParts
from penstock.handoff.protocol.grid import (
    PART_BLOCKS_MAX,
    PART_BYTES_MIN,
    Grid,
    cut,
    missing_blocks,
)
from penstock.handoff.protocol.identity import Identity, Life, facts_of, form_facts, rank_facts
from penstock.handoff.protocol.states import Role
from penstock.vocabulary.reshard import ReshardPlan, plan_reshard

if TYPE_CHECKING:
    from penstock.vocabulary.form import Form


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank of an engine."""

    name: str
    form: Form
    address: str = ""
    """Where it listens, if it does: prefill ranks do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """One engine: its scheduler, its ranks."""

    scheduler: str
    ranks: tuple[RankPlace, ...]
    address: str = ""
    """Where its scheduler listens."""
    listener: str = ""
    """The name under which its processes answer, where their pairs share a listener; empty: each
    party answers under its own."""

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of its ranks, in their order."""
        return tuple(rank.form for rank in self.ranks)

    @property
    def rank_names(self) -> tuple[str, ...]:
        """The names of its ranks, in their order."""
        return tuple(rank.name for rank in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """A prefill engine and a decode engine that hand off to each other.

    Raises:
        ValueError: two parties have one name, or the blocks of one engine cannot become those
            of the other; the message names the first difference with both values.
    """

    prefill: EnginePlace
    decode: EnginePlace
    model: str
    weights: str
    transport: str = ""
    """The data transport that both engines use."""
    plan: ReshardPlan = field(init=False)
    facts: tuple[tuple[str, str], ...] = field(init=False)
    """What the parties compare when they meet."""
    _routes: dict[tuple[str, str], RouteParts] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = self.names
        if len(set(names)) < len(names):
            raise ValueError(f"names of parties are {names}, none may be twice")
        sources, targets = self.prefill.forms, self.decode.forms
        plan = plan_reshard(sources, targets)
        form = (
            *form_facts((*sources, *targets)),
            *rank_facts("prefill", sources),
            *rank_facts("decode", targets),
            ("transport", self.transport),
        )
        routes = {
            (self.prefill.ranks[route.source].name, self.decode.ranks[route.target].name): (
                RouteParts(plan, route, sources[route.source], targets[route.target])
            )
            for route in plan.routes
        }
        set_field = object.__setattr__
        set_field(self, "plan", plan)
        set_field(self, "facts", facts_of(model=self.model, weights=self.weights, form=form))
        set_field(self, "_routes", routes)

    @property
    def names(self) -> tuple[str, ...]:
        """All parties."""
        engines = (self.prefill, self.decode)
        return tuple(name for each in engines for name in (each.scheduler, *each.rank_names))

    @property
    def answer_names(self) -> dict[str, str]:
        """Under which name a party answers who dials it, where that is not its own."""
        return {
            name: engine.listener
            for engine in (self.prefill, self.decode)
            if engine.listener
            for name in (engine.scheduler, *engine.rank_names)
        }

    def role_of(self, name: str) -> Role:
        """What a party is.

        Raises `ValueError`: it is none.
        """
        for engine, scheduler, rank in (
            (self.prefill, Role.PREFILL_SCHEDULER, Role.PREFILL_RANK),
            (self.decode, Role.DECODE_SCHEDULER, Role.DECODE_RANK),
        ):
            if name == engine.scheduler:
                return scheduler
            if name in engine.rank_names:
                return rank
        raise ValueError(f"name is {name!r}, must be one of {self.names}")

    def identity(self, name: str, incarnation: int) -> Identity:
        """Who a party is in one of its lives."""
        return Identity(Life(name, incarnation), self.role_of(name), self.facts)

    def place_of(self, name: str) -> RankPlace:
        """One rank."""
        for rank in (*self.prefill.ranks, *self.decode.ranks):
            if rank.name == name:
                return rank
        raise ValueError(f"name is {name!r}, must be that of a rank")

    def route(self, source: str, target: str) -> RouteParts | None:
        """What one rank sends another; nothing if they have nothing to do with each other."""
        return self._routes.get((source, target))

    def peers_of(self, name: str) -> tuple[str, ...]:
        """Those that a party has lines to."""
        role = self.role_of(name)
        if role is Role.PREFILL_SCHEDULER:
            return (*self.prefill.rank_names, self.decode.scheduler)
        if role is Role.DECODE_SCHEDULER:
            return (*self.decode.rank_names, self.prefill.scheduler)
        at_source = role is Role.PREFILL_RANK
        own = self.prefill if at_source else self.decode
        ends = ((source, target) for source, target in self._routes)
        if at_source:
            return (own.scheduler, *(target for source, target in ends if source == name))
        return (own.scheduler, *(source for source, target in ends if target == name))

    def wanted(
        self,
        *,
        cached_tokens: int | Mapping[str, int],
        token_count: int,
        berth_bytes: int,
        part_bytes_min: int = PART_BYTES_MIN,
        part_tokens: int | None = None,
    ) -> dict[str, tuple[tuple[str, Grid], ...]]:
        """For each decode rank by name, which prefill ranks owe it which parts.

        Raises `ValueError`: the part that is there is no whole number of blocks of both sides, or a
        block of one layer does not fit a berth.
        """
        found: dict[str, list[tuple[str, Grid]]] = {name: [] for name in self.decode.rank_names}
        for (source, target), parts in self._routes.items():
            cached = cached_tokens
            if isinstance(cached, Mapping):
                cached = cached[target]
                if cached == token_count:
                    continue
            blocks = missing_blocks(self.plan, cached_tokens=cached, token_count=token_count)
            cells = max(1, parts.cells_a_layer)
            room = max(parts.layer_bytes_max, CELLS_MAX // cells * parts.layer_bytes_max)
            grid = cut(
                layers=parts.layers,
                blocks=blocks,
                cell_bytes=parts.layer_bytes_max,
                block_tokens=self.plan.unit_tokens,
                berth_bytes=min(berth_bytes, room),
                part_bytes_min=part_bytes_min,
                # Staging counts the blocks of the source, where those are smaller.
                part_blocks_max=max(1, PART_BLOCKS_MAX // parts.source_ratio),
                part_tokens=part_tokens,
            )
            found[target].append((source, grid))
        return {name: tuple(sources) for name, sources in found.items()}
