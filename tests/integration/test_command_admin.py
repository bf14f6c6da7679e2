"""`kvatlas admin` against a running server: every action, as words and as JSON, and how wrong usage ends."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvatlas.cli.__main__ import main
from kvatlas.client.errors import Cancelled, KvatlasError
from kvatlas.client.sync import Client

FAKE = ("--runner", "fake", "--model", "random:tiny", "--num-pages", "63", "--page-size", "4")
PROMPT = "a prefix of some pages, the same each time"


@pytest.fixture(scope="module")
def server(start_module_server: Any) -> Any:
    return start_module_server(*FAKE)


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `kvatlas admin` in this process: another one would only cost time."""

    def run(server: Any, *arguments: str) -> Done:
        capsys.readouterr()
        code = main(["admin", *arguments, "--admin-address", server.facts["admin_address"]])
        return Done(code, *capsys.readouterr())

    return run


def facts(admin: Command, server: Any, *arguments: str) -> Any:
    done = admin(server, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_prefix_is_pinned_listed_hit_and_let_go(server: Any, admin: Command) -> None:
    (pin,) = facts(admin, server, "pin", "greeting", "--text", PROMPT, "--ttl", "600")
    assert pin["pinned_pages"] > 0
    assert pin["computed_tokens"] > 0
    with Client(server.address) as client:
        prefix = client.generate(PROMPT + "!", max_tokens=1).usage.prefix
        assert prefix is not None
        assert prefix.hit_tokens == pin["pinned_tokens"]
    (listed,) = facts(admin, server, "pins")
    assert (listed["name"], listed["pinned_pages"]) == ("greeting", pin["pinned_pages"])
    assert "greeting" in admin(server, "pins").stdout
    done = admin(server, "unpin", "greeting")
    assert (done.returncode, done.stdout) == (0, "greeting: let go\n")
    again = admin(server, "unpin", "greeting")
    assert (again.returncode, again.stdout) == (0, "greeting: there was no such pin\n")
    assert facts(admin, server, "pins") == []


def test_a_limit_that_nobody_gave_leaves_out_pinned_pages_that_are_in_use(
    start_server: Any, hold: Any, wait_until: Any, admin: Command
) -> None:
    """They are no PINNED pages then, and it took what they hold for room: the request could never fit."""
    server = start_server(*FAKE, *hold.settings)
    facts(admin, server, "pin", "greeting", "--text", PROMPT)
    with Client(server.address) as client:
        running = client.stream(PROMPT + "!", max_tokens=100)
        next(iter(running))
        wait_until(lambda: client.load().workers[0].running_sequences == 1)
        assert client.page_pool().stats.pinned_pages == 0
        other = client.stream("another")
        next(iter(other))
        for stream in (other, running):
            stream.close()


def test_flush_drops_what_the_cache_holds(server: Any, admin: Command) -> None:
    with Client(server.address) as client:
        client.generate(PROMPT, max_tokens=1)
        assert client.generate(PROMPT, max_tokens=1).usage.prefix.hit_tokens > 0  # type: ignore[union-attr]
        assert facts(admin, server, "flush")["freed_pages"] > 0
        assert client.generate(PROMPT, max_tokens=1).usage.prefix.hit_tokens == 0  # type: ignore[union-attr]
    done = admin(server, "flush", "--tenant", "nobody")
    assert (done.returncode, done.stdout) == (0, "0 pages freed\n")


def test_a_level_is_set_and_a_wrong_one_is_wrong_usage(server: Any, admin: Command) -> None:
    done = admin(server, "log-level", "warning", "--logger", "service.run", "--seconds", "1")
    assert (done.returncode, done.stdout) == (0, "service: warning\n")
    done = admin(server, "log-level", "loud")
    assert done.returncode == 2
    assert "'loud' is none of debug, info, warning, error" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "what to do is one of drain, undrain, flush"),
        (("dance",), "admin dance: what to do is one of"),
        (("pin", "x"), "--text says which prefix"),
        (("unpin",), "the name of the pin is missing"),
        (("cancel",), "an id, --principal or --label says which"),
        (("cancel", "--label", "x"), "--label 'x' is not KEY=VALUE"),
        (("drain", "worker-0"), "admin drain: takes no subject, and got 'worker-0'"),
        (("drain", "--worker-id", "worker-0"), "admin drain: acts on the service, --worker-id is not for it"),
        (("cancel", "x", "--worker-id", "worker-0"), "admin cancel: acts on the service"),
    ],
)
def test_wrong_usage_is_told_without_a_call(
    server: Any, admin: Command, arguments: tuple[str, ...], sentence: str
) -> None:
    done = admin(server, *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("action", ["start", "list"])
def test_a_recording_where_none_is_taken_is_wrong_usage(
    action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", action, "noon", "--admin-address", "127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == f"kvatlas: record {action}: takes no recording, and got 'noon'\n"


def test_the_servers_refusal_is_the_commands_exit_code(server: Any, admin: Command) -> None:
    done = admin(server, "flush", "--worker-id", "nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "WORKER_NOT_FOUND" in done.stderr


def test_the_load_is_told_once_and_pushed(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "--address", server.address]) == 0
    text = capsys.readouterr().out
    assert text.startswith("0 requests, of them waiting: 0")
    assert "worker-0 serving: 0 run, 0 wait" in text
    follow = ["load", "--watch", "-n", "3", "--interval", "0.1", "--json"]
    assert main([*follow, "--address", server.address]) == 0
    looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(looks) == 3
    for look in looks:
        (worker,) = look["workers"]
        assert (worker["state"], worker["total_pages"]) == ("serving", 63)


def test_an_operator_cancels_a_request_profiles_and_drains(
    start_server: Any, admin: Command, hold: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    server = start_server(*FAKE, *hold.settings)
    ended: list[KvatlasError] = []

    def read() -> None:
        with Client(server.address) as client:
            try:
                list(client.stream("hi", max_tokens=hold.tokens, ignore_eos=True, labels={"set": "7"}))
            except KvatlasError as error:
                ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    with Client(server.address) as client:
        wait_until(lambda: client.load().workers[0].running_sequences, "the request to run")
        path = tmp_path / "steps.pstats"
        profile = admin(server, "profile", "--steps", "3", "-o", str(path))
        assert (profile.returncode, profile.stdout) == (0, f"{path}: 3 steps\n"), profile.stderr
        assert path.stat().st_size > 0
        cancelled = facts(admin, server, "cancel", "--label", "set=7", "--reason", "a test")["cancelled_ids"]
        assert len(cancelled) == 1
    reader.join(60)
    assert isinstance(ended[0], Cancelled)
    assert ended[0].reason == "CANCELLED_BY_OPERATOR"
    assert facts(admin, server, "drain", "--grace", "1")["running_requests"] == 0
    assert server.process.wait(60) == 0, server.log()  # the service's end is everybody's
    assert "event=drained" in server.log()
