"""The worker's side of the seam: AddSequence in, StepOutput out, ids of several services kept apart."""

import math
from array import array
from dataclasses import replace

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from kvatlas.constraints.text import ConstraintText
from kvatlas.v1 import generation_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.ids import SequenceId
from worker.link import codec, status_codec
from worker.messages import AddAnswer, CallError, CallFailure, CallReason, Ticket
from worker.scheduling.output import (
    NO_TOKEN,
    BillCounters,
    FailureReason,
    FinishCode,
    OutputColumns,
    PrefixCounts,
    SequenceEnd,
    SequenceStart,
)
from worker.scheduling.request import AddOutcome, AddStatus, RequestSpec
from worker.scheduling.step import TokenLogprob
from worker.stats import EngineCounts
from worker.status import first_board


def u32(*values: int) -> bytes:
    return array("I", values).tobytes()


def full_add() -> worker_pb2.AddSequence:
    add = worker_pb2.AddSequence(
        sequence_id=7,
        sample_count=3,
        prompt_token_ids=u32(5, 6, 7),
        priority=-2,
        timeout_ms=1500,
        queue_timeout_ms=250,
        cache_read=True,
        cache_write=True,
        cache_salt=b"tenant\0salt",
        request_id="r",
        tenant="tenant",
        labels={"k": "v"},
        first_choice_index=1,
        attempt=2,
    )
    add.receive_time.FromNanoseconds(1_234_567_890_123_456_789)
    params = add.params
    params.temperature, params.top_p, params.top_k, params.min_p = 0.5, 0.75, 40, 0.125
    params.repetition_penalty, params.frequency_penalty, params.presence_penalty = 1.5, 0.25, -0.5
    params.seed, params.max_tokens, params.min_tokens = 2**63, 100, 3
    params.logit_bias_token_ids = u32(9, 8)
    params.logit_bias_values = array("f", (1.5, -2.0)).tobytes()
    params.stop_token_ids = u32(3, 4)
    params.stop_at_eos = True
    params.max_duration_ms = 2500
    params.logprobs = 0
    params.prompt_logprobs = 2
    return add


def spec_of(add: worker_pb2.AddSequence) -> RequestSpec:
    parsed = worker_pb2.AddSequence.FromString(add.SerializeToString())
    return codec.request_spec(parsed, session=5, source="s#5", now=1000.0, vocab_size=100)


def test_every_value_of_a_request_arrives() -> None:
    spec = spec_of(full_add())
    assert spec.sequence_id == codec.inner_id(5, 7)
    assert list(spec.prompt_token_ids) == [5, 6, 7]
    assert (spec.sample_count, spec.priority, spec.attempt, spec.first_choice_index) == (3, -2, 2, 1)
    assert (spec.deadline, spec.queue_deadline) == (1001.5, 1000.25)
    assert (spec.cache_read, spec.cache_write, spec.cache_salt) == (True, True, b"tenant\0salt")
    assert (spec.request_id, spec.tenant, spec.labels, spec.source) == ("r", "tenant", {"k": "v"}, "s#5")
    assert spec.receive_time_ns == 1_234_567_890_123_456_789
    params = spec.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.75, 40, 0.125)
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    assert penalties == (1.5, 0.25, -0.5)
    assert (params.seed, params.max_tokens, params.min_tokens) == (2**63, 100, 3)
    assert params.logit_bias == ((9, 1.5), (8, -2.0))
    assert params.stop_token_ids == {3, 4}
    assert params.stop_at_eos
    assert params.max_duration_seconds == 2.5
    assert (params.logprobs, params.prompt_logprobs) == (0, 2), "0 alternatives is not: none asked for"


def test_unset_times_and_logprobs_are_none() -> None:
    add = full_add()
    add.timeout_ms = add.queue_timeout_ms = 0
    for name in ("logprobs", "prompt_logprobs", "max_duration_ms"):
        add.params.ClearField(name)
    spec = spec_of(add)
    assert spec.deadline is None
    assert spec.queue_deadline is None
    assert spec.params.logprobs is None
    assert spec.params.prompt_logprobs is None
    assert spec.params.max_duration_seconds is None


def broken(**changes: object) -> worker_pb2.AddSequence:
    add = full_add()
    for name, value in changes.items():
        target, field = (add.params, name[7:]) if name.startswith("params_") else (add, name)
        if isinstance(value, Timestamp):
            getattr(target, field).CopyFrom(value)
        else:
            setattr(target, field, value)
    return add


