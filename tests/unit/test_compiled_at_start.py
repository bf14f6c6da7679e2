"""A kernel that requests need is asked for by the start: compiled later it would hold every stream up.

Steps of random mixes go through the runner as if it were on an H200; launches are bound as Triton binds them,
and none is run.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

import random
from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import dependent_launch, prefill_plan, static_prefill, triton_backend
from kernels.decode_plan import make_plan
from kernels.invariant_backend import InvariantBackend
from kernels.testing_keys import MULTIPROCESSORS, LaunchKeys, launches_recorded
from kernels.triton_backend import TritonBackend
from tests.toy_runners import sizes_for
from worker.execution.cuda_runner import CudaRunner
from worker.execution.torch_runner import BrokenHandle
from worker.execution.warm_steps import warm_steps
from worker.ids import Row, SequenceId
from worker.model.toy import toy_config, toy_model
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import RowStart, Step

CPU = torch.device("cpu")
CONTEXT, PAGE_SIZE = 4096, 16
CONFIG = toy_config(has_qk_norm=True)
PLAIN = SamplingParams(max_tokens=4, stop_at_eos=False)
FILTERED = SamplingParams(max_tokens=4, temperature=0.9, top_k=5, seed=1)
ASKING = SamplingParams(max_tokens=4, logprobs=2)
EDITED = SamplingParams(max_tokens=4, presence_penalty=0.5)
PARAMS = ((PLAIN,), (PLAIN, FILTERED), (PLAIN, FILTERED, ASKING), (PLAIN, EDITED), (FILTERED, EDITED, ASKING))


@pytest.fixture(autouse=True)
def as_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    def programs(device: torch.device) -> int:
        return 2 * MULTIPROCESSORS

    def plan(*arguments, **options):
        return replace(make_plan(*arguments, **options), multiprocessors=MULTIPROCESSORS)

    monkeypatch.setattr(dependent_launch, "_is_supported", lambda device: True)
    monkeypatch.setattr(prefill_plan, "resident_programs", programs)
    monkeypatch.setattr(static_prefill, "resident_programs", programs)
    monkeypatch.setattr(triton_backend, "make_plan", plan)


def new_runner(max_running: int, max_step_tokens: int, *, is_invariant: bool = False) -> CudaRunner:
    config = sizes_for(
        CONFIG,
        max_running=max_running,
        max_context=CONTEXT,
        num_pages=CONTEXT // PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_dtype=torch.bfloat16,
        max_step_tokens=max_step_tokens,
    )
    heads = (CONFIG.num_heads, CONFIG.num_kv_heads)
    backend = TritonBackend(*heads, CONFIG.head_dim, CONTEXT)
    if is_invariant:
        backend = InvariantBackend(*heads)
    return CudaRunner(toy_model(CONFIG, dtype=torch.bfloat16), backend, config, CPU)


def asked_at_start(runner: CudaRunner, max_running: int, max_step_tokens: int) -> LaunchKeys:
    keys = LaunchKeys()
    width = runner.page_table.slots.shape[1]
    limits = {"max_step_tokens": max_step_tokens, "max_running": max_running}
    steps = warm_steps(**limits, max_context=width, dummy_row=max_running)
    with launches_recorded(keys), torch.inference_mode():
        for run in runner.kernel_groups(steps):
            run()
    return keys


def mixes(count: int, max_running: int, max_step_tokens: int, seed: int) -> Iterator[Step]:
    """Decodes and prompts, some cached in part, some cut; few and many of both; all kinds of draws."""
    numbers = random.Random(seed)
    for number in range(count):
        most = min(max_running, max_step_tokens)
        num_decode = min(numbers.choice([0, 0, 1, 2, 4, 5, numbers.randint(1, 64), most]), most)
        spans = [(end - 1, end) for end in numbers.choices(range(2, CONTEXT), k=num_decode)]
        room = max_step_tokens - num_decode
        for _ in range(
            min(numbers.choice([0, 1, 1, 2, 3, numbers.randint(1, 40)]), max_running - num_decode)
        ):
            length = min(room, numbers.choice([1, numbers.randint(1, 40), numbers.randint(1, 2000)]))
            start = numbers.choice([0, 0, PAGE_SIZE * numbers.randint(0, 100), CONTEXT - length])
            if length > 0:
                spans.append((start, start + length))
                room -= length
        if spans:
            yield mix(number, spans, num_decode, max_running, numbers)


def mix(
    number: int, spans: list[tuple[int, int]], num_decode: int, max_running: int, numbers: random.Random
) -> Step:
    rows = numbers.sample(range(max_running), len(spans))
    starts = [
        RowStart(
            Row(row),
            SequenceId(row),
            0,
            [1] * end,
            end,
            numbers.choice(PARAMS[number % len(PARAMS)]),
            frozenset(),
        )
        for row, (_, end) in zip(rows, spans, strict=True)
    ]
    return Step(
        number=number,
        sequence_ids=[SequenceId(row) for row in rows],
        rows=array("i", rows),
        starts=array("i", [start for start, _ in spans]),
        ends=array("i", [end for _, end in spans]),
        sampled=tuple(i for i in range(len(spans)) if i < num_decode or numbers.random() < 0.8),
        num_decode=num_decode,
        row_starts=starts,
    )


@pytest.mark.parametrize(
    ("max_running", "max_step_tokens", "is_invariant"),
    [(64, 1024, False), (40, 64, False), (3, 512, False), (40, 512, True), (131, 4096, False)],
)
def test_no_mix_of_decodes_and_prompts_needs_a_kernel_that_the_start_did_not_ask_for(
    max_running: int, max_step_tokens: int, is_invariant: bool
) -> None:
    """A few decodes beside a prompt once had attention compiled for 0.4 s while all streams waited. Of 131
    neither the halves are powers of two nor is the room beside prompts a multiple of 16 bytes.
    """
    runner = new_runner(max_running, max_step_tokens, is_invariant=is_invariant)
    asked = asked_at_start(runner, max_running, max_step_tokens)
    used = LaunchKeys()
    with launches_recorded(used):
        for step in mixes(60, max_running, max_step_tokens, seed=5):
            handle = runner.launch(step)
            assert not isinstance(handle, BrokenHandle), handle.result()
    assert used.missing_in(asked) == []
    kernels = {parts["kernel"] for parts in used.seen.values()}
    assert len(kernels) >= 6, f"steps launched {sorted(kernels)} alone"


def test_beside_a_library_no_graph_of_decode_steps_is_the_first_to_need_a_kernel() -> None:
    """The draw with filters was compiled in the capture of the first batch that had any."""
    runner = new_runner(64, 1024)
    asked, used = LaunchKeys(), LaunchKeys()
    with torch.inference_mode():
        with launches_recorded(asked):
            runner.run_bodies()
        with launches_recorded(used):
            for size in runner.graphs.sizes:
                runner.graphs.body(size, True)
                runner.graphs.body(size, False)
    assert used.missing_in(asked) == []
    draws = {parts["HAS_FILTERS"] for parts in used.seen.values() if "HAS_FILTERS" in parts}
    assert len(draws) == 2


def test_a_key_knows_alignment_and_kinds_of_numbers() -> None:
    """What Triton compiles anew is another key, or the test above would show nothing."""
    from kernels.rms_norm import rms_norm

    values, weight = torch.zeros(4 * 64 + 1), torch.ones(64)
    keys, others = LaunchKeys(), LaunchKeys()
    with launches_recorded(keys):
        rms_norm(values[: 4 * 64].view(4, 64), weight, 1e-6)
        rms_norm(values[: 2 * 64].view(2, 64), weight, 1e-6)  # the same kernel
    with launches_recorded(others):
        rms_norm(values[1:].view(4, 64), weight, 1e-6)
    assert len(keys.seen) == len(others.seen) == 1
    [difference] = others.missing_in(keys)
    assert "kernels.rms_norm._norm_kernel: " in difference
    assert "'D') -> ('*fp32', " in difference
