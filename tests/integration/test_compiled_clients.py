"""The clients that need a compiler, against a real server: Java and Go. Each checks for itself what it gets.

Not part of `make test`: they need packages of Debian that their run.sh names, and minutes to compile.
JAVA_BUILD and GO_BUILD name folders that keep what was compiled.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILE_SECONDS = 900
STEPS = ["stream", "cancel", "deadline", "refused", "pages", "retry"]
NEEDS = {
    "java": (
        "javac",
        "protoc",
        "grpc_java_plugin",
        "/usr/share/java/grpc-netty.jar",
        "/usr/share/java/gson.jar",
    ),
    "go": (
        "go",
        "protoc",
        "protoc-gen-go",
        "protoc-gen-go-grpc",
        "/usr/share/gocode/src/google.golang.org/grpc",
        "/usr/share/gocode/src/google.golang.org/protobuf",
    ),
}

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(COMPILE_SECONDS + 60)]


def missing(language: str) -> list[str]:
    return [
        need
        for need in NEEDS[language]
        if not (Path(need).exists() if need.startswith("/") else shutil.which(need))
    ]


@pytest.mark.parametrize(
    "language",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(bool(missing(name)), reason=f"{name}: needs {', '.join(missing(name))}"),
        )
        for name in NEEDS
    ],
)
def test_a_compiled_client_streams_cancels_times_out_retries_and_reads_details(
    language: str, real_server: Any, tmp_path: Path
) -> None:
    build = f"{language.upper()}_BUILD"
    done = subprocess.run(
        [ROOT / "examples" / language / "run.sh", real_server.address],
        capture_output=True,
        text=True,
        timeout=COMPILE_SECONDS,
        env={build: str(tmp_path / "build"), **os.environ},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [*STEPS, "all as it should be"]
    assert lines[0].startswith("stream: 12 tokens:")
    assert lines[5] == "retry: taken at attempt 3"


@pytest.mark.parametrize("language", NEEDS)
def test_what_the_example_needs_is_said_where_it_is_run(language: str) -> None:
    script = (ROOT / "examples" / language / "run.sh").read_text()
    assert "Debian 12" in script
    assert os.access(ROOT / "examples" / language / "run.sh", os.X_OK)
