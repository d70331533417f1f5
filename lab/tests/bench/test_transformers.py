"""The benchmark of transformers measures what it says."""

from __future__ import annotations

from lab.bench.report import BenchReport
from lab.bench.transformers_first_token import run_transformers


def test_both_sides_answer_alike_and_the_document_is_found() -> None:
    report = BenchReport(version="0", command="lab bench transformers")

    run_transformers(report, shape="tiny", device="cpu", tokens=100, rounds=2)

    rows = {row.side: row for row in report.document().rows}
    assert rows["plain"].samples == rows["cached"].samples == 2
    assert rows["cached, after a restart"].samples == 1
    assert "0 of 2 first tokens differ" in report._notes
    assert any("3 with a hit" in note or "2 with a hit" in note for note in report._notes)
