"""What operators do to a service and its worker: what it changes, what it leaves alone, and who may not.

A real worker whose device is made of lists; a prompt of SLOW makes its steps slow while it runs.
"""

import asyncio
import hashlib
import logging
import pstats
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from kvatlas.v1 import cache_pb2, server_pb2, server_pb2_grpc
from kvatlas.v1 import generation_pb2 as pb
from service.testing import RunningService, loop_thread, running_service
from service.testing_callers import SECONDS, Caller, told
from service.testing_fleet import FAULTY_TOKENS, WorkerProcess, wait_for

PAGE_SIZE, PAGES = 16, 256
SLOW = chr(FAULTY_TOKENS["slow_steps"]) * 8
TENANTS = {"alice": "alice-1", "bob": "bob-2", "root": "root-3"}
GREETING = "You are a helpful assistant, and this greeting fills some pages."


class Desk:
    """A worker, a service that pins GREETING for alice at each start, and who calls."""

    def __init__(self, folder: Path, cleanup: ExitStack) -> None:
        self.folder = folder
        patch = cleanup.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("service.fleet.link.SILENCE_SECONDS", SECONDS)  # nobody here is silent, only slow
        auth = folder / "auth.toml"
        auth.touch(mode=0o600)
        auth.write_text("".join(_entry(name) for name in TENANTS))
        pins = folder / "pins.toml"
        pins.write_text(f'[[pin]]\nname = "greeting"\ntext = "{GREETING}"\ntenant = "alice"\n')
        flags = ("--runner", "fake", "--num-pages", str(PAGES), "--debug-faults", "requests")
        self.worker = WorkerProcess(folder, "worker-0", *flags, "--profiles", str(folder / "profiles"))
        cleanup.callback(self.worker.kill)
        self.worker.start()
        settings: dict[str, Any] = {"auth_file": str(auth), "pins": str(pins), "admin_address": "127.0.0.1:0"}
        self.running: RunningService = cleanup.enter_context(
            running_service(folder, num_workers=0, ready=False, workers=(self.worker.address,), **settings)
        )
        self.public = cleanup.enter_context(grpc.insecure_channel(self.running.address))
        admin_port = self.running.service.admin_port
        self.admin = cleanup.enter_context(grpc.insecure_channel(f"127.0.0.1:{admin_port}"))
        self.alice, self.bob, self.root = (
            Caller(self.public, self.admin, token) for token in TENANTS.values()
        )

    def pins(self) -> list[server_pb2.PinnedPrefix]:
        """All of them; none while the worker is not there."""
        try:
            return list(self.root.ListPinnedPrefixes(server_pb2.ListPinnedPrefixesRequest()).pins)
        except grpc.RpcError:
            return []

    def pool(self) -> cache_pb2.PoolStats:
        stats: cache_pb2.PoolStats = self.root.GetPagePool(cache_pb2.GetPagePoolRequest()).stats
        return stats


def _entry(name: str) -> str:
    digest = hashlib.sha256(TENANTS[name].encode()).hexdigest()
    scopes = '["generate", "cache.read", "admin"]' if name == "root" else '["generate", "cache.read"]'
    return (
        f'[[principal]]\nname = "{name}"\ntenant = "{name}"\ntoken_sha256 = ["{digest}"]\nscopes = {scopes}\n'
    )


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with ExitStack() as cleanup:
        desk = Desk(tmp_path_factory.mktemp("admin"), cleanup)
        wait_for(lambda: [pin.name for pin in desk.pins()] == ["greeting"], "the pin", [desk.worker])
        yield desk


def spec_of(text: str, max_tokens: int = 2, **more: Any) -> pb.GenerationSpec:
    spec = pb.GenerationSpec(text=text, sampling=pb.SamplingParams(temperature=0), **more)
    spec.stop.ignore_eos = True
    spec.stop.max_tokens = max_tokens
    return spec


def hit_tokens(response: pb.GenerateResponse) -> int:
    return response.usage.prefix.hit_tokens


def test_configured_pins_are_there_after_each_start_and_hits_are_counted(desk: Desk) -> None:
    whole = len(GREETING) // PAGE_SIZE * PAGE_SIZE
    (pin,) = desk.pins()
    assert (pin.tenant, pin.token_count, pin.pinned_tokens) == ("alice", len(GREETING), whole)
    assert hit_tokens(desk.alice.generate(spec_of(GREETING + " Hello?"))) == whole
    assert hit_tokens(desk.bob.generate(spec_of(GREETING + " Hello?"))) == 0, "another tenant"
    assert [pin.hit_tokens for pin in desk.pins()] == [whole]
    desk.worker.kill()
    desk.worker.start()
    wait_for(lambda: [pin.name for pin in desk.pins()] == ["greeting"], "the pin again", [desk.worker])
    assert [pin.hit_tokens for pin in desk.pins()] == [0], "another life"
    assert hit_tokens(desk.alice.generate(spec_of(GREETING + " Hello?"))) == whole


