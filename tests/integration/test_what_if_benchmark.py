"""What-if's benchmark of speed predicts the pool that was recorded, from a file of another process."""

import pytest

from benchmarks.what_if import speed


def test_the_recorded_pool_is_predicted_as_it_was() -> None:
    found = speed(seconds=4.0, rate=20.0)
    assert found["requests"] > 40
    assert found["recorded_events"] > 1000
    rows = {(row["resolution"], row["pages"]): row for row in found["rows"]}
    assert len(rows) == 9
    assert rows[1, 8192]["hit_ratio"] == pytest.approx(found["recorded_hit_ratio"], abs=0.002)
    assert all(row["cpu_seconds"] > 0 and row["steps"] > 10 for row in rows.values())
    assert rows[8, 8192]["steps"] < rows[1, 8192]["steps"] / 2
