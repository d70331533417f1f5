"""The results of the demonstration, as values; `page` shows them to a browser."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock_serve.demo.clients import ChatTurn
    from penstock_serve.demo.exactness import ExactnessVerdict

GENERATED_MAX = 1500
"""Tokens that the demonstration may generate, all rounds together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRound:
    """One round of all conversations."""

    title: str
    turns: tuple[ChatTurn, ...]
    statistics: dict[str, dict[str, Any]]
    """The counters of each instance in this round, by its name; see `counted`."""
    timeline: dict[str, dict[str, Any]]
    """The copies and handoffs of each instance in this round, by its name."""

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last answer."""
        began = min(turn.sent for turn in self.turns)
        return max(turn.ended for turn in self.turns) - began

    @property
    def generated(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def tokens_computed(self) -> int:
        """Prompt tokens that an instance computed."""
        return self.total_of("tokens_computed")

    @property
    def blocks_verified(self) -> int:
        """Blocks that were copied from tier to tier, each with its checksums."""
        hops = (each for hops in self.blocks_copied().values() for each in hops.values())
        return sum(blocks for _, blocks, _ in hops)

    def total_of(self, name: str) -> int:
        """A counter, summed over the instances."""
        return sum(each["counts"][name] for each in self.statistics.values())

    def handoffs_taken(self) -> dict[str, tuple[int, int, int]]:
        """Handoffs, their parts and bytes, by the instance that took them in and verified them."""
        return {
            name: (each["handoffs"].get("delivered", 0), parts, each["counts"]["handed_bytes"])
            for name, each in self.statistics.items()
            if (parts := each["counts"]["handed_parts_verified"])
        }

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
        for name, recorded in self.timeline.items():
            hops = found.setdefault(name, {})
            for copy in recorded["copies"]:
                hop = f"{copy['source']} to {copy['target']}"
                copies, blocks, size = hops.get(hop, (0, 0, 0))
                more = copy["blocks"] * recorded["block_bytes"]
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
    """What went wrong; empty if nothing did."""
    seconds: float

    @property
    def generated(self) -> int:
        """Tokens of all answers, of all rounds."""
        return sum(each.generated for each in self.rounds)

    @property
    def generated_max(self) -> int:
        return GENERATED_MAX

    @property
    def times_sooner(self) -> float | None:
        """The wait for the first token of later turns, with the cache off against with it."""
        waits = [each.first_token_s(later=True) for each in self.rounds]
        return waits[-1] / waits[0] if all(waits) else None

    @property
    def share_not_computed(self) -> float:
        """Of the prompt tokens of the round with the cache."""
        cached = self.rounds[0]
        return max(0.0, 1 - cached.tokens_computed / cached.prompt_tokens)

    @property
    def headline(self) -> tuple[str, ...]:
        """The result, in a few words each."""
        answers = f"{self.verdict.answers} answers"
        if self.findings:
            things = "thing" if len(self.findings) == 1 else "things"
            return (f"{answers}, {len(self.findings)} {things} wrong",)
        sooner = self.times_sooner
        return (
            f"{answers}, all right",
            *([f"later turns {sooner:.1f} times sooner"] if sooner else []),
            f"{self.share_not_computed:.0%} of prompt tokens not computed".replace("%", " %"),
        )

    def document(self) -> dict[str, Any]:
        """The results as a JSON document."""
        return {
            "fine": not self.findings,
            "headline": list(self.headline),
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
        "prompt_tokens_computed": played.tokens_computed,
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
    """The counters of each instance between two responses of `/cache`, by its name."""
    earlier = {each["instance"]: _counts(each) for each in before}
    found: dict[str, Any] = {}
    for instance in after:
        now, then = _counts(instance), earlier[instance["instance"]]
        found[instance["instance"]] = {
            name: {each: count - then[name].get(each, 0) for each, count in counts.items()}
            for name, counts in now.items()
        }
        computed = _tokens_computed(found[instance["instance"]], instance)
        found[instance["instance"]]["counts"]["tokens_computed"] = computed
    return found


def _tokens_computed(counts: dict[str, dict[str, int]], instance: dict[str, Any]) -> int:
    """Prompt tokens that an instance neither found nor was handed.

    A handoff is made of whole blocks, and may be a few tokens larger than what was missing.
    """
    missing: int = counts["counts"]["tokens_asked"] - sum(counts["tokens_found"].values())
    if instance["role"] == "prefill":
        return missing
    handed: int = counts["counts"]["handed_bytes"] // instance["token_bytes"]
    return max(0, missing - handed)


def _counts(instance: dict[str, Any]) -> dict[str, dict[str, int]]:
    cache = instance["cache"]
    return {
        "misses": cache["misses"],
        "handoffs": instance["handoffs"],
        "tokens_found": {tier["name"]: tier["tokens_cached"] for tier in cache["tiers"]},
        "blocks_evicted": {tier["name"]: tier["blocks_evicted"] for tier in cache["tiers"]},
        "counts": {
            "tokens_asked": cache["tokens_asked"],
            "blocks_corrupt": cache["blocks_corrupt"],
            "preemptions": instance["preemptions"],
            "handed_bytes": instance["handed_bytes"],
            "handed_parts_verified": instance["handed_parts_verified"],
        },
    }
