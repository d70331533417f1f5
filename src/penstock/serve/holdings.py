"""What an instance has cached, as far as the server knows: it follows the instance's KV events.

The one rule: a prompt is looked for under the keys that the instance itself gives its blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.machine.kv_events import BlocksRemoved, BlocksStored

if TYPE_CHECKING:
    from penstock.config import Config, ModelSettings
    from penstock.engine import messages as ms
    from penstock.machine.kv_events import KvEvent
    from penstock.vocabulary.ids import Key


class PromptKeys:
    """The keys of one prompt. Most instances name blocks alike, so they are computed once."""

    def __init__(self, submit: ms.Submit) -> None:
        self._submit = submit
        self._named: dict[tuple[ModelSettings, int, str], list[Key]] = {}

    def under(self, config: Config) -> list[Key]:
        """As an instance with this configuration names them."""
        naming = (config.model, config.cache.block_tokens, config.hash)
        if naming not in self._named:
            chain = config.key_chain(tenant=self._submit.tenant)
            chain.extend(self._submit.prompt)
            self._named[naming] = chain.keys
        return self._named[naming]


class Holdings:
    """What one instance has cached, in whatever tier."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._tiers_of: dict[bytes, set[str]] = {}

    def take(self, events: list[KvEvent]) -> None:
        """Follows the instance's events."""
        for event in events:
            if isinstance(event, BlocksStored):
                for key in event.keys:
                    self._tiers_of.setdefault(key, set()).add(event.tier)
            elif isinstance(event, BlocksRemoved):
                for key in event.keys:
                    self._remove(key, event.tier)
            else:
                self._tiers_of.clear()

    def change_weights(self, version: str) -> None:
        """Keys are made with other weights from now on."""
        model = replace(self.config.model, weights_version=version)
        self.config = replace(self.config, model=model)

    def leading(self, prompt: PromptKeys) -> int:
        """How many leading blocks of a prompt it has."""
        keys = prompt.under(self.config)
        for position, key in enumerate(keys):
            if key not in self._tiers_of:
                return position
        return len(keys)

    def _remove(self, key: bytes, tier: str) -> None:
        tiers = self._tiers_of.get(key)
        if tiers is not None:
            tiers.discard(tier)
            if not tiers:
                del self._tiers_of[key]
