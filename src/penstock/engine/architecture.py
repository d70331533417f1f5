"""What a Llama-family decoder looks like, read from the config of its checkpoint.

One rule: what a config asks for and this engine does not do is refused, never ignored. A model
that is computed a little differently answers fluently, and wrongly.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

QK_NORM_FAMILIES = frozenset({"qwen3"})
QKV_BIAS_FAMILIES = frozenset({"qwen2"})
FAMILIES = frozenset({"llama", "mistral", "smollm2"}) | QK_NORM_FAMILIES | QKV_BIAS_FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the rotary embedding: low frequencies are slowed down."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes and choices of one decoder."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    positions: int
    """The longest context it was made for."""
    qk_norm: bool
    qkv_bias: bool
    tied: bool
    """Whether the output layer is the embedding."""
    stop_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(
                "num_attention_heads",
                f"is {self.heads}, must be a multiple of num_key_value_heads, {self.kv_heads}",
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


def read_architecture(folder: Path) -> Architecture:
    """Reads `config.json` of a Hugging Face checkpoint.

    Raises:
        ConfigError: the file is missing or no JSON, or asks for what this engine does not do.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError("model", f"is {folder}, must be a folder with a config.json")
    architecture = architecture_from_config(_read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    if not generation.is_file():
        return architecture
    # Chat models often name the token that ends a turn here alone.
    more = _stop_tokens(_read_json(generation).get("eos_token_id"))
    stops = tuple(dict.fromkeys((*architecture.stop_tokens, *more)))
    return replace(architecture, stop_tokens=stops)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("model", f"has a {path.name} that is no JSON: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError("model", f"has a {path.name} that is no JSON object")
    return read


def architecture_from_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a Hugging Face config describes.

    Raises:
        ConfigError: something is missing, or asks for what this engine does not do.
    """
    family = config.get("model_type", "")
    if family not in FAMILIES:
        raise ConfigError(
            "model_type", f"is {family!r}, must be one of {', '.join(sorted(FAMILIES))}"
        )
    _refuse_what_is_not_done(config)
    missing = [name for name in _NEEDED if name not in config]
    if missing:
        raise ConfigError(missing[0], "is missing from config.json")
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return Architecture(
        family=family,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        rope_theta=config.get("rope_theta") or rope.get("rope_theta") or 10000.0,
        rope_scaling=_rope_scaling(rope),
        positions=config.get("max_position_embeddings", 2048),
        qk_norm=family in QK_NORM_FAMILIES,
        qkv_bias=family in QKV_BIAS_FAMILIES,
        tied=bool(config.get("tie_word_embeddings", False)),
        stop_tokens=_stop_tokens(config.get("eos_token_id")),
    )


_NEEDED = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads"),
    *("intermediate_size", "vocab_size"),
)


def _refuse_what_is_not_done(config: Mapping[str, Any]) -> None:
    for name, right in (("hidden_act", "silu"), ("mlp_bias", False), ("quantization_config", None)):
        value = config.get(name, right)
        if value != right:
            raise ConfigError(name, f"is {value!r}, must be {right!r} in this engine")
    if config.get("attention_bias") and config.get("model_type") not in QKV_BIAS_FAMILIES:
        # There it means a bias behind the heads, too.
        raise ConfigError("attention_bias", "is true, must be false in this engine")
    rotary = {**(config.get("rope_parameters") or {}), **config}.get("partial_rotary_factor", 1.0)
    if rotary != 1.0:
        raise ConfigError("partial_rotary_factor", f"is {rotary}, must be 1.0 in this engine")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError("layer_types", "has other layers than 'full_attention'")
    if config.get("use_sliding_window") or (
        config.get("model_type") == "mistral" and config.get("sliding_window")
    ):
        raise ConfigError(
            "sliding_window", f"is {config.get('sliding_window')}, must be off in this engine"
        )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError("rope_scaling", f"is of type {kind!r}, must be 'default' or 'llama3'")
    return RopeScaling(
        factor=rope["factor"],
        low_frequency_factor=rope["low_freq_factor"],
        high_frequency_factor=rope["high_freq_factor"],
        original_positions=rope["original_max_position_embeddings"],
    )


def _stop_tokens(given: object) -> tuple[int, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)  # type: ignore[arg-type]


def rotary_frequencies(architecture: Architecture) -> list[float]:
    """The angle by which each pair of channels turns from one position to the next."""
    half = architecture.head_dim // 2
    theta = architecture.rope_theta
    plain = [theta ** (-2.0 * pair / architecture.head_dim) for pair in range(half)]
    scaling = architecture.rope_scaling
    return plain if scaling is None else [_stretched(angle, scaling) for angle in plain]


def _stretched(angle: float, scaling: RopeScaling) -> float:
    """Slow turns are slowed down by the factor, quick ones are kept, with a ramp between."""
    wavelength = 2 * math.pi / angle
    longest = scaling.original_positions / scaling.low_frequency_factor
    shortest = scaling.original_positions / scaling.high_frequency_factor
    if wavelength < shortest:
        return angle
    if wavelength > longest:
        return angle / scaling.factor
    kept = (scaling.original_positions / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    return (1 - kept) * angle / scaling.factor + kept * angle
