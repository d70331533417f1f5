"""Publishes what instances have cached, in vLLM's format, for routers that are not ours.

    instance ══ CacheChanged ══ server ─┬─ PUB     batches, numbered from 0
                                        └─ ROUTER  those that somebody missed, or a snapshot

Each instance has two ports of its own, as each data-parallel rank of vLLM has. An instance sends
its KV events to the server in any case, so publishing costs the engine nothing.

The one rule: who applies all batches in order, or a snapshot and the batches after its number,
knows exactly what the instance has. A snapshot is one batch that begins with `AllBlocksCleared`.

Events carry hashes of blocks. With `events.token_ids` they also carry tokens, which the server
knows from the requests themselves; of blocks that were there before it, it does not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

from penstock import AllCleared, BlocksRemoved, BlocksStored, chains_of
from penstock.errors import UnavailableError
from penstock.toolkit import EventSockets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock import KeyChain, KvEvent
    from penstock.config import Config, EventsTable
    from penstock_serve.engine import messages as ms
    from penstock_serve.server.instance_link import InstanceLink

logger = logging.getLogger("penstock.serve.event_publisher")

EXPECTED_MAX = 1 << 17
"""Blocks that were asked for and are not cached, whose tokens are kept."""
CHAIN_BLOCKS = 64
"""Blocks in one event of a snapshot."""
TURN_EVENTS = 256
"""After so many events or batches of an answer, the server does other work."""
_ARRAY_OF_3 = b"\x93"
"""The head of a batch in MessagePack: time, events, number of the instance."""
_LONG_ARRAY = b"\xdd"
"""The head of an array in MessagePack, before its length in four bytes."""

Hash: TypeAlias = int | bytes


class _Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True, kw_only=True):
    """A chain of blocks can be used from a medium. Fields are named as vLLM names them."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[tuple[str]] | None = None
    """The tenant of each block, where blocks are a tenant's own."""


class _Removed(msgspec.Struct, tag="BlockRemoved", kw_only=True):
    block_hashes: list[Hash]
    medium: str


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


_Event: TypeAlias = _Stored | _Removed | _Cleared


@dataclass(slots=True)
class _Tokens:
    """The tokens of a block, and whose it is."""

    words: bytes
    """Four bytes each."""
    tenant: str


@dataclass(slots=True)
class _Block:
    """A cached block, whatever tiers it is in."""

    parent: bytes | None
    tokens: _Tokens | None


class _Answer:
    """An answer under way, whose blocks are named as it grows."""

    def __init__(self, chain: KeyChain, rest: list[int], tenant: str) -> None:
        self.chain = chain
        self.rest = rest
        """Tokens after the last whole block."""
        self.tenant = tenant

    def fork(self) -> _Answer:
        return _Answer(self.chain.fork(), self.rest.copy(), self.tenant)


class CachedTokens:
    """Which tokens the blocks of one instance have, from the requests that it was sent."""

    def __init__(self, config_of: Callable[[], Config]) -> None:
        self._config_of = config_of
        self._expected: dict[bytes, _Tokens] = {}
        self._answers: dict[str, dict[int, _Answer]] = {}
        """Each request's answers by number; -1 is where they all begin."""

    def begin(self, submit: ms.Submit) -> None:
        """A request is sent to the instance."""
        chain = self._config_of().key_chain(tenant=submit.tenant)
        answer = _Answer(chain, [], submit.tenant)
        self._extend(answer, submit.prompt)
        self._answers[submit.id] = {-1: answer}

    def token(self, progress: ms.TokenProgress) -> None:
        """The instance has sent a token of it."""
        answers = self._answers.get(progress.id)
        if answers is None or progress.token is None:
            return
        if progress.answer not in answers:
            answers[progress.answer] = answers[-1].fork()
        self._extend(answers[progress.answer], [progress.token])

    def end(self, request: str) -> None:
        self._answers.pop(request, None)

    def take(self, key: bytes) -> _Tokens | None:
        """The tokens of a block that is cached from now on, if they are known."""
        return self._expected.pop(key, None)

    def keep(self, key: bytes, tokens: _Tokens) -> None:
        """A block is not cached any more, but it may be again."""
        self._expected[key] = tokens
        if len(self._expected) > EXPECTED_MAX:
            del self._expected[next(iter(self._expected))]

    def _extend(self, answer: _Answer, tokens: Sequence[int]) -> None:
        answer.rest += tokens
        size = answer.chain.block_tokens
        whole = len(answer.rest) - len(answer.rest) % size
        if not whole:
            return
        words = np.array(answer.rest[:whole], np.uint32).tobytes()
        step = len(words) * size // whole
        for number, key in enumerate(answer.chain.extend(answer.rest[:whole])):
            self.keep(key, _Tokens(words[number * step : (number + 1) * step], answer.tenant))
        del answer.rest[:whole]


