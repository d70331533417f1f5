"""The kinds of shared stores: how the client of each is made from the configuration.

A client is loaded when a tier of its kind is opened, in the store process. Its package comes with
an extra of the same name; where it is missing, the tier is off, and says what to install.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import UnavailableError
from penstock.store.blobs import Secret
from penstock.store.shared import SharedTier

if TYPE_CHECKING:
    from penstock.store.base import StoreTier
    from penstock.store.blobs import BlobStore
    from penstock.store.messages import StoreTierConfig

Options = Mapping[str, Any]


def _redis(options: Options) -> BlobStore:
    from penstock.store.redis_blobs import RedisBlobs  # noqa: PLC0415
    from penstock.store.redis_connections import RedisSettings  # noqa: PLC0415

    return RedisBlobs(
        RedisSettings(
            url=options["url"],
            password=_secret(options, "password"),
            sentinel=options["sentinel"],
            cluster=options["cluster"],
            ca_file=options["ca_file"],
            certificate_file=options["certificate_file"],
            key_file=options["key_file"],
            ttl_s=options["ttl_s"] or None,
            threads=options["threads"],
        )
    )


def _mooncake(options: Options) -> BlobStore:
    from penstock.store.mooncake_blobs import MooncakeBlobs, MooncakeSettings  # noqa: PLC0415

    return MooncakeBlobs(
        MooncakeSettings(
            master=options["master"],
            host=options["host"],
            protocol=options["protocol"],
            devices=options["devices"],
            segment_gib=options["segment_gib"],
            replica_count=options["replicas"],
            staging_mib=options["staging_mib"],
            threads=options["threads"],
        )
    )


def _objects(options: Options) -> BlobStore:
    from penstock.store.object_blobs import ObjectSettings, open_objects  # noqa: PLC0415

    return open_objects(
        ObjectSettings(
            url=options["url"],
            endpoint=options["endpoint"],
            region=options["region"],
            key_id=_secret(options, "key_id"),
            secret=_secret(options, "secret"),
            ca_file=options["ca_file"],
            refresh_s=options["refresh_s"],
            threads=options["threads"],
        )
    )


def _secret(options: Options, name: str) -> Secret | None:
    """Where a secret is, if it is anywhere."""
    file, variable = options[f"{name}_file"], options[f"{name}_env"]
    return Secret(file=file, variable=variable) if file or variable else None


CLIENTS: Mapping[str, Callable[[Options], BlobStore]] = {
    "redis": _redis,
    "mooncake": _mooncake,
    "objects": _objects,
}
"""A new kind adds a row here and its keys in `penstock.config.values`."""


def open_client(kind: str, options: Options) -> BlobStore:
    """The client of a shared store.

    Raises:
        ConfigError: an option is wrong.
        UnavailableError: its package is not installed.
    """
    try:
        return CLIENTS[kind](options)
    except ImportError as error:
        raise UnavailableError(
            f"kind {kind!r} needs a package that is not installed ({error.name}): "
            f"pip install 'penstock[{kind}]'"
        ) from error


def open_shared(config: StoreTierConfig) -> StoreTier:
    """Opens a tier of one of the kinds in `CLIENTS`.

    Raises:
        ConfigError: an option is wrong.
        UnavailableError: a package is not installed.
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

    Raises:
        UnavailableError: it should, and the package is not installed.
    """
    name = options.get("compression", "off")
    if name == "off":
        return False
    try:
        import penstock.store.block_codec  # noqa: F401, PLC0415  (an extra)
    except ImportError as error:
        raise UnavailableError(
            f"compression {name!r} needs a package that is not installed ({error.name}): "
            "pip install 'penstock[compression]'"
        ) from error
    return True
