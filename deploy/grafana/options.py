"""How each kind of panel looks and joins its series: Grafana's options, the same for all panels of a kind."""

from typing import Any

from deploy.grafana.board import Panel, PanelKind

Json = dict[str, Any]


def custom_of(panel: Panel) -> Json:
    """What a field of this kind of panel has of its own."""
    if panel.kind is not PanelKind.LINES:
        return {}
    stacking = {"group": "A", "mode": "normal" if panel.is_stacked else "none"}
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 60 if panel.is_stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": stacking,
    }


def options_of(panel: Panel) -> Json:
    """How this kind of panel looks."""
    match panel.kind:
        case PanelKind.STAT:
            return {
                "colorMode": "value",
                "graphMode": "area",
                "justifyMode": "auto",
                "orientation": "auto",
                "percentChangeColorMode": "standard",
                "reduceOptions": {"calcs": ["lastNotNull"], "values": False},
                "showPercentChange": False,
                "textMode": "auto",
                "wideLayout": True,
            }
        case PanelKind.LINES:
            return {
                "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case PanelKind.HEAT_MAP:
            return _heat_map(panel)
        case PanelKind.BARS:
            return {
                "barWidth": 0.9,
                "fullHighlight": False,
                "groupWidth": 0.7,
                "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": False},
                "orientation": "auto",
                "showValue": "auto",
                "stacking": "none",
                "tooltip": {"mode": "single", "sort": "none"},
                "xField": next(iter(panel.columns.values())),
                "xTickLabelMaxLength": 8,
                "xTickLabelRotation": 0,
            }
        case PanelKind.TABLE:
            return {"frameIndex": 0, "showHeader": True, "cellHeight": "sm"}


def _heat_map(panel: Panel) -> Json:
    return {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "exponent": 0.5,
            "fill": "dark-orange",
            "mode": "scheme",
            "reverse": False,
            "scale": "exponential",
            "scheme": "Viridis",
            "steps": 64,
        },
        "exemplars": {"color": "rgba(255,255,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "unit": panel.unit},
    }


def columns_of(panel: Panel) -> list[Json]:
    """Series as rows, joined by process; what has no heading is left out."""
    names = list(panel.columns)
    steps: list[Json] = []
    if panel.kind is PanelKind.TABLE:
        steps.append({"id": "joinByField", "options": {"byField": names[0], "mode": "outer"}})
    else:
        conversions = [{"targetField": names[0], "destinationType": "number"}]
        steps.append({"id": "convertFieldType", "options": {"conversions": conversions, "fields": {}}})
        steps.append({"id": "sortBy", "options": {"fields": {}, "sort": [{"field": names[0]}]}})
        back = [{"targetField": names[0], "destinationType": "string"}]
        steps.append({"id": "convertFieldType", "options": {"conversions": back, "fields": {}}})
    steps.append({"id": "filterFieldsByName", "options": {"include": {"names": names}}})
    order = {name: index for index, name in enumerate(names)}
    renamed = dict(panel.columns)
    options = {"excludeByName": {}, "indexByName": order, "renameByName": renamed}
    steps.append({"id": "organize", "options": options})
    return steps
