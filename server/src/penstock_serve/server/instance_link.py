"""The server's connection to one instance: requests out, tokens in, on the event loop.

The one rule: every submitted request ends. When the instance is lost, all its requests fail at
once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from penstock.errors import PeerError, UnavailableError
from penstock.toolkit import BacklogError, ChannelClosed, ChannelFailed, Empty, ReceivedFrame
from penstock_serve.engine import messages as ms
from penstock_serve.engine.requests import Output

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection

    from penstock import KvEvent
    from penstock.toolkit import Channel
    from penstock_serve.engine.messages import What
    from penstock_serve.engine.requests import Request

ASK_S = 10.0
RETRY_S = 0.02
"""How soon a channel without room is tried again."""


class InstanceLost(Exception):  # noqa: N818 - what happened to an instance
    """The instance is gone."""


class RequestRefusal(Exception):  # noqa: N818 - the instance's answer, not a failure
    """A request was refused: it is `invalid`, its instance `busy`, or the server `paused`."""

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


class InstanceLink:
    """A channel to an instance, driven by the event loop."""

    def __init__(self, channel: Channel, *, on_change: Callable[[InstanceLink], None]) -> None:
        self.name = channel.name
        self.ready: ms.InstanceReady | None = None
        """What the instance can do; `None` until it is loaded, and when it is gone."""
        self.was_ready = False
        """Whether it has ever been."""
        self.leaving = False
        """Whether it finishes its requests and accepts no more."""
        self._held_back = ""
        self.lost = ""
        """Why it is gone, if it is."""
        self.loading: dict[int, ms.LoadProgress] = {}
        """The loading progress of each rank."""
        self.on_kv_events: Callable[[InstanceLink, list[KvEvent]], None] = lambda *_: None
        """Called with changes of what the instance caches."""
        self.reasons: list[str] = []
        """What is lost or off in its cache, and why."""
        self.on_load: Callable[[InstanceLink], None] = lambda *_: None
        """Called when a request under way has begun or ended."""
        self.on_standing: Callable[[InstanceLink], None] = lambda *_: None
        """Called when it may get requests, or may not any more."""
        self.on_ready: Callable[[InstanceLink], None] = lambda *_: None
        """Called before `on_change` when the instance accepts requests."""
        self.on_pair_failed: Callable[[InstanceLink, ms.PairFailed], None] = lambda *_: None
        """Called when the instance could not open a pair."""
        self.on_reset_kept: Callable[[InstanceLink, int], None] = lambda *_: None
        """Called with the number of the last reset that outlives the instance."""
        self._channel = channel
        self._on_change = on_change
        self._requests: dict[str, asyncio.Queue[Output | ms.SubmitRefused | InstanceLost]] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        """Those who wait for the end of a request."""
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._ask_next = 1
        self._outbox: deque[bytes] = deque()
        """Messages that the channel has no room for; bounded, as requests under way are."""
        self._loop = asyncio.get_running_loop()
        self._descriptor = channel.descriptor
        self._alarm: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._descriptor, self._pump)
        # The descriptor does not show what arrived before the reader was added.
        self._loop.call_soon(self._pump)

    @property
    def held_back(self) -> str:
        """Why it gets no requests although it is ready: it has not the weights of the others."""
        return self._held_back

    @held_back.setter
    def held_back(self, why: str) -> None:
        self._held_back = why
        self.on_standing(self)

    @property
    def load(self) -> int:
        """Requests under way."""
        return len(self._requests)

    @property
    def requests(self) -> Collection[str]:
        """The names of these requests."""
        return self._requests.keys()

    async def wait_ended(self, request: str) -> None:
        """Waits until a request under way has ended."""
        if request in self._requests:
            ended: asyncio.Future[None] = self._loop.create_future()
            self._waiting.setdefault(request, []).append(ended)
            await ended

    async def generate(self, submit: Request) -> AsyncGenerator[Output, None]:
        """Submits a request and yields its tokens until every answer has ended.

        If the prompt is scored, that comes first.
        Raises `InstanceLost`: the instance is gone; `RequestRefusal`: it refused the request.
        """
        queue: asyncio.Queue[Output | ms.SubmitRefused | InstanceLost] = asyncio.Queue()
        self._require_there()
        self._requests[submit.id] = queue
        self.on_load(self)
        running = submit.answers
        try:
            self.send(submit)
            while running:
                message = await queue.get()
                if isinstance(message, InstanceLost):
                    raise message
                if isinstance(message, ms.SubmitRefused):
                    running = 0
                    raise RequestRefusal(message.kind, message.problem)
                running -= message.reason is not None
                yield message
        finally:
            del self._requests[submit.id]
            self.on_load(self)
            for waiting in self._waiting.pop(submit.id, ()):
                if not waiting.done():
                    waiting.set_result(None)
            if running and not self.lost:
                # The caller stopped reading: the remaining tokens are not needed.
                self.send(ms.Abort(id=submit.id))

    async def ask(self, what: What, of: str = "") -> bytes:
        """Asks the instance about itself; the answer is JSON.

        Raises `InstanceLost`: it is gone, or does not answer in time.
        """
        return await self.order(partial(ms.Ask, what=what, of=of), timeout_s=ASK_S)

    async def order(self, make: Callable[..., ms.Ask | ms.Order], *, timeout_s: float) -> bytes:
        """Sends the message that `make` returns for an `id`; returns its answer, which is JSON.

        Raises `InstanceLost`: the instance is gone, or does not answer in time.
        """
        self._require_there()
        number, self._ask_next = self._ask_next, self._ask_next + 1
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._asked[number] = answer
        try:
            self.send(make(id=number))
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError as error:
            raise InstanceLost(
                f"instance {self.name!r} did not answer within {timeout_s:g} s"
            ) from error
        finally:
            del self._asked[number]

    def refuse_all(self, kind: str, problem: str) -> None:
        """Ends all requests under way with a refusal."""
        for request, queue in self._requests.items():
            self.send(ms.Abort(id=request))
            queue.put_nowait(ms.SubmitRefused(id=request, kind=kind, problem=problem))

    def send(self, message: ms.InstanceMessage | Request) -> None:
        """Sends a message, later if the channel has no room for it now."""
        self._outbox.append(ms.encode(message))
        self._flush()
        # `send` may take in frames, which the descriptor then does not show.
        self._loop.call_soon(self._pump)

    def look(self) -> None:
        """Receives what has arrived, also what the descriptor does not show."""
        self._pump()

    def close(self) -> None:
        """Closes the channel; the instance ends its requests."""
        self._lose("the server stops")

    def _require_there(self) -> None:
        if self.lost:
            raise InstanceLost(self.lost)

    def _flush(self) -> bool:
        """Sends what the channel has room for; returns whether that was anything."""
        sent = False
        while self._outbox and not self.lost:
            try:
                self._channel.send(self._outbox[0])
            except BacklogError:
                break
            except UnavailableError as error:
                self._lose(f"instance {self.name!r} is lost: {error}")
                break
            self._outbox.popleft()
            sent = True
        return sent

    def _pump(self) -> None:
        while not self.lost:
            match self._channel.receive():
                case ReceivedFrame(frame):
                    self._read(frame)
                case Empty():
                    break
                case ChannelClosed():
                    self._lose(f"instance {self.name!r} ended")
                case ChannelFailed(cause):
                    self._lose(f"instance {self.name!r} is lost: {cause}")
        if self._flush():
            # As in `send`: frames may have been taken in.
            self._loop.call_soon(self._pump)
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Calls `_pump` when the channel's alarm is due; both clocks are monotonic.

        While messages wait for room, it is called every `RETRY_S` as well: a refused `send` may
        take in frames, and the news that there is room, which the descriptor then does not show.
        """
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        due = None if self.lost else self._channel.alarm
        if self._outbox and not self.lost:
            retry = self._loop.time() + RETRY_S
            due = retry if due is None else min(due, retry)
        if due is not None:
            self._alarm = self._loop.call_at(due, self._pump)

    def _read(self, frame: bytes) -> None:
        try:
            message = ms.read_by_server(frame)
        except PeerError as error:
            self._lose(f"instance {self.name!r} sent an invalid message: {error}")
            return
        self._take(message)

    def _take(self, message: ms.FromInstance) -> None:
        match message:
            case ms.LoadProgress():
                self.loading[message.rank] = message
                self._on_change(self)
            case ms.InstanceReady():
                self.ready, self.was_ready = message, True
                self.on_ready(self)
                self.on_standing(self)
                self._on_change(self)
            case Output() | ms.SubmitRefused():
                self._take_progress(message)
            case ms.Leaving():
                self.leaving = True
                self.on_standing(self)
                self._on_change(self)
            case ms.PairFailed():
                self.on_pair_failed(self, message)
            case ms.CacheChanged() | ms.HealthChanged() | ms.ResetKept():
                self._take_cache_news(message)
            case ms.AskAnswer():
                answer = self._asked.get(message.id)
                if answer is not None and not answer.done():
                    answer.set_result(message.json)

    def _take_progress(self, message: Output | ms.SubmitRefused) -> None:
        queue = self._requests.get(message.request if isinstance(message, Output) else message.id)
        if queue is not None:
            queue.put_nowait(message)

    def _take_cache_news(self, message: ms.CacheChanged | ms.HealthChanged | ms.ResetKept) -> None:
        match message:
            case ms.CacheChanged():
                self._take_events(message)
            case ms.HealthChanged():
                self.reasons = message.reasons
            case ms.ResetKept():
                self.on_reset_kept(self, message.number)

    def _take_events(self, message: ms.CacheChanged) -> None:
        if self.ready is None:
            self._lose(f"instance {self.name!r} sent KV events before it was ready")
        else:
            self.on_kv_events(self, [*message.events])

    def _lose(self, why: str) -> None:
        if self.lost:
            return
        self.lost, self.ready = why, None
        self.on_standing(self)
        self._loop.remove_reader(self._descriptor)
        self._set_alarm()
        self._channel.close()
        for queue in self._requests.values():
            queue.put_nowait(InstanceLost(why))
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(InstanceLost(why))
        self._on_change(self)
