"""Which of an engine's requests are handed over, their blocks, and the thread that does it.

    thread = HandoffThread("prefill-0", handoffs)
    thread.post(handoffs.first_token, "request-1", 42)      # from the engine's thread
    thread.close()

    expect       ─→ a request is queued: who computes its prompt, who answers it
    find_tokens  ─→ how many tokens another engine computes for it
    start_claim  ─→ the engine allocated blocks for them
    plan_step    ─→ which prompts a step computes, which claims have ended
    finish       ─→ what a client must pass on to the decode engine

A request says what it is by its `kv_transfer_params`, with the names that vLLM's own connectors
use, so proxies that know those need no change:

| key                  | prefill engine              | decode engine                             |
|----------------------|-----------------------------|-------------------------------------------|
| `do_remote_decode`   | true: others answer it      |                                           |
| `do_remote_prefill`  |                             | true: it was, or is being computed        |
| `penstock.handoff`   | its name, if a router drew one | its name                               |
| `penstock.address`   |                             | of the prefill engine                     |

Everything here is called by the engine's own thread.

A prompt may be asked for from the moment that its request is queued; each step that computes it
says which blocks it adds, and ranks send what is in them while later steps compute. Until its last
step its blocks are the request's own, which the engine may preempt: then ranks let go of them
before the step begins that gives them to others. From its last step on, or its abort, they are
pinned.

The rules:

- After it was started, only the thread calls what it runs. Calls that were posted are made in their
  order.
- The engine is told of the end of a claim once, and does not use or free the blocks of the claim
  before.
- A claim is made when no step under way can write to its blocks. An engine that plans a step before
  the last one has ended may have given it blocks that the last one still writes to, for a request
  that has ended meanwhile.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, NamedTuple, ParamSpec

import msgspec

from penstock.connectors.base.keys import PARAMETER
from penstock.connectors.base.statistics import RateLimitedLog
from penstock.connectors.handoff.rank import AddedBlocks
from penstock.connectors.handoff.scheduler import (
    ClaimEnded,
    GivenPrompt,
    PromptClaim,
    PromptReleased,
)
from penstock.errors import InvariantViolation
from penstock.transport.waiting import wait_any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.connectors.base.keys import EngineRequest
    from penstock.connectors.base.requests import BlockPool
    from penstock.connectors.base.statistics import Counters
    from penstock.connectors.handoff.rank import RankSides
    from penstock.connectors.handoff.scheduler import SchedulerHandoffs


if TYPE_CHECKING:
    Arguments = ParamSpec("Arguments")

LOOK_S = 1.0
"""How often it steps at least: the longest that a timer nobody told it about is late."""
MAKE_S = 60.0
"""How long `make` waits for a call: the thread does bounded work in between."""
WAIT_S = 0.002
"""How long an engine that can compute nothing waits for a prompt. A request that comes meanwhile
waits for as long."""
CLOSE_S = 10.0
"""How long `close` waits for a step that is under way."""


@contextmanager
def engine_cores() -> Iterator[None]:
    """Threads that start meanwhile may run on all cores of the engine, whose child this worker is.

    vLLM binds a worker's first thread to one core, and has it poll there for a second after each
    step. A thread that it starts would be bound to that core, too, and get little of it: nothing at
    all for a minute, where a second engine's worker polls on the same one (Linux 6.18).
    """
    own = os.sched_getaffinity(0)
    # The parent has ended, or is in another set of cores.
    with suppress(OSError):
        os.sched_setaffinity(0, own | os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


class HandoffThread:
    """Runs handoffs until it is closed: their `step` when they have work, or wait no more."""

    def __init__(
        self,
        name: str,
        handoffs: RankSides | SchedulerHandoffs,
        *,
        begin: Callable[[], None] | None = None,
    ) -> None:
        """Starts it; it makes the call `begin` first, if that is given."""
        self._name = name
        self._handoffs = handoffs
        self._begin = begin
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stops = False
        self._thread = Thread(target=self._run, name=f"penstock handoff {name}", daemon=True)
        self._thread.start()

    def post(
        self,
        call: Callable[Arguments, object],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> None:
        """Has the thread make a call.

        Raises `InvariantViolation`: the thread has ended by an error of ours, which it has logged.
        """
        self.require()
        self._calls.put(lambda: call(*args, **kwargs))
        os.eventfd_write(self._wake, 1)

    def make(
        self,
        call: Callable[Arguments, object],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> None:
        """Has the thread make a call, and waits until it was made.

        Raises `InvariantViolation`: the thread has ended by an error of ours, or hangs.
        """
        made = Event()

        def making() -> None:
            call(*args, **kwargs)
            made.set()

        self.post(making)
        if not made.wait(MAKE_S):
            raise InvariantViolation(
                f"the handoff thread of {self._name!r} did not make a call within {MAKE_S:g} s"
            )

    def require(self) -> None:
        """Checks that it runs: otherwise nothing that is under way would ever end.

        Raises `InvariantViolation`: it has ended by an error of ours.
        """
        if not self._thread.is_alive() and not self._stops:
            raise InvariantViolation(f"the handoff thread of {self._name!r} has ended")

    def close(self) -> None:
        """Ends the thread and what it runs; a second call changes nothing."""
        if self._stops:
            return
        self._stops = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _run(self) -> None:
        try:
            if self._begin is not None:
                self._begin()
            while not self._stops:
                self._make_calls()
                self._handoffs.step()
                if not self._handoffs.has_work and self._calls.empty():
                    self._wait()
        finally:
            self._handoffs.close()

    def _make_calls(self) -> None:
        # Those that are there now: a caller without end does not keep `step` waiting.
        for _ in range(self._calls.qsize()):
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            call()

    def _wait(self) -> None:
        due = self._handoffs.next_deadline()
        latest = time.monotonic() + LOOK_S
        descriptors = [*self._handoffs.descriptors, self._wake]
        deadline = latest if due is None else min(due, latest)
        ready = wait_any(self._handoffs.waitables, descriptors, deadline=deadline)
        if self._wake in ready.descriptors:
            os.eventfd_read(self._wake)


if TYPE_CHECKING:
    Tables = Sequence[Sequence[int]]

NAME_CHARS_MAX = 200
"""Of a handoff and of an address: longer ones are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffStep:
    """From the scheduler's side to every worker, once a step; pickled by the engine."""

    computed: Mapping[str, int] = field(default_factory=dict)
    """How many leading tokens of each prompt are computed when the step has ended."""
    restarted: tuple[str, ...] = ()
    """Prompts that have lost their blocks: nothing of this step may be computed before ranks have
    let go of them."""
    added: Mapping[str, AddedBlocks] = field(default_factory=dict)
    """Blocks that this step adds to prompts."""
    received: frozenset[str] = frozenset()
    """Requests whose claims have ended."""
    failed: frozenset[str] = frozenset()
    """Those of them whose prompts the engine must compute."""


