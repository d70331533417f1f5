from __future__ import annotations

import io
import json

import msgspec
import pytest

from lab.bench.measure import Summary
from lab.bench.report import BenchReport, Document, Machine, Param

MACHINE = Machine(
    cpu="Abacus 9", cores=2, memory_bytes=1 << 34, kernel="Linux 6", python="3.11", numpy="2.0"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def new_report() -> BenchReport:
    return BenchReport(version="0.1.0", command="lab bench index", machine=MACHINE)


def add_row(report: BenchReport, *, side: str = "penstock", **params: Param) -> None:
    report.add_row(
        bench="index",
        side=side,
        params=params,
        metric="keys",
        unit="ns",
        summary=Summary(median=1_500_000.0, p99=2_000_000.0, samples=9),
    )


def test_a_written_report_has_exactly_the_agreed_fields() -> None:
    report = new_report()
    add_row(report, tokens=8192, block=16)
    report.add_ratio("acquire", 6.0, at_least=5.0)

    written = report.to_builtins()

    assert isinstance(written, dict)
    assert list(written) == ["penstock", "command", "machine", "rows", "ratios"]
    assert written["penstock"] == "0.1.0"
    assert written["machine"]["cpu"] == "Abacus 9"
    assert written["rows"] == [
        {
            "bench": "index",
            "side": "penstock",
            "params": {"tokens": 8192, "block": 16},
            "metric": "keys",
            "unit": "ns",
            "median": 1_500_000.0,
            "p99": 2_000_000.0,
            "samples": 9,
        }
    ]
    assert written["ratios"] == [{"name": "acquire", "value": 6.0, "target": 5.0, "holds": True}]


def test_a_written_report_reads_back_as_its_document() -> None:
    report = new_report()
    add_row(report, tokens=8192, fast=True, note="a [b] c")

    written = report.to_builtins()

    read = msgspec.json.decode(json.dumps(written), type=Document)
    assert read == report.document()


def test_a_report_without_rows_is_not_written() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        new_report().to_builtins()


def test_a_field_of_the_wrong_type_is_not_written() -> None:
    report = BenchReport(version=1, command="lab bench index", machine=MACHINE)  # type: ignore[arg-type]
    add_row(report, tokens=8192)

    with pytest.raises(msgspec.ValidationError, match="penstock"):
        report.to_builtins()


def test_a_parameter_that_is_no_plain_value_is_refused() -> None:
    with pytest.raises(TypeError, match=r"params.tokens: must be a .*, got \[8192\]"):
        add_row(new_report(), tokens=[8192])  # type: ignore[arg-type]


def test_the_same_row_twice_is_refused() -> None:
    report = new_report()
    add_row(report, tokens=8192)
    add_row(report, tokens=8192, side="vllm")

    with pytest.raises(ValueError, match="added already"):
        add_row(report, tokens=8192)


@pytest.mark.parametrize("median", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused(median: float) -> None:
    summary = Summary(median=median, p99=1.0, samples=1)

    with pytest.raises(ValueError, match="median: must be a finite number"):
        new_report().add_row(
            bench="index", side="penstock", params={}, metric="keys", unit="ns", summary=summary
        )


@pytest.mark.parametrize(("value", "holds"), [(4.9, False), (5.0, True), (5.1, True)])
def test_a_ratio_at_least_its_target_holds(value: float, *, holds: bool) -> None:
    assert new_report().add_ratio("speed", value, at_least=5.0).holds is holds


@pytest.mark.parametrize(("value", "holds"), [(3.9, True), (4.0, True), (4.1, False)])
def test_a_ratio_at_most_its_target_holds(value: float, *, holds: bool) -> None:
    assert new_report().add_ratio("growth", value, at_most=4.0).holds is holds


def test_a_ratio_needs_exactly_one_target() -> None:
    report = new_report()

    with pytest.raises(ValueError, match="needs one target"):
        report.add_ratio("speed", 1.0)
    with pytest.raises(ValueError, match="needs one target"):
        report.add_ratio("speed", 1.0, at_least=1.0, at_most=2.0)


def test_a_missed_target_is_an_exit_code_only_when_targets_are_checked() -> None:
    report = new_report()
    report.add_ratio("held", 6.0, at_least=5.0)
    assert report.exit_code(check=True) == 0

    report.add_ratio("missed", 4.0, at_least=5.0)

    assert report.exit_code(check=False) == 0
    assert report.exit_code(check=True) == 1


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()], ids=["plain", "terminal"])
def test_the_tables_show_rows_targets_and_notes(
    out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    report = new_report()
    add_row(report, tokens=8192, note="from a [list]")
    report.add_ratio("growth", 4.5, at_most=4.0)
    report.add_note("no peer: --peer-python was not given")

    report.show(out)

    text = out.getvalue()
    assert "tokens=8192 note=from a [list]" in text
    assert "1.5 ms" in text
    assert "≤ 4" in text
    assert "NO" in text
    assert text.endswith("Note: no peer: --peer-python was not given\n")


def test_plain_columns_line_up() -> None:
    report = new_report()
    add_row(report, tokens=8192)
    add_row(report, tokens=131072)
    out = io.StringIO()

    report.show(out)

    _, *lines = out.getvalue().rstrip().splitlines()
    assert len({line.index("keys") for line in lines[1:]}) == 1


def test_a_benchmark_says_how_far_it_is() -> None:
    lines: list[str] = []
    report = BenchReport(version="1", command="lab bench", say=lines.append)

    report.progress("round 1 of 3")
    add_row(report, tokens=8192)

    assert [line.partition(" s  ")[2] for line in lines] == [
        "round 1 of 3",
        "index, tokens=8192: keys, penstock: 1.5 ms",
    ]
