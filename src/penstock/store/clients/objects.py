"""Objects of S3, GCS or Azure, or files of a folder, as a shared store, and where values lie.

An object holds many values, one after the other, and is written once. Who has written one says
what is in it by a manifest, a small object that is written once too; others list the manifests and
read those that are new to them. Nothing here waits or asks a store.

| `url`                          | is                                                            |
|--------------------------------|---------------------------------------------------------------|
| `s3://bucket/prefix`           | S3, or with `endpoint` what speaks its protocol (MinIO, Ceph) |
| `gs://bucket/prefix`           | Google Cloud Storage                                          |
| `az://account/container/path`  | Azure Blob Storage                                            |
| `file:///folder`               | a folder, with a file for each value (`folder`)               |

Values of one call lie together in an object (`packed_objects`).

The rules:

- What a manifest says is a claim. An object that is not there, or is shorter, is a missing value,
  and costs no more than that.
- Memory of a caller is read and written by his own thread, before the call ends.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from penstock.errors import ConfigError
from penstock.store.clients.blobs import (
    BlobOutcome,
    BlobStore,
    BlobStoreError,
    check_names,
    check_reads,
    check_record,
)
from penstock.store.clients.folder import FolderBlobs

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping, Sequence
    from typing import TypeVar

    from obstore.store import ObjectStore

    from penstock.config.shared_stores import ObjectSettings
    from penstock.store.clients.blobs import BlobRead, BlobWrite


OBJECT_BYTES_MIN = 16 << 20
OBJECT_BYTES_MAX = 64 << 20
MANIFEST_BYTES_MAX = 8 << 20
"""A larger one is none of ours."""
VALUES_MAX = 1 << 20
"""Some 300 MB of memory; with blocks of 2 MiB two TiB. Beyond it the objects that were learned of
first are forgotten: their values are missing here, and may be written again."""
MARKS_MAX = 1 << 16
"""Objects that are lost, and values that were removed: a manifest that still names them may come
later."""
OBJECT_NAME = re.compile(r"[0-9a-f]{16}-[0-9]{8}", re.ASCII)

Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class ValuePlace(NamedTuple):
    """Where a value lies."""

    object: str
    offset: int
    length: int


class PackedValues(NamedTuple):
    """Values that lie one after the other, on their way to an object."""

    values: list[tuple[str, int, int]]
    """Name, offset in the body, length."""
    body: bytes


class ObjectContent(msgspec.Struct, array_like=True, frozen=True):
    """What is in one object: name, offset and length of each value."""

    name: str
    values: list[tuple[str, Offset, Offset]]


class ObjectManifest(msgspec.Struct, array_like=True, frozen=True):
    """What a client has written, and which values it found wrong and removed."""

    version: Annotated[int, msgspec.Meta(ge=1, le=1)]
    contents: list[ObjectContent]
    removed: list[tuple[str, str]]
    """Object and name of each."""

    @classmethod
    def of(
        cls, contents: Iterable[ObjectContent], removed: Iterable[tuple[str, str]] = ()
    ) -> ObjectManifest:
        return cls(1, list(contents), list(removed))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode_manifest(encoded: bytes | memoryview) -> ObjectManifest | None:
    """The manifest, or `None` if it is none."""
    try:
        manifest = msgspec.msgpack.decode(encoded, type=ObjectManifest)
    except msgspec.MsgspecError:
        return None
    named = [content.name for content in manifest.contents]
    named += [each for each, _ in manifest.removed]
    return manifest if all(map(OBJECT_NAME.fullmatch, named)) else None


class ObjectIndex:
    """Values by name, as far as manifests were read. The first place of a name counts."""

    def __init__(self, values_max: int = VALUES_MAX) -> None:
        self._values_max = values_max
        self._places: dict[str, ValuePlace] = {}
        self._names: dict[str, list[str]] = {}
        """By object, in the order in which they became known."""
        self._lost: dict[str, None] = {}
        self._removed: dict[tuple[str, str], None] = {}

    def __len__(self) -> int:
        return len(self._places)

    def find(self, name: str) -> ValuePlace | None:
        return self._places.get(name)

    def take(self, manifest: ObjectManifest) -> None:
        """Learns what a manifest says; one that was read before changes nothing."""
        for mark in manifest.removed:
            self._remove(*mark)
        for content in manifest.contents:
            if content.name not in self._lost:
                self._add(content)
        while len(self._places) > self._values_max:
            self._forget_object(next(iter(self._names)))

    def lose(self, name: str) -> None:
        """An object is not there any more: none of its values is."""
        _mark(self._lost, name)
        self._forget_object(name)

    def remaining(self, contents: Sequence[ObjectContent]) -> list[ObjectContent]:
        """The same without what is lost or removed."""
        return [
            ObjectContent(
                content.name,
                [each for each in content.values if (content.name, each[0]) not in self._removed],
            )
            for content in contents
            if content.name not in self._lost
        ]

    def _add(self, content: ObjectContent) -> None:
        names = self._names.setdefault(content.name, [])
        for name, offset, length in content.values:
            if name not in self._places and (content.name, name) not in self._removed:
                self._places[name] = ValuePlace(content.name, offset, length)
                names.append(name)
        if not names:
            del self._names[content.name]

    def _remove(self, object_name: str, name: str) -> None:
        _mark(self._removed, (object_name, name))
        place = self._places.get(name)
        if place is not None and place.object == object_name:
            del self._places[name]

    def _forget_object(self, object_name: str) -> None:
        for name in self._names.pop(object_name, ()):
            place = self._places.get(name)
            if place is not None and place.object == object_name:
                del self._places[name]


def _mark(marks: dict[str, None] | dict[tuple[str, str], None], mark: object) -> None:
    marks[mark] = None  # type: ignore[index]
    while len(marks) > MARKS_MAX:
        del marks[next(iter(marks))]  # type: ignore[arg-type]


if TYPE_CHECKING:
    Answer = TypeVar("Answer")

CONNECT_S = 5.0
REQUEST_S = 60.0
"""No request lasts longer, whoever waits for it. Calls have deadlines of their own."""
RETRIES_MAX = 2
"""Of one request, after an error of the server; the tier above tries again later."""


def open_objects(settings: ObjectSettings) -> BlobStore:
    """A client of the store that the settings name.

    Raises `ImportError`, `ConfigError` or `UnavailableError`.
    """
    if settings.scheme == "file":
        folder = Path(settings.url.removeprefix("file://"))
        return FolderBlobs(folder, threads=settings.threads)
    return ObjectBlobs(
        _open_store(settings), refresh_s=settings.refresh_s, threads=settings.threads
    )


def _open_store(settings: ObjectSettings) -> ObjectStore:
    from obstore import store  # noqa: PLC0415  (an extra)
    from obstore.exceptions import BaseError  # noqa: PLC0415

    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=REQUEST_S),
        "allow_http": settings.endpoint.startswith("http://"),
    }
    if settings.ca_file:
        try:
            client["root_certificate"] = Path(settings.ca_file).read_bytes()
        except OSError as error:
            raise ConfigError(
                "ca_file", f"is {settings.ca_file!r}, which cannot be read: {error.strerror}"
            ) from None
    retries = {"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=REQUEST_S)}
    kinds: Mapping[str, Any] = {
        "s3": store.S3Store,
        "gs": store.GCSStore,
        "az": store.AzureStore,
    }
    credentials = _credentials(settings)
    url = settings.url
    if settings.scheme == "az":
        # obstore wants the account beside the address, which begins with the container.
        url = f"az://{settings.path.partition('/')[2]}"
    try:
        opened: ObjectStore = kinds[settings.scheme].from_url(
            url,
            config=credentials,
            client_options=client,
            retry_config=retries,
        )
    except (BaseError, ValueError) as error:
        line = str(error).partition("\n")[0]
        raise ConfigError("url", f"cannot be used: {line}") from None
    return opened


def _credentials(settings: ObjectSettings) -> dict[str, Any]:
    secret = settings.secret.read() if settings.secret else ""
    if settings.scheme == "gs":
        return {"service_account_key": secret} if secret else {}
    if settings.scheme == "az":
        account = {"account_name": settings.path.partition("/")[0]}
        return {**account, "account_key": secret} if secret else account
    config: dict[str, Any] = {}
    if settings.endpoint:
        config |= {"endpoint": settings.endpoint, "virtual_hosted_style_request": False}
    if settings.region or settings.endpoint:
        config["region"] = settings.region or "us-east-1"
    if settings.key_id:
        config |= {"access_key_id": settings.key_id.read(), "secret_access_key": secret}
    return config


class ObjectBlobs(BlobStore):
    """A `BlobStore` over an object store: several threads call, one thread speaks."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        refresh_s: float = 2.0,
        linger_s: float = 0.25,
        threads: int = 8,
    ) -> None:
        """Takes a store of obstore."""
        from penstock.store.clients.packed_objects import PackedObjects  # noqa: PLC0415  (an extra)

        super().__init__(threads)
        self._objects = PackedObjects(store, refresh_s=refresh_s, linger_s=linger_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="object store", daemon=True
        )
        self._thread.start()

    def exists(self, names: Sequence[str], *, timeout_s: float) -> list[bool]:
        timeout_s = check_names(names, timeout_s=timeout_s)
        places = self._find(names, timeout_s)
        return [place is not None for place in places]

    def read(self, reads: Sequence[BlobRead], *, timeout_s: float) -> list[BlobOutcome]:
        timeout_s = check_reads(reads, timeout_s=timeout_s)
        until = time.monotonic() + timeout_s
        names = [read.name for read in reads]
        places = self._find(names, timeout_s)
        outcomes = [_foretold(read, place) for read, place in zip(reads, places, strict=True)]
        wanted: dict[str, list[int]] = {}
        for at, (read, place) in enumerate(zip(reads, places, strict=True)):
            asked = any(target.nbytes for _, target in read.ranges)
            if place is not None and outcomes[at] is BlobOutcome.READ and asked:
                wanted.setdefault(place.object, []).append(at)
        self._read_objects(reads, places, wanted, outcomes, until)
        return outcomes

    def _read_objects(
        self,
        reads: Sequence[BlobRead],
        places: list[ValuePlace | None],
        wanted: dict[str, list[int]],
        outcomes: list[BlobOutcome],
        until: float,
    ) -> None:
        """Reads all objects at once, each with all of its ranges, and copies what came."""
        gathered = []
        for name, numbers in wanted.items():
            starts, ends, targets = [], [], []
            for at in numbers:
                place = places[at]
                assert place is not None
                for offset, wanted_bytes in reads[at].ranges:
                    target = wanted_bytes[: place.length] if reads[at].whole else wanted_bytes
                    if target.nbytes:
                        starts.append(place.offset + offset)
                        ends.append(place.offset + offset + target.nbytes)
                        targets.append((at, target))
            gathered.append((name, starts, ends, targets))

        async def read_all() -> list[Sequence[memoryview] | None]:
            calls = (self._objects.read(name, starts, ends) for name, starts, ends, _ in gathered)
            return list(await asyncio.gather(*calls))

        answers = self._call(read_all(), until - time.monotonic()) if gathered else []
        for (_, _, _, targets), parts in zip(gathered, answers, strict=True):
            for number, (at, target) in enumerate(targets):
                part = None if parts is None else parts[number]
                if part is None:
                    outcomes[at] = BlobOutcome.MISSING
                elif part.nbytes != target.nbytes:
                    outcomes[at] = BlobOutcome.SHORT
                else:
                    target[:] = part

    def write(self, writes: Sequence[BlobWrite], *, timeout_s: float) -> list[str]:
        names = [write.name for write in writes]
        timeout_s = check_names(names, timeout_s=timeout_s)
        until = time.monotonic() + timeout_s
        places = self._find(names, timeout_s)
        there = {name for name, place in zip(names, places, strict=True) if place is not None}
        runs = list(_runs(writes, there))
        if not runs:
            return [""] * len(writes)
        left_s = until - time.monotonic()

        async def write_all() -> list[str]:
            calls = (self._objects.write(run, timeout_s=left_s) for run in runs)
            return list(await asyncio.gather(*calls))

        said = self._call(write_all(), left_s)
        if all(said):
            raise BlobStoreError(said[0])
        problems = {
            name: problem
            for run, problem in zip(runs, said, strict=True)
            for name, _, _ in run.values
        }
        return [problems.get(name, "") for name in names]

    def forget(self, names: Sequence[str], *, timeout_s: float) -> None:
        timeout_s = check_names(names, timeout_s=timeout_s)
        self._call(self._objects.forget(names, timeout_s=timeout_s), timeout_s)

    def get(self, name: str, *, timeout_s: float) -> bytes | None:
        timeout_s = check_names([name], timeout_s=timeout_s)
        return self._call(self._objects.get(name), timeout_s)

    def create(self, name: str, record: bytes, *, timeout_s: float) -> bool:
        timeout_s = check_record(name, record, timeout_s=timeout_s)
        return self._call(self._objects.create(name, bytes(record)), timeout_s)

    def replace(self, name: str, record: bytes, *, timeout_s: float) -> None:
        timeout_s = check_record(name, record, timeout_s=timeout_s)
        self._call(self._objects.replace(name, bytes(record)), timeout_s)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        ending = asyncio.run_coroutine_threadsafe(self._objects.close(), self._loop)
        with suppress(TimeoutError):
            ending.result(CONNECT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CONNECT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _find(self, names: Sequence[str], timeout_s: float) -> list[ValuePlace | None]:
        places = self._objects.known(names)
        if None not in places:
            return places
        return self._call(self._objects.find(names, timeout_s=timeout_s), timeout_s)

    def _call(self, work: Coroutine[Any, Any, Answer], timeout_s: float) -> Answer:
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return asked.result(max(timeout_s, 0.0))
        except TimeoutError:
            asked.cancel()
            raise BlobStoreError("the object store did not answer in time") from None


def _foretold(read: BlobRead, place: ValuePlace | None) -> BlobOutcome:
    """What comes of a read if the object is what its manifest says."""
    if place is None:
        return BlobOutcome.MISSING
    return BlobOutcome.READ if read.whole or read.end <= place.length else BlobOutcome.SHORT


def _runs(writes: Sequence[BlobWrite], there: set[str]) -> list[PackedValues]:
    """The values that are not there, in runs that fit an object, copied from their buffers."""
    runs: list[PackedValues] = []
    values: list[tuple[str, int, int]] = []
    buffers: list[memoryview] = []
    size = 0
    known = set(there)
    for name, parts in writes:
        if name in known:
            continue
        known.add(name)
        length = sum(part.nbytes for part in parts)
        if values and size + length > OBJECT_BYTES_MAX:
            runs.append(PackedValues(values, b"".join(buffers)))
            values, buffers, size = [], [], 0
        values.append((name, size, length))
        buffers += parts
        size += length
    if values:
        runs.append(PackedValues(values, b"".join(buffers)))
    return runs
