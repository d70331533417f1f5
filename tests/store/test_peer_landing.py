"""Blocks of peers by NIXL: the same ones, and what is lost on the way is a miss and no more."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.bench.peer_blocks import SPACE as BENCH_SPACE
from lab.bench.peer_blocks_child import keys_of, make_arena
from penstock.cache.operations import BlockFault
from penstock.config.shared_stores import PeerSettings
from penstock.relay import process as relay_process
from penstock.relay.agents import is_installed
from penstock.relay.messages import NixlDescription, encode_description
from penstock.store.base import LoadJob
from penstock.store.peers import landing, network
from penstock.store.peers.blobs import PeerBlobs
from penstock.store.peers.landing import LANDED, LenderLink
from penstock.store.peers.messages import FOUND, AreaOffered, NoLanding, PeerHello, frames
from penstock.store.peers.tier import PeerTier
from penstock.transport.zeromq import Listener
from tests.ports import free_ports
from tests.stopped import stop_process
from tests.store.shared_engines import draw_chain
from tests.store.test_peers import (
    PeerEngine,
    Peers,
    channel_to,
    damage,
    is_cut_off,
    until,
)
from tests.store.test_shared import packed, split

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.store.base import EndedJob
    from penstock.store.peers.messages import ReadBlocks
    from penstock.vocabulary.layout import Layout

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")


class NixlPeers(Peers):
    """Peers that map nothing, and read by NIXL."""

    def engine(self, number: int, layouts: list[Layout], **others: object) -> PeerEngine:  # type: ignore[override]
        return super().engine(number, layouts, **{"transport": "nixl"} | others)


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlPeers]:
    monkeypatch.setattr(network, "_listen_for_readers", lambda _: None)
    monkeypatch.setattr(network, "RETRY_S", 0.01)
    monkeypatch.setattr(network, "RETRY_MAX_S", 0.05)
    with ExitStack() as stack:
        yield NixlPeers(tmp_path, stack)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of reads that were answered by NIXL."""
    numbers, write = [], LenderLink.write

    def note(link: LenderLink, read: ReadBlocks, *others: object) -> None:
        write(link, read, *others)  # type: ignore[arg-type]
        numbers.append(read.number)

    monkeypatch.setattr(LenderLink, "write", note)
    return numbers


def lands(tier: PeerTier) -> bool:
    """Whether a peer was told where to write."""
    talks = tier._network._all()
    return any(each.landing is not None and each.landing.is_told for each in talks)


def area_bytes(tier: PeerTier) -> tuple[int, int]:
    """Of areas that are in use, and of those that are not given back yet."""
    site = tier._network._site
    assert site is not None
    return site._target.open_bytes, site._target.retired_bytes


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 4)])
def test_what_one_engine_has_lands_in_another(
    peers: NixlPeers, written: list[int], writers: int, readers: int
) -> None:
    one, other = peers.engine(0, split(writers)), peers.engine(1, packed(readers))
    keys = draw_chain(1, 5)
    one.lend(keys)
    other.knows(5)
    until(lambda: lands(other.tier))

    until(lambda: other.find(keys) == 5)
    for _ in range(3):  # More reads than there are berths.
        assert other.faults_of(keys) == set()
        other.require_loaded(keys)

    assert len(written) > landing.BERTHS or readers == 1
    assert written


def test_what_the_lender_lacks_or_has_damaged_is_a_miss_and_the_rest_lands(
    peers: NixlPeers, written: list[int]
) -> None:
    one, other = peers.engine(0, split(1)), peers.engine(1, split(1))
    keys = draw_chain(1, 4)
    one.lend(keys)
    other.knows(4)
    until(lambda: lands(other.tier))
    with one.tier._network.lock:
        del one.tier._network.books.lendings.lenders[0].slots[keys[1]]

    [ended] = other.load(keys)

    assert set(ended.faults) == {(1, BlockFault.MISSING)}
    other.require_loaded(keys, [ended])
    damage(one)
    assert other.faults_of([keys[0], *keys[2:]]) == {BlockFault.CORRUPT}
    assert other.tier.state().blocks_corrupt == 3
    assert written


