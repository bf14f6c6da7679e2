"""What a dashboard is made of: queries in panels, panels in rows, rows in a board.

Knows nothing of Grafana's JSON, which is render.py's, and nothing of kvatlas.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

WIDTH = 24  # columns of a dashboard


class PanelKind(Enum):
    """Visualizations that are used, by Grafana's name."""

    STAT = "stat"
    LINES = "timeseries"
    HEAT_MAP = "heatmap"
    BARS = "barchart"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression of a panel. `unit`, where it is not the panel's, puts it on the right axis."""

    expr: str
    legend: str = ""
    unit: str = ""
    has_exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `text` is a sentence; the metrics' own help is added to it from the metric tables."""

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    kind: PanelKind = PanelKind.LINES
    width: int = 8
    height: int = 8
    is_stacked: bool = False
    max: float | None = None
    steps: tuple[
        tuple[float, str], ...
    ] = ()  # of a stat: from which value on which colour of `ground` or group
    colours: Mapping[str, str] = field(default_factory=dict)  # by legend
    columns: Mapping[str, str] = field(
        default_factory=dict
    )  # of a table: label or query → heading; others hidden
    links: tuple[tuple[str, str], ...] = ()  # title and address of data links


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading, set from left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    text: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in order."""
        return tuple(panel for row in self.rows for panel in row.panels)
