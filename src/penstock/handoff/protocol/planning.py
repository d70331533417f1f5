"""What two engines must have in common, and which blocks of a prompt have to travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.vocabulary.form import Form
    from penstock.vocabulary.reshard import ReshardPlan


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
