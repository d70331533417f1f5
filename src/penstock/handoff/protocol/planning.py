"""From forms to claims: what the ranks of two engines owe each other, cut into parts.

The reshard planner says which layers and heads of which source rank go to which target rank;
here that becomes the `wanted` of `DecodeScheduler.submit`, and the facts of `Hello`.

What must not break: every cell of every missing block lies in the grid of exactly one source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.handoff.protocol.grid import PART_BYTES_MIN, Grid, cut
from penstock.vocabulary.narrowing import Cut, narrow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.vocabulary.form import Form
    from penstock.vocabulary.reshard import ReshardPlan, Route


def form_facts(forms: Sequence[Form]) -> tuple[tuple[str, str], ...]:
    """What of an engine's forms resharding cannot change, over all its ranks.

    How many ranks there are, and how heads, layers and tokens are dealt out, does not matter;
    whether two ways of dealing them out go together is for `plan_reshard` to say.
    """
    layers: set[tuple[int, bool]] = set()
    kinds: set[str] = set()
    for form in forms:
        for group in form.layout.groups:
            heads = "no heads" if group.heads is None else f"{group.heads.total} heads"
            for layer in group.layers:
                layers.add((layer.number, layer.draft))
                kinds |= {
                    f"{group.kind.value}, {heads}, {plane.dtype.value}" for plane in layer.planes
                }
    return (("layers", str(len(layers))), ("kinds", "; ".join(sorted(kinds))[:512]))


def missing_blocks(plan: ReshardPlan, *, cached_tokens: int, token_count: int) -> range:
    """The blocks that have to travel, in units that can be resharded (`plan.unit_tokens`).

    Raises:
        ValueError: what the decode side has is not a whole number of units. Where source blocks
            are the larger ones, it has to leave the rest of its match aside.
    """
    unit = plan.unit_tokens
    if not 0 <= cached_tokens < token_count:
        raise ValueError(f"cached_tokens is {cached_tokens}, must be from 0 to {token_count - 1}")
    if cached_tokens % unit:
        raise ValueError(f"cached_tokens is {cached_tokens}, must be a multiple of {unit}")
    return range(cached_tokens // unit, -(-token_count // unit))


def wanted_by(
    plan: ReshardPlan,
    targets: Sequence[Form],
    *,
    source_names: Sequence[str],
    target_names: Sequence[str],
    blocks: range,
    berth_bytes: int,
    part_bytes_min: int = PART_BYTES_MIN,
) -> dict[str, tuple[tuple[str, Grid], ...]]:
    """For each target rank by name, which source ranks owe it which parts.

    Layers inside a grid that its route does not touch have no bytes in any part.

    Args:
        plan: of the two engines' forms.
        targets: the forms of the decode ranks, as in the plan.
        source_names: of the prefill ranks, as in the plan.
        target_names: of the decode ranks, as in the plan.
        blocks: that are missing, see `missing_blocks`.
        berth_bytes: no part is larger.
        part_bytes_min: small layers are put together until a part has so many bytes.

    Raises:
        ValueError: one block of one layer does not fit a berth.
    """
    wanted: dict[str, list[tuple[str, Grid]]] = {name: [] for name in target_names}
    for route in plan.routes:
        sizes = _layer_bytes(route, targets[route.target], plan)
        grid = cut(
            layers=range(min(sizes), max(sizes) + 1),
            blocks=blocks,
            cell_bytes=max(sizes.values()),
            block_tokens=plan.unit_tokens,
            berth_bytes=berth_bytes,
            part_bytes_min=part_bytes_min,
        )
        wanted[target_names[route.target]].append((source_names[route.source], grid))
    return {name: tuple(sources) for name, sources in wanted.items()}


def _layer_bytes(route: Route, target: Form, plan: ReshardPlan) -> dict[int, int]:
    """What one unit of each layer takes on a route."""
    ratio = plan.unit_tokens // plan.target_tokens
    sizes: dict[int, int] = {}
    for piece in route.pieces:
        for layer in piece.layers:
            seen = Cut(group=piece.target_group, layers=(layer,), heads=piece.heads)
            size = narrow(target.layout, [seen]).block_bytes * ratio
            sizes[layer] = sizes.get(layer, 0) + size
    return sizes
