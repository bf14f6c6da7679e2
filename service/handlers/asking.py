"""Asking workers: which one a request means, and what its no means for the client."""

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc

from kvatlas.worker.v1 import worker_pb2
from service import errors
from service.errors import Failure, Violation
from service.fleet.link import CommandFailed, WorkerUnavailable
from service.fleet.mirrors import KeptMirror, PageMirrors, replies_to

_FIELDS = re.compile(r"(\w+(?:, \w+)*): (.+)", re.DOTALL)
"""A worker's words for INVALID_FIELD: the fields of what it was asked, and what is wrong with them."""


def named_worker(mirrors: PageMirrors, worker_id: str) -> KeptMirror:
    """The mirror of the worker that is named, or of the only one. Raises Failure."""
    known = mirrors.kept
    if not worker_id:
        if len(known) > 1:
            raise errors.worker_id_required([each.mirror.worker_id for each in known])
        if not known:
            raise errors.not_ready()
        return known[0]
    for each in known:
        if each.mirror.worker_id == worker_id:
            return each
    raise errors.worker_not_found(f"no worker has the id {worker_id[:128]!r}")


def reachable_workers(mirrors: PageMirrors, worker_id: str) -> list[KeptMirror]:
    """The worker that is named, or all that are there. Raises Failure."""
    if worker_id:
        return [named_worker(mirrors, worker_id)]
    there = [each for each in mirrors.kept if each.link.is_up]
    if not there:
        raise errors.not_ready()
    return there


@asynccontextmanager
async def asked(
    kept: KeptMirror,
    command: worker_pb2.Command,
    timeout: float,
    late: Callable[[], Failure] = errors.not_ready,
) -> AsyncIterator[AsyncIterator[worker_pb2.CommandReply]]:
    """The replies of a worker to a command. Raises Failure: `late` where `timeout` seconds pass."""
    try:
        async with replies_to(kept.link, command, timeout=timeout) as replies:
            yield replies
    except CommandFailed as failed:
        raise failure_of(failed) from failed
    except WorkerUnavailable as gone:
        raise errors.not_ready() from gone
    except TimeoutError as passed:
        raise late() from passed


async def ask(
    kept: KeptMirror,
    command: worker_pb2.Command,
    timeout: float,
    late: Callable[[], Failure] = errors.not_ready,
) -> worker_pb2.CommandReply:
    """The one reply of a worker to a command. Raises Failure: `late` where `timeout` seconds pass."""
    async with asked(kept, command, timeout, late) as replies:
        return await anext(replies)


def failure_of(failed: CommandFailed) -> Failure:
    """A worker's no as the client's."""
    status = next(
        (each for each in grpc.StatusCode if each.value[0] == failed.code), grpc.StatusCode.INTERNAL
    )
    reason = errors.reason_name(failed.error_reason)
    retry_ms = 1000 if status is grpc.StatusCode.RESOURCE_EXHAUSTED else None
    violations = _violations(failed.message) if reason == "INVALID_FIELD" else ()
    return Failure(status, reason, failed.message, failed.metadata, violations, retry_ms=retry_ms)


def _violations(message: str) -> Sequence[Violation]:
    found = _FIELDS.fullmatch(message)
    return [Violation(path, found[2]) for path in found[1].split(", ")] if found is not None else ()
