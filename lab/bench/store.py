"""Shared stores as a configuration names them, beside the plain client of each.

Both sides move the same bytes in values of the same size by as many threads, in turn in every
round, and remove them.

| side       | what it does                                                                 |
|------------|------------------------------------------------------------------------------|
| `penstock` | jobs from an arena to a `SharedTier` and back: heads, sums and names included |
| `raw`      | threads that call redis-py (with its Python packer, which copies less),      |
|            | Mooncake's client (with registered memory) or obstore's, and verify nothing  |

Where a tier has `compression`, both move plain bytes a second, and only `penstock` compresses.

Memory of Mooncake has to be lent by another process: what a client lends itself is not far away.
"""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec import structs

from lab.bench.measure import collector_paused, summarize
from penstock.errors import ConfigError, UnavailableError
from penstock.store.probe import TierProbe
from penstock.store.process.tier_slots import CLIENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from lab.bench.report import BenchReport
    from penstock.store.process.messages import StoreTierConfig

ROUNDS = 5
ROUND_BYTES = 64 << 20
SIZES = {"256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
KEPT_MIN = 0.85


class RawClient(Protocol):
    """A client as its authors ship it. Several threads call it."""

    def put(self, name: str, value: memoryview) -> None: ...

    def get(self, name: str) -> int:
        """Reads a value; returns how many bytes it had."""
        ...

    def remove(self, name: str) -> None: ...


def run_store(
    report: BenchReport,
    tiers: Sequence[StoreTierConfig],
    *,
    rounds: int,
    round_bytes: int = ROUND_BYTES,
    sizes: Sequence[str] = tuple(SIZES),
) -> None:
    """Measures every shared store in turn, and adds rows and ratios.

    Raises:
        ConfigError: none of the tiers is a shared store.
        UnavailableError: a store does not answer, or values do not come back.
    """
    shared = [
        structs.replace(tier, options={**tier.options, "segment_gib": 0})
        if tier.kind == "mooncake"
        else tier
        for tier in tiers
        if tier.kind in CLIENTS
    ]
    if not shared:
        raise ConfigError("tiers", f"has no shared store, must have one: {', '.join(CLIENTS)}")
    for tier in shared:
        for size in sizes:
            _measure(report, tier, size, rounds, round_bytes)


def _measure(
    report: BenchReport, tier: StoreTierConfig, size: str, rounds: int, round_bytes: int
) -> None:
    count = max(1, round_bytes // SIZES[size])
    raw = _RawRounds(tier, SIZES[size], count)
    with TierProbe(tier, SIZES[size], count) as probe:
        sides: dict[str, Callable[[], tuple[float, float]]] = {
            "penstock": probe.round,
            "raw": raw.round,
        }
        rates: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for number in range(-1, rounds):  # The first round opens connections.
            report.progress(f"{tier.kind}, {size}: round {number + 1} of {rounds}")
            for side in list(sides) if number % 2 else list(sides)[::-1]:
                with collector_paused():
                    down_and_up = sides[side]()
                if number >= 0:
                    rates[side].append(down_and_up)
    params: dict[str, str | int] = {
        "kind": tier.kind,
        "value": size,
        "threads": int(tier.options["threads"]),
    }
    if tier.options.get("compression", "off") != "off":
        params["compression"] = str(tier.options["compression"])
    for column, direction in enumerate(("put", "get")):
        for side, found in rates.items():
            report.add_row(
                bench="store",
                side=side,
                params=params,
                metric=direction,
                unit="MB/s",
                summary=summarize([each[column] / 1e6 for each in found]),
            )
        pairs = zip(rates["penstock"], rates["raw"], strict=True)
        value = float(np.median([mine[column] / plain[column] for mine, plain in pairs]))
        name = f"{tier.kind}, {size}, {direction}: rate of the raw client kept"
        report.add_ratio(name, value, at_least=KEPT_MIN)


class _RawRounds:
    """Threads that put and get values by the plain client."""

    def __init__(self, tier: StoreTierConfig, value_bytes: int, count: int) -> None:
        self._client = RAW_CLIENTS[tier.kind](tier.options)
        self._threads = int(tier.options["threads"])
        self._count = count
        self._value = np.random.default_rng(1).integers(0, 256, value_bytes, np.uint8)

    def round(self) -> tuple[float, float]:
        """Bytes a second there and back."""
        prefix = f"penstock-bench-{secrets.token_hex(8)}"
        names = [f"{prefix}-{number}" for number in range(self._count)]
        total = self._count * self._value.nbytes
        with ThreadPoolExecutor(self._threads) as pool:
            began = time.perf_counter()
            list(pool.map(lambda name: self._client.put(name, self._value.data), names))
            put_s = time.perf_counter() - began
            began = time.perf_counter()
            got = sum(pool.map(self._client.get, names))
            get_s = time.perf_counter() - began
            list(pool.map(self._client.remove, names))
        if got != total:
            raise UnavailableError(f"bench store: {got} of {total} bytes came back")
        return total / put_s, total / get_s


class _RawRedis:
    def __init__(self, options: dict[str, Any]) -> None:
        import redis  # noqa: PLC0415 - an extra

        if options["sentinel"] or options["cluster"]:
            raise ConfigError("tiers", "must name one server: the plain client has no other way")
        # As it is, redis-py copies a value twice on its way out.
        encode = redis.connection.Encoder("utf-8", "strict", decode_responses=False).encode
        packer = redis.connection.PythonRespSerializer(6000, encode)
        self._redis = redis.Redis(
            connection_pool=redis.ConnectionPool.from_url(options["url"], command_packer=packer)
        )

    def put(self, name: str, value: memoryview) -> None:
        self._redis.set(name, value)

    def get(self, name: str) -> int:
        return len(self._redis.get(name) or b"")

    def remove(self, name: str) -> None:
        self._redis.unlink(name)


class _RawMooncake:
    def __init__(self, options: dict[str, Any]) -> None:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - an extra

        self._store = MooncakeDistributedStore()
        status = self._store.setup(
            options["host"] or "127.0.0.1",
            "P2PHANDSHAKE",
            0,
            16 << 20,
            options["protocol"],
            options["devices"],
            options["master"],
        )
        if status:
            raise UnavailableError(f"bench store: Mooncake answers {status}")

        self._own = threading.local()

    def put(self, name: str, value: memoryview) -> None:
        memory = self._memory(len(value))
        status = self._store.put_from(name, memory.ctypes.data, len(value))
        if status:
            raise UnavailableError(f"bench store: Mooncake answers {status} to put")

    def get(self, name: str) -> int:
        memory = self._memory(0)
        return int(self._store.get_into(name, memory.ctypes.data, len(memory)))

    def _memory(self, size: int) -> NDArray[np.uint8]:
        """Memory of this thread that Mooncake may read and write."""
        memory: NDArray[np.uint8] | None = getattr(self._own, "memory", None)
        if memory is None or len(memory) < size:
            memory = np.ones(max(size, *SIZES.values()), dtype=np.uint8)
            self._store.register_buffer(memory.ctypes.data, len(memory))
            self._own.memory = memory
        return memory

    def remove(self, name: str) -> None:
        self._store.remove(name)


class _RawObjects:
    def __init__(self, options: dict[str, Any]) -> None:
        import obstore  # noqa: PLC0415 - an extra
        from obstore.store import from_url  # noqa: PLC0415 - an extra

        self._obstore = obstore
        url = options["url"]
        if url.startswith("file://"):
            Path(url.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
            self._store: Any = from_url(url)
        else:
            wishes: Any = {name: options[name] for name in ("endpoint", "region") if options[name]}
            self._store = from_url(url, client_options={"allow_http": True}, **wishes)

    def put(self, name: str, value: memoryview) -> None:
        self._obstore.put(self._store, name, value)

    def get(self, name: str) -> int:
        return len(self._obstore.get(self._store, name).bytes())

    def remove(self, name: str) -> None:
        self._obstore.delete(self._store, name)


RAW_CLIENTS: dict[str, Callable[[dict[str, Any]], RawClient]] = {
    "redis": _RawRedis,
    "mooncake": _RawMooncake,
    "objects": _RawObjects,
}
