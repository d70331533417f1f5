"""The benchmark of copies on a GPU, short: every side moves blocks, and has its rows."""

from __future__ import annotations

import pytest

from lab.bench import transfer
from lab.bench.report import BenchReport

pytestmark = pytest.mark.gpu

ROUNDS = 3
ONE_WAY = ("to host", "to device")
OURS = {("penstock", direction) for direction in (*ONE_WAY, "both")}
LAYER_WISE = {("layer-wise", "to device")}
OTHERS = {
    (side, direction)
    for side in ("batched memcpy", "index_select", "copy_")
    for direction in ONE_WAY
}
CEILING = {("ceiling", direction) for direction in (*ONE_WAY, "both")}


def test_every_side_moves_blocks_and_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = BenchReport(version="0", command="test")
    # With less, no poll would submit as much as is timed.
    monkeypatch.setattr(transfer, "MOVED_BYTES", transfer.SUBMITTED_BYTES)

    transfer.run_transfer(report, rounds=ROUNDS, layouts=[("8b", 16)])

    rows = report.document().rows
    rates = {(row.side, row.params["direction"]): row for row in rows if row.metric == "rate"}
    in_any_order = {("penstock", "to host, slots in any order")}
    assert rates.keys() == OURS | in_any_order | LAYER_WISE | OTHERS | CEILING
    assert all(row.median > 0 and row.samples == ROUNDS for row in rates.values()), rates
    shares = {
        (row.side, row.params["direction"]): row.median
        for row in rows
        if row.metric == "share of the ceiling"
    }
    assert shares.keys() == OURS | LAYER_WISE
    assert all(share > 0 for share in shares.values()), shares
    small = {row.side for row in rows if row.metric == "small copy to host"}
    assert small == {"alone", "beside a saturating save"}
