"""The weights of a checkpoint, and the part of them that one rank takes.

A checkpoint is a mapping from the names that Hugging Face gives to tensors. `RankWeights` cuts
out of it what a rank holds; nothing else of a large checkpoint is read.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from safetensors import safe_open

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from penstock.engine.sharding import Share


class Checkpoint(Protocol):
    """Tensors by their Hugging Face names."""

    def rows(self, name: str, held: range | None = None) -> torch.Tensor:
        """A tensor, or a range of its rows."""
        ...

    def columns(self, name: str, held: range) -> torch.Tensor:
        """A range of a matrix's columns."""
        ...

    def close(self) -> None:
        """Closes the files."""
        ...


class SafetensorsCheckpoint:
    """A folder with `*.safetensors`, in one file or in several with an index."""

    def __init__(self, folder: Path) -> None:
        self._open = ExitStack()
        self._file_of: dict[str, safe_open] = {}
        for path in _safetensors_files(folder):
            file = self._open.enter_context(safe_open(path, framework="pt"))
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def rows(self, name: str, held: range | None = None) -> torch.Tensor:
        """A tensor, or a range of its rows."""
        found = self._find(name)
        if held is None:
            return found.get_tensor(name)
        return found.get_slice(name)[held.start : held.stop]

    def columns(self, name: str, held: range) -> torch.Tensor:
        """A range of a matrix's columns."""
        return self._find(name).get_slice(name)[:, held.start : held.stop]

    def close(self) -> None:
        """Closes the files."""
        self._open.close()

    def _find(self, name: str) -> safe_open:
        if name not in self._file_of:
            raise ConfigError("model", f"has no tensor {name!r} in its safetensors files")
        return self._file_of[name]


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(named))]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ConfigError("model", f"is {folder}, must have *.safetensors files")
    return found


class RankWeights:
    """What one rank takes of a checkpoint, in its dtype and on its device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        share: Share,
        *,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint = checkpoint
        self._share = share
        self._head_dim = head_dim
        self._dtype = dtype
        self._device = device

    def whole(self, name: str) -> torch.Tensor:
        """A tensor that every rank has."""
        return self._placed(self._checkpoint.rows(name))

    def query(self, name: str) -> torch.Tensor:
        """The rows of this rank's query heads."""
        return self._placed(self._checkpoint.rows(name, self._scaled(self._share.heads)))

    def key_value(self, name: str) -> torch.Tensor:
        """The rows of this rank's KV heads."""
        return self._placed(self._checkpoint.rows(name, self._scaled(self._share.kv_heads)))

    def from_heads(self, name: str) -> torch.Tensor:
        """The columns that read this rank's query heads."""
        return self._placed(self._checkpoint.columns(name, self._scaled(self._share.heads)))

    def up(self, name: str) -> torch.Tensor:
        """This rank's rows of the MLP."""
        return self._placed(self._checkpoint.rows(name, self._share.intermediate))

    def down(self, name: str) -> torch.Tensor:
        """The columns that read this rank's part of the MLP."""
        return self._placed(self._checkpoint.columns(name, self._share.intermediate))

    def output(self, name: str) -> torch.Tensor:
        """This rank's rows of the vocabulary."""
        return self._placed(self._checkpoint.rows(name, self._share.vocabulary))

    def _scaled(self, heads: range) -> range:
        return range(heads.start * self._head_dim, heads.stop * self._head_dim)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._device, dtype=self._dtype).contiguous()
