"""The connector on a machine that cannot pin the memory of its host tier."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.connectors.vllm.adapter import PenstockConnector, RankHandshake
from penstock.runtime.messages import RankFacts


class UnpinnedConnector(PenstockConnector):
    def get_handshake_metadata(self) -> RankHandshake:
        told: Any = super().get_handshake_metadata()
        facts = RankFacts.from_bytes(told.facts)
        (host,) = facts.tiers
        refused = msgspec.structs.replace(host, off="its memory cannot be pinned")
        return RankHandshake(facts=msgspec.structs.replace(facts, tiers=(refused,)).to_bytes())
