"""Calls through the engine socket: who answers them, bounds, limits of time, and what is refused."""

import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.v1 import cache_pb2, server_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.description import WorkerState
from worker.ids import SequenceId
from worker.link.testing_bench import LinkBench, until
from worker.messages import (
    CheckIntegrity,
    EncodedReply,
    Flush,
    FlushAnswer,
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


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LinkBench]:
    made = LinkBench(tmp_path)
    yield made
    made.close()
    assert not made.failures
    assert not [thread for thread in threading.enumerate() if thread.name == "kvatlas-io"]


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
    unknown = worker_pb2.PinPrefix(name="p", token_ids=array("I", (1, 100)).tobytes())
    (beyond,) = service.command(worker_pb2.Command(pin=unknown))
    assert (beyond.code, beyond.error_reason) == (3, 1)
    assert "token_ids: token id 100" in beyond.message, "a device would read behind its table"
    assert bench.commands.is_empty
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
