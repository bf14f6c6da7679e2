"""The few shapes that the dashboards' queries have.

`W` and `S` select the chosen workers and services. Ratios divide by what is greater than 0, so that no
traffic gives no sample instead of NaN.
"""

from deploy.grafana.board import Query

W = 'instance=~"$worker"'
S = 'instance=~"$service"'
WINDOW = "$__rate_interval"
QUANTILES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))


def rate(metric: str, selector: str, window: str = WINDOW) -> str:
    """Growth a second of each series of a counter."""
    return f"rate({metric}{{{selector}}}[{window}])"


def total(expression: str, by: str = "") -> str:
    """The sum, by a label if one is given."""
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def share(part: str, whole: str) -> str:
    """Part of a whole; nothing where the whole is 0."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, metric: str, selector: str, by: str = "") -> str:
    """Quantile of a histogram over all chosen processes, by a label if one is given."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q:g}, {total(rate(metric + '_bucket', selector), labels)})"


def quantiles(
    metric: str, selector: str, name: str = "", *, has_exemplars: bool = False
) -> tuple[Query, ...]:
    """Median, 0.9 and 0.99 of a histogram; exemplars, which belong to the metric, come with one of them."""
    return tuple(
        Query(
            quantile(q, metric, selector), f"{name} {text}".strip(), has_exemplars=has_exemplars and q == 0.99
        )
        for q, text in QUANTILES
    )


def increases(metric: str, selector: str, by: str) -> str:
    """How many fell into each bucket within a point of a heat map."""
    return total(f"increase({metric}_bucket{{{selector}}}[{WINDOW}])", by)


def in_range(metric: str, selector: str) -> str:
    """Growth of a counter over the whole time range of the dashboard."""
    return total(f"increase({metric}{{{selector}}}[$__range])")
