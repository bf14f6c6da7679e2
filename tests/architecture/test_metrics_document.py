"""docs/metrics.md is what the metric tables make of it."""

import re
from pathlib import Path

from docs.metric_tables import PATH, render

ROOT = Path(__file__).resolve().parents[2]


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


def test_every_metric_that_documents_name_exists() -> None:
    from service.metric_table import TABLE as SERVICE
    from worker.readers.metric_table import TABLE as WORKER

    known = {name for row in (*WORKER, *SERVICE) for name in (row.exposed, row.family)}
    known |= {name + ending for name in known for ending in ("_bucket", "_sum", "_count")}
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")):
        text = re.sub(r"[^.]*do not exist", "", path.read_text())  # what is not there is said in words
        named = set(re.findall(r"`(kvatlas_[a-z0-9_]+)", text))
        assert named <= known, (path.name, named - known)
