"""Log-probabilities as clients get them, each against a full log_softmax in fp32 over the dense network."""

import math
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference import attention
from kvatlas.models.resolve import resolve_model
from kvatlas.v1 import generation_pb2 as pb
from service.testing_fleet import Fleet, running_fleet
from service.text.tokenizer import Tokenizer
from worker.model.source import load_model

CALL_SECONDS = 600.0  # ends a call that hangs
TOLERANCE = 2e-4  # of a logarithm; sums of 64 products of order 1 in another order
TEXT = "Déjà vu 🎉 twice"
TOY = Tokenizer.toy()
VOCAB = 512


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), "--num-pages", "400", count=1) as made:
        yield made


@pytest.fixture(scope="module")
def network() -> Any:
    """The worker's weights in plain torch operations."""
    return load_model(
        resolve_model("random:tiny"),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_context=4096,
        seed=0,
    )


def log_softmax(network: Any, ids: Sequence[int]) -> Tensor:
    """Of every position over the vocabulary, without pages, steps or samplers."""
    positions = torch.arange(len(ids))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, positions, scale=network.config.attention_scale)

    with torch.no_grad():
        hidden = network.forward(torch.tensor(ids), positions, attend)
        result: Tensor = network.logits(hidden)[:, :VOCAB].float().log_softmax(-1)
    return result


def spec_of(
    count: int = 24, *, temperature: float = 0.0, logprobs: int | None = 4, **more: Any
) -> pb.GenerationSpec:
    return pb.GenerationSpec(
        text=TEXT,
        sampling=pb.SamplingParams(temperature=temperature, seed=11, **more.pop("sampling", {})),
        stop=pb.StopCriteria(max_tokens=count, ignore_eos=True, **more.pop("stop", {})),
        output=pb.OutputOptions(
            format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS,
            logprobs=logprobs,
            skip_special_tokens=False,
            **more.pop("output", {}),
        ),
        **more,
    )


def answer(fleet: Fleet, spec: pb.GenerationSpec) -> pb.GenerateResponse:
    response: pb.GenerateResponse = fleet.generation.Generate(
        pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS
    )
    return response


def check(
    entries: Sequence[pb.TokenLogprob], ids: Sequence[int], exact: Tensor, num_alternatives: int
) -> None:
    """Every entry against the row of exact values that its token was drawn from."""
    assert [entry.token_id for entry in entries] == list(ids)
    for entry, row in zip(entries, exact, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=TOLERANCE)
        better = row > row[entry.token_id]
        certain = (row - row[entry.token_id]).abs() > TOLERANCE
        assert int((better & certain).sum()) <= entry.rank - 1 <= int((better | ~certain).sum())
        assert entry.token_bytes == TOY.token_bytes(entry.token_id)
        values = [other.logprob for other in entry.alternatives]
        assert values == pytest.approx(row.topk(num_alternatives).values.tolist(), abs=TOLERANCE)
        for other in entry.alternatives:
            assert other.logprob == pytest.approx(float(row[other.token_id]), abs=TOLERANCE)
            assert other.token_bytes == TOY.token_bytes(other.token_id)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_alternatives", [0, 1, 20])
