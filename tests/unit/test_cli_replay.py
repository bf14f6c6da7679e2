"""`kvatlas replay` around the process that does the work."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from kvatlas.cli import exits

ROOT = Path(__file__).resolve().parents[2]


def test_an_interrupted_replay_is_no_traceback(tmp_path: Path) -> None:
    """Ctrl-C goes to all processes of a terminal; the one that reads the recording told where it stood."""
    endless = tmp_path / "endless.kvrec"
    os.mkfifo(endless)
    with subprocess.Popen(
        [sys.executable, "-m", "kvatlas.cli", "replay", str(endless)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as replay:
        try:
            with endless.open("wb"):  # waits for the reader
                os.killpg(replay.pid, signal.SIGINT)
                said = replay.communicate(timeout=60)
        finally:
            replay.kill()
    assert (replay.returncode, *said) == (exits.INTERRUPTED, b"", b"")
