"""What a Llama-family decoder looks like, and which part of it a tensor-parallel rank holds.

`Fields` reads the fields of a model's files, which may come from anywhere: a value is used only
after its type and range were checked, and an error names the file, the field, the value and what
would be right.

KV heads are distributed with all their query heads, also if the numbers do not divide: of three KV
heads, two ranks hold two and one. With more ranks than KV heads, several ranks hold the same KV
head and divide its query heads.

The rules:

- What a config requires and this engine does not support is refused, never ignored. A model that is
  computed a little differently gives fluent, wrong answers.
- The ranks together hold every query head, every row of the MLP and every row of the vocabulary
  exactly once.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, TypeVar

from penstock.config import Flag, Number, Whole
from penstock.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from penstock.config import ValueKind

T = TypeVar("T")

LAYERS_MAX = 1_024
"""Bounds of what a file may say; each is several times what the largest models have."""
WIDTH_MAX = 1 << 20
"""Of the hidden state and of the MLP."""
HEADS_MAX = 4_096
HEAD_DIM_MAX = 4_096
VOCABULARY_MAX = 1 << 24
POSITIONS_MAX = (1 << 31) - 1

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
        if self.head_dim % 2:
            raise ConfigError(
                "head_dim", f"is {self.head_dim}, must be even: rotary channels come in pairs"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor that a checkpoint must have, by its Hugging Face name."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm.weight", (self.hidden,)
            yield f"{at}.post_attention_layernorm.weight", (self.hidden,)
            for name, rows in (("q", queries), ("k", keys), ("v", keys)):
                yield f"{at}.self_attn.{name}_proj.weight", (rows, self.hidden)
                if self.qkv_bias:
                    yield f"{at}.self_attn.{name}_proj.bias", (rows,)
            yield f"{at}.self_attn.o_proj.weight", (self.hidden, queries)
            if self.qk_norm:
                yield f"{at}.self_attn.q_norm.weight", (self.head_dim,)
                yield f"{at}.self_attn.k_norm.weight", (self.head_dim,)
            yield f"{at}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{at}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{at}.mlp.down_proj.weight", (self.hidden, self.intermediate)


def read_architecture(folder: Path) -> Architecture:
    """Reads `config.json` of a Hugging Face checkpoint.

    Raises `ConfigError`: the file is missing or no JSON, or asks for what this engine does not do.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError("model", f"is {folder}, must be a folder with a config.json")
    architecture = architecture_from_config(read_json(folder / "config.json").values)
    generation = folder / "generation_config.json"
    if not generation.is_file():
        return architecture
    # Chat models often name the token that ends a turn here alone.
    more = _stop_tokens(read_json(generation))
    stops = tuple(dict.fromkeys((*architecture.stop_tokens, *more)))
    return replace(architecture, stop_tokens=stops)


