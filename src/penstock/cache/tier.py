"""One tier: its slots, which blocks lie in them, and which of those may leave.

A slot is free only when nothing holds it. Every lease, pinned source and running copy counts as one
hold, and a count below zero is a defect that is raised, never clamped.

Eviction is leaf-first: a block may leave only when no block that follows it lies in the
same tier. Otherwise the blocks below would still take room and could never be matched.

Making room is done in two steps, so that a request that cannot be served changes nothing:
`plan_room` sets victims aside, and then either `evict` forgets them or `put_back` restores
everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cache.eviction import (
    Admits,
    EvictionPolicy,
    FollowsRequests,
    SharesArrays,
    policy_named,
)
from penstock.cache.nodes import NOWHERE, NodeTable, grown
from penstock.cache.settings import DEVICE, WriteKind
from penstock.cache.states import LEAVING, READY, SLOT_TABLE, SlotMove, SlotState
from penstock.errors import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.eviction import Judge
    from penstock.cache.settings import TierSettings
    from penstock.vocabulary.keys import Key


_STALE_MIN = 64
"""A list of spares with fewer entries than this is not cleaned up."""
_ONE = np.int32(1)
"""Of the counts' own type: adding it takes a third of the time that an int takes."""
_ENDS = {
    move: ([int(state) for state, of in SLOT_TABLE.legal if of is move], int(target))
    for (_, move), target in SLOT_TABLE.legal.items()
}
"""Each move with the states that it may begin in, and the one that it ends in."""
_RAW = [bytes((state,)) for state in SlotState]
"""A slot in each state, as an array of states has it."""


