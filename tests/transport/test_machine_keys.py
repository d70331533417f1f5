"""The keys of machines: their file, and whom a listener with keys lets in."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from pathlib import Path
from socket import gethostname

import pytest

from lab.fixtures.channel_suite import receive_frame, soon
from penstock.cli.app import run
from penstock.errors import UnavailableError
from penstock.transport import machine_keys
from penstock.transport.machine_keys import MachineKeys, is_local
from penstock.transport.zeromq import IPC, LOOPBACK, ChannelSettings, Listener, connect, dial
from penstock.transport.zmq_link import RefusalReason
from tests.ports import free_ports

EVERYWHERE = "tcp://0.0.0.0:*"
QUICK = ChannelSettings(open_s=0.5)


def two_machines() -> tuple[MachineKeys, MachineKeys]:
    """Both are this one; the first one is dialled at its loopback address."""
    here, there = MachineKeys.new(), MachineKeys.new()
    return (
        here.with_peer("127.0.0.1", here.public).with_peer("there", there.public),
        there.with_peer("127.0.0.1", here.public),
    )


def port_of(listener: Listener) -> str:
    return f"tcp://127.0.0.1:{listener.address.rpartition(':')[2]}"


def accept_while_dialling(listener: Listener, keys: MachineKeys | bytes) -> None:
    """Opens a channel to the listener, which is looked after by the same thread, and uses it."""
    with closing(dial(port_of(listener), name="rank 0", secret=keys)) as ours:
        deadline = soon()
        theirs = None
        while theirs is None or not ours.is_open:
            assert time.monotonic() < deadline, ours.failure
            theirs = theirs or listener.accept(deadline=time.monotonic() + 0.01)
            ours.receive(deadline=time.monotonic() + 0.01)
        with closing(theirs):
            ours.send(b"a prompt")
            assert receive_frame(theirs) == b"a prompt"


@pytest.mark.parametrize("near", [EVERYWHERE, LOOPBACK])
def test_machines_that_list_each_other_talk(near: str) -> None:
    here, there = two_machines()

    with Listener("router", near, secret=here) as listener:
        accept_while_dialling(listener, there)
        accept_while_dialling(listener, here)

        assert not listener.refused


def test_a_key_that_is_not_listed_is_refused_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, _ = two_machines()
    stranger = MachineKeys.new().with_peer("127.0.0.1", here.public)

    with Listener("router", EVERYWHERE, secret=here) as listener, caplog.at_level(logging.WARNING):
        deadline, hint = soon(), ""
        # An attempt may be over before a busy machine has let the listener refuse it.
        while listener.refused[RefusalReason.UNKNOWN_KEY] < 2 or not hint:
            assert time.monotonic() < deadline
            channel = dial(port_of(listener), name="rank 0", secret=stranger, settings=QUICK)
            while channel.failure is None:
                assert listener.accept(deadline=time.monotonic() + 0.01) is None
                channel.receive(deadline=time.monotonic() + 0.01)
            channel.close()
            hint = channel.failure.partition("so it and this end may not ")[2]
        accept_while_dialling(listener, here)

    assert [each.getMessage() for each in caplog.records] == [
        f"refused a connection from 127.0.0.1: its key {stranger.public} is not among the peers of "
        "this machine"
    ]
    assert hint == "know each other's keys"


def test_who_expects_another_key_does_not_connect() -> None:
    here, there = two_machines()
    misled = there.with_peer("127.0.0.1", MachineKeys.new().public)

    with Listener("router", EVERYWHERE, secret=here) as listener:
        channel = dial(port_of(listener), name="rank 0", secret=misled, settings=QUICK)
        while channel.failure is None:
            assert listener.accept(deadline=time.monotonic() + 0.01) is None
            channel.receive(deadline=time.monotonic() + 0.01)
        channel.close()


def test_a_secret_does_not_open_a_listener_with_keys() -> None:
    here, _ = two_machines()

    with (
        Listener("router", LOOPBACK, secret=here) as listener,
        closing(
            dial(listener.address, name="x", secret=b"sixteen bytes or more", settings=QUICK)
        ) as channel,
    ):
        while channel.failure is None:
            assert listener.accept(deadline=time.monotonic() + 0.01) is None
            channel.receive(deadline=time.monotonic() + 0.01)


@pytest.mark.parametrize("secret", [b"", b"sixteen bytes or more"])
@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:7000", "tcp://*:7000", "tcp://eth0:7000", "tcp://[::]:7000"]
)
def test_nothing_is_done_without_keys_where_other_machines_are(address: str, secret: bytes) -> None:
    with pytest.raises(ValueError, match="which other machines can reach: it needs the keys"):
        Listener("router", address, secret=secret)
    with pytest.raises(ValueError, match="which other machines can reach: it needs the keys"):
        dial(address, name="rank 0", secret=secret)


def test_a_host_without_a_key_is_not_dialled() -> None:
    here, _ = two_machines()

    with pytest.raises(UnavailableError, match=r"no key for host '192\.0\.2\.1'"):
        connect("tcp://192.0.2.1:7000", name="rank 0", secret=here, deadline=soon())


@pytest.mark.parametrize(
    ("address", "local"),
    [
        (IPC, True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://127.0.0.2:*", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://localhost.example:1", False),
    ],
)
def test_which_addresses_are_of_this_machine_alone(address: str, local: bool) -> None:  # noqa: FBT001
    assert is_local(address) is local


@pytest.mark.parametrize("port", ["*", "{free}"])
def test_a_listener_that_was_named_is_dialled_by_its_name(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its IP address, no peer would find its key: this is how pods and machines of DNS go."""
    name = gethostname().lower()
    monkeypatch.setattr(machine_keys, "is_loopback", lambda host: host != name)
    here = MachineKeys.new()
    keys = here.with_peer(name, here.public)
    [free] = free_ports(1)

    with Listener("router", f"tcp://{name}:{port.format(free=free)}", secret=keys) as listener:
        assert listener.address.startswith(f"tcp://{name}:")
        channel = dial(listener.address, name="rank 0", secret=keys)
        with closing(channel):
            while not channel.is_open:
                listener.accept(deadline=time.monotonic() + 0.01)
                channel.receive(deadline=time.monotonic() + 0.01)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "*", "lo"])
