"""What ranks must have in common, and refusals that name both sides."""

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

import penstock
from penstock.errors import ConfigError
from penstock.runtime.messages import RankFacts, TierFacts

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = 'version = 1\n[model]\nname = "none"\n'
TIER = '[[tiers]]\nname = "host"\nkind = "host"\nblocks = 16\n'


def config(ranks: int = 2, settings: str = "", tiers: str = TIER) -> penstock.Config:
    return penstock.parse_config(
        f"{MODEL}[cache]\nblock_tokens = 4\nranks = {ranks}\n{settings}\n{tiers}"
    )


def facts(rank: int, **changed: Any) -> RankFacts:
    tier = TierFacts(name="host", slot_count=changed.pop("tier_slots", 16), memory=f"of {rank}")
    told = RankFacts(
        rank=rank,
        life=rank + 1,
        block_tokens=4,
        block_bytes=96,
        cell_count=1,
        device_slots=(8,),
        tiers=(tier,),
        algorithm="xxh3",
        form=bytes(16),
    )
    return msgspec.structs.replace(told, **changed)


def test_the_least_of_the_ranks_counts() -> None:
    ranks = [facts(0, tier_slots=20, device_slots=(9,)), facts(1, tier_slots=12, device_slots=(7,))]
    owner = penstock.open_offload(config(), ranks=ranks)
    keys = config().key_chain().extend(range(4))

    assert [tier.slots for tier in owner.statistics().tiers] == [12]
    with pytest.raises(ValueError, match="slot 7, must be from 0 to 6"):
        owner.save(keys, [7], cause="save")


def test_facts_may_come_in_any_order() -> None:
    penstock.open_offload(config(3), ranks=[facts(2), facts(0), facts(1)])


