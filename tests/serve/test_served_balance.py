"""Two prefill and two decode instances whose router changes roles by load, while clients ask."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.serve.conftest import eventually, serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serve.conftest import Running

CONFIG = """
version = 1
model.name = "small-model"
cache = { blocks = 512, block_tokens = 8 }
engine = { step_requests = 4, threads = 1 }
serve = { prefill = 2, decode = 2, balance_s = 6.0 }
"""
CLIENTS = 10
MORE_ANSWERS = 60


class Asked(NamedTuple):
    prompt: list[int]
    max_tokens: int


LONG_PROMPTS = [Asked([(7 * n + at) % 300 + 1 for at in range(490)], 2) for n in range(6)]
LONG_ANSWERS = [Asked([(11 * n + at) % 300 + 1 for at in range(24)], 200) for n in range(6)]


def text(running: Running, asked: Asked) -> str:
    # Nothing is found again, so that every prompt is computed.
    found = running.complete(
        asked.prompt, max_tokens=asked.max_tokens, ignore_eos=True, cache="off"
    )
    said: str = found["choices"][0]["text"]
    return said


class Load:
    """Clients that ask again as soon as they have the right answer."""

    def __init__(self, running: Running, expected: dict[int, str], asked: list[Asked]) -> None:
        self.answered = 0
        self._running, self._expected, self._asked = running, expected, asked
        self._over = threading.Event()

    def __enter__(self) -> Load:
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients = [self._pool.submit(self._ask, number) for number in range(CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        for each in self._clients:
            each.result()

    def _ask(self, number: int) -> None:
        while not self._over.is_set():
            asked = self._asked[number % len(self._asked)]
            assert text(self._running, asked) == self._expected[id(asked)]
            self.answered += 1
            number += 1

    def go_on(self) -> None:
        """Waits for so many more answers; a client that got a wrong one ends this, too."""
        until = self.answered + MORE_ANSWERS
        eventually(
            lambda: self.answered >= until or any(each.done() for each in self._clients),
            wanted=True,
        )


def changes(running: Running) -> dict[str, int]:
    """How often an instance was given a role, and how often that failed."""
    found = {"prefill": 0, "decode": 0, "failed": 0}
    for line in running.client.get("/metrics").text.splitlines():
        for role in ("prefill", "decode"):
            for outcome, name in (("done", role), ("failed", "failed")):
                start = f'penstock_role_changes_total{{outcome="{outcome}",role="{role}"}} '
                if line.startswith(start):
                    found[name] += int(float(line.removeprefix(start)))
    return found


def roles(running: Running) -> list[str]:
    told: list[dict[str, Any]] = running.client.get("/cache").json()["instances"]
    return sorted(each["role"] for each in told)


@pytest.mark.long
def test_roles_follow_a_load_that_shifts_and_every_answer_is_right(
    server: Running, model_folder: Path, tmp_path: Path
) -> None:
    expected = {id(asked): text(server, asked) for asked in (*LONG_PROMPTS, *LONG_ANSWERS)}
    file = tmp_path / "penstock.toml"
    file.write_text(CONFIG)

    with serving(model_folder, "--config", str(file)) as running:
        assert running.client.get("/health").json()["balance"]["last_change"] is None

        with Load(running, expected, LONG_PROMPTS) as load:
            eventually(lambda: roles(running).count("prefill"), 3)
            load.go_on()
            # One decode instance stays, and nothing is taken back.
            assert changes(running) == {"prefill": 1, "decode": 0, "failed": 0}
        with Load(running, expected, LONG_ANSWERS) as load:
            eventually(lambda: roles(running).count("decode"), 3)
            load.go_on()
            assert changes(running) == {"prefill": 1, "decode": 2, "failed": 0}
        last = running.client.get("/health").json()["balance"]["last_change"]
        assert (last["role"], last["outcome"]) == ("decode", "done")
