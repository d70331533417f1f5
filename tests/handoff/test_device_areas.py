"""Handoffs whose areas lie in memory of a device: files in memory stand for it (`FileDevice`)."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.file_device import FileDevice
from penstock.handoff.handoff import Opening
from tests.handoff.conftest import LAYERS, Engines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.handoff.driver.decode_rank import DecodeRankDriver
    from penstock.transport.shared_memory import SharedArea

    Open = Callable[..., "Pair"]

AREA_BYTES = 4 * 4096
PROMPT = [5, 3, 8, 1, 2, 9, 4]


class Pair(Engines):
    """Both engines with a device each, which map each other's memory."""

    def __init__(self, stack: ExitStack, devices: dict[str, FileDevice]) -> None:
        self.devices = devices
        super().__init__(stack, transport="gpu")

    @property
    def rank(self) -> DecodeRankDriver:
        """The decode engine's rank."""
        rank: DecodeRankDriver = self.decode._drivers[0]
        return rank

    @property
    def areas(self) -> tuple[SharedArea, ...]:
        """Its areas that are open."""
        areas: tuple[SharedArea, ...] = self.rank._target.open_areas
        return areas

    def hand_over(self, name: str) -> None:
        """Hands a prompt over, and looks whether its KV is right."""
        self.results = {"prefill": [], "decode": []}
        for blocks in self.target:
            blocks[:] = 0
        self.decode.claim(name, PROMPT, slots=[3, 1])
        self.prefill.offer(name, PROMPT, slots=[2, 6])
        self.compute(name, PROMPT, [2, 6])
        self.finish()
        assert [result.delivered for result in self.results["decode"]] == [True]
        for layer in range(LAYERS):
            there = self.source[layer][[2, 6]].reshape(-1, 2)[: len(PROMPT)]
            here = self.target[layer][[3, 1]].reshape(-1, 2)[: len(PROMPT)]
            np.testing.assert_array_equal(here, there)

    def suspect(self) -> None:
        """The decode rank takes the prefill rank for silent."""
        rank = self.rank
        rank._carry_out(rank.machine.suspect("prefill/0", rank._clock()))


@pytest.fixture(name="open_pair")
def make_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    with ExitStack() as stack:

        def open_pair(**devices: FileDevice) -> Pair:
            found = {"prefill": FileDevice(), "decode": FileDevice(), **devices}
            monkeypatch.setattr(Opening, "device_memory", lambda self: found[self.engine.name])
            return Pair(stack, found)

        yield open_pair


def test_kv_lands_in_memory_of_the_device_and_is_counted(open_pair: Open) -> None:
    pair = open_pair()

    pair.hand_over("a")
    pair.hand_over("b")

    assert [area.on_device for area in pair.areas] == [True]
    assert pair.decode.statistics().landing_bytes == AREA_BYTES
    assert [len(device.ranges) for device in pair.devices.values()] == [1, 1]
    pair.prefill.close()
    pair.decode.close()
    gc.collect()
    assert [device.ranges for device in pair.devices.values()] == [[], []]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_kv_lands_on_the_host_where_the_device_cannot_be_shared(
    side: str, open_pair: Open, caplog: pytest.LogCaptureFixture
) -> None:
    pair = open_pair(**{side: FileDevice(makes="full", maps="no way")})

    pair.hand_over("a")

    assert [area.on_device for area in pair.areas] == [False]
    why = {"prefill": "no way", "decode": "full"}[side]
    assert "landing area is in host memory: peer=prefill/0" in caplog.text
    assert f"cause={why}" in caplog.text
    assert [device.ranges for device in pair.devices.values()] == [[], []]


def test_an_area_that_was_retired_is_freed_while_its_writer_lives(open_pair: Open) -> None:
    """Not so an arena: its writer would have to die."""
    pair = open_pair()
    pair.hand_over("a")
    (old,) = pair.areas

    pair.suspect()
    held = pair.rank._target.retired_bytes
    pair.until(lambda: pair.decode.connected)
    pair.hand_over("b")
    pair.until(lambda: not pair.rank.machine.retired)

    assert held == AREA_BYTES
    assert [area.on_device for area in pair.areas] == [True]
    assert pair.areas != (old,)
    assert pair.decode.statistics().landing_bytes == AREA_BYTES
    assert [len(device.ranges) for device in pair.devices.values()] == [1, 1]


def test_a_late_write_into_a_berth_in_use_is_asked_for_again(open_pair: Open) -> None:
    pair = open_pair()
    pair.hand_over("a")
    (area,) = pair.areas
    begin, spoiled = pair.rank._begin, []

    def spoil_first(take):  # noqa: ANN001, ANN202
        if not spoiled:
            spoiled.append(take)
            area.memory[take.berth * 4096] ^= 1  # type: ignore[index]
        return begin(take)

    pair.rank._begin = spoil_first  # type: ignore[method-assign]
    pair.hand_over("b")

    assert len(spoiled) == 1
    assert pair.decode.statistics().refused == {}
