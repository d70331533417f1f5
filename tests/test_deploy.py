"""What lies in `deploy/`: alert rules and a dashboard over metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.connectors.base.statistics import COUNTERS, GAUGES, TIMES
from penstock_serve.observe.live import RoutedServer
from penstock_serve.observe.metrics import COUNTER, METRICS, RouterMetrics, ServerMetrics

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
PROMTOOL = shutil.which("promtool") or str(ROOT / "build/prometheus/usr/bin/promtool")
METRIC = re.compile(r"\b((?:vllm:)?penstock_\w+)(?:\{([^}]*)\})?")
OTHERS = {"job"}
"""Labels that Prometheus adds itself."""
VLLM_PAGE = ROOT / "tests" / "observe" / "pages" / "vllm.txt"
"""What a vLLM with Penstock's connector answered."""


def exported() -> dict[str, set[str]]:
    """The labels of every series that a server, a router or vLLM exports, by its name."""
    found = {
        f"penstock_{row.name}{'_total' if row.kind is COUNTER else ''}": {"instance", *row.labels}
        for row in METRICS
    }
    server, router = ServerMetrics(), RouterMetrics()
    server.requests.labels("answered").inc()
    for metrics in (server, router):
        metrics.count_response("completions", 200)
    router.count("a", "decode", "answered")
    server_up = RoutedServer(name="a", role="decode", up=True, version="1", cause="", load=0)
    vllm = VLLM_PAGE.read_bytes()
    for text in (server.text([], retries=0), router.text([server_up]), vllm):
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_page_of_vllm_has_what_the_connector_counts_today() -> None:
    known = {name.removeprefix("vllm:penstock_") for name in exported()}

    # Those that came after the page was recorded.
    later = {"bytes_sent_early", "loads_not_started", "prompts_lost"}
    assert {f"{name}_total" for name in COUNTERS.keys() - later} <= known
    assert GAUGES.keys() <= known
    assert {f"{name}_bucket" for name in TIMES} <= known


def dashboard_expressions() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    variables = [
        each["query"]["query"]
        for each in dashboard["templating"]["list"]
        if each["type"] == "query"
    ]
    return [target["expr"] for panel in panels for target in panel["targets"]] + variables


def rule_expressions() -> list[str]:
    text = (DEPLOY / "prometheus-rules.yml").read_text()
    found = re.findall(r"expr: (?:\|\n((?: {10,}.*\n)+)|(.*))", text)
    assert len(found) == text.count("- alert:")
    return [block or line for block, line in found]


@pytest.mark.parametrize("read", [dashboard_expressions, rule_expressions])
def test_every_metric_that_is_asked_for_exists_with_its_labels(read: object) -> None:
    known = exported()
    assert callable(read)
    expressions = read()

    used = [match for each in expressions for match in METRIC.findall(each)]
    assert len(used) >= len(expressions)
    for name, labels in used:
        assert name in known, f"{name} is not exported"
        asked = set(re.findall(r"(\w+)\s*(?:=|!)", labels)) - OTHERS
        assert asked <= known[name], f"{name} has no label {asked - known[name]}"


def test_every_panel_says_what_it_shows_and_has_room() -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    panels = dashboard["panels"]

    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        box = panel["gridPos"]
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"]
        cells = {
            (x, y)
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.skipif(
    not Path(PROMTOOL).exists(), reason="there is no promtool: `make promtool`, or install it"
)
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "prometheus-rules.yml"),
        ("test", "rules", "prometheus-rules-test.yml"),
    ],
)
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    checked = subprocess.run(
        [PROMTOOL, *arguments], cwd=DEPLOY, capture_output=True, text=True, timeout=60, check=False
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr
