"""Owner and ranks in processes of their own: killed, stopped, brought back, and sharing memory."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from lab.fixtures.channel_suite import soon
from lab.fixtures.rank_channels import CarryingEngine, meet
from penstock.cache.operations import Outcome
from penstock.machine import effects as ef
from penstock.testing.writer_process import PeerProcess, peer_process
from penstock.transport.zeromq import Listener

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.transport.zmq_channel import ZmqChannel

SHAPE = (8, 4, 16)
STEPS_MAX = 2000

# It opens a rank, tells its facts, and then does what its standard input says, line by line.
RANK = """
import hashlib, socket, sys, time
import numpy as np
from penstock.config import parse_config  # Not all that `penstock` exports: it loads sooner.
from penstock.runtime.open import open_rank
from lab.fixtures.rank_channels import serve
from penstock.transport.zeromq import connect

text, number, seed, mode, fd = sys.argv[1:]
kv = np.random.default_rng(int(seed)).random((8, 4, 16))
config = parse_config(text)
arenas = {}
peer = socket.socket(fileno=int(fd)) if mode in ("give", "take") else None
if mode == "take":
    _, (arena,), _, _ = socket.recv_fds(peer, 16, 1)
    arenas = {"host": arena}
rank = open_rank(config, rank=int(number), kv=kv, arenas=arenas)
if mode == "give":
    socket.send_fds(peer, [b"arena"], list(rank.arenas.values()))
print(rank.facts.to_bytes().hex(), flush=True)
for line in sys.stdin:
    match line.split():
        case ["step", plan]:
            if plan != "-":
                rank.take(bytes.fromhex(plan))
            report = rank.step()
            print("-" if report is None else report.hex(), flush=True)
        case ["serve", address]:
            channel = connect(address, name=f"rank {number}", deadline=time.monotonic() + 300)
            print(serve(channel, rank, until=time.monotonic() + 3600), flush=True)
        case ["kv", *slots]:
            print(hashlib.sha256(kv[list(map(int, slots))].tobytes()).hexdigest(), flush=True)
        case ["wipe"]:
            kv[:] = 0
