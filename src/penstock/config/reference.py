"""What each key of a configuration file means, and tables of all keys for a reader.

`penstock config keys` prints these tables and the documentation site shows them. Ranges come from
`schema` and `values`, defaults from the settings; `MEANINGS` has the one sentence that no other
code holds. `tests/test_config.py` requires a sentence for every key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.toml import (
    CACHE_KEYS,
    ENGINE_KEYS,
    HANDOFF_KEYS,
    MODEL_KEYS,
    ROUTING_KEYS,
    SERVE_KEYS,
    TIER_KEYS,
)
from penstock.config.values import TIER_KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.config.keys import TierOption
    from penstock.config.toml import Setting

KEYS: Mapping[str, Mapping[str, Setting | TierOption]] = {
    "model": MODEL_KEYS,
    "cache": CACHE_KEYS,
    "tiers": TIER_KEYS,
    **{f"tiers of kind {kind}": keys for kind, keys in TIER_KINDS.items() if keys},
    "engine": ENGINE_KEYS,
    "serve": SERVE_KEYS,
    "handoff": HANDOFF_KEYS,
    "routing": ROUTING_KEYS,
}
"""The keys of each table of the file."""

_ROOM = {
    "eviction": "eviction policy; others can be installed",
    "low_watermark": "share of free slots below which blocks are evicted in the background",
    "high_watermark": "share of free slots at which that stops",
    "quotas": 'share of the slots for each tenant; `"*"`: each tenant that is not named',
}
_SHARED = {
    "gib": "how much of the store this engine keeps track of; the store sets its own size",
    "ask_ms": "time to answer which blocks are there; a request waits at most twice as long",
    "timeout_s": "how long one read or write may take",
    "threads": "of the store process, for reads and writes",
}
_CA_FILE = "who signed the server's certificate, if not one of the system's authorities"
_COMPRESSION = "whether blocks are written compressed, without loss"
_OR_VARIABLE = "or the environment variable that has it"

MEANINGS: Mapping[str, Mapping[str, str]] = {
    "model": {
        "name": "the model",
        "weights_version": "usually a digest of the weights; empty: unknown",
        "kv_dtype": "element type of the KV, or a short name such as `bf16`; empty: that of the "
        "arrays given to `penstock.open`, otherwise `unknown`",
        "kv_scales": "digest of the scales of quantised KV",
        "rotary": "rotary configuration, if not the model's own",
    },
    "cache": {
        "block_tokens": "tokens in a block",
        "hash": "hash of the keys; `xxh3_128` only if all requests trust each other",
        "salt": "`file:/PATH` or `env:NAME`: where a secret of 16 to 4096 bytes is that keys "
        "depend on",
        "ranks": "ranks that each hold a part of every block",
        "equal_ranks": "all ranks hold equal bytes (latent attention) and share the first tier, "
        'which must be of kind `"host"`',
        "groups": "KV groups of the model",
        "operation_timeout_s": "a copy without a deadline expires after this",
        "operation_blocks_max": "blocks in one copy operation; at most 1818 with a disk",
        "departed_count": "blocks whose reason for leaving is remembered",
        "story_count": "events in the history",
        "event_count": "KV events kept for a reader; then the oldest are dropped",
        "pin_share": "share of a tier that pins may take",
        "hint_share": "share of a tier that blocks may take whose priority one tenant raised",
        "load_gate": "`measured`: blocks are computed where that is quicker than loading them",
        "load_tokens_min": "loads of fewer tokens are skipped; 0: what the engine prefills in 5 ms",
        "rate_age_s": "how long a measured rate is used after its last sample",
        "layer_wise": "`auto`: loads onto a GPU fill layer by layer, a little slower; "
        "`penstock serve` with one rank joins them, without a measured gain",
        "device_wait_s": "a device that ends no copy (in `penstock serve`: no step) for this long "
        "counts as stuck",
        "blocks": "device blocks to manage; 0: the engine manages them, and the four keys below "
        "are refused",
        **_ROOM,
    },
    "tiers": {
        "name": "letters, digits, `-` and `_`; not `device`",
        "kind": "`memory`, `host`, `disk`, `redis`, `mooncake`, `objects`, or an installed one",
        "blocks": "slots; a tier with `gib` has that instead",
        "write": "when blocks are copied in: see above",
        "required": "true (not for stored tiers): no memory for the tier is an error; false: the "
        "cache runs without it",
        "hits": 'for `write = "selective"`: after how many hits a block is copied in',
        **_ROOM,
        "quotas": f"{_ROOM['quotas']}. Not for shared stores",
    },
    "tiers of kind host": {
        "gib": "size of the arena with its checksums; the layout decides how many blocks fit; 0: "
        "use `blocks`",
        "huge_pages": "whether to try huge pages",
        "numa_node": "NUMA node of the memory; -1: any",
    },
    "tiers of kind disk": {
        "path": "absolute path of a folder of its own, writable by nobody else; engines that name "
        "the same folder share it",
        "gib": "room for the blocks of all ranks and engines; on a smaller file system, what it "
        "has",
        "threads": "of the store process, for reads and writes",
        "key_file": "file with a key of 32 bytes: blocks are encrypted; empty: they are not",
        "other_versions": "what to do with files of another format version",
    },
    "tiers of kind redis": {
        "url": "`redis://HOST:PORT/DATABASE`, `rediss://…` with TLS, or `unix:///PATH`; without a "
        "password",
        "password_file": "file with the password",
        "password_env": _OR_VARIABLE,
        "sentinel": "the name of the service; `url` then lists the Sentinels",
        "sentinel_password_file": "file with the password of the Sentinels, if they want one",
        "sentinel_password_env": _OR_VARIABLE,
        "cluster": "whether `url` lists nodes of a cluster",
        "ca_file": _CA_FILE,
        "certificate_file": "the client's certificate",
        "key_file": "the key of that certificate",
        "ttl_s": "values are removed after this time, used or not; 0: when the server needs their "
        "memory",
        "compression": _COMPRESSION,
        **_SHARED,
    },
    "tiers of kind mooncake": {
        "master": "`HOST:PORT` of the master, or `etcd://…`",
        "host": "this machine's name for the others; empty: its address towards the master",
        "protocol": "how values travel",
        "devices": "RDMA devices, separated by commas; empty: all",
        "segment_gib": "memory that this machine gives to the store; 0: others do",
        "replicas": "copies of each value",
        "staging_mib": "memory for each thread, and the most that a value may have",
        **_SHARED,
    },
    "tiers of kind objects": {
        "url": "`s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://ACCOUNT/CONTAINER/PATH` or "
        "`file:///FOLDER`; without keys",
        "endpoint": "`https://HOST:PORT` of a store that speaks S3 and is not Amazon's",
        "region": "of an S3 bucket",
        "key_id_file": "file with the name of an S3 access key",
        "key_id_env": _OR_VARIABLE,
        "secret_file": "file with the secret access key, Azure's account key, or the JSON of a GCS "
        "service account",
        "secret_env": _OR_VARIABLE,
        "ca_file": _CA_FILE,
        "refresh_s": "how often values of others are looked for, while they are asked for",
        "compression": _COMPRESSION,
        **_SHARED,
    },
    "engine": {
        "model": "checkpoint folder or `.gguf` file; empty: the default model",
        "role": "what `penstock serve` starts",
        "prefill_tp": "ranks of a prefill instance; 0: each instance computes its own prompts",
        "decode_tp": "ranks of a decode instance; both or neither, instead of `cache.ranks`",
        "handoff_host": "host of this machine at which instances of other machines reach its "
        "instances for handoffs; empty: only those of this machine do",
        "dtype": "of weights and KV; sets `model.kv_dtype`",
        "device": "`cpu`, `cuda` or `cuda:N`. `cuda`: each rank has a GPU; prefill and decode "
        "instances have GPUs of their own if there are enough",
        "graphs": "whether decode steps are CUDA graphs; never with several ranks",
        "threads": "torch threads of each rank; 0: cores divided by all ranks. They wait for each "
        "other asleep; with `OMP_WAIT_POLICY=ACTIVE` in the environment spinning, quicker on idle "
        "cores",
        "step_tokens": "tokens in a step, at least `step_requests`; 0: 512 on CPUs, 2048 on GPUs",
        "step_requests": "requests in a step",
        "waiting_max": "waiting requests of each instance; more are refused",
    },
    "serve": {
        "host": "address or host name to listen on; `unix:/PATH`: a socket, without `port`",
        "port": "0: a free one",
        "ports": "where this command's processes listen over TCP for other machines: a port, or a "
        'range such as `"5200-5299"`; `"0"`: the kernel chooses',
        "api_key": "API key; empty: everybody is served. Never printed",
        "api_key_file": "file with the API key",
        "allowed_hosts": "further names of this server, such as that of a proxy, separated by "
        "commas",
        "instances": "copies of the model, or of each role, each with its own cache",
        "prefill": "prefill instances; this and `decode`, or neither; 0: `instances`, if "
        "`engine.prefill_tp` is given",
        "decode": "decode instances",
        "body_bytes_max": "longer requests get status 413",
        "requests_max": "requests in progress; more get status 429",
        "connections_max": "open connections",
        "header_s": "time for the head of a request",
        "body_s": "time for its body",
        "drain_s": "time for answers to end when stopping",
        "silence_s": "a server, instance or rank of this command that was silent so long is taken "
        "for lost; one that has ended, at once",
        "when_paused": "requests to a paused server: status 503, or they wait",
        "paused_wait_s": "how long they wait",
        "log_level": "level of the log",
        "log_json": "one JSON object a line",
        "router": "`tcp://HOST:PORT` of the role `router`",
        "number": "number of this command's first instance at the router",
        "keys_file": "keys of the machines, needed off the loopback interface",
        "record": "file to record requests in; if it exists, `NAME-2` and so on; also for vLLM's "
        "connector",
        "record_mib": "size at which the recording ends",
        "tracing": "whether each request becomes a span for OpenTelemetry",
    },
    "handoff": {
        "transport": "how KV gets from prefill to decode instances; `auto`: by shared memory on "
        "one machine, otherwise by NIXL; others can be installed",
        "handoff_s": "after which time decode computes a prompt itself that it did not get",
        "lease_s": "how long prefill keeps a prompt's blocks after decode last asked for it",
        "park_s": "how long a claim waits for a prompt that was not offered yet",
        "resend_s": "a message without an answer is sent again after this, then after twice as "
        "long, …",
        "resend_cap_s": "… but at least this often; at least 8 times `resend_s`",
        "resend_limit_s": "a peer that takes longer than `resend_cap_s` to answer is asked as "
        "seldom as it answers, but at least this often",
        "ping_s": "a peer that was silent so long is asked whether it is there",
        "suspect_s": "a peer that was silent so long is suspected",
        "berth_bytes": "the largest part of a prompt that travels at once; a block of one layer "
        "must fit",
        "berth_count": "parts under way between two ranks; 0: 8 on CPUs, 32 on GPUs",
        "landing_bytes_max": "memory of a decode rank for parts that arrive",
        "retired_bytes_max": "as much of it may wait until lost prefill ranks are seen dead",
        "peers_max": "instances that one hands over with at a time; each pair gets its share of "
        "`landing_bytes_max`",
        "idle_s": "a pair that no request has used so long is closed",
    },
    "routing": {
        "cached_weight": "worth of a leading block of the prompt that an instance has, in any tier",
        "load_weight": "each request under way counts so much against an instance",
        "computing_weight": "counts against a decode instance while no prefill instance can "
        "compute for it",
        "failed_weight": "counts against a prefill instance for each prompt that it failed to "
        "compute lately",
        "failed_s": "how long such a failure counts",
        "equal_blocks": "instances that differ by no more than this get requests in turn",
        "handoff_tokens_min": "a prompt of which decode has all but so many tokens is not started "
        "on a prefill instance; 0: a block",
        "attempts_max": "how many instances a request is sent to, one after the other, if they are "
        "lost",
    },
}


def key_tables() -> str:
    """Every key with its type, default and meaning, as tables in Markdown."""
    return "\n".join(f"### {name}\n\n{key_table(name)}" for name in KEYS)


def key_table(name: str) -> str:
    """The keys of one table of the file."""
    rows = [
        f"| `{key}` | {_type(setting)} | {_default(setting)} | {MEANINGS[name][key]} |"
        for key, setting in KEYS[name].items()
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _type(setting: Setting | TierOption) -> str:
    return str(setting.key).partition(", such as ")[0]


def _default(setting: Setting | TierOption) -> str:
    value = setting.default
    if value is None:
        return "required"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"
