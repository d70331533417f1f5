"""Which weights a model has: a part of every key, so that KV of others is never taken for its own.

    version = weights_version(model, given)      # empty: nothing outlives the process
    marks = weight_marks(model)                  # others after training, a merge, a load

| the model                                 | its version                                         |
|-------------------------------------------|-----------------------------------------------------|
| `weights_version` is in the configuration | that, and a digest of the weights in memory         |
| was read from a folder with safetensors   | a digest of their headers and sizes, and of memory  |
| anything else                             | none: blocks stay in host memory                    |

The digest of memory has the model's configuration and samples of every tensor. Training changes
numbers all over a tensor; so another model under the same name, and weights that were changed after
they were read, have other keys.

The one rule: what cannot be told apart here is told apart by nobody. A change of single numbers
between two runs, in places that are no samples, needs another `weights_version`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import try_to_load_from_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLES = 64
"""Numbers of each tensor: with 300 tensors a few milliseconds."""
HEADER_BYTES_MAX = 100 << 20
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Other classes (of quantisers, say) may not allow to look at their numbers."""
ELSEWHERE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
"""What a configuration says and no key depends on, or a tensor says itself."""


def weights_version(model: PreTrainedModel, given: str) -> str:
    """The version of a model's weights; empty if nothing but its memory says which they are."""
    name = given or _digest_of_files(model)
    return f"{name}@{_digest_of_memory(model)}" if name else ""


def weight_marks(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Numbers that change when a weight is written to, replaced or moved."""
    # torch counts all writes, but to inference tensors, which take none outside of that mode.
    return [
        (each.data_ptr(), -1 if each.is_inference() else each._version)  # noqa: SLF001 - its only name
        for each in model.parameters()
    ]


def _digest_of_memory(model: PreTrainedModel) -> str:
    digest = hashlib.blake2b(digest_size=16)
    said = {key: value for key, value in model.config.to_dict().items() if key not in ELSEWHERE}
    digest.update(type(model).__name__.encode())
    digest.update(json.dumps(said, sort_keys=True, default=str).encode())
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        if type(tensor) in PLAIN and tensor.device.type != "meta" and tensor.numel():
            digest.update(_samples_of(tensor.detach()))
    return digest.hexdigest()


def _samples_of(tensor: torch.Tensor) -> bytes:
    """Some numbers of a tensor, from its first to its last, without a copy of all of it."""
    count = min(SAMPLES, tensor.numel())
    places = torch.linspace(0, tensor.numel() - 1, count, dtype=torch.float64).long()
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # torch cannot pick single numbers of 8 bits.
    found = tensor[torch.unravel_index(places.to(tensor.device), tensor.shape)]
    sampled: bytes = found.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
    return sampled


def _digest_of_files(model: PreTrainedModel) -> str:
    """A digest of the names, sizes and headers of a checkpoint; empty if there is none."""
    digest = hashlib.blake2b(digest_size=16)
    files = sorted(_folder_of(model).glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), HEADER_BYTES_MAX))
        digest.update(f"{path.name}\0{path.stat().st_size}\0{len(header)}\0".encode() + header)
    return digest.hexdigest() if files else ""


def _folder_of(model: PreTrainedModel) -> Path:
    """Where a model was read from: a folder, or a revision in the cache of the hub."""
    name = str(model.name_or_path or "no name")
    revision = vars(model.config).get("_commit_hash")
    found = revision and try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else Path(name)
