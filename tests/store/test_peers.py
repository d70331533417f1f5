"""Engines read blocks out of each other's host memory: what one has, others find, verified."""

from __future__ import annotations

import gc
import os
import select
import socket
import threading
import time
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest

from lab.fixtures.store_tier_suite import WAIT_S
from penstock.cache.operations import BlockFault
from penstock.config.shared_stores import PeerSettings
from penstock.errors import PeerError, UnavailableError
from penstock.store.base import DIGEST_BYTES, LentBlocks
from penstock.store.clients.blobs import NotKeptError
from penstock.store.peers import discovery, near, network
from penstock.store.peers.blobs import PeerBlobs
from penstock.store.peers.messages import (
    FOUND,
    MISSING,
    BlocksRead,
    Lends,
    PeerHello,
    ReadBlocks,
    Resets,
    frames,
)
from penstock.store.peers.near import ArenaListener, ArenaShown, NearPeer, shown
from penstock.store.peers.tier import PeerTier
from penstock.store.shared.generations import Lineage
from penstock.store.shared.values import generation_name, piece_of
from penstock.transport.base import ChannelClosed, ChannelFailed, ReceivedFrame
from penstock.transport.machine_keys import MachineKeys
from penstock.transport.unix_sockets import send_packet
from penstock.transport.zeromq import Listener, connect
from penstock.vocabulary.keys import KEY_BYTES
from tests.ports import free_ports
from tests.store.shared_engines import SPACE, Engine, draw_chain
from tests.store.test_shared import packed, split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.store.peers.books import Listing
    from penstock.transport.zmq_channel import ZmqChannel
    from penstock.vocabulary.keys import Key
    from penstock.vocabulary.layout import Layout

T = TypeVar("T")


class PeerEngine(Engine):
    """An engine that lends what it has computed."""

    tier: PeerTier

    def lend(self, keys: Sequence[Key], gone: Sequence[Key] = ()) -> None:
        """Computes blocks on every rank, into the first slots, and lends them."""
        slots = list(range(len(keys)))
        for arena in self.arenas if keys else []:
            content = self.expected(arena, keys)
            memory = arena.host.arena.bytes[arena.host.blocks_offset :]
            blocks = memory[: arena.host.slot_count * arena.host.slot_bytes]
            blocks.reshape(arena.host.slot_count, -1)[slots, : content.shape[1]] = content
            sums = arena.span.sum_blocks(content, keys, arena.form.checksum, salt=self.salt)
            arena.host.keep_sums(np.array(slots, np.int32), sums)
        lent = LentBlocks(id(self), self.arenas, self.space, keys, slots, self.salt)
        self.tier.lend(lent, gone)

    def knows(self, count: int) -> None:
        """Waits until peers have listed so many blocks."""
        until(lambda: self.tier.state().blocks == count)

    def maps(self, blocks: int) -> list[Listing]:
        """Waits until arenas with so many blocks of peers are mapped; what is listed there."""

        def mapped() -> list[Listing]:
            with self.tier._network.lock:
                talks = self.tier._network.books.conversations
                listings = [each for talk in talks for each in talk.listings.values()]
            return [each for each in listings if len(each.arenas) == len(each.pieces)]

        until(lambda: sum(len(each.keys) for each in mapped()) == blocks)
        return mapped()

    def faults_of(self, keys: Sequence[Key]) -> set[BlockFault]:
        return {fault for ended in self.load(keys) for _, fault in ended.faults}


def until(done: Callable[[], bool]) -> None:
    pause, deadline = threading.Event(), time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        pause.wait(0.005)


def wait_for(found: Callable[[], T]) -> T:
    until(lambda: bool(found()))
    return found()


def locked(tier: PeerTier, call: Callable[[], T]) -> T:
    with tier._network.lock:
        return call()


