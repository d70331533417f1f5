"""The handoff benchmark on one GPU: two pools, all four parties in this process.

A layer is the matrix products of one layer of an 8B model over the prompt's tokens, on the
compute stream, behind which an event is recorded; parts leave in a stream of their own while
later layers compute. Three ways for the same bytes:

| way          | landing area          | who sums                                    |
|--------------|-----------------------|---------------------------------------------|
| `device`     | memory of the GPU     | the pack kernels, on both sides             |
| `shared`     | pinned shared memory  | the same; the way between two processes     |
| `host`       | plain host memory     | the CPU: what has no kernels                |

| side                     | what is measured                                                  |
|--------------------------|-------------------------------------------------------------------|
| `compute alone`          | the layers, and nothing is handed over                             |
| `one layer`              | a computed layer by itself, until the target says it is taken      |
| `handoff, by layers`     | parts leave while later layers compute; exposed after the last one |
| `handoff, after the last`| parts leave when all layers are computed                           |

The one rule: times are taken when the CPU has seen the device's events.
"""

from __future__ import annotations

import secrets
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.bench.handoff_rank import CHANNELS, HEADS, keys_of
from penstock.bench.measure import summarize
from penstock.errors import UnavailableError
from penstock.handoff.driver.decode_rank import DecodeRankDriver
from penstock.handoff.driver.device_parts import (
    DeviceReader,
    DeviceTaker,
    device_berths,
    pin_memory,
)
from penstock.handoff.driver.directory import Directory, EnginePlace, RankPlace
from penstock.handoff.driver.lines import Switchboard
from penstock.handoff.driver.prefill_rank import PrefillRankDriver
from penstock.handoff.driver.progress import LayerEvents
from penstock.handoff.driver.schedulers import DecodeSchedulerDriver, PrefillSchedulerDriver
from penstock.handoff.driver.tensor_parts import TensorReader, TensorTaker, TorchEvent
from penstock.handoff.protocol.settings import HandoffBounds, HandoffSettings
from penstock.handoff.protocol.states import DecodeState
from penstock.tiers.tensors import PART_FIRST, Held, TensorGroup, TensorLayer, TensorTier
from penstock.transport.inproc import InprocFabric
from penstock.transport.shared_memory import SharedTarget, connect_shared
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.layers import GroupKind, HeadRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.bench.report import BenchReport
    from penstock.transport.inproc import InprocTarget
    from penstock.transport.remote import WriterLink

