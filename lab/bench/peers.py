"""A handoff beside idle pairs: what it costs an instance that it may work with many others.

One prefill engine, one decode engine and `OTHERS` more in one process, driven by turns. The
prefill engine has the prompt cached, so a round is the handoff alone: from the claim until all KV
has been verified. Pairs with the others are open for one side of a round and closed for the other.
Nobody uses them.

The one rule: both sides hand over the same prompt, in turn, and the order changes every round.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from lab.bench.measure import summarize
from lab.bench.pair import BLOCK_TOKENS, SCALES, write_model
from penstock.config import EngineTable, parse_config
from penstock.errors import UnavailableError
from penstock_serve.engine.instance import build_engine
from penstock_serve.engine.peers import REST_S
from penstock_serve.engine.requests import Request
from penstock_serve.engine.spec import InstanceSpec, PairSpec

if TYPE_CHECKING:
    from lab.bench.report import BenchReport
    from penstock_serve.engine.engine import Engine

OTHERS = 7
TOKENS = 512
COST_MAX = 1.02
HANDOFF_S = 60.0
WARM_UPS = 1
HANDOFFS = 15
"""Of one side of a round, which is their median."""
BENCH = "handoff beside idle pairs"
CONFIG = f"""
version = 1
model.name = "random"
cache = {{ block_tokens = {BLOCK_TOKENS}, blocks = 128, load_gate = "off" }}
"""


def run_peers(report: BenchReport, *, rounds: int) -> None:
    """Measures a handoff with and without idle pairs, and adds rows and their ratio.

    Raises:
        UnavailableError: a handoff was not delivered.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))
        model = Path(folder) / "model"
        write_model(model, SCALES["cpu"], device="cpu")
        names = ("prefill", "decode", *(f"other-{number}" for number in range(OTHERS)))
        engines = {name: _engine(model, name) for name in names}
        for engine in engines.values():
            stack.callback(engine.close, 1.0)
        _measure(report, _Bench(engines), rounds)


def _measure(report: BenchReport, bench: _Bench, rounds: int) -> None:
    times: dict[str, list[float]] = {"one pair": [], f"{OTHERS} idle pairs beside it": []}
    alone, beside = times
    for number in range(rounds + WARM_UPS):
        for side in (alone, beside) if number % 2 else (beside, alone):
            bench.set_others(opened=side == beside)
            took = statistics.median(bench.hand_over() for _ in range(HANDOFFS))
            if number >= WARM_UPS:
                times[side].append(took)
    for side, found in times.items():
        report.add_row(
            bench=BENCH,
            side=side,
            params={"tokens": TOKENS, "others": OTHERS},
            metric="handoff",
            unit="s",
            summary=summarize(found),
        )
    ratios = [there / here for there, here in zip(times[beside], times[alone], strict=True)]
    name = f"handoff beside {OTHERS} idle pairs, of a fixed pair"
    report.add_ratio(name, statistics.median(ratios), at_most=COST_MAX)


class _Bench:
    """The engines, and their pairs."""

    def __init__(self, engines: dict[str, Engine]) -> None:
        self._engines = engines
        self._prompt = tuple(number % 199 for number in range(TOKENS))
        self._count = 0
        self._others_opened = False
        self._introduce("prefill", "decode")

    def hand_over(self) -> float:
        """Hands the prompt over; returns the seconds from the claim to the end."""
        self._count += 1
        decode, prefill = self._engines["decode"], self._engines["prefill"]
        decode.cache.reset("to be handed it again")
        request = Request(
            id=f"request-{self._count}",
            prompt=self._prompt,
            max_tokens=1,
            handoff=f"handoff-{self._count}",
            prefill="prefill",
            decode="decode",
        )
        decode.add(request)
        prefill.add(request)
        deadline = time.monotonic() + HANDOFF_S
        while decode.unfinished or prefill.unfinished:
            if time.monotonic() > deadline:
                raise UnavailableError(f"a handoff took longer than {HANDOFF_S:g} s")
            prefill.step()
            decode.step()
        assert decode.handoffs is not None
        ended = decode.handoffs.ended[-1]
        if ended.outcome != "delivered":
            raise UnavailableError(f"a handoff ended as {ended.outcome!r}")
        return ended.ended - ended.began

    def set_others(self, *, opened: bool) -> None:
        """Opens or closes the pairs with the others, and waits until they rest."""
        if opened == self._others_opened:
            return
        self._others_opened = opened
        for number in range(OTHERS):
            for prefill, decode in (("prefill", f"other-{number}"), (f"other-{number}", "decode")):
                if opened:
                    self._introduce(prefill, decode)
                else:
                    for name in (prefill, decode):
                        self._engines[name].close_pair(prefill, decode)
        resting_at = time.monotonic() + 2 * REST_S
        while time.monotonic() < resting_at:
            for engine in self._engines.values():
                engine.step()

    def _introduce(self, prefill: str, decode: str) -> None:
        places = []
        for name in (prefill, decode):
            handoffs = self._engines[name].handoffs
            assert handoffs is not None
            places.append(handoffs.peers.place())
        pair = PairSpec(prefill=places[0], decode=places[1])
        for name in (prefill, decode):
            self._engines[name].open_pair(pair)


def _engine(model: Path, name: str) -> Engine:
    spec = InstanceSpec(
        name=name,
        engine=EngineTable(model=str(model), step_tokens=TOKENS),
        config=parse_config(CONFIG),
        server="",
        hands_over=True,
    )
    return build_engine(spec)[0]
