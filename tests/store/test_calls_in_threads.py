"""Calls that nobody can end are made by threads, and always answered."""

from __future__ import annotations

import threading

import pytest

from penstock.errors import UnavailableError
from penstock.store.clients.blobs import call_in_thread


def test_what_a_call_returns_or_raises_is_its_answer() -> None:
    def fails() -> None:
        raise ValueError("no such server")

    assert call_in_thread(lambda: 7, "test").result(timeout=60) == 7
    with pytest.raises(ValueError, match="no such server"):
        call_in_thread(fails, "test").result(timeout=60)


class Panic(BaseException):
    """What compiled code of others ends a thread with."""


@pytest.mark.parametrize("ends_by", [SystemExit, Panic])
def test_a_call_that_ends_its_thread_is_answered_too(
    ends_by: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[object] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)

    def ends() -> None:
        raise ends_by

    with pytest.raises(UnavailableError, match="it failed, and the log says why"):
        call_in_thread(ends, "test").result(timeout=60)
