"""Executes the copies of one rank, around the engine's own steps on it.

    steps.join(lease.loads)                   # loads that the next step computes on, if any
    ... the forward pass: steps.wait_layer(i, stream) before layer i ...
    steps.submitted(stream, slots)            # after the step was submitted to the device

| call         | on a GPU                                               | on the CPU            |
|--------------|--------------------------------------------------------|-----------------------|
| `submitted`  | copies of these slots wait for the step, on the device | steps have ended      |
| `guard`      | a stream waits for copies that still touch slots       | whether none are left |
| `joinable`   | whether a load's layers will be there in time          | no: loads have ended  |
| `join`       | the next step's layers wait for these loads            | nothing               |
| `wait_layer` | a stream waits for one layer of them                   | nothing               |

    executor.submit(copy)
    for moved in executor.collect(budget_bytes=…): ...

It decides nothing.

The rules:

- A request that joined a step with its loads keeps its token, and commits nothing, until its lease
  is `READY`. If `cached_tokens` has become less by then, a block was not what its key names: all
  that was computed beyond is rolled back and computed again.
- `collect` returns each submitted copy once, and from then on nothing here touches its slots.
"""

from __future__ import annotations

import math
import reprlib
import time
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from penstock.cache.settings import DEVICE, HUB
from penstock.errors import UnavailableError, counted
from penstock.movers.base import WAIT_S, Moved, WaitsForDevice
from penstock.movers.table import mover_between
from penstock.tiers.base import GivesBack
from penstock.vocabulary.arguments import as_array, as_int, as_seconds, as_tuple
from penstock.vocabulary.keys import OperationId

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike

    from penstock.machine.effects import Copy
    from penstock.movers.base import Mover
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm


@runtime_checkable
class KnowsSteps(Protocol):
    """A mover whose copies are in order with the engine's steps, on the device."""

    def step_submitted(self, stream: int, slots: ArrayLike | None = None) -> None:
        """The engine has submitted a step; the movers of one device share what they know."""
        ...

    def guard(self, stream: int, slots: ArrayLike) -> bool:
        """Has a stream wait for copies of these slots; False if one has not begun yet."""
        ...


@runtime_checkable
class FillsLayers(Protocol):
    """A mover whose loads can be joined before they have ended."""

    def joinable(self, operation: OperationId, *, step_s: float) -> bool:
        """Whether a step of this length that begins now would hardly have to wait for it."""
        ...

    def join(self, operations: Collection[OperationId]) -> None:
        """The layers of the next step wait for theirs."""
        ...

    def wait_layer(self, layer: int, stream: int) -> None:
        """Has a stream wait for one layer of what was joined."""
        ...


class EngineSteps:
    """The engine's steps, as the movers of its device have to know them."""

    def __init__(self, movers: Mapping[tuple[int, int], Mover]) -> None:
        near = [mover for pair, mover in movers.items() if DEVICE in pair]
        # Asked once: whether something is of such a kind takes longer to find out than to use.
        self._knowing = [mover for mover in near if isinstance(mover, KnowsSteps)]
        self._unaware = [mover for mover in near if not isinstance(mover, KnowsSteps)]
        filling = (mover for mover in near if isinstance(mover, FillsLayers))
        self._filling: FillsLayers | None = next(filling, None)

    def submitted(self, stream: int, slots: ArrayLike | None = None) -> None:
        """The engine has submitted a step to its stream.

        Args:
            stream: The CUDA stream, as a number.
            slots: The device blocks that it reads or writes; without them, it may be any.
        """
        stream = as_int("stream", stream)
        if slots is not None:
            slots = as_array("slots", slots)
        for mover in self._knowing[:1]:  # The movers of one device share it.
            mover.step_submitted(stream, slots)

    @property
    def fills_layers(self) -> bool:
        """Whether loads arrive layer by layer, so that steps can join them."""
        return self._filling is not None

    def guard(self, stream: int, slots: ArrayLike) -> bool:
        """What is submitted to the stream from now on may write these device blocks again.

        Returns False where it may not yet: a copy of them has not begun. For engines that
        reuse a block before its copy is reported.
        """
        stream, slots = as_int("stream", stream), as_array("slots", slots)
        begun = [mover.guard(stream, slots) for mover in self._knowing]  # Each has its own waits.
        return all(begun) and not any(mover.busy for mover in self._unaware)

    def joinable(self, loads: Collection[OperationId], *, step_s: float) -> bool:
        """Whether the next step may compute on what these loads bring, while they bring it.

        Args:
            loads: All that a request waits for; see `Lease.loads`. With none of them there is
                nothing to join.
            step_s: How long the step will take.
        """
        loads = _as_operations(loads)
        step_s = as_seconds("step_s", step_s, zero=True)
        mover = self._filling
        if mover is None or not loads:
            return False
        return all(mover.joinable(operation, step_s=step_s) for operation in loads)

    def join(self, loads: Collection[OperationId]) -> None:
        """The next step computes on what these loads bring: all of them, in one call."""
        loads = _as_operations(loads)
        mover = self._filling
        if mover is not None:
            mover.join(loads)

    def wait_layer(self, layer: int, stream: int) -> None:
        """In the forward pass, before a layer's KV is read; may be captured in a CUDA graph.

        Args:
            layer: Its number in the model.
            stream: The CUDA stream that computes, as a number.
        """
        layer, stream = as_int("layer", layer), as_int("stream", stream)
        mover = self._filling
        if mover is not None:
            mover.wait_layer(layer, stream)

    def close(self) -> None:
        """Lets go of the movers, which have come to their end: nothing is under way."""
        self._knowing, self._unaware = [], []
        self._filling = None


