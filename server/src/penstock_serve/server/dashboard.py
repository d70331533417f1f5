"""`penstock dashboard`: the live page for engines that have none, from their `/metrics`.

    every 5 s   GET URL/metrics of each ─→ what their counters grew by ─→ slices of ten seconds
    viewers     ─→ LiveFeed ─→ the last document

Servers are asked whether somebody looks or not, as Prometheus does, so that the page has a past.

The one rule: a server that does not answer in time is shown as down, and delays no other.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import JSONResponse
from starlette.routing import Route

from penstock import StopSignal, __version__
from penstock_serve.observe.engine_pages import EnginePage, PageError, TimeBuckets, read_page
from penstock_serve.observe.live import (
    SLICE_S,
    SLICES_KEPT,
    MetricsLive,
    RatesReport,
    SliceReport,
    TimesReport,
    TrafficReport,
    WatchedServer,
    WatchedTier,
    health_of,
    rates_of,
)
from penstock_serve.server.access_log import AccessLog
from penstock_serve.server.http import GuardedApp, HttpServer, serve_until_stopped
from penstock_serve.server.live_feed import LiveFeed
from penstock_serve.server.vllm_server import VllmFailure, fetch

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from penstock_serve.server.guard import Guard
    from penstock_serve.server.vllm_server import ServerUrl

logger = logging.getLogger("penstock.serve.dashboard")

SCRAPE_EVERY_S = 5.0
SCRAPE_S = 4.0
"""How long a server may take, less than the time between two questions."""
PAGE_BYTES_MAX = 32 << 20
CONNECTIONS_MAX = 64
HEADER_S = 10.0
DRAIN_S = 5.0


class _Watched:
    """One server: its last page, and what happened since the one before."""

    def __init__(self, url: ServerUrl, what: str) -> None:
        self.url = url
        self._what = what
        self.cause = "has not been asked yet"
        self.page: EnginePage | None = None
        self.at = 0.0
        self.prompt_per_s = self.generated_per_s = 0.0

    async def ask(self) -> None:
        """Asks for its page; afterwards `cause` says why there is none, or is empty."""
        try:
            async with asyncio.timeout(SCRAPE_S):
                page = read_page(await self._text())
        except TimeoutError:
            self._fall(f"did not answer within {SCRAPE_S:g} s")
        except VllmFailure as failure:
            self._fall(str(failure).removeprefix(f"{self.url} "))
        except (PageError, UnicodeDecodeError) as error:
            self._fall(f"has no metrics that can be read: {error}")
        else:
            if self.cause:
                logger.info("%s up: url=%s", self._what, self.url)
            self.cause = ""
            self._take(page, time.monotonic())

    def _fall(self, cause: str) -> None:
        if cause != self.cause:
            logger.warning("%s down: url=%s cause=%s", self._what, self.url, cause)
        self.cause, self.page = cause, None

    async def _text(self) -> str:
        answer = await fetch(self.url, "/metrics", timeout_s=SCRAPE_S, bytes_max=PAGE_BYTES_MAX)
        if answer.status != 200:
            raise VllmFailure(f"answered GET /metrics with status {answer.status}")
        return answer.body.decode()

    def _take(self, page: EnginePage, now: float) -> None:
        before, past = self.page, now - self.at
        self.page, self.at = page, now
        if before is not None:
            self.prompt_per_s = _grown(before.prompt_tokens, page.prompt_tokens) / past
            self.generated_per_s = _grown(before.generated_tokens, page.generated_tokens) / past

    def report(self) -> WatchedServer:
        page = self.page
        if page is None:
            return WatchedServer(name=str(self.url), up=False, cause=self.cause)
        asked = page.prompt_tokens
        return WatchedServer(
            name=str(self.url),
            up=True,
            engine=page.engine,
            model=page.model,
            running=round(page.running),
            waiting=round(page.waiting),
            kv_used=page.kv_used,
            found_share=min(1.0, sum(page.found.values()) / asked) if asked else None,
            prompt_per_s=self.prompt_per_s,
            generated_per_s=self.generated_per_s,
            preemptions=round(page.preemptions),
        )


@dataclass(slots=True)
class _GrowingSlice:
    """What all servers did in ten seconds."""

    report: SliceReport
    first_token: TimeBuckets = field(default_factory=TimeBuckets)
    whole: TimeBuckets = field(default_factory=TimeBuckets)
    between: TimeBuckets = field(default_factory=TimeBuckets)

    def add(self, before: EnginePage, page: EnginePage) -> None:
        report = self.report
        report.prompt_tokens += round(_grown(before.prompt_tokens, page.prompt_tokens))
        for source, tokens in page.found.items():
            more = round(_grown(before.found.get(source, 0.0), tokens))
            report.found[source] = report.found.get(source, 0) + more
        first = page.first_token.since(before.first_token)
        report.requests += round(first.count)
        self.first_token = self.first_token.plus(first)
        self.whole = self.whole.plus(page.whole.since(before.whole))
        self.between = self.between.plus(page.between.since(before.between))
        report.generated += round(_grown(before.generated_tokens, page.generated_tokens))
        report.between_p50_s = self.between.quantile(0.5)
        report.warm_p50_s = self.first_token.quantile(0.5)
        report.cold_p50_s = self.whole.quantile(0.5)


class MetricsWatch:
    """All servers, and their last ten minutes."""

    def __init__(self, urls: Sequence[ServerUrl], *, what: str = "server") -> None:
        """Makes it; it asks nobody yet."""
        self._watched = [_Watched(url, what) for url in urls]
        self._slices: deque[_GrowingSlice] = deque(maxlen=SLICES_KEPT)
        self._asked_at = -SCRAPE_EVERY_S
        self._asking: asyncio.Task[None] | None = None
        self._since: float | None = None
        """When the first page was read."""

    async def run(self) -> None:
        """Asks all servers again and again."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self.ask()
            due = max(due + SCRAPE_EVERY_S, loop.time())
            await asyncio.sleep(due - loop.time())

    async def ask(self) -> None:
        """Asks all servers once, at the same time; joins whoever is asking them now.

        Of two that ask at a time, both would count what came since the page before.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all())
        await self._asking

    async def _ask_all(self) -> None:
        self._asked_at = time.monotonic()
        before = [each.page for each in self._watched]
        await asyncio.gather(*(each.ask() for each in self._watched))
        now = time.monotonic()
        if self._since is None and any(each.page for each in self._watched):
            self._since = now
        for earlier, each in zip(before, self._watched, strict=True):
            if earlier is not None and each.page is not None and earlier.engine == each.page.engine:
                self._slice_at(now).add(earlier, each.page)

    def ask_soon(self, now: float) -> None:
        """Asks all servers while others go on, unless that was done in the last seconds."""
        if now - self._asked_at >= SCRAPE_EVERY_S and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask_all())

    async def gather(self) -> bytes:
        """The document of the page, as JSON."""
        now = time.monotonic()
        down = [each for each in self._watched if each.cause]
        is_ready = len(down) < len(self._watched)
        return msgspec.json.encode(
            MetricsLive(
                version=__version__,
                now=now,
                health=health_of(
                    is_ready=is_ready,
                    status="ok" if is_ready else "no server answers",
                    why=[f"{each.url} {each.cause}" for each in down],
                ),
                servers=[each.report() for each in self._watched],
                tiers=self.tiers(),
                traffic=self.traffic(now),
            )
        )

    def tiers(self) -> list[WatchedTier]:
        """What is known of all servers' tiers together."""
        found: dict[str, WatchedTier] = {}
        for each in self._watched:
            for tier in each.page.tiers if each.page is not None else ():
                sum_of = found.setdefault(tier.name, WatchedTier(name=tier.name))
                sum_of.tokens += round(tier.tokens)
                sum_of.used += round(tier.used)
        return list(found.values())

    def traffic(self, now: float) -> TrafficReport:
        """What all servers did in the last ten minutes."""
        kept = [each for each in self._slices if each.report.at > now - SLICE_S * SLICES_KEPT]
        first = whole = between = TimeBuckets()
        for each in kept:
            first, whole = first.plus(each.first_token), whole.plus(each.whole)
            between = between.plus(each.between)
        slices = [each.report for each in kept]
        return TrafficReport(
            slice_s=SLICE_S,
            slices=slices,
            warm=_times(first),
            cold=_times(whole),
            outcomes={},
            requests=[],
            between=_times(between),
            rates=RatesReport(output_tokens_per_s=None)
            if self._since is None
            else rates_of(slices, since=self._since, now=now),
        )

    def _slice_at(self, now: float) -> _GrowingSlice:
        at = now - now % SLICE_S
        if not self._slices or self._slices[-1].report.at < at:
            self._slices.append(_GrowingSlice(SliceReport(at=at, found={})))
        return self._slices[-1]


