"""The instances as the router weighs them: what each has of a prompt, and how much it has in hand.

Each instance has a bit, and what many have in common is one number: who has a block, who is equally
busy, who computes prompts. So a choice among a thousand instances looks at some numbers of a
thousand bits, and not at each instance.

    leads = fleet.leads(prompt)                      # who has how many leading blocks
    fleet.weigh(fleet.answering, leads)              # groups of equal worth, the best first
    fleet.in_turn(group.members)                     # one after the other, the longest unused first

What an instance has is known by its KV events, and by the prompts that it was sent: those that it
still computes count as its own, so that what begins alike follows them. They may be late or wrong,
so it is an estimate: an instance has the last word on what it has.

The one rule: the numbers follow from the links. Whatever changes at one is noted here at once.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from penstock import BlocksRemoved, BlocksStored

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from penstock import KvEvent
    from penstock.config import Config, ModelSettings, RoutingTable
    from penstock.toolkit import Key
    from penstock_serve.engine.messages import RoleName
    from penstock_serve.engine.requests import Request
    from penstock_serve.server.instance_link import InstanceLink

FAILURES_KEPT = 16
"""More failures of one instance within `routing.failed_s` do not make it worse."""
QUEUED = 0.1
"""What a block of a prompt that waits to be computed counts, beside a cached one. With 1, a prompt
would begin earliest; but more of them would be computed, and kept, where they were not yet: with a
tenth the slowest first tokens are as quick, and as much is found as by affinity alone."""
BUSY_DIGITS = 4
"""How busy an instance is is kept with so many binary digits, to 6 %: else a thousand instances
would be a thousand groups."""
EXPECTED = ""
"""The tier of blocks that are being computed."""
FEW = 16
"""So many are sorted by their turn; of more, the first in the order of turns is looked for."""

Kind = TypeVar("Kind")
Members = int
"""A set of instances, by their bits."""


class Naming(NamedTuple):
    """All settings of an instance that its keys depend on, but for the tenant of a request."""

    model: ModelSettings
    block_tokens: int
    hash: str
    salt: str


def naming_of(config: Config) -> Naming:
    """What the keys of an instance depend on."""
    return Naming(config.model, config.cache.block_tokens, config.hash, config.salt)


class PromptKeys:
    """The keys of one prompt, as instances compute them: once for all with equal settings."""

    def __init__(self, submit: Request) -> None:
        self._submit = submit
        self.token_count = len(submit.prompt)
        self._named: dict[Naming, list[Key]] = {}

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
        naming = naming_of(config)
        if naming not in self._named:
            chain = config.key_chain(tenant=self._submit.tenant)
            chain.extend(self._submit.prompt)
            self._named[naming] = chain.keys
        return self._named[naming]


class Lead(NamedTuple):
    """Instances that have as many leading blocks of a prompt, in any tier."""

    blocks: int
    block_tokens: int
    members: Members


class EqualInstances(NamedTuple):
    """Instances that are worth as much for a prompt."""

    worth: float
    lead: Lead
    members: Members


class Fleet:
    """The links, their bits, and what is the same for many of them."""

    def __init__(self, weights: RoutingTable, *, salt: str) -> None:
        self.weights = weights
        self._salt = salt
        self._bits: dict[InstanceLink, Members] = {}
        self._links: list[InstanceLink | None] = []
        """By the position of their bit."""
        self._cached: dict[InstanceLink, CachedBlocks] = {}
        self._holders: dict[bytes, Members] = {}
        """Who has a block. A key says under which settings, so all are in one table."""
        self._alike: dict[Naming, Members] = {}
        """Those that were ready, by what their keys depend on."""
        self._configs: dict[Naming, Config] = {}
        """A configuration of each."""
        self._as_busy: dict[float, Members] = {}
        """By what counts against them: requests under way, and prompts still to be computed."""
        self._busy: dict[InstanceLink, float] = {}
        self._computing: dict[InstanceLink, int] = {}
        """Blocks of prompts that each has still to compute."""
        self._failed: dict[InstanceLink, deque[float]] = {}
        """When prefill instances failed to compute a prompt, as far as that still counts."""
        self._turns: dict[InstanceLink, int] = {}
        """The number of the last choice of each, in this order."""
        self._choices = 0
        self.answering: Members = 0
        """Those that accept requests and answer them."""
        self.whole: Members = 0
        """Those of them that compute their prompts themselves."""
        self.prefilling: Members = 0
        """Those that accept prompts and compute them for others."""

    # ---------------------------------------------------------------- who there is

    def add(self, link: InstanceLink) -> None:
        """A link is there; it gets a bit."""
        if None in self._links:
            place = self._links.index(None)
            self._links[place] = link
        else:
            place = len(self._links)
            self._links.append(link)
        self._bits[link] = 1 << place
        self._busy[link], self._computing[link] = 0.0, 0
        _put(self._as_busy, 0.0, self._bits[link])
        self.note_chosen(link)

    def remove(self, link: InstanceLink) -> None:
        """An instance is gone."""
        bit = self._bits.pop(link)
        self._links[bit.bit_length() - 1] = None
        _take(self._as_busy, self._busy.pop(link), bit)
        del self._computing[link]
        cached = self._cached.pop(link, None)
        if cached is not None:
            cached.clear()
            self._take_alike(cached.config, bit)
        self._failed.pop(link, None)
        del self._turns[link]
        self._set_role(bit, None)

    def note_role(self, link: InstanceLink, role: RoleName | None) -> None:
        """What an instance does from now on; nothing while it gets no requests."""
        if link in self._bits:
            self._set_role(self._bits[link], role)

    def _set_role(self, bit: Members, role: RoleName | None) -> None:
        self.answering = _with(self.answering, bit, there=role in ("both", "decode"))
        self.whole = _with(self.whole, bit, there=role == "both")
        self.prefilling = _with(self.prefilling, bit, there=role == "prefill")

    def note_load(self, link: InstanceLink) -> None:
        """A request began or ended at an instance."""
        bit = self._bits.get(link)
        if bit is not None:
            busy = _rounded(self.weights.load_weight * link.load + QUEUED * self._computing[link])
            if busy != self._busy[link]:
                _take(self._as_busy, self._busy[link], bit)
                self._busy[link] = busy
                _put(self._as_busy, busy, bit)

    def note_computing(self, link: InstanceLink, blocks: int) -> None:
        """An instance has so many more blocks of prompts to compute; less than 0: fewer."""
        if link in self._computing:
            self._computing[link] += blocks
            self.note_load(link)

    def note_failure(self, link: InstanceLink) -> None:
        """A prefill instance did not compute a prompt that it was sent."""
        if not link.lost:
            times = self._failed.setdefault(link, deque(maxlen=FAILURES_KEPT))
            times.append(asyncio.get_running_loop().time())

    # ---------------------------------------------------------------- what they have

    def cached_of(self, link: InstanceLink) -> CachedBlocks:
        """What a ready instance has; it may be asked for the first time."""
        if link not in self._cached:
            assert link.ready is not None
            # An instance elsewhere has its secret at a place of its own machine.
            config = replace(link.ready.config, salt=self._salt)
            self._cached[link] = CachedBlocks(config, self._bits[link], self._holders)
            self._put_alike(config, self._bits[link])
        return self._cached[link]

    def expect(self, link: InstanceLink, prompt: PromptKeys) -> list[Key]:
        """An instance was sent a prompt; returns the blocks that it has not said to have."""
        cached = self._cached.get(link)
        if cached is None or not prompt.reuses:
            return []
        keys = cached.missing(prompt.under(cached.config))
        cached.expect(keys)
        return keys

    def expect_no_more(self, link: InstanceLink, keys: list[Key]) -> None:
        """A request has ended: of its blocks those count that the instance said it has."""
        cached = self._cached.get(link)
        if cached is not None:
            cached.expect_no_more(keys)

    def change_weights(self, link: InstanceLink, version: str) -> None:
        """From now on keys of an instance are computed with this version of the weights."""
        cached = self.cached_of(link)
        self._take_alike(cached.config, self._bits[link])
        model = replace(cached.config.model, weights_version=version)
        cached.config = replace(cached.config, model=model)
        self._put_alike(cached.config, self._bits[link])

    def _put_alike(self, config: Config, bit: Members) -> None:
        naming = naming_of(config)
        self._configs[naming] = config
        _put(self._alike, naming, bit)

    def _take_alike(self, config: Config, bit: Members) -> None:
        naming = naming_of(config)
        _take(self._alike, naming, bit)
        if naming not in self._alike:
            del self._configs[naming]

    def leads(self, prompt: PromptKeys) -> list[Lead]:
        """How many leading blocks of a prompt instances have; each is in one of these."""
        found: list[Lead] = []
        for naming, members in self._alike.items():
            left, blocks, block_tokens = members, 0, naming.block_tokens
            for key in prompt.under(self._configs[naming]) if prompt.reuses else ():
                those = left & self._holders.get(key, 0)
                if those != left:
                    found.append(Lead(blocks, block_tokens, left & ~those))
                    left = those
                    if not left:
                        break
                blocks += 1
            if left:
                found.append(Lead(blocks, block_tokens, left))
        return found

    def missing(self, link: InstanceLink, leads: Iterable[Lead], prompt: PromptKeys) -> int:
        """How many blocks of a prompt an instance has to compute."""
        lead = next(each for each in leads if self.has(each.members, link))
        return -(-prompt.token_count // lead.block_tokens) - lead.blocks

    # ---------------------------------------------------------------- what they are worth

    def weigh(self, members: Members, leads: Iterable[Lead]) -> list[EqualInstances]:
        """The worth of each for a prompt, the best first."""
        weights = self.weights
        counts = {link: self._failures_of(link, weights.failed_s) for link in self._failed}
        failing = {link: count for link, count in counts.items() if count}
        groups: list[EqualInstances] = []
        for lead in leads:
            cached = weights.cached_weight * lead.blocks
            of_lead = lead.members & members
            for link, failures in failing.items():
                if (bit := self._bits[link]) & of_lead:
                    worth = cached - self._busy[link]
                    groups.append(
                        EqualInstances(worth - weights.failed_weight * failures, lead, bit)
                    )
                    of_lead &= ~bit
            if of_lead:
                groups.extend(
                    EqualInstances(cached - busy, lead, those)
                    for busy, alike in self._as_busy.items()
                    if (those := alike & of_lead)
                )
        groups.sort(key=_worth, reverse=True)
        return groups

    def _failures_of(self, link: InstanceLink, failed_s: float) -> int:
        """How many prompts an instance failed to compute lately."""
        times = self._failed[link]
        since = asyncio.get_running_loop().time() - failed_s
        while times and times[0] < since:
            times.popleft()
        return len(times)

    # ---------------------------------------------------------------- whose turn it is

    def mask(self, links: Collection[InstanceLink]) -> Members:
        """These instances, as far as they are still there."""
        found = 0
        for link in links:
            found |= self._bits.get(link, 0)
        return found

    def has(self, members: Members, link: InstanceLink) -> bool:
        return bool(self._bits.get(link, 0) & members)

    def in_turn(self, members: Members) -> Iterator[InstanceLink]:
        """These, the one that was chosen the longest time ago first.

        Nothing is to be noted before the last of them was taken.
        """
        if members.bit_count() > FEW:
            for link in self._turns:
                if self._bits[link] & members:
                    yield link
            return
        found: list[InstanceLink] = []
        while members:
            last = members.bit_length() - 1
            there = self._links[last]
            assert there is not None
            found.append(there)
            members ^= 1 << last
        yield from sorted(found, key=self._turns.__getitem__)

    def note_chosen(self, link: InstanceLink) -> None:
        """It was an instance's turn."""
        self._choices += 1
        self._turns.pop(link, None)
        self._turns[link] = self._choices


