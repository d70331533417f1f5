"""How the ranks of one engine share a host tier, when they hold equal bytes.

Rank 0 creates the memory and passes its descriptors to the others over a socket that exists only
while they start. The engine calls all ranks twice, and makes the second call when every rank has
answered the first (vLLM's names):

    register_kv_caches        rank 0 creates the memory and listens
    get_handshake_metadata    the others connect, which succeeds at once, and rank 0 serves them

The one rule: every wait has a timeout. A rank that does not come in time costs the engine its host
tier, not its start.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import UnavailableError, counted
from penstock.transport.private_folder import NamedFolder, named_folder
from penstock.transport.shared_memory import user_of_peer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CONNECT_S = 30.0
"""Ranks are called at the same time and have nothing to do before they connect; a machine that
is busy starting several engines may still be slow."""
NAMES_BYTES_MAX = 65_536
DESCRIPTORS_MAX = 64


class ArenaServer:
    """Rank 0, which creates the memory and shares it."""

    def __init__(self, engine: str, *, peers: int) -> None:
        """Starts to listen.

        Raises `UnavailableError`: the address is taken.
        """
        self._peers = peers
        try:
            self._folder = NamedFolder(_name(engine))
        except UnavailableError as error:
            raise UnavailableError(f"ranks cannot meet to share memory: {error}") from error
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(bytes(_address(self._folder.path)))
        except OSError as error:
            self._listener.close()
            self._folder.close()
            raise UnavailableError(f"ranks cannot meet to share memory: {error}") from error
        self._listener.listen(peers)

    def hand_out(self, arenas: Mapping[str, int], *, timeout_s: float = CONNECT_S) -> None:
        """Sends the descriptors to every other rank, and stops listening.

        Raises `UnavailableError`: a rank did not connect in time.
        """
        deadline = time.monotonic() + timeout_s
        names = msgspec.msgpack.encode(list(arenas))
        served = 0
        with closing(self._folder), self._listener:
            while served < self._peers:
                self._listener.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    peer, _ = self._listener.accept()
                except TimeoutError:
                    raise UnavailableError(
                        f"{served} of {counted(self._peers, 'rank')} came for the shared memory in "
                        f"{timeout_s:g} s"
                    ) from None
                with peer, suppress(OSError):  # A peer that has gone is not a rank.
                    if user_of_peer(peer) == os.getuid():
                        socket.send_fds(peer, [names], list(arenas.values()))
                        served += 1


def fetch_arenas(engine: str, *, timeout_s: float = CONNECT_S) -> dict[str, int]:
    """The descriptors of rank 0, by the names of their tiers.

    Raises `UnavailableError`: rank 0 is not there, or did not hand them out in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(timeout_s)
        try:
            link.connect(bytes(_address(named_folder(_name(engine)))))
            if user_of_peer(link) != os.getuid():
                raise UnavailableError("rank 0 does not share its memory: it is another user's")
            received, descriptors, _, _ = socket.recv_fds(link, NAMES_BYTES_MAX, DESCRIPTORS_MAX)
        except OSError as error:
            raise UnavailableError(f"rank 0 does not share its memory: {error}") from error
    try:
        names = msgspec.msgpack.decode(received, type=list[str]) if received else []
    except (msgspec.DecodeError, UnicodeDecodeError):
        names = []
    if len(names) != len(descriptors) or not names:
        for descriptor in descriptors:
            os.close(descriptor)
        raise UnavailableError("rank 0 ended before it shared its memory")
    return dict(zip(names, descriptors, strict=True))


def _name(engine: str) -> str:
    return f"arenas of {engine}"


def _address(folder: Path) -> Path:
    return folder / "arenas"
