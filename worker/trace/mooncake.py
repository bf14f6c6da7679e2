"""The public Mooncake trace format as input of what-if.

JSON lines with `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and `hash_ids`: one id
for each block of 512 prompt tokens, the same where the whole prefix is; the last block may be partly full.
Source: Mooncake (FAST 25), github.com/kvcache-ai/Mooncake, FAST25-release/README.md.

It says nothing of the worker: pool, limits and step times are the caller's assumptions.
"""

import json
import math
from array import array
from collections.abc import Sequence
from pathlib import Path

from worker.trace.step_time import StepTime
from worker.trace.workload import Limits, Output, Trace, TraceRequest

BLOCK_TOKENS = 512
ASSUMED_STEP = StepTime(base=0.008, per_prompt_token=25e-6, per_sequence=20e-6, per_context_token=8e-9)
"""Of a large model on one GPU: 25 ms for 1,000 prompt tokens, 10 ms for 100 sequences."""


class BadTrace(Exception):
    """A line that is not of this format; says which."""


def load(
    path: Path, *, num_pages: int, page_size: int = 16, max_running: int = 512, max_step_tokens: int = 8192
) -> Trace:
    """Reads a trace. Output is nobody's prefix: the format has no ids for it. Raises BadTrace, OSError."""
    requests, keys = [], _Keys()
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines):
            if line.strip():
                requests.append(_request(line, number, keys))
    if not requests:
        raise BadTrace("it has no requests")
    requests.sort(key=lambda request: request.arrival)
    first = requests[0].arrival
    requests = [_later(request, -first) for request in requests]
    longest = max(request.num_prompt + request.max_tokens for request in requests)
    return Trace(
        requests=requests,
        granularity=BLOCK_TOKENS,
        page_size=page_size,
        num_pages=num_pages,
        policy="lru",
        limits=Limits(
            max_running=max_running,
            max_step_tokens=max(max_step_tokens, max_running + 1),
            max_context_tokens=longest + 1,
        ),
        seconds=requests[-1].arrival,
        name=path.name,
    )


class _Keys:
    """Keys of whole prefixes, also where an id stands for its block alone."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}  # by key before it and id

    def of(self, hash_ids: Sequence[int]) -> "array[int]":
        """One for each block, the same where all blocks so far are."""
        found, above = array("Q"), -1
        for each in hash_ids:
            above = self._known.setdefault((above, each), len(self._known))
            found.append(above)
        return found


def _request(line: str, number: int, keys: _Keys) -> TraceRequest:
    try:
        record = json.loads(line)
        arrival = float(record["timestamp"]) / 1000
        num_prompt, num_output = int(record["input_length"]), int(record["output_length"])
        ids = [int(each) for each in record["hash_ids"]]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise BadTrace(f"line {number + 1}: {type(error).__name__}: {error}") from None
    if num_prompt < 1 or num_output < 0 or not 0 <= arrival < math.inf:  # JSON of Python's has NaN as well
        raise BadTrace(
            f"line {number + 1}: {num_prompt} prompt and {num_output} output tokens at {arrival:g} s"
        )
    if len(ids) < num_prompt // BLOCK_TOKENS:
        raise BadTrace(f"line {number + 1}: {len(ids)} hash_ids for {num_prompt} tokens")
    return TraceRequest(
        arrival=arrival,
        num_prompt=num_prompt,
        max_tokens=max(1, num_output),
        keys=keys.of(ids[: num_prompt // BLOCK_TOKENS]),  # of the blocks that are full
        outputs=(Output(max(1, num_output), array("Q")),),
    )


def _later(request: TraceRequest, seconds: float) -> TraceRequest:
    return TraceRequest(
        arrival=request.arrival + seconds,
        num_prompt=request.num_prompt,
        max_tokens=request.max_tokens,
        keys=request.keys,
        outputs=request.outputs,
    )