@pytest.mark.parametrize(
    ("changes", "status", "named"),
    [
        ({"sample_count": 0}, AddStatus.INVALID, "sample_count"),
        ({"sample_count": 100_000}, AddStatus.INVALID, "sample_count"),
        ({"sequence_id": 2**40 - 1}, AddStatus.INVALID, "sequence_id"),
        ({"prompt_token_ids": b""}, AddStatus.INVALID, "prompt_token_ids"),
        ({"prompt_token_ids": b"abc"}, AddStatus.INVALID, "prompt_token_ids"),
        ({"prompt_token_ids": u32(99, 100)}, AddStatus.INVALID, "token id 100"),
        ({"resume_token_ids": u32(1)}, AddStatus.INVALID, "resume_token_ids"),
        ({"adapter": "x"}, AddStatus.FEATURE_DISABLED, "adapters"),
        ({"params_temperature": math.nan}, AddStatus.INVALID, "temperature"),
        ({"params_temperature": -1.0}, AddStatus.INVALID, "temperature"),
        ({"params_top_p": 1.5}, AddStatus.INVALID, "top_p"),
        ({"params_repetition_penalty": 0.0}, AddStatus.INVALID, "repetition_penalty"),
        ({"params_max_tokens": 0}, AddStatus.INVALID, "max_tokens"),
        ({"params_min_tokens": 101}, AddStatus.INVALID, "min_tokens"),
        ({"params_stop_token_ids": u32(100)}, AddStatus.INVALID, "stop_token_ids"),
        ({"params_logit_bias_values": b""}, AddStatus.INVALID, "logit_bias_values"),
        ({"params_logit_bias_values": array("f", (1, math.inf)).tobytes()}, AddStatus.INVALID, "logit_bias"),
        ({"params_logprobs": 256}, AddStatus.INVALID, "^logprobs: 256 is not in 0 .. 255"),
        ({"params_prompt_logprobs": 2**32 - 1}, AddStatus.INVALID, "^prompt_logprobs: "),
        ({"first_choice_index": 2**31 - 2}, AddStatus.INVALID, "first_choice_index"),
        ({"receive_time": Timestamp(seconds=2**63 - 1)}, AddStatus.INVALID, "receive_time"),
        ({"receive_time": Timestamp(seconds=-1)}, AddStatus.INVALID, "receive_time"),
        ({"receive_time": Timestamp(nanos=10**9)}, AddStatus.INVALID, "receive_time"),
        ({"receive_time": Timestamp(nanos=-1)}, AddStatus.INVALID, "receive_time"),
    ],
)
def test_what_must_not_run_is_refused_with_its_reason(
    changes: dict[str, object], status: AddStatus, named: str
) -> None:
    with pytest.raises(codec.Unfit, match=named) as caught:
        spec_of(broken(**changes))
    assert caught.value.status is status


def test_the_last_values_that_can_be_told_again_are_taken() -> None:
    last = Timestamp(seconds=253_402_300_799, nanos=999_999_999)
    spec = spec_of(
        broken(
            params_logprobs=255, params_prompt_logprobs=255, first_choice_index=2**31 - 3, receive_time=last
        )
    )
    assert (spec.params.logprobs, spec.params.prompt_logprobs) == (255, 255)
    assert (spec.first_choice_index, spec.receive_time_ns) == (2**31 - 3, 253_402_300_799_999_999_999)
    entry = TokenLogprob(-1.0, 1, tuple((token, -2.0) for token in range(255)))
    assert codec.logprob_columns([entry]).alternative_counts == bytes((255,))


def test_a_resumed_sequence_brings_its_output_along() -> None:
    spec = spec_of(broken(sample_count=1, resume_token_ids=u32(8, 9)))
    assert list(spec.resume_token_ids) == [8, 9]


def test_equal_ids_of_two_sessions_never_meet() -> None:
    first, second = codec.inner_id(1, 7), codec.inner_id(2, 7)
    assert first != second
    assert codec.outer_id(first) == codec.outer_id(second) == 7
    assert (codec.session_of(first), codec.session_of(second)) == (1, 2)


