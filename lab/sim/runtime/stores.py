"""The store process as a party of a runtime world: its real server above real disk tiers.

Real here: the link and the arena offers with their sessions, the server, the disk tiers and their
format. Simulated: sockets, the disk below the tiers, the lives of the process, and time.

| trouble      | what happens                                                                  |
|--------------|-------------------------------------------------------------------------------|
| late         | it is started some time after its engine                                      |
| killed       | the process is gone, perhaps in a call of a tier; another one is started       |
| power lost   | the same, and any part of what was not synced is gone                          |
| stopped      | it does nothing for a while; answers come late, perhaps after a minute         |
| slow         | a step of a tier takes longer than the deadline of what it is for              |
| full         | writes of a tier fail for a while: it is off, and on again                     |
| neighbour    | another engine saves, loads and voids in the same store                        |

The one rule that must not break: a copy that is reported is not touched by any process any more,
and none that was reported is begun later.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.sim.disk.device import ProcessKilledError
from lab.sim.disk.process import DiskProcess
from lab.sim.disk.world import make_folder
from lab.sim.runtime.conditions import Way
from lab.sim.runtime.memory import ALGORITHM
from lab.sim.runtime.sockets import SimDeath, SimListener, sim_socket_pair
from penstock.errors import PenstockError
from penstock.store.base import part_name
from penstock.store.process.client import ArenaOffer, StoreSession
from penstock.store.process.link import StoreLink
from penstock.store.process.messages import SaveRequest, StoreConfig, StoreTierConfig, split_keys
from penstock.store.process.server import StoreServer
from penstock.store.process.sessions import StoreConnection
from penstock.store.process.tier_slots import TierSlot
from penstock.tiers.host import HostTier
from penstock.transport.unix_sockets import SocketPeer
from penstock.vocabulary.form import Form

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

    from lab.sim.conditions import StoreConditions
    from lab.sim.runtime.process import RankProcess
    from lab.sim.runtime.sockets import SimSocket
    from lab.sim.runtime.world import RuntimeWorld
    from penstock.machine.effects import Copy
    from penstock.store.base import MappedArena, StoreTier
    from penstock.store.process.messages import JobRequest
    from penstock.store.process.sessions import ClientSession, OwnerState
    from penstock.store.process.tier_slots import OpenTier
    from penstock.vocabulary.keys import Key, OperationId

SOCKET = Path("/simulated/socket")
SPACE = b"a simulated one."
STOP_S = 60.0
"""The longest time for which a process is stopped."""


class SimLink(StoreLink):
    """The link of the product over simulated sockets; it remembers its tickets."""

    def __init__(
        self,
        stores: Stores,
        *,
        life: int,
        arenas: Sequence[str],
        arrived: Callable[[], None],
    ) -> None:
        world = stores.world
        super().__init__(
            stores.config,
            life=life,
            space=SPACE,
            arenas=arenas,
            tiers=stores.tier_names,
            clock=lambda: world.now,
        )
        self._session.close()
        self._session = StoreSession(SOCKET, connect=stores.connector(arrived))
        self.life = life
        self.operations: dict[int, OperationId] = {}
        """By ticket, of all sessions."""

    def _order_copy(self, copy: Copy) -> None:
        super()._order_copy(copy)
        ticket = self._tickets.get(copy.operation)
        if ticket is not None:
            self.operations[ticket] = copy.operation


class SimOffer(ArenaOffer):
    """The offer of the product over simulated sockets."""

    def __init__(
        self,
        stores: Stores,
        host: HostTier,
        *,
        form: Form,
        part: bytes,
        arrived: Callable[[], None],
    ) -> None:
        world = stores.world
        super().__init__(str(SOCKET), host, form=form, part=part, clock=lambda: world.now)
        self._session.close()
        self._session = StoreSession(SOCKET, connect=stores.connector(arrived))


class SteppedSlot(TierSlot):
    """Opens its tier at a moment that the world chooses, and not in a thread."""

    def __init__(
        self,
        config: StoreTierConfig,
        kinds: Mapping[str, OpenTier],
        begin: Callable[[SteppedSlot], None],
    ) -> None:
        super().__init__(config, kinds)
        self._begin = begin

    def _begin_open(self) -> Future[StoreTier]:
        self._begin(self)
        return Future()

    def run_open(self) -> None:
        """What the thread of the product does; a process that is killed in it does no more."""
        assert self._opening is not None
        try:
            self._opening.set_result(self._try_open())
        except (PenstockError, OSError, ValueError) as error:
            self._opening.set_exception(error)


class WatchedServer(StoreServer):
    """The server of the product; a turn is what its loop does between two waits."""

    def __init__(self, stores: Stores, listener: SimListener, slots: Sequence[TierSlot]) -> None:
        world = stores.world
        super().__init__(listener, slots, clock=lambda: world.now)  # type: ignore[arg-type]
        self._stores = stores
        self._watch(listener.descriptor, self._accept)
        for slot in slots:
            self._watch(slot.descriptor, lambda _events: None)

    def turn(self) -> bool:
        """Does what is to be done now; whether there is more."""
        self._advance(self._clock())
        for fd, events in self._epoll.poll(0):
            if callback := self._callbacks.get(fd):
                callback(events)
        self._advance(self._clock())
        return bool(self._epoll.poll(0))

    @property
    def alarm(self) -> float:
        """When it has something to do, though nothing arrives."""
        return self._alarm()

    def _start(self, session: ClientSession, owner: OwnerState, request: JobRequest) -> None:
        super()._start(session, owner, request)
        life = owner.hello.life
        for number in owner.tickets.get(request.ticket, ()):
            job = self._jobs[number]
            assert job.slot.tier is not None
            for rank in job.ranks:
                self._stores.job_begins(life, request.ticket, rank)
            if life == self._stores.world.incarnation:
                self._stores.check_generation(request.ticket, job.slot)
            if isinstance(request, SaveRequest):
                part = job.arena.mapped.part
                self._stores.ever |= {(part, key) for key in split_keys(request.keys)}

    def end_a_session(self, rng: Random) -> bool:
        """A client is cut off, as one that does not read its answers; false if there is none."""
        busy = [session for session, owner in self._owners.items() if owner.tickets]
        sessions = busy or list(self._sessions.values())
        if sessions:
            self._end(rng.choice(sessions), "conditions")
        return bool(sessions)

    def works_for(self, life: int, ticket: int, rank: int) -> bool:
        """Whether a job for a rank's part of a copy is under way."""
        return any(
            job.owner.hello.life == life and job.ticket == ticket and rank in job.ranks
            for job in self._jobs.values()
        )

    def abandon(self) -> None:
        """Gives back what a process that was killed had."""
        self._epoll.close()
        self._listener.close()
        for slot in self._slots:
            os.close(slot.descriptor)
        for session in self._sessions.values():
            session._channel.close()  # noqa: SLF001
        arenas = {id(each): each for each in self._offers.values()}
        arenas |= {id(job.arena): job.arena for job in self._jobs.values()}
        for arena in arenas.values():
            arena.mapped.host.close()


