"""A rank's sides of all pairs, and how far the prompts are computed that it may hand over.

In a pair each KV group of a rank is a party of its own: a prompt has other blocks in each.

Its scheduler says which pairs to open and which prompts were offered. The engine's thread reports
each layer of each step. Nobody may want a prompt until it is computed, so progress is kept for
every prompt from its first layer on, and sent when its offer comes.

The one rule: KV is reported that is in its blocks.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from penstock.connectors.handoff.messages import (
    WITHIN_ENGINE,
    AdmitOffer,
    CloseSide,
    ForgetPrompt,
    OpenSide,
    SideOpened,
    SideRefused,
    receive,
    send,
)
from penstock.errors import PenstockError
from penstock.handoff import (
    DecodeHandoffRank,
    PrefillHandoffRank,
    SharedListener,
    open_decode,
    open_prefill,
)
from penstock.transport.zeromq import IPC, Listener
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.connectors.base.engine import HandedLayer
    from penstock.connectors.handoff.messages import AnyMessage, PairCard
    from penstock.handoff import HandoffOffer
    from penstock.tiers.tensors import TensorTier
    from penstock.transport.base import Waitable
    from penstock.transport.zmq_channel import ZmqChannel

log = logging.getLogger(__name__)

PROMPTS_MAX = 4096
"""Prompts whose progress is kept; as many as a scheduler can have under way."""

PairNames = tuple[str, str]
RankSide = PrefillHandoffRank | DecodeHandoffRank


class RankAddresses(NamedTuple):
    """Where a rank listens, and how its KV lies: what its scheduler must know of it."""

    scheduler: str
    """For its own scheduler."""
    pairs: str
    """For the parties of its pairs."""
    forms: list[bytes]
    """Of each KV group."""
    layers: list[list[int]]
    """Which layers of the model each KV group has."""


class RankSides:
    """The sides of one rank."""

    def __init__(
        self,
        engine: str,
        rank: int,
        tiers: Sequence[TensorTier],
        layers: Mapping[int, HandedLayer],
    ) -> None:
        """Listens from now on.

        Args:
            engine: The name of its engine.
            rank: Its number.
            tiers: Its KV, a tier for each KV group.
            layers: Where each layer is in them.

        Raises:
            UnavailableError: there is no address to listen at.
        """
        self._engine = engine
        self._rank = rank
        self._tiers = tuple(tiers)
        self._layers = dict(layers)
        self._door = Listener(f"{engine}/{rank}", settings=WITHIN_ENGINE)
        self._listener = SharedListener(engine, [IPC])
        self._scheduler: ZmqChannel | None = None
        self._open: dict[PairNames, tuple[RankSide, ...]] = {}
        """The sides of each pair, one for each KV group."""
        self._progress: OrderedDict[str, dict[int, int]] = OrderedDict()
        """Tokens computed in each layer, by handoff."""
        self._offered: dict[str, Sequence[PrefillHandoffRank]] = {}
        """Where a handoff was admitted, by KV group."""

    @property
    def addresses(self) -> RankAddresses:
        """For its scheduler."""
        forms = [Form(layout=tier.layout, checksum=Algorithm.XXH3) for tier in self._tiers]
        groups: list[list[int]] = [[] for _ in self._tiers]
        for layer, at in sorted(self._layers.items()):
            groups[at.group].append(layer)
        return RankAddresses(
            self._door.address, self._listener.address, [each.to_bytes() for each in forms], groups
        )

    # ---------------------------------------------------------------- from the engine's thread

    def computed(self, tokens: Mapping[str, int], layer: int) -> None:
        """The KV of the first tokens of some prompts is in its blocks, in one layer."""
        for handoff, count in tokens.items():
            layers = self._progress.get(handoff)
            if layers is None:
                layers = self._progress[handoff] = {}
                if len(self._progress) > PROMPTS_MAX:
                    self._forget(next(iter(self._progress)))
            layers[layer] = count
            if (sides := self._offered.get(handoff)) is not None:
                self._report(sides, handoff, layer, count)

    def restart(self, handoffs: Iterable[str]) -> None:
        """Prompts that nobody was offered yet have lost their blocks."""
        for handoff in handoffs:
            self._forget(handoff)

    # ---------------------------------------------------------------- what the thread calls

    def step(self) -> None:
        if (channel := self._door.accept()) is not None:
            self._meet(channel)
        if self._scheduler is not None:
            self._hear(self._scheduler)
        # Also a caller whose pair is not open: otherwise the descriptor stays readable.
        self._listener.look(frozenset())
        for side in self._sides:
            side.step()

    @property
    def has_work(self) -> bool:
        return any(side.has_work for side in self._sides)

    @property
    def waitables(self) -> list[Waitable]:
        lines = [each for side in self._sides for each in side.waitables]
        own = [self._scheduler] if self._scheduler is not None else []
        return [self._door, *own, *lines]

    @property
    def descriptors(self) -> list[int]:
        found = [each for side in self._sides for each in side.descriptors]
        return [*found, self._listener.descriptor]

    def next_deadline(self) -> float | None:
        dues = [side.next_deadline() for side in self._sides]
        return min((due for due in dues if due is not None), default=None)

    def close(self) -> None:
        for side in self._sides:
            side.close()
        self._open.clear()
        if self._scheduler is not None:
            self._scheduler.close()
        self._listener.close()
        self._door.close()

    # ---------------------------------------------------------------- inside

    @property
    def _sides(self) -> list[RankSide]:
        return [side for sides in self._open.values() for side in sides]

    def _meet(self, channel: ZmqChannel) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        self._scheduler = channel

    def _hear(self, channel: ZmqChannel) -> None:
        messages, end = receive(channel)
        for message in messages:
            self._obey(channel, message)
        if end:
            # The scheduler's process is gone: nobody needs these sides.
            channel.close()
            self._scheduler = None
            for names in list(self._open):
                self._close_side(names)

    def _obey(self, channel: ZmqChannel, message: AnyMessage) -> None:
        match message:
            case OpenSide(pair=pair):
                send(channel, self._open_side(pair))
            case CloseSide(prefill=prefill, decode=decode):
                self._close_side((prefill, decode))
            case AdmitOffer(decode=decode, offers=offers):
                self._admit(decode, offers)
            case ForgetPrompt(handoff=handoff):
                self._forget(handoff)
            case _:
                log.warning("a rank was sent %s: ignored", type(message).__name__)

    def _admit(self, decode: str, offers: Sequence[HandoffOffer]) -> None:
        """A prompt was offered: one offer for each KV group."""
        opened = self._open.get((self._engine, decode), ())
        sides = [side for side in opened if isinstance(side, PrefillHandoffRank)]
        if not sides:
            return
        for side, offer in zip(sides, offers, strict=True):
            side.admit(offer)
        handoff = offers[0].handoff
        self._offered[handoff] = sides
        for layer, count in self._progress.get(handoff, {}).items():
            self._report(sides, handoff, layer, count)

    def _report(
        self, sides: Sequence[PrefillHandoffRank], handoff: str, layer: int, count: int
    ) -> None:
        at = self._layers[layer]
        sides[at.group].computed({handoff: count}, layer=at.layer)

    def _open_side(self, pair: PairCard) -> SideOpened | SideRefused:
        names = pair.prefill.name, pair.decode.name
        self._close_side(names)
        open_side = open_decode if names[1] == self._engine else open_prefill
        first = self._rank * len(self._tiers)
        try:
            with ExitStack() as undo:
                sides: list[RankSide] = []
                for number, tier in enumerate(self._tiers, first):
                    side = open_side(pair.to_pair(), kv=tier, rank=number, listener=self._listener)
                    undo.callback(side.close)
                    sides.append(side)
                undo.pop_all()
        except (PenstockError, ValueError) as error:
            return SideRefused(prefill=names[0], decode=names[1], why=str(error))
        self._open[names] = tuple(sides)
        return SideOpened(prefill=names[0], decode=names[1])

    def _close_side(self, names: PairNames) -> None:
        sides = self._open.pop(names, ())
        closed = {id(side) for side in sides}
        self._offered = {name: at for name, at in self._offered.items() if id(at[0]) not in closed}
        for side in sides:
            side.close()

    def _forget(self, handoff: str) -> None:
        self._progress.pop(handoff, None)
        self._offered.pop(handoff, None)
