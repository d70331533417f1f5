"""A simulated engine: rates, a bounded cache of real keys, and a connection to the router.

| takes                     | for                                                              |
|---------------------------|------------------------------------------------------------------|
| 1 / `PREFILL_RATE`        | a token of a prompt that no tier has; one prompt after the other |
| 1 / `HOST_RATE`           | one that is loaded from its host memory                          |
| 1 / `PEER_RATE`           | one that is read from the host memory of a peer                   |
| `STEP_S`, and `STEP_MORE_S` for each request that decodes | a token of an answer              |

Blocks are in device and host memory when their prompt is computed; each forgets what was used
longest ago, the end of a conversation before its beginning. Every change goes to the router, and
host memory is lent to peers, by their own messages.

What one end of a connection sends, the other receives after `NETWORK_S`. An engine that dies as
machines do says nothing: the router takes it for lost after `SILENCE_S`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from lab.routing.traffic import BLOCK_TOKENS
from penstock import AllCleared, BlocksRemoved, BlocksStored
from penstock.config import parse_config
from penstock.errors import UnavailableError
from penstock.store.base import Space
from penstock.store.peers.books import PeerBooks
from penstock.store.peers.messages import SLOT, Lends, PeerHello
from penstock.transport.base import ChannelClosed, ChannelFailed, Empty, Received, ReceivedFrame
from penstock_serve.engine import messages as ms
from penstock_serve.engine.requests import Output, Reason, Request
from penstock_serve.engine.sampling_options import Sampled
from penstock_serve.engine.spec import EngineSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from lab.routing.world import RoutingWorld

PREFILL_RATE = 8_000.0
"""Tokens a second, as all rates."""
HOST_RATE = 200_000.0
PEER_RATE = 20_000.0
HANDOFF_RATE = 200_000.0
STEP_S = 0.02
STEP_MORE_S = 0.0002
DECODES_MAX = 64
"""With so many, no further prompt is computed."""
DEVICE_BLOCKS = 400
HOST_BLOCKS = 1_200
NETWORK_S = 0.001
EVENTS_S = 0.02
"""Until the router hears of what an engine caches: events are sent once a step."""
SILENCE_S = 30.0
"""The default of `serve.silence_s`."""
DEVICE, HOST = "device", "host"
CONFIG = parse_config(
    'version = 1\nmodel.name = "simulated"\n'
    f"cache = {{ blocks = {DEVICE_BLOCKS}, block_tokens = 1 }}\n"
)
SPACE = Space(b"s" * 16, 0)
PIECE = b"p" * 16


def _lends(new: Collection[bytes], gone: Collection[bytes]) -> Lends:
    """What an engine tells of its host memory, which nobody maps here."""
    slots = bytes(SLOT.itemsize * len(new))
    return Lends(0, *SPACE, [PIECE], keys=b"".join(new), slots=slots, salt=0, gone=b"".join(gone))


class Line:
    """The router's end of a connection; frames of the engine are put into it."""

    alarm = None
    ready = False
    descriptor = -1

    def __init__(self, name: str, engine: SimulatedEngine, life: int) -> None:
        self.name = name
        self.life = life
        self.frames: deque[bytes] = deque()
        self.end: ChannelClosed | ChannelFailed | None = None
        self._engine = engine

    def send(self, frame: bytes) -> None:
        if self.end is not None:
            raise UnavailableError(f"connection to {self.name!r} has ended")
        self._engine.world.after(NETWORK_S, self._engine.receive, self, frame)

    def receive(self, *, deadline: float | None = None) -> Received:
        del deadline
        return ReceivedFrame(self.frames.popleft()) if self.frames else self.end or Empty()

    def close(self) -> None:
        self.end = self.end or ChannelClosed()


@dataclass(slots=True, eq=False)
class Job:
    """A request at an engine."""

    request: Request
    keys: list[bytes]
    cached: tuple[int, ...] = ()
    """Blocks that came from each tier."""
    handed: bool = False


class PeerGroup:
    """Engines that read each other's host memory, and what they have told each other.

    All hear the same, so the books of one reader stand for those of all.
    """

    def __init__(self) -> None:
        self.books = PeerBooks(0)
        self._members: dict[int, SimulatedEngine] = {}
        """By the identity of their conversations."""

    def join(self, engine: SimulatedEngine) -> Callable[[Lends], object]:
        """An engine is there; returns what it says with."""
        said = self.books.begin(reads=True)
        self.books.take(said, PeerHello(engine.number, arena_address=""))
        self._members[id(said)] = engine
        return partial(self.books.take, said)

    def finds(self, reader: SimulatedEngine, key: bytes) -> bool:
        """Whether a peer of this engine lists a block, and has it still."""
        holders = (self._members[id(each)] for each in self.books.find(SPACE, PIECE, key))
        return any(each is not reader and each.up and key in each.host for each in holders)


