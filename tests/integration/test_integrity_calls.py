"""The live audit as a client sees it: real worker, real service, a leak that was planted."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvatlas.v1 import cache_pb2 as pb
from kvatlas.v1 import cache_pb2_grpc, generation_pb2, generation_pb2_grpc

FAKE = ("--runner", "fake", "--model", "random:tiny", "--num-pages", "255")


def test_a_sound_server_passes_every_check(
    start_server: Callable[..., Any], wait_until: Callable[..., None], hold: Any
) -> None:
    """H5: GetIntegrity and RunIntegrityCheck while a request runs."""
    server = start_server(*FAKE, *hold.settings, "--set-worker", "audit_interval=0.1")
    with grpc.insecure_channel(server.address) as channel:
        cache = cache_pb2_grpc.CacheServiceStub(channel)
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        spec = generation_pb2.GenerationSpec(text="a b c")
        spec.stop.max_tokens = hold.tokens
        spec.stop.ignore_eos = True
        stream = generation.StreamGenerate(generation_pb2.StreamGenerateRequest(spec=spec))
        next(stream)
        report = cache.RunIntegrityCheck(pb.RunIntegrityCheckRequest())
        assert (report.checked_pages, report.violations_total, len(report.violations)) == (255, 0, 0)
        assert report.checked_rows == 1

        def passed() -> bool:
            answer = cache.GetIntegrity(pb.GetIntegrityRequest())
            return len(answer.checks) == 6 and all(check.pass_count for check in answer.checks)

        wait_until(passed, "a pass of all six checks")
        hold.off()
        list(stream)
        answer = cache.GetIntegrity(pb.GetIntegrityRequest())
        assert [check.fail_count for check in answer.checks] == [0] * 6
        assert answer.last_success_time.ToSeconds() > 1_600_000_000
        assert answer.sweep_count >= 1
        with pytest.raises(grpc.RpcError) as refused:
            cache.GetIntegrity(pb.GetIntegrityRequest(worker_id="who"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_leak_is_told_to_who_asks_and_to_who_watches(start_server: Callable[..., Any]) -> None:
    server = start_server(
        *FAKE, "--set-worker", "debug_faults=page_leak", "--set-worker", "audit_interval=0.1"
    )
    with grpc.insecure_channel(server.address) as channel:
        cache = cache_pb2_grpc.CacheServiceStub(channel)
        watch = cache.WatchPageMap(pb.WatchPageMapRequest(), timeout=120)
        told = next(message.violations[0] for message in watch if message.violations)
        watch.cancel()
        answer = cache.GetIntegrity(pb.GetIntegrityRequest())
        leak = next(each for each in answer.violations if each.HasField("page_id"))
        assert told.check == leak.check == pb.INTEGRITY_CHECK_REFCOUNT
        assert (leak.expected, leak.found) == ("0", "1")
        assert leak.revision.number > 0
        page = cache.GetPage(pb.GetPageRequest(page_id=leak.page_id))
        assert (page.state, page.ref_count, len(page.sequences)) == (pb.PAGE_STATE_ACTIVE, 1, 0)
        report = cache.RunIntegrityCheck(pb.RunIntegrityCheckRequest())
        assert leak.page_id in {each.page_id for each in report.violations if each.HasField("page_id")}
    assert "event=audit_failed check=refcount" in server.log()
