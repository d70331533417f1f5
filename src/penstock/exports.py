"""Everything an engine needs, under the names that `penstock` exports.

`penstock` itself imports this module only when one of the names is asked for: a small process,
such as the supervisor, is part of the package without loading NumPy and the cache.
"""

from penstock.cache.explain import Miss as Miss
from penstock.cache.explain import MissReason as MissReason
from penstock.cache.operations import BlockFault as BlockFault
from penstock.cache.operations import Outcome as Outcome
from penstock.cache.operations import Purpose as Purpose
from penstock.cache.states import LeaseState as LeaseState
from penstock.config import Config as Config
from penstock.config import load_config as load_config
from penstock.config import parse_config as parse_config
from penstock.errors import AccessError as AccessError
from penstock.errors import CapacityError as CapacityError
from penstock.errors import ConfigError as ConfigError
from penstock.errors import InvariantViolation as InvariantViolation
from penstock.errors import LeaseError as LeaseError
from penstock.errors import NeverFitsError as NeverFitsError
from penstock.errors import PeerError as PeerError
from penstock.errors import PenstockError as PenstockError
from penstock.errors import UnavailableError as UnavailableError
from penstock.handoff import DecodeHandoff as DecodeHandoff
from penstock.handoff import DecodeHandoffRank as DecodeHandoffRank
from penstock.handoff import Handoff as Handoff
from penstock.handoff import HandoffBounds as HandoffBounds
from penstock.handoff import HandoffEngine as HandoffEngine
from penstock.handoff import HandoffOffer as HandoffOffer
from penstock.handoff import HandoffOutcome as HandoffOutcome
from penstock.handoff import HandoffPair as HandoffPair
from penstock.handoff import HandoffResult as HandoffResult
from penstock.handoff import HandoffSettings as HandoffSettings
from penstock.handoff import HandoffStatistics as HandoffStatistics
from penstock.handoff import HandoffTimes as HandoffTimes
from penstock.handoff import LocalPrefillHandoff as LocalPrefillHandoff
from penstock.handoff import PrefillHandoff as PrefillHandoff
from penstock.handoff import PrefillHandoffRank as PrefillHandoffRank
from penstock.handoff import SharedListener as SharedListener
from penstock.handoff import open_decode as open_decode
from penstock.handoff import open_prefill as open_prefill
from penstock.machine.effects import Ended as Ended
from penstock.machine.effects import Found as Found
from penstock.machine.effects import Settled as Settled
from penstock.machine.effects import Started as Started
from penstock.machine.kv_events import AllCleared as AllCleared
from penstock.machine.kv_events import BlocksRemoved as BlocksRemoved
from penstock.machine.kv_events import BlocksStored as BlocksStored
from penstock.machine.kv_events import KvEvent as KvEvent
from penstock.machine.kv_events import Snapshot as Snapshot
from penstock.machine.kv_events import chains_of as chains_of
from penstock.machine.statistics import CacheStatistics as CacheStatistics
from penstock.runtime.base import RankRegistry as RankRegistry
from penstock.runtime.cache import Cache as Cache
from penstock.runtime.cache import Lease as Lease
from penstock.runtime.cache import Pin as Pin
from penstock.runtime.cache import Verdict as Verdict
from penstock.runtime.copy_executor import EngineSteps as EngineSteps
from penstock.runtime.messages import RankFacts as RankFacts
from penstock.runtime.offload import Offload as Offload
from penstock.runtime.open import open as open  # noqa: A004
from penstock.runtime.open import open_offload as open_offload
from penstock.runtime.open import open_rank as open_rank
from penstock.runtime.rank import Rank as Rank
from penstock.runtime.status import Drained as Drained
from penstock.runtime.status import Health as Health
from penstock.transport.machine_keys import MachineKeys as MachineKeys
from penstock.transport.waiting import StopSignal as StopSignal
from penstock.vocabulary.keys import Item as Item
from penstock.vocabulary.keys import KeyChain as KeyChain
from penstock.vocabulary.keys import Namespace as Namespace
from penstock.vocabulary.layout import GroupKind as GroupKind
from penstock.vocabulary.layout import HeadRange as HeadRange
from penstock.vocabulary.layout import Layout as Layout
from penstock.vocabulary.planes import DType as DType
