"""The engine's way to the store process, and what it remembers of resets of its tiers.

A reset that was not confirmed is asked for again in the next session. The last generation of each
space is told to every store process: one that was restarted knows nothing, and a shared store may
have gone back to an earlier one meanwhile.

    link = StoreLink(config, life=…, space=…, arenas=[…], tiers={2: "disk"}, embedded=True)
    link.order(copy)                       # copies whose source or target is a tier of the store
    link.dispatch()                        # one batch; what does not fit waits
    for result in link.collect(): …        # whenever `descriptor` is readable, or at `alarm`

It has no thread, and nothing waits. The process is restarted, or another one is found, with a
growing pause; `StoreBack` says that the tiers can be used, `StoreLost` that they cannot.

| what happened                              | the link returns                                  |
|--------------------------------------------|---------------------------------------------------|
| the process is dead                        | a failed report for each copy, `StoreLost(fenced)` |
| it ended the session, does not answer, or  | `StoreLost`; copies in hand are reported when the |
| waits for the arena of a rank              | process answers again, or is dead                 |
| a new session begins with the same process | a failed report for each old copy, `StoreBack`    |

The one rule: a copy is reported when the store does not touch its slots any more, once for each
rank. Finds that are lost are answered with nothing found; a page that is lost is not answered.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.errors import PeerError
from penstock.machine.effects import Copy
from penstock.machine.events import CopyReport, Vanished
from penstock.store.base import Page
from penstock.store.process.client import (
    MODULE,
    STARTING,
    CannotConnect,
    Connected,
    Disconnected,
    EmbeddedStore,
    NobodyListens,
    StoreSession,
)
from penstock.store.process.messages import (
    BATCH_BYTES,
    BLOCK_BYTES,
    BLOCKS_MAX,
    IN_ANOTHER_FORM,
    MESSAGE_HEAD_BYTES,
    PAGE_KEYS_MAX,
    AbandonRequest,
    FindAnswer,
    FindRequest,
    GenerationNotice,
    GoneNotice,
    HubChanged,
    JobReport,
    LoadRequest,
    OwnerHello,
    OwnerWaiting,
    OwnerWelcome,
    PageAnswer,
    PageRequest,
    SaveRequest,
    StorePing,
    StoreState,
    VoidNotice,
    VoidRequest,
    VoidSeen,
    join_parents,
    join_slots,
    requests,
    split_keys,
    split_parents,
)
from penstock.vocabulary.checksums import life_salt
from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.machine.effects import Abandon
    from penstock.store.process.client import SessionNews
    from penstock.store.process.messages import (
        AnyStoreAnswer,
        AnyStoreRequest,
        JobRequest,
        StoreConfig,
    )
    from penstock.vocabulary.keys import Key, OperationId


GENERATIONS_MAX = 1024
"""Tiers and spaces of which the generation is remembered: versions of weights that were in use."""


class KnownResets:
    """Resets and generations, by the index of their tier and the name of their space."""

    def __init__(self) -> None:
        self._asked: Counter[tuple[int, bytes]] = Counter()
        """Those that were not confirmed."""
        self._unkept: dict[tuple[int, bytes], str] = {}
        """Those of them that count, with why the store may still lose them."""
        self._generations: dict[tuple[int, bytes], int] = {}

    def ask(self, tier: int, space: bytes) -> None:
        """A reset is asked for."""
        self._asked[tier, space] += 1

    def ask_again(self) -> list[tuple[int, bytes]]:
        """What a new session is to be asked for; each counts once from now on."""
        self._asked = Counter(dict.fromkeys(self._asked, 1))
        return list(self._asked)

    @property
    def unconfirmed(self) -> set[int]:
        """Tiers in which blocks of before a reset are found again if this process ends now."""
        return {tier for tier, _ in self._asked}

    @property
    def any_unconfirmed(self) -> bool:
        return bool(self._asked)

    @property
    def unkept(self) -> dict[int, str]:
        """Those of them that count, with why the store may still lose them."""
        return {tier: why for (tier, _), why in self._unkept.items()}

    def take(self, tier: int, notice: VoidNotice) -> bool:
        """Takes what a store says of a reset; whether its generation is news."""
        at = (tier, notice.space)
        self._asked.subtract({at: notice.asked})
        self._asked += Counter()  # Drops what is at 0.
        if notice.unkept and at in self._asked:
            self._unkept[at] = notice.unkept
        elif at not in self._asked:
            self._unkept.pop(at, None)
        return self.know(tier, notice.space, notice.generation)

    def know(self, tier: int, space: bytes, generation: int) -> bool:
        """Remembers which generation of a space counts; whether it is news."""
        before = self._generations.pop((tier, space), None)
        self._generations[tier, space] = generation
        if len(self._generations) > GENERATIONS_MAX:
            del self._generations[next(iter(self._generations))]
        return before != generation

    def generations(self, tiers: Sequence[int], space: bytes) -> list[int | None]:
        """The last ones of a space that are known."""
        return [self._generations.get((tier, space)) for tier in tiers]


PING_S = 1.0
"""How long the process may be silent before it is asked whether it is there."""
SILENT_S = 2.0
"""How long it may take to answer that; its loop does no I/O, and answers within milliseconds."""
COPIES_MAX = 4096
"""Copies in hand; more are reported as failed at once."""
FINDS_MAX = 1024
"""Finds in hand; more are answered with nothing found, at once."""
STEP_KEYS_MAX = 128
"""Keys of a page that one `collect` returns: noting one takes an engine some microseconds."""


class FoundInStore(NamedTuple):
    """The answer to `StoreLink.find`."""

    number: int
    tier: int
    present: list[bool]
    """Which blocks are there on every rank."""
    foreign: bool = False
    """Whether the first that is not was written in a form that cannot be read here."""


class Paged(NamedTuple):
    """The answer to `StoreLink.request_page`: some blocks, newest first."""

    tier: int
    keys: Sequence[Key]
    parents: Sequence[Key | None]
    last: bool
    """Whether that was all; if not, ask for the next page."""


class Voided(NamedTuple):
    """A tier has a new generation, by this engine's `void` or that of another: it is empty."""

    tier: int
    generation: int
    own: bool = False
    """Whether this engine asked for it."""


