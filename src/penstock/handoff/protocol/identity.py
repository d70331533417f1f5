"""Who a party is, and whether two parties can exchange KV at all.

What must not break (P5): nothing is exchanged between two parties before each has found the
other's version, role and facts to fit. What does not fit is refused with both values named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.handoff.protocol.messages import PROTOCOL_VERSION
from penstock.handoff.protocol.states import Role

if TYPE_CHECKING:
    from penstock.handoff.protocol.names import Life

SPEAKS_WITH: dict[Role, tuple[Role, ...]] = {
    Role.PREFILL_SCHEDULER: (Role.PREFILL_RANK, Role.DECODE_SCHEDULER),
    Role.PREFILL_RANK: (Role.PREFILL_SCHEDULER, Role.DECODE_RANK),
    Role.DECODE_SCHEDULER: (Role.DECODE_RANK, Role.PREFILL_SCHEDULER),
    Role.DECODE_RANK: (Role.DECODE_SCHEDULER, Role.PREFILL_RANK),
}
COLLEAGUES = frozenset(
    {
        (Role.PREFILL_SCHEDULER, Role.PREFILL_RANK),
        (Role.PREFILL_RANK, Role.PREFILL_SCHEDULER),
        (Role.DECODE_SCHEDULER, Role.DECODE_RANK),
        (Role.DECODE_RANK, Role.DECODE_SCHEDULER),
    }
)
"""Parties of one engine: its supervisor *sees* their deaths, while a peer is only suspected."""


class Identity(NamedTuple):
    """Who a party is, and what its KV is."""

    life: Life
    role: Role
    facts: tuple[tuple[str, str], ...] = ()
    """What must be equal on both sides, by name. See `facts_of`."""
    version: int = PROTOCOL_VERSION


class Misfit(NamedTuple):
    """The first thing in which two parties do not fit."""

    fact: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.fact} is {self.ours!r} here and {self.theirs!r} there"


def facts_of(
    *, model: str, weights: str, form: tuple[tuple[str, str], ...] = ()
) -> tuple[tuple[str, str], ...]:
    """The facts of an engine, in the order in which they are compared.

    Args:
        model: its name.
        weights: their version; two engines with other weights compute other KV.
        form: what resharding cannot change: number format, heads and layers of the whole model;
            not one rank's share of it. See `penstock.handoff.protocol.planning.form_facts`.
    """
    return (("model", model), ("weights", weights), *form)


def misfit(ours: Identity, theirs: Identity) -> Misfit | None:
    """What keeps two parties from exchanging KV, if anything does."""
    if ours.version != theirs.version:
        return Misfit("version", str(ours.version), str(theirs.version))
    if theirs.role not in SPEAKS_WITH[ours.role]:
        return Misfit("role", ours.role.value, theirs.role.value)
    if ours.facts == theirs.facts:
        return None
    mine, yours = dict(ours.facts), dict(theirs.facts)
    for name in (*mine, *yours):
        if mine.get(name) != yours.get(name):
            return Misfit(name, mine.get(name, "(absent)"), yours.get(name, "(absent)"))
    return Misfit("facts", str(ours.facts)[:512], str(theirs.facts)[:512])
