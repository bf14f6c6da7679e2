"""`kvatlas demo`, as `make demo` runs it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from kvatlas.cli import demo_dashboard

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


def test_its_dashboard_runs_for_as_long_as_it_is_looked_at(tmp_path: Path) -> None:
    with demo_dashboard.running("127.0.0.1:1", tmp_path) as (url, process):
        assert _workers(url) == {}, "nobody is there yet: the page says so"
        assert process.poll() is None
    assert process.returncode == 0
    with pytest.raises(OSError, match="refused"):
        _workers(url)


@pytest.mark.slow
def test_on_a_terminal_or_by_wish_it_serves_on_with_the_dashboard(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvatlas.cli", "demo", "--keep", "--model", "random:tiny", "-n", "8"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
    demo = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    try:
        assert demo.stdout is not None
        url = next(line.split()[-1] for line in demo.stdout if line.startswith("Every page, live:"))
        limit = time.monotonic() + 60
        while "live" not in (seen := _workers(url)).values():
            assert time.monotonic() < limit, seen
            time.sleep(0.05)
        demo.send_signal(signal.SIGINT)
        out, err = demo.communicate(timeout=60)
        assert demo.returncode == 0, out + err
        assert "drained and ended" in out
        with pytest.raises(OSError, match="refused"):
            _workers(url)
    finally:
        demo.kill()
        demo.wait()


def _workers(url: str) -> dict[str, str]:
    """What the dashboard's probe says of the workers it sees."""
    with urllib.request.urlopen(url + "live/health", timeout=10) as answer:
        workers: dict[str, str] = json.load(answer)["workers"]
        return workers
