"""docker-compose.yml, started as processes of this machine from what is written there."""

import hashlib
import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

from deploy.compose_processes import running_stack
from deploy.prometheus.local import Prometheus, missing_programs
from kvatlas.models.config import cache_folder
from kvatlas.seam_keys import read_key, write_pair
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.timeout(240),  # about half a minute on a quiet machine
    pytest.mark.skipif(
        bool(missing_programs("wget")),
        reason=f"needs the Debian packages {', '.join(missing_programs('wget'))}",
    ),
]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


def test_every_service_of_the_compose_file_starts_is_healthy_scraped_and_ends(
    model_path: Path, wait_until: Any
) -> None:
    """A prompt is answered, both processes are scraped, Alertmanager is known, the dashboard answers."""
    # What this machine has fetched and built already need not be fetched and built again.
    kept = {"models": cache_folder(), "kernels": Path.home() / ".cache"}
    with running_stack(volumes=kept) as stack:
        assert set(stack.left_out) <= {"grafana"}, "Debian has no Grafana"
        with grpc.insecure_channel(stack.address(50051)) as channel:
            answer = ask(channel)
        assert answer.usage.completion_tokens > 0
        assert answer.choices[0].text

        prometheus = Prometheus(stack.address(9090))
        jobs = {"kvatlas-service", "kvatlas-worker"}
        wait_until(lambda: scraped(prometheus) == jobs, "both jobs to be scraped")
        wait_until(lambda: counted(prometheus) >= 1, "the call to be counted")
        managers = json.loads(get(f"{prometheus.url}/api/v1/alertmanagers"))["data"]["activeAlertmanagers"]
        assert [each["url"] for each in managers] == [f"http://{stack.address(9093)}/api/v2/alerts"]

        assert b"<html" in get(f"http://{stack.address(8501)}/").lower()
        codes = stack.stop()
    assert codes.pop("model") == 0
    assert {name: codes[name] for name in ("worker", "service", "dashboard")} == {
        "worker": 0,
        "service": 0,
        "dashboard": 0,
    }


def ask(channel: grpc.Channel, token: str = "") -> Any:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    spec = pb.GenerationSpec(text="The sea is", stop=pb.StopCriteria(max_tokens=8))
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    return stub.Generate(pb.GenerateRequest(spec=spec), timeout=120, metadata=metadata)


def refusal(channel: grpc.Channel, token: str = "") -> grpc.StatusCode | None:
    try:
        ask(channel, token)
    except grpc.RpcError as error:
        return error.code()  # type: ignore[no-any-return]
    return None


def make_secrets(folder: Path) -> tuple[dict[str, Path], str]:
    """The files that compose.auth.yml, compose.tls.yml and compose.seam.yml name; a token."""
    tokens = {name: os.urandom(32).hex() for name in ("operator", "dashboard")}
    entries = [
        f'[[principal]]\nname = "{name}"\nscopes = ["generate", "cache.read"]\n'
        f'token_sha256 = ["{hashlib.sha256(token.encode()).hexdigest()}"]\n'
        for name, token in tokens.items()
    ]
    for name, text in (("auth.toml", "\n".join(entries)), ("dashboard-token", tokens["dashboard"])):
        (folder / name).touch(mode=0o640)
        (folder / name).write_text(text)
    for name in ("worker", "service"):
        write_pair(folder, name)
    subject = ["-subj", "/CN=service", "-addext", "subjectAltName=DNS:service,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-keyout", "tls.key", "-out", "tls.crt", *subject]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    files = {
        "kvatlas_auth": "auth.toml",
        "kvatlas_dashboard_token": "dashboard-token",
        "kvatlas_tls_certificate": "tls.crt",
        "kvatlas_tls_key": "tls.key",
        "kvatlas_tls_ca": "tls.crt",
        "kvatlas_worker_key": "worker.key",
        "kvatlas_worker_pub": "worker.pub",
        "kvatlas_service_key": "service.key",
        "kvatlas_service_pub": "service.pub",
    }
    return {name: folder / file for name, file in files.items()}, tokens["operator"]


@pytest.mark.slow
def test_with_tokens_tls_and_seam_keys_it_serves_and_survives_a_crash_of_the_worker(
    model_path: Path, tmp_path: Path, wait_until: Any
) -> None:
    """compose.auth.yml, compose.tls.yml and compose.seam.yml together."""
    secrets, token = make_secrets(tmp_path)
    kept = {"models": cache_folder(), "kernels": Path.home() / ".cache"}
    overrides = [ROOT / "deploy" / f"compose.{name}.yml" for name in ("auth", "tls", "seam")]
    with running_stack(volumes=kept, overrides=overrides, secrets=secrets) as stack:
        address = stack.address(50051)
        credentials = grpc.ssl_channel_credentials(secrets["kvatlas_tls_ca"].read_bytes())
        with grpc.secure_channel(address, credentials) as channel, grpc.insecure_channel(address) as plain:
            assert refusal(channel) is grpc.StatusCode.UNAUTHENTICATED
            assert refusal(plain, token) is grpc.StatusCode.UNAVAILABLE, "plaintext"
            assert ask(channel, token).usage.completion_tokens > 0
            stack.crash("worker")
            wait_until(lambda: refusal(channel, token) is None, "answers again")
        assert "tcp://127.0.0.1" in stack.log("worker")
        assert b"<html" in get(f"http://{stack.address(8501)}/").lower()
        left = [token, secrets["kvatlas_dashboard_token"].read_text()]
        left += [read_key(secrets[f"kvatlas_{name}_key"]).secret.decode() for name in ("worker", "service")]
        logs = "".join(stack.log(name) for name in ("worker", "service", "dashboard"))
        assert not any(secret in logs for secret in left)
        codes = stack.stop()
    assert {codes[name] for name in ("worker", "service", "dashboard")} == {0}


def scraped(prometheus: Prometheus) -> set[str]:
    return {sample.labels["job"] for sample in prometheus.query("up") if sample.value == 1}


def counted(prometheus: Prometheus) -> float:
    series = 'sum(grpc_server_handled_total{grpc_method="Generate", grpc_code="OK"})'
    return sum(sample.value for sample in prometheus.query(series))
