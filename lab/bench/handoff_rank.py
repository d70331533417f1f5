"""A rank of the handoff benchmark, in a process and on a core of its own.

The clock simulates the device of the source: a layer is computed after a given time, and the CPU is
free meanwhile, as with a GPU. Everything else is the production driver, over ZeroMQ and shared
memory.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.config.values import SHARED_MEMORY
from penstock.errors import InvariantViolation, UnavailableError
from penstock.handoff.driver.decode_rank import DecodeRankDriver
from penstock.handoff.driver.directory import Directory, EnginePlace, RankPlace
from penstock.handoff.driver.lines import zmq_lines
from penstock.handoff.driver.parts import (
    ArrayReader,
    ArrayTaker,
    PartGather,
    PartScatter,
)
from penstock.handoff.driver.prefill_rank import LayerEvents, PrefillRankDriver
from penstock.handoff.pair import Writer, transport_named
from penstock.handoff.protocol.settings import HandoffBounds, HandoffSettings, HandoffTimes
from penstock.tiers.arrays import ArrayTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import HeadRange, Layout
from penstock.vocabulary.planes import Axis, DType

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

PROGRAM = "from lab.bench.handoff_rank import main; main()"
SETTINGS = HandoffSettings(
    # On a busy machine, a rank that measures may not answer for a long time.
    times=HandoffTimes(suspect_s=60.0, handoff_s=120.0),
    bounds=HandoffBounds(),
)
HEADS, CHANNELS = 8, 128
WAIT_S = 1.0
PATIENCE_S = 30.0
PIECE_BYTES = 512 << 10
ORDERS = {
    "head major": (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CHANNEL),
    "token major": (Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL),
}


class Commands:
    """Non-blocking lines of JSON from standard input."""

    def __init__(self) -> None:
        self.descriptor = sys.stdin.fileno()
        self.ended = False
        self._rest = b""
        os.set_blocking(self.descriptor, False)

    def take(self) -> list[dict[str, Any]]:
        """The commands that have arrived."""
        try:
            found = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return []
        self.ended = not found
        *lines, self._rest = (self._rest + found).split(b"\n")
        return [json.loads(line) for line in lines]


def print_json(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


class BenchShape(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and the layout of its KV."""

    layers: int
    tokens: int
    block_tokens: int
    order: str
    """The key of one of `ORDERS`."""

    @property
    def block_count(self) -> int:
        return self.tokens // self.block_tokens

    def layout(self) -> Layout:
        """Its KV: eight heads of 128 numbers of two bytes."""
        return Layout.split(
            layers=range(self.layers),
            heads=HeadRange.all_of(HEADS),
            channels=CHANNELS,
            dtype=DType.BF16,
            block_tokens=self.block_tokens,
            block_count=self.block_count,
            order=ORDERS[self.order],
        )


class BenchOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a rank process."""

    name: str
    shape: BenchShape
    prefix: str
    cores: tuple[int, ...]
    transport: str = SHARED_MEMORY


def directory_of(shape: BenchShape, prefix: str) -> Directory:
    """Two engines with one rank each."""
    form = Form(layout=shape.layout())
    prefill, decode = (
        EnginePlace(
            scheduler=engine,
            address=f"ipc://{prefix}-{engine}",
            ranks=(RankPlace(name=f"{engine}/0", form=form, address=f"ipc://{prefix}-{engine}-0"),),
        )
        for engine in ("prefill", "decode")
    )
    return Directory(prefill=prefill, decode=decode, model="bench", weights="v1")


def _pool(size: int) -> NDArray[np.uint8]:
    """Memory that is aligned to a page, as tensors and arenas are, with all pages present."""
    memory = np.ones(size + mmap.PAGESIZE, dtype=np.uint8)
    first = -memory.ctypes.data % mmap.PAGESIZE
    pool: NDArray[np.uint8] = memory[first : first + size]
    return pool


def keys_of(name: str, count: int) -> list[bytes]:
    """The keys of a prompt's blocks."""
    return [f"{name} {n}".encode() for n in range(count)]


