"""The demonstration from start to verdict.

    penstock serve --prefill-tp 2 --decode-tp 1      router, two prefill ranks, one decode rank
    round 1                                          conversations, with the cache
    round 2                                          the same prompts, with the cache off
    the server ends
    every answer of both rounds against a fresh computation

The one rule: whatever goes wrong is a finding, and with findings the command fails.
"""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock_serve.demo.chats import chats
from penstock_serve.demo.clients import Talk, call, hold, served
from penstock_serve.demo.exactness import Fresh, check
from penstock_serve.demo.result import GENERATED_MAX, ChatRound, Played, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock_serve.demo.chats import Chat
    from penstock_serve.demo.clients import ChatTurn
    from penstock_serve.demo.exactness import ExactnessVerdict

ROUNDS = (("with the cache", "use"), ("with the cache off", "off"))
QUIET_S = 30.0
"""The timeout for instances to release the blocks of ended requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The settings of the demonstration.

    Raises:
        ValueError: it would generate more tokens than allowed.
    """

    model: str | None = None
    chats: int = 6
    turns: int = 3
    clients: int = 3
    max_tokens: int = 16
    prefill_tp: int = 2
    decode_tp: int = 1
    blocks: int = 70
    """On the device of each instance: about half of what all conversations need, so that idle ones
    are found in host memory."""
    block_tokens: int = 16
    host_gib: float = 0.25

    def __post_init__(self) -> None:
        if not 1 <= self.clients <= self.chats:
            raise ValueError(
                f"clients is {self.clients}, must be from 1 to the number of chats, {self.chats}"
            )
        if self.planned_tokens > GENERATED_MAX:
            raise ValueError(
                f"{self.chats} chats of {self.turns} turns with {self.max_tokens} tokens each, "
                f"{len(ROUNDS)} times, come to {self.planned_tokens} tokens, must be at most "
                f"{GENERATED_MAX}"
            )

    @property
    def planned_tokens(self) -> int:
        """Tokens that are generated if every answer is as long as it may be."""
        return len(ROUNDS) * self.chats * self.turns * self.max_tokens

    @property
    def options(self) -> list[str]:
        """The options of `penstock serve`."""
        model = [] if self.model is None else ["--model", self.model]
        return [
            *model,
            *("--prefill-tp", f"{self.prefill_tp}", "--decode-tp", f"{self.decode_tp}"),
            *("--blocks", f"{self.blocks}", "--block-tokens", f"{self.block_tokens}"),
            *("--host-gib", f"{self.host_gib:g}", "--dtype", "float32"),
        ]


def play(stage: Stage, report: Callable[[str], None]) -> Played:
    """Runs the demonstration; `report` is called with lines about its progress.

    Raises `UnavailableError`: the server does not start, or does not answer.
    """
    began = time.monotonic()
    asked = chats(stage.chats, turns=stage.turns)
    rounds: list[ChatRound] = []
    command = f"penstock serve {shlex.join(stage.options)}"
    report(command)
    with served(stage.options) as server:
        report(server.line)
        for title, cache in ROUNDS:
            said = {(turn.chat, turn.number): turn.text for each in rounds for turn in each.turns}
            talk = Talk(
                address=server.address,
                clients=stage.clients,
                max_tokens=stage.max_tokens,
                cache=cache,
                said=said or None,
            )
            rounds.append(_round(talk, asked, title, report))
        left = _left_behind(server.address)
    checking = time.monotonic()
    verdict = _check(stage, [turn for each in rounds for turn in each.turns], report)
    ended = time.monotonic()
    return Played(
        command=command,
        ready_line=server.line,
        ready_s=server.ready_s,
        rounds=tuple(rounds),
        verdict=verdict,
        check_s=ended - checking,
        findings=(*verdict.findings, *left, *_not_shown(rounds), *too_much(stage, rounds)),
        seconds=ended - began,
    )


def _round(
    talk: Talk, asked: Sequence[Chat], title: str, report: Callable[[str], None]
) -> ChatRound:
    before = call(talk.address, "GET", "/cache")["instances"]
    began = time.monotonic()
    count = sum(len(chat.questions) for chat in asked)
    report(f"{count} requests of {talk.clients} clients, {title}")
    turns = hold(talk, asked)
    _require_quiet(talk.address)
    after = call(talk.address, "GET", "/cache")["instances"]
    return ChatRound(
        title=title,
        turns=tuple(sorted(turns, key=lambda turn: (turn.chat, turn.number))),
        statistics=counted(before, after),
        timeline={
            each["instance"]: _since(each, began)
            for each in call(talk.address, "GET", "/cache/timeline")["instances"]
        },
    )


def _since(timeline: Mapping[str, Any], began: float) -> dict[str, Any]:
    kept = {
        name: [each for each in timeline[name] if each["began"] >= began]
        for name in ("copies", "handoffs")
    }
    return {**timeline, **kept}


def _require_quiet(address: str) -> bool:
    """Whether all blocks are released in time: a request may end a moment after its answer."""
    deadline = time.monotonic() + QUIET_S
    while any(_busy(each) for each in call(address, "GET", "/cache")["instances"]):
        if time.monotonic() > deadline:
            return False
    return True


def _busy(instance: Mapping[str, Any]) -> bool:
    cache = instance["cache"]
    return bool(cache["leases"] or cache["operations_running"] or cache["operations_ending"])


def _left_behind(address: str) -> list[str]:
    """Blocks that were not released, and violated invariants."""
    findings = []
    if not _require_quiet(address):
        findings.append(f"blocks were not released within {QUIET_S:g} s")
    named = {each["instance"] for each in call(address, "GET", "/cache")["instances"]}
    in_order = set(call(address, "POST", "/admin/audit")["in_order"])
    findings += [f"{name} violates an invariant" for name in sorted(named - in_order)]
    return findings


def _not_shown(rounds: Sequence[ChatRound]) -> list[str]:
    """What should have happened and did not."""
    findings = []
    for played in rounds:
        for name, counts in played.statistics.items():
            if counts["counts"]["blocks_corrupt"]:
                corrupt = counts["counts"]["blocks_corrupt"]
                findings.append(f"{name}, {played.title}: {corrupt} blocks were corrupt")
        ends = [each["handoffs"].get("delivered", 0) for each in played.statistics.values()]
        if not any(ends):
            findings.append(f"no prompt was handed over {played.title}")
    cached = [sum(played.tokens_by_tier().values()) for played in rounds]
    if not cached[0]:
        findings.append("no token came from the cache")
    if any(cached[1:]):
        findings.append(f"{cached[1]} tokens came from the cache although it was off")
    return findings


def too_much(stage: Stage, rounds: Sequence[ChatRound]) -> list[str]:
    """Tokens that were generated beyond the plan."""
    findings = [
        f"{turn.chat}, turn {turn.number + 1}, {played.title}: {len(turn.tokens)} tokens, must be "
        f"at most {stage.max_tokens}"
        for played in rounds
        for turn in played.turns
        if len(turn.tokens) > stage.max_tokens
    ]
    generated = sum(played.generated for played in rounds)
    if generated > GENERATED_MAX:
        findings.append(f"{generated} tokens were generated, must be at most {GENERATED_MAX}")
    return findings


def _check(
    stage: Stage, turns: Sequence[ChatTurn], report: Callable[[str], None]
) -> ExactnessVerdict:
    report(f"{len(turns)} answers against a fresh computation, without cache and handoff")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return check(turns, Fresh(stage.model))
