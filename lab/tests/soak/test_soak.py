"""A soak finds what grows, and a served system that is harmed has nothing to be found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.soak.clients import Clients, Prompt, draw_prompts
from lab.soak.meter import Look, growth
from lab.soak.run import soak

if TYPE_CHECKING:
    from pathlib import Path


def looks(count: int = 12, **rising: float) -> list[Look]:
    """Looks at a system of which nothing grows but what is given, by so much a look."""
    flat = Look(
        minutes=1.0,
        answers=100,
        unanswered=3,
        faults=9,
        cached=5000,
        memory_mib=2000.0,
        server_mib=200.0,
        server_descriptors=60,
        descriptors=300,
        threads=40,
        processes=13,
        files=20,
    )
    grown = {name: getattr(flat, name) for name in rising}
    return [
        flat._replace(**{name: grown[name] + n * more for name, more in rising.items()})
        for n in range(count)
    ]


def test_what_stays_has_not_grown() -> None:
    assert growth(looks()) == []


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("memory_mib", 60.0),
        ("server_mib", 5.0),
        ("server_descriptors", 2),
        ("descriptors", 5),
        ("threads", 1),
        ("files", 2),
    ],
)
def test_what_grows_with_every_look_is_named(name: str, more: float) -> None:
    [found] = growth(looks(**{name: more}))

    assert found.startswith(f"{name} grew from ")


def test_too_few_looks_say_nothing_of_growth() -> None:
    assert growth(looks(5, threads=10)) == []


def test_what_grew_at_first_and_stays_is_no_growth() -> None:
    before, after = looks(4, descriptors=50), looks(9)
    high = [each._replace(descriptors=500) for each in after]

    assert growth(before + high) == []


def test_more_open_pairs_than_before_are_no_growth() -> None:
    pairs = (2, 0, 1, 3, 1, 0, 1, 0, 2, 4, 0, 5)
    seen = [each._replace(descriptors=300 + 90 * n) for each, n in zip(looks(), pairs, strict=True)]

    assert growth(seen) == []


def test_prompts_of_a_seed_are_the_same_and_continue_each_other() -> None:
    prompts = draw_prompts(3)

    assert prompts == draw_prompts(3) != draw_prompts(4)
    assert prompts[1][: len(prompts[0])] == prompts[0]


def test_another_answer_than_the_known_one_is_a_finding() -> None:
    clients = Clients("http://127.0.0.1:1", seed=1)

    outcome = clients._compare(Prompt([1, 2, 3], "right"), "wrong", "under load")

    assert outcome == "strange"
    assert clients.findings == ["under load: a prompt of 3 tokens got another answer"]


@pytest.mark.long
def test_a_served_system_that_is_harmed_gives_right_answers_and_becomes_well_again(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")

    outcome = soak(tmp_path, minutes=2, seed=5, load_s=20, progress=lambda _: None)

    assert outcome.findings == []
    assert outcome.ends["answered"] > 0
    assert sum(outcome.faults.values()) > 0