class Peers:
    """Store processes, all of them in this one: each dials all."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack = stack
        self.addresses = [f"unix:{folder}/{number}" for number in range(8)]

    def settings(self, number: int, **others: object) -> PeerSettings:
        peers = ",".join(self.addresses)
        return PeerSettings(
            **{"listen": self.addresses[number], "peers": peers, "timeout_s": 60.0} | others  # type: ignore[arg-type]
        )

    def tier(self, number: int, **others: object) -> PeerTier:
        settings = self.settings(number, **others)
        tier = PeerTier(PeerBlobs(settings), ask_s=60, timeout_s=settings.timeout_s)
        self._stack.callback(lambda: tier.close(deadline=time.monotonic() + 5))
        return tier

    def engine(self, number: int, layouts: Sequence[Layout], **others: object) -> PeerEngine:
        return PeerEngine(self.tier(number, **others), layouts, salt=number + 1)


@pytest.fixture(params=["mapped", "over a channel"])
def peers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Peers]:
    """Peers that map each other's arenas, or that do not: as if on other machines."""
    if request.param != "mapped":
        monkeypatch.setattr(network, "_listen_for_readers", lambda _: None)
    monkeypatch.setattr(network, "RETRY_S", 0.01)
    monkeypatch.setattr(network, "RETRY_MAX_S", 0.05)
    with ExitStack() as stack:
        yield Peers(tmp_path, stack)


mapped_only = pytest.mark.parametrize("peers", ["mapped"], indirect=True)
channel_only = pytest.mark.parametrize("peers", ["over a channel"], indirect=True)


def test_what_one_engine_has_in_memory_others_find_and_load(peers: Peers) -> None:
    engines = [peers.engine(number, split(1)) for number in range(4)]
    keys = draw_chain(1, 5)

    engines[0].lend(keys)

    for engine in engines[1:]:
        engine.knows(5)
        assert engine.find(keys) == 5
        assert engine.faults_of(keys) == set()
        engine.require_loaded(keys)


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (4, 2), (2, 4)])
def test_engines_of_other_tensor_parallelism_and_layout_read_what_they_need(
    peers: Peers, writers: int, readers: int
) -> None:
    one, other = peers.engine(0, split(writers)), peers.engine(1, packed(readers))
    keys = draw_chain(1, 3)
    one.lend(keys)
    other.knows(3)

    until(lambda: other.find(keys) == 3)  # Once it has read how the other one cuts its blocks.
    assert other.faults_of(keys) == set()
    other.require_loaded(keys)


def test_engines_of_one_process_find_each_others_blocks(peers: Peers) -> None:
    tier = peers.tier(0)
    one, other = PeerEngine(tier, split(1), salt=1), PeerEngine(tier, split(1), salt=2)
    keys = draw_chain(1, 3)

    one.lend(keys)

    assert other.find(keys) == 3
    assert other.faults_of(keys) == set()
    other.require_loaded(keys)


def test_blocks_that_an_engine_has_no_longer_are_not_found(peers: Peers) -> None:
    one, other = peers.engine(0, split(1)), peers.engine(1, split(1))
    keys = draw_chain(1, 5)
    one.lend(keys)
    other.knows(5)

    one.lend([], gone=keys[2:])

    other.knows(2)
    assert other.find(draw_chain(1, 5)) == 2


@channel_only
def test_a_stale_listing_is_a_miss_and_is_not_believed_again(peers: Peers) -> None:
    one, other = peers.engine(0, split(1)), peers.engine(1, split(1))
    keys = draw_chain(1, 3)
    one.lend(keys)
    other.knows(3)
    with one.tier._network.lock:
        one.tier._network.books.lendings.lenders[0].slots.clear()

    assert other.faults_of(keys) == {BlockFault.MISSING}

    assert other.find(keys) == 0


def test_a_slot_with_another_block_or_damaged_bytes_is_a_counted_miss(peers: Peers) -> None:
    one, other = peers.engine(0, split(1)), peers.engine(1, split(1))
    keys, others = draw_chain(1, 2), draw_chain(2, 1)
    one.lend(keys)
    other.knows(2)
    with one.tier._network.lock:
        lender = one.tier._network.books.lendings.lenders[0]
        place = dict(lender.slots)
    one.lend(others)
    lender.slots.update(place)
    one.arenas[0].host.arena.bytes[one.arenas[0].host.blocks_offset :: 97] ^= 1

    assert other.faults_of(keys) == {BlockFault.CORRUPT}

    assert other.tier.state().blocks_corrupt == 2
    assert other.tier.state().on


@channel_only
def test_another_holder_is_asked_for_what_the_first_has_lost(peers: Peers) -> None:
    engines = [peers.engine(number, split(1)) for number in range(3)]
    keys = draw_chain(1, 4)
    for engine in engines[:2]:
        engine.lend(keys)
    engines[2].knows(8)
    with engines[0].tier._network.lock:
        engines[0].tier._network.books.lendings.lenders[0].slots.clear()

    for _ in range(2):  # Whoever is asked first.
        assert engines[2].faults_of(keys) == set()
        engines[2].require_loaded(keys)


