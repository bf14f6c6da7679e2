"""The dashboards: one source, whole, with right units and names, of Grafana's shape."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.generate import BOARDS, rendered
from deploy.grafana.render import DEFAULT_DATASOURCE
from kvatlas.metric import Metric, MetricKind
from service.metric_table import TABLE as SERVICE_TABLE
from worker.readers.metric_table import TABLE as WORKER_TABLE

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
PROMETHEUS = ROOT / "deploy" / "prometheus"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
TABLES: tuple[Metric, ...] = (*WORKER_TABLE, *SERVICE_TABLE)
NAME = re.compile(r"\b(?:kvatlas|grpc_server)_[a-z0-9_]*[a-z0-9]\b")
RECORDED = re.compile(r"\bkvatlas:[a-z0-9_]+(?::[a-z0-9_]+)?")
UNITS = {"_seconds": "s", "_bytes": "bytes"}

Json = dict[str, Any]


def boards() -> Iterator[Json]:
    for path in FILES:
        yield json.loads(path.read_text(encoding="utf-8"))


def panels(board: Json) -> list[Json]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def targets() -> Iterator[tuple[str, Json, Json]]:
    """(place for messages, panel, target) of every query of every dashboard."""
    for board in boards():
        for panel in panels(board):
            for target in panel["targets"]:
                yield f"{board['uid']}/{panel['title']}/{target['refId']}", panel, target


def exported() -> set[str]:
    """Every name that a scrape of ours can have."""
    names = set()
    for metric in TABLES:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is MetricKind.HISTOGRAM else ("",)
        names |= {metric.exposed + suffix for suffix in suffixes}
    return names


def recorded() -> set[str]:
    rules = yaml.safe_load((PROMETHEUS / "recording.yml").read_text())
    return {rule["record"] for group in rules["groups"] for rule in group["rules"]}


def unit_of(panel: Json, ref: str) -> str:
    """Unit in which a query of a panel is shown: its own on the right axis, else the panel's."""
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"] == {"id": "byFrameRefID", "options": ref}:
            return str({each["id"]: each["value"] for each in override["properties"]}["unit"])
    return str(panel["fieldConfig"]["defaults"]["unit"])


def test_the_files_are_what_the_source_makes() -> None:
    for path, text in rendered().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python -m deploy.grafana.generate"
    assert {path.stem for path in FILES} == set(BOARDS)


def test_ids_are_unique_and_panels_neither_overlap_nor_leave_the_grid() -> None:
    for board in boards():
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        taken: dict[tuple[int, int], str] = {}
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24, panel["title"]
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    assert (x, y) not in taken, (panel["title"], taken.get((x, y)))
                    taken[x, y] = panel["title"]


def test_every_panel_says_what_it_shows_in_which_unit_and_what_no_value_means() -> None:
    for board in boards():
        titles = [panel["title"] for panel in panels(board)]
        assert len(titles) == len(set(titles))
        for panel in panels(board):
            defaults = panel["fieldConfig"]["defaults"]
            assert panel["title"], panel["id"]
            assert defaults["unit"], panel["title"]
            assert defaults["noValue"] == "No traffic", panel["title"]
            sentence, _, rest = panel["description"].partition("\n\n")
            assert sentence.endswith("."), panel["title"]
            assert rest or "kvatlas:" in json.dumps(panel["targets"]), panel["title"]


