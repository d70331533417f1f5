"""Landing areas in GPU memory: two processes, late writes, deaths, and what cannot be mapped."""

from __future__ import annotations

import gc
import random
import time
from typing import TYPE_CHECKING

import pytest
import torch

import penstock
from lab.bench.handoff_cuda import LAYERS, CudaPair
from penstock.errors import UnavailableError
from penstock.handoff.driver.device_parts import DeviceReader, DeviceTaker
from penstock.handoff.driver.parts import RouteParts
from penstock.handoff.protocol.effects import Take
from penstock.handoff.protocol.grid import cut
from penstock.handoff.protocol.identity import Life, WriteId
from penstock.movers.cuda import landing
from penstock.movers.cuda.landing import DeviceBytes, LandingMemory
from penstock.testing.data_transport_suite import DataTransportSuite
from penstock.testing.writer_process import PeerProcess, ProcessWriter, drawn_bytes, peer_process
from penstock.transport.remote import Fenced, NotYet, Span, WriteDone, WriteFailed
from penstock.transport.shared_memory import SharedTarget, connect_shared
from penstock.transport.unix_sockets import private_folder, socket_path
from penstock.transport.waiting import wait_readable
from penstock.vocabulary.form import Form
from penstock.vocabulary.reshard import plan_reshard
from tests.gpu import landing_peers

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from penstock.handoff.driver.parts import PartForm
    from penstock.testing.writer_process import SuiteWriter
    from penstock.tiers.tensors import TensorTier
    from penstock.transport.remote import Area, Target
    from penstock.transport.shared_memory import SharedArea

pytestmark = pytest.mark.gpu

SIZE = 8 << 20
SOON_S = 120.0


@pytest.fixture(autouse=True)
def context() -> None:
    """A context of this process, before anything is mapped."""
    torch.zeros(1, device="cuda")


@pytest.fixture(name="target")
def make_target() -> Iterator[SharedTarget]:
    target = SharedTarget(device=LandingMemory(0))
    yield target
    target.close()


def bytes_of(memory: object) -> NDArray[np.uint8]:
    """What lies on the device."""
    found: NDArray[np.uint8] = torch.as_tensor(memory, device="cuda").cpu().numpy()
    return found


def let_in(target: SharedTarget, peer: PeerProcess) -> None:
    assert wait_readable(target.descriptor, time.monotonic() + SOON_S)
    while not any(area.connection for area in target.open_areas):
        target.notices()
    assert peer.hear() == "writing"


class TestGpuAreas(DataTransportSuite):
    """The writer is a process of its own on the same GPU, and is ended by SIGKILL."""

    def make_target(self) -> Target:
        return SharedTarget(device=LandingMemory(0))

    def make_writer(self) -> SuiteWriter:
        return ProcessWriter(program=landing_peers.program("writer"))

    def seen(self, area: Area) -> NDArray[np.uint8]:
        assert isinstance(area.memory, DeviceBytes), "the GPU cannot share memory here"
        return bytes_of(area.memory)


def test_two_processes_see_the_same_bytes_and_the_last_one_frees_them(
    target: SharedTarget,
) -> None:
    size = 512 << 20
    free_before, _ = torch.cuda.mem_get_info()
    area = target.open_area("rank 0", size)
    taken = free_before - torch.cuda.mem_get_info()[0]
    with peer_process(landing_peers.program("stray"), area.description.hex()) as peer:
        let_in(target, peer)
        area.memory[:] = 9
        peer.tell(str(size - 1))
        assert peer.hear() == "written"
        found = bytes_of(area.memory[size - 2 :]).tolist()
        held_with = free_before - torch.cuda.mem_get_info()[0]
        area.hang_up()  # As a writer that has left does, but this one keeps the memory.
        target.retire(area)
        target.free(area)
        held = held_with - (free_before - torch.cuda.mem_get_info()[0])

    deadline = time.monotonic() + SOON_S
    while free_before - torch.cuda.mem_get_info()[0] > size // 2 and time.monotonic() < deadline:
        wait_readable(target.descriptor, time.monotonic() + 0.05)
    assert taken >= size
    assert found == [9, 255 - 9]
    assert held < size // 2, "the owner's unmapping has freed what the writer still maps"
    assert free_before - torch.cuda.mem_get_info()[0] <= size // 2


