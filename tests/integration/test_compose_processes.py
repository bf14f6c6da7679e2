"""docker-compose.yml, started as processes of this machine from what is written there."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

from deploy.compose_processes import running_stack
from deploy.prometheus.local import Prometheus, missing_programs
from kvatlas.models.config import cache_folder
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc

pytestmark = [
    pytest.mark.timeout(240),  # about half a minute on a quiet machine
    pytest.mark.skipif(
        bool(missing_programs()), reason=f"needs the Debian packages {', '.join(missing_programs())}"
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
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            spec = pb.GenerationSpec(text="The sea is", stop=pb.StopCriteria(max_tokens=8))
            answer = stub.Generate(pb.GenerateRequest(spec=spec), timeout=120)
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


def scraped(prometheus: Prometheus) -> set[str]:
    return {sample.labels["job"] for sample in prometheus.query("up") if sample.value == 1}


def counted(prometheus: Prometheus) -> float:
    series = 'sum(grpc_server_handled_total{grpc_method="Generate", grpc_code="OK"})'
    return sum(sample.value for sample in prometheus.query(series))
