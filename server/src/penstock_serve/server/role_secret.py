"""What the roles of several commands share, to authenticate each other.

| where the other roles are      | what they share                                            |
|--------------------------------|------------------------------------------------------------|
| on the loopback interface      | a secret of this user, created at the first start          |
| anywhere, with a `keys_file`   | each other's public keys                                   |

The one rule: without keys, no role is off the loopback interface.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import MachineKeys
from penstock.config import require_address
from penstock.errors import ConfigError, UnavailableError
from penstock.toolkit import SECRET_BYTES_MIN, is_local, read_private

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.config import ServeTable
    from penstock.toolkit import Secret

SECRET_BYTES = 32
SECRET_BYTES_MAX = 4096
MAKE_KEYS = "make one with `penstock keys new FILE` and give it with --keys-file"


def secret_between(serve: ServeTable, addresses: Mapping[str, str]) -> Secret:
    """What the roles at these addresses share.

    Raises `ConfigError`: an address needs keys that are not there, or the file cannot be used;
    `UnavailableError`: the secret of this user can be neither read nor created.
    """
    for key, address in addresses.items():
        require_address(key, address)
        if not serve.keys_file and not is_local(address):
            raise ConfigError(
                "serve.keys_file",
                f"is '', must be a file with the keys of the machines for {key} {address!r}, "
                f"which is not on the loopback interface: {MAKE_KEYS}",
            )
    if not serve.keys_file:
        return _own_secret()
    keys = _read_keys(serve.keys_file)
    for address in addresses.values():
        try:
            keys.key_of(address)
        except UnavailableError as error:
            raise ConfigError("serve.keys_file", f"is {serve.keys_file!r}: {error}") from error
    return keys


def _read_keys(file: str) -> MachineKeys:
    try:
        return MachineKeys.read(Path(file).expanduser())
    except OSError as error:
        raise ConfigError(
            "serve.keys_file", f"is {file!r}, must be a file with keys: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ConfigError("serve.keys_file", f"is {file!r}: {error}") from error


def own_secret_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return folder / "penstock" / "secret"


def _own_secret() -> bytes:
    try:
        path = own_secret_path()
        if not path.exists():
            _make(path)
        return _read(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise UnavailableError(
            f"the secret by which roles on this machine know each other cannot be had: {error}; "
            f"or {MAKE_KEYS}"
        ) from error


def _read(path: Path) -> bytes:
    secret = read_private(path, bytes_max=SECRET_BYTES_MAX).strip()
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(f"{path} has {len(secret)} bytes, must have at least {SECRET_BYTES_MIN}")
    return secret


def _make(path: Path) -> None:
    """Writes a new secret atomically, unless another command was quicker."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"secret.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return
    finally:
        temporary.unlink()
