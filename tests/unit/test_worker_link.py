"""The engine socket, rule by rule, with the engine played by the test."""

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from kvatlas.v1 import cache_pb2, server_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.channels import CommandQueue, OutputQueue
from worker.description import ModelDescription, PoolDescription, WorkerDescription, WorkerState
from worker.ids import SequenceId
from worker.link.addresses import AddressError
from worker.link.server import EngineLink
from worker.link.testing import WAIT_SECONDS, TestService
from worker.messages import (
    Abort,
    AddAnswer,
    AddRequest,
    CheckIntegrity,
    DropSource,
    EncodedReply,
    EngineCommand,
    Flush,
    FlushAnswer,
    LinkMessage,
    ObserverCall,
    PageSlots,
    Pin,
    ReadRows,
    ReplayCall,
    RowsAnswer,
    SnapshotCall,
    StepOutputs,
    TableRow,
    Ticket,
)
from worker.scheduling.output import FinishCode, OutputColumns, SequenceEnd
from worker.scheduling.request import AbortReason, AddOutcome, AddStatus, RequestSpec
from worker.stats import EngineCounts
from worker.status import StepMark, first_board

SILENCE_SECONDS = 3.0
"""Until a service is lost, where that is tested: longer than a loaded machine holds up one that speaks."""


class Peer(TestService):
    """A service of these tests."""

    __test__ = False


class LinkBench:
    """A link without an engine."""

    def __init__(self, folder: Path, *, command_limit: int = 64, silence_seconds: float = 600.0) -> None:
        self.address = f"ipc://{folder}/engine"
        self.commands: CommandQueue[EngineCommand] = CommandQueue(command_limit)
        self.outputs: OutputQueue[LinkMessage] = OutputQueue(1000)
        self.calls: list[ObserverCall] = []
        self.failures: list[str] = []
        model = ModelDescription("m", vocab_size=100, max_context_tokens=64, eos_token_ids=(2,))
        pool = PoolDescription(32, 4, 8, 64, "lru")
        description = WorkerDescription(
            "w", 77, model, pool, 9, 64, 8, ("prefix_cache",), "ipc:///pages", b"key"
        )
        self.board = first_board(description, time.monotonic())
        self.board.state = WorkerState.SERVING
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.takes_calls = True
        self.link = EngineLink(
            self.context,
            self.address,
            commands=self.commands,
            outputs=self.outputs,
            status=self.board,
            to_observer=self.take_call,
            on_failure=lambda: self.failures.append("failed"),
            silence_seconds=silence_seconds,
        )
        self.link.start()
        self.services: list[Peer] = []

    def take_call(self, call: ObserverCall) -> bool:
        self.calls.append(call)
        return self.takes_calls

    def service(self, name: str = "a", epoch: int = 1) -> Peer:
        service = Peer(self.address, name, epoch)
        self.services.append(service)
        return service

    def command(self, limit: float = WAIT_SECONDS) -> EngineCommand:
        found = self.commands.wait(limit)
        assert found is not None, "no command came"
        return found

    def request(self) -> RequestSpec:
        command = self.command()
        assert isinstance(command, AddRequest), command
        return command.spec

    def accept(self, spec: RequestSpec) -> None:
        self.outputs.put(
            AddAnswer(spec.source, spec.sequence_id, spec.sample_count, AddOutcome(AddStatus.ACCEPTED))
        )

    def tokens(self, spec: RequestSpec, *tokens: int, end: FinishCode = FinishCode.NONE) -> None:
        columns = OutputColumns()
        for token in tokens:
            columns.sequence_ids.append(spec.sequence_id)
            columns.token_ids.append(token)
            columns.finish_codes.append(0)
        if end:
            columns.finish_codes[-1] = end
            columns.ends.append(SequenceEnd(spec.sequence_id, end, len(tokens)))
        self.outputs.put(StepOutputs(1, 0.001, {spec.source: columns}))

    def close(self) -> None:
        for service in self.services:
            service.close()
        self.link.close()
        self.outputs.close()
        self.context.term()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LinkBench]:
    made = LinkBench(tmp_path)
    yield made
    made.close()
    assert not made.failures
    assert not [thread for thread in threading.enumerate() if thread.name == "kvatlas-io"]


def until(is_done: Callable[[], bool], limit: float = WAIT_SECONDS) -> None:
    end = time.monotonic() + limit
    while not is_done():
        assert time.monotonic() < end, "not so in time"
        threading.Event().wait(0.005)