def test_output_tokens_of_every_sample(
    fleet: Fleet, network: Any, temperature: float, num_alternatives: int
) -> None:
    prompt = TOY.encode(TEXT)
    whole = answer(fleet, spec_of(temperature=temperature, logprobs=num_alternatives, sampling={"n": 3}))
    for choice in whole.choices:
        exact = log_softmax(network, [*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
        check(choice.logprobs, choice.token_ids, exact, num_alternatives)
        shown = b"".join(entry.token_bytes for entry in choice.logprobs)
        assert choice.text == shown.decode(errors="replace")
    assert len({tuple(choice.token_ids) for choice in whole.choices}) == (3 if temperature else 1)


def test_values_are_after_bias_and_before_temperature(fleet: Fleet, network: Any) -> None:
    prompt, bias = TOY.encode(TEXT), {65: 3.0, 66: -2.5}
    sampling = {"logit_bias": bias, "top_k": 5, "top_p": 0.9}
    (choice,) = answer(fleet, spec_of(12, temperature=1.4, sampling=sampling)).choices
    logits = log_softmax(network, [*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
    for token, value in bias.items():
        logits[:, token] += value
    check(choice.logprobs, choice.token_ids, logits.log_softmax(-1), 4)


def test_a_token_that_a_constraint_forbids_is_no_alternative(fleet: Fleet, network: Any) -> None:
    prompt = TOY.encode(TEXT)
    spec = spec_of(8, temperature=1.0, logprobs=20, regex="[a-e]{20}")
    spec.stop.ignore_eos = False
    (choice,) = answer(fleet, spec).choices
    logits = log_softmax(network, [*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
    letters = {b"a", b"b", b"c", b"d", b"e"}
    allowed = [token for token in range(VOCAB) if TOY.token_bytes(token) in letters]
    forbidden = torch.ones(VOCAB, dtype=torch.bool)
    forbidden[allowed] = False
    exact = logits.masked_fill(forbidden, -math.inf).log_softmax(-1)
    check(choice.logprobs, choice.token_ids, exact, min(20, len(allowed)))


@pytest.mark.parametrize("num_alternatives", [0, 5])
def test_prompt_tokens_and_the_cache_is_not_asked(fleet: Fleet, network: Any, num_alternatives: int) -> None:
    """Longer than a page; the same prompt again would be found, if it were looked up."""
    text = TEXT * 4
    prompt = TOY.encode(text)
    for _ in range(2):
        spec = spec_of(2, output={"prompt_logprobs": num_alternatives})
        spec.text = text
        whole = answer(fleet, spec)
        first, *others = whole.prompt_logprobs
        assert (first.token_id, first.HasField("logprob"), list(first.alternatives)) == (prompt[0], False, [])
        check(others, prompt[1:], log_softmax(network, prompt)[:-1], num_alternatives)
        assert not whole.usage.HasField("prefix")


def test_what_a_stop_string_cuts_off_has_no_entries(fleet: Fleet) -> None:
    (full,) = answer(fleet, spec_of()).choices
    cut_at = full.text[6:9]
    (choice,) = answer(fleet, spec_of(stop={"stop_strings": [cut_at]})).choices
    assert choice.finish_reason == pb.FINISH_REASON_STOP_STRING
    count = len(choice.token_ids)
    assert 0 < count < len(full.token_ids)
    assert list(choice.token_ids) == list(full.token_ids[:count])
    assert list(choice.logprobs) == list(full.logprobs[:count])


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_merged_messages_carry_the_same_entries(fleet: Fleet, at_once: int) -> None:
    """The mailbox merges tokens and their entries alike, whatever a message holds."""
    spec = spec_of(40, temperature=1.0, sampling={"n": 2})
    whole = answer(fleet, spec)
    request = pb.StreamGenerateRequest(spec=spec, stream=pb.StreamOptions(min_tokens_per_message=at_once))
    found: list[list[pb.TokenLogprob]] = [[], []]
    for message in fleet.generation.StreamGenerate(request, timeout=CALL_SECONDS):
        if message.WhichOneof("event") == "delta":
            delta = message.delta
            assert delta.token_offset == len(found[delta.index])
            assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
            found[delta.index] += delta.logprobs
    assert found == [list(choice.logprobs) for choice in whole.choices]


@pytest.mark.slow
def test_entries_go_on_when_the_worker_is_killed(tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = ("--num-pages", "400", "--debug-faults", "requests")
    with running_fleet(tmp_path_factory.mktemp("killed"), *flags) as fleet:
        spec = spec_of(120, temperature=1.0, logprobs=3)
        expected = answer(fleet, spec).choices[0]
        slow = [fleet.slow() for _ in range(2)]
        entries: list[pb.TokenLogprob] = []
        worker_id, was_killed, resumes = "", False, 0
        for message in fleet.stream(spec):
            kind = message.WhichOneof("event")
            if kind == "started":
                worker_id = message.started.worker_id
            elif kind == "delta":
                entries += message.delta.logprobs
                if len(entries) > 20 and not was_killed:
                    was_killed = True
                    next(w for w in fleet.workers if w.worker_id == worker_id).signal(signal.SIGKILL)
            elif kind == "summary":
                resumes = message.summary.usage.resumes
        for call in slow:
            call.cancel()
    assert (was_killed, resumes) == (True, 1)
    assert [entry.token_id for entry in entries] == list(expected.token_ids)
    for entry, other in zip(entries, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert [a.token_id for a in entry.alternatives] == [a.token_id for a in other.alternatives]
