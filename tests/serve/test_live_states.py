"""The live page in states that a server is seldom in: what it shows of a document, in a browser.

The document is that of a real server, with a prefill and a decode instance over host memory, a disk
and a store that others share; each test changes what it is about.
"""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette

from penstock_serve.server import errors
from penstock_serve.server.guard import Guard
from penstock_serve.server.http import HttpServer
from penstock_serve.server.live_feed import LiveFeed
from penstock_serve.server.server_socket import address_of, listen
from tests.serve import browser
from tests.serve.conftest import SOON_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.browser import BrowserPage

RECORDED = Path(__file__).parents[1] / "observe" / "pages" / "live-server.json"
HOSTILE = "<img src=x onerror=document.title='hurt'>" + "x" * 200
pytestmark = pytest.mark.skipif(
    not browser.PROGRAM, reason="there is no chromium: apt-get install chromium"
)

TOO_WIDE = """[...document.querySelectorAll('#cards *')].filter((each) => each.clientWidth
  && each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).overflowX !== 'auto'
  && getComputedStyle(each).display !== 'inline').map((each) => each.outerHTML.slice(0, 200))"""
"""Elements whose content does not fit, and that cannot be scrolled."""


class Shown:
    """A page over a document that a test may change."""

    def __init__(self) -> None:
        self.live: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
        self._bound = listen("127.0.0.1", 0)
        self.address = address_of(self._bound)
        self._ready = threading.Event()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(SOON_S)

    def instance(self, name: str) -> Any:
        return next(each for each in self.live["instances"] if each["instance"] == name)

    def tick(self) -> None:
        """Time goes on; counters are compared with those of an earlier time."""
        self.live["now"] += 1

    def fall_silent(self) -> None:
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    def stop(self) -> None:
        self.go_on()
        self._loop.call_soon_threadsafe(self._http.stop)
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()

    async def _gather(self) -> bytes:
        await asyncio.to_thread(self._goes_on.wait, SOON_S)
        return json.dumps(self.live).encode()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.feed = feed = LiveFeed(self._gather, Guard(""), every_s=0.05)
        app = Starlette(routes=feed.routes(), exception_handlers=errors.HANDLERS)
        self._http = HttpServer(
            app,
            connections_max=10,
            header_s=SOON_S,
            drain_s=SOON_S,
            on_stop=feed.close,
            on_overtime=lambda: None,
        )
        self._ready.set()
        await self._http.serve(sockets=[self._bound])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserPage]:
    with browser.browsing(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def shown(page: BrowserPage) -> Iterator[Shown]:
    """Opened in the browser; at the end, nothing was asked of others, and no error written."""
    with showing() as found:
        page.requests.clear()
        page.errors.clear()
        page.show(width=1024)
        page.open(found.address)
        page.wait("document.documentElement.dataset.updates > 0")
        yield found
        assert page.errors == []
        elsewhere = [
            each for each in page.requests if not each.startswith((found.address, "data:"))
        ]
        assert elsewhere == []
        page.open("about:blank")


@contextmanager
def showing() -> Iterator[Shown]:
    found = Shown()
    try:
        yield found
    finally:
        found.stop()


def titles(page: BrowserPage, selector: str) -> list[str]:
    found: list[str] = page.run(
        f"[...document.querySelectorAll('{selector}')].map((each) => each.title)"
    )
    return found


def test_flows_are_drawn_from_the_tier_that_blocks_go_through(
    shown: Shown, page: BrowserPage
) -> None:
    for hop in shown.instance("decode-0")["cache"]["hops"]:
        if (hop["source"], hop["target"]) == ("host", "shared"):
            hop["bytes_copied"] += 5_000_000_000
            hop["blocks_copied"] += 1000
    shown.tick()

    page.wait("document.querySelector('#card-tiers .flow.on')")

    assert titles(page, "#card-tiers .flow.on") == ["host to shared: 5.00 GB/s"]
    assert [each.partition(":")[0] for each in titles(page, "#card-tiers .flow")] == [
        *("device to host", "host to device", "host to disk", "disk to host"),
        *("host to shared", "shared to host"),
    ]


def test_times_are_rounded_before_they_are_divided(shown: Shown, page: BrowserPage) -> None:
    times = page.run("[119.7, 59.96, 59.94, 9.996, 61, 3599.6].map(seconds)")

    assert times == ["2 min 0 s", "1 min 0 s", "59.9 s", "10.0 s", "1 min 1 s", "60 min 0 s"]
    assert shown.live


def test_only_prompts_of_one_length_are_compared(shown: Shown, page: BrowserPage) -> None:
    traffic = shown.live["traffic"]
    traffic["warm"] = {"count": 60, "p50_s": 0.01, "p95_s": 0.02}
    traffic["cold"] = {"count": 60, "p50_s": 0.359, "p95_s": 0.5}
    shown.tick()
    page.wait("document.getElementById('card-cold').textContent.includes('359 ms')")
    unlike = page.run("document.getElementById('card-warm').textContent")

    alike = {"tokens_min": 2048, "tokens_max": 4095, "warm_count": 5, "cold_count": 6}
    traffic["alike"] = {**alike, "warm_p50_s": 0.1, "cold_p50_s": 0.31}
    shown.tick()
    sooner = "3.1 times sooner, of prompts of 2,048 to 4,095 tokens"
    page.wait(f"document.getElementById('card-warm').textContent.includes('{sooner}')")

    assert "sooner" not in unlike


def test_rates_and_the_time_between_tokens_are_shown(shown: Shown, page: BrowserPage) -> None:
    traffic = shown.live["traffic"]
    traffic["rates"] = {"requests_per_s": 2.54, "output_tokens_per_s": 1321.4}
    traffic["between"] = {"count": 9, "p50_s": 0.012, "p95_s": 0.03}
    traffic["outcomes"] = {"answered": 60, "refused": 2, "failed": 1}
    traffic["slices"][0] |= {"generated": 13214, "between_p50_s": 0.012}
    shown.tick()
    page.wait("document.getElementById('card-requests-s')")

    texts = {
        name: page.run(f"document.querySelector('#card-{name} b').textContent")
        for name in ("requests-s", "tokens-s", "between", "not-answered")
    }

    assert texts == {
        "requests-s": "2.5",
        "tokens-s": "1,321",
        "between": "12 ms",
        "not-answered": "3",
    }
    assert page.run("document.querySelectorAll('.spark').length") == 3


def test_no_table_is_cut_off_on_a_phone(shown: Shown, page: BrowserPage) -> None:
    page.show(width=390)
    page.fits(390)
    cut = """[...document.querySelectorAll('.scroll')].filter((each) => each.clientWidth
      && each.scrollWidth > each.clientWidth + 1).map((each) => each.textContent.slice(0, 80))"""

    assert page.run(cut) == []
    names = page.run("document.querySelector('#card-instances td:nth-child(2)').dataset.name")
    assert names == "role"
    assert shown.live


def test_axes_have_round_numbers(shown: Shown, page: BrowserPage) -> None:
    shown.live["traffic"]["slices"][0]["prompt_tokens"] = 7800
    shown.tick()
    page.wait("document.getElementById('card-tokens').textContent.includes('8,000 prompt tokens')")
    labels = (
        "[...document.querySelectorAll('#card-tokens svg text')].map((each) => each.textContent)"
    )
    texts = page.run(labels)

    assert texts[1:5] == ["2,000", "4,000", "6,000", "8,000 prompt tokens in 10 s"]


def test_a_store_that_does_not_tell_its_size_has_no_share_of_it(
    shown: Shown, page: BrowserPage
) -> None:
    tanks = "[...document.querySelectorAll('.tank b')].map((each) => each.textContent)"

    device, host, disk, shared = page.run(tanks)

    assert all(each.endswith(" %") for each in (device, host, disk))
    assert shared == "2.29 MiB"
    assert "0 B" not in page.run("document.getElementById('card-tiers').textContent")
    assert shown.live["instances"]


def test_without_an_instance_tiers_keep_their_colours_and_it_says_so(
    shown: Shown, page: BrowserPage
) -> None:
    colours = """Object.fromEntries([...document.querySelectorAll('#card-tokens .key')].map(
      (each) => [each.childNodes[1].data, getComputedStyle(each.firstChild).backgroundColor]))"""
    before = page.run(colours)
    shown.live["instances"] = []
    shown.live["health"] = {"state": "down", "status": "loading", "why": ["both ended"]}

    page.wait("document.getElementById('health').textContent === 'Not serving'")

    after = page.run(colours)
    assert after == before
    assert len(set(after.values())) == len(after)
    for name in ("tiers", "misses"):
        text = page.run(f"document.getElementById('card-{name}').textContent")
        assert "No instance answers now." in text


def test_handoffs_are_shown_as_they_happen(shown: Shown, page: BrowserPage) -> None:
    card = "document.getElementById('card-handoffs')"
    assert page.run(f"{card}.querySelector('.flow').textContent") == "idle"
    decode = shown.instance("decode-0")
    decode["claiming"] = 2
    decode["handed_bytes"] += 12_000_000
    newest = {**shown.live["traffic"]["requests"][0], "request": "cmpl-newest", "prompt_tokens": 64}
    shown.live["traffic"]["requests"].insert(0, {**newest, "found": {"handed over": 48}})
    shown.tick()

    page.wait(f"{card}.querySelector('.flow.on')")

    assert titles(page, "#card-handoffs .flow.on") == ["prefill to decode: 12.0 MB/s"]
    text = page.run(f"{card}.innerText")
    assert "2 being handed over" in text
    assert "48 of 64" in text
    assert titles(page, "#card-handoffs button")[0] == "cmpl-newest"
    page.show(width=1024, motion="reduce")
    assert page.run(f"getComputedStyle({card}.querySelector('.flow.on line')).animationName") == (
        "none"
    )


def test_a_server_without_a_request_says_so(shown: Shown, page: BrowserPage) -> None:
    shown.live["traffic"].update(requests=[], outcomes={}, slices=[])

    page.wait("document.getElementById('outcomes').textContent === 'None has ended yet.'")

    assert "No request had its first token" in page.run(
        "document.getElementById('card-tokens').textContent"
    )


def test_any_name_and_any_number_fits_and_is_text(shown: Shown, page: BrowserPage) -> None:
    live = shown.live
    live["model"] = live["health"]["why"] = HOSTILE
    live["health"] = {"state": "degraded", "status": "ok", "why": [HOSTILE]}
    live["traffic"]["requests"][0].update(request=HOSTILE, outcome=HOSTILE, prompt_tokens=10**9)
    live["traffic"]["outcomes"] = {"answered": 10**12, HOSTILE: 1}
    live["traffic"]["slices"][0].update(prompt_tokens=10**12)
    for each in live["instances"]:
        each.update(running=10**6, waiting=10**6, loading=10**6, claiming=10**6)
        each["handed_bytes"] = each["handed_parts_verified"] = 10**15
        each["cache"]["misses"][HOSTILE] = 10**9
        for tier in each["cache"]["tiers"]:
            tier.update(slots=10**9, free=1, held=10**9 - 1)
    page.wait("document.getElementById('health').textContent === 'Degraded'")

    for width in (390, 1024, 1920):
        page.show(width=width)
        page.fits(width)
        assert page.run(TOO_WIDE) == []

    assert page.run("document.querySelectorAll('img').length") == 0
    assert "hurt" not in page.run("document.title").partition("<img")[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(shown: Shown, page: BrowserPage, scheme: str) -> None:
    shown.live["health"] = {"state": "degraded", "status": "ok", "why": ["something is wrong"]}
    shown.live["traffic"]["requests"][0]["outcome"] = "failed"
    page.wait("document.querySelector('#requests .down')")

    page.show(width=1024, scheme=scheme)

    page.wait(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
    assert page.unreadable() == []


def test_a_page_that_nobody_sees_asks_for_nothing(shown: Shown, page: BrowserPage) -> None:
    seen = "Object.defineProperty(document, 'hidden', {{ configurable: true, value: {} }})"
    told = "document.dispatchEvent(new Event('visibilitychange'))"

    page.run(f"{seen.format('true')}; {told}")

    eventually(lambda: shown.feed._viewers, 0)
    updates = page.run("document.documentElement.dataset.updates")
    page.run(f"{seen.format('false')}; {told}")
    page.wait(f"document.documentElement.dataset.updates > {updates}")


def test_a_connection_that_nothing_comes_over_is_no_connection(
    shown: Shown, page: BrowserPage
) -> None:
    health = "document.getElementById('health').textContent"
    page.run("silent_s = 0.5")
    # What was waited for before may take as long as it could before.
    seen = int(page.run("document.documentElement.dataset.updates"))
    page.wait(f"document.documentElement.dataset.updates > {seen + 1}")
    shown.fall_silent()

    page.wait(f"{health} === 'No connection'")
    page.wait("document.getElementById('fresh').textContent.startsWith('nothing came for 0.5 s')")
    assert page.run("document.body.className") == "stale"
    shown.go_on()

    page.wait(f"{health} === 'Healthy'")
    assert page.run("document.body.className") == ""
