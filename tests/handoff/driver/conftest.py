"""Two engines in one process: every driver over in-process transports, on a clock of the test's."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from lab.fixtures.handoff_machines import freeze
from lab.fixtures.handoff_pair import (
    LAYERS,
    SLOTS,
    Pool,
    Shape,
    directory_of,
    keys_of,
    layouts_of,
)
from lab.fixtures.inproc import InprocFabric
from lab.fixtures.switchboard import Switchboard
from penstock.handoff.driver.decode_rank import DecodeRankDriver
from penstock.handoff.driver.parts import ArrayReader, ArrayTaker
from penstock.handoff.driver.prefill_rank import PrefillRankDriver
from penstock.handoff.driver.schedulers import DecodeSchedulerDriver, PrefillSchedulerDriver
from penstock.handoff.protocol.settings import HandoffBounds, HandoffSettings
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from lab.fixtures.switchboard import InprocLines
    from penstock.handoff.driver.parts import PartForm, RouteParts
    from penstock.handoff.driver.party_driver import PartyDriver
    from penstock.handoff.driver.prefill_rank import LayerEvents
    from penstock.handoff.protocol.effects import HandoffEnded, Take


SMALL = HandoffSettings(
    bounds=HandoffBounds(
        berth_bytes=4096, berth_count=4, landing_bytes_max=1 << 20, retired_bytes_max=1 << 19
    )
)


class SyncTaker(ArrayTaker):
    """Has put a part away when `take` returns, so that the clock of a test is the only one."""

    def take(
        self,
        take: Take,
        route: RouteParts,
        form: PartForm,
        memory: NDArray[np.uint8],
        keys: Sequence[bytes],
        slots: Sequence[int],
    ) -> bool | None:
        return self._scatter_of(route, form).scatter(memory, keys, take.sums, slots)


class World:
    """All parties of two engines, in one process."""

    def __init__(
        self,
        shape: Shape | None = None,
        *,
        settings: HandoffSettings = SMALL,
        seed: int = 0,
        sources: dict[str, LayerEvents] | None = None,
        clock: Callable[[], float] | None = None,
        taker: type[ArrayTaker] = SyncTaker,
    ) -> None:
        self.shape = shape or Shape()
        self.taker = taker
        self.settings = settings
        self.rng = random.Random(seed)
        self.now = 100.0
        self.directory = directory_of(self.shape)
        self.board = Switchboard()
        self.fabric = InprocFabric()
        self.sources = sources or {}
        self.clock = clock or (lambda: self.now)
        self.pools = {name: Pool(layout) for name, layout in layouts_of(self.shape).items()}
        self.targets = {name: self.fabric.target() for name in self.directory.decode.rank_names}
        self.ended: dict[str, list[HandoffEnded]] = {"prefill": [], "decode": []}
        self.prefill = PrefillSchedulerDriver(self.directory, self._join("prefill"), **self._life())
        self.decode = DecodeSchedulerDriver(
            self.directory, self._join("decode"), part_bytes_min=0, **self._life()
        )
        self.sending = {n: self.start_source(n) for n in self.directory.prefill.rank_names}
        self.taking = {n: self.start_target(n) for n in self.directory.decode.rank_names}
        self.settle()

    def _join(self, name: str) -> InprocLines:
        return self.board.join(name, self.directory.peers_of(name))

    def _life(self) -> dict[str, Any]:
        return {
            "incarnation": self.rng.getrandbits(63) + 1,
            "settings": self.settings,
            "clock": self.clock,
        }

    def start_source(self, name: str) -> PrefillRankDriver:
        reader = ArrayReader(self.pools[name].tier, Algorithm.XXH3)
        return PrefillRankDriver(
            self.directory,
            name,
            self._join(name),
            reader=reader,
            connect=self.fabric.connect,
            progress=self.sources.get(name),
            **self._life(),
        )

    def start_target(self, name: str) -> DecodeRankDriver:
        taker = self.taker(self.pools[name].tier, Algorithm.XXH3)
        return DecodeRankDriver(
            self.directory,
            name,
            self._join(name),
            taker=taker,
            target=self.targets[name],
            **self._life(),
        )

    @property
    def parties(self) -> dict[str, PartyDriver[Any]]:
        return {
            "prefill": self.prefill,
            "decode": self.decode,
            **self.sending,
            **self.taking,
        }

    def settle(self, *, rounds: int = 200, without: Sequence[str] = ()) -> None:
        """Steps every party, in any order, until nobody has anything to do."""
        quiet = 0
        for _ in range(rounds):
            before = self._activity()
            names = [name for name in self.parties if name not in without]
            self.rng.shuffle(names)
            for name in names:
                ended = self.parties[name].step()
                if ended:
                    self.ended[name].extend(ended)
            quiet = quiet + 1 if self._activity() == before else 0
            if quiet == 3:
                return
        raise AssertionError("the parties do not come to rest")

    def _activity(self) -> object:
        return [
            (sum(d.machine.counts.values()), len(d.machine.timers), d.unsent, freeze(d.machine))
            for d in self.parties.values()
        ]

    def pass_time(
        self, seconds: float, *, step_s: float = 0.1, without: Sequence[str] = ()
    ) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += step_s
            self.settle(without=without)

    # Requests.

    def submit(
        self,
        request: str,
        token_count: int,
        *,
        cached_tokens: int = 0,
        first: int = 0,
        scattered: bool = False,
    ) -> tuple[list[int], list[int]]:
        """Sends a request to both engines; returns its slots on both sides, from the first on."""
        plan = self.directory.plan
        keys = keys_of(request, token_count, plan.source_tokens)
        there = [first + n for n in reversed(range(len(keys)))]
        here = [first + n for n in reversed(range(-(-token_count // plan.target_tokens)))]
        assert max(*there, *here) < SLOTS
        if scattered:
            there, here = (self.rng.sample(range(SLOTS), len(each)) for each in (there, here))
        self.decode.submit(
            request,
            token_count=token_count,
            cached_tokens=cached_tokens,
            slots=dict.fromkeys(self.taking, here[cached_tokens // plan.target_tokens :]),
            keys=keys,
        )
        self.prefill.submit(request)
        for rank in self.sending.values():
            rank.admit(request, token_count=token_count, slots=there, keys=keys)
        return there, here

    def compute(
        self, request: str, slots: list[int], tokens: range, layers: range = range(LAYERS)
    ) -> None:
        for name, rank in self.sending.items():
            self.pools[name].compute(request, slots, tokens, layers)
            for layer in layers:
                rank.progress(request, layer=layer, tokens=tokens.stop)

    def hand_over(self, request: str, token_count: int, layers: range = range(LAYERS)) -> list[int]:
        """Has some layers of a request handed over, all if not said; returns its slots there."""
        there, here = self.submit(request, token_count)
        self.settle()
        self.compute(request, there, range(token_count), layers)
        if layers.stop == LAYERS:
            self.prefill.first_token(request, (1,))
        self.settle()
        return here

    def is_right(self, request: str, slots: list[int], tokens: range) -> bool:
        return all(self.pools[n].holds(request, slots, tokens) for n in self.taking)

    def outcomes(self, side: str) -> dict[str, str]:
        return {each.handoff: each.outcome.value for each in self.ended[side]}


@pytest.fixture
def world() -> World:
    return World()
