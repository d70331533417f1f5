"""What peers say is looked at before it is used, and changes nothing when it makes no sense."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.fixtures.handoff_machines import freeze
from lab.fixtures.handoff_pair import SLOTS, Shape, directory_of, keys_of
from penstock.errors import PeerError
from penstock.handoff.driver.party_driver import (
    Content,
    decode_content,
    encode_content,
    seal,
    unseal,
)
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.identity import Life, misfit

if TYPE_CHECKING:
    from tests.handoff.driver.conftest import World


def say(world: World, sender: str, target: str, frame: bytes) -> None:
    """Sends a frame over the line that a party has."""
    assert world.parties[sender].lines.send(target, frame)


def claim_of(world: World) -> tuple[msg.Claim, bytes]:
    """A claim that decode/0 would send to prefill/0, and its attachment."""
    found: list[tuple[msg.Claim, bytes]] = []
    rank = world.taking["decode/0"]
    send = rank._send

    def watch(message: Any) -> None:
        if isinstance(message, msg.Claim) and message.target.name == "prefill/0":
            found.append((message, rank._attach(message)))
        send(message)

    rank._send = watch  # type: ignore[method-assign]
    world.submit("a", 16)
    world.settle()
    rank._send = send  # type: ignore[method-assign]
    return found[-1]


@given(st.binary(max_size=200))
def test_bytes_are_an_envelope_or_refused(frame: bytes) -> None:
    try:
        envelope = unseal(frame)
    except PeerError:
        return

    assert seal(*envelope)[4:] == frame[4:]


@given(st.binary(max_size=100))
def test_an_attachment_is_a_content_or_refused(attachment: bytes) -> None:
    try:
        content = decode_content(attachment)
    except PeerError:
        return

    assert content.token_count >= 1


def test_a_content_is_read_as_it_was_written() -> None:
    content = Content(token_count=9, keys=(b"a", b"b"))

    assert decode_content(encode_content(content)) == content


@pytest.mark.parametrize("frame", [b"", b"\x05\0\0\0abc", b"\x03\0\0\0\x02\xc1\xc1", b"x" * 5000])
def test_garbage_on_a_line_is_counted_and_harmless(world: World, frame: bytes) -> None:
    before = freeze(world.sending["prefill/0"].machine)

    say(world, "decode/0", "prefill/0", frame)
    world.settle()

    assert world.sending["prefill/0"].refused["garbage"] == 1
    assert freeze(world.sending["prefill/0"].machine) == before


def test_nobody_speaks_in_another_ones_name(world: World) -> None:
    scheduler = world.prefill.life
    release = msg.ReleaseBlocks(
        sender=scheduler, target=world.sending["prefill/0"].life, handoff="a"
    )
    there, _ = world.submit("a", 16)
    world.settle()

    say(world, "decode/0", "prefill/0", seal(release))
    world.settle()

    assert world.sending["prefill/0"].refused["in another's name"] == 1
    assert "a" in world.sending["prefill/0"].machine.prompts
    assert there


@pytest.mark.parametrize(
    "change",
    [
        {"grid": {"block_tokens": 8}},
        {"grid": {"layer_count": 1}},
        {"grid": {"part_bytes": 1}},
        {"grid": {"part_blocks": 1 << 30, "part_bytes": 1 << 40}},
        {"berth_bytes": 64},
        {"generation": 7, "description": b"no area"},
        {"generation": 7, "description": b""},
    ],
    ids=str,
)
def test_a_claim_that_makes_no_sense_is_refused(world: World, change: dict[str, Any]) -> None:
    claim, description = claim_of(world)
    rank = world.sending["prefill/0"]
    before = freeze(rank.machine)
    changed = dict(change)
    description = changed.pop("description", description)
    if "grid" in changed:
        changed["grid"] = claim.grid._replace(**changed["grid"])

    say(
        world,
        "decode/0",
        "prefill/0",
        seal(msgspec.structs.replace(claim, **changed), description),
    )
    rank.step()

    assert sum(rank.refused.values()) == 1
    assert freeze(rank.machine) == before


def test_a_claim_of_more_than_its_area_holds_is_refused(world: World) -> None:
    claim, _ = claim_of(world)
    rank = world.sending["prefill/0"]
    small = world.fabric.target().open_area("prefill/0", 100)
    closed = []
    connect = rank._connect

    def watched(description: bytes) -> Any:
        link = connect(description)
        close = link.close
        link.close = lambda: (closed.append(description), close())  # type: ignore[method-assign]
        return link

    rank._connect = watched
    say(
        world,
        "decode/0",
        "prefill/0",
        seal(msgspec.structs.replace(claim, generation=9), small.description),
    )
    rank.step()

    assert rank.refused["area"] == 1
    assert closed == [small.description]
    assert rank.machine.lanes["decode/0"].generation == claim.generation


@pytest.mark.parametrize(
    "change",
    [
        {"content": Content(token_count=16, keys=(b"a",))},
        {"content": Content(token_count=60, keys=(b"a",) * 4)},
        {"content": None},
        {"slots": (0, 1, 2)},
        {"slots": (0, 1, 2, 64)},
        {"sources": (("prefill/9", None),)},
    ],
    ids=str,
)
def test_an_expectation_that_makes_no_sense_is_refused(
    world: World, change: dict[str, Any]
) -> None:
    wanted = world.directory.wanted(cached_tokens=0, token_count=16, berth_bytes=4096)
    sources = wanted["decode/0"]
    if "sources" in change:
        sources = (("prefill/9", sources[0][1]),)
    expect = msg.Expect(
        sender=world.decode.life,
        target=world.taking["decode/0"].life,
        handoff="x",
        epoch=1,
        sources=sources,
        slots=change.get("slots", (0, 1, 2, 3)),
    )
    content = change.get("content", Content(token_count=16, keys=(b"a",) * 4))

    say(
        world,
        "decode",
        "decode/0",
        seal(expect, b"" if content is None else encode_content(content)),
    )
    world.settle()

    assert world.taking["decode/0"].refused["expect"] == 1
    assert not world.taking["decode/0"].machine.collections


def test_a_claim_with_a_slot_that_a_rank_does_not_have_fails_at_once_and_says_so(
    world: World,
) -> None:
    slots = {**dict.fromkeys(world.taking, (0, 1, 2, 3)), "decode/0": (0, 1, 2, SLOTS)}

    world.decode.submit("a", token_count=16, slots=slots, keys=keys_of("a", 16, 4))
    world.settle()

    (ended,) = world.ended["decode"]
    assert ended.outcome.value == "failed_over"
    assert ended.why == f"slot is {SLOTS}, must be from 0 to {SLOTS - 1} on 'decode/0'"
    assert not any(rank.machine.collections for rank in world.taking.values())


def test_a_notice_of_another_life_or_kind_is_refused(world: World) -> None:
    claim_of(world)
    rank = world.taking["decode/0"]
    areas = world.targets["decode/0"].open_areas
    area = next(each for each in areas if each.peer.startswith("prefill/0#"))
    owner, generation = rank._owners[id(area)]
    landed = msg.Landed(
        sender=Life(owner.name, owner.incarnation + 1),
        target=rank.life,
        handoff="a",
        epoch=1,
        generation=generation,
        parts=(msg.LandedPart(0, 0, 0),),
    )

    area.deliver(b"garbage")
    area.deliver(seal(landed))
    area.deliver(seal(msgspec.structs.replace(landed, sender=owner, generation=generation + 1)))
    area.deliver(seal(msg.Ping(sender=owner, target=rank.life)))
    rank.step()

    assert rank.refused == {"garbage": 1, "notice": 3}


def test_engines_with_other_ideas_of_the_plan_do_not_hand_off() -> None:
    ours, theirs = directory_of(Shape()), directory_of(Shape(decode_ranks=2))

    found = misfit(ours.identity("decode", 1), theirs.identity("prefill", 1))

    assert str(found) == "ranks of decode is '3' here and '2' there"


class OtherVersion:
    """The lines of a party that speaks another version of the protocol."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lines, name)

    def send(self, name: str, frame: bytes) -> bool:
        version_at = 4
        return self._lines.send(name, frame[:version_at] + b"\x09" + frame[version_at + 1 :])


