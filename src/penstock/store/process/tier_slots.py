"""The tiers of a store process, made as its configuration names them: open, or why not.

A client is loaded when a tier of its kind is opened, in the store process. Its package comes with
an extra of the same name; where it is missing, the tier is off, and says what to install.

A tier is opened in a thread, because a large folder or a slow disk may take its time, and one whose
folder cannot be opened now is tried again, with a growing pause. The process serves its sessions
and its other tiers meanwhile. The one rule: a space that was to be voided while its tier was not
open is voided before anything of the tier is used, and counts as voided only when that outlives
the process.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from penstock.config.shared_stores import (
    MooncakeSettings,
    ObjectSettings,
    OtherStoreSettings,
    RedisSettings,
)
from penstock.errors import ConfigError, PenstockError, UnavailableError, install_hint
from penstock.extensions import OTHER_STORES
from penstock.store.base import OPENING, StoreTier, TierState
from penstock.store.clients.blobs import BlobStore, call_in_thread
from penstock.store.disk.format import load_cipher
from penstock.store.disk.tier import DiskTier
from penstock.store.peers.tier import open_peers
from penstock.store.process.messages import StoreTierConfig
from penstock.store.shared.tier import SharedTier
from penstock.vocabulary.frames import short

Options = Mapping[str, Any]


def _redis(options: Options) -> BlobStore:
    from penstock.store.clients.redis import RedisBlobs  # noqa: PLC0415

    return RedisBlobs(RedisSettings(**options))


def _mooncake(options: Options) -> BlobStore:
    from penstock.store.clients.mooncake import MooncakeBlobs  # noqa: PLC0415

    return MooncakeBlobs(MooncakeSettings(**options))


def _objects(options: Options) -> BlobStore:
    from penstock.store.clients.objects import open_objects  # noqa: PLC0415

    return open_objects(ObjectSettings(**options))


def _other(options: Options) -> BlobStore:
    settings = OtherStoreSettings(**options)
    opener = OTHER_STORES.find(settings.name, "store")
    assert opener is not None  # The settings have looked.
    found = opener(settings.address, threads=settings.threads)
    if not isinstance(found, BlobStore):
        what = f"opens a {type(found).__name__}, must open a BlobStore"
        raise ConfigError("store", f"is {settings.name!r}, which {what}")
    return found


CLIENTS: Mapping[str, Callable[[Options], BlobStore]] = {
    "redis": _redis,
    "mooncake": _mooncake,
    "objects": _objects,
    "shared": _other,
}
"""A new kind adds a row here and its settings in `CLIENT_SETTINGS` of `penstock.config`."""


def open_client(kind: str, options: Options) -> BlobStore:
    """The client of a shared store.

    Raises `ConfigError`: an option is wrong; `UnavailableError`: its package is not installed.
    """
    try:
        return CLIENTS[kind](options)
    except ImportError as error:
        how = "see its own manual" if kind == "shared" else install_hint(kind)
        raise UnavailableError(
            f"kind {kind!r} needs a package that is not installed ({error.name}): {how}"
        ) from error


def open_shared(config: StoreTierConfig) -> StoreTier:
    """Opens a tier of one of the kinds in `CLIENTS`.

    Raises `ConfigError`: an option is wrong; `UnavailableError`: a package is not installed.
    """
    options = config.options
    compress = compresses(options)
    return SharedTier(
        open_client(config.kind, options),
        ask_s=float(options["ask_ms"]) / 1000,
        timeout_s=float(options["timeout_s"]),
        compress=compress,
    )


def compresses(options: Options) -> bool:
    """Whether a tier with these options writes blocks compressed.

    Raises `UnavailableError`: it should, and the package is not installed.
    """
    name = options.get("compression", "off")
    if name == "off":
        return False
    try:
        import zstandard  # noqa: F401, PLC0415  (an extra)
    except ImportError as error:
        raise UnavailableError(
            f"compression {name!r} needs a package that is not installed ({error.name}): "
            f"{install_hint('compression')}"
        ) from error
    return True


logger = logging.getLogger(__name__)

OpenTier = Callable[[StoreTierConfig], StoreTier]


def open_disk(config: StoreTierConfig) -> StoreTier:
    """Opens a tier of the kind "disk"."""
    options = config.options
    key_file = str(options.get("key_file", ""))
    return DiskTier(
        Path(config.folder),
        config.size_bytes,
        threads=int(options.get("threads", DISK_THREADS)),
        cipher=load_cipher(Path(key_file)) if key_file else None,
        ignore_other_versions=options.get("other_versions") == "reclaim",
    )


TIER_KINDS: Mapping[str, OpenTier] = {
    "disk": open_disk,
    "peers": open_peers,
    **dict.fromkeys(CLIENTS, open_shared),
}
"""How a tier of each kind is opened. A new kind adds a row."""

RETRY_S = 1.0
RETRY_MAX_S = 60.0
"""Before a tier is tried again: somebody has to mount, free or unlock something."""
DISK_THREADS = 6
"""For the I/O of one disk tier: fewer leave a drive waiting, more gain nothing."""
STATE_S = 1.0
"""How often counters are sent at most; a tier that goes on or off is sent at once."""


class TierSlot:
    """A tier by its name, open or not."""

    def __init__(self, config: StoreTierConfig, kinds: Mapping[str, OpenTier]) -> None:
        if config.kind not in kinds:
            known = ", ".join(sorted(kinds))
            raise ConfigError(
                "tiers.kind", f"is {config.kind!r} in tier {config.name!r}, must be one of: {known}"
            )
        self.name = config.name
        self.terms = config.terms
        self.tier: StoreTier | None = None
        self.why = OPENING
        """Why it is not open."""
        self.retry_at = -math.inf
        self._pause_s = RETRY_S
        self._config = config
        self._open = kinds[config.kind]
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when `open` has something to take."""
        self._opening: Future[StoreTier] | None = None
        self._voids: set[bytes] = set()
        self._sent: TierState | None = None
        self._sent_at = -math.inf

    def open(self, now: float) -> bool:
        """Opens the tier, if that is due, and does not wait; true if it is open from now on."""
        if self._opening is not None and self._opening.done():
            return self._take_opened(self._opening, now)
        if self._opening is None and self.tier is None and now >= self.retry_at:
            self._opening = self._begin_open()
        return False

    def _begin_open(self) -> Future[StoreTier]:
        return call_in_thread(self._try_open, "open tier")

    def _try_open(self) -> StoreTier:
        try:
            return self._open(self._config)
        finally:
            os.eventfd_write(self.descriptor, 1)

    def _take_opened(self, opened: Future[StoreTier], now: float) -> bool:
        os.eventfd_read(self.descriptor)
        self._opening = None
        if (error := opened.exception()) is not None:
            why = str(error)
            if not isinstance(error, PenstockError | OSError | ValueError):
                logger.error("store tier fails: tier=%s", self.name, exc_info=error)
                why = "opening it failed, and the log says why"
            if why != self.why:
                logger.warning("store tier is off: tier=%s cause=%s", self.name, why)
            self.why = why
            self.retry_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, RETRY_MAX_S)
            return False
        self.tier = opened.result()
        self.retry_at = math.inf
        logger.info("store tier is open: tier=%s", self.name)
        return True

    def void(self, name: bytes) -> int | None:
        """Begins a new generation of a space; `None`: `settle_voids` returns it later."""
        if name in self._voids and self.tier is not None:
            self.tier.void_anew(name)
        return self._try_void(name)

    def _try_void(self, name: bytes) -> int | None:
        try:
            if self.tier is not None:
                generation = self.tier.void(name)
                if generation is not None:
                    self._voids.discard(name)
                    return generation
        except UnavailableError as error:
            logger.warning("store tier keeps no reset: tier=%s cause=%s", self.name, error)
        self._voids.add(name)
        return None

    def settle_voids(self) -> list[tuple[bytes, int]]:
        """Spaces that could not be voided before and are now, with their generations."""
        if not self._voids or not self.state().on:
            return []
        tried = [(name, self._try_void(name)) for name in list(self._voids)]
        return [(name, generation) for name, generation in tried if generation is not None]

    def expect(self, name: bytes, generation: int) -> None:
        """An engine knows of this generation: the tier may not go back behind it."""
        if self.tier is not None:
            self.tier.expect(name, generation)

    def generation(self, name: bytes) -> int | None:
        return None if self.tier is None else self.tier.generation(name)

    def state(self) -> TierState:
        """With what is wrong as it may travel."""
        state = TierState(on=False, why=self.why) if self.tier is None else self.tier.state()
        return replace(state, why=short(state.why)) if state.why else state

    def news(self, now: float) -> TierState | None:
        """The state, if it is to be sent now."""
        state = self.state()
        if state == self._sent:
            return None
        sent = self._sent
        calm = sent is not None and replace(sent, on=state.on, why=state.why) == sent
        if calm and now < self._sent_at + STATE_S:
            return None
        self._sent = state
        self._sent_at = now
        return state

    def alarm(self) -> float:
        """When `open` or `news` have something to do, though the tier is silent."""
        if self.tier is None:
            return self.retry_at if self._opening is None else math.inf
        return self._sent_at + STATE_S if self.state() != self._sent else math.inf

    def close(self, deadline: float) -> None:
        if self._opening is not None:
            wait([self._opening], max(0.0, deadline - time.monotonic()))
            self.open(deadline)
        if self.tier is not None:
            self.tier.close(deadline=deadline)