@dataclass(slots=True)
class _Offered:
    """A request whose prompt this engine computes for another one."""

    request: EngineRequest
    handoff: str
    first_blocks: Sequence[int] = ()
    """The block that is first sent of each KV group."""
    slots: list[list[int]] = field(default_factory=list)
    """The blocks of each KV group from there on, as far as the engine has taken them."""
    tokens: int = 0
    """How many leading tokens are computed, or in the last step that was planned."""
    begun: bool = False
    """Whether a step was planned that computes some of it."""
    whole: bool = False
    """Whether its last step was planned."""


@dataclass(slots=True)
class _Claimed:
    """A request whose prompt another engine computes."""

    request: EngineRequest
    handoff: str
    address: str
    tokens: int = 0
    """What is being handed over."""
    open: bool = True
    """Whether it may still be claimed."""
    under_way: bool = False


class EngineBlocks(NamedTuple):
    """How an engine deals with blocks."""

    tokens: int
    """Of a block."""
    skipped: Callable[[int], Sequence[int]]
    """How many leading blocks of a prompt with so many tokens each KV group does not keep."""
    null: int | None = None
    """The block that stands for those which have left a window, where a KV group has one."""
    claim_steps: int = 0
    """How many steps after its allocation a block is written to by no earlier step."""


class HandoffRequests:
    """The requests of one engine that are handed over."""

    def __init__(
        self,
        thread: HandoffThread,
        handoffs: SchedulerHandoffs,
        pool: BlockPool,
        *,
        counters: Counters,
        blocks: EngineBlocks,
        answer: Mapping[str, object],
        prefills: bool,
        decodes: bool,
    ) -> None:
        """Opens it."""
        self._thread = thread
        self._handoffs = handoffs
        self._pool = pool
        self._counters = counters
        self._tokens = blocks.tokens
        self._address = handoffs.address
        self._answer = dict(answer)
        self._prefills = prefills
        self._decodes = decodes
        self._skipped_blocks = blocks.skipped
        self._null_block = blocks.null
        self._claim_steps = blocks.claim_steps
        self._step = 0
        self._early: deque[tuple[int, PromptClaim]] = deque()
        """Claims whose blocks a step under way may still write to, and the step that makes them."""
        self._offered: dict[str, _Offered] = {}
        self._claimed: dict[str, _Claimed] = {}
        self._claims: dict[str, _Claimed] = {}
        """Claims under way, by handoff; their requests may have been aborted."""
        self._pins: dict[str, list[int]] = {}
        """Blocks that are pinned for prompts that were given and not released, by handoff."""
        self._warnings = RateLimitedLog()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._ended = Event()
        """Set when something has ended that was not collected."""
        handoffs.on_event = self._ended.set

    @property
    def pending(self) -> bool:
        """Whether the engine must step for something that has ended."""
        return bool(self._handoffs.events or self._received or self._early)

    @property
    def receiving(self) -> bool:
        """Whether prompts are on their way from other engines."""
        return bool(self._claims)

    def expect(self, request: EngineRequest) -> None:
        """A request is queued.

        Wrong parameters are counted by whoever reads the other switches of `kv_transfer_params`.
        """
        params = request.kv_transfer_params
        if not isinstance(params, dict) or request.prompt_embeds is not None or request.resumable:
            return
        own = params.get(PARAMETER)
        handoff, address = (_text(own, key) for key in ("handoff", "address"))
        if params.get("do_remote_decode") and self._prefills:
            name = handoff or f"{request.request_id[:100]}-{secrets.token_hex(8)}"
            self._give(_Offered(request, name))
        elif params.get("do_remote_prefill") and self._decodes and handoff and address:
            self._claimed[request.request_id] = _Claimed(request, handoff, address)
            self._thread.post(self._handoffs.meet, address)

    def find_tokens(self, request: EngineRequest, computed: int) -> int:
        """How many tokens after the first `computed` another engine computes for a request."""
        claimed = self._claimed.get(request.request_id)
        if claimed is None or not claimed.open:
            return 0
        if claimed.handoff in self._claims:
            # Two requests name one handoff: the other one has it.
            claimed.open = False
            return 0
        missing = self._handed_tokens(request) - computed
        if missing > self._tokens:
            return missing
        # Computing a block is quicker than asking for it.
        self._spare(claimed)
        return 0

    def give_up(self, request: EngineRequest) -> None:
        """A request is computed here, whatever another engine has computed for it."""
        claimed = self._claimed.get(request.request_id)
        if claimed is not None and claimed.open:
            self._spare(claimed)

    def start_claim(self, request: EngineRequest, tables: Tables, external: int) -> None:
        """The engine has allocated blocks for the tokens that `find_tokens` promised."""
        claimed = self._claimed[request.request_id]
        claimed.open, claimed.under_way, claimed.tokens = False, True, external
        count = self._handed_tokens(request)
        first = (count - external) // self._tokens
        self._claims[claimed.handoff] = claimed
        claim = PromptClaim(
            claimed.handoff,
            claimed.address,
            list(request.all_token_ids[:count]),
            [self._kept(table[first : self._blocks(count)]) for table in tables],
            _origin(request),
        )
        # The engine plans this step when its blocks are allocated: that is no later step.
        later = self._claim_steps + 1 if self._claim_steps else 0
        self._early.append((self._step + later, claim))
        self._make_claims()

    def is_claimed(self, request: EngineRequest) -> bool:
        """Whether the tokens that were promised for a request come from another engine."""
        claimed = self._claimed.get(request.request_id)
        return claimed is not None and claimed.open

    def is_offered(self, request: EngineRequest) -> bool:
        """Whether another engine may get the KV of a request, as soon as it is in its blocks."""
        return request.request_id in self._offered

    def plan_step(
        self,
        scheduled: Mapping[str, int],
        tables: Callable[[str], Tables],
        preempted: Iterable[str] = (),
    ) -> HandoffStep | None:
        """What every worker has to know of handoffs in this step; `None` in most steps."""
        self._step += 1
        self._make_claims()
        self._collect()
        if not self._offered and not self._received:
            return None
        restarted = self._restart(preempted)
        computed: dict[str, int] = {}
        added: dict[str, AddedBlocks] = {}
        for name, token_count in scheduled.items():
            offered = self._offered.get(name)
            if offered is None or offered.whole:
                continue
            if offered.request.num_computed_tokens < offered.tokens:
                # The engine has taken a step back: what it computed is void.
                restarted.append(self._lose_blocks(offered))
            blocks = self._extend(offered, token_count, tables(name))
            if blocks is not None:
                added[offered.handoff] = blocks
                computed[offered.handoff] = offered.tokens
        received, self._received = frozenset(self._received), set()
        failed, self._failed = frozenset(self._failed), set()
        if not (computed or restarted or received):
            return None
        return HandoffStep(
            computed=computed,
            restarted=tuple(restarted),
            added=added,
            received=received,
            failed=failed,
        )

    def wait(self) -> None:
        """The engine can compute nothing: waits for a prompt on its way here, a short time.

        Otherwise the engine would step without a pause, and take the interpreter from the threads
        that bring the prompt.
        """
        if self._claims and not self.pending:
            self._ended.wait(WAIT_S)

    def finish(self, request: EngineRequest, *, completed: bool) -> dict[str, object] | None:
        """A request has ended; returns what the client must pass on to a decode engine."""
        claimed = self._claimed.pop(request.request_id, None)
        if claimed is not None and claimed.under_way:
            self._cancel(claimed, "the request was aborted")
        elif claimed is not None and claimed.open:
            self._spare(claimed)
        offered = self._offered.pop(request.request_id, None)
        if offered is None:
            return None
        if not (completed and offered.whole and request.num_tokens > request.num_prompt_tokens):
            self._drop(offered, "the request was aborted")
            return None
        first_token = request.all_token_ids[request.num_prompt_tokens]
        self._thread.post(self._handoffs.first_token, offered.handoff, first_token)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": request.request_id,
            "remote_num_tokens": request.num_prompt_tokens,
            **self._answer,
            PARAMETER: {"handoff": offered.handoff, "address": self._address},
        }

    def reset(self) -> None:
        """What was computed is void: prompts are not handed over, claims fail."""
        waiting = {each.handoff for each in self._offered.values() if not each.begun}
        for handoff in self._pins.keys() - waiting:
            self._thread.post(self._handoffs.drop, handoff, "the engine was reset")
        for claimed in [*self._claims.values()]:
            self._cancel(claimed, "the engine was reset")

    def close(self) -> None:
        """Ends the scheduler's pairs."""
        self._thread.close()

    def _make_claims(self) -> None:
        """Makes the claims whose blocks no step writes to any more."""
        while self._early and self._early[0][0] <= self._step:
            self._thread.post(self._handoffs.claim, self._early.popleft()[1])

    def _cancel(self, claimed: _Claimed, why: str) -> None:
        """Ends a claim; one that was not made yet ends at once."""
        early = [each for each in self._early if each[1].handoff != claimed.handoff]
        if len(early) == len(self._early):
            self._thread.post(self._handoffs.cancel_claim, claimed.handoff)
            return
        self._early = deque(early)
        ended = self._claims.pop(claimed.handoff)
        self._spare(ended)
        self._end_claim(ended, ClaimEnded(claimed.handoff, why=why))

    def _collect(self) -> None:
        if self._claims:
            self._thread.require()
        self._ended.clear()
        events = self._handoffs.events
        while events:
            match events.popleft():
                case PromptReleased(handoff=handoff, outcome=outcome):
                    blocks = [self._pool.blocks[each] for each in self._pins.pop(handoff)]
                    self._pool.free_blocks(blocks)
                    delivered = outcome == "delivered"
                    self._counters.add("prompts_sent" if delivered else "prompts_not_sent")
                case ClaimEnded() as ended:
                    self._end_claim(self._claims.pop(ended.handoff), ended)

    def _end_claim(self, claimed: _Claimed, ended: ClaimEnded) -> None:
        claimed.under_way = False
        name = claimed.request.request_id
        self._received.add(name)
        if ended.delivered:
            self._counters.add("prompts_received")
            self._counters.add("tokens_received", claimed.tokens)
            return
        self._failed.add(name)
        if name in self._claimed:
            self._counters.add("prompts_not_received")
            self._counters.add("prompts_lost", int(ended.lost))
            self._warnings.warn(
                "handoff lost" if ended.lost else "handoff",
                "a prompt is computed here, its handoff %s: request=%s handoff=%s cause=%s",
                "was lost with the prefill engine" if ended.lost else "failed",
                name,
                ended.handoff,
                ended.why,
            )

    def _extend(self, offered: _Offered, token_count: int, tables: Tables) -> AddedBlocks | None:
        """The blocks that a step adds to a prompt; `None` if nobody gets it, or not any more."""
        request = offered.request
        known = min(request.num_computed_tokens + token_count, request.num_prompt_tokens)
        offered.tokens = min(known, self._handed_tokens(request))
        offered.begun = True
        offered.whole = known == request.num_prompt_tokens
        if offered.handoff not in self._pins:
            return None
        before, end = sum(map(len, offered.slots)), self._blocks(offered.tokens)
        groups = tuple(
            tuple(table[first + len(slots) : end])
            for slots, first, table in zip(offered.slots, offered.first_blocks, tables, strict=True)
        )
        if any(self._null_block in blocks for blocks in groups):
            self._drop(offered, "blocks of its window are not there")
            return None
        for slots, blocks in zip(offered.slots, groups, strict=True):
            slots.extend(blocks)
        if offered.whole:
            self._pin(offered)
        return AddedBlocks(before, groups)

    def _give(self, offered: _Offered) -> None:
        """Lets decode engines have a prompt: they ask before its first tokens are computed."""
        count = self._handed_tokens(offered.request)
        if offered.handoff in self._pins or not count:
            # A router has used a name twice: the earlier prompt has it.
            return
        # Of a group with a window, only what is in it when the prompt is computed.
        offered.first_blocks = [
            min(each, self._blocks(count)) for each in self._skipped_blocks(count)
        ]
        offered.slots = [[] for _ in offered.first_blocks]
        self._offered[offered.request.request_id] = offered
        self._pins[offered.handoff] = []
        prompt = GivenPrompt(
            offered.handoff,
            list(offered.request.all_token_ids[:count]),
            offered.first_blocks,
            _origin(offered.request),
        )
        self._thread.post(self._handoffs.give, prompt)

    def _pin(self, offered: _Offered) -> None:
        """Keeps the blocks of a prompt until it is released, whatever its request does."""
        pins = self._pins.get(offered.handoff)
        if pins is not None and not pins:
            pins += [each for group in offered.slots for each in group]
            self._pool.touch([self._pool.blocks[each] for each in pins])

    def _restart(self, preempted: Iterable[str]) -> list[str]:
        """Prompts that are computed anew; one that was computed whole is not handed over."""
        found: list[str] = []
        for name in preempted:
            offered = self._offered.get(name)
            if offered is None:
                continue
            if offered.whole:
                self._drop(offered, "it was preempted")
            else:
                found.append(self._lose_blocks(offered))
        return found

    def _drop(self, offered: _Offered, why: str) -> None:
        """A prompt is not handed over: whoever asks for it is told."""
        self._pin(offered)
        self._thread.post(self._handoffs.drop, offered.handoff, why)

    def _lose_blocks(self, offered: _Offered) -> str:
        offered.tokens = 0
        offered.slots = [[] for _ in offered.slots]
        return offered.handoff

    def _spare(self, claimed: _Claimed) -> None:
        claimed.open = False
        if claimed.handoff not in self._claims:  # Else another request has it.
            self._thread.post(self._handoffs.spare, claimed.address, claimed.handoff)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._tokens)

    def _handed_tokens(self, request: EngineRequest) -> int:
        """How many leading tokens of a prompt are handed over.

        Where a KV group has a window, all but the last, which the decode engine computes anyway:
        vLLM keeps the window of the token *after* those that it was promised, and the window of the
        last token may begin in the block before.
        """
        return request.num_prompt_tokens - (self._null_block is not None)

    def _kept(self, blocks: Sequence[int]) -> list[int]:
        """The last blocks of a table: those before them have left the window."""
        gone = [at for at, block in enumerate(blocks) if block == self._null_block]
        return list(blocks[gone[-1] + 1 :] if gone else blocks)


def _text(own: object, key: str) -> str:
    """A text of `kv_transfer_params.penstock`; empty if it is not there or makes no sense."""
    value = own.get(key) if isinstance(own, dict) else None
    if not isinstance(value, str) or len(value) > NAME_CHARS_MAX or not value.isprintable():
        return ""
    return value


def _origin(request: EngineRequest) -> str:
    """What the KV of a prompt depends on besides model, weights and tokens."""
    adapter = request.lora_request
    facts = (
        request.cache_salt or "",
        () if adapter is None else (adapter.lora_name, adapter.lora_path),
        [(item.modality, item.identifier, item.mm_position.offset) for item in request.mm_features],
    )
    return blake2b(msgspec.msgpack.encode(facts), digest_size=16).hexdigest()
