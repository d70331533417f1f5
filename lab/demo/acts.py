"""What is played: chats beyond the device's room, a fork, a preemption, bit rot, new weights.

    device (arrays) ⇄ host (memory, write through) ⇄ archive (memory, write back)

Time is counted in steps of the engine, so one seed always plays the same, to the byte.

The one rule that must not break: an act does not only show, it checks. What is not as it must
be is a finding, and a demonstration with findings has failed.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from lab.demo.chats import Chat, draw_chats, draw_turn
from lab.demo.engine import Request, ToyEngine
from lab.demo.result import Act, Demonstration, TierTraffic, in_words
from lab.demo.toy_model import ToyModel, device_arrays, device_layout
from lab.demo.watching import Router, WatchedTier
from penstock.cache.explain import MissReason
from penstock.cache.settings import HUB
from penstock.config import parse_config
from penstock.runtime.base import Driven
from penstock.runtime.cache import Cache
from penstock.runtime.copy_executor import CopyExecutor
from penstock.runtime.driver import Driver
from penstock.runtime.rank_facts import Agreement
from penstock.runtime.rank_links import LocalLink
from penstock.tiers.arrays import ArrayTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.keys import KeyChain

if TYPE_CHECKING:
    from lab.demo.engine import Grant
    from penstock.vocabulary.ids import Key

SETTINGS = """
version = 1
model = { name = "toy", weights_version = "1", kv_dtype = "float16" }

[cache]
block_tokens = 16
blocks = 160
low_watermark = 0.05
high_watermark = 0.10
story_count = 16384

[[tiers]]
name = "host"
kind = "memory"
blocks = 256
write = "write_through"
low_watermark = 0.05
high_watermark = 0.10
quotas = { globex = 0.4 }

[[tiers]]
name = "archive"
kind = "memory"
blocks = 320
write = "write_back"
eviction = "s3fifo"
"""
CLIENTS = {
    "acme": ("ada", "ben", "cleo", "dan", "eve", "finn", "gus", "hana"),
    "globex": ("ida", "jon", "kim", "leo", "mia", "ned", "ola", "pia"),
}
TURN_COUNT = 6
STEP_S = 0.01
"""What a step of the engine counts for on the demonstration's clock."""
AUDIT_STEPS = 20
"""The whole state is audited so often; oftener would take longer than the chats."""


class _Play:
    """The engine, its clients, and what has been seen so far."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.config = parse_config(SETTINGS, source="demo")
        block_tokens = self.config.cache.block_tokens
        assert self.config.cache.device is not None
        block_count = self.config.cache.device.slot_count
        kv = device_arrays(block_count, block_tokens)
        device = ArrayTier(device_layout(block_count, block_tokens), list(kv))
        lower = [WatchedTier(device.layout, tier.slot_count) for tier in self.config.cache.tiers]
        self.host, self.archive = lower
        self.driver = Driver(
            self.config.cache,
            LocalLink(CopyExecutor([device, *lower], Algorithm.XXH3)),
            clock=lambda: self.engine.steps * STEP_S,
        )
        agreement = Agreement(settings=self.config.cache, device_slots=(block_count,), off=())
        self.cache = Cache(Driven(self.config, agreement, self.driver))
        self.engine = ToyEngine(self.cache, kv, ToyModel(weights=1))
        self.router = Router(self.cache)
        self.chats = draw_chats(self.rng, clients=CLIENTS, turn_count=TURN_COUNT)
        self.acts: list[Act] = []
        self.findings: list[str] = []
        self.bytes_damaged = 0
        self.story: tuple[str, ...] = ()
        self.story_of = ""

    def expect(self, *, holds: bool, otherwise: str) -> None:
        if not holds:
            self.findings.append(otherwise)

    def settle(self) -> None:
        """Lets every copy end, and checks the books."""
        while self.cache.busy:
            self.engine.step()
        self.router.listen()
        self.cache.audit()

    def tell(self, title: str, *told: str) -> None:
        self.acts.append(Act(title=title, told=told))

    def ask(self, chat: Chat) -> Request:
        """The client says its next message."""
        turn = chat.turns.pop(0)
        request = Request(
            name=chat.name,
            tenant=chat.tenant,
            tokens=[*chat.said, *turn.message],
            reply_count=turn.reply_count,
        )
        chat.turns_taken += 1
        chat.waiting = True
        self.engine.submit(request)
        return request

    def hear(self, chat: Chat, request: Request) -> None:
        """The client has its answer, and begins to think."""
        chat.said = list(request.tokens)
        chat.waiting = False
        if chat.turns:
            chat.ready_at = self.engine.steps + chat.turns[0].thinking_steps

    def take_turn(self, chat: Chat) -> Request:
        """One more turn of a chat, from the message to the end of the answer."""
        chat.turns.append(draw_turn(self.rng))
        request = self.ask(chat)
        self.engine.finish(request)
        self.hear(chat, request)
        return request

    def keys_of(self, chat: Chat) -> list[Key]:
        """The keys of a chat's full blocks."""
        chain = KeyChain(
            self.config.namespace(tenant=chat.tenant),
            block_tokens=self.config.cache.block_tokens,
            algorithm=self.config.hash,
        )
        return chain.extend(chat.said)

    def fill_device(self) -> None:
        """A long document takes every device block, and is not kept."""
        assert self.config.cache.device is not None
        count = self.config.cache.device.slot_count * self.config.cache.block_tokens - 1
        document = Request(
            name="a long document",
            tenant="acme",
            tokens=[self.rng.randrange(1000) for _ in range(count)],
            reply_count=1,
            store=False,
        )
        self.engine.submit(document)
        self.engine.finish(document)


