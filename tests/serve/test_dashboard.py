"""`penstock dashboard`: the live page over the metrics of other engines, asked over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cli.app import run
from penstock_serve.server import dashboard
from penstock_serve.server.dashboard import MetricsWatch
from penstock_serve.server.vllm_server import ServerUrl
from tests.serve import browser
from tests.serve.conftest import SOON_S

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES = Path(__file__).parents[1] / "observe" / "pages"


class Engine(ThreadingHTTPServer):
    """A server with the recorded page of an engine."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.page = b""
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def show(self, name: str) -> None:
        self.page = (PAGES / name).read_bytes()


class _Answer(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        known = self.path == "/metrics"
        self.send_response(self.server.status if known else 404)
        self.send_header("content-length", str(len(self.server.page)))
        self.end_headers()
        self.wfile.write(self.server.page)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving_page(name: str) -> Iterator[Engine]:
    with Engine() as engine:
        engine.show(name)
        thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield engine
        finally:
            engine.shutdown()
            thread.join(SOON_S)


@pytest.fixture
def vllm() -> Iterator[Engine]:
    with serving_page("vllm.txt") as engine:
        yield engine


def watch_of(*urls: str) -> MetricsWatch:
    return MetricsWatch([ServerUrl.read("--metrics", each) for each in urls])


async def asked(watch: MetricsWatch) -> Any:
    await watch.ask()
    return json.loads(await watch.gather())


def test_the_document_has_what_the_counters_grew_by(vllm: Engine) -> None:
    async def look() -> Any:
        watch = watch_of(vllm.url)
        first = await asked(watch)
        vllm.show("vllm-later.txt")
        return first, await asked(watch)

    first, then = asyncio.run(look())

    assert first["kind"] == "metrics"
    assert first["health"] == {"state": "ok", "status": "ok", "why": []}
    assert first["traffic"]["slices"] == []
    [server] = then["servers"]
    assert (server["up"], server["engine"], server["model"]) == (True, "vLLM", "model")
    assert server["prompt_per_s"] > 0
    found = [each["found"] for each in then["traffic"]["slices"]]
    assert sum(each["host"] for each in found) == 480
    assert sum(each["prompt_tokens"] for each in then["traffic"]["slices"]) == 5000
    assert then["traffic"]["warm"]["count"] == then["traffic"]["cold"]["count"] == 10
    assert then["traffic"]["warm"]["p50_s"] <= then["traffic"]["cold"]["p95_s"]
    assert [tier["name"] for tier in then["tiers"]] == ["device", "host"]


def test_what_came_is_counted_once_however_many_ask_at_a_time(vllm: Engine) -> None:
    """The page asks when it is looked at, beside the one that asks again and again."""

    async def look() -> Any:
        watch = watch_of(vllm.url)
        await watch.ask()
        vllm.show("vllm-later.txt")
        watch.ask_soon(math.inf)
        return (await asyncio.gather(*(asked(watch) for _ in range(3))))[-1]

    slices = asyncio.run(look())["traffic"]["slices"]

    assert sum(each["prompt_tokens"] for each in slices) == 5000


def test_an_engine_that_began_anew_is_counted_from_nothing(vllm: Engine) -> None:
    async def look() -> Any:
        watch = watch_of(vllm.url)
        vllm.show("vllm-later.txt")
        await asked(watch)
        vllm.show("vllm.txt")
        return await asked(watch)

    slices = asyncio.run(look())["traffic"]["slices"]

    assert sum(each["prompt_tokens"] for each in slices) == 2000


def test_who_is_down_is_shown_as_down_and_why(
    vllm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        serving_page("sglang.txt") as failing,
        serving_page("sglang.txt") as strange,
    ):
        failing.status = 500
        strange.page = b"<html>another kind of server</html>"
        urls = [
            vllm.url,
            "http://127.0.0.1:9",
            f"http://127.0.0.1:{silent.getsockname()[1]}",
            failing.url,
            strange.url,
        ]
        # Who answers must do so in time, which a busy machine may keep it from doing.
        for scrape_s in (1.0, 10.0, 60.0):
            monkeypatch.setattr(dashboard, "SCRAPE_S", scrape_s)
            live = asyncio.run(asked(watch_of(*urls)))
            if sum("did not answer" in each["cause"] for each in live["servers"]) == 1:
                break

    assert live["health"]["state"] == "degraded"
    assert [each["up"] for each in live["servers"]] == [True, False, False, False, False]
    causes = [each["cause"] for each in live["servers"][1:]]
    assert causes[0] == "cannot be reached: Connection refused"
    assert "did not answer" in causes[1]
    assert causes[2] == "answered GET /metrics with status 500"
    assert "no metrics that can be read" in causes[3]
    assert live["health"]["why"] == [
        f"{url} {cause}" for url, cause in zip(urls[1:], causes, strict=True)
    ]


def test_without_any_server_it_is_down_and_comes_back_with_one(vllm: Engine) -> None:
    async def look() -> Any:
        watch = watch_of(vllm.url)
        vllm.status = 503
        down = await asked(watch)
        vllm.status = 200
        return down, await asked(watch)

    down, up = asyncio.run(look())

    assert down["health"]["state"] == "down"
    assert down["tiers"] == []
    assert up["health"]["state"] == "ok"


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:port", "http://", "http://a b", ""])
def test_what_is_no_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dashboard", "--metrics", url]) == 2
    assert "--metrics" in capsys.readouterr().err


def test_a_server_that_would_count_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    urls = ("--metrics", "127.0.0.1:8000", "--metrics", "http://127.0.0.1:8000/metrics")

    assert run(["dashboard", *urls]) == 2
    assert capsys.readouterr().err == (
        "penstock: --metrics: has http://127.0.0.1:8000 twice, must have each server once\n"
    )


def test_a_server_that_comes_back_is_logged_as_its_going_was(
    vllm: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "SCRAPE_S", SOON_S)
    caplog.set_level("INFO", logger=dashboard.logger.name)

    async def look() -> None:
        watch = watch_of(vllm.url)
        await watch.ask()
        vllm.status = 503
        await watch.ask()
        vllm.status = 200
        await watch.ask()
        await watch.ask()

    asyncio.run(look())

    assert [each.getMessage().partition(" cause=")[0] for each in caplog.records] == [
        f"server up: url={vllm.url}",
        f"server down: url={vllm.url}",
        f"server up: url={vllm.url}",
    ]


def test_of_a_long_line_that_is_no_metric_the_beginning_is_shown(
    vllm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "SCRAPE_S", SOON_S)
    vllm.page = b"<html>" + b"x" * 100_000

    [cause] = asyncio.run(asked(watch_of(vllm.url)))["health"]["why"]

    assert "no metrics that can be read" in cause
    assert "<html>" in cause
    assert len(cause) < 1000


def test_the_status_of_a_dashboard_says_what_to_do_instead(
    vllm: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    with dashboard_of(vllm.url) as address:
        assert run(["status", address]) == 3

    assert "is a penstock dashboard: open it in a browser" in capsys.readouterr().err


@contextmanager
def dashboard_of(*urls: str) -> Iterator[str]:
    options = [word for url in urls for word in ("--metrics", url)]
    command = [sys.executable, "-m", "penstock.cli.entry", "dashboard", *options, "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        servers = "1 server" if len(urls) == 1 else f"{len(urls)} servers"
        assert line.startswith(f"penstock: dashboard of {servers} at http://127.0.0.1:")
        yield line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON_S) == 0
        process.stdout.close()


@pytest.mark.skipif(not browser.PROGRAM, reason="there is no chromium: apt-get install chromium")
def test_the_page_shows_other_engines_in_a_browser(vllm: Engine, tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    with serving_page("sglang.txt") as sglang, browser.browsing(tmp_path) as page:
        with dashboard_of(f"{vllm.url}/metrics", sglang.url, nobody) as address:
            page.open(address)
            page.wait("document.querySelectorAll('#card-servers tbody tr').length === 3")
            page.wait("document.getElementById('health').textContent === 'Degraded'")
            page.wait("document.querySelectorAll('#card-servers .ok').length === 2")
            assert nobody in page.run("document.getElementById('why').textContent")
            assert page.run("document.querySelectorAll('.tank').length") == 2
            vllm.show("vllm-later.txt")
            page.wait("document.querySelector('#card-tokens rect')")
            assert "host" in page.run("document.querySelector('#card-tokens').textContent")
            assert page.run("document.getElementById('card-requests')") is None
            for width in (400, 800, 1400):
                page.show(width=width, scheme="dark" if width == 800 else "light")
                page.fits(width)
            assert page.errors == []
        # Without a connection, what is left is marked as old, also when it is drawn anew.
        gone = "document.getElementById('health').textContent === 'No connection'"
        page.wait(gone)
        page.show(width=500)
        page.wait("document.querySelector('#card-tokens svg').viewBox.baseVal.width < 500")
        assert page.run(gone)
        assert page.run("document.body.className") == "stale"
