"""`lab bench sglang-gpu`: the same SGLang on one GPU, with and without something below its cache.

| side       | is                                                                 |
|------------|--------------------------------------------------------------------|
| `plain`    | SGLang with a device pool of half the prompts                      |
| `own hits` | the same with room for all prompts: it finds them on the device    |
| `hicache`  | the small pool, and SGLang's HiCache in host memory                |
| `penstock` | the small pool, and Penstock's linker in host memory               |

Prompts are asked one at a time, in rounds: of a small pool each has been evicted by the others when
it comes again. In the first round everybody computes. The answers of later ones, and their
log-probabilities, must be those of `own hits`: the same steps. Then new prompts come all at once,
so that answers are computed beside what is saved.

Engines run side by side on the GPU and work in turns. One that does not start, or fails, is a note
that says why, and the others go on.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lab.bench.measure import summarize
from lab.bench.sglang_gpu_child import HICACHE, OURS, OWN, PAGE_TOKENS, PLAIN, SIDES
from lab.bench.vllm_engine import EngineProcess, ending_in_order
from lab.bench.vllm_gpu import LLAMA, SHAPES
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lab.bench.report import BenchReport

START_S = 150.0
MODEL_S = 120.0
PROMPTS = 8
POOL = 4
"""Prompts that the device holds, where others are to be evicted."""
ALL = PROMPTS + 2 * POOL
TAIL_TOKENS = 16
"""After whole pages, so that all of them can be found: the last token is always computed."""
ANSWER_TOKENS = 8
LOGPROB_MAX = 1e-3
"""Hits compute the same steps; what is right differs by nothing at all."""
WARM_SEED = 1_000_000
DECODE = {"count": 24, "tokens": 512, "answer": 64}
SMALL: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
}
"""Of 1.1 billion weights; 32 KiB of KV a token in bfloat16."""
SGLANG_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {**SHAPES["tiny"], "head_dim": 32},
    "1b": SMALL,
    "8b": {**SHAPES["8b"], "head_dim": 128},
}
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.9,
}
MODEL = """
import json, sys
from pathlib import Path
from lab.bench.sglang_gpu_child import make_model
make_model(Path(sys.argv[1]), json.loads(sys.argv[2]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangGpuPlan:
    """What is measured."""

    shape: str = "1b"
    sides: Sequence[str] = SIDES
    tokens: int = 4096
    rounds: int = 2
    """After the first one, in which everybody computes."""
    gib: int = 8
    """Host memory, which holds all prompts."""
    dtype: str = "bfloat16"
    decode: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    """More of what SGLang is told; of a side alone, below `side NAME`."""


def run_sglang_gpu(report: BenchReport, *, python: Path, plan: SglangGpuPlan) -> None:
    """Measures every side that starts, and adds rows and ratios.

    Raises `UnavailableError`: no model can be made, or no side answers.
    """
    with ending_in_order(), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        report.progress("making a model")
        _make_model(python, folder, plan)
        bench = _Bench(report, plan, _start(report, stack, python, folder, plan))
        bench.warm()
        bench.ask_all()
        if plan.decode:
            bench.decode()


def _make_model(python: Path, folder: Path, plan: SglangGpuPlan) -> None:
    config = {**LLAMA, **SGLANG_SHAPES[plan.shape], "torch_dtype": plan.dtype}
    made = subprocess.run(
        [str(python), "-c", MODEL, str(folder), json.dumps(config)],
        capture_output=True,
        text=True,
        timeout=MODEL_S,
        check=False,
    )
    if made.returncode:
        raise UnavailableError(f"no model can be made by {python}: {made.stderr[-2000:]}")


def _start(
    report: BenchReport, stack: ExitStack, python: Path, folder: Path, plan: SglangGpuPlan
) -> dict[str, EngineProcess]:
    """Starts all engines at once; those that came up."""
    prompt = plan.tokens + TAIL_TOKENS + ANSWER_TOKENS
    pages = -(-prompt // PAGE_TOKENS) + 1
    ready: dict[str, EngineProcess] = {}
    engines: dict[str, EngineProcess] = {}
    for at, side in enumerate(plan.sides):
        told = {
            "model": str(folder),
            # The side that finds everything on the device has room for all of it.
            "pool_tokens": (ALL if side == OWN else POOL) * pages * PAGE_TOKENS,
            "gib": plan.gib,
            "options": {
                **OPTIONS,
                "dtype": plan.dtype,
                # Engines that start together would choose the same one.
                "nccl_port": 29500 + at,
                **{name: each for name, each in plan.options.items() if "side " not in name},
                **plan.options.get(f"side {side}", {}),
            },
        }
        module = "lab.bench.sglang_gpu_child"
        engines[side] = EngineProcess(side, python, told, module=module)
        stack.callback(engines[side].close)
    for side, engine in engines.items():
        try:
            engine.wait_ready(START_S)
        except UnavailableError as problem:
            _absent(report, side, problem)
            engine.close()
        else:
            report.progress(f"{side}: has started")
            ready[side] = engine
    return ready


def _absent(report: BenchReport, side: str, problem: UnavailableError) -> None:
    report.progress(f"{side}: {problem}")
    report.add_note(f"no side {side}: {str(problem).strip().splitlines()[0][:200]}")


class _Bench:
    """The engines, and what is asked of them."""

    def __init__(
        self, report: BenchReport, plan: SglangGpuPlan, engines: dict[str, EngineProcess]
    ) -> None:
        self._report = report
        self._plan = plan
        self._engines = engines

    def warm(self) -> None:
        """Prompts that are forgotten and come again: kernels are compiled, memory is touched."""
        for number in (*range(POOL + 1), 0):
            self._each(self._prompt(WARM_SEED + number), "warm")

    def ask_all(self) -> None:
        """First tokens, and whether answers are right."""
        rounds: dict[str, list[list[dict[str, Any]]]] = {}
        for number in range(self._plan.rounds + 1):
            found: dict[str, list[dict[str, Any]]] = {side: [] for side in self._engines}
            for seed in range(PROMPTS):
                for side, answer in self._each(self._prompt(seed), f"round {number}").items():
                    found[side].append(answer)
            for side in self._engines:
                rounds.setdefault(side, []).append(found[side])
                self._tell(side, f"round {number}", found[side])
        living = {side: found for side, found in rounds.items() if side in self._engines}
        tell(self._report, living, shape=self._plan.shape, tokens=self._plan.tokens)

    def decode(self) -> None:
        """Answers of many new prompts at once, which are saved meanwhile."""
        spent: dict[str, list[float]] = {}
        for number in range(self._plan.rounds + 2):
            asked = {"do": "decode", "seed": 2 * WARM_SEED + number, **DECODE}
            for side, answer in self._each(asked, f"decode {number}").items():
                spent.setdefault(side, []).append(answer["tokens_per_s"])
        for side in self._engines:
            _row(self._report, side, {**DECODE}, "answers", "tokens/s", spent[side][1:])

    def _prompt(self, seed: int) -> dict[str, Any]:
        tokens = self._plan.tokens + TAIL_TOKENS
        return {"do": "ask", "seed": seed, "tokens": tokens, "answer": ANSWER_TOKENS}

    def _each(self, asked: dict[str, Any], what: str) -> dict[str, dict[str, Any]]:
        """What every engine answers; one that fails is left out from now on.

        Raises `UnavailableError`: none is left.
        """
        answers: dict[str, dict[str, Any]] = {}
        for side, engine in [*self._engines.items()]:
            try:
                answers[side] = engine.ask(asked)
            except UnavailableError as problem:
                _absent(self._report, f"{side}, {what}", problem)
                del self._engines[side]
        if not self._engines:
            raise UnavailableError(f"{what}: no side answers; what they said stands above")
        # Who was first is last in the next turn.
        order = [*self._engines]
        self._engines = {side: self._engines[side] for side in order[1:] + order[:1]}
        return answers

    def _tell(self, side: str, what: str, answers: Sequence[dict[str, Any]]) -> None:
        first = [1e3 * each["first_s"] for each in answers]
        self._report.progress(
            f"{what}: {side}: first token {median(first):.1f} ms ({min(first):.1f} to "
            f"{max(first):.1f}), found {[each['cached'] for each in answers]}, of them in host "
            f"memory {[each['host'] for each in answers]}"
        )


def tell(
    report: BenchReport,
    rounds: Mapping[str, Sequence[Sequence[dict[str, Any]]]],
    *,
    shape: str,
    tokens: int,
) -> None:
    """Adds what each side answered in each round; compares those that found it and were right."""
    right: dict[str, list[dict[str, Any]]] = {}
    for side, (computed, *later) in rounds.items():
        again = [each for found in later for each in found]
        params = {"shape": shape, "tokens": tokens}
        _row(report, side, params, "first token, computed", "s", _of(computed, "first_s"))
        _row(report, side, params, "first token again", "s", _of(again, "first_s"))
        _row(report, side, params, "found again", "tokens", _of(again, "cached"))
        if _is_right(report, side, again, rounds.get(OWN), tokens=tokens):
            right[side] = again
    for other, most in ((PLAIN, 0.9), (HICACHE, 1.0)):
        if OURS in right and other in right:
            ratio = median(
                ours["first_s"] / theirs["first_s"]
                for ours, theirs in zip(right[OURS], right[other], strict=True)
            )
            name = f"first token of {tokens} tokens again: {OURS} / {other}"
            report.add_ratio(name, ratio, at_most=most)


def _is_right(
    report: BenchReport,
    side: str,
    again: Sequence[dict[str, Any]],
    own: Sequence[Sequence[dict[str, Any]]] | None,
    *,
    tokens: int,
) -> bool:
    """Whether a side found what it should, and answered as SGLang does with its own hits."""
    if side == PLAIN:
        return True
    # What was still on the device says nothing about what is below it.
    found: int = min(each["cached" if side == OWN else "host"] for each in again)
    if found < tokens:
        where = "" if side == OWN else " below the device"
        _note(report, f"{side} is not compared: it found {found} of {tokens} tokens{where}")
    if own is None:
        _note(report, f"without {OWN!r} nothing says whether {side} is right")
        return found >= tokens
    computed, *later = own
    hits = [each for answers in later for each in answers]
    if side == OWN:
        # How much another way to compute the same changes: the scale for what follows.
        equal, largest = _apart(list(computed) * len(later), hits)
    else:
        equal, largest = _apart(again, hits)
    right = side == OWN or (equal == len(again) and largest <= LOGPROB_MAX)
    than = "what it computed" if side == OWN else OWN
    _note(
        report,
        f"{'' if right else 'WRONG: '}{side}: {equal} of {len(again)} answers equal those of "
        f"{than}, log-probabilities differ by {largest:.2g}",
    )
    return right and found >= tokens


def _note(report: BenchReport, line: str) -> None:
    """Says it at once, too: what follows may take long, or fail."""
    report.progress(line)
    report.add_note(line)


def _of(answers: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [each[name] for each in answers]


def _row(
    report: BenchReport,
    side: str,
    params: dict[str, Any],
    metric: str,
    unit: str,
    samples: list[float],
) -> None:
    report.add_row(
        bench="sglang-gpu",
        side=side,
        params=params,
        metric=metric,
        unit=unit,
        summary=summarize(samples),
    )


def _apart(some: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> tuple[int, float]:
    """How many answers are equal, and the largest difference of a log-probability.

    Up to the first token that differs: after it, other things are computed.
    """
    equal, largest = 0, 0.0
    for one, other in zip(some, others, strict=True):
        equal += [token for token, _ in one["scores"]] == [token for token, _ in other["scores"]]
        for (token, score), (other_token, other_score) in zip(
            one["scores"], other["scores"], strict=True
        ):
            if token != other_token:
                break
            largest = max(largest, abs(score - other_score))
    return equal, largest
