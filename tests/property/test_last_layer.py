"""The last layer runs for the tokens that are read alone: the same bits for them, whatever the batch is."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.batch import KvLayer
from kernels.cpu.library import cpu_library
from kernels.testing import PagedProblem, random_paged_problem
from tests import needs
from worker.execution.cpu_model import CpuModel, cpu_model, cpu_parts
from worker.model.layers import Placement
from worker.model.llama import Model
from worker.model.parameters import parameter_shapes
from worker.model.random_weights import random_checkpoint
from worker.model.source import build_model
from worker.model.toy import toy_config

if not needs.HAS_COMPILER:
    pytest.skip("needs a C++ compiler: apt-get install g++", allow_module_level=True)

CONFIG = toy_config(has_qk_norm=True)


def packed() -> Model:
    parts = cpu_parts(needs.compiled())
    return build_model(
        CONFIG,
        random_checkpoint(parameter_shapes(CONFIG), 0),
        placement=Placement(torch.device("cpu"), torch.float32),
        linear_factory=parts.linear_factory,
        embedding_factory=parts.embedding_factory,
        operations=parts.operations,
    )


MODEL = packed()


def fast(model: Model) -> CpuModel:
    found = cpu_model(model, cpu_library())
    assert found is not None
    return found


FAST = fast(MODEL)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[int]]:
    """Spans (new tokens, all tokens), single ones first; and which are sampled, all single ones."""
    num_decode = draw(st.integers(0, 4))
    decodes = [(1, draw(st.integers(1, 90))) for _ in range(num_decode)]
    chunks = [
        (new, new + cached)
        for new, cached in draw(st.lists(st.tuples(st.integers(2, 40), st.integers(0, 70)), max_size=4))
    ]
    ends = [span for span in range(num_decode, num_decode + len(chunks)) if draw(st.booleans())]
    return decodes + chunks or [(3, 3)], [*range(num_decode), *ends]


def problem_of(spans: list[tuple[int, int]]) -> PagedProblem:
    return random_paged_problem(
        q_lens=[new for new, _ in spans],
        kv_lens=[length for _, length in spans],
        num_heads=CONFIG.num_heads,
        num_kv_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        page_size=8,
    )


def pool_of(problem: PagedProblem) -> list[KvLayer]:
    return [problem.copy_of_kv() for _ in range(CONFIG.num_layers)]


def ids_of(problem: PagedProblem) -> Tensor:
    return torch.arange(len(problem.batch.positions), dtype=torch.int32) * 7 % CONFIG.vocab_size


@given(batches())
@settings(max_examples=40, deadline=None)
def test_tokens_that_are_read_have_the_bits_of_a_whole_last_layer(
    batch: tuple[list[tuple[int, int]], list[int]],
) -> None:
    spans, sampled = batch
    problem = problem_of(spans)
    whole, pruned = pool_of(problem), pool_of(problem)
    last, ids = problem.last_queries(sampled), ids_of(problem)
    expected = FAST.forward_paged(ids, problem.batch, whole)
    found = FAST.forward_paged(ids, problem.batch, pruned, last)
    tokens = last.tokens.long()
    assert torch.equal(found[tokens], expected[tokens])
    assert found.isfinite().all()
    for left, right in zip(whole, pruned, strict=True):
        assert torch.equal(left.k.nan_to_num(), right.k.nan_to_num())
        assert torch.equal(left.v.nan_to_num(), right.v.nan_to_num())


@pytest.mark.parametrize("sampled", [[], [1]])
def test_nothing_behind_k_and_v_is_computed_for_the_others(sampled: list[int]) -> None:
    """A last layer whose rest is NaN: only who is read sees it."""
    model = packed()
    nan = torch.full((CONFIG.hidden_size,), float("nan"))
    model.layers[-1] = replace(model.layers[-1], mlp_norm=nan)
    problem = problem_of([(9, 20), (12, 12), (30, 31)])
    last = problem.last_queries(sampled)
    found = fast(model).forward_paged(ids_of(problem), problem.batch, pool_of(problem), last)
    broken = (~found.isfinite()).any(dim=1).nonzero().flatten().tolist()
    assert broken == last.tokens.tolist() == [20] * len(sampled)


@pytest.mark.parametrize("tokens", [[3, 1], [2, 2], [-1, 2], [2, 9]])
def test_tokens_that_are_not_ascending_ones_of_the_step_are_a_bug(tokens: list[int]) -> None:
    problem = problem_of([(4, 4), (5, 5)])
    last = replace(problem.last_queries([0, 1]), tokens=torch.tensor(tokens, dtype=torch.int32))
    with pytest.raises(AssertionError, match="ascending"):
        FAST.forward_paged(ids_of(problem), problem.batch, pool_of(problem), last)
