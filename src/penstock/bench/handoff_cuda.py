"""The handoff benchmark on one GPU: two pools, all four parties in this process.

A layer is a matrix product on the compute stream, behind which an event is recorded; parts leave
through pinned staging in a stream of their own while later layers compute. Sides take turns:

| side                     | what is measured                                                  |
|--------------------------|-------------------------------------------------------------------|
| `compute alone`          | the layers, and nothing is handed over                             |
| `handoff, by layers`     | the same, parts leave meanwhile; exposed after the last layer      |
| `handoff, after the last`| parts leave when all layers are computed                           |

The one rule: times are taken when the CPU has seen the device's events.
"""

from __future__ import annotations

import secrets
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.bench.handoff_rank import CHANNELS, HEADS, keys_of
from penstock.bench.measure import summarize
from penstock.errors import UnavailableError
from penstock.handoff.settings import HandoffSettings
from penstock.handoff.states import DecodeState
from penstock.runtime.handoff.decode_rank import DecodeRankDriver
from penstock.runtime.handoff.directory import Directory, EnginePlace, RankPlace
from penstock.runtime.handoff.prefill_rank import PrefillRankDriver
from penstock.runtime.handoff.progress import LayerEvents
from penstock.runtime.handoff.schedulers import DecodeSchedulerDriver, PrefillSchedulerDriver
from penstock.runtime.handoff.switchboard import Switchboard
from penstock.runtime.handoff.tensors import TensorReader, TensorTaker, TorchEvent
from penstock.tiers.tensors import PART_FIRST, Held, TensorGroup, TensorLayer, TensorTier
from penstock.transport.inproc_remote import InprocFabric
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.layers import GroupKind, HeadRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.bench.report import Report

LAYERS, TOKENS, BLOCK_TOKENS = 32, 2048, 16
WORK_SIDE = 4096
"""Side of the matrices that a layer multiplies: about as long as a layer of an 8B model takes."""
EXPOSED_MAX = 1.5
PATIENCE_S = 60.0


class Sides(NamedTuple):
    """One round, in seconds."""

    compute_s: float
    by_layers_s: float
    exposed_s: float
    after_s: float


def run_handoff_on_cuda(report: Report, *, rounds: int) -> None:
    """Measures exposed latency and overlap, and adds rows and ratios."""
    pair = CudaPair()
    pair.run(by_layers=True)
    found = []
    for _ in range(rounds):
        compute_s = pair.compute_alone()
        by_layers_s, exposed_s = pair.run(by_layers=True)
        _, after_s = pair.run(by_layers=False)
        found.append(Sides(compute_s, by_layers_s, exposed_s, after_s))
    params = {"layers": LAYERS, "tokens": TOKENS, "block_tokens": BLOCK_TOKENS}
    for side, metric, values in (
        ("compute alone", "all layers", [each.compute_s for each in found]),
        ("handoff, by layers", "all layers", [each.by_layers_s for each in found]),
        ("handoff, by layers", "exposed", [each.exposed_s for each in found]),
        ("handoff, after the last", "exposed", [each.after_s for each in found]),
    ):
        report.add_row(
            bench="handoff on cuda",
            side=side,
            params=params,
            metric=metric,
            unit="ns",
            summary=summarize([1e9 * value for value in values]),
        )
    report.add_ratio(
        "exposed, in layers sent, one GPU",
        statistics.median(each.exposed_s * LAYERS / each.after_s for each in found),
        at_most=EXPOSED_MAX,
    )
    report.add_ratio(
        "compute beside the handoff, of alone",
        statistics.median(each.compute_s / each.by_layers_s for each in found),
        at_least=0.9,
    )


