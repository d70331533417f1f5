"""Chooses the instance for a request: the one with most of its prefix, unless it is too busy.

KV events say what each instance has cached; the keys of a prompt are computed as that instance
computes them. A request whose instance is lost before the first token is sent to another one.

In a pair, the instance that answers has a fixed partner that computes the prompts. A pair is chosen
by what both have cached and by the load of both.
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
"""Each request under way counts against this many cached blocks: a long queue outweighs a hit."""
GONE_LOAD = 4
"""A pair without its prefill instance counts as if it had this many more requests: it is chosen
only if others are busier still, or have much less of the prefix."""
EQUAL_BLOCKS = 1
"""Instances that differ by no more than this in cached blocks count as equal and get requests in
turn. All conversations share a start, such as the first lines of a chat template, which would
otherwise send all of them to one instance."""
ATTEMPTS_MAX = 3


def handoffs_of(request: str) -> list[str]:
    """The names of a request's handoffs, one for each attempt."""
    return [f"{request}/{attempt}" for attempt in range(1, ATTEMPTS_MAX + 1)]


class _Prefill:
    """A prompt that one instance computes for another one, which answers the request."""

    def __init__(self, prefill: InstanceLink, decode: InstanceLink, submit: ms.Submit) -> None:
        self._link = prefill
        # Each attempt is a request of its own: an earlier one may still hold blocks.
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
        """The KV was delivered: the two instances end the handoff by themselves."""
        self._delivered = True

    def end(self) -> None:
        """Aborts it unless it was delivered; may be called twice."""
        if self._delivered:
            return
        self._task.cancel()
        if not self._link.lost:
            self._link.send(Abort(id=self._submit.id))

    async def _compute(self, decode: InstanceLink, request: str) -> None:
        """Has the prompt computed; if that fails, `decode` computes it."""
        computed = False
        with suppress(InstanceLost, RequestRefusal):
            async with aclosing(self._link.generate(self._submit)) as tokens:
                async for progress in tokens:
                    computed = isinstance(progress, TokenProgress) and progress.token is not None
        if not computed and not decode.lost:
            decode.send(ComputeLocally(id=request))


class Router:
    """The connected instances, and which of them computes prompts for which."""

    def __init__(self) -> None:
        self.links: list[InstanceLink] = []
        self.retries = 0
        self._holdings: dict[InstanceLink, CachedBlocks] = {}
        self._at: dict[str, InstanceLink] = {}
        """The instance that answers each request."""
        self._resets = 0
        self._weights_version = ""
        """The version of the weights, if it has changed."""
        self._reset_sent: dict[str, int] = {}
        """The last reset that was sent to each instance, in any of its lives."""
        self._choices = 0
        self._chosen: dict[InstanceLink, int] = {}
        """The number of the last choice of each instance."""

    def add(self, link: InstanceLink) -> None:
        self.links.append(link)
        link.on_kv_events = self._note_events
        link.on_ready = self._send_missed_resets

    def remove(self, link: InstanceLink) -> None:
        self.links.remove(link)
        self._holdings.pop(link, None)
        self._chosen.pop(link, None)

    @property
    def ready(self) -> list[InstanceLink]:
        """The loaded instances."""
        return [link for link in self.links if link.ready is not None]

    @property
    def answering(self) -> list[InstanceLink]:
        """The instances that accept requests and answer them."""
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
            InstanceLost: no instance is ready, or the one that had begun to answer is gone.
            RequestRefusal: the instance refused the request.
        """
        tried: set[InstanceLink] = set()
        while True:
            link = self._choose(submit, tried)
            tried.add(link)
            begun = False
            self._at[submit.id] = link
            asked, prefill = self._paired(submit, link, attempt=len(tried))
            try:
                async with aclosing(link.generate(asked)) as tokens:
                    async for progress in tokens:
                        if isinstance(progress, Scored):
                            # If this instance is lost, the next one sends it again.
                            yield progress
                            continue
                        if progress.handed and prefill is not None:
                            prefill.deliver()
                        elif not begun and prefill is not None:
                            # The handoff was not needed, or failed.
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
        """Ends one answer of a request; the others continue."""
        link = self._at.get(request)
        if link is not None and not link.lost:
            link.send(StopAnswer(id=request, answer=answer))

    def reset(self, why: str, *, weights_version: str = "") -> list[str]:
        """Clears the caches of all instances, also of those that are restarting.

        Returns the names of the ready ones.
        """
        self._resets += 1
        self._weights_version = weights_version or self._weights_version
        for link in self.ready:
            self._reset(link, why, weights_version)
        return [link.name for link in self.ready]

    def _send_missed_resets(self, link: InstanceLink) -> None:
        """Called when an instance is ready, before it gets any request."""
        known, version = self._holdings_of(link).config.model.weights_version, self._weights_version
        other = version if known != version else ""
        if other or self._reset_sent.get(link.name, 0) < self._resets:
            self._reset(link, "it was away when the others were reset", other)

    def _reset(self, link: InstanceLink, why: str, weights_version: str) -> None:
        self._reset_sent[link.name] = self._resets
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
        """The request for its instance, and the prefill request of the partner, if it has one."""
        partner = self._partner_of(link)
        # A handoff brings KV without logits, so a prompt that is scored is computed there.
        if partner is None or submit.scores_prompt:
            return submit, None
        handed = msgspec.structs.replace(submit, handoff=handoffs_of(submit.id)[attempt - 1])
        return handed, _Prefill(partner, link, handed)

    def _partner_of(self, link: InstanceLink) -> InstanceLink | None:
        """The instance that computes prompts for another one, if there is one that can."""
        name = link.ready.partner if link.ready is not None else ""
        found = [other for other in self.ready if name and other.name == name and not other.leaving]
        return found[0] if found else None

    def _worth(self, link: InstanceLink, prompt: PromptKeys) -> int:
        """Cached blocks on both sides of a pair, less the load of both.

        An instance that computes its prompts itself counts as both sides.
        """
        assert link.ready is not None
        partner = self._partner_of(link)
        gone = LOAD_BLOCKS * GONE_LOAD if link.ready.partner and partner is None else 0
        return self._worth_alone(link, prompt) + self._worth_alone(partner or link, prompt) - gone

    def _worth_alone(self, link: InstanceLink, prompt: PromptKeys) -> int:
        return self._holdings_of(link).leading(prompt) - LOAD_BLOCKS * link.load

    def _note_events(self, link: InstanceLink, events: list[KvEvent]) -> None:
        self._holdings_of(link).take(events)

    def _holdings_of(self, link: InstanceLink) -> CachedBlocks:
        if link not in self._holdings:
            assert link.ready is not None
            self._holdings[link] = CachedBlocks(link.ready.config)
        return self._holdings[link]


class PromptKeys:
    """The keys of one prompt, computed once for all instances with equal settings."""

    def __init__(self, submit: ms.Submit) -> None:
        self._submit = submit
        self._named: dict[tuple[ModelSettings, int, str], list[Key]] = {}

    def under(self, config: Config) -> list[Key]:
        """The keys in an instance with this configuration."""
        naming = (config.model, config.cache.block_tokens, config.hash)
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