def test_hello_is_answered_by_who_the_worker_is(bench: LinkBench) -> None:
    config = bench.service().hello()
    assert (config.protocol, config.worker.worker_id, config.worker.epoch) == (1, "w", 77)
    assert config.worker.state == server_pb2.SERVER_STATE_SERVING
    assert (config.model.vocab_size, list(config.model.eos_token_ids)) == (100, [2])
    geometry = config.geometry
    assert (geometry.page_count, geometry.dummy_page_id, geometry.page_size) == (33, 32, 4)
    assert (geometry.row_count, geometry.row_width) == (9, 64)
    assert (config.max_running_sequences, config.max_queued_requests, config.max_pinned_pages) == (8, 9, 8)
    assert list(config.features) == ["prefix_cache"]
    assert config.fingerprint_key == b"key"


@pytest.mark.parametrize("fault", ["protocol", "name"])
def test_a_service_that_does_not_fit_is_refused(bench: LinkBench, fault: str) -> None:
    service = bench.service()
    hello = worker_pb2.Hello(protocol=1, instance_id="a", service_epoch=1)
    if fault == "protocol":
        hello.protocol = 2
    else:
        hello.instance_id = "another"
    service.send(worker_pb2.ServiceMessage(hello=hello))
    service.wait(lambda: service.refusal is not None)
    assert service.refusal is not None
    assert service.refusal.protocol == 1


def test_a_hello_from_a_dead_process_is_refused(bench: LinkBench) -> None:
    bench.service("a", epoch=5).hello()
    late = bench.service("a", epoch=4)
    late.say_hello()
    late.wait(lambda: late.refusal is not None)
    assert late.refusal is not None
    assert "older" in late.refusal.message


def test_messages_before_hello_are_ignored(bench: LinkBench) -> None:
    service = bench.service()
    service.add([1, 2])
    service.hello()
    service.add([1, 2, 3])
    assert len(bench.request().prompt_token_ids) == 3
    assert bench.commands.drain() == []


def test_a_second_hello_ends_what_the_first_left(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    service.add([1, 2])
    old = bench.request()
    bench.accept(old)
    service.hello()
    assert bench.command() == DropSource(old.source)
    bench.tokens(old, 7)  # late, of the session before: reaches nobody
    service.add([1, 2, 3])
    new = bench.request()
    assert new.source != old.source
    bench.accept(new)
    bench.tokens(new, 5, end=FinishCode.MAX_TOKENS)
    answer = service.finish(2)[0]
    assert answer.tokens == [5]
    assert set(service.answers) == {2}


def test_two_services_with_equal_ids_get_their_own_tokens(bench: LinkBench) -> None:
    first, second = bench.service("a"), bench.service("b")
    for service in (first, second):
        service.hello()
        service.add([1, 2])
    specs = {spec.source.partition("#")[0]: spec for spec in (bench.request(), bench.request())}
    assert specs["a"].sequence_id != specs["b"].sequence_id
    for name, token in (("a", 11), ("b", 22)):
        bench.accept(specs[name])
        bench.tokens(specs[name], token, end=FinishCode.EOS)
    assert first.finish(1)[0].tokens == [11]
    assert second.finish(1)[0].tokens == [22]


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.SERVING])
def test_every_request_gets_exactly_one_answer(bench: LinkBench, state: WorkerState) -> None:
    """A malformed one and one that comes too early are answered by the link, the others by the engine."""
    bench.board.state = state
    service = bench.service()
    service.hello()
    good = service.add([1, 2])
    bad = service.add([1, 100])
    if state is WorkerState.STARTING:
        expected = {good: AddStatus.NOT_READY, bad: AddStatus.NOT_READY}
    else:
        bench.accept(bench.request())
        expected = {good: AddStatus.ACCEPTED, bad: AddStatus.INVALID}
    service.wait(lambda: len(service.results) == 2)
    assert {first: result.status for first, result in service.results.items()} == expected


def test_a_constraint_is_refused_where_nothing_compiles_it(bench: LinkBench) -> None:
    """H8: the library is missing, so there is no desk."""
    service = bench.service()
    service.hello()
    params = worker_pb2.SequenceParams(top_p=1.0, repetition_penalty=1.0, max_tokens=2, regex="a+")
    first = service.add([1, 2], params=params)
    service.wait(lambda: service.results)
    result = service.results[first]
    assert (result.status, result.message) == (AddStatus.FEATURE_DISABLED, "constraints")