class CudaPair:
    """Two pools of one GPU, and the four parties of two engines with one rank each."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)
        pools = [self._pool() for _ in range(2)]
        form = Form(layout=pools[0].layout)
        prefill, decode = (
            EnginePlace(scheduler=name, ranks=(RankPlace(name=f"{name}/0", form=form),))
            for name in ("prefill", "decode")
        )
        self.directory = Directory(prefill=prefill, decode=decode, model="bench", weights="v1")
        settings, board, fabric = HandoffSettings(), Switchboard(), InprocFabric()
        part_bytes = settings.bounds.berth_bytes
        self.events = LayerEvents(TorchEvent)
        lines = {
            name: board.join(name, self.directory.peers_of(name)) for name in self.directory.names
        }
        self.prefill = PrefillSchedulerDriver(
            self.directory, lines["prefill"], incarnation=_drawn(), settings=settings
        )
        self.decode = DecodeSchedulerDriver(
            self.directory, lines["decode"], incarnation=_drawn(), settings=settings
        )
        self.source = PrefillRankDriver(
            self.directory,
            "prefill/0",
            lines["prefill/0"],
            reader=TensorReader(pools[0], Algorithm.XXH3, part_bytes=part_bytes),
            connect=fabric.connect,
            incarnation=_drawn(),
            settings=settings,
            progress=self.events,
        )
        self.target = DecodeRankDriver(
            self.directory,
            "decode/0",
            lines["decode/0"],
            taker=TensorTaker(pools[1], Algorithm.XXH3, part_bytes=part_bytes),
            target=fabric.target(),
            incarnation=_drawn(),
            settings=settings,
        )
        self._factors = [
            torch.randn(WORK_SIDE, WORK_SIDE, device=self.device, dtype=torch.bfloat16)
            for _ in range(2)
        ]
        self._number = 0
        self._until(lambda: self.prefill.machine.is_open("prefill/0"))
        self._until(lambda: self.decode.machine.is_open("decode/0"))

    def _pool(self) -> TensorTier:
        shape = (2, TOKENS // BLOCK_TOKENS, BLOCK_TOKENS, HEADS, CHANNELS)
        layers = [
            TensorLayer(
                number=n,
                planes=[
                    Held.pair(torch.randn(shape, device=self.device).to(torch.bfloat16), PART_FIRST)
                ],
            )
            for n in range(LAYERS)
        ]
        group = TensorGroup(kind=GroupKind.ATTENTION, heads=HeadRange.all_of(HEADS), layers=layers)
        return TensorTier.of([group], block_tokens=BLOCK_TOKENS)

    def compute_alone(self) -> float:
        """Seconds that the layers take."""
        torch.cuda.synchronize(self.device)
        began = time.monotonic()
        for _ in range(LAYERS):
            torch.mm(*self._factors)
        torch.cuda.synchronize(self.device)
        return time.monotonic() - began

    def run(self, *, by_layers: bool) -> tuple[float, float]:
        """Seconds until the last layer was seen computed, and from then until decode can begin."""
        self._number += 1
        name = f"prompt-{self._number}"
        slots = list(range(TOKENS // BLOCK_TOKENS))
        keys = keys_of(name, len(slots))
        self.decode.submit(name, token_count=TOKENS, slots={"decode/0": slots}, keys=keys)
        self.prefill.submit(name)
        self.prefill.first_token(name, (1,))
        self.source.admit(name, token_count=TOKENS, slots=slots, keys=keys)
        self._until(lambda: name in self.source.machine.wants.get("decode/0", {}))
        torch.cuda.synchronize(self.device)
        began = time.monotonic()
        stream = torch.cuda.current_stream(self.device)
        if by_layers:
            self.events.begin({name: TOKENS}, range(LAYERS))
        for layer in range(LAYERS):
            torch.mm(*self._factors)
            if by_layers:
                self.events.layer_submitted(layer, stream)
        if by_layers:
            self._until(lambda: not self.events.busy)
        else:
            torch.cuda.synchronize(self.device)
            self.source.chunk_progress(name, tokens=TOKENS)
        computed = time.monotonic()
        self._until(lambda: self._is_over(name))
        return computed - began, time.monotonic() - computed

    def _is_over(self, name: str) -> bool:
        claimed = self.decode.machine.claimed.get(name)
        return claimed is None or claimed.state is not DecodeState.CLAIMING

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise UnavailableError(f"the benchmark has waited for {PATIENCE_S} s")
            for party in (self.source, self.target, self.decode, self.prefill):
                party.step()


def _drawn() -> int:
    return secrets.randbits(63) + 1
