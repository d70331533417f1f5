"""The kinds of shared stores: how the client of each is made from the configuration.

A client is loaded when a tier of its kind is opened, in the store process. Its package comes with
an extra of the same name; where it is missing, the tier is off, and says what to install.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.shared_stores import mooncake_settings, object_settings, redis_settings
from penstock.errors import UnavailableError, install_hint
from penstock.store.shared import SharedTier

if TYPE_CHECKING:
    from penstock.store.base import StoreTier
    from penstock.store.blobs import BlobStore
    from penstock.store.messages import StoreTierConfig

Options = Mapping[str, Any]


def _redis(options: Options) -> BlobStore:
    from penstock.store.redis_blobs import RedisBlobs  # noqa: PLC0415

    return RedisBlobs(redis_settings(options))


def _mooncake(options: Options) -> BlobStore:
    from penstock.store.mooncake_blobs import MooncakeBlobs  # noqa: PLC0415

    return MooncakeBlobs(mooncake_settings(options))


def _objects(options: Options) -> BlobStore:
    from penstock.store.object_blobs import open_objects  # noqa: PLC0415

    return open_objects(object_settings(options))


CLIENTS: Mapping[str, Callable[[Options], BlobStore]] = {
    "redis": _redis,
    "mooncake": _mooncake,
    "objects": _objects,
}
"""A new kind adds a row here and its keys in `penstock.config.values`."""


def open_client(kind: str, options: Options) -> BlobStore:
    """The client of a shared store.

    Raises `ConfigError`: an option is wrong; `UnavailableError`: its package is not installed.
    """
    try:
        return CLIENTS[kind](options)
    except ImportError as error:
        raise UnavailableError(
            f"kind {kind!r} needs a package that is not installed ({error.name}): "
            f"{install_hint(kind)}"
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
        import penstock.store.block_codec  # noqa: F401, PLC0415  (an extra)
    except ImportError as error:
        raise UnavailableError(
            f"compression {name!r} needs a package that is not installed ({error.name}): "
            f"{install_hint('compression')}"
        ) from error
    return True