def _grown(before: float, now: float) -> float:
    """What a counter grew by; one that is smaller began anew."""
    return now - before if now >= before else now


def _times(buckets: TimeBuckets) -> TimesReport:
    return TimesReport(
        count=round(buckets.count), p50_s=buckets.quantile(0.5), p95_s=buckets.quantile(0.95)
    )


class DashboardApp:
    """The endpoints: the live page, what it shows, and whether this process is there."""

    def __init__(self, watch: MetricsWatch, guard: Guard) -> None:
        self._guard = guard
        self.live = LiveFeed(watch.gather, guard)

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [Route("/health", self.health), *self.live.routes()]
        return GuardedApp(routes, self._guard)

    async def health(self, _http: HttpRequest) -> Response:
        """`GET /health`: of the page, not of the servers that it shows."""
        return JSONResponse({"status": "ok"})


def run_dashboard(urls: Sequence[ServerUrl], bound: socket.socket, guard: Guard) -> None:
    """Serves the page until the process gets a stop signal."""
    with StopSignal((signal.SIGINT, signal.SIGTERM)) as stop:
        asyncio.run(_run(MetricsWatch(urls), bound, guard, stop))


async def _run(watch: MetricsWatch, bound: socket.socket, guard: Guard, stop: StopSignal) -> None:
    app = DashboardApp(watch, guard)
    server = HttpServer(
        AccessLog(app.app(), lambda _endpoint, _status: None),
        connections_max=CONNECTIONS_MAX,
        header_s=HEADER_S,
        drain_s=DRAIN_S,
        on_stop=app.live.close,
        on_overtime=lambda: None,
    )
    asking = asyncio.create_task(watch.run())
    try:
        await serve_until_stopped(server, bound, stop)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
