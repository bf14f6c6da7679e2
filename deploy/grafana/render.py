"""Boards as Grafana's JSON model: grid, units, colours, data links, variables, annotations.

Shapes are those of npm's @grafana/schema, which schema/check.mjs holds the result against.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.grafana.board import WIDTH, Board, Panel, PanelKind, Query
from deploy.grafana.options import Json, columns_of, custom_of, options_of
from kvatlas.metric import Metric

SCHEMA_VERSION = 41
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
DEFAULT_DATASOURCE = "kvatlas-prometheus"  # uid in provisioning/datasources
DASHBOARD = "http://localhost:8501"  # of the live page map
STAT_WIDTH, STAT_HEIGHT = 4, 4
NO_VALUE = "No traffic"
GROUPS = ("ground", "states", "results", "bands")
_NAME = re.compile(r"\b(?:kvatlas|grpc_server)_\w+")


def palette_of(path: Path) -> dict[str, str]:
    """Colour by name, of the dark column. A name means the same in all groups."""
    groups = json.loads(path.read_text())
    return {name: colour["dark"] for group in GROUPS for name, colour in groups[group].items()}


class Renderer:
    """Makes one board's JSON; ids and places are handed out in order."""

    def __init__(self, palette: Mapping[str, str], metrics: Sequence[Metric]) -> None:
        self._palette = palette
        self._help = {metric.exposed: metric.help for metric in metrics}
        self._next_id = 1

    def board(self, board: Board) -> Json:
        """The whole dashboard."""
        return {
            "uid": board.uid,
            "title": board.title,
            "description": board.text,
            "tags": ["kvatlas"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "links": _links(),
            "annotations": {"list": [_alerts(self._palette["exhausted"])]},
            "templating": {"list": _variables()},
            "panels": self._panels(board),
        }

    def _panels(self, board: Board) -> list[Json]:
        panels: list[Json] = []
        y = 0
        for row in board.rows:
            place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
            heading = {"id": self._id(), "type": "row", "title": row.title, "collapsed": False}
            panels.append({**heading, "gridPos": place, "panels": []})
            y += 1
            x = line_height = 0
            for panel in row.panels:
                width, height = _size(panel)
                if x + width > WIDTH:
                    x, y, line_height = 0, y + line_height, 0
                panels.append(self._panel(panel, {"x": x, "y": y, "w": width, "h": height}))
                x, line_height = x + width, max(line_height, height)
            y += line_height
        return panels

    def _id(self) -> int:
        number, self._next_id = self._next_id, self._next_id + 1
        return number

    def _panel(self, panel: Panel, place: Json) -> Json:
        rendered: Json = {
            "id": self._id(),
            "type": panel.kind.value,
            "title": panel.title,
            "description": self._description(panel),
            "gridPos": place,
            "datasource": DATASOURCE,
            "targets": [_target(query, index, panel) for index, query in enumerate(panel.queries)],
            "fieldConfig": {"defaults": self._defaults(panel), "overrides": self._overrides(panel)},
            "options": options_of(panel),
        }
        if panel.columns:
            rendered["transformations"] = columns_of(panel)
        return rendered

    def _description(self, panel: Panel) -> str:
        """The sentence, and what each metric of the panel counts, in the words of its table."""
        found = dict.fromkeys(name for query in panel.queries for name in _NAME.findall(query.expr))
        names = dict.fromkeys(_base(name) for name in found)
        lines = [f"`{name}`: {self._help[name]}" for name in names if name in self._help]
        return "\n\n".join([panel.text, *lines])

    def _defaults(self, panel: Panel) -> Json:
        defaults: Json = {"unit": panel.unit, "noValue": NO_VALUE, "custom": custom_of(panel)}
        if panel.kind is PanelKind.STAT:
            steps = [
                {"value": value if index else None, "color": self._palette[colour]}
                for index, (value, colour) in enumerate(panel.steps or ((0.0, "active"),))
            ]
            defaults["color"] = {"mode": "thresholds"}
            defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        elif panel.kind is not PanelKind.TABLE:
            defaults["color"] = {"mode": "palette-classic"}
        if panel.kind is PanelKind.LINES:
            defaults["min"] = 0
        if panel.max is not None:
            defaults |= {"min": 0, "max": panel.max}
        if panel.links and panel.kind is not PanelKind.TABLE:
            defaults["links"] = _data_links(panel)
        return defaults

    def _overrides(self, panel: Panel) -> list[Json]:
        overrides = [
            _override("byName", legend, {"color": {"mode": "fixed", "fixedColor": self._palette[colour]}})
            for legend, colour in panel.colours.items()
        ]
        for index, query in enumerate(panel.queries):
            if query.unit:
                axis = {"unit": query.unit, "custom.axisPlacement": "right", "custom.fillOpacity": 0}
                overrides.append(_override("byFrameRefID", _letter(index), axis))
        if panel.links and panel.kind is PanelKind.TABLE:
            overrides.append(_override("byName", "Worker", {"links": _data_links(panel)}))
        return overrides


def _size(panel: Panel) -> tuple[int, int]:
    if panel.kind is PanelKind.STAT and panel.height == 8 and panel.width == 8 and len(panel.queries) == 1:
        return STAT_WIDTH, STAT_HEIGHT
    return panel.width, panel.height


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def _base(name: str) -> str:
    return re.sub(r"_(?:bucket|sum|count)$", "", name)


def _target(query: Query, index: int, panel: Panel) -> Json:
    is_instant = panel.kind in (PanelKind.TABLE, PanelKind.BARS)
    shape = {PanelKind.TABLE: "table", PanelKind.BARS: "table", PanelKind.HEAT_MAP: "heatmap"}
    return {
        "refId": _letter(index),
        "datasource": DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "format": shape.get(panel.kind, "time_series"),
        "instant": is_instant,
        "range": not is_instant,
        "exemplar": query.has_exemplars,
    }


def _override(matcher: str, name: str, properties: Mapping[str, Any]) -> Json:
    return {
        "matcher": {"id": matcher, "options": name},
        "properties": [{"id": key, "value": value} for key, value in properties.items()],
    }


def _data_links(panel: Panel) -> list[Json]:
    return [{"title": title, "url": url, "targetBlank": True} for title, url in panel.links]


def _links() -> list[Json]:
    shared = {"asDropdown": False, "includeVars": True, "keepTime": True, "targetBlank": False}
    boards = {**shared, "title": "kvatlas", "type": "dashboards", "icon": "external link"}
    live = {**shared, "title": "Live page map", "type": "link", "icon": "external link", "includeVars": False}
    return [
        {**boards, "tags": ["kvatlas"], "tooltip": "The other dashboards of kvatlas"},
        {**live, "keepTime": False, "tags": [], "tooltip": "Every page, live", "url": "${dashboard}"},
    ]


def _alerts(colour: str) -> Json:
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": colour,
        "target": {"refId": "alerts", "expr": 'ALERTS{alertstate="firing",alertname=~"Kvatlas.*"}'},
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}}",
    }


def _variables() -> list[Json]:
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {"text": "Prometheus", "value": DEFAULT_DATASOURCE},
        },
        _instances("worker", "Worker", "kvatlas_pages_capacity"),
        _instances("service", "Service", "kvatlas_requests_total"),
        {
            "name": "dashboard",
            "label": "Live page map",
            "type": "textbox",
            "query": DASHBOARD,
            "current": {"text": DASHBOARD, "value": DASHBOARD},
            "hide": 2,
        },
    ]


def _instances(name: str, label: str, metric: str) -> Json:
    query = f"label_values({metric}, instance)"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": f"{name}-instances"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
