"""The live page: what it says, who may see it, and what it costs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import signal
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.requests import Request

from penstock.cache.explain import MissReason
from penstock_serve.observe.miss_reasons import MISS_ADVICE
from penstock_serve.server import dashboard
from penstock_serve.server.fields import BadRequest
from penstock_serve.server.guard import Guard
from penstock_serve.server.live_feed import VIEWERS_MAX, LiveFeed
from tests.serve import browser
from tests.serve.conftest import SOON_S, eventually, pids_of, serving
from tests.serve.vllm_servers import LONG, FakeVllm, RunningRouter, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.conftest import Running

KEY = "a-key-of-the-tests"
PAGES = Path(__file__).parents[1] / "observe" / "pages"
PROMPT = "a prompt that is long enough for some blocks, and for some more of them " * 2


@pytest.fixture(scope="module")
def locked(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a key, one prefill and one decode instance."""
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(KEY)
    options = ("--prefill", "1", "--decode", "1", "--blocks", "64", "--block-tokens", "8")
    with serving(model_folder, *options, "--api-key-file", str(file)) as found:
        found.client.headers["authorization"] = f"Bearer {KEY}"
        yield found


@contextmanager
def events_of(client: httpx.Client) -> Iterator[Iterator[Any]]:
    with client.stream("GET", "/live/events") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        lines = (line for line in answer.iter_lines() if line)
        yield (json.loads(line.removeprefix("data: ")) for line in lines)


def test_who_asks_for_the_head_of_the_events_gets_it_and_is_no_viewer(server: Running) -> None:
    connection = HTTPConnection(server.address.removeprefix("http://"), timeout=SOON_S)
    try:
        connection.request("HEAD", "/live/events")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
        answer.read()

        # The answer has ended, so the connection can be used again.
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
    finally:
        connection.close()


def test_a_document_says_what_happened_to_requests(server: Running) -> None:
    def last(count: int) -> list[str]:
        found = server.client.get("/live").json()["traffic"]["requests"]
        return [each["request"] for each in found[:count]]

    # A document may be a second old: older than the requests of the test before this one.
    first = server.complete("nobody has asked before this")
    eventually(lambda: last(1), [first["id"]])
    before = server.client.get("/live").json()
    answer = server.complete(PROMPT)
    again = server.complete(PROMPT)

    eventually(lambda: last(2), [again["id"], answer["id"]])
    live = server.client.get("/live").json()
    assert live["kind"] == "server"
    assert live["health"] == {"state": "ok", "status": "ok", "why": []}
    assert [each["instance"] for each in live["instances"]] == ["instance-0"]
    newest = live["traffic"]["requests"][0]
    assert newest["outcome"] == "answered"
    assert newest["prompt_tokens"] == again["usage"]["prompt_tokens"]
    assert sum(newest["found"].values()) == again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < newest["first_token_s"] <= newest["took_s"]
    assert newest["generated"] == again["usage"]["completion_tokens"]
    answered = live["traffic"]["outcomes"]["answered"]
    assert answered == before["traffic"]["outcomes"].get("answered", 0) + 2
    assert live["traffic"]["warm"]["count"] > 0


def test_documents_come_as_they_change(server: Running) -> None:
    with events_of(server.client) as events:
        first = next(events)
        answer = server.complete("another prompt for the stream")
        ids = [each["request"] for each in first["traffic"]["requests"]]
        assert answer["id"] not in ids
        assert any(
            answer["id"] in [each["request"] for each in live["traffic"]["requests"]]
            for live in events
        )


