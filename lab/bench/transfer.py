"""How fast blocks travel between a GPU and pinned host memory, beside other ways and the link.

Scattered blocks of two layouts, both directions, alone and both at once, with checksums. Each
round measures every side and the link's own ceiling (one large copy), so that a share of the
ceiling compares what the same moments allowed.

| side               | how it moves scattered blocks                                        |
|--------------------|----------------------------------------------------------------------|
| `penstock`         | the production movers: pack or scatter by kernel, sums, DMA in turns  |
| `layer-wise`       | the production mover for loads that fill layer by layer, sums         |
| `batched memcpy`   | one `cudaMemcpyBatchAsync`, an entry per block and plane, no sums     |
| `index_select`     | torch gathers a layer, then copies it; the reverse for loads, no sums |
| `copy_`            | one `copy_` per block and plane, no sums                              |

The one rule: host slots lie in a row for every side, as a pool gives them while it fills; a row
of its own says what slots in any order cost.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from lab.bench.measure import interleave, summarize
from lab.fixtures.pinned_tier import PinnedTier
from penstock.cache.operations import Purpose
from penstock.errors import InvariantViolation, UnavailableError
from penstock.machine.effects import Copy
from penstock.movers.cuda.layers import LayerLoadMover
from penstock.movers.cuda.mover import LoadMover, SaveMover
from penstock.movers.cuda.streams import Stream, StreamPiece
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.keys import OperationId
from penstock.vocabulary.layout import GroupKind, HeadRange
from penstock.vocabulary.planes import Axis, PlaneRole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from lab.bench.report import BenchReport
    from penstock.movers.cuda.queue import QueuedMover

ROUNDS = 7
LAYOUTS = (("8b", 16), ("8b", 64), ("mla", 16), ("mla", 64))
"""What the blocks are of, and their tokens."""
MOVED_BYTES = 4 << 30
"""What one measurement of ours moves: long enough that beginning and end do not count."""
SLOW_BYTES = 128 << 20
"""The same for sides that take a call per block and plane."""
SMALL_BYTES = 4096
SMALL_SAMPLES = 500
SUBMITTED_BYTES = 512 << 20
"""What one poll submits where the engine's time for it is measured: PCIe 5 moves it in 10 ms."""
SHARE_TARGET = 0.965
LAYERS_TARGET = 0.88
SMALL_TARGET_MS = 0.3
_UNLIMITED = 1 << 40


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rig:
    """KV tensors of one layout, twice as many blocks as are moved, and slots for them.

    Saves and loads have device blocks and host slots of their own: both at once must not
    disturb each other, and what other sides write must not spoil what is loaded.
    """

    name: str
    tokens: int
    tensors: Sequence[torch.Tensor]
    """One a layer."""
    block_axis: int
    tier: TensorTier
    saved: PinnedTier
    loaded: PinnedTier
    sources: NDArray[np.int32]
    """Device slots that are saved, in any order."""
    targets: NDArray[np.int32]
    """Device slots that are loaded, in any order."""

    @property
    def count(self) -> int:
        return len(self.sources)

    @property
    def block_bytes(self) -> int:
        return self.tier.layout.block_bytes