class StoreLost(NamedTuple):
    """The tiers of the store cannot be used."""

    why: str
    fenced: bool
    """Whether the process is dead. If not, another `StoreLost` or `StoreBack` follows."""
    starts: bool = False
    """Whether nothing has gone wrong: the process is starting, or waits for a rank's arena."""


class StoreBack(NamedTuple):
    """The tiers of the store can be used, each as its last `StoreState` says. Page anew."""


StoreResult = (
    CopyReport | FoundInStore | Paged | Vanished | Voided | StoreState | StoreLost | StoreBack
)


class _CopyInHand(NamedTuple):
    operation: OperationId
    ranks: set[int]
    """Those that have not reported."""
    blocks: int


class _FindInHand(NamedTuple):
    tier: int
    keys: int


class StoreLink:
    """The engine's session with the store process. It belongs to one thread."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        life: int,
        space: bytes,
        arenas: Sequence[str],
        tiers: Mapping[int, str],
        embedded: bool = False,
        module: str = MODULE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the process if it is to be `embedded`; the rest happens in `collect`."""
        self._clock = clock
        terms = {tier.name: tier.terms for tier in config.tiers}
        self._hello = OwnerHello(
            life,
            space,
            list(arenas),
            list(tiers.values()),
            terms=[terms[name] for name in tiers.values() if name in terms],
        )
        self._numbers = {index: number for number, index in enumerate(tiers)}
        self._indexes = list(tiers)
        self._session = StoreSession(Path(config.socket))
        self._host = EmbeddedStore(config, module) if embedded else None
        if self._host is not None:
            self._session.watch(self._host.descriptor)
        self._queue: list[AnyStoreRequest] = []
        self._queue_bytes = 0
        self._results: list[StoreResult] = []
        self._ticket = 0
        self._copies: dict[int, _CopyInHand] = {}
        self._tickets: dict[OperationId, int] = {}
        self._old_tickets_below = 1
        """Copies of earlier sessions have smaller tickets."""
        self._finds: dict[int, _FindInHand] = {}
        self._question_number = 0
        self._cursors: dict[int, int | None] = {}
        self._rests: dict[int, Page] = {}
        """Blocks of a page that were not asked for yet."""
        self._rests_wanted: set[int] = set()
        self.resets = KnownResets()
        """What `void` has asked for, and what counts."""
        self._welcome = False
        self._silent = False
        self._told: StoreLost | StoreBack | None = None
        self._heard_at = 0.0
        self._pinged_at: float | None = None
        self._closed = False

    # What the engine asks for.

    @property
    def is_up(self) -> bool:
        """Whether the tiers of the store can be used, as far as `collect` has said."""
        return isinstance(self._told, StoreBack)

    @property
    def is_failed(self) -> bool:
        """Whether there is no process, and none that starts; another try follows."""
        told = self._told
        return isinstance(told, StoreLost) and told.fenced and not told.starts

    def order(self, effect: Copy | Abandon) -> None:
        """Has the store start or abandon a copy; it leaves with the next `dispatch`."""
        if isinstance(effect, Copy):
            self._order_copy(effect)
            return
        ticket = self._tickets.get(effect.operation)
        if ticket is not None and ticket >= self._old_tickets_below:
            self._put(AbandonRequest(ticket), MESSAGE_HEAD_BYTES)

    def _order_copy(self, copy: Copy) -> None:
        problem = self._why_no_copy(len(copy.keys))
        if problem:
            self._fail(copy.operation, range(len(self._hello.arenas)), problem)
            return
        self._ticket += 1
        ticket, operation = self._ticket, copy.operation
        count = len(copy.keys)
        remaining_s = copy.deadline - self._clock()
        salt = life_salt(operation.incarnation, operation.epoch)
        keys = b"".join(copy.keys)
        number = self._numbers.get(copy.target)
        request: JobRequest
        if number is not None:
            parents = join_parents(copy.parents, count)
            slots = join_slots(copy.source_slots)
            request = SaveRequest(ticket, number, keys, parents, slots, salt, remaining_s)
        else:
            number = self._numbers[copy.source]
            slots = join_slots(copy.target_slots)
            request = LoadRequest(ticket, number, keys, slots, salt, remaining_s)
        ranks = set(range(len(self._hello.arenas)))
        self._copies[ticket] = _CopyInHand(operation, ranks, count)
        self._tickets[operation] = ticket
        self._put(request, MESSAGE_HEAD_BYTES + count * BLOCK_BYTES)

    def _why_no_copy(self, count: int) -> str:
        if not self._welcome:
            lost = self._told if isinstance(self._told, StoreLost) else None
            return f"the store is away: {lost.why if lost else self._session.why}"
        if count > BLOCKS_MAX:
            return f"a copy has {count} blocks, must have at most {BLOCKS_MAX} with a store"
        if len(self._copies) >= COPIES_MAX:
            return f"{COPIES_MAX} copies of the store are in hand, which is the most"
        return ""

    def find(self, tier: int, keys: Sequence[Key], *, first: int = 0) -> int:
        """Asks which blocks are in a tier; returns the number of the `FoundInStore` to come.

        `first` blocks of their chain come before these.
        """
        self._question_number += 1
        number, count = self._question_number, len(keys)
        if self._welcome and count <= BLOCKS_MAX and len(self._finds) < FINDS_MAX:
            self._finds[number] = _FindInHand(tier, count)
            request = FindRequest(number, self._numbers[tier], b"".join(keys), first)
            self._put(request, MESSAGE_HEAD_BYTES + count * KEY_BYTES)
        else:
            self._results.append(FoundInStore(number, tier, [False] * count))
        return number

    def request_page(self, tier: int) -> None:
        """Asks for the next page of the blocks of a tier, or for the first after the last."""
        if tier in self._rests:
            self._rests_wanted.add(tier)
        elif self._welcome:
            request = PageRequest(self._numbers[tier], self._cursors.get(tier), PAGE_KEYS_MAX)
            self._put(request, MESSAGE_HEAD_BYTES)

    def forget_pages(self, tier: int) -> None:
        """The next page is the first."""
        self._cursors.pop(tier, None)
        self._rests.pop(tier, None)
        self._rests_wanted.discard(tier)

    def void(self, tier: int) -> None:
        """Begins a new generation of this engine's blocks in a tier, now or when it is back.

        It outlives this process once it was answered: see `resets`.
        """
        self.resets.ask(tier, self._hello.space)
        self.forget_pages(tier)
        if self._session.is_connected:
            self._put(VoidRequest(self._numbers[tier], self._hello.space), MESSAGE_HEAD_BYTES)

    def name_arenas(self, arenas: Sequence[str]) -> None:
        """Names the hubs of the ranks anew: one of them was restarted."""
        if len(arenas) != len(self._hello.arenas):
            raise ValueError(f"arenas are {len(arenas)}, must be {len(self._hello.arenas)}")
        self._hello = msgspec.structs.replace(self._hello, arenas=list(arenas))
        if self._session.is_connected:
            self._put(self._hello, MESSAGE_HEAD_BYTES + sum(map(len, arenas)))

    def enter_space(self, space: bytes) -> None:
        """From now on the blocks of another space are meant; another session begins for it."""
        self._hello = msgspec.structs.replace(self._hello, space=space)
        now = self._clock()
        for news in self._session.end("its engine has other weights now", now):
            self._take(news, now, starts=True)

    def tell_hub(
        self,
        tier: int,
        keys: Sequence[Key],
        slots: NDArray[np.int32],
        salt: int,
        gone: Sequence[Key],
    ) -> None:
        """Says what lies in the hub and what does no longer, for a tier that lends it."""
        size = MESSAGE_HEAD_BYTES + len(keys) * BLOCK_BYTES + len(gone) * KEY_BYTES
        number = self._numbers[tier]
        self._put(HubChanged(number, b"".join(keys), join_slots(slots), salt, b"".join(gone)), size)

    def _put(self, request: AnyStoreRequest, size: int) -> None:
        """Adds a request to the batch; one that is full is sent at once."""
        if self._queue_bytes + size > BATCH_BYTES:
            self.dispatch()
        self._queue.append(request)
        self._queue_bytes += size

    def dispatch(self) -> None:
        """Sends what was asked for since the last call; never waits."""
        if self._queue:
            self._session.send(requests.encode(self._queue))
            self._queue = []
            self._queue_bytes = 0

    # What the store answers.

    @property
    def descriptor(self) -> int:
        """Readable when `collect` may have something."""
        return self._session.descriptor

    @property
    def ready(self) -> bool:
        """Whether `collect` has something now, whatever `descriptor` says."""
        return bool(self._results or self._rests_wanted)

    @property
    def alarm(self) -> float | None:
        """When to call `collect`, though `descriptor` is silent."""
        at = self._session.alarm
        if not self._session.is_connected:
            return at
        if self._pinged_at is not None:
            return None if self._silent else self._pinged_at + SILENT_S
        return self._heard_at + PING_S if self._awaits_answer else None

    def collect(self) -> list[StoreResult]:
        """Everything that has happened since the last call; never waits."""
        now = self._clock()
        if self._session.is_ready(now):  # Most steps of an engine find nothing.
            if self._host is not None:
                self._host.poll()
            for news in self._session.poll(now):
                self._take(news, now)
        self._check_silence(now)
        for tier in list(self._rests_wanted):
            self._rests_wanted.remove(tier)
            self._results.append(self._next_page(tier, self._rests.pop(tier)))
        results, self._results = self._results, []
        return results

    def _take(self, news: SessionNews, now: float, *, starts: bool = False) -> None:
        match news:
            case Connected():
                self._begin(now)
            case Disconnected():
                self._end(news, starts=starts and not news.dead)
            case CannotConnect(why):
                self._lose(why, fenced=True)
            case NobodyListens():
                if self._host is not None:
                    self._host.start(now)
                    why = self._host.why
                    self._lose(why or STARTING, fenced=True, starts=not why)
                else:
                    self._lose(self._session.why, fenced=True)
            case _:
                self._heard_at = now
                self._pinged_at = None
                if self._silent:
                    self._silent = False
                    self._tell_welcome()
                try:
                    for answer in news:
                        self._take_answer(answer)
                except PeerError as error:
                    for each in self._session.drop(str(error), now):
                        self._take(each, now)

    def _begin(self, now: float) -> None:
        """A session with the store has begun."""
        self._heard_at = now
        self._pinged_at = None
        self._silent = False
        again = self.resets.ask_again()
        voids = [VoidRequest(self._numbers[tier], space) for tier, space in again]
        known = self.resets.generations(self._indexes, self._hello.space)
        hello = msgspec.structs.replace(self._hello, generations=known)
        self._queue = [hello, *voids]
        self._queue_bytes = 0
        self._old_tickets_below = self._ticket + 1
        self.dispatch()

    def _end(self, lost: Disconnected, *, starts: bool = False) -> None:
        self._welcome = False
        self._queue = []
        self._queue_bytes = 0
        for tier in self._indexes:
            self.forget_pages(tier)
        for number, find in self._finds.items():
            self._results.append(FoundInStore(number, find.tier, [False] * find.keys))
        self._finds.clear()
        if lost.dead:
            self._fail_copies_below(self._ticket + 1, lost.why)
        self._lose(lost.why, fenced=lost.dead, starts=starts)

    def _lose(self, why: str, *, fenced: bool, starts: bool = False) -> None:
        """Says that the store is lost, unless that was said with the same reason."""
        told = self._told
        if isinstance(told, StoreLost) and (told.fenced or not fenced):
            if told.why == why:
                return
            fenced = told.fenced
        self._told = StoreLost(why, fenced, starts)
        self._results.append(self._told)

    def _take_welcome(self) -> None:
        self._session.keep_trying_soon()
        if self._host is not None:
            self._host.note_success()
        self._fail_copies_below(self._old_tickets_below, "the session was lost")
        self._welcome = True
        self._tell_welcome()

    def _tell_welcome(self) -> None:
        if self._welcome and not self.is_up:
            self._told = StoreBack()
            self._results.append(self._told)

    def _check_silence(self, now: float) -> None:
        """Asks a silent process whether it is there; one that does not answer is lost for now."""
        if not self._session.is_connected:
            return
        if self._pinged_at is None:
            if self._awaits_answer and now >= self._heard_at + PING_S:
                self._pinged_at = now
                self._put(StorePing(), MESSAGE_HEAD_BYTES)
                self.dispatch()
        elif not self._silent and now >= self._pinged_at + SILENT_S:
            self._silent = True
            self._lose(f"the store process has not answered for {SILENT_S:g} s", fenced=False)

    @property
    def _awaits_answer(self) -> bool:
        return bool(self._copies or self._finds) or self.resets.any_unconfirmed

    def _take_answer(self, answer: AnyStoreAnswer) -> None:
        match answer:
            case JobReport():
                self._take_report(answer)
            case FindAnswer():
                find = self._finds.pop(answer.number, None)
                if find is not None and len(answer.present) == find.keys:
                    present = [each == 1 for each in answer.present]
                    foreign = IN_ANOTHER_FORM in answer.present
                    found = FoundInStore(answer.number, find.tier, present, foreign)
                    self._results.append(found)
            case PageAnswer() | GoneNotice():
                self._take_blocks(answer)
            case VoidNotice() | GenerationNotice():
                self._take_generation(answer)
            case StoreState():
                self._results.append(StoreState(self._tier(answer.tier), answer.state))
            case OwnerWelcome():
                self._take_welcome()
            case OwnerWaiting(why):
                self._welcome = False
                self._lose(why, fenced=False, starts=True)
            case _:
                pass  # The news that a process is there was all of it.

    def _take_blocks(self, answer: PageAnswer | GoneNotice) -> None:
        tier, keys = self._tier(answer.tier), split_keys(answer.keys)
        if isinstance(answer, GoneNotice):
            self._drop_from_rest(tier, keys)
            self._results.append(Vanished(tier=tier, keys=keys))
        else:
            parents = split_parents(answer.parents, len(keys))
            self._cursors[tier] = answer.cursor
            page = Page(keys, parents, answer.cursor)
            self._results.append(self._next_page(tier, page))

    def _take_generation(self, notice: VoidNotice | GenerationNotice) -> None:
        tier = self._tier(notice.tier)
        if isinstance(notice, GenerationNotice):
            self.resets.know(tier, self._hello.space, notice.generation)
        elif self.resets.take(tier, notice) and notice.space == self._hello.space:
            self.forget_pages(tier)
            self._put(VoidSeen(notice.tier, notice.generation), MESSAGE_HEAD_BYTES)
            own = bool(notice.asked or notice.unkept)
            self._results.append(Voided(tier, notice.generation, own))

    def _next_page(self, tier: int, page: Page) -> Paged:
        """As many blocks of a page as are returned at once; the rest waits to be asked for."""
        keys, parents = page.keys[:STEP_KEYS_MAX], page.parents[:STEP_KEYS_MAX]
        if len(page.keys) > STEP_KEYS_MAX:
            rest = page.keys[STEP_KEYS_MAX:], page.parents[STEP_KEYS_MAX:]
            self._rests[tier] = Page(*rest, page.cursor)
        return Paged(tier, keys, parents, page.cursor is None and tier not in self._rests)

    def _drop_from_rest(self, tier: int, gone: Sequence[Key]) -> None:
        """Blocks that were given up since a page was read are not returned as its blocks."""
        rest = self._rests.get(tier)
        if rest is not None:
            went = set(gone)
            kept = [at for at, key in enumerate(rest.keys) if key not in went]
            self._rests[tier] = Page(
                [rest.keys[at] for at in kept], [rest.parents[at] for at in kept], rest.cursor
            )

    def _tier(self, number: int) -> int:
        if number >= len(self._indexes):
            raise PeerError(f"tier is {number}, must be below {len(self._indexes)}")
        return self._indexes[number]

    def _take_report(self, report: JobReport) -> None:
        copy = self._copies.get(report.ticket)
        if copy is None or report.rank not in copy.ranks:
            return  # Late: it was reported as failed when its session was lost.
        copy.ranks.remove(report.rank)
        if not copy.ranks:
            del self._copies[report.ticket], self._tickets[copy.operation]
        self._results.append(
            CopyReport(
                operation=copy.operation,
                rank=report.rank,
                faults=tuple(each for each in report.faults if each[0] < copy.blocks),
                failure=report.failure,
            )
        )

    def _fail_copies_below(self, ticket: int, why: str) -> None:
        for each in [each for each in self._copies if each < ticket]:
            copy = self._copies.pop(each)
            del self._tickets[copy.operation]
            self._fail(copy.operation, sorted(copy.ranks), why)

    def _fail(self, operation: OperationId, ranks: Sequence[int], why: str) -> None:
        for rank in ranks:
            self._results.append(CopyReport(operation=operation, rank=rank, failure=why))

    # The end.

    def close(self, deadline: float) -> None:
        """Ends the session, and the process if this link has started it, by `deadline`."""
        if self._closed:
            return
        self._closed = True
        self._session.close()
        if self._host is not None:
            self._host.close(deadline)