def run_demo(seed: int) -> Demonstration:
    """Plays all acts from one seed."""
    play = _Play(seed)
    _chat(play)
    _fork(play)
    _preempt(play)
    _damage(play)
    _reset(play)
    return _conclude(play)


def _chat(play: _Play) -> None:
    """All clients talk; together they need more room than the device has."""
    engine = play.engine
    asked: dict[Request, Chat] = {}
    while asked or any(chat.turns for chat in play.chats):
        for chat in play.chats:
            if chat.turns and not chat.waiting and chat.ready_at <= engine.steps:
                asked[play.ask(chat)] = chat
        for request in engine.step():
            play.hear(asked.pop(request), request)
        play.router.listen()
        if engine.steps % AUDIT_STEPS == 0:
            play.cache.audit()
    play.settle()
    blocks = len({key for chat in play.chats for key in play.keys_of(chat)})
    statistics = play.cache.statistics()
    share = statistics.tokens_cached / statistics.tokens_asked
    device, host, archive = statistics.tiers
    play.tell(
        "Chats",
        f"{len(play.chats)} clients of {len(CLIENTS)} tenants took {TURN_COUNT} turns each, with 2 "
        "system prompts that all of them use.",
        f"They said {blocks} different blocks; the device has {device.slots} slots, host "
        f"{host.slots}, archive {archive.slots}.",
        f"{share:.0%} of the prompt tokens were found, "
        f"{engine.tally.preemptions} requests made way for others and came back.",
    )
    play.expect(
        holds=blocks > device.slots and host.tokens_cached > 0 and archive.tokens_cached > 0,
        otherwise="chats: the workload did not need all tiers",
    )


def _fork(play: _Play) -> None:
    """Two answers to one prompt share every full block, and neither writes to the other's."""
    chat = play.chats[0]
    chat.turns.append(draw_turn(play.rng))
    first = play.ask(chat)
    play.engine.run_until_prefilled(first)
    slots_before = play.cache.statistics().tiers[0].held
    second = play.engine.fork(first, f"{first.name} (second answer)")
    slots_after = play.cache.statistics().tiers[0].held
    play.engine.finish(first, second)
    play.hear(chat, first)
    play.settle()
    prompt = len(first.tokens) - first.reply_count
    answers = {tuple(request.tokens[prompt:]) for request in (first, second)}
    play.tell(
        "Fork",
        f"{first.name!r} was forked after its prompt of {prompt} tokens, and gave two "
        "different answers.",
        f"The fork itself took {slots_after - slots_before} slots; the unfinished block was "
        "copied when the first of the two was about to write to it.",
    )
    play.expect(
        holds=len(answers) == 2 and slots_after == slots_before,
        otherwise="fork: the answers are equal, or blocks were not shared",
    )


def _preempt(play: _Play) -> None:
    """A request gives its blocks back in the middle of its answer, and finds them again."""
    chat = play.chats[1]
    chat.turns.append(draw_turn(play.rng))
    request = play.ask(chat)
    play.engine.run_until_prefilled(request)
    for _ in range(4):
        play.engine.step()
    said_before = len(request.tokens)
    play.engine.preempt(request)
    play.fill_device()
    play.engine.finish(request)
    play.hear(chat, request)
    play.settle()
    play.tell(
        "Preemption",
        f"{request.name!r} gave its blocks back after {said_before} tokens; a long document took "
        "the whole device meanwhile.",
        f"On its return {request.cached_tokens} tokens were brought back, and it went on.",
    )
    full = (said_before - 1) // play.config.cache.block_tokens * play.config.cache.block_tokens
    play.expect(
        holds=request.cached_tokens == full,
        otherwise=f"preemption: {request.cached_tokens} tokens came back, {full} were full",
    )


