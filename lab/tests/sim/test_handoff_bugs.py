"""Bugs planted in the machines of a handoff are found.

Each is planted in the shipped code, for the length of one test, and looked for in at most as
many seeds as are stated with it. `test_scenarios` shows that without a planted bug these
seeds find nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lab.sim.handoff import HandoffSimulation
from lab.tests.explore.epoch_checks import (
    answer_earlier_claims,
    begin_what_was_dropped,
    believe_every_report,
    close_later_claims,
    merge_earlier_claims,
    serve_what_was_stopped,
    stop_later_claims,
)
from lab.tests.sim.planting import Plant, first_failure
from lab.worlds.decode import DecodeRankActor
from penstock.handoff.protocol.decode_rank import DecodeRank
from penstock.handoff.protocol.decode_scheduler import DecodeScheduler
from penstock.handoff.protocol.effects import Fence
from penstock.handoff.protocol.party import Party
from penstock.handoff.protocol.prefill_rank import PrefillRank, Want
from penstock.handoff.protocol.prefill_scheduler import PrefillScheduler

if TYPE_CHECKING:
    from penstock.handoff.protocol.effects import AnyEffect, Take
    from penstock.handoff.protocol.identity import WriteId


def finder_of(seed: int) -> str:
    """Who finds something in a world; nobody, if it comes to a good end."""
    found = first_failure(HandoffSimulation, [seed])
    return "nobody" if found is None else found.checker


def plant_any_rank_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handoff is delivered when the first rank is complete."""
    monkeypatch.setattr(
        DecodeScheduler, "_every_rank_is_complete", lambda _, claimed: claimed.complete != 0
    )


def plant_no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a retired area is given back at once."""
    retire = DecodeRank._retire

    def retire_and_free(landing: DecodeRank, name: str) -> None:
        retire(landing, name)
        landing.effects = [each for each in landing.effects if not isinstance(each, Fence)]
        for peer, generation in [*landing.retired]:
            landing.retired[peer, generation] = True
            landing._free_if_unused(peer, generation)

    monkeypatch.setattr(DecodeRank, "_retire", retire_and_free)


def plant_hasty_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill rank says that it reads no more, though its writes are under way."""
    answer = PrefillRank._answer_release

    def answer_at_once(rank: PrefillRank, handoff: str) -> None:
        writes, rank.writes = rank.writes, {}
        answer(rank, handoff)
        rank.writes = writes

    monkeypatch.setattr(PrefillRank, "_answer_release", answer_at_once)


def plant_one_prefill_rank_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill engine gets a prompt's blocks back when the first rank has released them."""
    released = PrefillScheduler._released

    def released_by_all(scheduler: PrefillScheduler, handoff: str, ranks: int, *rest: Any) -> None:
        released(scheduler, handoff, scheduler.everyone if ranks else 0, *rest)

    monkeypatch.setattr(PrefillScheduler, "_released", released_by_all)


def plant_berth_reused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A berth is written to again as soon as the write before has ended."""
    done = PrefillRank.write_done

    def done_and_free(
        writer: PrefillRank, write: WriteId, now: float, *, sums: bytes = b""
    ) -> list[AnyEffect]:
        writer.writes[write] = writer.writes[write]._replace(settled=True)
        return done(writer, write, now, sums=sums)

    monkeypatch.setattr(PrefillRank, "write_done", done_and_free)


def plant_unverified_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part counts, whatever its bytes are."""

    def taken_anyway(rank: DecodeRank, take: Take, now: float) -> list[AnyEffect]:
        return rank.parts_taken((take,), now)

    monkeypatch.setattr(DecodeRank, "part_spoiled", taken_anyway)


def plant_early_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wanted is written, computed or not."""

    def everything(want: Want) -> int:
        return want.grid.everything & ~(want.posted | want.have)

    monkeypatch.setattr(Want, "sendable", property(everything))


def plant_claims_never_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that is lost stays lost: safe, live, and worthless on a bad wire."""
    monkeypatch.setattr(DecodeRank, "_keep_asking", lambda *_: None)


