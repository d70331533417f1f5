"""Arenas of peers on this machine, mapped: blocks are copied straight out of them.

The lender listens at a Unix socket in its private folder, and names it when it greets. A peer
whose process can open it, and is of the same user, asks there for the arenas of an engine:

    reader    number of the lender (8 bytes)
    lender    `ArenaShown`, with a descriptor of the arena that can only be read; one for each rank

Where that is not possible (another machine or container, another user, huge pages), blocks come
over the channel. Nothing is asked for each block: the listing says in which slot it lies, the
arena has its sums. What the sums do not confirm is asked for over the channel.

The one rule: an arena belongs to a listing, and is unmapped with it: when its engine has gone, was
reset or sleeps, or its peer was lost.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.errors import PeerError, UnavailableError
from penstock.store.base import DIGEST_BYTES, MappedArena
from penstock.tiers.host import HostTier
from penstock.transport.base import Empty
from penstock.transport.unix_sockets import (
    Packet,
    private_folder,
    receive_packet,
    send_packet,
    socket_path,
    socket_peer,
)
from penstock.vocabulary.form import Form
from penstock.vocabulary.frames import Count, FrameCodec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.store.peers.lending import Lender

FORM_BYTES_MAX = 128 << 10
"""A packet with it fits into the buffer that Linux gives a socket; larger ones are not shown."""
CALLERS_MAX = 256
"""Peers of this machine, and half of the descriptors that a process has by default."""
_NUMBER = struct.Struct("<Q")
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class ArenaShown(
    msgspec.Struct, array_like=True, frozen=True, tag=True, forbid_unknown_fields=True, gc=False
):
    """An arena of an engine; its descriptor comes with this."""

    process: Count
    """Of the lender, as it has greeted."""
    lender: Count
    slot_count: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    part: Digest
    form: Annotated[bytes, msgspec.Meta(max_length=FORM_BYTES_MAX)]


shown: FrameCodec[ArenaShown] = FrameCodec(
    msgspec.msgpack.Decoder(ArenaShown),
    version=1,
    bytes_max=FORM_BYTES_MAX + 1024,
    mark=b"PA",
    name="an arena of a peer",
)


class ArenaListener:
    """Where peers of this machine get arenas. It belongs to the thread of the network.

    Raises:
        UnavailableError: there is no place for its socket.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self.path = str(socket_path(private_folder()))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.settimeout(0)
            self._listener.bind(self.path)
            self._listener.listen(CALLERS_MAX)
        except OSError as error:
            self._listener.close()
            raise UnavailableError(f"no socket at {self.path}: {error.strerror}") from error
        self._callers: list[socket.socket] = []
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        """Given up for a moment where no descriptor is left to accept a caller with."""

    @property
    def descriptors(self) -> list[int]:
        """Readable while somebody asks."""
        return [each.fileno() for each in (self._listener, *self._callers)]

    def asked(self) -> Iterable[tuple[socket.socket, int]]:
        """Who asks, for the arenas of which lender."""
        self._accept()
        for channel in list(self._callers):
            packet = receive_packet(channel, _NUMBER.size)
            if isinstance(packet, Packet):
                _close_all(packet)
            if isinstance(packet, Packet) and len(packet.frame) == _NUMBER.size:
                yield channel, _NUMBER.unpack(packet.frame)[0]
            elif not isinstance(packet, Empty):
                self._leave(channel)

    def _accept(self) -> None:
        """Lets callers in; whoever is turned away has blocks over the channel."""
        while True:
            try:
                channel, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in {errno.EMFILE, errno.ENFILE, errno.ECONNABORTED}:
                    raise
                # Left alone, the next caller would wake the loop again and again.
                os.close(self._spare)
                with suppress(OSError):
                    self._listener.accept()[0].close()
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                return
            channel.settimeout(0)
            if socket_peer(channel).uid == os.getuid() and len(self._callers) < CALLERS_MAX:
                self._callers.append(channel)
            else:
                channel.close()

    def show(self, channel: socket.socket, lender: Lender) -> None:
        """Gives a caller the arenas of an engine."""
        try:
            for arena in lender.arenas:
                if not self._show(channel, lender.number, arena):
                    raise BlockingIOError  # It does not read.
        except (OSError, ValueError):  # It has gone, or the arena was closed.
            self._leave(channel)

    def _show(self, channel: socket.socket, number: int, arena: MappedArena) -> bool:
        memory, form = arena.host.arena, arena.form.to_bytes()
        # A huge page that was given back, and that another one has by now, would kill a reader.
        if memory.page_bytes > mmap.PAGESIZE or len(form) > FORM_BYTES_MAX:
            return True
        frame = ArenaShown(self._process, number, arena.host.slot_count, arena.part, form)
        fd = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return send_packet(channel, shown.encode(frame), fd)
        finally:
            os.close(fd)

    def _leave(self, channel: socket.socket) -> None:
        if channel in self._callers:
            self._callers.remove(channel)
        channel.close()

    def close(self) -> None:
        for channel in (self._listener, *self._callers):
            channel.close()
        self._callers.clear()
        os.close(self._spare)
        with suppress(FileNotFoundError):
            Path(self.path).unlink()


class NearPeer:
    """The way to the arenas of one peer. It belongs to the thread of the network.

    Raises:
        UnavailableError: there is none.
    """

    def __init__(self, path: str, process: int) -> None:
        self._process = process
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._channel.settimeout(0)
            self._channel.connect(path)
            uid = socket_peer(self._channel).uid
        except (OSError, ValueError) as error:
            self._channel.close()
            raise UnavailableError(f"no arenas at {path!r}: {error}") from error
        if uid != os.getuid():
            self._channel.close()
            raise UnavailableError(f"no arenas at {path!r}: it is of user {uid}")

    @property
    def descriptor(self) -> int:
        return self._channel.fileno()

    def ask(self, lender: int) -> None:
        """Asks for the arenas of an engine.

        Raises `OSError`: the peer has gone, or does not answer.
        """
        if not send_packet(self._channel, _NUMBER.pack(lender)):
            raise BlockingIOError("it does not read")

    def take(self) -> tuple[int, MappedArena] | None:
        """An arena that has come, and of which lender it is.

        Raises `PeerError`: the peer has gone, or what came is none.
        """
        packet = receive_packet(self._channel, FORM_BYTES_MAX + 1024)
        if isinstance(packet, Empty):
            return None
        if not isinstance(packet, Packet):
            raise PeerError("its socket for arenas is closed")
        try:
            if packet.problem or len(packet.descriptors) != 1:
                raise PeerError(packet.problem or "no arena came with its description")
            said = shown.decode(packet.frame)
            if said.process != self._process:
                raise PeerError("another process has its socket for arenas")
            form = Form.from_bytes(said.form)
            host = HostTier.attach(
                packet.descriptors[0], form.layout, said.slot_count, writable=False
            )
            return said.lender, MappedArena(host, form, said.part)
        except (ValueError, UnavailableError) as error:
            raise PeerError(f"its arena: {error}") from error
        finally:
            _close_all(packet)

    def close(self) -> None:
        self._channel.close()


def _close_all(packet: Packet) -> None:
    for fd in packet.descriptors:
        os.close(fd)
