"""Plain NIXL writes between two processes on one GPU: which memory, how fast, and is there a fence?

    python -m lab.bench.nixl_memory

Prints a line of JSON for each way. A writer sends 256 MiB in writes of 4 MiB; the time ends when
all bytes are in the memory that is named last. Ways are permitted if relays let UCX use their
transports. For the fence, the writer prepares eight writes, the target destroys its agent and
clears its memory, and then they are begun: what is found in the memory is what a late writer can do
to its next owner.

Needs torch, CUDA and a package of NIXL. The figures are in docs/performance.md.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from penstock.errors import UnavailableError
from penstock.relay.agents import ENVIRONMENT, Nixl

SIZE = 256 << 20
PIECE_BYTES = 4 << 20
PIECES = SIZE // PIECE_BYTES
IN_FLIGHT = 16
LATE_WRITES = 8
ROUNDS = 3
PATIENCE_S = 20.0
FILLED = 7
GPU, HOST = "gpu", "pinned host"


class Way(NamedTuple):
    """Where the bytes are on both sides, and by which transports of UCX they go."""

    name: str
    source: str
    target: str
    permitted: bool = True
    copied: bool = False
    """Whether both sides copy between the GPU and that memory, as Penstock does."""
    fence: bool = False


WAYS = (
    Way("GPU to GPU", GPU, GPU, fence=True),
    Way("GPU to host", GPU, HOST),
    Way("host to GPU", HOST, GPU),
    Way("host to host", HOST, HOST, fence=True),
    Way("GPU, host, write, host, GPU", HOST, HOST, copied=True),
    Way("GPU to GPU by CUDA IPC", GPU, GPU, permitted=False, fence=True),
)


class Side:
    """Memory with an agent, and a copy of it on the GPU where the way has one."""

    def __init__(self, way: Way, kind: str, value: int) -> None:
        self.kind = "VRAM" if kind == GPU else "DRAM"
        self.memory = torch.full((SIZE,), value, dtype=torch.uint8, device="cuda")
        self.device: Any = self.memory if way.copied else None
        if kind == HOST:
            self.memory = self.memory.cpu().pin_memory()
        torch.cuda.synchronize()
        nixl = Nixl()
        self.errors = nixl.errors
        config = nixl.api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.agent: Any = nixl.api.nixl_agent(f"memory-{os.getpid()}", config)
        self.region: Any = self.agent.register_memory(self.memory)

    def piece(self, tensor: Any, number: int) -> Any:  # noqa: ANN401 - a tensor
        return tensor[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]


def receive(way: Way) -> None:
    """Runs the target until its standard input ends."""
    side = Side(way, way.target, 0)
    where = side.memory if side.device is None else side.device
    _say(metadata=side.agent.get_agent_metadata().hex(), address=side.memory.data_ptr())
    for line in sys.stdin:
        order = json.loads(line)["order"]
        if order == "receive":
            _say(receives=True)
            deadline, came = time.monotonic() + PATIENCE_S, 0
            while came < PIECES and time.monotonic() < deadline:
                for notices in side.agent.get_new_notifs().values():
                    came += len(notices)
                    for notice in notices if side.device is not None else ():
                        piece = side.piece(side.memory, int(notice))
                        side.piece(side.device, int(notice)).copy_(piece, non_blocking=True)
            torch.cuda.synchronize()
            _say(ended=time.monotonic(), right=bool((where == FILLED).all().item()))
            where.zero_()
        elif order == "destroy":
            with suppress(*side.errors):
                side.agent.deregister_memory(side.region)
            del side.agent, side.region
            gc.collect()
            side.memory.zero_()
            torch.cuda.synchronize()
            _say(destroyed=True)
        elif order == "look":
            torch.cuda.synchronize()
            _say(landed=int((side.memory != 0).sum().item()))


def write(way: Way, area: dict[str, Any]) -> None:
    """Runs the writer until its standard input ends."""
    side = Side(way, way.source, FILLED)
    kinds = side.kind, "VRAM" if way.target == GPU else "DRAM"
    remote = side.agent.add_remote_agent(bytes.fromhex(area["metadata"]))

    def prepare(number: int) -> Any:  # noqa: ANN401 - NIXL's
        places = side.memory.data_ptr(), area["address"]
        descriptions = [
            side.agent.get_xfer_descs([(first + number * PIECE_BYTES, PIECE_BYTES, 0)], kind)
            for first, kind in zip(places, kinds, strict=True)
        ]
        return side.agent.initialize_xfer("WRITE", *descriptions, remote, str(number).encode())

    _say(connected=True)
    late: list[Any] = []
    for line in sys.stdin:
        order = json.loads(line)["order"]
        if order == "write":
            _say(began=time.monotonic())
            _write_all(side, prepare)
        elif order == "prepare":
            late = [prepare(number) for number in range(LATE_WRITES)]
            _say(prepared=True)
        elif order == "late":
            _say(late=_end_late(side, late))


def _write_all(side: Side, prepare: Any) -> None:  # noqa: ANN401 - a function
    packed = []
    for number in range(PIECES) if side.device is not None else ():
        piece = side.piece(side.device, number)
        side.piece(side.memory, number).copy_(piece, non_blocking=True)
        packed.append(torch.cuda.Event())
        packed[-1].record()
    deadline, at = time.monotonic() + PATIENCE_S, 0
    under_way: list[Any] = []
    while (at < PIECES or under_way) and time.monotonic() < deadline:
        while at < PIECES and len(under_way) < IN_FLIGHT and (not packed or packed[at].query()):
            under_way.append(prepare(at))
            side.agent.transfer(under_way[-1])
            at += 1
        done = [each for each in under_way if side.agent.check_xfer_state(each) != "PROC"]
        for handle in done:
            under_way.remove(handle)
            side.agent.release_xfer_handle(handle)


def _end_late(side: Side, late: list[Any]) -> str:
    """Begins writes to an agent that is gone; how that ends."""
    try:
        states = [side.agent.transfer(handle) for handle in late]
        deadline = time.monotonic() + 2.0
        while "PROC" in states and time.monotonic() < deadline:
            states = [side.agent.check_xfer_state(handle) for handle in late]
    except side.errors as error:
        return type(error).__name__
    return ", ".join(sorted({*states}))


class _Child:
    """One side in a process of its own."""

    def __init__(self, way: Way, role: str, area: str = "") -> None:
        permitted = dict(ENVIRONMENT)
        if not way.permitted:
            del permitted["UCX_TLS"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lab.bench.nixl_memory", role, str(WAYS.index(way)), area],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **permitted},
            text=True,
        )

    def ask(self, order: str, word: str) -> Any:  # noqa: ANN401 - from JSON
        assert self.process.stdin is not None
        if order:
            self.process.stdin.write(json.dumps({"order": order}) + "\n")
            self.process.stdin.flush()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{") and word in (answer := json.loads(line)):
                return answer
        raise UnavailableError(f"a side ended before it said {word!r}")


def measure(way: Way) -> dict[str, Any]:
    """Rates of one way, and what a late write does."""
    children = [_Child(way, "receive")]
    try:
        target = children[0]
        area = target.ask("", "metadata")
        children.append(writer := _Child(way, "write", json.dumps(area)))
        writer.ask("", "connected")
        found: dict[str, Any] = {"way": way.name, "GB/s": [], "right": True}
        for _ in range(ROUNDS):
            target.ask("receive", "receives")
            began = writer.ask("write", "began")["began"]
            ended = target.ask("", "ended")
            found["GB/s"].append(round(SIZE / (ended["ended"] - began) / 1e9, 2))
            found["right"] &= ended["right"]
        if way.fence:
            writer.ask("prepare", "prepared")
            target.ask("destroy", "destroyed")
            found["late write"] = writer.ask("late", "late")["late"]
            found["bytes of it that landed"] = target.ask("look", "landed")["landed"]
        return found
    finally:
        for child in children:
            child.process.kill()
            child.process.wait()


def _say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measures every way, or is one side of one."""
    if len(sys.argv) == 1:
        for way in WAYS:
            _say(**measure(way))
        return
    way = WAYS[int(sys.argv[2])]
    if sys.argv[1] == "receive":
        receive(way)
    else:
        write(way, json.loads(sys.argv[3]))
    os._exit(0)  # The destructors of the wheel's libraries would end with SIGSEGV.


if __name__ == "__main__":
    main()