def test_a_peer_that_has_gone_lists_nothing_any_more(peers: Peers) -> None:
    one, other = peers.engine(0, split(1)), peers.engine(1, split(1))
    keys = draw_chain(1, 3)
    one.lend(keys)
    other.knows(3)

    one.tier.close(deadline=time.monotonic() + 5)

    other.knows(0)
    assert other.find(keys) == 0
    assert other.tier.state().on


def test_a_peer_that_comes_back_is_listed_again(peers: Peers) -> None:
    one, other = peers.engine(0, split(1)), peers.engine(1, split(1))
    one.tier.close(deadline=time.monotonic() + 5)

    again = peers.engine(0, split(1))
    keys = draw_chain(1, 3)
    again.lend(keys)

    other.knows(3)
    assert other.faults_of(keys) == set()


@channel_only
def test_a_slow_peer_costs_its_time_once_and_the_tier_stays_on(peers: Peers) -> None:
    one, other = peers.engine(0, split(1)), peers.engine(1, split(1), timeout_s=0.2)
    keys = draw_chain(1, 3)
    one.lend(keys)
    other.knows(3)

    with one.tier._network.lock:
        faults = other.faults_of(keys)

    assert faults == {BlockFault.MISSING}
    assert other.find(keys) == 0
    assert other.tier.state().on


def test_after_a_reset_no_block_of_before_is_found_by_anyone(peers: Peers) -> None:
    all_of_them = ",".join(peers.addresses[:2])
    one = peers.engine(0, split(1), peers=all_of_them)
    other = peers.engine(1, split(1), peers=all_of_them)
    keys = draw_chain(1, 3)
    one.lend(keys)
    other.knows(3)

    other.tier.void(SPACE)
    until(lambda: other.tier.void(SPACE) is not None)

    other.follow()
    assert other.find(keys) == 0
    assert set(other.load(keys)[0].faults) == {(at, BlockFault.MISSING) for at in range(3)}
    until(lambda: one.tier.generation(SPACE) == other.space.generation)
    one.follow()
    one.lend(keys)
    until(lambda: other.find(keys) == 3)


def test_a_reset_is_not_kept_until_every_peer_knows_it(peers: Peers) -> None:
    addresses = peers.addresses[:2]
    tier = peers.tier(0, peers=",".join(addresses), timeout_s=0.05)
    one = PeerEngine(tier, split(1))

    tier.void(SPACE)
    until(lambda: any(each.unkept for each in tier.take_generations()))
    assert tier.void(SPACE) is None

    other = peers.engine(1, split(1), peers=",".join(addresses))
    until(lambda: tier.void(SPACE) is not None)
    one.follow()
    until(lambda: other.tier.generation(SPACE) == one.space.generation)


def test_an_engine_that_was_cut_off_during_a_reset_is_not_believed(peers: Peers) -> None:
    one = peers.engine(0, split(1))
    keys = draw_chain(1, 3)
    one.lend(keys)
    old = one.space

    # Another process knew of the reset, and has died since; its engine has not.
    after = peers.tier(1)
    after.expect(SPACE, 4711)
    other = PeerEngine(after, split(1))

    assert other.space.generation == 4711 != old.generation
    assert other.find(keys) == 0
    until(lambda: one.tier.generation(SPACE) == 4711)


def test_strangers_without_a_listed_key_are_refused(tmp_path: Path) -> None:
    host, stranger = "127.0.0.1", MachineKeys.new()
    [port] = free_ports(1)
    own = MachineKeys.new()
    own.with_peer(host, own.public).write(tmp_path / "keys")
    settings = PeerSettings(
        listen=f"{host}:{port}", peers=f"{host}:{port}", keys_file=str(tmp_path / "keys")
    )
    tier = PeerTier(PeerBlobs(settings), ask_s=1, timeout_s=1)
    try:
        for secret in (stranger.with_peer(host, own.public), b""):
            with pytest.raises(UnavailableError):
                connect(
                    f"tcp://{host}:{port}",
                    name="stranger",
                    secret=secret,
                    deadline=time.monotonic() + 0.5,
                )
    finally:
        tier.close(deadline=time.monotonic() + 5)


