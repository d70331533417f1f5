"""What is said of the last requests: how many, how quick, and what a hit saves."""

from __future__ import annotations

import pytest

from penstock_serve.observe.live import ALIKE_MIN, Traffic

START = 1_000_003.0


def asked(traffic: Traffic, tokens: int, took_s: float, *, warm: bool, at: float = START) -> None:
    record = traffic.begin("r", prompt_tokens=tokens, now=at)
    traffic.first_token(record, found={}, is_warm=warm, now=at + took_s)


def test_times_of_long_prompts_are_not_compared_with_those_of_short_ones() -> None:
    traffic = Traffic()
    for _ in range(50):
        asked(traffic, 25, 0.01, warm=True)
        asked(traffic, 3000, 0.36, warm=False)

    found = traffic.report(START + 1)

    assert found.alike is None
    assert (found.warm.p50_s, found.cold.p50_s) == pytest.approx((0.01, 0.36))


def test_prompts_of_one_length_are_compared_and_those_of_others_left_out() -> None:
    traffic = Traffic()
    for _ in range(50):
        asked(traffic, 25, 0.01, warm=True)
    for number in range(ALIKE_MIN):
        asked(traffic, 2048 + number, 0.1, warm=True)
        asked(traffic, 4095 - number, 0.4, warm=False)

    alike = traffic.report(START + 1).alike

    assert alike is not None
    assert (alike.tokens_min, alike.tokens_max) == (2048, 4095)
    assert (alike.warm_count, alike.cold_count) == (ALIKE_MIN, ALIKE_MIN)
    assert alike.cold_p50_s / alike.warm_p50_s == pytest.approx(4)


def test_a_few_prompts_are_not_compared() -> None:
    traffic = Traffic()
    for _ in range(ALIKE_MIN):
        asked(traffic, 3000, 0.4, warm=False)
    for _ in range(ALIKE_MIN - 1):
        asked(traffic, 3000, 0.1, warm=True)

    assert traffic.report(START + 1).alike is None


def test_prompts_of_unknown_length_are_not_compared() -> None:
    traffic = Traffic()
    for number in range(4 * ALIKE_MIN):
        record = traffic.begin("r", prompt_tokens=None, now=START)
        traffic.first_token(record, found={}, is_warm=number % 2 == 0, now=START + 0.1)

    assert traffic.report(START + 1).alike is None


def test_rates_are_those_of_the_last_minute_and_go_back_to_zero() -> None:
    traffic = Traffic()
    for second in range(120):
        asked(traffic, 100, 0.1, warm=False, at=START + second)
        for number in range(20):
            now = START + second + 0.2 + number / 50
            traffic.token(generated=1, gap_s=0.02, now=now)

    rates = traffic.report(START + 120).rates
    later = traffic.report(START + 200)

    assert rates.requests_per_s == pytest.approx(1, rel=0.05)
    assert rates.output_tokens_per_s == pytest.approx(20, rel=0.05)
    assert (later.rates.requests_per_s, later.rates.output_tokens_per_s) == (0, 0)
    assert later.between.p50_s == pytest.approx(0.02)
    assert later.slices[0].between_p50_s == pytest.approx(0.02)


def test_rates_of_a_server_that_has_just_begun_are_not_those_of_a_minute() -> None:
    traffic = Traffic()
    for second in range(5):
        asked(traffic, 100, 0.1, warm=False, at=START + second)

    assert traffic.report(START + 5).rates.requests_per_s == pytest.approx(1)


def test_without_requests_there_are_no_rates() -> None:
    found = Traffic().report(START)

    assert (found.rates.requests_per_s, found.between.count, found.alike) == (0, 0, None)