def run_transfer(
    report: BenchReport, *, rounds: int = ROUNDS, layouts: Sequence[tuple[str, int]] = LAYOUTS
) -> None:
    """Measures everything.

    Raises:
        UnavailableError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise UnavailableError("bench transfer needs a CUDA device, and torch sees none")
    report.add_note(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, tokens in layouts:
        rig = _rig(name, tokens)
        _measure(report, rig, rounds)
        rig.saved.close()
        rig.loaded.close()
        del rig
        torch.cuda.empty_cache()


def _rig(name: str, tokens: int) -> Rig:
    make = _eight_b if name == "8b" else _mla
    count = MOVED_BYTES // make(tokens, 1)[1].layout.block_bytes
    tensors, tier = make(tokens, 2 * count)
    scattered = np.random.default_rng(1).permutation(2 * count).astype(np.int32)
    return Rig(
        name=name,
        tokens=tokens,
        tensors=tensors,
        block_axis=1 if name == "8b" else 0,
        tier=tier,
        saved=PinnedTier(tier.layout, count),
        loaded=PinnedTier(tier.layout, count),
        sources=scattered[:count],
        targets=scattered[count:],
    )


def _eight_b(tokens: int, blocks: int) -> tuple[list[torch.Tensor], TensorTier]:
    """32 layers of 8 KV heads of 128 channels in bf16, K and V of a layer in one tensor."""
    tensors = [_random(2, blocks, tokens, 8, 128) for _ in range(32)]
    layers = [
        TensorLayer(number=number, planes=[Held.pair(tensor)])
        for number, tensor in enumerate(tensors)
    ]
    group = TensorGroup(kind=GroupKind.ATTENTION, layers=layers, heads=HeadRange.all_of(8))
    return tensors, TensorTier.of([group], block_tokens=tokens)


def _mla(tokens: int, blocks: int) -> tuple[list[torch.Tensor], TensorTier]:
    """61 layers of 576 latent channels in bf16."""
    tensors = [_random(blocks, tokens, 576) for _ in range(61)]
    axes = (Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL)
    layers = [
        TensorLayer(number=number, planes=[Held.of(PlaneRole.LATENT, tensor, axes)])
        for number, tensor in enumerate(tensors)
    ]
    group = TensorGroup(kind=GroupKind.LATENT, layers=layers)
    return tensors, TensorTier.of([group], block_tokens=tokens)


def _random(*shape: int) -> torch.Tensor:
    words = (*shape[:-1], shape[-1] // 2)
    drawn = torch.randint(-(1 << 31), (1 << 31) - 1, words, dtype=torch.int32, device="cuda")
    return drawn.view(torch.bfloat16)


def _measure(report: BenchReport, rig: Rig, rounds: int) -> None:
    save = SaveMover(rig.tier, rig.saved, Algorithm.MIX64)
    load = LoadMover(rig.loaded, rig.tier, Algorithm.MIX64)
    layers = LayerLoadMover(rig.loaded, rig.tier, Algorithm.MIX64)
    fill = SaveMover(rig.tier, rig.loaded, Algorithm.MIX64)
    rows = np.arange(rig.count, dtype=np.int32)
    _move([(fill, _copy(rig, Purpose.SAVE, rig.targets, rows))])
    fill.close()
    others = _Others(rig)
    order = np.random.default_rng(2).permutation(rig.count)
    down = _copy(rig, Purpose.SAVE, rig.sources, rows)
    shuffled = _copy(rig, Purpose.SAVE, rig.sources, rows[order])
    up = _copy(rig, Purpose.LOAD, rows, rig.targets)
    sides: dict[str, Callable[[], float]] = {
        "penstock: to host": partial(_move, [(save, down)]),
        "penstock: to host, slots in any order": partial(_move, [(save, shuffled)]),
        "penstock: to device": partial(_move, [(load, up)]),
        "layer-wise: to device": partial(_move, [(layers, up)]),
        "penstock: both": partial(_move, [(save, down), (load, up)]),
        "ceiling: to host": partial(others.large_copies, to_host=True),
        "ceiling: to device": partial(others.large_copies, to_device=True),
        "ceiling: both": partial(others.large_copies, to_host=True, to_device=True),
    }
    for what, to_host in (("to host", True), ("to device", False)):
        sides[f"batched memcpy: {what}"] = partial(others.batched, to_host=to_host)
        sides[f"index_select: {what}"] = partial(others.index_select, to_host=to_host)
        sides[f"copy_: {what}"] = partial(others.copy_each, to_host=to_host)
    for side in sides.values():
        side()  # Compiled, mapped and warm.
    _report_rates(report, rig, interleave(sides, rounds))
    _report_small_copies(report, rig, save, down)
    for mover, copy, what in ((save, down, "to host"), (load, up, "to device")):
        _report_submit(report, rig, mover, copy, what)
    report.add_note(
        f"{rig.name}, {rig.tokens} tokens: staging of {save.staging_bytes >> 20} MiB for saves, "
        f"{load.staging_bytes >> 20} MiB for loads, {layers.staging_bytes >> 20} MiB layer-wise"
    )
    for each in (save, load, layers, others):
        each.close()


def _copy(
    rig: Rig, purpose: Purpose, sources: NDArray[np.int32], targets: NDArray[np.int32]
) -> Copy:
    return Copy(
        operation=OperationId(1, 0, 1),
        purpose=purpose,
        source=0,
        target=1,
        keys=[number.to_bytes(16, "little") for number in range(rig.count)],
        source_slots=sources,
        target_slots=targets,
        deadline=float("inf"),
        cause="bench",
    )


def _move(work: Sequence[tuple[QueuedMover, Copy]]) -> float:
    """Moves the copies at the same time; returns bytes a second, all together."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    moved_bytes = 0
    for mover, copy in work:
        mover.submit(copy)
    while any(mover.busy for mover, _ in work):
        for mover, _ in work:
            moved, spent = mover.poll(budget_bytes=_UNLIMITED)
            moved_bytes += spent
            if any(each.faults for each in moved):
                raise InvariantViolation("bench: good blocks were found damaged")
    return moved_bytes / (time.perf_counter() - started)