@pytest.mark.parametrize(
    "said",
    [
        b"garbage",
        frames.encode(Resets(SPACE, [1], [], asks=True)),
        frames.encode(PeerHello(1, "")) + b"?",
    ],
    ids=["no message", "no hello", "more than a message"],
)
def test_a_peer_that_talks_garbage_is_cut_off_and_changes_nothing(
    peers: Peers, said: bytes
) -> None:
    engine = peers.engine(0, split(1))
    channel = channel_to(peers.addresses[0])

    channel.send(said)

    assert is_cut_off(channel)
    assert engine.tier.generation(SPACE) == 0
    assert engine.tier.state().on


def read_of(keys: bytes, spans: list[tuple[int, int]]) -> bytes:
    """A read as a peer may send it, whatever it asks for."""
    return frames.encode(ReadBlocks(1, SPACE, 0, bytes(DIGEST_BYTES), keys, spans))


def channel_to(address: str, name: str = "peer") -> ZmqChannel:
    at = address.replace("unix:", "ipc://")
    return connect(at, name=name, deadline=time.monotonic() + WAIT_S)


def is_cut_off(channel: ZmqChannel) -> bool:
    while isinstance(
        received := channel.receive(deadline=time.monotonic() + WAIT_S), ReceivedFrame
    ):
        pass
    channel.close()
    return isinstance(received, ChannelClosed | ChannelFailed)


@pytest.mark.parametrize(
    ("keys", "spans"),
    [
        (b"", [(0, 1 << 62)] * 4),
        (bytes(KEY_BYTES), [(0, 1 << 62)] * 4),
        (bytes(KEY_BYTES) * 4096, [(0, 1 << 20)]),
        (bytes(KEY_BYTES - 1), [(0, 1)]),
    ],
    ids=["sizes without a key", "sizes", "too much in all", "half a key"],
)
def test_a_peer_that_reads_what_no_value_has_is_cut_off_and_others_go_on(
    peers: Peers, keys: bytes, spans: list[tuple[int, int]]
) -> None:
    one, other = peers.engine(0, split(1)), peers.engine(1, split(1))
    channel = channel_to(peers.addresses[0])
    channel.send(frames.encode(PeerHello(1, "")))

    channel.send(read_of(keys, spans))

    assert is_cut_off(channel)
    chain = draw_chain(1, 2)
    one.lend(chain)
    other.knows(2)
    assert other.faults_of(chain) == set()
    assert one.tier.state().on


def test_of_what_was_not_found_no_byte_is_sent(peers: Peers) -> None:
    engine = peers.engine(0, split(1))
    key = draw_chain(1, 1)[0]
    engine.lend([key])
    channel = channel_to(peers.addresses[0])
    channel.send(frames.encode(PeerHello(1, "")))

    piece = piece_of(engine.arenas[0])
    keys = bytes(KEY_BYTES) + key + bytes(KEY_BYTES)
    channel.send(frames.encode(ReadBlocks(1, SPACE, 0, piece.name, keys, [(0, piece.value_bytes)])))

    deadline, answer = time.monotonic() + WAIT_S, None
    while not isinstance(answer, BlocksRead):
        received = channel.receive(deadline=deadline)
        assert isinstance(received, ReceivedFrame)
        answer = frames.decode(received.frame)
    channel.close()
    assert list(answer.found) == [MISSING, FOUND, MISSING]
    assert len(answer.content) == piece.value_bytes


def damage(engine: PeerEngine) -> None:
    host = engine.arenas[0].host
    host.arena.bytes[host.blocks_offset :: 97] ^= 1


@channel_only
def test_wrong_bytes_of_one_peer_do_not_hide_those_of_another(peers: Peers) -> None:
    engines = [peers.engine(number, split(1)) for number in range(3)]
    keys = draw_chain(1, 4)
    for engine in engines[:2]:
        engine.lend(keys)
    engines[2].knows(8)
    damage(engines[0])

    def all_came() -> bool:
        faults = engines[2].faults_of(keys)
        assert faults <= {BlockFault.CORRUPT}
        return not faults and engines[2].tier.state().blocks < 8

    until(all_came)  # Runs of a load ask one peer and the other in turn.

    assert engines[2].tier.state().blocks_corrupt > 0
    assert engines[2].tier.state().blocks >= 4
    engines[2].require_loaded(keys)


def test_a_damaged_block_of_this_process_is_not_found_again(peers: Peers) -> None:
    tier = peers.tier(0)
    one, other = PeerEngine(tier, split(1), salt=1), PeerEngine(tier, split(1), salt=2)
    far = peers.engine(1, split(1))
    keys = draw_chain(1, 3)
    one.lend(keys)
    far.knows(3)
    damage(one)

    assert other.faults_of(keys) == {BlockFault.CORRUPT}

    assert other.find(keys) == 0
    far.knows(0)


