"""A prefill engine's part in handoffs: it computes prompts and sends their KV while it does.

    prefill = open_prefill(pair, kv=kv, block_tokens=16)
    prefill.offer("request-1", prompt, slots=blocks)
    for layer in range(32):
        ...                                                  # the engine computes the layer
        prefill.computed({"request-1": len(prompt)}, layer=layer)
    prefill.first_token("request-1", 42)
    prefill.step()                                           # later: a HandoffResult

On a GPU, `computed(…, layer=layer, stream=stream)` follows the launch of a layer's kernels.

The one rule: KV is sent that *is* in its blocks. On a GPU, that is when its stream has got behind
the layer's last kernel, not when the kernel was launched.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Unpack, overload

import msgspec

from penstock.errors import counted
from penstock.handoff.driver.parts import ArrayReader
from penstock.handoff.driver.prefill_rank import LayerEvents, PrefillRankDriver
from penstock.handoff.driver.schedulers import PrefillSchedulerDriver
from penstock.handoff.handoff import (
    EngineHandoff,
    Handoff,
    HandoffRank,
    Opening,
    OpeningOptions,
    as_prompt,
    as_rank_slots,
    as_slots,
    connected,
    draw_incarnation,
)
from penstock.handoff.pair import Writer, keys_of
from penstock.vocabulary.arguments import as_int, as_seconds, as_text, as_tuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.handoff.driver.lines import SharedListener
    from penstock.handoff.driver.parts import PartReader
    from penstock.handoff.pair import HandoffPair
    from penstock.handoff.protocol.settings import HandoffSettings
    from penstock.runtime.tiers import Kv
    from penstock.transport.remote import PinMemory
    from penstock.vocabulary.keys import Tokens
    from penstock.vocabulary.layout import Layout


class HandoffOffer(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that is offered: what each rank must know before it computes it."""

    handoff: str
    token_count: int
    cached_tokens: int
    slots: list[int]
    keys: list[bytes]
    scheduler: int
    """The life of the engine that offers it."""
    first_block: int = 0
    """The block of the prompt that `slots` begin with; the rank has none before it. Slots of the
    last blocks may follow: `ComputingHandoff.extend`."""


