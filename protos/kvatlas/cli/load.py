"""`kvatlas load`: how busy a service and its workers are, once or as the service tells it."""

import json
from argparse import Namespace
from contextlib import closing
from typing import Any

from kvatlas.cli.connecting import connect
from kvatlas.cli.counted import counted
from kvatlas.cli.exits import DONE
from kvatlas.client.sync import Client
from kvatlas.v1 import server_pb2

RECONNECT_SECONDS = 30.0


def run(settings: Namespace) -> int:
    """One look, or looks until Ctrl-C."""
    with connect(settings) as client:
        if settings.watch:
            _follow(client, settings)
        else:
            _tell(client.load(), settings)
    return DONE


def _follow(client: Client, settings: Namespace) -> None:
    loads = client.watch_load(interval_seconds=settings.interval, reconnect_seconds=RECONNECT_SECONDS)
    try:
        with closing(loads):
            for number, load in enumerate(loads, start=1):
                _tell(load, settings)
                if number == settings.count:
                    return
    except KeyboardInterrupt:
        pass  # the way to leave


def _tell(load: server_pb2.Load, settings: Namespace) -> None:
    if settings.json:
        print(json.dumps(as_json(load)), flush=True)
        return
    wait = f", a new one waits {_wait(load):.1f} s" if load.HasField("estimated_wait") else ""
    print(f"{counted(load.active_requests, 'request')}, of them waiting: {load.waiting_requests}{wait}")
    for worker in load.workers:
        print(f"  {_line(worker)}", flush=True)


def _line(worker: server_pb2.WorkerLoad) -> str:
    return (
        f"{worker.worker_id} {_state(worker)}: {worker.running_sequences} run, {worker.waiting_requests} wait"
        f" · {worker.available_pages:,} of {worker.total_pages:,} pages to be had"
        f" · tokens/s {worker.output_tokens_per_second:.1f} out, {worker.prompt_tokens_per_second:.1f} in"
        f" · step {worker.mean_step_time.ToNanoseconds() / 1e6:.1f} ms"
        f" · prefix hits {worker.prefix_hit_rate:.0%}"
    )


def as_json(load: server_pb2.Load) -> dict[str, Any]:
    """The same as plain values; what is unknown is null."""
    return {
        "active_requests": load.active_requests,
        "waiting_requests": load.waiting_requests,
        "estimated_wait_seconds": _wait(load) if load.HasField("estimated_wait") else None,
        "workers": [
            {
                "worker_id": worker.worker_id,
                "state": _state(worker),
                "running_sequences": worker.running_sequences,
                "waiting_requests": worker.waiting_requests,
                "waiting_uncached_tokens": worker.waiting_uncached_tokens,
                "available_pages": worker.available_pages,
                "total_pages": worker.total_pages,
                "output_tokens_per_second": worker.output_tokens_per_second,
                "prompt_tokens_per_second": worker.prompt_tokens_per_second,
                "prefix_hit_rate": worker.prefix_hit_rate,
                "mean_step_seconds": worker.mean_step_time.ToNanoseconds() / 1e9,
            }
            for worker in load.workers
        ],
    }


def _state(worker: server_pb2.WorkerLoad) -> str:
    return server_pb2.ServerState.Name(worker.state).removeprefix("SERVER_STATE_").lower()


def _wait(load: server_pb2.Load) -> float:
    return float(load.estimated_wait.ToNanoseconds() / 1e9)
