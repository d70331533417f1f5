"""Prompts that one instance computes and another one answers: the same answers, whatever dies."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.conftest import SOON_S, eventually, kill_all, pids_of, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.serve.conftest import Running

SIZES = ("--blocks", "96", "--block-tokens", "8", "--host-gib", "0.01")
# float32 on other shapes: sums in another order.
BOUND = 2e-4
STORY = "A block that is not where it should be is looked for in every tier below. " * 3


def reported(running: Running, prompt: str | list[int], **more: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
    answer = running.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(running: Running, prompt: str) -> str:
    found: str = reported(running, prompt)["choices"][0]["text"]
    return found


def handoffs(running: Running) -> dict[str, dict[str, int]]:
    instances = running.client.get("/cache").json()["instances"]
    return {each["instance"]: each["handoffs"] for each in instances}


def delivered(running: Running) -> int:
    return handoffs(running)["decode-0"].get("delivered", 0)


def require_same(one: Any, other: Any) -> None:
    first, second = (each["choices"][0]["logprobs"] for each in (one, other))
    assert first["tokens"] == second["tokens"]
    assert first["token_logprobs"] == pytest.approx(second["token_logprobs"], abs=BOUND)
    for mine, yours in zip(first["top_logprobs"], second["top_logprobs"], strict=True):
        assert mine == pytest.approx(yours, abs=BOUND)


@pytest.fixture(scope="module")
def pair(model_folder: Path) -> Iterator[Running]:
    with serving(model_folder, "--prefill-tp", "1", "--decode-tp", "2", *SIZES) as running:
        yield running


def test_a_prompt_that_was_handed_over_gives_the_same_tokens_and_probabilities(
    server: Running, pair: Running
) -> None:
    before = delivered(pair)

    expected = reported(server, STORY, logprobs=5, cache="off")
    found = reported(pair, STORY, logprobs=5)

    require_same(found, expected)
    assert delivered(pair) == before + 1
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_what_several_ranks_verify_is_counted(pair: Running) -> None:
    one = reported(pair, f"One. {STORY}")
    first = handed(pair)
    reported(pair, f"Another one. {STORY}")
    second = handed(pair)

    assert one["usage"]["prompt_tokens"] > 0
    assert 0 < first["decode-0"][0] < second["decode-0"][0]
    # Each rank takes its own heads: together, what the prefill instance has sent.
    assert first["decode-0"][1] == first["prefill-0"][1] > 0
    assert second["decode-0"][1] == second["prefill-0"][1]


def handed(running: Running) -> dict[str, tuple[int, int]]:
    """Parts that were verified and bytes that were moved, once the counters stay the same."""
    found: list[dict[str, tuple[int, int]]] = []

    def settled() -> bool:
        instances = running.client.get("/cache").json()["instances"]
        found.append(
            {
                each["instance"]: (each["handed_parts_verified"], each["handed_bytes"])
                for each in instances
            }
        )
        return found[-1]["decode-0"][1] == found[-1]["prefill-0"][1] > 0

    eventually(settled, wanted=True)
    return found[-1]


def test_a_pair_chooses_tokens_as_one_instance_does(server: Running, pair: Running) -> None:
    prompt = "What is asked for holds for the first token, too, whoever chooses it. " * 3
    wishes: dict[str, Any] = {
        "logit_bias": {"0": 100},
        "min_tokens": 3,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "top_k": 7,
        "temperature": 0.8,
        "seed": 11,
    }
    before = delivered(pair)

    found = [reported(running, prompt, **wishes) for running in (server, pair)]
    scored = [
        reported(running, prompt, echo=True, logprobs=3, max_tokens=1) for running in (server, pair)
    ]

    assert found[0]["choices"][0]["text"] == found[1]["choices"][0]["text"] != ""
    assert [each["usage"]["completion_tokens"] for each in found] == [4, 4]
    # A prompt that is scored is computed where it is answered.
    assert delivered(pair) == before + 1
    first, second = (each["choices"][0]["logprobs"] for each in scored)
    assert first["token_logprobs"][1:] == pytest.approx(second["token_logprobs"][1:], abs=BOUND)
    assert len(first["tokens"]) == scored[0]["usage"]["prompt_tokens"] + 1


def test_a_first_token_that_travels_alone_is_the_same(server: Running, pair: Running) -> None:
    before = delivered(pair)
    prompt = "Whoever gives a block back has to say so once. " * 4

    found = [text(running, prompt) for running in (server, pair)]

    assert found[0] == found[1]
    assert delivered(pair) == before + 1


def test_only_what_decode_does_not_have_is_handed_over(server: Running, pair: Running) -> None:
    prefix = "Nothing is copied twice, and nothing is forgotten on the way. " * 3
    reported(pair, prefix)
    before = delivered(pair)

    expected = reported(server, prefix + STORY, logprobs=5, cache="off")
    found = reported(pair, prefix + STORY, logprobs=5)

    require_same(found, expected)
    assert delivered(pair) == before + 1
    assert found["usage"]["cached_by_tier"]["device"] >= 24


def test_a_timeline_and_a_story_cover_both_instances(pair: Running) -> None:
    began = time.monotonic()
    prompt = "Whoever looks for time finds where it went. " * 4

    answer = reported(pair, prompt)

    handed = {
        each["instance"]: [each for each in each["handoffs"] if each["began"] >= began]
        for each in pair.client.get("/cache/timeline").json()["instances"]
    }
    [claimed] = handed["decode-0"]
    assert claimed["handoff"] == f"{answer['id']}/1"
    assert (claimed["outcome"], claimed["ended"] > claimed["began"]) == ("delivered", True)
    eventually(lambda: len(of_prefill(pair)["handoffs"]) > 0, wanted=True)
    story = pair.client.get("/cache/story", params={"request": answer["id"]}).json()["story"]
    assert any(f"{answer['id']}/1" in line for line in story)
    assert any(f"{answer['id']}/1" not in line for line in story)


def test_a_prompt_that_was_delivered_counts_so_on_both_sides(pair: Running) -> None:
    before = handoffs(pair)["prefill-0"]

    reported(pair, "What one side calls an end, the other one does, too. " * 4)

    def more() -> dict[str, int]:
        now = handoffs(pair)["prefill-0"]
        return {end: count - before.get(end, 0) for end, count in now.items()}

    eventually(lambda: more().get("delivered"), 1)
    assert more().get("cancelled", 0) == 0


def test_a_prefill_instance_that_is_killed_in_a_handoff_is_not_missed(
    server: Running, pair: Running
) -> None:
    prompt = "A rank that has died says nothing, and nobody waits for it. " * 3
    expected = reported(server, prompt, logprobs=5, cache="off")
    before = Counter(of_decode(pair)["handoffs"])
    victims = pids_of("prefill-0", pair)
    with ThreadPoolExecutor(1) as client:
        # Stopped, it neither computes the prompt nor says so, until it is killed.
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        asked = client.submit(reported, pair, prompt, logprobs=5)
        # Whoever stands still for long is given up: then it may have ended before we looked.
        eventually(lambda: of_decode(pair)["claiming"] == 1 or asked.done(), wanted=True)
        kill_all(victims)
        found = asked.result(timeout=SOON_S)

    require_same(found, expected)
    # The router says that the instance is gone; or, before it, the silence of the instance.
    ended = Counter(of_decode(pair)["handoffs"]) - before
    assert (ended.total(), ended["lost"] + ended["failed_over"]) == (1, 1)
    # Until there is another one, prompts are computed where they are answered.
    again = reported(pair, "Meanwhile. " + STORY, logprobs=5)
    require_same(again, reported(server, "Meanwhile. " + STORY, logprobs=5, cache="off"))
    _prefill_comes_back(pair)


def _prefill_comes_back(pair: Running) -> None:
    eventually(
        lambda: pair.client.get("/health").json()["instances"],
        {"prefill-0": True, "decode-0": True},
    )
    # It is there before the decode instance, which dials it again, has met it: until then, too,
    # prompts are computed where they are answered.
    numbers = count()
    before = delivered(pair)
    eventually(
        lambda: reported(pair, f"And it goes on, {next(numbers)}. " + STORY) and delivered(pair),
        before + 1,
    )
    assert pair.client.post("/admin/audit").json()["in_order"] == ["decode-0", "prefill-0"]
    eventually(lambda: [each["cache"]["leases"] for each in everybody(pair)], [0, 0])


# One of two, without ranks: in `test_many_instances`.
@pytest.mark.long
def test_a_decode_instance_that_is_killed_comes_back_and_is_handed_prompts(
    server: Running, pair: Running
) -> None:
    prompt = "What a life has claimed, the next one does not get. " * 3
    victims = set(pids_of("decode-0", pair))

    kill_all(victims)
    eventually(lambda: victims & set(pids_of("decode-0", pair)), set())
    # Its next life is there once nothing was handed to it: it may have come before we looked.
    eventually(lambda: [each["handoffs"] for each in decoding(pair)], [{}])
    eventually(lambda: pair.client.get("/health").status_code, 200)
    found = reported(pair, prompt, logprobs=5)

    require_same(found, reported(server, prompt, logprobs=5, cache="off"))
    assert of_decode(pair)["handoffs"] == {"delivered": 1}


def everybody(running: Running) -> Any:
    return running.client.get("/cache").json()["instances"]


def decoding(running: Running) -> list[Any]:
    """The statistics of the decode instance, if it is there."""
    instances = running.client.get("/cache").json().get("instances", [])
    return [each for each in instances if each["instance"] == "decode-0"]


def of_prefill(running: Running) -> Any:
    [found] = running.client.get("/cache", params={"instance": "prefill-0"}).json()["instances"]
    return found


def of_decode(running: Running) -> Any:
    [found] = running.client.get("/cache", params={"instance": "decode-0"}).json()["instances"]
    return found
