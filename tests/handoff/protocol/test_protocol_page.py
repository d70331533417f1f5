"""PROTOCOL.md says what the code does: its tables, its rules and the tests that it names."""

from __future__ import annotations

import ast
import re
from enum import Enum
from pathlib import Path

import pytest

from penstock.errors import InvariantViolation
from penstock.handoff.protocol import messages as msg
from penstock.handoff.protocol.states import (
    DECODE_MOVES,
    PREFILL_MOVES,
    TARGET_MOVES,
    WANT_MOVES,
    DecodeMove,
    DecodeState,
    PrefillMove,
    PrefillState,
    TargetMove,
    TargetState,
    WantMove,
    WantState,
    advance,
)

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "src" / "penstock" / "handoff" / "protocol"
PAGE = (PACKAGE / "PROTOCOL.md").read_text(encoding="utf-8")
TABLES = [
    ("decode scheduler", DECODE_MOVES, DecodeState, DecodeMove),
    ("decode rank", TARGET_MOVES, TargetState, TargetMove),
    ("prefill scheduler", PREFILL_MOVES, PrefillState, PrefillMove),
    ("prefill rank", WANT_MOVES, WantState, WantMove),
]
Table = dict[tuple[Enum, Enum], Enum]


def names_of_tests() -> set[str]:
    """Every test function below tests/handoff."""
    found: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return found


def rules() -> list[str]:
    return re.findall(r"^- \*\*(P\d+)\.", PAGE, re.MULTILINE)


def written_tables() -> list[list[tuple[str, str, str]]]:
    section = PAGE.split("## 5. States")[1].split("## 6.")[0]
    tables: list[list[tuple[str, str, str]]] = []
    for block in re.split(r"\n(?=A handoff with|What a target)", section):
        rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \| ([^|]+?) \|$", block, re.MULTILINE)
        if rows:
            tables.append([row for row in rows if row[0] not in ("state", "---")])
    return tables


@pytest.mark.parametrize("number", range(len(TABLES)), ids=[name for name, *_ in TABLES])
def test_the_tables_of_the_page_are_those_of_the_code(number: int) -> None:
    _, moves, _, _ = TABLES[number]

    assert written_tables()[number] == [
        (state.value, move.value, after.value) for (state, move), after in moves.items()
    ]


@pytest.mark.parametrize(("name", "moves", "states", "kinds"), TABLES)
def test_a_move_that_is_not_in_the_table_raises(
    name: str, moves: Table, states: type[Enum], kinds: type[Enum]
) -> None:
    illegal = [(s, m) for s in states for m in kinds if (s, m) not in moves]

    for state, move in illegal:
        with pytest.raises(InvariantViolation, match=f"is {state.value} cannot {move.value}"):
            advance(moves, state, move)
    assert illegal, name


@pytest.mark.parametrize(("name", "moves", "states", "kinds"), TABLES)
def test_every_state_can_be_reached_and_left(
    name: str, moves: Table, states: type[Enum], kinds: type[Enum]
) -> None:
    first = next(iter(states))
    reached = {first, *moves.values()}

    # A want is open at once where the prompt is known.
    assert reached | {PrefillState.COMPUTING, WantState.OPEN} >= set(states), name
    assert {state for state, _ in moves} == {s for s in states if s.value != "over"}
    assert {move for _, move in moves} == set(kinds)


def test_the_rules_are_numbered_without_a_gap() -> None:
    assert rules() == [f"P{n}" for n in range(1, len(rules()) + 1)]


def test_every_rule_has_a_test_that_names_it() -> None:
    named = {
        match.group(1) for name in names_of_tests() if (match := re.match(r"test_p(\d+)_", name))
    }

    assert {f"P{n}" for n in named} == set(rules())


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))

    assert len(named) > 15
    assert named <= names_of_tests()


def test_the_page_goes_through_all_hazards() -> None:
    rows = re.findall(r"^\| (H\d+) .*\| (P\d+.*) \| `test_\w+` \|$", PAGE, re.MULTILINE)

    assert [hazard for hazard, _ in rows] == [f"H{n}" for n in range(1, 23)]
    assert {f"P{n}" for _, text in rows for n in re.findall(r"P(\d+)", text)} <= set(rules())


def test_the_code_cites_every_rule_and_no_other() -> None:
    cited = {
        rule
        for path in PACKAGE.glob("*.py")
        for rule in re.findall(r"\bP\d+\b", path.read_text(encoding="utf-8"))
    }

    assert cited == set(rules())


def test_every_message_is_on_the_page() -> None:
    section = PAGE.split("## 3. Messages")[1].split("## 4.")[0]

    assert {kind.__name__ for kind in msg.AnyMessage.__args__} <= set(
        re.findall(r"`(\w+)`", section)
    )