class StoreProcess:
    """One life of the store process."""

    def __init__(self, stores: Stores, pid: int) -> None:
        self.pid = pid
        self.alive = True
        self.stopped = False
        self.death = SimDeath()
        self.listener = SimListener()
        self._stores = stores
        self._world = stores.world
        kinds = {"disk": lambda config: stores.disks[config.name].start()}
        slots = [SteppedSlot(config, kinds, self._begin_open) for config in stores.config.tiers]
        self.server = WatchedServer(stores, self.listener, slots)
        self._called = False
        self._alarm_at = math.inf
        self._stepping: set[str] = set()
        self._opening: list[SteppedSlot] = []
        self.call()

    def call(self) -> None:
        """There is something for it: its next turn comes soon."""
        if self.alive and not self._called and not self.stopped:
            self._called = True
            self._world.after(self._world.rng.random() * self._stores.pace_s, self._turn)

    def resume(self) -> None:
        """It goes on after it was stopped."""
        self.stopped = False
        self.call()
        for slot in self._opening:
            self._world.after(self._stores.draw_pause(), self._open_tier, slot)

    def _begin_open(self, slot: SteppedSlot) -> None:
        self._opening.append(slot)
        self._world.after(self._stores.draw_pause(), self._open_tier, slot)

    def _open_tier(self, slot: SteppedSlot) -> None:
        if not self.alive or self.stopped or slot not in self._opening:
            return
        self._opening.remove(slot)
        try:
            slot.run_open()
        except ProcessKilledError:
            self._stores.die_in_a_call()
            return
        self.call()

    def _turn(self) -> None:
        self._called = False
        if not self.alive or self.stopped:
            return
        try:
            more = self.server.turn()
        except ProcessKilledError:
            self._stores.die_in_a_call()
            return
        if more:
            self.call()
        alarm = self.server.alarm
        if alarm < self._alarm_at:
            self._alarm_at = alarm
            self._world.after(max(0.0, alarm - self._world.now), self._ring)
        for name in self._stores.disks:
            self._wake_tier(name)

    def _ring(self) -> None:
        self._alarm_at = math.inf
        self.call()

    # ---------------------------------------------------------------- the threads of its tiers

    def _wake_tier(self, name: str) -> None:
        tier = self._stores.disks[name].tier
        if tier is None or name in self._stepping or self.stopped:
            return
        if tier.ready_steps(keeper=True):
            pause = self._stores.draw_pause()
        elif tier.retry_at < math.inf:
            pause = max(0.0, tier.retry_at - self._world.now)
        else:
            self._stores.disks[name].step()  # It compares what it found with what was there.
            return
        self._stepping.add(name)
        self._world.after(pause, self._step_tier, name)

    def _step_tier(self, name: str) -> None:
        self._stepping.discard(name)
        if not self.alive or self.stopped:
            return
        try:
            self._stores.disks[name].step()
        except ProcessKilledError:
            self._stores.die_in_a_call()
            return
        self.call()

    def die(self) -> None:
        """It is gone; who watches it will see that."""
        self.alive = False
        self.server.abandon()
        self.death.die()


