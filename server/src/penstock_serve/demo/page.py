"""The results of the demonstration as one page for a browser: no scripts, and no network.

It begins with the result, then explains it: how long clients waited, where the tokens of their
prompts came from, what a handoff is, and what happened when.

    client 0      ░░░░████░░███           waits for its first token, reads the answer
    prefill-0     ▒▒▒▒  ▒▒                prompts that are handed over
    decode-0      ▒▒▒▒  ▒▒                the same, where they arrive
    decode-0        ▪ ▪▪                  blocks that are copied from tier to tier

The one rule: every number on it is from this run.
"""

from __future__ import annotations

import math
from collections import Counter
from html import escape
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import MissReason
from penstock.toolkit import round_step
from penstock_serve.observe.miss_reasons import MISS_ADVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock_serve.demo.clients import ChatTurn
    from penstock_serve.demo.result import ChatRound, Played

STYLE = """
:root { --bg: #f4f6f8; --card: #fff; --ink: #17212b; --soft: #5a6875; --line: #dde3e9;
  --hole: #edf1f4; --waits: #c2410c; --reads: #0f8a6d; --handed: #c17a0c; --failed: #86929e;
  --loaded: #1d6fb8; --saved: #7a4fb0; --device: #0f8a6d; --host: #1d6fb8; --other: #7a4fb0;
  --rest: #86929e; --ok: #0f7b4f; --bad: #c0262d; color-scheme: light dark }
@media screen and (prefers-color-scheme: dark) { :root { --bg: #0e141a; --card: #161f28;
  --ink: #e6edf3; --soft: #93a3b1; --line: #263341; --hole: #101820; --waits: #ff8a5c;
  --reads: #34c79f; --handed: #f0b04c; --failed: #61748a; --loaded: #5aa9f0; --saved: #b18ae6;
  --device: #34c79f; --host: #5aa9f0; --other: #b18ae6; --rest: #61748a; --ok: #3fce8e;
  --bad: #ff7b7b } }
* { box-sizing: border-box }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
main { max-width: 1240px; margin: 0 auto; padding: 22px 20px 40px }
h1 { font-size: clamp(23px, 3.6vw, 38px); line-height: 1.2; letter-spacing: -.02em; margin: 8px 0 }
h1 span { white-space: normal } h2 { font-size: 18px; margin: 0 0 6px } p { margin: 0 0 8px }
.soft { color: var(--soft) } .small { font-size: 13px } .ok { color: var(--ok) }
.bad { color: var(--bad) } b.big { display: block; font-size: 27px; line-height: 1.25 }
.cards { display: grid; grid-template-columns: repeat(12, minmax(0, 1fr)); gap: 14px }
.card { grid-column: span 12; background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; padding: 16px 18px; min-width: 0 }
.tile { grid-column: span 6 }
@media (min-width: 760px) { .tile { grid-column: span 3 } }
@media (min-width: 1240px) { .half { grid-column: span 6 } }
@media (max-width: 480px) { main { padding: 14px 10px 30px } .card { padding: 12px }
  .cards { gap: 10px } b.big { font-size: 21px } }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 6px 0 10px; font-size: 13px }
.legend i, dt i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; margin: 10px 0 0 }
dt { font-weight: 600 } dd { margin: 0 }
@media (max-width: 600px) { dl { grid-template-columns: 1fr; gap: 0 } dd { margin: 0 0 8px 17px } }
.waits { display: grid; grid-template-columns: max-content 1fr max-content; gap: 5px 10px;
  align-items: center; margin: 8px 0 12px } .waits b { grid-column: 1 / -1; margin-top: 6px }
.track, .stack { display: flex; height: 16px; background: var(--hole); border-radius: 5px;
  overflow: hidden } .num { font-variant-numeric: tabular-nums; text-align: right }
.scroll { overflow-x: auto }
.scroll svg { display: block; width: 100%; margin-bottom: 10px; min-width: 720px }
svg text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--soft) }
svg .name { fill: var(--ink) } svg .grid { stroke: var(--line) }
svg .box { fill: var(--hole); stroke: var(--line) } svg .flow { stroke: var(--handed);
  stroke-width: 3; fill: none } svg .ask { stroke: var(--soft); stroke-width: 2; fill: none }
.picture svg { min-width: 520px; max-width: 760px }
table { border-collapse: collapse; width: 100%; font-size: 14px }
th { text-align: left; font-weight: 500; color: var(--soft) }
td, th { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top }
pre { background: var(--hole); border-radius: 8px; padding: 9px 12px; overflow-x: auto;
  font: 12.5px/1.6 ui-monospace, "DejaVu Sans Mono", monospace; margin: 6px 0 0 }
.dense td, .dense th { white-space: nowrap }
summary { cursor: pointer } .question { min-width: 16em }
"""


