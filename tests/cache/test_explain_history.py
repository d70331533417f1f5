"""The story of blocks and requests, within bounds."""

from __future__ import annotations

from penstock.cache.explain import History


def test_a_block_tells_what_happened_to_it_oldest_first() -> None:
    history = History(limit=8)
    history.add(0.5, "published", "request 1", [b"a", b"b"])
    history.add(1.5, "evicted", "request 2", [b"b"], "from device")

    story = history.of_key(b"b")

    assert story == (
        "0.500000 published cause=request 1 [2 blocks]",
        "1.500000 evicted cause=request 2 [1 block] from device",
    )


def test_a_request_tells_what_it_caused() -> None:
    history = History(limit=8)
    history.add(0.0, "acquired", "request 1", [b"a"])
    history.add(0.0, "acquired", "request 2", [b"a"])
    history.add(1.0, "released", "request 1")

    story = history.of_request("request 1")

    assert story == (
        "0.000000 acquired cause=request 1 [1 block]",
        "1.000000 released cause=request 1",
    )


def test_nobody_has_a_story_before_something_happened() -> None:
    history = History(limit=8)

    assert history.of_key(b"a") == history.of_request("request 1") == history.lately(3) == ()


def test_the_last_happenings_can_be_told_whatever_they_concern() -> None:
    history = History(limit=8)
    for number in range(5):
        history.add(float(number), "tick", f"cause {number}")

    assert history.lately(2) == ("3.000000 tick cause=cause 3", "4.000000 tick cause=cause 4")


def test_the_oldest_happenings_are_forgotten() -> None:
    history = History(limit=3)

    for number in range(10):
        history.add(float(number), "tick", "clock", [b"a"])

    assert len(history.of_request("clock")) == 3
    assert history.of_key(b"a")[0].startswith("7.0")


def test_happenings_with_many_keys_push_out_older_ones() -> None:
    history = History(limit=4)
    history.add(0.0, "small", "request", [b"a"])

    history.add(1.0, "large", "request", [bytes([number]) for number in range(200)])
    history.add(2.0, "large", "request", [bytes([number]) for number in range(200)])

    assert [line.split()[1] for line in history.of_request("request")] == ["large"]


def test_one_happening_is_remembered_however_many_keys_it_has() -> None:
    history = History(limit=1)

    history.add(0.0, "huge", "request", [bytes([number]) for number in range(256)])

    assert len(history.lately(5)) == 1


def test_room_taken_by_forgotten_keys_is_given_back() -> None:
    history = History(limit=2)
    for number in range(50):
        history.add(float(number), "published", "request", [bytes([key]) for key in range(60)])

    assert len(history.lately(5)) == 2
