"""Python clients against a server with a fake runner: both classes say the same, and every example runs."""

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from kvatlas.client.aio import AsyncClient
from kvatlas.client.errors import Cancelled, Refused
from kvatlas.client.request import Message
from kvatlas.client.sync import Client
from kvatlas.free_ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples" / "python").glob("*.py"))

# A call, and what of its answer is the same whenever it is asked.
CALLS: list[tuple[str, dict[str, Any], Callable[[Any], Any]]] = [
    ("generate", {"prompt": "The sky", "max_tokens": 4, "temperature": 0.0}, lambda a: a.choices[0].text),
    ("chat", {"messages": [Message("user", "Hello!")], "max_tokens": 4, "seed": 3}, lambda a: a.text),
    ("cancel", {"request_ids": ["nobody"]}, lambda a: list(a.unknown_ids)),
    ("tokenize", {"prompt": "one two", "include_offsets": True}, lambda a: a),
    ("detokenize", {"token_ids": [5, 6, 7]}, lambda a: a),
    ("server_info", {}, lambda a: (a.version, [each.worker_id for each in a.workers])),
    ("models", {}, lambda a: [each.model_id for each in a]),
    ("load", {}, lambda a: [each.worker_id for each in a.workers]),
    ("page_pool", {}, lambda a: a.geometry.page_count),
    ("page", {"page_id": 3, "event_limit": 0}, lambda a: a.state),
    ("sequences", {"max_results": 5}, lambda a: len(a.sequences) < 5),  # one may just be ending
    ("page_map", {}, lambda a: (a.page_count, sorted(a.planes))),
]


def public(kind: type) -> dict[str, inspect.Signature]:
    return {name: inspect.signature(value) for name, value in vars(kind).items() if not name.startswith("_")}


def test_both_clients_have_the_same_methods_with_the_same_parameters() -> None:
    ours, theirs = public(Client), public(AsyncClient)
    assert ours.keys() == theirs.keys()
    for name, signature in ours.items():
        assert list(signature.parameters.values()) == list(theirs[name].parameters.values()), name
    watched = {"stream", "watch_load", "watch_pages", "check_integrity", "close"}
    assert ours.keys() == watched | {name for name, _, _ in CALLS}


def test_both_clients_are_answered_alike(fake_server: Any) -> None:
    with Client(fake_server.address) as client:
        said = {name: read(getattr(client, name)(**given)) for name, given, read in CALLS}

    async def ask() -> dict[str, Any]:
        async with AsyncClient(fake_server.address) as client:
            return {name: read(await getattr(client, name)(**given)) for name, given, read in CALLS}

    assert asyncio.run(ask()) == said
    assert said["page_map"][0] == said["page_pool"] > 1
    assert said["cancel"] == ["nobody"]


def test_both_clients_watch_and_check(fake_server: Any) -> None:
    def checked_pages(client: Client) -> int:
        while True:  # one check a second is allowed
            try:
                return client.check_integrity().checked_pages
            except Refused as refusal:
                if refusal.reason != "QUOTA_EXCEEDED":
                    raise

    async def watch() -> tuple[int, int]:
        async with AsyncClient(fake_server.address) as client:
            async with aclosing(client.watch_load(interval_seconds=0.1)) as loads:
                first, second = await anext(loads), await anext(loads)
                assert [len(each.workers) for each in (first, second)] == [1, 1]
            async with aclosing(client.watch_pages()) as maps:
                return (await anext(maps)).page_count, (await client.page_pool()).geometry.page_count

    with Client(fake_server.address) as client:
        loads = client.watch_load(interval_seconds=0.1)
        assert [len(next(loads).workers) for _ in range(2)] == [1, 1]
        loads.close()
        count = client.page_pool().geometry.page_count
        assert checked_pages(client) == count - 1
    assert asyncio.run(watch()) == (count, count)


def test_a_watch_whose_async_client_is_closed_says_so_and_cancels_no_task(fake_server: Any) -> None:
    async def main() -> None:
        client = AsyncClient(fake_server.address)
        async with aclosing(client.watch_load(interval_seconds=60.0, reconnect_seconds=60.0)) as loads:
            await anext(loads)
            closing = asyncio.create_task(client.close())
            with pytest.raises(Cancelled, match="the client was closed"):
                await anext(loads)
            await closing

    asyncio.run(main())


def run_example(
    name: str, address: str, folder: Path, *arguments: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "python" / f"{name}.py"), address, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT / "protos"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize("example", [path.stem for path in EXAMPLES])
def test_every_example_runs_and_shows_its_token(example: str, guarded_server: Any, tmp_path: Path) -> None:
    arguments = ["3"] if example == "watch_pages" else []  # an idle server sends one message a second
    done = run_example(
        example, guarded_server.address, tmp_path, *arguments, KVATLAS_TOKEN=guarded_server.token
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout or list(tmp_path.iterdir()), "an example shows something"


def test_the_example_of_errors_says_what_was_wrong(guarded_server: Any, tmp_path: Path) -> None:
    unknown = run_example("errors", guarded_server.address, tmp_path, KVATLAS_TOKEN="nobody-s")
    assert unknown.stdout.splitlines() == ["BAD_CREDENTIALS: no valid credentials"] * 3, unknown.stderr
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    away = run_example("errors", nobody, tmp_path)
    assert away.stdout.count(f"given up: UNAVAILABLE: no server answers at {nobody}") == 3, away.stderr