@pytest.mark.parametrize("seed", range(4))
def test_a_writer_that_is_killed_while_its_kernels_write_hurts_nobody(
    target: SharedTarget, seed: int
) -> None:
    chance = random.Random(seed)
    area = target.open_area("rank 0", SIZE)
    with peer_process(landing_peers.program("scribbler"), area.description.hex()) as peer:
        let_in(target, peer)
        wait_readable(area.pidfd or -1, time.monotonic() + chance.uniform(0.0, 0.1))
        target.retire(area)
        alive = target.fence(area)
        fd = target.fence_descriptor(area)
        assert fd is not None
        others = [target.open_area(f"rank {number}", SIZE) for number in (1, 2)]
        for other in others:
            other.memory[:] = 200

        peer.kill()
        dead = wait_readable(fd, time.monotonic() + SOON_S)
        fenced = target.fence(area)
        target.free(area)
        again = target.open_area("rank 3", SIZE)
        again.memory[:] = 201

        assert isinstance(alive, NotYet)
        assert dead
        assert fenced == Fenced()
        assert all((bytes_of(other.memory) == 200).all() for other in others)
        assert (bytes_of(again.memory) == 201).all()


def test_a_writer_that_says_it_has_left_and_goes_on_reaches_nothing_in_use(
    target: SharedTarget,
) -> None:
    """The memory of an area is never that of another: the late kernels write to what nobody has."""
    area = target.open_area("rank 0", SIZE)
    with peer_process(landing_peers.program("scribbler"), area.description.hex()) as peer:
        let_in(target, peer)
        area.hang_up()  # As a writer that has left does.
        target.retire(area)
        assert target.fence(area) == Fenced()
        target.free(area)
        others = [target.open_area(f"rank {number}", SIZE) for number in range(8)]
        for other in others:
            other.memory[:] = 200
        wait_readable(target.descriptor, time.monotonic() + 0.3)

        assert all((bytes_of(other.memory) == 200).all() for other in others)
        peer.stop()  # It is alive: nothing of what it did was a fault.
        peer.resume()


def test_a_writer_outlives_its_target() -> None:
    with peer_process(landing_peers.program("target")) as peer:
        link = connect_shared(bytes.fromhex(peer.hear()), device=LandingMemory(0))
        peer.tell("")
        assert peer.hear() == "given"
        window = link.window(0, SIZE)
        assert isinstance(window, DeviceBytes)
        stream = torch.cuda.current_stream()
        memory = torch.as_tensor(window, device="cuda")
        for value in range(64):
            memory.fill_(value)
        peer.kill()
        for value in range(64):
            memory.fill_(value)
        stream.synchronize()
        link.post([Span(drawn_bytes(1000, 1), 0)], b"")

        ends, _ = link.observe(budget_bytes=1 << 20)

        assert ends == [WriteFailed(0, "rank 0 hung up")]
        assert (bytes_of(window) == 63).all()
        link.close()
        assert torch.ones(10, device="cuda").sum().item() == 10


def test_a_target_and_a_writer_of_one_process_share_the_memory(target: SharedTarget) -> None:
    area = target.open_area("rank 0", SIZE)
    link = connect_shared(area.description, device=LandingMemory(0))
    target.notices()
    window = link.window(1000, 100)
    assert isinstance(window, DeviceBytes)
    area.memory[:] = 0

    link.post([Span(drawn_bytes(100, 3), 1000)], b"")
    ends, _ = link.observe(budget_bytes=1 << 20)

    assert ends == [WriteDone(0)]
    assert (bytes_of(area.memory[1000:1100]) == drawn_bytes(100, 3)).all()
    link.close()


class OnePart:
    """A part of a prompt, on its way from one pool of this process to the other."""

    def __init__(self) -> None:
        self.there, self.here = landing_peers.pool(5), landing_peers.pool(6)
        form = Form(layout=self.there.layout)
        plan = plan_reshard([form], [form])
        self.route = RouteParts(plan, plan.routes[0], form, form)
        self.form: PartForm = self.route.form_of(0, 2)
        self.slots = list(range(0, 2 * 16, 2))
        self.size = len(self.slots) * self.form.block_bytes
        self.keys = [b"key %d" % slot for slot in self.slots]
        self.grid = cut(
            layers=range(16), blocks=range(16), cell_bytes=1, block_tokens=16, berth_bytes=64
        )
        self.reader = DeviceReader(self.there, part_bytes=self.size)
        self.taker = DeviceTaker(self.here, part_bytes=self.size)
        self._number = 0

    def close(self) -> None:
        self.reader.close()
        self.taker.close()

    def write(self, berth: object) -> bytes:
        """Has the kernel write it, and returns its sums when that was seen."""
        self._number += 1
        write = WriteId(Life("target", 1), 1, 0, "a", 1, self._number, 0)
        torch.cuda.synchronize()
        assert self.reader.read(write, self.form, self.slots, self.keys, berth) is None  # type: ignore[arg-type]
        torch.cuda.synchronize()
        ((_, sums),) = self.reader.ended()
        return sums

    def take(self, berth: object, sums: bytes) -> bool:
        """Whether it was found intact."""
        take = Take(
            handoff="a",
            epoch=1,
            source=Life("source", 1),
            generation=1,
            berth=0,
            grid=self.grid,
            part=0,
            attempt=0,
            sums=sums,
        )
        begun = self.taker.take(take, self.route, self.form, berth, self.keys, self.slots)  # type: ignore[arg-type]
        assert begun is None
        torch.cuda.synchronize()
        ((_, intact),) = self.taker.ended()
        return intact

    def clear(self) -> None:
        """Empties the slots."""
        for number in range(16):
            self.here.numbers(number, torch.uint8).zero_()

    def moved(self) -> str:
        """What the slots hold of the part: all of it, nothing, or something else."""
        found = _parts_of(self.here, self.slots)
        if torch.equal(found, _parts_of(self.there, self.slots)):
            return "all"
        return "nothing" if not found.any() else "something else"


