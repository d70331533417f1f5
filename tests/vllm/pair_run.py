"""Two vLLM engines, one that computes prompts and one that answers them, and what is done to them.

As `engine_run.py`, for a pair: the script has a script for each engine, under `prefill` and
`decode`. `fork_server.py` calls it. The page of metrics is the decode engine's: vLLM takes those of
an earlier engine of the process off it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from itertools import count
from threading import Event
from typing import TYPE_CHECKING, Any

from engine_run import (
    generate,
    kill_all,
    metrics_of,
    open_engine,
    processes,
    prompts_of,
    row_of,
    until,
)
from prometheus_client import REGISTRY

from vllm import SamplingParams

if TYPE_CHECKING:
    from vllm import LLM

REMOTE_DECODE = {
    # What vLLM's own proxy sends to the prefill engine.
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def main(model: str, script: dict[str, Any]) -> None:
    pair = Pair(model, script)
    for act in script["acts"]:
        began = time.monotonic()
        results = getattr(pair, act["act"])(act)
        results["seconds"] = round(time.monotonic() - began, 2)
        results["metrics"] = metrics_of(pair.decode)
        sys.stdout.write(f"ACT {json.dumps(results)}\n")
        sys.stdout.flush()


class Pair:
    """The two engines. Each act is a method."""

    def __init__(self, model: str, script: dict[str, Any]) -> None:
        before = {pid for pid, _ in processes()}
        both = script.get("both", {})
        self.prefill = open_engine(model, {"role": "kv_producer", **both, **script["prefill"]})
        self._sent_early = counters_of("vllm:penstock_bytes_sent_early")
        self._prefilling = [pid for pid, _ in processes() if pid not in before]
        self.decode = open_engine(model, {"role": "kv_consumer", **both, **script["decode"]})
        self._address = ""
        self._names = (f"handoff-{number}" for number in count())

    def in_turn(self, act: dict[str, Any]) -> dict[str, Any]:
        """As vLLM's own proxy asks: the prefill engine, then the decode engine with its answer."""
        prompts = prompts_of(act)
        asked = sampling_of(act, REMOTE_DECODE, max_tokens=1)
        answers = self.prefill.generate(prompts, asked, use_tqdm=False)
        params = [answer.kv_transfer_params for answer in answers]
        self._address = params[0]["penstock"]["address"]
        if act.get("passes") == "wrong address":
            for each in params:
                each["penstock"]["address"] = "ipc:///nobody/listens/here"
        told = [sampling_of(act, each) for each in params]
        out = self.decode.generate(prompts, told, use_tqdm=False)
        return {"rows": [row_of(each) for each in out], "params": params}

    def at_once(self, act: dict[str, Any]) -> dict[str, Any]:
        """As our router asks: both engines, when the prefill engine's address is known."""
        prompts = prompts_of(act)
        names = self._ask_decode(prompts, act)
        self._ask_prefill(prompts, names, act)
        drain(self.prefill)
        return {"rows": self._answers(names)}

    def in_pieces(self, act: dict[str, Any]) -> dict[str, Any]:
        """As `at_once`, until something was sent of a prompt before its last piece was computed.

        How soon the decode engine asks for a prompt is up to the machine: it gets more time in each
        round, and all KV is forgotten in between.
        """
        prompts, before = prompts_of(act), value_of(self._sent_early)
        for ahead_s in (0.0, 0.1, 0.3, 1.0, 3.0, 9.0):
            names = self._ask_decode(prompts, act)
            Event().wait(ahead_s)
            self._ask_prefill(prompts, names, act)
            drain(self.prefill)
            rows = self._answers(names)
            if sent := value_of(self._sent_early) - before:
                break
            self.forget(act)
        return {"rows": rows, "early": sent}

    def from_peer(self, act: dict[str, Any]) -> dict[str, Any]:
        """The one engine computes the prompts; the other answers once peers have listed blocks."""
        computed = generate(self.prefill, act)
        nudge = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)

        def are_listed() -> bool:
            # An engine without requests takes no steps, in which it would say what it has.
            for llm in (self.prefill, self.decode):
                llm.generate([{"prompt_token_ids": [11]}], nudge, use_tqdm=False)
            listed = metrics_of(self.decode).get("vllm:penstock_disk_blocks", 0)
            return bool(listed >= act["blocks"])

        until(are_listed)
        found = generate(self.decode, act)
        return {"computed": computed["rows"], "rows": found["rows"]}

    def alone(self, act: dict[str, Any]) -> dict[str, Any]:
        """The decode engine computes the prompts, or finds them in vLLM's own cache."""
        out = self.decode.generate(prompts_of(act), sampling_of(act, {}), use_tqdm=False)
        return {"rows": [row_of(each) for each in out]}

    def abort_decode(self, act: dict[str, Any]) -> dict[str, Any]:
        """Requests are taken back while their prompts are awaited, which nobody computes."""
        names = self._ask_decode(prompts_of(act), act)
        self.decode.llm_engine.abort_request(names)
        return {}

    def abort_prefill(self, act: dict[str, Any]) -> dict[str, Any]:
        """Prompts are taken back at the prefill engine before they are computed."""
        prompts = prompts_of(act)
        names = self._ask_decode(prompts, act)
        self._ask_prefill(prompts, names, act)
        self.prefill.llm_engine.abort_request(names)
        drain(self.prefill)
        return {"rows": self._answers(names)}

    def abort_anywhere(self, act: dict[str, Any]) -> dict[str, Any]:
        """One prompt after the other is taken back on either side, or on none, at any moment.

        The rows are those of requests that the decode engine had to answer, and their `prompts` say
        to which prompt. Both engines forget all KV in between: no block may be left in use.
        """
        draw, prompts = random.Random(act["draws"]), prompts_of(act)
        rows, asked, aborted = [], [], 0
        for number in range(act["count"]):
            which = number % len(prompts)
            names = self._ask_decode([prompts[which]], act)
            self._ask_prefill([prompts[which]], names, act)
            # Both engines go on meanwhile; a prompt takes them some hundredths of a second.
            Event().wait(draw.uniform(0.0, act["within_s"]))
            sides = draw.choice([[], [self.prefill], [self.decode], [self.prefill, self.decode]])
            for llm in sides:
                llm.llm_engine.abort_request(names)
            aborted += bool(sides)
            drain(self.prefill)
            answers = drain(self.decode)
            if self.decode not in sides:
                rows.append(row_of(answers[names[0]]))
                asked.append(which)
            self.forget(act)
        return {"rows": rows, "prompts": asked, "aborted": aborted}

    def kill_prefill(self, act: dict[str, Any]) -> dict[str, Any]:
        """The prefill engine is killed while it computes prompts."""
        prompts = prompts_of(act)
        names = self._ask_decode(prompts, act)
        self._ask_prefill(prompts, names, act)
        kill_all(self._prefilling)
        return {"rows": self._answers(names)}

    def forget(self, act: dict[str, Any]) -> dict[str, Any]:
        """Both engines forget all KV, but for the host's, if the act `keeps_host`.

        vLLM refuses while a block is in use.
        """
        below = not act.get("keeps_host")
        for llm in (self.prefill, self.decode):
            until(lambda llm=llm: llm.reset_prefix_cache(reset_connector=below))
        return {}

    def _ask_decode(self, prompts: list[Any], act: dict[str, Any]) -> list[str]:
        names = [next(self._names) for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            own = {"handoff": name, "address": self._address}
            params = {"do_remote_prefill": True, "do_remote_decode": False, "penstock": own}
            self.decode.llm_engine.add_request(name, prompt, sampling_of(act, params))
        return names

    def _ask_prefill(self, prompts: list[Any], names: list[str], act: dict[str, Any]) -> None:
        for name, prompt in zip(names, prompts, strict=True):
            params = {**REMOTE_DECODE, "penstock": {"handoff": name}}
            asked = sampling_of(act, params, max_tokens=1)
            self.prefill.llm_engine.add_request(name, prompt, asked)

    def _answers(self, names: list[str]) -> list[dict[str, Any]]:
        ended = drain(self.decode)
        return [row_of(ended[name]) for name in names]


def counters_of(name: str) -> list[Any]:
    """The counters of the engine that was opened last, which it counts into for ever."""
    return [each for each in REGISTRY._collector_to_names if getattr(each, "_name", "") == name]


def value_of(counters: list[Any]) -> float:
    found = [sample for each in counters for metric in each.collect() for sample in metric.samples]
    return sum(sample.value for sample in found if sample.name.endswith("_total"))


def drain(llm: LLM) -> dict[str, Any]:
    """Steps an engine until all its requests have ended: their answers."""
    ended: dict[str, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        ended |= {out.request_id: out for out in llm.llm_engine.step() if out.finished}
    return ended


def sampling_of(
    act: dict[str, Any], params: dict[str, Any], max_tokens: int | None = None
) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens or act.get("max_tokens", 24),
        logprobs=1,
        detokenize=False,
        ignore_eos=True,
        extra_args={"kv_transfer_params": params},
    )
