"""The handoff of KV from a prefill engine to a decode engine.

`open_prefill` and `open_decode` are what an engine calls; docs/integrating.md shows both. Engines
use the names of this file alone. Behind them, `protocol` decides what is sent and when, and knows
no clock or socket; `driver` carries it out.
"""

from penstock.handoff.decode import DecodeHandoff as DecodeHandoff
from penstock.handoff.decode import DecodeHandoffRank as DecodeHandoffRank
from penstock.handoff.decode import open_decode as open_decode
from penstock.handoff.driver.lines import ListenerShare as ListenerShare
from penstock.handoff.driver.lines import SharedListener as SharedListener
from penstock.handoff.handoff import Handoff as Handoff
from penstock.handoff.handoff import HandoffResult as HandoffResult
from penstock.handoff.handoff import HandoffStatistics as HandoffStatistics
from penstock.handoff.pair import HandoffEngine as HandoffEngine
from penstock.handoff.pair import HandoffPair as HandoffPair
from penstock.handoff.prefill import HandoffOffer as HandoffOffer
from penstock.handoff.prefill import LocalPrefillHandoff as LocalPrefillHandoff
from penstock.handoff.prefill import PrefillHandoff as PrefillHandoff
from penstock.handoff.prefill import PrefillHandoffRank as PrefillHandoffRank
from penstock.handoff.prefill import open_prefill as open_prefill
from penstock.handoff.protocol.settings import HandoffBounds as HandoffBounds
from penstock.handoff.protocol.settings import HandoffSettings as HandoffSettings
from penstock.handoff.protocol.settings import HandoffTimes as HandoffTimes
from penstock.handoff.protocol.states import HandoffOutcome as HandoffOutcome