def test_another_listener_is_dialled_by_its_ip_address(host: str) -> None:
    here, _ = two_machines()

    with Listener("router", f"tcp://{host}:*", secret=here) as listener:
        assert listener.address.startswith(("tcp://127.0.0.1:", "tcp://0.0.0.0:"))


def test_listeners_with_keys_end_without_a_trace() -> None:
    here, there = two_machines()
    before = {path.name for path in Path("/proc/self/task").iterdir()}

    for _ in range(3):
        with Listener("router", EVERYWHERE, secret=here) as listener:
            accept_while_dialling(listener, there)

    after = {path.name for path in Path("/proc/self/task").iterdir()}
    assert len(after) <= len(before) + 2  # The threads of the context that channels have.


# The file, and the command


def test_a_file_is_made_listed_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = tmp_path / "ours.keys", tmp_path / "theirs.keys"

    assert run(["keys", "new", str(ours), "10.0.0.1"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert run(["keys", "new", str(theirs), "GPU-7.example"]) == 0
    assert run(line.replace("FILE", str(theirs)).split()[1:]) == 0
    capsys.readouterr()
    assert run(["keys", "show", str(theirs)]) == 0
    shown = capsys.readouterr().out

    here, there = MachineKeys.read(ours), MachineKeys.read(theirs)
    assert ours.stat().st_mode & 0o777 == theirs.stat().st_mode & 0o777 == 0o600
    assert there.peers == {"10.0.0.1": here.public, "gpu-7.example": there.public}
    assert there.key_of("tcp://10.0.0.1:7000") == here.public_z85
    assert there.key_of("tcp://127.0.0.1:7000") == there.public_z85
    assert here.public in shown
    assert there.private not in shown
    assert there.private not in repr(there)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.keys", "theirs.keys"]


def test_a_file_that_exists_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.keys"
    path.write_text("mine")

    assert run(["keys", "new", str(path), "10.0.0.1"]) == 2

    assert "which exists, must be a new file" in " ".join(capsys.readouterr().err.split())
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["10.0.0.1:7000", "ab" * 32], "HOST: has '10.0.0.1:7000', must be a host"),
        (["", "ab" * 32], "HOST: has '', must be a host"),
        (["10.0.0.1", "ab"], "PUBLIC: is 'ab', must be 64 hexadecimal digits"),
        (["10.0.0.1", "xy" * 32], "must be 64 hexadecimal digits"),
    ],
)
def test_wrong_hosts_and_keys_are_refused(
    tmp_path: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.keys"
    MachineKeys.new().write(path)
    before = path.read_bytes()

    assert run(["keys", "add", str(path), *arguments]) == 2

    assert problem in " ".join(capsys.readouterr().err.split())
    assert path.read_bytes() == before


GOOD = MachineKeys(  # The same in every process that collects the tests.
    public="8f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285f",
    private=bytes(range(32)).hex(),
)


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        ("", 0o600, "public is '', must be 64 hexadecimal digits"),
        ("\x00", 0o600, "is no file of `penstock keys new`"),
        (f'public = "{GOOD.public}"\nprivate = "{GOOD.public}"', 0o600, "is not that of private"),
        (f'public = "{GOOD.public}"\nprivate = 7', 0o600, "private must be 64 hexadecimal digits"),
        ('pubic = "x"', 0o600, "pubic is not known, must be public, private, peers"),
        ("peers = 7", 0o600, "peers is 7, must be a table"),
        ('public = "x"', 0o644, "with mode -rw-r--r--, must be of user"),
        ("x" * (1 << 21), 0o600, "must have at most 1048576"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused(
    tmp_path: Path, content: str, mode: int, problem: str
) -> None:
    path = tmp_path / "machine.keys"
    path.write_text(content)
    path.chmod(mode)

    with pytest.raises(ValueError, match=problem) as refused:
        MachineKeys.read(path)

    assert GOOD.private not in str(refused.value)
