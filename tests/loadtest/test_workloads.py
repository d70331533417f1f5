"""What a load test asks follows from its seed, and shares what its workload says it shares."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from penstock.errors import ConfigError
from penstock_serve.loadtest.workloads import PROFILES, WORDS, TraceSettings, from_trace, generate

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_serve.loadtest.workloads import ScriptSession


def prompts(sessions: list[ScriptSession]) -> list[str]:
    return [turn.messages[0].content for each in sessions for turn in each.turns]


@pytest.mark.parametrize("name", PROFILES)
def test_a_seed_always_asks_the_same_and_another_one_something_else(name: str) -> None:
    first, again, other = (
        list(generate(PROFILES[name], seed=seed, requests=12, rate=3.0)) for seed in (1, 1, 2)
    )

    assert first == again
    assert prompts(first)[0] != prompts(other)[0]
    assert [each.at_s for each in first][1:] != [each.at_s for each in other][1:]


def test_there_are_exactly_as_many_requests_as_were_asked_for() -> None:
    sessions = list(generate(PROFILES["conversations"], seed=0, requests=13))

    assert [len(each.turns) for each in sessions] == [5, 5, 3]


def test_sessions_of_shared_begin_with_one_of_a_few_system_prompts() -> None:
    sessions = list(generate(PROFILES["shared"], seed=0, requests=40))

    openings = {each.opening[0].content for each in sessions}
    assert len(openings) == PROFILES["shared"].prefixes
    assert {len(each.split()) for each in openings} == {2000}
    assert len(set(prompts(sessions))) == 40


def test_every_question_about_a_document_begins_with_the_whole_document() -> None:
    one, other = generate(PROFILES["documents"], seed=0, requests=8)

    documents = {each.partition("\n\n")[0] for each in prompts([one])}
    assert len(documents) == 1
    assert len(documents.pop().split()) == 8000
    assert prompts([one])[0].partition("\n\n")[0] != prompts([other])[0].partition("\n\n")[0]
    assert not one.keeps_history


def test_agents_wait_for_their_tools_between_turns() -> None:
    [session] = generate(PROFILES["agents"], seed=0, requests=10)

    first, *later = (turn.gap_s for turn in session.turns)
    assert first == 0
    assert min(later) > 0
    assert session.keeps_history


def test_requests_of_an_open_loop_come_at_the_rate_on_average() -> None:
    short = replace(PROFILES["conversations"], turn_tokens=1, output_tokens=1)
    sessions = list(generate(short, seed=0, requests=10_000, rate=8.0))

    lasted_s = sessions[-1].at_s
    assert 10_000 / 8.0 * 0.9 < lasted_s < 10_000 / 8.0 * 1.1


@pytest.mark.parametrize(
    "wrong", [{"turns": 0}, {"turn_tokens": 0}, {"system_tokens": -1}, {"gap_s": float("nan")}]
)
def test_an_impossible_shape_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(PROFILES["shared"], **wrong)  # type: ignore[arg-type]


def write_trace(path: Path, *requests: tuple[int, int, list[int]]) -> str:
    lines = (
        json.dumps({"timestamp": at, "input_length": size, "output_length": 7, "hash_ids": ids})
        for at, size, ids in requests
    )
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_prompts_of_a_trace_share_exactly_the_blocks_that_the_trace_shares(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "trace.jsonl", (0, 1100, [1, 2, 3]), (500, 1024, [1, 4]), (2000, 600, [5, 4])
    )

    found, sessions = from_trace(TraceSettings(trace=trace, requests=10))

    words = [each.split() for each in prompts(list(sessions))]
    assert found == 3
    assert [len(each) for each in words] == [1100, 1024, 600]
    assert words[0][:512] == words[1][:512]
    assert words[0][512:528] != words[1][512:528]
    # The same id after another block is another block.
    assert words[1][512:528] != words[2][512:528]


def test_a_trace_keeps_its_times_unless_a_rate_stretches_them(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", (1000, 10, [1]), (1500, 10, [2]), (3000, 10, [3]))

    plain = TraceSettings(trace=trace, requests=10)
    _, own = from_trace(plain)
    _, stretched = from_trace(replace(plain, rate=0.5))

    assert [each.at_s for each in own] == [0.0, 0.5, 2.0]
    assert [each.at_s for each in stretched] == [0.0, 1.0, 4.0]


def test_prompts_and_answers_of_a_trace_can_be_cut(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", (0, 1100, [1, 2, 3]), (0, 20, [9]))
    settings = TraceSettings(trace=trace, requests=1, prompt_max=100, output_tokens=3)

    found, sessions = from_trace(settings)

    [session] = sessions
    assert found == 1
    assert len(prompts([session])[0].split()) == 100
    assert session.turns[0].output_tokens == 3


def test_a_wrong_line_of_a_trace_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", (0, 10, [1]), (5, 600, [1]))

    with pytest.raises(ConfigError, match=r"trace.jsonl:2: hash_ids has 1 ids, must have 2"):
        from_trace(TraceSettings(trace=trace, requests=10))


def test_a_trace_of_one_time_cannot_be_stretched(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", (5, 10, [1]), (5, 10, [2]))

    with pytest.raises(ConfigError, match="--rate: is 2"):
        from_trace(TraceSettings(trace=trace, requests=10, rate=2.0))


def test_the_trace_that_comes_with_penstock_can_be_asked() -> None:
    found, sessions = from_trace(TraceSettings(trace="conversation", requests=3))

    assert found == 3
    assert all(len(each.split()) > 500 for each in prompts(list(sessions)))


def test_each_byte_of_a_key_has_a_word_of_its_own() -> None:
    assert len(set(WORDS)) == 256