def architecture_from_config(config: Mapping[str, object]) -> Architecture:
    """The architecture that a Hugging Face config describes.

    Raises `ConfigError`: something is missing or has no meaning, or asks for what this engine does
    not do.
    """
    fields = Fields("config.json", config)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        fields.refuse(
            "model_type", f"is {shown(family)}, must be one of {', '.join(sorted(FAMILIES))}"
        )
    rope = fields.table("rope_parameters")
    rope = rope if rope.values else fields.table("rope_scaling")
    _refuse_what_is_not_done(fields)
    heads = fields.whole("num_attention_heads", maximum=HEADS_MAX)
    hidden = fields.whole("hidden_size", maximum=WIDTH_MAX)
    theta = {**rope.values, **{k: v for k, v in config.items() if v is not None}}
    try:
        return Architecture(
            family=family,
            layers=fields.whole("num_hidden_layers", maximum=LAYERS_MAX),
            hidden=hidden,
            heads=heads,
            kv_heads=fields.whole("num_key_value_heads", maximum=HEADS_MAX, default=heads),
            head_dim=fields.whole(
                "head_dim", maximum=HEAD_DIM_MAX, default=max(1, hidden // heads)
            ),
            intermediate=fields.whole("intermediate_size", maximum=WIDTH_MAX),
            vocabulary=fields.whole("vocab_size", maximum=VOCABULARY_MAX),
            norm_epsilon=fields.number("rms_norm_eps", maximum=1.0, default=1e-6),
            rope_theta=Fields(fields.file, theta).number(
                "rope_theta", maximum=1e15, default=10000.0
            ),
            rope_scaling=_rope_scaling(rope),
            positions=fields.whole("max_position_embeddings", maximum=POSITIONS_MAX, default=2048),
            qk_norm=family in QK_NORM_FAMILIES,
            qkv_bias=family in QKV_BIAS_FAMILIES,
            tied=fields.flag("tie_word_embeddings", default=False),
            stop_tokens=_stop_tokens(fields),
        )
    except ConfigError as error:
        if error.field.startswith(fields.file):
            raise
        raise ConfigError(f"{fields.file}: {error.field}", error.problem) from error


def _refuse_what_is_not_done(fields: Fields) -> None:
    config = fields.values
    for name, right in (("hidden_act", "silu"), ("mlp_bias", False), ("quantization_config", None)):
        value = config.get(name, right)
        if value != right:
            fields.refuse(name, f"is {shown(value)}, must be {shown(right)} in this engine")
    if config.get("attention_bias") and config.get("model_type") not in QKV_BIAS_FAMILIES:
        # There it means a bias behind the heads, too.
        fields.refuse("attention_bias", "is true, must be false in this engine")
    rotary = {**fields.table("rope_parameters").values, **config}.get("partial_rotary_factor", 1.0)
    if rotary != 1.0:
        fields.refuse("partial_rotary_factor", f"is {shown(rotary)}, must be 1.0 in this engine")
    kinds = config.get("layer_types")
    if kinds is not None and not (
        isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    ):
        fields.refuse("layer_types", f"is {shown(kinds)}, must have 'full_attention' alone")
    if config.get("use_sliding_window") or (
        config.get("model_type") == "mistral" and config.get("sliding_window")
    ):
        window = shown(config.get("sliding_window"))
        fields.refuse("sliding_window", f"is {window}, must be off in this engine")


def _rope_scaling(rope: Fields) -> RopeScaling | None:
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        rope.refuse("rope_type", f"is {shown(kind)}, must be 'default' or 'llama3'")
    low = rope.number("low_freq_factor", maximum=1e6)
    return RopeScaling(
        factor=rope.number("factor", maximum=1e6),
        low_frequency_factor=low,
        high_frequency_factor=rope.number("high_freq_factor", above=low, maximum=1e6),
        original_positions=rope.whole("original_max_position_embeddings", maximum=POSITIONS_MAX),
    )


def _stop_tokens(fields: Fields) -> tuple[int, ...]:
    given = fields.values.get("eos_token_id")
    tokens: list[object] = [] if given is None else given if isinstance(given, list) else [given]
    found = [each for each in tokens if isinstance(each, int) and not isinstance(each, bool)]
    if len(found) < len(tokens) or not all(0 <= token < VOCABULARY_MAX for token in found):
        fields.refuse(
            "eos_token_id", f"is {shown(given)}, must be a token id or a list of token ids"
        )
    return tuple(found)


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


JSON_BYTES_MAX = 256 << 20
"""Of a config, an index or a tokenizer's settings; the largest index of today has a few MB."""


class Fields:
    """Named values of one file."""

    def __init__(self, file: str, values: Mapping[str, object]) -> None:
        self.file = file
        self.values = values

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Raises the refusal of one field."""
        raise ConfigError(f"{self.file}: {name}", problem)

    def whole(
        self, name: str, *, minimum: int = 1, maximum: int, default: int | None = None
    ) -> int:
        """A whole number; without a default it must be there."""
        return self._taken(name, default, Whole(minimum=minimum, maximum=maximum))

    def number(
        self, name: str, *, above: float = 0.0, maximum: float, default: float | None = None
    ) -> float:
        """A finite number; without a default it must be there."""
        kind = Number(minimum=math.nextafter(above, math.inf), maximum=maximum)
        right = f"a number above {above:g} and up to {maximum:g}"
        return self._taken(name, default, kind, right)

    def flag(self, name: str, *, default: bool) -> bool:
        return self._taken(name, default, Flag())

    def table(self, name: str) -> Fields:
        """Fields within a field; none where it is missing or null."""
        value = self.values.get(name)
        if value is None:
            return Fields(self.file, {})
        if not isinstance(value, dict):
            self.refuse(name, f"is {shown(value)}, must be an object")
        return Fields(f"{self.file}: {name}", value)

    def _taken(self, name: str, default: object, kind: ValueKind[T], right: str = "") -> T:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            self.refuse(name, "is missing")
        found = kind.taken(value)
        if found is None:
            self.refuse(name, f"is {shown(value)}, must be {right or kind}")
        return found


def read_json(path: Path) -> Fields:
    """The object in a JSON file.

    Raises `ConfigError`: there is no such file, or it holds something else.
    """
    try:
        size = path.stat().st_size
        if size > JSON_BYTES_MAX:
            raise ConfigError(
                path.name, f"has {size} bytes, must have at most {JSON_BYTES_MAX}: {path}"
            )
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(path.name, f"cannot be read: {error.strerror}: {path}") from error
    except RecursionError:
        raise ConfigError(path.name, f"is nested too deeply: {path}") from None
    except ValueError as error:
        raise ConfigError(path.name, f"is no JSON: {error}: {path}") from error
    if not isinstance(read, dict):
        raise ConfigError(path.name, f"is {shown(read)}, must be a JSON object: {path}")
    return Fields(path.name, read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of the model, as ranges."""

    rank: int
    ranks: int
    heads: range
    """Query heads."""
    kv_heads: range
    intermediate: range
    vocabulary: range

    @property
    def is_first(self) -> bool:
        """Whether this rank samples."""
        return self.rank == 0


def share_of(architecture: Architecture, *, rank: int, ranks: int) -> Share:
    """The share of one rank.

    Raises `ConfigError`: there are more ranks than query heads, or heads that cannot be
    distributed.
    """
    if not 0 <= rank < ranks:
        raise ConfigError("rank", f"is {rank}, must be from 0 to {ranks - 1}")
    if ranks > architecture.heads:
        raise ConfigError(
            "tp", f"is {ranks}, must be at most {architecture.heads}, the attention heads"
        )
    heads, kv_heads = _heads(architecture, rank, ranks)
    return Share(
        rank=rank,
        ranks=ranks,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=dealt(architecture.intermediate, rank, ranks),
        vocabulary=dealt(architecture.vocabulary, rank, ranks),
    )


def _heads(architecture: Architecture, rank: int, ranks: int) -> tuple[range, range]:
    kv_heads, group = architecture.kv_heads, architecture.group
    if ranks <= kv_heads:
        held = dealt(kv_heads, rank, ranks)
        return range(held.start * group, held.stop * group), held
    # Several ranks on one KV head: the ranks are distributed over the heads, then the query
    # heads of each over its ranks.
    for head in range(kv_heads):
        sharers = dealt(ranks, head, kv_heads)
        if rank in sharers:
            if len(sharers) > group:
                break
            part = dealt(group, rank - sharers.start, len(sharers))
            start = head * group
            return range(start + part.start, start + part.stop), range(head, head + 1)
    raise ConfigError(
        "tp",
        f"is {ranks}, must be at most {kv_heads * group} for {kv_heads} KV heads of {group} "
        "query heads each",
    )


def dealt(total: int, number: int, shares: int) -> range:
    """Share `number` of `total` things, distributed in order over `shares`."""
    size, rest = divmod(total, shares)
    first = number * size + min(number, rest)
    return range(first, first + size + (number < rest))
