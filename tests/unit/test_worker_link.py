"""The engine socket, rule by rule, with the engine played by the test: sessions, requests, ends."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvatlas.v1 import server_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.description import WorkerState
from worker.link.addresses import AddressError
from worker.link.server import EngineLink
from worker.link.testing import WAIT_SECONDS
from worker.link.testing_bench import LinkBench, until
from worker.messages import (
    Abort,
    DropSource,
    EngineCommand,
)
from worker.scheduling.output import FinishCode
from worker.scheduling.request import AbortReason, AddStatus
from worker.stats import EngineCounts
from worker.status import StepMark

SILENCE_SECONDS = 3.0
"""Until a service is lost, where that is tested: longer than a loaded machine holds up one that speaks."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LinkBench]:
    made = LinkBench(tmp_path)
    yield made
    made.close()
    assert not made.failures
    assert not [thread for thread in threading.enumerate() if thread.name == "kvatlas-io"]


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
