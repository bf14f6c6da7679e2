"""Clients in other languages against a real server: Node with grpc-js, and buf curl through reflection.

What they show: stream, cancel, a deadline of 200 ms, error details, service config, planes of the page map.
"""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2

from kvatlas.client.sync import Client
from kvatlas.free_ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
NODE_FOLDER = ROOT / "examples" / "node"
UNAVAILABLE = 8 * 14  # buf's exit code of that status

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.clients]


def run(command: list[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, capture_output=True, text=True, timeout=90, env={**os.environ, **environment}, cwd=ROOT
    )


def buf() -> str:
    """The one of this environment, else the one on the path."""
    own = Path(sys.executable).with_name("buf")
    found = str(own) if own.exists() else shutil.which("buf")
    assert found, "buf is not installed: pip install buf-bin"
    return found


def buf_curl(
    address: str, method: str, request: dict[str, Any], *flags: str
) -> "subprocess.CompletedProcess[str]":
    url = f"http://{address}/{method}"
    body = json.dumps(request)
    return run([buf(), "curl", "--protocol", "grpc", "--http2-prior-knowledge", *flags, "-d", body, url])


def objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects that buf curl prints one after the other."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text.rstrip()):
        value, end = decoder.raw_decode(text, at)
        found.append(value)
        at = end + len(text[end:]) - len(text[end:].lstrip())
    return found


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_a_node_client_streams_cancels_times_out_and_reads_details(real_server: Any) -> None:
    if not (NODE_FOLDER / "node_modules").exists():
        installed = run(["npm", "ci", "--silent", "--prefix", str(NODE_FOLDER)])
        assert installed.returncode == 0, installed.stderr
    done = run(["node", str(NODE_FOLDER / "generate.mjs"), real_server.address])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all as it should be"
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:6]] == [
        "stream",
        "cancel",
        "deadline",
        "refused",
        "retry",
        "pages",
    ]


@pytest.mark.skipif(
    not (NODE_FOLDER / "node_modules").exists(), reason="`npm ci` was not run for the example"
)
def test_a_node_client_shows_its_token(guarded_server: Any) -> None:
    command = ["node", str(NODE_FOLDER / "generate.mjs"), guarded_server.address]
    guarded_server.hold.on()  # else an answer may end before Node has cancelled it
    try:
        done = run(command, KVATLAS_TOKEN=guarded_server.token)
    finally:
        guarded_server.hold.off()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all as it should be"


def test_the_shell_example_tells_of_a_server_that_is_away() -> None:
    """It said that the server had no such service, tried once, and left with 1."""
    script = str(ROOT / "examples" / "shell" / "generate.sh")
    done = run([script, f"127.0.0.1:{free_ports(1)[0]}"], BUF=buf())
    assert done.returncode == UNAVAILABLE, done.stdout + done.stderr
    assert done.stderr.count("unavailable") == 4, "tried again"
    assert done.stdout == ""


def test_the_shell_example_streams_through_reflection(real_server: Any) -> None:
    script = str(ROOT / "examples" / "shell" / "generate.sh")
    done = run([script, real_server.address, 'Say "hi" \\ there,\n\tand on another line.'], BUF=buf())
    assert done.returncode == 0, done.stdout + done.stderr
    messages = objects(done.stdout)
    assert "started" in messages[0]
    assert "summary" in messages[-1]
    assert sum(m["delta"].get("tokenCount", 0) for m in messages if "delta" in m) > 0


@pytest.mark.parametrize("script", ["shell/generate.sh", "go/run.sh", "java/run.sh"])
def test_a_script_without_its_tools_says_so_in_one_line(script: str, tmp_path: Path) -> None:
    command = ["/bin/sh", str(ROOT / "examples" / script)]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "is not installed: " in done.stderr
    assert done.stderr.count("\n") == 1


def test_buf_curl_prints_the_details_of_an_error(real_server: Any) -> None:
    request = {"spec": {"text": "x", "sampling": {"temperature": 9}}}
    done = buf_curl(real_server.address, "kvatlas.v1.GenerationService/Generate", request)
    assert done.returncode != 0
    error = json.loads(done.stderr)
    assert error["code"] == "invalid_argument"
    values = {entry["type"]: base64.b64decode(entry["value"] + "==") for entry in error["details"]}
    info = error_details_pb2.ErrorInfo.FromString(values["google.rpc.ErrorInfo"])
    assert (info.reason, info.domain) == ("INVALID_FIELD", "kvatlas.v1")
    faults = error_details_pb2.BadRequest.FromString(values["google.rpc.BadRequest"])
    assert [fault.field for fault in faults.field_violations] == ["spec.sampling.temperature"]


def test_a_buf_curl_that_is_interrupted_gives_its_pages_back(
    real_server: Any, wait_until: Callable[..., None]
) -> None:
    request = json.dumps({"spec": {"text": "Once", "stop": {"maxTokens": 2000, "ignoreEos": True}}})
    url = f"http://{real_server.address}/kvatlas.v1.GenerationService/StreamGenerate"
    command = [buf(), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", request, url]
    with (
        Client(real_server.address) as client,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as curl,
    ):
        wait_until(lambda: client.page_pool().stats.active_pages > 0, "an answer that runs")
        curl.send_signal(signal.SIGINT)
        wait_until(lambda: client.page_pool().stats.active_pages == 0, "pages given back")
    assert curl.returncode != 0


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
def test_both_versions_of_reflection_describe_the_services(real_server: Any, protocol: str) -> None:
    done = run(
        [
            buf(),
            "curl",
            "--protocol",
            "grpc",
            "--http2-prior-knowledge",
            "--reflect-protocol",
            protocol,
            "--list-services",
            f"http://{real_server.address}",
        ]
    )
    assert done.returncode == 0, done.stderr
    assert {
        "kvatlas.v1.CacheService",
        "kvatlas.v1.GenerationService",
        "kvatlas.v1.ServerService",
    } <= set(done.stdout.split())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("generate.py", "page-seconds"),
        ("chat.py", "prompt tokens cached"),
        ("cancel.py", "0 pages in use"),
        ("structured.py", "'rainy': "),
        ("errors.py", "spec.sampling.temperature"),
    ],
)
def test_the_python_examples_run(real_server: Any, script: str, words: str) -> None:
    path = str(ROOT / "examples" / "python" / script)
    done = run([sys.executable, path, real_server.address], PYTHONPATH=str(ROOT / "protos"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert words in done.stdout


def test_the_python_watch_shows_totals_that_add_up(real_server: Any) -> None:
    path = str(ROOT / "examples" / "python" / "watch_pages.py")
    done = run([sys.executable, path, real_server.address, "2"], PYTHONPATH=str(ROOT / "protos"))
    assert done.returncode == 0, done.stdout + done.stderr
    for line in done.stdout.splitlines():
        counts = [int(part.split()[-1]) for part in line.split(": ")[1].split(" · ")]
        assert sum(counts) == 256