class _Others:
    """The link's ceiling, and other ways to move the same blocks, without checksums."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._links = (Stream(), Stream())
        self._large = torch.empty(MOVED_BYTES, dtype=torch.uint8, device="cuda")
        self._host = torch.from_numpy(rig.saved.bytes)
        self._few = max(1, SLOW_BYTES // rig.block_bytes)
        # Blocks along the first axis, each in one run of bytes.
        self._planes = [
            plane
            for tensor in rig.tensors
            for plane in (tensor.unbind(0) if rig.block_axis == 1 else [tensor])
        ]

    def close(self) -> None:
        """Gives the streams back."""
        for link in self._links:
            link.close()

    def large_copies(self, *, to_host: bool = False, to_device: bool = False) -> float:
        """One large copy each way that is asked for."""
        half = MOVED_BYTES // 2
        host, device = self._rig.saved.address, self._large.data_ptr()
        length: int = min(half, self._host.numel() // 2)
        torch.cuda.synchronize()
        started = time.perf_counter()
        if to_host:
            self._links[0].copy([StreamPiece(device, host, length)])
        if to_device:
            self._links[1].copy([StreamPiece(host + length, device + half, length)])
        torch.cuda.synchronize()
        return (to_host + to_device) * length / (time.perf_counter() - started)

    def batched(self, *, to_host: bool) -> float:
        """One call, with an entry per block and plane."""
        pieces: list[StreamPiece] = []
        at = self._rig.saved.address
        for slot in self._rig.sources[: self._few].tolist():
            for plane in self._planes:
                address = plane.data_ptr() + slot * plane.stride(0) * plane.element_size()
                length = plane[0].numel() * plane.element_size()
                pieces.append(
                    StreamPiece(address, at, length)
                    if to_host
                    else StreamPiece(at, address, length)
                )
                at += length
        return self._timed(lambda: self._links[0].copy(pieces))

    def copy_each(self, *, to_host: bool) -> float:
        """One `copy_` per block and plane."""
        length = self._planes[0][0].numel() * 2

        def copy() -> None:
            at = 0
            for slot in self._rig.sources[: self._few].tolist():
                for plane in self._planes:
                    block = plane[slot]
                    there = self._host[at : at + length].view(torch.bfloat16).view(block.shape)
                    first, second = (there, block) if to_host else (block, there)
                    first.copy_(second, non_blocking=True)
                    at += length

        return self._timed(copy)

    def index_select(self, *, to_host: bool) -> float:
        """A layer's blocks gathered by torch and copied in one piece, or the reverse."""
        wanted = torch.from_numpy(self._rig.sources[: self._few].astype(np.int64)).cuda()

        def copy() -> None:
            at = 0
            for plane in self._planes:
                length = self._few * plane[0].numel() * 2
                there = self._host[at : at + length].view(torch.bfloat16)
                if to_host:
                    gathered = plane.index_select(0, wanted)
                    there.view(gathered.shape).copy_(gathered, non_blocking=True)
                else:
                    arrived = there.cuda(non_blocking=True)
                    plane.index_copy_(0, wanted, arrived.view(self._few, *plane.shape[1:]))
                at += length

        return self._timed(copy)

    def _timed(self, copy: Callable[[], None]) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        return self._few * self._rig.block_bytes / (time.perf_counter() - started)


