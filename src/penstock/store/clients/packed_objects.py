"""Values in an object store: many in an object, found by manifests, read by ranges.

    data/CLIENT-NUMBER        values one after the other, 16 to 64 MiB, written once
    manifests/CLIENT-NUMBER   what is in some of them (`objects`), written once
    records/NAME              a small record

Object stores charge for requests and take tens of milliseconds for each, so values travel together.
What is too small for an object waits `linger_s` for more; a value counts as written when the
manifest that names it is. Manifests of others are looked for every `refresh_s`, and only while
somebody asks for what is not known here. A client merges its own small manifests.

All of it runs in one event loop, in the thread of `ObjectBlobs`, and touches no memory but its own.
The one rule: nothing waits longer than the calls that wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
from bisect import bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import obstore

from penstock.store.clients.blobs import RECORD_BYTES_MAX, BlobStoreError
from penstock.store.clients.objects import (
    MANIFEST_BYTES_MAX,
    OBJECT_BYTES_MAX,
    OBJECT_BYTES_MIN,
    ObjectContent,
    ObjectIndex,
    ObjectManifest,
    decode_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Sequence
    from typing import Any, TypeVar

    from obstore.store import ObjectStore

    from penstock.store.clients.objects import PackedValues, ValuePlace

    Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)

LINGER_S = 0.25
"""How long a small object waits for values of other calls: those of the other threads."""
REFRESH_S = 2.0
"""How often manifests of others are looked for, while somebody asks for what is not known."""
STALE_S = 30.0
"""For so long after a look that succeeded, questions are answered while the next one lasts."""
REFRESH_TIMEOUT_S = 20.0
MANIFESTS_AT_ONCE = 32
MERGE_COUNT = 32
"""So many small manifests become one. Others list and read them when they start."""
SMALL_MANIFEST_BYTES = 512 << 10
GAP_BYTES = 1 << 20
"""Between two ranges that one request reads: it costs less than another request."""
SHOWN_CHARACTERS = 400
_RETRIES = re.compile(r" in [0-9.]+\S+, after \d+ retries, max_retries: \d+, retry_timeout: \S+ *")
_CAUSE = re.compile(r'<Code>(\w{1,80})</Code>|\bmessage: "([^"?]{1,80})"')
"""Of an error of S3 or of the system, in what obstore shows of its own errors."""


class OwnManifest(NamedTuple):
    """One that this client has written, and may still merge."""

    path: str
    manifest: ObjectManifest


class _Batch:
    """Small runs that become one object."""

    def __init__(self) -> None:
        self.runs: list[PackedValues] = []
        self.until = 0.0
        """When the last of its calls ends."""
        self.full = asyncio.Event()
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it was not written, or an empty text."""

    @property
    def size(self) -> int:
        return sum(len(run.body) for run in self.runs)


class _Unlisted(NamedTuple):
    """What the next manifest says."""

    contents: list[ObjectContent]
    removed: list[tuple[str, str]]
    until: float
    done: asyncio.Future[str]


