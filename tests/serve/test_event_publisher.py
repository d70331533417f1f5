"""KV events for routers that are not ours: what a subscriber rebuilds is what the cache holds."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from penstock.config import parse_config
from penstock.config.routing import EventsTable
from penstock.errors import ConfigError, UnavailableError
from penstock.machine.kv_events import AllCleared, BlocksRemoved, BlocksStored, chains_of
from penstock_serve.engine import messages as ms
from penstock_serve.server import event_publisher
from penstock_serve.server.event_publisher import CachedTokens, EventPublisher, InstanceStream
from penstock_serve.server.plan import ServeOptions, settle
from tests.runtime.conftest import Engine, configure
from tests.serve.conftest import eventually, pids_of, serving
from tests.serve.subscriber import SNAPSHOT, Subscriber

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

ANY = EventsTable(port=0, replay_port=0)
BLOCKS = 'version = 1\nmodel.name = "m"\ncache = { blocks = 8, block_tokens = 4 }\n'


class Stream:
    """The stream of an instance, in a loop of its own, and who subscribes to it."""

    def __init__(self, stream: InstanceStream) -> None:
        self.stream = stream
        self._all: list[Subscriber] = []

    def subscriber(self, **more: Any) -> Subscriber:
        sockets = self.stream._sockets
        self._all.append(Subscriber(sockets.address, sockets.replay_address, **more))
        return self._all[-1]

    async def beside(self, what: Callable[[], Any]) -> Any:
        """Has a subscriber wait in a thread, while the server goes on."""
        return await asyncio.to_thread(what)

    def close(self) -> None:
        for each in self._all:
            each.close()
        self.stream.close()


def played(
    play: Callable[[Stream], Awaitable[None]],
    *,
    settings: EventsTable = ANY,
    config: str = BLOCKS,
    tokens: CachedTokens | None = None,
) -> None:
    async def whole() -> None:
        stream = Stream(InstanceStream("instance-0", 0, settings))
        stream.stream.begin(parse_config(config), tokens)
        try:
            await play(stream)
        finally:
            stream.close()

    asyncio.run(asyncio.wait_for(whole(), 120))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(
    first: int, count: int, *, tier: str = "device", parent: int | None = None
) -> BlocksStored:
    return BlocksStored(
        sequence=0,
        epoch=0,
        tier=tier,
        keys=[key(number) for number in range(first, first + count)],
        parent=None if parent is None else key(parent),
    )


def removed(first: int, count: int, *, tier: str = "device") -> BlocksRemoved:
    keys = [key(number) for number in range(first, first + count)]
    return BlocksRemoved(sequence=0, epoch=0, tier=tier, keys=keys)


def held_by(engine: Engine) -> dict[str, set[int]]:
    """What can be matched in a cache, as hashes by medium."""
    media = {"device": "GPU", "host": "CPU"}
    return {
        media[tier]: {int.from_bytes(each[-8:], "big") for each, _ in rows}
        for tier, rows in engine.cache.kv_snapshot().blocks.items()
        if rows
    }


def chats(engine: Engine, turns: int) -> Iterator[None]:
    """Conversations over a cache far too small, with a reset in the middle."""
    for turn in range(turns):
        past = [number * 1000 + turn % 7 for number in range(turn % 5 + 1)] * 6
        engine.turn([turn % 3] * 4 + past[:20], [turn + 7] * 4)
        if turn == turns // 2:
            engine.cache.reset("new weights")
        yield


def test_who_follows_the_events_of_a_cache_knows_what_it_holds_also_after_losing_some() -> None:
    engine = Engine(configure(blocks=12, tiers={"host": 20}))

    async def play(stream: Stream) -> None:
        early = stream.subscriber()
        for _ in chats(engine, 40):
            stream.stream.take(engine.cache.take_kv_events())
            await asyncio.sleep(0)
        late = stream.subscriber()

        # Whether the first batches came before its subscription or after it: it asks for them.
        await stream.beside(lambda: early.ask((0).to_bytes(8, "big")))
        await stream.beside(lambda: late.ask(SNAPSHOT))

        assert early.held() == late.held() == held_by(engine)
        assert set(early.held()) == {"GPU", "CPU"}
        assert early.number == late.number == stream.stream._next - 1
        assert late.orphans == 0

        # From here on both follow what is published.
        for _ in chats(engine, 10):
            stream.stream.take(engine.cache.take_kv_events())
        for each in (early, late):
            while each.number < stream.stream._next - 1:
                await stream.beside(each.read)
            assert each.held() == held_by(engine)

    played(play, config=BLOCKS + "\n[[tiers]]\nname = 'host'\nkind = 'memory'\nblocks = 64\n")


def test_a_gap_is_filled_from_what_is_kept_and_by_a_snapshot_where_it_is_not() -> None:
    async def play(stream: Stream) -> None:
        subscriber = stream.subscriber()
        for number in range(4):
            stream.stream.take([stored(10 * number, 2)])
        assert await stream.beside(lambda: subscriber.ask((0).to_bytes(8, "big"))) == [0, 1, 2, 3]

        for number in range(4, 10):
            stream.stream.take([stored(10 * number, 2)])
        stream.stream.take([removed(0, 2)])

        # Of 11 batches the last 4 are kept: 7 to 10.
        assert await stream.beside(lambda: subscriber.ask((4).to_bytes(8, "big"))) == [10]
        assert subscriber.held() == {"GPU": {10 * n + k for n in range(1, 10) for k in (0, 1)}}
        assert await stream.beside(lambda: subscriber.ask((7).to_bytes(8, "big"))) == [7, 8, 9, 10]
        assert await stream.beside(lambda: subscriber.ask((11).to_bytes(8, "big"))) == []

    played(play, settings=replace(ANY, replay_batches=4))


def test_a_subscriber_that_does_not_read_holds_nobody_up_and_sees_what_it_missed() -> None:
    async def play(stream: Stream) -> None:
        slow, awake = stream.subscriber(slow=True), stream.subscriber()
        # Until both subscriptions have arrived.
        last = 0
        for each in (awake, slow):
            while not await stream.beside(lambda each=each: each.read(wait_ms=50)):
                stream.stream.take([stored(10 * last + 5, 1)])  # None of those below.
                last += 1

        # 16 MB, more than the network keeps: nobody waits for it.
        for many in range(1, 161):
            stream.stream.take([stored(1_000 * many, 2), removed(1_000 * (many - 1), many > 1)])
        while slow.number < stream.stream._next - 1:
            if not await stream.beside(lambda: slow.read(wait_ms=200)):
                stream.stream.take([stored(10 * last + 5, 1)])
                last += 1

        assert slow.gaps
        await stream.beside(lambda: awake.ask(SNAPSHOT))
        assert slow.held() == awake.held()

    played(play, settings=replace(ANY, topic="t" * 100_000, queue_batches=2, replay_batches=9))


def test_a_lost_instance_has_nothing_until_it_is_back() -> None:
    async def play(stream: Stream) -> None:
        subscriber = stream.subscriber()
        stream.stream.take([stored(0, 3)])
        stream.stream.lose()
        stream.stream.lose()  # Nothing more to say.

        assert await stream.beside(lambda: subscriber.ask((0).to_bytes(8, "big"))) == [0, 1]
        assert subscriber.held() == {}

        stream.stream.begin(parse_config(BLOCKS), None)
        stream.stream.take([stored(1, 1, parent=0)])
        assert await stream.beside(lambda: subscriber.ask((2).to_bytes(8, "big"))) == [2]
        assert subscriber.held() == {"GPU": {1}}

    played(play)


def test_a_block_in_two_tiers_of_one_medium_is_stored_and_removed_once() -> None:
    tiers = "[[tiers]]\nname = '{}'\nkind = 'memory'\nblocks = 64\n"

    async def play(stream: Stream) -> None:
        subscriber = stream.subscriber()
        stream.stream.take([stored(0, 2, tier="near")])
        stream.stream.take([stored(0, 4, tier="far"), removed(0, 1, tier="near")])
        stream.stream.take([removed(1, 3, tier="far")])

        await stream.beside(lambda: subscriber.ask((0).to_bytes(8, "big")))
        assert subscriber.held() == {"CPU": {0, 1}}
        assert subscriber.orphans == 0

    played(play, config="\n".join([BLOCKS, tiers.format("near"), tiers.format("far")]))


def test_what_is_no_request_is_ignored() -> None:
    async def play(stream: Stream) -> None:
        subscriber = stream.subscriber()
        stream.stream.take([stored(0, 3)])
        for parts in ((b"1",), (b"", b"x" * 8), (b"x" * 9,), ()):
            subscriber.send(*parts)

        assert await stream.beside(lambda: subscriber.ask((0).to_bytes(8, "big"))) == [0]

    played(play)


def test_tokens_of_prompts_and_answers_go_with_their_blocks_and_those_of_others_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_publisher, "EXPECTED_MAX", 4)
    config = parse_config(BLOCKS)
    tokens = CachedTokens(lambda: config)
    prompt = list(range(100, 110))

    async def play(stream: Stream) -> None:
        subscriber = stream.subscriber()
        tokens.begin(ms.Submit(id="r", prompt=prompt, max_tokens=9, answers=2, tenant="a"))
        for answer, token in [(0, 1), (1, 7), (0, 2), (1, 8), (0, 3)]:
            tokens.token(ms.TokenProgress(id="r", answer=answer, token=token))
        tokens.token(ms.TokenProgress(id="r", answer=0, reason="stop"))
        tokens.token(ms.TokenProgress(id="another", answer=0, token=4))
        tokens.end("r")
        expected = {}
        for end in ([1, 2], [7, 8]):
            chain = config.key_chain(tenant="a")
            whole = prompt + end
            expected |= {
                each: whole[4 * n : 4 * n + 4] for n, each in enumerate(chain.extend(whole))
            }
        keys = list(expected)
        chain_of_one, last_of_other = keys[:3], keys[3]

        stream.stream.take(
            [
                BlocksStored(sequence=1, epoch=0, tier="device", keys=chain_of_one, parent=None),
                BlocksStored(
                    sequence=2, epoch=0, tier="device", keys=[last_of_other], parent=keys[1]
                ),
                stored(5, 1),
            ]
        )
        # Evicted and computed again: its tokens are still known.
        stream.stream.take([BlocksRemoved(sequence=3, epoch=0, tier="device", keys=keys)])
        stream.stream.take(
            [BlocksStored(sequence=4, epoch=0, tier="device", keys=chain_of_one, parent=None)]
        )
        for first in ((0).to_bytes(8, "big"), SNAPSHOT):
            await stream.beside(lambda first=first: subscriber.ask(first))
            found = subscriber.blocks["GPU"]
            assert {each: block["tokens"] for each, block in found.items()} == {
                int.from_bytes(each[-8:], "big"): expected[each] for each in chain_of_one
            } | {5: []}
            assert found[int.from_bytes(keys[0][-8:], "big")]["extra_keys"] == [["a"]] * 3
            assert "extra_keys" not in found[5]

    played(play, tokens=tokens)


def test_whole_keys_and_a_topic_are_published_where_that_is_asked_for() -> None:
    async def play(stream: Stream) -> None:
        subscriber = stream.subscriber()
        stream.stream.take([stored(0, 2), AllCleared(sequence=1, epoch=1), stored(3, 2)])

        await stream.beside(lambda: subscriber.ask(SNAPSHOT))
        assert subscriber.held() == {"GPU": {key(3), key(4)}}
        # A subscription takes a moment to arrive.
        while not await stream.beside(lambda: subscriber.read(wait_ms=50)):
            stream.stream.take([stored(9, 1), removed(9, 1)])
        assert subscriber.topics == {b"kv@pod"}

    played(play, settings=replace(ANY, hashes="bytes", topic="kv@pod"))


def test_chains_put_every_block_after_the_one_before_it() -> None:
    parents = {5: 4, 9: 2, 4: 3, 3: None, 8: 7, 2: 3, 6: 5}

    found = list(
        chains_of(
            dict.fromkeys(map(key, parents)),
            lambda each: None if (of := parents[int.from_bytes(each)]) is None else key(of),
            longest=2,
        )
    )

    placed: set[bytes] = set()
    for keys, first in found:
        before = first
        for each in keys:
            of = parents[int.from_bytes(each)]
            assert before == (None if of is None else key(of))
            assert before is None or before in placed or before == key(7)
            placed.add(each)
            before = each
    assert placed == {key(each) for each in parents}
    assert max(len(keys) for keys, _ in found) == 2


def test_a_port_that_is_in_use_is_named() -> None:
    async def whole() -> None:
        context = zmq.Context()
        taken = context.socket(zmq.PUB)
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        try:
            with pytest.raises(
                UnavailableError, match=f"tcp://127.0.0.1:{port} cannot be listened"
            ):
                EventPublisher(replace(ANY, port=port), ["instance-0"])
            with pytest.raises(
                UnavailableError, match=f"tcp://127.0.0.1:{port} cannot be listened"
            ):
                EventPublisher(replace(ANY, replay_port=port), ["instance-0"])
        finally:
            context.destroy(linger=0)

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ("host = 'a-host'", "events.host: is 'a-host', must be an IP address"),
        ("port = 5657", "events.replay_port: is 5657, must be another one than events.port"),
        (
            "host = '0.0.0.0'\ntoken_ids = true",
            "events.token_ids: is true with events.host '0.0.0.0', must be false, or "
            "events.unencrypted true",
        ),
        ("hashes = 'sha'", "events.hashes: is 'sha', must be one of integers, bytes"),
        ("port = 70000", "events.port: is 70000"),
    ],
)
def test_settings_that_cannot_be_or_should_not_be_are_refused(given: str, refusal: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(f"{BLOCKS}[events]\n{given}\n")

    assert str(refused.value).startswith(refusal)


def test_settings_read_back_as_they_were_printed() -> None:
    text = f"{BLOCKS}[events]\nhost = '0.0.0.0'\ntoken_ids = true\nunencrypted = true\n"
    config = parse_config(text)

    assert config.events == EventsTable(host="0.0.0.0", token_ids=True, unencrypted=True)
    assert parse_config(config.to_toml()) == config
    assert parse_config(BLOCKS).events is None


def test_events_belong_to_the_command_that_serves_http(model_folder: Path) -> None:
    def refused(events: str, **options: Any) -> str:
        config = parse_config(f"{BLOCKS}[events]\n{events}")
        with pytest.raises(ConfigError) as refusal:
            settle(config, ServeOptions(model=str(model_folder), **options))
        return str(refusal.value)

    elsewhere = refused("", role="decode", router="tcp://127.0.0.1:5000")
    assert elsewhere.startswith("events: is given to a command whose instances join a router")
    near = refused("port = 5557\nreplay_port = 5558", instances=2)
    assert near.startswith("events.replay_port: is 5558 with events.port 5557, must be at least 2")
    assert refused("port = 65535", instances=2).startswith("events.port: is 65535, must be at most")


def test_a_server_publishes_what_its_instance_has_with_tokens(
    model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(
        'version = 1\nmodel.name = "small-model"\n'
        # So few events are remembered that the instance often has to send all it has.
        "cache = { blocks = 24, block_tokens = 8, event_count = 3 }\n"
        "[events]\nport = 0\nreplay_port = 0\ntoken_ids = true\n"
    )
    with serving(model_folder, "--config", str(file), "--host-gib", "0.01") as running:
        said = capfd.readouterr().err
        found = re.search(r"instance=instance-0 number=0 published=(\S+) replayed=(\S+)", said)
        assert found is not None, said
        subscriber = Subscriber(*found.groups())
        prompts = [[1 + (number * place) % 300 for place in range(60)] for number in (1, 2, 3, 4)]
        for prompt in prompts:
            running.complete(prompt, max_tokens=20)

        def differences() -> list[str]:
            tiers = {tier["name"]: tier["ready"] for tier in running.cache()["cache"]["tiers"]}
            subscriber.ask(SNAPSHOT)
            held = {medium: len(each) for medium, each in subscriber.held().items()}
            ready = {"GPU": tiers["device"], "CPU": tiers["host"]}
            return [] if held == ready else [f"{held} and {ready}"]

        eventually(differences, [])
        known = [block["tokens"] for block in subscriber.blocks["CPU"].values()]
        assert prompts[0][:8] in known
        assert all(len(tokens) == 8 for tokens in known)
        assert len(known) > 4 * (60 // 8), "blocks of answers are among them"

        before = subscriber.number
        [instance] = pids_of("instance-0", running)
        os.kill(instance, signal.SIGKILL)
        deadline = time.monotonic() + 300
        while subscriber.held() and time.monotonic() < deadline:
            subscriber.read(wait_ms=1000)
        assert subscriber.held() == {}
        assert subscriber.number > before
        subscriber.close()
