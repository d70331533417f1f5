"""A process has descriptors kept for its next life, and nobody else finds them."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from penstock.supervisor.descriptors import (
    HELD_MAX,
    HeldDescriptors,
    serve_keep_request,
)
from penstock.supervisor.messages import (
    Hold,
    OnFailure,
    ProcessExited,
    RequestRefused,
    decode_answer,
    encode,
)

if TYPE_CHECKING:
    from tests.supervisor.conftest import Lab

AT_ONCE = OnFailure(limit=3, window_s=3600, delay_s=0, delay_max_s=0)


def open_descriptors(lab: Lab) -> int:
    return len(os.listdir(f"/proc/{lab.supervisor.pid}/fd"))


def test_what_a_process_made_itself_is_there_in_its_next_life(lab: Lab) -> None:
    lab.start("keep_an_arena", "2", keeps=True, restart=AT_ONCE)

    heard = [lab.line.hear().split() for _ in range(3)]

    assert [found for _, found, _ in heard] == ["0", "1", "2"]
    assert len({memory for _, _, memory in heard}) == 1


def test_another_process_does_not_find_it(lab: Lab) -> None:
    lab.start("keep_an_arena", "0", name="one", keeps=True, restart=AT_ONCE)
    first = lab.line.hear().split()
    lab.start("keep_an_arena", "0", name="two", keeps=True, restart=AT_ONCE)

    second = lab.line.hear().split()

    assert (first[1], second[1]) == ("0", "0")
    assert first[2] != second[2]


def test_it_is_let_go_when_the_process_has_ended_for_good(lab: Lab) -> None:
    before = open_descriptors(lab)
    lab.start("keep_an_arena", "0", keeps=True, restart=AT_ONCE)
    lab.line.hear()

    lab.supervisor.stop_process("keep-an-arena")

    assert open_descriptors(lab) == before
    lab.start("keep_an_arena", "0", keeps=True)
    assert lab.line.hear().startswith("found 0")


def test_there_is_a_limit_and_the_process_is_told(lab: Lab) -> None:
    lab.start("keep_too_much", keeps=True)

    told, after = lab.line.hear(), lab.line.hear()

    # The line itself is held, too.
    assert told.startswith(f"keep-too-much kept {HELD_MAX - 1} then the supervisor does not keep")
    assert after == "keep-too-much kept one anew"


@pytest.mark.parametrize("count", [0, 2])
def test_a_request_to_keep_without_one_descriptor_is_refused_and_nothing_is_kept(
    count: int,
) -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        frame = encode(Hold(request=7, name="arena"))
        socket.send_fds(near, [frame], [near.fileno()] * count)
        held = HeldDescriptors()

        found = serve_keep_request(far, held, "rank")

        assert found is True
        answer = decode_answer(near.recv(1000))
    assert isinstance(answer, RequestRefused)
    assert answer.request == 7
    assert held.kept_by("rank") == {}


def test_who_is_not_to_keep_anything_has_no_keeper(lab: Lab) -> None:
    lab.start("keep_without_asking")

    assert lab.line.hear() == "keep-without-asking has none"
    while not isinstance(lab.event(), ProcessExited):
        pass
