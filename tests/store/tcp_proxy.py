"""A connection's middleman for tests: passes bytes on, or holds, cuts, changes or delays them."""

from __future__ import annotations

import selectors
import socket
import threading
from enum import Enum

WAKE_S = 0.02
"""Between two bytes that trickle."""


class Mood(Enum):
    """What becomes of the server's answers."""

    HONEST = "passed on"
    SILENT = "not passed on, the connection stays"
    TRICKLING = "passed on one byte at a time"
    CUT = "half of the next piece is passed on, then the connection ends"
    WRONG = "passed on with other bytes"


class TcpProxy:
    """Listens on loopback and speaks to a server of loopback; ends with `close`."""

    def __init__(self, server_port: int) -> None:
        self.mood = Mood.HONEST
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ended = threading.Event()
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._waker.send(b"e")
        self._ended.set()
        self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            woken = False
            while not woken:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        woken = True
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._pass_on(key.fileobj, *key.data)  # type: ignore[arg-type]
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._server_port))
        self._selector.register(client, selectors.EVENT_READ, (server, False))
        self._selector.register(server, selectors.EVENT_READ, (client, True))

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:  # noqa: FBT001
        if source.fileno() < 0:
            return  # Its other side ended in this turn.
        mood = self.mood if answers else Mood.HONEST
        try:
            piece = source.recv(1 if mood is Mood.TRICKLING else 1 << 16)
            if mood is Mood.TRICKLING:
                self._ended.wait(WAKE_S)
            if mood is Mood.WRONG:
                piece = bytes(byte ^ 0x80 for byte in piece)
            if mood is Mood.CUT:
                piece = piece[: len(piece) // 2]
            if mood is not Mood.SILENT:
                target.sendall(piece)
        except OSError:
            piece = b""
        if not piece or mood is Mood.CUT:
            for each in (source, target):
                self._selector.unregister(each)
                each.close()