def _parts_of(tier: TensorTier, slots: list[int]) -> torch.Tensor:
    """The first two layers of some slots."""
    shape = (2, landing_peers.BLOCKS, -1)
    return torch.stack([tier.numbers(n, torch.uint8).view(*shape)[:, slots] for n in range(2)])


@pytest.fixture(name="part")
def make_part() -> Iterator[OnePart]:
    part = OnePart()
    yield part
    part.close()


def area_for(target: SharedTarget, part: OnePart) -> SharedArea:
    return target.open_area("rank 0", 2 * part.size)


def test_a_kernel_writes_a_part_into_the_area_and_it_is_taken_from_there(
    target: SharedTarget, part: OnePart
) -> None:
    area = area_for(target, part)
    part.clear()

    sums = part.write(area.memory[part.size : 2 * part.size])

    assert part.take(area.memory[part.size : 2 * part.size], sums)
    assert part.moved() == "all"


def test_a_part_at_an_odd_address_goes_through_staging(target: SharedTarget, part: OnePart) -> None:
    area = area_for(target, part)
    part.clear()
    berth = area.memory[7 : 7 + part.size]

    sums = part.write(berth)

    assert part.take(berth, sums)
    assert part.moved() == "all"


def test_a_late_write_into_a_berth_that_a_later_claim_uses_is_found_by_the_sums(
    target: SharedTarget, part: OnePart
) -> None:
    """Another process changes a byte after the notice and before the copy; then not."""
    area = area_for(target, part)
    berth = area.memory[: part.size]
    with peer_process(landing_peers.program("stray"), area.description.hex()) as peer:
        let_in(target, peer)
        part.clear()
        sums = part.write(berth)
        peer.tell(str(part.form.block_bytes + 77))
        assert peer.hear() == "written"
        spoiled = part.take(berth, sums)
        kept = _parts_of(part.here, part.slots[1:2])
        part.clear()
        sums = part.write(berth)
        again = part.take(berth, sums)
        moved = part.moved()
        peer.tell("5")  # Later still: the slots are not reached from there.
        assert peer.hear() == "written"

        assert not spoiled
        assert not kept.any(), "the block that was spoiled is in its slot"
        assert again
        assert moved == part.moved() == "all"


def test_whatever_is_written_while_parts_are_taken_no_slot_has_wrong_bytes(
    target: SharedTarget, part: OnePart
) -> None:
    """A process writes to the whole area without end; now and then it is stopped."""
    area = area_for(target, part)
    berth = area.memory[: part.size]
    expected = _parts_of(part.there, part.slots)
    seen = {True: 0, False: 0}
    with peer_process(landing_peers.program("scribbler"), area.description.hex()) as peer:
        let_in(target, peer)
        for number in range(400):
            if number % 8 == 0:
                peer.stop()
            if number % 8 == 4:
                peer.resume()
            part.clear()
            intact = part.take(berth, part.write(berth))
            seen[intact] += 1
            found = _parts_of(part.here, part.slots)
            # Blocks that were spoiled are left alone, the others are right.
            right = (found == expected).all(dim=-1)
            empty = (found == 0).all(dim=-1)
            assert bool((right | empty).all())
            assert not intact or bool(right.all())
        peer.resume()

    assert seen[True] > 0
    assert seen[False] > 0


