"""What benchmarks/suite.py runs: the GPU tests, memcheck and all measurements, each with its limit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SHAPES = {"0.6b": "random:qwen3-0.6b", "8b": "random:llama-3.1-8b"}
VARIANTS = "kvatlas kvatlas_fp8_weights kvatlas_fp8_pages kvatlas_fp8 kvatlas_deterministic"
PYTEST = "python -m pytest -v --tb=short -p no:cacheprovider --timeout 0 --maxfail 5"
# As `make memcheck`: a read past a tensor would hit the next one of the caching allocator.
MEMCHECK = (
    "env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no"
    " --target-processes all --error-exitcode 9 --launch-timeout 0"
)
EAGER = "not graph and not captured and not chain"  # graphs need the caching allocator
TESTS = Path(__file__).resolve().parents[1] / "tests" / "gpu"
# The longest first, so that none begins last.
KERNEL_TESTS = (
    "attention",
    "sample_kernel",
    "decode_product",
    "small_kernels",
    "cluster_decode",
    "dependent_launch",
    "paged_cuda",
    "decode_stretches",
    "ring_product",
    "hand_overs",
    "sliced_product",
    "row_groups",
)
MEMCHECKED = (
    "attention",
    "cluster_decode",
    "decode_product",
    "decode_stretches",
    "ring_product",
    "sample_kernel",
    "sliced_product",
    "small_kernels",
)
LONG_ENGINE_TESTS = ("engine", "fp8")


@dataclass(frozen=True, slots=True)
class Stage:
    """Commands by name, `at_once` of them at a time; seconds it takes on one H200 and may take."""

    name: str
    commands: Mapping[str, str]
    usual_s: int
    limit_s: int
    at_once: int = 1


def stages(
    peers: Sequence[str] = ("vllm",), sites: Sequence[str] = (), beside: str = ""
) -> tuple[Stage, ...]:
    """All, in an order that lets what takes longest begin early.

    `peers`: the engines beside ours, and `sites` where their packages are, as benchmarks.peers takes them;
    `beside`: what else the host does meanwhile, for the files.
    """
    found = [
        *(_of_engines("peers", size, ["kvatlas", *peers], 270, sites, beside) for size in reversed(SHAPES)),
        _tests("tests-engine", _engine_tests(), 300, at_once=4),  # some take most of the device's memory
        _tests("tests-kernels", KERNEL_TESTS, 170, at_once=6),
        Stage("memcheck", {f"memcheck-{test}": _memcheck(test) for test in MEMCHECKED}, 400, 590, 4),
        _alone("serving", f"serving --model {SHAPES['0.6b']}", 150, 300),
    ]
    found += [_alone(f"startup-{size}", f"startup --model {SHAPES[size]}", 60, 150) for size in SHAPES]
    usual = {"0.6b": 140, "8b": 310}
    found += [_of_engines("variants", size, VARIANTS.split(), usual[size], sites, beside) for size in SHAPES]
    found += [
        _alone("observation", f"observation --device cuda --model {SHAPES['0.6b']} --rounds 6", 110, 240),
        _alone("decode-attention", "kernels.paged_decode", 45, 120),
        _alone("backends", "kernels.backends", 150, 300),
    ]
    return tuple(found)


def _engine_tests() -> list[str]:
    """All that are not of kernels."""
    there = {path.stem.removeprefix("test_").removesuffix("_gpu") for path in TESTS.glob("test_*_gpu.py")}
    return [*LONG_ENGINE_TESTS, *sorted(there - {*LONG_ENGINE_TESTS, *KERNEL_TESTS})]


def _file(test: str) -> str:
    return f"tests/gpu/test_{test}_gpu.py"


def _tests(name: str, tests: Iterable[str], usual_s: int, at_once: int) -> Stage:
    commands = {f"{name}-{test}": f"{PYTEST} -m gpu {_file(test)}" for test in tests}
    return Stage(name, commands, usual_s, 590, at_once)


def _memcheck(test: str) -> str:
    return f"{MEMCHECK} {PYTEST} -m 'gpu and not slow' -k '{EAGER}' {_file(test)}"


def _alone(name: str, command: str, usual_s: int, limit_s: int) -> Stage:
    return Stage(name, {name: f"python -m benchmarks.{command}"}, usual_s, limit_s)


def _of_engines(
    kind: str, size: str, engines: Sequence[str], usual_s: int, sites: Sequence[str], beside: str
) -> Stage:
    options = [f"--site {site}" for site in sites if site.partition("=")[0] in engines]
    if beside:
        options.append(f'--also-running "{beside}"')
    command = " ".join(["peers --compare", SHAPES[size], *engines, *options])
    return _alone(f"{kind}-{size}", command, usual_s, min(590, 2 * usual_s))
