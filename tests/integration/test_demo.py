"""`kvatlas demo`, as `make demo` runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_shows_three_maps_and_hits_and_leaves_nothing(model_path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "pages.svg"
    command = [sys.executable, "-m", "kvatlas.cli", "demo", "--model", str(model_path), "--svg", str(picture)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    titles = [
        line.split()[0] for line in done.stdout.splitlines() if re.match(r"before |during |after ", line)
    ]
    assert titles == ["before", "during", "after", "during", "after"]
    found = re.search(r"(\d+) of its (\d+) prompt tokens were served from (\d+) CACHED pages", done.stdout)
    assert found
    hits, prompt, pages = map(int, found.groups())
    assert hits == pages * 16
    assert hits < prompt
    legends = [line for line in done.stdout.splitlines() if line.endswith("= 256 pages")]
    for legend in legends:
        assert sum(map(int, re.findall(r"(?:free|active|cached|pinned|reserved) (\d+)", legend))) == 256
    assert "= 256 pages" in picture.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["pages.svg"]
