"""The router in front of vLLM servers: which of them are up, and what becomes of their requests."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from penstock_serve.server import vllm_server
from tests.serve.conftest import SOON_S, eventually
from tests.serve.vllm_servers import LONG, FakeVllm, hang, running, starting, whole_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx


@pytest.fixture
def vllm() -> Iterator[Callable[[str], FakeVllm]]:
    """Starts servers by their names."""
    with starting() as start:
        yield start


def test_a_server_that_is_down_is_not_asked_and_comes_back(
    vllm: Callable[[str], FakeVllm],
) -> None:
    first, second = vllm("first"), vllm("second")
    first.health = 503
    with running([], [first, second]) as router:
        for number in range(3):
            router.complete(f"{number} {LONG}")
        asked_while_down = len(first.asked)
        state = router.servers()[first.url]
        first.health = 200

        eventually(lambda: router.servers()[first.url], {"up": True, "version": "0.32.0"})
        for number in range(3, 6):
            router.complete(f"{number} {LONG}")

        assert asked_while_down == 0
        assert state == {"up": False, "cause": "answered GET /health with status 503"}
        assert first.asked


def test_requests_at_a_server_that_goes_down_are_sent_to_another_one(
    vllm: Callable[[str], FakeVllm],
) -> None:
    first, second = vllm("first"), vllm("second")
    with running([], [first, second]) as router:
        first.always = hang
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(router.complete()))
        asking.start()
        assert first.came.acquire(timeout=SOON_S)

        first.health = 500

        asking.join(SOON_S)
        assert answers[0].json() == whole_of(second)


def test_a_server_that_hangs_is_down_after_three_checks(
    vllm: Callable[[str], FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "CHECK_S", 0.5)
    monkeypatch.setattr(vllm_server, "CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(vllm_server, "CHECK_EVERY_MAX_S", 0.01)
    decode = vllm("decode")
    with running([], [decode]) as router:
        # A check that a busy machine delays is missed, too; not each time.
        after_two = any(router.is_up_after_misses(decode, 2) for _ in range(5))
        decode.misses = 1_000_000
        eventually(lambda: router.servers()[decode.url]["up"], wanted=False)
        cause = router.servers()[decode.url]["cause"]

        decode.misses = 0

        eventually(lambda: router.servers()[decode.url]["up"], wanted=True)
        assert after_two
        assert cause == "did not answer GET /health within 0.5 s"


def test_a_server_that_does_not_answer_checks_is_asked_if_there_is_no_other(
    vllm: Callable[[str], FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "CHECK_S", 0.2)
    monkeypatch.setattr(vllm_server, "CHECK_EVERY_S", 0.01)
    decode = vllm("decode")
    with running([], [decode]) as router:
        decode.misses = 1_000_000
        eventually(lambda: router.servers()[decode.url]["up"], wanted=False)

        answer = router.complete()

        decode.misses = 0
        assert (answer.status_code, answer.json()) == (200, whole_of(decode))


def test_a_server_that_is_no_vllm_is_named_and_not_used(
    vllm: Callable[[str], FakeVllm],
) -> None:
    other, decode = vllm("other"), vllm("decode")
    other.version = {"hello": "world"}
    with running([other], [decode]) as router:
        answer = router.complete()

        assert answer.json() == whole_of(decode)
        assert not other.asked
        cause = "is no vLLM server: GET /version does not say vLLM's version"
        assert router.servers()[other.url] == {"up": False, "cause": cause}


@pytest.mark.parametrize("host", ["a..b", "nobody.invalid"])
def test_a_server_whose_name_leads_nowhere_is_down(
    vllm: Callable[[str], FakeVllm], host: str
) -> None:
    nowhere, decode = SimpleNamespace(url=f"http://{host}:80"), vllm("decode")
    with running([nowhere], [decode]) as router:
        state = router.servers()[nowhere.url]

        assert not state["up"]
        assert state["cause"].startswith("cannot be reached: ")
        assert router.complete().json() == whole_of(decode)