def _as_operations(loads: Collection[OperationId]) -> tuple[OperationId, ...]:
    found = as_tuple("loads", loads)
    if not set(map(type, found)) <= {OperationId}:
        raise ValueError(
            f"loads is {reprlib.repr(loads)}, must be names of operations: Lease.loads"
        )
    return found


DEVICE_SHARE = 16
"""How much less a byte that a device copies counts in a step's budget: 64 MiB of it are 1 GiB
for a GPU, which PCIe 5 moves in 20 ms. The movers bound what is in flight themselves."""
LAYERS_SHARE = 8 * DEVICE_SHARE
"""The same for loads that come layer by layer: they are a call a layer, however long, and a step
can join only what was submitted whole."""
NOT_GIVEN_BACK = (
    "the KV is in memory of a GPU that belongs to the engine, which must be able to give it back: "
    "see TensorTier.memory"
)


@runtime_checkable
class Closable(Protocol):
    """A tier or mover with something to give back."""

    def close(self) -> None:
        """Gives everything back, after what is in flight has ended."""
        ...


@runtime_checkable
class RegistersHosts(Protocol):
    """A device that has the memory of host tiers registered, so that its copies reach it."""

    def forget(self, host: object) -> None:
        """Ends the registration of one tier, if it has any; its movers are closed before."""
        ...


@runtime_checkable
class SleepsAndWakes(Protocol):
    """A device whose memory, and that of host tiers, can be away for a while."""

    def release(self, host: object) -> None:
        """Ends the registration of one tier until `take_again`; no copy may use it."""
        ...

    @property
    def can_give_back(self) -> bool:
        """Whether its own memory can be given back for a while."""
        ...

    def take_again(self) -> None:
        """Takes its own memory again, and registers what was released."""
        ...


