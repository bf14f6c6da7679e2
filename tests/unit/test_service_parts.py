"""Small parts of the service: the cap, the router, resume limits, ids, options, series."""

import asyncio
import re
import socket
from array import array
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest

from kvatlas.metric import MetricKind
from kvatlas.v1 import generation_pb2 as pb
from service import http
from service.admission import Admission
from service.errors import Failure
from service.fleet.prefix_hint import cached_tokens, page_fingerprints
from service.fleet.resume import Attempts
from service.handlers.convert import new_request_id, to_duration
from service.handlers.prompts import Prompts
from service.metric_table import MIRRORS, TABLE
from service.metrics import ServiceMetrics
from service.server_options import server_options
from service.text.threads import TextThreads
from service.text.tokenizer import Tokenizer
from worker.pages.fingerprint import Fingerprinter


def test_the_cap_gives_so_many_permits_and_takes_each_back_once() -> None:
    admission = Admission(2)
    first, second = admission.enter(), admission.enter()
    assert admission.enter() is None
    assert first is not None
    assert second is not None
    first.release()
    first.release()
    assert admission.active == 1
    assert admission.enter() is not None
    assert admission.enter() is None


def test_a_request_is_resumed_three_times_when_it_gets_on() -> None:
    attempts = Attempts()
    assert [attempts.start_next(tokens) for tokens in (5, 9, 12, 20)] == [True, True, True, False]
    assert attempts.count == 3


@pytest.mark.parametrize(
    ("tokens", "allowed"),
    [([0, 0], [True, False]), ([5, 5, 5], [True, True, False]), ([0, 4, 4, 4], [True, True, True, False])],
)
def test_a_request_is_resumed_once_without_a_new_token(tokens: list[int], allowed: list[bool]) -> None:
    attempts = Attempts()
    assert [attempts.start_next(number) for number in tokens] == allowed


def test_request_ids_are_uuids_of_version_7_and_sort_by_time() -> None:
    ids = [new_request_id() for _ in range(200)]
    assert len(set(ids)) == 200
    for made in ids:
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", made)
    assert [made[:13] for made in ids] == sorted(made[:13] for made in ids)


def test_durations_are_never_negative() -> None:
    assert to_duration(-1).ToNanoseconds() == 0
    assert to_duration(1.5).ToMilliseconds() == 1500


def test_the_channel_options_are_those_of_the_table() -> None:
    assert dict(server_options(processes=1, behind_balancer=False)) == {
        "grpc.max_receive_message_length": 4194304,
        "grpc.max_send_message_length": 4194304,
        "grpc.keepalive_time_ms": 30000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.keepalive_timeout_ms": 10000,
        "grpc.http2.ping_timeout_ms": 10000,
        "grpc.http2.min_ping_interval_without_data_ms": 10000,
        "grpc.max_connection_idle_ms": 600000,
        "grpc.so_reuseport": 0,
    }
    balanced = dict(server_options(processes=2, behind_balancer=True))
    assert balanced["grpc.so_reuseport"] == 1
    assert balanced["grpc.max_connection_age_ms"] == 1800000
    assert "grpc.max_connection_age_grace_ms" not in balanced
    assert "grpc.max_concurrent_streams" not in balanced


