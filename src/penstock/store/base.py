"""What a tier of the store process is: blocks by identity, moved to and from mapped arenas.

A tier of the store owns its index and decides where a block lies. An engine names blocks by
identity and its own arena slots; it never names places in the tier.

    identity = space (model), generation (up to the next reset), part (form and rank), key

A job is one rank's part of an operation. The rules:

- Every job is reported by `collect` exactly once, cancelled or not. From then on the tier does not
  touch the arena slots of the job.
- A block that was reported as saved is found again after the process was killed.
- A block that is delivered is the one that was asked for: its bytes were verified against sums
  that are bound to its key. Anything else is a fault of that block.
- Calls come from one thread and return at once. A tier may have threads of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.machine.statistics import StoreCounts
from penstock.vocabulary.checksums import SUM_BYTES, CellSpan
from penstock.vocabulary.frames import Text  # noqa: TC001 - msgspec reads it
from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.operations import BlockFault
    from penstock.tiers.host import HostTier
    from penstock.vocabulary.form import Form
    from penstock.vocabulary.keys import Key

DIGEST_BYTES = 16
"""Of spaces and parts."""
PART_DOMAIN = b"penstock.part.v1"
NO_KEY = bytes(KEY_BYTES)
"""In place of the key of a block that has none before it."""
KEY_FIELD_BYTES = 32
"""What a key takes in a head, row or trailer: it has 16 bytes today, and zeros follow."""
OPENING = "it is being opened"
"""Why a tier is off that will be on in a moment, or has another reason then."""


def key_fields(keys: Sequence[Key | None]) -> NDArray[np.void]:
    """Keys as they stand in heads, rows and trailers; zeros for none."""
    joined = b"".join((key or b"").ljust(KEY_FIELD_BYTES, b"\0") for key in keys)
    return np.frombuffer(joined, dtype=f"V{KEY_FIELD_BYTES}")


class Space(NamedTuple):
    """Whose blocks: those of one model with one version of its weights, up to its next reset."""

    name: bytes
    """`DIGEST_BYTES` bytes: a digest of what every key of the model says about it."""
    generation: int


def part_name(form: Form, *, rank: int, rank_count: int, equal: bool) -> bytes:
    """What part of a block a rank holds, and in which form.

    Ranks that hold equal bytes (`equal`) have one part. The form alone does not do: opaque blocks
    of two ranks have one form, and other bytes.
    """
    place = b"equal" if equal else b"%d/%d" % (rank, rank_count)
    framed = (len(each).to_bytes(4, "little") + each for each in (form.fingerprint, place))
    return sha256(PART_DOMAIN + b"".join(framed)).digest()[:DIGEST_BYTES]


@dataclass(frozen=True, slots=True, eq=False)
class MappedArena:
    """The hub of one rank, mapped into the store process."""

    host: HostTier
    form: Form
    """Its checksum is that of `host`'s sums."""
    part: bytes
    span: CellSpan = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "span", CellSpan.of(self.host.layout))

    def blocks(self, slots: NDArray[np.int32], nbytes: int) -> list[NDArray[np.uint8]]:
        """The first bytes of each of these slots, where they lie."""
        memory, size = self.host.arena.bytes, self.host.slot_bytes
        starts = (self.host.blocks_offset + slots.astype(np.int64) * size).tolist()
        return [memory[start : start + nbytes] for start in starts]

    def places(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """Where in the arena the block and the sums of each slot begin."""
        sums_bytes = len(self.host.layout.cells) * SUM_BYTES
        at = slots.astype(np.int64)
        blocks = self.host.blocks_offset + at * self.host.slot_bytes
        return np.stack((blocks, at * sums_bytes), axis=1)


class NearBlocks(NamedTuple):
    """Blocks that lie in memory which is mapped here: of another engine, which may write there."""

    arena: MappedArena
    salt: int
    """Of the sums of these slots."""
    positions: list[int]
    """Which of the blocks that were asked for, and"""
    slots: list[int]
    """where each lies."""
    counts: Callable[[], bool]
    """Whether that was so all the time, as far as is known: asked when they were copied."""


class SaveJob(NamedTuple):
    """Write blocks from arena slots into the tier. One that is there already is not written."""

    ticket: int
    arena: MappedArena
    space: Space
    keys: Sequence[Key]
    """A chain, or pieces of chains: neighbours should lie together."""
    parents: Sequence[Key | None]
    """The block before each."""
    slots: Sequence[int]
    salt: int
    """What the sums of these slots in the arena were made with (`life_salt`)."""


class LoadJob(NamedTuple):
    """Read blocks from the tier into arena slots, and write their sums there with `salt`."""

    ticket: int
    arena: MappedArena
    space: Space
    keys: Sequence[Key]
    slots: Sequence[int]
    salt: int


class FindJob(NamedTuple):
    """Which blocks of a chain are there, on every rank?"""

    ticket: int
    arenas: Sequence[MappedArena]
    """Of all ranks of the engine that asks; each part once."""
    space: Space
    keys: Sequence[Key]
    """In the order of the chain."""
    first: int = 0
    """How many blocks of the chain come before these."""


class FoundBlocks(NamedTuple):
    """The answer to a `FindJob`."""

    ticket: int
    present: Sequence[bool]
    foreign: bool = False
    """Whether the first block that is not there was written in a form that cannot be read here."""


class LentBlocks(NamedTuple):
    """Blocks that an engine has in its arenas, for others to read."""

    life: int
    """Of the engine."""
    arenas: Sequence[MappedArena]
    """Of all its ranks; each part once."""
    space: Space
    keys: Sequence[Key]
    slots: Sequence[int]
    salt: int
    """Of the sums of these slots."""


class EndedJob(NamedTuple):
    """A job that the tier is through with."""

    ticket: int
    faults: tuple[tuple[int, BlockFault], ...] = ()
    """By position in the job. `MISSING`: the tier does not have the block. `CORRUPT`: it had it,
    the bytes failed their sums, and it is forgotten. `UNREADABLE`: not read, or not written."""
    failure: str = ""
    """Why all of it failed, if it did."""


class GoneBlocks(NamedTuple):
    """Blocks that the tier gave up to make room."""

    space: Space
    part: bytes
    keys: Sequence[Key]


class NewGeneration(NamedTuple):
    """A generation of a space that counts from now on."""

    name: bytes
    """Of the space."""
    generation: int
    unkept: str = ""
    """Why it may still be lost, if a reset here has begun it; empty: others have."""


class Page(NamedTuple):
    """Some of the blocks of one space and part, newest first."""

    keys: Sequence[Key]
    parents: Sequence[Key | None]
    cursor: int | None
    """Where the next page begins; `None`: this was the last."""


class TierState(
    StoreCounts, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """How a tier is, for health, metrics and people, in the store process and on its way."""

    on: bool
    why: Text = ""
    """Why it is off."""


class StoreTier(ABC):
    """A tier of the store process."""

    descriptor: int
    """Readable while `collect`, `take_gone`, `take_found` or `state` have something new."""

    def attach(self, name: bytes, arenas: Sequence[MappedArena]) -> None:  # noqa: B027
        """An engine with these ranks uses a space from now on; each part once."""

    def detach(self, arena: MappedArena) -> None:  # noqa: B027
        """An arena is unmapped next; no job uses it."""

    def lend(self, blocks: LentBlocks, gone: Sequence[Key]) -> None:  # noqa: B027
        """An engine has these blocks now; those that are `gone` it has no longer."""

    def end_lending(self, life: int) -> None:  # noqa: B027
        """An engine has gone, with all that it lent."""

    @abstractmethod
    def save(self, job: SaveJob) -> None:
        """Takes a job in. With too many in hand it is reported as dropped: `UNREADABLE` faults."""

    @abstractmethod
    def load(self, job: LoadJob) -> None:
        """Takes a job in; loads go before saves."""

    @abstractmethod
    def cancel(self, ticket: int) -> None:
        """Ends a save or a load early, if it can; it is reported all the same."""

    @abstractmethod
    def collect(self) -> list[EndedJob]:
        """The jobs that have ended since the last call."""

    @abstractmethod
    def find(self, job: FindJob) -> FoundBlocks | None:
        """Which blocks are there, as far as is known yet.

        `None`: somebody else keeps them and is asked; `take_found` has the answer, within a bounded
        time.
        """

    def take_found(self) -> list[FoundBlocks]:
        """The answers since the last call to what was asked."""
        return []

    def page(
        self,
        space: Space,  # noqa: ARG002 - A tier that has to ask lists nothing.
        part: bytes,  # noqa: ARG002
        cursor: int | None,  # noqa: ARG002
        limit: int,  # noqa: ARG002
    ) -> Page:
        """A page of the blocks that are there; begins with `None`."""
        return Page([], [], None)

    def take_gone(self) -> list[GoneBlocks]:
        """The blocks that were given up since the last call."""
        return []

    @abstractmethod
    def generation(self, name: bytes) -> int | None:
        """The generation of a space that counts now; it survives restarts.

        `None`: it is not known yet; `take_generations` says when it is.
        """

    @abstractmethod
    def void(self, name: bytes) -> int | None:
        """Begins a new generation: no block of an earlier one is found again. Returns it.

        `None`: it is being written; ask again when `descriptor` is readable.

        Raises:
            UnavailableError: it counts for this process, but would not outlive it. Ask again when
                the tier is on.
        """

    def void_anew(self, name: bytes) -> None:  # noqa: B027
        """Another reset, while one is in hand: what was written since the first is void too."""

    def take_generations(self) -> list[NewGeneration]:
        """Generations that became known or have changed since the last call.

        Not those that `void` has returned.
        """
        return []

    @abstractmethod
    def expect(self, name: bytes, generation: int) -> None:
        """An engine knows of this generation of a space: none of before it may count again.

        Where what counts now did not come after it, another one begins; until then `generation`
        may be unknown.
        """

    @abstractmethod
    def state(self) -> TierState: ...

    @abstractmethod
    def close(self, *, deadline: float) -> None:
        """Ends what is in hand, syncs, and gives everything back by `deadline`."""