class BarKind(NamedTuple):
    """A kind of bar on the timeline."""

    name: str
    colour: str
    about: str


WAITS = BarKind(
    "waits", "waits", "A client has sent its request and waits for the first token of the answer."
)
READS = BarKind("reads", "reads", "The answer arrives, token after token.")
HANDED = BarKind(
    "handed over",
    "handed",
    "KV of a prompt on its way from the prefill to the decode instance; both sides show it.",
)
FAILED = BarKind("no handoff", "failed", "A handoff that failed, or was not needed.")
LOADED = BarKind(
    "loaded",
    "loaded",
    "Blocks come back from host memory to the device: somebody needs them again.",
)
SAVED = BarKind(
    "saved", "saved", "Blocks are copied to host memory, so that their room can be given to others."
)
KINDS = (WAITS, READS, HANDED, FAILED, LOADED, SAVED)


def html_of(played: Played) -> str:
    """The page."""
    cards = [
        *(_tile(*each) for each in _tiles(played)),
        _findings(played),
        _waits(played),
        _sources(played.rounds[0]),
        _handoffs(played),
        _misses(played.rounds[0]),
        _checksums(played),
        _exactness(played),
        _timelines(played),
        _answers(played.rounds[0]),
    ]
    pill = '<span class="bad">Something is wrong</span>' if played.findings else ""
    headline = "; ".join(played.headline)
    unbroken = escape(headline).replace(" %", "&nbsp;%")
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Penstock demo: {escape(headline)}</title><style>{STYLE}</style></head><body><main>"
        f"<p class='soft'>Penstock demo {pill}</p><h1>{unbroken}.</h1>"
        f"<p class='soft'>{escape(_setting(played))}</p><pre>{escape(played.command)}</pre><br>"
        f"<div class='cards'>{''.join(cards)}</div></main></body></html>\n"
    )


def _setting(played: Played) -> str:
    cached = played.rounds[0]
    chats = {turn.chat for turn in cached.turns}
    clients = {turn.client for turn in cached.turns}
    return (
        f"{len(clients)} clients held {len(chats)} conversations with a small model on this "
        f"machine's CPU, first with the cache and then with the cache off. A turn repeats all that "
        f"was said before it, so most of its prompt has been computed already. It took "
        f"{played.seconds:.0f} s."
    )


def _card(title: str, *parts: str, kind: str = "") -> str:
    return f"<section class='card {kind}'><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _legend(rows: Iterable[tuple[str, str, str]]) -> str:
    """What colours mean: a name, its colour and a text in each row."""
    drawn = (
        f"<dt><i style='background:var(--{colour})'></i>{escape(name)}</dt><dd>{escape(text)}</dd>"
        for name, colour, text in rows
    )
    return f"<dl>{''.join(drawn)}</dl>"


CELLS = {">": " class='num'", "~": " class='question'"}
"""Columns of numbers and of long texts, by how their names begin."""


