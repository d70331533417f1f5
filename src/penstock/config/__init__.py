"""The TOML configuration: text in, settings that cannot be wrong out, and back to text.

| module     | holds                                                                   |
|------------|-------------------------------------------------------------------------|
| `values`   | `Config` and its parts, those of `penstock serve` too, with defaults    |
| `keys`     | the kinds of values a key can have                                      |
| `reference`| what each key means, and tables of all of them for a reader            |
| `toml`     | text → `Config`, or one refusal that names the key; `Config` → text     |

The one rule that must not break: nothing that is written in a file is ignored. A key that
is unknown, of the wrong type, out of its range or without any effect is refused, by a
message that names the key as the file spells it, the value, and what would be right.

`docs/config.md` describes the file, and `penstock config keys` lists its keys. The environment is
never read, but for a salt whose place a file names there.
"""

from __future__ import annotations

from penstock.cache.settings import CacheSettings, TierSettings
from penstock.config.keys import Gib, Number, String, TierOption, Value, Whole
from penstock.config.shared_stores import (
    PORT_MAX,
    UNIX,
    port_range,
    require_address,
    require_socket,
)
from penstock.config.toml import (
    LOG_LEVELS,
    STARTER_TOML,
    VERSION,
    load_completed,
    load_config,
    parse_config,
)
from penstock.config.values import (
    AUTO,
    BLOCKS_MAX,
    DEVICE_NAME,
    KEY_VARIABLE,
    LOOPBACK,
    NIXL,
    SHARED_KINDS,
    SHARED_MEMORY,
    STORED_KINDS,
    TIER_KINDS,
    UNSIZED_BLOCKS,
    Config,
    EngineTable,
    HandoffTable,
    ModelSettings,
    RoutingTable,
    ServeTable,
    TierKind,
)

__all__ = [
    "AUTO",
    "BLOCKS_MAX",
    "DEVICE_NAME",
    "KEY_VARIABLE",
    "LOG_LEVELS",
    "LOOPBACK",
    "NIXL",
    "PORT_MAX",
    "SHARED_KINDS",
    "SHARED_MEMORY",
    "STARTER_TOML",
    "STORED_KINDS",
    "TIER_KINDS",
    "UNIX",
    "UNSIZED_BLOCKS",
    "VERSION",
    "CacheSettings",
    "Config",
    "EngineTable",
    "Gib",
    "HandoffTable",
    "ModelSettings",
    "Number",
    "RoutingTable",
    "ServeTable",
    "String",
    "TierKind",
    "TierOption",
    "TierSettings",
    "Value",
    "Whole",
    "load_completed",
    "load_config",
    "parse_config",
    "port_range",
    "require_address",
    "require_socket",
]
