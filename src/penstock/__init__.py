"""Penstock keeps the KV cache of LLM serving.

    cache = penstock.open("penstock.toml", kv=arrays)      # Penstock manages the device blocks
    offload = penstock.open_offload("penstock.toml", kv=arrays)      # the engine does

docs/api.md describes both; everything an engine needs is exported here.
"""

from penstock.cache.departed import Miss as Miss
from penstock.cache.departed import MissReason as MissReason
from penstock.cache.states import LeaseState as LeaseState
from penstock.config import Config as Config
from penstock.config import load_config as load_config
from penstock.config import parse_config as parse_config
from penstock.errors import CapacityError as CapacityError
from penstock.errors import ConfigError as ConfigError
from penstock.errors import InvariantViolation as InvariantViolation
from penstock.errors import LeaseError as LeaseError
from penstock.errors import PenstockError as PenstockError
from penstock.errors import UnavailableError as UnavailableError
from penstock.machine.effects import Ended as Ended
from penstock.machine.effects import Found as Found
from penstock.machine.effects import Settled as Settled
from penstock.machine.effects import Started as Started
from penstock.machine.kv_events import Snapshot as Snapshot
from penstock.machine.statistics import CacheStatistics as CacheStatistics
from penstock.runtime.leases import Lease as Lease
from penstock.runtime.managed import Cache as Cache
from penstock.runtime.managed import Pin as Pin
from penstock.runtime.offload import Offload as Offload
from penstock.runtime.opening import open as open  # noqa: A004
from penstock.runtime.opening import open_offload as open_offload
from penstock.vocabulary.keys import Item as Item
from penstock.vocabulary.keys import KeyChain as KeyChain
from penstock.vocabulary.layout import Layout as Layout
from penstock.vocabulary.namespace import Namespace as Namespace

__version__ = "0.1.0"
