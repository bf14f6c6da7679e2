"""benchmarks/serving_path.py: from marks of several processes to the stations of one request."""

import json
from pathlib import Path

import pytest

from benchmarks import serving_marks
from benchmarks.serving_path import STATIONS, alone_lines, read_marks, table, timeline


def write(folder: Path, process: str, marks: list[tuple[str, int]]) -> None:
    Path(folder, f"{process}.marks").write_text(json.dumps(marks))


def test_each_station_is_the_first_passed_after_the_one_before(tmp_path: Path) -> None:
    half = len(STATIONS) // 2
    write(tmp_path, "service", [(name, 5 + at) for at, name in enumerate(STATIONS[:half])])
    later = [(name, 100 + at) for at, name in enumerate(STATIONS[half:])]
    write(tmp_path, "worker", [(STATIONS[half], 1), *later, (STATIONS[half], 900)])
    times = timeline(read_marks(*tmp_path.iterdir()), 2, 1000)
    assert times == [2, *range(5, 5 + half), *range(100, 100 + len(STATIONS) - half), 1000]


def test_a_station_that_was_not_passed_is_told(tmp_path: Path) -> None:
    write(tmp_path, "service", [(name, 5) for name in STATIONS[:-1]])
    with pytest.raises(AssertionError, match=STATIONS[-1]):
        timeline(read_marks(*tmp_path.iterdir()), 2, 10)


def test_the_engine_alone_has_a_line_for_each_prompt(tmp_path: Path) -> None:
    steps = [("scheduled", 20), ("launched", 30), ("asks for result", 40), ("result there", 60)]
    first = [("queued", 10), *steps, ("committed", 61)]
    write(tmp_path, "alone", first + [(name, at + 100) for name, at in first])
    lines = alone_lines(read_marks(*tmp_path.iterdir()))
    assert lines == [[10, 20, 30, 40, 60, 61], [110, 120, 130, 140, 160, 161]]
    rows = table(["a", "b", "c", "d", "e", "f"], [[at * 1_000_000 for at in line] for line in lines])
    assert [row["p50"] for row in rows] == [0, 10, 10, 10, 20, 1]
    assert rows[-1]["total_p50"] == 51


def test_marks_are_made_around_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a class that this test wraps and gives back."""
    monkeypatch.setattr(serving_marks.Marks, "write", serving_marks.Marks.write)
    marks = serving_marks.Marks()
    marks.wrap("benchmarks.serving_marks:Marks.write", "before", "after", lambda _s, _f, name: name == "a")
    other = serving_marks.Marks()
    other.write(tmp_path, "a")
    other.write(tmp_path, "b")
    assert [name for name, _ in marks.passed] == ["before", "after"]
    assert json.loads((tmp_path / "b.marks").read_text()) == []
