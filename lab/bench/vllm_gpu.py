"""`lab bench vllm-gpu`: the same vLLM on one GPU, with and without connectors.

| side                 | is                                                          |
|----------------------|-------------------------------------------------------------|
| `plain`              | vLLM with its own device cache alone                         |
| `offloading`         | vLLM's OffloadingConnector                                   |
| `penstock`           | this connector; loads end before their step                 |
| `penstock by layers` | the same; steps compute on their loads while they arrive    |

| part     | asks                                                                            |
|----------|---------------------------------------------------------------------------------|
| `right`  | prompts again after the device has forgotten them: the log-probabilities must be |
|          | those of plain vLLM which found them on the device: the same steps, bit by bit   |
| `first`  | documents of several lengths, each when the others have evicted it, with a new   |
|          | question behind it                                                               |
| `again`  | the same without a question                                                      |
| `chats`  | more chats than the device holds                                                |
| `decode` | 64 new prompts at once, whose blocks are all saved                              |
| `pair`   | prompts that one engine computes and another one on the same GPU answers, both  |
|          | asked at once, beside `plain`: first tokens, and prompts a second. Answers must |
|          | be those of `plain` when it finds the prompt on the device: the same steps       |

Engines have the sizes of the model and random weights. They run side by side on the GPU and work in
turns, a round each, and each begins a round where the last one ended.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lab.bench.measure import summarize
from lab.bench.vllm_engine import EngineProcess, ending_in_order
from lab.bench.vllm_gpu_child import DECODE, OFFLOADING, OUR_LAYERS, OURS, PLAIN, PREFILL, SIDES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.bench.report import BenchReport, Param

QUESTION_TOKENS = 100
CHAT_TOKENS = 4 * (512 + 32)
"""Of a chat at its end."""
PARTS = ("right", "first", "again", "chats", "decode", "pair")
PAIR = "pair"
PAIR_GOALS = {512: 1.3, 2048: 1.12, 8192: 1.06}
"""Lengths of prompts, and how much later their first tokens may come out of a pair."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 32000,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
"""Of a model to try this out, and of Llama 3.1 8B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """What is measured."""

    shape: str = "8b"
    parts: Sequence[str] = PARTS
    sides: Sequence[str] = SIDES
    lengths: Sequence[int] = (2048, 8192, 32768)
    pool_tokens: int = 57_344
    """What the device holds: fewer than the prompts of each length have together."""
    gib: int = 24
    """Host memory, which holds them all."""
    rounds: int = 5
    options: dict[str, Any] | None = None
    """More of what vLLM is told, the same for all sides."""

    @property
    def spread(self) -> int:
        """Tokens of all prompts of one length together: more than the device holds."""
        return self.pool_tokens * 8 // 7


def run_vllm_gpu(report: BenchReport, *, python: Path, plan: GpuPlan) -> None:
    """Measures every side, and adds rows and ratios.

    Raises `UnavailableError`: an engine does not run.
    """
    with ending_in_order(), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config.json").write_text(json.dumps({**LLAMA, **SHAPES[plan.shape]}))
        told = {
            "model": str(folder),
            "dtype": "bfloat16",
            "pool_tokens": plan.pool_tokens,
            "longest": max(*plan.lengths, CHAT_TOKENS) + 512,
            "gib": plan.gib,
            "options": plan.options or {},
        }
        report.progress(f"starting {', '.join(plan.sides)}")
        engines: dict[str, EngineProcess] = {}
        pair = (PREFILL, DECODE) if PAIR in plan.parts else ()
        for side in (*plan.sides, *pair):
            module = "lab.bench.vllm_gpu_child"
            engines[side] = EngineProcess(side, python, {"side": side, **told}, module=module)
            stack.callback(engines[side].close)
        for engine in engines.values():
            engine.wait_ready()
        pair_of = {side: engines.pop(side) for side in pair}
        bench = _Bench(report, engines, plan, pair_of)
        for part in plan.parts:
            getattr(bench, part)()


class _Bench:
    """The engines, and what is asked of them."""

    def __init__(
        self,
        report: BenchReport,
        engines: dict[str, EngineProcess],
        plan: GpuPlan,
        pair: dict[str, EngineProcess],
    ) -> None:
        self._report = report
        self._engines = engines
        self._plan = plan
        self._pair = pair

    def right(self) -> None:
        """Answers and log-probabilities of hits, beside those of plain vLLM's own hits."""
        length = min(self._plan.lengths[-1], self._plan.pool_tokens // 2) // 8
        asked = {"do": "ask", "tokens": length + 5, "count": 4, "answer": 16, "told": True}
        # What is evicted by nothing in plain vLLM is forgotten by the others.
        found = {
            side: [
                engine.ask({**asked, "seed": 1, "forget": again and side != PLAIN})
                for again in (False, True)
            ]
            for side, engine in self._engines.items()
        }
        for side, (cold, again) in found.items():
            plain_cold, plain = found[PLAIN]
            self._report.add_note(
                f"right: {side}: {length + 5} tokens, found {again['cached']}: "
                f"{_equal(again['answers'], plain['answers'])} answers as plain vLLM gives them "
                f"with its own hits, largest difference of a log-probability "
                f"{_apart(again, plain):.2g}; computed, {_apart(cold, plain_cold):.2g}; "
                f"plain's own hits against computed {_apart(plain, plain_cold):.2g}"
            )

    def first(self) -> None:
        """First tokens of documents of each length with a new question."""
        for length in self._plan.lengths:
            self._first(f"first token of {length} tokens and a question", length, QUESTION_TOKENS)

    def again(self) -> None:
        """First tokens of the same prompts again."""
        for length in self._plan.lengths:
            self._first(f"first token of {length} tokens", length, 0)

    def _first(self, what: str, length: int, question: int) -> None:
        count = self._plan.spread // length + 1
        params: dict[str, Param] = {"tokens": length, "question": question, "count": count}
        results = self._rounds(what, {"do": "ask", "answer": 2, "seed": length, **params})
        for side, rounds in results.items():
            self._row(side, params, "first token", "s", _each(rounds, "first_s"))
            self._row(side, params, "found", "tokens", _each(rounds, "cached"))
        self._compare(what, results, "first_s", at_most=0.9)

    def chats(self) -> None:
        """Chats that the device does not hold."""
        sizes = {"system": 0, "question": 512, "answer": 32, "together": 8, "turns": 4}
        chats = self._plan.spread // CHAT_TOKENS // 8 * 8 + 8
        params: dict[str, Param] = {"chats": chats, **sizes}
        results = self._rounds("chats", {"do": "chats", **params})
        for side, rounds in results.items():
            self._row(side, params, "answers", "tokens/s", [r["tokens_per_s"] for r in rounds])
            self._row(side, params, "first token", "s", _each(rounds, "first_s"))
            self._row(side, params, "found", "share", [r["found"] for r in rounds])
        self._compare("chats, answers a second", results, "tokens_per_s", at_least=1.05)

    def decode(self) -> None:
        """Answers of many requests at once."""
        sizes = {"count": 64, "tokens": min(512, self._plan.pool_tokens // 128), "answer": 256}
        params: dict[str, Param] = {**sizes}
        results = self._rounds("decode", {"do": "decode", **sizes})
        for side, rounds in results.items():
            self._row(side, params, "answers", "tokens/s", [r["tokens_per_s"] for r in rounds])
            spent = [r["thread_s"] for r in rounds]
            self._row(side, params, "engine's thread a step", "s", spent)
            self._row(side, params, "a step", "s", _each(rounds, "steps_s"))
        self._compare(
            "decode while saving, answers a second",
            results,
            "tokens_per_s",
            than=PLAIN,
            at_least=0.99,
        )
        self._compare("engine's thread a step", results, "thread_s", at_most=1.0)

    def pair(self) -> None:
        """Prompts that are handed over, beside those that one engine computes and answers."""
        # Where the prefill engine is found; both have opened the pair by the end of this.
        first = {"tokens": 64, "count": 1, "seed": 0, "names": ["open"]}
        (params,) = self._pair[PREFILL].ask({"do": "offer", **first})["params"]
        address = params["penstock"]["address"]
        self._pair[DECODE].ask({"do": "claim", "answer": 2, "address": address, **first})
        for length, goal in PAIR_GOALS.items():
            name = f"pair: first token of {length} tokens ÷ one engine"
            self._beside_plain(name, "first_s", address, length, at_most=goal)
        name = "pair: prompts of 2048 tokens a second ÷ one engine"
        self._beside_plain(name, "prompts_per_s", address, 2048, count=16, at_least=0.9)

    def _beside_plain(
        self,
        name: str,
        value: str,
        address: str,
        length: int,
        *,
        count: int = 1,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Rounds of `count` prompts at once, of one engine and of the pair in turns."""
        results: dict[str, list[dict[str, Any]]] = {PLAIN: [], PAIR: []}
        for number in range(2 * self._plan.rounds + 1):
            names = [f"{length} {count} {number} {each}" for each in range(count)]
            # All but the last token fill blocks, so that a hit computes that one, as a pair does.
            asked = {"tokens": length + 1, "count": count, "seed": 1000 * length + number}
            claim = {"do": "claim", "names": names, "answer": 16, **asked}
            plain = self._engines[PLAIN].ask({**claim, "address": ""})
            hits = self._engines[PLAIN].ask({**claim, "address": ""})
            results[PLAIN].append({**plain, "answers": hits["answers"]})
            self._pair[PREFILL].send({"do": "offer", "names": names, **asked})
            results[PAIR].append(self._pair[DECODE].ask({**claim, "address": address}))
            self._pair[PREFILL].answer()
            self._report.progress(f"{name}: round {number + 1} of {2 * self._plan.rounds + 1}")
        answers = {side: [each["answers"] for each in found] for side, found in results.items()}
        self._report.add_note(
            f"{name}: {_equal(answers[PAIR], answers[PLAIN])} rounds answer as plain hits do; "
            f"found {min(_each(results[PAIR], 'cached'))} tokens of each prompt or more"
        )
        params: dict[str, Param] = {"tokens": length, "together": count}
        metric, unit = ("first token", "s") if value == "first_s" else ("prompts", "1/s")
        for side, rounds in results.items():
            # The first round compiles.
            self._row(side, params, metric, unit, [s for r in rounds[1:] for s in _list(r[value])])
        ratio = median(
            median(_list(ours[value])) / median(_list(theirs[value]))
            for ours, theirs in zip(results[PAIR][1:], results[PLAIN][1:], strict=True)
        )
        self._report.add_ratio(name, ratio, at_least=at_least, at_most=at_most)

    def _rounds(self, what: str, asked: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
        """What each side answers in each round but the first, which compiles and fills.

        Rounds have prompts of their own, unless `asked` has a seed.
        """
        sides = [*self._engines]
        results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for number in range(self._plan.rounds + 1):
            turn = number % len(sides)
            for side in sides[turn:] + sides[:turn]:
                results[side].append(self._engines[side].ask({"seed": number, **asked}))
            self._report.progress(f"{what}: round {number + 1} of {self._plan.rounds + 1}")
        return {side: rounds[1:] for side, rounds in results.items()}

    def _row(
        self, side: str, params: dict[str, Param], metric: str, unit: str, samples: list[float]
    ) -> None:
        self._report.add_row(
            bench="vllm-gpu",
            side=side,
            params={"shape": self._plan.shape, **params},
            metric=metric,
            unit=unit,
            summary=summarize(samples),
        )

    def _compare(
        self,
        name: str,
        results: dict[str, list[dict[str, Any]]],
        value: str,
        *,
        than: str = OFFLOADING,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Ours by theirs, round by round: the median."""
        for side in (OURS, OUR_LAYERS):
            if side in results and than in results:
                ratio = median(
                    median(_list(ours[value])) / median(_list(theirs[value]))
                    for ours, theirs in zip(results[side], results[than], strict=True)
                )
                self._report.add_ratio(
                    f"{name}: {side} / {than}", ratio, at_least=at_least, at_most=at_most
                )


def _list(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def _each(rounds: list[dict[str, Any]], value: str) -> list[float]:
    return [sample for each in rounds for sample in each[value]]


def _equal(ours: list[list[int]], theirs: list[list[int]]) -> str:
    equal = sum(one == other for one, other in zip(ours, theirs, strict=True))
    return f"{equal} of {len(theirs)}"


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of a log-probability, over tokens up to the first that differs."""
    found = 0.0
    for tokens, scores, their_tokens, theirs in zip(
        one["answers"], one["logprobs"], other["answers"], other["logprobs"], strict=True
    ):
        for token, score, their_token, their_score in zip(
            tokens, scores, their_tokens, theirs, strict=True
        ):
            if token != their_token:
                break
            found = max(found, abs(score - their_score))
    return found
