"""Collectives between ranks on several machines, over channels with the keys of the machines.

    exchange = RankExchange.listen(name, address, rank=1, secret=keys)
    exchange.meet(addresses, deadline=…)      # the others' addresses, from the scheduler
    ExchangedRanks(share, exchange)           # what the model calls: `summed` and `gathered`

Ranks of one machine use gloo or NCCL instead, whose sockets anybody who reaches them can write to.

Two rules. Sums are made in the order of the ranks, so that every rank gets the same bits. And all
ranks take part in the same collectives in the same order: each frame has the number of its
collective, and a rank that receives another one than its own fails.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

import torch

from penstock.errors import PeerError, UnavailableError
from penstock.toolkit import (
    BacklogError,
    ChannelSettings,
    Listener,
    ReceivedFrame,
    connect,
    wait_readable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from penstock.toolkit import Channel, Secret
    from penstock_serve.engine.sharding import Share

CHUNK_BYTES = 8 << 20
"""A frame of a channel has at most 16 MiB, and a channel takes four of these ahead."""
COLLECTIVE_S = 60.0
"""The timeout of a collective: a lost machine is noticed within 7 s, a slow link takes longer."""
ROOM_S = 0.05
"""How long to wait for room at a time: the descriptor does not show what was seen before."""
_NUMBER = struct.Struct("<Q")


class RankExchange:
    """The channels of one rank to the others."""

    def __init__(
        self,
        listener: Listener,
        *,
        name: str,
        rank: int,
        secret: Secret,
        settings: ChannelSettings,
    ) -> None:
        self.address = listener.address
        """Where ranks with higher numbers connect to this one."""
        self._listener = listener
        self._name = name
        self._rank = rank
        self._secret = secret
        self._settings = settings
        self._channels: dict[int, Channel] = {}
        self._number = 0

    @classmethod
    def listen(
        cls,
        name: str,
        address: str,
        *,
        rank: int,
        secret: Secret,
        settings: ChannelSettings | None = None,
    ) -> Self:
        """Accepts other ranks at an address.

        Raises `UnavailableError`: the address cannot be listened on.
        """
        settings = settings or ChannelSettings()
        listener = Listener(_rank_name(name, rank), address, secret=secret, settings=settings)
        return cls(listener, name=name, rank=rank, secret=secret, settings=settings)

    def meet(self, addresses: Sequence[str], *, deadline: float) -> None:
        """Connects to the ranks before this one, and accepts those after it.

        Raises `UnavailableError`: they did not all come in time; `PeerError`: somebody came who is
        none of them.
        """
        for rank in range(self._rank):
            self._channels[rank] = connect(
                addresses[rank],
                name=_rank_name(self._name, self._rank),
                deadline=deadline,
                secret=self._secret,
                settings=self._settings,
            )
        expected = {
            _rank_name(self._name, rank): rank for rank in range(self._rank + 1, len(addresses))
        }
        while expected:
            channel = self._listener.accept(deadline=deadline)
            if channel is None:
                raise UnavailableError(f"{', '.join(sorted(expected))} did not connect in time")
            if channel.name not in expected:
                channel.close()
                raise PeerError(f"{channel.name!r} came, must be one of {sorted(expected)}")
            self._channels[expected.pop(channel.name)] = channel
        self._listener.close()

    def close(self) -> None:
        """Closes all channels; may be called twice."""
        self._listener.close()
        for channel in self._channels.values():
            channel.close()

    def swap(self, mine: memoryview) -> list[memoryview]:
        """What each rank has brought, in the order of the ranks; all bring as many bytes.

        Raises `UnavailableError`: a rank is lost; `PeerError`: a rank brought something else.
        """
        parts = {rank: bytearray() for rank in self._channels}
        # Chunk by chunk, so that nobody is further ahead than a channel takes.
        for first in range(0, len(mine), CHUNK_BYTES):
            chunk = mine[first : first + CHUNK_BYTES]
            self._number += 1
            for rank in self._channels:
                self._send(rank, chunk)
            for rank in self._channels:
                parts[rank] += self._receive(rank, len(chunk))
        found = {rank: memoryview(part) for rank, part in parts.items()}
        found[self._rank] = mine
        return [found[rank] for rank in sorted(found)]

    def give(self, mine: memoryview) -> None:
        """Sends bytes to the first rank, which calls `take`."""
        self._number += 1
        for first in range(0, len(mine), CHUNK_BYTES):
            self._send(0, mine[first : first + CHUNK_BYTES])

    def take(self, sizes: Sequence[int]) -> list[bytearray]:
        """What the other ranks give, in their order; `sizes` are their bytes."""
        self._number += 1
        parts = [bytearray() for _ in sizes]
        for rank, size in enumerate(sizes, start=1):
            for first in range(0, size, CHUNK_BYTES):
                parts[rank - 1] += self._receive(rank, min(CHUNK_BYTES, size - first))
        return parts

    def _send(self, rank: int, chunk: memoryview) -> None:
        channel, frame = self._channels[rank], _NUMBER.pack(self._number) + chunk
        deadline = time.monotonic() + COLLECTIVE_S
        while True:
            try:
                channel.send(frame)
            except BacklogError as error:
                if time.monotonic() >= deadline:
                    raise UnavailableError(f"rank {rank} takes nothing: {error}") from error
                # It wakes up when the other rank has taken a part of what it was sent.
                wait_readable(channel.descriptor, min(deadline, time.monotonic() + ROOM_S))
            else:
                return

    def _receive(self, rank: int, size: int) -> memoryview:
        said = self._channels[rank].receive(deadline=time.monotonic() + COLLECTIVE_S)
        if not isinstance(said, ReceivedFrame):
            raise UnavailableError(f"rank {rank} is lost in a collective: {said}")
        found = memoryview(said.frame)
        number = _NUMBER.unpack_from(found)[0] if len(found) >= _NUMBER.size else None
        if number != self._number or len(found) != _NUMBER.size + size:
            raise PeerError(
                f"rank {rank} brought {len(found) - _NUMBER.size} bytes for collective {number}, "
                f"must be {size} for {self._number}"
            )
        return found[_NUMBER.size :]


class ExchangedRanks:
    """One of several ranks whose machines exchange what they have computed."""

    def __init__(self, share: Share, vocabulary_sizes: list[int], exchange: RankExchange) -> None:
        self.share = share
        self._sizes = vocabulary_sizes
        self._exchange = exchange

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' parts, on every rank."""
        first, *others = (
            _tensor(each, part) for each in self._exchange.swap(_bytes(part.contiguous()))
        )
        total = first.clone()
        for other in others:
            total += other
        return total

    def gathered(self, logits: torch.Tensor) -> torch.Tensor | None:
        """All logits, on the first rank."""
        logits = logits.contiguous()
        if not self.share.is_first:
            self._exchange.give(_bytes(logits))
            return None
        rows, itemsize = logits.shape[0], logits.element_size()
        taken = self._exchange.take([rows * size * itemsize for size in self._sizes[1:]])
        others = [
            torch.frombuffer(part, dtype=logits.dtype).view(rows, size)
            for part, size in zip(taken, self._sizes[1:], strict=True)
        ]
        return torch.cat([logits, *others], dim=1)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _tensor(part: memoryview, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(part, dtype=like.dtype).view(like.shape)


def _rank_name(name: str, rank: int) -> str:
    return f"{name}-rank-{rank}"
