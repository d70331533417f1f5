"""An instance's part in handoffs: prompts that it offers or claims, and what its ranks send.

| role    | an answer that begins                      | its blocks are held until            |
|---------|--------------------------------------------|--------------------------------------|
| prefill | is offered, and computed up to one token   | nothing reads them any more          |
| decode  | is claimed, if enough of it is missing     | they are filled, or will not be      |

The one rule: blocks of an answer that is held belong to its handoff. They are neither given back
nor computed into before the handoff has ended, however it ends.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.engine.pairing import SETTINGS, pair_of
from penstock.engine.requests import Phase
from penstock.engine.spec import InstanceRole
from penstock.engine.steps import HandedCounts
from penstock.errors import CapacityError, UnavailableError
from penstock.handoff import (
    DecodeHandoff,
    LocalPrefillHandoff,
    PrefillHandoff,
    PrefillHandoffRank,
    open_decode,
    open_prefill,
)

if TYPE_CHECKING:
    from penstock.engine.architecture import Architecture
    from penstock.engine.requests import Answer
    from penstock.engine.spec import InstanceSpec
    from penstock.engine.steps import Step
    from penstock.handoff import DecodeHandoffRank, HandoffOffer
    from penstock.tiers.tensors import TensorTier

HANDOFFS_KEPT = 4096
"""Handoffs that have ended and are kept with their times: about half a megabyte."""


class HandedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A handoff that has ended on this side, with its times."""

    handoff: str
    tokens: int
    """The prompt's tokens whose KV was to be handed over, whole blocks but for the last."""
    outcome: str
    began: float
    """On the monotonic clock, which all processes of a machine share."""
    ended: float


class Over(NamedTuple):
    """The handoff of an answer is over."""

    answer: Answer
    tokens: tuple[int, ...]
    """The first token, if the prompt's KV has come."""


class RankHandoffs:
    """A rank's part: it reports each layer that is computed, so that its KV is sent."""

    def __init__(
        self, door: LocalPrefillHandoff | PrefillHandoffRank | DecodeHandoff | DecodeHandoffRank
    ) -> None:
        self.door = door
        self._stops: dict[str, int] = {}
        """Tokens of each prompt whose KV is there once the step under way is computed."""

    @property
    def counts(self) -> HandedCounts:
        """What the rank has handed over, or taken in."""
        found = self.door.statistics()
        decodes = not isinstance(self.door, LocalPrefillHandoff | PrefillHandoffRank)
        return HandedCounts(found.parts if decodes else 0, found.bytes)

    def begin(self, step: Step) -> None:
        """A step is about to be computed."""
        self._stops = {name: step.spans[span].stop for span, name in step.handed}
        if isinstance(self.door, PrefillHandoffRank):
            for offer in step.offers:
                self.door.admit(offer)
            self.door.step()

    def layer_computed(self, layer: int) -> None:
        """The KV of the step is there in one layer: it goes out while the next is computed."""
        if self._stops and isinstance(self.door, LocalPrefillHandoff | PrefillHandoffRank):
            self.door.computed(self._stops, layer=layer)


class Handoffs:
    """What a scheduler knows of handoffs; as it stands, those of an instance that has none."""

    def begin(self, answer: Answer) -> bool:  # noqa: ARG002
        """An answer has its blocks; `False` if it is of no use to compute it."""
        return True

    def sampled(self, answer: Answer, token: int) -> None:
        """A token was chosen."""

    def cancel(self, answer: Answer) -> None:
        """The handoff of an answer that is held is not wanted any more."""

    def take_offers(self) -> list[HandoffOffer]:
        """What ranks in other processes have to know with the next step."""
        return []

    def step(self) -> list[Over]:
        """Does what there is to do; returns what is over since the last call."""
        return []


