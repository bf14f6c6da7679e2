"""docs/metrics.md is what the metric tables make of it."""

from docs.metric_tables import PATH, render


def test_the_document_is_fresh() -> None:
    """`python -m docs.metric_tables` makes it so."""
    assert PATH.read_text() == render()


def test_every_metric_has_one_row_with_its_help() -> None:
    from service.metric_table import TABLE as SERVICE
    from worker.readers.metric_table import TABLE as WORKER

    lines = PATH.read_text().splitlines()
    for row in (*WORKER, *SERVICE):
        found = [line for line in lines if line.startswith(f"| `{row.exposed}` | {row.kind.value} |")]
        assert any(row.help in line for line in found), row.exposed