class ClockEvent:
    """An event of the simulated device; its "stream" is the time at which it is reached."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self, stream: object) -> None:
        assert isinstance(stream, float)
        self._at = stream

    @property
    def reached(self) -> bool:
        return time.monotonic() >= self._at

    def close(self) -> None:
        pass


class SourceRank:
    """The prefill rank."""

    def __init__(self, orders: BenchOrders) -> None:
        shape = self.shape = orders.shape
        layout = shape.layout()
        chance = np.random.default_rng(1)
        sizes = layout.buffer_bytes
        self.arrays = [_pool(sizes[at]) for at in sorted(sizes)]
        for array in self.arrays:
            array[:] = chance.integers(0, 256, len(array), dtype=np.uint8)
        self.slots = [int(slot) for slot in chance.permutation(shape.block_count)]
        self.copy = [_pool(len(array)) for array in self.arrays]
        self.events = LayerEvents(ClockEvent)
        directory = directory_of(shape, orders.prefix)
        route = directory.route("prefill/0", "decode/0")
        assert route is not None
        forms = [route.form_of(layer, layer + 1) for layer in range(shape.layers)]
        tiers = [ArrayTier(layout, arrays) for arrays in (self.arrays, self.copy)]
        self._movers = [
            (
                PartGather(form, tiers[0], Algorithm.XXH3),
                PartScatter(route, form, tiers[1], Algorithm.XXH3),
            )
            for form in forms
        ]
        self._berths = [
            np.ones(form.block_bytes * shape.block_count, dtype=np.uint8) for form in forms
        ]
        self.driver = PrefillRankDriver(
            directory,
            orders.name,
            zmq_lines(directory, orders.name),
            reader=ArrayReader(ArrayTier(layout, self.arrays), Algorithm.XXH3),
            connect=Writer(transport_named(orders.transport)).connect,
            incarnation=secrets.randbits(63) + 1,
            settings=SETTINGS,
            progress=self.events,
        )

    def execute(self, order: dict[str, Any]) -> None:
        """Runs a command and prints how long it took."""
        if "copy" in order:
            cpu_s = time.process_time()
            copied_s = self._copy_and_sum()
            cpu_s = time.process_time() - cpu_s
            pieces_s = self._copy_in_pieces()
            packed_s, taken_s = self._work_alone()
            print_json(
                copied=copied_s, cpu_s=cpu_s, pieces=pieces_s, packed=packed_s, taken=taken_s
            )
        elif "together" in order:
            self._run_together(order["together"])
        else:
            self._run(order["run"], order["layer_s"])

    def _run_together(self, names: list[str]) -> None:
        """Computes several prompts at once, and sends them."""
        shape, driver = self.shape, self.driver
        for name in names:
            keys = keys_of(name, shape.block_count)
            driver.admit(name, token_count=shape.tokens, slots=self.slots, keys=keys)
        wants = driver.machine.wants
        self._until(lambda: all(name in wants.get("decode/0", {}) for name in names))
        began = time.monotonic()
        for name in names:
            driver.chunk_progress(name, tokens=shape.tokens)
        self._until(lambda: not any(name in driver.machine.prompts for name in names))
        print_json(ran=names, began=began)

    def _run(self, name: str, layer_s: float) -> None:
        """Computes a prompt, at once or layer by layer, while it is sent."""
        shape, driver = self.shape, self.driver
        keys = keys_of(name, shape.block_count)
        driver.admit(name, token_count=shape.tokens, slots=self.slots, keys=keys)
        self._until(lambda: name in driver.machine.wants.get("decode/0", {}))
        cpu_s, parts = time.process_time(), driver.parts_moved
        began = ended = time.monotonic()
        if layer_s:
            ended = self._compute_by_layers(name, layer_s)
        else:
            driver.chunk_progress(name, tokens=shape.tokens)
        self._until(lambda: name not in driver.machine.prompts)
        print_json(
            ran=name,
            began=began,
            ended=ended,
            cpu_s=time.process_time() - cpu_s,
            parts=driver.parts_moved - parts,
        )

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise UnavailableError(f"the other side has not answered in {PATIENCE_S} s")
            self.driver.wait(deadline)
            self.driver.step()

    def _compute_by_layers(self, name: str, layer_s: float) -> float:
        """Returns when the last layer was computed."""
        first = time.monotonic()
        for layer in range(self.shape.layers):
            self.events.record({name: self.shape.tokens}, layer, first + (layer + 1) * layer_s)
        ended = first + self.shape.layers * layer_s
        while self.events.busy:
            self.driver.drive(time.monotonic() + WAIT_S)
        return ended

    def _copy_and_sum(self) -> float:
        """Seconds for a plain copy of all bytes, and then one pass over them."""
        began = time.perf_counter()
        for target, array in zip(self.copy, self.arrays, strict=True):
            np.copyto(target, array)
        for target in self.copy:
            xxh3_64_intdigest(target.data)
        return time.perf_counter() - began

    def _work_alone(self) -> tuple[float, float]:
        """CPU seconds of both sides' work on all parts, in this process and its own memory."""
        keys = keys_of("alone", self.shape.block_count)
        slots = range(self.shape.block_count)
        began = time.process_time()
        sums = [
            gather.gather(self.slots, keys, berth)
            for (gather, _), berth in zip(self._movers, self._berths, strict=True)
        ]
        packed = time.process_time()
        for (_, scatter), berth, each in zip(self._movers, self._berths, sums, strict=True):
            if not scatter.scatter(berth, keys, each, slots):
                raise InvariantViolation("an unchanged part is not intact")
        return packed - began, time.process_time() - packed

    def _copy_in_pieces(self) -> float:
        """The same, with each piece summed while it is in the cache: the upper bound."""
        began = time.perf_counter()
        for target, array in zip(self.copy, self.arrays, strict=True):
            for at in range(0, len(array), PIECE_BYTES):
                piece = target[at : at + PIECE_BYTES]
                np.copyto(piece, array[at : at + PIECE_BYTES])
                xxh3_64_intdigest(piece.data)
        return time.perf_counter() - began


