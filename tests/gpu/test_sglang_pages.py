"""SGLang's pages on a GPU, without SGLang: what the linker does with its pools and its streams."""

from __future__ import annotations

import hashlib
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import torch

import penstock
from penstock.connectors.base.pages import PageTiers
from penstock.connectors.base.statistics import TransferCounts
from penstock.connectors.sglang import pools

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu

PAGE, PAGES, LAYERS, HEADS, CHANNELS = 64, 12, 3, 2, 64
LONG_CYCLES = 100_000_000
"""About 50 ms."""
TEXT = """
version = 1
model.name = "toy"
cache.load_tokens_min = 1
[[tiers]]
name = "host"
kind = "host"
blocks = 32
"""
HASHES = [hashlib.sha256(bytes([at])).hexdigest() for at in range(3)]


class MHATokenToKVPool:
    """What the linker reads of SGLang's pool of this name."""

    kv_cache_layout = "nhd"
    dtype = store_dtype = torch.bfloat16

    def __init__(self) -> None:
        self.k_buffer = [self._buffer() for _ in range(LAYERS)]
        self.v_buffer = [self._buffer() for _ in range(LAYERS)]

    def _buffer(self) -> torch.Tensor:
        return torch.randn((PAGES + 1) * PAGE, HEADS, CHANNELS, device="cuda").to(torch.bfloat16)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [*self.k_buffer, *self.v_buffer]


class Rig:
    """A pool, the tiers below it, and the stream in which SGLang computes."""

    def __init__(self) -> None:
        self.pool = MHATokenToKVPool()
        config = pools.engine_of(self.pool, PAGE).fit_config(penstock.parse_config(TEXT))
        tier = pools.tier_of(self.pool, PAGE)
        self.tiers = PageTiers(
            config,
            penstock.open_offload(config, kv=tier),
            TransferCounts(),
            page_bytes=tier.layout.block_bytes,
        )
        self.stream = torch.cuda.Stream()
        torch.cuda.synchronize()

    def compute(self, page: int, value: float) -> None:
        """A long step that ends by writing a page in all layers; it is only submitted."""
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(LONG_CYCLES)
            for buffer in self.pool.buffers:
                buffer[page * PAGE : (page + 1) * PAGE].fill_(value)
        steps = self.tiers.offload.steps
        assert steps is not None
        steps.submitted(self.stream.cuda_stream)

    def save(self, hashes: list[str], pages: list[int]) -> None:
        self.tiers.save(hashes, pages)
        give_up = time.monotonic() + 30.0
        while not self.tiers.saves_ended():
            assert time.monotonic() < give_up, "the save does not end"
            self.tiers.step()
        assert self.tiers.take_saved()

    def page(self, number: int) -> list[torch.Tensor]:
        at = slice(number * PAGE, (number + 1) * PAGE)
        return [buffer[at].clone() for buffer in self.pool.buffers]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    with closing(made.tiers):
        yield made


def same(some: list[torch.Tensor], others: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_a_load_has_written_all_layers_when_it_says_yes(rig: Rig) -> None:
    kept = [rig.page(number) for number in (1, 2, 3)]
    rig.save(HASHES, [1, 2, 3])

    assert rig.tiers.find("request", HASHES) == len(HASHES)
    assert rig.tiers.load("request", HASHES, [9, 7, 8])

    # In a stream that waits for nothing, as SGLang's.
    with torch.cuda.stream(rig.stream):
        loaded = [rig.page(number) for number in (9, 7, 8)]
    torch.cuda.synchronize()
    assert all(same(one, other) for one, other in zip(loaded, kept, strict=True))


def test_a_save_has_what_a_submitted_step_writes(rig: Rig) -> None:
    rig.compute(1, 2.0)
    rig.save(HASHES[:1], [1])
    assert rig.tiers.load("request", HASHES[:1], [5])
    assert all(bool((each == 2.0).all()) for each in rig.page(5))


def test_a_load_is_not_overwritten_by_a_step_that_was_submitted_before(rig: Rig) -> None:
    kept = rig.page(1)
    rig.save(HASHES[:1], [1])
    rig.compute(5, 3.0)
    assert rig.tiers.load("request", HASHES[:1], [5])
    torch.cuda.synchronize()
    assert same(rig.page(5), kept)


def test_a_damaged_page_is_not_loaded(rig: Rig) -> None:
    rig.save(HASHES, [1, 2, 3])
    host = rig.tiers.offload._driver.links.executor.stores[1]  # type: ignore[attr-defined]
    (buffer,) = host.blocks([1]).buffers.values()
    plane = host.layout.groups[0].layers[0].planes[0]
    buffer[plane.offset + plane.block_stride] ^= 1

    assert not rig.tiers.load("request", HASHES, [9, 7, 8])


def test_the_numbers_of_pages_come_while_nobody_waits() -> None:
    tokens = torch.arange(3 * PAGE, 6 * PAGE, device="cuda")
    # The first call loads kernels and gets memory, which may wait for the device.
    assert pools.PageNumbers(tokens, PAGE).wait() == [3, 4, 5]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG_CYCLES)
        numbers = pools.PageNumbers(tokens, PAGE)
        assert not numbers.ready
        assert numbers.wait() == [3, 4, 5]
        assert numbers.ready
