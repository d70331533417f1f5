"""Which instance gets a request: the one that has most of its prefix, unless it is too busy.

What an instance has cached is known from its KV events; a prompt is looked for under the keys
that the instance itself gives its blocks. Instances come and go; a request whose instance was
lost before its first token is sent to another one.

Who answers a request may have another instance compute its prompt, always the same one. The two
are chosen together, by what both have cached and by what waits before both.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from penstock.engine.messages import (
    Abort,
    ComputeLocally,
    ResetCache,
    Scored,
    StopAnswer,
    TokenProgress,
)
from penstock.machine.kv_events import BlocksRemoved, BlocksStored
from penstock.serve.instance_link import InstanceLink, InstanceLost, RequestRefusal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from penstock.config import Config, ModelSettings
    from penstock.engine import messages as ms
    from penstock.machine.kv_events import KvEvent
    from penstock.vocabulary.ids import Key

LOAD_BLOCKS = 8
"""The cached blocks that a request under way outweighs: a long queue outweighs a hit."""
GONE_LOAD = 4
"""A pair whose prefill instance is gone counts as if it had this many more requests: others come
first, unless they are busier still, or have much less of the prefix."""
EQUAL_BLOCKS = 1
"""Instances that differ by no more than this in what they need not compute count as equal: such
requests are dealt out in turn. It covers the start that all conversations have in common, such as
a chat template's own first lines, which would otherwise bind all of them to one instance."""
ATTEMPTS_MAX = 3


def handoffs_of(request: str) -> list[str]:
    """What the handoffs of a request are called, attempt by attempt."""
    return [f"{request}/{attempt}" for attempt in range(1, ATTEMPTS_MAX + 1)]


class _Prefill:
    """A prompt that one instance computes for another, which answers."""

    def __init__(self, prefill: InstanceLink, decode: InstanceLink, submit: ms.Submit) -> None:
        self._link = prefill
        # Another attempt is another request: this one may have blocks for a moment after it.
        self._submit = msgspec.structs.replace(
            submit,
            id=submit.handoff,
            max_tokens=1,
            min_tokens=min(1, submit.min_tokens),
            answers=1,
            logprobs=0,
        )
        self._task = asyncio.create_task(self._compute(decode, submit.id))
        self._delivered = False

    def deliver(self) -> None:
        """It has come: what is left to do, the two instances do without us."""
        self._delivered = True

    def end(self) -> None:
        """Nobody needs it any more; twice does no harm."""
        if self._delivered:
            return
        self._task.cancel()
        if not self._link.lost:
            self._link.send(Abort(id=self._submit.id))

    async def _compute(self, decode: InstanceLink, request: str) -> None:
        """Has the prompt computed; if that fails, who answers is told to do it."""
        computed = False
        with suppress(InstanceLost, RequestRefusal):
            async with aclosing(self._link.generate(self._submit)) as told:
                async for progress in told:
                    computed = isinstance(progress, TokenProgress) and progress.token is not None
        if not computed and not decode.lost:
            decode.send(ComputeLocally(id=request))


