"""A worker as a process of its own: signals, its launcher's end, and starts that fail.

Starts of a service that fail stand here, too: both tell why in the same line.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvatlas.v1 import server_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.link.testing import WAIT_SECONDS, TestService
from worker.link.testing_bench import until

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"}


def start_process(folder: Path, *flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "worker", "--runner", "fake", "--model", "random:tiny"]
    command += ["--engine-address", f"ipc://{folder}/e", "--pages-address", f"ipc://{folder}/p"]
    command += ["--metrics-port", "0", "--page-size", "4", "--num-pages", "64", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def end_process(process: "subprocess.Popen[str]") -> str:
    try:
        return process.communicate(timeout=WAIT_SECONDS)[1]
    finally:
        process.kill()
        process.wait()


def test_sigterm_drains_and_ends_with_status_zero(tmp_path: Path, hold: Any) -> None:
    """B109: the worker is a fresh process, never a fork; after its end nothing of it is left."""
    process = start_process(tmp_path, "--drain-grace", "600", *hold.flags)
    service = TestService(f"ipc://{tmp_path}/e")
    try:
        service.hello()
        serving = server_pb2.SERVER_STATE_SERVING
        service.wait(lambda: bool(service.heartbeats) and service.heartbeats[-1].load.state == serving)
        running = service.add([1, 2, 3], max_tokens=250)
        service.wait(lambda: bool(service.answers[running].tokens))
        process.send_signal(signal.SIGTERM)
        draining = server_pb2.SERVER_STATE_DRAINING
        service.wait(lambda: service.heartbeats[-1].load.state == draining)
        late = service.add([1, 2, 3])
        service.wait(lambda: late in service.results)
        hold.off()
        assert len(service.finish(running)[0].tokens) == 250
        assert service.results[late].status == worker_pb2.ADD_STATUS_DRAINING
        log = end_process(process)
    finally:
        process.kill()
        service.close()
    assert process.returncode == 0, log
    for name in ("listening", "ready", "service_joined", "drain_began", "drain_ended"):
        assert f"event={name} " in log, log
    assert list(tmp_path.iterdir()) == []


def test_what_the_grace_cuts_off_is_handed_over_before_the_end(tmp_path: Path, hold: Any) -> None:
    process = start_process(tmp_path, "--drain-grace", "0.2", *hold.flags)
    service = TestService(f"ipc://{tmp_path}/e")
    try:
        service.hello()
        until(lambda: (service.read(0.01), service.heartbeats and service.heartbeats[-1].load.state == 2)[1])
        ids = [service.add([number], max_tokens=200) for number in range(12)]
        service.wait(lambda: len(service.results) == len(ids) and bool(service.answers[ids[0]].tokens))
        process.send_signal(signal.SIGTERM)
        answers = service.finish(*ids)
        assert {answer.code for answer in answers} == {worker_pb2.FINISH_CODE_DRAINED}
        end_process(process)
    finally:
        process.kill()
        service.close()
    assert process.returncode == 0


def test_a_signal_while_loading_ends_at_once(tmp_path: Path) -> None:
    process = start_process(tmp_path, "--num-pages", "1000000")  # takes a while to lay out
    until(lambda: (tmp_path / "e.lock").exists() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    log = end_process(process)
    assert process.returncode == 0, log


def test_a_worker_ends_with_its_launcher(tmp_path: Path) -> None:
    launcher = (
        "import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()"
    )
    command = [sys.executable, "-m", "worker", "--runner", "fake", "--model", "random:tiny", "--parent-watch"]
    command += ["--engine-address", f"ipc://{tmp_path}/e", "--pages-address", f"ipc://{tmp_path}/p"]
    command += ["--metrics-port", "-1"]
    parent = subprocess.Popen(
        [sys.executable, "-c", launcher, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=ENVIRONMENT,
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        service = TestService(f"ipc://{tmp_path}/e")
        service.hello()
        service.close()
        parent.kill()
        parent.wait()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    finally:
        parent.kill()
        parent.stdout.close()
        if child.is_running():
            child.kill()
    until(lambda: list(tmp_path.iterdir()) == [])


@pytest.mark.parametrize(
    ("flags", "reason", "named"),
    [
        (["--model", "random:nothing"], "UNKNOWN_MODEL", "nothing"),
        # Triton is imported before the model is looked for, and has nothing to say at the end.
        (["--runner", "torch", "--device", "cuda", "--model", "random:nothing"], "UNKNOWN_MODEL", "nothing"),
        (["--engine-address", "tcp://256.1.1.1:5", "--insecure"], "ADDRESS_UNUSABLE", "tcp://256.1.1.1:5"),
        (["--metrics-host", "256.1.1.1"], "ADDRESS_UNUSABLE", "metrics_host 256.1.1.1"),
        (["--seam-key", "{empty}", "--seam-peers", "{empty}"], "INVALID_SETTING", "seam_key"),
    ],
)
def test_a_worker_that_cannot_start_says_why(
    tmp_path: Path, flags: list[str], reason: str, named: str
) -> None:
    empty = tmp_path / "empty"
    empty.touch(0o600)
    process = start_process(tmp_path, *(word.format(empty=empty) for word in flags))
    log = end_process(process)
    assert process.returncode == 1, log
    last = log.splitlines()[-1]
    assert f"event=start_failed reason={reason} why=" in last
    assert named in last
    assert "Traceback" not in log
    assert [path for path in tmp_path.iterdir() if path.suffix == ".lock"] == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--model", "random:nothing"], "UNKNOWN_MODEL"),
        (["--metrics-address", "{taken}"], "ADDRESS_UNUSABLE"),
        (["--address", "{taken}"], "ADDRESS_UNUSABLE"),
        (["--auth-file", "{empty}"], "INVALID_SETTING"),
    ],
)
def test_a_service_that_cannot_start_says_why(tmp_path: Path, flags: list[str], reason: str) -> None:
    command = [sys.executable, "-m", "service", "--model", "random:tiny", "--workers", "ipc:///nowhere"]
    command += ["--address", "127.0.0.1:0", "--metrics-address", "127.0.0.1:0"]
    empty = tmp_path / "empty"
    empty.touch(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command += [word.format(taken=address, empty=empty) for word in flags]
        done = subprocess.run(
            command, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
        )
    assert done.returncode == 1, done.stderr
    assert f"event=start_failed reason={reason} why=" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_setting_out_of_its_range_is_told_before_anything_starts(tmp_path: Path) -> None:
    process = start_process(tmp_path, "--page-size", "0")
    log = end_process(process)
    assert process.returncode == 2, log
    assert "page_size" in log


def test_the_environment_of_a_worker_is_read_once(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "KVATLAS_WORKER_PAGE_SIZES": "4"}
    command = [sys.executable, "-m", "worker", "--print-config"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert done.returncode == 2
    assert "KVATLAS_WORKER_PAGE_SIZES" in done.stderr