def test_a_pin_set_again_goes_on_counting_and_pins_come_in_pages_of_a_list(desk: Desk) -> None:
    ask = server_pb2.SetPinnedPrefixRequest
    for _ in range(2):
        (pin,) = desk.root.SetPinnedPrefix(ask(name="one", text="1" * 40, tenant="bob")).pins
        assert pin.computed_tokens == 40, "by the first of them"
        desk.bob.generate(spec_of("1" * 40))
    (two,) = desk.root.SetPinnedPrefix(
        ask(name="two", text="1" * 40, tenant="bob", ttl=Duration(seconds=9999))
    ).pins
    assert two.computed_tokens == 0, "its pages were there"
    assert two.HasField("expire_time")
    names: list[str] = []
    cursor = ""
    while not names or cursor:
        page = desk.root.ListPinnedPrefixes(
            server_pb2.ListPinnedPrefixesRequest(max_results=1, cursor=cursor)
        )
        names += [pin.name for pin in page.pins]
        hits = {pin.name: pin.hit_tokens for pin in page.pins}
        assert hits.get("one", 64) == 64, "two prompts found its two pages"
        cursor = page.next_cursor
    assert names == ["greeting", "one", "two"]
    brief = ask(name="brief", text="1" * 40, tenant="bob", ttl=Duration(nanos=400_000))
    assert desk.root.SetPinnedPrefix(brief).pins[0].HasField("expire_time"), "it ends, too"
    for name in ("one", "two", "two", "brief"):
        assert not desk.root.SetPinnedPrefix(ask(name=name, remove=True)).pins, "idempotent"
    assert [pin.name for pin in desk.pins()] == ["greeting"]


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (server_pb2.SetPinnedPrefixRequest(name="two words", text="x" * 40), "name"),
        (server_pb2.SetPinnedPrefixRequest(name="a"), "prefix"),
        (server_pb2.SetPinnedPrefixRequest(name="a", text="short"), "text"),
        (server_pb2.SetPinnedPrefixRequest(name="a", text="x" * 40, tenant="\0"), "tenant"),
        (server_pb2.SetPinnedPrefixRequest(name="a", text="x" * 40, salt="s" * 65), "salt"),
        (server_pb2.SetPinnedPrefixRequest(name="a", text="x" * 40, ttl=Duration()), "ttl"),
        (server_pb2.StartDrainRequest(grace=Duration(seconds=-1)), "grace"),
        (server_pb2.CancelRequestsRequest(), "request_ids"),
        (server_pb2.CancelRequestsRequest(request_ids=["no id"]), "request_ids[0]"),
        (server_pb2.SetLogLevelRequest(), "level"),
        (server_pb2.SetLogLevelRequest(level=server_pb2.LOG_LEVEL_INFO, logger="no.such"), "logger"),
        (server_pb2.CaptureProfileRequest(), "steps"),
        (server_pb2.CaptureProfileRequest(steps=1001), "steps"),
        (server_pb2.ListPinnedPrefixesRequest(max_results=1001), "max_results"),
    ],
)
def test_a_value_out_of_its_range_is_named_and_changes_nothing(desk: Desk, request_: Any, path: str) -> None:
    method = type(request_).__name__.removesuffix("Request")
    got = told(lambda: getattr(desk.root, method)(request_))
    assert (got.status, got.reason, got.paths) == ("INVALID_ARGUMENT", "INVALID_FIELD", (path,))
    assert [pin.name for pin in desk.pins()] == ["greeting"]


def test_a_flush_takes_a_tenants_pages_and_leaves_pins_and_pages_in_use(desk: Desk) -> None:
    ask = server_pb2.FlushPrefixCacheRequest
    desk.root.FlushPrefixCache(ask())
    desk.alice.generate(spec_of("a" * 40))
    desk.bob.generate(spec_of("b" * 40))
    assert desk.root.FlushPrefixCache(ask(tenant="bob")).freed_pages == 2
    assert hit_tokens(desk.bob.generate(spec_of("b" * 40))) == 0
    assert hit_tokens(desk.alice.generate(spec_of("a" * 40))) == 32
    call = desk.alice.stream(spec_of(SLOW + "c" * 40, 1000))
    while next(call).WhichOneof("event") != "delta":
        pass
    flushed = desk.root.FlushPrefixCache(ask(tenant="alice", include_active=True))
    assert (flushed.freed_pages, flushed.unindexed_pages) == (2, 3), "in use: out of the index, and kept"
    assert next(call).WhichOneof("event") == "delta", "and it goes on"
    call.cancel()
    wait_for(lambda: not desk.pool().active_pages, "idle", [desk.worker])
    assert hit_tokens(desk.alice.generate(spec_of(SLOW + "c" * 40, 1))) == 0
    desk.root.FlushPrefixCache(ask(tenant="bob", include_pinned=True))
    assert [pin.name for pin in desk.pins()] == ["greeting"], "another tenant's pins stay"


