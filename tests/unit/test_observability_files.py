"""What `deploy/observability` asks Prometheus for exists, under these names and with these labels."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.metrics.definitions import Kind, Metric
from pdserve.metrics.router_table import ROUTER_METRICS
from pdserve.metrics.worker_table import WORKER_METRICS

FILES = Path(__file__).parents[2] / "deploy" / "observability"
RULES, SCRAPE = FILES / "rules.yml", FILES / "prometheus.yml"
DASHBOARD = FILES / "grafana" / "dashboards" / "pdserve.json"

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in (*ROUTER_METRICS, *WORKER_METRICS)}
ADDED_BY_PROMETHEUS = {"instance", "job"}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])


def series_of(metric: Metric) -> set[str]:
    if metric.kind is Kind.HISTOGRAM:
        return {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    return {metric.name}


def labels_of(series: str) -> set[str]:
    (metric,) = (metric for metric in BY_NAME.values() if series in series_of(metric))
    labels = {*metric.labels, *ADDED_BY_PROMETHEUS}
    if series.endswith("_bucket"):
        labels.add("le")
    # Each worker says which role it has.
    return labels | {"role"} if metric in WORKER_METRICS else labels


def test_every_metric_that_is_named_exists() -> None:
    known = {series for metric in BY_NAME.values() for series in series_of(metric)}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    named = {name for text in expressions() for name in re.findall(r"\bpdserve[a-z0-9_:]+", text)}
    assert len(named) >= 40
    assert named <= known | recorded


def test_every_label_that_is_selected_or_grouped_by_exists() -> None:
    for text in expressions():
        for series, selector in re.findall(r"\b(pdserve_[a-z0-9_]+)\{([^}]*)\}", text):
            assert set(re.findall(r"(\w+)\s*[=!]~?=?\s*\"", selector)) <= labels_of(series), text
        named = re.findall(r"\bpdserve_[a-z0-9_]+", text)
        for group in re.findall(r"\bby \(([^)]*)\)", text):
            wanted = {label.strip() for label in group.split(",")}
            assert any(wanted <= labels_of(series) for series in named), f"{wanted} in {text}"


def test_legends_use_labels_that_are_left() -> None:
    for panel in panels():
        for target in panel["targets"]:
            groups = {g.strip() for group in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for g in group.split(",")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= groups, panel["title"]


def test_panels_have_names_of_their_own_and_do_not_overlap() -> None:
    every = json.loads(DASHBOARD.read_text())["panels"]
    assert [p["title"] for p in every if p["type"] == "row"] == [
        "Overview", "Prefill and decode", "Placement", "Recovery",
    ]  # fmt: skip
    assert len({panel["id"] for panel in every}) == len(every)
    cells = [
        (x, y)
        for panel in every
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_alerts_say_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 10
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["description"]


def test_every_role_is_scraped() -> None:
    jobs = yaml.safe_load(SCRAPE.read_text())["scrape_configs"]
    assert {job["job_name"] for job in jobs} == {"pdserve-router", "pdserve-prefill", "pdserve-decode"}


@needs_promtool
@pytest.mark.parametrize("arguments", [("rules", RULES), ("config", SCRAPE)], ids=lambda a: a[0])
def test_promtool_accepts_them(arguments: tuple[str, Path]) -> None:
    kind, path = arguments
    done = subprocess.run(["promtool", "check", kind, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