def test_a_model_without_a_chat_template_refuses_chats() -> None:
    """H8."""
    prompts = Prompts(Tokenizer.toy(), None, TextThreads(), TextThreads())
    with pytest.raises(Failure) as raised:
        prompts.check_chat(pb.ChatPrompt())
    assert (raised.value.reason, raised.value.metadata) == ("FEATURE_DISABLED", {"feature": "chat"})


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 49])
def test_a_prompt_has_the_fingerprints_that_the_worker_gives_its_pages(length: int) -> None:
    """Computed by two programs; the last token of a prompt is never found."""
    ids, key, salt = list(range(100, 100 + length)), b"secret", b"tenant\0salt"
    worker = Fingerprinter(key)
    parent, expected = worker.of_salt(salt), []
    for page in range((length - 1) // 16):
        plane = array("I", ids[16 * page : 16 * (page + 1)]).tobytes()
        expected.append(worker.of_page(parent, plane))
        parent = expected[-1].to_bytes(8, "little")
    assert page_fingerprints(ids, 16, key, salt).tolist() == expected


def test_cached_tokens_are_counted_up_to_the_first_page_that_is_missing() -> None:
    prompt = np.array([5, 6, 7, 8], dtype=np.uint64)
    for pool, tokens in (([], 0), ([6, 7], 0), ([5], 16), ([0, 8, 6, 5], 32), ([8, 7, 6, 5], 64)):
        assert cached_tokens(prompt, np.array(pool, dtype=np.uint64), 16) == tokens


def test_every_series_is_there_at_zero_from_the_first_scrape() -> None:
    """All but those of the mirrors, which know their workers only later, and calls, which know no method."""
    metrics = ServiceMetrics(CollectorRegistry(), version="1", commit="c")
    families = {family.name: family for family in metrics.registry.collect()}
    rows = [row for row in TABLE if row not in MIRRORS]
    assert set(families) == {row.family for row in rows}
    for row in rows:
        family = families[row.family]
        assert (family.type, family.documentation) == (row.kind.value, row.help)
        for label, values in row.labels.items():
            assert {sample.labels[label] for sample in family.samples} == set(values)
        if row.kind is not MetricKind.INFO:
            assert all(sample.value == 0 for sample in family.samples)
            assert bool(family.samples) == all(row.labels.values()), row.name


def test_edges_can_be_replaced() -> None:
    metrics = ServiceMetrics(CollectorRegistry(), version="1", commit="c", ttft_buckets=(1.0, 2.0))
    text = generate_latest(metrics.registry).decode()
    edges = re.findall(r'kvatlas_time_to_first_token_seconds_bucket\{le="([^"]+)"\}', text)
    assert edges == ["1.0", "2.0", "+Inf"]


def test_building_the_series_twice_in_one_process_does_no_harm() -> None:
    """B112."""
    one, two = (ServiceMetrics(CollectorRegistry(), version="1", commit="c") for _ in range(2))
    one.merges.inc(3)
    assert two.registry.get_sample_value("kvatlas_stream_merges_total") == 0


def test_a_page_that_breaks_is_an_error_that_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The connection was closed without a word."""

    class Broken(CollectorRegistry):
        def collect(self) -> Iterator[Metric]:
            raise KeyError("a bug")

    async def scenario() -> bytes:
        ops = http.OpsServer(Broken(), lambda: True)
        port = await ops.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        writer.close()
        ops.close()
        return answer

    answer = asyncio.run(asyncio.wait_for(scenario(), 100))
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert answer.endswith(b"\r\n\r\ninternal error\n")
    assert "event=http_page_failed request='GET /metrics" in caplog.text


class MuchToSay(http.OpsServer):
    """Answers at once, with more than the buffers of both ends hold."""

    answer = bytes(32 << 20)

    async def _answer(self, head: str) -> bytes:
        return self.answer


def test_an_answer_that_nobody_reads_is_dropped_when_the_patience_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its place was given back and the connection with its answer kept: as many as somebody opened."""
    monkeypatch.setattr(http, "PATIENCE_SECONDS", 0.5)

    async def scenario() -> int:
        ops = MuchToSay(CollectorRegistry(), lambda: True)
        loop, port = asyncio.get_running_loop(), await ops.start("127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            client.setblocking(False)
            for wanted in (1, 0):
                while ops._num_connections != wanted:
                    await asyncio.sleep(0)
            num_read = 0
            with suppress(ConnectionResetError):
                while data := await loop.sock_recv(client, 1 << 20):
                    num_read += len(data)
        ops.close()
        return num_read

    assert asyncio.run(asyncio.wait_for(scenario(), 100)) < len(MuchToSay.answer)


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/"])
def test_a_head_gets_what_a_get_would_but_for_the_body(path: str) -> None:
    """The body came too."""

    async def said(port: int, method: str) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{method} {path} HTTP/1.1\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return head, body

    async def scenario() -> None:
        ops = http.OpsServer(CollectorRegistry(), lambda: True)
        port = await ops.start("127.0.0.1", 0)
        head, _ = await said(port, "GET")
        assert await said(port, "HEAD") == (head, b"")
        ops.close()

    asyncio.run(asyncio.wait_for(scenario(), 100))
