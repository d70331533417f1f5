"""Questions of engines to the store process: which blocks are there, one by one or in pages.

Tiers that know what they have are answered for at once. Those that have to ask (`AskedTier`) answer
later: a find when the tier has the answer, the first page when the tier knows which generation of
the space counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.store.base import AskedTier, FindJob, Space
from penstock.store.messages import (
    IN_ANOTHER_FORM,
    FindAnswer,
    PageAnswer,
    join_parents,
    split_keys,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.store.base import FoundBlocks, MappedArena
    from penstock.store.messages import FindRequest, PageRequest
    from penstock.store.sessions import ClientSession, OwnerState
    from penstock.vocabulary.ids import Key

FINDS_MAX = 4096
"""Questions in hand, of all owners; more are answered with nothing found, at once."""


class _Find(NamedTuple):
    """A question that a tier has yet to answer."""

    session: ClientSession
    number: int


class StoreQuestions:
    """The questions in hand of all owners."""

    def __init__(self) -> None:
        self._finds: dict[int, _Find] = {}
        """By the ticket of their jobs."""
        self._pages: list[tuple[ClientSession, PageRequest]] = []
        """Of tiers that do not know the generation of a space yet."""

    def find(
        self,
        session: ClientSession,
        owner: OwnerState,
        request: FindRequest,
        arenas: Sequence[MappedArena],
        ticket: int,
    ) -> None:
        """Answers which blocks are there, or has a tier ask under `ticket`."""
        keys, slot = split_keys(request.keys), owner.slot(request.tier)
        if not isinstance(slot.tier, AskedTier) or owner.why_not(request.tier):
            found = _present(owner, request.tier, arenas, keys)
            session.answer(FindAnswer(request.number, bytes(found)))
            return
        if len(self._finds) >= FINDS_MAX:
            session.answer(FindAnswer(request.number, bytes(len(keys))))
            return
        self._finds[ticket] = _Find(session, request.number)
        space = _space(owner, request.tier)
        slot.tier.seek(FindJob(ticket, arenas, space, keys, request.first))

    def answer(self, found: Sequence[FoundBlocks]) -> None:
        """Passes answers of a tier on."""
        for each in found:
            find = self._finds.pop(each.ticket)
            present = bytearray(each.present)
            if each.foreign:
                present[present.index(0)] = IN_ANOTHER_FORM
            find.session.answer(FindAnswer(find.number, bytes(present)))

    def page(
        self,
        session: ClientSession,
        owner: OwnerState,
        request: PageRequest,
        arenas: Sequence[MappedArena],
    ) -> None:
        """Answers with some blocks of a tier; later, if its generation is not known."""
        slot = owner.slot(request.tier)
        if slot.tier is None or not owner.ready:
            return  # Once it is welcome again, it begins with the first page.
        if slot.tier.generation(owner.hello.space) is None:
            self._pages.append((session, request))
            return
        space = _space(owner, request.tier)
        page = slot.tier.page(space, arenas[0].part, request.cursor, request.limit)
        keys = list(page.keys)
        there = _present(owner, request.tier, arenas, keys)
        kept = [at for at, present in enumerate(there) if present]
        parents = [page.parents[at] for at in kept]
        session.answer(
            PageAnswer(
                request.tier,
                b"".join([keys[at] for at in kept]),
                join_parents(parents, len(kept)),
                page.cursor,
            )
        )

    def take_pages(self) -> list[tuple[ClientSession, PageRequest]]:
        """The pages that wait for a generation; they are to be asked for again."""
        pages, self._pages = self._pages, []
        return pages


def _space(owner: OwnerState, tier: int) -> Space:
    slot = owner.slot(tier)
    assert slot.tier is not None
    generation = slot.tier.generation(owner.hello.space)
    assert generation is not None
    return Space(owner.hello.space, generation)


def _present(
    owner: OwnerState, tier: int, arenas: Sequence[MappedArena], keys: list[Key]
) -> list[bool]:
    """Which blocks are there on every rank."""
    slot = owner.slot(tier)
    if slot.tier is None or owner.why_not(tier):
        return [False] * len(keys)
    space = _space(owner, tier)
    found = [True] * len(keys)
    for arena in arenas:
        there = slot.tier.find(space, arena.part, keys)
        found = [both and one for both, one in zip(found, there, strict=True)]
    return found
