"""The prefill rank: writes what is computed, wanted, and has a free berth.

Watermarks record how far the computation is; sets record which parts were written and which the
target has. Neither ever goes back, except by a new epoch or a new area, or where a prompt is
computed anew.

Progress of layers and chunks, claims and stops come in any order. After each of them the rank
writes whatever is allowed by now. It waits for no other rank (P1, P8).

A target's landing area consists of berths, each for one part. A berth belongs to the writer until
it writes; then to the target, until the target has verified and moved the part and claims again. So
the number of berths is the credit of this writer.

Invariants:

- A berth is written to again only when the write before was observed to end *and* the target is
  through with it (P14).
- `Stopped` and `Released` are sent only when every write that they speak of was observed to end
  (P15, P16).
- Nothing is read for an earlier life of the scheduler once the next one has given work, or a
  message of it came (P16).
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.errors import InvariantViolation
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.effects import AbandonWrite, Write, notice_of
from penstock.handoff.protocol.grid import from_bytes
from penstock.handoff.protocol.identity import Identity, Life, WriteId
from penstock.handoff.protocol.party import Party, Standing
from penstock.handoff.protocol.states import WANT_MOVES, Role, WantMove, WantState, advance

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.handoff.protocol.effects import AnyEffect
    from penstock.handoff.protocol.grid import Grid
    from penstock.handoff.protocol.party import TimerKey
    from penstock.handoff.protocol.settings import HandoffSettings


class Prompt(NamedTuple):
    """A prompt whose KV this rank computes."""

    token_count: int
    layer_first: int
    watermarks: tuple[int, ...]
    """Tokens ready in each layer of this rank."""

    def covers(self, grid: Grid) -> bool:
        """Whether the prompt and this rank have all that a grid asks for."""
        blocks = -(-self.token_count // grid.block_tokens)
        return (
            self.layers.start <= grid.layer_first
            and grid.layer_first + grid.layer_count <= self.layers.stop
            and grid.block_first + grid.block_count <= blocks
        )

    @property
    def layers(self) -> range:
        """The layers of this rank."""
        return range(self.layer_first, self.layer_first + len(self.watermarks))

    def raised(self, tokens: int, layers: range) -> Prompt:
        """The prompt after `tokens` tokens are ready in these layers."""
        marks = [*self.watermarks]
        for at in range(layers.start - self.layer_first, layers.stop - self.layer_first):
            marks[at] = max(marks[at], tokens)
        return Prompt(self.token_count, self.layer_first, tuple(marks))

    def restarted(self) -> Prompt:
        """The prompt after its blocks were lost."""
        return self._replace(watermarks=(0,) * len(self.watermarks))


class Want(NamedTuple):
    """What one decode rank wants of one prompt."""

    state: WantState
    epoch: int
    grid: Grid
    have: int = 0
    """The set of parts that the target has."""
    posted: int = 0
    """The set of parts that were written and, as far as we know, need not be written again."""
    ready: int = 0
    """The set of parts that are computed."""
    spoiled: tuple[int, ...] = ()
    """Parts whose first attempt was not intact; then their second; and so on."""

    @property
    def sendable(self) -> int:
        """The set of parts to write as soon as a berth is free."""
        return self.ready & ~(self.posted | self.have) if self.state is WantState.OPEN else 0

    def attempt_of(self, part: int) -> int:
        """Which attempt at a part is the next."""
        return sum([spoiled >> part & 1 for spoiled in self.spoiled]) if self.spoiled else 0

    def merged(self, have: int, spoiled: tuple[int, ...]) -> Want:
        """The want after a claim of its epoch, which may be older than others before it."""
        if not spoiled:  # As nearly always: nothing is asked for again.
            return self.with_parts(self.have | have, self.posted, self.ready)
        pairs = list(zip_longest(self.spoiled, spoiled, fillvalue=0))
        again = 0
        for before, after in pairs:
            again |= after & ~before
        return self._replace(
            have=self.have | have,
            posted=self.posted & ~again,
            spoiled=tuple(before | after for before, after in pairs),
        )

    def with_parts(self, have: int, posted: int, ready: int) -> Want:
        """The want with other sets of parts."""
        # Written out because it is done for every part: `_replace` takes four times as long.
        return Want(self.state, self.epoch, self.grid, have, posted, ready, self.spoiled)

    def computed(self, prompt: Prompt, layers: range | None = None) -> Want:
        """The want after its prompt made progress, in these layers or in any."""
        marks, first, tokens = prompt.watermarks, prompt.layer_first, prompt.token_count
        ready = self.ready | self.grid.ready(marks, first, tokens, layers)
        return self if ready == self.ready else self.with_parts(self.have, self.posted, ready)


class Lane(NamedTuple):
    """The landing area of one life of one target, as its writer sees it."""

    target: Life
    generation: int
    berth_count: int
    free: int
    """The set of berths that are ours to write to."""
    poisoned: bool = False
    """A write failed and may land yet: nothing more is written into this generation."""

    def holds(self, write: WriteId) -> bool:
        """Whether a write went into this area."""
        return self.target == write.target and self.generation == write.generation

    def with_free(self, free: int) -> Lane:
        """The area with another set of berths that are ours."""
        return Lane(self.target, self.generation, self.berth_count, free, self.poisoned)


class Posted(NamedTuple):
    """How far a write is."""

    observed: bool = False
    """It was seen to have ended."""
    settled: bool = False
    """The target is through with it, or does not want it."""
    sums: bytes = b""


_POSTED = Posted()


class PrefillRank(Party):
    """One rank of a prefill engine."""

    role = Role.PREFILL_RANK

    def __init__(self, identity: Identity, settings: HandoffSettings, *, scheduler: str) -> None:
        super().__init__(identity, settings)
        self.scheduler = scheduler
        self.prompts: dict[str, Prompt] = {}
        self.wants: dict[str, dict[str, Want]] = {}
        """By target, then by handoff, the oldest first: that is the order of service."""
        self.lanes: dict[str, Lane] = {}
        self.writes: dict[WriteId, Posted] = {}
        """Writes that were not observed to end, or whose berth is not ours yet."""
        self.stops: dict[tuple[str, str], int] = {}
        """Stops that wait for a write to end, by target and handoff: their epochs."""
        self.releases: dict[str, None] = {}
        """Releases that wait for a write to end."""

    # Calls of the engine and the driver.

    def admit(
        self,
        handoff: str,
        *,
        token_count: int,
        layers: range,
        now: float,
        scheduler: int | None = None,
    ) -> list[AnyEffect]:
        """The rank is going to compute a prompt whose KV may be claimed.

        One that was released already (cancelled before it got here) is left alone.
        Raises `ValueError`: the prompt is known, or has no tokens or layers; or that life of the
        scheduler is over.
        """
        if handoff in self.prompts:
            raise ValueError(f"handoff is {handoff!r}, which was admitted already")
        if token_count < 1 or not layers or layers.step != 1:
            raise ValueError(f"need tokens and layers, got {token_count} and {layers}")
        if scheduler is not None and self._is_over(scheduler):
            raise ValueError(
                f"scheduler is {scheduler:016x}, a life of {self.scheduler!r} that is over"
            )
        self._start(now)
        if scheduler is not None:
            self._serve(scheduler)
        if not self._is_released(handoff):
            self.prompts[handoff] = Prompt(token_count, layers.start, (0,) * len(layers))
            for target, wants in self.wants.items():
                if handoff in wants:
                    self._open(target, handoff)
        return self.effects

    def progress(self, handoff: str, *, layer: int, tokens: int, now: float) -> list[AnyEffect]:
        """The KV of the first `tokens` tokens is there in one layer.

        Layers may come in any order, late or twice: the watermark only rises. What comes after
        the release is left alone.
        Raises `ValueError`: the prompt was never admitted, or has no such layer or token.
        """
        prompt = self.require_progress(handoff, layer=layer, tokens=tokens)
        self._start(now)
        if prompt is not None:
            self._raise(handoff, prompt, tokens, range(layer, layer + 1))
        return self.effects

    def chunk_progress(self, handoff: str, *, tokens: int, now: float) -> list[AnyEffect]:
        """The KV of the first `tokens` tokens is there in every layer of this rank.

        Raises `ValueError`: as for `progress`.
        """
        prompt = self.require_progress(handoff, layer=None, tokens=tokens)
        self._start(now)
        if prompt is not None:
            self._raise(handoff, prompt, tokens, prompt.layers)
        return self.effects

    def restart(self, handoff: str, now: float) -> list[AnyEffect]:
        """The prompt has lost its blocks, and is computed anew in others (P8).

        Nothing is read for it until progress comes again: the caller carries the effects out
        before others get the blocks. Parts that a target has, or that were read, stay as they are.
        Raises `ValueError`: the prompt was never admitted.
        """
        prompt = self._known(handoff)
        self._start(now)
        if prompt is not None:
            self.prompts[handoff] = prompt.restarted()
            for wants in self.wants.values():
                if handoff in wants:
                    wants[handoff] = wants[handoff]._replace(ready=0)
        # Also of one that was released while something was to be read of it.
        self._abandon_writes(handoff)
        return self.effects

    def require_progress(self, handoff: str, *, layer: int | None, tokens: int) -> Prompt | None:
        """The prompt of which so much may be reported; none if it was released.

        Raises `ValueError`: as for `progress`.
        """
        prompt = self._known(handoff)
        if prompt is not None:
            count = len(prompt.watermarks)
            if layer is not None and not 0 <= layer - prompt.layer_first < count:
                first, last = prompt.layers[0], prompt.layers[-1]
                raise ValueError(f"layer is {layer}, must be from {first} to {last} on this rank")
            if not 0 <= tokens <= prompt.token_count:
                raise ValueError(f"tokens is {tokens}, must be from 0 to {prompt.token_count}")
        return prompt

    def write_done(self, write: WriteId, now: float, *, sums: bytes = b"") -> list[AnyEffect]:
        """A write was observed to have ended well; `sums` are what its notice carried.

        Raises `ValueError`: no such write is under way.
        """
        return self.writes_done([(write, sums)], now)

    def writes_done(self, writes: Sequence[tuple[WriteId, bytes]], now: float) -> list[AnyEffect]:
        """Writes into one area were observed to have ended well, with the sums of each.

        Raises `ValueError`: one of them is not under way; nothing has changed then.
        """
        for write, _ in writes:
            self._under_way(write)
        self._start(now)
        self._count("parts written", len(writes))
        for write, sums in writes:
            settled = self.writes[write].settled
            self.writes[write] = Posted(observed=True, settled=settled, sums=sums)
            lane = self.lanes.get(write.target.name)
            if settled or lane is None or not lane.holds(write):
                self._free(write)
            else:
                self._asked(write.target.name, write)
        if self.stops or self.releases:
            for write, _ in writes:
                self._answer_after(write)
        target = writes[0][0].target.name
        self._pump(target)
        self._keep_noticing(target)
        return self.effects

    def write_failed(self, write: WriteId, now: float) -> list[AnyEffect]:
        """A write ended with an error: it may land yet, so its area is not safe any more (P17).

        Raises `ValueError`: no such write is under way.
        """
        self._under_way(write)
        self._start(now)
        del self.writes[write]
        self._count("writes failed")
        lane = self.lanes.get(write.target.name)
        if lane is not None and lane.holds(write):
            self.lanes[write.target.name] = lane._replace(poisoned=True)
            self._send_poisoned(write.target.name)
        self._after_end(write)
        return self.effects

    def write_dropped(self, write: WriteId, now: float) -> list[AnyEffect]:
        """A write that was abandoned has ended, and nothing of it is moved any more (P16).

        Its notice was not given, so its berth is ours again.
        Raises `ValueError`: no such write is under way.
        """
        self._under_way(write)
        self._start(now)
        self._count("writes dropped")
        self._owe_again(write)
        self._free(write)
        self._after_end(write)
        return self.effects

    # Messages.

    def _on_message(self, message: msg.AnyMessage) -> None:
        match message:
            case msg.Claim():
                self._on_claim(message)
            case msg.Stop():
                self._on_stop(message)
            case msg.ReleaseBlocks() if message.sender.name == self.scheduler:
                self._let_go(message.handoff)
                self.releases[message.handoff] = None
                self._answer_release(message.handoff)
            case _:
                self._refuse("not for this role")

    def _on_claim(self, claim: msg.Claim) -> None:
        problem = self._problem_of(claim)
        if problem:
            self._refuse(problem)
            return
        if not self._enter(claim):
            self._refuse("for an earlier area")
            return
        target = claim.sender.name
        have = from_bytes(claim.have)
        spoiled = tuple(from_bytes(each) for each in claim.spoiled)
        unsettled = len(self.writes)
        self._settle_parts(claim, have, spoiled)
        if len(self.writes) < unsettled:
            self._hasten(("notice", target))
        if self._is_wanted(claim):
            self._want(claim, have, spoiled)
        if self.lanes[target].poisoned:
            self._send_poisoned(target)
        self._pump(target)
        self._keep_noticing(target)

    def _on_stop(self, stop: msg.Stop) -> None:
        target, handoff = stop.sender.name, stop.handoff
        want = self.wants.get(target, {}).get(handoff)
        if want is not None and want.epoch <= stop.epoch:
            self._forget(target, handoff, WantMove.STOP)
        # A claim that this stop overtook must not begin it all again.
        self._remember(
            ("stopped", target, handoff), max(stop.epoch, self._stopped(target, handoff))
        )
        self._settle(stop.sender, handoff, stop.epoch)
        # The newest stop answers for those before it.
        self.stops[target, handoff] = max(stop.epoch, self.stops.get((target, handoff), 0))
        self._answer_stop(target, handoff)
        self._pump(target)
        self._keep_noticing(target)

    def _problem_of(self, claim: msg.Claim) -> str:
        """Why a claim makes no sense, if it does not."""
        grid = claim.grid
        known = self.wants.get(claim.sender.name, {}).get(claim.handoff)
        prompt = self.prompts.get(claim.handoff)
        if grid.problem() or grid.part_bytes > claim.berth_bytes:
            return "claim of a wrong grid"
        if not 0 < claim.berth_count <= msg.BERTH_COUNT_MAX:
            return "claim of a wrong area"
        if known is not None and known.epoch == claim.epoch and known.grid != grid:
            return "claim of another grid"
        if prompt is not None and not prompt.covers(grid):
            return "claim beyond the prompt"
        return ""

    # Wants.

    def _is_wanted(self, claim: msg.Claim) -> bool:
        """Whether a claim asks for something that is not over."""
        over = claim.epoch <= self._stopped(claim.sender.name, claim.handoff)
        return not over and not self._is_released(claim.handoff)

    def _stopped(self, target: str, handoff: str) -> int:
        """The last epoch that a target stopped."""
        return self.remembered.get(("stopped", target, handoff), (0, ""))[0]

    def _is_released(self, handoff: str) -> bool:
        return ("released", handoff) in self.remembered

    def _want(self, claim: msg.Claim, have: int, spoiled: tuple[int, ...]) -> None:
        target, handoff = claim.sender.name, claim.handoff
        wants = self.wants[target]
        want = wants.get(handoff)
        if want is not None and want.epoch > claim.epoch:
            self._refuse("from an earlier epoch")
            return
        if want is None or want.epoch < claim.epoch:
            # A newer epoch begins with nothing: its grid may be another.
            known = handoff in self.prompts
            if not known and not self._park(target, handoff):
                return
            want = Want(WantState.OPEN if known else WantState.PARKED, claim.epoch, claim.grid)
            want = want.computed(self.prompts[handoff]) if known else want
        wants[handoff] = want.merged(have, spoiled)

    def _park(self, target: str, handoff: str) -> bool:
        """Keeps a claim for a prompt that has not come yet, if there is room (P23)."""
        parked = sum(timer[0] == "park" for timer in self.timers)
        if parked >= self.settings.bounds.parked_count_max:
            return self._refuse("no room to park a claim")
        self._arm(("park", handoff, target), self.settings.times.park_s)
        return True

    def _open(self, target: str, handoff: str) -> None:
        """The prompt of a parked claim has come."""
        prompt = self.prompts[handoff]
        want = self.wants[target][handoff]
        self._disarm(("park", handoff, target))
        if prompt.covers(want.grid):
            state = advance(WANT_MOVES, want.state, WantMove.ADMIT)
            self.wants[target][handoff] = want._replace(state=state)
        else:
            self._refuse("claim beyond the prompt")
            self._forget(target, handoff, WantMove.FORGET)

    def _forget(self, target: str, handoff: str, move: WantMove) -> None:
        want = self.wants[target].pop(handoff)
        advance(WANT_MOVES, want.state, move)  # Raises if the move is illegal; a want ends here.
        self._disarm(("park", handoff, target))

    def _let_go(self, handoff: str) -> None:
        """Nothing more is read for a prompt, and what comes for it later is left alone."""
        self.prompts.pop(handoff, None)
        for target, wants in self.wants.items():
            if handoff in wants:
                self._forget(target, handoff, WantMove.FORGET)
        self._remember(("released", handoff), 0)

    def _is_over(self, scheduler: int) -> bool:
        """Whether a life of the scheduler was followed by another, or seen dead."""
        known = self.peers.get(self.scheduler)
        if known is None:
            return False
        dead = known.standing is Standing.LOST and known.incarnation == scheduler
        return dead or scheduler in known.buried

    def _serve(self, scheduler: int) -> None:
        """Takes a life of the scheduler for the present one, as our own engine names it (P16)."""
        if self.life_of(self.scheduler).incarnation != scheduler:
            life = Life(self.scheduler, scheduler)
            self._meet(Identity(life, Role.PREFILL_SCHEDULER, self.identity.facts))

    def _abandon_writes(self, restarted: str = "") -> None:
        """Nothing more is read of prompts that were let go, or of one that was restarted.

        Their blocks are given to others.
        """
        for write, posted in sorted(self.writes.items()):
            lost = write.handoff not in self.prompts or write.handoff == restarted
            if lost and not posted.observed:
                self.effects.append(AbandonWrite(write=write))

    def _owe_again(self, write: WriteId) -> None:
        """A part of a prompt that was restarted was not written."""
        target = write.target.name
        want, lane = self.wants.get(target, {}).get(write.handoff), self.lanes.get(target)
        if want is not None and want.epoch == write.epoch and lane is not None:
            # In another area it may have been written since.
            again = lane.holds(write) << write.part
            self.wants[target][write.handoff] = want._replace(posted=want.posted & ~again)

    def _known(self, handoff: str) -> Prompt | None:
        """The prompt; none if it was released."""
        prompt = self.prompts.get(handoff)
        if prompt is None and not self._is_released(handoff):
            raise ValueError(f"handoff is {handoff!r}, which was never admitted")
        return prompt

    def _raise(self, handoff: str, prompt: Prompt, tokens: int, layers: range) -> None:
        """Raises the watermarks of some layers, and writes what that allows."""
        self.prompts[handoff] = prompt = prompt.raised(tokens, layers)
        for target, wants in self.wants.items():
            want = wants.get(handoff)
            if want is not None:
                wants[handoff] = want.computed(prompt, layers)
                if wants[handoff] is not want:
                    self._post(target, handoff)
                    if self.lanes[target].poisoned:
                        self._keep_noticing(target)

    # Ends of writes, and who waits for them.

    def _after_end(self, write: WriteId) -> None:
        self._answer_after(write)
        self._pump(write.target.name)
        self._keep_noticing(write.target.name)

    def _answer_after(self, write: WriteId) -> None:
        """Answers who waits for the end of a write, if that was the last one."""
        if (write.target.name, write.handoff) in self.stops:
            self._answer_stop(write.target.name, write.handoff)
        if write.handoff in self.releases:
            self._answer_release(write.handoff)

    def _answer_stop(self, target: str, handoff: str) -> None:
        """Says that nothing more comes, once that is certain (P15)."""
        epoch, life = self.stops[target, handoff], self.life_of(target)
        if any(
            write.handoff == handoff
            and write.target == life
            and write.epoch <= epoch
            and not posted.observed
            for write, posted in self.writes.items()
        ):
            return
        del self.stops[target, handoff]
        lane = self.lanes.get(target)
        self._send(
            msg.Stopped(
                sender=self.life,
                target=life,
                handoff=handoff,
                epoch=epoch,
                generation=lane.generation if lane is not None else 0,
                poisoned=lane is not None and lane.poisoned,
            )
        )

    def _answer_release(self, handoff: str) -> None:
        """Says that nothing reads the prompt's blocks any more, once that is certain (P16)."""
        if any(w.handoff == handoff and not p.observed for w, p in self.writes.items()):
            return
        del self.releases[handoff]
        scheduler = self.life_of(self.scheduler)
        self._send(msg.Released(sender=self.life, target=scheduler, handoff=handoff))

    def _under_way(self, write: WriteId) -> Posted:
        posted = self.writes.get(write)
        if posted is None or posted.observed:
            raise ValueError(f"write is {write}, which is not under way")
        return posted

    # Areas.

    def _enter(self, claim: msg.Claim) -> bool:
        """Follows the target into the area that a claim names; `False` if that is over."""
        target = claim.sender.name
        lane = self.lanes.get(target)
        same_life = lane is not None and lane.target == claim.sender
        if lane is not None and same_life and claim.generation <= lane.generation:
            return claim.generation == lane.generation
        self._leave(target)
        self.lanes[target] = Lane(
            claim.sender, claim.generation, claim.berth_count, (1 << claim.berth_count) - 1
        )
        wants = self.wants.setdefault(target, {})
        for handoff, want in wants.items():
            wants[handoff] = want._replace(posted=0)
        return True

    def _leave(self, target: str) -> None:
        """Forgets an area. Writes into it stay known until they were observed to end."""
        self.lanes.pop(target, None)
        for write, posted in list(self.writes.items()):
            if write.target.name == target and posted.observed:
                del self.writes[write]

    # Berths.

    def _settle(self, target: Life, handoff: str, epoch: int) -> None:
        """The target wants nothing of a handoff up to this epoch."""
        for write in [w for w in self.writes if w.handoff == handoff and w.target == target]:
            if write.epoch <= epoch:
                self._settle_write(write)

    def _settle_parts(self, claim: msg.Claim, have: int, spoiled: tuple[int, ...]) -> None:
        """The target is through with the parts that it has, and with those it could not use."""
        self._settle(claim.sender, claim.handoff, claim.epoch - 1)
        for write in [
            w for w in self.writes if w.handoff == claim.handoff and w.target == claim.sender
        ]:
            if write.epoch == claim.epoch:
                bad = spoiled[write.attempt] if write.attempt < len(spoiled) else 0
                if (have | bad) >> write.part & 1:
                    self._settle_write(write)

    def _settle_write(self, write: WriteId) -> None:
        posted = self.writes[write]
        if posted.observed:
            self._answered(write.target.name, write)
            self._free(write)
        else:
            self.writes[write] = posted._replace(settled=True)

    def _free(self, write: WriteId) -> None:
        """A berth is ours again."""
        del self.writes[write]
        lane = self.lanes.get(write.target.name)
        if lane is not None and lane.holds(write):
            self.lanes[lane.target.name] = lane.with_free(lane.free | 1 << write.berth)

    # Writes.

    def _pump(self, target: str) -> None:
        """Gives the free berths of a target to its wants, the oldest first."""
        if target not in self.lanes:
            return
        for handoff, want in self.wants.get(target, {}).items():
            if not self.lanes[target].free:
                return
            # Parts that are computed, neither written nor there: most wants have none.
            if want.sendable:
                self._post(target, handoff)

    def _post(self, target: str, handoff: str) -> None:
        """Writes all parts of one want that are computed and have a berth."""
        lane = self.lanes[target]
        want = self.wants[target][handoff]
        sendable = want.sendable
        if not sendable or not lane.free or lane.poisoned or not self.is_open(target):
            return
        free, posted = lane.free, want.posted
        while free and sendable:
            part = (sendable & -sendable).bit_length() - 1
            berth = (free & -free).bit_length() - 1
            sendable &= sendable - 1
            free &= free - 1
            posted |= 1 << part
            attempt = want.attempt_of(part) if want.spoiled else 0
            write = WriteId(lane.target, lane.generation, berth, handoff, want.epoch, part, attempt)
            self.writes[write] = _POSTED
            self.effects.append(Write(write=write, grid=want.grid, source=self.life))
        self.lanes[target] = lane.with_free(free)
        self.wants[target][handoff] = want.with_parts(want.have, posted, want.ready)

    # Notices.

    def _unanswered(self, target: str) -> list[WriteId]:
        """Writes whose notice, or the answer to it, may be lost."""
        return [
            w for w, posted in self.writes.items() if posted.observed and w.target.name == target
        ]

    def _awaits_answer(self, target: str) -> bool:
        for write, posted in self.writes.items():
            if posted.observed and write.target.name == target:
                return True
        return False

    def _keep_noticing(self, target: str) -> None:
        """Lets a timer run while a target owes us an answer."""
        lane, timer = self.lanes.get(target), ("notice", target)
        asks = lane is not None and lane.poisoned and any(self._sendable_to(target))
        if (asks or self._awaits_answer(target)) and self.is_open(target):
            if timer not in self.timers:
                self._arm_resend(timer)
        else:
            # How long this target takes to answer is kept in mind: the next notice waits as long.
            self.timers.pop(timer, None)

    def _notice_again(self, target: str) -> None:
        notices = []
        for write in sorted(self._unanswered(target)):
            notice = notice_of(self.life, write, self.writes[write].sums)
            notices.append((notice, 0))  # Its bytes are there.
            self._asked_again(target, write)
        for notice in join_notices(notices, bytes_max=0):
            self._send(notice)
        lane = self.lanes.get(target)
        if lane is not None and lane.poisoned:
            self._send_poisoned(target)
        self._keep_noticing(target)

    def _send_poisoned(self, target: str) -> None:
        lane = self.lanes[target]
        self._send(msg.Poisoned(sender=self.life, target=lane.target, generation=lane.generation))

    def _sendable_to(self, target: str) -> list[int]:
        return [want.sendable for want in self.wants.get(target, {}).values()]

    # Timers and peers.

    def _on_timer(self, timer: TimerKey) -> None:
        match timer:
            case ("notice", target):
                self._notice_again(target)
            case ("park", handoff, target):
                self._count("claims forgotten")
                self._forget(target, handoff, WantMove.FORGET)
            case _:
                raise InvariantViolation(f"timer {timer} is not one of a prefill rank")

    def _asked_by(self, timer: TimerKey) -> tuple[str, ...]:
        return timer[1:2]

    def _peer_open(self, name: str) -> None:
        self._pump(name)
        self._keep_noticing(name)

    def _peer_refused(self, name: str, *, why: str) -> None:
        """Nothing to do: a decode rank that does not fit claims nothing."""

    def _peer_silent(self, name: str) -> None:
        # Nothing is written to it and nothing forgotten: its area stays, in case it answers again.
        self._keep_noticing(name)

    def _peer_gone(self, name: str) -> None:
        if name == self.scheduler:
            for handoff in [*self.prompts]:
                self._let_go(handoff)
            self.releases.clear()
            self._abandon_writes()
            return
        for handoff in [*self.wants.get(name, ())]:
            self._forget(name, handoff, WantMove.FORGET)
        self.wants.pop(name, None)
        self._leave(name)
        for key in [key for key in self.stops if key[0] == name]:
            del self.stops[key]
        self._disarm(("notice", name))