@channel_only
def test_a_peer_that_always_answers_too_late_is_asked_ever_less_often(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "SLOW_S", 0.01)
    one, other = peers.engine(0, split(1)), peers.engine(1, split(1), timeout_s=0.05)
    keys = draw_chain(1, 3)
    one.lend(keys)
    other.knows(3)
    [talk] = [each for each in other.tier._network._talks.values() if each.conversation.listed]
    talk.slow_s = 0.01

    for late in range(1, 4):
        until(lambda: other.find(keys) == 3)
        with one.tier._network.lock:
            assert other.faults_of(keys) == {BlockFault.MISSING}
        for count in (3 + 2 * late - 1, 3 + 2 * late):  # Its answer comes before the second.
            one.lend(draw_chain(100 + count, 1))
            other.knows(count)

        assert talk.slow_s == 0.01 * 2**late


def test_a_peer_that_goes_as_soon_as_it_has_come_is_dialled_ever_less_often(
    peers: Peers,
) -> None:
    tier = peers.tier(0, peers=peers.addresses[1])
    with Listener("peer", peers.addresses[1].replace("unix:", "ipc://")) as listener:
        [target] = wait_for(lambda: list(tier._network._targets.values()))
        while target.retry_s < network.RETRY_MAX_S:
            channel = listener.accept(deadline=time.monotonic() + WAIT_S)
            assert channel is not None
            channel.send(frames.encode(PeerHello(1, "")))
            channel.send(b"garbage")
            assert is_cut_off(channel)


def test_a_reset_is_not_kept_before_it_is_known_who_the_peers_are(peers: Peers) -> None:
    blobs = PeerBlobs(peers.settings(0))
    record = Lineage(5, (0,)).to_record(SPACE)

    with pytest.raises(NotKeptError, match="is not known"):
        blobs.replace(generation_name(SPACE), record, timeout_s=0.01)

    blobs.network.stop()
    blobs.network.run()
    blobs.close()


def test_who_was_found_by_name_stays_a_peer_while_names_cannot_be_looked_up(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "a test")

    monkeypatch.setattr(discovery, "is_name", lambda host: host == "127.0.0.1")
    monkeypatch.setattr(network, "RESOLVE_S", 0.01)
    tier = peers.tier(0, peers=f"127.0.0.1:{free_ports(1)[0]}")
    wait_for(lambda: "is away" in str(locked(tier, lambda: tier._network.unaware(SPACE))))

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    wait_for(lambda: "is not known" in str(locked(tier, lambda: tier._network.unaware(SPACE))))

    assert "is away" in str(locked(tier, lambda: tier._network.unaware(SPACE)))


@mapped_only
def test_blocks_of_a_peer_on_this_machine_need_nothing_of_its_threads(peers: Peers) -> None:
    one, other = peers.engine(0, split(2)), peers.engine(1, split(2))
    keys = draw_chain(1, 5)
    one.lend(keys)
    [listing] = other.maps(5)
    assert not any(each.host.arena.bytes.flags.writeable for each in listing.arenas.values())

    with one.tier._network.lock:
        assert other.faults_of(keys) == set()

    other.require_loaded(keys)


@mapped_only
def test_a_mapped_slot_with_another_block_is_asked_for_and_missed(peers: Peers) -> None:
    one, other = peers.engine(0, split(1)), peers.engine(1, split(1))
    keys = draw_chain(1, 2)
    one.lend(keys)
    other.maps(2)
    damage(one)
    with one.tier._network.lock:  # What it would tell in a moment.
        one.tier._network.books.lendings.lenders[0].slots.clear()

    assert other.faults_of(keys) == {BlockFault.MISSING}
    assert other.tier.state().blocks_corrupt == 0


@mapped_only
def test_the_arena_of_an_engine_that_has_gone_is_unmapped(peers: Peers) -> None:
    one, other = peers.engine(0, split(1)), peers.engine(1, split(1))
    gc.collect()  # Arenas of other tests.
    before = arenas_open()
    for number in range(5):
        one.lend(draw_chain(number, 3))
        [arena] = [weakref.ref(each.host) for each in other.maps(3)[0].arenas.values()]

        one.tier.end_lending(id(one))

        other.knows(0)
        until(lambda: arena() is None)  # noqa: B023
    assert arenas_open() == before


def arenas_open() -> int:
    """Descriptors of arenas that this process has."""
    count = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # Of the folder itself, or of another thread.
            count += str(each.readlink()).startswith("/memfd:")
    return count


