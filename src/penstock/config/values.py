"""A configuration as values: what the rest of Penstock is built from.

Each field says what it is in a file: its type and bounds, its default, and under it what it means,
as `penstock.vocabulary.schema` explains.

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

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from penstock.cache.settings import BLOCKS_MAX, COUNT_MAX, CacheSettings, WriteKind
from penstock.config.shared_stores import (
    ANYWHERE,
    CLIENT_SETTINGS,
    PORT_MAX,
    UNIX,
    DiskOptions,
    HostOptions,
    MooncakeSettings,
    ObjectSettings,
    OtherStoreSettings,
    PeerSettings,
    RedisSettings,
    port_range,
    require_address,
    require_host,
    require_name,
    require_socket,
)
from penstock.errors import ConfigError
from penstock.extensions import OTHER_TIERS, OTHER_TRANSPORTS
from penstock.vocabulary.keys import ALGORITHMS, FIELD_BYTES_MAX, KEPT, KeyChain, Namespace, frame
from penstock.vocabulary.planes import DTYPE_NAMES
from penstock.vocabulary.schema import (
    Bytes,
    Number,
    String,
    Text,
    TierOption,
    Value,
    Whole,
    YesNo,
    settings_of,
)

_Weight: TypeAlias = Annotated[float, Number(minimum=0, maximum=1_000_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """`[routing]`: how the router chooses instances; weights are in cached blocks of a prompt."""

    cached_weight: _Weight = 1.0
    """Worth of a leading block of the prompt that an instance has, in any tier."""
    load_weight: _Weight = 8.0
    """Each request under way counts so much against an instance.

    A long queue outweighs a hit."""
    computing_weight: _Weight = 32.0
    """Counts against a decode instance while no prefill instance can compute for it."""
    failed_weight: _Weight = 32.0
    """Counts against a prefill instance for each prompt that it failed to compute lately."""
    failed_s: Annotated[float, Number(minimum=0, maximum=86_400)] = 10.0
    """How long such a failure counts."""
    equal_blocks: _Weight = 1.0
    """Instances that differ by no more than this get requests in turn.

    All conversations share a start, such as the first lines of a chat template, which would
    otherwise send all of them to one instance."""
    handoff_tokens_min: Annotated[int, Whole(minimum=0, maximum=COUNT_MAX)] = 0
    """A prompt of which decode has all but so many tokens is not started on a prefill instance;
    0: a block."""
    attempts_max: Annotated[int, Whole(minimum=1, maximum=16)] = 3
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

NOT_COMPRESSED = {
    "memory": "its blocks are in memory, where nothing is gained",
    "host": "its blocks are in memory, and are copied at more than the rate of compression",
    "disk": "slots of its files have one size, so compressed blocks would take as much room",
    "mooncake": "its links are quicker than compression",
    "peers": "its blocks are in the memory of engines",
}
"""Kinds without the key `compression`, and why."""
TIER_KINDS: Mapping[str, Mapping[str, TierOption]] = {
    "memory": {},
    "host": settings_of(HostOptions),
    "disk": settings_of(DiskOptions),
    "redis": settings_of(RedisSettings),
    "mooncake": settings_of(MooncakeSettings),
    "objects": settings_of(ObjectSettings),
    "shared": settings_of(OtherStoreSettings),
    "peers": settings_of(PeerSettings),
}
"""The built-in kinds of tiers, with the keys that only a tier of this kind has."""
PEERS = "peers"
"""The kind whose blocks lie in the host memory of engines."""
SHARED_KINDS = frozenset(CLIENT_SETTINGS)
"""Kinds that many engines share: somebody else keeps their blocks."""
STORED_KINDS = frozenset({"disk"}) | SHARED_KINDS
"""Kinds that the store process serves: slower than host memory, and their blocks outlive it."""


TIER_KIND = String(choices=tuple(TIER_KINDS), others=OTHER_TIERS)


def tier_options(kind: str, *, place: str = "kind") -> Mapping[str, TierOption]:
    """The keys that only tiers of this kind have.

    Raises:
        ConfigError: there is no such kind, or its entry point is broken; `place` is the setting.
    """
    TIER_KIND.read(place, kind)
    factory = None if kind in TIER_KINDS else OTHER_TIERS.find(kind, place)
    return factory.options if factory else TIER_KINDS[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What every key of one engine says about the model; `Namespace` explains the fields."""

    name: Text
    """The model."""
    weights_version: Text = ""
    """Usually a digest of the weights; empty: unknown."""
    kv_dtype: Annotated[str, String(choices=("", *DTYPE_NAMES))] = ""
    """Element type of the KV, or a short name such as `bf16`; empty: that of the arrays given to
    `penstock.open`, otherwise `unknown`."""
    kv_scales: Text = ""
    """Digest of the scales of quantised KV."""
    rotary: Text = ""
    """Rotary configuration, if not the model's own."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("model.name", "is '', must name the model: keys are made from it")
        for name, setting in settings_of(ModelSettings).items():
            value = setting.key.read(f"model.{name}", getattr(self, name))
            size = len(str(value).encode("utf-8"))
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

    name: Annotated[str, String(), "kind"]
    """`memory`, `host`, `disk`, `redis`, `mooncake`, `objects`, `shared`, `peers`, or an installed
    one."""
    options: Mapping[str, Value] = field(default_factory=dict)
    required: YesNo = False
    """True (not for stored tiers): no memory for the tier is an error; false: the cache runs
    without it."""

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
            CLIENT_SETTINGS[self.name](**self.options)
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
"""`gpu` or `shared_memory` between engines on one machine, NIXL between machines."""
SHARED_MEMORY = "shared_memory"
GPU = "gpu"
NIXL = "nixl"
"""The data transports that are built in."""
BERTH_BYTES_MIN = 4096
_Patience: TypeAlias = Annotated[float, Number(minimum=0.1, maximum=86_400)]
_Seconds: TypeAlias = Annotated[float, Number(minimum=0.1, maximum=3_600)]
_Memory: TypeAlias = Annotated[int, Bytes(minimum=1 << 20, maximum=1 << 44)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTable:
    """`[handoff]`: how KV travels from a prefill instance to a decode instance, and its bounds."""

    transport: Annotated[
        str, String(choices=(AUTO, SHARED_MEMORY, GPU, NIXL), others=OTHER_TRANSPORTS)
    ] = AUTO
    """How KV gets from prefill to decode instances; `auto`: on one machine by `gpu` (memory of
    the GPU where both can map it, else of the host), otherwise by NIXL; others can be installed."""
    handoff_s: _Patience = 60.0
    """After which time decode computes a prompt itself that it did not get."""
    lease_s: _Patience = 120.0
    """How long prefill keeps a prompt's blocks after decode last asked for it."""
    park_s: _Patience = 60.0
    """How long a claim waits for a prompt that was not offered yet."""
    resend_s: Annotated[float, Number(minimum=0.01, maximum=3_600)] = 0.25
    """A message without an answer is sent again after this, then after twice as long, …"""
    resend_cap_s: _Seconds = 4.0
    """… but at least this often; at least 8 times `resend_s`."""
    resend_limit_s: _Seconds = 30.0
    """A peer that takes longer than `resend_cap_s` to answer is asked as seldom as it answers, but
    at least this often."""
    # A step on a CPU may take seconds, in which a scheduler sends nothing; the router sees at once
    # that a process has died.
    ping_s: _Seconds = 2.0
    """A peer that was silent so long is asked whether it is there."""
    suspect_s: _Seconds = 20.0
    """A peer that was silent so long is suspected."""
    berth_bytes: Annotated[int, Bytes(minimum=0, maximum=1 << 30)] = 0
    """The largest part of a prompt that travels at once, 4 KiB or more; a block of one layer must
    fit. 0: 4 MiB on CPUs, 16 MiB on GPUs."""
    berth_count: Annotated[int, Whole(minimum=0, maximum=1_024)] = 0
    """Parts under way between two ranks; 0: 8, in vLLM on CPUs 16, and on GPUs up to 32 of them
    that are smaller."""
    landing_bytes_max: _Memory = 4 << 30
    """Memory of a decode rank for parts that arrive."""
    retired_bytes_max: _Memory = 1 << 30
    """As much of it may wait until lost prefill ranks are seen dead."""
    peers_max: Annotated[int, Whole(minimum=1, maximum=1_024)] = 16
    """Instances that one hands over with at a time; each pair gets its share of
    `landing_bytes_max`."""
    idle_s: _Patience = 60.0
    """A pair that no request has used so long is closed."""

    def __post_init__(self) -> None:
        if 0 < self.berth_bytes < BERTH_BYTES_MIN:
            raise ConfigError(
                "handoff.berth_bytes",
                f"is {self.berth_bytes}, must be at least {BERTH_BYTES_MIN}, or 0 for the default",
            )