def join_notices(notices: Iterable[tuple[msg.Landed, int]], *, bytes_max: int) -> list[msg.Landed]:
    """The same parts in fewer notices, each with about the bytes of its parts at most.

    A notice comes after all of its bytes: where they are many, their target begins later.
    """
    found: list[msg.Landed] = []
    latest: dict[tuple[Life, int, str, int], tuple[int, int]] = {}
    for notice, size in notices:
        about = notice.target, notice.generation, notice.handoff, notice.epoch
        at, before = latest.get(about, (-1, 0))
        if at >= 0 and before + size <= bytes_max and _fit(found[at].parts, notice.parts):
            found[at] = msgspec.structs.replace(found[at], parts=(*found[at].parts, *notice.parts))
            latest[about] = at, before + size
        else:
            latest[about] = len(found), size
            found.append(notice)
    return found


def _fit(parts: tuple[msg.LandedPart, ...], others: tuple[msg.LandedPart, ...]) -> bool:
    both = (*parts, *others)
    sums = sum([len(part.sums) for part in both])
    return len(both) <= msg.LANDED_COUNT_MAX and sums <= msg.LANDED_SUMS_MAX


def writes_of(notice: msg.Landed) -> list[tuple[WriteId, bytes]]:
    """The writes that a notice speaks of, with their sums."""
    about = notice.target, notice.generation
    return [
        (WriteId(*about, berth, notice.handoff, notice.epoch, part, attempt), sums)
        for berth, part, attempt, sums in notice.parts
    ]