def _damage(play: _Play) -> None:
    """Bits flip in host memory: the checksum finds them, and the blocks are computed anew."""
    chat = play.chats[2]
    play.take_turn(chat)
    play.fill_device()
    keys = play.keys_of(chat)
    damaged = _damage_host_copies(play, keys, count=2)
    corrupt_before = play.cache.statistics().blocks_corrupt
    chat.turns.append(draw_turn(play.rng))
    request = play.ask(chat)
    play.engine.run_until_checked(request)
    found, arrived = request.found_tokens, request.cached_tokens
    # The client hangs up and asks again: by then it is known why the block is not there.
    play.engine.abort(request)
    again = Request(
        name=f"{request.name} (again)",
        tenant=request.tenant,
        tokens=request.tokens,
        reply_count=request.reply_count,
    )
    play.engine.submit(again)
    play.engine.finish(again)
    play.hear(chat, again)
    play.settle()
    play.story_of, play.story = request.name, play.cache.story(request.name)
    corrupt = play.cache.statistics().blocks_corrupt - corrupt_before
    reason = play.engine.tally.grants[-1].miss.reason
    play.tell(
        "Bit rot",
        f"One bit was flipped in each of {len(damaged)} blocks of {chat.client}'s chat, in host "
        "memory, while they lay nowhere else.",
        f"The next turn found {found} tokens; on their way to the device {corrupt} blocks failed "
        f"their checksum, {arrived} tokens were used and the rest computed anew.",
        f"The client hung up and asked again; that request was told: {reason.value}.",
    )
    play.expect(
        holds=corrupt == len(damaged) == 2 and arrived < found and reason is MissReason.CORRUPT,
        otherwise=f"bit rot: {corrupt} of {len(damaged)} damaged blocks were found, "
        f"{arrived} of {found} tokens used, the reason told was {reason.value}",
    )


def _damage_host_copies(play: _Play, keys: list[Key], *, count: int) -> list[Key]:
    """Flips a bit in the last few blocks of a chain that lie in host memory and nowhere else."""
    blocks = play.cache.kv_snapshot().blocks
    present = {tier: {key for key, _ in rows} for tier, rows in blocks.items()}
    alone = [key for key in keys if key in present["host"] - present["device"] - present["archive"]]
    books = play.driver.machine._books  # noqa: SLF001 - only a demo of damage asks where it lies
    for key in alone[-count:]:
        slot = int(books.tier(HUB).slot_of[books.nodes.get(key)])
        play.host.damage(slot, play.rng.randrange(play.host.layout.block_bytes))
        play.bytes_damaged += 1
    return alone[-count:]


def _reset(play: _Play) -> None:
    """New weights: nothing computed with the old ones may be found, running requests go on."""
    engine = play.engine
    running = play.chats[3]
    running.turns.append(draw_turn(play.rng))
    request = play.ask(running)
    engine.run_until_prefilled(request)
    engine.model = ToyModel(weights=2)
    play.cache.reset("new weights")
    engine.finish(request)
    play.hear(running, request)
    grants_before = len(engine.tally.grants)
    for chat in play.chats[:4]:
        play.take_turn(chat)
    play.settle()
    grants = engine.tally.grants[grants_before:]
    first = grants[0]
    play.tell(
        "Reset",
        f"The weights changed while {request.name!r} was answering: it ended with the old ones, "
        "and what it computed was not kept.",
        f"{first.request!r} then found {first.cached_tokens} tokens, and was told: "
        f"{first.miss.reason.value}. The next turns were cached as ever.",
    )
    play.expect(
        holds=first.cached_tokens == 0 and first.miss.reason is MissReason.RESET,
        otherwise=f"reset: {first.request!r} found {first.cached_tokens} tokens, and was told "
        f"{first.miss.reason.value}",
    )


def _conclude(play: _Play) -> Demonstration:
    tally = play.engine.tally
    play.settle()
    statistics = play.cache.statistics()
    snapshot = {
        tier: {key for key, _ in rows} for tier, rows in play.cache.kv_snapshot().blocks.items()
    }
    known = {tier: play.router.present.get(tier, set()) for tier in snapshot}
    play.expect(
        holds=known == snapshot and not play.router.gaps,
        otherwise="KV events: what they told differs from the snapshot",
    )
    play.expect(
        holds=statistics.leases == 0 and all(tier.held == 0 for tier in statistics.tiers),
        otherwise="the end: blocks are still held although every request has ended",
    )
    examples: dict[str, Grant] = {}
    for grant in tally.grants:
        examples.setdefault(grant.miss.reason.value, grant)
    departed = [grant for grant in tally.grants if grant.miss.reason is MissReason.EVICTED]
    block_tokens = play.config.cache.block_tokens
    return Demonstration(
        seed=play.seed,
        acts=tuple(play.acts),
        statistics=statistics,
        traffic=tuple(
            TierTraffic(
                tier=tier.name,
                slots=tier.slots,
                stored=play.router.stored.get(tier.name, 0),
                removed=play.router.removed.get(tier.name, 0),
                present=len(snapshot[tier.name]),
            )
            for tier in statistics.tiers
        ),
        misses=examples,
        tokens_computed=tally.tokens_computed,
        tokens_recomputed=tally.recomputed_tokens,
        bytes_verified=tally.bytes_verified,
        sums_made=play.host.sums_made + play.archive.sums_made,
        sums_checked=play.host.sums_checked + play.archive.sums_checked,
        bytes_damaged=play.bytes_damaged,
        preemptions=tally.preemptions,
        story=play.story,
        story_of=play.story_of,
        explained=in_words((departed or tally.grants)[0], block_tokens=block_tokens),
        findings=(*tally.differences, *play.findings),
    )
