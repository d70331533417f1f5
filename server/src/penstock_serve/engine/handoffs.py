"""An instance's part in handoffs: prompts that it offers or claims.

| it is the | an answer that begins                    | its blocks are held until       |
|-----------|------------------------------------------|---------------------------------|
| `prefill` | is offered, and computed up to one token | nothing reads them any more     |
| `decode`  | is claimed, if enough of it is missing   | they are filled, or will not be |

An instance can be both, for different requests and with different peers (`peers`).

The one rule: blocks of an answer that is held belong to its handoff. They are neither given back
nor computed into before the handoff has ended, however it ends.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import TYPE_CHECKING

import msgspec

from penstock import DecodeHandoff, PrefillHandoff
from penstock.errors import CapacityError, UnavailableError
from penstock_serve.engine.requests import Phase
from penstock_serve.engine.steps import StepOffer

if TYPE_CHECKING:
    from penstock import HandoffResult
    from penstock_serve.engine.peers import PairNames, Peers
    from penstock_serve.engine.requests import Answer
    from penstock_serve.engine.spec import InstanceSpec, PairSpec

logger = logging.getLogger("penstock.engine.handoffs")

HANDOFFS_KEPT = 4096
"""Handoffs that have ended and are kept with their times: about half a megabyte."""
CLOSED = "closed"
"""The outcome of a handoff whose pair was closed before it had ended."""
LOST = "lost"
"""The outcome of a handoff that ended because the other instance is gone."""


class HandedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A handoff that has ended on this side, with its times."""

    handoff: str
    tokens: int
    """The prompt's tokens whose KV was to be handed over, whole blocks but for the last."""
    outcome: str
    began: float
    """On the monotonic clock, which all processes of a machine share."""
    ended: float


class Handoffs:
    """What a scheduler calls; this class is for an instance without handoffs."""

    def begin(self, answer: Answer) -> bool:  # noqa: ARG002
        """An answer has its blocks; `False` if it is of no use to compute it."""
        return True

    def sampled(self, answer: Answer, token: int) -> None:
        """A token was chosen."""

    def cancel(self, answer: Answer, *, lost: bool = False) -> None:
        """The handoff of an answer that is held ends: nobody wants it, or it is lost."""

    def take_offers(self) -> list[StepOffer]:
        """What ranks in other processes have to know with the next step."""
        return []

    def step(self) -> list[tuple[Answer, tuple[int, ...]]]:
        """Sends and receives; returns the answers whose handoff ended since the last call.

        Each comes with its first token, if the prompt's KV has come.
        """
        return []