@pytest.mark.parametrize("who", ["the reader", "the lender"])
def test_where_one_has_no_nixl_blocks_come_over_the_channel_and_the_log_says_so_once(
    peers: NixlPeers,
    written: list[int],
    who: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    if who == "the reader":
        monkeypatch.setattr(relay_process, "is_installed", lambda: False)
    one = peers.engine(0, split(1), transport="zeromq")
    other = peers.engine(1, split(1))
    keys = draw_chain(1, 3)

    one.lend(keys)

    other.knows(3)
    until(lambda: "blocks come over ZeroMQ" in caplog.text or "peer come over" in caplog.text)
    for _ in range(2):
        assert other.faults_of(keys) == set()
        other.require_loaded(keys)
    lines = [each for each in caplog.messages if "over ZeroMQ, not NIXL" in each]
    assert len(lines) == 1
    assert not written


@pytest.mark.parametrize("whose", ["the lender's", "the reader's"])
def test_where_a_relay_ends_blocks_come_over_the_channel(
    peers: NixlPeers, written: list[int], whose: str
) -> None:
    one, other = peers.engine(0, split(1)), peers.engine(1, split(1), timeout_s=2.0)
    keys = draw_chain(1, 3)
    one.lend(keys)
    other.knows(3)
    until(lambda: lands(other.tier))
    assert other.faults_of(keys) == set()
    assert written
    site = (one if whose == "the lender's" else other).tier._network._site
    assert site is not None
    pid = site._target.relay.pid
    assert pid is not None

    os.kill(pid, signal.SIGKILL)

    until(lambda: not lands(other.tier))
    count = len(written)
    until(lambda: not other.faults_of(keys))
    other.require_loaded(keys)
    assert len(written) == count
    until(lambda: area_bytes(other.tier) == (0, 0))


@pytest.mark.parametrize(
    "said",
    [
        frames.encode(AreaOffered(b"garbage")),
        frames.encode(
            AreaOffered(
                encode_description(
                    NixlDescription(peer="x", metadata=b"x", address=0, size=2 * landing.AREA_BYTES)
                )
            )
        ),
        frames.encode(NoLanding("a lender says that")),
    ],
    ids=["no description", "too large", "of the other side"],
)
def test_a_peer_that_talks_garbage_of_nixl_is_cut_off(peers: NixlPeers, said: bytes) -> None:
    engine = peers.engine(0, split(1))
    channel = channel_to(peers.addresses[0])
    channel.send(frames.encode(PeerHello(1, "")))

    channel.send(said)

    assert is_cut_off(channel)
    assert engine.tier.state().on


def test_a_description_of_nobody_fails_its_writes_and_the_peer_is_told(peers: NixlPeers) -> None:
    engine = peers.engine(0, split(1))
    channel = channel_to(peers.addresses[0])
    channel.send(frames.encode(PeerHello(1, "")))
    description = NixlDescription(peer="x", metadata=b"nobody", address=0, size=1 << 20)

    channel.send(frames.encode(AreaOffered(encode_description(description))))

    def said() -> bool:
        received = channel.receive(deadline=time.monotonic() + 60)
        return isinstance(frames.decode(received.frame), NoLanding)  # type: ignore[union-attr]

    until(said)
    channel.close()
    assert engine.tier.state().on


def test_notices_that_answer_nothing_take_no_berth(peers: NixlPeers) -> None:
    with Listener("peer", peers.addresses[1].replace("unix:", "ipc://")) as listener:
        tier = peers.engine(0, split(1), peers=peers.addresses[1]).tier
        channel = listener.accept(deadline=time.monotonic() + 60)
        assert channel is not None
        channel.send(frames.encode(PeerHello(1, "")))
        until(lambda: lands(tier))
        [talk] = [each for each in tier._network._all() if each.landing]
        found = talk.landing
        assert found is not None

        berths = {found.take_berth(number, 8) for number in range(landing.BERTHS)}

        assert len(berths) == landing.BERTHS
        assert not found.has_room()
        for notice in (b"", b"?" * 7, LANDED.pack(99) + bytes([FOUND])):
            assert found.take(notice) is None
        landed = found.take(LANDED.pack(3) + bytes([FOUND] * 5000))
        assert landed is not None
        assert len(landed.answer.content) == 40_000
        assert found.take(LANDED.pack(3)) is None  # A second time.
        assert not found.has_room()
        landed.free()
        assert found.has_room()
        channel.close()


class Lender:
    """A process with blocks, as that of the benchmark."""

    BLOCK_BYTES, COUNT = 1 << 20, 64

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.place, self.here = (f"127.0.0.1:{port}" for port in free_ports(2))
        # The first pair maps arenas; it is not used.
        pairs = (f"unix:{folder}/0", f"unix:{folder}/1", "zeromq", self.place, self.here, "nixl")
        self._words = [str(each) for each in (self.BLOCK_BYTES, self.COUNT, *pairs)]
        self._stack = stack
        self.start()
        settings = PeerSettings(
            listen=self.here, peers=self.place, transport="nixl", timeout_s=2.0, threads=4
        )
        self.tier = PeerTier(PeerBlobs(settings), ask_s=60, timeout_s=2.0)
        stack.callback(lambda: self.tier.close(deadline=time.monotonic() + 5))
        self.arena = make_arena(self.BLOCK_BYTES, self.COUNT)
        self.keys = keys_of(self.COUNT)
        self.tier.attach(BENCH_SPACE.name, [self.arena])
        until(lambda: self._news() and self.tier.generation(BENCH_SPACE.name) is not None)
        self._ticket = 0

    def start(self) -> None:
        command = [sys.executable, "-m", "lab.bench.peer_blocks_child", *self._words]
        self.process = self._stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ},
            )
        )
        self._stack.callback(self.process.kill)

    def _news(self) -> bool:
        self.tier.take_generations()
        return True

    def is_known(self) -> None:
        until(lambda: self._news() and self.tier.state().blocks == self.COUNT)
        until(lambda: lands(self.tier))

    def load(self) -> set[int]:
        """Loads all blocks; which of them did not come. What came is right."""
        self._ticket += 1
        host, slots = self.arena.host, range(self.COUNT)
        blocks = host.arena.bytes[host.blocks_offset :][: self.COUNT * host.slot_bytes]
        rows = blocks.reshape(self.COUNT, -1)[:, : self.BLOCK_BYTES]
        rows[:] = 0
        job = LoadJob(self._ticket, self.arena, BENCH_SPACE, self.keys, slots, self._ticket)
        self.tier.load(job)
        ended: list[EndedJob] = []
        until(lambda: bool(ended.extend(self.tier.collect()) or ended))
        missing = {at for at, _ in ended[0].faults}
        wanted = np.random.default_rng(1).integers(0, 256, rows.shape, np.uint8)
        for at in set(slots) - missing:
            np.testing.assert_array_equal(rows[at], wanted[at])
        return missing


