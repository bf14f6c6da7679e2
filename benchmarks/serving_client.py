"""A client process of benchmarks/serving.py: opens streams at their times and notes when tokens come.

Each line of its input names a file with an order; it writes the answer beside it, with the suffix .answer,
and prints a line. Ends with its input. Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a
machine share.

    order   {"addresses": [...], "start": seconds, "pause": seconds or null,
             "requests": [{"at": s, "prompt": [ids], "tokens": n}, ...]}
             pause: every request waits for the one before it and then so long
    answer  [{"sent": ns, "times": [ns of each message], "counts": [tokens of each message]}, ...]
"""

import asyncio
import gc
import json
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.workloads import TEMPERATURE
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc

STREAMS_PER_CHANNEL = 32
CALL_SECONDS = 60.0  # then a case has failed


async def run(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Sends all requests of an order, each at its time; answers in their order."""
    requests = order["requests"]
    async with AsyncExitStack() as stack:
        stubs = []
        for number in range(max(len(order["addresses"]), -(-len(requests) // STREAMS_PER_CHANNEL))):
            address = order["addresses"][number % len(order["addresses"])]
            channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
            await stack.enter_async_context(channel)
            await channel.channel_ready()
            stubs.append(generation_pb2_grpc.GenerationServiceStub(channel))
        start, pause = order["start"], order["pause"]
        if pause is not None:
            await asyncio.sleep(max(0.0, start - time.monotonic()))
            return [await _stream(stubs[0], request, time.monotonic() + pause) for request in requests]
        calls = [
            _stream(stubs[number % len(stubs)], request, start + request["at"])
            for number, request in enumerate(requests)
        ]
        return await asyncio.gather(*calls)


async def _stream(stub: Any, request: dict[str, Any], due: float) -> dict[str, Any]:
    message = pb.StreamGenerateRequest()
    message.spec.token_ids.ids.extend(request["prompt"])
    message.spec.sampling.temperature = TEMPERATURE
    message.spec.sampling.seed = request["seed"]
    message.spec.stop.max_tokens = request["tokens"]
    message.spec.stop.ignore_eos = True
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    times: list[int] = []
    counts: list[int] = []
    sent = time.monotonic_ns()
    call = stub.StreamGenerate(message, timeout=CALL_SECONDS)
    while (answer := await call.read()) is not grpc.aio.EOF:
        if answer.HasField("delta"):
            times.append(time.monotonic_ns())
            counts.append(answer.delta.token_count)
    assert sum(counts) == request["tokens"], f"{sum(counts)} tokens instead of {request['tokens']}"
    return {"sent": sent, "times": times, "counts": counts}


def main() -> None:
    """Serves orders until the input ends."""
    gc.disable()  # a client's pause would count as the server's
    for line in sys.stdin:
        path = Path(line.strip())
        answers = uvloop.run(run(json.loads(path.read_text())))
        # Through a file: a pipe that an event loop has left non-blocking loses what does not fit.
        path.with_suffix(".answer").write_text(json.dumps(answers))
        print(flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
