"""An engine with a disk below its host memory; as a program, one that saves until it is killed.

python -m tests.runtime.stored_engine FOLDER FIRST [SAVED…]

It finds the prompts SAVED, and then prints each prompt that is on the disk, from FIRST on.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.machine.statistics import StoreStatistics

BLOCK_TOKENS = 4
SOON_S = 600.0
GIB = 0.03
TOML = """
version = 1
[model]
name = "m"
weights_version = "{weights}"
[cache]
block_tokens = 4
blocks = 32
load_gate = "off"
[[tiers]]
name = "host"
kind = "host"
blocks = 16
[[tiers]]
name = "disk"
kind = "disk"
path = "{path}"
gib = 0.03
"""


class Engine:
    """An engine whose blocks hold what their tokens say, with a cache over host memory and disk."""

    def __init__(
        self,
        path: Path,
        *,
        weights: str = "v1",
        key_file: Path | str = "",
        gib: float = GIB,
        wait_for_tiers_s: float = 0,
    ) -> None:
        self.folder = path
        self.kv = np.zeros((32, 256), dtype=np.int64)
        text = TOML.format(path=path, weights=weights) + f'key_file = "{key_file}"\n'
        text = text.replace(f"gib = {GIB}", f"gib = {gib}")
        config = penstock.parse_config(text)
        self.cache = penstock.open(config, kv=self.kv, wait_for_tiers_s=wait_for_tiers_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close(SOON_S)

    def run_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON_S
        while not done():
            assert time.monotonic() < deadline, self.cache.health()
            self.cache.wait(deadline)
            self.cache.step()

    def wait_until_on(self) -> None:
        self.run_until(lambda: self.cache.health().ok)

    def answer(self, tokens: list[int]) -> int:
        """Computes what is not cached; returns how many tokens were. Blocks are checked."""
        with self.cache.acquire(tokens) as lease:
            self.run_until(lambda: lease.state is not penstock.LeaseState.LOADING)
            cached = lease.token_count
            for place, slot in enumerate(lease.block_table.tolist()):
                content = tokens[: (place + 1) * BLOCK_TOKENS]
                expected = np.arange(256) + hash(tuple(content))
                if place * BLOCK_TOKENS < cached:
                    assert (self.kv[slot] == expected).all()
                else:
                    self.kv[slot] = expected
            lease.commit_prompt(len(tokens))
        return cached

    def save(self, tokens: list[int]) -> int:
        """The same, and waits until every copy has ended."""
        cached = self.answer(tokens)
        self.run_until(lambda: not self.cache.busy)
        return cached


def prompt(number: int, blocks: int = 8) -> list[int]:
    return [1000 * number + each for each in range(blocks * BLOCK_TOKENS)]


def all_but_the_last_block(tokens: list[int]) -> int:
    """What of a prompt can be found: the last token is always computed."""
    return (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def on_disk(engine: Engine) -> int:
    return engine.cache.statistics().tiers[-1].ready


def said(engine: Engine) -> StoreStatistics:
    store = engine.cache.statistics().tiers[-1].store
    assert store is not None
    return store


def processes_of(folder: Path) -> set[int]:
    """The store processes of a folder, by their command lines."""
    found = set()
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with suppress(OSError):
                words = (each / "cmdline").read_bytes().split(b"\0")
                if b"penstock.store" in words and any(
                    str(folder).encode() in word for word in words
                ):
                    found.add(int(each.name))
    return found


def process_of(folder: Path) -> int:
    """The store process of a folder."""
    [pid] = processes_of(folder)
    return pid


def store_pid(engine: Engine) -> int:
    return process_of(engine.folder)


def check(engine: Engine, saved: list[int]) -> None:
    """Finds all prompts that an engine before this one has saved."""
    engine.wait_until_on()
    # Blocks are listed in pages, the newest first.
    engine.run_until(lambda: said(engine).recovered == 1 and on_disk(engine) == said(engine).blocks)
    for number in saved:
        assert engine.save(prompt(number)) == all_but_the_last_block(prompt(number)), number
    engine.cache.audit()


def main(folder: Path, first: int, before: list[int]) -> None:
    with Engine(folder) as engine:
        check(engine, before)
        for number in count(first):
            engine.save(prompt(number))
            if on_disk(engine) and engine.cache.health().ok:
                os.write(sys.stdout.fileno(), b"%d\n" % number)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(each) for each in sys.argv[3:]])