_Ranks: TypeAlias = Annotated[int, Whole(minimum=0, maximum=1_024)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTable:
    """`[engine]`: the model, and how it is computed."""

    model: Text = ""
    """Checkpoint folder or `.gguf` file; empty: the default model."""
    role: Annotated[str, String(choices=("both", "prefill", "decode", "router"))] = "both"
    """What `penstock serve` starts."""
    prefill_tp: _Ranks = 0
    """Ranks of a prefill instance; 0: each instance computes its own prompts."""
    decode_tp: _Ranks = 0
    """Ranks of a decode instance; both or neither, instead of `cache.ranks`."""
    handoff_host: Text = ""
    """Host of this machine at which instances of other machines reach its instances for handoffs;
    empty: only those of this machine do."""
    dtype: Annotated[str, String(choices=("float32", "bfloat16", "float16"))] = "float32"
    """Of weights and KV; sets `model.kv_dtype`."""
    device: Text = "cpu"
    """`cpu`, `cuda` or `cuda:N`. `cuda`: each rank has a GPU; prefill and decode instances have
    GPUs of their own if there are enough."""
    graphs: YesNo = True
    """Whether decode steps are CUDA graphs; never with several ranks."""
    threads: Annotated[int, Whole(minimum=0, maximum=1_024)] = 0
    """Torch threads of each rank; 0: cores divided by all ranks. They wait for each other asleep;
    with `OMP_WAIT_POLICY=ACTIVE` in the environment spinning, quicker on idle cores."""
    step_tokens: Annotated[int, Whole(minimum=0, maximum=65_536)] = 0
    """Tokens in a step, at least `step_requests`; 0: 512 on CPUs, 2048 on GPUs."""
    step_requests: Annotated[int, Whole(minimum=1, maximum=4_096)] = 64
    """Requests in a step."""
    waiting_max: Annotated[int, Whole(minimum=1, maximum=COUNT_MAX)] = 1024
    """Waiting requests of each instance; more are refused."""

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


LOG_LEVELS = ("debug", "info", "warning", "error")
_Instances: TypeAlias = Annotated[int, Whole(minimum=0, maximum=16)]
_Many: TypeAlias = Annotated[int, Whole(minimum=1, maximum=65_536)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTable:
    """`[serve]`: the address, and what clients may do."""

    host: Text = LOOPBACK
    """Address or host name to listen on; `unix:/PATH`: a socket, without `port`."""
    port: Annotated[int, Whole(minimum=0, maximum=PORT_MAX)] = 8000
    """0: a free one."""
    ports: Text = "0"
    """Where this command's processes listen over TCP for other machines: a port, or a range such as
    `"5200-5299"`; `"0"`: the kernel chooses."""
    api_key: Text = field(default="", repr=False)
    """API key; empty: everybody is served. Never printed."""
    api_key_file: Text = ""
    """File with the API key."""
    allowed_hosts: Text = ""
    """Further names of this server, such as that of a proxy, separated by commas."""
    instances: Annotated[int, Whole(minimum=1, maximum=16)] = 1
    """Copies of the model, or of each role, each with its own cache."""
    prefill: _Instances = 0
    """Prefill instances; this and `decode`, or neither; 0: `instances`, if `engine.prefill_tp` is
    given."""
    decode: _Instances = 0
    """Decode instances."""
    body_bytes_max: Annotated[int, Bytes(minimum=1_024, maximum=1 << 30)] = 1 << 20
    """Longer requests get status 413."""
    requests_max: _Many = 512
    """Requests in progress; more get status 429."""
    connections_max: _Many = 1024
    """Open connections."""
    header_s: _Seconds = 10.0
    """Time for the head of a request."""
    body_s: _Seconds = 60.0
    """Time for its body."""
    drain_s: Annotated[float, Number(minimum=0, maximum=86_400)] = 20.0
    """Time for answers to end when stopping."""
    silence_s: Annotated[float, Number(minimum=1, maximum=3_600)] = 30.0
    """A server, instance or rank of this command that was silent so long is taken for lost; one
    that has ended, at once.

    This is for processes that stand still, and longer than machines do now and then."""
    when_paused: Annotated[str, String(choices=("refuse", "wait"))] = "refuse"
    """Requests to a paused server: status 503, or they wait."""
    paused_wait_s: _Patience = 600.0
    """How long they wait.

    Then they are refused all the same."""
    balance_s: Annotated[float, Number(minimum=0, maximum=86_400)] = 0.0
    """Prefill and decode instances change their roles by load, one in so many seconds at most; 0:
    never, 30 is good.

    `engine.step_requests` says how many answers a decode instance has room for."""
    log_level: Annotated[str, String(choices=LOG_LEVELS)] = "info"
    """Level of the log."""
    log_json: YesNo = False
    """One JSON object a line."""
    router: Text = ""
    """`tcp://HOST:PORT` of the role `router`."""
    number: Annotated[int, Whole(minimum=0, maximum=1_023)] = 0
    """Number of this command's first instance at the router."""
    keys_file: Text = ""
    """Keys of the machines, needed off the loopback interface."""
    record: Text = ""
    """File to record requests in; if it exists, `NAME-2` and so on; also for vLLM's connector."""
    record_mib: Annotated[int, Whole(minimum=1, maximum=1 << 20)] = 1024
    """Size at which the recording ends.

    A GiB names 67 million blocks."""
    tracing: YesNo = False
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
    hash: Annotated[str, String(choices=tuple(ALGORITHMS))] = "sha256"
    """Hash of the keys; `xxh3_128` only if all requests trust each other."""
    salt: Text = ""
    """`file:/PATH` or `env:NAME`: where a secret of 16 to 4096 bytes is that keys depend on."""
    tier_kinds: tuple[TierKind, ...] = ()
    """One for each of `cache.tiers`, in the same order."""
    equal_ranks: YesNo = False
    """All ranks hold equal bytes (latent attention) and share the first tier, which must be of kind
    `"host"`."""
    layer_wise: Annotated[str, String(choices=("auto", "off"))] = "off"
    """`auto`: loads onto a GPU fill layer by layer, a little slower; `penstock serve` with one rank
    joins them, without a measured gain.

    A step may then compute on loads whose layers will arrive in time. `off`: a request waits until
    its loads have ended, which are made whole."""
    device_wait_s: Annotated[float, Number(minimum=0.001, maximum=3_600)] = 30.0
    """A device that ends no copy (in `penstock serve`: no step) for this long counts as stuck."""
    handoff: HandoffTable | None = None
    engine: EngineTable | None = None
    serve: ServeTable | None = None
    routing: RoutingTable | None = None

    def __post_init__(self) -> None:
        for name in ("hash", "layer_wise"):
            settings_of(Config)[name].key.read(name, getattr(self, name))
        require_salt(self.salt, algorithm=self.hash)
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
        self._require_peers()
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

    def _require_peers(self) -> None:
        """Nobody writes into the memory of another engine, and one way there is enough."""
        kinds = [kind.name for kind in self.tier_kinds]
        for index, (tier, kind) in enumerate(zip(self.cache.tiers, kinds, strict=True)):
            reads_only = tier.write.kind is WriteKind.NONE
            if kind == PEERS and not reads_only:
                raise ConfigError(
                    f"tiers[{index}].write",
                    f"is {tier.write.kind.value!r}, must be 'none' for kind 'peers': engines read "
                    "blocks out of each other's memory, and write none into it",
                )
            if tier.stored and reads_only and kind != PEERS:
                raise ConfigError(
                    f"tiers[{index}].write",
                    f"is 'none', which only kind 'peers' can have: this engine would write nothing "
                    f"into a tier of kind {kind!r}",
                )
        if kinds.count(PEERS) > 1:
            raise ConfigError(
                f"tiers[{len(kinds) - 1 - kinds[::-1].index(PEERS)}].kind",
                "is 'peers' a second time, must be so once: one tier can name all of them",
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
    def from_builtins(cls, tree: object) -> "Config":
        """The configuration that `to_builtins` returned, in whatever process.

        Raises:
            ConfigError: the tree is none, or one of its settings is wrong.
        """
        try:
            return msgspec.convert(tree, cls)
        except msgspec.ValidationError as error:
            raise ConfigError("config", f"cannot be read: {error}") from error
