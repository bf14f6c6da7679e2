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
from grpc.experimental import ChannelOptions

from benchmarks.workloads import TEMPERATURE
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc

STREAMS_PER_CHANNEL = 32
CALL_SECONDS = 60.0  # then a case has failed


def run(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Sends all requests of an order, each at its time; answers in their order."""
    if order["pause"] is not None:
        return _one_by_one(order["addresses"][0], order["requests"], order["start"], order["pause"])
    return uvloop.run(_all_at_once(order["addresses"], order["requests"], order["start"]))


def _one_by_one(
    address: str, requests: list[dict[str, Any]], start: float, pause: float
) -> list[dict[str, Any]]:
    """Over one connection, on the caller's own thread: no thread of the client stands before a token."""
    answers = []
    options = [(ChannelOptions.SingleThreadedUnaryStream, 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        grpc.channel_ready_future(channel).result(CALL_SECONDS)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        time.sleep(max(0.0, start - time.monotonic()))
        for request in requests:
            message = _message(request)
            time.sleep(pause)
            sent = time.monotonic_ns()
            call = stub.StreamGenerate(message, timeout=CALL_SECONDS)
            came = [(time.monotonic_ns(), answer) for answer in call]
            answers.append(_answer(request, sent, came))
    return answers


async def _all_at_once(
    addresses: list[str], requests: list[dict[str, Any]], start: float
) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        stubs = []
        for number in range(max(len(addresses), -(-len(requests) // STREAMS_PER_CHANNEL))):
            address = addresses[number % len(addresses)]
            channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
            await stack.enter_async_context(channel)
            await channel.channel_ready()
            stubs.append(generation_pb2_grpc.GenerationServiceStub(channel))
        calls = [
            _stream(stubs[number % len(stubs)], request, start) for number, request in enumerate(requests)
        ]
        return await asyncio.gather(*calls)


async def _stream(stub: Any, request: dict[str, Any], start: float) -> dict[str, Any]:
    message = _message(request)
    await asyncio.sleep(max(0.0, start + request["at"] - time.monotonic()))
    sent = time.monotonic_ns()
    call = stub.StreamGenerate(message, timeout=CALL_SECONDS)
    came = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        came.append((time.monotonic_ns(), answer))
    return _answer(request, sent, came)


def _message(request: dict[str, Any]) -> pb.StreamGenerateRequest:
    message = pb.StreamGenerateRequest()
    message.spec.token_ids.ids.extend(request["prompt"])
    message.spec.sampling.temperature = TEMPERATURE
    message.spec.sampling.seed = request["seed"]
    message.spec.stop.max_tokens = request["tokens"]
    message.spec.stop.ignore_eos = True
    return message


def _answer(
    request: dict[str, Any], sent: int, came: list[tuple[int, pb.StreamGenerateResponse]]
) -> dict[str, Any]:
    deltas = [(at, message.delta.token_count) for at, message in came if message.HasField("delta")]
    tokens = sum(count for _, count in deltas)
    assert tokens == request["tokens"], f"{tokens} tokens instead of {request['tokens']}"
    return {"sent": sent, "times": [at for at, _ in deltas], "counts": [count for _, count in deltas]}


def main() -> None:
    """Serves orders until the input ends."""
    gc.disable()  # a client's pause would count as the server's
    for line in sys.stdin:
        path = Path(line.strip())
        answers = run(json.loads(path.read_text()))
        # Through a file: a pipe that an event loop has left non-blocking loses what does not fit.
        path.with_suffix(".answer").write_text(json.dumps(answers))
        print(flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
