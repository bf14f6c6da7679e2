"""The calls beside a generation: what is wrong with them is named, what they answer is the request's own."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc
from service.testing import Refusal, RunningService, running_service
from service.testing_worker import WorkerScript

CALL_SECONDS = 120.0  # ends a call that hangs
USER = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("small"), script=WorkerScript(step_ms=0)) as service:
        yield service


@pytest.fixture(scope="module")
def stub(running: RunningService) -> Iterator[Any]:
    with grpc.insecure_channel(running.address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.mark.parametrize(
    ("method", "request_", "path"),
    [
        ("Tokenize", pb.TokenizeRequest(), "prompt"),
        ("Tokenize", pb.TokenizeRequest(chat=pb.ChatPrompt()), "chat.messages"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1 << 31]), "token_ids"),
        ("CancelGeneration", pb.CancelGenerationRequest(), "request_ids"),
        ("CancelGeneration", pb.CancelGenerationRequest(request_ids=["no spaces"]), "request_ids[0]"),
    ],
)
def test_what_is_wrong_with_a_call_is_named_by_its_path(
    stub: Any, method: str, request_: Any, path: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        getattr(stub, method)(request_, timeout=CALL_SECONDS)
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert refusal.paths == (path,)


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
def test_what_chats_of_this_model_do_not_offer_is_refused(stub: Any, method: str) -> None:
    chat = pb.ChatPrompt(messages=[USER], tools_json=["{}"])
    request = pb.TokenizeRequest(chat=chat)
    if method == "Generate":
        request = pb.GenerateRequest(spec=pb.GenerationSpec(chat=chat))
    with pytest.raises(grpc.RpcError) as raised:
        getattr(stub, method)(request, timeout=CALL_SECONDS)
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason) == ("FAILED_PRECONDITION", "FEATURE_DISABLED")


def test_a_whole_answer_says_its_id_before_it(stub: Any) -> None:
    spec = pb.GenerationSpec(text="abc", stop=pb.StopCriteria(max_tokens=3), request_id="mine")
    answer, call = stub.Generate.with_call(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
    assert dict(call.initial_metadata())["x-request-id"] == answer.request_id == "mine"


def test_a_cancel_tells_which_ids_were_there_and_each_once(
    stub: Any, running: RunningService, wait_until: Any
) -> None:
    spec = pb.GenerationSpec(text="abc", request_id="runs", labels={"fake.hold_at": "2"})
    spec.stop.max_tokens = 50
    call = stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)
    next(call)
    request = pb.CancelGenerationRequest(request_ids=["gone", "runs", "runs", "gone", "never"])
    told = stub.CancelGeneration(request, timeout=CALL_SECONDS)
    assert (list(told.cancelled_ids), list(told.unknown_ids)) == (["runs"], ["gone", "never"])
    ends = [m.choice_finished for m in call if m.WhichOneof("event") == "choice_finished"]
    assert [end.finish_reason for end in ends] == [pb.FINISH_REASON_CANCELLED]
    wait_until(lambda: running.is_idle, "idle service and worker")
