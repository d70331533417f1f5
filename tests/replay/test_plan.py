"""A plan has a row for every combination, and recommends one of them for a reason that holds."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.app import run
from penstock.errors import ConfigError, UnavailableError
from penstock.replay import plan as planning
from penstock.replay.advice import (
    ENOUGH,
    CachePlan,
    CellFound,
    PlanCell,
    PlanRow,
    recommend,
    sentence_on_the_gap,
)
from penstock.replay.page import LineChart, columns_of, page_of, round_sizes
from penstock.replay.plan import (
    ADAPTIVE,
    LRU,
    WRITES,
    FirstPass,
    Planner,
    PlanSettings,
    cells_of,
    default_sizes,
)
from penstock.replay.report import FirstToken
from penstock.replay.simulation import Speeds
from tests.serve import browser

MIB = 1 / 1024


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Twelve conversations in turn, of six blocks each, which all come back."""
    lines = [
        {"timestamp": at * 1000, "tokens": [at % 12] * 100, "output_length": 2} for at in range(60)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return str(path)


def settings_for(trace: str, **others: object) -> PlanSettings:
    # A block of 16 tokens takes 1 MiB.
    known = {
        "device_gib": 10 * MIB,
        "host_gib": (0.0, 40 * MIB, 80 * MIB, 160 * MIB),
        "policies": (LRU,),
        "writes": WRITES[:1],
    }
    return PlanSettings(trace=trace, token_bytes=1 << 16, **{**known, **others})  # type: ignore[arg-type]


class Watched:
    """What a plan said while it was made."""

    def __init__(self) -> None:
        self.estimates: list[dict[PlanCell, float]] = []
        self.replayed: dict[PlanCell, float] = {}
        self.counts: list[tuple[int, int]] = []

    def reading(self, found: FirstPass, *, ended: bool) -> None:
        assert ended
        assert not self.counts
        self.estimates.append({cell: found.estimate(cell) for cell in cells_of(found.settings)})

    def ended(self, found: tuple[PlanCell, CellFound] | None, done: int, total: int) -> None:
        self.counts.append((done, total))
        if found is not None:
            self.replayed[found[0]] = found[1].token_rate


def plan_for(
    trace: str, *, jobs: int = 1, watch: Watched | None = None, **others: object
) -> CachePlan:
    return Planner(settings_for(trace, **others), jobs=jobs, watch=watch or Watched()).run()


def test_a_plan_recommends_the_smallest_tier_that_finds_nearly_all(trace: str) -> None:
    plan = plan_for(trace)

    rates = {row.cell.host_gib: row.found.token_rate for row in plan.rows}
    # LRU finds nothing of a loop that is larger than its room.
    assert rates[0.0] == rates[40 * MIB] == 0.0
    assert rates[80 * MIB] == rates[160 * MIB] == pytest.approx(48 * 96 / 6000)
    assert plan.recommended.cell.host_gib == 80 * MIB
    assert f"{ENOUGH:.0%}" in plan.recommended.reason
    assert "try larger" not in plan.recommended.reason
    assert all(row.found.token_rate <= row.best_rate for row in plan.rows)
    assert [row.tokens_per_gib for row in plan.rows] == [
        None,
        0.0,
        pytest.approx(48 * 96 / (40 * MIB)),
        0.0,
    ]


def test_where_times_are_known_the_first_token_decides_and_not_the_share() -> None:
    def row(host: float, rate: float, mean_s: float | None) -> PlanRow:
        cell = PlanCell(policy=LRU, write=WRITES[0] if host else "", host_gib=host, disk_gib=0.0)
        times = dict.fromkeys(("p50_s", "p90_s", "p99_s", "compute_busy"), 0.5)
        first = None if mean_s is None else FirstToken(mean_s=mean_s, **times)
        found = CellFound(
            requests=9, refused=0, tokens=900, token_rate=rate, tier_rates=[rate], first_token=first
        )
        return PlanRow(
            cell=cell, total_gib=1 + host, found=found, best_rate=0.9, tokens_per_gib=None
        )

    by_time = recommend([row(0, 0.1, 1.5), row(2, 0.4, 1.05), row(4, 0.6, 0.98), row(8, 0.6, 0.97)])
    by_share = recommend([row(0, 0.1, None), row(2, 0.4, None), row(4, 0.6, None)])

    assert by_time.cell.host_gib == 2
    assert by_time.reason == (
        "It finds 40.00% of prompt tokens with 3 GiB in all, and the first token comes after 1.05 "
        "s on average. No smaller host tier is within 11% of the 0.97 s of the quickest "
        "configuration here, of up to 9 GiB."
    )
    assert by_share.cell.host_gib == 4


def test_a_plan_without_a_host_tier_says_why(trace: str) -> None:
    enough = plan_for(trace, device_gib=200 * MIB).recommended
    nothing = plan_for(trace, host_gib=(0.0, 1 * MIB)).recommended
    untried = plan_for(trace, host_gib=(0.0,)).recommended

    assert enough.cell.host_gib == nothing.cell.host_gib == 0.0
    assert re.search(r"at least 90% of the 76.80% that .*, so host memory adds", enough.reason)
    assert "No configuration here finds anything" in nothing.reason
    assert untried.reason.endswith("No host tier was tried.")


def test_the_largest_size_is_recommended_with_the_advice_to_try_larger_ones(trace: str) -> None:
    plan = plan_for(trace, host_gib=(0.0, 80 * MIB))

    assert plan.recommended.cell.host_gib == 80 * MIB
    assert plan.recommended.reason.endswith("the largest that was tried: try larger ones.")


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (0.37, ["0%", "10%", "20%", "30%", "40%"]),
        (0.05, ["0%", "1%", "2%", "3%", "4%", "5%"]),
        (1.0, ["0%", "20%", "40%", "60%", "80%", "100%"]),
        (0.0, ["0%", "20%", "40%", "60%", "80%", "100%"]),
    ],
)
def test_a_chart_has_lines_at_round_values(highest: float, ticks: list[str]) -> None:
    chart = LineChart([40.0, 296.0], highest)
    chart.add_axes([40.0, 296.0], "GiB", percent=True)

    assert re.findall(r">([\d.]+%)<", chart.svg()) == ticks