class _MoverState:
    """A mover, and whether a device makes its copies: found out once, not in every step."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self.device = mover if isinstance(mover, WaitsForDevice) else None
        # A device copies by itself: submitting a byte costs far less than copying it.
        by_layers = LAYERS_SHARE if isinstance(mover, FillsLayers) else DEVICE_SHARE
        self.cheaper = 1 if self.device is None else by_layers


class CopyExecutor:
    """The tiers and movers of one rank. A tier that is `None` cannot be used here."""

    def __init__(
        self,
        stores: Sequence[SlotStore | None],
        algorithm: Algorithm,
        *,
        device_wait_s: float = WAIT_S,
    ) -> None:
        self.stores: tuple[SlotStore | None, ...] = tuple(stores)
        self.algorithm = algorithm
        self.refused: dict[int, str] = {}
        """Tiers that nothing here can reach, although they are there, and why."""
        self.connect_s: dict[int, float] = {}
        """How long it took to have the device's copies reach each tier, by its index."""
        self.movers = self._connect()
        """The mover of each pair of tiers that exchange blocks: (from, to)."""
        self._states = [_MoverState(mover) for mover in self.movers.values()]
        self.steps = EngineSteps(self.movers)
        """What the engine calls around its steps."""
        self._device_wait_s = device_wait_s
        self._waits_since: float | None = None
        """When the wait for the device began that has not seen any of its copies end."""
        self._mover_of: dict[OperationId, Mover] = {}

    @property
    def busy(self) -> bool:
        return bool(self._mover_of)

    @property
    def copy_count(self) -> int:
        """How many copies are under way."""
        return len(self._mover_of)

    def has(self, operation: OperationId) -> bool:
        """Whether a copy is under way, which `collect` will return."""
        return operation in self._mover_of

    def submit(self, copy: Copy) -> None:
        """Takes a copy in; its work is done in `collect`."""
        mover = self.movers[copy.source, copy.target]
        self._mover_of[copy.operation] = mover
        mover.submit(copy)

    def abandon(self, operation: OperationId) -> None:
        """Ends a copy early; `collect` returns it all the same."""
        mover = self._mover_of.get(operation)
        if mover is not None:
            mover.abandon(operation)

    def collect(self, *, budget_bytes: int) -> Iterator[Moved]:
        """Moves blocks for at most `budget_bytes`, and returns what has ended.

        Every mover gets on by a block at least, whatever the budget: else a steady stream of
        loads would leave saves, and the slots of abandoned copies, waiting for ever.
        """
        for state in self._states:
            if not state.mover.busy:
                continue
            moved, spent = state.mover.poll(budget_bytes=max(0, budget_bytes) * state.cheaper)
            budget_bytes -= spent // state.cheaper
            for ended in moved:
                self._waits_since = None
                del self._mover_of[ended.operation]
                yield ended

    def wait(self, deadline: float) -> bool:
        """Waits for copies that a device makes; returns False if no copies are out.

        Where the CPU has copies to make there is nothing to wait for: True at once. At
        `deadline`, on the monotonic clock, it is True as well: copies are under way.
        Raises `UnavailableError`: the device has ended none of them for `device_wait_s`.
        """
        busy = [state for state in self._states if state.mover.busy]
        waiting = [state.device for state in busy if state.device is not None]
        if waiting and len(waiting) == len(busy):
            self._wait_for(waiting[0].wait_for_room, deadline)
        return bool(busy)

    def fence(self) -> list[Moved]:
        """Abandons every copy and waits until none touches a slot any more.

        Raises `UnavailableError`: the device has ended none of them for `device_wait_s`: they may
        still touch their slots.
        """
        moved: list[Moved] = []
        for operation in list(self._mover_of):
            self.abandon(operation)
        self._waits_since = None
        while self._mover_of:
            if not any(state.mover.busy for state in self._states):
                # A call was interrupted before its mover had them: nothing copies them.
                lost, self._mover_of = self._mover_of, {}
                return moved + [Moved(each, failure="it was never begun") for each in lost]
            for state in self._states:
                if state.device is not None and state.mover.busy:
                    self._wait_for(state.device.wait, math.inf)
            moved += self.collect(budget_bytes=0)
        return moved

    def _wait_for(self, ended: Callable[[float], None], deadline: float) -> None:
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        stuck_at = self._waits_since + self._device_wait_s
        try:
            ended(max(0.0, min(deadline, stuck_at) - now))
        except UnavailableError as error:
            if time.monotonic() < stuck_at:
                return  # Whoever waits has something else to do by now.
            copies = counted(len(self._mover_of), "copy", "copies")
            raise UnavailableError(
                f"the device has ended none of {copies} for {self._device_wait_s:g} s: {error}"
            ) from error

    @property
    def can_give_back(self) -> bool:
        """Whether memory can be returned while the tiers are open."""
        store = self.stores[DEVICE]
        device: object = store
        if isinstance(device, SleepsAndWakes):
            return device.can_give_back
        return store is not None and store.medium == "arrays"

    def give_back(self, tier: int) -> int:
        """Returns the pages of a tier that no copy touches to the system, until `take_again`.

        Returns how many bytes that were; 0 where the memory is of another kind.
        """
        store: object = self.stores[tier] if tier < len(self.stores) else None
        device: object = self.stores[DEVICE]
        if not self.can_give_back or not isinstance(store, GivesBack):
            return 0
        if isinstance(device, SleepsAndWakes) and tier != DEVICE:
            device.release(store)
        return store.give_back()

    def take_again(self) -> None:
        """Takes memory again that a device gave back; other memory comes when it is used.

        Raises `UnavailableError`: there is none; may be called again.
        """
        device: object = self.stores[DEVICE]
        if isinstance(device, SleepsAndWakes):
            device.take_again()

    def close(self) -> None:
        """Fences, then gives movers and tiers back. Once closed it stays so.

        Raises `UnavailableError`: the device does not end its copies. Nothing is given back: they
        may still touch it.
        """
        self.fence()
        for each in (*self.movers.values(), *self.stores):
            _give_back(each)
        self.steps.close()
        self.movers, self._states = {}, []
        self.stores = ()

    def _connect(self) -> dict[tuple[int, int], Mover]:
        """Movers for every pair of tiers that exchange blocks: all of them with the hub."""
        movers: dict[tuple[int, int], Mover] = {}
        for source, target in _pairs(len(self.stores)):
            read, write = self.stores[source], self.stores[target]
            lower = max(source, target)
            if read is None or write is None or {source, target} & self.refused.keys():
                continue
            began = time.perf_counter()
            try:
                movers[source, target] = mover_between(read, write, self.algorithm)
            except UnavailableError as error:
                if lower == DEVICE:
                    raise
                self.refused[lower] = str(error)
            taken_s = time.perf_counter() - began
            self.connect_s[lower] = self.connect_s.get(lower, 0.0) + taken_s
        for pair in [pair for pair in movers if {*pair} & self.refused.keys()]:
            _give_back(movers.pop(pair))
        self._give_back_refused()
        return movers

    def _give_back_refused(self) -> None:
        """Memory that nothing here can use is not kept from others."""
        device: object = self.stores[DEVICE]
        for tier in self.refused:
            if isinstance(device, RegistersHosts):
                device.forget(self.stores[tier])
            _give_back(self.stores[tier])
        self.stores = tuple(
            None if tier in self.refused else store for tier, store in enumerate(self.stores)
        )


def _give_back(each: object) -> None:
    if isinstance(each, Closable):
        each.close()


def _pairs(tier_count: int) -> list[tuple[int, int]]:
    # Loads come first: a request waits for them.
    pairs = [(HUB, DEVICE), (DEVICE, DEVICE)]
    lower = range(HUB + 1, tier_count)
    pairs += [(tier, HUB) for tier in lower]
    pairs += [(DEVICE, HUB), *((HUB, tier) for tier in lower)]
    return [pair for pair in pairs if max(pair) < tier_count]