@pytest.fixture
def lender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lender]:
    monkeypatch.setattr(network, "_listen_for_readers", lambda _: None)
    monkeypatch.setattr(network, "RETRY_S", 0.05)
    monkeypatch.setattr(network, "RETRY_MAX_S", 0.2)
    with ExitStack() as stack:
        yield Lender(tmp_path, stack)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lender_that_ends_in_mid_transfer_costs_its_time_and_nothing_lands_elsewhere(
    lender: Lender, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender.is_known()
    landed, take = [0], landing.Landing.take

    def count(self: landing.Landing, notice: bytes) -> object:
        landed[0] += 1
        if landed[0] == 2 and how == "killed":
            lender.process.kill()
        elif landed[0] == 2:
            stop_process(lender.process.pid)
        return take(self, notice)

    monkeypatch.setattr(landing.Landing, "take", count)
    began = time.monotonic()

    missing = lender.load()

    assert missing
    assert time.monotonic() < began + 60
    assert lender.tier.state().on
    # Its area is given back once nobody can write there, and not before.
    until(lambda: area_bytes(lender.tier) == (0, 0))
    if how == "killed":
        lender.process.wait()
        lender.start()
    else:
        lender.process.send_signal(signal.SIGCONT)
    lender.is_known()
    until(lambda: not lender.load())