class InstanceStream:
    """The events of one instance, in all its lives."""

    def __init__(self, name: str, number: int, settings: EventsTable) -> None:
        """Binds its ports.

        Raises `UnavailableError`: one is in use.
        """
        self._number = number
        self._settings = settings
        self._topic = settings.topic.encode()
        self._sockets = EventSockets(
            settings.host,
            settings.port and settings.port + number,
            settings.replay_port and settings.replay_port + number,
            queue_count=settings.queue_batches,
            replay_count=settings.replay_batches,
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._sent: deque[bytes] = deque(maxlen=settings.replay_batches)
        self._next = 0
        """The number of the next batch."""
        self._held: dict[str, dict[bytes, _Block]] = {}
        """The blocks of each tier."""
        self._beside: dict[str, list[dict[bytes, _Block]]] = {}
        """For each tier, the blocks of others of the same medium."""
        self._media: dict[str, str] = {}
        """What vLLM calls each tier."""
        self._block_tokens = 0
        self._tokens: CachedTokens | None = None
        self._answering: asyncio.Task[None] | None = None
        asyncio.get_running_loop().add_reader(self._sockets.descriptor, self._serve_requests)
        logger.info(
            "KV events: instance=%s number=%d published=%s replayed=%s",
            name,
            number,
            self._sockets.address,
            self._sockets.replay_address,
        )

    def begin(self, config: Config, tokens: CachedTokens | None) -> None:
        """The instance is there, and will send what it has."""
        self._media = {"device": "GPU"} | {
            tier.name: "STORAGE" if tier.stored else "CPU" for tier in config.cache.tiers
        }
        self._held = {tier: {} for tier in self._media}
        self._beside = {
            tier: [
                held
                for each, held in self._held.items()
                if each != tier and self._media[each] == of
            ]
            for tier, of in self._media.items()
        }
        self._block_tokens = config.cache.block_tokens
        self._tokens = tokens

    def take(self, events: Iterable[KvEvent]) -> None:
        """Publishes what the instance has sent."""
        found: list[_Event] = []
        for event in events:
            match event:
                case BlocksStored():
                    found += self._store(event)
                case BlocksRemoved():
                    found += self._remove(event)
                case AllCleared():
                    found.append(self._clear())
                case _:
                    raise TypeError(f"{type(event).__name__} is not published")
        self._publish(found)

    def lose(self) -> None:
        """The instance is gone, and what it had in memory with it; it may come back."""
        if any(self._held.values()):
            self._publish([self._clear()])

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._sockets.descriptor)
        if self._answering is not None:
            self._answering.cancel()
        self._sockets.close()

    # ---------------------------------------------------------------- events

    def _publish(self, events: list[_Event]) -> None:
        if not events:
            return
        payload = self._encoder.encode((time.time(), events, self._number))
        self._sockets.publish(self._topic, self._next, payload)
        self._sent.append(payload)
        self._next += 1

    def _store(self, event: BlocksStored) -> list[_Event]:
        """An event for each run of blocks that are new in the medium and alike."""
        medium, held, beside = self._tier(event.tier)
        found: list[_Event] = []
        run: dict[bytes, _Block] = {}
        alike = True
        before = event.parent
        for key in event.keys:
            known = key in held or (beside and any(key in other for other in beside))
            block = held[key] = self._find(key) or self._new(key, before)
            before = key
            if run and (known or alike is not (block.tokens is None)):
                found.append(self._stored(run, medium))
                run = {}
            if not known:
                run[key], alike = block, block.tokens is None
        return [*found, self._stored(run, medium)] if run else found

    def _remove(self, event: BlocksRemoved) -> list[_Event]:
        medium, held, beside = self._tier(event.tier)
        gone: list[bytes] = []
        for key in event.keys:
            block = held.pop(key, None)
            if block is None:
                continue
            if not any(key in other for other in beside):
                gone.append(key)
            if block.tokens is not None and self._tokens is not None and self._find(key) is None:
                self._tokens.keep(key, block.tokens)
        return [_Removed(block_hashes=self._hashes(gone), medium=medium)] if gone else []

    def _clear(self) -> _Cleared:
        for held in self._held.values():
            for key, block in held.items():
                if block.tokens is not None and self._tokens is not None:
                    self._tokens.keep(key, block.tokens)
            held.clear()
        return _Cleared()

    def _tier(self, name: str) -> tuple[str, dict[bytes, _Block], list[dict[bytes, _Block]]]:
        """Its medium, its blocks, and those of other tiers of the same medium."""
        return self._media[name], self._held[name], self._beside[name]

    def _find(self, key: bytes) -> _Block | None:
        for held in self._held.values():
            if key in held:
                return held[key]
        return None

    def _new(self, key: bytes, parent: bytes | None) -> _Block:
        return _Block(parent, None if self._tokens is None else self._tokens.take(key))

    def _stored(self, run: Mapping[bytes, _Block], medium: str) -> _Stored:
        """Blocks that follow each other, and are alike."""
        first = next(iter(run.values()))
        tenant = first.tokens.tenant if first.tokens is not None else ""
        words = b"".join(block.tokens.words for block in run.values() if block.tokens is not None)
        return _Stored(
            block_hashes=self._hashes(run),
            parent_block_hash=None if first.parent is None else self._hashes([first.parent])[0],
            token_ids=np.frombuffer(words, np.uint32).tolist(),
            block_size=self._block_tokens,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=[(tenant,)] * len(run) if tenant else None,
        )

    def _hashes(self, keys: Iterable[bytes]) -> list[Hash]:
        if self._settings.hashes == "bytes":
            return list(keys)
        return [int.from_bytes(key[-8:], "big") for key in keys]

    # ---------------------------------------------------------------- those who missed some

    def _serve_requests(self) -> None:
        if self._answering is None:
            self._answering = asyncio.get_running_loop().create_task(self._answer_all())

    async def _answer_all(self) -> None:
        """Answers until nobody asks: the descriptor does not show what arrives meanwhile."""
        try:
            while requests := self._sockets.requests():
                for reader, first in requests.items():
                    await self._answer(reader, first)
        finally:
            # At once, not when the loop comes to it: the next request may arrive in between.
            self._answering = None

    async def _answer(self, reader: bytes, first: int | None) -> None:
        """Sends batches from a number on, or a snapshot where they are not kept any more."""
        oldest = self._next - len(self._sent)
        if first is not None and first >= oldest:
            kept = islice(self._sent, first - oldest, None)
            for number, payload in enumerate(list(kept), start=first):
                self._sockets.answer(reader, self._topic, number, payload)
                if number % TURN_EVENTS == 0:
                    await asyncio.sleep(0)
        elif self._next:
            # Copied before anything else can happen: as of the last batch.
            number, held = self._next - 1, self._held_by_medium()
            payload = await self._snapshot(held)
            self._sockets.answer(reader, self._topic, number, payload)
        self._sockets.end_answer(reader)

    def _held_by_medium(self) -> dict[str, dict[bytes, _Block]]:
        found: dict[str, dict[bytes, _Block]] = {}
        for tier, held in self._held.items():
            medium = self._media[tier]
            found[medium] = found[medium] | held if medium in found else held.copy()
        return found

    async def _snapshot(self, held: Mapping[str, dict[bytes, _Block]]) -> bytes:
        """One batch with all blocks; encoded in turns, because there may be a million."""
        count, parts = 0, []
        for event in self._snapshot_events(held):
            parts.append(self._encoder.encode(event))
            count += 1
            if count % TURN_EVENTS == 0:
                await asyncio.sleep(0)
        encode = self._encoder.encode
        head = (_ARRAY_OF_3, encode(time.time()), _LONG_ARRAY, count.to_bytes(4, "big"))
        return b"".join((*head, *parts, encode(self._number)))

    def _snapshot_events(self, held: Mapping[str, dict[bytes, _Block]]) -> Iterator[_Event]:
        yield _Cleared()
        for medium, blocks in held.items():
            for keys, _ in chains_of(blocks, partial(_parent_in, blocks), longest=CHAIN_BLOCKS):
                for _, run in groupby(keys, partial(_has_tokens, blocks)):
                    yield self._stored({key: blocks[key] for key in run}, medium)


