"""The copies driven by a process of their own, over CUDA IPC: run with `python -m`.

It opens the engine's pool by the handle in its first argument, has host slots and movers of
its own, and polls them without pause between two orders. JSON lines, one answer an order:

    started                                →  {"kind": "ready"}
    {"kind": "begin", "work": "save"}      →  {"kind": "running"}, and copies go on
    {"kind": "end", "began": …, "ended": …}  →  {"kind": "moved", "moved_bytes": …}

Times are of the monotonic clock, which all processes of a machine share.

The one rule: it answers `moved` only after a sample of what it moved was found right.
"""

from __future__ import annotations

import os
import select
import sys
from typing import Literal

import msgspec


class Begin(msgspec.Struct, frozen=True, tag_field="kind", tag="begin"):
    """Start to copy."""

    work: Literal["save", "load", "both"]


class End(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """Stop, and tell what ended between two times."""

    began: float
    ended: float


class Ready(msgspec.Struct, frozen=True, tag_field="kind", tag="ready"):
    """The pool is open, and the movers are warm."""


class Running(msgspec.Struct, frozen=True, tag_field="kind", tag="running"):
    """Copies are under way."""


class Moved(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="moved"):
    """What was moved in the time asked for."""

    moved_bytes: int


ORDERS: msgspec.json.Decoder[Begin | End] = msgspec.json.Decoder(Begin | End)
ANSWERS: msgspec.json.Decoder[Ready | Running | Moved] = msgspec.json.Decoder(
    Ready | Running | Moved
)


class Orders:
    """Lines from standard input, asked for without waiting or waited for."""

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno()
        self._poller = select.poll()
        self._poller.register(self._descriptor, select.POLLIN)
        self._received = b""

    @property
    def waiting(self) -> bool:
        """Whether there is something to read: an order, or the engine's end."""
        return bool(self._poller.poll(0))

    def next(self) -> Begin | End | None:
        """The next order; `None` when the engine has gone."""
        while b"\n" not in self._received:
            part = os.read(self._descriptor, 1 << 16)
            if not part:
                return None
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return ORDERS.decode(line)


def main(handle: str) -> None:
    """Serves orders until the engine goes."""
    # Here rather than above: the engine's side imports the messages where there is no CUDA.
    from lab.bench.interference.cuda_pool import DevicePool, Rig  # noqa: PLC0415

    pool = DevicePool.open(bytes.fromhex(handle))
    rig = Rig(pool)
    orders = Orders()
    _answer(Ready())
    while isinstance(order := orders.next(), Begin):
        samples = rig.wipe(order.work)
        traffic = rig.traffic(order.work)
        _answer(Running())
        while not orders.waiting:
            for each in traffic:
                each.advance()
        for each in traffic:
            each.drain()
        end = orders.next()
        if not isinstance(end, End):
            break
        moved_bytes = sum(each.moved_between(end.began, end.ended) for each in traffic)
        rig.require_moved(samples)
        _answer(Moved(moved_bytes=moved_bytes))
    rig.close()
    pool.close()


def _answer(answer: Ready | Running | Moved) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
