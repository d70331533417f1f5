"""A configuration as values: what the rest of Penstock is built from.

The defaults are stated here; `schema` has the ranges, `reference` what each key means.

A configuration names the place of the secret, `file:/PATH` or `env:NAME`, never the secret: it
travels between processes and is printed. Every process that makes keys reads the secret itself,
once. The one rule that must not break: no message has a part of it.

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
    ├── serve       ServeTable        whom it answers, if the file says
    ├── routing     RoutingTable      how its router chooses instances, if the file says

`[handoff]`, `[engine]`, `[serve]` and `[routing]` mean nothing to a cache that another
engine embeds, so a `Config` has them only if its file does.

The one rule that must not break: a `Config` that exists is usable; whatever could be wrong
with it was refused when it was built.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re

# msgspec resolves the annotations when it decodes a `Config`, so imports for them must be real.
from collections.abc import Mapping  # noqa: TC003
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import msgspec

from penstock.cache.settings import CacheSettings  # noqa: TC001
from penstock.config.keys import Flag, Gib, Number, String, TierOption, Value, Whole
from penstock.config.shared_stores import (
    ANYWHERE,
    CLIENT_SETTINGS,
    UNIX,
    port_range,
    require_address,
    require_host,
    require_name,
    require_socket,
)
from penstock.errors import ConfigError
from penstock.extensions import OTHER_TIERS
from penstock.vocabulary.keys import ALGORITHMS, FIELD_BYTES_MAX, KEPT, KeyChain, Namespace, frame
from penstock.vocabulary.planes import DTYPE_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """`[routing]`: how the router chooses instances; weights are in cached blocks of a prompt."""

    cached_weight: float = 1.0
    """What a leading block of the prompt is worth that an instance has in any tier."""
    load_weight: float = 8.0
    """What each request under way counts against an instance: a long queue outweighs a hit."""
    computing_weight: float = 32.0
    """What counts against a decode instance while no prefill instance can compute for it."""
    failed_weight: float = 32.0
    """What counts against a prefill instance for each prompt that it failed to hand over lately."""
    failed_s: float = 10.0
    """How long such a failure counts."""
    equal_blocks: float = 1.0
    """Instances that differ by no more than this in worth get requests in turn. All conversations
    share a start, such as the first lines of a chat template, which would otherwise send all of
    them to one instance."""
    handoff_tokens_min: int = 0
    """A prompt of which decode has all but so many tokens, or fewer, is not started on a prefill
    instance; 0: a block."""
    attempts_max: int = 3
    """How many instances a request is sent to, one after the other, if they are lost."""


SETTING = "cache.salt"
SALT_DOMAIN = b"penstock.salt.v1"
SECRET_BYTES_MIN = 16
"""Who has a key can try secrets until one gives it, so a short or guessable one is none."""
SECRET_BYTES_MAX = 4_096
_PLACE = re.compile(r"file:/[^\0]+|env:[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_TENANTS_KEPT = 1_024
"""As many as namespaces whose hashes are kept at hand."""


def require_salt(place: object, *, algorithm: str) -> None:
    """Refuses what names no place of a secret, or would not keep it; empty: there is none.

    Raises `ConfigError`: it does not show the value, which may be the secret itself.
    """
    if place and not (isinstance(place, str) and _PLACE.fullmatch(place)):
        said = f"{len(place)} characters" if isinstance(place, str) else type(place).__name__
        raise ConfigError(
            SETTING,
            f'is {said} that name no place, must be "file:/ABSOLUTE/PATH" or "env:NAME", where '
            "the secret is",
        )
    if place and algorithm != "sha256":
        raise ConfigError(
            SETTING,
            f"is given while cache.hash is {algorithm!r}, must be 'sha256': from keys of another "
            "hash the secret could be found",
        )


@lru_cache(maxsize=_TENANTS_KEPT)
def salted_tenant(place: str, tenant: str) -> str:
    """The tenant as the namespace of keys has it: only who knows the secret can compute it.

    Raises `ConfigError`: the secret cannot be read, or is too short.
    """
    message = frame(SALT_DOMAIN) + frame(tenant.encode("utf-8"))
    return f"salted:{hmac.digest(_secret(place), message, hashlib.sha256).hex()}"


@lru_cache(maxsize=16)
def _secret(place: str) -> bytes:
    kind, _, name = place.partition(":")
    found = _in_file(Path(name)) if kind == "file" else os.environb.get(name.encode(), b"")
    if kind == "env" and not found:
        raise ConfigError(SETTING, f"is {place!r}, a variable that is not set, or is empty")
    found = found.strip()
    if not SECRET_BYTES_MIN <= len(found) <= SECRET_BYTES_MAX:
        raise ConfigError(
            SETTING,
            f"is {place!r}, where {len(found)} bytes are, must be from {SECRET_BYTES_MIN} to "
            f"{SECRET_BYTES_MAX}, chosen at random, as by `openssl rand -hex 32`",
        )
    return found


def _in_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            # One byte more than is allowed, and what surrounds it: a file that is too long is seen.
            return file.read(SECRET_BYTES_MAX + 64)
    except OSError as error:
        raise ConfigError(
            SETTING, f"is 'file:{path}', which cannot be read: {error.strerror}"
        ) from None


DEVICE_NAME = "device"
"""The name of the device tier, which a file configures in `[cache]`."""
UNKNOWN = "unknown"
"""The value in a namespace where the weights version or the KV type was not given."""
LAYER_WISE = ("auto", "off")
"""Whether a step may compute on loads that are still arriving, layer by layer."""
BLOCKS_MAX = 2**31 - 1
"""Slot numbers are kept in 32-bit integers."""
NOT_PERSISTED = (
    "is not given: nothing is kept beyond the process, and the tiers that do so stay off, since "
    "blocks of other weights could be taken for those of this model"
)
"""What is wrong with a stored tier while the weights version is not known."""
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 2048
"""Submitting a step of an 8B model takes 14 ms of a CPU, in which an H200 computes 700 tokens."""
UNSIZED_BLOCKS = BLOCKS_MAX
"""The slots of a tier that is given a size in GiB, until it is known how large a block is."""

LOOPBACK = "127.0.0.1"
KEY_VARIABLE = "PENSTOCK_API_KEY"
"""The environment variable that may hold the API key."""
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")

_SHARED_OPTIONS = {
    "gib": TierOption(Gib(minimum=1 / 1024, maximum=1 << 20), 256.0),
    "ask_ms": TierOption(Number(minimum=1, maximum=10_000), 50.0),
    "timeout_s": TierOption(Number(minimum=0.01, maximum=600), 2.0),
    "threads": TierOption(Whole(minimum=1, maximum=64), 4),
}
"""What every kind of shared store has."""
_COMPRESSION = TierOption(String(choices=("off", "zstd")), "off")
NOT_COMPRESSED = {
    "memory": "its blocks are in memory, where nothing is gained",
    "host": "its blocks are in memory, and are copied at more than the rate of compression",
    "disk": "slots of its files have one size, so compressed blocks would take as much room",
    "mooncake": "its links are quicker than compression",
}
"""Kinds without the key `compression`, and why."""
TIER_KINDS: Mapping[str, Mapping[str, TierOption]] = {
    "memory": {},
    "host": {
        "gib": TierOption(Gib(minimum=0, maximum=65_536), 0.0),
        "huge_pages": TierOption(String(choices=("auto", "never")), "auto"),
        "numa_node": TierOption(Whole(minimum=-1, maximum=1_023), -1),
    },
    "disk": {
        "path": TierOption(String(), None),
        "gib": TierOption(Gib(minimum=1 / 1024, maximum=1 << 20), None),
        "threads": TierOption(Whole(minimum=4, maximum=8), 6),
        "key_file": TierOption(String(), ""),
        "other_versions": TierOption(String(choices=("refuse", "reclaim")), "refuse"),
    },
    "redis": {
        "url": TierOption(String(), None),
        "password_file": TierOption(String(), ""),
        "password_env": TierOption(String(), ""),
        "sentinel": TierOption(String(), ""),
        "sentinel_password_file": TierOption(String(), ""),
        "sentinel_password_env": TierOption(String(), ""),
        "cluster": TierOption(Flag(), default=False),
        "ca_file": TierOption(String(), ""),
        "certificate_file": TierOption(String(), ""),
        "key_file": TierOption(String(), ""),
        "ttl_s": TierOption(Number(minimum=0, maximum=31_536_000), 0.0),
        "compression": _COMPRESSION,
        **_SHARED_OPTIONS,
    },
    "mooncake": {
        "master": TierOption(String(), None),
        "host": TierOption(String(), ""),
        "protocol": TierOption(String(choices=("tcp", "rdma")), "tcp"),
        "devices": TierOption(String(), ""),
        "segment_gib": TierOption(Gib(minimum=0, maximum=65_536), 0.0),
        "replicas": TierOption(Whole(minimum=1, maximum=16), 1),
        "staging_mib": TierOption(Whole(minimum=1, maximum=1024), 32),
        **_SHARED_OPTIONS,
    },
    "objects": {
        "url": TierOption(String(), None),
        "endpoint": TierOption(String(), ""),
        "region": TierOption(String(), ""),
        "key_id_file": TierOption(String(), ""),
        "key_id_env": TierOption(String(), ""),
        "secret_file": TierOption(String(), ""),
        "secret_env": TierOption(String(), ""),
        "ca_file": TierOption(String(), ""),
        "refresh_s": TierOption(Number(minimum=0.1, maximum=3600), 2.0),
        "compression": _COMPRESSION,
        **_SHARED_OPTIONS,
        "ask_ms": TierOption(Number(minimum=1, maximum=10_000), 200.0),
        "timeout_s": TierOption(Number(minimum=0.01, maximum=600), 30.0),
        "threads": TierOption(Whole(minimum=1, maximum=64), 8),
    },
}
"""The built-in kinds of tiers, with the keys that only a tier of this kind has."""
SHARED_KINDS = frozenset({"redis", "mooncake", "objects"})
"""Kinds that many engines share: somebody else keeps their blocks."""
STORED_KINDS = frozenset({"disk"}) | SHARED_KINDS
"""Kinds that the store process serves: slower than host memory, and their blocks outlive it."""


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
        if type(tenant) is type(adapter) is type(kv_group) is str:
            return _namespace(self, tenant, adapter, kv_group)
        return _namespace.__wrapped__(self, tenant, adapter, kv_group)  # Which refuses it.


@lru_cache(maxsize=KEPT)
def _namespace(model: ModelSettings, tenant: str, adapter: str, kv_group: str) -> Namespace:
    """Made once: every request needs it, and a namespace checks itself."""
    return Namespace(
        model=model.name,
        weights_version=model.weights_version or UNKNOWN,
        kv_dtype=model.kv_dtype or UNKNOWN,
        kv_scales=model.kv_scales,
        rotary=model.rotary,
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
        for name in self.options if self.name in STORED_KINDS else ():
            value = str(self.options[name])
            if (name == "path" or name.endswith("_file")) and value and not value.startswith("/"):
                raise ConfigError(
                    name, f"is {value!r}, must be an absolute path: several processes use it"
                )
        if self.name in STORED_KINDS and self.required:
            raise ConfigError(
                "required",
                f"is true, must be false for kind {self.name!r}: the cache is opened before its "
                "store process has answered",
            )
        if self.name in CLIENT_SETTINGS:
            CLIENT_SETTINGS[self.name](self.options)
        if self.name == "disk" and not str(self.options["path"]).strip("/."):
            raise ConfigError(
                "path",
                f"is {self.options['path']!r}, must be the absolute path of a folder of its own",
            )

    @property
    def gib(self) -> float:
        """The size of the tier; 0 if it is given in blocks."""
        return float(self.options.get("gib", 0))


AUTO = "auto"
"""Shared memory between engines on one machine, NIXL between machines."""
SHARED_MEMORY = "shared_memory"
NIXL = "nixl"
"""The data transports that are built in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTable:
    """`[handoff]`: how KV travels from a prefill instance to a decode instance, and its bounds."""

    transport: str = AUTO
    handoff_s: float = 60.0
    """After which time decode computes a prompt itself that it did not get."""
    lease_s: float = 120.0
    """How long prefill keeps a prompt's blocks after decode last asked for it."""
    park_s: float = 60.0
    """How long a claim waits for a prompt that was not offered yet."""
    resend_s: float = 0.25
    resend_cap_s: float = 4.0
    resend_limit_s: float = 30.0
    # A step on a CPU may take seconds, in which a scheduler sends nothing; the router sees at once
    # that a process has died.
    ping_s: float = 2.0
    suspect_s: float = 20.0
    berth_bytes: int = 4 << 20
    """The largest part of a prompt that travels at once."""
    berth_count: int = 0
    """Parts under way between two ranks; 0: 8 on CPUs, 32 on GPUs."""
    landing_bytes_max: int = 4 << 30
    """Memory of a decode rank for parts that arrive, from all prefill ranks."""
    retired_bytes_max: int = 1 << 30
    """As much of it may wait for prefill ranks that were lost to be seen dead."""
    peers_max: int = 16
    """Instances that one has pairs open with at a time."""
    idle_s: float = 60.0
    """A pair that no request has used so long is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTable:
    """`[engine]`: the model, and how it is computed."""

    model: str = ""
    """A folder with a checkpoint or a `.gguf` file; empty: the default model."""
    role: str = "both"
    prefill_tp: int = 0
    """Ranks of an instance that computes prompts for another one; 0: each computes its own."""
    decode_tp: int = 0
    """Ranks of an instance that answers what another one has computed."""
    handoff_host: str = ""
    """The host of this machine at which instances of others reach its instances for handoffs;
    empty: only instances of this machine do."""
    dtype: str = "float32"
    device: str = "cpu"
    graphs: bool = True
    """Whether a GPU replays decode steps as CUDA graphs."""
    threads: int = 0
    """Of torch, in each rank; 0: the cores of the machine, divided by the ranks."""
    step_tokens: int = 0
    """Tokens of a step at most; 0: as many as suit the device."""
    step_requests: int = 64
    waiting_max: int = 1024

    def __post_init__(self) -> None:
        if _DEVICE.fullmatch(self.device) is None:
            raise ConfigError(
                "engine.device",
                f"is {self.device!r}, must be 'cpu', 'cuda' or 'cuda:N', the N-th GPU from 0 on",
            )
        if bool(self.prefill_tp) is not bool(self.decode_tp):
            raise ConfigError(
                "engine.prefill_tp",
                f"is {self.prefill_tp} with engine.decode_tp {self.decode_tp}, must both be 0 or "
                "both be given: prompts that one instance computes, another one answers",
            )
        if self.handoff_host:
            require_host("engine.handoff_host", self.handoff_host)
            if self.handoff_host in ANYWHERE or self.handoff_host == "::":
                raise ConfigError(
                    "engine.handoff_host",
                    f"is {self.handoff_host!r}, must be a host that other machines can dial",
                )
        if 0 < self.step_tokens < self.step_requests:
            raise ConfigError(
                "engine.step_tokens",
                f"is {self.step_tokens}, must be 0 or at least engine.step_requests, "
                f"{self.step_requests}: every running request gets a token a step",
            )

    @property
    def tokens_a_step(self) -> int:
        """Tokens of a step at most, chosen for the device where `step_tokens` is 0."""
        suited = CPU_STEP_TOKENS if self.device == "cpu" else GPU_STEP_TOKENS
        return self.step_tokens or max(suited, self.step_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTable:
    """`[serve]`: the address, and what clients may do."""

    host: str = LOOPBACK
    port: int = 8000
    api_key: str = field(default="", repr=False)
    api_key_file: str = ""
    """A file that holds the key, instead of `api_key`."""
    allowed_hosts: str = ""
    """Further names of this server in `Host` headers, separated by commas."""
    instances: int = 1
    prefill: int = 0
    """Instances that compute prompts for others; 0: as many as `instances`, if the ranks of a
    role are given."""
    decode: int = 0
    """Instances that answer what those have computed."""
    body_bytes_max: int = 1 << 20
    requests_max: int = 512
    connections_max: int = 1024
    header_s: float = 10.0
    """How long the head of a request may take to arrive."""
    body_s: float = 60.0
    """How long the body of a request may take to arrive."""
    drain_s: float = 20.0
    """How long answers may go on after the server was asked to stop."""
    silence_s: float = 30.0
    """How long a process of this server may be silent before it is taken for lost. One whose
    connection is closed, as by its end, is lost at once; this is for those that stand still, and
    longer than machines do now and then."""
    when_paused: str = "refuse"
    """What becomes of requests while the server is paused: `refuse` (status 503) or `wait`."""
    paused_wait_s: float = 600.0
    """How long they wait, before they are refused all the same."""
    log_level: str = "info"
    log_json: bool = False
    router: str = ""
    """Where a router lets instances in that other commands start; empty: only its own."""
    number: int = 0
    """Which of the router's instances, or pairs, this one is."""
    ports: str = "0"
    """Where the processes of this command listen for other machines, beside the addresses that are
    settings of their own: a port, or a range such as `5200-5299`; 0: any."""
    keys_file: str = ""
    """The keys of this machine and its peers, for roles on several machines."""
    record: str = ""
    """A file that requests are recorded in, for `penstock replay`; empty: none."""
    record_mib: int = 1024
    """Where recording ends: a GiB names 67 million blocks."""
    tracing: bool = False
    """Whether each request becomes a span for OpenTelemetry."""

    def __post_init__(self) -> None:
        if self.host.startswith(UNIX):
            require_socket("serve.host", self.host)
        else:
            require_host("serve.host", self.host)
        if bool(self.prefill) is not bool(self.decode):
            raise ConfigError(
                "serve.prefill",
                f"is {self.prefill} with serve.decode {self.decode}, must both be 0 or both be "
                "given: prompts that one instance computes, another one answers",
            )
        for name in filter(None, self.allowed_hosts.split(",")):
            require_name("serve.allowed_hosts", name.strip())
        port_range(self.ports)
        if self.router:
            require_address("serve.router", self.router)
        if self.api_key and self.api_key_file:
            raise ConfigError(
                "serve.api_key_file",
                f"is {self.api_key_file!r} beside serve.api_key, must be the only one of the two",
            )


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
    salt: str = ""
    """Where the secret is that keys depend on, `file:/PATH` or `env:NAME`; empty: there is none."""
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
    routing: RoutingTable | None = None

    def __post_init__(self) -> None:
        if self.hash not in ALGORITHMS:
            known = ", ".join(ALGORITHMS)
            raise ConfigError("hash", f"is {self.hash!r}, must be one of {known}")
        require_salt(self.salt, algorithm=self.hash)
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
        self._require_kinds_that_suit()
        self._require_stored_tiers()
        if self.equal_ranks:
            self._require_shared_hub()
        if self.cache.device is not None and self.cache.device.name != DEVICE_NAME:
            raise ConfigError(
                "cache.device.name", f"is {self.cache.device.name!r}, must be {DEVICE_NAME!r}"
            )

    def _require_kinds_that_suit(self) -> None:
        for tier, kind in zip(self.cache.tiers, self.tier_kinds, strict=True):
            if kind.gib and tier.slot_count != UNSIZED_BLOCKS:
                raise ConfigError(
                    f"tier {tier.name!r}: slot_count",
                    f"is {tier.slot_count}, must be {UNSIZED_BLOCKS} (not known yet) while gib "
                    f"is {kind.gib}",
                )
            if tier.stored is not (kind.name in STORED_KINDS):
                raise ConfigError(
                    f"tier {tier.name!r}: stored",
                    f"is {tier.stored}, must be {not tier.stored} for kind {kind.name!r}",
                )

    def _require_stored_tiers(self) -> None:
        for index, kind in enumerate(self.tier_kinds):
            if kind.name in STORED_KINDS and self.tier_kinds[0].name != "host":
                raise ConfigError(
                    f"tiers[{index}].kind",
                    f"is {kind.name!r} below tiers[0].kind {self.tier_kinds[0].name!r}, must be "
                    "below 'host': the store process reads and writes that memory",
                )
            quotas = self.cache.tiers[index].quotas
            if quotas and kind.name in SHARED_KINDS:
                raise ConfigError(
                    f"tiers[{index}].quotas",
                    f"are {dict(quotas)}, must be left out for kind {kind.name!r}: what a shared "
                    "store keeps is its own choice, and it does not count by tenant",
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

    @property
    def persists(self) -> bool:
        """Whether blocks may outlive the process: it is known which weights they belong to."""
        return bool(self.model.weights_version)

    def namespace(self, *, tenant: str = "", adapter: str = "", kv_group: str = "") -> Namespace:
        """The namespace of keys for one tenant, adapter and KV group, with the secret salt.

        Raises:
            ConfigError: the place of the salt cannot be read.
        """
        namespace = self.model.namespace(tenant=tenant, adapter=adapter, kv_group=kv_group)
        if not self.salt:
            return namespace
        return replace(namespace, tenant=salted_tenant(self.salt, tenant))

    def key_chain(self, *, tenant: str = "", adapter: str = "", kv_group: str = "") -> KeyChain:
        """An empty chain that gives a request's blocks their keys.

        Raises:
            ConfigError: the place of the salt cannot be read.
        """
        return KeyChain(
            self.namespace(tenant=tenant, adapter=adapter, kv_group=kv_group),
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