LAYERS, TOKENS, BLOCK_TOKENS = 32, 2048, 16
PRODUCTS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""The products of a layer of an 8B model: queries, keys and values; output; up and gate; down."""
SETTINGS = HandoffSettings(bounds=HandoffBounds(berth_bytes=8 << 20, berth_count=16))
"""A berth holds one layer of the prompt, so that a layer is one part."""
WAYS = ("device", "shared", "host")
EXPOSED_MAX = 1.5
BESIDE_MIN = 0.9
PATIENCE_S = 60.0


class Sides(NamedTuple):
    """One round, in seconds."""

    compute_s: float
    layer_s: float
    by_layers_s: float
    exposed_s: float
    after_s: float


def run_handoff_on_cuda(report: BenchReport, *, rounds: int) -> None:
    """Measures exposed latency and overlap, and adds rows and ratios."""
    for way in WAYS:
        pair = CudaPair(way=way)
        pair.run(by_layers=True)
        pair.one_layer()
        found = []
        for _ in range(rounds):
            compute_s = pair.compute_alone()
            layer_s = pair.one_layer()
            by_layers_s, exposed_s = pair.run(by_layers=True)
            _, after_s = pair.run(by_layers=False)
            found.append(Sides(compute_s, layer_s, by_layers_s, exposed_s, after_s))
        pair.close()
        _add(report, way, found)
    report.add_note("one layer: from its progress until the target rank has taken and verified it")


def _add(report: BenchReport, way: str, found: list[Sides]) -> None:
    params: dict[str, str | int | float | bool] = {
        "layers": LAYERS,
        "tokens": TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "way": way,
    }
    for side, metric, values in (
        ("compute alone", "all layers", [each.compute_s for each in found]),
        ("one layer", "taken", [each.layer_s for each in found]),
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
        f"exposed, against sending one layer, one GPU, {way}",
        statistics.median(each.exposed_s / each.layer_s for each in found),
        at_most=EXPOSED_MAX,
    )
    report.add_ratio(
        f"compute beside the handoff, of alone, one GPU, {way}",
        statistics.median(each.compute_s / each.by_layers_s for each in found),
        at_least=BESIDE_MIN,
    )


class CudaPair:
    """Two pools of one GPU, and the four parties of two engines with one rank each."""

    def __init__(self, device: str = "cuda", *, way: str = "device") -> None:
        # Tensors name their device by its number, and so do the kernels.
        self.device = torch.device(device, torch.cuda.current_device())
        self.pools = [self._pool() for _ in range(2)]
        sums = Algorithm.XXH3 if way == "host" else Algorithm.MIX64
        form = Form(layout=self.pools[0].layout, checksum=sums)
        prefill, decode = (
            EnginePlace(scheduler=name, ranks=(RankPlace(name=f"{name}/0", form=form),))
            for name in ("prefill", "decode")
        )
        self.directory = Directory(prefill=prefill, decode=decode, model="bench", weights="v1")
        board = Switchboard()
        self.events = LayerEvents(TorchEvent)
        self.decode_stream = torch.cuda.Stream(self.device)
        """What the decode engine computes in, were it to compute: it has steps of its own."""
        lines = {
            name: board.join(name, self.directory.peers_of(name)) for name in self.directory.names
        }
        self.reader, self.taker = self._movers(way)
        connect, self._landing = _transport(way, self.device)
        self.prefill = PrefillSchedulerDriver(
            self.directory, lines["prefill"], incarnation=_drawn(), settings=SETTINGS
        )
        self.decode = DecodeSchedulerDriver(
            self.directory, lines["decode"], incarnation=_drawn(), settings=SETTINGS
        )
        self.source = PrefillRankDriver(
            self.directory,
            "prefill/0",
            lines["prefill/0"],
            reader=self.reader,
            connect=connect,
            incarnation=_drawn(),
            settings=SETTINGS,
            progress=self.events,
        )
        self.target = DecodeRankDriver(
            self.directory,
            "decode/0",
            lines["decode/0"],
            taker=self.taker,
            target=self._landing,
            incarnation=_drawn(),
            settings=SETTINGS,
        )
        self._factors = [_factors(TOKENS, *sides, self.device) for sides in PRODUCTS]
        self._number = 0
        self._until(lambda: self.prefill.machine.is_open("prefill/0"))
        self._until(lambda: self.decode.machine.is_open("decode/0"))

    def _movers(self, way: str) -> tuple[Any, Any]:
        there, here = self.pools
        part_bytes = SETTINGS.bounds.berth_bytes
        if way == "host":
            sums = Algorithm.XXH3
            staged = TensorReader(there, sums, part_bytes=part_bytes)
            return staged, TensorTaker(here, sums, part_bytes=part_bytes)
        reader = DeviceReader(there, part_bytes=part_bytes)
        return reader, DeviceTaker(here, part_bytes=part_bytes)

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

    def close(self) -> None:
        """Gives memory, streams and events back."""
        torch.cuda.synchronize(self.device)
        self.source.close()
        self.target.close()
        if isinstance(self._landing, SharedTarget):
            self._landing.close()
        for mover in (self.reader, self.taker):
            if isinstance(mover, DeviceReader | DeviceTaker):
                mover.close()

    def compute_alone(self) -> float:
        """Seconds that the layers take."""
        torch.cuda.synchronize(self.device)
        began = time.monotonic()
        for _ in range(LAYERS):
            self._compute_layer()
        torch.cuda.synchronize(self.device)
        return time.monotonic() - began

    def one_layer(self) -> float:
        """Seconds to send a layer by itself, until it was taken: the median over the layers."""
        name = self._begin()
        found = []
        for layer in range(LAYERS):
            before, began = self.target.parts_moved, time.monotonic()
            self.source.progress(name, layer=layer, tokens=TOKENS)
            self._until(lambda before=before: self.target.parts_moved > before)  # type: ignore[misc]
            found.append(time.monotonic() - began)
        self._until(lambda: self._is_over(name))
        return statistics.median(found)

    def run(self, *, by_layers: bool) -> tuple[float, float]:
        """Seconds until the last layer was seen computed, and from then until decode can begin."""
        name = self._begin()
        torch.cuda.synchronize(self.device)
        began = time.monotonic()
        stream = torch.cuda.current_stream(self.device)
        if by_layers:
            self.events.begin({name: TOKENS}, range(LAYERS))
        for layer in range(LAYERS):
            self._compute_layer()
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

    def _begin(self) -> str:
        """A prompt that both engines know, and of which nothing is computed."""
        self._number += 1
        name = f"prompt-{self._number}"
        slots = list(range(TOKENS // BLOCK_TOKENS))
        keys = keys_of(name, len(slots))
        self.decode.submit(name, token_count=TOKENS, slots={"decode/0": slots}, keys=keys)
        self.prefill.submit(name)
        self.prefill.first_token(name, (1,))
        self.source.admit(name, token_count=TOKENS, slots=slots, keys=keys)
        self._until(lambda: name in self.source.machine.wants.get("decode/0", {}))
        return name

    def _compute_layer(self) -> None:
        for one, other, out in self._factors:
            torch.mm(one, other, out=out)

    def _is_over(self, name: str) -> bool:
        claimed = self.decode.machine.claimed.get(name)
        return claimed is None or claimed.state is not DecodeState.CLAIMING

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise UnavailableError(f"the benchmark has waited for {PATIENCE_S} s")
            self.source.step()
            with torch.cuda.stream(self.decode_stream):
                self.target.step()
            self.decode.step()
            self.prefill.step()


def _transport(
    way: str, device: torch.device
) -> tuple[Callable[[bytes], WriterLink], InprocTarget | SharedTarget]:
    """How the source gets at landing areas, and where the target has them from."""
    if way == "shared":
        return partial(connect_shared, pin=pin_memory), SharedTarget(pin=pin_memory)
    fabric = InprocFabric()
    return fabric.connect, fabric.target(device_berths(device) if way == "device" else None)


def _factors(rows: int, inner: int, columns: int, device: torch.device) -> tuple[Any, Any, Any]:
    """Two matrices, and room for their product."""
    one = torch.randn(rows, inner, device=device).to(torch.bfloat16)
    other = torch.randn(inner, columns, device=device).to(torch.bfloat16)
    return one, other, torch.empty(rows, columns, device=device, dtype=torch.bfloat16)


def _drawn() -> int:
    return secrets.randbits(63) + 1
