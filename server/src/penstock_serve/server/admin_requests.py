"""The bodies of `POST /admin/*`: what an operator may ask for, checked before anything happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock_serve.server.fields import (
    BadRequest,
    flag,
    number,
    one_of,
    read_fields,
    read_object,
    refuse,
    whole,
    word,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock_serve.engine.messages import RoleName
    from penstock_serve.server.fields import Read

TIMEOUT_S_MAX = 86_400.0
VERSION_BYTES_MAX = 128
ROLES = ("both", "prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """How the requests under way end."""

    mode: str = "drain"
    """`drain`: they have `timeout_s` to finish, and are aborted then. `abort`: at once."""
    timeout_s: float = 60.0


_DRAIN: Mapping[str, Read] = {
    "mode": one_of("drain", "abort"),
    "timeout_s": number(0, TIMEOUT_S_MAX),
}


def read_pause(body: bytes) -> DrainRequest:
    """The body of `POST /admin/pause`, which may be empty.

    Raises `BadRequest`: a field is wrong.
    """
    return DrainRequest(**_read(body, _DRAIN))


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepRequest:
    """Memory that all instances give back."""

    level: int = 1
    """1: the KV of the device. 2: the weights, too."""
    host: bool = False
    """Whether host memory is given back, too."""
    mode: str = "drain"
    timeout_s: float = 60.0

    @property
    def drain(self) -> DrainRequest:
        """How requests under way end before."""
        return DrainRequest(mode=self.mode, timeout_s=self.timeout_s)


def read_sleep(body: bytes) -> SleepRequest:
    """The body of `POST /admin/sleep`, which may be empty.

    Raises `BadRequest`: a field is wrong.
    """
    return SleepRequest(**_read(body, {"level": whole(1, 2), "host": flag, **_DRAIN}))


def read_empty(body: bytes) -> None:
    """The body of a call that takes no fields.

    Raises `BadRequest`: it has some.
    """
    _read(body, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """Another role for one instance."""

    instance: str
    role: RoleName
    timeout_s: float = 60.0
    """How long the requests of the old role may take to end."""


def read_role(body: bytes) -> RoleRequest:
    """The body of `POST /admin/role`: `{"instance": NAME, "role": ROLE, "timeout_s": SECONDS}`.

    Raises `BadRequest`: a field is wrong, or missing.
    """
    known = {"instance": word, "role": one_of(*ROLES), "timeout_s": number(0, TIMEOUT_S_MAX)}
    found = _read(body, known)
    for name, right in (("instance", "the name of an instance"), ("role", " or ".join(ROLES))):
        if name not in found:
            raise BadRequest(f"{name} is missing, must be {right}", param=name)
    return RoleRequest(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRequest:
    """Other weights for all instances."""

    path: str = ""
    """The checkpoint that is loaded; empty: the weights were changed by other means."""
    version: str = ""
    mode: str = "drain"
    timeout_s: float = 60.0
    load_timeout_s: float = 600.0
    """How long an instance may take to load."""

    @property
    def drain(self) -> DrainRequest:
        """How requests under way end before the load."""
        return DrainRequest(mode=self.mode, timeout_s=self.timeout_s)


def read_weights(body: bytes) -> WeightsRequest:
    """The body of `POST /admin/weights`.

    Raises `BadRequest`: a field is wrong, or there is neither a path nor a version.
    """
    known = {"path": _path, "version": _version, "load_timeout_s": number(0.1, TIMEOUT_S_MAX)}
    found = WeightsRequest(**_read(body, {**known, **_DRAIN}))
    if not found.version and not found.path:
        raise BadRequest("version is missing, must be a string", param="version")
    return found


def _read(body: bytes, known: Mapping[str, Read]) -> dict[str, Any]:
    return read_fields(read_object(body or b"{}"), known)


def _path(name: str, value: object) -> str:
    path = word(name, value)
    if not path or "\0" in path:
        refuse(name, value, "a folder with a checkpoint, or a .gguf file")
    return path


def _version(name: str, value: object) -> str:
    version = word(name, value)
    length = len(version.encode())
    if not 1 <= length <= VERSION_BYTES_MAX:
        raise BadRequest(
            f"{name} has {length} bytes, must have from 1 to {VERSION_BYTES_MAX}", param=name
        )
    return version