def test_levels_go_back_by_themselves_in_both_processes(desk: Desk) -> None:
    logger = logging.getLogger("service.admin")
    before = logger.level
    for worker_id in ("", "worker-0"):
        name = "worker.engine" if worker_id else "service.admin"
        desk.root.SetLogLevel(
            server_pb2.SetLogLevelRequest(
                worker_id=worker_id,
                logger=name,
                level=server_pb2.LOG_LEVEL_ERROR,
                duration=Duration(nanos=200_000_000),
            )
        )
    wait_for(lambda: logger.level == before, "the level before")
    unknown = server_pb2.SetLogLevelRequest(worker_id="worker-0", logger="x", level=server_pb2.LOG_LEVEL_INFO)
    got = told(lambda: desk.root.SetLogLevel(unknown))
    assert (got.reason, got.paths) == ("INVALID_FIELD", ("logger",))


INVALID_FIRST_BYTE = ("INVALID_ARGUMENT", "INVALID_FIELD", ("first_byte",))


def test_a_profile_is_of_so_many_steps_and_the_last_four_are_kept(desk: Desk) -> None:
    capture, ask = desk.root.CaptureProfile, server_pb2.CaptureProfileRequest
    nobody = told(lambda: capture(ask(steps=3), timeout=2.0))
    assert nobody.status == "DEADLINE_EXCEEDED", "nothing ran"
    holder = desk.alice.stream(spec_of(SLOW, 1000))
    next(holder)
    names = []
    for _ in range(5):
        done = capture(ask(steps=1))
        assert done.steps == 1
        names.append(done.file_name)
    stub = server_pb2_grpc.AdminServiceStub(desk.admin)
    pending = stub.CaptureProfile.future(ask(steps=1000), timeout=SECONDS, metadata=desk.root.metadata)
    log = desk.worker.log_path
    wait_for(lambda: log.read_text().count("event=profile_began") == 7, "the profile", [desk.worker])
    assert told(lambda: capture(ask(steps=1))).reason == "PROFILE_RUNNING"
    pending.cancel()
    wait_for(lambda: log.read_text().count("event=profile_ended") == 7, "its end", [desk.worker])
    holder.cancel()
    assert told(lambda: desk.root.GetProfile(server_pb2.GetProfileRequest(file_name=names[0]))).reason == "PROFILE_NOT_FOUND"  # fmt: skip # noqa: E501
    pieces = list(desk.root.GetProfile(server_pb2.GetProfileRequest()))
    data = b"".join(piece.data for piece in pieces)
    assert (pieces[0].file_name, pieces[0].byte_count, len(data)) == (
        names[-1],
        done.byte_count,
        done.byte_count,
    )
    rest = desk.root.GetProfile(server_pb2.GetProfileRequest(file_name=names[-1], first_byte=100))
    assert b"".join(piece.data for piece in rest) == data[100:], "a broken download goes on"
    beyond = told(lambda: desk.root.GetProfile(server_pb2.GetProfileRequest(first_byte=len(data) + 1)))
    assert (beyond.status, beyond.reason, beyond.paths) == INVALID_FIRST_BYTE
    path = desk.folder / "fetched.pstats"
    path.write_bytes(data)
    functions = {name for _, _, name in pstats.Stats(str(path)).stats}  # type: ignore[attr-defined]
    assert "schedule" in functions


def test_a_download_begins_within_its_recording(desk: Desk) -> None:
    desk.root.StartRecording(server_pb2.StartRecordingRequest())
    ended = desk.root.StopRecording(server_pb2.StopRecordingRequest()).recording
    ask = server_pb2.GetRecordingRequest
    rest = list(desk.root.GetRecording(ask(first_byte=ended.byte_count)))
    assert b"".join(piece.data for piece in rest) == b""
    beyond = told(lambda: desk.root.GetRecording(ask(first_byte=ended.byte_count + 1)))
    assert (beyond.status, beyond.reason, beyond.paths) == INVALID_FIRST_BYTE


