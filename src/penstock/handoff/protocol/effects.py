"""What the machines of a handoff ask their drivers to do.

| effect         | from            | carried out by                    | ends with                |
|----------------|-----------------|-----------------------------------|--------------------------|
| `Send`         | all             | the channel to `message.target`   | nothing: P3              |
| `Write`        | prefill rank    | the transport, then the notice    | `write_done/_failed`     |
| `AbandonWrite` | prefill rank    | its blocks are read no more       | at once; `write_dropped` |
| `Take`         | decode rank     | verify, then the rank's own mover | `parts_taken/_spoiled`   |
| `OpenArea`     | decode rank     | memory that one peer can write to | at once; `area_failed`   |
| `Fence`        | decode rank     | the transport, until it holds     | `fenced`                 |
| `FreeArea`     | decode rank     | that memory is given back         | at once                  |
| `HandoffEnded` | both schedulers | the engine: what it held is back  | at once                  |

Effects are carried out in the order of the list, and each that starts work ends with exactly one
of the inputs named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.handoff.protocol.messages import Landed, LandedPart

if TYPE_CHECKING:
    from penstock.handoff.protocol.grid import Grid
    from penstock.handoff.protocol.identity import Life, WriteId
    from penstock.handoff.protocol.messages import AnyMessage
    from penstock.handoff.protocol.states import HandoffOutcome


class HandoffEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the driver has to do."""


class Send(HandoffEffect, frozen=True, kw_only=True):
    """Send a message; it may be lost."""

    message: AnyMessage


class Write(HandoffEffect, frozen=True, kw_only=True):
    """Write one part into a berth of the target's landing area, and then give the notice.

    The notice must not arrive before the bytes. The transport ends every write, done or
    failed, whatever becomes of the target (P21).
    """

    write: WriteId
    grid: Grid
    source: Life
    """The life that writes."""

    @property
    def notice(self) -> Landed:
        """The notice for the target once the bytes are there, without sums."""
        return notice_of(self.source, self.write, b"")


class AbandonWrite(HandoffEffect, frozen=True, kw_only=True):
    """Read nothing more for a write: its blocks belong to somebody else from now on (P16).

    When this was carried out, no byte is read for it any more. If its bytes had not all been
    read by then, it ends with `write_dropped`, and its notice is not given; otherwise it goes on.
    """

    write: WriteId


class Take(HandoffEffect, frozen=True, kw_only=True):
    """Verify a part in its berth and move it into its slots, with the rank's own mover."""

    handoff: str
    epoch: int
    source: Life
    generation: int
    berth: int
    grid: Grid
    part: int
    attempt: int
    sums: bytes


class OpenArea(HandoffEffect, frozen=True, kw_only=True):
    """Take memory for a landing area, and let this life of this peer write to it."""

    peer: Life
    generation: int
    berth_count: int
    berth_bytes: int


class Fence(HandoffEffect, frozen=True, kw_only=True):
    """Find out when this life of this peer can no longer write to the area (P19)."""

    peer: Life
    generation: int


class FreeArea(HandoffEffect, frozen=True, kw_only=True):
    """Give the memory of an area back: nothing can write to it any more."""

    peer: Life
    generation: int


class HandoffEnded(HandoffEffect, frozen=True, kw_only=True):
    """A handoff is over on this side. Exactly one for each that was submitted.

    Decode: `DELIVERED` gives the slots to the request, with its first token; any other outcome
    gives them back. Prefill: nothing reads the request's blocks for this handoff any more.
    """

    handoff: str
    epoch: int
    """On the prefill side the last epoch that was claimed, 0 if none."""
    outcome: HandoffOutcome
    why: str = ""
    tokens: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()


AnyEffect = Send | Write | AbandonWrite | Take | OpenArea | Fence | FreeArea | HandoffEnded


def notice_of(source: Life, write: WriteId, sums: bytes) -> Landed:
    """The notice of one write, with its part's sums."""
    target, generation, berth, handoff, epoch, part, attempt = write
    return Landed(
        sender=source,
        target=target,
        handoff=handoff,
        epoch=epoch,
        generation=generation,
        parts=(LandedPart(berth, part, attempt, sums),),
    )