def plant_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gives a handoff up."""
    expire = DecodeScheduler._on_timer

    def expire_but_deadlines(scheduler: DecodeScheduler, timer: tuple[str, ...]) -> None:
        if timer[0] != "deadline":
            expire(scheduler, timer)

    monkeypatch.setattr(DecodeScheduler, "_on_timer", expire_but_deadlines)


def plant_any_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier life of a peer says counts, too."""
    acceptable = Party._acceptable

    def from_any_life(party: Party, message: Any) -> bool:
        known = party.peers.get(message.sender.name)
        if known is None or message.target != party.life:
            return acceptable(party, message)
        return True

    monkeypatch.setattr(Party, "_acceptable", from_any_life)


def plant_unbounded_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retired areas do not count."""
    monkeypatch.setattr(DecodeRank, "retired_bytes", property(lambda _: 0))


def plant_no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resend waits as long as the first each time."""
    monkeypatch.setattr(
        Party, "_resend_wait_s", lambda party, _timer: party.settings.times.resend_s
    )


PLANTED = [
    pytest.param(plant_any_rank_will_do, 20, 1, id="any rank will do"),
    pytest.param(plant_no_fence, 60, 15, id="no fence"),
    pytest.param(believe_every_report, 200, 47, id="no epoch check of reports"),
    pytest.param(begin_what_was_dropped, 20, 2, id="no epoch check of expects"),
    pytest.param(serve_what_was_stopped, 40, 2, id="no epoch check of what was stopped"),
    pytest.param(merge_earlier_claims, 200, 58, id="no epoch check of claims"),
    pytest.param(stop_later_claims, 20, 2, id="no epoch check of stops"),
    pytest.param(answer_earlier_claims, 200, 53, id="no epoch check of questions"),
    pytest.param(close_later_claims, 400, 262, id="no epoch check of closes"),
    pytest.param(plant_hasty_release, 60, 13, id="hasty release"),
    pytest.param(plant_one_prefill_rank_will_do, 40, 1, id="one prefill rank will do"),
    pytest.param(plant_berth_reused_early, 20, 1, id="berth reused early"),
    pytest.param(plant_unverified_parts, 150, 2, id="unverified parts"),
    pytest.param(plant_early_writes, 20, 1, id="writes what is not computed"),
    pytest.param(plant_claims_never_repeated, 20, 6, id="claims never repeated"),
    pytest.param(plant_no_backoff, 200, 31, id="no backoff"),
    pytest.param(plant_no_deadline, 400, 120, id="no deadline"),
    pytest.param(plant_unbounded_areas, 300, 61, id="unbounded areas"),
    pytest.param(plant_any_life, 1200, 0, id="any life", marks=pytest.mark.long),
]
"""What is planted, how many seeds find it at the latest, and one that has: looked at first."""


@pytest.mark.parametrize(("plant", "seed_count", "seed"), PLANTED)
def test_a_bug_that_was_planted_is_found(
    plant: Plant, seed_count: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    assert first_failure(HandoffSimulation, (seed, *range(seed_count))) is not None


def test_claims_that_are_never_repeated_are_found_because_nothing_is_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant_claims_never_repeated(monkeypatch)

    assert "usefulness" in map(finder_of, (39, *range(60)))


def test_parts_that_are_believed_without_their_sums_are_found_where_writes_are_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def believe(rank: DecodeRankActor, take: Take, now: float) -> list[AnyEffect]:
        number = rank.takes.index(take)
        del rank.takes[number], rank.takers[number]
        lies = rank.berths[take.source, take.generation][take.berth]
        assert lies is not None
        place = (take.handoff, take.epoch)
        rank.slots[place] = rank.slots.get(place, frozenset()) | {lies}
        return rank.machine.parts_taken((take,), now)

    late = [seed for seed in range(400) if HandoffSimulation(seed).conditions.stray]
    honest = {finder_of(seed) for seed in late[:20]}
    monkeypatch.setattr(DecodeRankActor, "_finish", believe)

    assert honest == {"nobody"}
    assert "content" in map(finder_of, late)


def test_writes_into_memory_given_back_are_what_a_missing_fence_leads_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant_no_fence(monkeypatch)

    found = first_failure(HandoffSimulation, range(60))

    assert found is not None
    assert found.checker == "given back"
