"""A rank's sides of all pairs, and how far the prompts are computed that it may hand over.

In a pair each KV group of a rank is a party of its own: a prompt has other blocks in each.

Its scheduler says which pairs to open and which prompts were offered. The engine's thread says
which blocks a step adds to a prompt, and reports each of its layers. Nobody may want a prompt until
it is computed, so both are kept for every prompt from its first step on, and used when its offer
comes: before, between or after the steps that compute it.

On a GPU a step is submitted long before it is computed. Its layers come with events
(`StepProgress`), and count when the device has reached them.

The one rule: KV is reported that is in its blocks, and nothing is read of blocks that a prompt has
lost.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.connectors.handoff.messages import (
    WITHIN_ENGINE,
    AdmitOffer,
    CloseSide,
    ForgetPrompt,
    OpenSide,
    SideAnswer,
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
from penstock.runtime.tiers import ALGORITHMS
from penstock.transport.zeromq import IPC, Listener
from penstock.vocabulary.form import Form

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.connectors.base.engine import HandedLayer
    from penstock.connectors.handoff.messages import AnyMessage, PairCard, PairNames
    from penstock.connectors.handoff.progress import SubmittedLayers
    from penstock.handoff import HandoffOffer, HandoffSettings
    from penstock.handoff.driver.prefill_rank import DeviceEvent
    from penstock.tiers.tensors import TensorTier
    from penstock.transport.base import Waitable
    from penstock.transport.zmq_channel import ZmqChannel

log = logging.getLogger(__name__)

PROMPTS_MAX = 4096
"""Prompts whose progress is kept; as many as a scheduler can have under way."""
LOOK_S = 0.001
"""While events of the device are not reached, they are looked at again after this."""

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


class AddedBlocks(NamedTuple):
    """Blocks that a step adds to a prompt."""

    known: int
    """How many it had before."""
    groups: tuple[tuple[int, ...], ...]
    """The next ones of each KV group."""


class _Prompt:
    """A prompt that is being computed, or was: its blocks by KV group, and tokens by layer."""

    def __init__(self, groups: int) -> None:
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        self.layers: dict[int, int] = {}

    @property
    def known(self) -> int:
        return sum(map(len, self.blocks))


class RankSides:
    """The sides of one rank."""

    def __init__(
        self,
        engine: str,
        rank: int,
        tiers: Sequence[TensorTier],
        layers: Mapping[int, HandedLayer],
        settings: HandoffSettings,
    ) -> None:
        """Listens from now on.

        Raises `UnavailableError`: there is no address to listen at.
        """
        self._engine = engine
        self._rank = rank
        self._tiers = tuple(tiers)
        self._layers = dict(layers)
        self._settings = settings
        self._door = Listener(f"{engine}/{rank}", settings=WITHIN_ENGINE)
        self._listener = SharedListener(engine, [IPC])
        self._scheduler: ZmqChannel | None = None
        self._open: dict[PairNames, tuple[RankSide, ...]] = {}
        """The sides of each pair, one for each KV group."""
        self._prompts: OrderedDict[str, _Prompt] = OrderedDict()
        self._offered: dict[str, Sequence[PrefillHandoffRank]] = {}
        """Where a handoff was admitted, by KV group."""
        self._submitted: deque[SubmittedLayers] = deque()
        """What the device has not computed yet, in its order."""
        self.spare_events: list[DeviceEvent] = []
        """Events that were reached, for the next steps; either thread may take or add some."""
        self._early_bytes = self._early_closed = 0
        """In all pairs, and in those that are closed."""

    @property
    def addresses(self) -> RankAddresses:
        """For its scheduler."""
        forms = [Form(layout=each.layout, checksum=ALGORITHMS[each.medium]) for each in self._tiers]
        groups: list[list[int]] = [[] for _ in self._tiers]
        for layer, at in sorted(self._layers.items()):
            groups[at.group].append(layer)
        return RankAddresses(
            self._door.address, self._listener.address, [each.to_bytes() for each in forms], groups
        )

    # ---------------------------------------------------------------- from the engine's thread

    def extend(self, added: Mapping[str, AddedBlocks]) -> None:
        """A step is going to compute the KV of these blocks of some prompts."""
        for handoff, (known, groups) in added.items():
            prompt = self._prompts.get(handoff)
            if prompt is None and not known:
                prompt = self._prompts[handoff] = _Prompt(len(self._tiers))
                if len(self._prompts) > PROMPTS_MAX:
                    self._prompts.popitem(last=False)
            if prompt is None or prompt.known != known:
                # It was forgotten meanwhile: what follows alone is of no use.
                self.restart([handoff])
                self._forget(handoff)
                continue
            sides = self._offered.get(handoff)
            for group, blocks in enumerate(groups):
                prompt.blocks[group] += blocks
                if sides is not None and blocks:
                    sides[group].extend(handoff, blocks)

    def computed(self, tokens: Mapping[str, int], layer: int) -> None:
        """The KV of the first tokens of some prompts is in its blocks, in one layer."""
        for handoff, count in tokens.items():
            prompt = self._prompts.get(handoff)
            if prompt is None:
                continue
            prompt.layers[layer] = count
            if (sides := self._offered.get(handoff)) is not None:
                self._report(sides, handoff, layer, count)

    def submitted(self, layers: Iterable[SubmittedLayers]) -> None:
        """A step was submitted to the device that computes these layers, in this order."""
        self._submitted.extend(layers)

    def restart(self, handoffs: Iterable[str]) -> None:
        """Prompts have lost their blocks: when this returns, those are not read any more."""
        for handoff in handoffs:
            self._prompts.pop(handoff, None)
            for each in self._submitted:
                each.tokens.pop(handoff, None)
            for side in self._offered.get(handoff, ()):
                side.restart(handoff)

    @property
    def early_bytes(self) -> int:
        """What was sent of prompts before their last step began; any thread may ask."""
        return self._early_bytes

    # ---------------------------------------------------------------- what the thread calls

    def step(self) -> None:
        if (channel := self._door.accept()) is not None:
            self._meet(channel)
        if self._scheduler is not None:
            self._hear(self._scheduler)
        # Also a caller whose pair is not open: otherwise the descriptor stays readable.
        self._listener.look(frozenset())
        self._look_at_device()
        for side in self._sides:
            side.step()
        now_open = sum(s.early_bytes for s in self._sides if isinstance(s, PrefillHandoffRank))
        self._early_bytes = self._early_closed + now_open

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
        if self._submitted:
            dues.append(time.monotonic() + LOOK_S)
        return min((due for due in dues if due is not None), default=None)

    def close(self) -> None:
        for side in self._sides:
            side.close()
        self._open.clear()
        for event in [*(each.event for each in self._submitted), *self.spare_events]:
            event.close()
        self._submitted.clear()
        self.spare_events.clear()
        if self._scheduler is not None:
            self._scheduler.close()
        self._listener.close()
        self._door.close()

    # ---------------------------------------------------------------- inside

    @property
    def _sides(self) -> list[RankSide]:
        return [side for sides in self._open.values() for side in sides]

    def _look_at_device(self) -> None:
        while self._submitted and self._submitted[0].event.reached:
            event, tokens, layers = self._submitted.popleft()
            self.spare_events.append(event)
            for layer in layers if tokens else ():
                self.computed(tokens, layer)

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
            case CloseSide(names=names):
                self._close_side(names)
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
        handoff = offers[0].handoff
        prompt = self._prompts.get(handoff) or _Prompt(len(sides))
        for side, offer, blocks in zip(sides, offers, prompt.blocks, strict=True):
            side.admit(msgspec.structs.replace(offer, slots=[*blocks]))
        self._offered[handoff] = sides
        for layer, count in prompt.layers.items():
            self._report(sides, handoff, layer, count)

    def _report(
        self, sides: Sequence[PrefillHandoffRank], handoff: str, layer: int, count: int
    ) -> None:
        at = self._layers[layer]
        sides[at.group].computed({handoff: count}, layer=at.layer)

    def _open_side(self, pair: PairCard) -> SideAnswer:
        names = pair.names
        self._close_side(names)
        open_side = open_decode if names[1] == self._engine else open_prefill
        first = self._rank * len(self._tiers)
        try:
            with ExitStack() as undo:
                sides: list[RankSide] = []
                for number, tier in enumerate(self._tiers, first):
                    side = open_side(
                        pair.to_pair(),
                        kv=tier,
                        rank=number,
                        settings=self._settings,
                        listener=self._listener,
                    )
                    undo.callback(side.close)
                    sides.append(side)
                undo.pop_all()
        except (PenstockError, ValueError) as error:
            return SideAnswer(names=names, why=str(error))
        self._open[names] = tuple(sides)
        return SideAnswer(names=names)

    def _close_side(self, names: PairNames) -> None:
        sides = self._open.pop(names, ())
        closed = {id(side) for side in sides}
        self._offered = {name: at for name, at in self._offered.items() if id(at[0]) not in closed}
        for side in sides:
            if isinstance(side, PrefillHandoffRank):
                self._early_closed += side.early_bytes
            side.close()

    def _forget(self, handoff: str) -> None:
        self._prompts.pop(handoff, None)
        self._offered.pop(handoff, None)
        for each in self._submitted:
            each.tokens.pop(handoff, None)
