"""`penstock demo` in its short form: a small random model, all processes, a picture."""

from __future__ import annotations

import contextlib
import html
import io
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache.explain import MissReason
from penstock.cli.app import run
from penstock_serve.cli import demo
from penstock_serve.demo import Played, Stage
from penstock_serve.demo.chats import CHATS_MAX, chats
from penstock_serve.demo.page import KINDS
from penstock_serve.demo.result import GENERATED_MAX
from penstock_serve.demo.runner import too_much
from penstock_serve.observe.miss_reasons import MISS_ADVICE
from tests.serve import browser
from tests.serve.conftest import make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

CHATS, TURNS, TOKENS = 4, 2, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a run of the command left behind."""

    status: int
    text: str
    document: dict[str, Any]
    picture: str
    played: Played


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    folder = tmp_path_factory.mktemp("demo")
    make_checkpoint(folder / "small-model", positions=2048)
    options = {
        "model": folder / "small-model",
        "chats": CHATS,
        "turns": TURNS,
        "clients": 2,
        "tokens": TOKENS,
        "blocks": 192,
        "picture": folder / "demo.html",
        "json": folder / "demo.json",
    }
    printed = io.StringIO()
    kept: list[Played] = []
    play = demo.play_stage
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(demo, "play_stage", lambda *given: kept.append(play(*given)) or kept[0])
        status = run(
            [
                "demo",
                *(text for name, value in options.items() for text in (f"--{name}", f"{value}")),
            ]
        )
    return Shown(
        status=status,
        text=printed.getvalue(),
        document=json.loads((folder / "demo.json").read_text()),
        picture=(folder / "demo.html").read_text(),
        played=kept[0],
    )


def test_it_ends_well_when_every_answer_is_right(shown: Shown) -> None:
    assert shown.status == 0, shown.document["findings"]
    assert "All answers were right" in shown.text
    exactness = shown.document["exactness"]
    assert exactness["answers"] == 2 * CHATS * TURNS
    assert exactness["largest_difference"] < exactness["bound"]
    assert 0 < shown.document["generated_tokens"] <= 2 * CHATS * TURNS * TOKENS


def test_it_says_how_long_it_took_and_how_much_it_generated(shown: Shown) -> None:
    tokens = sum(len(turn.tokens) for each in shown.played.rounds for turn in each.turns)
    printed = " ".join(shown.text.split())

    assert f"It took {shown.played.seconds:.0f} s" in printed
    assert f"{tokens:,} tokens were generated, {GENERATED_MAX:,} may be" in printed
    assert shown.document["generated_tokens"] == tokens
    assert shown.played.seconds > sum(each.seconds for each in shown.played.rounds)


def test_prompts_are_handed_over_and_later_ones_found(shown: Shown) -> None:
    cached, off = shown.document["rounds"]

    assert cached["instances"]["decode-0"]["handoffs"]["delivered"] > 0
    assert cached["tokens_by_tier"]["device"] > 0
    assert off["tokens_by_tier"] == {"device": 0, "host": 0}
    handed = [each["instances"]["decode-0"]["counts"] for each in (cached, off)]
    assert 0 < handed[0]["handed_bytes"] < handed[1]["handed_bytes"]
    assert 0 < handed[0]["handed_parts_verified"] <= handed[1]["handed_parts_verified"]


def test_it_says_why_requests_found_no_more(shown: Shown) -> None:
    cached, off = (each["instances"]["decode-0"]["misses"] for each in shown.document["rounds"])

    assert cached["never seen"] > 0
    assert off["opted out"] == CHATS * TURNS
    assert "never seen" in shown.text


def test_the_same_prompts_are_sent_again_with_the_cache_off(shown: Shown) -> None:
    cached, off = ([turn.messages for turn in each.turns] for each in shown.played.rounds)

    assert cached == off


def test_the_page_begins_with_the_result(shown: Shown) -> None:
    headline = shown.document["headline"]

    assert headline[0] == f"{2 * CHATS * TURNS} answers, all right"
    assert "times sooner" in headline[1]
    computed = shown.document["rounds"][0]["prompt_tokens_computed"]
    share = 1 - computed / shown.document["rounds"][0]["prompt_tokens"]
    assert headline[2] == f"{100 * share:.0f} % of prompt tokens not computed"
    assert 0 < share < 1
    [first] = re.findall("<h1>(.*?)</h1>", shown.picture)
    assert first.replace("&nbsp;", " ") == "; ".join(headline) + "."
    assert "; ".join(headline) in " ".join(shown.text.split())


def test_with_the_cache_off_every_prompt_token_is_computed(shown: Shown) -> None:
    off = shown.document["rounds"][1]

    assert off["prompt_tokens_computed"] >= off["prompt_tokens"]


def test_the_page_explains_misses_and_counts_what_was_verified(shown: Shown) -> None:
    verified = sum(
        each.blocks_verified + each.total_of("handed_parts_verified")
        for each in shown.played.rounds
    )

    assert verified > 0
    assert f"{verified:,} verified" in shown.picture
    assert MISS_ADVICE[MissReason.NEVER_SEEN].means in shown.picture
    for kind in KINDS:
        assert html.escape(kind.about) in shown.picture


def test_the_page_has_every_client_handoff_and_copy(shown: Shown) -> None:
    assert shown.picture.startswith("<!DOCTYPE html>")
    assert "<script" not in shown.picture
    assert "://" not in shown.picture.replace("http://127.0.0.1", "")
    for name in ("client 0", "client 1", "prefill-0: handoffs", "decode-0: copies"):
        assert name in shown.picture
    bars = shown.picture.count('<rect class="bar"')
    handoffs = sum(
        len(reported["handoffs"])
        for each in shown.played.rounds
        for reported in each.timeline.values()
    )
    copies = sum(
        len(reported["copies"])
        for each in shown.played.rounds
        for reported in each.timeline.values()
    )
    assert bars == 2 * 2 * CHATS * TURNS + handoffs + copies
    assert handoffs
    assert copies


@pytest.mark.skipif(not browser.PROGRAM, reason="there is no chromium: apt-get install chromium")
def test_the_page_fits_every_screen_and_has_no_console_error(shown: Shown, tmp_path: Path) -> None:
    file = tmp_path / "demo.html"
    file.write_text(shown.picture)
    with browser.browsing(tmp_path / "profile") as page:
        page.open(file.as_uri())
        for width in (390, 800, 1024, 1240, 1920):
            page.show(width=width, scheme="dark" if width == 800 else "light")
            page.fits(width)
            # Only a phone has to scroll pictures and tables.
            cut = "(each) => each.scrollWidth > each.clientWidth"
            count = page.run(f"[...document.querySelectorAll('.scroll')].filter({cut}).length")
            assert width == 390 or count == 0
        assert page.run("document.querySelectorAll('.tile').length") == 4
        assert page.run("document.querySelector('.card .big').textContent").endswith("checked")
        assert page.run("document.querySelector('rect.bar title').textContent")
        assert page.picture().startswith(b"\x89PNG")
        assert page.errors == []


def test_it_ends_with_where_to_look(shown: Shown) -> None:
    last = shown.text.strip().splitlines()[-1]

    assert re.fullmatch(r"Look at file:///\S+/demo\.html: it explains what happened\.", last)


def test_a_finding_ends_it_with_status_one(
    shown: Shown,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finding = "museum 1, turn 2: log-probabilities of token 3 are off by 1.2, must be at most 0.002"
    wrong = replace(shown.played, findings=(finding,))
    monkeypatch.setattr(demo, "play_stage", lambda *_: wrong)

    status = run(["demo", "--picture", str(tmp_path / "demo.html")])

    printed = capsys.readouterr().out
    assert status == 1
    assert finding in " ".join(printed.split())
    assert "All answers were right" not in printed


def test_too_many_tokens_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=f"must be at most {GENERATED_MAX}"):
        Stage(max_tokens=100)
    with pytest.raises(ValueError, match="clients is 7"):
        Stage(clients=7)


def test_what_is_played_without_options_stays_within_the_tokens_it_may_generate() -> None:
    assert Stage().planned_tokens == 2 * 6 * 3 * 16 <= GENERATED_MAX == 1500


def test_more_tokens_than_planned_are_a_finding(shown: Shown) -> None:
    first, second = shown.played.rounds
    stage = Stage(chats=CHATS, turns=TURNS, clients=2, max_tokens=TOKENS)
    turn = first.turns[0]
    long = replace(turn, tokens=turn.tokens * (GENERATED_MAX // len(turn.tokens) + 1))

    found = too_much(stage, [replace(first, turns=(long, *first.turns[1:])), second])

    assert too_much(stage, [first, second]) == []
    assert f"{turn.chat}, turn 1, {first.title}: {len(long.tokens)} tokens" in found[0]
    assert found[1].endswith(f"tokens were generated, must be at most {GENERATED_MAX}")


def test_half_of_the_conversations_share_a_system_prompt() -> None:
    found = chats(CHATS_MAX, turns=3)

    assert len({chat.system for chat in found}) == 2
    assert len({chat.questions for chat in found}) == len(found) == CHATS_MAX
