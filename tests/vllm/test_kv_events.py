"""What `penstock serve` publishes is what vLLM's own classes read; no engine is started."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from penstock.config import parse_config
from penstock.config.routing import EventsTable
from penstock.machine.kv_events import AllCleared, BlocksRemoved, BlocksStored
from penstock_serve.engine import messages as ms
from penstock_serve.server.event_publisher import CachedTokens, InstanceStream

# What vLLM's own imports warn of is not ours.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

CONFIG = (
    'version = 1\nmodel.name = "m"\ncache = { blocks = 8, block_tokens = 4 }\n'
    '[[tiers]]\nname = "host"\nkind = "memory"\nblocks = 16\n'
)


async def batches_of(stream: InstanceStream, first: int) -> list[tuple[int, bytes]]:
    """Asks as vLLM's subscribers ask for what they missed."""
    context = zmq.asyncio.Context()
    asking = context.socket(zmq.DEALER)
    asking.connect(stream._sockets.replay_address)
    await asking.send_multipart((b"", first.to_bytes(8, "big", signed=True)))
    found = []
    try:
        while True:
            _, _, number, payload = await asyncio.wait_for(asking.recv_multipart(), 60)
            if int.from_bytes(number, "big", signed=True) == -1:
                return found
            found.append((int.from_bytes(number, "big"), payload))
    finally:
        context.destroy(linger=0)


PROMPT = list(range(100, 112))


async def published(keys: list[bytes]) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
    """A snapshot and all batches of an instance that stored, saved, dropped and cleared blocks."""
    config = parse_config(CONFIG)
    stream = InstanceStream("instance-2", 2, EventsTable(port=0, replay_port=0))
    tokens = CachedTokens(lambda: config)
    stream.begin(config, tokens)
    tokens.begin(ms.Submit(id="r", prompt=PROMPT, max_tokens=1, tenant="a"))
    try:
        for event in (
            BlocksStored(sequence=1, epoch=0, tier="device", keys=keys, parent=None),
            BlocksStored(sequence=2, epoch=0, tier="host", keys=keys[1:], parent=keys[0]),
            BlocksRemoved(sequence=3, epoch=0, tier="device", keys=keys[1:]),
        ):
            stream.take([event])
        snapshot = await batches_of(stream, -1)
        stream.take([AllCleared(sequence=4, epoch=1)])
        return snapshot, await batches_of(stream, 0)
    finally:
        stream.close()


def stored(hashes: list[int], first: int, end: int, medium: str) -> Any:
    """What vLLM would publish of these blocks of the prompt."""
    from vllm.distributed.kv_events import BlockStored  # noqa: PLC0415 - imports vLLM

    return BlockStored(
        block_hashes=hashes[first:end],
        parent_block_hash=hashes[first - 1] if first else None,
        token_ids=PROMPT[4 * first : 4 * end],
        block_size=4,
        lora_id=None,
        medium=medium,
        lora_name=None,
        extra_keys=[("a",)] * (end - first),
    )


def test_vllms_classes_read_every_event_and_write_it_back_alike() -> None:
    from vllm.distributed.kv_events import (  # noqa: PLC0415 - imports vLLM
        AllBlocksCleared,
        BlockRemoved,
        KVEventBatch,
    )

    keys = parse_config(CONFIG).key_chain(tenant="a").extend(PROMPT)
    hashes = [int.from_bytes(key, "big") & (1 << 64) - 1 for key in keys]
    read = msgspec.msgpack.Decoder(KVEventBatch).decode

    snapshot, replay = asyncio.run(published(keys))

    found = [read(payload) for _, payload in replay]
    assert [number for number, _ in replay] == [0, 1, 2, 3]
    assert [batch.events for batch in found] == [
        [stored(hashes, 0, 3, "GPU")],
        [stored(hashes, 1, 3, "CPU")],
        [BlockRemoved(block_hashes=hashes[1:], medium="GPU")],
        [AllBlocksCleared()],
    ]
    assert {batch.data_parallel_rank for batch in found} == {2}
    # Field by field what vLLM would publish.
    for batch, (_, payload) in zip(found, replay, strict=True):
        assert fields_of(msgspec.msgpack.encode(batch)) == fields_of(payload)
    [(number, payload)] = snapshot
    assert number == 2
    whole = [stored(hashes, 0, 1, "GPU"), stored(hashes, 1, 3, "CPU")]
    assert read(payload).events == [AllBlocksCleared(), *whole]


def fields_of(payload: bytes) -> Any:
    return msgspec.msgpack.decode(payload)
