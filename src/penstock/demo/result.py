"""What came of the demonstration, as values: for the table, the picture, JSON and the tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.demo.clients import ChatTurn
    from penstock.demo.exactness import ExactnessVerdict

GENERATED_MAX = 1500
"""Tokens that the demonstration may generate, all rounds together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRound:
    """All conversations, held once."""

    title: str
    turns: tuple[ChatTurn, ...]
    statistics: dict[str, dict[str, Any]]
    """What each instance counted in this round, by its name; see `counted`."""
    timeline: dict[str, dict[str, Any]]
    """The copies and handoffs of each instance in this round, by its name."""

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last answer."""
        began = min(turn.sent for turn in self.turns)
        return max(turn.ended for turn in self.turns) - began

    @property
    def generated(self) -> int:
        """Tokens of all answers."""
        return sum(len(turn.heard) for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(turn.prompt_tokens for turn in self.turns)

    def first_token_s(self, *, later: bool) -> float:
        """The median wait for a first token: in first turns, or in later ones."""
        return median(self._waits(later=later))

    def slowest_first_token_s(self, *, later: bool) -> float:
        """The longest of them."""
        return max(self._waits(later=later))

    def tokens_by_tier(self) -> Counter[str]:
        """Prompt tokens that the answering instance found, by tier."""
        found: Counter[str] = Counter()
        for turn in self.turns:
            found.update(turn.cached_by_tier)
        return found

    def blocks_copied(self) -> dict[str, dict[str, tuple[int, int, int]]]:
        """Copies, blocks and bytes by instance and hop."""
        found: dict[str, dict[str, tuple[int, int, int]]] = {}
        for name, told in self.timeline.items():
            hops = found.setdefault(name, {})
            for copy in told["copies"]:
                hop = f"{copy['source']} to {copy['target']}"
                copies, blocks, size = hops.get(hop, (0, 0, 0))
                more = copy["blocks"] * told["block_bytes"]
                hops[hop] = (copies + 1, blocks + copy["blocks"], size + more)
        return found

    def _waits(self, *, later: bool) -> list[float]:
        waits = [turn.first_token_s for turn in self.turns if bool(turn.number) is later]
        return waits or [0.0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The whole demonstration."""

    command: str
    ready_line: str
    ready_s: float
    rounds: tuple[ChatRound, ...]
    verdict: ExactnessVerdict
    check_s: float
    findings: tuple[str, ...]
    """What is not as it should be; empty if all is well."""
    seconds: float

    @property
    def generated(self) -> int:
        """Tokens of all answers, of all rounds."""
        return sum(each.generated for each in self.rounds)

    @property
    def generated_max(self) -> int:
        """As many as these may be."""
        return GENERATED_MAX

    def document(self) -> dict[str, Any]:
        """All of it that a program may want to read."""
        return {
            "fine": not self.findings,
            "command": self.command,
            "seconds": round(self.seconds, 3),
            "ready_s": round(self.ready_s, 3),
            "check_s": round(self.check_s, 3),
            "generated_tokens": self.generated,
            "generated_tokens_max": self.generated_max,
            "rounds": [_round(each) for each in self.rounds],
            "exactness": {
                "answers": self.verdict.answers,
                "tokens": self.verdict.tokens,
                "logprobs_compared": self.verdict.values,
                "largest_difference": self.verdict.largest,
                "bound": self.verdict.bound,
                "near_ties": self.verdict.near_ties,
            },
            "findings": list(self.findings),
        }


def _round(played: ChatRound) -> dict[str, Any]:
    return {
        "title": played.title,
        "seconds": round(played.seconds, 3),
        "prompt_tokens": played.prompt_tokens,
        "tokens_by_tier": dict(played.tokens_by_tier()),
        "first_token_s": {
            "first turns": round(played.first_token_s(later=False), 4),
            "later turns": round(played.first_token_s(later=True), 4),
        },
        "instances": played.statistics,
        "copies": {
            name: {
                hop: dict(zip(("copies", "blocks", "bytes"), counts, strict=True))
                for hop, counts in hops.items()
            }
            for name, hops in played.blocks_copied().items()
        },
        "answers": [
            {"chat": turn.chat, "turn": turn.number + 1, "asked": _asked(turn), "said": turn.text}
            for turn in played.turns
        ],
    }


def _asked(turn: ChatTurn) -> str:
    return turn.messages[-1]["content"]


def counted(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What each instance counted between two looks at `/cache`, by its name."""
    earlier = {told["instance"]: _counts(told) for told in before}
    found: dict[str, Any] = {}
    for told in after:
        now, then = _counts(told), earlier[told["instance"]]
        found[told["instance"]] = {
            name: {each: count - then[name].get(each, 0) for each, count in counts.items()}
            for name, counts in now.items()
        }
    return found


def _counts(told: dict[str, Any]) -> dict[str, dict[str, int]]:
    cache = told["cache"]
    return {
        "misses": cache["misses"],
        "handoffs": told["handoffs"],
        "tokens_found": {tier["name"]: tier["tokens_cached"] for tier in cache["tiers"]},
        "blocks_evicted": {tier["name"]: tier["blocks_evicted"] for tier in cache["tiers"]},
        "counts": {
            "tokens_asked": cache["tokens_asked"],
            "blocks_corrupt": cache["blocks_corrupt"],
            "preemptions": told["preemptions"],
            "handed_bytes": told["handed_bytes"],
            "handed_parts_verified": told["handed_parts_verified"],
        },
    }
