"""A configuration as values: what the rest of Penstock is built from.

    Config
    ├── model       ModelSettings     what every key says about the model
    ├── hash        str               how keys are computed
    ├── cache       CacheSettings     device tier and the tiers below it
    ├── tier_kinds  TierKind, …       what each tier below the device is made of
    ├── equal_ranks bool              whether ranks hold equal bytes, and share a hub
    ├── layer_wise  str               whether steps may compute on loads that still arrive
    ├── device_wait_s float           how long a device is waited for
    ├── handoff     HandoffTable      how KV travels between instances, if the file says
    ├── engine      EngineTable       how `penstock serve` computes, if the file says
    └── serve       ServeTable        whom it answers, if the file says

The one rule that must not break: a `Config` that exists is usable; whatever could be wrong
with it was refused when it was built.
"""

from __future__ import annotations

# msgspec resolves the annotations when it decodes a `Config`, so these imports must be real.
from collections.abc import Mapping  # noqa: TC003
from dataclasses import dataclass, field

import msgspec

from penstock.cache.settings import CacheSettings  # noqa: TC001
from penstock.config.keys import Gib, String, TierOption, Value, Whole
from penstock.config.serving import EngineTable, HandoffTable, ServeTable  # noqa: TC001
from penstock.errors import ConfigError
from penstock.extensions import OTHER_TIERS
from penstock.vocabulary.dtypes import DTYPE_NAMES
from penstock.vocabulary.keys import ALGORITHMS, KeyChain
from penstock.vocabulary.namespace import FIELD_BYTES_MAX, Namespace

DEVICE_NAME = "device"
"""The name of the device tier, which a file configures in `[cache]`."""
UNKNOWN = "unknown"
"""What a namespace says when nobody said which weights the model has, or how its KV is kept."""
LAYER_WISE = ("auto", "off")
"""Whether a step may compute on loads that are still arriving, layer by layer."""
BLOCKS_MAX = 2**31 - 1
"""Slot numbers are kept in 32-bit integers."""
UNSIZED_BLOCKS = BLOCKS_MAX
"""The slots of a tier that is given a size in GiB, until it is known how large a block is."""

TIER_KINDS: Mapping[str, Mapping[str, TierOption]] = {
    "memory": {},
    "host": {
        "gib": TierOption(Gib(minimum=0, maximum=65_536), 0.0),
        "huge_pages": TierOption(String(choices=("auto", "never")), "auto"),
        "numa_node": TierOption(Whole(minimum=-1, maximum=1_023), -1),
    },
}
"""The built-in kinds of tiers, with the keys that only a tier of this kind has."""


