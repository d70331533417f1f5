"""Access control: the API key of clients, which web pages may ask, and who may use `/admin/*`.

| path        | with a key                    | without one                                     |
|-------------|-------------------------------|-------------------------------------------------|
| `/admin/*`  | clients with the key          | this machine: loopback on both ends, no proxy   |
| the others  | clients with the key          | everybody who can reach the port                |

Whoever can reach the port includes the browsers of this machine, and so every page that is open in
them. Two things are therefore refused at every path, unless the request has the key:

| what                                          | how it is known                                |
|-----------------------------------------------|------------------------------------------------|
| a page of another site asks                   | `Sec-Fetch-Site`, or `Origin` against `Host`   |
| a name of another site leads to the loopback  | `Host` is a name in the public DNS that is not |
| interface (DNS rebinding)                     | known; checked without a key only              |

At `/admin/*`, pages of other sites are refused even with the key.

The one rule: a key is compared in constant time, and appears in no message.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.config import KEY_VARIABLE, ServeTable
from penstock.errors import ConfigError, shown
from penstock.toolkit import is_loopback
from penstock_serve.server.fields import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

    from starlette.requests import Request as HttpRequest

_KEY = re.compile(r"[!-~]{1,512}")
_FILE_BYTES_MAX = 4096
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
"""Nobody can register a name that ends so: such names are of this machine or of its network."""


class Guard:
    """Checks requests before they are processed."""

    def __init__(self, api_key: str, hosts: Iterable[str] = ()) -> None:
        """Makes it."""
        self._digest = _digest(api_key.encode()) if api_key else b""
        self._hosts = {_plain(name) for name in hosts}
        self._machine = _plain(socket.gethostname())

    @property
    def needs_key(self) -> bool:
        """Whether clients must send one."""
        return bool(self._digest)

    def require_key(self, http: HttpRequest) -> None:
        """Refuses a request without the key, if there is one."""
        if self._digest and not self._has_key(http):
            raise BadRequest("the API key is missing or wrong", status=401)

    def require_own_site(self, http: HttpRequest) -> None:
        """Refuses what a page of another site asks, unless it has the key."""
        if self._digest and self._has_key(http):
            return
        if not _follows_link(http):
            self._require_same_site(http)
        server = http.scope.get("server")
        if self._digest or not server or not is_loopback(server[0]):
            # Other machines reach it by names that are not known here; Unix sockets by none.
            return
        host = _host_of(http.headers.get("host", ""))
        if not self._is_own(host):
            raise BadRequest(
                f"the Host header is {shown(host)}, must be a name of this server: without an API "
                "key, pages of a site whose name leads here could use it. If it is the name of a "
                "proxy, give it with --allowed-hosts or serve.allowed_hosts",
                param="host",
                status=403,
            )

    def require_admin(self, http: HttpRequest) -> None:
        self._require_same_site(http)
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

    def _has_key(self, http: HttpRequest) -> bool:
        given = http.headers.get("authorization", "")
        scheme, _, key = given.partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else given
        # Digests all have one length, so not even the length of the key can be measured.
        return hmac.compare_digest(_digest(key.encode()), self._digest)

    def _require_same_site(self, http: HttpRequest) -> None:
        # Browsers add `Origin` to every POST. They add `Sec-Fetch-Site` to every request to this
        # machine or by TLS, and no page can change it; behind a proxy that sets another `Host`,
        # it alone tells whether the page is of this server.
        site = http.headers.get("sec-fetch-site")
        if site is None:
            origin = http.headers.get("origin")
            place = "" if origin is None else urlsplit(origin).netloc
            same = (
                origin is None
                or place == http.headers.get("host", "")
                or _plain(_host_of(place)) in self._hosts
            )
        else:
            same = site in {"none", "same-origin"}
        if not same:
            raise BadRequest(f"{http.url.path} is not for pages of other sites", status=403)

    def _is_own(self, host: str) -> bool:
        """Whether a name or an address in a `Host` header cannot be that of another site."""
        name = _plain(host)
        if "." not in name or name == self._machine or name.endswith(_LOCAL_SUFFIXES):
            # Names without a dot are not in the public DNS; HTTP/1.0 may have none at all.
            return True
        if name in self._hosts:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        # A browser that was given an address has not asked the DNS.
        return True


def read_hosts(allowed: str) -> list[str]:
    """The names of `serve.allowed_hosts`."""
    return [name.strip() for name in allowed.split(",") if name.strip()]


def find_key(serve: ServeTable, environment: MutableMapping[str, str] = os.environ) -> str:
    """The API key in effect, empty if there is none; it is taken out of the environment.

    Options and the configuration take precedence over the environment.
    Raises `ConfigError`: the key, or the file that should hold it, is not usable.
    """
    of_environment = environment.pop(KEY_VARIABLE, "")
    if serve.api_key_file:
        return _key_in(Path(serve.api_key_file), "serve.api_key_file")
    if serve.api_key:
        return _usable("serve.api_key", serve.api_key)
    return _usable(KEY_VARIABLE, of_environment) if of_environment else ""


def find_client_key(api_key_file: str | None) -> str:
    """The key that a command sends to a server, empty if it was given none.

    Raises `ConfigError`: the key, or the file that should hold it, is not usable.
    """
    require_usable_options(None, api_key_file)
    if api_key_file is not None:
        return _key_in(Path(api_key_file), "--api-key-file")
    return find_key(ServeTable())


def require_usable_options(api_key: str | None, api_key_file: str | None) -> None:
    """Refuses options that seem to give a key and give none, such as an unset shell variable.

    Raises `ConfigError`: one of them is empty, or both are given.
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


def _follows_link(http: HttpRequest) -> bool:
    """Whether a browser opens it as a page of its own, which the page with the link cannot read."""
    return (
        http.method in {"GET", "HEAD"}
        and http.headers.get("sec-fetch-mode") == "navigate"
        and http.headers.get("sec-fetch-dest") == "document"
    )


def _is_unix_socket(http: HttpRequest) -> bool:
    """Whether it came over a socket that only the user of this server can connect to."""
    server = http.scope.get("server")
    return http.client is None and (server is None or server[1] is None)


def _host_of(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _plain(name: str) -> str:
    """A name as it is compared: `GPU7.example.` is `gpu7.example`."""
    return name.lower().rstrip(".")
