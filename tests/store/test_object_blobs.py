"""Values in objects of S3 and in files of a folder: the sentences of every store, and their own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import obstore
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer
from obstore.store import AzureStore, GCSStore

from penstock.config.shared_stores import ObjectSettings
from penstock.errors import ConfigError, UnavailableError
from penstock.store.clients.blobs import (
    BlobOutcome,
    BlobRange,
    BlobRead,
    BlobStoreError,
    BlobWrite,
)
from penstock.store.clients.folder import FolderBlobs
from penstock.store.clients.objects import (
    OBJECT_BYTES_MAX,
    ObjectBlobs,
    ObjectContent,
    ObjectIndex,
    ObjectManifest,
    _open_store,
    decode_manifest,
    open_objects,
)
from penstock.testing.blob_store_suite import BlobStoreSuite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.store.clients.blobs import BlobStore

SOON_S = 60.0
SOON_REFRESHED_S = 0.001
SHORT_LINGER_S = 0.005
SECRET = "a secret access key"


class S3:
    """A server that speaks S3, with a bucket."""

    def __init__(self, folder: Path) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()
        bucket = urllib.request.Request(f"{self.endpoint}/bucket", method="PUT")
        urllib.request.urlopen(bucket, timeout=SOON_S).close()
        self._secret = folder / "secret"
        self._secret.write_text(f"{SECRET}\n")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def settings(self, prefix: str = "kv", endpoint: str = "") -> ObjectSettings:
        return ObjectSettings(
            url=f"s3://bucket/{prefix}",
            endpoint=endpoint or self.endpoint,
            key_id_file=str(self._secret),
            secret_file=str(self._secret),
        )

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    server = S3(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


class TestObjects(BlobStoreSuite):
    """In objects of a store in memory, as obstore has it."""

    large_bytes = 5 << 20

    @pytest.fixture(autouse=True)
    def start(self) -> None:
        self.store = obstore.store.MemoryStore()

    def make_client(self) -> BlobStore:
        return client(self.store)


@pytest.mark.long
class TestS3(BlobStoreSuite):
    """The same over HTTP."""

    large_bytes = 5 << 20

    @pytest.fixture(autouse=True)
    def start(self, s3: S3) -> None:
        self.s3 = s3

    def make_client(self) -> BlobStore:
        return client(_open_store(self.s3.settings("suite")))


class TestFolder(BlobStoreSuite):
    """In files."""

    @pytest.fixture(autouse=True)
    def start(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_client(self) -> BlobStore:
        return open_objects(ObjectSettings(url=f"file://{self.folder}/kv"))


@pytest.fixture
def memory() -> obstore.store.MemoryStore:
    return obstore.store.MemoryStore()


def client(store: obstore.store.ObjectStore, *, linger_s: float = SHORT_LINGER_S) -> ObjectBlobs:
    return ObjectBlobs(store, refresh_s=SOON_REFRESHED_S, linger_s=linger_s, threads=4)


def put(blobs: BlobStore, values: dict[str, bytes]) -> None:
    writes = [BlobWrite(name, [memoryview(value)]) for name, value in values.items()]
    assert blobs.write(writes, timeout_s=SOON_S) == [""] * len(writes)


def take(blobs: BlobStore, name: str, size: int) -> bytes | BlobOutcome:
    target = bytearray(size)
    reads = [BlobRead(name, [BlobRange(0, memoryview(target))])]
    (outcome,) = blobs.read(reads, timeout_s=SOON_S)
    return bytes(target) if outcome is BlobOutcome.READ else outcome


def paths(store: obstore.store.ObjectStore, folder: str) -> list[str]:
    return [each["path"] for each in obstore.list(store, folder).collect()]


# Objects


def test_the_values_of_a_call_share_an_object(memory: obstore.store.MemoryStore) -> None:
    blobs = client(memory)

    put(blobs, {f"v{each}": b"%04d" % each for each in range(100)})

    assert len(paths(memory, "data")) == 1
    assert len(paths(memory, "manifests")) == 1
    assert take(blobs, "v7", 4) == b"0007"
    blobs.close()


def test_small_calls_that_come_together_share_an_object(
    memory: obstore.store.MemoryStore,
) -> None:
    blobs = client(memory, linger_s=30.0)  # Far longer than the test: 16 MiB end the wait.
    values = [{f"v{each}": bytes([each]) * (6 << 20)} for each in range(3)]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda each: put(blobs, each), values))

    assert len(paths(memory, "data")) == 1
    assert [take(blobs, f"v{each}", 2) for each in range(3)] == [b"\0\0", b"\1\1", b"\2\2"]
    blobs.close()


def test_a_call_that_is_larger_than_an_object_becomes_several(
    memory: obstore.store.MemoryStore,
) -> None:
    blobs = client(memory)
    value = bytes(OBJECT_BYTES_MAX // 2 - 5)

    put(blobs, {f"v{each}": value for each in range(3)})

    assert len(paths(memory, "data")) == 2
    assert take(blobs, "v2", 3) == bytes(3)
    blobs.close()


def test_a_value_that_is_there_is_not_written_again(memory: obstore.store.MemoryStore) -> None:
    one, other = client(memory), client(memory)
    put(one, {"a": b"first"})

    put(other, {"a": b"other"})

    assert take(other, "a", 5) == b"first"
    assert len(paths(memory, "data")) == 1
    one.close()
    other.close()


def test_objects_that_a_lifecycle_rule_removed_are_missing_and_can_be_written_again(
    memory: obstore.store.MemoryStore,
) -> None:
    blobs = client(memory)
    put(blobs, {"a": b"aaaa", "b": b"bbbb"})
    obstore.delete(memory, paths(memory, "data"))

    assert blobs.exists(["a"], timeout_s=SOON_S) == [True]  # As far as its manifest says.
    assert take(blobs, "a", 4) is BlobOutcome.MISSING
    assert blobs.exists(["a", "b"], timeout_s=SOON_S) == [False, False]
    put(blobs, {"a": b"anew"})
    assert take(blobs, "a", 4) == b"anew"
    blobs.close()


def test_an_object_that_is_shorter_than_its_manifest_says_is_short(
    memory: obstore.store.MemoryStore,
) -> None:
    blobs = client(memory)
    put(blobs, {"a": b"aaaa"})
    obstore.put(memory, paths(memory, "data")[0], b"aa")

    assert take(blobs, "a", 4) is BlobOutcome.SHORT
    blobs.close()


def test_manifests_are_merged_and_nothing_is_lost(memory: obstore.store.MemoryStore) -> None:
    blobs = client(memory, linger_s=0.0001)
    for each in range(70):
        put(blobs, {f"v{each}": b"%04d" % each})
    blobs.forget(["v3"], timeout_s=SOON_S)
    deadline = time.monotonic() + SOON_S
    while len(paths(memory, "manifests")) > 40 and time.monotonic() < deadline:
        put(blobs, {f"more{time.monotonic_ns()}": b"more"})

    newcomer = client(memory)

    assert len(paths(memory, "manifests")) <= 40
    found = newcomer.exists([f"v{each}" for each in range(70)], timeout_s=SOON_S)
    assert found == [each != 3 for each in range(70)]
    assert take(newcomer, "v69", 4) == b"0069"
    blobs.close()
    newcomer.close()


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"\x93\x02\x90\x90", b"\x93\x01\x91\x92\xa4../x\x90\x90"]
)
def test_what_is_no_manifest_is_ignored(content: bytes, memory: obstore.store.MemoryStore) -> None:
    obstore.put(memory, "manifests/0123456789abcdef-00000000", content)
    blobs = client(memory)

    put(blobs, {"a": b"value"})

    assert take(blobs, "a", 5) == b"value"
    blobs.close()


def test_a_value_that_one_client_removes_is_gone_for_others(
    memory: obstore.store.MemoryStore,
) -> None:
    one, other = client(memory), client(memory)
    put(one, {"a": b"wrong", "b": b"right"})
    assert take(other, "a", 5) == b"wrong"

    one.forget(["a"], timeout_s=SOON_S)

    deadline = time.monotonic() + SOON_S
    while other.exists(["a", "unknown"], timeout_s=SOON_S)[0] and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert take(other, "a", 5) is BlobOutcome.MISSING
    assert take(other, "b", 5) == b"right"
    one.close()
    other.close()


def test_s3_keeps_values_and_records_for_all_clients(s3: S3) -> None:
    one, other = (client(_open_store(s3.settings("several"))) for _ in range(2))
    value = os.urandom(200_000)

    put(one, {"a": value, "empty": b""})
    target = bytearray(30)
    ranges = [
        BlobRange(at, memoryview(target)[each * 10 : each * 10 + 10])
        for each, at in enumerate((0, 1000, 199_990))
    ]
    outcomes = other.read([BlobRead("a", ranges), BlobRead("b", [])], timeout_s=SOON_S)

    assert outcomes == [BlobOutcome.READ, BlobOutcome.MISSING]
    assert bytes(target) == value[:10] + value[1000:1010] + value[-10:]
    assert other.exists(["a", "b", "empty"], timeout_s=SOON_S) == [True, False, True]
    assert one.create("r", b"first", timeout_s=SOON_S)
    assert not other.create("r", b"second", timeout_s=SOON_S)
    one.replace("r", b"third", timeout_s=SOON_S)
    assert other.get("r", timeout_s=SOON_S) == b"third"
    other.forget(["a", "r", "none"], timeout_s=SOON_S)
    assert other.exists(["a"], timeout_s=SOON_S) == [False]
    assert other.get("r", timeout_s=SOON_S) is None
    one.close()
    other.close()


# The index


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_none(content: bytes) -> None:
    manifest = decode_manifest(content)

    if manifest is not None:
        assert decode_manifest(manifest.encode()) == manifest


names = st.sampled_from(["a", "b", "c", "d"])
objects = st.sampled_from([f"{each:016x}-00000000" for each in range(3)])
contents = st.builds(
    ObjectContent, objects, st.lists(st.tuples(names, st.integers(0, 9), st.integers(0, 9)))
)
manifests = st.builds(
    ObjectManifest.of,
    st.lists(contents, max_size=3),
    st.lists(st.tuples(objects, names), max_size=2),
)


@given(st.lists(manifests, max_size=6), objects)
def test_an_index_knows_nothing_that_is_removed_or_lost_whatever_the_order(
    said: list[ObjectManifest], lost: str
) -> None:
    index = ObjectIndex()
    for manifest in said:
        index.take(manifest)
    index.lose(lost)
    for manifest in said:
        index.take(manifest)

    removed = {mark for manifest in said for mark in manifest.removed}
    listed = {
        (content.name, name)
        for manifest in said
        for content in manifest.contents
        for name, _, _ in content.values
    }
    for name in "abcd":
        place = index.find(name)
        there = {(each, n) for each, n in listed - removed if n == name and each != lost}
        assert (place is not None) == bool(there)
        assert place is None or (place.object, name) in there


def test_an_index_forgets_the_objects_that_it_learned_of_first() -> None:
    index = ObjectIndex(values_max=4)

    for each in range(5):
        values = [(f"{each}-{n}", n, 1) for n in range(2)]
        index.take(ObjectManifest.of([ObjectContent(f"{each:016x}-00000000", values)]))

    assert len(index) == 4
    assert [index.find(f"{each}-1") is not None for each in range(5)] == [
        *(False, False, False),
        *(True, True),
    ]


# A store that does not answer


def test_a_store_that_never_answers_costs_a_call_its_time(s3: S3) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        blobs = ObjectBlobs(_open_store(s3.settings(endpoint=endpoint)), linger_s=SHORT_LINGER_S)
        target = memoryview(bytearray(b"untouched"))
        reads = [BlobRead("a", [BlobRange(0, target)])]
        writes = [BlobWrite("a", [memoryview(b"1")])]

        for call in (
            lambda: blobs.exists(["a"], timeout_s=0.1),
            lambda: blobs.read(reads, timeout_s=0.1),
            lambda: blobs.write(writes, timeout_s=0.1),
            lambda: blobs.forget(["a"], timeout_s=0.1),
            lambda: blobs.get("a", timeout_s=0.1),
            lambda: blobs.create("a", b"1", timeout_s=0.1),
            lambda: blobs.replace("a", b"1", timeout_s=0.1),
        ):
            with pytest.raises(BlobStoreError):
                call()
        blobs.close()

    assert bytes(target) == b"untouched"


def test_a_store_that_is_not_there_is_an_error_that_shows_no_secret(s3: S3) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        endpoint = f"http://127.0.0.1:{gone.getsockname()[1]}"
    blobs = ObjectBlobs(_open_store(s3.settings(endpoint=endpoint)), refresh_s=SOON_REFRESHED_S)

    with pytest.raises(BlobStoreError, match=r"127\.0\.0\.1") as refusal:
        blobs.get("a", timeout_s=SOON_S)

    assert SECRET not in str(refusal.value)
    blobs.close()


def test_a_store_that_comes_back_is_used_again(s3: S3) -> None:
    place = socket.create_server(("127.0.0.1", 0))
    port = place.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    blobs = ObjectBlobs(_open_store(s3.settings(endpoint=endpoint)), refresh_s=SOON_REFRESHED_S)
    with pytest.raises(BlobStoreError):
        blobs.get("a", timeout_s=0.1)
    place.close()

    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    bucket = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
    urllib.request.urlopen(bucket, timeout=SOON_S).close()

    put(blobs, {"a": b"again"})
    assert take(blobs, "a", 5) == b"again"
    blobs.close()
    server.stop()


def test_a_bucket_that_does_not_exist_is_an_error_that_names_it_until_it_does(s3: S3) -> None:
    settings = replace(s3.settings(), url="s3://forgotten/kv")
    blobs = ObjectBlobs(_open_store(settings), refresh_s=SOON_REFRESHED_S)

    for write in (blobs.create, blobs.replace):
        with pytest.raises(BlobStoreError, match=r"forgotten.*NoSuchBucket") as refusal:
            write("a", b"1", timeout_s=SOON_S)
        assert "\n" not in str(refusal.value)
    with pytest.raises(BlobStoreError, match=r"forgotten.*NoSuchBucket"):
        blobs.exists(["a"], timeout_s=SOON_S)

    bucket = urllib.request.Request(f"{s3.endpoint}/forgotten", method="PUT")
    urllib.request.urlopen(bucket, timeout=SOON_S).close()
    assert blobs.create("a", b"1", timeout_s=SOON_S)
    blobs.close()


# A folder


def test_several_who_write_a_file_leave_one_whole(tmp_path: Path) -> None:
    folders = [FolderBlobs(tmp_path) for _ in range(4)]
    contents = [bytes([each]) * 300_000 for each in range(4)]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, folders, [{"a/b": content} for content in contents]))

    assert take(folders[0], "a/b", 300_000) in contents
    assert not list((tmp_path / "unfinished").iterdir())


def test_a_write_asks_neither_for_its_name_nor_for_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were a third of a put: who writes has asked for the name, and the folder is there."""
    blobs = FolderBlobs(tmp_path)
    put(blobs, {"a/1": b"first"})
    asked: list[str] = []
    for module, name in ((os.path, "exists"), (os, "makedirs"), (os, "stat"), (os, "mkdir")):
        monkeypatch.setattr(module, name, lambda *args, **_: asked.append(str(args)))

    put(blobs, {"a/2": b"second", "a/1": b"other"})

    assert asked == []
    assert take(blobs, "a/1", 5) == b"first"
    assert take(blobs, "a/2", 6) == b"second"


