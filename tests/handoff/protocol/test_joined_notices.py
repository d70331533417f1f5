"""Parts that end together share a notice, and count one by one."""

from __future__ import annotations

import msgspec
import pytest

from lab.fixtures.handoff_machines import freeze
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.effects import notice_of
from penstock.handoff.protocol.identity import Life, WriteId
from penstock.handoff.protocol.prefill_rank import join_notices, writes_of
from tests.handoff.protocol.conftest import World

SOURCE, TARGET = Life("p0", 1), Life("d0", 2)


def notice(part: int, *, handoff: str = "h", epoch: int = 1, sums: bytes = b"") -> msg.Landed:
    return notice_of(SOURCE, WriteId(TARGET, 1, part, handoff, epoch, part, 0), sums)


def parts_of(notices: list[msg.Landed]) -> list[list[int]]:
    return [[part.part for part in each.parts] for each in notices]


def both_landed() -> tuple[World, msg.Landed]:
    """Two parts are in their berths, and one notice says so."""
    world = World().busy()
    first, second = world.posted[0].notice, world.posted[1].notice
    for _ in range(2):
        world.land()
    world.wire = []
    return world, msgspec.structs.replace(first, parts=(*first.parts, *second.parts))


def test_p9_parts_of_one_notice_are_taken_and_answered_like_those_of_two() -> None:
    world, joined = both_landed()

    world.do("d0", lambda d: d.receive(joined, world.now))

    assert [take.part for _, take in world.takes] == [0, 1]
    world.observe()
    world.observe()
    world.run()
    assert world.outcome("D") == ["delivered"]


def test_p11_a_part_that_is_wrong_does_not_touch_the_others_of_its_notice() -> None:
    world, joined = both_landed()
    first, second = joined.parts
    wrong = msgspec.structs.replace(joined, parts=(first._replace(part=99), second))

    world.do("d0", lambda d: d.receive(wrong, world.now))

    assert [take.part for _, take in world.takes] == [second.part]
    assert world.parties["d0"].counts["refused: of a part that is not in the grid"] == 1


def test_p3_notices_without_an_answer_are_repeated_together() -> None:
    world, _ = both_landed()
    for _ in range(2):
        world.observe()

    world.expire("p0", "notice", "d0")

    (repeated,) = (each for each in world.wire if isinstance(each, msg.Landed))
    assert [part.part for part in repeated.parts] == [0, 1]


def test_p15_writes_that_are_not_all_under_way_are_refused_and_none_counts() -> None:
    world, joined = both_landed()
    rank = world.parties["p0"]
    before = freeze(rank)
    (first, sums), (second, _) = writes_of(joined)

    with pytest.raises(ValueError, match="is not under way"):
        rank.writes_done([(first, sums), (second._replace(part=99), b"")], world.now)

    assert freeze(rank) == before


def test_notices_are_joined_by_handoff_and_epoch() -> None:
    some = [notice(0), notice(1, handoff="other"), notice(2), notice(3, epoch=2)]

    joined = join_notices([(each, 10) for each in some], bytes_max=100)

    assert parts_of(joined) == [[0, 2], [1], [3]]
    assert [name.part for each in joined for name, _ in writes_of(each)] == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("size", "sums", "together"),
    [
        (40, b"", 2),
        (200, b"", 1),
        (1, bytes(msg.LANDED_SUMS_MAX // 4), 4),
        (0, b"", msg.LANDED_COUNT_MAX),
    ],
)
def test_a_notice_speaks_of_no_more_than_fits_it(size: int, sums: bytes, together: int) -> None:
    some = [(notice(part, sums=sums), size) for part in range(40)]

    joined = parts_of(join_notices(some, bytes_max=100))

    assert {len(each) for each in joined[:-1]} == {together}
    assert [part for each in joined for part in each] == [*range(40)]
