"""A whole network through the cpu library: packed as its file stores it, all layers in one call."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.batch import KvLayer
from kernels.cpu.library import CpuLibrary
from kernels.cpu_backend import CpuBackend
from kernels.reference import ReferenceBackend
from kernels.testing import random_paged_problem
from kvatlas.models.files import ModelFiles, ModelKind
from tests import needs
from tests.toy_runners import sizes_for
from worker.execution.cpu_model import CpuParts, cpu_model, cpu_parts
from worker.execution.torch_runner import BAD_HIDDEN, TorchRunner
from worker.ids import Row, SequenceId
from worker.model.layers import Placement
from worker.model.llama import Model
from worker.model.parameters import parameter_shapes
from worker.model.random_weights import random_checkpoint
from worker.model.source import build_model, load_model, open_checkpoint
from worker.model.toy import toy_config
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import RowStart, Step, StepResult

CPU = torch.device("cpu")
FP32 = Placement(CPU, torch.float32)
TINY = ModelFiles(ModelKind.RANDOM, "random:tiny", "tiny", "0", shape="tiny")


@pytest.fixture
def library() -> CpuLibrary:
    return needs.compiled()


def both(library: CpuLibrary) -> tuple[Model, Model]:
    """The same random weights, plain and packed."""
    return loaded(TINY), loaded(TINY, cpu_parts(library))


def loaded(source: ModelFiles, parts: CpuParts | None = None) -> Model:
    if parts is None:
        return load_model(source, max_context=512)
    return load_model(
        source,
        max_context=512,
        linear_factory=parts.linear_factory,
        embedding_factory=parts.embedding_factory,
        operations=parts.operations,
    )


def runner(model: Model, reference: bool = False) -> TorchRunner:
    shape = model.config
    config = sizes_for(
        shape,
        max_running=8,
        max_context=512,
        num_pages=100,
        page_size=8,
        poison=True,
    )
    backend = ReferenceBackend() if reference else CpuBackend()
    return TorchRunner(model, backend, config, CPU)


def prompts(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (n,), generator=draw).tolist() for n in lengths]


def generate(runner: TorchRunner, token_ids: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """All prompts in one step, then decode steps; row i has pages 12 * i and on."""
    out: list[list[int]] = [[] for _ in token_ids]
    lengths = [len(ids) for ids in token_ids]
    for step in range(count):
        spans = [(n + step - 1, n + step) if step else (0, n) for n in lengths]
        rows = range(len(token_ids))
        new = [(row, page) for row in rows for page in range(12)] if step == 0 else []
        result = runner.launch(
            Step(
                number=step,
                sequence_ids=[SequenceId(row) for row in rows],
                rows=array("i", rows),
                starts=array("i", [start for start, _ in spans]),
                ends=array("i", [end for _, end in spans]),
                sampled=list(rows),
                num_decode=len(rows) if step else 0,
                row_starts=[]
                if step
                else [
                    RowStart(Row(row), SequenceId(row), 0, ids, len(ids), SamplingParams(), frozenset())
                    for row, ids in enumerate(token_ids)
                ],
                new_page_rows=array("i", [row for row, _ in new]),
                new_page_indexes=array("i", [page for _, page in new]),
                new_page_ids=array("i", [12 * row + page for row, page in new]),
            )
        ).result()
        for row, token in enumerate(result.token_ids):
            out[row].append(token)
    return out


@pytest.mark.parametrize("changes", [{}, {"has_qk_norm": True, "head_dim": 24}, {"has_qkv_bias": True}])
def test_all_layers_in_one_call_give_the_bits_of_layer_by_layer(
    library: CpuLibrary, changes: dict[str, Any]
) -> None:
    """With q/k norm, a head_dim of its own, and biases too."""
    model = packed_toy(library, **changes)
    fused = cpu_model(model, library)
    assert fused is not None
    head_dim = model.config.head_dim
    problem = random_paged_problem(
        q_lens=[1, 1, 9], kv_lens=[40, 3, 30], num_heads=6, num_kv_heads=2, head_dim=head_dim, page_size=8
    )
    pools = [[copy_of(problem.kv) for _ in range(model.config.num_layers)] for _ in range(2)]
    for pool in pools:
        for kv in pool:
            kv.k.nan_to_num_(0.3)
            kv.v.nan_to_num_(0.4)
    input_ids = torch.arange(11, dtype=torch.int32) * 7
    backend = CpuBackend()
    backend.plan(problem.batch)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return backend.run(pools[0][layer], q, k, v, scale=model.config.attention_scale)

    by_layer = model.forward(input_ids, problem.batch.positions, attend)
    at_once = fused.forward_paged(input_ids, problem.batch, pools[1])
    assert torch.equal(by_layer, at_once)
    for one, other in zip(*pools, strict=True):
        assert torch.equal(one.k, other.k)
        assert torch.equal(one.v, other.v)


def packed_toy(library: CpuLibrary, **changes: Any) -> Model:
    config = toy_config(**changes)
    checkpoint = random_checkpoint(parameter_shapes(config), 0)
    parts = cpu_parts(library)
    return build_model(
        config,
        checkpoint,
        placement=FP32,
        linear_factory=parts.linear_factory,
        embedding_factory=parts.embedding_factory,
        operations=parts.operations,
    )


def copy_of(kv: KvLayer) -> KvLayer:
    return KvLayer(k=kv.k.clone(), v=kv.v.clone())


def test_the_packed_network_gives_the_plain_networks_tokens(library: CpuLibrary) -> None:
    plain, packed = both(library)
    token_ids = prompts(plain.config.vocab_size, [1, 7, 30, 60])
    expected = generate(runner(plain, reference=True), token_ids, 12)
    assert generate(runner(packed), token_ids, 12) == expected


def test_a_sequence_gives_the_same_tokens_alone_and_in_company(library: CpuLibrary) -> None:
    _, packed = both(library)
    token_ids = prompts(packed.config.vocab_size, [5, 40, 17, 33, 2, 64, 9, 21])
    together = generate(runner(packed), token_ids, 10)
    for ids, answer in zip(token_ids, together, strict=True):
        assert generate(runner(packed), [ids], 10) == [answer]


def one_step(
    found: TorchRunner, spans: Sequence[tuple[int, int]], sampled: Sequence[int], params: SamplingParams
) -> StepResult:
    """Spans (start, end), a row each; those from 0 begin, row 0 with `params`, in 12 pages of their own."""
    begin = [row for row, (start, _) in enumerate(spans) if start == 0]
    starts = [
        RowStart(
            Row(row),
            SequenceId(row),
            0,
            range(row, row + 40),
            40,
            params if row == 0 else SamplingParams(),
            frozenset(),
        )
        for row in begin
    ]
    pages = [(row, page) for row in begin for page in range(12)]
    return found.launch(
        Step(
            number=0,
            sequence_ids=[SequenceId(row) for row in range(len(spans))],
            rows=array("i", range(len(spans))),
            starts=array("i", [start for start, _ in spans]),
            ends=array("i", [end for _, end in spans]),
            sampled=sampled,
            num_decode=0,
            row_starts=starts,
            new_page_rows=array("i", [row for row, _ in pages]),
            new_page_indexes=array("i", [page for _, page in pages]),
            new_page_ids=array("i", [12 * row + page for row, page in pages]),
        )
    ).result()


def test_prompts_are_scored_as_ever_where_others_are_sampled_alone(library: CpuLibrary) -> None:
    """Who asks for log-probabilities of a prompt reads all of it behind the last layer, in chunks too."""
    plain, packed = both(library)
    ways = runner(plain, reference=True), runner(packed)
    params = SamplingParams(prompt_logprobs=2)
    for spans, sampled in (([(0, 25), (0, 30)], [1]), ([(25, 40), (30, 40)], [0, 1])):
        expected, found = (one_step(way, spans, sampled, params) for way in ways)
        assert list(found.token_ids) == list(expected.token_ids)
        assert list(found.prompt_logprobs) == list(expected.prompt_logprobs) == [0]
        pairs = list(zip(found.prompt_logprobs[0], expected.prompt_logprobs[0], strict=True))
        assert len(pairs) == (25 if spans[0][0] == 0 else 14)
        for ours, theirs in pairs:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in ours.alternatives] == [token for token, _ in theirs.alternatives]


def test_a_chunk_that_reads_nan_fails_though_nothing_of_it_is_sampled(library: CpuLibrary) -> None:
    """B057: before its pages are kept, and alone."""
    _, packed = both(library)
    found = runner(packed)
    spans, later = [(0, 8), (0, 8), (0, 8)], [(8, 20), (8, 20), (8, 40)]
    assert one_step(found, spans, [], SamplingParams()).failed == {}
    for kv in found.kv_pool.layers:
        kv.k[found.page_table.slots[1, 3].long()] = float("nan")
    result = one_step(found, later, [2], SamplingParams())
    assert result.failed == {1: BAD_HIDDEN}
    assert len(result.token_ids) == 1


@pytest.mark.model
def test_the_real_models_logits_are_those_of_its_dense_weights(library: CpuLibrary, model_path: Path) -> None:
    """Whole-number products, quantised embedding, all layers in one call: within the screening margin."""
    source = ModelFiles(ModelKind.GGUF, str(model_path), "model", "0", path=model_path)
    plain, packed = loaded(source), loaded(source, cpu_parts(library))
    fused = cpu_model(packed, library)
    assert fused is not None
    token_ids = prompts(plain.config.vocab_size, [50])[0]
    problem = random_paged_problem(
        q_lens=[50], kv_lens=[50], num_heads=9, num_kv_heads=3, head_dim=64, page_size=16
    )
    pool = [copy_of(problem.kv) for _ in range(30)]
    hidden = fused.forward_paged(torch.tensor(token_ids, dtype=torch.int32), problem.batch, pool)
    backend, plain_pool = ReferenceBackend(), [copy_of(problem.kv) for _ in range(30)]
    backend.plan(problem.batch)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return backend.run(plain_pool[layer], q, k, v, scale=plain.config.attention_scale)

    expected = plain.logits(plain.forward(torch.tensor(token_ids), problem.batch.positions, attend))
    error = (packed.logits(hidden) - expected).abs().max().item()
    assert error < 1e-3, f"logits differ by {error:.2e}"


def test_weights_are_packed_from_the_files_own_bytes(library: CpuLibrary, tmp_path: Path) -> None:
    """A GGUF of the llama architecture permutes q and k rows: what is packed must be undone as well."""
    path = write_gguf(tmp_path / "tiny.gguf")
    source = ModelFiles(ModelKind.GGUF, str(path), "tiny", "0", path=path)
    config, checkpoint = open_checkpoint(source, 0)
    plain = build_model(config, checkpoint, placement=FP32)
    parts = cpu_parts(library)
    packed = build_model(
        config,
        checkpoint,
        placement=FP32,
        linear_factory=parts.linear_factory,
        embedding_factory=parts.embedding_factory,
        operations=parts.operations,
    )
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(packed.layers, plain.layers, strict=True):
        torch.testing.assert_close(ours.qkv(x), theirs.qkv(x))
        torch.testing.assert_close(ours.gate_up(x), theirs.gate_up(x))
    ids = torch.arange(5, dtype=torch.int32)
    assert torch.equal(packed.embedding(ids), plain.embedding(ids))


def write_gguf(path: Path) -> Path:
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(64)])
    writer.add_token_merges([])
    matrices = {
        "attn_q": (64, 64),
        "attn_k": (32, 64),
        "attn_v": (32, 64),
        "attn_output": (64, 64),
        "ffn_gate": (96, 64),
        "ffn_up": (96, 64),
        "ffn_down": (64, 96),
    }
    for name, shape in matrices.items():
        add_quantized(writer, f"blk.0.{name}.weight", draw.standard_normal(shape, dtype=np.float32), "Q4_1")
    add_quantized(writer, "token_embd.weight", draw.standard_normal((64, 64), dtype=np.float32), "Q8_0")
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_quantized(writer: gguf.GGUFWriter, name: str, dense: np.ndarray, quantization: str) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    writer.add_tensor(name, gguf.quants.quantize(dense, kind), raw_dtype=kind)


def test_a_model_that_is_not_packed_runs_layer_by_layer(library: CpuLibrary) -> None:
    assert cpu_model(loaded(TINY), library) is None
    assert cpu_model(loaded(TINY, cpu_parts(library)), None) is None