@pytest.mark.parametrize("numbers", [[], [0], [0, 0], [1, 2], [0, 1, 2]])
def test_every_rank_must_be_there_once(numbers: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"cache.ranks: is 2, but there are facts of ranks"):
        penstock.open_offload(config(), ranks=[facts(number) for number in numbers])


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"block_tokens": 8}, "cache.block_tokens: is 4, but 8 on rank 1"),
        ({"device_slots": (8, 8)}, "cache.groups: is 1, but 2 on rank 1"),
        ({"tiers": ()}, "tiers: is ('host',), but () on rank 1"),
        ({"shares": True}, "cache.equal_ranks: is False, but True on rank 1"),
        (
            {"algorithm": "mix64"},
            "ranks: sum their cells by xxh3 (rank 0) and mix64 (rank 1), must do it in one way",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_refused(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        penstock.open_offload(config(), ranks=[facts(0), facts(1, **changed)])


def test_a_rank_with_fewer_blocks_than_are_managed_is_refused() -> None:
    managed = config(settings="blocks = 8")

    with pytest.raises(ConfigError, match="is 8, must be at most 6, the device blocks of rank 1"):
        penstock.open(managed, ranks=[facts(0), facts(1, device_slots=(6,))])


@pytest.mark.parametrize(
    ("opener", "settings", "other"),
    [
        (penstock.open, "", "use penstock.open_offload"),
        (penstock.open_offload, "blocks = 8", "or use penstock.open"),
    ],
)
def test_the_wrong_way_in_names_the_other(
    opener: Callable[..., object], settings: str, other: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(other)):
        opener(config(settings=settings), ranks=[facts(0), facts(1)])


def test_operations_that_no_plan_could_carry_are_refused() -> None:
    wide = config(settings="groups = 256\noperation_blocks_max = 65536")
    slots = (8,) * 256

    with pytest.raises(ConfigError, match=r"operation_blocks_max: is 65536, must be at most 16"):
        penstock.open_offload(
            wide, ranks=[facts(0, device_slots=slots), facts(1, device_slots=slots)]
        )


# ---------------------------------------------------------------- equal ranks


EQUAL = "equal_ranks = true"


def kv(layers: int = 1) -> list[np.ndarray]:
    return [np.zeros((8, 4, 3)) for _ in range(layers)]


def test_ranks_that_share_memory_must_hold_equal_bytes() -> None:
    shared = config(settings=EQUAL)
    first = penstock.open_rank(shared, rank=0, kv=kv())
    other = facts(1, shares=True)

    with pytest.raises(ConfigError, match=r"the forms of rank 0 \(\w+\) and rank 1 \(0+\) differ"):
        penstock.open_offload(shared, ranks=[first.facts, other])


def test_a_rank_that_shares_memory_needs_the_descriptor() -> None:
    shared = config(settings=EQUAL)

    with pytest.raises(ValueError, match="arenas is missing, must be given to rank 1"):
        penstock.open_rank(shared, rank=1, kv=kv())


def test_ranks_that_should_share_memory_and_do_not_are_refused() -> None:
    shared = config(settings=EQUAL)
    ours, theirs = (penstock.open_rank(shared, rank=0, kv=kv()) for _ in range(2))
    other = penstock.open_rank(shared, rank=1, kv=kv(), arenas=theirs.arenas)

    with pytest.raises(ConfigError, match=r"lies in 'memfd .*' on rank 0 and in 'memfd .*' on"):
        penstock.open_offload(shared, ranks=[ours.facts, other.facts])


def test_a_writer_comes_back_with_the_memory_that_the_others_have() -> None:
    shared = config(settings=EQUAL)
    writer = penstock.open_rank(shared, rank=0, kv=kv())
    reader = penstock.open_rank(shared, rank=1, kv=kv(), arenas=writer.arenas)
    owner = penstock.open_offload(shared, ranks=[writer.facts, reader.facts])
    owner.ranks.lose(0, "killed")

    with pytest.raises(ConfigError, match="they do not share it"):
        owner.ranks.rejoin(penstock.open_rank(shared, rank=0, kv=kv()).facts)
    owner.ranks.rejoin(penstock.open_rank(shared, rank=0, kv=kv(), arenas=reader.arenas).facts)

    assert owner.health().ok


def test_a_writer_without_memory_has_none_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    shared = config(settings=EQUAL)
    writer = penstock.open_rank(shared, rank=0, kv=kv())
    reader = penstock.open_rank(shared, rank=1, kv=kv(), arenas=writer.arenas)

    owner = penstock.open_offload(shared, ranks=[writer.facts, reader.facts])

    (reason,) = owner.health().reasons
    assert reason.startswith("tier host is off: rank 0: no arena of")


def test_a_rank_that_does_not_write_has_nothing_below_the_hub() -> None:
    below = '[[tiers]]\nname = "archive"\nkind = "memory"\nblocks = 32\n'
    shared = config(settings=EQUAL, tiers=TIER + below)
    memory = [np.full((8, 4, 3), 1.0 + at) for at in range(2)]
    writer = penstock.open_rank(shared, rank=0, kv=memory[0])
    reader = penstock.open_rank(shared, rank=1, kv=memory[1], arenas=writer.arenas)
    owner = penstock.open_offload(shared, ranks=[writer.facts, reader.facts])
    keys = shared.key_chain().extend(range(8))

    owner.save(keys, [0, 1], cause="save")
    for _ in range(10):
        owner.step()
        plan = owner.ranks.take_plan()
        for rank in (writer, reader):
            if plan is not None:
                rank.take(plan)
            report = rank.step()
            if report is not None:
                owner.ranks.receive(report)

    assert reader.executor.stores[2] is None
    assert (reader.busy, reader.step()) == (False, None)
    assert not owner.busy
    assert [tier.ready for tier in owner.statistics().tiers] == [2, 2]
    assert owner.health().ok


def test_a_rank_that_does_not_write_cannot() -> None:
    shared = config(settings=EQUAL)
    first = penstock.open_rank(shared, rank=0, kv=kv())

    second = penstock.open_rank(shared, rank=1, kv=kv(), arenas=first.arenas)

    store = second.executor.stores[1]
    assert store is not None
    with pytest.raises(ValueError, match="read-only"):
        store.blocks([0]).buffers[0][0] = 1
    second.close()
    first.close()


def test_memory_of_another_size_is_refused() -> None:
    first = penstock.open_rank(config(), rank=0, kv=kv())
    larger = config(tiers=TIER.replace("16", "4096"))

    with pytest.raises(ValueError, match="it was made for other blocks"):
        penstock.open_rank(larger, rank=1, kv=kv(), arenas=first.arenas)


def test_descriptors_of_tiers_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="arenas: has 'ghost', must be a tier of kind 'host'"):
        penstock.open_rank(config(), rank=0, kv=kv(), arenas={"ghost": 0})


@pytest.mark.parametrize("descriptor", [-1, "3", 1.5, 1 << 31])
def test_a_descriptor_must_be_a_number_that_descriptors_have(descriptor: object) -> None:
    with pytest.raises(ValueError, match=r"arenas\['host'\] is "):
        penstock.open_rank(config(), rank=0, kv=kv(), arenas={"host": descriptor})  # type: ignore[dict-item]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_must_be_one_of_those_configured(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank is {rank}, must be from 0 to 1"):
        penstock.open_rank(config(), rank=rank, kv=kv())


@pytest.mark.parametrize(
    ("ranks", "tiers", "problem"),
    [
        (1, TIER, "is true, which has no effect while cache.ranks is 1"),
        (2, TIER.replace('"host"\nb', '"memory"\nb'), "while tiers[0].kind is 'memory', must be"),
        (2, "", "while tiers[0].kind is 'none', must be 'host'"),
    ],
)
def test_equal_ranks_that_could_not_share_are_refused(ranks: int, tiers: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("cache.equal_ranks: is true")) as refusal:
        config(ranks, settings=f"{EQUAL}\nblocks = 8", tiers=tiers)

    assert problem in str(refusal.value)
