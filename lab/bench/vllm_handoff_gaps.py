"""What arriving prompts cost the tokens of an answer that is under way, for `lab bench vllm`.

A long answer is streamed by a decode server. Its time between tokens is taken

| load         | while                                                                          |
|--------------|--------------------------------------------------------------------------------|
| `alone`      | nothing else happens                                                           |
| `computed`   | the prefill server computes prompts that nobody wants: what cores, caches and   |
|              | memory bandwidth shared with it cost                                           |
| `handed over`| it computes prompts, and the decode server takes and answers them               |

The one rule: the three are taken from the same answer, one after the other, so that a machine that
changes its speed changes all of them.
"""

from __future__ import annotations

import time
from itertools import pairwise
from threading import Event, Thread
from typing import TYPE_CHECKING

from lab.bench.measure import summarize
from lab.bench.vllm_pairs import AT_ONCE, NIXL, OURS, PLAIN, draw_prompt
from lab.bench.vllm_proxy import ANSWER_S, alone, stream
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lab.bench.report import BenchReport
    from lab.bench.vllm_pairs import Pairs
    from lab.bench.vllm_proxy import Answer, Prompt
    from lab.bench.vllm_servers import VllmServer

GAP_MAX = 1.05
"""The longest that tokens beside handoffs may take, in times of alone."""
LONG_TOKENS = 12000
"""Of the answer: more than it gives until it is ended."""
FIRST_TOKENS = 20
"""Tokens before anything is measured."""
ALONE_TOKENS = 200
PROMPTS = 3
"""So many arrive, one after the other."""
ALONE, COMPUTED, HANDED = "alone", "computed", "handed over"


def run_gaps(report: BenchReport, pairs: Pairs, *, rounds: int, tokens: int) -> None:
    """Measures the time between tokens, and adds rows and ratios.

    Args:
        report: Gets them.
        pairs: The servers.
        rounds: How often.
        tokens: Of the prompts that arrive.

    Raises:
        UnavailableError: a server does not answer.
    """
    at_once = pairs.at_once()
    ways: dict[str, tuple[VllmServer, VllmServer, Callable[[Prompt], Answer]]] = {
        PLAIN: (pairs.plain, pairs.plain, lambda prompt: alone(pairs.plain, prompt))
    }
    for name in pairs.names:
        ways[name] = pairs.prefill[name], pairs.decode[name], pairs.asking(name)
    ways[AT_ONCE] = pairs.prefill[OURS], pairs.decode[OURS], at_once
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
    for number in range(rounds):
        for name, (prefill, decode, ask) in ways.items():
            pairs.begin_turn(name)
            salt = f"gaps-{tokens}-{number}"
            gaps = _measure(prefill, decode, ask, salt=f"{salt}~{name}", tokens=tokens)
            for load, samples in gaps.items():
                found[name].setdefault(load, []).append(summarize(samples).median)
                found[name].setdefault(f"{load}, longest", []).append(max(samples))
        report.progress(f"between tokens: round {number + 1} of {rounds}")
    _tell(report, found, tokens=tokens)


def _measure(
    prefill: VllmServer,
    decode: VllmServer,
    ask: Callable[[Prompt], Answer],
    *,
    salt: str,
    tokens: int,
) -> dict[str, list[float]]:
    answer = LongAnswer(decode, draw_prompt(f"long-{salt}", tokens=64, answer_tokens=LONG_TOKENS))
    prompts = [
        draw_prompt(f"{number}-{salt}", tokens=tokens, answer_tokens=1)
        for number in range(2 * PROMPTS)
    ]
    spans = {}
    try:
        answer.wait_for(FIRST_TOKENS)
        began = time.monotonic()
        answer.wait_for(FIRST_TOKENS + ALONE_TOKENS)
        spans[ALONE] = began, time.monotonic()
        for load, ask_one in ((COMPUTED, lambda prompt: alone(prefill, prompt)), (HANDED, ask)):
            began = time.monotonic()
            for prompt in prompts[:PROMPTS]:
                if error := ask_one(prompt).error:
                    raise UnavailableError(f"server {decode.name!r} did not answer: {error}")
            spans[load] = began, time.monotonic()
            del prompts[:PROMPTS]
    finally:
        answer.close()
    return {load: answer.gaps(*span) for load, span in spans.items()}


class LongAnswer:
    """An answer that is streamed until it is closed."""

    def __init__(self, server: VllmServer, prompt: Prompt) -> None:
        self._server = server
        self._times: list[float] = []
        self._wanted = 0
        self._came = Event()
        self._closed = False
        self._thread = Thread(target=self._read, args=[prompt], daemon=True)
        self._thread.start()

    def wait_for(self, count: int) -> None:
        """Waits until so many tokens have come.

        Raises:
            UnavailableError: they do not.
        """
        self._came.clear()
        self._wanted = count
        if len(self._times) < count and not self._came.wait(ANSWER_S):
            raise UnavailableError(
                f"server {self._server.name!r} gave {len(self._times)} tokens of {count} "
                f"in {ANSWER_S:g} s"
            )

    def gaps(self, began: float, ended: float) -> list[float]:
        """The times between tokens that came within a span."""
        came = [each for each in self._times if began <= each <= ended]
        return [later - earlier for earlier, later in pairwise(came)]

    def close(self) -> None:
        """Ends it; the server forgets it."""
        self._closed = True
        self._thread.join(ANSWER_S)

    def _read(self, prompt: Prompt) -> None:
        tokens = stream(self._server, prompt.body())
        for _ in tokens:
            self._times.append(time.monotonic())
            if len(self._times) >= self._wanted:
                self._came.set()
            if self._closed:
                tokens.close()
                return


def _tell(report: BenchReport, found: dict[str, dict[str, list[float]]], *, tokens: int) -> None:
    for side, loads in found.items():
        for load, samples in loads.items():
            report.add_row(
                bench="vllm-handoff",
                side=side,
                params={"arriving": tokens},
                metric=f"between tokens, {load}",
                unit="s",
                summary=summarize(samples),
            )
    for side in [each for each in (NIXL, OURS, AT_ONCE) if each in found]:
        for against in (ALONE, COMPUTED):
            ratio = _ratio(found[side][HANDED], found[side][against])
            name = f"between tokens of {side}, prompts {HANDED} ÷ {against}"
            if side != NIXL and against == ALONE:
                report.add_ratio(name=name, value=ratio, at_most=GAP_MAX)
            else:
                report.add_note(f"{name}: {ratio:.2f}")


def _ratio(beside: Sequence[float], alone_s: Sequence[float]) -> float:
    return summarize([a / b for a, b in zip(beside, alone_s, strict=True)]).median
