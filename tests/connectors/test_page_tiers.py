"""The tiers below an engine that hands over hashes and pages: a real cache, but no SGLang."""

from __future__ import annotations

import hashlib
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from penstock.connectors.base.keys import PageKeys
from penstock.connectors.base.pages import SCRATCH_PAGE, PageTiers
from penstock.connectors.base.statistics import BlockBytes, TransferCounts

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS, PAGES, HOST = 16, 64, 32
TEXT = f"""
version = 1
model.name = "toy"
cache.block_tokens = {TOKENS}
cache.load_tokens_min = 1
"""
TIER = """
[[tiers]]
name = "host"
kind = "host"
blocks = {blocks}
{more}
"""


class Engine:
    """Device pages with bytes that nobody else has, and the tiers below them."""

    def __init__(self, *, verifies: bool = False, blocks: int = HOST, more: str = "") -> None:
        self.memory = np.zeros((PAGES, TOKENS * 8), dtype=np.uint8)
        config = penstock.parse_config(TEXT + TIER.format(blocks=blocks, more=more))
        self.counts = TransferCounts(BlockBytes(loaded=TOKENS * 8, saved=TOKENS * 8))
        offload = penstock.open_offload(config, kv=self.memory)
        self.tiers = PageTiers(
            config, offload, self.counts, page_bytes=TOKENS * 8, verifies=verifies
        )

    def save(self, hashes: list[str], first: int) -> bool:
        """Computes pages, saves them, and takes what became of it."""
        pages = list(range(first, first + len(hashes)))
        for each, page in zip(hashes, pages, strict=True):
            self.memory[page] = content(each)
        self.tiers.save(hashes, pages)
        while not self.tiers.saves_ended():
            self.tiers.step()
        return self.tiers.take_saved()

    def damage(self, at: int) -> None:
        """Flips a bit of the host block that was written as the number `at`."""
        host = self.tiers.offload._driver.links.executor.stores[1]  # type: ignore[attr-defined]
        (buffer,) = host.blocks([at]).buffers.values()
        plane = host.layout.groups[0].layers[0].planes[0]
        buffer[plane.offset + at * plane.block_stride] ^= 1

    def counted(self) -> Any:
        return self.counts.counters.take()

    def close(self) -> None:
        self.tiers.close()


def hashes_of(name: str, count: int) -> list[str]:
    return [hashlib.sha256(f"{name} {at}".encode()).hexdigest() for at in range(count)]


def content(page_hash: str) -> Any:
    return np.frombuffer(bytes.fromhex(page_hash) * (TOKENS * 8 // 32), dtype=np.uint8)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with closing(Engine()) as made:
        yield made


ONE = hashes_of("one", 6)
OTHER = hashes_of("other", 6)


def test_what_was_saved_is_found_and_loaded_into_other_pages(engine: Engine) -> None:
    assert engine.tiers.find("first", ONE) == 0
    assert engine.save(ONE, 1)

    assert engine.tiers.find("again", ONE) == 6
    assert engine.tiers.load("again", ONE, [20, 22, 24, 26, 28, 30])

    for page_hash, page in zip(ONE, range(20, 32, 2), strict=True):
        assert (engine.memory[page] == content(page_hash)).all()
    counted = engine.counted()
    assert counted["tokens_loaded"] == counted["tokens_found"] == 6 * TOKENS
    assert counted["bytes_loaded"] == counted["bytes_saved"] == 6 * TOKENS * 8


def test_the_tail_of_a_prompt_is_found_without_what_comes_before_it(engine: Engine) -> None:
    engine.save(ONE, 1)

    assert engine.tiers.find("tail", ONE[4:]) == 2
    assert engine.tiers.find("gap", [ONE[0], OTHER[0], ONE[2]]) == 1


def test_a_damaged_page_makes_load_say_no_and_is_not_found_again(engine: Engine) -> None:
    engine.save(ONE, 1)
    engine.damage(2)

    assert engine.tiers.find("damaged", ONE) == 6
    assert not engine.tiers.load("damaged", ONE, list(range(20, 26)))

    assert engine.tiers.find("later", ONE) == 2
    assert engine.counted()["loads_failed"] == 1


def test_where_ranks_must_agree_only_what_was_verified_counts() -> None:
    with closing(Engine(verifies=True)) as engine:
        engine.save(ONE, 1)
        engine.damage(2)
        untouched = engine.memory[1:].copy()

        assert engine.tiers.find("damaged", ONE) == 2
        assert engine.tiers.find("damaged", ONE) == 2

        assert SCRATCH_PAGE == 0
        assert (engine.memory[1:] == untouched).all()
        loaded = engine.counted()["bytes_loaded"]
        assert engine.tiers.load("damaged", ONE[:2], [20, 21])
        assert loaded == 2 * TOKENS * 8, "the second question reads nothing again"


def test_saves_are_reported_in_the_order_of_the_calls(engine: Engine) -> None:
    engine.tiers.save(ONE, list(range(1, 7)))
    engine.tiers.save(OTHER, list(range(7, 13)))
    assert engine.tiers.saves_ended() == 0

    while engine.tiers.saves_ended() < 2:
        engine.tiers.step()

    assert engine.tiers.take_saved()
    assert engine.tiers.take_saved()
    assert engine.tiers.saves_ended() == 0


def test_a_save_that_has_no_room_says_so_and_the_engine_may_offer_it_again() -> None:
    with closing(Engine(blocks=4)) as engine:
        assert not engine.save(ONE, 1)

        assert engine.counted()["blocks_dropped_room"] == 2


def test_a_tier_that_wants_to_see_pages_twice_gets_them_offered_twice() -> None:
    with closing(Engine(more='write = "selective"\nhits = 2')) as engine:
        assert not engine.save(ONE, 1)
        assert engine.save(ONE, 1)

        assert engine.tiers.find("again", ONE) == 6


def test_after_a_reset_nothing_is_found_and_no_save_is_under_way(engine: Engine) -> None:
    engine.save(ONE, 1)
    engine.tiers.save(OTHER, list(range(7, 13)))

    engine.tiers.reset("flushed")

    assert engine.tiers.saves_ended() == 0
    assert engine.tiers.find("again", ONE) == 0
    assert engine.tiers.find("again", OTHER) == 0
    assert engine.save(ONE, 1)
    assert engine.tiers.find("again", ONE) == 6


def test_answers_are_remembered_for_a_bounded_number_of_pages(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.connectors.base.pages.ASKED_KEPT", 20)
    engine.save(ONE, 1)

    for number in range(8):
        assert engine.tiers.find(f"request {number}", ONE) == 6

    assert len(engine.tiers._asked) == 3
    assert engine.tiers.load("request 0", ONE, list(range(20, 26))), "of a forgotten one, too"


def test_a_key_names_model_weights_dtype_and_rank_beside_the_hash_of_the_engine() -> None:
    def keys_of(toml: str = "", part: str = "", since: str = "") -> bytes:
        config = penstock.parse_config(TEXT + toml + TIER.format(blocks=1, more=""))
        return PageKeys(config, part=part, since=since).of(ONE)[0]

    found = {
        "plain": keys_of(),
        "weights": keys_of('model.weights_version = "v2"'),
        "dtype": keys_of('model.kv_dtype = "float32"'),
        "rank": keys_of(part="rank 0 of 2"),
        "other rank": keys_of(part="rank 1 of 2"),
        "flushed": keys_of(since="now"),
    }

    assert len(set(found.values())) == len(found)
    assert keys_of() == found["plain"]