def test_the_bound_never_falls_with_more_room(trace: str) -> None:
    plan = plan_for(trace)

    rates = [rate for _, rate in plan.bound]
    assert rates == sorted(rates)
    assert {row.total_gib for row in plan.rows} <= {size for size, _ in plan.bound}


def test_lru_with_write_through_is_known_from_one_pass_and_the_replay_agrees(trace: str) -> None:
    watch = Watched()

    plan = plan_for(trace, watch=watch)
    replayed = {
        host: plan_for(trace, host_gib=(host,)).rows[0].found
        for host in (40 * MIB, 80 * MIB, 160 * MIB)
    }

    # Without the smaller device in the plan, its share is not known, and all is replayed.
    assert [cell.host_gib for cell in watch.replayed] == [0.0]
    assert {row.cell.host_gib: row.found for row in plan.rows if row.cell.host_gib} == replayed
    assert watch.estimates == [{row.cell: row.found.token_rate for row in plan.rows}]


def test_a_configuration_that_another_of_its_sizes_beats_clearly_is_estimated(trace: str) -> None:
    sizes = {"host_gib": (0.0, 50 * MIB, 80 * MIB), "policies": (LRU, ADAPTIVE), "writes": WRITES}
    watch = Watched()

    plan = plan_for(trace, watch=watch, **sizes)

    # Of a loop, the adaptive policy finds some where LRU finds nothing; with enough room, it all.
    (row,) = [row for row in plan.rows if row.found.estimated]
    assert row.cell == PlanCell(policy=LRU, write=WRITES[1], host_gib=50 * MIB, disk_gib=0.0)
    assert row.found.token_rate == watch.estimates[0][row.cell]
    assert columns_of([row])[1][0][3] == f"about {row.found.token_rate:.2%}"
    assert row.cell not in watch.replayed
    assert plan.recommended.cell != row.cell
    assert watch.counts[-1] == (len(watch.replayed) + 1,) * 2


def test_a_trace_with_hints_is_replayed(trace: str) -> None:
    with open(trace, "a", encoding="utf-8") as file:
        line = {"timestamp": 60_000, "tokens": [1] * 100, "penstock": {"keep_tokens": 0}}
        file.write(f"{json.dumps(line)}\n")
    watch = Watched()

    plan = plan_for(trace, watch=watch)

    assert watch.replayed.keys() == {row.cell for row in plan.rows}


