"""Strangers beside a server and its pair: as another user, and as this one."""

from __future__ import annotations

import os
import random
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.cli.app import run
from penstock.config.values import ServeTable
from penstock.errors import ConfigError, UnavailableError
from penstock.transport.machine_keys import MachineKeys
from penstock.transport.zeromq import ChannelSettings, connect
from penstock_serve.server.plan import secret_between
from tests.serve.conftest import SOON_S, STATE, Running, command, descendants, serving
from tests.serve.test_roles import SIZES
from tests.transport.hostile import Place, bound_by, storm
from tests.transport.test_strangers import as_nobody, as_root

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ("decode-0", "prefill-0/0")


@pytest.fixture(name="pair", scope="module")
def start_pair(model_folder: Path) -> Iterator[Running]:
    with serving(model_folder, "--prefill-tp", "2", "--decode-tp", "1", *SIZES) as running:
        yield running


def processes(pair: Running) -> list[int]:
    return [pair.process.pid, *descendants(pair.process.pid)]


def our_sockets(pair: Running) -> list[Place]:
    """All that is listened on, but for the HTTP server's port and those of torch's collectives."""
    found = [place for pid in processes(pair) for place in bound_by(pid)]
    return [place for place in found if place.family == socket.AF_UNIX]


def test_no_stranger_of_this_user_joins_or_ends_anything(pair: Running) -> None:
    """It can connect where the kernel lets it, but does not have the secret."""
    before = {pid: command(pid) for pid in processes(pair)}
    reported = pair.complete("Before they came,")["choices"][0]["text"]
    places = our_sockets(pair)
    impatient = ChannelSettings(open_s=0.2)

    for number, place in enumerate(places):
        storm(place, random.Random(number), count=12)  # All of it has each kind elsewhere.
        if place.kind != socket.SOCK_STREAM:
            continue
        for name in NAMES:
            with pytest.raises(UnavailableError):
                connect(place.url, name=name, deadline=float("inf"), settings=impatient)

    assert pair.complete("Before they came,", cache="off")["choices"][0]["text"] == reported
    assert {pid: command(pid) for pid in processes(pair)} == before
    assert all(pair.client.get("/health").json()["instances"].values())
    # The server, the scheduler of the ranks, both schedulers' and two ranks' lines, a target, and
    # two more for each channel between them.
    assert len(places) > 10


@as_root
def test_another_user_reaches_none_of_its_sockets(pair: Running) -> None:
    places = our_sockets(pair)

    def call_all() -> None:
        for place in places:
            stranger = socket.socket(place.family, place.kind)
            with stranger, suppress(PermissionError):
                stranger.connect(place.address)
                raise ConnectionError(f"{place} let another user in")

    assert as_nobody(call_all) == "done"
    assert not [place for place in places if str(place.address).startswith("\0")]


def test_command_lines_show_neither_addresses_nor_configuration(pair: Running) -> None:
    lines = [command(pid) for pid in descendants(pair.process.pid)]

    assert len(lines) >= 5
    for line in lines:
        for word in ("ipc://", "tcp://", "penstock-", "version =", "{", "secret"):
            assert word not in line


def test_its_sockets_lie_in_one_folder_of_mode_0700_that_ends_with_it(pair: Running) -> None:
    """The last test of the pair, which it ends."""
    folders = {Path(str(place.address)).parent for place in our_sockets(pair)}
    [folder] = folders
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_uid == os.getuid()

    pair.process.send_signal(signal.SIGTERM)
    assert pair.process.wait(timeout=SOON_S) == 0

    assert not folder.exists()


def keys_of(tmp_path: Path, *hosts: str) -> Path:
    keys = MachineKeys.new()
    for host in hosts:
        keys = keys.with_peer(host, keys.public)
    keys.write(tmp_path / "machine.keys")
    return tmp_path / "machine.keys"


@pytest.mark.parametrize(
    ("key", "place"), [("--router", "tcp://192.0.2.1:7300"), ("--handoff-host", "192.0.2.1")]
)
def test_a_role_off_the_loopback_interface_needs_keys(
    model_folder: Path,
    key: str,
    place: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"--router": "tcp://127.0.0.1:7000", key: place}
    options = [word for place in places.items() for word in place]
    serve = ["serve", "--model", str(model_folder), "--role", "decode", *options]

    assert run([*serve, "--print-config"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    file = str(keys_of(tmp_path, "192.0.2.1"))
    assert run([*serve, "--keys-file", file, "--print-config"]) == 0

    assert "serve.keys_file: is '', must be a file with the keys of the machines for" in said
    assert f"{place!r}, which is not on the loopback interface: make one" in said


def test_a_host_without_a_key_is_named_before_anything_is_started(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(keys_of(tmp_path, "192.0.2.1"))
    serve = ["serve", "--model", str(model_folder), "--keys-file", file]

    assert run([*serve, "--router", "tcp://192.0.2.2:7000"]) == 2

    assert "there is no key for host '192.0.2.2'" in " ".join(capsys.readouterr().err.split())


def test_roles_on_one_machine_share_a_secret_of_their_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    here = ["tcp://127.0.0.1:7000", "tcp://[::1]:7000", "tcp://localhost:7000"]

    first = [secret_between(ServeTable(), {"serve.router": address}) for address in here]
    kept = tmp_path / "penstock" / "secret"
    kept.chmod(0o640)

    assert isinstance(first[0], bytes)
    assert len(first[0]) == 64
    assert len(set(first)) == 1
    with pytest.raises(UnavailableError, match="with mode -rw-r-----, must be of user"):
        secret_between(ServeTable(), {"serve.router": here[0]})
    assert Path(STATE.name) != tmp_path


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (b"x" * 32, 0o600, "is no file of `penstock keys new`"),
        (b"x" * 32, 0o644, "with mode -rw-r--r--, must be of user"),
        (None, 0o600, "must be a file with keys: No such file"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused(
    tmp_path: Path, content: bytes | None, mode: int, problem: str
) -> None:
    path = tmp_path / "machine.keys"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)

    with pytest.raises(ConfigError, match=problem):
        secret_between(ServeTable(keys_file=str(path)), {"serve.router": "tcp://192.0.2.1:7000"})