class PrefillHandoff(EngineHandoff):
    """A prefill engine: prompts are computed here for another engine."""

    def __init__(self, opening: Opening, drivers: Sequence[PrefillRankDriver] = ()) -> None:
        name = opening.engine.name
        self._engine: PrefillSchedulerDriver = PrefillSchedulerDriver(
            opening.directory,
            opening.lines(name),
            incarnation=draw_incarnation(),
            settings=opening.settings,
        )
        super().__init__(name, [*drivers, self._engine], opening)
        self._pair = opening.pair
        self._block_tokens = opening.directory.plan.source_tokens
        self._slot_count = opening.slot_count

    def offer(
        self,
        handoff: str,
        tokens: Tokens,
        *,
        slots: Sequence[int],
        cached_tokens: int = 0,
        origin: str = "",
        timeout_s: float | None = None,
    ) -> HandoffOffer:
        """Offers the KV of a prompt. It ends with one `HandoffResult`.

        The prompt's blocks must stay as they are until then. Where the ranks are other
        processes, the engine sends the offer to each of them, which passes it to `admit` before
        it computes the prompt.

        Args:
            handoff: A name that was never used before, the same on both sides.
            tokens: The prompt.
            slots: The block of the engine's KV for each block of the prompt, first to last; the
                same on every rank.
            cached_tokens: How many leading tokens have their KV there already.
            origin: What the KV depends on besides model, weights and prompt, such as a tenant. The
                same on both sides.
            timeout_s: It fails if the decode engine has not asked for it this long.

        Raises:
            ValueError: an argument is wrong, or the name is in use.
            UnavailableError: a rank is not connected.
            CapacityError: too many handoffs are under way.
        """
        words = as_prompt(tokens)
        count = -(-len(words) // self._block_tokens)
        found = as_slots(slots, count=count, slot_count=self._slot_count)
        first_tokens = as_int("cached_tokens", cached_tokens, 0, len(words))
        (offer,) = self._offer(handoff, words, [found], first_tokens, origin, timeout_s)
        return offer

    def offer_by_rank(
        self,
        handoff: str,
        tokens: Tokens,
        *,
        slots: Sequence[Sequence[int]],
        first_blocks: Sequence[int] | None = None,
        origin: str = "",
        timeout_s: float | None = None,
    ) -> list[HandoffOffer]:
        """Offers a prompt whose blocks lie elsewhere on each rank: `offer`, with one for each.

        Args:
            handoff: As for `offer`, like all arguments that are not explained here.
            tokens: The prompt.
            slots: For each rank, a block of its KV for each of the prompt's *last* blocks. Blocks
                before them have left the window of its layers, and are not sent.
            first_blocks: For each rank, the block of the prompt that its `slots` begin with, where
                they are not the last ones: an engine that computes a prompt in several steps tells
                its ranks of the blocks that follow by `extend`.
            origin: What the KV depends on besides model, weights and prompt.
            timeout_s: It fails if the decode engine has not asked for it this long.

        Raises:
            ValueError, UnavailableError, CapacityError: As `offer`.
        """
        words, ranks = as_prompt(tokens), len(self._engine.machine.ranks)
        count = -(-len(words) // self._block_tokens)
        found = as_rank_slots(slots, ranks=ranks, count=count, slot_count=self._slot_count)
        firsts = None if first_blocks is None else _as_firsts(first_blocks, found, count=count)
        return self._offer(handoff, words, found, 0, origin, timeout_s, firsts)

    def _offer(
        self,
        handoff: object,
        words: NDArray[np.uint32],
        slots: Sequence[tuple[int, ...]],
        cached_tokens: int,
        origin: object,
        timeout_s: object,
        first_blocks: Sequence[int] | None = None,
    ) -> list[HandoffOffer]:
        name, size = as_text("handoff", handoff), self._block_tokens
        keys = keys_of(self._pair, words, block_tokens=size, origin=as_text("origin", origin))
        life = self._engine.life.incarnation
        firsts = first_blocks or [len(keys) - len(each) for each in slots]
        offers = [
            HandoffOffer(name, len(words), cached_tokens, [*each], keys, life, first)
            for each, first in zip(slots, firsts, strict=True)
        ]
        lease_s = None if timeout_s is None else as_seconds("timeout_s", timeout_s)
        with self._access:
            self._engine.submit(name, lease_s=lease_s)
            self._begin(name, len(words))
            for offer in offers:
                self._offered(offer)
        return offers

    def first_token(self, handoff: str, token: int, drafts: Sequence[int] = ()) -> None:
        """The prompt is computed, and this token follows it: the decode engine gets it, too.

        A handoff that has ended meanwhile is left alone.

        Raises:
            ValueError: an argument is wrong, or the first token was given already.
        """
        name, first = as_text("handoff", handoff), as_int("token", token)
        more = tuple(as_int(f"drafts[{n}]", d) for n, d in enumerate(as_tuple("drafts", drafts)))
        with self._access:
            if name in self._open:
                self._engine.first_token(name, (first,), more)

    def _offered(self, offer: HandoffOffer) -> None:
        """An offer was made; the engine sends it to ranks elsewhere."""


class ComputingHandoff(Handoff):
    """The rank that computes prompts, in this process."""

    _rank: PrefillRankDriver

    def computed(
        self,
        tokens: Mapping[str, int],
        *,
        layer: int | None = None,
        stream: object = None,
    ) -> None:
        """The KV of the first tokens of some prompts is in its blocks; sends what that allows.

        Args:
            tokens: For each handoff, how many of its leading tokens. Handoffs that have ended
                are left alone.
            layer: In this layer; in all layers if it is left out.
            stream: The CUDA stream, or its number, to which the kernels were submitted that
                compute them, in the order of the calls. The KV is sent when the stream has got
                there; `step`, `wait` and `drive` look. Left out, it is there already.

        Raises:
            ValueError: a handoff was never offered, or has no such layer or token; or there is
                a stream, and the KV is not on a GPU.
        """
        given = _Computed(tokens, layer, stream)
        with self._access:
            given.report(self._rank)
            self._advance_beside(stream)

    def extend(self, handoff: str, slots: Sequence[int]) -> None:
        """The next blocks of a prompt, whose offer did not name them all, lie in these slots.

        Must come before they are reported as computed. A handoff that has ended is left alone.

        Raises:
            ValueError: the handoff was never offered, or has fewer blocks; or a slot is wrong.
        """
        name, given = as_text("handoff", handoff), as_tuple("slots", slots)
        blocks = [as_int(f"slots[{number}]", each) for number, each in enumerate(given)]
        with self._access:
            self._rank.extend(name, blocks)

    def restart(self, handoff: str) -> None:
        """A prompt has lost its blocks, and is computed anew in others, which `extend` tells.

        When this returns, the blocks that it had are not read any more. What was sent counts. A
        handoff that has ended is left alone.

        Raises:
            ValueError: the handoff was never offered.
        """
        name = as_text("handoff", handoff)
        with self._access:
            self._rank.restart(name)

    @property
    def early_bytes(self) -> int:
        """Bytes that were sent before the slot of their prompt's last block was known."""
        return self._rank.early_bytes


class LocalPrefillHandoff(PrefillHandoff, ComputingHandoff):
    """A prefill engine whose one rank is in this process."""

    def __init__(self, opening: Opening, rank: PrefillRankDriver) -> None:
        super().__init__(opening, [rank])
        self._rank = rank

    def _offered(self, offer: HandoffOffer) -> None:
        _admit(self._rank, offer)


class PrefillHandoffRank(HandoffRank, ComputingHandoff):
    """One of several ranks of a prefill engine, in a process of its own."""

    def __init__(self, opening: Opening, rank: PrefillRankDriver) -> None:
        super().__init__(opening, rank)
        self._rank = rank

    def admit(self, offer: HandoffOffer) -> None:
        """The rank is going to compute a prompt that its engine offered.

        When this returns, nothing is read any more for an engine that ran before the one that
        made the offer.

        Raises:
            ValueError: the offer is known, or does not fit this rank.
        """
        if not isinstance(offer, HandoffOffer):
            raise ValueError(f"offer is {reprlib.repr(offer)}, must be a HandoffOffer")  # noqa: TRY004
        with self._access:
            _admit(self._rank, offer)


@overload
def open_prefill(
    pair: HandoffPair,
    *,
    kv: Kv,
    rank: None = None,
    **options: Unpack[OpeningOptions],
) -> LocalPrefillHandoff: ...


@overload
def open_prefill(
    pair: HandoffPair,
    *,
    kv: Kv,
    rank: int,
    **options: Unpack[OpeningOptions],
) -> PrefillHandoffRank: ...


@overload
def open_prefill(
    pair: HandoffPair, *, kv: None = None, **options: Unpack[OpeningOptions]
) -> PrefillHandoff: ...


def open_prefill(
    pair: HandoffPair,
    *,
    kv: Kv | None = None,
    rank: int | None = None,
    layout: Layout | None = None,
    block_tokens: int = 0,
    settings: HandoffSettings | None = None,
    timeout_s: float = 60.0,
    listener: SharedListener | None = None,
) -> PrefillHandoff | PrefillHandoffRank:
    """Opens a prefill engine's part in handoffs.

    | given            | opens                                                    |
    |------------------|----------------------------------------------------------|
    | `kv`             | an engine whose one rank is in this process              |
    | `kv` and `rank`  | that rank of an engine whose scheduler is elsewhere      |
    | neither          | an engine whose ranks are other processes                |

    Args:
        pair: The two engines.
        kv: The KV of the rank, as for `penstock.open`.
        rank: Which rank this is.
        layout: How `kv` lies, where that does not follow from it.
        block_tokens: Tokens of a block, where `kv` is arrays or tensors without a layout.
        settings: Times and bounds.
        timeout_s: How long an engine waits for its ranks to connect.
        listener: Of this process, where the engine is in several pairs; its name and address are
            those that the pair has for the engine.

    Raises:
        ValueError: an argument is wrong, or the KV of the two engines does not fit.
        UnavailableError: the ranks did not connect, or an address is in use.
    """
    opening = Opening(
        pair,
        "prefill",
        kv,
        layout=layout,
        block_tokens=block_tokens,
        settings=settings,
        timeout_s=timeout_s,
        listener=listener,
    )
    ranks = opening.directory.prefill.rank_names
    with opening:
        if opening.tier is None:
            if rank is not None:
                raise ValueError(f"rank is {rank!r}, must be left out without kv")
            return connected(PrefillHandoff(opening), ranks, opening.timeout_s)
        driver = _rank_driver(opening, opening.rank(rank))
        if rank is not None:
            return PrefillHandoffRank(opening, driver)
        return connected(LocalPrefillHandoff(opening, driver), ranks, opening.timeout_s)


def _rank_driver(opening: Opening, name: str) -> PrefillRankDriver:
    assert opening.tier is not None
    reader: PartReader = ArrayReader(opening.tier, opening.checksum)
    pin: PinMemory | None = None
    events: LayerEvents | None = None
    if opening.on_gpu:
        from penstock.handoff.driver.device_parts import DeviceReader, pin_memory  # noqa: PLC0415
        from penstock.movers.cuda.streams import StreamEvent  # noqa: PLC0415 - both need CUDA

        part_bytes = opening.settings.bounds.berth_bytes
        reader = opening.keep(DeviceReader(opening.tier, part_bytes=part_bytes))  # type: ignore[arg-type]
        pin = pin_memory
        events = opening.keep(LayerEvents(StreamEvent))
    writer = opening.keep(
        Writer(
            opening.transport,
            pin=pin,
            device=opening.device_memory(),
            addresses=opening.addresses(name),
        )
    )
    return opening.keep(
        PrefillRankDriver(
            opening.directory,
            name,
            opening.lines(name),
            reader=reader,
            connect=writer.connect,
            incarnation=draw_incarnation(),
            settings=opening.settings,
            progress=events,
        )
    )


def _admit(driver: PrefillRankDriver, offer: HandoffOffer) -> None:
    driver.admit(
        offer.handoff,
        token_count=offer.token_count,
        slots=offer.slots,
        keys=offer.keys,
        scheduler=offer.scheduler,
        first_block=offer.first_block,
    )
    if offer.cached_tokens:
        driver.chunk_progress(offer.handoff, tokens=offer.cached_tokens)


def _as_firsts(first_blocks: object, slots: Sequence[tuple[int, ...]], *, count: int) -> list[int]:
    """For each rank, the block that its slots begin with."""
    given = as_tuple("first_blocks", first_blocks)
    if len(given) != len(slots):
        said = counted(len(given), "rank")
        raise ValueError(f"first_blocks are for {said}, must be for {len(slots)}")
    return [
        as_int(f"first_blocks[{rank}]", first, 0, count - len(slots[rank]))
        for rank, first in enumerate(given)
    ]


class _Computed:
    """The arguments of `computed`, checked before anything is touched."""

    def __init__(self, tokens: Mapping[str, int], layer: object, stream: object) -> None:
        if not isinstance(tokens, Mapping):
            raise ValueError(f"tokens is {reprlib.repr(tokens)}, must map handoffs to token counts")  # noqa: TRY004
        self._tokens = {
            as_text("handoff", name): as_int(f"tokens[{name!r}]", count)
            for name, count in tokens.items()
        }
        self._layer = None if layer is None else as_int("layer", layer)
        # A stream of torch has its number in an attribute.
        number = getattr(stream, "cuda_stream", stream)
        self._stream = None if stream is None else as_int("stream", number)

    def report(self, driver: PrefillRankDriver) -> None:
        if self._stream is not None:
            driver.submitted(self._tokens, layer=self._layer, stream=self._stream)
            return
        for handoff, count in self._tokens.items():
            if self._layer is None:
                driver.chunk_progress(handoff, tokens=count)
            else:
                driver.progress(handoff, layer=self._layer, tokens=count)
