"""The socket of the store process, and each client: what it said and asked, the answers that wait.

    listener = StoreListener.open(path)      # in the store process
    connection = connect_store(path)         # elsewhere: a socket, and a pidfd of its process

The socket has mode 0600 and lies in a folder of the user. A lock beside it (`NAME.lock`) belongs to
the process that serves: whoever holds it may replace a socket that a dead process left behind.

Answers are collected while requests are carried out, and leave together, in frames of bounded
size.

Tiers that know what they have answer at once. Those that have to ask answer later: a find when the
tier has the answer, the first page when the tier knows which generation of the space counts.

The rules:

- Both sides know whom they speak with. The process serves its own user and root; a client watches
  the process that it is connected to by a pidfd, so that its death is seen.
- A client that does not read costs a bounded amount of memory, and then its session.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
from collections import Counter, deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import PeerError, UnavailableError
from penstock.store.base import FindJob, Space
from penstock.store.process.messages import (
    FRAME_BYTES_MAX,
    IN_ANOTHER_FORM,
    FindAnswer,
    PageAnswer,
    SessionRefused,
    VoidNotice,
    answer_frames,
    answers,
    join_parents,
    split_keys,
)
from penstock.transport.unix_sockets import receive_packet, send_packet, socket_peer
from penstock.vocabulary.frames import short

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Self

    from penstock.store.base import FoundBlocks, MappedArena, NewGeneration
    from penstock.store.process.messages import (
        AnyStoreAnswer,
        FindRequest,
        OwnerHello,
        PageRequest,
        VoidSeen,
    )
    from penstock.store.process.tier_slots import TierSlot
    from penstock.transport.base import ChannelClosed, ChannelFailed, Empty
    from penstock.transport.unix_sockets import Packet, SocketPeer


BACKLOG = 128
"""Connections that wait to be accepted: all ranks of a machine start at once."""
SEND_BUFFER_BYTES = 2 * FRAME_BYTES_MAX
"""What is asked for; the kernel may give less, and gives one frame in any case."""


class StoreBusyError(UnavailableError):
    """Another process serves this socket, and is alive."""


class StoreListener:
    """The socket that a store process listens on, and the lock that makes it the only one."""

    def __init__(self, path: Path, listener: socket.socket, lock: int, folder: int) -> None:
        self.path = path
        self._listener = listener
        self._lock = lock
        self._folder = folder
        self._socket_id = _id_of(path)
        # Given up for a moment where no descriptor is left to accept a connection with.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Listens at a path; its folder is made if it is missing.

        Raises `StoreBusyError`: another process listens there; `UnavailableError`: the folder or
        the socket cannot be made.
        """
        return cls(path, *_listen(path, None))

    @property
    def is_in_place(self) -> bool:
        """Whether who connects to the path comes here: not if its folder was removed, say."""
        return self._socket_id is not None and _id_of(self.path) == self._socket_id

    def listen_again(self) -> None:
        """Listens at the path anew, with another descriptor. Raises as `open`."""
        listener, lock, folder = _listen(self.path, self._lock)
        self._listener.close()
        for before, now in ((self._lock, lock), (self._folder, folder)):
            if before != now:
                os.close(before)
        self._listener, self._lock, self._folder = listener, lock, folder
        self._socket_id = _id_of(self.path)

    @property
    def descriptor(self) -> int:
        """Readable while somebody waits to be accepted."""
        return self._listener.fileno()

    def accept(self) -> Iterator[tuple[socket.socket, SocketPeer]]:
        """Those who have connected since the last call."""
        for _ in range(BACKLOG):
            try:
                channel, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in {errno.EMFILE, errno.ENFILE, errno.ECONNABORTED}:
                    raise
                self._turn_away()
                return
            channel.settimeout(0)
            _set_buffer(channel)
            yield channel, socket_peer(channel)

    def _turn_away(self) -> None:
        """Closes the next connection: left alone, it would wake the loop again and again."""
        os.close(self._spare)
        with suppress(OSError):
            self._listener.accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Stops listening, and removes the socket; then another process may serve."""
        with suppress(FileNotFoundError):
            os.unlink(self.path.name, dir_fd=self._folder)
        self._listener.close()
        for fd in (self._lock, self._folder, self._spare):
            os.close(fd)


class StoreConnection(NamedTuple):
    """A connection to a store process; whoever has it closes both."""

    channel: socket.socket
    pid: int
    pidfd: int
    """Readable when the process is dead, with all its threads."""


def connect_store(path: Path) -> StoreConnection | None:
    """Connects; `None` if nobody listens. Never waits.

    Raises `UnavailableError`: somebody listens, and this process cannot connect.
    """
    with ExitStack() as undo:
        channel = undo.enter_context(_new_socket())
        try:
            folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, folder)
            channel.connect(_short_path(folder, path.name))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise UnavailableError(f"cannot connect to {path}: {error.strerror}") from error
        peer = socket_peer(channel)
        if peer.uid not in {os.getuid(), 0}:
            raise UnavailableError(
                f"{path} is served by user {peer.uid}, must be by user {os.getuid()} or root"
            )
        pidfd = _watch(peer.pid, channel, path)
        os.close(folder)
        undo.pop_all()
        return StoreConnection(channel, peer.pid, pidfd)


def _watch(pid: int, channel: socket.socket, path: Path) -> int:
    if pid <= 0:
        raise UnavailableError(
            f"{path} is served in another PID namespace, must be in that of this process: its "
            "end could not be seen"
        )
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise UnavailableError(
            f"the process {pid} that serves {path} cannot be watched: {error.strerror}"
        ) from error
    # A process that was alive after its number was looked up is the one that has this number.
    poller = select.poll()
    poller.register(channel, 0)
    if any(events & select.POLLHUP for _, events in poller.poll(0)):
        os.close(pidfd)
        raise UnavailableError(f"the process {pid} that served {path} has ended")
    return pidfd


def _new_socket() -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(0)
    _set_buffer(channel)
    return channel


def _set_buffer(channel: socket.socket) -> None:
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def _listen(path: Path, held: int | None) -> tuple[socket.socket, int, int]:
    """A socket that listens at a path, the lock beside it, and their folder.

    The lock is the one that is `held`, if that lies there.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as undo:
            folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, folder)
            lock = os.open(
                f"{path.name}.lock",
                os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
                dir_fd=folder,
            )
            undo.callback(os.close, lock)
            is_held = held is not None and os.path.sameopenfile(held, lock)
            if not is_held:
                _take_lock(lock, path)
            listener = undo.enter_context(_new_socket())
            with suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)
            # Before it has a name: nobody else can connect, not even for a moment.
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(_short_path(folder, path.name))
            listener.listen(BACKLOG)
            undo.pop_all()
    except OSError as error:
        raise UnavailableError(f"no socket at {path}: {error.strerror}") from error
    if held is None or not is_held:
        return listener, lock, folder
    os.close(lock)
    return listener, held, folder


