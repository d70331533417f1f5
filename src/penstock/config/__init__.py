"""The TOML configuration: text in, settings that cannot be wrong out, and back to text.

| module     | holds                                                                   |
|------------|-------------------------------------------------------------------------|
| `values`   | `Config` and its parts, those of `penstock serve` too                   |
| `shared_stores` | addresses, and the keys that only some kinds of tiers have         |
| `toml`     | text → `Config`, or one refusal that names the key; `Config` → text;    |
|            | tables of all keys for a reader                                         |

A key is a field of the settings that it becomes, which say its type, bounds, default and meaning
(`penstock.vocabulary.schema`); so do those of the cache, in `penstock.cache.settings`.

The one rule that must not break: nothing that is written in a file is ignored. A key that
is unknown, of the wrong type, out of its range or without any effect is refused, by a
message that names the key as the file spells it, the value, and what would be right.

`docs/config.md` describes the file, and `penstock config keys` lists its keys. The environment is
never read, but for a salt whose place a file names there.
"""

from penstock.cache.settings import BLOCKS_MAX as BLOCKS_MAX
from penstock.cache.settings import CacheSettings as CacheSettings
from penstock.cache.settings import TierSettings as TierSettings
from penstock.config.shared_stores import PORT_MAX as PORT_MAX
from penstock.config.shared_stores import UNIX as UNIX
from penstock.config.shared_stores import port_range as port_range
from penstock.config.shared_stores import require_address as require_address
from penstock.config.shared_stores import require_socket as require_socket
from penstock.config.toml import KEYS as KEYS
from penstock.config.toml import STARTER_TOML as STARTER_TOML
from penstock.config.toml import VERSION as VERSION
from penstock.config.toml import load_completed as load_completed
from penstock.config.toml import load_config as load_config
from penstock.config.toml import parse_completed as parse_completed
from penstock.config.toml import parse_config as parse_config
from penstock.config.values import AUTO as AUTO
from penstock.config.values import DEVICE_NAME as DEVICE_NAME
from penstock.config.values import KEY_VARIABLE as KEY_VARIABLE
from penstock.config.values import LOG_LEVELS as LOG_LEVELS
from penstock.config.values import LOOPBACK as LOOPBACK
from penstock.config.values import NIXL as NIXL
from penstock.config.values import SHARED_KINDS as SHARED_KINDS
from penstock.config.values import SHARED_MEMORY as SHARED_MEMORY
from penstock.config.values import STORED_KINDS as STORED_KINDS
from penstock.config.values import TIER_KINDS as TIER_KINDS
from penstock.config.values import UNSIZED_BLOCKS as UNSIZED_BLOCKS
from penstock.config.values import Config as Config
from penstock.config.values import EngineTable as EngineTable
from penstock.config.values import HandoffTable as HandoffTable
from penstock.config.values import ModelSettings as ModelSettings
from penstock.config.values import RoutingTable as RoutingTable
from penstock.config.values import ServeTable as ServeTable
from penstock.config.values import TierKind as TierKind
from penstock.vocabulary.schema import Flag as Flag
from penstock.vocabulary.schema import Gib as Gib
from penstock.vocabulary.schema import Number as Number
from penstock.vocabulary.schema import String as String
from penstock.vocabulary.schema import TierOption as TierOption
from penstock.vocabulary.schema import Value as Value
from penstock.vocabulary.schema import ValueKind as ValueKind
from penstock.vocabulary.schema import Whole as Whole