def tier_options(kind: str, *, place: str = "kind") -> Mapping[str, TierOption]:
    """The keys that only tiers of this kind have.

    Raises:
        ConfigError: there is no such kind, or its entry point is broken; `place` is the setting.
    """
    if kind in TIER_KINDS:
        return TIER_KINDS[kind]
    factory = OTHER_TIERS.find(kind, place)
    if factory is None:
        known = ", ".join([*TIER_KINDS, *OTHER_TIERS.names()])
        raise ConfigError(place, f"is {kind!r}, must be one of {known}")
    return factory.options


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What every key of one engine says about the model; `Namespace` explains the fields."""

    name: str
    weights_version: str = ""
    """Empty: unknown."""
    kv_dtype: str = ""
    """Empty: `penstock.open` takes that of the arrays it is given; unknown elsewhere."""
    kv_scales: str = ""
    rotary: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("model.name", "is '', must name the model: keys are made from it")
        if self.kv_dtype and self.kv_dtype not in DTYPE_NAMES:
            raise ConfigError(
                "model.kv_dtype", f"is {self.kv_dtype!r}, must be one of {', '.join(DTYPE_NAMES)}"
            )
        for name in ("name", "weights_version", "kv_dtype", "kv_scales", "rotary"):
            size = len(getattr(self, name).encode("utf-8"))
            if size > FIELD_BYTES_MAX:
                raise ConfigError(
                    f"model.{name}", f"is {size} bytes long, must be at most {FIELD_BYTES_MAX}"
                )

    def namespace(self, *, tenant: str = "", adapter: str = "", kv_group: str = "") -> Namespace:
        """The namespace of this model's keys for one tenant, adapter and KV group."""
        return Namespace(
            model=self.name,
            weights_version=self.weights_version or UNKNOWN,
            kv_dtype=self.kv_dtype or UNKNOWN,
            kv_scales=self.kv_scales,
            rotary=self.rotary,
            kv_group=kv_group,
            adapter=adapter,
            tenant=tenant,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierKind:
    """What a tier is made of, with the settings that only this kind has."""

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)
    required: bool = False
    """Whether a machine that cannot give the tier its memory is an error; otherwise the cache is
    opened without the tier."""

    def __post_init__(self) -> None:
        known = tier_options(self.name)
        if set(self.options) != set(known):
            raise ConfigError(
                "options",
                f"are {sorted(self.options)}, must be {sorted(known)} for kind {self.name!r}",
            )

    @property
    def gib(self) -> float:
        """The size of the tier; 0 if it is given in blocks."""
        return float(self.options.get("gib", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole configuration; `parse_config(config.to_toml()) == config`.

    It travels between processes as a value. A `msgspec.Struct` may have a field of type `Config`:
    msgspec encodes it, as JSON or MessagePack, and checks it again where it decodes it. Elsewhere
    use `to_builtins` and `from_builtins`. Both hold the API key, if `serve` has one; `to_toml`
    never prints it.
    """

    model: ModelSettings
    cache: CacheSettings
    hash: str = "sha256"
    tier_kinds: tuple[TierKind, ...] = ()
    """One for each of `cache.tiers`, in the same order."""
    equal_ranks: bool = False
    """Whether all ranks hold equal bytes, as with latent attention: then they share one hub."""
    layer_wise: str = "off"
    """`auto`: loads fill layer by layer where the device can wait for a layer, and a step may
    compute on those whose layers will arrive in time; `off`: a request waits until its loads have
    ended, which are made whole."""
    device_wait_s: float = 30.0
    """A device that ends none of its copies for this long while somebody waits counts as stuck."""
    handoff: HandoffTable | None = None
    engine: EngineTable | None = None
    serve: ServeTable | None = None

    def __post_init__(self) -> None:
        if self.hash not in ALGORITHMS:
            known = ", ".join(ALGORITHMS)
            raise ConfigError("hash", f"is {self.hash!r}, must be one of {known}")
        if self.layer_wise not in LAYER_WISE:
            known = ", ".join(LAYER_WISE)
            raise ConfigError("layer_wise", f"is {self.layer_wise!r}, must be one of {known}")
        if not self.device_wait_s > 0:
            raise ConfigError("device_wait_s", f"is {self.device_wait_s}, must be more than 0")
        if len(self.tier_kinds) != len(self.cache.tiers):
            raise ConfigError(
                "tier_kinds",
                f"has {len(self.tier_kinds)} entries for {len(self.cache.tiers)} tiers, "
                "must have one for each",
            )
        for tier, kind in zip(self.cache.tiers, self.tier_kinds, strict=True):
            if kind.gib and tier.slot_count != UNSIZED_BLOCKS:
                raise ConfigError(
                    f"tier {tier.name!r}: slot_count",
                    f"is {tier.slot_count}, must be {UNSIZED_BLOCKS} (not known yet) while gib "
                    f"is {kind.gib}",
                )
        if self.equal_ranks:
            self._require_shared_hub()
        if self.cache.device is not None and self.cache.device.name != DEVICE_NAME:
            raise ConfigError(
                "cache.device.name", f"is {self.cache.device.name!r}, must be {DEVICE_NAME!r}"
            )

    def _require_shared_hub(self) -> None:
        if self.cache.rank_count == 1:
            raise ConfigError(
                "cache.equal_ranks", "is true, which has no effect while cache.ranks is 1"
            )
        if not self.tier_kinds or self.tier_kinds[0].name != "host":
            kind = self.tier_kinds[0].name if self.tier_kinds else "none"
            raise ConfigError(
                "cache.equal_ranks",
                f"is true while tiers[0].kind is {kind!r}, must be 'host': no other memory can be "
                "shared by ranks",
            )

    def key_chain(self, *, tenant: str = "", adapter: str = "", kv_group: str = "") -> KeyChain:
        """An empty chain that gives a request's blocks their keys."""
        return KeyChain(
            self.model.namespace(tenant=tenant, adapter=adapter, kv_group=kv_group),
            block_tokens=self.cache.block_tokens,
            algorithm=self.hash,
        )

    def to_toml(self) -> str:
        """Every setting with the value in effect, as a file that reads back equal."""
        from penstock.config.toml import print_toml  # noqa: PLC0415  (imports this module)

        return print_toml(self)

    def to_builtins(self) -> dict[str, object]:
        """The configuration as a tree of dicts, lists, strings and numbers."""
        tree: dict[str, object] = msgspec.to_builtins(self)
        return tree

    @classmethod
    def from_builtins(cls, tree: object) -> Config:
        """The configuration that `to_builtins` returned, in whatever process.

        Raises:
            ConfigError: the tree is none, or one of its settings is wrong.
        """
        try:
            return msgspec.convert(tree, cls)
        except msgspec.ValidationError as error:
            raise ConfigError("config", f"cannot be read: {error}") from error
