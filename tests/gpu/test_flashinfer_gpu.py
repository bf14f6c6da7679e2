"""The backend `flashinfer` on a GPU: against the reference, in graphs, and with plans queued ahead."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import reference
from kernels.batch import KvLayer, PagedBatch
from kernels.flashinfer_backend import FlashInferBackend, compiled_kernels, is_installed
from kernels.testing import random_paged_problem
from kernels.triton_backend import TritonBackend
from worker.scheduling.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_installed(), reason="flashinfer is not installed"),
]
BF16 = torch.bfloat16
BOUND = {"rtol": 2e-2, "atol": 2e-2}  # bf16, B083


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_at_eos=False)


def prefill_kernels(head_dim: int) -> str:
    """Compiling takes minutes: what is there is tested, and where nothing is, one shape all the same."""
    there = compiled_kernels(head_dim, BF16)
    if not there and head_dim != 128:
        pytest.skip(f"flashinfer's kernels for head_dim {head_dim} are not compiled")
    return there[-1] if there else "auto"


@pytest.mark.parametrize("decode_by", ["flashinfer", "triton"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (28, 4, 128), (4, 4, 128), (9, 3, 64)]
)
def test_mixed_steps_equal_the_reference(device, heads, kv_heads, head_dim, page_size, decode_by):
    """B080, B085, B088, M-31: ragged decode and prefill spans on a NaN-filled pool, step after step."""
    beside = TritonBackend(heads, kv_heads, head_dim, 4096) if decode_by == "triton" else None
    ours = FlashInferBackend(
        heads, kv_heads, head_dim, page_size=page_size, dtype=BF16, device=device, beside=beside,
        least_pairs=0, prefill=prefill_kernels(head_dim),
    )  # fmt: skip
    steps = [
        ([1, 1, 1], [1, 17, 300]),
        ([1, 1, 10, 7], [page_size, page_size + 1, 10, 700]),
        ([130, 1, 64], [130, 1, 65]),
        ([1] * 20, list(range(1, 61, 3))),
    ]
    for seed, (q_lens, kv_lens) in enumerate(steps):
        problem = random_paged_problem(
            q_lens=q_lens, kv_lens=kv_lens, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
            page_size=page_size, seed=seed, dtype=BF16, device=device,
        )  # fmt: skip
        ours.plan(problem.batch)
        kv = problem.copy_of_kv()
        out = ours.run(kv, problem.q, problem.k, problem.v, scale=problem.scale)
        plain = reference.ReferenceBackend()
        plain.plan(problem.batch)
        expected = plain.run(problem.kv, problem.q, problem.k, problem.v, scale=problem.scale)
        torch.testing.assert_close(out, expected, **BOUND)


class Replays:
    """A captured decode step of one layer, and the same step by the reference."""

    def __init__(self, device: torch.device, size: int, page_size: int, max_pages: int) -> None:
        heads, kv_heads, head_dim = 32, 8, 128
        self.device, self.size, self.page_size, self.max_pages = device, size, page_size, max_pages
        num_pages = size * max_pages
        pool = torch.randn(2, (num_pages + 1) * page_size, kv_heads, head_dim, device=device, dtype=BF16)
        self.kv = KvLayer(pool[0], pool[1])
        self.scale = head_dim**-0.5
        order = torch.randperm(num_pages, device=device, dtype=torch.int32).view(size, max_pages)
        offsets = torch.arange(page_size, device=device, dtype=torch.int32)
        table = (order[:, :, None] * page_size + offsets).view(size, -1)
        dummy = torch.full((1, table.shape[1]), num_pages * page_size, dtype=torch.int32, device=device)
        self.table = torch.cat([table, dummy])
        self.q = torch.randn(size, heads, head_dim, device=device, dtype=BF16)
        self.columns = torch.zeros(2, size, dtype=torch.int32, device=device)
        self.fill(list(range(size)), [1] * size)
        backend = FlashInferBackend(heads, kv_heads, head_dim, page_size=page_size, dtype=BF16, device=device)
        self.decode = backend.static_decode(self.table, size)
        self.decode.prepare(size, [1] * size)
        self.body()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.body()

    def body(self) -> Tensor:
        self.decode.begin(self.columns[0], self.columns[1])
        return self.decode.attend(self.kv, self.q, scale=self.scale)

    def fill(self, rows: list[int], lens: list[int]) -> None:
        padding = self.size - len(rows)
        host = torch.tensor([rows + [self.size] * padding, lens + [1] * padding], dtype=torch.int32)
        self.columns.copy_(host.pin_memory(), non_blocking=True)

    def replay(self, rows: list[int], lens: list[int]) -> Tensor:
        self.fill(rows, lens)
        self.decode.prepare(self.size, lens)
        self.graph.replay()
        return self.out[: len(rows)].clone()

    def expected(self, rows: list[int], lens: list[int]) -> Tensor:
        count = len(rows)
        columns = torch.tensor([rows, lens], dtype=torch.int32, device=self.device)
        batch = PagedBatch(
            page_table=self.table, rows=columns[0], kv_lens=columns[1],
            q_indptr=torch.arange(count + 1, dtype=torch.int32, device=self.device),
            positions=columns[1] - 1, write_slots=columns[1], num_decode=count, max_q_len=1,
            max_kv_len=max(lens), page_size=self.page_size, rows_host=rows, kv_lens_host=lens,
            q_lens_host=[1] * count,
        )  # fmt: skip
        return reference.paged_attention(self.q[:count], self.kv, batch, scale=self.scale)


def mixes(size: int, longest: int, count: int) -> list[tuple[list[int], list[int]]]:
    """Rows and lengths: one long among short, all alike, around the edges of splits, fewer than captured."""
    draw = random.Random(size)
    kinds: list[Callable[[int], list[int]]] = [
        lambda n: [longest, *[draw.randint(1, 9) for _ in range(n - 1)]],
        lambda n: [draw.randint(1, longest)] * n,
        lambda n: [
            max(1, min(longest, draw.choice((128, 256, 512, 1024)) + draw.randint(-1, 1))) for _ in range(n)
        ],
        lambda n: [draw.randint(1, longest) for _ in range(n)],
    ]
    found = []
    for number in range(count):
        real = draw.randint(1, size)
        rows = draw.sample(range(size), real)
        found.append((rows, kinds[number % 4](real)))
    return found


@pytest.mark.parametrize(("size", "page_size"), [(8, 16), (33, 1)])
def test_replays_follow_their_own_plan_and_plans_queued_ahead_do_not_mix(device, size, page_size):
    """B083, H9: 500 steps planned and replayed without a wait, behind a device that is kept busy."""
    replays = Replays(device, size, page_size, max_pages=2048 // page_size)
    asked = mixes(size, 2048, 500)
    outs = []
    for number, (rows, lens) in enumerate(asked):
        if number % 7 == 0:
            torch.cuda._sleep(2_000_000)  # 1 ms: the host runs ahead
        outs.append(replays.replay(rows, lens))
    torch.cuda.synchronize()
    for (rows, lens), out in zip(asked[::5], outs[::5], strict=True):
        torch.testing.assert_close(out, replays.expected(rows, lens), **BOUND)


def test_every_plan_of_a_size_is_laid_out_as_the_captured_one(device):
    """B083: what a graph was recorded with is checked at each replay; lengths alone never change it."""
    replays = Replays(device, 16, 16, max_pages=512)
    for lens in ([1] * 16, [8192] * 16, [8192, *[1] * 15], [513] * 3):
        replays.replay(list(range(len(lens))), lens)  # raises StalePlanError where it does
    torch.cuda.synchronize()


@pytest.mark.parametrize("backend", ["flashinfer", "flashinfer+triton"])
def test_whole_answers_follow_those_of_the_triton_backend(gpu_engine, gpu_model, backend: str) -> None:
    """Chunks, mixed steps, graphs with overlap. bf16 rounds otherwise, so runs start anew every 4 tokens."""
    model: Any = gpu_model("random:qwen3-0.6b", BF16)
    draw = random.Random(1)
    prompts = [[draw.randrange(100_000) for _ in range(5 + 40 * i)] for i in range(12)]
    settings: dict[str, Any] = {"num_pages": 2048, "max_step_tokens": 256, "max_running": 16}
    answers = gpu_engine(model, **settings).answer([(p, greedy(24)) for p in prompts]).tokens
    runs = [
        (prompt + answer[:at], answer[at : at + 4])
        for prompt, answer in zip(prompts, answers, strict=True)
        for at in range(0, 24, 4)
    ]
    engine = gpu_engine(model, backend=backend, **settings)
    found = engine.answer([(start, greedy(4)) for start, _ in runs]).tokens
    firsts = sum(tokens[0] == run[0] for tokens, (_, run) in zip(found, runs, strict=True))
    wholes = sum(tokens == run for tokens, (_, run) in zip(found, runs, strict=True))
    assert firsts >= 0.85 * len(runs), f"{firsts} first tokens of {len(runs)} are the same"
    assert wholes >= 0.6 * len(runs), f"{wholes} runs of {len(runs)} are the same"
