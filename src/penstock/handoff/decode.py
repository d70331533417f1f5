"""A decode engine's part in handoffs: it claims prompts that the other engine computes.

    decode = open_decode(pair, kv=kv, block_tokens=16)
    decode.claim("request-1", prompt, slots=blocks, timeout_s=10.0)
    while not (results := decode.step()):
        decode.wait(time.monotonic() + 10.0)

The one rule: the blocks of a claim belong to the handoff until its `HandoffResult`. If that says
`delivered`, they hold the prompt's KV; otherwise what they hold has no meaning.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from penstock.config.values import GPU
from penstock.handoff.driver.decode_rank import DecodeRankDriver
from penstock.handoff.driver.parts import ArrayTaker
from penstock.handoff.driver.schedulers import DecodeSchedulerDriver
from penstock.handoff.handoff import (
    EngineHandoff,
    HandoffRank,
    Opening,
    OpeningOptions,
    as_prompt,
    as_rank_slots,
    as_slots,
    connected,
    draw_incarnation,
)
from penstock.handoff.pair import keys_of
from penstock.handoff.protocol.grid import PART_BYTES_MIN
from penstock.vocabulary.arguments import as_int, as_seconds, as_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.handoff.driver.lines import SharedListener
    from penstock.handoff.driver.parts import PartTaker
    from penstock.handoff.pair import HandoffPair
    from penstock.handoff.protocol.settings import HandoffSettings
    from penstock.runtime.tiers import Kv
    from penstock.vocabulary.keys import Tokens
    from penstock.vocabulary.layout import Layout


class DecodeHandoff(EngineHandoff):
    """A decode engine: prompts are computed elsewhere and answered here."""

    def __init__(self, opening: Opening, drivers: Sequence[DecodeRankDriver] = ()) -> None:
        name = opening.engine.name
        self._engine: DecodeSchedulerDriver = DecodeSchedulerDriver(
            opening.directory,
            opening.lines(name),
            incarnation=draw_incarnation(),
            settings=opening.settings,
            part_bytes_min=_part_bytes_min(opening),
        )
        super().__init__(name, [*drivers, self._engine], opening)
        self._pair = opening.pair
        self._plan = opening.directory.plan
        self._slot_count = opening.slot_count

    def claim(
        self,
        handoff: str,
        tokens: Tokens,
        *,
        slots: Sequence[int],
        cached_tokens: int = 0,
        origin: str = "",
        epoch: int = 1,
        timeout_s: float | None = None,
    ) -> None:
        """Claims the KV of a prompt, or of its end. It ends with one `HandoffResult`.

        Args:
            handoff: The name under which the prefill engine offers it, sooner or later.
            tokens: The prompt.
            slots: Where the missing blocks are to lie: a block of the engine's KV for each, the
                same on every rank.
            cached_tokens: How many leading tokens have their KV here already: a whole number of
                blocks of both engines.
            origin: What the KV depends on besides model, weights and prompt, such as a tenant. The
                same on both sides.
            epoch: 1; a higher number for each claim that follows a `withdraw`.
            timeout_s: It fails after this many seconds.

        Raises:
            ValueError: an argument is wrong, or the name is in use.
            UnavailableError: a rank is not connected.
            CapacityError: too many handoffs are under way.
        """
        words, size = as_prompt(tokens), self._plan.target_tokens
        cached = as_int("cached_tokens", cached_tokens, 0, len(words) - 1)
        count = -(-len(words) // size) - cached // size
        blocks = as_slots(slots, count=count, slot_count=self._slot_count)
        ranks = len(self._engine.machine.ranks)
        self._claim(handoff, words, [blocks] * ranks, [cached] * ranks, origin, epoch, timeout_s)

    def claim_by_rank(
        self,
        handoff: str,
        tokens: Tokens,
        *,
        slots: Sequence[Sequence[int]],
        origin: str = "",
        epoch: int = 1,
        timeout_s: float | None = None,
        part_tokens: int | None = None,
    ) -> None:
        """Claims a prompt whose blocks are to lie elsewhere on each rank: `claim`, with that.

        Args:
            handoff: As for `claim`, like all arguments that are not explained here.
            tokens: The prompt.
            slots: For each rank, a block of its KV for each of the prompt's *last* blocks. It has
                those before them, or never reads them, as with a sliding window.
            origin: What the KV depends on besides model, weights and prompt.
            epoch: 1; a higher number for each claim that follows a `withdraw`.
            timeout_s: It fails after this many seconds.
            part_tokens: KV is sent in parts of at most so many tokens: what the prefill engine
                computes in a step, so that a longer prompt is sent step by step.

        Raises:
            ValueError, UnavailableError, CapacityError: As `claim`.
        """
        words, size = as_prompt(tokens), self._plan.target_tokens
        count = -(-len(words) // size)
        blocks = as_rank_slots(
            slots,
            ranks=len(self._engine.machine.ranks),
            count=count,
            slot_count=self._slot_count,
        )
        cached = [(count - len(each)) * size if len(each) else len(words) for each in blocks]
        most = None if part_tokens is None else as_int("part_tokens", part_tokens, 1)
        self._claim(handoff, words, blocks, cached, origin, epoch, timeout_s, most)

    def _claim(
        self,
        handoff: object,
        words: NDArray[np.uint32],
        slots: Sequence[tuple[int, ...]],
        cached_tokens: Sequence[int],
        origin: object,
        epoch: object,
        timeout_s: object,
        part_tokens: int | None = None,
    ) -> None:
        name, number = as_text("handoff", handoff), as_int("epoch", epoch, 1)
        source, ranks = self._plan.source_tokens, self._engine.machine.ranks
        keys = keys_of(self._pair, words, block_tokens=source, origin=as_text("origin", origin))
        patience_s = None if timeout_s is None else as_seconds("timeout_s", timeout_s)
        with self._access:
            self._engine.submit(
                name,
                token_count=len(words),
                slots=dict(zip(ranks, slots, strict=True)),
                keys=keys,
                cached_tokens=dict(zip(ranks, cached_tokens, strict=True)),
                epoch=number,
                patience_s=patience_s,
                part_tokens=part_tokens,
            )
            self._begin(name, len(words) - min(cached_tokens))

    def withdraw(self, handoff: str) -> None:
        """Gives the blocks of a claim back; the prefill engine keeps what it has computed.

        After its `HandoffResult` it may be claimed again, with the next epoch. A handoff that has
        ended is left alone.

        Raises:
            ValueError: an argument is wrong.
        """
        name = as_text("handoff", handoff)
        with self._access:
            if name in self._open:
                self._engine.withdraw(name)
                self._collect(self._engine.take_ended())


def _part_bytes_min(opening: Opening) -> int:
    """Layers of a prompt are put together up to this.

    Between GPUs a part takes so little time that nothing is gained by sending it early; each one
    that is taken interrupts the kernels of the other process, where they share one.
    """
    if opening.pair.data_transport == GPU:
        return opening.settings.bounds.berth_bytes
    return PART_BYTES_MIN


class DecodeHandoffRank(HandoffRank):
    """One of several ranks of a decode engine, in a process of its own."""


@overload
def open_decode(
    pair: HandoffPair,
    *,
    kv: Kv | None = None,
    rank: None = None,
    folder: Path | None = None,
    **options: Unpack[OpeningOptions],
) -> DecodeHandoff: ...


@overload
def open_decode(
    pair: HandoffPair,
    *,
    kv: Kv,
    rank: int,
    folder: Path | None = None,
    **options: Unpack[OpeningOptions],
) -> DecodeHandoffRank: ...


def open_decode(
    pair: HandoffPair,
    *,
    kv: Kv | None = None,
    rank: int | None = None,
    layout: Layout | None = None,
    block_tokens: int = 0,
    settings: HandoffSettings | None = None,
    folder: Path | None = None,
    timeout_s: float = 60.0,
    listener: SharedListener | None = None,
) -> DecodeHandoff | DecodeHandoffRank:
    """Opens a decode engine's part in handoffs.

    Args:
        pair: The two engines.
        kv: As for `open_prefill`, like all arguments that are not explained here.
        rank: Which rank this is.
        layout: How `kv` lies.
        block_tokens: Tokens of a block.
        settings: Times and bounds.
        folder: Where the socket is made at which prefill ranks fetch the memory that they write
            to; a private folder of this process if it is left out.
        timeout_s: How long an engine waits for its ranks.
        listener: Of this process, where the engine is in several pairs.

    Raises:
        ValueError: an argument is wrong, or the KV of the two engines does not fit.
        UnavailableError: the ranks did not connect, or an address is in use.
    """
    if folder is not None and not isinstance(folder, Path):
        raise ValueError(f"folder is a {type(folder).__name__}, must be a Path or None")
    opening = Opening(
        pair,
        "decode",
        kv,
        layout=layout,
        block_tokens=block_tokens,
        settings=settings,
        timeout_s=timeout_s,
        listener=listener,
    )
    ranks = opening.directory.decode.rank_names
    with opening:
        if opening.tier is None:
            if rank is not None:
                raise ValueError(f"rank is {rank!r}, must be left out without kv")
            return connected(DecodeHandoff(opening), ranks, opening.timeout_s)
        driver = _rank_driver(opening, opening.rank(rank), folder)
        if rank is not None:
            return DecodeHandoffRank(opening, driver)
        return connected(DecodeHandoff(opening, [driver]), ranks, opening.timeout_s)


def _rank_driver(opening: Opening, name: str, folder: Path | None) -> DecodeRankDriver:
    assert opening.tier is not None
    taker: PartTaker
    options: dict[str, Any] = {}
    if opening.on_gpu:
        from penstock.handoff.driver.device_parts import pin_memory  # noqa: PLC0415 - needs CUDA

        options["pin"] = pin_memory
    device = opening.device_memory()
    if device is not None:
        options["device"] = device
    if opening.transport.takes_addresses:
        options["addresses"] = opening.addresses(name)
    target = opening.keep(opening.transport.open_target(folder, **options))
    # Closed before the target is, whose areas its thread or its device reads.
    if opening.on_gpu:
        from penstock.handoff.driver.device_parts import DeviceTaker  # noqa: PLC0415 - the same

        part_bytes = opening.settings.bounds.berth_bytes
        taker = opening.keep(DeviceTaker(opening.tier, part_bytes=part_bytes))  # type: ignore[arg-type]
    else:
        taker = opening.keep(ArrayTaker(opening.tier, opening.checksum))
    return opening.keep(
        DecodeRankDriver(
            opening.directory,
            name,
            opening.lines(name),
            taker=taker,
            target=target,
            incarnation=draw_incarnation(),
            settings=opening.settings,
        )
    )