class CachedBlocks:
    """The blocks that one instance has cached, in any tier, by its KV events."""

    def __init__(self, config: Config, bit: Members, holders: dict[bytes, Members]) -> None:
        self.config = config
        self._bit = bit
        self._holders = holders
        self._tiers: dict[str, int] = {}
        """A bit for each tier."""
        self._tiers_of: dict[bytes, int] = {}

    def take(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event.keys, event.tier)
            elif isinstance(event, BlocksRemoved):
                self._remove(event.keys, event.tier)
            else:
                self.clear()

    def missing(self, keys: list[bytes]) -> list[bytes]:
        """Those that it does not have."""
        tiers_of = self._tiers_of
        return [key for key in keys if key not in tiers_of]

    def expect(self, keys: list[bytes]) -> None:
        """It is going to compute these."""
        self._store(keys, EXPECTED)

    def expect_no_more(self, keys: list[bytes]) -> None:
        self._remove(keys, EXPECTED)

    def clear(self) -> None:
        """It has nothing any more."""
        for key in self._tiers_of:
            self._leave(key)
        self._tiers_of.clear()

    def _store(self, keys: list[bytes], name: str) -> None:
        tier = self._tiers.setdefault(name, 1 << len(self._tiers))
        tiers_of, holders, bit = self._tiers_of, self._holders, self._bit
        for key in keys:
            had = tiers_of.get(key, 0)
            if not had:
                holders[key] = holders.get(key, 0) | bit
            tiers_of[key] = had | tier

    def _remove(self, keys: list[bytes], name: str) -> None:
        tier = self._tiers.get(name, 0)
        for key in keys:
            had = self._tiers_of.get(key, 0)
            left = had & ~tier
            if left:
                self._tiers_of[key] = left
            elif had:
                del self._tiers_of[key]
                self._leave(key)

    def _leave(self, key: bytes) -> None:
        left = self._holders[key] & ~self._bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]


def _put(table: dict[Kind, Members], kind: Kind, bit: Members) -> None:
    table[kind] = table.get(kind, 0) | bit


def _take(table: dict[Kind, Members], kind: Kind, bit: Members) -> None:
    left = table[kind] & ~bit
    if left:
        table[kind] = left
    else:
        del table[kind]


def _rounded(busy: float) -> float:
    digits, exponent = math.frexp(busy)
    return math.ldexp(round(math.ldexp(digits, BUSY_DIGITS)), exponent - BUSY_DIGITS)


def _with(members: Members, bit: Members, *, there: bool) -> Members:
    return members | bit if there else members & ~bit


def _worth(group: EqualInstances) -> float:
    return group.worth
