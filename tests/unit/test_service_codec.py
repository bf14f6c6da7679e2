"""Worker messages and our types: planes as they lie, counts that must agree, unknown kinds refused."""

from array import array

import pytest
from google.protobuf.message import DecodeError

from kvatlas.constraints.text import ConstraintText
from kvatlas.v1 import generation_pb2
from kvatlas.worker.v1 import worker_pb2
from service.fleet import codec
from service.request import (
    AbortReason,
    AddStatus,
    FinishCode,
    KvBill,
    Output,
    Request,
    Run,
    Sampling,
    Stops,
)


def request_of(**more: object) -> Request:
    sampling = Sampling(0.5, 0.9, 4, 0.1, 1.2, -0.5, 0.25, 99, ((7, -1.5),))
    values = {"stops": Stops(11, min_tokens=2, token_ids=(3, 4)), "output": Output(), **more}
    return Request("id", array("I", [1, 2, 3]), sampling, **values)  # type: ignore[arg-type]


def added(request: Request, run: Run) -> worker_pb2.AddSequence:
    message = worker_pb2.ServiceMessage.FromString(codec.encode_add(request, run))
    assert message.WhichOneof("kind") == "add"
    return message.add


def step_of(**columns: object) -> codec.StepColumns:
    message = worker_pb2.WorkerMessage(number=5, step=worker_pb2.StepOutput(**columns))  # type: ignore[arg-type]
    number, kind, step = codec.decode(message.SerializeToString())
    assert (number, kind) == (5, "step")
    assert isinstance(step, codec.StepColumns)
    return step


def test_an_empty_step_has_empty_columns() -> None:
    step = step_of(step=1)
    assert (list(step.sequence_ids), list(step.token_ids), step.ends, step.starts) == ([], [], [], [])
    assert step.scores is None


def test_the_columns_of_a_step_belong_together() -> None:
    step = step_of(
        sequence_ids=array("Q", [1 << 40, 2]).tobytes(),
        token_ids=array("I", [0xFFFFFFFF, 7]).tobytes(),
        finish_codes=bytes([6, 0]),
        ends=[worker_pb2.SequenceEnd(sequence_id=1 << 40, bill=generation_pb2.KvBill(peak_pages=3))],
    )
    assert list(step.sequence_ids) == [1 << 40, 2]
    assert list(step.token_ids) == [0xFFFFFFFF, 7]
    (end,) = step.ends
    assert (end.sequence_id, end.code) == (1 << 40, FinishCode.ABORTED)
    assert end.bill == KvBill(peak_pages=3)


def test_a_finish_code_without_its_end_is_no_message() -> None:
    with pytest.raises(ValueError, match="1 finish codes, 0 ends"):
        step_of(finish_codes=bytes([1]), sequence_ids=bytes(8), token_ids=bytes(4))


def test_a_plane_that_is_cut_is_no_message() -> None:
    with pytest.raises((ValueError, TypeError)):
        step_of(sequence_ids=bytes(7))


@pytest.mark.parametrize("frame", [b"\xff\xff", worker_pb2.WorkerMessage(number=1).SerializeToString()])
def test_what_has_no_kind_is_no_message(frame: bytes) -> None:
    with pytest.raises((DecodeError, ValueError)):
        codec.decode(frame)


def test_a_request_carries_final_values() -> None:
    request = request_of(cache_salt=b"s", tenant="t", labels={"a": "b"}, receive_time_ns=1_500_000_001)
    run = Run(8, 2, timeout_ms=30, queue_timeout_ms=20, max_duration_ms=10, prompt_logprobs=3)
    add = added(request, run)
    assert (add.sequence_id, add.sample_count, add.attempt) == (8, 2, 0)
    assert add.cache_salt == b"t\0s"
    assert (add.timeout_ms, add.queue_timeout_ms) == (30, 20)
    assert (add.params.max_tokens, add.params.min_tokens, add.params.max_duration_ms) == (11, 2, 10)
    assert (add.params.prompt_logprobs, add.params.HasField("logprobs")) == (3, False)
    assert (add.receive_time.seconds, add.receive_time.nanos) == (1, 500_000_001)
    assert add.params.WhichOneof("constraint") is None


@pytest.mark.parametrize(
    ("stops", "limits"),
    [
        (Stops(2**32 - 1), (1 << 31, 0)),
        (Stops(2**32 - 1, min_tokens=2**32 - 1), (1 << 31, 1 << 31)),
        (Stops(40, is_limit_given=False, min_tokens=41), (40, 40)),  # what was left of the context
    ],
)
def test_limits_that_no_sequence_reaches_are_such_as_a_worker_takes(
    stops: Stops, limits: tuple[int, int]
) -> None:
    params = added(request_of(stops=stops), Run(1, 1)).params
    assert (params.max_tokens, params.min_tokens) == limits


def test_a_resumed_sample_carries_its_output_apart_from_the_prompt() -> None:
    add = added(request_of(), Run(9, 1, first_choice=3, resume_ids=array("I", [5, 6]), attempt=2))
    assert memoryview(add.prompt_token_ids).cast("I").tolist() == [1, 2, 3]
    assert memoryview(add.resume_token_ids).cast("I").tolist() == [5, 6]
    assert (add.first_choice_index, add.attempt) == (3, 2)


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
def test_a_constraint_reaches_the_worker(kind: str) -> None:
    params = added(request_of(constraint=ConstraintText(kind, "x")), Run(1, 1)).params
    assert (params.WhichOneof("constraint"), getattr(params, kind)) == (kind, "x")


def test_a_list_of_choices_reaches_the_worker() -> None:
    params = added(request_of(constraint=ConstraintText("choices", choices=("a", "b"))), Run(1, 1)).params
    assert list(params.choices.choices) == ["a", "b"]


def test_our_numbers_are_those_of_the_protocol() -> None:
    for ours, prefix, theirs in (
        (AddStatus, "ADD_STATUS", worker_pb2.AddStatus),
        (FinishCode, "FINISH_CODE", worker_pb2.FinishCode),
        (AbortReason, "ABORT_REASON", worker_pb2.AbortReason),
    ):
        known = {name: number for name, number in theirs.items() if number}
        assert {f"{prefix}_{member.name}": member.value for member in ours} == known


def test_the_seam_and_the_api_name_the_same_ends() -> None:
    from service.request import FinishReason

    known = {name: number for name, number in generation_pb2.FinishReason.items() if number}
    assert {f"FINISH_REASON_{member.name}": member.value for member in FinishReason} == known
