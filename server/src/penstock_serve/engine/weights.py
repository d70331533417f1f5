"""Other weights for a model that is loaded: checked first, then copied over the old ones in place.

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

from dataclasses import fields
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from penstock.errors import ConfigError, UnavailableError
from penstock_serve.engine.checkpoints import RankWeights, find_model

if TYPE_CHECKING:
    from penstock_serve.engine.architecture import Architecture
    from penstock_serve.engine.checkpoints import Checkpoint, ModelFiles
    from penstock_serve.engine.model import Decoder


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
    model, checkpoint = _opened(path, architecture)
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
        model, checkpoint = _opened(path, decoder.architecture)
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


def _opened(path: str, architecture: Architecture) -> tuple[ModelFiles, Checkpoint]:
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
