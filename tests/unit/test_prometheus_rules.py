"""The rules: promtool's tests of them, names and documents both ways, faults that must be noticed."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.prometheus.mutations import FOLDER, RULE_FILES, TEST_FILES, faults, is_noticed, survivors
from deploy.prometheus.shorten import shortened
from kvatlas.metric import Metric, MetricKind
from service.config import ServiceConfig
from service.metric_table import TABLE as SERVICE_TABLE
from service.metric_table import TTFT_SECONDS
from worker.config import WorkerConfig
from worker.readers.metric_table import TABLE as WORKER_TABLE

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = ROOT / "docs" / "operations.md"
TABLES: tuple[Metric, ...] = (*WORKER_TABLE, *SERVICE_TABLE)
NAME = re.compile(r"\b(?:kvatlas|grpc_server)_[a-z0-9_]*[a-z0-9]\b")
RECORDED = re.compile(r"\bkvatlas:[a-z0-9_]+:[a-z0-9_]+")
needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs promtool (Debian package prometheus)"
)
needs_amtool = pytest.mark.skipif(
    not shutil.which("amtool"), reason="needs amtool (Debian package prometheus-alertmanager)"
)


def rules(file: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return rules("alerts.yml")


def exported() -> set[str]:
    names = set()
    for metric in TABLES:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is MetricKind.HISTOGRAM else ("",)
        names |= {metric.exposed + suffix for suffix in suffixes}
    return names


def headings() -> set[str]:
    return set(re.findall(r"^### (\w+)$", OPERATIONS.read_text(), re.MULTILINE))


def run(*command: str, folder: Path = FOLDER) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_finds_nothing_wrong() -> None:
    run("promtool", "check", "config", "prometheus.yml")
    run("promtool", "check", "rules", *RULE_FILES)


@needs_promtool
@pytest.mark.parametrize("file", TEST_FILES)
def test_each_ratio_has_its_value_and_each_alert_fires_and_stays_silent(file: str) -> None:
    run("promtool", "test", "rules", file)


def test_each_ratio_is_asked_for_and_each_alert_has_both_cases() -> None:
    tests = [each for file in TEST_FILES for each in yaml.safe_load((FOLDER / file).read_text())["tests"]]
    asked = json.dumps([each.get("promql_expr_test", []) for each in tests])
    for rule in rules("recording.yml"):
        assert rule["record"] in asked, rule["record"]
    cases = [case for each in tests for case in each.get("alert_rule_test", [])]
    for alert in alerts():
        expected = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == alert["alert"]]
        assert True in expected, f"{alert['alert']} is never seen firing"
        assert False in expected, f"{alert['alert']} is never seen silent"


@needs_promtool
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_planted_fault_goes_unnoticed() -> None:
    tried = list(faults())
    assert len(tried) > 200
    assert [f"{fault.rule}: {fault.what}" for fault in survivors(tried)] == []


@needs_promtool
def test_planted_faults_of_one_rule_are_noticed_and_a_harmless_change_is_not() -> None:
    """The quick part of the test above, and that its judge can say no."""
    tried = [fault for fault in faults() if fault.rule == "KvatlasDown"]
    assert len(tried) >= 8
    assert [fault.what for fault in tried if not is_noticed(fault)] == []
    text = (FOLDER / tried[0].file).read_text()
    assert not is_noticed(replace(tried[0], what="nothing", text=text))


def test_every_name_in_a_rule_is_exported_or_recorded_and_every_record_is_used() -> None:
    known, records = exported(), {rule["record"] for rule in rules("recording.yml")}
    used = set()
    for rule in (*rules("recording.yml"), *alerts()):
        name = rule.get("record") or rule["alert"]
        assert set(NAME.findall(rule["expr"])) <= known, name
        used |= set(RECORDED.findall(rule["expr"]))
    shown = "\n".join(path.read_text() for path in (ROOT / "deploy/grafana/dashboards").glob("*.json"))
    told = OPERATIONS.read_text()
    assert used <= records
    assert records - used - set(RECORDED.findall(shown)) - set(RECORDED.findall(told)) <= FOR_PEOPLE


# Asked for by people at a console, and by the dashboards of others.
FOR_PEOPLE = {
    "kvatlas:page_sharing:ratio",
    "kvatlas:prefix_hit:ratio_rate5m",
    "kvatlas:ttft_seconds:p50_rate5m",
}


# Of a host tier, which docs/metrics.md says there is none of yet.
ABSENT = {"kvatlas_host_pages", "kvatlas_page_move_seconds"}


def test_every_name_in_the_documents_exists() -> None:
    assert not ABSENT & exported()
    known, records = exported(), {rule["record"] for rule in rules("recording.yml")}
    families = {metric.exposed for metric in TABLES}
    for document in (OPERATIONS, ROOT / "docs" / "metrics.md"):
        text = document.read_text()
        assert set(NAME.findall(text)) - ABSENT <= known | families, document
        assert set(RECORDED.findall(text)) <= records, document


def test_every_alert_leads_to_its_runbook_and_every_runbook_has_its_alert() -> None:
    for alert in alerts():
        annotations = alert["annotations"]
        assert set(annotations) == {"summary", "action", "runbook_url"}, alert["alert"]
        path, _, anchor = annotations["runbook_url"].partition("#")
        assert ROOT / path == OPERATIONS
        assert anchor == alert["alert"].lower()
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert headings() == {alert["alert"] for alert in alerts()}
    text = OPERATIONS.read_text()
    for name in headings():
        part = text.partition(f"### {name}\n")[2].partition("\n##")[0]
        assert "**Means.**" in part, name
        assert "**Do.**" in part, name


def test_the_slo_is_an_edge_of_the_histogram_as_it_is_written() -> None:
    for rule in rules("recording.yml"):
        for edge in re.findall(r'le="([^"]+)"', rule["expr"]):
            assert float(edge) in TTFT_SECONDS
            assert edge == str(float(edge)), "Prometheus compares the text of the edge"


def targets_of(job: dict[str, Any]) -> list[str]:
    [path] = job["file_sd_configs"][0]["files"]
    [group] = yaml.safe_load((FOLDER / path).read_text())
    targets: list[str] = group["targets"]
    return targets


def test_jobs_and_ports_are_those_of_the_processes() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    targets = {each["job_name"]: targets_of(each) for each in config["scrape_configs"]}
    worker = WorkerConfig()
    assert targets == {
        "kvatlas-service": [ServiceConfig().metrics_address],
        "kvatlas-worker": [f"{worker.metrics_host}:{worker.metrics_port}"],
    }
    down = next(alert for alert in alerts() if alert["alert"] == "KvatlasDown")
    pattern = re.search(r'job=~"([^"]+)"', down["expr"])
    assert pattern is not None
    assert all(re.fullmatch(pattern[1], job) for job in targets)


@needs_amtool
def test_alertmanagers_example_is_valid_and_routes_by_severity() -> None:
    path = ROOT / "deploy" / "alertmanager" / "alertmanager.yml"
    run("amtool", "check-config", str(path))
    for severity, receiver in (("critical", "on-call"), ("warning", "daytime"), ("info", "daytime")):
        run(
            *("amtool", "config", "routes", "test", f"--config.file={path}"),
            *(f"--verify.receivers={receiver}", f"severity={severity}"),
        )
    known = {alert["alert"] for alert in alerts()}
    named = set(re.findall(r'alertname="(\w+)"', path.read_text()))
    assert named <= known


@needs_promtool
def test_shortened_rules_keep_everything_but_durations(tmp_path: Path) -> None:
    paths = shortened(tmp_path, 60.0)
    run("promtool", "check", "rules", *map(str, paths))
    for path in paths:
        [*short] = [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
        for rule, original in zip(short, rules(path.name), strict=True):
            assert rule.get("labels") == original.get("labels")
            assert "5m]" not in rule["expr"]
            assert ("for" in rule) == ("for" in original)
