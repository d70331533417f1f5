"""vLLM's own OffloadingConnector on a machine without a GPU, for `lab bench vllm`.

As it is, it refuses to run on the CPU. Everything it decides is left alone (scheduler, manager,
policy); only the worker that copies blocks is replaced, by one that copies with torch, at once,
in the worker's thread. Its figures are labelled so: on a GPU its copies would not cost that
thread.
"""

# vLLM has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks of one KV group between vLLM's memory and plain tensors."""

    def __init__(self, kv_caches: Any, chunk_count: int) -> None:
        self._device = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            for each in kv_caches.tensors
        ]
        self._host = [
            torch.zeros((chunk_count, each.shape[1]), dtype=torch.int8) for each in self._device
        ]
        self._finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Device to host."""
        return self._copy(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Host to device."""
        return self._copy(job_id, self._host, src_spec, self._device, dst_spec)

    def _copy(self, job_id: int, source: Any, read: Any, target: Any, write: Any) -> bool:
        rows, places = torch.from_numpy(read.block_ids), torch.from_numpy(write.block_ids)
        for there, here in zip(source, target, strict=True):
            here[places.long()] = there[rows.long()]
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self) -> list[Any]:
        """All of it, always."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """There is nothing to wait for."""


class CpuCopySpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's CPU offloading, with the worker above."""

    _copying: CopyingWorker | None = None

    def get_worker(self, kv_caches: Any) -> CopyingWorker:
        """The worker of this rank."""
        if self.blocks_per_chunk != 1 or len(kv_caches.group_data_refs) != 1:
            raise ValueError("the shim knows one KV group, and chunks of one block")
        if self._copying is None:
            self._copying = CopyingWorker(kv_caches, self.num_chunks)
        return self._copying
