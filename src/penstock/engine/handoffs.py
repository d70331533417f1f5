"""The scheduler's part in handoffs: prompts that are offered, and prompts that are claimed.

| role    | an answer that begins                      | its blocks are held until            |
|---------|--------------------------------------------|--------------------------------------|
| prefill | is offered, and computed up to one token   | nothing reads them any more          |
| decode  | is claimed, if enough of it is missing     | they are filled, or will not be      |

The one rule: blocks of an answer that is held belong to its handoff. They are neither given back
nor computed into before the handoff has ended, however it ends.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.engine.pairing import SETTINGS, block_keys, directory_of
from penstock.engine.requests import Phase
from penstock.engine.spec import InstanceRole
from penstock.engine.steps import Offer
from penstock.errors import CapacityError, UnavailableError
from penstock.handoff.driver.lines import zmq_lines
from penstock.handoff.driver.schedulers import DecodeSchedulerDriver, PrefillSchedulerDriver
from penstock.handoff.protocol.states import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.config import Config
    from penstock.engine.architecture import Architecture
    from penstock.engine.handed_ranks import HandedRank
    from penstock.engine.requests import Answer
    from penstock.engine.spec import InstanceSpec
    from penstock.transport.base import Waitable

MEET_S = 60.0
"""The ranks are loaded already; then something is wrong."""
HANDOFFS_KEPT = 4096
"""So many that have ended are kept, with their times: about half a megabyte."""


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


class Handoffs:
    """What a scheduler knows of handoffs; as it stands, those of an instance that has none."""

    def begin(self, answer: Answer) -> bool:  # noqa: ARG002
        """An answer has its blocks; `False` if it is of no use to compute it."""
        return True

    def sampled(self, answer: Answer, token: int) -> None:
        """A token was chosen."""

    def cancel(self, answer: Answer) -> None:
        """The handoff of an answer that is held is not wanted any more."""

    def take_offers(self) -> list[Offer]:
        """What the ranks have to know with the next step."""
        return []

    def step(self) -> list[Over]:
        """Does what there is to do; returns what is over since the last call."""
        return []


class Side(Handoffs):
    """What both sides have in common."""

    def __init__(
        self,
        driver: PrefillSchedulerDriver | DecodeSchedulerDriver,
        config: Config,
        rank: HandedRank | None,
    ) -> None:
        self.party = driver
        self.weights = config.model.weights_version
        """What the weights are called; sums are bound to it."""
        self.outcomes: Counter[str] = Counter()
        self.rank = rank
        """The one rank, if it is in this process."""
        self.ranks: tuple[str, ...] = ()
        """The names of all its ranks."""
        if rank is not None:
            rank.between_layers = self.listen
        self._block_tokens = config.cache.block_tokens
        self.ended: deque[HandedPrompt] = deque(maxlen=HANDOFFS_KEPT)
        self.delivered: set[str] = set()
        """Requests whose prompts were delivered; whoever tells of it takes them out."""
        self._held: dict[str, Answer] = {}
        self._begun: dict[str, HandedPrompt] = {}
        self._cancelled: set[str] = set()
        self._over: list[Over] = []

    def meet(self, ranks: Sequence[str], deadline: float) -> None:
        """Waits until its ranks are there.

        Raises:
            UnavailableError: they did not come in time.
        """
        self.ranks = tuple(ranks)
        while not all(self.party.machine.is_open(name) for name in ranks):
            if time.monotonic() > deadline:
                raise UnavailableError(f"ranks {list(ranks)} did not come to hand blocks over")
            self.listen()
            if self.rank is not None:
                self.rank.step()
            self.party.wait(min(deadline, time.monotonic() + 0.05))

    def step(self) -> list[Over]:
        """Does what there is to do; see `Handoffs`."""
        if self.rank is not None:
            self.rank.step()
        self.listen()
        over, self._over = self._over, []
        return over

    def listen(self) -> None:
        """Takes in what was said; what is over is told by the next `step`."""
        for ended in self.party.step():
            answer = self._held.pop(ended.handoff)
            self._cancelled.discard(ended.handoff)
            delivered = ended.outcome is Outcome.DELIVERED
            self._count(self._begun.pop(ended.handoff), ended.outcome)
            if delivered and answer.phase is not Phase.ENDED:
                self.delivered.add(answer.request.id)
            self._over.append(Over(answer, ended.tokens if delivered else ()))

    def cancel(self, answer: Answer) -> None:
        """The handoff is not wanted any more; see `Handoffs`."""
        name = answer.request.handoff
        if name in self._held and name not in self._cancelled:
            self._cancelled.add(name)
            self.party.cancel(name)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do, whatever comes."""
        ranks = self.rank is not None and self.rank.has_work
        return bool(self._over) or self.party.has_work or ranks

    @property
    def waitables(self) -> list[Waitable]:
        """What to ask, and then to wait for, until there is something to do."""
        own = () if self.rank is None else self.rank.waitables
        return [*self.party.lines.waitables, *own]

    @property
    def descriptors(self) -> list[int]:
        """What to wait for, besides."""
        own = () if self.rank is None else self.rank.descriptors
        return [*self.party.lines.descriptors, *own]

    def next_deadline(self, latest: float) -> float:
        """When to call `step` although nothing came."""
        dues = [latest, self.party.next_deadline()]
        if self.rank is not None:
            dues.append(self.rank.next_deadline())
        return min(due for due in dues if due is not None)

    def close(self) -> None:
        """Ends the lines: nothing is sent or taken in after this."""
        if self.rank is not None:
            self.rank.close()
        self.party.close()

    def _hold(self, answer: Answer, *, tokens: int) -> None:
        answer.held = True
        name, now = answer.request.handoff, time.monotonic()
        self._held[name] = answer
        self._begun[name] = HandedPrompt(
            handoff=name, tokens=tokens, outcome="", began=now, ended=now
        )

    def _count(self, begun: HandedPrompt, outcome: Outcome) -> None:
        self.outcomes[outcome.value] += 1
        now = time.monotonic()
        self.ended.append(msgspec.structs.replace(begun, outcome=outcome.value, ended=now))

    def _keys(self, answer: Answer) -> list[bytes]:
        request = answer.request
        origin = f"{self.weights}\n{request.tenant}"
        return block_keys(request.prompt, block_tokens=self._block_tokens, origin=origin)

    def _blocks(self, answer: Answer) -> list[int]:
        """The slots of the prompt's blocks."""
        assert answer.lease is not None
        count = -(-len(answer.request.prompt) // self._block_tokens)
        table: list[int] = answer.lease.block_table.tolist()
        return table[:count]


class Offers(Side):
    """Prompts that are computed here for another instance."""

    party: PrefillSchedulerDriver

    def __init__(
        self, driver: PrefillSchedulerDriver, config: Config, rank: HandedRank | None
    ) -> None:
        super().__init__(driver, config, rank)
        self._new: dict[str, Offer] = {}

    def begin(self, answer: Answer) -> bool:
        """Offers a prompt; see `Handoffs`."""
        if answer.handed:
            return not answer.request.handoff
        answer.handed = True
        name = answer.request.handoff
        assert answer.lease is not None
        try:
            self.party.submit(name)
        except (ValueError, UnavailableError, CapacityError):
            self.outcomes["refused"] += 1
            return False
        self._hold(answer, tokens=len(answer.request.prompt))
        self._new[name] = Offer(
            name,
            len(answer.request.prompt),
            answer.lease.token_count,
            self._blocks(answer),
            self._keys(answer),
            self.party.life.incarnation,
        )
        return True

    def sampled(self, answer: Answer, token: int) -> None:
        """The first token goes to the other side; see `Handoffs`."""
        if answer.request.handoff in self._held:
            self.party.first_token(answer.request.handoff, (token,))

    def take_offers(self) -> list[Offer]:
        """What the ranks have to know with the next step; see `Handoffs`."""
        offers, self._new = list(self._new.values()), {}
        return offers

    def cancel(self, answer: Answer) -> None:
        """The handoff is not wanted any more; see `Handoffs`."""
        self._new.pop(answer.request.handoff, None)
        super().cancel(answer)


class Claims(Side):
    """Prompts that are computed elsewhere and answered here."""

    party: DecodeSchedulerDriver

    def begin(self, answer: Answer) -> bool:
        """Claims what is missing of a prompt, if that is more than a block; see `Handoffs`."""
        if answer.handed:
            return True
        answer.handed = True
        assert answer.lease is not None
        tokens = len(answer.request.prompt)
        first = answer.lease.token_count // self._block_tokens
        if tokens - first * self._block_tokens <= self._block_tokens:
            self.outcomes["not needed"] += 1
            return True
        try:
            self.party.submit(
                answer.request.handoff,
                token_count=tokens,
                cached_tokens=first * self._block_tokens,
                slots=dict.fromkeys(self.ranks, self._blocks(answer)[first:]),
                keys=self._keys(answer),
            )
        except (ValueError, UnavailableError, CapacityError):
            self.outcomes["refused"] += 1
            return True
        self._hold(answer, tokens=tokens - first * self._block_tokens)
        answer.phase = Phase.CLAIMING
        return True


def handoffs_of(
    spec: InstanceSpec, architecture: Architecture, rank: HandedRank | None
) -> Offers | Claims | None:
    """The scheduler's part in handoffs, if its instance is one of a pair; its ranks are there.

    Args:
        spec: the instance.
        architecture: of its model.
        rank: its one rank, if that is in this process.

    Raises:
        UnavailableError: the ranks did not come.
    """
    if spec.pair is None:
        return None
    directory = directory_of(spec, architecture)
    lines = zmq_lines(directory, spec.name, secret=spec.pair.secret)
    incarnation = secrets.randbits(63) + 1
    config = spec.config
    found: Offers | Claims
    if spec.role is InstanceRole.PREFILL:
        prefill = PrefillSchedulerDriver(
            directory, lines, incarnation=incarnation, settings=SETTINGS
        )
        found, place = Offers(prefill, config, rank), directory.prefill
    else:
        decode = DecodeSchedulerDriver(directory, lines, incarnation=incarnation, settings=SETTINGS)
        found, place = Claims(decode, config, rank), directory.decode
    found.meet(place.rank_names, time.monotonic() + MEET_S)
    return found
