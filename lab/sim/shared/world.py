"""Engines that share blocks through a store that lies, from one seed.

    SharedWorld(seed).run()

Real here: the tier in a shared store, with its values, geometries, codec and what its threads do.
Simulated: the store, the time, and the order in which threads get on, also while another one is in
a call: a call that hangs lets the rest of the world go on.

The bytes of a block follow from its generation, text, layer, head and token. So a block that is
delivered for another one, or from before a reset, is seen to be wrong, however it was cut.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.fixtures.lying_blobs import Lie, LyingBlobs
from lab.fixtures.memory_blobs import MemoryBlobs, MemoryServer
from lab.sim.coverage import Kinds
from lab.sim.shared.engine import ARENA_SLOTS, SPACE, Geometry, SimulatedEngine, SteppedTier
from lab.sim.turns import TurnsWorld, quiet_logs
from penstock.cache.operations import BlockFault
from penstock.errors import UnavailableError
from penstock.store.base import FindJob, LoadJob, SaveJob
from penstock.store.shared.generations import Lineage
from penstock.store.shared.values import generation_name
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.store.base import EndedJob
    from penstock.vocabulary.keys import Key

TURNS = 70
TEXTS = 2
NEW_TEXT = 100
"""From here on: texts of the end, which nobody saved before."""
DEPTH_MAX = 3
"""Calls under way at a time, of all engines."""
POLL_S, ABSENT_S, RETRY_MAX_S = 1.0, 1.0, 60.0
"""As the tier has them."""
REST_STEPS = 400
DAMAGES = frozenset(
    {Lie.WRONG_BYTES, Lie.WRONG_VALUE, Lie.CUT_READ, Lie.NOT_READ, Lie.CUT_WRITE, Lie.WRONG_RECORD}
)
"""Lies after which a block may be called corrupt."""

SHARED_FAULTS: tuple[str, ...] = (
    *(lie.value for lie in Lie),
    "answer comes after its deadline",
    "block corrupt",
    "block missing",
    "block unreadable",
    "bytes rot",
    "engine joins",
    "engine restarted",
    "generation changed elsewhere",
    "generation voided",
    "job cancelled",
    "replica behind",
    "replica takes over",
    "reset not kept yet",
    "store evicts",
    "store goes back",
    "store is away",
    "store loses everything",
    "tier is off",
)
SHARED_KINDS = Kinds(
    events=("find", "load", "save", "step", "void"),
    faults=SHARED_FAULTS,
    copy_word="job",
    copies=("find", "load", "save"),
    has_tables=False,
    events_mean_min=60.0,
)


class DrawnServer(MemoryServer):
    """A store that knows in which order generations were written, and which a replica has."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[int, int] = {}
        """Generation to its number in that order."""
        self.kept: set[int] = set()

    def note_record(self, name: str, record: bytes) -> None:
        lineage = Lineage.from_record(SPACE, record)
        if name == generation_name(SPACE) and lineage is not None:
            self.drawn.setdefault(lineage.current, len(self.drawn))
            if self.replica is None:
                self.kept.add(lineage.current)


class WorldlyBlobs(LyingBlobs):
    """A lying client; while one of its calls is under way, the world goes on."""

    def __init__(
        self, world: SharedWorld, *, seed: int, lie_rate: float, lies: Sequence[Lie]
    ) -> None:
        super().__init__(
            MemoryBlobs(world.server),
            seed=seed,
            lie_rate=lie_rate,
            lies=lies,
            wait=world.pass_in_call,
        )
        self._world = world
        self.tier: SteppedTier | None = None

    def _perhaps_late(self, timeout_s: float) -> None:
        # Every call begins with it.
        if self.tier is not None and self.tier.is_locked:
            raise Violation("store", "a call is made with the lock held")
        self._world.in_call()
        super()._perhaps_late(timeout_s)


