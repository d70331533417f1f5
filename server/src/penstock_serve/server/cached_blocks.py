"""What each instance has cached, as the router knows it from KV events.

The keys of a prompt are computed as the instance computes them: with its model, tenant and block
size. Events may be late, so this is an estimate: an instance has the last word on what it has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock import BlocksRemoved, BlocksStored

if TYPE_CHECKING:
    from penstock import KvEvent
    from penstock.config import Config, ModelSettings
    from penstock.toolkit import Key
    from penstock_serve.engine import messages as ms


class PromptKeys:
    """The keys of one prompt, computed once for all instances with equal settings."""

    def __init__(self, submit: ms.Submit) -> None:
        self._submit = submit
        self.token_count = len(submit.prompt)
        self._named: dict[tuple[ModelSettings, int, str, str], list[Key]] = {}

    @property
    def reuses(self) -> bool:
        """Whether cached blocks may be used for it."""
        return self._submit.reuse and not self.scored

    @property
    def affinity(self) -> tuple[str, str] | None:
        """What it has in common with requests that should go to the same instance."""
        key = self._submit.cache_key
        return (self._submit.tenant, key) if key else None

    @property
    def scored(self) -> bool:
        """Whether its log-probabilities are wanted: a handoff brings KV without logits."""
        return self._submit.scores_prompt

    def under(self, config: Config) -> list[Key]:
        """The keys in an instance with this configuration."""
        naming = (config.model, config.cache.block_tokens, config.hash, config.salt)
        if naming not in self._named:
            chain = config.key_chain(tenant=self._submit.tenant)
            chain.extend(self._submit.prompt)
            self._named[naming] = chain.keys
        return self._named[naming]


class CachedBlocks:
    """The blocks that one instance has cached, in any tier."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._tiers_of: dict[bytes, set[str]] = {}

    def take(self, events: list[KvEvent]) -> None:
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
        """From now on keys are computed with this version of the weights."""
        model = replace(self.config.model, weights_version=version)
        self.config = replace(self.config, model=model)

    def leading(self, prompt: PromptKeys) -> int:
        """The number of leading blocks of a prompt that are cached."""
        keys = prompt.under(self.config) if prompt.reuses else []
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
