"""The secret salt of keys: who does not know it cannot compute a key, nor test a guessed prompt.

A configuration names the place of the secret, `file:/PATH` or `env:NAME`, never the secret: it
travels between processes and is printed. Every process that makes keys reads the secret itself,
once. The one rule that must not break: no message has a part of it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from functools import lru_cache
from pathlib import Path

from penstock.errors import ConfigError
from penstock.vocabulary.namespace import frame

SETTING = "cache.salt"
SALT_DOMAIN = b"penstock.salt.v1"
SECRET_BYTES_MIN = 16
"""Who has a key can try secrets until one gives it, so a short or guessable one is none."""
SECRET_BYTES_MAX = 4_096
_PLACE = re.compile(r"file:/[^\0]+|env:[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_TENANTS_KEPT = 1_024
"""As many as namespaces whose hashes are kept at hand."""


def require_salt(place: object, *, algorithm: str) -> None:
    """Refuses what names no place of a secret, or would not keep it; empty: there is none.

    Raises `ConfigError`: it does not show the value, which may be the secret itself.
    """
    if place and not (isinstance(place, str) and _PLACE.fullmatch(place)):
        said = f"{len(place)} characters" if isinstance(place, str) else type(place).__name__
        raise ConfigError(
            SETTING,
            f'is {said} that name no place, must be "file:/ABSOLUTE/PATH" or "env:NAME", where '
            "the secret is",
        )
    if place and algorithm != "sha256":
        raise ConfigError(
            SETTING,
            f"is given while cache.hash is {algorithm!r}, must be 'sha256': from keys of another "
            "hash the secret could be found",
        )


@lru_cache(maxsize=_TENANTS_KEPT)
def salted_tenant(place: str, tenant: str) -> str:
    """The tenant as the namespace of keys has it: only who knows the secret can compute it.

    Raises `ConfigError`: the secret cannot be read, or is too short.
    """
    message = frame(SALT_DOMAIN) + frame(tenant.encode("utf-8"))
    return f"salted:{hmac.digest(_secret(place), message, hashlib.sha256).hex()}"


@lru_cache(maxsize=16)
def _secret(place: str) -> bytes:
    kind, _, name = place.partition(":")
    found = _in_file(Path(name)) if kind == "file" else os.environb.get(name.encode(), b"")
    if kind == "env" and not found:
        raise ConfigError(SETTING, f"is {place!r}, a variable that is not set, or is empty")
    found = found.strip()
    if not SECRET_BYTES_MIN <= len(found) <= SECRET_BYTES_MAX:
        raise ConfigError(
            SETTING,
            f"is {place!r}, where {len(found)} bytes are, must be from {SECRET_BYTES_MIN} to "
            f"{SECRET_BYTES_MAX}, chosen at random, as by `openssl rand -hex 32`",
        )
    return found


def _in_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            # One byte more than is allowed, and what surrounds it: a file that is too long is seen.
            return file.read(SECRET_BYTES_MAX + 64)
    except OSError as error:
        raise ConfigError(
            SETTING, f"is 'file:{path}', which cannot be read: {error.strerror}"
        ) from None
