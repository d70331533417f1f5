"""Access control: the API key of clients, and who may use `/admin/*`.

| path        | with a key                    | without one                                     |
|-------------|-------------------------------|-------------------------------------------------|
| `/admin/*`  | clients with the key          | this machine: loopback on both ends, no proxy   |
| the others  | clients with the key          | everybody who can reach the port                |

Requests that a browser sends for a page of another site are always refused at `/admin/*`.

The one rule: a key is compared in constant time, and appears in no message.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.values import KEY_VARIABLE, ServeTable
from penstock.errors import ConfigError
from penstock.serve.fields import BadRequest
from penstock.transport.machine_keys import is_loopback

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from starlette.requests import Request as HttpRequest

_KEY = re.compile(r"[!-~]{1,512}")
_FILE_BYTES_MAX = 4096
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


class Guard:
    """Checks requests before they are processed."""

    def __init__(self, api_key: str) -> None:
        self._digest = _digest(api_key.encode()) if api_key else b""

    @property
    def needs_key(self) -> bool:
        """Whether clients must send one."""
        return bool(self._digest)

    def require_key(self, http: HttpRequest) -> None:
        """Refuses a request without the key, if there is one."""
        given = http.headers.get("authorization", "")
        scheme, _, key = given.partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else given
        # Digests all have one length, so not even the length of the key can be measured.
        if self._digest and not hmac.compare_digest(_digest(key.encode()), self._digest):
            raise BadRequest("the API key is missing or wrong", status=401)

    def require_admin(self, http: HttpRequest) -> None:
        _require_same_site(http)
        if self._digest:
            self.require_key(http)
            return
        client = http.client.host if http.client is not None else ""
        host = _host_of(http.headers.get("host", ""))
        forwarded = any(name in http.headers for name in _FORWARDED)
        is_here = is_loopback(client) or _is_unix_socket(http)
        if forwarded or not is_here or not is_loopback(host):
            raise BadRequest(
                f"{http.url.path} needs an API key, which this server has not, unless it is asked "
                "from its own machine, without a proxy, by a loopback address",
                status=403,
            )


def find_key(serve: ServeTable, environment: MutableMapping[str, str] = os.environ) -> str:
    """The API key in effect, empty if there is none; it is taken out of the environment.

    Options and the configuration take precedence over the environment.

    Raises:
        ConfigError: the key, or the file that should hold it, is not usable.
    """
    of_environment = environment.pop(KEY_VARIABLE, "")
    if serve.api_key_file:
        return _key_in(Path(serve.api_key_file), "serve.api_key_file")
    if serve.api_key:
        return _usable("serve.api_key", serve.api_key)
    return _usable(KEY_VARIABLE, of_environment) if of_environment else ""


def find_client_key(api_key_file: str | None) -> str:
    """The key that a command sends to a server, empty if it was given none.

    Raises:
        ConfigError: the key, or the file that should hold it, is not usable.
    """
    require_usable_options(None, api_key_file)
    if api_key_file is not None:
        return _key_in(Path(api_key_file), "--api-key-file")
    return find_key(ServeTable())


def require_usable_options(api_key: str | None, api_key_file: str | None) -> None:
    """Refuses options that seem to give a key and give none, such as an unset shell variable.

    Raises:
        ConfigError: one of them is empty, or both are given.
    """
    if api_key is not None and api_key_file is not None:
        raise ConfigError(
            "--api-key", "is given beside --api-key-file, must be only one of the two"
        )
    for option, given in (("--api-key", api_key), ("--api-key-file", api_key_file)):
        if given == "":
            raise ConfigError(option, "is empty, must be left out to do without a key")


def wrong_key(url: str) -> ConfigError:
    """What a command raises if a server wants another key."""
    return ConfigError(
        "API key",
        f"is missing or wrong for {url}, must be in --api-key-file FILE or {KEY_VARIABLE}",
    )


def _key_in(path: Path, place: str) -> str:
    try:
        with path.open("rb") as file:
            found = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            place, f"is {str(path)!r}, which cannot be read: {error.strerror}"
        ) from error
    return _usable(f"the key in {str(path)!r}", found.decode("latin-1").strip())


def _usable(where: str, key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ConfigError(
            where,
            f"has {len(key)} characters, must be from 1 to 512 printable ASCII characters without "
            "spaces",
        )
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _require_same_site(http: HttpRequest) -> None:
    # Browsers add `Origin` to every POST, and `Sec-Fetch-Site` to every request.
    origin = http.headers.get("origin")
    site = http.headers.get("sec-fetch-site", "none")
    same = origin is None or origin.partition("://")[2] == http.headers.get("host", "")
    if not same or site not in {"none", "same-origin"}:
        raise BadRequest(f"{http.url.path} is not for pages of other sites", status=403)


def _is_unix_socket(http: HttpRequest) -> bool:
    """Whether it came over a socket that only the user of this server can connect to."""
    server = http.scope.get("server")
    return http.client is None and (server is None or server[1] is None)


def _host_of(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
