"""What decode attention is compiled to for an H200: how many programs fit, and what they ask for early."""

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

# Prints of each launch: programs a multiprocessor that it counts on, that its registers and its shared memory
# let fit, whether K and V are asked for before the wait for the product, and whether the next kernel may
# begin only behind a program's last turn. Beside another group of rows twice as many programs are to fit.
PROGRAM = """
import dataclasses, re, subprocess, tempfile
import torch
from triton import knobs
from kernels import dependent_launch, fp8, launcher
from kernels.batch import KvLayer
from kernels.decode_plan import BESIDE
from kernels.testing_decode import DecodeProblem
from kernels.testing_driver import AbsentGpu

gpu = AbsentGpu()
dependent_launch._is_supported = lambda device: True

def registers(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\\d+)", said)[1])

def describe(rows, attend, shape=(32, 8, 128), is_fp8=False, launch=None):
    launcher._compiled.clear()
    problem = DecodeProblem(shape, 16, [40] * rows, with_norm=True, dtype=torch.bfloat16)
    kv = problem.kv
    if is_fp8:
        kv = KvLayer(fp8.to_fp8(kv.k, 0.02), fp8.to_fp8(kv.v, 0.02), 0.02, 0.02)
    plan = dataclasses.replace(problem.plan(launch), multiprocessors=132)
    with dependent_launch.dependent_launches():
        attend(problem, kv, plan)
    (kernel,) = (one for one in launcher._compiled.values() if one.name == "_decode_kernel")
    per_warp = -(-registers(kernel.asm["cubin"]) * 32 // 256) * 256
    by_registers = 65536 // (per_warp * kernel.metadata.num_warps)
    by_memory = 228 * 1024 // (kernel.metadata.shared + 1024)
    ptx = kernel.asm["ptx"]
    is_early = ptx.index("cp.async") < ptx.index("griddepcontrol.wait")
    # What is read early must not come out of the multiprocessor's own cache.
    assert not is_early or "cp.async.ca" not in ptx
    is_late = ptx.rindex("mma") < ptx.index("griddepcontrol.launch_dependents")
    counted = plan.launch_of(rows, 2 * shape[2]).programs_per_sm * (2 if launch else 1)
    print(counted, by_registers, by_memory, is_early, is_late)

for rows in (1, 4, 8, 16):
    describe(rows, DecodeProblem.by_one)
describe(1, DecodeProblem.by_one, is_fp8=True)
for rows in (1, 8):
    describe(rows, DecodeProblem.by_two_kernels)
describe(8, DecodeProblem.by_two_kernels, (16, 1, 256))
describe(64, DecodeProblem.by_one, (16, 8, 128), launch=BESIDE)
"""


@pytest.mark.slow
def test_as_many_programs_fit_as_a_launch_counts_on_and_the_product_is_waited_for_late(
    run_on_absent_gpu: Callable[[str], list[str]],
) -> None:
    """A program too many for its multiprocessor is a second wave, also where it has no tile."""
    early, late = [], []
    for line in run_on_absent_gpu(PROGRAM):
        counted, by_registers, by_memory, is_early, is_late = line.split()
        assert int(counted) <= int(by_registers)
        assert int(counted) <= int(by_memory)
        early.append(is_early)
        late.append(is_late)
    assert early == [*["True"] * 4, *["False"] * 4, "True"]
    assert late == [*["False"] * 8, "True"]