class TargetRank:
    """The decode rank."""

    def __init__(self, orders: BenchOrders) -> None:
        layout = orders.shape.layout()
        sizes = layout.buffer_bytes
        arrays = [_pool(sizes[at]) for at in sorted(sizes)]
        directory = directory_of(orders.shape, orders.prefix)
        self.driver = DecodeRankDriver(
            directory,
            orders.name,
            zmq_lines(directory, orders.name),
            taker=ArrayTaker(ArrayTier(layout, arrays), Algorithm.XXH3),
            target=transport_named(orders.transport).open_target(None),
            incarnation=secrets.randbits(63) + 1,
            settings=SETTINGS,
        )

    def execute(self, order: dict[str, Any]) -> None:
        """Prints the CPU time of this process, and of its thread that drives the handoff."""
        print_json(cpu=order["cpu"], cpu_s=time.process_time(), thread_s=time.thread_time())


def main() -> None:
    """Runs a rank until its standard input ends."""
    orders = msgspec.json.decode(sys.argv[1], type=BenchOrders)
    os.sched_setaffinity(0, orders.cores)
    is_source = orders.name.startswith("prefill/")
    rank = SourceRank(orders) if is_source else TargetRank(orders)
    commands = Commands()
    print_json(ready=orders.name)
    while not commands.ended:
        for order in commands.take():
            rank.execute(order)
        rank.driver.step()
        rank.driver.wait(time.monotonic() + WAIT_S, [commands.descriptor])
    rank.driver.close()