class SharedWorld(TurnsWorld):
    """One seed's world."""

    def __init__(self, seed: int, *, log: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, log)
        rng = self.rng
        self.server = DrawnServer()
        self._healthy = rng.random() < 0.15
        self._lie_rate = 0.0 if self._healthy else rng.choice((0.0, 0.05, 0.15, 0.3))
        # With all lies in every world, generations would change so often that little is found.
        self._lies = [lie for lie in Lie if rng.random() < 0.5]
        self._meanwhile = rng.choice((0.0, 0.2, 0.5))
        self._ask_s, self._timeout_s = rng.choice((0.05, 0.2)), rng.choice((0.5, 2.0))
        self._depth = self._ticket = self._rotten = 0
        self._clients: list[WorldlyBlobs] = []
        latent = rng.random() < 0.2
        self.engines = [
            SimulatedEngine(
                f"engine {number}",
                Geometry(rng.choice((1, 1, 2)), rng.choice((4, 4, 8)), latent),
                rng.choice((Algorithm.XXH3, Algorithm.MIX64)),
                rng.getrandbits(63),
            )
            for number in range(rng.randint(1, 3))
        ]
        troubles = 0.0 if self._healthy else 1.0
        self._actions = [
            (3.0, self._save),
            (3.0, self._load),
            (2.0, self._find),
            (5.0, self._work),
            (2.0, self._take_results),
            (1.0, self._pass_time),
            (0.15, self._cancel),
            (troubles * rng.choice((0.15, 0.5)), self._void),
            (troubles * rng.choice((0.0, 0.3)), self._evict),
            (troubles * rng.choice((0.0, 0.3)), self._rot),
            (troubles * rng.choice((0.0, 0.3)), self._go_away),
            (troubles * 0.05, self._lose_everything),
            (troubles * 0.1, self._restart),
            (troubles * rng.choice((0.0, 0.5)), self._go_back),
            (troubles * rng.choice((0.0, 0.4)), self._trouble_replica),
            (troubles * 0.05, self._join),
        ]
        self._images: list[dict[str, bytes]] = []
        """What the store held at some times: backups, or old versions of objects."""

    def run(self) -> None:
        """Lives the world to its end."""
        with quiet_logs("store"):
            try:
                for engine in self.engines:
                    self._open(engine)
                for _ in range(TURNS):
                    self.draw_action(within_s=0.05)()
                self._end()
            finally:
                for engine in self.engines:
                    engine.tier.close(deadline=0.0)
                    engine.close()

    def _open(self, engine: SimulatedEngine) -> None:
        blobs = WorldlyBlobs(
            self, seed=self.rng.getrandbits(32), lie_rate=self._lie_rate, lies=self._lies
        )
        self._clients.append(blobs)
        engine.tier = SteppedTier(
            blobs,
            self.rng,
            ask_s=self._ask_s,
            timeout_s=self._timeout_s,
            compress=self.rng.random() < 0.5,
            clock=lambda: self.now,
        )
        blobs.tier = engine.tier
        if engine.newest is not None:
            engine.tier.expect(SPACE, engine.newest)
        engine.tier.attach(SPACE, engine.arenas)

    # ---------------------------------------------------------------- calls of clients

    def in_call(self) -> None:
        """A call is under way: others may get on meanwhile."""
        while self._depth < DEPTH_MAX and self.rng.random() < self._meanwhile:
            chosen = self.rng.choices((self._step, self._take_results, self._cancel), (6, 3, 1))
            self._nested(chosen[0])

    def pass_in_call(self, seconds: float) -> None:
        """A call hangs: time passes, and whoever has something to do does it."""
        until = self.now + seconds
        for _ in range(4 if self._depth < DEPTH_MAX else 0):
            # Calls within this one may have taken longer: time does not go back.
            self.now = max(self.now, min(until, self.now + self.rng.random() * seconds / 2))
            self._nested(self._step)
        self.now = max(self.now, until)

    def _nested(self, action: Callable[[], None]) -> None:
        self._depth += 1
        try:
            action()
        finally:
            self._depth -= 1

    # ---------------------------------------------------------------- what engines want

    def _ready(self) -> SimulatedEngine | None:
        """An engine that knows which generation counts."""
        engine = self.rng.choice(self.engines)
        if engine.voiding:
            return None  # As in the server: nothing is used before its reset counts.
        if engine.generation is None:
            self._follow(engine, engine.tier.generation(SPACE))
        return engine if engine.generation is not None else None

    def _follow(self, engine: SimulatedEngine, generation: int | None) -> None:
        """An engine goes by a generation from now on: never by one of before what it knew.

        So no block that a reset has voided is served to who knew of the reset.
        """
        engine.generation = generation
        if generation is None:
            return
        drawn = self.server.drawn
        if generation not in drawn:
            raise Violation("reset", f"{engine.name} follows a generation that nobody drew")
        if engine.newest is not None and drawn[generation] < drawn[engine.newest]:
            raise Violation("reset", f"{engine.name} follows one from before a reset again")
        if engine.voided_before is not None and drawn[generation] <= engine.voided_before:
            raise Violation("reset", f"{engine.name} follows one that its own reset voided")
        engine.newest = generation

    def _draw_keys(self, engine: SimulatedEngine) -> tuple[int, Sequence[Key]]:
        keys = engine.keys(self.rng.randrange(TEXTS))
        first = self.rng.choice((0, 0, self.rng.randrange(len(keys))))
        return first, keys[first : first + self.rng.randint(1, len(keys))]

    def _save(self) -> None:
        engine = self._ready()
        if engine is not None:
            self._begin(engine, *self._draw_keys(engine), save=True)

    def _load(self) -> None:
        engine = self._ready()
        if engine is not None:
            self._begin(engine, *self._draw_keys(engine), save=False)

    def _begin(
        self, engine: SimulatedEngine, first: int, keys: Sequence[Key], *, save: bool
    ) -> None:
        """A job on every rank, as far as they have room."""
        texts = (engine.keys(text) for text in range(TEXTS))
        before = next(keys_there[first - 1] for keys_there in texts if keys[0] in keys_there)
        parents = [before if first else None, *keys[:-1]]
        for rank in range(len(engine.arenas)):
            if len(engine.free[rank]) >= len(keys):
                self._begin_on(engine, rank, parents, keys, save=save)

    def _begin_on(
        self,
        engine: SimulatedEngine,
        rank: int,
        parents: Sequence[Key | None],
        keys: Sequence[Key],
        *,
        save: bool,
    ) -> None:
        slots = engine.take_slots(rank, len(keys), self.rng)
        self._ticket += 1
        self.events["save" if save else "load"] += 1
        self.tell(f"{engine.name} {'saves' if save else 'loads'} {len(keys)} as {self._ticket}")
        arena, space = engine.arenas[rank], engine.space
        if save:
            engine.fill(rank, space, keys, slots)
            saving = SaveJob(self._ticket, arena, space, keys, parents, slots, engine.salt)
            engine.jobs[self._ticket] = (saving, rank)
            engine.tier.save(saving)
        else:
            loading = LoadJob(self._ticket, arena, space, keys, slots, engine.salt)
            engine.jobs[self._ticket] = (loading, rank)
            engine.tier.load(loading)

    def _find(self) -> None:
        engine = self._ready()
        if engine is None:
            return
        first, keys = self._draw_keys(engine)
        self._ask(engine, first, keys)

    def _ask(self, engine: SimulatedEngine, first: int, keys: Sequence[Key]) -> int:
        self._ticket += 1
        self.events["find"] += 1
        job = FindJob(self._ticket, engine.arenas, engine.space, keys, first)
        engine.questions[self._ticket] = (job, self.now)
        engine.tier.find(job)
        return self._ticket

    def _cancel(self) -> None:
        engine = self.rng.choice(self.engines)
        if engine.jobs:
            self.note("job cancelled")
            engine.tier.cancel(self.rng.choice(list(engine.jobs)))

    def _void(self) -> None:
        engine = self._ready()
        if engine is None:
            return
        self.events["void"] += 1
        if engine.unkept:
            engine.tier.void_anew(SPACE)
        engine.voiding, engine.unkept = True, False
        engine.voided_before = max(self.server.drawn.values(), default=-1)
        self._ask_for_void(engine)

    def _ask_for_void(self, engine: SimulatedEngine) -> None:
        with suppress(UnavailableError):
            made = engine.tier.void(SPACE)
            if made is None:
                return
            self.note("generation voided")
            if made not in self.server.kept:
                raise Violation("reset", f"{engine.name}: confirmed, and no replica has it")
            engine.voiding = engine.unkept = False
            # Another engine may have voided since: as the server, it goes by what counts now.
            self._follow(engine, engine.tier.generation(SPACE))

    def _work(self) -> None:
        """The threads of an engine have some time."""
        engine = self.rng.choice(self.engines)
        for _ in range(self.rng.randint(1, 12)):
            self.events["step"] += 1
            if not engine.tier.step():
                return

    def _step(self) -> None:
        self.events["step"] += 1
        engine = self.rng.choice(self.engines)
        engine.tier.step()

    # ---------------------------------------------------------------- what they are told

    def _take_results(self) -> None:
        engine = self.rng.choice(self.engines)
        self._collect(engine)

    def _collect(self, engine: SimulatedEngine) -> dict[int, int]:
        """Checks what was reported; how many blocks were found, by question."""
        for ended in engine.tier.collect():
            self._check(engine, ended)
        counts: dict[int, int] = {}
        for found in engine.tier.take_found():
            if found.ticket not in engine.questions:
                raise Violation("operations", f"question {found.ticket} is answered twice")
            job, asked_at = engine.questions.pop(found.ticket)
            self.copies["find"] += 1
            present = list(found.present)
            counts[found.ticket] = count = sum(present)
            if len(present) != len(job.keys) or not all(present[:count]):
                raise Violation("operations", "blocks behind a missing one are called found")
            if self.now > asked_at + self._ask_s:
                self.note("answer comes after its deadline")
        self._take_generations(engine)
        if not engine.tier.state().on:
            self.note("tier is off")
        return counts

    def _take_generations(self, engine: SimulatedEngine) -> None:
        for _, generation, unkept in engine.tier.take_generations():
            if unkept:
                self.note("reset not kept yet")
                # It counts from now on, though it is not confirmed.
                engine.voiding, engine.unkept = False, True
            elif engine.generation not in (None, generation):
                self.note("generation changed elsewhere")
            if not engine.voiding:
                self._follow(engine, generation)
        if engine.voiding or engine.unkept:
            self._ask_for_void(engine)

    def _check(self, engine: SimulatedEngine, ended: EndedJob) -> None:
        if ended.ticket not in engine.jobs:
            raise Violation("operations", f"job {ended.ticket} is reported twice")
        job, rank = engine.jobs.pop(ended.ticket)
        faults = dict(ended.faults)
        for fault in faults.values():
            self.note(f"block {fault.value}")
        if BlockFault.CORRUPT in faults.values() and not self._was_damaged():
            raise Violation("store", "a block is called corrupt that nobody damaged")
        if isinstance(job, SaveJob):
            self.copies["save"] += 1
            engine.check(rank, job.space, job.keys, job.slots)
        else:
            self.copies["load"] += 1
            good = [] if ended.failure else [at for at in range(len(job.keys)) if at not in faults]
            keys, slots = [job.keys[at] for at in good], [job.slots[at] for at in good]
            engine.check(rank, job.space, keys, slots)
        engine.give_back(rank, job.slots)

    def _was_damaged(self) -> bool:
        reported = {lie for client in self._clients for lie in client.reported}
        return bool(self._rotten) or bool(reported & DAMAGES)

    # ---------------------------------------------------------------- what befalls the store

    def _pass_time(self) -> None:
        self.now += self.rng.choice((0.1, 1.0, 5.0))

    def _values(self) -> list[str]:
        """Names of values; records are not among them."""
        return [name for name in self.server.values if name.count("/") == 4 and "geom" not in name]

    def _evict(self) -> None:
        names = self._values()
        for name in self.rng.sample(names, min(len(names), 3)):
            self.note("store evicts")
            del self.server.values[name]

    def _rot(self) -> None:
        names = self._values()
        if names:
            self._rotten += 1
            self.note("bytes rot")
            name = self.rng.choice(names)
            value = bytearray(self.server.values[name])
            if value:
                value[self.rng.randrange(len(value))] ^= 1 << self.rng.randrange(8)
            self.server.values[name] = bytes(value[: self.rng.choice((None, len(value) // 2))])

    def _go_away(self) -> None:
        """The store does not answer from now on, or does again."""
        self.server.away = not self.server.away
        if self.server.away:
            self.note("store is away")

    def _lose_everything(self) -> None:
        self.note("store loses everything")
        self.server.values.clear()

    def _go_back(self) -> None:
        """The store holds what it held at an earlier time, or that time is noted."""
        if not self._images or self.rng.random() < 0.5:
            self._images.append(dict(self.server.values))
            return
        self.note("store goes back")
        self.server.values = dict(self.rng.choice(self._images))
        if self.rng.random() < 0.5:  # What made it go back may have ended store processes too.
            self._restart()

    def _trouble_replica(self) -> None:
        """A replica stands still, comes up again, or takes over from a master that died."""
        if self.server.replica is None:
            self.note("replica behind")
            self.server.replica = dict(self.server.values)
            return
        if self.rng.random() < 0.5:
            self.note("replica takes over")
            self.server.values = self.server.replica
        self.server.replica = None

    def _join(self) -> None:
        """An engine of another life takes the place of one: it knows of no generation."""
        engine = self.rng.choice(self.engines)
        if engine.tier.is_busy or engine.voiding or engine.unkept:
            return
        self._end_process(engine)
        self.note("engine joins")
        engine.generation = engine.newest = engine.voided_before = None
        self._open(engine)

    def _restart(self) -> None:
        """A store process ends and begins again; what it had in hand is reported first."""
        engine = self.rng.choice(self.engines)
        if engine.tier.is_busy:
            return
        self.note("engine restarted")
        self._end_process(engine)
        engine.generation = None
        self._open(engine)
        if engine.voiding or engine.unkept:
            engine.voiding, engine.unkept = True, False
            self._ask_for_void(engine)

    def _end_process(self, engine: SimulatedEngine) -> None:
        engine.tier.close(deadline=0.0)
        self._collect(engine)
        if engine.jobs or engine.questions:
            raise Violation("liveness", f"{engine.name}: closed with jobs in hand")

    # ---------------------------------------------------------------- the end

    def _end(self) -> None:
        """The store is well and honest; every job ends, and all blocks are shared again."""
        self.server.away, self._meanwhile = False, 0.0
        self.server.replica = None
        for client in self._clients:
            client.lie_rate = 0.0
        self._count_lies()
        for engine in self.engines:
            self._come_to_rest(engine)
        # Records of the time before may have been lies: they are read again, and announced.
        for _ in range(3):
            self.now += POLL_S + ABSENT_S
            for engine in self.engines:
                self._come_to_rest(engine)
        generations = {engine.tier.generation(SPACE) for engine in self.engines}
        if len(generations) != 1:
            raise Violation("store", "engines do not agree on the generation")
        for number, writer in enumerate(self.engines):
            self._share(writer, NEW_TEXT + number)
        for engine in self.engines:
            engine.check_unused()
            if engine.tier.bytes_in_hand:
                raise Violation("drain", f"{engine.name}: bytes in hand do not come back")

    def _count_lies(self) -> None:
        for client in self._clients:
            for lie, count in client.reported.items():
                self.faults[lie.value] += count

    def _share(self, writer: SimulatedEngine, text: int) -> None:
        """What one saves now is found by all, but for engines with other block sizes."""
        if any(len(free) != ARENA_SLOTS for free in writer.free):
            raise Violation("drain", f"{writer.name}: slots do not come back")
        self._use_text(writer, text, save=True)
        for reader in self.engines:
            wanted = reader.keys(text)
            ticket = self._ask(reader, 0, wanted)
            found = self._come_to_rest(reader).get(ticket)
            readable = reader.geometry.block_tokens == writer.geometry.block_tokens
            if found != (len(wanted) if readable else 0):
                raise Violation(
                    "usefulness",
                    f"{reader.name} finds {found} of {len(wanted)} blocks of {writer.name}",
                )
            if not readable:
                continue
            before = self.faults.copy()
            self._use_text(reader, text, save=False)
            if any(self.faults[each] > before[each] for each in self.faults if "block " in each):
                raise Violation("usefulness", f"{reader.name} cannot load what is there")

    def _use_text(self, engine: SimulatedEngine, text: int, *, save: bool) -> None:
        """Saves or loads a whole text, rank after rank: the queue of saves may be short."""
        keys = engine.keys(text)
        for rank in range(len(engine.arenas)):
            self._begin_on(engine, rank, [None, *keys[:-1]], keys, save=save)
            self._come_to_rest(engine)

    def _come_to_rest(self, engine: SimulatedEngine) -> dict[int, int]:
        """Lets its threads do all that there is to do; answers to its questions."""
        counts: dict[int, int] = {}
        for _ in range(REST_STEPS):
            if engine.tier.step():
                continue
            counts |= self._collect(engine)
            waits = engine.jobs or engine.questions or engine.voiding or engine.unkept
            if engine.tier.state().on and not waits:
                return counts
            self.now += min(engine.tier.keeper_wait_s(), RETRY_MAX_S) + 0.001
        left = [*engine.jobs, *engine.questions]
        raise Violation("liveness", f"{engine.name}: not reported: {left}")
