"""One peer of `disk_peers` in its own process: a round for every line of standard input.

It runs with the Python of the peer's environment, which has no Penstock.
"""

# Peers have no types that mypy could see from here.
# mypy: disallow-untyped-calls=false

from __future__ import annotations

import asyncio
import json
import mmap
import os
import secrets
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


class VllmFileSystem:
    """vLLM's file-system tier, below a view of memory that stands for its host tier."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        from vllm.v1.kv_offload.base import make_offload_key  # noqa: PLC0415
        from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: PLC0415
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager  # noqa: PLC0415

        self._key, self._transfer = make_offload_key, TransferJob
        self._count, self._job = wanted["count"], wanted["job_blocks"]
        self.size = wanted["block_bytes"] * self._count
        flat = np.frombuffer(mmap.mmap(-1, self.size), dtype=np.uint8)
        memory = flat.reshape(self._count, wanted["block_bytes"])
        memory[:] = np.random.default_rng().integers(0, 256, memory.shape, np.uint8)
        parallel = SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False
        )
        config = SimpleNamespace(
            groups=[],
            parallel=parallel,
            canonical_layout=False,
            kv_cache_layout=None,
            replicated_layout=False,
            model=SimpleNamespace(name="bench", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )
        spec = SimpleNamespace(blocks_per_chunk=1, kv_events_config=None, config=config)
        self._tier = FileSystemTierManager(
            spec,
            memory.data,
            "fs",
            wanted["folder"],
            n_read_threads=wanted["threads"] // 2,
            n_write_threads=wanted["threads"] - wanted["threads"] // 2,
        )
        self._jobs = 0

    def begin(self) -> None:
        self._keys = [self._key(secrets.token_bytes(32), 0) for _ in range(self._count)]

    def save(self) -> None:
        self._move(self._tier.submit_store, load=False)

    def load(self) -> None:
        self._move(self._tier.submit_load, load=True)

    def _move(self, submit: Callable[[object], None], *, load: bool) -> None:
        for first in range(0, self._count, self._job):
            self._jobs += 1
            end = min(self._count, first + self._job)
            submit(
                self._transfer(
                    job_id=self._jobs,
                    keys=self._keys[first:end],
                    chunk_ids=np.arange(first, end),
                    is_promotion=load,
                    req_context=None,
                )
            )
        self._tier.drain_jobs()
        if not all(each.success for each in self._tier.get_finished_jobs()):
            raise OSError("a job of the file-system tier failed")


class LmcacheDisk:
    """LMCache's local disk backend, with its own host memory."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        import torch  # noqa: PLC0415
        from lmcache.utils import CacheEngineKey  # noqa: PLC0415
        from lmcache.v1.config import LMCacheEngineConfig  # noqa: PLC0415
        from lmcache.v1.memory_management import MemoryFormat  # noqa: PLC0415
        from lmcache.v1.metadata import LMCacheMetadata  # noqa: PLC0415
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: PLC0415
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend  # noqa: PLC0415

        self._count = wanted["count"]
        self.size = wanted["block_bytes"] * self._count
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            max_local_cpu_size=3 * self.size / (1 << 30),
            local_disk=wanted["folder"],
            max_local_disk_size=64.0,
            extra_config={"use_odirect": True, "disk_io_threads": wanted["threads"]},
        )
        tokens = wanted["block_bytes"] // (2 * 32 * 64 * 2)
        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(32, 2, tokens, 1, 64),
            chunk_size=tokens,
        )
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        memory = LocalCPUBackend(config, metadata)
        self._disk = LocalDiskBackend(config, loop, memory, "cpu", metadata=metadata)
        shape = torch.Size((2, 32, tokens, 64))
        self._blocks = [
            memory.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD) for _ in range(self._count)
        ]
        for each in self._blocks:
            each.tensor.fill_(1.0)
        self._key = lambda: CacheEngineKey("bench", 1, 0, secrets.randbits(62), torch.bfloat16)

    def begin(self) -> None:
        self._keys = [self._key() for _ in range(self._count)]

    def save(self) -> None:
        left = threading.Semaphore(0)
        for key, block in zip(self._keys, self._blocks, strict=True):
            self._disk.submit_put_task(key, block, lambda _key: left.release())
        for _ in self._keys:
            if not left.acquire(timeout=120):
                raise OSError("a put of the local disk backend did not end")

    def load(self) -> None:
        for block in self._disk.batched_get_blocking(self._keys):
            if block is None:
                raise OSError("a get of the local disk backend failed")
            block.ref_count_down()


def main() -> None:
    wanted = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What the peers print goes elsewhere.
    peer = VllmFileSystem(wanted) if wanted["side"] == "vllm fs" else LmcacheDisk(wanted)
    for _ in sys.stdin:
        peer.begin()
        rates = []
        for move in (peer.save, peer.load):
            began = time.perf_counter()
            move()
            rates.append(peer.size / (time.perf_counter() - began))
        out.write(json.dumps(rates) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
