"""What the store process does with clients that are broken, hostile, too many or asleep."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from hashlib import shake_128
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.store.process.link import FoundInStore
from penstock.store.process.messages import (
    FRAME_BYTES_MAX,
    PAGE_KEYS_MAX,
    ArenaOffered,
    FindRequest,
    LoadRequest,
    OwnerHello,
    PageRequest,
    SaveRequest,
    StorePing,
    answers,
    arena_name,
    requests,
)
from penstock.store.process.server import SESSIONS_MAX
from penstock.transport.unix_sockets import send_packet
from penstock.vocabulary.keys import KEY_BYTES
from tests.store.segments import FORM
from tests.store.store_lab import DISK, PATIENCE_S, SLOTS, SPACE, StoreEngine, StoreProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.store.process.messages import AnyStoreRequest


class RawClient:
    """A connection that sends what it likes."""

    def __init__(self, path: str) -> None:
        # Not as an engine connects: that one fails where the process has sent it away already.
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(PATIENCE_S)
        self.channel.connect(path)

    def send(self, *batch: AnyStoreRequest, fd: int | None = None) -> None:
        send_packet(self.channel, requests.encode(batch), fd)

    def read_end(self) -> str:
        """Why the process ended the session."""
        why = ""
        while True:
            try:
                frame = self.channel.recv(FRAME_BYTES_MAX)
            except ConnectionResetError:
                continue
            if not frame:
                return why
            why = getattr(answers.decode(frame)[-1], "why", why)

    def close(self) -> None:
        self.channel.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """One process for all: nothing that a client does may harm it."""
    with closing(StoreProcess(tmp_path_factory.mktemp("clients"))) as store:
        store.start()
        yield store


@pytest.fixture(scope="module")
def engine(store: StoreProcess) -> Iterator[StoreEngine]:
    """One that has nothing to do with the others and must not notice them."""
    with closing(StoreEngine(store.config, life=1)) as engine:
        yield engine.up()


@pytest.fixture
def client(store: StoreProcess, engine: StoreEngine) -> Iterator[RawClient]:
    assert engine.link.is_up
    with closing(RawClient(store.config.socket)) as client:
        yield client


def hello(engine: StoreEngine, life: int = 9, tiers: Sequence[str] = ("disk",)) -> OwnerHello:
    return OwnerHello(life, SPACE, [engine.offers[0].name], list(tiers))


KEY = bytes(KEY_BYTES)
HEADER = requests.encode([])[:3]


@pytest.mark.parametrize(
    "frame",
    [
        b"\0",
        b"P",
        b"PQ",
        pytest.param(b"PQ" + bytes([HEADER[2] + 1]) + b"\x90", id="of another version"),
        HEADER,
        HEADER + b"\xc0",
        HEADER + b"\x91\x91\xa4nope",
        requests.encode([StorePing()]),
        requests.encode([FindRequest(1, 0, KEY, 0)]),
        requests.encode([OwnerHello(1, SPACE, ["memfd 0:0"], ["disk"])])[:-3],
        shake_128(b"garbage").digest(100),
        pytest.param(bytes(FRAME_BYTES_MAX + 1), id="too long"),
    ],
)
def test_garbage_ends_its_session_and_nothing_else(
    frame: bytes, client: RawClient, engine: StoreEngine
) -> None:
    client.channel.send(frame)

    client.read_end()

    engine.save([1])


def test_an_empty_packet_ends_its_session(client: RawClient, engine: StoreEngine) -> None:
    client.channel.send(b"")

    client.read_end()

    engine.save([1])


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (SaveRequest(1, 0, KEY, KEY, b"", 0, 1.0), "slots have 0 bytes, must have 4"),
        (SaveRequest(1, 0, KEY, b"", bytes(4), 0, 1.0), "parents have 0 bytes"),
        (SaveRequest(1, 0, KEY[1:], KEY, bytes(4), 0, 1.0), "keys have 15 bytes"),
        (LoadRequest(1, 0, KEY, b"\xff" * 4, 0, 1.0), "slot is -1, must be at least 0"),
        (
            LoadRequest(1, 0, KEY, SLOTS.to_bytes(4, "little"), 0, 1.0),
            "slot is 64, must be below 64",
        ),
        (LoadRequest(1, 3, KEY, bytes(4), 0, 1.0), "tier is 3, must be below 1"),
        (LoadRequest(1, 0, KEY, bytes(4), 0, float("nan")), "remaining_s is nan"),
        (PageRequest(1, None, 5), "tier is 1, must be below 1"),
    ],
)
def test_a_request_that_makes_no_sense_ends_its_session(
    request_: AnyStoreRequest, why: str, client: RawClient, engine: StoreEngine
) -> None:
    client.send(hello(engine), request_)

    assert why in client.read_end()

    engine.save([1])


def test_an_unknown_tier_is_refused_with_those_that_there_are(
    client: RawClient, engine: StoreEngine
) -> None:
    client.send(hello(engine, tiers=["tape"]))

    assert client.read_end() == "there is no tier 'tape' here, must be one of: disk"


def offer_of(engine: StoreEngine, **changed: object) -> ArenaOffered:
    fields = {
        "name": engine.offers[0].name,
        "slot_count": SLOTS,
        "form": FORM.to_bytes(),
        "part": bytes(16),
    }
    return ArenaOffered(**{**fields, **changed})  # type: ignore[arg-type]


def test_an_arena_of_another_name_size_or_form_is_refused(
    store: StoreProcess, engine: StoreEngine
) -> None:
    fd = engine.hosts[0].arena.fd
    pipe = os.pipe()
    wrong = [
        (offer_of(engine, name="memfd 1:1"), fd, "must be 'memfd"),
        (offer_of(engine, slot_count=SLOTS + 100_000), fd, "it was made for other blocks"),
        (offer_of(engine, form=b"no form"), fd, "form cannot be read"),
        (offer_of(engine), None, "0 descriptors"),
        (offer_of(engine, name=arena_name(pipe[0])), pipe[0], "is no arena"),
    ]

    for offer, passed, why in wrong:
        with closing(RawClient(store.config.socket)) as client:
            client.send(offer, fd=passed)
            assert why in client.read_end()

    for end in pipe:
        os.close(end)
    assert store.mapped_arenas() == 1
    engine.save([1])


def test_a_client_that_does_not_read_is_cut_off(client: RawClient, engine: StoreEngine) -> None:
    client.channel.settimeout(0)
    for start in range(0, 240, 60):
        engine.save(range(start, start + 60))
    client.send(hello(engine))
    question = requests.encode([PageRequest(0, None, PAGE_KEYS_MAX)] * 16)
    deadline = time.monotonic() + PATIENCE_S

    def ask() -> bool:
        """Whether the session goes on."""
        try:
            sent = send_packet(client.channel, question)
        except (BrokenPipeError, ConnectionResetError):
            return False
        if not sent:
            engine.step(0.01)
        return True

    while ask():
        assert time.monotonic() < deadline

    engine.save([1])


def test_more_sessions_than_allowed_are_refused(store: StoreProcess, engine: StoreEngine) -> None:
    with ExitStack() as stack:
        clients = []
        for number in range(SESSIONS_MAX):
            clients.append(stack.enter_context(closing(RawClient(store.config.socket))))
            if number % 64 == 63:  # Half of what may wait to be accepted.
                engine.link.find(DISK, [])
                engine.take(FoundInStore)
        ends = clients[SESSIONS_MAX - 2 :]

        assert [client.read_end() for client in ends] == [
            f"there are {SESSIONS_MAX} sessions, which is the most"
        ] * 2
        engine.save([1])
    engine.until(lambda: len(os.listdir(f"/proc/{store.pid}/fd")) < 64)


def test_a_client_that_says_nothing_is_sent_away(tmp_path: Path) -> None:
    with closing(StoreProcess(tmp_path / "store")) as store:
        store.file("curt").touch()
        store.start()
        with closing(StoreEngine(store.config)) as engine:
            engine.up()
            with closing(RawClient(store.config.socket)) as client:
                assert "did not say what it is for" in client.read_end()


OTHER_USER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
channel.settimeout(120)
channel.connect(sys.argv[1])
print(channel.recv(4096))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_is_refused(store: StoreProcess, engine: StoreEngine) -> None:
    path = Path(store.config.socket)
    path.chmod(0o777)  # Even then.
    for folder in [path.parent, *path.parent.parents]:
        if folder.stat().st_mode & 0o005 != 0o005 and folder != Path("/"):
            folder.chmod(0o755)

    other = subprocess.run(
        [sys.executable, "-I", "-S", "-c", OTHER_USER, str(path)], capture_output=True, check=False
    )

    assert b"it is of user 65534" in other.stdout, other.stderr
    engine.save([1])


def test_it_sleeps_while_nothing_happens(store: StoreProcess, engine: StoreEngine) -> None:
    engine.save([1])

    def wakes_in_a_second() -> int:
        def wakes() -> int:
            status = Path(f"/proc/{store.pid}/status").read_text()
            return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

        before = wakes()
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            engine.step(0.5)
        return wakes() - before

    # Its last state is sent within a second of its own time, which a busy machine makes longer.
    engine.until(lambda: wakes_in_a_second() <= 2)
