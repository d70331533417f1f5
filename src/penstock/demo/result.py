"""The results of the demonstration, as values and as a picture.

The picture is one HTML file without scripts:

    client 0      ░░░░████░░███           waits for its first token, reads the answer
    prefill-0     ▒▒▒▒  ▒▒                prompts that are handed over
    decode-0      ▒▒▒▒  ▒▒                the same, where they arrive
    decode-0        ▪ ▪▪                  blocks that are copied from tier to tier
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.demo.clients import ChatTurn
    from penstock.demo.exactness import ExactnessVerdict

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

    def document(self) -> dict[str, Any]:
        """The results as a JSON document."""
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
    """The counters of each instance between two responses of `/cache`, by its name."""
    earlier = {each["instance"]: _counts(each) for each in before}
    found: dict[str, Any] = {}
    for instance in after:
        now, then = _counts(instance), earlier[instance["instance"]]
        found[instance["instance"]] = {
            name: {each: count - then[name].get(each, 0) for each, count in counts.items()}
            for name, counts in now.items()
        }
    return found


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


WIDTH = 1000
MARGIN = 220
BAR = 12
GAP = 3
TICK_COUNT = 10
COLOURS = {
    "waits for its first token": "#f2c14e",
    "reads its answer": "#4d9078",
    "handed over": "#3066be",
    "handoff failed, or not needed": "#b4b8c5",
    "loaded": "#d1495b",
    "saved": "#8d6a9f",
}
STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1260px; color: #222 }
table { border-collapse: collapse } td, th { padding: 2px 12px 2px 0; text-align: left }
svg text { font: 11px system-ui, sans-serif; fill: #444 }
.key { display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 14px }
pre { background: #f5f5f5; padding: 8px; overflow-x: auto }"""


class Bar(NamedTuple):
    """One event with its duration and a tooltip."""

    began: float
    ended: float
    kind: str
    tooltip: str


class PictureLane(NamedTuple):
    """The bars of one name."""

    name: str
    bars: list[Bar]


def html_of(played: Played) -> str:
    keys = "".join(
        f'<span class="key" style="background:{colour}"></span>{escape(kind)}'
        for kind, colour in COLOURS.items()
    )
    parts = [
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>penstock demo</title><style>{STYLE}</style></head><body>",
        f"<h1>penstock demo</h1><pre>{escape(played.command)}</pre><p>{keys}</p>",
    ]
    longest = max(each.seconds for each in played.rounds)
    for each in played.rounds:
        parts.append(f"<h2>{len(each.turns)} requests, {escape(each.title)}</h2>")
        parts.append(_drawn(_lanes(each), _start(each), longest))
    parts.append(_answers(played.rounds[0]))
    return "\n".join([*parts, "</body></html>\n"])


def _start(played: ChatRound) -> float:
    return min(turn.sent for turn in played.turns)


def _lanes(played: ChatRound) -> Iterator[PictureLane]:
    for client in sorted({turn.client for turn in played.turns}):
        yield PictureLane(f"client {client}", list(_of_client(played, client)))
    for name, recorded in played.timeline.items():
        yield PictureLane(f"{name}: handoffs", [_handoff(each) for each in recorded["handoffs"]])
        yield PictureLane(f"{name}: copies", [_copy(each) for each in recorded["copies"]])


def _of_client(played: ChatRound, client: int) -> Iterator[Bar]:
    waits, reads = list(COLOURS)[:2]
    for turn in played.turns:
        if turn.client == client:
            tooltip = (
                f"{turn.chat}, turn {turn.number + 1}: {turn.prompt_tokens} tokens, of which "
                f"{sum(turn.cached_by_tier.values())} cached; first token after "
                f"{turn.first_token_s:.2f} s"
            )
            yield Bar(turn.sent, turn.first, waits, tooltip)
            yield Bar(turn.first, turn.ended, reads, tooltip)


def _handoff(each: dict[str, Any]) -> Bar:
    delivered, failed = list(COLOURS)[2:4]
    tooltip = f"{each['handoff']}: {each['tokens']} tokens, {each['outcome']}"
    kind = delivered if each["outcome"] == "delivered" else failed
    return Bar(each["began"], each["ended"], kind, tooltip)


def _copy(each: dict[str, Any]) -> Bar:
    loaded, saved = list(COLOURS)[4:6]
    tooltip = (
        f"{each['purpose']}: {each['blocks']} blocks, {each['source']} to {each['target']}, for "
        f"{each['cause']}"
    )
    kind = loaded if each["purpose"] in {"load", "stage", "duplicate"} else saved
    return Bar(each["began"], each["ended"], kind, tooltip)


def _drawn(lanes: Iterator[PictureLane], start: float, seconds: float) -> str:
    """Lanes below each other, with a scale in seconds above them."""
    scale = (WIDTH - MARGIN) / max(seconds, 1e-3)
    parts: list[str] = []
    top = 24
    for lane in lanes:
        rows = _rows(lane.bars)
        parts.append(f'<text x="0" y="{top + BAR - 2}">{escape(lane.name)}</text>')
        for row in rows or [[]]:
            parts += [_bar(bar, start, scale, top) for bar in row]
            top += BAR + GAP
        top += GAP
    for number in range(TICK_COUNT + 1):
        at = MARGIN + number * (WIDTH - MARGIN) / TICK_COUNT
        label = f"{seconds * number / TICK_COUNT:.1f} s"
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="16" y2="{top}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="12" text-anchor="middle">{label}</text>')
    return f'<svg viewBox="0 0 {WIDTH + 30} {top}" width="100%">{"".join(parts)}</svg>'


def _rows(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Distributes bars over as few rows as possible without overlap."""
    rows: list[list[Bar]] = []
    for bar in sorted(bars):
        row = next((row for row in rows if row[-1].ended <= bar.began), None)
        if row is None:
            rows.append([bar])
        else:
            row.append(bar)
    return rows


def _bar(bar: Bar, start: float, scale: float, top: int) -> str:
    left = MARGIN + (bar.began - start) * scale
    width = max(1.0, (bar.ended - bar.began) * scale)
    tooltip = escape(f"{bar.tooltip} ({bar.ended - bar.began:.3f} s)")
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" '
        f'fill="{COLOURS[bar.kind]}"><title>{tooltip}</title></rect>'
    )


def _answers(played: ChatRound) -> str:
    rows = "".join(
        f"<tr><td>{escape(turn.chat)}</td><td>{escape(turn.messages[-1]['content'])}</td>"
        f"<td>{escape(turn.text)}</td></tr>"
        for turn in played.turns
    )
    return f"<h2>Answers</h2><table><tr><th></th><th>asked</th><th>said</th></tr>{rows}</table>"
