"""Worlds of engines that share a lying store: clean, and bugs planted in the tier are found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.sim.shared import SharedWorld
from lab.tests.sim.planting import Plant, first_failure
from penstock.store.shared import io
from penstock.store.shared.generations import KnownGenerations, SharedKeeper
from penstock.store.shared.tier import SharedTier

if TYPE_CHECKING:
    from penstock.cache.operations import BlockFault
    from penstock.store.shared.generations import Lineage
    from penstock.store.shared.io import SumsOfArenas, ValueRun
    from penstock.store.shared.values import Gathering

SEEDS = range(40)
"""None of them finds anything without a planted bug, and each planted bug is found in one."""


def plant_blind_reads(patch: pytest.MonkeyPatch) -> None:
    """What arrives is taken for what was asked for."""

    def believe(
        run: ValueRun,
        _gathering: Gathering,
        _fronts: object,
        sums: SumsOfArenas,
        faults: dict[int, BlockFault],
        *,
        skipped: object = (),
    ) -> None:
        host = run.arena.host
        places = host.blocks_offset + run.slots.astype("int64") * host.slot_bytes
        own = sums.of(run.arena, run.arena.form.checksum)
        pair = (run.salt, run.salt)
        host.keep_sums(run.slots, own.sum_pairs(host.arena.bytes, places, run.keys, pair)[0])
        assert skipped is not faults

    patch.setattr(io, "_verify", believe)


def plant_early_reports(patch: pytest.MonkeyPatch) -> None:
    """A job that is cancelled is reported at once, also if a call of it is under way."""
    cancel = SharedTier.cancel

    def report(tier: SharedTier, ticket: int) -> None:
        cancel(tier, ticket)
        with tier.lock:
            job = tier.jobs.get(ticket)
            if job is not None:
                tier.refuse(job.job)

    patch.setattr(SharedTier, "cancel", report)


def plant_no_way_back(patch: pytest.MonkeyPatch) -> None:
    """A store that did not answer is not asked again."""
    switch_off = SharedTier.switch_off

    def for_good(tier: SharedTier, why: str) -> None:
        switch_off(tier, why)
        tier.broken = True

    patch.setattr(SharedTier, "switch_off", for_good)


def plant_believed_records(patch: pytest.MonkeyPatch) -> None:
    """Whatever record of the generation is read counts."""
    patch.setattr(KnownGenerations, "accepts", lambda *_: True)


def plant_forgetful_processes(patch: pytest.MonkeyPatch) -> None:
    """A store process does not listen to what its engines know."""
    patch.setattr(SharedTier, "expect", lambda *_: None)


def plant_resets_without_replicas(patch: pytest.MonkeyPatch) -> None:
    """A reset is confirmed though no replica has it."""
    replace = SharedKeeper._replace

    def forget_why(keeper: SharedKeeper, name: bytes, lineage: Lineage) -> str:
        replace(keeper, name, lineage)
        return ""

    patch.setattr(SharedKeeper, "_replace", forget_why)


PLANTED = [
    pytest.param(plant_blind_reads, SEEDS, {"bytes"}, id="sums not checked"),
    pytest.param(
        plant_early_reports, SEEDS[2:], {"operations", "reuse"}, id="reported before the end"
    ),
    pytest.param(plant_no_way_back, SEEDS, {"liveness"}, id="never asked again"),
    pytest.param(plant_believed_records, range(36, 63), {"reset"}, id="an old record is believed"),
    pytest.param(plant_forgetful_processes, range(45, 115), {"reset"}, id="engines are not heard"),
    pytest.param(plant_resets_without_replicas, SEEDS, {"reset"}, id="no replica is waited for"),
]
"""With seeds of which an early one finds it, to be quick."""


@pytest.mark.parametrize(("plant", "seeds", "checkers"), PLANTED)
def test_a_bug_planted_in_the_shared_tier_is_found(
    plant: Plant, seeds: range, checkers: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    found = first_failure(SharedWorld, seeds)

    assert found is not None
    assert found.checker in checkers, found