class Side(Handoffs):
    """What both sides have in common."""

    door: PrefillHandoff | DecodeHandoff

    def __init__(self, spec: InstanceSpec, rank: RankHandoffs | None) -> None:
        config = spec.config
        self.weights = config.model.weights_version
        """What the weights are called now; KV of others is refused."""
        self.outcomes: Counter[str] = Counter()
        self.rank = rank
        """The one rank, if it is in this process."""
        self._block_tokens = config.cache.block_tokens
        self.ended: deque[HandedPrompt] = deque(maxlen=HANDOFFS_KEPT)
        self.delivered: set[str] = set()
        """Requests whose prompts were delivered; whoever reports that removes them."""
        self._held: dict[str, tuple[Answer, HandedPrompt]] = {}

    def step(self) -> list[Over]:
        over = []
        for result in self.door.step():
            answer, begun = self._held.pop(result.handoff)
            self.outcomes[result.outcome.value] += 1
            now = time.monotonic()
            self.ended.append(
                msgspec.structs.replace(begun, outcome=result.outcome.value, ended=now)
            )
            if result.delivered and answer.phase is not Phase.ENDED:
                self.delivered.add(answer.request.id)
            over.append(Over(answer, result.tokens))
        return over

    def cancel(self, answer: Answer) -> None:
        self.door.cancel(answer.request.handoff)

    def _hold(self, answer: Answer, *, tokens: int) -> None:
        answer.held = True
        name, now = answer.request.handoff, time.monotonic()
        begun = HandedPrompt(handoff=name, tokens=tokens, outcome="", began=now, ended=now)
        self._held[name] = answer, begun

    def _origin(self, answer: Answer) -> str:
        return f"{self.weights}\n{answer.request.tenant}"

    def _blocks(self, answer: Answer) -> list[int]:
        """The slots of the prompt's blocks."""
        assert answer.lease is not None
        count = -(-len(answer.request.prompt) // self._block_tokens)
        table: list[int] = answer.lease.block_table.tolist()
        return table[:count]


class Offers(Side):
    """Prompts that are computed here for another instance."""

    def __init__(self, spec: InstanceSpec, rank: RankHandoffs | None, door: PrefillHandoff) -> None:
        super().__init__(spec, rank)
        self.door: PrefillHandoff = door
        self._new: dict[str, HandoffOffer] = {}

    def begin(self, answer: Answer) -> bool:
        if answer.handed:
            return not answer.request.handoff
        answer.handed = True
        name, prompt = answer.request.handoff, answer.request.prompt
        assert answer.lease is not None
        try:
            offer = self.door.offer(
                name,
                prompt,
                slots=self._blocks(answer),
                cached_tokens=answer.lease.token_count,
                origin=self._origin(answer),
            )
        except (ValueError, UnavailableError, CapacityError):
            self.outcomes["refused"] += 1
            return False
        self._hold(answer, tokens=len(prompt))
        if self.rank is None:
            self._new[name] = offer
        return True

    def sampled(self, answer: Answer, token: int) -> None:
        """The first token goes to the other side."""
        if answer.request.handoff in self._held:
            self.door.first_token(answer.request.handoff, token)

    def take_offers(self) -> list[HandoffOffer]:
        offers, self._new = list(self._new.values()), {}
        return offers

    def cancel(self, answer: Answer) -> None:
        self._new.pop(answer.request.handoff, None)
        super().cancel(answer)


class Claims(Side):
    """Prompts that are computed elsewhere and answered here."""

    def __init__(self, spec: InstanceSpec, rank: RankHandoffs | None, door: DecodeHandoff) -> None:
        super().__init__(spec, rank)
        self.door: DecodeHandoff = door

    def begin(self, answer: Answer) -> bool:
        """Claims what is missing of a prompt, if that is more than a block."""
        if answer.handed:
            return True
        answer.handed = True
        assert answer.lease is not None
        prompt = answer.request.prompt
        first = answer.lease.token_count // self._block_tokens
        cached = first * self._block_tokens
        if len(prompt) - cached <= self._block_tokens:
            self.outcomes["not needed"] += 1
            return True
        try:
            self.door.claim(
                answer.request.handoff,
                prompt,
                slots=self._blocks(answer)[first:],
                cached_tokens=cached,
                origin=self._origin(answer),
            )
        except (ValueError, UnavailableError, CapacityError):
            self.outcomes["refused"] += 1
            return True
        self._hold(answer, tokens=len(prompt) - cached)
        answer.phase = Phase.CLAIMING
        return True


def rank_handoffs(
    spec: InstanceSpec, architecture: Architecture, tier: TensorTier, *, rank: int
) -> RankHandoffs | None:
    """The part of a rank in a process of its own, if its instance is one of a pair."""
    if spec.pair is None:
        return None
    pair = pair_of(spec, architecture)
    if spec.role is InstanceRole.PREFILL:
        return RankHandoffs(open_prefill(pair, kv=tier, rank=rank, settings=SETTINGS))
    folder = Path(spec.folder) if spec.folder else None
    return RankHandoffs(open_decode(pair, kv=tier, rank=rank, settings=SETTINGS, folder=folder))


def handoffs_of(
    spec: InstanceSpec, architecture: Architecture, tier: TensorTier | None
) -> Offers | Claims | None:
    """The scheduler's part in handoffs, if its instance is one of a pair; its ranks are there.

    Args:
        spec: the instance.
        architecture: of its model.
        tier: the KV of its one rank, if that is in this process.

    Raises:
        UnavailableError: the ranks did not come.
    """
    if spec.pair is None:
        return None
    pair = pair_of(spec, architecture)
    if spec.role is InstanceRole.DECODE:
        folder = Path(spec.folder) if spec.folder else None
        decode = open_decode(pair, kv=tier, settings=SETTINGS, folder=folder)
        return Claims(spec, None if tier is None else RankHandoffs(decode), decode)
    if tier is None:
        return Offers(spec, None, open_prefill(pair, settings=SETTINGS))
    local = open_prefill(pair, kv=tier, settings=SETTINGS)
    return Offers(spec, RankHandoffs(local), local)