def _id_of(path: Path) -> tuple[int, int] | None:
    """Which file has this name; `None`: none that can be seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _short_path(folder: int, name: str) -> str:
    """A path that fits into a socket's address, whatever the folder is called."""
    return f"/proc/self/fd/{folder}/{name}"


def _take_lock(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreBusyError(f"another process serves {path}") from None


OUTPUT_BYTES_MAX = 8 << 20
"""Answers that may wait for a client: those of thousands of jobs. With more it is cut off."""
VOIDING = -1
"""In place of a generation: the owner has asked for another one, which does not count yet."""


class ClientSession:
    """A connection that was accepted. `answer` collects, `flush` sends."""

    def __init__(self, channel: socket.socket, *, pid: int, opened_at: float) -> None:
        self.pid = pid
        self.opened_at = opened_at
        self.greeted = False
        """Whether it has said what it is for."""
        self.is_open = True
        self.waits_for_room = False
        """Whether its loop waits until more can be sent."""
        self._channel = channel
        self._answers: list[AnyStoreAnswer] = []
        self._frames: deque[bytes] = deque()
        self._frames_bytes = 0

    @property
    def descriptor(self) -> int:
        return self._channel.fileno()

    @property
    def has_output(self) -> bool:
        return bool(self._answers or self._frames)

    def receive(self) -> Packet | Empty | ChannelClosed | ChannelFailed:
        """The next packet, if there is one; the caller owns its descriptors."""
        return receive_packet(self._channel, FRAME_BYTES_MAX)

    def answer(self, answer: AnyStoreAnswer) -> None:
        """Adds an answer to the next batch; goes nowhere once the session has ended."""
        if self.is_open:
            self._answers.append(answer)

    def flush(self) -> bool:
        """Sends what waits; whether some is left for lack of room.

        Raises `PeerError`: too much waits; `OSError`: the client has gone.
        """
        for frame in answer_frames(self._answers):
            self._frames.append(frame)
            self._frames_bytes += len(frame)
        self._answers.clear()
        while self._frames and send_packet(self._channel, self._frames[0]):
            self._frames_bytes -= len(self._frames.popleft())
        if self._frames_bytes > OUTPUT_BYTES_MAX:
            raise PeerError(f"{self._frames_bytes} bytes of answers wait, and it does not read")
        return bool(self._frames)

    def refuse(self, problem: str) -> None:
        """Ends the session, and says why if there is a reason and room to say it."""
        if problem and not self._frames:
            with suppress(OSError):
                send_packet(self._channel, answers.encode([SessionRefused(short(problem))]))
        self.is_open = False
        self._answers.clear()
        self._frames.clear()
        self._channel.close()


@dataclass(slots=True, eq=False)
class OfferedArena:
    """An arena that a session has offered."""

    name: str
    mapped: MappedArena
    jobs: set[int] = field(default_factory=set)
    offered: bool = True


@dataclass(slots=True, eq=False)
class OwnerState:
    """What is known of an owner."""

    hello: OwnerHello
    tiers: list[TierSlot]
    ranks: dict[str, list[int]]
    """By the name of their arena."""
    generations: list[int | None]
    """Which generation its requests mean, by number of the tier, or `VOIDING`; `None`: its tier is
    not open."""
    ready: bool = False
    why: str = ""
    """Why it is not ready, as it was told."""
    voids: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    """Requests to void a space in a tier that were not answered yet."""
    tickets: dict[int, set[int]] = field(default_factory=dict)
    """The numbers of the jobs of each ticket that are under way."""

    def slot(self, tier: int) -> TierSlot:
        """The tier of a number.

        Raises `PeerError`: there is none.
        """
        if tier >= len(self.tiers):
            raise PeerError(f"tier is {tier}, must be below {len(self.tiers)}")
        return self.tiers[tier]

    def why_not(self, tier: int) -> str:
        """Why nothing of a tier can be used now; empty if it can."""
        slot = self.tiers[tier]
        if slot.tier is None:
            return f"tier {slot.name!r} is off: {slot.why}"
        if not self.ready:
            return self.why
        if self.generations[tier] == VOIDING:
            return "its new generation cannot be kept yet"
        generation = slot.tier.generation(self.hello.space)
        if generation is None:
            return "its generation is being read"
        if self.generations[tier] != generation:
            return "another engine has begun a new generation"
        return ""

    def take_void(self, tier: int, new: NewGeneration, *, voided: bool) -> VoidNotice | None:
        """A space has a new generation in a tier: what the owner is told, if it concerns it.

        `voided` says that requests to void the space have begun it.
        """
        waits, ours = self.voids[tier, new.name], self.hello.space == new.name
        if ours and not voided and self.generations[tier] == VOIDING:
            return None  # Its own reset voids this one too, and comes next.
        if ours and voided and waits:  # What it sends after its request is meant for this one.
            self.generations[tier] = new.generation
        asked = self.voids.pop((tier, new.name), 0) if voided and not new.unkept else 0
        if not waits and not ours:
            return None
        unkept = short(new.unkept) if waits else ""
        return VoidNotice(tier, new.name, new.generation, asked, unkept)

    def note_seen(self, seen: VoidSeen) -> None:
        """The owner knows of a generation: what it sends from now on is meant for that one."""
        counts = self.slot(seen.tier).generation(self.hello.space)
        if seen.generation == counts and self.generations[seen.tier] != VOIDING:
            self.generations[seen.tier] = seen.generation


def tell_known(hello: OwnerHello, tiers: Sequence[TierSlot]) -> None:
    """Tells tiers which generations an owner knows of."""
    for slot, generation in zip(tiers, hello.generations, strict=False):
        if generation is not None:
            slot.expect(hello.space, generation)


FINDS_MAX = 4096
"""Questions in hand, of all owners; more are answered with nothing found, at once."""


class _Find(NamedTuple):
    """A question that a tier has yet to answer."""

    session: ClientSession
    number: int
    tier: str


class StoreQuestions:
    """The questions in hand of all owners."""

    def __init__(self) -> None:
        self._finds: dict[int, _Find] = {}
        """By the ticket of their jobs."""
        self._asked: Counter[str] = Counter()
        """How many each tier has: one that is slow takes nothing from others."""
        self._pages: list[tuple[ClientSession, PageRequest]] = []
        """Of tiers that do not know the generation of a space yet."""

    def find(
        self,
        session: ClientSession,
        owner: OwnerState,
        request: FindRequest,
        arenas: Sequence[MappedArena],
        ticket: int,
    ) -> None:
        """Answers which blocks are there, or has a tier ask under `ticket`."""
        keys, slot = split_keys(request.keys), owner.slot(request.tier)
        present: Sequence[bool] = [False] * len(keys)
        if self._asked[slot.name] < FINDS_MAX and slot.tier and not owner.why_not(request.tier):
            space = _space(owner, request.tier)
            found = slot.tier.find(FindJob(ticket, arenas, space, keys, request.first))
            if found is None:
                self._finds[ticket] = _Find(session, request.number, slot.name)
                self._asked[slot.name] += 1
                return
            present = found.present
        session.answer(FindAnswer(request.number, bytes(present)))

    def answer(self, found: Sequence[FoundBlocks]) -> None:
        """Passes answers of a tier on."""
        for each in found:
            find = self._finds.pop(each.ticket)
            self._asked[find.tier] -= 1
            present = bytearray(each.present)
            if each.foreign:
                present[present.index(0)] = IN_ANOTHER_FORM
            find.session.answer(FindAnswer(find.number, bytes(present)))

    def page(
        self,
        session: ClientSession,
        owner: OwnerState,
        request: PageRequest,
        arenas: Sequence[MappedArena],
    ) -> None:
        """Answers with some blocks of a tier; later, if its generation is not known."""
        slot = owner.slot(request.tier)
        if slot.tier is None or not owner.ready:
            return  # Once it is welcome again, it begins with the first page.
        if slot.tier.generation(owner.hello.space) is None:
            self._pages.append((session, request))
            return
        space = _space(owner, request.tier)
        page = slot.tier.page(space, arenas[0].part, request.cursor, request.limit)
        kept: list[int] = []
        if page.keys and not owner.why_not(request.tier):
            found = slot.tier.find(FindJob(0, arenas, space, page.keys))
            assert found is not None, "what lists its blocks knows them"
            kept = [at for at, present in enumerate(found.present) if present]
        keys = b"".join([page.keys[at] for at in kept])
        parents = join_parents([page.parents[at] for at in kept], len(kept))
        session.answer(PageAnswer(request.tier, keys, parents, page.cursor))

    def take_pages(self) -> list[tuple[ClientSession, PageRequest]]:
        """The pages that wait for a generation; they are to be asked for again."""
        pages, self._pages = self._pages, []
        return pages


def _space(owner: OwnerState, tier: int) -> Space:
    slot = owner.slot(tier)
    assert slot.tier is not None
    generation = slot.tier.generation(owner.hello.space)
    assert generation is not None
    return Space(owner.hello.space, generation)