@pytest.mark.parametrize("party", ["prefill", "prefill/0"])
def test_a_party_of_another_version_fails_the_handoff_at_once_with_both_versions(
    world: World, party: str
) -> None:
    suspect_s = world.settings.times.suspect_s
    world.pass_time(suspect_s + 1, without=[party])  # Its life is over, for all that is known.
    other = world.parties[party]
    other.lines = OtherVersion(other.lines)
    plan = world.directory.plan
    slots = range(-(-16 // plan.target_tokens))

    world.decode.submit(
        "a",
        token_count=16,
        cached_tokens=0,
        slots=dict.fromkeys(world.taking, slots),
        keys=keys_of("a", 16, plan.source_tokens),
    )
    world.settle()

    (ended,) = world.ended["decode"]
    assert ended.outcome.value == "failed_over"
    assert ended.why == "refused: version is '2' here and '9' there"


def test_one_frame_of_another_version_from_a_peer_that_is_there_is_garbage(world: World) -> None:
    world.submit("a", 16)
    world.settle()
    ping = seal(msg.Ping(sender=world.sending["prefill/0"].life, target=Life("decode/0", 1)))

    OtherVersion(world.sending["prefill/0"].lines).send("decode/0", ping)
    world.settle()

    assert sum(world.taking["decode/0"].refused.values()) == 1
    assert world.outcomes("decode") == {}


def test_a_directory_finds_each_rank_by_its_name_and_refuses_others() -> None:
    directory = directory_of(Shape(), lambda name: f"address of {name}")
    names = [rank.name for rank in (*directory.prefill.ranks, *directory.decode.ranks)]

    assert len(names) > 2
    assert [directory.place_of(name).address for name in names] == [
        f"address of {name}" for name in names
    ]
    with pytest.raises(ValueError, match="name is 'nobody', must be that of a rank"):
        directory.place_of("nobody")