def test_a_plan_is_the_same_with_several_processes(trace: str) -> None:
    sizes = {"host_gib": (0.0, 80 * MIB), "policies": (LRU, ADAPTIVE), "writes": WRITES}

    assert plan_for(trace, jobs=2, **sizes) == plan_for(trace, **sizes)


def test_a_wrong_line_ends_a_plan_of_several_processes_with_its_message(trace: str) -> None:
    with open(trace, "a", encoding="utf-8") as file:
        file.write("{}\n")

    with pytest.raises(ConfigError, match=r"trace\.jsonl:61: timestamp is missing, must be"):
        plan_for(trace, jobs=2)


def test_a_plan_whose_process_is_killed_ends_and_says_so(trace: str) -> None:
    class BlocksReplays(Watched):
        """Whoever opens a pipe that nobody writes waits: no replay ends before the kill."""

        def reading(self, found: FirstPass, *, ended: bool) -> None:
            super().reading(found, ended=ended)
            os.unlink(trace)
            os.mkfifo(trace)

    before = multiprocessing.active_children()
    threads = set(threading.enumerate())

    def kill_one() -> None:
        for _ in range(1200):
            for new in set(multiprocessing.active_children()) - set(before):
                new.kill()
                return
            threading.Event().wait(0.05)

    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(UnavailableError, match=r"process of the plan was killed.* fewer --jobs"):
        plan_for(trace, jobs=2, watch=BlocksReplays())
    killer.join()

    assert set(multiprocessing.active_children()) <= set(before)
    assert set(threading.enumerate()) <= threads