def test_kv_lands_in_gpu_memory_where_both_ranks_can_map_it() -> None:
    pair = CudaPair()
    try:
        pair.run(by_layers=True)
        torch.cuda.synchronize()

        (driver,) = (each for each in pair.decode._drivers if hasattr(each, "_target"))
        assert [area.on_device for area in driver._target.open_areas] == [True]
        assert pair.decode.statistics().landing_bytes > 0
        assert pair.parts == LAYERS
    finally:
        pair.close()


def test_a_gpu_that_is_almost_full_keeps_what_is_left_for_its_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(landing, "SPARE_SHARE", 1)

    with pytest.raises(UnavailableError, match=r"8 MiB of GPU memory: \d+ MiB are free, of which"):
        LandingMemory(0).create(SIZE)


@pytest.mark.parametrize("broken", ["create", "map"])
def test_where_memory_cannot_be_mapped_kv_lands_on_the_host(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise UnavailableError("not here")

    monkeypatch.setattr(LandingMemory, broken, fails)
    pair = CudaPair()
    try:
        pair.run(by_layers=True)
        torch.cuda.synchronize()

        (driver,) = (each for each in pair.decode._drivers if hasattr(each, "_target"))
        assert [area.on_device for area in driver._target.open_areas] == [False]
        assert "landing area is in host memory: peer=prefill/0" in caplog.text
        assert pair.parts == LAYERS
    finally:
        pair.close()


def test_what_an_engine_takes_of_the_gpu_it_gives_back_when_it_is_closed() -> None:
    def round_trip() -> None:
        pair = CudaPair()
        pair.run(by_layers=True)
        pair.close()

    def free() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    round_trip()
    before = free()
    round_trip()

    # An area has 128 MiB.
    assert before - free() < 64 << 20


def test_killed_prefill_processes_cost_handoffs_and_nothing_else() -> None:
    """Each is killed while its parts are on their way; its successor hands over what is right."""
    folder = private_folder()
    addresses = [f"ipc://{socket_path(folder)}" for _ in range(2)]
    chance = random.Random(3)
    kv, wanted = landing_peers.pool(6), landing_peers.pool(5)
    outcomes: list[str] = []
    known: set[Life] = set()
    with penstock.open_decode(
        landing_peers.pair_at(*addresses), kv=kv, settings=landing_peers.SETTINGS
    ) as decode:
        for life in range(4):
            with peer_process(landing_peers.program("prefill"), *addresses) as peer:
                assert peer.hear() == "ready"
                # A claim of an earlier life fails with it.
                _meet(decode, known)
                for number in range(2):
                    name = f"prompt-{life}-{number}"
                    for at in range(landing_peers.LAYERS):
                        kv.numbers(at, torch.uint8).zero_()
                    torch.cuda.synchronize()
                    decode.claim(
                        name,
                        range(landing_peers.TOKENS),
                        slots=range(landing_peers.BLOCKS),
                        timeout_s=60.0,
                    )
                    peer.tell(name)
                    result = _finish(decode, peer if number else None, chance)
                    torch.cuda.synchronize()
                    if result.delivered:
                        assert all(
                            torch.equal(
                                kv.numbers(at, torch.uint8), wanted.numbers(at, torch.uint8)
                            )
                            for at in range(landing_peers.LAYERS)
                        )
                    outcomes.append("delivered" if result.delivered else result.why)
        statistics = decode.statistics()

    assert outcomes[::2] == ["delivered"] * 4, outcomes
    assert statistics.under_way == 0


def _meet(decode: penstock.DecodeHandoff, known: set[Life]) -> None:
    """Waits until lives of the prefill engine and its rank have come that were not known."""
    deadline = time.monotonic() + SOON_S
    peers = [
        (driver.machine, name)
        for driver in decode._drivers
        for name in ("prefill", "prefill/0")
        if name in decode._directory.peers_of(driver.life.name)
    ]
    while True:
        lives = {machine.life_of(name) for machine, name in peers}
        if decode.connected and not lives & known:
            known |= lives
            return
        assert time.monotonic() < deadline, "no new life has come"
        decode.wait(time.monotonic() + 0.01)
        decode.step()


def _finish(
    decode: penstock.DecodeHandoff, victim: PeerProcess | None, chance: random.Random
) -> penstock.HandoffResult:
    """How the prompt ended; the victim dies some time after its first part came."""
    before = decode.statistics().parts
    dies_at: float | None = None
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        results = decode.step()
        if results:
            return results[0]
        if victim is not None:
            if dies_at is None and decode.statistics().parts > before:
                dies_at = time.monotonic() + chance.uniform(0.0, 0.004)
            elif dies_at is not None and time.monotonic() >= dies_at:
                victim.kill()
                victim = None
        decode.wait(time.monotonic() + 0.001)
    raise AssertionError("the handoff did not end")
