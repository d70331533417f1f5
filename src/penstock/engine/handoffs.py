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
from typing import TYPE_CHECKING

import msgspec

from penstock.config.values import HandoffTable
from penstock.engine.defaults import handoff_settings
from penstock.engine.requests import Phase
from penstock.engine.sharding import share_of
from penstock.engine.spec import InstanceRole
from penstock.engine.steps import HandedCounts
from penstock.errors import CapacityError, UnavailableError
from penstock.handoff import (
    DecodeHandoff,
    HandoffEngine,
    HandoffPair,
    LocalPrefillHandoff,
    PrefillHandoff,
    PrefillHandoffRank,
    open_decode,
    open_prefill,
)
from penstock.vocabulary.dtypes import DType
from penstock.vocabulary.layers import HeadRange
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.engine.architecture import Architecture
    from penstock.engine.requests import Answer
    from penstock.engine.spec import EngineSpec, InstanceSpec
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


class RankHandoffs:
    """A rank's part: it reports each layer that is computed, so that its KV is sent."""

    def __init__(
        self, door: LocalPrefillHandoff | PrefillHandoffRank | DecodeHandoff | DecodeHandoffRank
    ) -> None:
        self.door = door

    @property
    def counts(self) -> HandedCounts:
        """What the rank has handed over, or taken in."""
        found = self.door.statistics()
        sends = isinstance(self.door, LocalPrefillHandoff | PrefillHandoffRank)
        return HandedCounts(0 if sends else found.parts, found.bytes)

    def begin(self, step: Step, stream: int) -> Callable[[int], None] | None:
        """A step is about to be computed; returns what is called after each layer of it.

        Args:
            step: The step.
            stream: Where it runs on a GPU; 0 on the CPU.
        """
        door = self.door
        if isinstance(door, PrefillHandoffRank):
            for offer in step.offers:
                door.admit(offer)
            door.step()
        if not isinstance(door, LocalPrefillHandoff | PrefillHandoffRank) or not step.handed:
            return None
        tokens = {name: step.spans[span].stop for span, name in step.handed}

        def computed(layer: int) -> None:
            """The KV of the step goes out layer by layer, while the next ones are computed."""
            door.computed(tokens, layer=layer, stream=stream or None)

        return computed

    def drive(self, seconds: float) -> None:
        """Sends and receives while a step is computed."""
        self.door.drive(time.monotonic() + seconds)


class Handoffs:
    """What a scheduler calls; this class is for an instance without handoffs."""

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

    def step(self) -> list[tuple[Answer, tuple[int, ...]]]:
        """Sends and receives; returns the answers whose handoff ended since the last call.

        Each comes with its first token, if the prompt's KV has come.
        """
        return []


class Side(Handoffs):
    """What both sides have in common."""

    door: PrefillHandoff | DecodeHandoff

    def __init__(self, spec: InstanceSpec, rank: RankHandoffs | None) -> None:
        self.weights = spec.config.model.weights_version
        """What the weights are called now; KV of others is refused."""
        self.outcomes: Counter[str] = Counter()
        self.rank = rank
        """The one rank, if it is in this process."""
        self.ended: deque[HandedPrompt] = deque(maxlen=HANDOFFS_KEPT)
        self.delivered: set[str] = set()
        """Requests whose prompts were delivered; whoever reports that removes them."""
        self._block_tokens = spec.config.cache.block_tokens
        self._held: dict[str, Answer] = {}

    def step(self) -> list[tuple[Answer, tuple[int, ...]]]:
        over = []
        for result in self.door.step():
            answer = self._held.pop(result.handoff)
            outcome = result.outcome.value
            self.outcomes[outcome] += 1
            self.ended.append(
                HandedPrompt(
                    handoff=result.handoff,
                    tokens=result.token_count,
                    outcome=outcome,
                    began=result.began,
                    ended=result.ended,
                )
            )
            if result.delivered and answer.phase is not Phase.ENDED:
                self.delivered.add(answer.request.id)
            over.append((answer, result.tokens))
        return over

    def cancel(self, answer: Answer) -> None:
        self.door.cancel(answer.request.handoff)

    def _hold(self, answer: Answer) -> None:
        answer.held = True
        self._held[answer.request.handoff] = answer

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
        assert answer.lease is not None
        try:
            offer = self.door.offer(
                answer.request.handoff,
                answer.request.prompt,
                slots=self._blocks(answer),
                cached_tokens=answer.lease.token_count,
                origin=self._origin(answer),
            )
        except (ValueError, UnavailableError, CapacityError):
            self.outcomes["refused"] += 1
            return False
        self._hold(answer)
        if self.rank is None:
            self._new[offer.handoff] = offer
        return True

    def sampled(self, answer: Answer, token: int) -> None:
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
        self._hold(answer)
        answer.phase = Phase.CLAIMING
        return True


def rank_handoffs(
    spec: InstanceSpec, architecture: Architecture, tier: TensorTier, *, rank: int
) -> RankHandoffs | None:
    """The part of a rank in a process of its own, if its instance is one of a pair."""
    pair = pair_of(spec, architecture)
    if pair is None:
        return None
    settings = handoff_settings(spec.config, spec.device)
    if spec.role is InstanceRole.PREFILL:
        return RankHandoffs(open_prefill(pair, kv=tier, rank=rank, settings=settings))
    return RankHandoffs(
        open_decode(
            pair,
            kv=tier,
            rank=rank,
            settings=settings,
            folder=_folder(spec),
        )
    )


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
    pair = pair_of(spec, architecture)
    if pair is None:
        return None
    settings = handoff_settings(spec.config, spec.device)
    if spec.role is InstanceRole.DECODE:
        decode = open_decode(pair, kv=tier, settings=settings, folder=_folder(spec))
        return Claims(spec, None if tier is None else RankHandoffs(decode), decode)
    if tier is None:
        return Offers(spec, None, open_prefill(pair, settings=settings))
    local = open_prefill(pair, kv=tier, settings=settings)
    return Offers(spec, RankHandoffs(local), local)


def pair_of(spec: InstanceSpec, architecture: Architecture) -> HandoffPair | None:
    """The instance and its partner, if it has one: both instances compute the same pair."""
    if spec.pair is None:
        return None
    model = spec.config.model
    return HandoffPair(
        prefill=_engine(spec, spec.pair.prefill, architecture),
        decode=_engine(spec, spec.pair.decode, architecture),
        model=model.name,
        weights=f"{model.weights_version} {model.kv_dtype}",
        checksum="xxh3" if spec.device == "cpu" else "mix64",
        secret=spec.pair.secret,
        transport=(spec.config.handoff or HandoffTable()).transport,
    )


def _engine(spec: InstanceSpec, engine: EngineSpec, architecture: Architecture) -> HandoffEngine:
    layouts = []
    for rank in range(engine.ranks):
        heads = share_of(architecture, rank=rank, ranks=engine.ranks).kv_heads
        layouts.append(
            Layout.split(
                layers=range(architecture.layers),
                heads=HeadRange(first=heads.start, count=len(heads), total=architecture.kv_heads),
                channels=architecture.head_dim,
                dtype=DType.parse(spec.dtype),
                block_tokens=spec.config.cache.block_tokens,
                block_count=1,  # The other side need not know how many there are.
            )
        )
    return HandoffEngine(
        name=engine.name,
        address=engine.address,
        rank_addresses=tuple(engine.rank_addresses),
        layouts=tuple(layouts),
    )


def _folder(spec: InstanceSpec) -> Path | None:
    return Path(spec.folder) if spec.folder else None