def _parent_in(blocks: Mapping[bytes, _Block], key: bytes) -> bytes | None:
    return blocks[key].parent


def _has_tokens(blocks: Mapping[bytes, _Block], key: bytes) -> bool:
    return blocks[key].tokens is not None


class EventPublisher:
    """The streams of all instances of a server."""

    def __init__(self, settings: EventsTable, names: Sequence[str]) -> None:
        """Binds the ports of the instances that the server starts itself.

        Raises `UnavailableError`: one is in use.
        """
        self._settings = settings
        self._streams: dict[str, InstanceStream | None] = {}
        """By the name of the instance, in the order of their ports; `None`: a port is in use."""
        try:
            for name in names:
                self._streams[name] = InstanceStream(name, len(self._streams), settings)
        except UnavailableError:
            self.close()
            raise

    def begin(self, link: InstanceLink, config_of: Callable[[], Config]) -> None:
        """An instance is ready; what it has cached follows."""
        stream = self._stream_of(link)
        if stream is None:
            return
        tokens = CachedTokens(config_of) if self._settings.token_ids else None
        stream.begin(config_of(), tokens)
        link.tokens = tokens

    def take(self, link: InstanceLink, events: Iterable[KvEvent]) -> None:
        """An instance has sent events."""
        stream = self._streams.get(link.name)
        if stream is not None:
            stream.take(events)

    def lose(self, link: InstanceLink) -> None:
        """An instance is gone."""
        stream = self._streams.get(link.name)
        if stream is not None:
            stream.lose()

    def close(self) -> None:
        """Publishes nothing more; may be called twice."""
        for stream in self._streams.values():
            if stream is not None:
                stream.close()
        self._streams.clear()

    def _stream_of(self, link: InstanceLink) -> InstanceStream | None:
        if link.name not in self._streams:
            # An instance of another command: it is served, whether its events can be or not.
            number = len(self._streams)
            self._streams[link.name] = None
            try:
                self._streams[link.name] = InstanceStream(link.name, number, self._settings)
            except UnavailableError as error:
                logger.error("KV events not published: instance=%s cause=%s", link.name, error)  # noqa: TRY400
        return self._streams[link.name]
