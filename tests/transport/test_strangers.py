"""Strangers at every kind of socket that a process of ours binds: it lives, and goes on serving."""

from __future__ import annotations

import os
import random
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lab.fixtures.channel_suite import receive_frame, soon
from penstock.errors import UnavailableError
from penstock.testing.writer_process import peer_process
from penstock.transport.shared_memory import SharedTarget, connect_shared
from penstock.transport.unix_sockets import (
    SOCKET_PATH_BYTES_MAX,
    private_folder,
    require_private,
    runtime_root,
    shared_folder,
    socket_path,
)
from penstock.transport.zeromq import IPC, LOOPBACK, ChannelSettings, connect, dial
from tests.transport.hostile import bound_by, send_stream, storm, streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.testing.writer_process import PeerProcess
    from penstock.transport.zmq_channel import ZmqChannel

NOBODY = 65534
SECRET = b"a secret that our processes have"
SETTINGS = ChannelSettings(heartbeat_s=0.1, silence_s=600.0, open_s=60.0)
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")

# It lets peers in and says back what they say; its first line is its address. Told to be busy, it
# looks at nothing until it is told otherwise.
ECHO = """
import sys, time
from penstock.transport.base import ChannelClosed, ChannelFailed, ReceivedFrame
from penstock.transport.waiting import wait_any
from penstock.transport.zeromq import ChannelSettings, Listener

settings = ChannelSettings(heartbeat_s=0.1, silence_s=600.0, open_s=60.0)
listener = Listener("engine", sys.argv[1], secret=bytes.fromhex(sys.argv[2]), settings=settings)
print(listener.address, flush=True)
channels = []
while True:
    wait_any([listener, *channels], deadline=time.monotonic() + 600)
    while (found := listener.accept()) is not None:
        channels.append(found)
    for channel in list(channels):
        match channel.receive():
            case ReceivedFrame(frame):
                channel.send(frame)
                if frame == b"be busy":
                    print("busy", flush=True)
                    sys.stdin.readline()
            case ChannelClosed() | ChannelFailed():
                channels.remove(channel)
                channel.close()
"""

# It opens an area for a writer, and tells of its notices.
TARGET = """
import time
from penstock.transport.shared_memory import SharedTarget
from penstock.transport.waiting import wait_readable

target = SharedTarget(huge_pages=False)
print(target.open_area("writer", 4096).description.hex(), flush=True)
while True:
    wait_readable(target.descriptor, time.monotonic() + 600)
    for notice in target.notices():
        print(notice.payload.decode(), flush=True)
"""


@pytest.fixture(name="echo", params=[IPC, LOOPBACK], ids=["ipc", "tcp"])
def start_echo(request: pytest.FixtureRequest) -> Iterator[PeerProcess]:
    with peer_process(ECHO, request.param, SECRET.hex()) as peer:
        yield peer


def join(address: str, secret: bytes = SECRET, name: str = "rank 0") -> ZmqChannel:
    return connect(address, name=name, deadline=soon(), secret=secret, settings=SETTINGS)


def require_echo(channel: ZmqChannel) -> None:
    channel.send(b"still there?")
    assert receive_frame(channel) == b"still there?"


@pytest.mark.parametrize("near", [IPC, LOOPBACK], ids=["ipc", "tcp"])
@pytest.mark.parametrize("secret", [b"", SECRET], ids=["open", "secret"])
def test_no_frame_of_a_stranger_ends_a_process_or_a_channel(near: str, secret: bytes) -> None:
    """At the listener, and at the two sockets that each channel has besides.

    First while the process looks at everything at once, and then while it computes for long and
    what strangers send is not taken.
    """
    with peer_process(ECHO, near, secret.hex()) as peer:
        address = peer.hear()
        with closing(join(address, secret)) as channel:
            places = bound_by(peer.pid)
            for place in places:
                storm(place, random.Random(1))
            require_echo(channel)
            channel.send(b"be busy")
            assert peer.hear() == "busy"
            for place in places:
                storm(place, random.Random(2))
            peer.tell("go on")

            assert receive_frame(channel) == b"be busy"
            require_echo(channel)
            with closing(join(address, secret, "rank 1")) as other:
                require_echo(other)

    assert len(places) == 3


