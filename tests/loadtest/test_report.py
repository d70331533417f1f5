"""What a load test reports: figures of whole answers, errors by kind, runs side by side."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock.errors import ConfigError
from penstock_serve.loadtest.exchange import Failure, StreamedAnswer, StreamUsage
from penstock_serve.loadtest.report import (
    LoadContext,
    describe_runs,
    load_page,
    load_report,
    read_report,
)
from penstock_serve.loadtest.runner import SentRequest

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_serve.loadtest.report import LoadReport


def usage(prompt: int, output: int, cached: int | None) -> StreamUsage:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    fields = {"prompt_tokens": prompt, "completion_tokens": output, **details}
    return msgspec.convert(fields, StreamUsage)


def answered(
    turn: int, began_s: float, *times_s: float, cached: int | None = 50, late_s: float = 0.0
) -> SentRequest:
    answer = StreamedAnswer(
        began_s=began_s,
        token_times_s=[began_s + each for each in times_s],
        ended_s=began_s + times_s[-1],
        usage=usage(100, len(times_s), cached),
    )
    return SentRequest(session=0, turn=turn, late_s=late_s, answer=answer)


def failed(kind: str, message: str = "why") -> SentRequest:
    failure = Failure(kind=kind, message=message)
    answer = StreamedAnswer(began_s=1.0, ended_s=2.0, failure=failure)
    return SentRequest(session=1, turn=0, late_s=0.0, answer=answer)


def report(*asked: SentRequest, label: str = "one", **more: Any) -> LoadReport:
    context = {"ttft_bound_s": 1.0, "tpot_bound_s": None, "settings": {"seed": 1}, **more}
    return load_report(
        asked,
        LoadContext(penstock="0", label=label, url="http://here:1", model="small", **context),
        began_s=0.0,
    )


def test_times_are_those_of_whole_answers() -> None:
    found = report(
        answered(0, 0.0, 2.0, 2.5, 4.0), answered(1, 4.0, 0.5, 1.0), failed("cut"), failed("cut")
    )

    assert found.requests == 4
    assert found.answered == 2
    assert found.errors == {"cut": 2}
    assert found.first_token is not None
    assert (found.first_token.samples, found.first_token.mean_s) == (2, 1.25)
    assert found.first_turns is not None
    assert found.first_turns.p50_s == 2.0
    assert found.later_turns is not None
    assert found.later_turns.p50_s == 0.5
    assert found.between_tokens is not None
    assert (found.between_tokens.samples, found.between_tokens.max_s) == (3, 1.5)
    assert found.token is not None
    assert found.token.max_s == 1.0
    assert found.seconds == 5.0
    assert found.requests_per_s == pytest.approx(0.4)
    assert found.output_tokens_per_s == pytest.approx(1.0)


def test_goodput_counts_answers_within_all_bounds_of_all_requests() -> None:
    asked = (answered(0, 0.0, 2.0, 2.1), answered(0, 1.0, 0.5, 2.5), answered(0, 2.0, 0.5, 0.6))

    by_first = report(*asked, failed("cut"))
    by_both = report(*asked, failed("cut"), tpot_bound_s=1.0)

    assert (by_first.goodput.requests, by_first.goodput.share) == (2, 0.5)
    assert (by_both.goodput.requests, by_both.goodput.share) == (1, 0.25)


def test_a_server_that_says_nothing_where_nothing_was_cached_gets_no_larger_share() -> None:
    """SGLang leaves the field out of answers that found nothing, as vLLM once did."""
    found = report(answered(0, 0.0, 1.0, cached=80), answered(0, 0.0, 1.0, cached=None))

    assert found.cached_share == 0.4
    assert found.prompt_tokens == 200


def test_a_server_that_says_nothing_of_cached_tokens_has_no_share_and_a_note() -> None:
    found = report(answered(0, 0.0, 1.0, cached=None))

    assert found.cached_share is None
    assert "--enable-prompt-tokens-details" in describe_runs([found])


def test_a_run_without_a_single_answer_has_a_report_too() -> None:
    found = report(failed("timeout", "too slow"), failed("status 503", "busy"))

    assert found.first_token is None
    assert "one: 1 failed, status 503: busy" in describe_runs([found])
    assert "<svg" not in load_page([found])


def test_a_generator_that_is_late_itself_says_so() -> None:
    assert "too busy to measure" in describe_runs([report(answered(0, 0.0, 1.0, late_s=0.2))])


def test_runs_side_by_side_say_how_much_better_each_is_than_the_first() -> None:
    slow = report(answered(0, 0.0, 2.0, 4.0), label="slow")
    fast = report(answered(0, 0.0, 0.5, 1.0), label="fast")

    lines = describe_runs([slow, fast]).splitlines()

    assert lines[0].split() == ["slow", "fast", "better"]
    [first] = [line for line in lines if line.startswith("first token, p50")]
    assert first.split()[-5:] == ["ms", "2,000", "500", "×", "4.00"]
    [rate] = [line for line in lines if line.startswith("answers")]
    assert rate.endswith("× 4.00")


def test_runs_that_asked_for_different_things_are_not_compared_in_silence() -> None:
    one = report(answered(0, 0.0, 1.0))
    other = report(answered(0, 0.0, 1.0), label="two", settings={"seed": 2})

    assert "two asked for something else than one: seed is 2, not 1" in describe_runs([one, other])


def test_a_goodput_is_never_shown_without_its_bounds() -> None:
    loose = report(answered(0, 0.0, 1.0), ttft_bound_s=2.0)
    tight = report(answered(0, 0.0, 1.0), label="two", ttft_bound_s=0.5, tpot_bound_s=0.05)

    assert "goodput: answers with a first token within 2 s" in describe_runs([loose, loose])
    both = describe_runs([loose, tight])
    assert "one: goodput: answers with a first token within 2 s" in both
    assert "two: goodput: answers with a first token within 0.5 s and 0.05 s a token" in both


def test_the_slowest_hundredth_of_fewer_than_a_hundred_answers_is_a_note() -> None:
    many = [answered(0, float(number), 1.0) for number in range(100)]

    assert "of 99 answers, p99 is about the slowest one" in describe_runs([report(*many[1:])])
    assert "p99 is about" not in describe_runs([report(*many)])


def test_a_page_needs_nothing_but_itself_and_trusts_nobody() -> None:
    evil = "<script>alert(1)</script>"
    runs = [
        report(answered(0, 0.0, 0.001, 0.002), failed("cut", evil), label=evil),
        report(answered(0, 0.0, 50.0, 60.0), label="two"),
    ]

    page = load_page(runs)

    assert page.count("<svg") == 3
    assert "<script" not in page
    assert not re.search(r"(src|href)=|url\(|@import", page)
    assert "two" in page


def test_a_report_reads_back_as_it_was_written(tmp_path: Path) -> None:
    found = report(answered(0, 0.0, 1.0, 2.0), failed("cut"))
    path = tmp_path / "run.json"
    path.write_bytes(msgspec.json.encode(found))

    assert read_report(path) == found


@pytest.mark.parametrize("text", ["", "[]", "{}", "\xff", '{"penstock": 5}', "[" * 100_000])
def test_a_file_that_is_no_report_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text, encoding="latin-1")

    with pytest.raises(ConfigError, match=r"run.json: is not what `penstock load --json` writes"):
        read_report(path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.json: cannot be read"):
        read_report(tmp_path / "none.json")
