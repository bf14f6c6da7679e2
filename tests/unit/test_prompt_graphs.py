"""Steps with prompts in pieces, through Triton's interpreter: the same results, padding that nobody sees."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import reference
from kernels.batch import HostSpans, KvLayer, LastQueries, PagedBatch
from kernels.rms_norm import add_rms_norm
from kernels.triton_backend import TritonBackend
from kvatlas.models.shapes import SHAPES
from kvatlas.models.vocabulary import Vocabulary
from worker.execution.prompt_graphs import PromptGraphs, token_sizes
from worker.execution.whole_sizes import WholeSize, grids_of
from worker.model.fused import FusedModel, OwnRows
from worker.model.hub_config import from_hub_config
from worker.model.layers import Linear
from worker.model.toy import toy_config, toy_model

CPU = torch.device("cpu")
CONFIG = toy_config(has_qk_norm=True)
MODEL = FusedModel(toy_model(CONFIG), own_rows=OwnRows(0, 0, 0))
TOKENS, SLOTS = 5, 12


def test_sizes_are_four_to_a_doubling_up_to_the_largest_step_and_eight_of_large_ones() -> None:
    assert token_sizes(200) == [64, 80, 96, 112, 128, 160, 192, 200]
    assert token_sizes(64) == [64]
    assert token_sizes(63) == []
    sizes = token_sizes(8192)
    assert len(sizes) == 41
    assert max(large / small for small, large in pairwise(sizes)) == 1.25
    assert max(large / small for small, large in pairwise(sizes) if small >= 1024) == 1.125


def layers() -> list[KvLayer]:
    shape = (SLOTS + 1, CONFIG.num_kv_heads, CONFIG.head_dim)
    return [KvLayer(torch.zeros(shape), torch.zeros(shape)) for _ in range(CONFIG.num_layers)]


class PlainAttention:
    """A backend of which PromptGraphs needs the eager half, or the half that graphs hold."""

    def __init__(self, *, is_static: bool = False) -> None:
        self.is_static = is_static
        self.num_plans = self.num_prepared = 0
        self._batch: PagedBatch | None = None

    def plan(self, batch: PagedBatch) -> None:
        self.num_plans += 1
        self._batch = batch

    def prepare(self, batch: PagedBatch, size: int) -> None:
        self.num_prepared += 1
        self._batch = batch

    def static_prefill(self, page_table: Tensor, max_tokens: int) -> Any:
        return Static(self) if self.is_static else None

    def static_decode(self, page_table: Tensor, max_batch: int) -> object:
        """Nobody uses it: a table of one row has no room for decodes, and no step comes by message."""
        return object()

    def attend(self, kv: KvLayer, q: Tensor, *, scale: float, out: Tensor | None = None) -> Tensor:
        batch = self._batch
        assert batch is not None
        assert q.shape[0] == len(batch.positions), "attention sees padding"
        slots = batch.page_table[0, : batch.max_kv_len].long()
        attended = reference.attention(q, kv.k[slots], kv.v[slots], batch.positions, scale=scale)
        return attended if out is None else out.copy_(attended)


class Static:
    def __init__(self, eager: PlainAttention) -> None:
        self._eager = eager
        self.prepare = eager.prepare

    def num_parts(self, spans: HostSpans) -> int:
        return 1

    def attend(self, kv: KvLayer, q: Tensor, out: Tensor, *, scale: float, is_split: bool) -> None:
        assert self._eager._batch is not None
        count = len(self._eager._batch.positions)
        out[:count] = self._eager.attend(kv, q[:count], scale=scale)


def batch_of(slots: Tensor, num_decode: int = 0) -> PagedBatch:
    """One prompt from its beginning."""
    count = len(slots)
    return PagedBatch(
        page_table=slots[None],
        rows=torch.zeros(1, dtype=torch.int32),
        kv_lens=torch.tensor([count], dtype=torch.int32),
        q_indptr=torch.tensor([0, count], dtype=torch.int32),
        positions=torch.arange(count, dtype=torch.int32),
        write_slots=slots,
        num_decode=num_decode,
        max_q_len=count,
        max_kv_len=count,
        page_size=1,
        rows_host=[0],
        kv_lens_host=[count],
        q_lens_host=[count],
    )


@pytest.mark.parametrize("is_static", [False, True], ids=["pieces", "whole"])
def test_a_step_in_pieces_is_the_step_in_one_and_padding_writes_the_dummy_page_alone(
    monkeypatch: pytest.MonkeyPatch, is_static: bool
) -> None:
    """S1-30, M-25: twice over the same buffers, the second step shorter than the first."""
    monkeypatch.setattr("worker.execution.prompt_graphs.SMALLEST", 8)
    whole, pieced, backend = layers(), layers(), PlainAttention(is_static=is_static)
    table, scale = torch.zeros(1, SLOTS, dtype=torch.int32), CONFIG.head_dim**-0.5
    given: Any = backend
    graphs = PromptGraphs(
        MODEL, given, pieced, table, max_tokens=8, dummy_slot=SLOTS, scale=scale, capture=False
    )
    for num_tokens in (TOKENS, TOKENS - 2):
        ids = torch.randint(0, CONFIG.vocab_size, (num_tokens,))
        batch = batch_of(torch.randperm(SLOTS)[:num_tokens].int())
        inputs = MODEL.embedding[ids]
        backend.plan(batch)
        steps = (batch.positions, batch.write_slots)
        expected = MODEL.forward(
            inputs.clone(), *steps, whole, lambda kv, q: backend.attend(kv, q, scale=scale)
        )
        found = graphs.run(inputs.clone(), batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for left, right in zip(whole, pieced, strict=True):
            torch.testing.assert_close(left.k[:SLOTS], right.k[:SLOTS], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(left.v[:SLOTS], right.v[:SLOTS], rtol=1e-5, atol=1e-5)
    assert backend.num_plans == (2 if is_static else 4)


def test_products_of_many_rows_add_to_the_residual_as_the_norm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layer, so that no norm behind them adds; one with a bias is left to the norm."""
    monkeypatch.setattr("worker.execution.prompt_graphs.SMALLEST", 8)
    given: Any = PlainAttention()
    table, scale = torch.zeros(1, SLOTS, dtype=torch.int32), CONFIG.head_dim**-0.5
    batch = batch_of(torch.randperm(SLOTS)[:TOKENS].int())
    inputs = MODEL.embedding[torch.randint(0, CONFIG.vocab_size, (TOKENS,))]
    biased = toy_model(CONFIG)
    for layer in biased.layers:
        layer.output.bias = torch.zeros(CONFIG.hidden_size)
    found, stored, by_norm = [], [], []

    def counted(*arguments: Any) -> Tensor:
        by_norm[-1] += 1
        return add_rms_norm(*arguments)

    monkeypatch.setattr("worker.model.fused.add_rms_norm", counted)
    for model, least in ((MODEL, 9), (MODEL, 8), (FusedModel(biased, own_rows=OwnRows(0, 0, 0)), 8)):
        monkeypatch.setattr("worker.model.fused.ADDING_ROWS", least)
        kv = layers()
        sizes = {"max_tokens": 8, "dummy_slot": SLOTS, "scale": scale, "capture": False}
        by_norm.append(0)
        found.append(PromptGraphs(model, given, kv, table, **sizes).run(inputs.clone(), batch).clone())
        stored.append(torch.stack([part[:SLOTS] for layer in kv for part in (layer.k, layer.v)]))
    assert by_norm == [2 * CONFIG.num_layers - 1, 0, CONFIG.num_layers]
    for other in (1, 2):
        torch.testing.assert_close(found[other], found[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(stored[other], stored[0], rtol=1e-5, atol=1e-5)


def last_of(batch: PagedBatch, tokens: list[int]) -> LastQueries:
    """Some tokens of a step, each a span."""
    count, at = len(tokens), torch.tensor(tokens, dtype=torch.int32)
    spans = torch.bucketize(at, batch.q_indptr, right=True) - 1
    positions = batch.positions[at.long()]
    found = replace(
        batch,
        rows=batch.rows[spans],
        kv_lens=positions + 1,
        q_indptr=torch.arange(count + 1, dtype=torch.int32),
        positions=positions,
        write_slots=positions,
        num_decode=count,
        max_kv_len=max((positions + 1).tolist(), default=0),
        rows_host=batch.rows[spans].tolist(),
        kv_lens_host=(positions + 1).tolist(),
        q_lens_host=[1] * count,
    )
    return LastQueries(at, found)


@pytest.mark.parametrize("tokens", [[], [4], [1, 4], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize(("max_tokens", "is_static"), [(8, False), (8, True), (4, False)])
def test_the_last_layer_runs_for_the_tokens_that_are_read(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], max_tokens: int, is_static: bool
) -> None:
    """In pieces, whole, and eagerly: hidden states and all K and V as ever; no product for others."""
    monkeypatch.setattr("worker.execution.prompt_graphs.SMALLEST", max_tokens)
    network = toy_model(CONFIG)
    parts = [getattr(network.layers[-1], name) for name in ("output", "gate_up", "down")]
    spied = [Spy(part) for part in parts]
    for name, spy in zip(("output", "gate_up", "down"), spied, strict=True):
        network.layers[-1] = replace(network.layers[-1], **{name: spy})
    model = FusedModel(network, own_rows=OwnRows(0, 0, 0))
    whole, pruned, scale = layers(), layers(), CONFIG.head_dim**-0.5
    given: Any = PlainAttention(is_static=is_static)
    batch = batch_of(torch.randperm(SLOTS)[:TOKENS].int())
    inputs = model.embedding[torch.randint(0, CONFIG.vocab_size, (TOKENS,))]
    given.plan(batch)
    steps = (batch.positions, batch.write_slots)
    expected = model.forward(inputs.clone(), *steps, whole, lambda kv, q: given.attend(kv, q, scale=scale))
    table = torch.zeros(1, SLOTS, dtype=torch.int32)
    graphs = PromptGraphs(
        model, given, pruned, table, max_tokens=max_tokens, dummy_slot=SLOTS, scale=scale, capture=False
    )
    for spy in spied:
        spy.rows.clear()
    found = graphs.run(inputs.clone(), batch, last_of(batch, tokens))
    torch.testing.assert_close(found[tokens], expected[tokens], rtol=1e-5, atol=1e-5)
    assert found.isfinite().all()
    assert [spy.rows for spy in spied] == [[len(tokens)] if tokens else []] * 3
    for left, right in zip(whole, pruned, strict=True):
        torch.testing.assert_close(left.k[:SLOTS], right.k[:SLOTS], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(left.v[:SLOTS], right.v[:SLOTS], rtol=1e-5, atol=1e-5)


class Spy:
    """A product that notes how many rows it is asked for."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.rows: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[0])
        return self._linear(x)


def test_steps_that_one_graph_does_not_hold_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many tokens, or more decodes than a graph has rows for: the backend plans the step."""
    monkeypatch.setattr("worker.execution.prompt_graphs.SMALLEST", 8)
    monkeypatch.setattr("worker.execution.whole_sizes.WHOLE_TOKENS", 8)
    backend = PlainAttention(is_static=True)
    given: Any = backend
    table = torch.zeros(1, SLOTS, dtype=torch.int32)
    graphs = PromptGraphs(
        MODEL, given, layers(), table, max_tokens=12, dummy_slot=SLOTS, scale=0.3, capture=False
    )
    for num_tokens, num_decode, expected in ((8, 0, (0, 1)), (8, 1, (1, 1)), (9, 0, (2, 1))):
        batch = batch_of(torch.arange(num_tokens, dtype=torch.int32), num_decode)
        graphs.run(MODEL.embedding[torch.ones(num_tokens, dtype=torch.int64)], batch)
        assert (backend.num_plans, backend.num_prepared) == expected


class Recorded(PromptGraphs):
    """Captures where there is no GPU: what would be recorded runs, and is not replayed."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, capture=False)
        self._captures = True

    def _captured_on_stream(self, capture: Any) -> Any:
        return capture()

    def _recorded(self, work: Any) -> Any:
        work()
        return SimpleNamespace(replay=lambda: None)


def test_pieces_are_captured_at_a_start_only_where_no_step_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others when a step needs them, but not before the start's captures: until then launches may be asked
    for alone, and a graph would be empty.
    """
    monkeypatch.setattr("worker.execution.prompt_graphs.SMALLEST", 8)
    monkeypatch.setattr("worker.execution.whole_sizes.WHOLE_TOKENS", 10)
    given: Any = PlainAttention(is_static=True)
    table = torch.zeros(1, SLOTS, dtype=torch.int32)
    graphs = Recorded(
        model=MODEL,
        backend=given,
        kv=layers(),
        page_table=table,
        max_tokens=12,
        dummy_slot=SLOTS,
        scale=0.3,
    )
    assert graphs.sizes == [8, 10, 12]

    def step_beside_a_decode(num_tokens: int) -> None:
        batch = batch_of(torch.arange(num_tokens, dtype=torch.int32), 1)
        graphs.run(MODEL.embedding[torch.ones(num_tokens, dtype=torch.int64)], batch)

    step_beside_a_decode(8)
    assert not graphs._graphs
    graphs.capture_all()
    assert set(graphs._graphs) == {12}
    assert {whole.num_tokens for whole in graphs._whole} == {8, 10}
    for _ in range(2):
        step_beside_a_decode(8)
        assert set(graphs._graphs) == {8, 12}


# --- the real static attention -------------------------------------------------------------------


HEADS, KV_HEADS, DIM, WIDTH, ROWS = 4, 2, 16, 96, 6


def prompts(spans: list[tuple[int, int]], table: Tensor) -> PagedBatch:
    """Spans (tokens cached, tokens new), each in a row of its own."""
    q_lens, kv_lens = [new for _, new in spans], [cached + new for cached, new in spans]
    indptr = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0).int()
    rows = list(range(len(spans)))
    positions = torch.cat([torch.arange(cached, cached + new) for cached, new in spans]).int()
    return PagedBatch(
        page_table=table,
        rows=torch.tensor(rows, dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        q_indptr=indptr,
        positions=positions,
        write_slots=positions,
        num_decode=0,
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        page_size=1,
        rows_host=rows,
        kv_lens_host=kv_lens,
        q_lens_host=q_lens,
    )


def test_static_attention_follows_each_step_and_leaves_padding_alone() -> None:
    """B083: spans of other numbers and lengths through the same buffers; the eager kernel's bits."""
    draw = torch.Generator().manual_seed(3)
    table = torch.randperm(ROWS * WIDTH, generator=draw).view(ROWS, WIDTH).int()
    shape = (ROWS * WIDTH, KV_HEADS, DIM)
    kv = KvLayer(torch.randn(shape, generator=draw), torch.randn(shape, generator=draw))
    backend = TritonBackend(HEADS, KV_HEADS, DIM, WIDTH)
    static = backend.static_prefill(table, 128)
    out = torch.full((128, HEADS, DIM), 7.0)
    for spans in ([(0, 90)], [(3, 1), (0, 70), (40, 5)], [(11, 2)], [(0, 20)] * 5):
        batch = prompts(spans, table)
        count, out[:] = sum(batch.q_lens_host), 7.0
        q = torch.randn(128, HEADS, DIM, generator=draw)
        backend.plan(batch)
        expected = backend.attend(kv, q[:count], scale=0.25)
        assert static.num_parts(batch) == 1
        static.prepare(batch, 128)
        static.attend(kv, q, out, scale=0.25, is_split=False)
        assert torch.equal(out[:count], expected)
        assert (out[count:] == 7.0).all()


def test_static_attention_leaves_the_rows_of_decodes_to_others() -> None:
    """Prompts beside decodes: the bits that they have alone, and nothing where the decodes' go."""
    draw = torch.Generator().manual_seed(4)
    table = torch.randperm(ROWS * WIDTH, generator=draw).view(ROWS, WIDTH).int()
    shape = (ROWS * WIDTH, KV_HEADS, DIM)
    kv = KvLayer(torch.randn(shape, generator=draw), torch.randn(shape, generator=draw))
    static = TritonBackend(HEADS, KV_HEADS, DIM, WIDTH).static_prefill(table, 128)
    q = torch.randn(128, HEADS, DIM, generator=draw)
    out, alone = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
    chunks = [(0, 70), (40, 5)]
    static.prepare(replace(prompts([(30, 1), (9, 1), *chunks], table), num_decode=2), 128)
    static.attend(kv, q, out, scale=0.25, is_split=False)
    static.prepare(replace(prompts(chunks, table), rows_host=[2, 3]), 128)
    static.attend(kv, q.roll(-2, 0), alone, scale=0.25, is_split=False)
    assert torch.equal(out[2:77], alone[:75])
    assert (out[:2] == 7.0).all()
    assert (out[77:] == 7.0).all()


def test_prompts_beside_decodes_run_in_one_graph_as_they_do_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """M-24: other decodes and fewer through the same buffers; scored, or with more of them, in pieces."""
    monkeypatch.setattr("worker.execution.prompt_graphs.SMALLEST", 8)
    monkeypatch.setattr("worker.execution.whole_sizes.DECODES", 3)
    table = torch.randperm(ROWS * 32).view(ROWS, 32).int()
    table[-1] = ROWS * 32  # the dummy row
    heads, dim = (CONFIG.num_heads, CONFIG.num_kv_heads), CONFIG.head_dim
    pool = torch.randn(CONFIG.num_layers, 2, ROWS * 32 + 1, heads[1], dim)
    pools = [[KvLayer(*layer.clone()) for layer in pool] for _ in range(2)]
    made: list[PromptGraphs] = []
    for whole_tokens, layers_of in zip((8, 0), pools, strict=True):
        monkeypatch.setattr("worker.execution.whole_sizes.WHOLE_TOKENS", whole_tokens)
        backend = TritonBackend(*heads, dim, 32)
        sizes = {"max_tokens": 8, "dummy_slot": ROWS * 32, "scale": dim**-0.5, "capture": False}
        made.append(PromptGraphs(MODEL, backend, layers_of, table, **sizes))
    few, many = ([(9, 1), (4, 1)], [(0, 3), (6, 2)]), ([(3, 1), (8, 1), (1, 1), (5, 1)], [(7, 4)])
    for (decodes, chunks), room in zip((few, many, ([(5, 1)], [(3, 2)])), (3, 5, 3), strict=True):
        batch = replace(prompts(decodes + chunks, table), num_decode=len(decodes))
        token_rows = torch.arange(len(batch.rows_host)).repeat_interleave(torch.tensor(batch.q_lens_host))
        batch = replace(batch, write_slots=table[token_rows, batch.positions.long()])
        count = len(batch.positions)
        wholes = [way._whole_of(batch, count, is_scored=False) for way in made]
        assert wholes == [WholeSize(8, False, room), None]
        assert made[0]._whole_of(batch, count, is_scored=True) is None
        inputs = MODEL.embedding[torch.randint(0, CONFIG.vocab_size, (len(batch.positions),))]
        last = last_of(batch, list(range(len(decodes))))
        found, expected = (way.run(inputs.clone(), batch, last) for way in made)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for left, right in zip(*pools, strict=True):
            torch.testing.assert_close(left.k[:-1], right.k[:-1], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(left.v[:-1], right.v[:-1], rtol=1e-4, atol=1e-4)
    most = replace(prompts([(3, 1)] * 6 + [(0, 2)], table), num_decode=6)
    assert made[0]._whole_of(most, 8, is_scored=False) is None


def test_many_decodes_have_graphs_where_the_device_would_wait_for_the_host() -> None:
    """Products of the small shape are short beside the launches of a layer, those of the large shape are not;
    more running than a graph has rows for, fewer than one without many decodes has, and none.
    """
    nobody = Vocabulary(None, None, frozenset())
    small, large = (from_hub_config(SHAPES[name], nobody, name) for name in ("qwen3-0.6b", "llama-3.1-8b"))
    sizes = token_sizes(2048)
    few, many = [size for size in sizes if size <= 1024], sizes[-1::-2][::-1]
    of_256, of_100 = ([size for size in many if size >= room] for room in (256, 100))
    assert grids_of(small, sizes, max_running=300) == [(0, few), (64, few), (256, of_256)]
    assert grids_of(small, sizes, max_running=100) == [(0, few), (64, few), (100, of_100)]
    larger = few + [size for size in many if size > 1024]
    assert grids_of(small, sizes, max_running=40) == [(0, few), (40, larger)]
    assert grids_of(large, sizes, max_running=300) == [(0, few), (64, few)]
    assert grids_of(small, sizes, max_running=0) == [(0, few)]
    assert grids_of(small, [], max_running=300) == []


def test_static_attention_refuses_what_it_has_no_room_for() -> None:
    """No prompt, and more spans than it has."""
    table = torch.zeros(20, WIDTH, dtype=torch.int32)
    static = TritonBackend(HEADS, KV_HEADS, DIM, WIDTH).static_prefill(table, 128)
    assert static.num_parts(prompts([(0, 9)] * 8, table)) == 1
    assert static.num_parts(prompts([(0, 9)] * 9, table)) == 0
    assert static.num_parts(replace(prompts([(5, 1), (9, 1)], table), num_decode=2)) == 0


def test_static_attention_splits_keys_as_the_eager_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into other numbers of parts through the same buffers; scratch of steps before is read by nobody."""
    monkeypatch.setattr("kernels.prefill_plan.MIN_KEYS", 16)
    monkeypatch.setattr("kernels.prefill_plan.resident_programs", lambda device: 12)
    monkeypatch.setattr("kernels.static_prefill.resident_programs", lambda device: 12)
    draw = torch.Generator().manual_seed(5)
    table = torch.randperm(ROWS * WIDTH, generator=draw).view(ROWS, WIDTH).int()
    shape = (ROWS * WIDTH, KV_HEADS, DIM)
    kv = KvLayer(torch.randn(shape, generator=draw), torch.randn(shape, generator=draw))
    backend = TritonBackend(HEADS, KV_HEADS, DIM, WIDTH)
    static = backend.static_prefill(table, 128)
    out, seen = torch.empty(128, HEADS, DIM), []
    for spans in ([(80, 9)], [(40, 3), (90, 2)], [(1, 50)], [(30, 2), (20, 3), (60, 4)]):
        batch = prompts(spans, table)
        count, out[:] = sum(batch.q_lens_host), 7.0
        q = torch.randn(128, HEADS, DIM, generator=draw)
        backend.plan(batch)
        expected = backend.attend(kv, q[:count], scale=0.25)
        seen.append(static.num_parts(batch))
        static.prepare(batch, 128)
        static._split.partial.fill_(float("nan"))
        static.attend(kv, q, out, scale=0.25, is_split=True)
        assert torch.equal(out[:count], expected)
        assert (out[count:] == 7.0).all()
    assert seen == [5, 3, 3, 2]


def test_few_queries_over_many_keys_run_in_one_graph_as_they_do_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a decode and alone; such a graph has a size of its own."""
    monkeypatch.setattr("worker.execution.prompt_graphs.SMALLEST", 8)
    monkeypatch.setattr("kernels.prefill_plan.MIN_KEYS", 16)
    for module in ("prefill_plan", "static_prefill"):
        monkeypatch.setattr(f"kernels.{module}.resident_programs", lambda device: 12)
    table = torch.randperm(ROWS * WIDTH).view(ROWS, WIDTH).int()
    table[-1] = ROWS * WIDTH  # the dummy row
    heads, dim = (CONFIG.num_heads, CONFIG.num_kv_heads), CONFIG.head_dim
    pool = torch.randn(CONFIG.num_layers, 2, ROWS * WIDTH + 1, heads[1], dim)
    pools = [[KvLayer(*layer.clone()) for layer in pool] for _ in range(2)]
    made: list[PromptGraphs] = []
    for whole_tokens, layers_of in zip((16, 0), pools, strict=True):
        monkeypatch.setattr("worker.execution.whole_sizes.WHOLE_TOKENS", whole_tokens)
        backend = TritonBackend(*heads, dim, WIDTH)
        sizes = {"max_tokens": 16, "dummy_slot": ROWS * WIDTH, "scale": dim**-0.5, "capture": False}
        made.append(PromptGraphs(MODEL, backend, layers_of, table, **sizes))
    assert made[0].whole_sizes == [8, 10, 12, 14, 16]
    for spans, num_decode, size in ([(9, 1), (70, 3)], 1, 8), ([(60, 9)], 0, 12), ([(70, 2), (40, 9)], 0, 12):
        batch = replace(prompts(spans, table), num_decode=num_decode)
        token_rows = torch.arange(len(spans)).repeat_interleave(torch.tensor(batch.q_lens_host))
        batch = replace(batch, write_slots=table[token_rows, batch.positions.long()])
        whole = made[0]._whole_of(batch, len(token_rows), is_scored=False)
        assert whole == (size, True, 5 if num_decode else 0)
        inputs = MODEL.embedding[torch.randint(0, CONFIG.vocab_size, (len(token_rows),))]
        last = last_of(batch, [len(token_rows) - 1])
        found, expected = (way.run(inputs.clone(), batch, last) for way in made)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for left, right in zip(*pools, strict=True):
            torch.testing.assert_close(left.k[:-1], right.k[:-1], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(left.v[:-1], right.v[:-1], rtol=1e-4, atol=1e-4)