def test_a_process_that_is_killed_as_soon_as_it_was_started_is_missed(
    trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's pool does not watch the one that it has started last."""

    class BlocksReplays(Watched):
        def reading(self, found: FirstPass, *, ended: bool) -> None:
            super().reading(found, ended=ended)
            os.unlink(trace)
            os.mkfifo(trace)

    before = set(multiprocessing.active_children())
    wait_for = planning.wait
    killed: list[Any] = []

    def kill_the_last(left: Any, *how: Any) -> Any:
        if not killed:
            started = set(multiprocessing.active_children()) - before
            killed.append(max(started, key=lambda each: each.pid or 0))
            killed[0].kill()
        return wait_for(left, 0.2, *how[1:])

    monkeypatch.setattr(planning, "wait", kill_the_last)
    with pytest.raises(UnavailableError, match=r"process of the plan was killed"):
        plan_for(trace, jobs=2, watch=BlocksReplays(), host_gib=(0.0, 40 * MIB))
    assert set(multiprocessing.active_children()) <= before


def test_an_interrupted_plan_leaves_neither_processes_nor_threads(trace: str) -> None:
    class Interrupted(Watched):
        def ended(self, found: tuple[PlanCell, CellFound] | None, done: int, total: int) -> None:
            super().ended(found, done, total)
            raise KeyboardInterrupt

    before = multiprocessing.active_children()
    threads = set(threading.enumerate())

    with pytest.raises(KeyboardInterrupt):
        plan_for(trace, jobs=2, watch=Interrupted(), writes=WRITES)

    assert set(multiprocessing.active_children()) <= set(before)
    assert set(threading.enumerate()) <= threads


def test_with_rates_the_recommended_sizes_are_tried_under_other_loads(trace: str) -> None:
    watch = Watched()

    plan = plan_for(
        trace, host_gib=(80 * MIB,), speeds=Speeds(prefill_tokens_per_s=100.0), watch=watch
    )

    firsts = [row.found.first_token.mean_s for row in plan.loads if row.found.first_token]
    assert [row.cell.stretch for row in plan.loads] == [0.5, 1.0, 2.0]
    # A prompt arrives every second and takes one to compute: under twice the load, they queue.
    assert firsts[0] > firsts[1] == pytest.approx(firsts[2])
    assert watch.counts == [(done, 4) for done in range(1, 5)]


def test_sizes_that_nobody_gave_are_larger_than_the_device(trace: str) -> None:
    settings = settings_for(trace, device_gib=40.0, host_gib=(), policies=(LRU, ADAPTIVE))
    cells = cells_of(PlanSettings(trace=trace, token_bytes=1, device_gib=40.0))

    assert default_sizes(40.0) == (0.0, 64.0, 128.0, 256.0)
    assert default_sizes(0.5) == (0.0, 1.0, 2.0, 4.0)
    assert {cell.host_gib for cell in cells_of(settings)} == set(default_sizes(40.0))
    assert {(cell.policy, cell.write) for cell in cells if cell.host_gib} == {
        (policy, write) for policy in (LRU, ADAPTIVE) for write in WRITES
    }


def test_a_host_tier_that_is_no_larger_than_the_device_is_told_of(trace: str) -> None:
    small = plan_for(trace, device_gib=20 * MIB, host_gib=(0.0, 10 * MIB))
    exclusive = plan_for(trace, device_gib=20 * MIB, host_gib=(10 * MIB,), writes=WRITES[1:])

    (note,) = small.notes
    assert note.startswith("A host tier of 0.00976562 GiB is not larger than the device, 0.0195312")
    assert note in page_of(small)
    assert exclusive.notes == []


def test_one_sentence_says_what_closes_the_gap(trace: str) -> None:
    host = 70 * MIB
    apart = plan_for(trace, host_gib=(host,), writes=WRITES)
    alone = plan_for(trace, host_gib=(60 * MIB, 160 * MIB))
    all_found = plan_for(trace, host_gib=(160 * MIB,))

    assert apart.gap == (
        "In this room lru with write_through finds 51.20% and the best possible is 76.80%: of "
        "these 25.60 points exclusive closes 21.60; hints of clients may close more (penstock "
        "replay --perfect-hints says how much)."
    )
    small = sentence_on_the_gap(alone.rows, alone.rows[0].cell)
    assert "74.67 points nothing that was tried closes any; hints" in small
    assert small.endswith("; lru, 0.15625 GiB of host memory (write_through) finds 76.80%.")
    assert all_found.gap == (
        "In this room lru with write_through finds as much as any policy could, 76.80%."
    )


def test_a_disk_is_tried_below_a_host_tier_only(trace: str) -> None:
    cells = cells_of(settings_for(trace, host_gib=(0.0, 1.0), disk_gib=(0.0, 2.0)))

    assert [(cell.host_gib, cell.disk_gib) for cell in cells] == [(0, 0), (1, 0), (1, 2)]
    assert [cell.write for cell in cells] == ["", "write_through", "write_through"]
    with pytest.raises(ConfigError, match="--host-gib: is 0, must be more with a disk"):
        cells_of(settings_for(trace, host_gib=(0.0,), disk_gib=(2.0,)))


def test_requests_that_do_not_fit_on_the_device_count_nowhere_and_are_told(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"timestamp": 60_000, "tokens": [99] * 1000}
    with open(trace, "a", encoding="utf-8") as file:
        file.write(f"{json.dumps(long)}\n{json.dumps(long)}\n")

    plan = plan_for(trace, host_gib=(160 * MIB,))
    page = page_of(plan)

    (row,) = plan.rows
    assert row.found.refused == 2
    assert row.found.token_rate == row.best_rate == pytest.approx(48 * 96 / 6000)
    assert "2 requests have more blocks than they can get: they were left out" in page
    sizes = ["--device-gib", f"{10 * MIB}", "--host-gib", f"{160 * MIB}", "--kv-bytes", "65536"]
    assert run(["plan", trace, *sizes, "--jobs", "1"]) == 0
    assert "2 requests have more blocks than they can get" in capsys.readouterr().out


def test_a_device_without_room_for_any_request_is_refused(trace: str) -> None:
    with pytest.raises(ConfigError, match=r"--device-gib: is 0.0058\d+, must have room for the"):
        plan_for(trace, device_gib=6 * MIB)


def test_a_size_without_room_for_a_block_is_refused(trace: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--host-gib: is 0.0001, must be 0 or have room for 1 to"
    ):
        plan_for(trace, host_gib=(0.0001,))
    with pytest.raises(ConfigError, match=r"--device-gib: is 1e\+07, must have room for 1 to"):
        plan_for(trace, device_gib=1e7)


class Tags(HTMLParser):
    """Which elements a page has, and what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.references += [value or "" for name, value in attrs if name in {"src", "href"}]


def test_the_page_has_curves_and_nothing_from_elsewhere(trace: str) -> None:
    tags = Tags()

    tags.feed(page_of(plan_for(trace, speeds=Speeds(prefill_tokens_per_s=1000.0))))

    assert tags.names.count("svg") == 2
    # What was tried, LRU over all the room, and the bound; and what each GiB more brings.
    assert tags.names.count("polyline") == 4
    assert "script" not in tags.names
    assert not tags.references


@pytest.mark.parametrize(
    ("sizes", "ticks"),
    [
        ([3.9, 7.8, 15.6], [2, 4, 8, 16]),
        ([1.0, 4.0], [1, 2, 4]),
        ([0.3], [0.25, 0.5]),
        ([8.0], [8, 16]),
        ([1.0, 2.0**20], [4.0**each for each in range(11)]),
    ],
)
def test_axes_of_sizes_have_round_numbers(sizes: list[float], ticks: list[float]) -> None:
    assert round_sizes(sizes) == ticks


@pytest.mark.skipif(not browser.PROGRAM, reason="there is no chromium: apt-get install chromium")
def test_the_page_fits_every_screen_and_can_be_read(trace: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    file.write_text(
        page_of(plan_for(trace, speeds=Speeds(prefill_tokens_per_s=1000.0))), encoding="utf-8"
    )

    with browser.browsing(tmp_path / "profile") as page:
        page.open(file.as_uri())
        page.suits_every_screen()
        page.show(width=390)
        cut = (
            "[...document.querySelectorAll('.table')].filter((e) => e.scrollWidth > e.clientWidth)"
        )
        page.wait(f"{cut}.length === 0")
        assert page.requests == [file.as_uri()]
        assert page.errors == []


def test_the_command_prints_a_table_and_writes_json_and_a_page(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--device-gib", "0.02", "--host-gib", "0,0.2", "--kv-bytes", "65536"]
    written = ["--html", str(tmp_path / "new" / "p.html"), "--json", str(tmp_path / "p.json")]

    status = run(["plan", trace, *sizes, *written, "--jobs", "1"])

    printed, said = capsys.readouterr()
    assert status == 0
    # LRU with write_through is known from the pass, and not replayed.
    assert said.startswith(f"first answer, by {LRU} over 60 requests: no host tier 0.00%; 0.2 GiB")
    assert "in any room at most 76.80%" in said
    assert re.search(rf" s, 5 of 6 replays: {LRU}, no host tier: 0.00%\n", said)
    assert said.endswith(f" s, 6 of 6 replays: {LRU}, 0.2 GiB of host memory (exclusive): 76.80%\n")
    assert f"recommended: {LRU}, 0.2 GiB of host memory (" in printed
    assert len(json.loads((tmp_path / "p.json").read_text())["rows"]) == 6
    assert "<svg" in (tmp_path / "new" / "p.html").read_text(encoding="utf-8")


def test_a_trace_that_takes_long_to_read_is_answered_before_its_end(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.cli.replay.FIRST_ANSWER_S", 0.0)
    Path(trace).write_text('{"timestamp": 0, "tokens": [1]}\n' * 600, encoding="utf-8")

    run(["plan", trace, "--jobs", "1", "--host-gib", "0"])

    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("first answer, by lru over 256 requests, so far: no host tier 0.00%")
    assert said[1].startswith("first answer, by lru over 600 requests: no host tier 0.00%")


def test_a_plan_of_a_pipe_is_that_of_the_file(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(Path(trace).read_bytes(),))
    sizes = ["--device-gib", "0.02", "--host-gib", "0,0.2", "--kv-bytes", "65536", "--jobs", "1"]

    writer.start()
    status = run(["plan", str(pipe), *sizes])
    writer.join()

    piped = capsys.readouterr().out
    assert status == 0
    run(["plan", trace, *sizes])
    assert capsys.readouterr().out == piped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host-gib", "a"], "is 'a', must be numbers from 0"),
        (["--device-gib", "1048577"], "is 1048577.0, must be a number from 1e-06 to 1048576"),
        (["--html", "-"], "--html: is '-', must be a file of its own"),
        (["--html", "x", "--json", "./x"], "--html: is 'x', must be a file of its own"),
        (["--policy", "best"], "--policy: is 'best', must be one of"),
        (["--write", "write_back"], "--write: is 'write_back', must be one of write_through, exc"),
        (["--bandwidth", "host=1", "--bandwidth", "host=2"], "names 'host' twice, must be given"),
        (["--bandwidth", "tape=1"], "names 'tape', must be one of host, disk"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    trace: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["plan", trace, *options])

    assert status == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
