"""Text and device work are processes of their own; between them are private messages, no service."""

import ast
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvatlas.worker.v1 import worker_pb2

ROOT = Path(__file__).resolve().parents[2]


def imported_names(package: str) -> Iterator[str]:
    """Top-level packages that any file of a package imports, at whatever depth."""
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module.partition(".")[0]


def test_service_and_worker_know_each_other_only_through_the_seam() -> None:
    """M-32: the service holds no tensors, the worker speaks no gRPC, and both talk over ZeroMQ."""
    service, worker = set(imported_names("service")), set(imported_names("worker"))
    assert service.isdisjoint({"worker", "kernels", "torch"})
    assert worker.isdisjoint({"service", "grpc", "tokenizers", "transformers"})
    assert "zmq" in service & worker


def test_the_seam_has_messages_and_no_service() -> None:
    """M-32: what a step says travels as planes, not as a message per token."""
    assert not worker_pb2.DESCRIPTOR.services_by_name
    step: Descriptor = worker_pb2.StepOutput.DESCRIPTOR
    for plane in ("sequence_ids", "token_ids", "finish_codes"):
        assert step.fields_by_name[plane].type == FieldDescriptor.TYPE_BYTES