def _table(columns: Sequence[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    """A table of cells in HTML."""
    kinds = [CELLS.get(each[:1], "") for each in columns]

    def drawn(tag: str, cells: Iterable[str]) -> str:
        each = zip(kinds, cells, strict=True)
        return f"<tr>{''.join(f'<{tag}{of}>{cell}</{tag}>' for of, cell in each)}</tr>"

    head = drawn("th", (each.lstrip(">~") for each in columns))
    body = "".join(drawn("td", row) for row in rows)
    return f"<div class='scroll'><table{kind}>{head}{body}</table></div>"


def _tile(title: str, big: str, more: str) -> str:
    return (
        f"<section class='card tile'><span class='soft small'>{escape(title)}</span>"
        f"<b class='big'>{escape(big)}</b><span class='soft small'>{escape(more)}</span></section>"
    )


def _tiles(played: Played) -> Iterator[tuple[str, str, str]]:
    cached, off = played.rounds[0], played.rounds[-1]
    wrong = len(played.findings)
    yield (
        "Answers",
        f"{played.verdict.answers} checked",
        f"{wrong} findings" if wrong else "all as a fresh computation has them",
    )
    sooner = played.times_sooner
    if sooner is not None:
        times = [f"{each.first_token_s(later=True):.2f} s" for each in (cached, off)]
        yield "First token of later turns", f"{sooner:.1f}×", f"sooner: {times[0]}, not {times[1]}"
    yield (
        "Prompt tokens not computed",
        f"{100 * played.share_not_computed:.0f} %",
        f"{cached.tokens_computed:,} of {cached.prompt_tokens:,} were computed",
    )
    verified = sum(
        each.blocks_verified + each.total_of("handed_parts_verified") for each in played.rounds
    )
    corrupt = sum(each.total_of("blocks_corrupt") for each in played.rounds)
    yield "Checksums", f"{verified:,} verified", f"{corrupt} did not agree"


def _findings(played: Played) -> str:
    if not played.findings:
        return ""
    rows = "".join(f"<li>{escape(each)}</li>" for each in played.findings)
    return _card("What is wrong", f"<ul class='bad'>{rows}</ul>")


def _waits(played: Played) -> str:
    """Bars of the waits by turn, and why the first one is longer."""
    cached = played.rounds[0]
    first = min(cached.turns, key=lambda turn: turn.sent)
    groups = [
        ("the very first request", [(first.chat, first.number)]),
        *(
            (
                f"turn {number + 1}" if number else "other first turns, median",
                [
                    (turn.chat, turn.number)
                    for turn in cached.turns
                    if turn.number == number and turn is not first
                ],
            )
            for number in _numbers(cached)
        ),
    ]
    waits = [(name, [_wait(each, of) for each in played.rounds]) for name, of in groups if of]
    longest = max(seconds for _, each in waits for seconds in each)
    rows = []
    for name, each in waits:
        rows.append(f"<b>{escape(name)}</b>")
        for seconds, title, colour in zip(
            each, (each.title for each in played.rounds), ("reads", "waits"), strict=False
        ):
            rows.append(
                f"<span class='small soft'>{escape(title)}</span><span class='track'>"
                f"<i style='width:{100 * seconds / longest:.1f}%;background:var(--{colour})'></i>"
                f"</span><span class='num'>{seconds:.2f} s</span>"
            )
    is_longer = first.first_token_s > max((each[0] for _, each in waits[1:]), default=0.0)
    question = "Why is the first bar longer?" if is_longer else "Why do they differ?"
    return _card(
        "How long clients waited for the first token",
        f"<div class='waits'>{''.join(rows)}</div>",
        f"<p><strong>{question}</strong> {escape(_why_longer(played, first))}</p>",
        kind="half",
    )


def _numbers(played: ChatRound) -> list[int]:
    return sorted({turn.number for turn in played.turns})


def _wait(played: ChatRound, of: Sequence[tuple[str, int]]) -> float:
    """The median of some turns."""
    return median(turn.first_token_s for turn in played.turns if (turn.chat, turn.number) in of)


def _why_longer(played: Played, first: ChatTurn) -> str:
    later = [turn for turn in played.rounds[0].turns if turn.number]
    text = (
        f"When it came, the cache was empty: it found {_found(first)} of its {first.prompt_tokens} "
        f"prompt tokens, and the rest had to be computed. Other conversations have one of two "
        f"system prompts, and find it already in their first turn."
    )
    if later:
        share = sum(map(_found, later)) / sum(turn.prompt_tokens for turn in later)
        text += (
            f" Later turns repeat their conversation: {100 * share:.0f} % of their prompts were "
            f"found. With the cache off, every prompt is computed from its first token."
        )
    return text


def _found(turn: ChatTurn) -> int:
    return sum(turn.cached_by_tier.values())


COLOURS_OF_TIERS = {"device": "device", "host": "host"}


def _sources(played: ChatRound) -> str:
    """Where the answering instance had the tokens of its prompts, by turn."""
    tiers = list(played.tokens_by_tier())
    rows = []
    for number in _numbers(played):
        turns = [turn for turn in played.turns if turn.number == number]
        asked = sum(turn.prompt_tokens for turn in turns)
        found = Counter[str]()
        for turn in turns:
            found.update(turn.cached_by_tier)
        parts = [(tier, found[tier], COLOURS_OF_TIERS.get(tier, "other")) for tier in tiers]
        parts.append(("handed over", asked - found.total(), "handed"))
        drawn = "".join(
            f"<i style='width:{100 * count / asked:.2f}%;background:var(--{colour})' "
            f"title='{escape(name)}: {count:,} tokens'></i>"
            for name, count, colour in parts
        )
        shares = ", ".join(f"{name} {100 * count / asked:.0f} %" for name, count, _ in parts)
        rows.append(
            f"<b>turn {number + 1}</b><span class='stack' style='grid-column:1/-1'>{drawn}</span>"
            f"<span class='small soft' style='grid-column:1/-1'>{escape(shares)}</span>"
        )
    keys = (
        *((tier, COLOURS_OF_TIERS.get(tier, "other"), TIERS.get(tier, "")) for tier in tiers),
        ("handed over", "handed", "sent by the prefill instance, which found or computed it"),
    )
    return _card(
        "Where the tokens of prompts came from",
        "<p class='soft'>As the instance that answers has them, with the cache on.</p>",
        f"<div class='waits'>{''.join(rows)}</div>{_legend(keys)}",
        kind="half",
    )


TIERS = {
    "device": "still in the memory that the model computes in: nothing to do",
    "host": "had made room for others, and was loaded back, with its checksums verified",
}


def _handoffs(played: Played) -> str:
    delivered, parts, size = _taken(played.rounds[0])
    return _card(
        "What a handoff is",
        f"<div class='scroll picture'>{_PAIR}</div>",
        "<p>To answer a prompt, a model first computes its KV: what it remembers of every token. "
        "That is the work of the <strong>prefill</strong> instance. It sends the KV on, layer by "
        "layer and while it still computes the next ones, to the <strong>decode</strong> instance, "
        "which writes the answer. That is a handoff. Neither disturbs the other: long prompts do "
        "not stop answers that are being written.</p>",
        f"<p>With the cache, {delivered} handoffs took {size / 1e6:,.1f} MB in {parts:,} "
        "parts: only what the decode instance did not have yet. ",
        f"With the cache off it was {_taken(played.rounds[-1])[2] / 1e6:,.1f} MB.</p>"
        if len(played.rounds) > 1
        else "</p>",
        kind="half",
    )


def _taken(played: ChatRound) -> list[int]:
    """Handoffs, their parts and their bytes."""
    return [sum(each[at] for each in played.handoffs_taken().values()) for at in range(3)]


_PAIR = (
    "<svg viewBox='0 0 640 150' role='img' aria-label='A client asks; the prefill instance hands "
    "KV over to the decode instance, which answers'>"
    "<rect class='box' x='4' y='52' width='90' height='44' rx='8'/>"
    "<text class='name' x='49' y='79' text-anchor='middle'>clients</text>"
    "<rect class='box' x='190' y='14' width='190' height='44' rx='8'/>"
    "<text class='name' x='285' y='33' text-anchor='middle'>prefill, 2 ranks</text>"
    "<text x='285' y='49' text-anchor='middle'>computes the prompt</text>"
    "<rect class='box' x='190' y='92' width='190' height='44' rx='8'/>"
    "<text class='name' x='285' y='111' text-anchor='middle'>decode, 1 rank</text>"
    "<text x='285' y='127' text-anchor='middle'>writes the answer</text>"
    "<path class='ask' d='M94 66 C140 60 150 38 184 36'/>"
    "<text x='104' y='40'>prompt</text>"
    "<path class='ask' d='M188 114 C150 112 140 92 98 84'/>"
    "<text x='104' y='122'>answer</text>"
    "<path class='flow' d='M285 60 V84 M278 78 L285 88 L292 78'/>"
    "<text x='300' y='80'>KV, layer by layer: the handoff</text>"
    "<rect class='box' x='500' y='52' width='132' height='44' rx='8'/>"
    "<text class='name' x='566' y='71' text-anchor='middle'>host memory</text>"
    "<text x='566' y='87' text-anchor='middle'>what had to leave</text>"
    "<path class='ask' d='M382 36 C450 36 470 50 496 64 M382 114 C450 114 470 100 496 86'/></svg>"
)


def _misses(played: ChatRound) -> str:
    counts = Counter[str]()
    for each in played.statistics.values():
        counts.update(each["misses"])
    rows = []
    for reason, count in counts.most_common():
        if count:
            advice = MISS_ADVICE[MissReason(reason)]
            helps = f"<span class='soft small'>{escape(advice.helps)}</span>"
            rows.append((escape(reason), f"{count}", f"{escape(advice.means)}<br>{helps}"))
    return _card(
        "Why requests did not find more",
        "<p class='soft'>Each instance says for every request why the rest of its prompt was not "
        "in the cache. New text is the best reason: the last words of a prompt are always new.</p>",
        _table(("reason", ">times", "it means"), rows),
        kind="half",
    )


def _checksums(played: Played) -> str:
    rows = []
    for each in played.rounds:
        for name, hops in each.blocks_copied().items():
            for hop, (copies, blocks, size) in hops.items():
                rows.append((each.title, name, hop, f"{copies:,}", f"{blocks:,} blocks", size))
        for name, (done, parts, size) in each.handoffs_taken().items():
            rows.append((each.title, name, "handoff", f"{done:,}", f"{parts:,} parts", size))
    drawn = (
        [*map(escape, (title, name, hop)), times, what, f"{size / 1e6:,.1f}"]
        for title, name, hop, times, what, size in rows
    )
    corrupt = sum(each.total_of("blocks_corrupt") for each in played.rounds)
    return _card(
        "What was copied, and verified",
        f"<p class='soft'>Every block and every part has checksums, which are verified when it "
        f"arrives. {corrupt} did not agree. What does not agree is dropped and computed again.</p>",
        _table(("", "instance", "way", ">copies", ">", ">MB"), drawn, " class='dense'"),
        kind="half",
    )


def _exactness(played: Played) -> str:
    verdict = played.verdict
    return _card(
        "How answers were checked",
        f"<p>All {verdict.answers} answers, with and without the cache, were computed again after "
        f"the server had ended, in one process without cache and handoff. {verdict.values:,} "
        "log-probabilities were compared: of each token, and of the likeliest ones beside it. The "
        f"largest difference is {verdict.largest:.1e}; {verdict.bound:g} is allowed, and one wrong "
        "block changes them by hundreds of that. "
        f"{verdict.near_ties} tokens differ where two are nearly equal.</p>"
        "<p class='soft'>It is a very small model: its answers are right if they are what the "
        "model says, not if they are wise.</p>",
        kind="half",
    )


class Bar(NamedTuple):
    """One event with its duration and a tooltip."""

    began: float
    ended: float
    kind: BarKind
    tooltip: str


class PictureLane(NamedTuple):
    """The bars of one name."""

    name: str
    bars: list[Bar]


WIDTH = 1000
MARGIN = 150
BAR = 12
GAP = 3
TICK_COUNT = 10


def _timelines(played: Played) -> str:
    longest = max(each.seconds for each in played.rounds)
    pictures = "".join(
        f"<p><strong>{len(each.turns)} requests, {escape(each.title)}: {each.seconds:.1f} s"
        f"</strong></p><div class='scroll'>{_drawn(_lanes(each), _start(each), longest)}</div>"
        for each in played.rounds
    )
    return _card(
        "What happened when",
        "<p class='soft'>A row for every client, then what the instances did meanwhile. Both "
        "pictures have the same scale. Point at a bar to read more.</p>",
        pictures,
        _legend((kind.name, kind.colour, kind.about) for kind in KINDS),
    )


def _start(played: ChatRound) -> float:
    return min(turn.sent for turn in played.turns)


def _lanes(played: ChatRound) -> Iterator[PictureLane]:
    for client in sorted({turn.client for turn in played.turns}):
        yield PictureLane(f"client {client}", list(_of_client(played, client)))
    for name, recorded in played.timeline.items():
        yield PictureLane(f"{name}: handoffs", [_handoff(each) for each in recorded["handoffs"]])
        yield PictureLane(f"{name}: copies", [_copy(each) for each in recorded["copies"]])


def _of_client(played: ChatRound, client: int) -> Iterator[Bar]:
    for turn in played.turns:
        if turn.client == client:
            tooltip = (
                f"{turn.chat}, turn {turn.number + 1}: {turn.prompt_tokens} tokens, of which "
                f"{_found(turn)} cached; first token after {turn.first_token_s:.2f} s"
            )
            yield Bar(turn.sent, turn.first, WAITS, tooltip)
            yield Bar(turn.first, turn.ended, READS, tooltip)


def _handoff(each: dict[str, Any]) -> Bar:
    tooltip = f"{each['handoff']}: {each['tokens']} tokens, {each['outcome']}"
    kind = HANDED if each["outcome"] == "delivered" else FAILED
    return Bar(each["began"], each["ended"], kind, tooltip)


def _copy(each: dict[str, Any]) -> Bar:
    tooltip = (
        f"{each['purpose']}: {each['blocks']} blocks, {each['source']} to {each['target']}, for "
        f"{each['cause']}"
    )
    kind = LOADED if each["purpose"] in {"load", "stage", "duplicate"} else SAVED
    return Bar(each["began"], each["ended"], kind, tooltip)


def _drawn(lanes: Iterable[PictureLane], start: float, seconds: float) -> str:
    """Lanes below each other, with a scale in seconds above them."""
    scale = (WIDTH - MARGIN) / max(seconds, 1e-3)
    parts: list[str] = []
    top = 24
    for lane in lanes:
        rows = _rows(lane.bars)
        parts.append(f'<text class="name" x="0" y="{top + BAR - 2}">{escape(lane.name)}</text>')
        for row in rows or [[]]:
            parts += [_bar(bar, start, scale, top) for bar in row]
            top += BAR + GAP
        top += GAP
    lines = []
    step = round_step(max(seconds, 1e-3) / TICK_COUNT)
    for number in range(math.floor(seconds / step + 1e-9) + 1):
        at = MARGIN + number * step * scale
        label = f"{number * step:g} s"
        lines.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="16" y2="{top}"/>')
        lines.append(f'<text x="{at:.1f}" y="12" text-anchor="middle">{label}</text>')
    return f'<svg viewBox="0 0 {WIDTH + 30} {top}" role="img">{"".join(lines + parts)}</svg>'


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
        f'<rect class="bar" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2" '
        f'fill="var(--{bar.kind.colour})"><title>{tooltip}</title></rect>'
    )


def _answers(played: ChatRound) -> str:
    rows = (
        map(escape, (turn.chat, turn.messages[-1]["content"], turn.text)) for turn in played.turns
    )
    table = _table(("", "~asked", "~said"), rows)
    return (
        "<section class='card'><details><summary><strong>All questions and answers</strong>"
        f"</summary>{table}</details></section>"
    )