def test_the_data_source_is_the_readers_choice_everywhere() -> None:
    for board in boards():
        places = [*panels(board), *board["annotations"]["list"]]
        places += [target for panel in panels(board) for target in panel["targets"]]
        places += [each for each in board["templating"]["list"] if each["type"] == "query"]
        for place in places:
            assert place["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, place
        chosen = next(each for each in board["templating"]["list"] if each["name"] == "datasource")
        assert chosen["current"]["value"] == DEFAULT_DATASOURCE


def test_units_follow_from_the_names_of_metrics() -> None:
    """B118: seconds in s, bytes in bytes, shares of 1 in percent; rates of seconds may stay seconds."""
    for place, panel, target in targets():
        expression, unit = target["expr"], unit_of(panel, target["refId"])
        is_share = (
            re.fullmatch(r"sum\(.*\) / \(sum\(.*\) > 0\)", expression) and "_references" not in expression
        )
        if is_share or (":ratio" in expression.partition(" / ")[0] and " / " not in expression):
            assert unit == "percentunit", place
            continue
        for suffix, wanted in UNITS.items():
            if (
                re.search(rf"quantile\([\d.]+, .*{suffix}_bucket\b", expression)
                and "page_seconds" not in expression
            ):
                assert unit == wanted, place
            if re.search(rf"^(?:max|sum|min)(?: by \(\w+\))? ?\(kvatlas_\w+{suffix}\{{", expression):
                assert unit == wanted, place


def test_counters_are_read_as_growth_and_quantiles_over_sums_of_rates() -> None:
    """B118: a total is no figure by itself, and a quantile of an average is none at all."""
    for place, _, target in targets():
        expression = target["expr"]
        for found in re.finditer(r"\b\w+_(?:total|bucket|count)\b(?=\{)", expression):
            before = expression[: found.start()]
            assert before.endswith(("rate(", "increase(")), f"{place}: {found[0]} is a counter"
        for found in re.finditer(r"histogram_quantile\([\d.]+, ", expression):
            assert expression[found.end() :].startswith(("sum by (le) (rate(", "sum by (le, ")), place
        assert not re.search(r"rate\([^\[]*\)", expression), f"{place}: a rate without a window"


def test_every_name_in_a_query_is_exported_or_recorded() -> None:
    """B118: a renamed series leaves a panel empty, for ever."""
    known, rules = exported(), recorded()
    for place, _, target in targets():
        assert set(NAME.findall(target["expr"])) <= known, place
        assert set(RECORDED.findall(target["expr"])) <= rules, place
    for board in boards():
        for variable in board["templating"]["list"]:
            assert set(NAME.findall(json.dumps(variable["query"]))) <= known, variable["name"]


def test_ratios_are_never_added_up() -> None:
    """B118: two workers that are half full are not one that is full."""
    ratio = re.compile(r"\bsum(?: by \([^)]*\))? ?\((?:[^()]*\()*kvatlas:\w+:ratio")
    queries = [(place, target["expr"]) for place, _, target in targets()]
    for name in ("recording.yml", "alerts.yml"):
        for group in yaml.safe_load((PROMETHEUS / name).read_text())["groups"]:
            queries += [(rule.get("record") or rule["alert"], rule["expr"]) for rule in group["rules"]]
    assert len(queries) > 100
    assert [place for place, expression in queries if ratio.search(expression)] == []
    for wrong in (
        "sum(kvatlas:pages_available:ratio)",
        "sum by (job) (max(kvatlas:ttft_slow:ratio5m{a='b'}))",
    ):
        assert ratio.search(wrong)


def test_every_metric_is_in_the_panel_that_its_table_names_or_says_why_in_none() -> None:
    shown: dict[str, str] = {}
    for board in boards():
        for panel in panels(board):
            place = f"{board['uid'].removeprefix('kvatlas-')}/{panel['title']}"
            shown[place] = " ".join(target["expr"] for target in panel["targets"])
    for metric in TABLES:
        assert bool(metric.panel) != bool(metric.excuse), metric.name
        if metric.panel:
            assert metric.panel in shown, f"{metric.family}: no panel {metric.panel!r}"
            names = {
                re.sub(r"_(?:bucket|sum|count)$", "", name) for name in NAME.findall(shown[metric.panel])
            }
            assert metric.exposed in names, f"{metric.panel} does not show {metric.exposed}"


def test_label_values_in_queries_exist() -> None:
    """A matcher of a value that no series has shows an empty panel, for ever."""
    closed: dict[str, dict[str, set[str]]] = {}
    for metric in TABLES:
        for label, values in metric.labels.items():
            if values:
                closed.setdefault(metric.exposed, {}).setdefault(label, set()).update(values)
    num_matchers = 0
    for place, _, target in targets():
        for name, inside in re.findall(r"\b(\w+?)(?:_bucket|_count|_sum)?\{([^}]*)\}", target["expr"]):
            for label, operator, text in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', inside):
                if label in closed.get(name, {}):
                    assert set(text.split("|")) <= closed[name][label], (place, label, operator, text)
                    num_matchers += 1
    assert num_matchers > 10


def test_colours_are_those_of_the_palette() -> None:
    palette = (ROOT / "dashboard" / "palette.json").read_text()
    text = "\n".join(path.read_text() for path in FILES)
    for colour in set(re.findall(r"#[0-9a-f]{6}", text)):
        assert colour in palette
    assert len(set(re.findall(r"#[0-9a-f]{6}", text))) >= 10


def expressions() -> str:
    """Every query as a recording rule, with Grafana's variables filled in."""
    rules = []
    for index, (_, _, target) in enumerate(targets()):
        expression = target["expr"]
        for name, value in (
            ("$__rate_interval", "1m"),
            ("$__range", "1h"),
            ("$worker", ".*"),
            ("$service", ".*"),
        ):
            expression = expression.replace(name, value)
        assert "$" not in expression
        rules.append({"record": f"panel:query:{index}", "expr": expression})
    return yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]})


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian package prometheus)")
def test_every_query_is_promql_of_the_right_types(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yml", tmp_path / "bad.yml"
    good.write_text(expressions())
    bad.write_text(expressions().replace("[1m]", "", 1))
    assert "rate(" in bad.read_text()
    checked = [
        subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=30)
        for path in (good, bad)
    ]
    assert checked[0].returncode == 0, checked[0].stderr
    assert checked[1].returncode != 0, "a rate without a window must be found"


