"""Landing areas: poison, retirement, fences, silence (P17 to P21)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.fixtures.handoff_machines import freeze
from penstock.handoff.protocol import effects as eff
from penstock.handoff.protocol.settings import HandoffBounds
from tests.handoff.protocol.conftest import World

ONE_BERTH = HandoffBounds(
    berth_bytes=1024, berth_count=1, landing_bytes_max=1 << 20, retired_bytes_max=8192
)


# ------------------------------------------------------------------ poison


def test_p17_after_a_failed_write_the_rest_goes_into_another_area() -> None:
    world = World().busy()

    failed = world.fail_write()
    world.run()
    world.put(failed)

    assert world.outcome("D") == ["delivered"]
    assert {key[2] for key in world.areas} == {1, 2}
    assert world.parties["d0"].retired_bytes == 2048
    world.check_over()


def test_p17_nothing_more_is_written_into_a_poisoned_area() -> None:
    world = World(layers=3).busy()
    world.fail_write()
    world.wire.clear()

    world.land()
    world.observe()
    while world.takes or world.wire:
        world.take() if world.takes else world.deliver()

    assert not [w for w in world.posted if w.write.generation == 1]


def test_p17_a_peer_whose_writes_always_fail_fails_the_handoff_over() -> None:
    world = World().busy()

    for _ in range(50):
        if world.posted:
            world.fail_write()
        elif world.wire:
            world.deliver()

    assert world.outcome("D") == ["failed_over"]
    assert world.ended["D"][0].why == "writes of p0 failed in 3 areas"


def test_p17_a_lost_word_of_poison_is_said_again() -> None:
    world = World().busy()
    world.fail_write()
    world.wire.clear()

    world.drive(10)

    assert world.outcome("D") == ["delivered"]


# ------------------------------------------------------------------ areas and fences


def test_p19_memory_comes_back_only_behind_the_fence() -> None:
    world = World().busy()
    world.do("d0", lambda d: d.suspect("p0", 0.0))
    world.run_messages()
    area = ("d0", world.parties["p0"].life, 1)

    world.drive(300)
    before = area in world.areas
    world.fence_holds()

    assert before
    assert area in world.given_back
    assert world.parties["d0"].retired_bytes == 0


def test_p19_memory_that_our_own_mover_reads_stays_behind_the_fence() -> None:
    world = World().busy()
    world.land()
    world.deliver()
    world.do("d0", lambda d: d.suspect("p0", 0.0))

    world.fence_holds()
    between = set(world.given_back)
    world.take()

    assert not between
    assert len(world.given_back) == 1


def test_p19_a_fence_that_nobody_asked_for_is_refused() -> None:
    world = World().busy()

    with pytest.raises(ValueError, match="area 1 of p0#0000000000000002 is not retired"):
        world.parties["d0"].fenced(world.parties["p0"].life, 1, 0.0)


def test_p18_an_area_without_memory_fails_the_handoff_over_and_is_free_at_once() -> None:
    world = World().busy()
    source = world.parties["p0"].life

    world.do("d0", lambda d: d.area_failed(source, 1, 0.0, why="full"))
    world.run_messages()
    world.fence_holds()

    assert world.outcome("D") == ["failed_over"]
    assert world.ended["D"][0].why == "no landing area for p0: full"
    assert world.parties["d0"].retired_bytes == 0


def test_p18_an_area_that_is_not_open_cannot_fail() -> None:
    world = World().busy()
    before = freeze(world.parties["d0"])

    with pytest.raises(ValueError, match="area 2 of p0#0000000000000002 is not open"):
        world.parties["d0"].area_failed(world.parties["p0"].life, 2, 0.0, why="full")

    assert freeze(world.parties["d0"]) == before


def test_p18_what_lands_in_a_retired_area_is_not_believed() -> None:
    world = World().busy()
    world.land()
    world.do("d0", lambda d: d.suspect("p0", 0.0))

    world.run_messages()

    assert not world.takes
    world.drive(5)
    assert world.outcome("D") == ["failed_over"]


def test_p18_retired_memory_is_bounded() -> None:
    bounds = replace(ONE_BERTH, retired_bytes_max=2048)
    world = World(bounds=bounds)
    for n in range(5):
        world.submit_prefill(f"h{n}")
        world.submit_decode(f"h{n}")
        world.run()
        world.do("d0", lambda d: d.suspect("p0", 0.0))
        world.run()

    assert world.parties["d0"].retired_bytes == bounds.retired_bytes_max == 2048
    assert world.ended["D"][-1].why == "no landing area for p0: 2048 bytes are retired"


def test_p18_a_peer_that_is_suspected_again_and_again_costs_others_nothing() -> None:
    world = World(2, 1, bounds=replace(ONE_BERTH, retired_bytes_max=4096))
    for n in range(6):
        world.submit_prefill(f"h{n}")
        world.submit_decode(f"h{n}", wanted={"d0": (("p0", world.grid()),)})
        world.run()
        world.do("d0", lambda d: d.suspect("p0", 0.0))
        world.run()
    world.submit_prefill("other")
    world.submit_decode("other", wanted={"d0": (("p1", world.grid()),)})

    world.compute("other")
    world.run()

    assert world.parties["d0"].retired_bytes == 3 * 1024
    assert world.outcome("D") == ["failed_over"] * 6 + ["delivered"]


def test_p20_a_silent_source_fails_only_what_needs_it() -> None:
    world = World(2, 1)
    for number, handoff in enumerate(("a", "b")):
        world.submit_prefill(handoff)
        world.submit_decode(handoff, wanted={"d0": ((f"p{number}", world.grid()),)})
    world.run()

    world.do("d0", lambda d: d.suspect("p0", 0.0))
    for handoff in ("a", "b"):
        world.compute(handoff)
    world.run()

    assert {e.handoff: (e.outcome.value, e.why) for e in world.ended["D"]} == {
        "a": ("failed_over", "p0 is silent"),
        "b": ("delivered", ""),
    }


def test_p20_a_silent_target_does_not_slow_another() -> None:
    world = World(1, 2)
    world.submit_prefill()
    world.submit_decode()
    world.run()
    world.do("p0", lambda p: p.suspect("d1", 0.0))

    world.compute()

    assert {w.write.target.name for w in world.posted} == {"d0"}


def test_p20_a_suspected_peer_that_is_heard_again_is_used_again() -> None:
    world = World()
    world.submit_prefill()
    world.submit_decode()
    world.run()
    world.do("d0", lambda d: d.suspect("p0", 0.0))
    world.run()
    world.submit_prefill("i")
    world.submit_decode("i")

    world.compute("i")
    world.run()

    assert world.outcome("D") == ["failed_over", "delivered"]
    assert {key[2] for key in world.areas} == {1, 2}


def test_p20_a_silent_prefill_engine_fails_over_at_once() -> None:
    world = World()
    world.submit_decode()
    world.run()

    world.do("D", lambda d: d.suspect("P", 0.0))
    world.run()

    assert [(e.outcome.value, e.why) for e in world.ended["D"]] == [("failed_over", "P is silent")]


@pytest.mark.parametrize("again", [False, True])
def test_p20_a_prefill_engine_with_its_token_sent_is_given_up_when_it_starts_again(
    *, again: bool
) -> None:
    world = World()
    world.submit_prefill()
    world.submit_decode()
    world.do("P", lambda p: p.first_token("h", 0.0, tokens=(1,)))
    world.run()

    if again:
        world.start("P")
        world.acquaint("P")
    else:
        world.do("D", lambda d: d.suspect("P", 0.0))
    world.run()

    # Silence alone does not keep its ranks from sending the rest.
    assert world.outcome("D") == (["failed_over"] if again else [])


def test_p20_a_silent_decode_engine_frees_the_prompt() -> None:
    world = World()
    world.submit_prefill()
    world.submit_decode()
    world.run()

    world.do("P", lambda p: p.suspect("D", 0.0))
    world.run()

    assert world.outcome("P") == ["failed_over"]


def test_p21_an_effect_names_what_ends_it() -> None:
    world = World().busy()
    write = world.posted[0]

    with pytest.raises(ValueError, match="which is not under way"):
        world.parties["p0"].write_done(write.write._replace(part=99), 0.0)
    take = eff.Take(
        handoff="h",
        epoch=1,
        source=world.parties["p0"].life,
        generation=1,
        berth=0,
        grid=world.grid(),
        part=0,
        attempt=0,
        sums=b"",
    )
    with pytest.raises(ValueError, match="is not under way"):
        world.parties["d0"].parts_taken((take,), 0.0)