def test_no_frame_of_a_stranger_ends_a_process_that_shares_memory() -> None:
    with peer_process(TARGET) as peer:
        description = bytes.fromhex(peer.hear())
        [place] = bound_by(peer.pid)
        storm(place, random.Random(2))
        with closing(connect_shared(description, grant_s=60.0)) as link:
            link.post([], b"one")
            while link.busy:
                link.observe(budget_bytes=4096)
            storm(place, random.Random(3))
            link.post([], b"two")
            while link.busy:
                link.observe(budget_bytes=4096)

            assert [peer.hear(), peer.hear()] == ["one", "two"]


def test_who_connects_first_to_the_sockets_of_a_channel_does_not_keep_its_peer_out() -> None:
    """The peer was told where to come over tcp, and a stranger was quicker."""
    with peer_process(ECHO, LOOPBACK, SECRET.hex()) as echo:
        require_let_in_after_strangers(echo)


def require_let_in_after_strangers(echo: PeerProcess) -> None:
    address = echo.hear()
    before = bound_by(echo.pid)
    channel = dial(address, name="rank 0", secret=SECRET, settings=SETTINGS)
    # Until this end looks, it has not connected to what the listener made for it.
    deadline = soon()
    while len(made := [place for place in bound_by(echo.pid) if place not in before]) < 2:
        assert deadline > 0
        channel._epoll.poll(0.01)
    for place in made:
        for content in streams(random.Random(4)):
            send_stream(place, content, read=False)

    assert channel.wait_open(deadline=soon())
    require_echo(channel)
    channel.close()


@pytest.mark.parametrize("wrong", [b"", b"another secret of some bytes"], ids=["none", "other"])
def test_who_does_not_have_the_secret_is_not_let_in(echo: PeerProcess, wrong: bytes) -> None:
    address = echo.hear()

    # The other end may not have broken off the connection before a short time is over.
    for open_s in (0.5, 5.0, 50.0):
        settings = ChannelSettings(open_s=open_s)
        with pytest.raises(UnavailableError) as refused:
            connect(address, name="rank 0", deadline=soon(), secret=wrong, settings=settings)
        if "it breaks off" in str(refused.value):
            break

    assert "it and this end may not have the same secret" in str(refused.value)
    with closing(join(address)) as channel:
        require_echo(channel)


def test_who_dials_with_a_secret_says_nothing_to_one_without() -> None:
    """Somebody else may have taken the address of a listener that is not there yet."""
    with peer_process(ECHO, LOOPBACK, "") as peer:
        address = peer.hear()
        impatient = ChannelSettings(open_s=0.5)

        with pytest.raises(UnavailableError, match="no answer"):
            connect(address, name="rank 0", deadline=soon(), secret=SECRET, settings=impatient)


