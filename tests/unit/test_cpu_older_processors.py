"""The same sources for processors without whole-number products, AVX-512 or AVX2: same results."""

import platform
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kernels import reference
from kernels.cpu.build import build
from kernels.cpu.library import CpuLibrary, Format
from kernels.cpu_backend import CpuBackend
from kernels.testing import assert_no_worse, random_paged_problem
from tests import needs
from worker.execution.cpu_model import cpu_operations
from worker.execution.cpu_sampler import CpuSampler
from worker.execution.sampler import Sampler
from worker.execution.sampling_state import SamplingState
from worker.ids import Row, SequenceId
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import RowStart

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), needs.COMPILER]

X86 = {"x86-64-v2": "sse4_2", "x86-64-v3": "avx2", "skylake-avx512": "avx512vl"}
"""Architectures, and what /proc/cpuinfo must name for their code to run."""


def architectures() -> list[Any]:
    if platform.machine() != "x86_64":
        return [pytest.param("native")]
    there = set(Path("/proc/cpuinfo").read_text().split())
    return [
        pytest.param(name, marks=pytest.mark.skipif(has not in there, reason=f"a processor without {has}"))
        for name, has in X86.items()
    ]


@pytest.fixture(scope="module", params=architectures())
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    path: Path | None = build(tmp_path_factory.mktemp("kernels"), architecture=request.param)
    assert path is not None, "the compiler made none"
    older = CpuLibrary(path)
    assert not older.multiplies_integers
    return older


@pytest.mark.parametrize("form", list(Format))
def test_products(library: CpuLibrary, form: Format) -> None:
    """As exact as fp32, and a row the same in any batch."""
    kind = gguf.GGMLQuantizationType[form.name]
    dense = np.random.default_rng(0).standard_normal((70, 160), dtype=np.float32)
    rows = gguf.quants.quantize(dense, kind).view(np.uint8).reshape(70, -1)
    weight = torch.from_numpy(
        np.ascontiguousarray(gguf.quants.dequantize(rows, kind)).reshape(70, 160)
    ).double()
    packed = library.pack(form, rows, 160)
    x = torch.randn(30, 160, generator=torch.Generator().manual_seed(1))
    together = torch.empty(30, 70)
    library.product(form, packed, None, x, together)
    rounding = torch.finfo(torch.float32).eps * (x.abs().double() @ weight.abs().T)
    assert ((together - x.double() @ weight.T).abs() <= 2 * rounding).all()
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 13):
        some = torch.empty(num_rows, 70)
        library.product(form, packed, None, x[:num_rows], some)
        assert torch.equal(some, together[:num_rows])


@pytest.mark.parametrize("head_dim", [40, 64])
def test_attention(library: CpuLibrary, head_dim: int) -> None:
    problem = random_paged_problem(
        q_lens=[1, 1, 40], kv_lens=[300, 5, 290], num_heads=6, num_kv_heads=2, head_dim=head_dim
    )
    backend, kv = CpuBackend(library), problem.copy_of_kv()
    backend.plan(problem.batch)
    ours = backend.run(kv, problem.q, problem.k, problem.v, scale=problem.scale)
    exact = reference.paged_attention(problem.q, kv, problem.batch, scale=problem.scale)
    assert_no_worse(ours, plain=exact + 1e-6, exact=exact)


def test_operations(library: CpuLibrary) -> None:
    operations = cpu_operations(library)
    x, weight = torch.randn(5, 100), torch.randn(100)
    torch.testing.assert_close(operations.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(operations.silu_mul(x * 10), reference.silu_mul(x * 10))
    heads, cos = torch.randn(5, 3, 40), torch.randn(5, 20)
    torch.testing.assert_close(operations.rotary(heads, cos, cos), reference.rotary(heads, cos, cos))


def test_draws(library: CpuLibrary) -> None:
    """The same tokens as torch draws."""
    draw = torch.Generator().manual_seed(0)
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=1 << 40),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, presence_penalty=0.5),
    ):
        logits = torch.randn(20, 1001, generator=draw) * 3
        plain, compiled = Sampler(sampling_state(params)), CpuSampler(sampling_state(params), library)
        for _ in range(3):
            expected = plain.sample(logits.clone(), *COLUMNS).ids
            assert torch.equal(compiled.sample(logits.clone(), *COLUMNS).ids, expected)


COLUMNS = (np.arange(20, dtype=np.int32), np.arange(2, 22, dtype=np.int32))


def sampling_state(params: SamplingParams) -> SamplingState:
    state = SamplingState(max_running=20, vocab_size=1001, device=torch.device("cpu"))
    rows = range(20)
    state.start_rows([RowStart(Row(i), SequenceId(i), 0, [i, 7], 1, params, frozenset()) for i in rows])
    return state