class SimulatedEngine:
    """One machine with one engine, in all its lives."""

    def __init__(self, world: RoutingWorld, number: int, rack: int, peers: PeerGroup) -> None:
        self.world = world
        self.number = number
        self.name = f"engine-{number}"
        self.rack = rack
        self.up = True
        self.cut = False
        """Whether the network lies between it and the router."""
        self.loses_events = False
        self.life = 0
        self.device: dict[bytes, None] = {}
        self.host: dict[bytes, None] = {}
        self.line: Line | None = None
        self._peers = peers
        self._lend = peers.join(self)
        self._queue: deque[Job] = deque()
        self._computing: Job | None = None
        self._decoding: dict[str, Job] = {}
        self._claims: dict[str, Job] = {}
        """Jobs whose prompt another engine computes, by their handoffs."""
        self._held: list[bytes] = []
        """What was sent while it was cut off."""
        self._sequence = 0
        self._leaving = False

    # ---------------------------------------------------------------- the connection

    def join(self) -> None:
        """Connects to the router, and says what it has."""
        self.line = self.world.connect(self)
        self._say(
            ms.InstanceReady(
                model="simulated",
                positions=1 << 20,
                stop_tokens=[],
                config=CONFIG,
                tiers=[DEVICE, HOST, "peers"],
                engine=EngineSpec(name=self.name, ranks=1, address=f"tcp://{self.name}:1"),
            )
        )
        for tier, blocks in ((DEVICE, self.device), (HOST, self.host)):
            if blocks:
                self._say(ms.CacheChanged(events=[self._stored(tier, list(blocks))]))

    def _say(self, message: ms.InstanceMessage | Output) -> None:
        self.world.after(NETWORK_S, self._arrive, self.line, ms.encode(message))

    def _arrive(self, line: Line | None, frame: bytes, keys: int = 0) -> None:
        """A frame, with events of so many keys, comes to the router if they are connected."""
        if line is not self.line or line is None or line.end is not None:
            return
        if self.cut:
            self._held.append(frame)
            return
        line.frames.append(frame)
        self.world.look(line, keys)

    def part(self) -> None:
        """The network between it and the router is gone."""
        self.cut = True
        self.world.after(SILENCE_S, self._give_up, self.line)

    def _give_up(self, line: Line | None) -> None:
        if self.cut:
            self.fail(line)

    def heal(self) -> None:
        """The network is whole again: what waits arrives, or a new connection is made."""
        self.cut = False
        held, self._held = self._held, []
        if self.line is None or self.line.end is not None:
            self._drop_work()
            self.join()
            return
        for frame in held:
            self._arrive(self.line, frame)

    def receive(self, line: Line, frame: bytes) -> None:
        """A frame of the router."""
        if not self.up or line is not self.line:
            return
        if self.cut:
            # TCP sends it again when the network is whole.
            self.world.after(1.0, self.receive, line, frame)
            return
        message = ms.read_by_instance(frame)
        match message:
            case Request():
                self._take(message)
            case ms.Abort(id=name):
                self._drop(name)
            case ms.ComputeLocally(id=name):
                self._retake(name, "")
            case ms.ChangePrefill(id=name, handoff=handoff):
                self._retake(name, handoff)
            case _:
                pass  # Pairs and roles cost nothing here.

    # ---------------------------------------------------------------- work

    @property
    def idle(self) -> bool:
        return not (self._queue or self._computing or self._decoding or self._claims)

    def _take(self, request: Request) -> None:
        job = Job(request, self.world.keys_of(request))
        if request.handoff and request.id != request.handoff and self._misses(job):
            self._claims[request.handoff] = job
            return
        self._queue.append(job)
        self._begin()

    def _misses(self, job: Job) -> bool:
        return sum(self._found(job.keys)[:2]) < len(job.keys)

    def _retake(self, name: str, handoff: str) -> None:
        """Another engine computes a prompt, or this one."""
        for old, job in list(self._claims.items()):
            if job.request.id == name:
                del self._claims[old]
                if handoff:
                    self._claims[handoff] = job
                else:
                    self._queue.append(job)
                    self._begin()

    def _drop(self, name: str) -> None:
        """A request is not wanted any more; a prompt that is being computed is finished."""
        self._queue = deque(each for each in self._queue if each.request.id != name)
        self._claims = {
            handoff: each for handoff, each in self._claims.items() if each.request.id != name
        }
        if self._decoding.pop(name, None):
            self._begin()

    def _found(self, keys: list[bytes]) -> tuple[int, int, int]:
        """Leading blocks in device memory, after these in host memory, after these at peers."""
        counts = [0, 0, 0]
        tier = 0
        for key in keys:
            while tier < 3 and not self._has(tier, key):
                tier += 1
            if tier == 3:
                break
            counts[tier] += 1
        return counts[0], counts[1], counts[2]

    def _has(self, tier: int, key: bytes) -> bool:
        if tier < 2:
            return key in (self.host if tier else self.device)
        return self._peers.finds(self, key)

    def _begin(self) -> None:
        """Computes the next prompt, if nothing is in its way."""
        if self._computing or not self._queue or len(self._decoding) >= DECODES_MAX:
            return
        job = self._computing = self._queue.popleft()
        job.cached = self._found(job.keys)
        _, loaded, read = job.cached
        computed = max(len(job.keys) - sum(job.cached), 1 / BLOCK_TOKENS)
        slow = self.world.slow_store
        takes = computed / PREFILL_RATE + (loaded / HOST_RATE + read / PEER_RATE) * slow
        self.world.after(takes * BLOCK_TOKENS, self._computed, job, self.life)

    def _computed(self, job: Job, life: int) -> None:
        if life != self.life:
            return
        self._computing = None
        self._keep(job.keys)
        request = job.request
        if request.handoff == request.id:
            self._emit(job, Reason.LENGTH)
            after_s = len(job.keys) * BLOCK_TOKENS / HANDOFF_RATE
            self.world.after(after_s, self.world.hand_over, request.decode, request.handoff)
        else:
            self._decode(job)
        self._begin()

    def take_over(self, handoff: str) -> None:
        """The KV of a prompt has arrived."""
        job = self._claims.pop(handoff, None)
        if self.up and job is not None:
            job.handed = True
            self._keep(job.keys)
            self._decode(job)

    def _decode(self, job: Job) -> None:
        """Sends the first token now, and the last one when all were decoded."""
        name, left = job.request.id, job.request.max_tokens - 1
        self._emit(job, Reason.STOP if not left else None)
        if left:
            self._decoding[name] = job
            step_s = STEP_S + STEP_MORE_S * len(self._decoding)
            self.world.after(left * step_s, self._decoded, name, job, self.life)

    def _decoded(self, name: str, job: Job, life: int) -> None:
        if life == self.life and self._decoding.pop(name, None) is job:
            self._say(Output(request=name, answer=0, reason=Reason.STOP))
            self._begin()
            if self._leaving and self.idle:
                self.stop()

    def _emit(self, job: Job, reason: Reason | None) -> None:
        self._say(
            Output(
                request=job.request.id,
                answer=0,
                sampled=Sampled(1, 0.0),
                reason=reason,
                cached_by_tier=job.cached,
                handed=job.handed,
            )
        )

    # ---------------------------------------------------------------- the cache

    def _keep(self, keys: list[bytes]) -> None:
        """The blocks of a prompt are in both tiers, and were used now."""
        events: list[BlocksStored | BlocksRemoved | AllCleared] = []
        changed = 0
        for tier, blocks, most in (
            (DEVICE, self.device, DEVICE_BLOCKS),
            (HOST, self.host, HOST_BLOCKS),
        ):
            new = [key for key in keys if key not in blocks]
            # The last block first: of equals the end of a chain is forgotten before its start.
            for key in reversed(keys):
                blocks.pop(key, None)
                blocks[key] = None
            gone = list(islice(blocks, max(0, len(blocks) - most)))
            for key in gone:
                del blocks[key]
            changed += len(new) + len(gone)
            if new:
                events.append(self._stored(tier, new))
            if gone:
                events.append(self._removed(tier, gone))
            if tier == HOST and (new or gone):
                self._lend(_lends(new, gone))
        if events and not self.loses_events:
            frame = ms.encode(ms.CacheChanged(events=events))
            self.world.after(EVENTS_S, self._arrive, self.line, frame, changed)

    def _stored(self, tier: str, keys: list[bytes]) -> BlocksStored:
        self._sequence += 1
        return BlocksStored(sequence=self._sequence, epoch=0, tier=tier, keys=keys, parent=None)

    def _removed(self, tier: str, keys: list[bytes]) -> BlocksRemoved:
        self._sequence += 1
        return BlocksRemoved(sequence=self._sequence, epoch=0, tier=tier, keys=keys)

    # ---------------------------------------------------------------- faults

    def speak(self) -> None:
        """From now on the router hears of its cache again; what it missed stays unknown."""
        self.loses_events = False

    def die(self) -> None:
        """The machine is gone at once, with all that it has; nobody is told."""
        self.up = False
        self._lend(_lends([], self.host))
        self.device.clear()
        self.host.clear()
        self._drop_work()
        self.world.after(SILENCE_S, self.fail, self.line)

    def fail(self, line: Line | None) -> None:
        """The router takes it for lost, unless it has a new connection."""
        if line is not None and line.end is None:
            line.end = ChannelFailed(f"nothing was heard for {SILENCE_S:g} s")
            self.world.look(line)

    def start_again(self) -> None:
        """The machine is back, with nothing; its new connection ends the old one."""
        self.fail(self.line)
        self.up = True
        self.join()

    def leave(self) -> None:
        """It is taken out of service: its requests end, others are not accepted."""
        self._leaving = True
        self._say(ms.Leaving())
        if self.idle:
            self.stop()

    def stop(self) -> None:
        """Ends the connection in good order."""
        self.up = False
        self.world.after(2 * NETWORK_S, self._end, self.line)

    def _end(self, line: Line | None) -> None:
        if line is not None and line.end is None:
            line.end = ChannelClosed()
            self.world.look(line)

    def _drop_work(self) -> None:
        self.life += 1
        self._queue.clear()
        self._decoding.clear()
        self._claims.clear()
        self._computing = None
        self._held.clear()
