"""Messages to the server, in order, kept until the server has room for them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from penstock.engine import messages as ms
from penstock.errors import UnavailableError
from penstock.transport.base import BacklogError

if TYPE_CHECKING:
    from penstock.transport.base import Channel


class ServerLost(UnavailableError):  # noqa: N818 - what happened to a server
    """The server is gone."""


class ServerOutbox:
    """Messages to the server, in order; those it has no room for wait here."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._frames: deque[bytes] = deque()

    @property
    def empty(self) -> bool:
        """Whether everything was sent."""
        return not self._frames

    def put(self, message: ms.InstanceMessage) -> None:
        """Sends a message, now or when there is room."""
        self._frames.append(ms.encode(message))

    def flush(self) -> bool:
        """Sends what there is room for; returns whether that was all.

        Raises:
            ServerLost: the server is gone.
        """
        while self._frames:
            try:
                self._channel.send(self._frames[0])
            except BacklogError:
                return False
            except UnavailableError as error:
                raise ServerLost(f"the server is lost: {error}") from error
            self._frames.popleft()
        return True