class InstanceHandoffs(Handoffs):
    """The handoffs of one instance, with all its peers."""

    def __init__(self, spec: InstanceSpec, peers: Peers) -> None:
        self.weights = spec.config.model.weights_version
        """What the weights are called now; KV of others is refused."""
        self.outcomes: Counter[str] = Counter()
        self.delivered_s = 0.0
        """The time that handoffs took which were delivered, all together."""
        self.peers = peers
        self.ended: deque[HandedPrompt] = deque(maxlen=HANDOFFS_KEPT)
        self.delivered: set[str] = set()
        """Requests whose prompts were delivered; whoever reports that removes them."""
        self._name = spec.name
        self._block_tokens = spec.config.cache.block_tokens
        self._held: dict[str, Answer] = {}
        self._lost: set[str] = set()
        """Those of the handoffs that end because the other instance is gone."""
        self._new: dict[str, StepOffer] = {}
        """Offers that ranks in other processes have not got yet."""
        self._dropped: list[Answer] = []
        """Answers whose pair was closed: their handoffs have ended."""

    def open(self, pair: PairSpec) -> None:
        """Opens a pair, as `Peers.open`; handoffs of an earlier one of these names end."""
        self._drop((pair.prefill.name, pair.decode.name))
        self.peers.open(pair, weights=self.weights)

    def close_pair(self, prefill: str, decode: str, *, lost: bool = False) -> None:
        """Closes a pair; its handoffs end, and count as lost where one of the two is gone."""
        self._drop((prefill, decode), LOST if lost else CLOSED)

    def begin(self, answer: Answer) -> bool:
        offers = answer.request.prefill == self._name
        if answer.handed:
            return not (offers and answer.request.handoff)
        answer.handed = True
        return self._offer(answer) if offers else self._claim(answer)

    def sampled(self, answer: Answer, token: int) -> None:
        handoff = answer.request.handoff
        if handoff in self._held:
            door = self.peers.door(*_pair_names(answer))
            if isinstance(door, PrefillHandoff):
                door.first_token(handoff, token)

    def cancel(self, answer: Answer, *, lost: bool = False) -> None:
        handoff = answer.request.handoff
        self._new.pop(handoff, None)
        door = self.peers.door(*_pair_names(answer))
        if isinstance(door, PrefillHandoff | DecodeHandoff):
            if lost and handoff in self._held:
                self._lost.add(handoff)
            door.cancel(handoff, "the other instance is gone" if lost else "cancelled")

    def take_offers(self) -> list[StepOffer]:
        offers, self._new = list(self._new.values()), {}
        return offers

    def step(self) -> list[tuple[Answer, tuple[int, ...]]]:
        over: list[tuple[Answer, tuple[int, ...]]] = [(answer, ()) for answer in self._dropped]
        self._dropped.clear()
        for result in self.peers.step():
            answer = self._held.pop(result.handoff)
            self._note(result, answer)
            if result.delivered and answer.phase is not Phase.ENDED:
                self.delivered.add(answer.request.id)
            over.append((answer, result.tokens))
        return over

    def _offer(self, answer: Answer) -> bool:
        """Offers a prompt; `False` if that cannot be: nobody else needs it."""
        assert answer.lease is not None
        door = self.peers.door(*_pair_names(answer))
        if not isinstance(door, PrefillHandoff):
            return self._refuse()
        try:
            offer = door.offer(
                answer.request.handoff,
                answer.request.prompt,
                slots=self._blocks(answer),
                cached_tokens=answer.lease.token_count,
                origin=self._origin(answer),
            )
        except (ValueError, UnavailableError, CapacityError):
            return self._refuse()
        self._hold(answer)
        if not self.peers.has_rank:
            self._new[offer.handoff] = StepOffer(offer, answer.request.decode)
        return True

    def _claim(self, answer: Answer) -> bool:
        """Claims what is missing of a prompt, if that is more than a block."""
        assert answer.lease is not None
        prompt = answer.request.prompt
        first = answer.lease.token_count // self._block_tokens
        cached = first * self._block_tokens
        if len(prompt) - cached <= self._block_tokens:
            self.outcomes["not needed"] += 1
            return True
        door = self.peers.door(*_pair_names(answer))
        if not isinstance(door, DecodeHandoff):
            return not self._refuse()
        try:
            door.claim(
                answer.request.handoff,
                prompt,
                slots=self._blocks(answer)[first:],
                cached_tokens=cached,
                origin=self._origin(answer),
            )
        except (ValueError, UnavailableError, CapacityError):
            return not self._refuse()
        self._hold(answer)
        answer.enter(Phase.CLAIMING)
        return True

    def _refuse(self) -> bool:
        self.outcomes["refused"] += 1
        return False

    def _note(self, result: HandoffResult, answer: Answer) -> None:
        lost = result.handoff in self._lost
        self._lost.discard(result.handoff)
        outcome = LOST if lost and not result.delivered else result.outcome.value
        self._count(outcome, answer)
        if result.delivered:
            self.delivered_s += result.ended - result.began
        self.ended.append(
            HandedPrompt(
                handoff=result.handoff,
                tokens=result.token_count,
                outcome=outcome,
                began=result.began,
                ended=result.ended,
            )
        )

    def _count(self, outcome: str, answer: Answer) -> None:
        self.outcomes[outcome] += 1
        if outcome == LOST:
            asked = answer.request
            logger.warning(
                "handoff lost: handoff=%s prefill=%s decode=%s cause=%s is gone",
                *(asked.handoff, asked.prefill, asked.decode),
                asked.decode if asked.prefill == self._name else asked.prefill,
            )

    def _drop(self, names: PairNames, outcome: str = CLOSED) -> None:
        """A pair was closed, or is about to be opened anew: what it held is free."""
        self.peers.close_pair(*names)
        for handoff, answer in list(self._held.items()):
            if _pair_names(answer) == names:
                del self._held[handoff]
                self._new.pop(handoff, None)
                self._dropped.append(answer)
                self._count(LOST if handoff in self._lost else outcome, answer)
                self._lost.discard(handoff)

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


def _pair_names(answer: Answer) -> PairNames:
    return answer.request.prefill, answer.request.decode
