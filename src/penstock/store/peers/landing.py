"""Blocks of peers over NIXL: areas of who reads, links of who lends.

    reader    AreaOffered(description)       memory for this one peer
    reader    ReadBlocks(…, berth)           into a part of that memory where nothing is awaited
    lender    writes the values there by NIXL; the notice is `LANDED`: number of the read, found
    reader    copies them to where they are verified; the berth is free again
    lender    NoLanding(why)                 it cannot write, and answers over the channel

Bytes and notices of NIXL are not encrypted. Whoever reaches the area can write there, and nothing
is believed but the sums; where blocks are asked for and lent stays with the channel.

The one rule: an area has one writer, and a berth one write. A berth is used again when its answer
was copied out; the memory of an area when the fence of its transport holds.
"""

from __future__ import annotations

import logging
import struct
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import CapacityError, PeerError, UnavailableError
from penstock.relay.messages import decode_description
from penstock.relay.sides import NixlTarget, NixlWriter
from penstock.store.peers.lending import answer
from penstock.store.peers.messages import ANSWER_BYTES, BERTHS, FOUND, BlocksRead
from penstock.transport.remote import Fenced, HandoffAddresses, WriteFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from penstock.relay.sides import NixlArea, NixlLink
    from penstock.store.peers.messages import ReadBlocks
    from penstock.transport.remote import Area

logger = logging.getLogger(__name__)

AREA_BYTES = BERTHS * ANSWER_BYTES
AREAS_MAX = 32
"""Peers that are read from by NIXL at a time, with 1 GiB; others answer over their channels."""
LANDED = struct.Struct("<Q")
"""Before the byte for each key."""


class LandedAnswer(NamedTuple):
    """An answer, where it has landed."""

    answer: BlocksRead
    free: Callable[[], None]
    """Gives the berth back, once the answer was copied out; any thread may."""


class Landing:
    """The area that one peer writes to."""

    def __init__(self, area: NixlArea) -> None:
        self.area = area
        self.is_told = False
        """Whether the peer was sent its description."""
        self._free = list(range(BERTHS))
        self._awaited: dict[int, tuple[int, int]] = {}
        """The berth of a read and the bytes of a value in it, by the number of the read."""

    def has_room(self) -> bool:
        return bool(self._free)

    def take_berth(self, number: int, value_bytes: int) -> int:
        berth = self._free.pop()
        self._awaited[number] = berth, value_bytes
        return berth

    def give_up(self, number: int) -> None:
        """The peer has answered otherwise, and writes nothing for this read."""
        taken = self._awaited.pop(number, None)
        if taken is not None:
            self._free.append(taken[0])

    def take(self, notice: bytes) -> LandedAnswer | None:
        """The answer that has landed; `None`: to nothing that was asked."""
        if len(notice) < LANDED.size:
            return None
        [number] = LANDED.unpack_from(notice)
        taken = self._awaited.pop(number, None)
        if taken is None:
            return None
        berth, value_bytes = taken
        found, start = notice[LANDED.size :], berth * ANSWER_BYTES
        size = min(found.count(FOUND) * value_bytes, ANSWER_BYTES)
        content = self.area.memory[start : start + size].data
        return LandedAnswer(BlocksRead(number, found, content), partial(self._free.append, berth))


class LandingSite:
    """What a store process has of NIXL. It belongs to the thread of the network.

    Raises:
        ConfigError: NIXL is not installed; `UnavailableError`: its relay does not start.
    """

    def __init__(self, address: str) -> None:
        addresses = HandoffAddresses(own=(address,))
        self._target = NixlTarget(addresses=addresses)
        self._writer = NixlWriter(addresses=addresses)

    def open(self, peer: str) -> Landing | None:
        """An area for a peer that is read from, unless there is no room or no relay now."""
        if len(self._target.open_areas) + len(self._target.retired_areas) >= AREAS_MAX:
            return None
        try:
            return Landing(self._target.open_area(peer, AREA_BYTES))
        except UnavailableError as error:
            logger.warning("no memory for blocks by NIXL: cause=%s", error)
            return None

    def notices(self) -> Iterator[tuple[Area, bytes]]:
        """What has come, and where; memory that nobody can write to any more is given back."""
        for notice in self._target.notices():
            yield notice.area, notice.payload
        for area in self._target.retired_areas:
            if isinstance(self._target.fence(area), Fenced):
                self._target.free(area)

    def retire(self, landing: Landing) -> None:
        self._target.retire(landing.area)

    @property
    def waits(self) -> bool:
        """Whether the end of a writer is awaited, and may have to be enforced."""
        return bool(self._target.retired_areas)

    @property
    def descriptors(self) -> list[int]:
        return [self._target.descriptor, self._target.relay.descriptor]

    def connect(self, description: bytes) -> LenderLink:
        """A way into the area of a peer that reads.

        Raises `PeerError`: it describes none; `UnavailableError`: there is no relay now.
        """
        try:
            size = decode_description(description).size
            if size > AREA_BYTES:
                raise PeerError(f"its area has {size} bytes, must have at most {AREA_BYTES}")
            return LenderLink(self._writer.connect(description))
        except ValueError as error:
            raise PeerError(str(error)) from error

    def close(self) -> None:
        self._writer.close()
        self._target.close()


class LenderLink:
    """Writes of values into the area of one peer."""

    def __init__(self, link: NixlLink) -> None:
        self._link = link
        self._reads: dict[int, int] = {}
        """The read that a write answers, by the number of the write."""

    def write(
        self,
        read: ReadBlocks,
        shape: tuple[int, int],
        fill: Callable[[NDArray[np.uint8]], list[bool]],
    ) -> None:
        """Has `fill` put the values that are there into the first rows, and sends them.

        Raises `UnavailableError`: the way is lost; `PeerError`: the peer asks for too much.
        """
        offset, (count, value_bytes) = read.berth * ANSWER_BYTES, shape
        try:
            found = fill(self._link.window(offset, count * value_bytes).reshape(shape))
            size = sum(found) * value_bytes
            notice = LANDED.pack(read.number) + answer(found)
            write = self._link.post([], notice, packed=[(offset, size)] if size else [])
        except (ValueError, CapacityError) as error:
            raise PeerError(str(error)) from error
        self._reads[write] = read.number

    def observe(self) -> list[int]:
        """Lets writes go on; returns the reads whose writes have failed."""
        ends, _ = self._link.observe(budget_bytes=0)
        reads = [(end, self._reads.pop(end.number)) for end in ends]
        return [number for end, number in reads if isinstance(end, WriteFailed)]

    @property
    def failure(self) -> str:
        return self._link.failure or ""

    @property
    def descriptors(self) -> list[int]:
        found = self._link.descriptor
        return [] if found is None else [found]

    def close(self) -> None:
        self._link.close()
