"""Which steps lie between a request and its first token."""

from __future__ import annotations

from lab.bench.vllm_first_token import FirstToken, StepCounts, WorkerCall, first_token, slowest

COUNTS = StepCounts(queued_steps=2, loading_steps=1, computing_steps=3, step_tokens=96)


def call(began: float, ended: float) -> WorkerCall:
    return WorkerCall(began=began, ended=ended, cpu_s=(ended - began) / 2, connector_s=0.01)


def answered_in(seconds: float, *, request: int = 0) -> FirstToken:
    return FirstToken(
        request=request,
        prompt_tokens=64,
        cached_tokens=32,
        seconds=seconds,
        outside_s=0.0,
        waited_s=0.0,
        calls=1,
        worker_s=seconds,
        cpu_s=seconds,
        connector_s=0.0,
        counts=COUNTS,
    )


def test_only_what_the_worker_did_while_a_request_waited_counts_for_it() -> None:
    calls = [call(0.0, 1.0), call(1.5, 2.5), call(3.0, 4.0), call(5.0, 6.0)]

    found = first_token(
        calls,
        request=7,
        prompt_tokens=64,
        cached_tokens=32,
        seconds=3.5,
        queued=1.25,
        scheduled=2.75,
        answered=4.5,
        counts=COUNTS,
    )

    assert (found.calls, found.worker_s, found.cpu_s) == (2, 2.0, 1.0)
    assert (found.outside_s, found.waited_s) == (0.25, 1.5)
    assert "request 7, 64 tokens of which 32 cached; outside of the scheduler 0.25 s" in str(found)
    assert "waited 1.50 s; 2 worker calls of 2.00 s, 1.00 s on the CPU, 20.0 ms" in str(found)
    assert "steps: 2 in the queue, 1 for the load, 3 of its own, 96 tokens in all" in str(found)


def test_the_slowest_of_all_rounds_are_told_with_their_round() -> None:
    rounds = [[answered_in(0.3), answered_in(0.9)], [answered_in(1.4, request=1)], []]

    reported = slowest(rounds, most=2)

    assert [each.split(":")[0] for each in reported] == ["round 2, 1.40 s", "round 1, 0.90 s"]