class FalsePeer:
    """Greets as a peer that lists a block and shows an arena, as it is told."""

    def __init__(self, address: str, folder: Path, stack: ExitStack) -> None:
        self._path, self._stack = str(folder / "arenas"), stack
        self._arena_listener = stack.enter_context(
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        )
        self._arena_listener.bind(self._path)
        self._arena_listener.listen()
        self._listener = stack.enter_context(
            Listener("false peer", address.replace("unix:", "ipc://"))
        )

    def tell(self, piece: bytes, keys: Sequence[Key], slots: Sequence[int]) -> None:
        channel = self._listener.accept(deadline=time.monotonic() + WAIT_S)
        assert channel is not None
        self._stack.callback(channel.close)
        channel.send(frames.encode(PeerHello(1, self._path)))
        where = np.array(slots, dtype="<i4").tobytes()
        channel.send(frames.encode(Lends(1, SPACE, 0, [piece], b"".join(keys), where, 1, b"")))
        self._arena_listener.settimeout(WAIT_S)
        self._caller = self._stack.enter_context(self._arena_listener.accept()[0])
        self._caller.settimeout(WAIT_S)
        assert self._caller.recv(64) == (1).to_bytes(8, "little")

    def show(self, packet: bytes, fd: int | None) -> None:
        assert send_packet(self._caller, packet, fd)

    def is_left_alone(self) -> bool:
        return self._caller.recv(64) == b""


@mapped_only
@pytest.mark.parametrize(
    "problem", ["garbage", "no descriptor", "another process", "too few bytes", "not sealed"]
)
def test_what_is_no_arena_is_not_mapped_and_the_peer_stays(
    peers: Peers, tmp_path: Path, problem: str
) -> None:
    engine = peers.engine(0, split(1), timeout_s=0.05)
    [arena] = engine.arenas
    with ExitStack() as stack:
        peer = FalsePeer(peers.addresses[1], tmp_path, stack)
        peer.tell(piece_of(arena).name, draw_chain(1, 1), [0])
        process = 2 if problem == "another process" else 1
        count = 2**30 if problem == "too few bytes" else arena.host.slot_count
        packet = shown.encode(ArenaShown(process, 1, count, arena.part, arena.form.to_bytes()))
        fd: int | None = arena.host.arena.fd
        if problem == "not sealed":
            fd = os.memfd_create("a test")
            stack.callback(os.close, fd)
            os.ftruncate(fd, arena.host.arena.size)

        peer.show(
            b"?" if problem == "garbage" else packet, None if problem == "no descriptor" else fd
        )

        assert peer.is_left_alone()
        assert engine.tier.state().blocks == 1


@mapped_only
def test_slots_that_an_arena_does_not_have_are_not_read(peers: Peers, tmp_path: Path) -> None:
    engine = peers.engine(0, split(1), timeout_s=0.05)
    [arena] = engine.arenas
    keys = draw_chain(1, 3)
    with ExitStack() as stack:
        peer = FalsePeer(peers.addresses[1], tmp_path, stack)
        peer.tell(piece_of(arena).name, keys, [-1, arena.host.slot_count, 2**31 - 1])
        shown_arena = ArenaShown(1, 1, arena.host.slot_count, arena.part, arena.form.to_bytes())
        peer.show(shown.encode(shown_arena), arena.host.arena.fd)
        engine.maps(3)

        assert engine.faults_of(keys) == {BlockFault.MISSING}
        assert engine.tier.state().on


def test_a_listener_turns_away_whom_it_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "CALLERS_MAX", 1)
    listener = ArenaListener(1)
    try:
        first, second = NearPeer(listener.path, 1), NearPeer(listener.path, 1)
        first.ask(7)

        assert [number for _, number in listener.asked()] == [7]

        assert not select.select(listener.descriptors, [], [], 0)[0]
        with pytest.raises(PeerError, match="closed"):
            second.take()
        assert first.take() is None
        first.close()
        second.close()
    finally:
        listener.close()
    with pytest.raises(UnavailableError, match="no arenas at"):
        NearPeer(listener.path, 1)


def test_who_does_not_say_who_it_is_is_cut_off(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "GREETING_S", 0.05)
    monkeypatch.setattr(network, "RESOLVE_S", 0.05)
    tier = peers.tier(0)

    assert is_cut_off(channel_to(peers.addresses[0]))

    assert tier.state().on