class Router:
    """The instances that are there, and who computes prompts for whom."""

    def __init__(self) -> None:
        self.links: list[InstanceLink] = []
        self.retries = 0
        self._holdings: dict[InstanceLink, CachedBlocks] = {}
        self._at: dict[str, InstanceLink] = {}
        """Where each request is answered."""
        self._resets = 0
        self._weights_version = ""
        """What the weights are called, if that has changed."""
        self._told: dict[str, int] = {}
        """The last reset that each instance was told of, whichever life it was in."""
        self._choices = 0
        self._chosen: dict[InstanceLink, int] = {}
        """When each instance was last chosen, counted in choices."""

    def add(self, link: InstanceLink) -> None:
        """A new instance."""
        self.links.append(link)
        link.on_kept = self._follow
        link.on_ready = self._welcome

    def remove(self, link: InstanceLink) -> None:
        """An instance is gone."""
        self.links.remove(link)
        self._holdings.pop(link, None)
        self._chosen.pop(link, None)

    @property
    def ready(self) -> list[InstanceLink]:
        """Those that are loaded."""
        return [link for link in self.links if link.ready is not None]

    @property
    def answering(self) -> list[InstanceLink]:
        """Those that take requests and answer them."""
        return [
            link
            for link in self.ready
            if link.ready and link.ready.role != "prefill" and not link.leaving
        ]

    async def generate(
        self, submit: ms.Submit
    ) -> AsyncGenerator[ms.TokenProgress | ms.Scored, None]:
        """Sends a request to the best instance, and to another if that is lost before a token.

        Raises:
            InstanceLost: no instance is there, or the one that had begun to answer is gone.
            RequestRefusal: the instance did not take the request.
        """
        tried: set[InstanceLink] = set()
        while True:
            link = self._choose(submit, tried)
            tried.add(link)
            begun = False
            self._at[submit.id] = link
            asked, prefill = self._paired(submit, link, attempt=len(tried))
            try:
                async with aclosing(link.generate(asked)) as told:
                    async for progress in told:
                        if isinstance(progress, Scored):
                            # Told again by another instance, if this one is lost.
                            yield progress
                            continue
                        if progress.handed and prefill is not None:
                            prefill.deliver()
                        elif not begun and prefill is not None:
                            # It was not needed, or did not come.
                            prefill.end()
                        begun = True
                        yield progress
            except InstanceLost:
                untried = set(self.answering) - tried
                if begun or not untried or len(tried) >= ATTEMPTS_MAX:
                    raise
                self.retries += 1
                continue
            finally:
                del self._at[submit.id]
                if prefill is not None:
                    prefill.end()
            return

    def stop(self, request: str, answer: int) -> None:
        """One answer is long enough for its reader; the others go on."""
        link = self._at.get(request)
        if link is not None and not link.lost:
            link.send(StopAnswer(id=request, answer=answer))

    def reset(self, why: str, *, weights_version: str = "") -> list[str]:
        """Voids what every instance has cached, also of those that are away and come back.

        Returns the names of those that are there.
        """
        self._resets += 1
        self._weights_version = weights_version or self._weights_version
        for link in self.ready:
            self._reset(link, why, weights_version)
        return [link.name for link in self.ready]

    def _welcome(self, link: InstanceLink) -> None:
        """Sends an instance the resets that it missed, before any request."""
        known, version = self._holdings_of(link).config.model.weights_version, self._weights_version
        other = version if known != version else ""
        if other or self._told.get(link.name, 0) < self._resets:
            self._reset(link, "it was away when the others were told", other)

    def _reset(self, link: InstanceLink, why: str, weights_version: str) -> None:
        self._told[link.name] = self._resets
        link.send(ResetCache(why=why, weights_version=weights_version))
        if weights_version:
            self._holdings_of(link).change_weights(weights_version)

    def _choose(self, submit: ms.Submit, tried: set[InstanceLink]) -> InstanceLink:
        able = [link for link in self.answering if link not in tried]
        if not able:
            raise InstanceLost("no instance is ready")
        if len(able) > 1:
            prompt = PromptKeys(submit)
            worths = {link: self._worth(link, prompt) for link in able}
            # Twice: what is handed over and what is computed are counted separately.
            least = max(worths.values()) - 2 * EQUAL_BLOCKS
            able = [link for link in able if worths[link] >= least]
        chosen = min(able, key=lambda link: self._chosen.get(link, 0))
        self._choices += 1
        self._chosen[chosen] = self._choices
        return chosen

    def _paired(
        self, submit: ms.Submit, link: InstanceLink, *, attempt: int
    ) -> tuple[ms.Submit, _Prefill | None]:
        """The request as its instance gets it, and who computes its prompt, if somebody does."""
        partner = self._partner_of(link)
        # KV that is handed over brings no logits: who scores a prompt computes it.
        if partner is None or submit.scores_prompt:
            return submit, None
        handed = msgspec.structs.replace(submit, handoff=handoffs_of(submit.id)[attempt - 1])
        return handed, _Prefill(partner, link, handed)

    def _partner_of(self, link: InstanceLink) -> InstanceLink | None:
        """Who computes prompts for an instance; nobody if it does that itself, or has to."""
        name = link.ready.partner if link.ready is not None else ""
        found = [other for other in self.ready if name and other.name == name and not other.leaving]
        return found[0] if found else None

    def _worth(self, link: InstanceLink, prompt: PromptKeys) -> int:
        """What need not be handed over and what need not be computed, less what waits before.

        An instance that computes its prompts itself counts twice, since it does both.
        """
        assert link.ready is not None
        partner = self._partner_of(link)
        gone = LOAD_BLOCKS * GONE_LOAD if link.ready.partner and partner is None else 0
        return self._worth_alone(link, prompt) + self._worth_alone(partner or link, prompt) - gone

    def _worth_alone(self, link: InstanceLink, prompt: PromptKeys) -> int:
        return self._holdings_of(link).leading(prompt) - LOAD_BLOCKS * link.load

    def _follow(self, link: InstanceLink, events: list[KvEvent]) -> None:
        self._holdings_of(link).take(events)

    def _holdings_of(self, link: InstanceLink) -> CachedBlocks:
        if link not in self._holdings:
            assert link.ready is not None
            self._holdings[link] = CachedBlocks(link.ready.config)
        return self._holdings[link]


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


class CachedBlocks:
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