class Stores:
    """The store of a world: its lives, its disks, and what is known of its jobs."""

    def __init__(self, world: RuntimeWorld, conditions: StoreConditions) -> None:
        self.world = world
        self.conditions = conditions
        self.pace_s = conditions.pace_s
        settings = world.conditions.settings
        self.tier_names = {
            index: tier.name for index, tier in enumerate(settings.tiers, 1) if tier.stored
        }
        """By index in the cache."""
        self.folder = make_folder()
        size_bytes = 8 * (8192 + conditions.segment_places * 8192)
        self.disks = {
            name: DiskProcess(world.rng, self.folder / name, size_bytes, clock=lambda: world.now)
            for name in self.tier_names.values()
        }
        for disk in self.disks.values():
            disk.disk.conditions.meanwhile = 0.2
            disk.truth.is_rotten = self._is_rotten
        self.config = StoreConfig(
            socket=str(SOCKET),
            tiers=tuple(
                StoreTierConfig(
                    name=name,
                    kind="disk",
                    size_bytes=size_bytes,
                    options={"path": str(self.folder / name)},
                )
                for name in self.tier_names.values()
            ),
        )
        self.links: dict[int, SimLink] = {}
        """Of all owners, by life."""
        self.ever: set[tuple[bytes, Key]] = set()
        """Part and key of all that anybody ever saved."""
        self.well = False
        self._reported: set[tuple[int, int, int]] = set()
        """Life of the owner, ticket and rank of what was reported."""
        self._generations = dict.fromkeys(self.disks, 0)
        """As far as they were seen."""
        self._voided = dict.fromkeys(self.disks, -1)
        """The generation of each tier when the engine was last reset."""
        self._sockets: list[SimSocket] = []
        self._watchers: list[Callable[[], None]] = []
        self._pids = 0
        self.process: StoreProcess | None = None
        if conditions.late_s:
            world.note("store starts late")
            world.after(conditions.late_s, self.start)
        else:
            self.start()

    # ---------------------------------------------------------------- for clients

    def connector(self, arrived: Callable[[], None]) -> Callable[[Path], StoreConnection | None]:
        """How a client connects; `arrived` is called when there is something for it."""
        self._watchers.append(arrived)

        def connect(_path: Path) -> StoreConnection | None:
            process = self.process
            if process is None:
                return None
            near, far = sim_socket_pair(self.world, arrived, process.call, self.conditions.delay_s)
            self._sockets += (near, far)
            process.listener.put(far, SocketPeer(self._pids, os.getuid(), os.getgid()))
            process.call()
            return StoreConnection(near, process.pid, process.death.pidfd())  # type: ignore[arg-type]

        return connect

    def offer(self, process: RankProcess, hub: object) -> SimOffer:
        """A rank offers its hub."""
        world = self.world
        assert isinstance(hub, HostTier)
        here = world.ways.way is Way.HERE
        form = Form(layout=hub.layout, checksum=ALGORITHM)
        count = world.conditions.settings.rank_count
        return SimOffer(
            self,
            hub,
            form=form,
            part=part_name(form, rank=process.number, rank_count=count, equal=False),
            arrived=world.call_owner if here else process.wake,
        )

    def _is_rotten(self, arena: MappedArena, slot: int) -> bool:
        return self.world.ranks.is_rotten(arena, slot)

    def draw_pause(self) -> float:
        """How long a step of a tier takes: a slow disk is slower than deadlines."""
        pause = self.world.rng.random() * self.pace_s
        if not self.well and self.world.rng.random() < self.conditions.hang / 4:
            self.world.note("store is slow")
            timeout_s = self.world.conditions.settings.operation_timeout_s
            pause += timeout_s * self.world.rng.uniform(0.5, 1.5)
        return pause

    # ---------------------------------------------------------------- what is known of jobs

    def note_reset(self) -> None:
        """The world's engine was reset: what is there now must not be found by it again."""
        for name, disk in self.disks.items():
            if disk.tier is not None:
                generation = disk.tier.generation(SPACE)
                assert generation is not None
                self._generations[name] = generation
        self._voided = dict(self._generations)

    def check_generation(self, ticket: int, slot: TierSlot) -> None:
        """A copy from after a reset meets nothing from before it."""
        operation = self.links[self.world.incarnation].operations[ticket]
        assert slot.tier is not None
        generation = slot.tier.generation(SPACE)
        assert generation is not None
        self._generations[slot.name] = generation
        if operation.epoch == self.world.epoch > 0 and generation <= self._voided[slot.name]:
            raise Violation(
                "store", f"{operation} meets generation {generation}, from before a reset"
            )

    def job_begins(self, life: int, ticket: int, rank: int) -> None:
        """A process begins to touch the slots of a copy."""
        if (life, ticket, rank) in self._reported:
            raise Violation("reuse", f"ticket {ticket} begins for rank {rank}, but has ended")

    def job_reported(self, link: SimLink, operation: OperationId, rank: int) -> None:
        """An engine was told that a copy has ended for a rank: nobody touches its slots."""
        for ticket, name in link.operations.items():
            if name == operation:
                self._reported.add((link.life, ticket, rank))
                if self.process and self.process.server.works_for(link.life, ticket, rank):
                    raise Violation(
                        "reuse", f"{operation} is reported for rank {rank}, and is under way"
                    )

    # ---------------------------------------------------------------- what befalls it

    def start(self) -> None:
        """A process is started where there is none."""
        if self.process is None:
            self._pids += 1
            self.process = StoreProcess(self, self._pids)

    def die(self, *, power: bool) -> None:
        """The process is killed, or power is lost; another one comes."""
        process = self.process
        if process is None:
            return
        self.world.note("store loses power" if power else "store is killed")
        self.world.tell("the store process dies")
        self.process = None
        process.die()
        for disk in self.disks.values():
            disk.kill(power=power)
            disk.disk.dies_at = None
        for watcher in self._watchers:
            watcher()
        timeout_s = self.world.conditions.settings.operation_timeout_s
        self.world.after(self.world.rng.uniform(0.0, 1.0) * timeout_s, self.start)

    def die_in_a_call(self) -> None:
        """A step of a tier, or the opening of one, was the last of the process."""
        self.world.note("store dies in a call")
        self.die(power=self.world.rng.random() < self.conditions.power)

    def doom(self) -> None:
        """The process dies in one of its next calls."""
        disk = self.world.rng.choice(list(self.disks.values())).disk
        disk.dies_at = disk.call_count + self.world.rng.randint(1, 10)

    def stop(self) -> None:
        """The process is stopped for a while."""
        process = self.process
        if process is not None and not process.stopped:
            self.world.note("store is stopped")
            process.stopped = True
            timeout_s = self.world.conditions.settings.operation_timeout_s
            pause = self.world.rng.choice((0.5 * timeout_s, 4.0, STOP_S))
            self.world.after(pause * self.world.rng.uniform(0.5, 1.0), process.resume)

    def end_a_session(self) -> None:
        """The process ends a session, and lives on."""
        process = self.process
        if process is not None and process.server.end_a_session(self.world.rng):
            self.world.note("store ends a session")

    def fill_up(self) -> None:
        """Writes of a tier fail for a while."""
        disk = self.world.rng.choice(list(self.disks.values())).disk
        if disk.conditions.refusals is None:
            self.world.note("store is full")
            disk.conditions.refusals = {"pwritev": errno.ENOSPC, "fallocate": errno.ENOSPC}
            timeout_s = self.world.conditions.settings.operation_timeout_s
            pause = self.world.rng.uniform(0.0, 2.0) * timeout_s
            self.world.after(pause, setattr, disk.conditions, "refusals", None)

    def rot(self) -> bool:
        """A byte on a disk changes."""
        return self.world.rng.choice(list(self.disks.values())).rot()

    def mend(self) -> None:
        """From now on nothing goes wrong with it."""
        self.well = True
        for disk in self.disks.values():
            disk.disk.conditions.refusals, disk.disk.dies_at = None, None
        if self.process is not None and self.process.stopped:
            self.process.resume()
        self.start()

    def check_kept(self) -> None:
        """At the end: after one more kill, all that was acknowledged is found."""
        for disk in self.disks.values():
            disk.disk.dies_at = None
            disk.kill(power=False)
            disk.start()
            disk.settle()
            if not disk.checked:
                raise Violation("store", "a disk tier does not come back")

    def close(self) -> None:
        """The world is over."""
        if self.process is not None:
            self.process.die()
            self.process = None
        for each in self._sockets:
            each.dispose()
        for disk in self.disks.values():
            disk.kill_quietly()
        shutil.rmtree(self.folder)