def test_a_folder_that_is_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    put(blobs, {"a/1": b"first"})
    blobs.replace("a/r", b"record", timeout_s=SOON_S)
    for root in ("values", "records", "unfinished"):
        shutil.rmtree(tmp_path / root)

    put(blobs, {"a/1": b"again"})
    blobs.replace("a/r", b"newer", timeout_s=SOON_S)

    assert take(blobs, "a/1", 5) == b"again"
    assert blobs.get("a/r", timeout_s=SOON_S) == b"newer"
    assert not list((tmp_path / "unfinished").iterdir())


def test_a_record_that_cannot_be_named_leaves_no_unfinished_file(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    (tmp_path / "records" / "a").write_text("in the way")

    with pytest.raises(BlobStoreError, match="Not a directory"):
        blobs.replace("a/r", b"record", timeout_s=SOON_S)

    assert not list((tmp_path / "unfinished").iterdir())


def test_files_that_a_killed_process_left_are_removed_later(tmp_path: Path) -> None:
    put(FolderBlobs(tmp_path), {"a": b"1"})
    left = tmp_path / "unfinished" / "left"
    left.write_bytes(b"half")
    fresh = tmp_path / "unfinished" / "fresh"
    fresh.write_bytes(b"under way")
    os.utime(left, (1, 1))

    FolderBlobs(tmp_path)

    assert not left.exists()
    assert fresh.exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(UnavailableError, match="file/kv cannot be used: Not a directory"):
        FolderBlobs(tmp_path / "file" / "kv")


# Settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "s3://key:secret@bucket"}, r"^url: is 's3://\*\*\*@bucket', must be s3://"),
        ({"url": "s3://bucket?token=secret"}, r"^url: is 's3://bucket\?\*\*\*', must be"),
        ({"url": "ftp://bucket"}, r"^url: is 'ftp://\*\*\*', must be s3://"),
        ({"url": ""}, "^url: is '', must be s3://"),
        ({"url": None}, "^url: is None"),
        ({"url": "file://relative"}, "^url: is 'file://relative', must be file:// and the abs"),
        ({"endpoint": "minio:9000"}, "^endpoint: is 'minio:9000', must be http://HOST"),
        ({"endpoint": "http://u:p@minio"}, r"^endpoint: is 'http://\*\*\*', must be"),
        ({"url": "gs://bucket", "region": "eu"}, "^region: is given, which has no effect with gs"),
        ({"url": "file:///kv", "ca_file": "x"}, "^ca_file: is given, which has no effect"),
        (
            {"key_id_env": "ID"},
            "^key_id_env: is given without secret_file or secret_env, must be both",
        ),
        (
            {"secret_env": "KEY"},
            "^secret_env: is given without key_id_file or key_id_env, must be both",
        ),
        ({"threads": 0}, "^threads: is 0"),
        ({"threads": 2.0}, "^threads: is 2.0"),
        ({"refresh_s": float("nan")}, "^refresh_s: is nan"),
        ({"refresh_s": 1e9}, "^refresh_s: is 1000000000.0, must be a number from 0.1 to 3600"),
    ],
)
def test_settings_that_are_wrong_are_refused_by_their_name(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        ObjectSettings(**{"url": "s3://bucket/kv", **change})  # type: ignore[arg-type]

    assert "secret@" not in str(refusal.value)
    assert "token=" not in str(refusal.value)


def test_a_secret_that_is_not_there_is_told(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")

    with pytest.raises(ConfigError, match=f"^{missing}: cannot be read: No such file"):
        open_objects(ObjectSettings(url="s3://bucket", key_id_file=missing, secret_file=missing))
    with pytest.raises(ConfigError, match=r"^ca_file: is .* cannot be read"):
        open_objects(ObjectSettings(url="s3://bucket", ca_file=f"{tmp_path}/nowhere"))


def test_the_address_of_azure_names_account_container_and_path(tmp_path: Path) -> None:
    """As far as a client goes without Azure: what obstore makes of the settings."""
    key = tmp_path / "key"
    key.write_text("c2VjcmV0")

    opened = _open_store(
        ObjectSettings(url="az://account/container/some/path", secret_file=str(key))
    )

    assert isinstance(opened, AzureStore)
    assert dict(opened.config) == {
        "account_name": "account",
        "container_name": "container",
        "account_key": "c2VjcmV0",
    }
    assert opened.prefix == "some/path"


def test_the_address_of_google_names_bucket_and_path(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: there is no key")
    words = ["openssl", "genpkey", "-algorithm", "RSA", "-quiet"]
    pem = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    account = {"private_key": pem, "client_email": "a@b", "private_key_id": "1"}
    key = tmp_path / "key"
    key.write_text(json.dumps(account))

    opened = _open_store(ObjectSettings(url="gs://bucket/some/path", secret_file=str(key)))

    assert isinstance(opened, GCSStore)
    assert opened.prefix == "some/path"
    assert dict(opened.config)["bucket"] == "bucket"


def test_a_server_that_does_not_answer_is_told_with_the_address_and_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of the test")
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    blobs = open_objects(ObjectSettings(url="s3://bucket/kv", endpoint=endpoint))

    with pytest.raises(BlobStoreError) as failure:
        blobs.get("name", timeout_s=60)

    blobs.close()
    assert endpoint in str(failure.value)
    assert str(failure.value).endswith("Connection refused")
