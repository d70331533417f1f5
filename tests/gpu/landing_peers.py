"""Processes on the GPU that tests of landing areas stop and kill: writers, targets, a prefill rank.

Each is started with `peer_process("from tests.gpu.landing_peers import NAME; NAME()", …)`.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from functools import partial

import torch

import penstock
from penstock.movers.cuda.landing import LandingMemory
from penstock.testing.writer_process import LocalWriter, obey_lines
from penstock.tiers.tensors import PART_FIRST, Held, TensorGroup, TensorLayer, TensorTier
from penstock.transport.shared_memory import (
    SharedTarget,
    call,
    connect_shared,
    decode_description,
)
from penstock.transport.waiting import wait_readable
from penstock.vocabulary.layout import GroupKind, HeadRange

LAYERS, TOKENS, BLOCK_TOKENS, HEADS, CHANNELS = 16, 1024, 16, 8, 128
BLOCKS = TOKENS // BLOCK_TOKENS
WAIT_S = 0.001
SETTINGS = penstock.HandoffSettings(
    times=penstock.HandoffTimes(suspect_s=2.0, ping_s=0.2),
    bounds=penstock.HandoffBounds(berth_bytes=4 << 20, berth_count=8),
)


def program(name: str) -> str:
    """What runs one of the functions below."""
    return f"from tests.gpu.landing_peers import {name}; {name}()"


def say(line: str) -> None:
    """Tells the test."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def writer() -> None:
    """A writer that does what it is told, for the suite of data transports."""
    torch.zeros(1, device="cuda")
    obey_lines(LocalWriter(partial(connect_shared, device=LandingMemory(0))))


def scribbler() -> None:
    """Maps an area, and has kernels write to all of it without end, whatever anybody says."""
    torch.zeros(1, device="cuda")
    description = decode_description(bytes.fromhex(sys.argv[1]))
    connection = call(description)
    wait_readable(connection.fileno(), time.monotonic() + 60)
    _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    mapped = LandingMemory(0).map(fds[0], description.size)
    memory = torch.as_tensor(mapped.bytes, device="cuda")
    memory.fill_(1)
    torch.cuda.synchronize()
    say("writing")
    value = 0
    while True:
        for _ in range(16):
            value = (value + 1) % 64
            memory.fill_(value)
        torch.cuda.synchronize()


def stray() -> None:
    """Maps an area, and changes one byte of it each time it is told where."""
    torch.zeros(1, device="cuda")
    description = decode_description(bytes.fromhex(sys.argv[1]))
    connection = call(description)
    wait_readable(connection.fileno(), time.monotonic() + 60)
    _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    mapped = LandingMemory(0).map(fds[0], description.size)
    memory = torch.as_tensor(mapped.bytes, device="cuda")
    say("writing")
    for line in sys.stdin:
        memory[int(line)] ^= 255
        torch.cuda.synchronize()
        say("written")


def target() -> None:
    """Opens an area, lets its writer in, and waits for its end."""
    torch.zeros(1, device="cuda")
    opened = SharedTarget(device=LandingMemory(0))
    area = opened.open_area("rank 0", 8 << 20)
    say(area.description.hex())
    sys.stdin.readline()
    opened.notices()
    say("given")
    sys.stdin.read()


def pool(seed: int) -> TensorTier:
    """KV of random numbers, the same in every process."""
    drawn = torch.Generator(device="cuda").manual_seed(seed)
    device = torch.device("cuda", torch.cuda.current_device())
    shape = (2, BLOCKS, BLOCK_TOKENS, HEADS, CHANNELS)
    layers = [
        TensorLayer(
            number=number,
            planes=[
                Held.pair(
                    torch.randn(shape, device=device, generator=drawn).to(torch.bfloat16),
                    PART_FIRST,
                )
            ],
        )
        for number in range(LAYERS)
    ]
    group = TensorGroup(kind=GroupKind.ATTENTION, heads=HeadRange.all_of(HEADS), layers=layers)
    return TensorTier.of([group], block_tokens=BLOCK_TOKENS)


def pair_at(prefill: str, decode: str) -> penstock.HandoffPair:
    """The same pair in both processes."""
    layouts = (pool(0).layout,)
    return penstock.HandoffPair(
        prefill=penstock.HandoffEngine(name="prefill", address=prefill, layouts=layouts),
        decode=penstock.HandoffEngine(name="decode", address=decode, layouts=layouts),
        model="toy",
        weights="v1",
        checksum="mix64",
    )


def prefill() -> None:
    """Computes each prompt whose name it reads, layer by layer."""
    kv = pool(5)
    pair = pair_at(sys.argv[1], sys.argv[2])
    with penstock.open_prefill(pair, kv=kv, settings=SETTINGS) as door:
        say("ready")
        while True:
            door.step()
            if not select.select([0], [], [], 0)[0]:
                door.wait(time.monotonic() + WAIT_S, descriptors=[0])
                continue
            name = sys.stdin.readline().strip()
            if not name:
                return
            door.offer(name, range(TOKENS), slots=range(BLOCKS))
            stream = torch.cuda.current_stream()
            for layer in range(LAYERS):
                door.computed({name: TOKENS}, layer=layer, stream=stream)
            door.first_token(name, 1)
