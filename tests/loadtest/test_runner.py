"""When the requests of a run are sent: in an open loop, in a closed one, after gaps."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from penstock_serve.loadtest import runner
from penstock_serve.loadtest.runner import LoadRun
from penstock_serve.loadtest.workloads import ChatMessage, ScriptSession, ScriptTurn
from tests.loadtest.conftest import answer_whole, target_at
from tests.serve.conftest import SOON_S

if TYPE_CHECKING:
    from typing import Any

    from penstock_serve.loadtest.exchange import LoadTarget
    from tests.serve.vllm_servers import Conversation, FakeVllm


def session(number: int, *gaps_s: float, at_s: float = 0.0, **more: Any) -> ScriptSession:
    turns = (
        ScriptTurn(
            messages=(ChatMessage(role="user", content=f"question {number}.{turn}"),),
            answer=f"scripted {number}.{turn}",
            output_tokens=3,
            gap_s=gap_s,
        )
        for turn, gap_s in enumerate(gaps_s or (0.0,))
    )
    return ScriptSession(number=number, turns=tuple(turns), at_s=at_s, **more)


def play(target: LoadTarget, *sessions: ScriptSession, **more: Any) -> LoadRun:
    run = LoadRun(target, **{"concurrency": None, **more})
    asyncio.run(run.run(iter(sessions)))
    return run


class Together:
    """Answers when so many requests are there at once, and counts the most that were."""

    def __init__(self, wanted: int) -> None:
        self.most = self._now = 0
        self._lock = threading.Lock()
        self._wanted = threading.Barrier(wanted)

    def __call__(self, conversation: Conversation) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._wanted.wait(SOON_S)
        with self._lock:
            self._now -= 1
        answer_whole(conversation)


def test_an_open_loop_does_not_wait_for_answers(openai: FakeVllm, target: LoadTarget) -> None:
    openai.always = together = Together(5)

    run = play(target, *(session(number) for number in range(5)))

    assert together.most == 5
    assert [each.answer.failure for each in run.asked] == [None] * 5


def test_a_closed_loop_has_exactly_so_many_requests_under_way(
    openai: FakeVllm, target: LoadTarget
) -> None:
    openai.always = together = Together(2)

    run = play(target, *(session(number) for number in range(8)), concurrency=2)

    assert together.most == 2
    assert sorted(each.session for each in run.asked) == list(range(8))


def test_sessions_of_an_open_loop_begin_at_their_times(target: LoadTarget) -> None:
    run = play(target, session(0), session(1, at_s=0.4))

    began_s = {each.session: each.answer.began_s - run.began_s for each in run.asked}
    assert began_s[1] >= 0.4


def test_a_turn_is_sent_after_its_gap_with_the_history_before_it(
    openai: FakeVllm, target: LoadTarget
) -> None:
    run = play(target, session(0, 0.0, 0.3, opening=(ChatMessage(role="system", content="be"),)))

    first, second = run.asked
    assert second.answer.began_s - first.answer.ended_s >= 0.3
    assert [each["content"] for each in openai.asked[1]["messages"]] == [
        "be",
        "question 0.0",
        "scripted 0.0",
        "question 0.1",
    ]


def test_a_history_can_have_the_servers_own_answers(openai: FakeVllm, target: LoadTarget) -> None:
    play(target, session(0, 0.0, 0.0), own_answers=True)

    assert openai.asked[1]["messages"][1] == {"role": "assistant", "content": "abc"}


def test_questions_about_a_document_do_not_see_each_other(
    openai: FakeVllm, target: LoadTarget
) -> None:
    play(target, session(0, 0.0, 0.0, keeps_history=False))

    assert [each["content"] for each in openai.asked[1]["messages"]] == ["question 0.1"]


@pytest.mark.parametrize("concurrency", [None, 1])
def test_a_server_that_asks_for_a_pause_gets_it(
    openai: FakeVllm, target: LoadTarget, concurrency: int | None
) -> None:
    openai.behaves = [
        lambda conversation: conversation.answer(503, {}, **{"retry-after": "0.4"}),
    ]

    run = play(target, session(0, 0.0, 0.0), concurrency=concurrency)

    first, second = run.asked
    assert first.answer.failure is not None
    assert second.answer.failure is None
    assert second.answer.began_s - first.answer.ended_s >= 0.4
    assert run.errors == 1


def test_a_client_of_a_closed_loop_pauses_before_its_next_session_too(
    openai: FakeVllm, target: LoadTarget
) -> None:
    openai.behaves = [
        lambda conversation: conversation.answer(503, {}, **{"retry-after": "0.4"}),
    ]

    run = play(target, session(0), session(1), concurrency=1)

    first, second = run.asked
    assert second.answer.began_s - first.answer.ended_s >= 0.4


@pytest.mark.parametrize("concurrency", [None, 1])
def test_nothing_is_sent_after_the_end_of_the_run(
    openai: FakeVllm, target: LoadTarget, concurrency: int | None
) -> None:
    late = session(1, at_s=3600.0) if concurrency is None else session(1)

    play(target, session(0, 0.0, 3600.0), late, concurrency=concurrency, seconds=0.5)

    assert "question 0.1" not in str(openai.asked)
    assert "question 1.0" not in str(openai.asked)


def test_what_cannot_be_sent_any_more_is_counted(
    openai: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "OPEN_SESSIONS_MAX", 1)
    openai.always = lambda conversation: conversation.hang()

    run = play(target_at(openai.url, timeout_s=0.5), session(0), session(1, 0.0, 0.0))

    kinds = sorted(each.answer.failure.kind for each in run.asked if each.answer.failure)
    assert kinds == ["not sent", "not sent", "timeout"]


def test_progress_is_told_after_every_request(target: LoadTarget) -> None:
    told: list[int] = []

    play(target, session(0, 0.0, 0.0), progress=lambda run: told.append(len(run.asked)))

    assert told == [1, 2]