def test_the_page_has_nothing_from_elsewhere_and_allows_nothing_else(server: Running) -> None:
    page = server.client.get("/")

    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    for element in ("script", "style"):
        [inline] = re.findall(rf"<{element}>(.*?)</{element}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page.text)
    assert not re.findall(r"<[^>]+ style=|<[^>]+ on[a-z]+=", page.text.partition("<script>")[0])


def test_with_a_key_the_page_has_no_data_and_the_data_needs_the_key(locked: Running) -> None:
    with httpx.Client(base_url=locked.address, timeout=SOON_S) as stranger:
        page = stranger.get("/")
        assert page.status_code == 200
        assert 'data-key="needed"' in page.text
        assert "small-model" not in page.text
        for path in ("/live", "/live/events", f"/live?key={KEY}"):
            refused = stranger.get(path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
    assert locked.client.get("/live").status_code == 200
    with events_of(locked.client) as events:
        assert next(events)["model"] == "small-model"


def test_prompts_that_were_handed_over_are_counted_as_such(locked: Running) -> None:
    answer = locked.complete("nobody has asked for this before, so it is handed over " * 3)

    def found() -> Any:
        requests = locked.client.get("/live").json()["traffic"]["requests"]
        return next((each["found"] for each in requests if each["request"] == answer["id"]), None)

    eventually(found, {"handed over": answer["usage"]["prompt_tokens"]})
    assert answer["usage"]["timings_ms"]["handed_over"] > 0
    seconds = re.search(
        r'penstock_handed_seconds_total\{instance="decode-0"\} (\S+)',
        locked.client.get("/metrics").text,
    )
    assert seconds is not None
    assert float(seconds[1]) > 0


@pytest.mark.long
def test_an_instance_that_died_is_a_reason_until_it_is_back(locked: Running) -> None:
    def health() -> Any:
        return locked.client.get("/live").json()["health"]

    [pid] = pids_of("prefill-0", locked)[:1]
    with events_of(locked.client) as events:
        assert next(events)["health"]["state"] == "ok"
        os.kill(pid, signal.SIGKILL)
        assert any(live["health"]["state"] == "degraded" for live in events)
    eventually(lambda: health()["state"], "ok")


def test_a_paused_server_is_down_and_says_so(server: Running) -> None:
    server.client.post("/admin/pause", json={}).raise_for_status()
    try:
        eventually(
            lambda: server.client.get("/live").json()["health"],
            {"state": "down", "status": "paused", "why": ["the server is paused"]},
        )
    finally:
        server.client.post("/admin/resume", json={}).raise_for_status()
    eventually(lambda: server.client.get("/live").json()["health"]["state"], "ok")


@pytest.mark.long
def test_a_server_that_stops_does_not_wait_for_viewers(model_folder: Path) -> None:
    options = ("--blocks", "64", "--host-gib", "0", "--drain-s", "3600")
    with serving(model_folder, *options) as found, events_of(found.client) as events:
        next(events)
        found.process.send_signal(signal.SIGTERM)
        for _ in events:
            pass
        assert found.process.wait(SOON_S) == 0


def test_every_reason_of_a_miss_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "why-misses.md").read_text(encoding="utf-8")

    assert MISS_ADVICE.keys() == set(MissReason)
    assert not [reason for reason in MISS_ADVICE if f"| `{reason.value}` |" not in page]


# The feed alone.


class Viewer:
    """One who looks, without a network."""

    def __init__(self, feed: LiveFeed) -> None:
        self.feed = feed
        self.seen: asyncio.Queue[bytes] = asyncio.Queue()
        self.gone = asyncio.Event()

    async def look(self) -> None:
        answer = await self.feed.events(HTTP)
        await answer({}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.seen.put_nowait(message.get("body", b""))


HTTP = Request({"type": "http", "method": "GET", "headers": []})


def test_documents_are_made_once_for_all_viewers_and_not_when_nobody_looks() -> None:
    made = 0

    async def gather() -> bytes:
        nonlocal made
        made += 1
        return f"{made:09}".encode()

    async def look() -> None:
        feed = LiveFeed(gather, Guard(""), every_s=0.05)
        assert made == 0
        viewers = [Viewer(feed) for _ in range(VIEWERS_MAX)]
        tasks = [asyncio.create_task(each.look()) for each in viewers]
        for each in viewers:
            while await asyncio.wait_for(each.seen.get(), SOON_S) < b"data: 000000003\n\n":
                pass
        for each in viewers:
            each.gone.set()
        await asyncio.gather(*tasks)
        before = made
        await asyncio.sleep(0.5)
        assert made == before

    asyncio.run(look())


def test_one_viewer_too_many_is_refused_and_another_one_may_take_its_place() -> None:
    async def gather() -> bytes:
        return b"{}"

    async def look() -> None:
        feed = LiveFeed(gather, Guard(""))
        viewers = [Viewer(feed) for _ in range(VIEWERS_MAX)]
        tasks = [asyncio.create_task(each.look()) for each in viewers]
        for each in viewers:
            await asyncio.wait_for(each.seen.get(), SOON_S)
        refused = await feed.events(HTTP)
        assert getattr(refused, "status_code", 0) == 429
        viewers[0].gone.set()
        await tasks[0]
        another = Viewer(feed)
        tasks.append(asyncio.create_task(another.look()))
        await asyncio.wait_for(another.seen.get(), SOON_S)
        feed.close()
        await asyncio.wait_for(asyncio.gather(*tasks), SOON_S)

    asyncio.run(look())


def test_a_key_is_needed_before_anything_is_made() -> None:
    async def gather() -> bytes:
        raise AssertionError

    async def look() -> None:
        feed = LiveFeed(gather, Guard("secret"))
        for path in (feed.now, feed.events):
            with pytest.raises(BadRequest, match="API key"):
                await path(HTTP)

    asyncio.run(look())


# The router of vLLM servers.


def test_a_router_that_stops_does_not_wait_for_viewers(caplog: pytest.LogCaptureFixture) -> None:
    decode = FakeVllm("decode")
    try:
        router = RunningRouter([], [decode], "", drain_s=SOON_S)
        router.start()
        with (
            httpx.Client(base_url=router.address, timeout=SOON_S) as viewer,
            events_of(viewer) as events,
        ):
            assert next(events)["kind"] == "router"
            router.stop()
            for _ in events:  # Those of before the stop; the stream has ended.
                pass
        assert "answers cut off" not in caplog.text
    finally:
        decode.stop()


def test_the_router_says_how_its_servers_are() -> None:
    prefill, decode = FakeVllm("prefill"), FakeVllm("decode")
    try:
        with running([prefill], [decode]) as router:
            assert "<title>Penstock</title>" in router.client.get("/").text
            router.complete()
            router.stream("What is this? " + LONG)

            def outcomes() -> Any:
                return router.client.get("/live").json()["traffic"]["outcomes"]

            eventually(outcomes, {"answered": 2})
            live = router.client.get("/live").json()
            assert live["kind"] == "router"
            assert live["health"] == {"state": "ok", "status": "ok", "why": []}
            assert [(each["role"], each["up"]) for each in live["servers"]] == [
                ("prefill", True),
                ("decode", True),
            ]
            assert live["prompts"] == {"prefill": 2}
            assert live["traffic"]["warm"]["count"] == 2
            whole, streamed = live["traffic"]["requests"][::-1]
            assert (whole["request"], whole["prompt_tokens"]) == ("cmpl-decode", 40)
            assert whole["by"] == streamed["by"] == decode.url
            prefill.health = 500
            eventually(lambda: router.client.get("/live").json()["health"]["state"], "degraded")
    finally:
        prefill.stop()
        decode.stop()


def test_the_router_says_where_prompt_tokens_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "SCRAPE_EVERY_S", 0.1)
    prefill, decode = FakeVllm("prefill"), FakeVllm("decode")
    try:
        # What the prefill server counts is on the page of the decode server, too.
        prefill.page = decode.page = (PAGES / "vllm.txt").read_bytes()
        with running([prefill], [decode]) as router:

            def live() -> Any:
                return router.client.get("/live").json()

            eventually(lambda: [each["name"] for each in live()["tiers"]], ["device", "host"])
            prefill.page = decode.page = (PAGES / "vllm-later.txt").read_bytes()
            eventually(lambda: sum(each["prompt_tokens"] for each in live()["sources"]), 5000)
            assert sum(each["found"]["host"] for each in live()["sources"]) == 480
    finally:
        prefill.stop()
        decode.stop()


# In a browser.


@pytest.mark.skipif(not browser.PROGRAM, reason="there is no chromium: apt-get install chromium")
def test_the_page_of_a_router_renders_and_has_no_console_error(tmp_path: Path) -> None:
    decode = FakeVllm("decode")
    decode.page = (PAGES / "vllm.txt").read_bytes()
    try:
        with running([], [decode]) as router, browser.browsing(tmp_path) as page:
            router.complete()
            page.open(f"{router.address}/")
            page.wait("document.querySelectorAll('#card-servers tbody tr').length === 1")
            page.wait("document.querySelectorAll('#requests tr').length === 1")
            page.wait("document.querySelectorAll('#card-tiers .tank').length === 2")
            for width in (390, 1024, 1920):
                page.show(width=width, scheme="dark" if width == 1024 else "light")
                page.fits(width)
            assert page.unreadable() == []
            assert page.errors == []
            assert all(each.startswith((router.address, "data:")) for each in page.requests)
    finally:
        decode.stop()


@pytest.mark.skipif(not browser.PROGRAM, reason="there is no chromium: apt-get install chromium")
def test_the_page_renders_updates_and_has_no_console_error(locked: Running, tmp_path: Path) -> None:
    answer = locked.complete(PROMPT)
    with browser.browsing(tmp_path) as page:
        page.open(f"{locked.address}/")
        page.wait("document.getElementById('health').textContent === 'Locked'")
        assert page.run("document.getElementById('cards').childElementCount") == 0
        page.run("document.getElementById('key').value = 'a-wrong-key'")
        page.press("Enter")
        page.wait("document.getElementById('refused').textContent")
        assert page.run("document.getElementById('cards').childElementCount") == 0
        # The browser itself notes the answer 401.
        assert [each for each in page.errors if "401" not in each] == []
        page.errors.clear()
        page.run(f"document.getElementById('key').value = '{KEY}'")
        page.press("Enter")
        page.wait("document.getElementById('health').textContent === 'Healthy'")
        assert page.run("location.href") == f"{locked.address}/"
        assert page.run("document.querySelectorAll('.tank').length") == 2
        page.wait("document.querySelector('#card-tokens rect')")
        later = locked.complete("what the page has not seen yet")
        page.wait(f"document.querySelector('#requests button').title === '{later['id']}'")

        # Without a mouse.
        page.run(f"document.querySelector('#requests [title=\"{answer['id']}\"]').focus()")
        page.press("Enter")
        page.wait("document.querySelector('#story pre')")
        assert "acquired" in page.run("document.querySelector('#story pre').textContent")
        assert page.run("document.querySelectorAll('#story rect').length") > 1
        page.press("Escape")
        page.wait("!document.getElementById('story').open")
        for width in (360, 820, 1440):
            page.show(width=width, scheme="dark" if width == 820 else "light")
            page.fits(width)
        assert page.picture().startswith(b"\x89PNG")
        assert page.errors == []
        assert all(each.startswith((locked.address, "data:")) for each in page.requests)
