"""What of a client's message becomes a request, field by field, and what goes back to it."""

import math
import uuid
from array import array
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from kvatlas.constraints.text import ConstraintText
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1.server_pb2 import DefaultSampling, Model
from service.handlers import convert
from service.handlers.convert import StreamShape
from service.request import Call, Output, Request, Sampling, Scores, Stops

CALL = Call("m", receive_time_ns=7, deadline=9.0, traceparent="t", request_id="r", tenant="acme")
DEFAULTS = DefaultSampling(temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, repetition_penalty=1.5)
MODEL = Model(model_id="m1", defaults=DEFAULTS)
IDS = array("I", [1, 2])


def request_of(**fields: Any) -> Request:
    fields.setdefault("sampling", {"seed": 5})
    return convert.request_from(pb.GenerationSpec(**fields), CALL, MODEL, IDS, 99)


PLAIN = Request(
    request_id="r",
    prompt_ids=IDS,
    sampling=Sampling(0.5, 0.25, 3, 0.125, 1.5, 0.0, 0.0, seed=5),
    stops=Stops(0, is_limit_given=False),
    output=Output(),
    model_id="m1",
    context_tokens=99,
    tenant="acme",
    traceparent="t",
    receive_time_ns=7,
    deadline=9.0,
)
SET: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (
        {
            "sampling": pb.SamplingParams(
                temperature=1, top_p=0.75, top_k=0, min_p=0, repetition_penalty=2, frequency_penalty=-1,
                presence_penalty=0.5, seed=0, n=4, logit_bias={3: 2.0},
            )
        },
        {
            "sampling": Sampling(1.0, 0.75, 0, 0.0, 2.0, -1.0, 0.5, seed=0, logit_bias=((3, 2.0),)),
            "num_samples": 4,
        },
    ),
    (
        {
            "stop": pb.StopCriteria(
                max_tokens=8, min_tokens=2, stop_strings=["a"], stop_token_ids=[4], ignore_eos=True,
                include_stop_in_output=True, max_duration=Duration(seconds=2),
            )
        },
        {"stops": Stops(8, True, 2, ("a",), (4,), True, True, 2000)},
    ),
    (
        {"output": pb.OutputOptions(logprobs=0, prompt_logprobs=2, skip_special_tokens=False)},
        {"output": Output(logprobs=0, prompt_logprobs=2, skip_special=False)},
    ),
    ({"output": pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT)}, {}),
    ({"output": pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS)}, {"output": Output(False, True)}),
    ({"output": pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS)}, {"output": Output(ids=True)}),
    (
        {"scheduling": pb.SchedulingOptions(priority=-2, queue_timeout=Duration(nanos=1))},
        {"priority": -2, "queue_timeout_ms": 1},
    ),
    (
        {"cache": pb.CacheOptions(read=False, write=False, salt="é")},
        {"cache_read": False, "cache_write": False, "cache_salt": "é".encode()},
    ),
    ({"labels": {"a": "b"}, "adapter": "l"}, {"labels": {"a": "b"}, "adapter": "l"}),
    ({"regex": "a"}, {"constraint": ConstraintText("regex", "a")}),
    (
        {"choices": pb.ChoiceConstraint(choices=["x", "y"])},
        {"constraint": ConstraintText("choices", choices=("x", "y"))},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "changes"), SET)
def test_what_is_set_is_what_the_request_has_and_nothing_else(
    fields: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert request_of(**fields) == replace(PLAIN, **changes)


def test_a_model_without_defaults_has_penalties_and_a_share_that_change_nothing() -> None:
    spec = pb.GenerationSpec(text="x")
    bare = convert.request_from(spec, CALL, Model(), IDS).sampling
    assert (bare.top_p, bare.repetition_penalty) == (1.0, 1.0)
    assert len({convert.request_from(spec, CALL, Model(), IDS).sampling.seed for _ in range(3)}) == 3


def test_a_prompt_and_its_limit_complete_a_request() -> None:
    request = request_of(stop=pb.StopCriteria(max_tokens=8))
    assert convert.with_prompt(request, IDS, 8) is request
    other = array("I", [9])
    assert convert.with_prompt(request, other, 8) == replace(request, prompt_ids=other)
    longer = convert.with_prompt(request, IDS, 9)
    assert longer == replace(request, stops=replace(request.stops, max_tokens=9))
    assert longer.stops.is_limit_given


@pytest.mark.parametrize(
    ("duration", "wanted"),
    [
        (None, 0),
        (Duration(), 0),
        (Duration(nanos=1), 1),
        (Duration(nanos=1_600_000), 2),
        (Duration(seconds=3, nanos=4_000_000), 3004),
    ],
)
def test_a_time_that_is_set_is_no_less_than_a_millisecond(duration: Duration | None, wanted: int) -> None:
    assert convert.milliseconds(duration) == wanted


def test_a_stream_is_cut_as_it_is_asked_for() -> None:
    assert convert.stream_shape(pb.StreamGenerateRequest()) == StreamShape(1, 0.1, False, array("I"))
    options = pb.StreamOptions(min_tokens_per_message=3, max_hold=Duration(), queue_updates=True)
    request = pb.StreamGenerateRequest(stream=options, resume_after={"ids": [4, 5]})
    assert convert.stream_shape(request) == StreamShape(3, 0.0, True, array("I", [4, 5]))


def test_times_go_back_as_they_were() -> None:
    assert convert.to_duration(-1.0) == Duration()
    assert convert.to_duration(2.25) == Duration(seconds=2, nanos=250_000_000)
    at = convert.to_timestamp(3_000_000_007)
    assert (at.seconds, at.nanos) == (3, 7)


def test_ids_are_uuids_of_version_7_that_sort_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for milliseconds in (1, 2, 1 << 40):
        monkeypatch.setattr(convert.time, "time_ns", lambda now=milliseconds: now * 1_000_000)
        made.append(convert.new_request_id())
    assert made == sorted(made)
    for text, milliseconds in zip(made, (1, 2, 1 << 40), strict=True):
        found = uuid.UUID(text)
        assert (found.version, found.variant, found.int >> 80) == (7, uuid.RFC_4122, milliseconds)
    assert convert.new_request_id() != convert.new_request_id()


def test_scores_of_each_token_have_its_own_alternatives() -> None:
    scores = Scores(
        array("f", [-1.0, math.nan, -3.0]),
        array("I", [1, 2, 3]),
        bytearray([2, 0, 1]),
        array("I", [7, 8, 9]),
        array("f", [-0.5, -0.25, -0.125]),
    )
    entries = convert.to_logprobs([65, 66, 67], scores, lambda token: bytes([token]))
    assert [(entry.token_id, entry.rank, entry.token_bytes) for entry in entries] == [
        (65, 1, b"A"), (66, 2, b"B"), (67, 3, b"C"),
    ]  # fmt: skip
    assert [entry.logprob if entry.HasField("logprob") else None for entry in entries] == [-1.0, None, -3.0]
    told = [[(one.token_id, one.logprob, one.token_bytes) for one in entry.alternatives] for entry in entries]
    assert told == [[(7, -0.5, b"\x07"), (8, -0.25, b"\x08")], [], [(9, -0.125, b"\x09")]]
