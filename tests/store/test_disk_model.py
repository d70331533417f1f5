"""Random saves, loads, cancels, voids and restarts, beside a model that remembers everything.

The tier may forget (room, cancels); what it delivers must be what was saved, what it was told to
void must stay away, and what it reported as saved must be there until it reports it as gone.
"""

from __future__ import annotations

import select
import time
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.store_tier_suite import (
    LAYOUTS,
    LOAD_SALT,
    SAVE_SALT,
    WAIT_S,
    StoreRig,
    wait_until_recovered,
)
from penstock.cache.operations import BlockFault
from penstock.store.base import LoadJob, SaveJob, Space
from penstock.store.disk.tier import DiskTier
from penstock.testing import failing_seed

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.store.base import EndedJob
    from penstock.vocabulary.keys import Key

NAMES = [b"one space of all", b"another one here"]
KEYS = [bytes([number]) * 16 for number in range(60)]
SLOTS_A_JOB = 8


class Model:
    """What was saved, under which identity; contents follow from the identity."""

    def __init__(self, folder: Path, random: Random, kind: str, *, direct: bool) -> None:
        self.random, self.kind, self.direct, self.folder = random, kind, direct, folder
        self.there: set[tuple[Space, Key]] = set()
        """Reported as saved, and not as gone since."""
        self.ever: set[tuple[Space, Key]] = set()
        """That a save was begun for, whether it was cancelled or not."""
        self.jobs: dict[int, SaveJob | LoadJob] = {}
        self.unsure: dict[int, set[tuple[Space, Key]]] = {}
        """By job in hand, what was given up meanwhile."""
        self.ticket = 0
        self.tier = self.open()

    def open(self) -> DiskTier:
        size = 40 * (LAYOUTS[self.kind].block_bytes // 4096 * 4096 + 12288)
        tier = DiskTier(self.folder, size, direct=self.direct)
        self.rig = StoreRig(tier, LAYOUTS[self.kind])
        self.free = [list(range(first, first + SLOTS_A_JOB)) for first in range(0, 48, SLOTS_A_JOB)]
        return tier

    def content(self, space: Space, key: Key) -> np.ndarray:
        seed = [*space.name, space.generation, key[0]]
        size = self.rig.host.layout.block_bytes
        return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)

    def space(self) -> Space:
        name = self.random.choice(NAMES)
        return Space(name, self.tier.generation(name))

    def draw_keys(self) -> list[Key]:
        first = self.random.randrange(len(KEYS))
        count = self.random.randint(1, SLOTS_A_JOB)
        chain = (KEYS + KEYS)[first : first + count]
        return chain if self.random.random() < 0.8 else self.random.sample(KEYS, count)

    def save(self) -> None:
        if not self.free:
            return self.settle()
        space, keys, slots = self.space(), self.draw_keys(), self.free.pop()
        taken = slots[: len(keys)]
        content = np.stack([self.content(space, key) for key in keys])
        self.rig.blocks()[taken] = content
        sums = self.rig.sums(content, keys, SAVE_SALT)
        self.rig.host.keep_sums(np.array(taken, np.int32), sums)
        self.ever |= {(space, key) for key in keys}
        arena, parents = self.rig.arena, [None] * len(keys)
        self.start(SaveJob(self.next(), arena, space, keys, parents, slots, SAVE_SALT))
        return None

    def load(self) -> None:
        if not self.free:
            return self.settle()
        space, keys, slots = self.space(), self.draw_keys(), self.free.pop()
        self.rig.blocks()[slots] = 0
        job = LoadJob(self.next(), self.rig.arena, space, keys, slots, LOAD_SALT)
        self.start(job)
        return None

    def next(self) -> int:
        self.ticket += 1
        return self.ticket

    def start(self, job: SaveJob | LoadJob) -> None:
        self.jobs[job.ticket] = job
        (self.tier.save if isinstance(job, SaveJob) else self.tier.load)(job)  # type: ignore[arg-type]

    def cancel(self) -> None:
        if self.jobs:
            self.tier.cancel(self.random.choice(list(self.jobs)))

    def settle(self) -> None:
        """Waits for one report at least, if there is any to come."""
        deadline = time.monotonic() + WAIT_S
        before = len(self.jobs)
        while self.jobs and len(self.jobs) == before:
            assert time.monotonic() < deadline, self.tier.state()
            self.take_news(WAIT_S)

    def settle_all(self) -> None:
        while self.jobs:
            self.settle()
        self.take_news(0)

    def take_news(self, timeout_s: float) -> None:
        select.select([self.tier.descriptor], [], [], timeout_s)
        ended = self.tier.collect()
        gone = self.tier.take_gone()
        self.tier.state()
        for each in ended:
            self.check(each)
        lost = {(each.space, key) for each in gone for key in each.keys}
        self.there -= lost
        # A save that ended before and is collected next says nothing about these any more.
        for ticket in self.jobs:
            self.unsure.setdefault(ticket, set()).update(lost)

    def check(self, ended: EndedJob) -> None:
        job = self.jobs.pop(ended.ticket)
        self.free.append(list(job.slots))
        faults = dict(ended.faults)
        for position, key in enumerate(job.keys):
            identity = (job.space, key)
            if position in faults:
                assert faults[position] is not BlockFault.CORRUPT, identity
            elif isinstance(job, SaveJob):
                if identity not in self.unsure.get(ended.ticket, ()):
                    self.there.add(identity)
            else:
                assert identity in self.ever, identity
                slot = job.slots[position]
                expected = self.content(*identity)
                np.testing.assert_array_equal(self.rig.blocks()[slot], expected)
                sums = self.rig.sums(expected[np.newaxis], [key], LOAD_SALT)
                found = self.rig.host.sums(np.array([slot], np.int32))
                np.testing.assert_array_equal(found, sums)

    def void(self) -> None:
        self.settle_all()
        name = self.random.choice(NAMES)
        before = self.tier.generation(name)
        assert self.tier.void(name) > before

    def reopen(self) -> None:
        self.settle_all()
        self.tier.close(deadline=time.monotonic() + WAIT_S)
        self.rig.host.close()
        self.tier = self.open()
        if self.random.random() < 0.5:
            wait_until_recovered(self.tier)
            self.require_what_is_there()

    def require_what_is_there(self) -> None:
        for name in NAMES:
            space = Space(name, self.tier.generation(name))
            known = [key for key in KEYS if (space, key) in self.there]
            assert all(self.rig.find(known, space=space)), space
            unknown = [key for key in KEYS if (space, key) not in self.ever]
            assert not any(self.rig.find(unknown, space=space)), space
            paged = {key for page in self.rig.pages(7, space=space) for key in page.keys}
            assert {*known} <= paged <= {key for key in KEYS if (space, key) in self.ever}


def run_history(folder: Path, seed: int, *, steps: int) -> None:
    random = Random(seed)
    kinds = ["whole pages", "less than a page", "not a multiple of a page"]
    model = Model(folder, random, kinds[seed % 3], direct=seed % 2 == 0)
    actions = [model.save, model.load, model.cancel, model.settle, model.void, model.reopen]
    for _ in range(steps):
        random.choices(actions, weights=[10, 8, 3, 6, 0.3, 0.6])[0]()
    model.settle_all()
    wait_until_recovered(model.tier)
    model.settle_all()
    model.require_what_is_there()
    model.tier.close(deadline=time.monotonic() + WAIT_S)
    model.rig.host.close()


@pytest.mark.parametrize("seed", range(12))
def test_the_tier_delivers_what_the_model_remembers(tmp_path: Path, seed: int) -> None:
    with failing_seed(seed):
        run_history(tmp_path / "tier", seed, steps=120)


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 400, 30))
def test_the_tier_delivers_what_the_model_remembers_for_long(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 30):
        with failing_seed(seed):
            run_history(tmp_path / f"tier-{seed}", seed, steps=400)
