"""A world in which the four machines meet: a wire, landing areas, slots, and checks.

Nothing happens by itself. A test delivers messages, lets writes land and end, and so on, in the
order it wants; `run` does all of it in order until nothing is left to do. The world looks after
the rules that must hold whatever the order is:

- nothing is written into memory that was given back, or into a berth that is being read;
- what a decode rank takes is what it thinks it is; a delivered handoff has every part;
- slots are touched by no rank after the end; prompts are read by no write after theirs;
- every handoff ends once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.fixtures.handoff_machines import introduce
from penstock.handoff.protocol import effects as eff
from penstock.handoff.protocol.decode_rank import DecodeRank
from penstock.handoff.protocol.decode_scheduler import DecodeScheduler
from penstock.handoff.protocol.grid import Grid
from penstock.handoff.protocol.identity import Identity, Life, facts_of
from penstock.handoff.protocol.prefill_rank import PrefillRank
from penstock.handoff.protocol.prefill_scheduler import PrefillScheduler
from penstock.handoff.protocol.settings import HandoffBounds, HandoffSettings, HandoffTimes
from penstock.handoff.protocol.states import HandoffOutcome, Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.handoff.protocol.messages import AnyMessage
    from penstock.handoff.protocol.party import Party

FACTS = facts_of(model="toy", weights="v1")
ROLES = {
    "P": Role.PREFILL_SCHEDULER,
    "p": Role.PREFILL_RANK,
    "D": Role.DECODE_SCHEDULER,
    "d": Role.DECODE_RANK,
}
SMALL = HandoffBounds(
    berth_bytes=1024, berth_count=2, landing_bytes_max=1 << 20, retired_bytes_max=8192
)


class World:
    """A prefill engine "P" with ranks p0, p1, … and a decode engine "D" with ranks d0, d1, …"""

    def __init__(
        self,
        prefill_count: int = 1,
        decode_count: int = 1,
        *,
        layers: int = 2,
        tokens: int = 4,
        bounds: HandoffBounds = SMALL,
        times: HandoffTimes | None = None,
        acquainted: bool = True,
    ) -> None:
        self.settings = HandoffSettings(bounds=bounds, times=times or HandoffTimes())
        self.now = 0.0
        self.layers, self.tokens = layers, tokens
        self.prefill_names = tuple(f"p{n}" for n in range(prefill_count))
        self.decode_names = tuple(f"d{n}" for n in range(decode_count))
        self.names = ("P", *self.prefill_names, "D", *self.decode_names)
        self.parties: dict[str, Party] = {}
        self.lives = 0
        self.wire: list[AnyMessage] = []
        self.posted: list[eff.Write] = []
        self.landed: list[eff.Write] = []
        self.takes: list[tuple[str, eff.Take]] = []
        self.fences: list[tuple[str, eff.Fence]] = []
        self.areas: dict[tuple[str, Life, int], dict[int, object]] = {}
        self.given_back: set[tuple[str, Life, int]] = set()
        self.fenced: set[tuple[str, Life, int]] = set()
        self.dead: set[Life] = set()
        self.slots: dict[tuple[str, str, int], set[tuple[str, int]]] = {}
        self.ended: dict[str, list[eff.HandoffEnded]] = {"P": [], "D": []}
        self.submitted: dict[str, int] = {"P": 0, "D": 0}
        self.wanted: dict[tuple[str, int], dict[str, tuple[tuple[str, Grid], ...]]] = {}
        for name in self.names:
            self.start(name)
        if acquainted:
            for name in self.names:
                self.acquaint(name)

    # Lives.

    def start(self, name: str) -> None:
        """A party starts, or starts again."""
        self.lives += 1
        if name in self.parties:
            self.dead.add(self.parties[name].life)
        identity = Identity(Life(name, self.lives), ROLES[name[0]], FACTS)
        match name[0]:
            case "P":
                party: Party = PrefillScheduler(identity, self.settings, ranks=self.prefill_names)
            case "p":
                party = PrefillRank(identity, self.settings, scheduler="P")
            case "D":
                party = DecodeScheduler(identity, self.settings, ranks=self.decode_names)
            case _:
                party = DecodeRank(identity, self.settings, scheduler="D")
        self.parties[name] = party

    def colleagues(self, name: str) -> tuple[str, ...]:
        prefill = ("P", *self.prefill_names)
        return prefill if name in prefill else ("D", *self.decode_names)

    def acquaint(self, name: str) -> None:
        """All that a party has to do with know it, and it knows them."""
        for other in self.names:
            if other == name or ROLES[name[0]] is ROLES[other[0]]:
                continue
            if (name in "PD") + (other in "PD") == 1 and other not in self.colleagues(name):
                continue
            if name not in "PD" and other not in "PD" and other in self.colleagues(name):
                continue
            self.introduce(name, other)

    def introduce(self, one: str, other: str) -> None:
        for name, peer in ((one, other), (other, one)):
            identity = self.parties[peer].identity
            self.do(name, lambda p, i=identity: introduce(p, i, self.now))

    def crash(self, name: str) -> None:
        """A party dies: colleagues see it, its moves and the observing of its writes end."""
        self.dead.add(self.parties[name].life)
        self.landed = [w for w in self.landed if w.notice.sender.name != name]
        self.takes = [(n, take) for n, take in self.takes if n != name]
        self.fences = [(n, fence) for n, fence in self.fences if n != name]
        for key in [key for key in self.areas if key[0] == name]:
            del self.areas[key]
        # Its next life counts its areas from 1 again.
        self.given_back = {key for key in self.given_back if key[0] != name}
        self.fenced = {key for key in self.fenced if key[0] != name}
        for other in self.colleagues(name):
            if other != name and name in self.parties[other].peers:
                self.do(other, lambda p: p.suspect(name, self.now))

    # Inputs.

    def do(self, name: str, act: Callable[[Party], list[eff.AnyEffect]]) -> None:
        """Gives an input to a machine, and takes what it wants done."""
        for effect in act(self.parties[name]):
            self.carry_out(name, effect)

    def carry_out(self, name: str, effect: eff.AnyEffect) -> None:
        match effect:
            case eff.Send(message=message):
                assert message.sender == self.parties[name].life
                self.wire.append(message)
            case eff.Write():
                self.check_write(effect)
                self.posted.append(effect)
            case eff.Take():
                self.takes.append((name, effect))
            case eff.OpenArea():
                area = (name, effect.peer, effect.generation)
                assert area not in self.areas
                assert area not in self.given_back
                self.areas[area] = {}
            case eff.Fence():
                self.fences.append((name, effect))
            case eff.FreeArea():
                area = (name, effect.peer, effect.generation)
                assert not [t for n, t in self.takes if area == (n, t.source, t.generation)]
                del self.areas[area]
                self.given_back.add(area)
            case eff.HandoffEnded():
                self.end(name, effect)

    def check_write(self, write: eff.Write) -> None:
        target = write.write
        busy = [(w.notice.sender, *w.write[:3]) for w in self.unended()]
        assert (write.notice.sender, *target[:3]) not in busy, "a berth is written to twice at once"
        for name, take in self.takes:
            reading = (take.source, name, take.generation, take.berth)
            writing = (write.notice.sender, target.target.name, target.generation, target.berth)
            assert reading != writing, "a berth is written to while its target reads it"

    def unended(self) -> list[eff.Write]:
        return [*self.posted, *self.landed]

    def end(self, name: str, ended: eff.HandoffEnded) -> None:
        self.ended[name].append(ended)
        handoff = ended.handoff
        if name == "D":
            key = (handoff, ended.epoch)
            assert not [t for _, t in self.takes if (t.handoff, t.epoch) == key]
            if ended.outcome is HandoffOutcome.DELIVERED:
                for rank, sources in self.wanted[key].items():
                    expected = {(s, n) for s, grid in sources for n in range(grid.part_count)}
                    assert self.slots.get((rank, *key), set()) == expected
        else:
            reading = [w for w in self.unended() if w.notice.sender not in self.dead]
            assert handoff not in [w.write.handoff for w in reading]

    def grid(self, **changes: int) -> Grid:
        plain = Grid(0, self.layers, 0, self.tokens, 1, self.tokens)
        return plain._replace(**changes)

    def diagonal(self) -> dict[str, tuple[tuple[str, Grid], ...]]:
        """Every target wants everything from the source of its number."""
        count = len(self.prefill_names)
        return {
            name: ((self.prefill_names[n % count], self.grid()),)
            for n, name in enumerate(self.decode_names)
        }

    def everything(self) -> dict[str, tuple[tuple[str, Grid], ...]]:
        """Every target wants something from every source."""
        return {
            name: tuple((source, self.grid()) for source in self.prefill_names)
            for name in self.decode_names
        }

    def submit_prefill(self, handoff: str = "h", *, admit: bool = True) -> None:
        self.submitted["P"] += 1
        self.do("P", lambda p: p.submit(handoff, self.now))
        if admit:
            self.admit(handoff)

    def admit(self, handoff: str = "h") -> None:
        for name in self.prefill_names:
            self.do(
                name,
                lambda p: p.admit(
                    handoff, token_count=self.tokens, layers=range(self.layers), now=self.now
                ),
            )

    def compute(self, handoff: str = "h") -> None:
        """All layers of all ranks, and the first token."""
        for name in self.prefill_names:
            self.do(name, lambda p: p.chunk_progress(handoff, tokens=self.tokens, now=self.now))
        self.do("P", lambda p: p.first_token(handoff, self.now, tokens=(7,), drafts=(8, 9)))

    def submit_decode(
        self,
        handoff: str = "h",
        *,
        epoch: int = 1,
        wanted: dict[str, tuple[tuple[str, Grid], ...]] | None = None,
        **options: object,
    ) -> None:
        wanted = self.diagonal() if wanted is None else wanted
        self.submitted["D"] += 1
        self.wanted[handoff, epoch] = wanted
        self.do(
            "D",
            lambda d: d.submit(
                handoff, self.now, prefill="P", wanted=wanted, epoch=epoch, **options
            ),
        )

    def busy(self) -> World:
        """Everything is computed and claimed, and nothing has landed."""
        self.submit_prefill()
        self.submit_decode()
        self.compute()
        self.run_messages()
        return self

    def said(self, kind: type) -> list[AnyMessage]:
        """The messages of a kind that are on their way."""
        return [message for message in self.wire if isinstance(message, kind)]

    # Moves of the world.

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        message = self.wire[index] if keep else self.wire.pop(index)
        party = self.parties.get(message.target.name)
        if party is not None:
            self.do(message.target.name, lambda p: p.receive(message, self.now))

    def lose(self, index: int = 0) -> None:
        self.wire.pop(index)

    def land(self, index: int = 0) -> None:
        """The bytes of a write arrive, and then its notice; behind a fence, none does."""
        write = self.posted.pop(index)
        if self.area_of(write) in self.fenced:
            self.end_badly(write)
            return
        if write.notice.sender not in self.dead:
            self.landed.append(write)
        self.put(write)
        self.wire.append(write.notice)

    def put(self, write: eff.Write) -> None:
        area = self.area_of(write)
        if write.write.target in self.dead:
            return  # The memory it was meant for went with the process.
        assert area not in self.given_back, "a write landed in memory that was given back"
        if area in self.areas:
            name = write.notice.sender.name
            self.areas[area][write.write.berth] = (name, write.write.handoff, write.write.part)

    def area_of(self, write: eff.Write) -> tuple[str, Life, int]:
        return (write.write.target.name, write.notice.sender, write.write.generation)

    def observe(self, index: int = 0) -> None:
        write = self.landed.pop(index)
        self.do(write.notice.sender.name, lambda p: p.write_done(write.write, self.now))

    def fail_write(self, index: int = 0) -> eff.Write:
        """A write ends with an error; it may land yet, with `put`."""
        write = self.posted.pop(index)
        self.end_badly(write)
        return write

    def take(self, index: int = 0, *, corrupt: bool = False) -> None:
        """A decode rank's own mover verifies a part and moves it."""
        name, take = self.takes.pop(index)
        content = self.areas[name, take.source, take.generation].get(take.berth)
        if corrupt or content != (take.source.name, take.handoff, take.part):
            self.do(name, lambda d: d.part_spoiled(take, self.now))
            return
        gone = [e for e in self.ended["D"] if (e.handoff, e.epoch) == (take.handoff, take.epoch)]
        assert not gone, "a slot was written to after its handoff had ended"
        key = (name, take.handoff, take.epoch)
        self.slots.setdefault(key, set()).add((take.source.name, take.part))
        self.do(name, lambda d: d.parts_taken((take,), self.now))

    def fence_holds(self, index: int = 0) -> None:
        """A fence holds: what its writer has posted for the area lands never, and fails."""
        name, fence = self.fences.pop(index)
        area = (name, fence.peer, fence.generation)
        self.fenced.add(area)
        self.do(name, lambda d: d.fenced(fence.peer, fence.generation, self.now))
        for write in [w for w in self.posted if self.area_of(w) == area]:
            self.posted.remove(write)
            self.end_badly(write)

    def end_badly(self, write: eff.Write) -> None:
        """Tells a writer, if it lives, that a write has failed."""
        writer = write.notice.sender
        if writer not in self.dead:
            self.do(writer.name, lambda p: p.write_failed(write.write, self.now))

    def expire(self, name: str, *timer: str) -> None:
        self.do(name, lambda p: p.expire(timer, self.now))

    def wait(self, seconds: float) -> None:
        """Time passes; timers that are due go off, in order."""
        end = self.now + seconds
        for _ in range(10_000):
            due = [(p.next_deadline(), n) for n, p in self.parties.items()]
            times = [(time, name) for time, name in due if time is not None and time <= end]
            if not times:
                break
            self.now, name = min(times)
            self.do(name, lambda p: p.handle_timer(self.now))
        else:
            raise AssertionError("timers never end")
        self.now = end

    def progress_without_messages(self) -> bool:
        """The next thing that happens to a write or a move, if there is one."""
        if self.posted:
            self.land()
        elif self.landed:
            self.observe()
        elif self.takes:
            self.take()
        else:
            return False
        return True

    def run_messages(self) -> None:
        """Messages alone, until none is left."""
        for _ in range(10_000):
            if not self.wire:
                return
            self.deliver()
        raise AssertionError("the parties never stop talking")

    def run(self) -> None:
        """Everything that can happen without time or faults, until nothing is left to do."""
        for _ in range(100_000):
            if self.wire:
                self.deliver()
            elif not self.progress_without_messages():
                return
        raise AssertionError("the world does not come to rest")

    def drive(self, seconds: float = 300.0) -> None:
        """Time and everything else, long enough for every handoff to end."""
        for _ in range(int(seconds)):
            self.run()
            self.wait(1.0)

    def outcome(self, name: str) -> list[str]:
        return [ended.outcome.value for ended in self.ended[name]]

    def check_over(self) -> None:
        """Every handoff ended once on each side, and everything came back."""
        for name in ("P", "D"):
            keys = [(e.handoff, e.epoch if name == "D" else 0) for e in self.ended[name]]
            assert len(keys) == len(set(keys)) == self.submitted[name], (name, keys)
        for name, party in self.parties.items():
            leftovers = {
                book: getattr(party, book)
                for book in ("prefills", "claimed", "collections", "prompts", "stops", "takes")
                if getattr(party, book, None)
            }
            assert not leftovers, (name, leftovers)
