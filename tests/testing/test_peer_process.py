"""A peer in a process of its own is heard line by line, and not waited for without end."""

from __future__ import annotations

import os

import pytest

from penstock.testing import writer_process as module
from penstock.testing.writer_process import peer_process

ECHO = """
import sys
for line in sys.stdin:
    sys.stdout.write(line + line)
    sys.stdout.flush()
sys.stdout.write("half a line")
sys.stdout.flush()
sys.exit(3)
"""


def test_lines_are_heard_one_by_one_until_the_peer_is_gone() -> None:
    with peer_process(ECHO) as peer:
        peer.tell("blöcke")
        heard = [peer.hear(), peer.hear()]
        peer.tell("x" * 200_000)
        long = [len(peer.hear()), len(peer.hear())]
        peer.end_input()
        rest = [peer.hear(), peer.hear()]

        assert heard == ["blöcke"] * 2
        assert long == [200_000] * 2
        assert rest == ["half a line", ""]
        assert peer.wait() == 3


def test_a_peer_that_says_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAR_S", 0.05)
    with peer_process("import sys; sys.stdin.read()") as peer:
        with pytest.raises(TimeoutError, match=r"the peer said nothing for 0\.05 s"):
            peer.hear()
        pid = peer.pid

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