"""


def config_of(ranks: int, *, equal: bool = False) -> str:
    shared = "equal_ranks = true\n" if equal else ""
    return (
        f'version = 1\n[model]\nname = "none"\n[cache]\nblock_tokens = 4\nranks = {ranks}\n{shared}'
        '[[tiers]]\nname = "host"\nkind = "host"\nblocks = 32\n'
    )


def digest(seed: int, slots: list[int]) -> str:
    """What a rank that has not been written to must have in these slots."""
    kv = np.random.default_rng(seed).random(SHAPE)
    return hashlib.sha256(kv[slots].tobytes()).hexdigest()


class RankProcess:
    """A rank, seen from its owner."""

    def __init__(self, peer: PeerProcess, seed: int) -> None:
        self.peer = peer
        self.seed = seed

    @cached_property
    def facts(self) -> penstock.RankFacts:
        """The first that it says; nobody waits for it before, so that ranks start at once."""
        return penstock.RankFacts.from_bytes(bytes.fromhex(self.peer.hear()))

    def step(self, plan: bytes | None) -> bytes | None:
        self.peer.tell(f"step {'-' if plan is None else plan.hex()}")
        report = self.peer.hear()
        return None if report == "-" else bytes.fromhex(report)

    def digest(self, slots: list[int]) -> str:
        self.peer.tell(f"kv {' '.join(map(str, slots))}")
        return self.peer.hear()


@contextmanager
def rank_process(
    text: str, number: int, seed: int, *, mode: str = "own", peer: socket.socket | None = None
) -> Iterator[RankProcess]:
    fds = [] if peer is None else [peer.fileno()]
    with peer_process(
        RANK, text, str(number), str(seed), mode, *(map(str, fds or [-1])), pass_fds=fds
    ) as process:
        yield RankProcess(process, seed)


@contextmanager
def rank_processes(count: int) -> Iterator[list[RankProcess]]:
    with ExitStack() as stack:
        text = config_of(count)
        yield [stack.enter_context(rank_process(text, n, 10 + n)) for n in range(count)]


def keys_of(config: penstock.Config, count: int) -> list[bytes]:
    return config.key_chain().extend(range(4 * count))


def settle(owner: penstock.Offload, ranks: list[RankProcess]) -> list[ef.Ended | ef.Settled]:
    """Steps as an engine does: the plan goes out with the step, reports come back."""
    for _ in range(STEPS_MAX):
        owner.step()
        plan = owner.ranks.take_plan()
        for report in [rank.step(plan) for rank in ranks]:
            if report is not None:
                owner.ranks.receive(report)
        if not owner.busy:
            owner.audit()
            return owner.poll()
    raise AssertionError(f"copies are still under way after {STEPS_MAX} steps")


# ---------------------------------------------------------------- with the engine's messages


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_in_processes_get_back_what_they_gave(count: int) -> None:
    config = penstock.parse_config(config_of(count))
    keys = keys_of(config, 3)
    with rank_processes(count) as ranks:
        owner = penstock.open_offload(config, ranks=[rank.facts for rank in ranks])
        owner.save(keys, [4, 1, 2], cause="save")
        settle(owner, ranks)
        for rank in ranks:
            rank.peer.tell("wipe")

        owner.load(keys, [0, 7, 5], cause="load")
        (ended,) = settle(owner, ranks)

        assert isinstance(ended, ef.Ended)
        assert ended.outcome is Outcome.DONE
        for rank in ranks:
            assert rank.digest([0, 7, 5]) == digest(rank.seed, [4, 1, 2])


def test_a_killed_rank_fails_its_operations_and_works_again_when_it_is_back() -> None:
    config = penstock.parse_config(config_of(2))
    keys = keys_of(config, 3)
    with rank_processes(2) as ranks, rank_process(config_of(2), 1, 99) as successor:
        owner = penstock.open_offload(config, ranks=[rank.facts for rank in ranks])
        owner.save(keys, [0, 1, 2], cause="save")
        plan = owner.ranks.take_plan()
        report = ranks[0].step(plan)
        assert report is not None
        owner.ranks.receive(report)

        ranks[1].peer.kill()
        owner.ranks.lose(1, "killed by SIGKILL")
        (ended,) = owner.poll()
        lost = owner.health()
        owner.ranks.rejoin(successor.facts)
        ranks[1] = successor
        owner.save(keys, [0, 1, 2], cause="again")
        (saved,) = settle(owner, ranks)

        assert isinstance(ended, ef.Ended)
        assert (ended.outcome, ended.failure) == (Outcome.FAILED, "rank 1 is lost")
        assert lost.reasons == ("rank 1 is lost: killed by SIGKILL",)
        assert isinstance(saved, ef.Ended)
        assert saved.outcome is Outcome.DONE
        assert owner.health().ok
        assert owner.lookup(keys).ready == 3


def test_two_engines_at_once_share_nothing() -> None:
    config = penstock.parse_config(config_of(1))
    keys = keys_of(config, 2)
    with rank_processes(1) as ours, rank_process(config_of(1), 0, 50) as other:
        theirs = [other]
        engines = [
            (penstock.open_offload(config, ranks=[rank.facts for rank in ranks]), ranks)
            for ranks in (ours, theirs)
        ]
        for owner, _ in engines:
            owner.save(keys, [0, 1], cause="save")
        for owner, ranks in engines:
            settle(owner, ranks)
            owner.load(keys, [6, 7], cause="load")
            settle(owner, ranks)

        for _, ranks in engines:
            for rank in ranks:
                assert rank.digest([6, 7]) == digest(rank.seed, [0, 1])


# ---------------------------------------------------------------- ranks with equal bytes


def test_ranks_with_equal_bytes_share_memory_that_one_of_them_writes() -> None:
    text = config_of(2, equal=True)
    config = penstock.parse_config(text)
    keys = keys_of(config, 3)
    ours, theirs = socket.socketpair()
    with ours, theirs, rank_process(text, 0, 7, mode="give", peer=theirs) as writer:
        _, (fd,), _, _ = socket.recv_fds(ours, 16, 1)
        near, far = socket.socketpair()
        socket.send_fds(near, [b"arena"], [fd])
        with near, far, rank_process(text, 1, 7, mode="take", peer=far) as reader:
            os.close(fd)
            owner = penstock.open_offload(config, ranks=[writer.facts, reader.facts])
            owner.save(keys, [0, 1, 2], cause="save")
            owner.step()
            plan = owner.ranks.take_plan()
            # The reader has nothing to write, and says so at once.
            told = reader.step(plan)
            assert told is not None
            owner.ranks.receive(told)
            ready = owner.lookup(keys).ready
            report = writer.step(plan)
            assert report is not None
            owner.ranks.receive(report)

            for rank in (writer, reader):
                rank.peer.tell("wipe")
            owner.load(keys, [5, 6, 7], cause="load")
            (ended,) = [each for each in settle(owner, [writer, reader]) if _is_load(each)]

            assert ready == 0
            assert writer.facts.tiers[0].memory == reader.facts.tiers[0].memory
            assert isinstance(ended, ef.Ended)
            assert ended.outcome is Outcome.DONE
            for rank in (writer, reader):
                assert rank.digest([5, 6, 7]) == digest(7, [0, 1, 2])


def _is_load(each: ef.Ended | ef.Settled) -> bool:
    return isinstance(each, ef.Ended) and each.purpose.value == "load"


# ---------------------------------------------------------------- over ZeroMQ


@contextmanager
def served(
    count: int,
) -> Iterator[tuple[CarryingEngine[penstock.Offload], list[RankProcess], Listener]]:
    """An engine whose messages travel over channels, and its ranks."""
    config = penstock.parse_config(config_of(count))
    with rank_processes(count) as ranks, Listener("owner") as listener:
        channels: list[ZmqChannel] = []
        facts: list[penstock.RankFacts] = []
        for rank in ranks:
            assert rank.facts
            rank.peer.tell(f"serve {listener.address}")
            channels.append(accept(listener))
            facts.append(meet(channels[-1], deadline=soon()))
        owner = penstock.open_offload(config, ranks=facts)
        with closing(CarryingEngine(owner, facts, channels)) as engine:
            yield engine, ranks, listener


def accept(listener: Listener) -> ZmqChannel:
    channel = listener.accept(deadline=soon())
    assert channel is not None
    return channel


def finish(engine: CarryingEngine[penstock.Offload]) -> list[ef.Ended | ef.Settled]:
    engine.finish(deadline=soon())
    return engine.cache.poll()


def test_ranks_serve_their_owner_over_zeromq() -> None:
    with served(2) as (engine, ranks, _):
        keys = keys_of(penstock.parse_config(config_of(2)), 3)
        engine.cache.save(keys, [0, 1, 2], cause="save")
        finish(engine)
        engine.cache.load(keys, [5, 6, 7], cause="load")
        (ended,) = finish(engine)
        drained = engine.close()

        assert isinstance(ended, ef.Ended)
        assert ended.outcome is Outcome.DONE
        assert drained.clean
        for rank in ranks:
            assert rank.peer.hear() == "the owner closed the channel"
            assert rank.digest([5, 6, 7]) == digest(rank.seed, [0, 1, 2])


def test_a_rank_that_is_killed_while_it_serves_is_noticed_and_replaced() -> None:
    config = penstock.parse_config(config_of(2))
    keys = keys_of(config, 3)
    with served(2) as (engine, ranks, listener), rank_process(config_of(2), 1, 99) as successor:
        owner = engine.cache
        ranks[1].peer.stop()
        owner.save(keys, [0, 1, 2], cause="save")
        engine.step()
        ranks[1].peer.kill()

        # If it is noticed before the other rank has reported, the end is told in two parts.
        ended = finish(engine)[0]
        lost = owner.health()
        assert successor.facts
        successor.peer.tell(f"serve {listener.address}")
        channel = accept(listener)
        engine.rejoin(meet(channel, deadline=soon()), channel)
        owner.save(keys, [0, 1, 2], cause="again")
        (saved,) = finish(engine)

        assert isinstance(ended, ef.Ended)
        assert ended.outcome is Outcome.FAILED
        assert len(lost.reasons) == 1
        assert lost.reasons[0].startswith("rank 1 is lost: ")
        assert isinstance(saved, ef.Ended)
        assert saved.outcome is Outcome.DONE
        assert owner.health().ok


def test_an_owner_with_nothing_to_do_waits_without_using_the_cpu() -> None:
    with served(2) as (engine, _, _):
        engine.step()
        started, used = time.monotonic(), time.process_time()

        woken = engine.wait(started + 1.0)

        assert not woken
        assert time.monotonic() - started >= 1.0
        # Whoever asks over and over uses all of it; the garbage collector may have its turn.
        assert time.process_time() - used < 0.5