def test_aborts_name_the_workers_own_ids(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    service.add([1])
    spec = bench.request()
    service.abort(1, 2**63, reason=4)
    assert bench.command() == Abort([spec.sequence_id], AbortReason.CANCELLED)
    service.abort(1, reason=99)
    assert bench.command() == Abort([spec.sequence_id], AbortReason.UNSPECIFIED)


def test_goodbye_ends_the_session(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    service.goodbye()
    command = bench.command()
    assert isinstance(command, DropSource)
    assert command.source.startswith("a#")


def test_a_silent_service_loses_its_sequences_and_one_that_speaks_does_not(tmp_path: Path) -> None:
    bench = LinkBench(tmp_path, silence_seconds=SILENCE_SECONDS)
    try:
        check_silence(bench)
    finally:
        bench.close()


def check_silence(bench: LinkBench) -> None:
    silent, speaking = bench.service("silent"), bench.service("speaking")
    began = time.monotonic()  # before the silent one speaks for the last time
    silent.hello()
    speaking.hello()
    dropped: list[EngineCommand] = []

    def is_dropped() -> bool:
        dropped.extend(bench.commands.drain())
        return bool(dropped)

    while not is_dropped():
        speaking.heartbeat()
        speaking.read(0.05)
        assert time.monotonic() - began < WAIT_SECONDS
    assert time.monotonic() - began >= SILENCE_SECONDS
    assert [command.source.partition("#")[0] for command in dropped] == ["silent"]  # type: ignore[union-attr]


def test_a_vanished_service_is_noticed_when_something_is_sent_to_it(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    service.add([1])
    spec = bench.request()
    bench.services.remove(service)
    service.close()

    def is_dropped() -> bool:
        bench.tokens(spec, 1)
        return DropSource(spec.source) in bench.commands.drain()

    until(is_dropped)


def test_heartbeats_come_by_themselves_and_carry_the_load(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    service.wait(lambda: len(service.heartbeats) >= 2)
    beat = service.heartbeats[-1]
    assert (beat.load.total_pages, beat.load.available_pages, beat.pool.reserved_pages) == (32, 32, 1)
    assert beat.load.state == server_pb2.SERVER_STATE_SERVING
    assert beat.revision.epoch == 77


def test_a_change_of_state_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.link.server.HEARTBEAT_SECONDS", 3600.0)
    bench = LinkBench(tmp_path)
    try:
        service = bench.service()
        service.hello()
        bench.board.state = WorkerState.DRAINING
        bench.link.announce()
        draining = server_pb2.SERVER_STATE_DRAINING
        service.wait(lambda: bool(service.heartbeats) and service.heartbeats[-1].load.state == draining)
    finally:
        bench.close()


def test_a_lasting_difference_of_live_sequences_is_counted_and_a_passing_one_is_not(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    for live in (1, 1, 0, 2, 2, 0, 3, 2, 1):
        service.heartbeat(live)
    for _ in range(6):
        service.heartbeat(5)
    until(lambda: bench.link.sequence_mismatches == 1)


def test_a_difference_within_one_long_step_is_none(bench: LinkBench) -> None:
    """What a service began or ended waits for the step's end; a prompt on a busy CPU takes seconds."""
    service = bench.service()
    service.hello()
    counts = EngineCounts(running_sequences=1)
    bench.board.load = replace(bench.board.load, counts=counts)
    for _ in range(20):
        service.heartbeat(5)
    service.add([1, 2])
    bench.request()  # the heartbeats before it were read
    assert bench.link.sequence_mismatches == 0
    for step in range(1, 9):
        bench.board.step = StepMark(step, time.monotonic())
        service.heartbeat(5)
        service.add([1, 2])
        bench.request()
    assert bench.link.sequence_mismatches > 0, "the engine went on and the difference stayed"


def test_garbage_on_the_socket_is_survived(bench: LinkBench) -> None:
    service = bench.service()
    service._engine.send(b"\xff\xff\xff")
    service._engine.send_multipart([b"two", b"frames"])
    service.hello()


def test_a_message_that_breaks_the_link_costs_its_service_the_session(
    bench: LinkBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B102: the stage before the engine."""
    broken, other = bench.service("broken"), bench.service("other")
    broken.hello()
    other.hello()

    def breaks(sequence_ids: object, *rest: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("worker.link.codec.plane", breaks)
    broken.abort(1)
    dropped = bench.command()
    monkeypatch.undo()
    assert isinstance(dropped, DropSource)
    assert dropped.source.startswith("broken#")
    other.add([1])
    assert bench.request().source.startswith("other#")


def test_a_full_command_queue_holds_services_back_and_loses_nothing(tmp_path: Path) -> None:
    bench = LinkBench(tmp_path, command_limit=4)
    try:
        service = bench.service()
        service.hello()
        for number in range(20):
            service.add([number])
        until(lambda: not bench.commands.has_room)
        prompts = [bench.request().prompt_token_ids[0] for _ in range(20)]
        assert prompts == list(range(20))
    finally:
        bench.close()


def test_an_address_in_use_is_an_error_and_leaves_nothing(bench: LinkBench) -> None:
    with pytest.raises(AddressError, match="tcp://256"):
        EngineLink(
            bench.context,
            "tcp://256.0.0.1:1",
            commands=bench.commands,
            outputs=bench.outputs,
            status=bench.board,
            to_observer=bench.take_call,
            on_failure=lambda: None,
        )


# Commands.


def test_calls_go_to_who_can_answer_them(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    source = "a#1"
    service.send_command(worker_pb2.Command(snapshot=worker_pb2.SnapshotRequest()))
    service.send_command(worker_pb2.Command(replay=worker_pb2.ReplayRequest(after_number=9)))
    service.send_command(worker_pb2.Command(page_table=cache_pb2.GetPageTableRequest(rows=[1, 8])))
    service.send_command(
        worker_pb2.Command(flush=server_pb2.FlushPrefixCacheRequest(tenant="t", salt="", include_active=True))
    )
    pin = worker_pb2.PinPrefix(
        name="p", token_ids=array("I", (1, 2)).tobytes(), cache_salt=b"t\0", ttl_ms=500
    )
    service.send_command(worker_pb2.Command(pin=pin))
    assert bench.command() == ReadRows(Ticket(source, 3), (1, 8), False)
    assert bench.command() == Flush(Ticket(source, 4), "t", b"", True, False)
    assert bench.command() == Pin(Ticket(source, 5), "p", array("I", (1, 2)), b"t\0", 0.5)
    assert bench.calls == [SnapshotCall(Ticket(source, 1)), ReplayCall(Ticket(source, 2), 9, False)]


def test_rows_come_one_by_one_and_the_last_ends_the_call(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    command_id = service.send_command(worker_pb2.Command(page_table=cache_pb2.GetPageTableRequest()))
    ticket = Ticket("a#1", command_id)
    assert bench.command() == ReadRows(ticket, (), False)
    rows = [
        TableRow(1, 5, "r", 2, 3, PageSlots(array("i", [2, 5]), 4), 7),
        TableRow(2, 0, "", 0, 0, array("i"), 8),
    ]
    bench.outputs.put(RowsAnswer(ticket, rows))
    bench.outputs.put(RowsAnswer(ticket, rows))  # late and double: nobody waits for it
    bench.outputs.put(FlushAnswer(ticket, 1, 2))
    service.wait(lambda: len(service.replies) == 2)
    first, last = service.replies
    assert (first.more, last.more) == (True, False)
    table = first.page_table
    assert (table.row, table.owner, table.request_id, table.choice_index) == (1, 5, "r", 2)
    assert (table.token_count, table.step, table.rows_left) == (3, 7, 1)
    assert array("i", table.slots).tolist() == [8, 9, 10, 11, 20, 21, 22, 23]
    assert (last.page_table.step, last.page_table.slots) == (8, b"")
    service.read(0.1)
    assert len(service.replies) == 2


def test_encoded_parts_are_numbered_with_the_other_messages(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    command_id = service.send_command(worker_pb2.Command(snapshot=worker_pb2.SnapshotRequest()))
    until(lambda: bool(bench.calls))
    for left in (2, 1, 0):
        reply = worker_pb2.CommandReply(command_id=command_id, more=left > 0, message="x" * 200_000)
        bench.outputs.put(EncodedReply(bench.calls[0].ticket, reply.SerializeToString(), left == 0))
    service.wait(lambda: len(service.replies) == 3)  # reads numbers without gaps, or raises


@pytest.mark.parametrize("kind", ["estimate", "start_recording", "profile", "log_level", "get_recording"])
def test_what_is_not_built_answers_so(bench: LinkBench, kind: str) -> None:
    service = bench.service()
    service.hello()
    command = worker_pb2.Command()
    getattr(command, kind).SetInParent()
    (reply,) = service.command(command)
    assert (reply.code, reply.error_reason) == (12, 15), "UNIMPLEMENTED, FEATURE_DISABLED"
    assert kind in reply.message


def test_bad_calls_are_refused_at_once(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    (none,) = service.command(worker_pb2.Command())
    assert none.code == 3
    too_many = cache_pb2.GetPageTableRequest(rows=range(65))
    (rows,) = service.command(worker_pb2.Command(page_table=too_many))
    assert (rows.code, "64" in rows.message) == (3, True)
    cut = worker_pb2.PinPrefix(name="p", token_ids=b"abc")
    assert service.command(worker_pb2.Command(pin=cut))[0].code == 3
    bench.board.state = WorkerState.STARTING
    (early,) = service.command(worker_pb2.Command(snapshot=worker_pb2.SnapshotRequest()))
    assert (early.code, early.error_reason) == (14, 12)


def test_device_reads_are_limited_to_one_a_second(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    asked = cache_pb2.GetPageTableRequest(from_device=True)
    service.send_command(worker_pb2.Command(page_table=asked))
    (second,) = service.command(worker_pb2.Command(page_table=asked))
    assert (second.code, second.error_reason) == (8, 8)


def test_checks_of_everything_are_limited_to_one_a_second(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    full = worker_pb2.Command(check_integrity=cache_pb2.RunIntegrityCheckRequest())
    service.send_command(full)
    (second,) = service.command(full)
    assert (second.code, second.error_reason) == (8, 8)
    assert bench.command() == CheckIntegrity(Ticket("a#1", 1))


def test_a_call_that_nobody_answers_ends_by_its_time(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    command = worker_pb2.Command(snapshot=worker_pb2.SnapshotRequest(), timeout_ms=50)
    (reply,) = service.command(command)
    assert (reply.code, reply.error_reason) == (4, 28)
    bench.outputs.put(EncodedReply(bench.calls[0].ticket, b"", True))
    service.read(0.1)
    assert len(service.replies) == 1, "a late answer is dropped"


def test_a_call_that_was_given_up_is_not_answered(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    given_up = service.send_command(worker_pb2.Command(snapshot=worker_pb2.SnapshotRequest()))
    service.send_command(worker_pb2.Command(cancel=worker_pb2.CancelCommand(command_id=given_up)))
    service.send_command(worker_pb2.Command(flush=server_pb2.FlushPrefixCacheRequest()))
    flush = bench.command()
    assert isinstance(flush, Flush)
    bench.outputs.put(EncodedReply(Ticket("a#1", given_up), b"", True))
    bench.outputs.put(FlushAnswer(flush.ticket, 3, 4))
    service.wait(lambda: bool(service.replies))
    (reply,) = service.replies
    assert (reply.flush.freed_pages, reply.flush.unindexed_pages) == (3, 4)


def test_open_calls_of_one_service_are_bounded(bench: LinkBench) -> None:
    service, other = bench.service("a"), bench.service("b")
    service.hello()
    other.hello()
    for _ in range(64):
        service.send_command(worker_pb2.Command(snapshot=worker_pb2.SnapshotRequest()))
    (refused,) = service.command(worker_pb2.Command(snapshot=worker_pb2.SnapshotRequest()))
    assert refused.code == 8
    assert len(bench.calls) == 64
    bench.takes_calls = False
    (busy,) = other.command(worker_pb2.Command(snapshot=worker_pb2.SnapshotRequest()))
    assert busy.code == 8, "the observer takes no more"


def test_ids_are_translated_in_any_number(bench: LinkBench) -> None:
    service = bench.service()
    service.hello()
    service._next_id = 2**40 - 2
    service.add([1], samples=2)
    spec = bench.request()
    bench.accept(spec)
    columns = OutputColumns()
    for number in range(2):
        columns.sequence_ids.append(spec.sequence_id + number)
        columns.token_ids.append(number)
        columns.finish_codes.append(FinishCode.EOS)
        columns.ends.append(SequenceEnd(SequenceId(spec.sequence_id + number), FinishCode.EOS, 1))
    bench.outputs.put(StepOutputs(1, 0.0, {spec.source: columns}))
    answers = service.finish(2**40 - 2, 2**40 - 1)
    assert [answer.tokens for answer in answers] == [[0], [1]]