def test_a_step_goes_out_in_planes_with_the_services_own_ids() -> None:
    ids = [codec.inner_id(3, number) for number in (10, 11, 12)]
    columns = OutputColumns(
        sequence_ids=array("Q", ids),
        token_ids=array("I", (1, 2, NO_TOKEN)),
        finish_codes=bytearray((0, FinishCode.EOS, FinishCode.FAILED)),
        logprobs={1: TokenLogprob(-0.5, 1, ((2, -0.5), (7, -1.25)))},
        starts=[SequenceStart(ids[0], PrefixCounts(16, 32, 0, 5), 1, 0.25, resumed=False)],
        ends=[
            SequenceEnd(ids[1], FinishCode.EOS, 9, BillCounters(peak_pages=4, tail_waste_slots=3)),
            SequenceEnd(ids[2], FinishCode.FAILED, 0, failure=FailureReason.INTERNAL, message="why"),
        ],
        prompt_logprobs=[(ids[0], [None, TokenLogprob(-1.0, 3)])],
    )
    sent = worker_pb2.StepOutput.FromString(codec.step_output(77, 0.0123, columns).SerializeToString())
    assert (sent.step, sent.step_us) == (77, 12_300)
    assert array("Q", sent.sequence_ids).tolist() == [10, 11, 12]
    assert array("I", sent.token_ids).tolist() == [1, 2, NO_TOKEN]
    assert list(sent.finish_codes) == [0, 1, 9]
    logprobs = array("f", sent.logprobs.logprobs)
    assert math.isnan(logprobs[0])
    assert logprobs[1] == -0.5
    assert array("I", sent.logprobs.ranks).tolist() == [0, 1, 0]
    assert list(sent.logprobs.alternative_counts) == [0, 2, 0]
    assert array("I", sent.logprobs.alternative_token_ids).tolist() == [2, 7]
    start = sent.starts[0]
    assert (start.sequence_id, start.reused_pages, start.queue_us, start.resumed) == (10, 1, 250_000, False)
    assert (start.prefix.hit_tokens, start.prefix.miss_cold_tokens) == (16, 32)
    ended, failed = sent.ends
    assert (ended.sequence_id, ended.completion_tokens, ended.bill.peak_pages) == (11, 9, 4)
    assert not failed.HasField("bill")
    assert (failed.error_reason, failed.message) == (FailureReason.INTERNAL, "why")
    assert sent.prompt_logprobs[0].sequence_id == 10
    assert array("I", sent.prompt_logprobs[0].columns.ranks).tolist() == [0, 3]


def test_a_start_without_a_look_up_has_no_prefix() -> None:
    columns = OutputColumns(starts=[SequenceStart(SequenceId(1), None, 0, 0.0, resumed=True)])
    sent = codec.step_output(1, 0.0, columns)
    assert not sent.starts[0].HasField("prefix")
    assert sent.starts[0].resumed
    assert not sent.HasField("logprobs")


def test_an_answer_keeps_short_waits_apart_from_unknown_ones() -> None:
    outcome = AddOutcome(AddStatus.QUEUE_FULL, 3, 0.0001, 5, 9, "full")
    sent = codec.add_result(AddAnswer("s#1", codec.inner_id(1, 4), 2, outcome))
    assert (sent.sequence_id, sent.status, sent.queue_position) == (4, AddStatus.QUEUE_FULL, 3)
    assert (sent.estimated_wait_ms, sent.needed_pages, sent.total_pages, sent.message) == (1, 5, 9, "full")


@pytest.mark.parametrize("size", [0, 100, 200, 20_000, 3_000_000])
def test_a_reply_that_is_bytes_already_is_wrapped_as_protobuf_would(size: int) -> None:
    reply = worker_pb2.CommandReply(command_id=3, more=True, message="x" * size)
    whole = worker_pb2.WorkerMessage(number=300, reply=reply)
    wrapped = codec.wrapped_reply(300, reply.SerializeToString())
    assert worker_pb2.WorkerMessage.FromString(wrapped) == whole


def test_a_failed_call_says_which_and_why() -> None:
    failure = CallFailure(Ticket("s#1", 9), CallError.UNIMPLEMENTED, CallReason.FEATURE_DISABLED, "profile")
    reply = codec.failure_reply(failure)
    assert (reply.command_id, reply.code, reply.error_reason) == (9, 12, 15)
    assert not reply.more
    assert reply.WhichOneof("reply") is None


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
def test_a_constraint_comes_as_its_client_wrote_it(kind: str) -> None:
    params = worker_pb2.SequenceParams(**{kind: "a+"})
    assert codec.constraint_text(params) == ConstraintText(kind, "a+")


def test_choices_come_in_their_order_and_most_requests_have_no_constraint() -> None:
    choices = generation_pb2.ChoiceConstraint(choices=["yes", "", "no"])
    params = worker_pb2.SequenceParams(choices=choices)
    assert codec.constraint_text(params) == ConstraintText("choices", choices=("yes", "", "no"))
    assert codec.constraint_text(worker_pb2.SequenceParams()) is None


def test_a_step_that_took_hours_is_told() -> None:
    """A process may be stopped in the middle of one, and then goes on."""
    assert codec.step_output(1, 7200.0, OutputColumns()).step_us == 0xFFFFFFFF


def test_a_wait_of_less_than_a_millisecond_is_told_as_one() -> None:
    """0 means that nobody knows it."""
    model, pool = ModelDescription("m", 1000, 64), PoolDescription(4, 16, 2, 64, "lru")
    board = first_board(WorkerDescription("w", 1, model, pool, 8, 64, 0, (), "", b""), 0.0)
    board.load = replace(board.load, counts=EngineCounts(estimated_wait_seconds=0.0004))
    assert status_codec.heartbeat(board, 0.0).estimated_wait_ms == 1
    assert status_codec.heartbeat(first_board(board.description, 0.0), 0.0).estimated_wait_ms == 0
