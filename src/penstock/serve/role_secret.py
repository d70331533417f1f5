"""The secret that the roles of several commands share, to authenticate each other.

| where the other roles are      | the secret                                                 |
|--------------------------------|------------------------------------------------------------|
| anywhere, with a `secret_file` | the content of that file                                   |
| on the loopback interface      | one of this user, created at the first start                |
| on other machines              | none: with `--insecure`, whoever reaches them may join      |

The one rule: a file that holds a secret is readable by this user only.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.values import require_address
from penstock.errors import ConfigError, UnavailableError
from penstock.serve.guard import is_loopback
from penstock.transport.zmq_link import SECRET_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.config.values import ServeTable

SECRET_BYTES = 32
SECRET_BYTES_MAX = 4096


def secret_between(serve: ServeTable, addresses: Iterable[str]) -> bytes:
    """The secret of the roles at these addresses; empty if they have none.

    Raises:
        ConfigError: the file cannot be used as a secret.
        UnavailableError: the secret of this user can be neither read nor created.
    """
    if serve.secret_file:
        try:
            return _read(Path(serve.secret_file))
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                "serve.secret_file", f"is {serve.secret_file!r}, must be a file: {problem}"
            ) from error
    if all(is_local(address) for address in addresses):
        return _own_secret()
    return b""


def is_local(address: str) -> bool:
    host, _ = require_address("address", address)
    return is_loopback(host.strip("[]"))


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
            "give all of them the same --secret-file"
        ) from error


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ValueError(
                f"{path} is of user {found.st_uid} with mode {stat.filemode(found.st_mode)}, must "
                f"be of user {os.getuid()} with mode -rw-------"
            )
        secret = file.read(SECRET_BYTES_MAX + 1).strip()
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise ValueError(
            f"{path} has {len(secret)} bytes, must have from {SECRET_BYTES_MIN} to "
            f"{SECRET_BYTES_MAX}"
        )
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