class Pool:
    """Numbered slots."""

    def __init__(self, name: str, slot_count: int) -> None:
        self.name = name
        self.slot_count = slot_count
        self.state = np.zeros(slot_count, dtype=np.uint8)
        """A `SlotState` each."""
        self.holders = np.zeros(slot_count, dtype=np.int32)
        """How many leases and operations rely on the slot."""
        self.node = np.full(slot_count, NOWHERE, dtype=np.intp)
        """The node of the block that lies here, or `NOWHERE` if it has no name yet."""
        # Reading one number through a memoryview takes a third of the time an array takes.
        self.state_view = self.state.data
        self.holders_view = self.holders.data
        self._free = np.arange(slot_count - 1, -1, -1, dtype=np.int32)
        self.free_count = slot_count
        self._counts = [0] * len(SlotState)
        """How many slots are in each state."""
        self._counts[SlotState.FREE] = slot_count
        self.taken_count = 0
        """How many slots were ever taken for writing."""
        self.held_count = 0
        """How many slots a lease or an operation relies on, without victims that are set aside."""

    def take(self, count: int) -> NDArray[np.intp]:
        """Takes free slots for writing; the caller made sure that there are enough."""
        if count > self.free_count:
            raise InvariantViolation(
                f"tier {self.name!r}: {count} slots taken of {self.free_count} free"
            )
        self.free_count -= count
        self.taken_count += count
        slots = self._free[self.free_count : self.free_count + count][::-1].astype(np.intp)
        self._move(slots, SlotMove.TAKE)
        return slots

    def take_exactly(self, slots: NDArray[np.intp]) -> None:
        """Takes the named free slots: blocks that were found where they already lie."""
        wanted = set(slots.tolist())
        free = self._free[: self.free_count]
        kept = free[~np.isin(free, slots)]
        if len(wanted) != len(slots) or len(free) - len(kept) != len(slots):
            raise InvariantViolation(f"tier {self.name!r}: slots {sorted(wanted)} are not all free")
        self._free[: len(kept)] = kept
        self.free_count = len(kept)
        self._move(slots, SlotMove.TAKE)

    def fill(self, slots: NDArray[np.intp]) -> None:
        """Every rank wrote these slots: their blocks may be matched."""
        self._move(slots, SlotMove.FILL)

    def depart(self, slots: NDArray[np.intp]) -> None:
        """Their blocks are being written to a lower tier, then leave."""
        self._move(slots, SlotMove.DEPART)

    def keep(self, slots: NDArray[np.intp]) -> None:
        """Leaving blocks stay after all."""
        self._move(slots, SlotMove.KEEP)

    def condemn(self, slots: NDArray[np.intp]) -> None:
        """Nobody may read these slots any more; something may still write to them."""
        self._move(slots, SlotMove.CONDEMN)

    def evict(self, slots: NDArray[np.intp]) -> None:
        """Frees slots of blocks that this tier forgets."""
        self._free_after(slots, SlotMove.EVICT)

    def hand_over(self, slots: NDArray[np.intp]) -> None:
        """Gives slots to somebody who writes there when the saves that hold them have ended."""
        self._move(slots, SlotMove.HAND_OVER)
        self.taken_count += len(slots)
        self.held_count += len(slots)

    def discard(self, slots: NDArray[np.intp]) -> None:
        """Frees slots whose bytes were condemned or never published."""
        self._free_after(slots, SlotMove.DISCARD)

    def hold(self, slots: NDArray[np.intp]) -> None:
        """One more lease or operation relies on each of these slots."""
        if not len(slots):
            return
        before = self.holders[slots]
        self.holders[slots] = before + _ONE
        self.held_count += len(slots) - int(np.count_nonzero(before))

    def unhold(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """One less; returns the slots that nothing holds any more."""
        if not len(slots):
            return slots
        left = self.holders[slots] - _ONE
        quiet = slots
        if np.count_nonzero(left):
            if np.count_nonzero(left < 0):
                worst = int(slots[int(left.argmin())])
                problem = f"tier {self.name!r}: slot {worst} was released once too often"
                raise InvariantViolation(problem, node=int(self.node[worst]))
            quiet = slots[left == 0]
        self.holders[slots] = left
        self.held_count -= len(quiet)
        return quiet

    def count(self, state: SlotState) -> int:
        """How many slots are in a state."""
        return self._counts[state]

    @property
    def leaving_count(self) -> int:
        """How many slots are `LEAVING`, and so will soon be free."""
        return self._counts[LEAVING]

    def free_slots(self) -> NDArray[np.int32]:
        """The free slots, the next one to be taken last."""
        return self._free[: self.free_count].copy()

    def _move(self, slots: NDArray[np.intp], move: SlotMove) -> None:
        if not len(slots):
            return
        before = self.state.take(slots)
        counts, (sources, target) = self._counts, _ENDS[move]
        one = len(sources) == 1
        # To compare bytes takes a quarter of the time that NumPy takes for a few slots.
        if one and SLOT_TABLE.counts is None and before.tobytes() == _RAW[sources[0]] * len(slots):
            self.state[slots] = target
        else:
            self.state[slots] = SLOT_TABLE.after_all(before, move)
        # Counted here, so that whoever asks need not look at every slot of a large tier.
        if one:
            counts[sources[0]] -= len(slots)
        else:
            for state, count in enumerate(np.bincount(before).tolist()):
                counts[state] -= count
        counts[target] += len(slots)

    def _free_after(self, slots: NDArray[np.intp], move: SlotMove) -> None:
        if np.count_nonzero(self.holders[slots]):
            worst = int(slots[int(self.holders[slots].argmax())])
            problem = f"tier {self.name!r}: {move.name} of slot {worst}, which is held"
            raise InvariantViolation(problem, node=int(self.node[worst]))
        self._move(slots, move)
        self._free[self.free_count : self.free_count + len(slots)] = slots
        self.free_count += len(slots)


ANY_TENANT = "*"
"""The quota of every tenant that has none of its own."""
_LONG_RUN = 8
"""With at least this many blocks, an array operation is cheaper than a loop."""


class Room(NamedTuple):
    """What would have to go so that slots can be taken."""

    victims: list[int]
    """Nodes that were set aside."""
    own_count: int
    """How many leading victims go because their tenant is over its quota."""
    slot_count: int
    """Slots that could be taken once the victims are gone: no more than were wanted."""
    refused: bool = False
    """Whether there are fewer than wanted because blocks here are worth more."""
    spare_count: int = 0
    """How many victims after those are spares: the tier above keeps their blocks."""


class Spares:
    """Blocks of a tier that the tier above has, too: what they take here is as good as free.

    Those that the tier above will keep longest come first, for it needs a copy of what it is about
    to evict. Whether a listed block is a spare is seen when its turn comes: blocks that become one
    again are listed again.
    """

    def __init__(self, sparable: Callable[[NDArray[np.intp]], NDArray[np.bool_]]) -> None:
        self._sparable = sparable
        self._runs: list[NDArray[np.intp]] = []
        """What was used together, the latest last; of a chain, the first block stays longest."""
        self._count = 0
        self._limit = _STALE_MIN

    def add(self, nodes: NDArray[np.intp]) -> None:
        """These blocks were used, or may have become spares."""
        self._runs.append(nodes)
        self._count += len(nodes)
        if self._count > self._limit:
            listed = np.concatenate(self._runs[::-1])
            listed = listed[np.sort(np.unique(listed, return_index=True)[1])]
            listed = listed[self._sparable(listed)]
            self._runs, self._count = [listed], len(listed)
            self._limit = 2 * len(listed) + _STALE_MIN

    def take(self, count: int) -> list[int]:
        """Up to `count` spares, which are listed no more."""
        taken: list[int] = []
        while self._runs and len(taken) < count:
            run = self._runs.pop()
            self._count -= len(run)
            good = run[self._sparable(run)]
            chosen, rest = np.split(good, [count - len(taken)])
            # A block that was listed twice may have been taken just now.
            taken = list(dict.fromkeys([*taken, *chosen.tolist()]))
            if len(rest):
                self.add(rest)
        return taken


class Tier:
    """The copies of blocks in one place."""

    def __init__(
        self, index: int, settings: TierSettings, nodes: NodeTable, *, hint_share: float = 1.0
    ) -> None:
        self.index = index
        self.name = settings.name
        self.settings = settings
        self.nodes = nodes
        self.pool = Pool(settings.name, settings.slot_count)
        self.on = True
        """Whether copies here can be read and written now."""
        self.slot_of = np.full(nodes.capacity, NOWHERE, dtype=np.intp)
        """Node to the slot where its copy lies."""
        self.children = np.zeros(nodes.capacity, dtype=np.int32)
        """How many of the blocks that follow a node lie in this tier and are not leaving."""
        self.priority = np.zeros(nodes.capacity, dtype=np.int16)
        """Node to the priority of its copy here: the node's, or 0 if its tenant raised too many."""
        self.fetched_from = np.zeros(nodes.capacity, dtype=np.int8)
        """Node to the tier below that its copy was fetched from, until a request uses it; or 0."""
        self.any_fetched = False
        self._look_at_arrays()
        self.used_by: dict[int, int] = {}
        """Tenant to the number of its blocks here."""
        self.raised_by: dict[int, int] = {}
        """Tenant to the number of its blocks here that have a priority above zero."""
        self.hints_refused = 0
        """Copies that did not get a priority above zero, for their tenant had its share."""
        self._hint_share = hint_share
        self.policy = self._make_policy()
        self.quota_arrays = self._make_policy() if settings.quotas else None
        """Of a policy that lets others share its arrays: a block has one tenant, so all can."""
        self._follower = self.policy if isinstance(self.policy, FollowsRequests) else None
        self.may_refuse = isinstance(self.policy, Admits) and self.policy.may_refuse
        """Whether blocks that nobody needs here now may be worth too little to enter."""
        self.saves_late = False
        """Whether blocks may leave before a tier below is given them."""
        self.reclaims = False
        """Whether a store gives blocks up for new ones, so that free entries here mean nothing."""
        self._only_tenant: int | None = None
        """The one whose blocks all are, as long as no second one was ever introduced."""
        self._tenant_count = 0
        self._quotas: dict[int, int] = {}
        self._quota_policies: dict[int, EvictionPolicy] = {}
        """A tenant with a quota evicts its own blocks first, so they are also queued here."""
        self._marked: list[EvictionPolicy] = []
        """The policies that the last plan asked for victims."""
        self.above: Tier | None = None
        """The tier whose copies need none here, until it is about to evict them."""
        self.near = np.zeros(nodes.capacity, dtype=bool)
        """Node to whether the tier above is about to evict it: its copy here is no spare."""
        self._spares = Spares(self._is_spare)
        self.asked_by: int | None = None
        """The tenant that room was made for last."""

    # ---------------------------------------------------------------- who pays

    def introduce(self, tenant: int, name: str) -> None:
        """Makes a tenant known, with its quota if it has one."""
        self._tenant_count += 1
        self._only_tenant = tenant if self._tenant_count == 1 else None
        quotas = self.settings.quotas
        share = quotas.get(name, quotas.get(ANY_TENANT))
        if share is not None:
            self._quotas[tenant] = int(share * self.pool.slot_count)
            self._quota_policies[tenant] = self._make_quota_policy(tenant)

    def dismiss(self, tenant: int) -> None:
        """Forgets a tenant that has no blocks here; its number may be another's next."""
        self._quotas.pop(tenant, None)
        self._quota_policies.pop(tenant, None)

    def over_quota(self, tenant: int, wanted: int) -> int:
        """By how many slots `wanted` more would exceed the tenant's quota."""
        quota = self._quotas.get(tenant)
        if quota is None:
            return 0
        return max(0, self.used_by.get(tenant, 0) + wanted - quota)

    # ---------------------------------------------------------------- coming and going

    def place(
        self,
        nodes: NDArray[np.intp],
        slots: NDArray[np.intp],
        *,
        tick: int,
        keys: Sequence[Key] | None = None,
    ) -> None:
        """Records that the blocks of `nodes` lie, or will lie, in `slots`."""
        if np.count_nonzero(self.slot_of[nodes] != NOWHERE):
            raise InvariantViolation(f"tier {self.name!r}: a block was placed twice")
        self.slot_of[nodes] = slots
        self.pool.node[slots] = nodes
        self.nodes.add_copies(nodes)
        self._count_children(nodes, 1)
        if keys is None:
            keys = self.nodes.keys_of(nodes.tolist())
        if self.nodes.hinted:
            self.prioritize(nodes)
        if self.above is not None:
            self.near[nodes] = False
        self.policy.add(nodes, keys, tick=tick)
        for tenant, count in self._tenants_of(nodes):
            self.used_by[tenant] = self.used_by.get(tenant, 0) + count
            if tenant in self._quota_policies:
                own = self.nodes.tenant[nodes] == tenant
                own_keys = [key for key, mine in zip(keys, own.tolist(), strict=True) if mine]
                self._quota_policies[tenant].add(nodes[own], own_keys, tick=tick)

    def displace(self, nodes: NDArray[np.intp], *, evicted: bool) -> None:
        """Forgets where the blocks of `nodes` lie; their slots are the caller's affair.

        Blocks before them that have no follower here any more may leave from now on.
        """
        self.offer(self._unlink(nodes))
        numbers = nodes.tolist()
        self._forget(nodes, numbers, self.nodes.keys_of(numbers), evicted=evicted)

    def depart(self, nodes: NDArray[np.intp]) -> None:
        """These blocks are being written down and then leave; those before them may follow."""
        self.pool.depart(self.slot_of[nodes])
        parents = self._count_children(nodes, -1)
        self.offer(parents)

    def depart_victim(self, node: int) -> None:
        """A block that was set aside is written down before it leaves."""
        self.pool.holders[self.slot_of[node]] -= 1
        nodes = np.array([node], dtype=np.intp)
        self._count_children(nodes, 1)
        self.depart(nodes)

    def keep(self, nodes: NDArray[np.intp]) -> None:
        """Leaving blocks stay after all."""
        self.pool.keep(self.slot_of[nodes])
        self._count_children(nodes, 1)

    def note_fetched(self, nodes: NDArray[np.intp], source: int) -> None:
        """Copies were fetched from a tier below, before a request needed them."""
        self.any_fetched = True
        self.fetched_from[nodes] = source

    def take_origins(self, nodes: NDArray[np.intp]) -> NDArray[np.int8]:
        """Of copies that a request uses: the tier each was fetched from for it, or 0."""
        found = self.fetched_from[nodes]
        self.fetched_from[nodes] = 0
        return found

    def touch(self, nodes: NDArray[np.intp], *, tick: int) -> None:
        """A request used the copies here."""
        self.policy.touch(nodes, tick=tick)
        for tenant, _ in self._tenants_of(nodes) if self._quota_policies else ():
            own = self._quota_policies.get(tenant)
            if own is not None:
                own.touch(nodes[self.nodes.tenant[nodes] == tenant], tick=tick)
        if self.above is not None:
            self.near[nodes] = False
        # Their place in the order is another one now.
        self.offer(nodes)

    def release(self, nodes: NDArray[np.intp], *, tick: int) -> None:
        """A request that used the copies here has ended."""
        if self._follower is None:
            self.touch(nodes, tick=tick)
            return
        self._follower.release(nodes, tick=tick)
        for tenant, _ in self._tenants_of(nodes) if self._quota_policies else ():
            own: object = self._quota_policies.get(tenant)
            if isinstance(own, FollowsRequests):
                own.release(nodes[self.nodes.tenant[nodes] == tenant], tick=tick)
        self.offer(nodes)

    def offer(self, nodes: NDArray[np.intp]) -> None:
        """Queues those of `nodes` that may leave."""
        if self.above is not None and len(nodes):
            self._spares.add(nodes)
        if len(nodes) > 1:
            nodes = nodes[self.children[nodes] == 0]
        if len(nodes):
            self._offer(nodes.tolist())

    def prioritize(self, nodes: NDArray[np.intp]) -> None:
        """Takes over what priority nodes have now: above zero, as far as their tenants may.

        Leading blocks come first, as others need them. The caller offers the blocks.
        """
        nodes = nodes[self.slot_of[nodes] != NOWHERE]
        wanted = self.nodes.priority[nodes].copy()
        if self.raised_by or wanted.max(initial=0) > 0:
            self._lower(nodes)
            limit = int(self._hint_share * self.pool.slot_count)
            for tenant, _ in self._tenants_of(nodes):
                raised = ((wanted > 0) & (self.nodes.tenant[nodes] == tenant)).nonzero()[0]
                had = self.raised_by.get(tenant, 0)
                count = min(len(raised), max(0, limit - had))
                wanted[raised[count:]] = 0
                self.hints_refused += len(raised) - count
                if had + count:
                    self.raised_by[tenant] = had + count
        self.priority[nodes] = wanted

    def _lower(self, nodes: NDArray[np.intp]) -> None:
        """Takes the priority of copies back, if it is above zero."""
        raised = nodes[self.priority[nodes] > 0]
        self.priority[raised] = 0
        for tenant, count in self._tenants_of(raised):
            self.raised_by[tenant] -= count
            if not self.raised_by[tenant]:
                del self.raised_by[tenant]

    def offer_slots(self, slots: NDArray[np.intp]) -> None:
        """Queues those of the blocks in `slots` that may leave."""
        if len(slots):
            nodes = self.pool.node[slots]
            self.offer(nodes[nodes != NOWHERE])

    def standing(self, node: int) -> int | None:
        """The priority of a block that may leave now; `None` if it may not."""
        slot = self._slot_of_view[node]
        if (
            slot == NOWHERE
            or self._children_view[node]
            or self.pool.holders_view[slot]
            or self.pool.state_view[slot] != READY
            or self.nodes.pins_view[node]
        ):
            return None
        return self._priority_view[node]

    def placed_nodes(self) -> NDArray[np.intp]:
        """The blocks that have a slot here, also those that are being written."""
        nodes: NDArray[np.intp] = self.pool.node[self.pool.node != NOWHERE]
        return nodes

    def ready_nodes(self) -> NDArray[np.intp]:
        """The blocks that can be matched here."""
        state = self.pool.state
        slots = np.flatnonzero((state == READY) | (state == LEAVING))
        nodes: NDArray[np.intp] = self.pool.node[slots]
        return nodes

    # ---------------------------------------------------------------- making room

    def plan_room(
        self,
        wanted: int,
        tenant: int | None,
        *,
        strict: bool = False,
        judge: Judge | None = None,
    ) -> Room:
        """Sets victims aside so that `wanted` slots can be taken for a tenant.

        A tenant over its quota gives its own blocks first; if these do not suffice, it gets
        the slots all the same, unless the quota is `strict`. With a `judge`, blocks that are worth
        more than those that want the slots stay. The caller must `evict` or `put_back` the victims.
        """
        victims: list[int] = []
        refused = False
        self.asked_by = tenant
        if judge is not None and self.reclaims:
            admitted = self._judge_next(judge, wanted)
            refused, wanted, judge = admitted < wanted, admitted, None
        if wanted <= 0:
            return Room(victims, 0, 0, refused)
        self._mark(tenant)
        if tenant is not None and tenant in self._quota_policies:
            over = self.over_quota(tenant, wanted)
            own = self._quota_policies[tenant]
            refused |= self._set_aside_from(own, over, victims, judge, wanted - over)
            if strict:
                wanted = max(0, wanted - (over - len(victims)))
        own_count = len(victims)
        free_count = self.pool.free_count
        if self.above is not None:
            self._set_spares_aside(wanted - free_count - own_count, victims)
        spare_count = len(victims) - own_count
        first = free_count + len(victims)
        refused |= self._set_aside_from(self.policy, wanted - first, victims, judge, first)
        slot_count = max(0, min(wanted, free_count + len(victims)))
        return Room(victims, own_count, slot_count, refused, spare_count)

    def keep_for_above(self, nodes: NDArray[np.intp]) -> None:
        """The tier above is about to evict these blocks: their copies here are no spares."""
        if self.above is not None:
            self.near[nodes] = True

    def next_to_leave(self, count: int, tenant: int | None) -> NDArray[np.intp]:
        """The blocks that would go if a tenant took all free slots and `count` more, in order.

        Nothing changes.
        """
        room = self.plan_room(self.pool.free_count + max(0, count), tenant)
        self.put_back(room.victims)
        own, others = room.victims[: room.own_count], room.victims[room.own_count :]
        return np.array(own + others[room.spare_count :], dtype=np.intp)

    def judge_of(self, keys: Sequence[Key], *, priority: int) -> Judge | None:
        """What says which blocks are worth those that would leave for them; `None`: all are."""
        policy = self.policy
        if not isinstance(policy, Admits) or not policy.may_refuse:
            return None
        return policy.admit(keys, priority=priority)

    def refuse(self, nodes: NDArray[np.intp], keys: list[Key], *, tick: int) -> None:
        """Blocks of one tenant stay outside: those that lie here are worth more.

        For the policies they came and left, so that it is known what refusing them cost.
        """
        own = self._quota_policies.get(int(self.nodes.tenant[nodes[0]]))
        for policy in (self.policy,) if own is None else (self.policy, own):
            policy.add(nodes, keys, tick=tick)
            policy.forget(nodes.tolist(), keys, evicted=True)

    def pop_victim(self) -> int | None:
        """Sets the next block to leave aside and returns it."""
        victims: list[int] = []
        self._mark(None)
        self._set_aside_from(self.policy, 1, victims)
        return victims[0] if victims else None

    def set_aside_leaves(self, nodes: Iterable[int]) -> list[int]:
        """Sets those of `nodes` aside that may leave; a follower must come before its parent."""
        victims: list[int] = []
        for node in nodes:
            if self.standing(node) is not None:
                victims.append(node)
                parent = self._set_aside(node)
                if parent != NOWHERE:
                    self._offer((parent,))
        return victims

    def put_back(self, victims: list[int]) -> None:
        """Restores everything that `plan_room` or `pop_victim` changed."""
        nodes = np.array(victims, dtype=np.intp)
        self.pool.holders[self.slot_of[nodes]] -= _ONE
        self._count_children(nodes, 1)
        for policy in self._marked:
            policy.rollback()
        self.offer(nodes)

    def _mark(self, tenant: int | None) -> None:
        """Those that will be asked, and no others: there may be many tenants."""
        own = None if tenant is None else self._quota_policies.get(tenant)
        self._marked = [self.policy] if own is None else [self.policy, own]
        for policy in self._marked:
            policy.mark()

    def evict(
        self, victims: list[int], keys: list[Key], *, spares: bool = False, saving: bool = False
    ) -> NDArray[np.intp]:
        """Forgets blocks that were set aside; returns the slots they lay in.

        For the policies, `spares` have left, but were not found to be worth the least. Slots are
        free now, unless their blocks are `saving`: then they are the caller's.
        """
        nodes = np.array(victims, dtype=np.intp)
        slots: NDArray[np.intp] = self.slot_of[nodes]
        # Setting them aside already took them from the counts of the blocks before them.
        self._take_out(nodes, slots)
        self.pool.holders[slots] -= _ONE
        self._forget(nodes, victims, keys, evicted=not spares)
        if saving:
            self.pool.hand_over(slots)
        else:
            self.pool.evict(slots)
        return slots

    def fit(self) -> None:
        capacity = self.nodes.capacity
        if len(self.slot_of) < capacity:
            self.slot_of = grown(self.slot_of, capacity, fill=NOWHERE)
            self.children = grown(self.children, capacity)
            self.priority = grown(self.priority, capacity)
            self.fetched_from = grown(self.fetched_from, capacity)
            if self.above is not None:
                self.near = grown(self.near, capacity)
            self._look_at_arrays()
            for policy in (self.policy, *self._quota_policies.values()):
                policy.resize(capacity)

    def quota_policies(self) -> Iterable[tuple[int, EvictionPolicy]]:
        """Tenants with a quota, and the policies that queue their blocks."""
        return self._quota_policies.items()

    def _set_aside_from(
        self,
        policy: EvictionPolicy,
        count: int,
        victims: list[int],
        judge: Judge | None = None,
        first: int = 0,
    ) -> bool:
        """Sets up to `count` victims aside, the next for newcomer `first`, and so on.

        Returns whether there are fewer because of the `judge`.
        """
        if count <= 0:
            return False
        begun = len(victims)
        target = end = begun + count
        node = policy.pop()
        while node is not None:
            if judge is not None:
                end = min(target, begun + judge(node) - first)
                if end <= len(victims):
                    self._offer((node,))
                    return True
            victims.append(node)
            parent = self._set_aside(node)
            if parent == node - 1 and end - len(victims) >= _LONG_RUN <= self.nodes.run[node]:
                parent = self._set_run_aside(policy, node, end - len(victims), victims)
            if len(victims) == target:
                if parent != NOWHERE:
                    self._offer((parent,))
                return False
            if parent == NOWHERE:
                node = policy.pop()
            elif self._quota_policies:
                self._offer((parent,))
                node = policy.pop()
            else:
                node = policy.offer_and_pop(parent)
        return False

    def _set_spares_aside(self, count: int, victims: list[int]) -> None:
        """Sets up to `count` spares aside; blocks here that follow them find them above."""
        if count <= 0:
            return
        for node in self._spares.take(count):
            victims.append(node)
            parent = self._set_aside(node)
            if parent != NOWHERE:
                self._offer((parent,))

    def _is_spare(self, nodes: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of some blocks can give way here, for the tier above keeps them."""
        assert self.above is not None
        here, there = self.slot_of[nodes], self.above.slot_of[nodes]
        spare: NDArray[np.bool_] = (here != NOWHERE) & (there != NOWHERE)
        spare &= (self.pool.state.take(here) == READY) & (self.pool.holders[here] == 0)
        spare &= self.above.pool.state.take(there) == READY
        spare &= (self.nodes.pins[nodes] == 0) & ~self.near[nodes]
        return spare

    def _judge_next(self, judge: Judge, wanted: int) -> int:
        """How many newcomers are worth more than the block that would leave next."""
        node = self.policy.pop()
        if node is None:
            return wanted
        self._offer((node,))
        return min(wanted, judge(node))

    def _set_run_aside(
        self, policy: EvictionPolicy, node: int, limit: int, victims: list[int]
    ) -> int:
        """Sets blocks before `node` aside that would follow it one by one anyway.

        Returns what `_set_aside` of the last one would.
        """
        nodes, pool = self.nodes, self.pool
        first = node - min(limit, nodes.run_view[node])
        before = np.arange(node - 1, first - 1, -1, dtype=np.intp)
        # They are numbered one by one: a slice of an array takes less time than a list of places.
        slots = self.slot_of[first:node][::-1]
        held = pool.holders[slots]
        blocked = held | nodes.pins[first:node][::-1]
        blocked |= self.priority[first:node][::-1] ^ self._priority_view[node]
        # The first one's only follower here has just been set aside, the others' will be.
        blocked[1:] |= self.children[first : node - 1][::-1] ^ _ONE
        may_leave = blocked == 0
        may_leave &= (slots != NOWHERE) & (pool.state[slots] == READY)
        may_leave &= policy.leave_together(node, before)
        count = int(may_leave.argmin())
        if may_leave[count]:
            count = len(before)
        if count == 0:
            return node - 1
        run = before[:count]
        pool.holders[slots[:count]] = held[:count] + _ONE
        self.children[run] = 0
        victims += run.tolist()
        parent = nodes.parent_view[int(run[-1])]
        if parent == NOWHERE:
            return NOWHERE
        self._children_view[parent] -= 1
        return NOWHERE if self._children_view[parent] else parent

    def _set_aside(self, node: int) -> int:
        """Takes a block out of the reckoning; returns the block before it if it may follow."""
        # Held, so that no second entry of it in a queue can bring it up again.
        self.pool.holders_view[self._slot_of_view[node]] += 1
        parent = self.nodes.parent_view[node]
        if parent == NOWHERE:
            return NOWHERE
        left = self._children_view[parent] - 1
        self._children_view[parent] = left
        return NOWHERE if left else parent

    def _look_at_arrays(self) -> None:
        self._slot_of_view = self.slot_of.data
        self._children_view = self.children.data
        self._priority_view = self.priority.data

    def _count_children(self, nodes: NDArray[np.intp], change: int) -> NDArray[np.intp]:
        parents: NDArray[np.intp] = self.nodes.parent[nodes]
        parents = parents[parents != NOWHERE]
        # A number of the array's own type is added in a third of the time, of many in a twentieth.
        np.add.at(self.children, parents, np.int32(change))
        return parents

    def _unlink(self, nodes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Takes blocks out of the maps; returns the blocks before them."""
        slots = self.slot_of[nodes]
        staying = self.pool.state.take(slots) != LEAVING
        self._take_out(nodes, slots)
        return self._count_children(nodes[staying], -1)

    def _take_out(self, nodes: NDArray[np.intp], slots: NDArray[np.intp]) -> None:
        if np.count_nonzero(slots == NOWHERE):
            raise InvariantViolation(f"tier {self.name!r}: a block left that was not there")
        if self.raised_by:
            self._lower(nodes)
        if self.any_fetched:
            self.fetched_from[nodes] = 0
        self.slot_of[nodes] = NOWHERE
        self.pool.node[slots] = NOWHERE
        self.nodes.drop_copies(nodes)

    def _forget(
        self, nodes: NDArray[np.intp], numbers: list[int], keys: list[Key], *, evicted: bool
    ) -> None:
        self.policy.forget(numbers, keys, evicted=evicted)
        for tenant, count in self._tenants_of(nodes):
            self.used_by[tenant] -= count
            if not self.used_by[tenant]:
                del self.used_by[tenant]
            if tenant in self._quota_policies:
                own = [n for n in numbers if self.nodes.tenant[n] == tenant]
                own_keys = self.nodes.keys_of(own)
                self._quota_policies[tenant].forget(own, own_keys, evicted=evicted)

    def _offer(self, nodes: Iterable[int]) -> None:
        self.policy.offer(nodes)
        if self._quota_policies:
            for node in nodes:
                own = self._quota_policies.get(int(self.nodes.tenant[node]))
                if own is not None:
                    own.offer((node,))

    def _tenants_of(self, nodes: NDArray[np.intp]) -> list[tuple[int, int]]:
        if len(nodes) == 0:
            return []
        if self._only_tenant is not None:
            return [(self._only_tenant, len(nodes))]
        tenants = self.nodes.tenant[nodes]
        first = int(tenants[0])
        if np.count_nonzero(tenants == first) == len(tenants):
            return [(first, len(tenants))]
        values, counts = np.unique(tenants, return_counts=True)
        return list(zip(values.tolist(), counts.tolist(), strict=True))

    def _make_quota_policy(self, tenant: int) -> EvictionPolicy:
        shared = self.quota_arrays
        if shared is None or not isinstance(shared, SharesArrays):
            return self._make_policy()
        owners, standing = self.nodes, self.standing

        def own_standing(node: int) -> int | None:
            return standing(node) if owners.tenant[node] == tenant else None

        policy = shared.sharing(own_standing)
        shared.resize(self.nodes.capacity)
        policy.resize(self.nodes.capacity)
        return policy

    def _make_policy(self) -> EvictionPolicy:
        make = policy_named(self.settings.eviction)
        policy = make(self.pool.slot_count, self.standing)
        lost = self.settings.write.kind is WriteKind.EXCLUSIVE
        # Under `exclusive`, what is refused would be nowhere.
        if self.index != DEVICE and isinstance(policy, Admits) and not lost:
            policy.may_refuse = True
        policy.resize(self.nodes.capacity)
        return policy
