"""Writes docs/metrics.md from the metric tables of both processes.

`python -m docs.metric_tables` rewrites the file; with `--check` it writes nothing and exits 1 where the
file is stale. What is said beside the tables stands here.
"""

import sys
from pathlib import Path

from kvatlas.metric import Metric, MetricKind
from service.metric_table import TABLE as SERVICE
from worker.readers.metric_table import TABLE as WORKER

PATH = Path(__file__).with_name("metrics.md")

HEAD = """\
# Metrics

Made by `python -m docs.metric_tables` from `worker/readers/metric_table.py` and `service/metric_table.py`;
edit those. The same tables make the registries and both dashboards, so names here are names there. Rules
over them and what to do when one fires: [operations.md](operations.md).

Each process has a registry and a port of its own, `/metrics` in the text format or, asked for by `Accept`,
in OpenMetrics: the worker (`--metrics-port`, 9102) and the service (`metrics_address`). Several service
processes are several targets.

## How to read them

- **Numbers that add up do so in every scrape.** A scrape of a worker shows one frozen snapshot:
  `kvatlas_pages` sums to `kvatlas_pages_capacity`; `kvatlas_page_events_total` `allocated` less `freed`
  are the usable pages that are not free (until the observer has lost events, and with them their kinds;
  `kvatlas_page_events_dropped_total` counts those, and both together are the revision); the four results
  of `kvatlas_prefix_tokens_total` are the prompt tokens that were looked up;
  `kvatlas_pool_pressure_seconds_total` is the time since the start.
- **Ratios exist only in rules.** Processes export what is divided, so that any window and any sum over
  processes is possible. Never average a ratio over processes.
- **Every label set is closed and there at 0 from the first scrape**, so the first failure is an increase.
  Exceptions are values that only a running process knows: `worker`, which comes when a worker introduces
  itself, and the methods of calls, whose series come with the first call of each. What does not exist
  counts as `other`; nothing that a client sends becomes a label.
- **A quantile is as exact as its buckets**: wrong by at most the ratio of the two edges around it. Edges of
  latencies contain those of OpenTelemetry's GenAI metrics of the same meaning. `ttft_buckets`,
  `itl_buckets` and `e2e_buckets` of the service replace them.
- **Cached pages are not a leak.** Free pages fall to nothing on a healthy server and stay there: cached
  pages are given up when they are needed. A page in state `active` while no request runs is a leak.
- **"Evicted" has a horizon.** A miss counts as evicted only while a bounded list remembers the page; older
  ones count as cold.
- **A recompute is not a hit.** Prefix tokens are counted at a request's first admission only.
- **Time under pressure is accumulated**, not sampled: a shortage of 200 ms between two scrapes is there.
- Reuse distances are estimated from a sample of page contents, about 1,024 of a full pool: the share of uses
  below an edge is right to about five points. Only such shares mean anything.
- Exemplars: `kvatlas_time_to_first_token_seconds` carries the `trace_id` of requests whose trace is sampled
  (OpenMetrics only).
- There is no host tier yet, so `kvatlas_host_pages` and `kvatlas_page_move_seconds` do not exist, and
  `mode="swap"` stays at 0.

Steps, pages and memory are measured by the worker; what a client feels by the service, at the moment of its
writes. The engine's thread increments nothing: another thread folds page events into all of this
([page-events.md](page-events.md)).
"""

COLUMNS = "| name | type | labels | meaning | panel |\n|---|---|---|---|---|\n"


def render() -> str:
    """The whole document."""
    parts = [HEAD]
    for title, table in (("Worker", WORKER), ("Service", SERVICE)):
        parts.append(f"\n## {title}\n")
        for section in dict.fromkeys(row.section for row in table):
            parts.append(
                f"\n### {section}\n\n| name | type | labels | meaning | panel |\n|---|---|---|---|---|\n"
            )
            parts += [_line(row) for row in table if row.section == section]
    parts.append("\n## Buckets\n\n| histogram | upper edges |\n|---|---|\n")
    parts += [_edges(row) for row in (*WORKER, *SERVICE) if row.buckets]
    return "".join(parts)


def _line(row: Metric) -> str:
    labels = "<br>".join(_label(name, values) for name, values in row.labels.items()) or "-"
    panel = row.panel.replace("/", ": ", 1) if row.panel else f"none: {row.excuse}"
    return f"| `{row.exposed}` | {row.kind.value} | {labels} | {row.help} | {panel} |\n"


def _label(name: str, values: tuple[str, ...]) -> str:
    return f"`{name}`: " + (", ".join(values) if values else "known when it runs")


def _edges(row: Metric) -> str:
    unit = f", times the {row.bucket_unit}" if row.bucket_unit else ""
    assert row.kind is MetricKind.HISTOGRAM, row.name
    return f"| `{row.exposed}` | {' '.join(f'{edge:g}' for edge in row.buckets)}{unit} |\n"


def main(arguments: list[str]) -> int:
    """0, or 1 where the file is stale and was not to be written."""
    text = render()
    if "--check" not in arguments:
        PATH.write_text(text)
    if PATH.read_text() != text:
        sys.stderr.write("docs/metrics.md is stale: run `python -m docs.metric_tables`\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