def _report_rates(report: BenchReport, rig: Rig, rates: Mapping[str, Sequence[float]]) -> None:
    for name, found in rates.items():
        side, what = name.split(": ")
        report.add_row(
            bench="transfer",
            side=side,
            params={"layout": rig.name, "tokens": rig.tokens, "direction": what},
            metric="rate",
            unit="GB/s",
            summary=summarize([rate / 1e9 for rate in found]),
        )
    shares = [("penstock", what) for what in ("to host", "to device", "both")]
    for side, what in (*shares, ("layer-wise", "to device")):
        pairs = zip(rates[f"{side}: {what}"], rates[f"ceiling: {what}"], strict=True)
        share = summarize([ours / most for ours, most in pairs])
        report.add_row(
            bench="transfer",
            side=side,
            params={"layout": rig.name, "tokens": rig.tokens, "direction": what},
            metric="share of the ceiling",
            unit="of 1",
            summary=share,
        )
        if what != "both":
            target = SHARE_TARGET if side == "penstock" else LAYERS_TARGET
            name = f"{rig.name}, {rig.tokens} tokens, {side} {what}: share of the ceiling"
            report.add_ratio(name, share.median, at_least=target)


def _report_submit(
    report: BenchReport, rig: Rig, mover: QueuedMover, copy: Copy, direction: str
) -> None:
    """How much of the engine's own time a poll takes that submits what a step moves."""
    samples: list[float] = []
    mover.submit(copy)
    while mover.busy:
        # An engine's thread is awake when it polls: one that slept takes up to three times as long.
        while mover.in_flight and mover.busy:
            mover.collect()
        started_ns = time.perf_counter_ns()
        _, spent = mover.poll(budget_bytes=SUBMITTED_BYTES)
        if spent > SUBMITTED_BYTES - rig.block_bytes:
            samples.append(time.perf_counter_ns() - started_ns)
    report.add_row(
        bench="transfer",
        side="penstock",
        params={"layout": rig.name, "tokens": rig.tokens, "direction": direction},
        metric=f"engine's time to submit {SUBMITTED_BYTES >> 20} MiB",
        unit="ns",
        summary=summarize(samples),
    )


def _report_small_copies(report: BenchReport, rig: Rig, save: SaveMover, down: Copy) -> None:
    found = {"alone": _small_copies([]), "beside a saturating save": _small_copies([(save, down)])}
    for side, samples in found.items():
        report.add_row(
            bench="transfer",
            side=side,
            params={"layout": rig.name, "tokens": rig.tokens, "bytes": SMALL_BYTES},
            metric="small copy to host",
            unit="ns",
            summary=summarize(samples),
        )
    p99_ms = summarize(found["beside a saturating save"]).p99 / 1e6
    name = f"{rig.name}, {rig.tokens} tokens: p99 of a 4 KiB copy beside a save, ms"
    report.add_ratio(name, p99_ms, at_most=SMALL_TARGET_MS)


def _small_copies(work: Sequence[tuple[QueuedMover, Copy]]) -> list[float]:
    """How long small copies of the engine take, one after each poll of the movers."""
    there = torch.empty(SMALL_BYTES, dtype=torch.uint8).pin_memory()
    here = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device="cuda")
    engine = torch.cuda.Stream()
    ended = torch.cuda.Event()
    torch.cuda.synchronize()
    samples: list[float] = []
    while len(samples) < SMALL_SAMPLES:
        for mover, copy in work:
            if not mover.busy:
                mover.submit(copy)
            mover.poll(budget_bytes=_UNLIMITED)
        with torch.cuda.stream(engine):
            started_ns = time.perf_counter_ns()
            there.copy_(here, non_blocking=True)
            ended.record()
            while not ended.query():
                pass
            samples.append(time.perf_counter_ns() - started_ns)
    while any(mover.busy for mover, _ in work):
        for mover, _ in work:
            mover.poll(budget_bytes=_UNLIMITED)
    return samples
