"""`penstock router` in front of vLLM servers: answers are those of plain vLLM, whatever ends."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import signal
import sys
import urllib.error
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest
from processes import END_S
from routed import DECODE, PREFILL, ROUTER, Routed, agree, ask, begins, until

from lab.bench.vllm_model import HandoffModel
from lab.bench.vllm_servers import VllmForks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.bench.vllm_servers import VllmServer

pytestmark = pytest.mark.vllm

HANDED_OVER, PROMPTS_MAX = 3, 12
"""On a machine that is busy with other things, an engine may be too late for a handoff; then decode
computes the prompt, which is no failure."""


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    forks = VllmForks(Path(sys.executable), tmp_path_factory.mktemp("routed"))
    made: Routed | None = None
    try:
        forks.make_model(HandoffModel(positions=1024))
        made = Routed(forks)
        yield made
        assert made.end_router() == 0
    finally:
        if made is not None:
            made.close_router()
        forks.close()


class Asked(Thread):
    """A request of a client, and what became of it."""

    def __init__(self, port: int, number: int, **more: Any) -> None:
        super().__init__(daemon=True)
        self.body = b""
        self.error: BaseException | None = None
        self._asked = {"port": port, "number": number, **more}
        self.start()

    def run(self) -> None:
        try:
            self.body = ask(**self._asked)
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            self.error = error

    def answer(self) -> bytes:
        """The answer, which there must be."""
        assert not self.failed(), self.error
        return self.body

    def failed(self) -> bool:
        """Whether there is no answer; waits for its end."""
        self.join(END_S)
        assert not self.is_alive(), "a request hangs"
        return self.error is not None


def test_answers_through_the_router_are_those_of_plain_vllm(routed: Routed) -> None:
    answers: dict[int, bytes] = {}
    while (received := routed.prompts_received()) < HANDED_OVER and len(answers) < PROMPTS_MAX:
        number = len(answers) + 1
        answers[number] = ask(routed.port, number)

    assert received == HANDED_OVER
    assert all(agree(answer, ask(routed.plain.port, each)) for each, answer in answers.items())


def test_handoffs_do_not_have_to_share_the_core_where_a_worker_polls(routed: Routed) -> None:
    for server in routed.servers.values():
        pids = {does: pid for pid, does in server.processes().items()}
        worker = pids["worker"]
        tasks = [int(task.name) for task in Path(f"/proc/{worker}/task").iterdir()]

        assert len(os.sched_getaffinity(worker)) == 1
        # The thread for handoffs, and two of ZeroMQ.
        engine = os.sched_getaffinity(pids["scheduler"])
        assert sum(os.sched_getaffinity(task) == engine for task in tasks) >= 3


def test_a_stream_through_the_router_is_that_of_plain_vllm(routed: Routed) -> None:
    streamed = ask(routed.port, 101, stream=True)

    assert streamed.endswith(b"data: [DONE]\n\n")
    assert agree(streamed, ask(routed.plain.port, 101))


def test_errors_of_vllm_reach_the_client(routed: Routed) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(routed.port, 102, model="another")

    with refused.value as answer:
        assert answer.code == 404
        assert "another" in json.load(answer)["error"]["message"]


def test_a_prompt_whose_prefill_worker_stands_still_is_computed_by_decode(routed: Routed) -> None:
    with standing_still(routed, "worker", PREFILL):
        answer = Asked(routed.port, 103).answer()

    assert agree(answer, ask(routed.plain.port, 103))
    assert agree(ask(routed.port, 104), ask(routed.plain.port, 104))


def test_decode_schedulers_that_stood_still_go_on_with_their_requests(routed: Routed) -> None:
    with standing_still(routed, "worker", PREFILL):
        asked = Asked(routed.port, 105)
        until(lambda: bool(routed.decode_counted("vllm:num_requests_waiting")))
        for name in DECODE:
            routed.send(signal.SIGSTOP, name, "scheduler")
    try:
        # Channels between engines end when one of them is silent for 6 s, those within one do not.
        Event().wait(8.0)
    finally:
        for name in DECODE:
            routed.send(signal.SIGCONT, name, "scheduler")

    assert agree(asked.answer(), ask(routed.plain.port, 105))
    assert_handed_over(routed, 200)


def test_a_router_that_stood_still_passes_on_what_was_answered(routed: Routed) -> None:
    answered = "vllm:request_success_total"
    before = routed.decode_counted(answered)
    prefill = routed.servers[PREFILL]
    computed = prefill.counted(answered)
    with standing_still(routed, "worker", *DECODE):
        asked = Asked(routed.port, 106)
        routed.decoding()
        # Else decode would wait for a prompt that nobody was asked to compute.
        until(lambda: prefill.counted(answered) > computed)
        routed.send(signal.SIGSTOP, ROUTER)
    try:
        until(lambda: routed.decode_counted(answered) > before)
    finally:
        routed.send(signal.SIGCONT, ROUTER)

    assert agree(asked.answer(), ask(routed.plain.port, 106))


def test_requests_of_a_router_that_is_killed_are_aborted(routed: Routed) -> None:
    with standing_still(routed, "worker", *DECODE):
        asked = Asked(routed.port, 107)
        routed.decoding()

        routed.send(signal.SIGKILL, ROUTER)

        assert asked.failed()
    until(lambda: not any(in_hand(server) for server in routed.servers.values()))
    routed.revive(ROUTER)
    assert agree(ask(routed.port, 108), ask(routed.plain.port, 108))


def test_another_decode_server_answers_when_the_worker_of_one_is_killed(routed: Routed) -> None:
    with standing_still(routed, "worker", *DECODE):
        asked = Asked(routed.port, 109)

        routed.send(signal.SIGKILL, routed.decoding(), "worker")

    assert agree(asked.answer(), ask(routed.plain.port, 109))


def test_a_prompt_whose_prefill_scheduler_is_killed_is_computed_by_decode(routed: Routed) -> None:
    with standing_still(routed, "scheduler", PREFILL):
        asked = Asked(routed.port, 110)
        until(lambda: bool(routed.in_hand()[PREFILL]))

        routed.send(signal.SIGKILL, PREFILL, "scheduler")

    assert agree(asked.answer(), ask(routed.plain.port, 110))
    assert agree(ask(routed.port, 111), ask(routed.plain.port, 111))


@contextmanager
def standing_still(routed: Routed, role: str, *servers: str) -> Iterator[None]:
    """Stops a process of some servers, and has it go on."""
    for name in servers:
        routed.send(signal.SIGSTOP, name, role)
    try:
        yield
    finally:
        for name in servers:
            routed.send(signal.SIGCONT, name, role)


def in_hand(server: VllmServer) -> float:
    """Requests that a server has."""
    return sum(server.counted(f"vllm:num_requests_{state}") for state in ("running", "waiting"))


TARGETS = [*itertools.product((PREFILL, *DECODE), ("http", "scheduler", "worker")), (ROUTER, "")]
FAULTS = [*itertools.product(TARGETS, (signal.SIGKILL, signal.SIGSTOP))]
ROUNDS = 5


@pytest.mark.long
@pytest.mark.parametrize("draws", range(8))
def test_no_answer_is_wrong_or_missing_whatever_is_killed_or_stopped(
    routed: Routed, draws: int
) -> None:
    draw = random.Random(draws)
    for number in range(draws * ROUNDS, (draws + 1) * ROUNDS):
        # Each fault twice.
        (target, role), how = FAULTS[7 * number % len(FAULTS)]
        asked = {1000 + 3 * number + each: draw_request(draw) for each in range(3)}
        answers = {each: Asked(routed.port, each, **more) for each, more in asked.items()}
        # Prompts take some hundredths of a second, answers some tenths.
        Event().wait(draw.uniform(0.0, 0.8))
        routed.send(how, target, role)
        if how is signal.SIGSTOP:
            # A peer that is silent for 5 s is given up.
            Event().wait(draw.choice([0.1, 1.0, 7.0]))
            routed.send(signal.SIGCONT, target, role)

        for each, answer in answers.items():
            assert_right(routed, each, answer, asked[each], breaks=breaks_of(target, how))
        if how is signal.SIGKILL:
            routed.revive(target)
        more = {"tokens": 300}
        assert_right(routed, 2000 + number, Asked(routed.port, 2000 + number, **more), more)
    assert_handed_over(routed, 3000 + draws * PROMPTS_MAX)


def draw_request(draw: random.Random) -> dict[str, Any]:
    return {
        "tokens": draw.randrange(150, 900),
        "max_tokens": draw.randrange(1, 60),
        "stream": draw.random() < 0.5,
    }


def breaks_of(target: str, how: signal.Signals) -> str:
    """What may break off when a process is killed: nothing else may."""
    if how is signal.SIGKILL and target in DECODE:
        return "streams"
    return "all" if how is signal.SIGKILL and target == ROUTER else ""


def assert_right(
    routed: Routed, number: int, asked: Asked, more: dict[str, Any], breaks: str = ""
) -> None:
    failed = asked.failed()
    expected = ask(routed.plain.port, number, **{**more, "stream": False})
    if failed:
        assert breaks == "all", asked.error
    elif b'"error"' in asked.body:
        assert breaks == "streams"
        assert more["stream"]
        assert asked.body.endswith(b"data: [DONE]\n\n")
        assert begins(asked.body, expected)
    else:
        assert agree(asked.body, expected)


def assert_handed_over(routed: Routed, first: int) -> None:
    before = routed.prompts_received()
    for number in range(first, first + PROMPTS_MAX):
        assert agree(ask(routed.port, number), ask(routed.plain.port, number))
        if routed.prompts_received() > before:
            return
    pytest.fail(f"none of {PROMPTS_MAX} prompts was handed over")
