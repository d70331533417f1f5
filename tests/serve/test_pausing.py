"""Pausing and resuming a real server."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.conftest import ENDLESS, ENDLESS_TOKENS, SOON_S, eventually, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.serve.conftest import Running

LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


class Asked:
    """A request in a thread of its own."""

    def __init__(self, running: Running, body: dict[str, Any]) -> None:
        self.answer: Any = None
        self._thread = threading.Thread(target=self._ask, args=(running, body))
        self._thread.start()

    def _ask(self, running: Running, body: dict[str, Any]) -> None:
        self.answer = running.client.post("/v1/completions", json=body)

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def joined(self) -> Any:
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        return self.answer


def being_answered(running: Running) -> Asked:
    """A request in the middle of its answer; asked again if that ended before anybody looked."""
    asked: list[Asked] = []

    def is_running() -> bool:
        if not (asked and asked[-1].waits):
            asked.append(Asked(running, LONG))
        return running.cache()["running"] == 1 and asked[-1].waits

    eventually(is_running, wanted=True)
    return asked[-1]


def post(running: Running, what: str, **body: Any) -> Any:
    answer = running.client.post(f"/admin/{what}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def running(endless_model_folder: Path) -> Iterator[Running]:
    with serving(endless_model_folder, *ENDLESS) as found:
        yield found


def test_a_drained_pause_lets_a_request_finish_and_refuses_others(running: Running) -> None:
    asked = being_answered(running)

    result = post(running, "pause", mode="drain", timeout_s=100)

    assert result == {"state": "paused", "instances": ["instance-0"], "failed": {}, "aborted": 0}
    assert asked.joined().json()["usage"]["completion_tokens"] == 400
    refused = running.client.post("/v1/completions", json=LONG)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "the server is paused" in refused.json()["error"]["message"]
    health = running.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "paused")
    assert 'penstock_state{instance="instance-0",state="paused"} 1.0' in (
        running.client.get("/metrics").text
    )

    assert post(running, "resume")["state"] == "running"

    assert running.client.get("/health").status_code == 200
    assert running.complete("Once upon a time")["usage"]["completion_tokens"] == 8


def test_an_aborted_request_gets_503_and_its_blocks_are_given_back(running: Running) -> None:
    endless = {**LONG, "max_tokens": ENDLESS_TOKENS}
    whole, stream = Asked(running, endless), Asked(running, {**endless, "stream": True})
    eventually(lambda: running.cache()["running"], 2)

    assert post(running, "pause", mode="abort")["aborted"] == 2

    assert whole.joined().status_code == 503
    # An event of the stream, or all of the answer if its first token was not sent yet.
    assert "service_unavailable" in stream.joined().text
    assert running.cache()["cache"]["leases"] == 0
    post(running, "resume")
    post(running, "audit")
    assert running.complete("Once upon a time")["usage"]["completion_tokens"] == 8


# As in `test_control`, with a file for the setting.
@pytest.mark.long
def test_requests_wait_while_a_server_is_paused_and_configured_so(
    model_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(
        'version = 1\nmodel.name = "m"\ncache = { blocks = 96, block_tokens = 8 }\n'
        'serve = { when_paused = "wait" }\n'
    )
    with serving(model_folder, "--config", str(file)) as running:
        before = running.complete("Once upon a time")
        post(running, "pause")
        asked = Asked(running, {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0})
        eventually(lambda: running.cache()["state"], "paused")
        assert asked.waits

        post(running, "resume")

        assert asked.joined().json()["choices"] == before["choices"]