class PackedObjects:
    """A client of one store; every method belongs to one event loop."""

    def __init__(
        self, store: ObjectStore, *, linger_s: float = LINGER_S, refresh_s: float = REFRESH_S
    ) -> None:
        self._store = store
        self._linger_s = linger_s
        self._refresh_s = refresh_s
        self._index = ObjectIndex()
        self._client = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._seen: set[str] = set()
        """Manifests that were read."""
        self._refresh: asyncio.Task[None] | None = None
        self._refresh_began = 0.0
        self._refreshed_at: float | None = None
        self._batch: _Batch | None = None
        self._unlisted: list[_Unlisted] = []
        self._own: list[OwnManifest] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._lister: asyncio.Task[None] | None = None
        self._merger: asyncio.Task[None] | None = None

    def known(self, names: Sequence[str]) -> list[ValuePlace | None]:
        """Where values lie, as far as it is known; any thread may ask."""
        return [self._index.find(name) for name in names]

    async def find(self, names: Sequence[str], *, timeout_s: float) -> list[ValuePlace | None]:
        """Where values lie; `None` for those that no manifest names."""
        places = self.known(names)
        if None in places:
            # Half the time: the other half is for what follows, and for the answer.
            await self._look_for_manifests(timeout_s / 2)
            places = self.known(names)
        return places

    async def read(
        self, object_name: str, starts: list[int], ends: list[int]
    ) -> Sequence[memoryview] | None:
        """Ranges of an object, shorter where it was cut; `None` if it is not there.

        Ranges that lie near each other are one request. obstore would join them by itself, and
        panics where the object ends before one of them begins.
        """
        runs = _near_ranges(starts, ends)
        try:
            reading = (self._read_range(f"data/{object_name}", *run) for run in runs)
            bodies = await asyncio.gather(*reading)
        except FileNotFoundError:
            self._index.lose(object_name)
            return None
        found: list[memoryview] = []
        for start, end in zip(starts, ends, strict=True):
            at = bisect_right(runs, start, key=lambda run: run[0]) - 1
            first = runs[at][0]
            found.append(bodies[at][start - first : end - first])
        return found

    async def _read_range(self, path: str, start: int, end: int) -> memoryview:
        """Bytes of an object, fewer if it ends before `end`."""
        try:
            reading = obstore.get_range_async(self._store, path, start=start, end=end)
            return memoryview(await _mapped(reading, of_one=True))
        except BlobStoreError:
            # Stores refuse a range that begins behind the end, each in its own words.
            head = await _mapped(obstore.head_async(self._store, path), of_one=True)
            if head["size"] > start:
                raise
            return memoryview(b"")

    async def write(self, run: PackedValues, *, timeout_s: float) -> str:
        """Writes values; why they could not be written, or an empty text."""
        until = _now() + timeout_s
        if len(run.body) >= OBJECT_BYTES_MIN:
            return await self._put([run], until)
        if self._batch is None or self._batch.size + len(run.body) > OBJECT_BYTES_MAX:
            self._batch = _Batch()
            self._spawn(self._write_batch(self._batch, min(self._linger_s, timeout_s / 4)))
        batch = self._batch
        batch.runs.append(run)
        batch.until = max(batch.until, until)
        if batch.size >= OBJECT_BYTES_MIN:
            batch.full.set()
        return await asyncio.shield(batch.done)

    async def forget(self, names: Sequence[str], *, timeout_s: float) -> None:
        """Removes values and records."""
        places = await self.find(names, timeout_s=timeout_s)
        removed = [(place.object, name) for name, place in zip(names, places, strict=True) if place]
        await asyncio.gather(*(self._delete(f"records/{name}") for name in names))
        if removed:
            problem = await self._list([], removed, _now() + timeout_s)
            if problem:
                raise BlobStoreError(problem)

    async def get(self, name: str) -> bytes | None:
        """A record."""
        try:
            found = await _mapped(obstore.get_async(self._store, f"records/{name}"), of_one=True)
            if found.meta["size"] > RECORD_BYTES_MAX:
                return b""
            return bytes(await _mapped(found.bytes_async(), of_one=True))
        except FileNotFoundError:
            return None

    async def create(self, name: str, record: bytes) -> bool:
        """Writes a record if there is none."""
        try:
            await self._put_once(f"records/{name}", record)
        except FileExistsError:
            return False
        return True

    async def replace(self, name: str, record: bytes) -> None:
        """Writes a record."""
        await _mapped(
            obstore.put_async(self._store, f"records/{name}", record, use_multipart=False)
        )

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = [*self._tasks, *([self._refresh] if self._refresh else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Manifests of others

    async def _look_for_manifests(self, wait_s: float) -> None:
        """Learns what others have written, unless that was done just now."""
        refresh, now = self._refresh, _now()
        if refresh is None or (refresh.done() and now - self._refresh_began >= self._refresh_s):
            refresh = self._refresh = asyncio.create_task(self._read_manifests())
            self._refresh_began = now
        if not refresh.done():
            await asyncio.wait({refresh}, timeout=wait_s)
        if refresh.done():
            refresh.result()
        elif self._refreshed_at is None or now - self._refreshed_at > STALE_S:
            raise BlobStoreError("the manifests have not been listed yet")

    async def _read_manifests(self) -> None:
        try:
            async with asyncio.timeout(REFRESH_TIMEOUT_S):
                listed = await _mapped(obstore.list(self._store, "manifests").collect_async())
                sizes = {each["path"]: each["size"] for each in listed}
                # In order: what a client removed comes after what it wrote.
                fresh = sorted(sizes.keys() - self._seen)
                for first in range(0, len(fresh), MANIFESTS_AT_ONCE):
                    await self._read_some(
                        [
                            path
                            for path in fresh[first : first + MANIFESTS_AT_ONCE]
                            if sizes[path] <= MANIFEST_BYTES_MAX
                        ]
                    )
        except TimeoutError:
            raise BlobStoreError(f"the manifests took more than {REFRESH_TIMEOUT_S:g} s") from None
        self._seen &= sizes.keys()
        self._refreshed_at = _now()

    async def _read_some(self, paths: list[str]) -> None:
        for path, encoded in zip(
            paths, await asyncio.gather(*map(self._fetch, paths)), strict=True
        ):
            # One that is gone was merged into another, which the next list has.
            manifest = None if encoded is None else decode_manifest(encoded)
            if encoded is not None and manifest is None:
                logger.warning("object store: %s is no manifest, and is ignored", path)
            if manifest is not None:
                self._index.take(manifest)
            self._seen.add(path)

    async def _fetch(self, path: str) -> bytes | None:
        try:
            found = await _mapped(obstore.get_async(self._store, path), of_one=True)
            return bytes(await _mapped(found.bytes_async(), of_one=True))
        except FileNotFoundError:
            return None

    # What this client writes

    async def _write_batch(self, batch: _Batch, linger_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(batch.full.wait(), linger_s)
        if self._batch is batch:
            self._batch = None
        batch.done.set_result(await self._put(batch.runs, batch.until))

    async def _put(self, runs: list[PackedValues], until: float) -> str:
        """Writes an object and has it listed."""
        name = f"{self._client}-{next(self._numbers):08d}"
        values, offset = [], 0
        for run in runs:
            values += [(each, offset + start, length) for each, start, length in run.values]
            offset += len(run.body)
        body = runs[0].body if len(runs) == 1 else b"".join(run.body for run in runs)
        try:
            async with asyncio.timeout_at(until):
                # One that is there already is what an answer that was lost has written.
                with suppress(FileExistsError):
                    await self._put_once(f"data/{name}", body)
        except TimeoutError:
            return "the store did not take an object in time"
        except BlobStoreError as error:
            return str(error)
        return await self._list([ObjectContent(name, values)], [], until)

    async def _list(
        self, contents: list[ObjectContent], removed: list[tuple[str, str]], until: float
    ) -> str:
        """Has the next manifest say so; why it could not be written, or an empty text."""
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._unlisted.append(_Unlisted(contents, removed, until, done))
        if self._lister is None or self._lister.done():
            self._lister = self._spawn(self._write_manifests())
        return await asyncio.shield(done)

    async def _write_manifests(self) -> None:
        while self._unlisted:
            said, self._unlisted = self._unlisted, []
            manifest = ObjectManifest.of(
                itertools.chain.from_iterable(each.contents for each in said),
                itertools.chain.from_iterable(each.removed for each in said),
            )
            problem = await self._write_manifest(manifest, max(each.until for each in said))
            for each in said:
                each.done.set_result(problem)
        if (self._merger is None or self._merger.done()) and len(self._own) >= MERGE_COUNT:
            self._merger = self._spawn(self._merge())

    async def _write_manifest(self, manifest: ObjectManifest, until: float) -> str:
        path = f"manifests/{self._client}-{next(self._numbers):08d}"
        try:
            async with asyncio.timeout_at(until):
                with suppress(FileExistsError):
                    await self._put_once(path, manifest.encode())
        except TimeoutError:
            return "the store did not take a manifest in time"
        except BlobStoreError as error:
            return str(error)
        self._index.take(manifest)
        self._seen.add(path)
        self._own.append(OwnManifest(path, manifest))
        return ""

    async def _merge(self) -> None:
        """Replaces small manifests of this client by one; others may have read either."""
        parts = list(self._own)
        merged = ObjectManifest.of(
            [each for own in parts for each in self._index.remaining(own.manifest.contents)],
            [each for own in parts for each in own.manifest.removed],
        )
        problem = await self._write_manifest(merged, _now() + REFRESH_TIMEOUT_S)
        if problem:
            logger.warning("object store: manifests could not be merged: %s", problem)
            return
        # One that is large enough is not merged again, and need not be kept in memory.
        large = len(merged.encode()) >= SMALL_MANIFEST_BYTES
        done = {own.path for own in parts}
        self._own = [
            own
            for own in self._own
            if own.path not in done and not (large and own.manifest is merged)
        ]
        for path in done:
            with suppress(BlobStoreError):
                await self._delete(path)

    # The store itself

    async def _put_once(self, path: str, content: bytes) -> None:
        await _mapped(obstore.put_async(self._store, path, content, mode="create"))

    async def _delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            await _mapped(obstore.delete_async(self._store, path), of_one=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _near_ranges(starts: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges that hold all of these, in order, each with what lies between its own."""
    runs: list[tuple[int, int]] = []
    for start, end in sorted(zip(starts, ends, strict=True)):
        if runs and start <= runs[-1][1] + GAP_BYTES:
            runs[-1] = (runs[-1][0], max(runs[-1][1], end))
        else:
            runs.append((start, end))
    return runs


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _mapped(answer: Awaitable[Answer], *, of_one: bool = False) -> Answer:
    """The answer of the store; its errors become ours, except those of files.

    That something is not there concerns a file only where one is read or removed (`of_one`).
    Otherwise it is the bucket.
    """
    try:
        return await answer
    except obstore.exceptions.AlreadyExistsError as error:
        raise FileExistsError(str(error)) from None
    except (obstore.exceptions.BaseError, OSError) as error:
        if of_one and isinstance(error, FileNotFoundError):
            raise
        raise BlobStoreError(_shown(error)) from None


def _shown(error: Exception) -> str:
    """The first line; what follows a `?` in a URL may be a token."""
    line, _, details = str(error).partition("\n")
    line = line.partition(": <?xml")[0]
    line = _RETRIES.sub(" ", re.sub(r"\?[^\s\"']*", "?…", line))
    cause = _CAUSE.search(details)
    if cause:
        line = f"{line}: {cause[1] or cause[2]}"
    if len(line) <= SHOWN_CHARACTERS:
        return line
    # What was tried comes first, and why it failed last.
    return f"{line[: SHOWN_CHARACTERS // 2]}…{line[-SHOWN_CHARACTERS // 2 :]}"
