"""Names of parties, handoffs and writes; and whether two parties can exchange KV at all.

Invariants:

- A name is never given twice. A party that starts again draws a new incarnation, a decode engine
  that claims a handoff again raises the epoch, and a part that is written again gets the next
  attempt. So a late message names the one it belongs to.
- P5: two parties exchange nothing before each has checked the other's version, role and facts.
  The first difference is refused with both values.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from penstock.handoff.protocol.states import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.vocabulary.form import Form

PROTOCOL_VERSION = 2

NAME_CHARS_MAX = 128
"""A longer name of a party or handoff is refused: room for a UUID with a host."""

FACT_CHARS_MAX = 192
"""A longer value of a fact is cut, with a digest of the whole: both values fit one message."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
HandoffId = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
"""One prefill of one prompt. A router gives it to both engines; it is never used again."""
Incarnation = Annotated[int, msgspec.Meta(ge=0)]
"""64 random bits, drawn when a party starts."""
Epoch = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
"""Which claim of a handoff: the decode engine counts from 1."""

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
"""Parties of one engine. Its supervisor sees their deaths; other peers can only be suspected."""


class Life(NamedTuple):
    """One life of one party (a scheduler or a rank); incarnation 0 means "not known yet"."""

    name: Name
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation:016x}"


class WriteId(NamedTuple):
    """One remote write, never given twice in the life of the writing rank.

    The target's incarnation and the area's generation belong to it: the same part may have to
    be written again, into another area.
    """

    target: Life
    generation: int
    berth: int
    handoff: str
    epoch: int
    part: int
    attempt: int


class Identity(NamedTuple):
    """Who a party is, and what its KV is."""

    life: Life
    role: Role
    facts: tuple[tuple[str, str], ...] = ()
    """What must be equal on both sides, by name. See `facts_of`."""
    version: int = PROTOCOL_VERSION


class Misfit(NamedTuple):
    """The first difference between two parties."""

    fact: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.fact} is {self.ours!r} here and {self.theirs!r} there"


def facts_of(
    *, model: str, weights: str, form: tuple[tuple[str, str], ...] = ()
) -> tuple[tuple[str, str], ...]:
    """The facts of an engine, in the order in which they are compared."""
    return (("model", model), ("weights", weights), *form)


def form_facts(forms: Sequence[Form]) -> tuple[tuple[str, str], ...]:
    """The number format, heads and layers of the whole model, over all ranks of an engine.

    How many ranks there are, and how heads, layers and tokens are divided between them, is left
    out: `plan_reshard` decides whether two divisions fit.
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


def rank_facts(engine: str, forms: Sequence[Form]) -> tuple[tuple[str, str], ...]:
    """How the KV of an engine's ranks lies, a fact for each kind of field of their forms.

    Two sides with equal facts have equal forms, so that they cut a transfer alike. A difference
    is named by its field, such as `block_tokens of prefill`, and not by a digest of everything.
    """
    values: dict[str, list[str]] = {}
    for form in forms:
        for name, value in form.facts:
            # `group.0.layer.3.k.dtype` is one of the values of `dtype`.
            values.setdefault(name.rpartition(".")[2], []).append(value)
    facts = [(f"ranks of {engine}", str(len(forms)))]
    facts += [(f"{field} of {engine}", _listed(each)) for field, each in values.items()]
    return tuple(facts)


def _listed(values: Sequence[str]) -> str:
    """Values in their order, repeated ones and rising numbers together, in a bounded text."""
    if len(set(values)) == 1:
        text = values[0] if len(values) == 1 else f"{values[0]} ({len(values)} times)"
    elif all(value.isdecimal() for value in values):
        text = ", ".join(_spans([int(value) for value in values]))
    else:
        runs = [(value, len(list(run))) for value, run in groupby(values)]
        text = ", ".join(
            value if count == 1 else f"{value} ({count} times)" for value, count in runs
        )
    if len(text) <= FACT_CHARS_MAX:
        return text
    digest = sha256(text.encode()).hexdigest()[:16]
    return f"{text[: FACT_CHARS_MAX - len(digest) - 3]}… {digest}"


def _spans(numbers: Sequence[int]) -> Iterator[str]:
    """Rising numbers as `first-last`, in their order."""
    first = 0
    for position in range(1, len(numbers) + 1):
        if position == len(numbers) or numbers[position] != numbers[position - 1] + 1:
            one = position - first == 1
            yield str(numbers[first]) if one else f"{numbers[first]}-{numbers[position - 1]}"
            first = position


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
