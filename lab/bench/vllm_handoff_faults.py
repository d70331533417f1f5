"""What a client sees when the prefill server is killed, for `lab bench vllm --handoff`.

| killed          | means                                                                     |
|-----------------|---------------------------------------------------------------------------|
| `in mid-prompt` | while the prefill server computes the prompt                              |
| `after it`      | when it has answered, before the decode server is asked for the prompt     |

All processes of the server are killed at once. The prompt is one whose answer is known from plain
vLLM.
"""

from __future__ import annotations

from threading import Timer
from typing import TYPE_CHECKING

from lab.bench.measure import summarize
from lab.bench.vllm_pairs import AT_ONCE, OURS, draw_prompt
from lab.bench.vllm_proxy import alone, prefilled

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.bench.report import BenchReport
    from lab.bench.vllm_pairs import Pairs
    from lab.bench.vllm_proxy import Answer, Prompt

PART = 0.4
"""Of the time that a prompt takes, after which its server is killed."""
MID, AFTER = "in mid-prompt", "after it"


def run_faults(report: BenchReport, pairs: Pairs, *, tokens: int) -> None:
    """Kills prefill servers, and adds a row and a note for each time.

    Args:
        report: Gets them.
        pairs: The servers; the prefill servers are started again, but for the last time.
        tokens: Of the prompt.

    Raises:
        UnavailableError: a server does not start again.
    """
    faults: list[tuple[str, str, str]] = []
    for name in pairs.names:
        faults += [(name, name, MID), (name, name, AFTER)]
    faults.append((AT_ONCE, OURS, MID))
    for number, (side, pair, moment) in enumerate(faults):
        pairs.begin_turn(pair)
        prompt = draw_prompt(f"killed-{number}", tokens=tokens)
        known = alone(pairs.plain, draw_prompt(f"killed-{number}~plain", tokens=tokens))
        # It has met its decode server, as servers that are killed have.
        ask = pairs.at_once() if side == AT_ONCE else pairs.asking(pair)
        before = ask(draw_prompt(f"before-{number}", tokens=tokens))
        if moment == MID:
            answer = _kill_in_mid_prompt(
                pairs, pair, ask, prompt, after_s=PART * min(known.first_s, before.first_s)
            )
        else:
            answer = _kill_after_it(pairs, pair, prompt)
        took_s = answer.ended - answer.began
        report.add_row(
            bench="vllm-handoff",
            side=side,
            params={"tokens": tokens, "prefill server killed": moment},
            metric="until the client has an answer or an error",
            unit="s",
            summary=summarize([took_s]),
        )
        how = answer.error or ("an answer" if answer.words == known.words else "ANOTHER ANSWER")
        if moment == MID and side != AT_ONCE and not answer.error:
            # Asked in turn, the decode server is not asked without the prefill server's answer.
            how += " (the prefill server had answered before it was killed)"
        report.add_note(
            f"{side}, prefill server killed {moment}: {how} after {took_s:.1f} s; one plain "
            f"instance takes {known.ended - known.began:.1f} s"
        )
        report.progress(f"killed: {number + 1} of {len(faults)}")
        if number + 1 < len(faults):
            pairs.start_prefill(pair)
            pairs.prefill[pair].wait_ready()


def _kill_in_mid_prompt(
    pairs: Pairs, pair: str, ask: Callable[[Prompt], Answer], prompt: Prompt, *, after_s: float
) -> Answer:
    killing = Timer(after_s, pairs.prefill[pair].kill)
    killing.start()
    try:
        return ask(prompt)
    finally:
        killing.join()


def _kill_after_it(pairs: Pairs, pair: str, prompt: Prompt) -> Answer:
    reported = prefilled(pairs.prefill[pair], prompt)
    pairs.prefill[pair].kill()
    return alone(pairs.decode[pair], prompt, kv_transfer_params=reported)
