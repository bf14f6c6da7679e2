"""From the start of the processes to the first token: with an empty kernel cache, and the second time.

    python -m benchmarks.startup --model random:qwen3-0.6b        on a GPU
    python -m benchmarks.startup --model random:tiny --device cpu

Worker and service are started together, as `kvatlas serve` does; the first token is what a gRPC client has of
a prompt of 512 ids that is sent as soon as the service says that it serves. The timeline is made of both
processes' own log lines: a phase with its beginning and its length, anything else as a moment, all in seconds
after the start. Phases of threads lie beside those of the main thread.

The first start finds no compiled kernel and no bytecode, a later one finds what the one before has kept. With
`--bytecode as-is` Python does with bytecode what it does on this machine anyway.
"""

import argparse
import re
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc

from benchmarks.record import RESULTS, device_name, write_result
from benchmarks.stack import Stack, run_stack
from benchmarks.workloads import TEMPERATURE, fixed, id_limit
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc

KERNEL_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
PROMPT_TOKENS = 512
LINE = re.compile(r"(\S+)Z level=\w+ logger=\S+ event=(\w+) ?(.*)")


def first_token_seconds(stack: Stack, model: str) -> float:
    """Since the start of the stack."""
    message = pb.StreamGenerateRequest()
    message.spec.token_ids.ids.extend(fixed(1, PROMPT_TOKENS).within(id_limit(model)).prompts[0])
    message.spec.sampling.temperature = TEMPERATURE
    message.spec.stop.max_tokens = 4
    message.spec.stop.ignore_eos = True
    with grpc.insecure_channel(stack.addresses[0]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for answer in stub.StreamGenerate(message, timeout=120):
            if answer.HasField("delta"):
                return time.monotonic() - stack.began
    raise SystemExit("a stream without a token")


def timeline(process: str, log: str, start_ns: int) -> list[dict[str, Any]]:
    """What a process's log says of its start, in the order of the log; "at": where it began."""
    events: list[dict[str, Any]] = []
    for line in log.splitlines():
        if matched := LINE.match(line):
            stamp, event, pairs = matched.groups()
            moment = datetime.fromisoformat(stamp).replace(tzinfo=UTC).timestamp() - start_ns / 1e9
            if event == "phase":
                values = dict(re.findall(r"(phase|seconds)=(\S+)", pairs))
                seconds = float(values["seconds"])
                entry = {"at": round(moment - seconds, 2), "phase": values["phase"], "seconds": seconds}
            else:
                entry = {"at": round(moment, 2), "event": event}
            events.append({"process": process, **entry})
    return events


def table(start: dict[str, Any]) -> str:
    """A start as text: one line for a phase or event, in the order of their beginnings."""
    lines = [f"start {start['start']}"]
    for entry in start["timeline"]:
        length = f"{entry['seconds']:8.2f}" if "seconds" in entry else " " * 8
        lines.append(
            f"{entry['at']:8.2f}{length}  {entry['process']:8s} {entry.get('phase', entry.get('event'))}"
        )
    lines.append(f"{start['ready_seconds']:8.2f}          client   serving")
    lines.append(f"{start['first_token_seconds']:8.2f}          client   first token")
    return "\n".join(lines)


def bytecode_as_is() -> str:
    """What Python does with bytecode on this machine."""
    spec = find_spec("torch")
    has_some = spec is not None and spec.cached is not None and Path(spec.cached).exists()
    beside = "some beside torch" if has_some else "none beside torch"
    return f"as is: {beside}, {'not written' if sys.dont_write_bytecode else 'written where that can be'}"


def measure(
    model: str, settings: dict[str, Any], caches: Path, limit: float, bytecode: dict[str, str]
) -> dict[str, Any]:
    """One start; `bytecode`: what Python is told about it by its environment."""
    environment = {name: str(caches / name.lower()) for name in KERNEL_CACHES} | bytecode
    start_ns = time.time_ns()
    with run_stack(
        model,
        settings,
        ready_seconds=limit,
        worker_environment=environment,
        service_environment=bytecode,
        logs=caches,
    ) as stack:
        first_token = first_token_seconds(stack, model)
        ready = stack.ready_seconds
    events = [
        entry
        for process in ("worker", "service")
        for path in caches.glob(f"{process}*.log")
        for entry in timeline(process, path.read_text(errors="replace"), start_ns)
        if entry["at"] <= first_token
    ]
    return {
        "ready_seconds": round(ready, 2),
        "first_token_seconds": round(first_token, 2),
        "timeline": sorted(events, key=lambda entry: entry["at"]),
    }


def main() -> None:
    """Starts twice over one cache that is empty the first time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--bytecode", default="kept", choices=("kept", "as-is"))
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one start")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    settings = {"device": options.device, "max-running": 256, "max-context": 4096}
    settings |= {"memory-ratio": 0.8} if options.device == "cuda" else {"num-pages": 4096}
    starts = []
    kept = "kept" if options.bytecode == "kept" else bytecode_as_is()
    print(f"bytecode: {kept}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvatlas-start-") as caches:
        bytecode = {}
        if options.bytecode == "kept":  # in a folder of this run alone, empty at first
            bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{caches}/bytecode"}
        for number in range(options.starts):
            start = measure(options.model, settings, Path(caches), options.limit, bytecode)
            starts.append({"start": number + 1, **start})
            print(table(starts[-1]), flush=True)
    name = f"startup-{Path(options.model).name.removeprefix('random:').removesuffix('.gguf')}"
    device = device_name() if options.device == "cuda" else ""
    figures = {"bytecode": kept, "starts": starts}
    print(write_result(name, figures, ["torch", "triton"], options.results, device))


if __name__ == "__main__":
    main()
