"""An engine that manages its own device slots and uses what lies below them.

A request looks its prompt up, may have blocks brought nearer, loads what is ready into
slots of the engine's, computes the rest, saves what it computed, and ends. It may give up
at any point, with copies under way.

The contract kept here: a slot that a copy may touch stays the request's until that copy is
settled, whatever became of the request.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from lab.explore.world import Violation
from lab.sim.engine import Engine
from penstock.cache.explain import MissReason
from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import Outcome, Purpose
from penstock.cache.settings import DEVICE, WriteKind
from penstock.errors import UnavailableError
from penstock.machine import events as ev
from penstock.machine.effects import Ended, Found, Settled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lab.sim.ranks import Job
    from lab.sim.workload import Text
    from lab.sim.world import World
    from penstock.machine.effects import Started
    from penstock.vocabulary.keys import Key, OperationId


class Stage(Enum):
    """How far a request is."""

    LOOKING = "looking"
    LOADING = "loading"
    COMPUTING = "computing"
    OVER = "over"
    """It has ended, but copies may still touch its slots."""


class Sequence:
    """A request in an engine with slots of its own: one row of slots a KV group."""

    __slots__ = (
        "copies",
        "good",
        "keys",
        "losses",
        "name",
        "partial",
        "ready",
        "saved",
        "slots",
        "stage",
        "text",
        "worth",
    )

    def __init__(self, name: str, text: Text, keys: list[Key], slots: list[list[int]]) -> None:
        self.name = name
        self.text = text
        self.keys = keys
        self.slots = slots
        self.stage = Stage.LOOKING
        self.ready = 0
        """So many leading blocks can be loaded, as was told last."""
        self.worth = 0
        """So many of them are quicker to load than to compute."""
        self.losses = 0
        """How often the cache had lost blocks by then."""
        self.good: set[int] = set()
        """Blocks whose bytes are in the slots."""
        self.partial: set[int] = set()
        """Blocks that were loaded for some groups only."""
        self.saved = 0
        """So many leading blocks were computed or loaded, and offered to the cache."""
        self.copies: dict[OperationId, Job] = {}
        """What may still touch the slots."""


class OffloadEngine(Engine):
    """A client of `Lookup`, `Load`, `Save`, `Prefetch` and `Cancel`."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.group_count = world.conditions.settings.group_count
        self._free = [list(range(world.conditions.engine_slots)) for _ in range(self.group_count)]
        self.sequences: dict[str, Sequence] = {}
        self._owner: dict[OperationId, Sequence] = {}
        self.reactions = {Ended: self._operation_ended, Settled: self._operation_settled}

    def advance(self) -> None:
        """Lets a request arrive, or go a step further."""
        rng = self.rng
        running = [s for s in self.sequences.values() if s.stage is not Stage.OVER]
        if not running or (len(running) < self.conditions.requests_max and rng.random() < 0.4):
            self._arrive()
            return
        sequence = rng.choice(running)
        if rng.random() < self.conditions.abort:
            loading = sequence.stage is Stage.LOADING
            self.world.note("abort while loading" if loading else "abort while computing")
            self._give_up(sequence)
        elif sequence.stage is Stage.LOOKING:
            self._look_again(sequence)
        elif sequence.stage is Stage.COMPUTING:
            self._compute(sequence)

    # ---------------------------------------------------------------- a request's life

    def _arrive(self) -> None:
        text = self.library.next_text()
        keys = self.library.all_keys(text)
        if not keys or len(keys) > min(map(len, self._free)):
            return
        sequence = self._admit(text, keys)
        found = self._look(sequence, 0)
        if found.below and self.rng.random() < 0.6:
            started = self.prefetch(keys, sequence.name)
            if not started.accepted and started.miss.reason is not MissReason.NO_ROOM:
                raise Violation(
                    "usefulness", f"{sequence.name}: {found.below} blocks lie below and stay there"
                )
        elif found.ready or not found.pending:
            self._load(sequence)

    def _admit(self, text: Text, keys: list[Key]) -> Sequence:
        slots = [[free.pop() for _ in keys] for free in self._free]
        sequence = Sequence(self.next_name(), text, keys, slots)
        self.last_keys = keys
        self.sequences[sequence.name] = sequence
        return sequence

    def _look(self, sequence: Sequence, start: int) -> Found:
        effects = self.world.send(ev.Lookup(keys=sequence.keys, start=start))
        found = next(effect for effect in effects if isinstance(effect, Found))
        sequence.ready, sequence.losses = found.ready, found.losses
        sequence.worth = found.worth
        self.check_skipped(sequence.name, found.miss, sequence.keys)
        if self.conditions.healthy:
            model = self.world.model
            reported = (found.ready, found.ready + found.pending)
            right = (model.known_prefix(sequence.keys), model.coming_prefix(sequence.keys))
            if reported != right:
                raise Violation(
                    "usefulness", f"{sequence.name} finds {reported}, the model knows {right}"
                )
        return found

    def _look_again(self, sequence: Sequence) -> None:
        """What was ready is still ready as long as the cache lost nothing."""
        kept = sequence.losses == self.world.machine.losses
        found = self._look(sequence, sequence.ready if kept else 0)
        if kept and self.rng.random() < 0.3 and self._look(sequence, 0).ready != found.ready:
            raise Violation("usefulness", f"{sequence.name}: a shorter search found less")
        if not found.pending or self.rng.random() < 0.5:
            self._load(sequence)

    def _load(self, sequence: Sequence) -> None:
        count = sequence.ready
        if self.conditions.tell_speed and self.rng.random() < 0.7:
            # Some engines go by what they are told, some load all the same.
            count = min(count, sequence.worth)
        if not count or self.rng.random() < self.conditions.opt_out:
            sequence.stage = Stage.COMPUTING
            return
        slots = np.array([row[:count] for row in sequence.slots], dtype=np.int32)
        if self.group_count > 1 and self.rng.random() < 0.3:
            # A group with a window needs the last blocks only.
            windowed = self.rng.randrange(count)
            slots[0, :windowed] = NOWHERE
            sequence.partial.update(range(windowed))
        event = ev.Load(
            keys=sequence.keys[:count], slots=slots, cause=sequence.name, deadline=self._deadline()
        )
        kept = sequence.losses == self.world.machine.losses
        started = self._start(event, sequence)
        if started is None:
            return
        if kept and not self.world.ranks.lost and list(started.accepted) != list(range(count)):
            raise Violation(
                "usefulness", f"{sequence.name}: {count} blocks were ready, {started} are loaded"
            )
        sequence.stage = Stage.LOADING
        self._go_on_when_loaded(sequence)

    def _compute(self, sequence: Sequence) -> None:
        """Computes some blocks and saves them; saves loaded ones again, now and then."""
        ranks = self.world.ranks
        if ranks.dead:
            # A step needs every rank; an engine may still try to save what it has.
            if ranks.lost and self.rng.random() < 0.3:
                self._save(sequence, 0, 1)
            return
        first = sequence.saved
        end = (
            self.rng.randint(first + 1, len(sequence.keys)) if first < len(sequence.keys) else first
        )
        if first == end:
            self._leave(sequence)
            return
        self.write(sequence, first, end)
        sequence.saved = end
        if self.rng.random() < 0.2 and not sequence.partial:
            first = 0
        self._save(sequence, first, end)

    def write(self, sequence: Sequence, first: int, end: int) -> None:
        """Every rank computes blocks into the engine's slots."""
        ranks = self.world.ranks
        for block in range(first, end):
            right = self.library.right[sequence.keys[block]]
            for group, row in enumerate(sequence.slots):
                place = ranks.place(group, row[block])
                for memory in ranks.memory:
                    memory[DEVICE][place] = (group, right)

    def _save(self, sequence: Sequence, first: int, end: int) -> None:
        slots = np.array([row[first:end] for row in sequence.slots], dtype=np.int32)
        hinted = self.rng.random() < self.conditions.hint
        event = ev.Save(
            keys=sequence.keys[first:end],
            slots=slots,
            cause=sequence.name,
            parent=sequence.keys[first - 1] if first else None,
            tenant=sequence.text.namespace.tenant,
            priority=self.rng.randint(0, 2) if hinted else 0,
            ttl_s=self.rng.choice((None, 0.2, 2.0)) if hinted else None,
            deadline=self._deadline(),
        )
        started = self._start(event, sequence)
        if started is not None:
            self.world.model.save([event.keys[position] for position in started.accepted])

    def _start(self, event: ev.Load | ev.Save, sequence: Sequence) -> Started | None:
        """Sends a wish for copies; its copies hold the request's slots from then on."""
        world = self.world
        world.watch()
        try:
            effects = world.send(event)
        except UnavailableError:
            world.check_unchanged()
            world.note("rank is lost")
            self._give_up(sequence)
            return None
        if world.ranks.lost:
            raise Violation("refusal", f"{sequence.name} may copy though a rank is lost")
        started = self.only_start(effects, event.keys)
        for operation in started.operations:
            sequence.copies[operation] = world.ranks.open[operation]
            self._owner[operation] = sequence
        return started

    def _leave(self, sequence: Sequence) -> None:
        self.library.remember(sequence.text)
        sequence.stage = Stage.OVER
        if self.conditions.hint > 0 and len(self.sequences) % 4 == 0:
            # No draw of its own: seeds go on meaning what they meant.
            self.world.send(ev.LetGo(keys=sequence.keys, keep=len(sequence.keys) // 2))
        self._free_when_quiet(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        """Ends a request early; some engines cancel its copies, some let them run out."""
        self._leave(sequence)
        for operation, job in list(sequence.copies.items()):
            if not job.ended and self.rng.random() < 0.5 and not self.conditions.healthy:
                self.world.note("copy cancelled")
                self.world.send(ev.Cancel(operation=operation))

    def _free_when_quiet(self, sequence: Sequence) -> None:
        if sequence.copies or sequence.stage is not Stage.OVER:
            return
        if self.sequences.pop(sequence.name, None) is not None:
            for free, row in zip(self._free, sequence.slots, strict=True):
                free.extend(row)

    def _deadline(self) -> float | None:
        if self.rng.random() < self.conditions.haste:
            return self.world.now + self.rng.uniform(0.05, 0.5)
        return None

    # ---------------------------------------------------------------- what it is told

    def _operation_ended(self, effect: Ended) -> None:
        """The outcome of a copy: what arrived is right, and what is quiet may be reused."""
        sequence = self._owner.get(effect.operation)
        if sequence is None:
            return
        job = sequence.copies[effect.operation]
        if self.conditions.healthy and effect.outcome is not Outcome.DONE:
            raise Violation("usefulness", f"{job} of {sequence.name} is {effect.outcome}")
        if effect.purpose is Purpose.SAVE:
            self.world.model.saved(job.keys)
        elif not effect.failure and sequence.stage is not Stage.OVER:
            faulty = {position for position, _ in effect.faults}
            for position, key in enumerate(job.keys):
                if position not in faulty:
                    self._check_loaded(sequence, job, position, key)
        if effect.settled:
            self._forget_copy(sequence, effect.operation)
        self._go_on_when_loaded(sequence)

    def _operation_settled(self, effect: Settled) -> None:
        """A copy whose outcome was told is quiet."""
        sequence = self._owner.get(effect.operation)
        if sequence is not None:
            self._forget_copy(sequence, effect.operation)
            self._go_on_when_loaded(sequence)

    def _forget_copy(self, sequence: Sequence, operation: OperationId) -> None:
        del sequence.copies[operation]
        del self._owner[operation]
        self._free_when_quiet(sequence)

    def _go_on_when_loaded(self, sequence: Sequence) -> None:
        if sequence.stage is Stage.LOADING and not sequence.copies:
            good = sequence.good
            sequence.saved = next(i for i in range(len(sequence.keys) + 1) if i not in good)
            sequence.partial = {block for block in sequence.partial if block < sequence.saved}
            sequence.stage = Stage.COMPUTING

    def _check_loaded(self, sequence: Sequence, job: Job, position: int, key: Key) -> None:
        right = self.library.right[key]
        ranks = self.world.ranks
        for group, row in enumerate(job.targets):
            if row[position] == NOWHERE:
                continue
            place = ranks.place(group, row[position])
            for rank, memory in enumerate(ranks.memory):
                if memory[DEVICE][place] != (group, right) and rank not in ranks.dead:
                    raise Violation(
                        "bytes", f"{sequence.name}: {job} is done, but wrong on rank {rank}"
                    )
        sequence.good.add(sequence.keys.index(key))

    def rank_died(self) -> None:
        """Device memory is gone on a rank: no running request has what it needs."""
        for sequence in list(self.sequences.values()):
            if sequence.stage is not Stage.OVER:
                self._leave(sequence)

    # ---------------------------------------------------------------- the end of a world

    def stop(self) -> None:
        """Half of the requests give up at once."""
        for sequence in list(self.sequences.values()):
            if sequence.stage is not Stage.OVER and self.rng.random() < 0.5:
                self._give_up(sequence)

    def finish(self) -> None:
        """The other half ends, too."""
        for sequence in list(self.sequences.values()):
            if sequence.stage is not Stage.OVER:
                self._leave(sequence)
        super().finish()

    def check_no_one_waits(self) -> None:
        """Every copy has ended, and every request knows."""
        for sequence in self.sequences.values():
            if sequence.copies or sequence.stage is Stage.LOADING:
                raise Violation("liveness", f"{sequence.name} waits for nothing")

    def recover(self) -> None:
        """New blocks are saved, looked up, loaded, and right."""
        text = self.library.fresh_text("recovery", 2 * self.block_tokens)
        sequence = self._admit(text, self.library.all_keys(text))
        self.write(sequence, 0, 2)
        write = self.conditions.settings.tiers[0].write
        showings = write.hits if write.kind is WriteKind.SELECTIVE else 1
        slots = np.array(sequence.slots, dtype=np.int32)
        for _ in range(showings):
            event = ev.Save(keys=sequence.keys, slots=slots, cause=sequence.name, tenant="recovery")
            self._start(event, sequence)
        self.world.run_until_quiet()
        ready = self._find_saved(sequence)
        if ready:
            keys, targets = sequence.keys[:ready], self._blank(slots)[..., :ready]
            self._start(ev.Load(keys=keys, slots=targets, cause="load"), sequence)
            self.world.run_until_quiet()
        else:
            sequence.good = set()
        if sequence.good != set(range(ready)):
            raise Violation("usefulness", "a quiet cache does not load what it just saved")
        self._leave(sequence)

    def _find_saved(self, sequence: Sequence) -> int:
        """How many saved blocks can be loaded; a hub that is kept empty may have sent them below.

        Then they are asked for. It may send them below again, but it loses none, unless its policy
        keeps others rather (`_filtered`).
        """
        found = self._look_fresh(sequence)
        if found.below:
            self.prefetch(sequence.keys, sequence.name)
            self.world.run_until_quiet()
            found = self._look_fresh(sequence)
        if self._filtered(found):
            return found.ready
        if found.ready + found.pending != len(sequence.keys) or not (found.ready or found.below):
            raise Violation("usefulness", "a quiet cache does not find what it just saved")
        return found.ready

    def _filtered(self, found: Found) -> bool:
        """Whether the hub keeps older blocks rather than a new one that was not hit yet.

        Every policy does so for those with a higher priority.
        """
        hub = self.world.books.hub
        assert hub is not None
        if found.miss.reason is not MissReason.EVICTED:
            return found.miss.reason is MissReason.REFUSED
        return bool((hub.priority[hub.slot_of != NOWHERE] > 0).any())

    def _look_fresh(self, sequence: Sequence) -> Found:
        effects = self.world.send(ev.Lookup(keys=sequence.keys))
        return next(effect for effect in effects if isinstance(effect, Found))

    def _blank(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """The same slots, emptied, so that a load has something to do."""
        ranks = self.world.ranks
        for group, row in enumerate(slots.tolist()):
            for slot in row:
                for memory in ranks.memory:
                    memory[DEVICE][ranks.place(group, slot)] = None
        return slots
