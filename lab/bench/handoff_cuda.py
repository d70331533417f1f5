"""The handoff benchmark on one GPU: two engines in this process, by the public interface.

A layer is the matrix products of one layer of an 8B model over the prompt's tokens, on the
compute stream; parts leave in a stream of their own while later layers compute, and land in memory
that two processes could share: that of the GPU, or pinned memory of the host. The pack kernels sum
them on both sides.

| side                     | what is measured                                                  |
|--------------------------|-------------------------------------------------------------------|
| `compute alone`          | the layers, and nothing is handed over                             |
| `one layer`              | a computed layer by itself, until the target has taken it          |
| `handoff, by layers`     | parts leave while later layers compute; exposed after the last one |
| `handoff, after the last`| parts leave when all layers are computed                           |

The one rule: times are taken when the CPU has seen the device's events.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import penstock
from lab.bench.handoff_rank import CHANNELS, HEADS
from lab.bench.measure import summarize
from penstock.errors import UnavailableError
from penstock.tiers.tensors import PART_FIRST, Held, TensorGroup, TensorLayer, TensorTier
from penstock.transport.unix_sockets import private_folder, socket_path
from penstock.vocabulary.layout import GroupKind, HeadRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.bench.report import BenchReport

LAYERS, TOKENS, BLOCK_TOKENS = 32, 2048, 16
PRODUCTS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""The products of a layer of an 8B model: queries, keys and values; output; up and gate; down."""
SETTINGS = penstock.HandoffSettings(
    bounds=penstock.HandoffBounds(berth_bytes=8 << 20, berth_count=16)
)
"""A berth holds one layer of the prompt, so that a layer is one part."""
WAYS = {"gpu": "gpu", "shared_memory": "shared"}
"""What the rows call each transport."""
EXPOSED_MAX = 1.5
BESIDE_MIN = 0.9
PATIENCE_S = 60.0
LOOK_S = 0.001


class Sides(NamedTuple):
    """One round, in seconds."""

    compute_s: float
    layer_s: float
    by_layers_s: float
    exposed_s: float
    after_s: float


def run_handoff_on_cuda(report: BenchReport, *, rounds: int) -> None:
    """Measures exposed latency and overlap, and adds rows and ratios."""
    for transport, way in WAYS.items():
        _run_way(report, transport, way, rounds=rounds)
    report.add_note("one layer: from its progress until the target rank has taken and verified it")


def _run_way(report: BenchReport, transport: str, way: str, *, rounds: int) -> None:
    pair = CudaPair(transport)
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
    _add(report, found, way)


def _add(report: BenchReport, found: list[Sides], way: str) -> None:
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
    """Two pools of one GPU, and a prefill and a decode engine with one rank each."""

    def __init__(self, transport: str = "auto") -> None:
        # Tensors name their device by its number, and so do the kernels.
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.pools = [self._pool() for _ in range(2)]
        self._factors = [_factors(TOKENS, *sides, self.device) for sides in PRODUCTS]
        self._number = 0
        self._results: dict[str, penstock.HandoffResult] = {}
        folder = private_folder()
        prefill, decode = (
            penstock.HandoffEngine(name=name, address=f"ipc://{socket_path(folder)}")
            for name in ("prefill", "decode")
        )
        self.pair = penstock.HandoffPair(
            prefill=prefill,
            decode=decode,
            model="bench",
            weights="v1",
            checksum="mix64",
            transport=transport,
        )
        there, here = self.pools
        with ExitStack() as stack:
            self.prefill = stack.enter_context(
                penstock.open_prefill(self.pair, kv=there, settings=SETTINGS)
            )
            self.decode = stack.enter_context(
                penstock.open_decode(self.pair, kv=here, settings=SETTINGS)
            )
            self._until(lambda: self.prefill.connected and self.decode.connected)
            self._opened = stack.pop_all()

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
        self._opened.close()

    @property
    def parts(self) -> int:
        """Parts that the decode engine has taken."""
        return self.decode.statistics().parts

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
        name = self.begin()
        found = []
        for layer in range(LAYERS):
            before, began = self.parts, time.monotonic()
            self.prefill.computed({name: TOKENS}, layer=layer)
            self._until(lambda before=before: self.parts > before)  # type: ignore[misc]
            found.append(time.monotonic() - began)
        self.finish(name)
        return statistics.median(found)

    def run(self, *, by_layers: bool) -> tuple[float, float]:
        """Seconds until the last layer was seen computed, and from then until decode can begin."""
        name = self.begin()
        torch.cuda.synchronize(self.device)
        began = time.monotonic()
        stream = torch.cuda.current_stream(self.device)
        for layer in range(LAYERS):
            self._compute_layer()
            if by_layers:
                self.prefill.computed({name: TOKENS}, layer=layer, stream=stream)
        done = torch.cuda.Event()
        done.record(stream)
        if by_layers:
            self._until(done.query)
        else:
            torch.cuda.synchronize(self.device)
            self.prefill.computed({name: TOKENS})
        computed = time.monotonic()
        self.finish(name)
        return computed - began, time.monotonic() - computed

    def finish(self, name: str) -> None:
        """Waits until the decode engine has the prompt.

        Raises:
            UnavailableError: it did not get it.
        """
        self._until(lambda: name in self._results)
        result = self._results.pop(name)
        if not result.delivered:
            raise UnavailableError(f"{name} was not delivered: {result.why}")

    def begin(self) -> str:
        """A prompt that both engines know, and of which nothing is computed."""
        self._number += 1
        name, prompt = f"prompt-{self._number}", range(TOKENS)
        slots = list(range(TOKENS // BLOCK_TOKENS))
        self.decode.claim(name, prompt, slots=slots)
        self.prefill.offer(name, prompt, slots=slots)
        self.prefill.first_token(name, 1)
        return name

    def _compute_layer(self) -> None:
        for one, other, out in self._factors:
            torch.mm(one, other, out=out)

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise UnavailableError(f"the benchmark has waited for {PATIENCE_S} s")
            self.prefill.step()
            self._results |= {each.handoff: each for each in self.decode.step()}


def _factors(rows: int, inner: int, columns: int, device: torch.device) -> tuple[Any, Any, Any]:
    """Two matrices, and room for their product."""
    one = torch.randn(rows, inner, device=device).to(torch.bfloat16)
    other = torch.randn(inner, columns, device=device).to(torch.bfloat16)
    return one, other, torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