def as_nobody(attempt: Callable[[], object]) -> str:
    """What became of something that another user tries."""
    seen, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            attempt()
            os.write(told, b"done")
        except OSError as error:
            os.write(told, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(told)
    with os.fdopen(seen) as answer:
        return answer.read()


@as_root
def test_another_user_reaches_no_socket_in_a_private_folder(echo: PeerProcess) -> None:
    echo.hear()
    paths = [place for place in bound_by(echo.pid) if place.family == socket.AF_UNIX]

    def call(address: object) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(address)  # type: ignore[arg-type]

    for place in paths:
        assert as_nobody(lambda place=place: call(place.address)) == "PermissionError"


@as_root
def test_another_user_gets_no_memory_even_where_the_folder_lets_it_in(tmp_path: Path) -> None:
    """The kernel tells who calls."""
    folder = Path(os.path.realpath("/tmp")) / f"penstock-open-{os.getpid()}"
    folder.mkdir(mode=0o755)
    target = SharedTarget(huge_pages=False, folder=folder)
    try:
        [path] = folder.iterdir()
        folder.chmod(0o755)
        path.chmod(0o777)
        assert tmp_path.exists()

        def call() -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(bytes(path))
                stranger.send(bytes(16))

        answer = as_nobody(call)
        target.notices()
    finally:
        target.close()
        folder.rmdir()

    assert answer == "done"
    assert target.refused == {"user": 1}


# Folders.

HOLDER = """
import sys
from penstock.transport.unix_sockets import private_folder
print(private_folder(), flush=True)
sys.stdin.read()
"""


def test_a_private_folder_is_of_this_user_alone_and_short_enough_for_sockets() -> None:
    folder = private_folder()

    found = folder.stat()

    assert stat.S_IMODE(found.st_mode) == 0o700
    assert found.st_uid == os.getuid()
    assert len(bytes(socket_path(folder))) <= SOCKET_PATH_BYTES_MAX
    assert private_folder() == folder


def test_a_private_folder_is_gone_with_its_process() -> None:
    with peer_process(HOLDER) as peer:
        folder = Path(peer.hear())
        assert folder.is_dir()
        peer.end_input()
        assert peer.wait() == 0

    assert not folder.exists()


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next_and_no_other() -> None:
    with peer_process(HOLDER) as alive, peer_process(HOLDER) as killed:
        kept, left = Path(alive.hear()), Path(killed.hear())
        (left / "socket").touch()
        killed.kill()
        assert left.is_dir()

        with peer_process(HOLDER) as other:
            other.hear()

            assert not left.exists()
            assert kept.is_dir()


def test_processes_of_this_user_share_a_folder_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / ("too long for the address of a socket" * 3)
    root.mkdir(parents=True, mode=0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root))

    folder = shared_folder("one")

    assert folder.parent == root
    require_private(folder)
    assert shared_folder("one") == folder
    assert shared_folder("other") != folder


@as_root
def test_a_folder_that_another_user_made_first_is_left_alone_and_another_one_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "tmp"
    root.mkdir()
    root.chmod(0o1777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root))
    taken = shared_folder("one")
    os.chown(taken, 65534, 65534)
    (root / f"{taken.name}-0").mkdir(mode=0o700)
    os.chown(root / f"{taken.name}-0", 65534, 65534)

    folder = shared_folder("one")

    assert folder.parent == root
    assert folder != taken
    require_private(folder)
    assert shared_folder("one") == folder
    # Whoever uses it by now is not left by those who come later.
    taken.rmdir()
    assert shared_folder("one") == folder


def environment_with(root: str) -> dict[str, str]:
    return {**os.environ, "XDG_RUNTIME_DIR": root, "TMPDIR": root}


def folder_made_in(root: str) -> Path:
    made = subprocess.run(
        [sys.executable, "-c", HOLDER],
        env=environment_with(root),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(made.stdout.strip())


def test_a_folder_is_made_in_the_runtime_folder_of_the_user() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        assert folder_made_in(short).parent == Path(short)


def test_a_place_that_is_too_long_or_that_others_can_change_is_passed_over(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)

    found = [folder_made_in(str(place)).parent for place in (long, open_to_all, tmp_path / "no")]

    assert found == [Path("/tmp")] * 3


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)

    with pytest.raises(UnavailableError, match="with mode drwxr-x---, must be a folder of user"):
        require_private(tmp_path)


def test_nothing_is_bound_under_an_abstract_name(echo: PeerProcess) -> None:
    echo.hear()

    places = bound_by(echo.pid)

    assert not [place for place in places if str(place.address).startswith("\0")]
    assert runtime_root().is_dir()
    os.kill(echo.pid, signal.SIGTERM)