SCHEMA = GRAFANA / "schema"
HAS_SCHEMA = shutil.which("node") is not None and (SCHEMA / "node_modules" / "typescript").exists()


@pytest.mark.skipif(not HAS_SCHEMA, reason="needs node and `npm ci --prefix deploy/grafana/schema`")
def test_dashboards_have_the_shape_of_grafanas_published_types(tmp_path: Path) -> None:
    faults = {
        "key": ('"noValue":', '"noValues":'),
        "enum": ('"mode": "absolute"', '"mode": "relative"'),
        "option": ('"showPoints": "never"', '"showPoints": 3'),
        "missing": ('"justifyMode": "auto",', ""),
    }
    bad = []
    for name, (old, new) in faults.items():
        text = FILES[0].read_text()
        assert old in text
        bad.append(tmp_path / f"{name}.json")
        bad[-1].write_text(text.replace(old, new, 1))
    done = subprocess.run(
        ["node", "check.mjs", *map(str, (*FILES, *bad))],
        cwd=SCHEMA,
        capture_output=True,
        text=True,
        timeout=100,
    )
    found = set(re.findall(r"^(\w+)\.checked\.ts", done.stderr, re.MULTILINE))
    assert found == set(faults), done.stderr


def test_provisioning_fits_the_dashboards_and_prometheus() -> None:
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())
    providers = yaml.safe_load((GRAFANA / "provisioning/dashboards/kvatlas.yml").read_text())
    scraping = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert sources["apiVersion"] == providers["apiVersion"] == 1
    [source] = sources["datasources"]
    assert source["uid"] == DEFAULT_DATASOURCE
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == scraping["global"]["scrape_interval"]
    [provider] = providers["providers"]
    assert provider["type"] == "file"
    assert Path(provider["options"]["path"]).is_absolute()
