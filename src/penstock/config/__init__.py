"""The TOML configuration: text in, settings that cannot be wrong out, and back to text.

| module     | holds                                                                   |
|------------|-------------------------------------------------------------------------|
| `schema`   | which tables and keys there are, with types, ranges and defaults: data  |
| `values`   | `Config` and its parts                                                  |
| `reading`  | text → `Config`, or one refusal that names the key                      |
| `printing` | `Config` → text                                                         |

The one rule that must not break: nothing that is written in a file is ignored. A key that
is unknown, of the wrong type, out of its range or without any effect is refused, by a
message that names the key as the file spells it, the value, and what would be right.

`docs/config.md` describes the file. The environment is never read.
"""

from __future__ import annotations

from penstock.config.reading import load_config, parse_config
from penstock.config.schema import STARTER_TOML, TIER_KINDS, VERSION
from penstock.config.values import Config, ModelSettings, TierKind

__all__ = [
    "STARTER_TOML",
    "TIER_KINDS",
    "VERSION",
    "Config",
    "ModelSettings",
    "TierKind",
    "load_config",
    "parse_config",
]
