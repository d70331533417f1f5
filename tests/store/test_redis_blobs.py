"""What Redis adds to being a shared store: servers of several kinds, passwords, TLS, errors."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from penstock.config.shared_stores import RedisSettings
from penstock.errors import ConfigError, UnavailableError
from penstock.store.clients import redis
from penstock.store.clients.blobs import (
    BlobOutcome,
    BlobRange,
    BlobRead,
    BlobStoreError,
    BlobWrite,
    NotKeptError,
)
from penstock.store.clients.redis import RedisBlobs
from tests.store.redis_server import RedisServer, free_port, require_redis
from tests.store.tcp_proxy import Mood, TcpProxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOON_S = 60.0
PASSWORD = "correct-horse-battery"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    require_redis()
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


def open_blobs(url: str, **settings: Any) -> closing[RedisBlobs]:
    return closing(RedisBlobs(RedisSettings(url=url, **settings)))


def put(blobs: RedisBlobs, name: str, value: bytes) -> str:
    return blobs.write([BlobWrite(name, [memoryview(value)])], timeout_s=SOON_S)[0]


def take(blobs: RedisBlobs, name: str, size: int, timeout_s: float = SOON_S) -> bytes | BlobOutcome:
    memory = bytearray(size)
    reads = [BlobRead(name, [BlobRange(0, memoryview(memory))])]
    (outcome,) = blobs.read(reads, timeout_s=timeout_s)
    return bytes(memory) if outcome is BlobOutcome.READ else outcome


def redis_cli(server: RedisServer, *words: str) -> str:
    command = ["redis-cli", "-p", str(server.port), "--no-auth-warning", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_values_go_after_their_time_and_records_do_not(server: RedisServer) -> None:
    with open_blobs(server.url, ttl_s=1000) as blobs:
        put(blobs, "ttl/value", b"1")
        blobs.create("ttl/created", b"1", timeout_s=SOON_S)
        blobs.replace("ttl/replaced", b"1", timeout_s=SOON_S)

    assert 900 < int(redis_cli(server, "TTL", "ttl/value")) <= 1000
    assert redis_cli(server, "TTL", "ttl/created") == "-1"
    assert redis_cli(server, "TTL", "ttl/replaced") == "-1"


def test_a_server_without_memory_says_why_a_value_was_not_written(tmp_path: Path) -> None:
    require_redis()
    full = RedisServer(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    try:
        with open_blobs(full.url) as blobs:
            problems = [put(blobs, f"a/{each}", bytes(1 << 20)) for each in range(9)]

            assert problems[0] == ""
            assert problems[-1].startswith("OOM ")
            assert take(blobs, "a/0", 1 << 20) == bytes(1 << 20)
    finally:
        full.kill()


def test_what_is_no_value_is_the_fault_of_its_name_alone(server: RedisServer) -> None:
    redis_cli(server, "HSET", "kind/hash", "a", "b")
    with open_blobs(server.url) as blobs:
        put(blobs, "kind/value", b"1")
        memory = bytearray(2)
        reads = [
            BlobRead("kind/hash", [BlobRange(0, memoryview(memory)[:1])]),
            BlobRead("kind/value", [BlobRange(0, memoryview(memory)[1:])]),
        ]

        outcomes = blobs.read(reads, timeout_s=SOON_S)

        assert outcomes == [BlobOutcome.SHORT, BlobOutcome.READ]
        assert memory == b"\x001"
        assert blobs.get("kind/hash", timeout_s=SOON_S) == b""


def test_a_value_beyond_what_redis_takes_is_refused_before_it_is_sent(server: RedisServer) -> None:
    piece = memoryview(bytes(1 << 20))
    with open_blobs(server.url) as blobs:
        writes = [BlobWrite("huge", [piece] * 513), BlobWrite("small", [piece[:1]])]

        large, small = blobs.write(writes, timeout_s=SOON_S)

        assert "537919488 bytes" in large
        assert small == ""
        assert blobs.exists(["huge", "small"], timeout_s=SOON_S) == [False, True]


def test_the_call_after_a_restart_works(tmp_path: Path) -> None:
    require_redis()
    server = RedisServer(tmp_path)
    try:
        with open_blobs(server.url) as blobs:
            # Several connections, all of which the restart ends.
            ready = threading.Barrier(blobs.threads)
            threads = [
                threading.Thread(target=lambda: (ready.wait(SOON_S), put(blobs, "a", b"1")))
                for _ in range(blobs.threads)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

            server.kill()
            server.start()

            assert [take(blobs, "a", 1) for _ in range(4)] == [BlobOutcome.MISSING] * 4
    finally:
        server.kill()


@pytest.mark.parametrize("mood", [Mood.SILENT, Mood.TRICKLING, Mood.CUT, Mood.WRONG])
def test_answers_that_do_not_come_as_they_should_cost_one_call(
    server: RedisServer, mood: Mood, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = bytes(range(256)) * 40
    with closing(TcpProxy(server.port)) as proxy, open_blobs(proxy.url) as blobs:
        put(blobs, "proxy/value", value)

        monkeypatch.setattr(redis, "OPEN_S", 0.5)
        proxy.mood = mood
        with pytest.raises(BlobStoreError):
            take(blobs, "proxy/value", len(value), 0.3)
        with pytest.raises(BlobStoreError):
            blobs.get("proxy/value", timeout_s=0.3)
        proxy.mood = Mood.HONEST
        monkeypatch.setattr(redis, "OPEN_S", SOON_S)

        # An attempt to connect that was begun before may have to fail first.
        while True:
            try:
                found = take(blobs, "proxy/value", len(value))
                break
            except BlobStoreError:
                continue
        assert found == value


def test_what_is_there_can_be_asked_while_all_threads_write(server: RedisServer) -> None:
    names = ["written/a", "written/b"]
    pause = threading.Event()
    deadline = time.monotonic() + SOON_S
    with open_blobs(server.url, threads=2) as blobs:
        redis_cli(server, "CLIENT", "PAUSE", str(int(SOON_S * 1000)), "WRITE")
        writers = [threading.Thread(target=put, args=(blobs, name, b"1")) for name in names]
        for writer in writers:
            writer.start()
        try:
            while redis_cli(server, "CLIENT", "LIST").count("cmd=set") < len(writers):
                assert time.monotonic() < deadline
                pause.wait(0.02)

            found = blobs.exists(["asked"], timeout_s=SOON_S / 10)
        finally:
            redis_cli(server, "CLIENT", "UNPAUSE")
            for writer in writers:
                writer.join()

        assert found == [False]
        assert blobs.exists(names, timeout_s=SOON_S) == [True, True]


def test_more_callers_than_threads_wait_for_their_turn(server: RedisServer) -> None:
    server.stop()
    try:
        with open_blobs(server.url, threads=1) as blobs:
            problems: list[str] = []

            def ask() -> None:
                with pytest.raises(BlobStoreError) as caught:
                    blobs.exists(["a"], timeout_s=0.2)
                problems.append(str(caught.value))

            threads = [threading.Thread(target=ask) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SOON_S)

            assert len(problems) == 3
    finally:
        server.proceed()


def test_a_unix_socket_will_do(tmp_path: Path) -> None:
    require_redis()
    path = tmp_path / "r.sock"
    server = RedisServer(tmp_path, "--unixsocket", str(path))
    try:
        with open_blobs(f"unix://{path}") as blobs:
            put(blobs, "a", b"value")

            assert take(blobs, "a", 5) == b"value"
    finally:
        server.kill()


def test_passwords_come_from_a_file_or_a_variable_and_are_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_redis()
    acl = ("--user", "kv", "on", f">{PASSWORD}", "~*", "+@all", "-@dangerous")
    server = RedisServer(tmp_path, "--requirepass", PASSWORD, *acl)
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    monkeypatch.setenv("KV_PASSWORD", PASSWORD)
    of_user = server.url.replace("//", "//kv@")
    told: list[str] = []
    try:
        for url, secret in (
            (server.url, {"password_file": str(file)}),
            (server.url, {"password_env": "KV_PASSWORD"}),
            (of_user, {"password_env": "KV_PASSWORD"}),
        ):
            settings = RedisSettings(url=url, **secret)
            with closing(RedisBlobs(settings)) as blobs:
                put(blobs, "a", b"value")
                assert take(blobs, "a", 5) == b"value"
                told += [repr(settings), repr(settings.password), repr(blobs), str(settings)]

        file.write_text(f"{PASSWORD}-wrong")
        for secret in ({}, {"password_file": str(file)}, {"password_env": "NOT_SET"}):
            with open_blobs(server.url, **secret) as blobs:
                with pytest.raises(BlobStoreError) as caught:
                    blobs.exists(["a"], timeout_s=SOON_S)
                told.append(str(caught.value))
    finally:
        server.kill()
    assert not [text for text in told if PASSWORD in text]
    assert "NOT_SET: is not set" in told[-1]


def test_a_password_in_the_url_is_refused_without_being_shown() -> None:
    for url in (
        f"redis://:{PASSWORD}@host:6379",
        f"redis://kv:{PASSWORD}@host",
        f"redis:/{PASSWORD}@host",
        f"http://{PASSWORD}",
    ):
        with pytest.raises(ConfigError) as caught:
            RedisSettings(url=url)

        assert caught.value.field == "url"
        assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("url", {"url": ""}),
        ("url", {"url": "redis://a,b"}),
        ("url", {"url": "redis://a:0"}),
        ("url", {"url": "redis://a:65536"}),
        ("url", {"url": "redis://a/x"}),
        ("url", {"url": "redis://a/1", "cluster": True}),
        ("url", {"url": "unix:///run/redis.sock", "cluster": True}),
        ("url", {"url": 7}),
        ("cluster", {"url": "redis://a", "cluster": 1}),
        ("sentinel", {"url": "redis://a", "cluster": True, "sentinel": "m"}),
        ("certificate_file", {"url": "rediss://a", "certificate_file": "/c"}),
        ("ttl_s", {"url": "redis://a", "ttl_s": -1}),
        ("ttl_s", {"url": "redis://a", "ttl_s": float("nan")}),
        ("ttl_s", {"url": "redis://a", "ttl_s": 1e12}),
        ("threads", {"url": "redis://a", "threads": 0}),
        ("threads", {"url": "redis://a", "threads": 2.0}),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(
    field: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisSettings(**settings)

    assert caught.value.field == field


def test_without_the_package_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)

    with pytest.raises(UnavailableError, match=r'pip install "\.\[redis\]"') as caught:
        RedisBlobs(RedisSettings(url="redis://a"))

    assert "\n" not in str(caught.value)


def make_certificate(folder: Path) -> Path:
    """A certificate for 127.0.0.1 that signs itself; its key is beside it."""
    path = folder / "server.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-days", "2", "-keyout", str(folder / "server.key"), "-out", str(path)),
        ],
        check=True,
        capture_output=True,
    )
    return path


def test_tls_verifies_the_server_and_carries_values(tmp_path: Path) -> None:
    require_redis()
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: there is no certificate")
    certificate = make_certificate(tmp_path)
    key = tmp_path / "server.key"
    port = free_port()
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key))
    server = RedisServer(
        tmp_path, "--tls-port", str(port), *files, "--tls-ca-cert-file", str(certificate)
    )
    url = f"rediss://127.0.0.1:{port}"
    own = {"certificate_file": str(certificate), "key_file": str(key)}
    value = bytes(range(256)) * 4096
    try:
        with open_blobs(url, ca_file=str(certificate), **own) as blobs:
            put(blobs, "a", value)
            assert take(blobs, "a", len(value)) == value
            assert take(blobs, "b", 1) is BlobOutcome.MISSING

        with open_blobs(url, **own) as blobs, pytest.raises(BlobStoreError, match="certificate"):
            take(blobs, "a", 1)
    finally:
        server.kill()


def test_the_master_is_the_one_that_the_sentinels_name(tmp_path: Path) -> None:
    require_redis()
    master = RedisServer(tmp_path / "master")
    config = tmp_path / "sentinel.conf"
    config.write_text(f"requirepass {PASSWORD}\nsentinel monitor kv 127.0.0.1 {master.port} 1\n")
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    sentinel = RedisServer.sentinel(tmp_path / "sentinel", config)
    try:
        urls = f"redis://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}"
        with open_blobs(urls, sentinel="kv", sentinel_password_file=str(file)) as blobs:
            put(blobs, "a", b"value")
            assert take(blobs, "a", 5) == b"value"

        with (
            open_blobs(urls, sentinel="other", sentinel_password_file=str(file)) as blobs,
            pytest.raises(BlobStoreError, match="other"),
        ):
            take(blobs, "a", 5)
    finally:
        sentinel.kill()
        master.kill()


def test_a_cluster_s_values_are_found_where_they_are_and_after_they_moved(tmp_path: Path) -> None:
    require_redis()
    # Servers of a starved machine may be silent for long; that takes no slots from them.
    patience = ("--cluster-node-timeout", str(round(10 * SOON_S * 1000)))
    options = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", *patience)
    first = RedisServer(tmp_path / "first", *options)
    second = RedisServer(tmp_path / "second", *options)
    try:
        redis_cli(first, "CLUSTER", "ADDSLOTSRANGE", "0", "8191")
        redis_cli(second, "CLUSTER", "ADDSLOTSRANGE", "8192", "16383")
        redis_cli(second, "CLUSTER", "BUMPEPOCH")
        redis_cli(first, "CLUSTER", "MEET", "127.0.0.1", str(second.port))
        wait_for_slots(first, second)
        names = [f"a/{each}" for each in range(40)]
        with open_blobs(first.url, cluster=True) as blobs:
            for name in names:
                assert put(blobs, name, name.encode()) == ""

            assert blobs.exists([*names, "b"], timeout_s=SOON_S) == [True] * 40 + [False]
            assert 0 < int(redis_cli(second, "DBSIZE")) < 40
            # The second loses its slots and values to the first, which the client does not know.
            redis_cli(second, "FLUSHALL")
            slots = {int(redis_cli(first, "CLUSTER", "KEYSLOT", name)) for name in names[:6]}
            for slot in sorted(slots & {*range(8192, 16384)}):
                move_slot(slot, second, first)

            for name in names[:6]:
                assert put(blobs, name, name.encode()) == ""
                assert take(blobs, name, len(name)) == name.encode()
            assert redis_cli(second, "DBSIZE") == "0"
    finally:
        first.kill()
        second.kill()


def move_slot(slot: int, source: RedisServer, target: RedisServer) -> None:
    """Moves an empty slot as `redis-cli --cluster reshard` does.

    A server that imports a slot and then takes it gets a newer epoch than its owner. Without that,
    what the owner says of its slots between the two commands gives it the slot back.
    """
    owner, heir = (redis_cli(server, "CLUSTER", "MYID") for server in (source, target))
    redis_cli(target, "CLUSTER", "SETSLOT", str(slot), "IMPORTING", owner)
    redis_cli(source, "CLUSTER", "SETSLOT", str(slot), "MIGRATING", heir)
    for server in (target, source):
        redis_cli(server, "CLUSTER", "SETSLOT", str(slot), "NODE", heir)


def test_a_record_of_a_cluster_is_kept_when_a_replica_of_its_master_has_it(tmp_path: Path) -> None:
    require_redis()
    options = ("--cluster-enabled", "yes", "--repl-diskless-sync-delay", "0")
    master, replica = (
        RedisServer(tmp_path / "one", *options),
        RedisServer(tmp_path / "two", *options),
    )
    try:
        redis_cli(master, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        redis_cli(replica, "CLUSTER", "MEET", "127.0.0.1", str(master.port))
        wait_for_slots(master, replica)
        redis_cli(replica, "CLUSTER", "REPLICATE", redis_cli(master, "CLUSTER", "MYID"))
        pause, deadline = threading.Event(), time.monotonic() + SOON_S
        while "state=online" not in redis_cli(master, "INFO", "replication"):
            assert time.monotonic() < deadline
            pause.wait(0.05)
        with open_blobs(master.url, cluster=True) as blobs:
            blobs.replace("a/record", b"1", timeout_s=SOON_S)
            replica.stop()

            with pytest.raises(NotKeptError, match="no answer from its replica"):
                blobs.replace("a/record", b"2", timeout_s=4)

            assert blobs.get("a/record", timeout_s=SOON_S) == b"2"
            replica.proceed()
            blobs.replace("a/record", b"3", timeout_s=SOON_S)
    finally:
        replica.kill()
        master.kill()


def wait_for_slots(*servers: RedisServer) -> None:
    """Until each server of a cluster knows the owners of all slots."""
    pause = threading.Event()
    deadline = time.monotonic() + SOON_S * 5
    for server in servers:
        while True:
            state = redis_cli(server, "CLUSTER", "INFO")
            if "cluster_state:ok" in state and "cluster_slots_assigned:16384" in state:
                break
            assert time.monotonic() < deadline, state
            pause.wait(0.05)
