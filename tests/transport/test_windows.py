"""Windows: who packs his bytes anyway may pack them into the area itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.inproc import InprocFabric
from penstock.errors import UnavailableError
from penstock.transport.remote import Span, WriteDone
from penstock.transport.shared_memory import SharedTarget, connect_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.transport.remote import Area, Target, WriterLink

    Ends = tuple[Target, Area, WriterLink]


@pytest.fixture(params=["in-process", "shared memory"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    if request.param == "in-process":
        fabric = InprocFabric()
        target = fabric.target()
        area = target.open_area("writer", 1000)
        yield target, area, fabric.connect(area.description)
        return
    shared = SharedTarget(huge_pages=False)
    area = shared.open_area("writer", 1000)
    link = connect_shared(area.description)
    yield shared, area, link
    link.close()
    shared.close()


def test_bytes_that_were_packed_into_a_window_are_there_with_the_notice(ends: Ends) -> None:
    target, area, link = ends
    target.notices()
    window = link.window(300, 200)
    assert window is not None

    window[:] = 7
    number = link.post((), b"there")
    observed, _ = link.observe(budget_bytes=1)
    (notice,) = target.notices()

    assert observed == [WriteDone(number)]
    assert notice.payload == b"there"
    assert np.flatnonzero(area.memory == 7).tolist() == list(range(300, 500))


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, 1001), (999, 2), (5, -1)])
def test_a_window_is_within_its_area(ends: Ends, offset: int, length: int) -> None:
    _, _, link = ends

    with pytest.raises(ValueError, match="must be within the 1000"):
        link.window(offset, length)


def test_there_is_no_window_before_the_memory_is_given() -> None:
    target = SharedTarget(huge_pages=False)
    area = target.open_area("writer", 1000)
    link = connect_shared(area.description)

    early = link.window(0, 10)
    target.notices()
    later = link.window(0, 10)

    assert early is None
    assert later is not None
    link.close()
    target.close()


def test_a_closed_link_has_no_window(ends: Ends) -> None:
    target, _, link = ends
    target.notices()

    link.close()

    with pytest.raises(UnavailableError):
        link.window(0, 10)


def test_shared_memory_is_pinned_on_both_sides_until_it_goes() -> None:
    pinned: list[tuple[str, int]] = []

    def pin_as(side: str) -> Callable[[NDArray[np.uint8]], Callable[[], None]]:
        def pin(memory: NDArray[np.uint8]) -> Callable[[], None]:
            pinned.append((side, len(memory)))
            return lambda: pinned.remove((side, len(memory)))

        return pin

    target = SharedTarget(huge_pages=False, pin=pin_as("target"))
    area = target.open_area("writer", 5000)
    link = connect_shared(area.description, pin=pin_as("writer"))
    target.notices()
    window = link.window(0, 5000)

    both = [side for side, _ in pinned]
    link.close()
    one = [side for side, _ in pinned]
    target.close()

    assert window is not None
    assert (both, one, pinned) == (["target", "writer"], ["target"], [])


def test_memory_that_cannot_be_pinned_is_no_way_to_the_area() -> None:
    def refuse(memory: NDArray[np.uint8]) -> Callable[[], None]:
        raise UnavailableError(f"{len(memory)} bytes cannot be pinned")

    target = SharedTarget(huge_pages=False)
    area = target.open_area("writer", 5000)
    link = connect_shared(area.description, pin=refuse)
    target.notices()

    with pytest.raises(UnavailableError, match="5000 bytes cannot be pinned"):
        link.window(0, 5000)

    link.close()
    target.close()


def test_an_area_of_other_memory_is_written_through_windows_alone() -> None:
    made: list[memoryview] = []

    def allocate(size: int) -> memoryview:
        made.append(memoryview(bytearray(size)))
        return made[-1]

    fabric = InprocFabric()
    target = fabric.target(allocate)
    area = target.open_area("writer", 1000)
    link = fabric.connect(area.description)
    window = link.window(300, 200)
    assert window is not None

    window[0] = 7
    number = link.post((), b"there")
    observed, _ = link.observe(budget_bytes=1)

    assert observed == [WriteDone(number)]
    assert made[0][300] == 7
    assert [each.payload for each in target.notices()] == [b"there"]
    with pytest.raises(ValueError, match="pack into a window"):
        link.post([Span(np.zeros(1, dtype=np.uint8), 0)], b"")