def test_a_stream_that_nobody_reads_gives_its_pages_back_when_an_operator_ends_it(desk: Desk) -> None:
    call = desk.alice.stream(spec_of(SLOW, 1000, request_id="unread"))
    wait_for(lambda: desk.pool().active_pages, "its pages", [desk.worker])
    cancelled = desk.root.CancelRequests(
        server_pb2.CancelRequestsRequest(request_ids=["unread"], reason="r\n")
    )
    assert list(cancelled.cancelled_ids) == ["unread"]
    wait_for(lambda: not desk.pool().active_pages, "its pages back", [desk.worker])
    got = told(lambda: call)
    assert (got.status, got.reason) == ("CANCELLED", "CANCELLED_BY_OPERATOR")
    assert desk.running.value("kvatlas_requests_total", outcome="cancelled") >= 1


def test_channelz_is_the_operators(desk: Desk) -> None:
    ask = channelz_pb2.GetServersRequest()
    stub = channelz_pb2_grpc.ChannelzStub(desk.admin)
    servers = stub.GetServers(ask, timeout=SECONDS, metadata=desk.root.metadata).server
    assert len(servers) >= 2
    assert told(lambda: stub.GetServers(ask, timeout=SECONDS)).reason == "BAD_CREDENTIALS"
    alice = told(lambda: stub.GetServers(ask, timeout=SECONDS, metadata=desk.alice.metadata))
    assert (alice.reason, alice.metadata["scope"]) == ("MISSING_SCOPE", "admin")
    public = channelz_pb2_grpc.ChannelzStub(desk.public)
    assert told(lambda: public.GetServers(ask, timeout=SECONDS, metadata=desk.root.metadata)).status == "UNIMPLEMENTED"  # fmt: skip # noqa: E501


def test_the_public_listener_has_no_call_of_the_operators_not_even_for_them(desk: Desk) -> None:
    """Also after the admin listener has answered it: what one listener knows is no other's."""
    public = server_pb2_grpc.AdminServiceStub(desk.public)
    for name in server_pb2.DESCRIPTOR.services_by_name["AdminService"].methods_by_name:
        if name in ("StartDrain", "StopDrain"):
            continue
        request = getattr(server_pb2, f"{name}Request")()
        with suppress(grpc.RpcError):
            outcome = getattr(desk.root, name)(request)
            if hasattr(outcome, "__next__"):
                list(outcome)
        method = getattr(public, name)
        got = told(lambda method=method, request=request: method(request, timeout=SECONDS, metadata=desk.root.metadata))  # type: ignore[misc] # fmt: skip # noqa: E501
        assert got.status == "UNIMPLEMENTED", name
    desk.root.SetPinnedPrefix(
        server_pb2.SetPinnedPrefixRequest(name="greeting", text=GREETING, tenant="alice")
    )


def test_no_call_of_the_operators_is_anybody_elses(desk: Desk) -> None:
    methods = server_pb2.DESCRIPTOR.services_by_name["AdminService"].methods_by_name
    assert len(methods) >= 13
    for name in methods:
        request = getattr(server_pb2, f"{name}Request")()
        got = told(lambda name=name, request=request: getattr(desk.alice, name)(request))  # type: ignore[misc]
        assert (got.status, got.reason) == ("PERMISSION_DENIED", "MISSING_SCOPE"), name


def test_a_refused_auth_file_is_counted(desk: Desk) -> None:
    before = desk.running.value("kvatlas_auth_reload_failures_total")
    auth = desk.folder / "auth.toml"
    text = auth.read_text()
    auth.write_text("not toml [")
    wait_for(lambda: desk.running.value("kvatlas_auth_reload_failures_total") == before + 1, "the count")
    auth.write_text(text)
    assert desk.root.GetLoad(server_pb2.GetLoadRequest()).load.workers, "the old one is in force"


def test_a_drain_by_signal_is_for_good(desk: Desk) -> None:
    """The module's last test: its service ends here."""
    service, loop = desk.running.service, loop_thread().loop
    holder = desk.root.stream(spec_of(SLOW, 1000))
    next(holder)
    end: Future[None] = asyncio.run_coroutine_threadsafe(service.serve(), loop)
    desk.root.StartDrain(server_pb2.StartDrainRequest(grace=Duration(seconds=9999)))
    loop.call_soon_threadsafe(service.stop)  # as the handler of SIGTERM does
    wait_for(lambda: service.backstage.drain._is_final, "the signal")
    refused = told(lambda: desk.root.StopDrain(server_pb2.StopDrainRequest()))
    assert (refused.status, refused.reason) == ("UNAVAILABLE", "DRAINING")
    assert next(holder).WhichOneof("event") == "delta", "it keeps the patience that it has"
    holder.cancel()
    end.result(SECONDS)
