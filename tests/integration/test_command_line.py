"""The `kvatlas` command against a running server: what it prints, how it ends, what it leaves behind."""

import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvatlas.client.errors import KvatlasError
from kvatlas.client.sync import Client

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "kvatlas.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
FAKE = ("--runner", "fake", "--model", "random:tiny", "--num-pages", "63")
WAIT_SECONDS = 120.0  # only ends a test that hangs

WaitUntil = Callable[..., None]


def kvatlas(*arguments: str, server: Any = None, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    address = ["--address", server.address] if server else []
    return subprocess.run(
        [*COMMAND, *arguments, *address],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env=ENVIRONMENT,
    )


def active_pages(server: Any) -> int:
    with Client(server.address) as client:
        return client.page_pool().stats.active_pages


# generate


def test_generate_streams_text_and_tells_what_it_took(fake_server: Any) -> None:
    done = kvatlas("generate", "hello there", "-n", "8", "--ignore-eos", server=fake_server)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert re.search(r"prompt \d+ tokens, \d+ of them from cached pages · answer 8 tokens", done.stderr)
    assert re.search(r"pages: \d+ at most", done.stderr)


def test_generate_reads_stdin_and_prints_json(fake_server: Any) -> None:
    flags = (
        "generate",
        "--json",
        "-n",
        "4",
        "-t",
        "0",
        "--ignore-eos",
        "--logprobs",
        "2",
        "--output",
        "both",
    )
    first = kvatlas(*flags, server=fake_server, stdin="a prompt\n")
    assert first.returncode == 0, first.stderr
    answer = json.loads(first.stdout)
    assert answer["usage"]["completion_tokens"] == 4
    assert len(answer["choices"][0]["token_ids"]) == len(answer["choices"][0]["logprobs"]) == 4
    assert answer["choices"][0]["logprobs"][0]["logprob"] <= 0
    second = kvatlas(*flags, server=fake_server, stdin="a prompt\n")
    assert json.loads(second.stdout)["choices"] == answer["choices"]


def test_json_is_the_same_where_the_output_is_not_utf_8(fake_server: Any) -> None:
    """Each letter that the encoding does not have was a question mark."""
    done = subprocess.run(
        [*COMMAND, "generate", "hi", "--json", "-n", "60", "--seed", "3", "--address", fake_server.address],
        env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    with Client(fake_server.address) as client:
        text = client.generate("hi", max_tokens=60, seed=3).text
    assert not text.isascii()
    assert json.loads(done.stdout)["choices"][0]["text"] == text


def test_generate_takes_token_ids_and_several_samples(fake_server: Any) -> None:
    flags = ("--token-ids", "--samples", "3", "-n", "3", "--seed", "7", "--ignore-eos")
    done = kvatlas("generate", "1, 2 3", *flags, server=fake_server)
    assert done.returncode == 0, done.stderr
    assert {line for line in done.stdout.splitlines() if line.startswith("---")} == {
        f"--- {index} (max_tokens)" for index in range(3)
    }


def test_a_refused_request_is_one_line_with_reason_and_path(fake_server: Any) -> None:
    done = kvatlas("generate", "x", "-t", "9", "--top-p", "3", server=fake_server)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "INVALID_FIELD" in done.stderr
    assert "spec.sampling.temperature" in done.stderr
    assert "spec.sampling.top_p" in done.stderr


def test_a_prompt_too_long_for_the_pool_is_refused_at_once(fake_server: Any) -> None:
    done = kvatlas("generate", "x" * 20_000, server=fake_server)
    assert done.returncode == 2
    assert re.search(r"PROMPT_TOO_LONG|EXCEEDS_PAGE_POOL", done.stderr)


@pytest.mark.parametrize("command", ["generate hi -n 200 --ignore-eos", "pages", "top -n 500 --interval 0"])
def test_a_reader_that_leaves_is_not_a_traceback(fake_server: Any, command: str) -> None:
    shell = f"{' '.join(COMMAND)} {command} --address {fake_server.address} | head -c 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shell}"],
        capture_output=True,
        text=True,
        errors="replace",  # one byte may be part of a character
        timeout=WAIT_SECONDS,
        env=ENVIRONMENT,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 141), "rich's own would say that the command failed"


# chat


def test_a_piped_chat_answers_every_line_and_keeps_the_history(fake_server: Any) -> None:
    done = kvatlas(
        "chat", "-n", "4", "--ignore-eos", server=fake_server, stdin="one\ntwo\n/reset\nthree\n/exit\nx\n"
    )
    assert done.returncode == 0, done.stderr
    prompts = [int(number) for number in re.findall(r"prompt (\d+) tokens", done.stderr)]
    assert len(prompts) == 3
    assert prompts[1] > prompts[0]
    assert prompts[2] < prompts[1]


def test_a_chat_with_a_message_answers_once(fake_server: Any) -> None:
    done = kvatlas("chat", "hello", "-n", "4", "--quiet", server=fake_server)
    assert (done.returncode, done.stderr) == (0, "")


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.text = ""
        self.fd, self._slave = pty.openpty()
        name = os.ttyname(self._slave)
        # A leader of a session that opens a terminal gets it as its own: Ctrl-C then comes from there.
        shell = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', name, *COMMAND, *arguments]
        environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "80"}
        self.process = subprocess.Popen(shell, env=environment, start_new_session=True)

    def read_until(self, pattern: str) -> None:
        limit = time.monotonic() + WAIT_SECONDS
        while not re.search(pattern, self.text):
            assert time.monotonic() < limit, f"{pattern!r} did not come: {self.text!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.text += os.read(self.fd, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> int:
        return self.process.wait(WAIT_SECONDS)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._slave)
        os.close(self.fd)


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    start_server: Any, wait_until: WaitUntil, hold: Any
) -> None:
    server = start_server(*FAKE, *hold.settings)
    length = ("-n", str(hold.tokens), "--ignore-eos")
    with closing(Terminal("chat", "--address", server.address, *length)) as terminal:
        terminal.read_until("> ")
        terminal.type("hello\n")
        wait_until(lambda: active_pages(server) > 0, "an answer that runs")
        terminal.read_until(r"hello\r\n.")
        terminal.type("\x03")
        terminal.read_until(r"\[stopped\]")
        wait_until(lambda: active_pages(server) == 0, "pages given back")
        terminal.read_until(r"\[stopped\]\r\n.*> ")
        terminal.type("/exit\n")
        assert terminal.end() == 0


@pytest.mark.parametrize("is_piped", [False, True])
def test_an_interrupt_ends_a_chat_that_nobody_types_in(
    start_server: Any, wait_until: WaitUntil, hold: Any, is_piped: bool
) -> None:
    """It ended with 0, as if the answer were whole; and a pipe's next question was asked."""
    server = start_server(*FAKE, *hold.settings)
    message = [] if is_piped else ["hello"]
    length = ("-n", str(hold.tokens), "--ignore-eos")
    with subprocess.Popen(
        [*COMMAND, "chat", *message, "--address", server.address, *length],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write(b"hello\nworld\n")
        chat.stdin.close()
        assert chat.stdout.read(1)
        chat.send_signal(signal.SIGINT)
        assert chat.wait(WAIT_SECONDS) == 130
    wait_until(lambda: active_pages(server) == 0, "pages given back")


# pages and top


def test_the_page_map_has_a_glyph_per_page_and_no_colour_when_piped(fake_server: Any) -> None:
    done = kvatlas("pages", "--width", "72", server=fake_server)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert max(map(len, lines[1:-1])) <= 72
    glyphs = "".join(line.split(" ", maxsplit=1)[-1].strip() for line in lines[1:-1])
    assert len(re.sub(r"^\d+ |\s", "", glyphs)) >= 256
    assert lines[-1].endswith("= 256 pages")
    counts = [
        int(number) for number in re.findall(r"(?:free|active|cached|pinned|reserved) (\d+)", lines[-1])
    ]
    assert sum(counts) == 256


def test_the_page_map_as_json_adds_up(fake_server: Any) -> None:
    plain = json.loads(kvatlas("pages", "--json", server=fake_server).stdout)
    assert sum(plain["counts"].values()) == plain["page_count"] == 256
    stats = plain["stats"]
    assert sum(stats[f"{state}_pages"] for state in plain["counts"]) == 256


def test_the_page_map_as_a_picture(fake_server: Any, tmp_path: Path) -> None:
    done = kvatlas("pages", "--svg", str(tmp_path / "pages.svg"), server=fake_server)
    assert done.returncode == 0, done.stderr
    assert "= 256 pages" in (tmp_path / "pages.svg").read_text()
    refused = kvatlas("pages", "--svg", str(tmp_path / "no" / "pages.svg"), server=fake_server)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_a_watched_map_shows_an_answer_come_and_go(start_server: Any, hold: Any) -> None:
    server = start_server(*FAKE, *hold.settings)
    watch = subprocess.Popen(
        [*COMMAND, "pages", "--watch", "--json", "--interval", "0.05", "--address", server.address],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert watch.stdout is not None
    try:
        assert json.loads(watch.stdout.readline())["counts"]["active"] == 0
        active, tokens = 0, set()
        with (
            Client(server.address) as client,
            client.stream("hello " * 8, max_tokens=hold.tokens, ignore_eos=True),
        ):
            while active < 3 or len(tokens) <= 3:  # pages come, and token counts grow while it runs
                plain = json.loads(watch.stdout.readline())
                assert sum(plain["counts"].values()) == 64
                active = max(active, plain["counts"]["active"])
                tokens |= {sequence["token_count"] for sequence in plain["sequences"]}
        while plain["counts"]["active"]:  # and go
            plain = json.loads(watch.stdout.readline())
    finally:
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=WAIT_SECONDS)
    assert watch.returncode == 0


def test_a_watched_map_is_piped_picture_by_picture_until_its_reader_leaves(
    fake_server: Any, wait_until: WaitUntil
) -> None:
    """Nothing came before the end, and nobody noticed that the reader had left."""
    command = [*COMMAND, "pages", "--watch", "--interval", "0.05", "--address", fake_server.address]
    with (
        Client(fake_server.address) as client,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        ) as watch,
    ):
        assert watch.stdout is not None
        assert watch.stderr is not None
        try:
            assert "256 pages of" in watch.stdout.readline()
            watch.stdout.close()

            def has_ended() -> bool:
                client.generate("another picture", max_tokens=2)
                return watch.poll() is not None

            wait_until(has_ended, "the end of a watch that nobody reads")
        finally:
            watch.kill()
        assert (watch.returncode, watch.stderr.read()) == (141, "")


def test_a_map_that_was_read_leaves_no_watch_behind(fake_server: Any) -> None:
    """B111: more reads than the server allows watches at a time; none is refused."""
    with Client(fake_server.address) as client:
        for _ in range(100):
            assert client.page_map().page_count == 256


def test_top_shows_running_sequences_once(start_server: Any, wait_until: WaitUntil, hold: Any) -> None:
    server = start_server(*FAKE, *hold.settings)
    with (
        Client(server.address) as client,
        client.stream("hello", max_tokens=hold.tokens, ignore_eos=True, request_id="seen"),
    ):
        wait_until(lambda: active_pages(server) > 0, "an answer that runs")
        shown = kvatlas("top", "-n", "1", server=server)
        plain = json.loads(kvatlas("top", "--json", server=server).stdout)
    assert shown.returncode == 0, shown.stderr
    assert "seen#0" in shown.stdout
    assert re.search(r"= 64 pages", shown.stdout)
    assert [sequence["request_id"] for sequence in plain["sequences"]] == ["seen"]
    assert sum(plain["pages"].values()) == 64


# serve


def test_a_killed_worker_comes_back_as_a_new_epoch(start_server: Any, wait_until: WaitUntil) -> None:
    server = start_server(*FAKE)
    with Client(server.address) as client:
        before, killed = client.page_pool().revision.epoch, server.process_ids["worker"]
        os.kill(killed, signal.SIGKILL)

        def answers_again() -> bool:
            try:
                client.generate("hello", max_tokens=2, timeout_seconds=10.0)
                return client.page_pool().revision.epoch != before
            except KvatlasError:
                return False

        wait_until(answers_again, "a new worker")
    wait_until(lambda: server.process_ids.get("worker", killed) != killed, "its number in the ready file")
    children = [child.pid for child in psutil.Process(server.process.pid).children()]
    assert server.process_ids["worker"] in children
    assert "worker ended (signal KILL); again in" in server.log()
    assert server.stop() == 0


def test_a_killed_service_comes_back(start_server: Any, wait_until: WaitUntil) -> None:
    server = start_server(*FAKE)
    os.kill(server.process_ids["service"], signal.SIGKILL)

    def answers_again() -> bool:
        with Client(server.address) as client:
            try:
                return bool(client.generate("hello", max_tokens=2, timeout_seconds=10.0).choices)
            except KvatlasError:
                return False

    wait_until(answers_again, "a new service")
    assert server.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_running_request_finish_and_leaves_nothing(
    start_server: Any, wait_until: WaitUntil, hold: Any, number: int
) -> None:
    server = start_server(*FAKE, *hold.settings, "--grace", "600")
    folder = Path(server.facts["folder"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert {child.pid for child in children} >= set(server.process_ids.values())
    with Client(server.address) as client:
        with client.stream("hello", max_tokens=hold.tokens, ignore_eos=True) as stream:
            next(stream)
            server.process.send_signal(number)
            wait_until(lambda: "draining" in server.log(), "the drain")
            hold.off()
            events = list(stream)
        assert type(events[-1]).__name__ == "Summary"
    assert server.stop() == 0
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert not folder.exists()


def test_a_second_signal_ends_what_runs(start_server: Any, wait_until: WaitUntil, hold: Any) -> None:
    """Long before the grace is over."""
    server = start_server(*FAKE, *hold.settings, "--grace", "600")
    with (
        Client(server.address, resume_seconds=0) as client,
        client.stream("hello", max_tokens=hold.tokens, ignore_eos=True) as stream,
    ):
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.log(), "the drain")
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(KvatlasError):
            list(stream)
    assert server.stop() == 0


def test_children_end_when_the_supervisor_is_killed(start_server: Any, wait_until: WaitUntil) -> None:
    server = start_server(*FAKE)
    pids = list(server.process_ids.values())
    server.process.kill()
    server.process.wait()

    def all_ended() -> bool:
        return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)

    wait_until(all_ended, "the end of worker and service")
    shutil.rmtree(server.facts["folder"])  # who is killed cannot tidy up


def test_a_busy_port_and_a_bad_model_are_told_in_one_line(tmp_path: Path) -> None:
    free = (
        "--metrics-port",
        "0",
        "--worker-metrics-port",
        "0",
    )  # a server that runs has those of the defaults
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = kvatlas("serve", *FAKE, *free, "--listen", f"127.0.0.1:{port}", "--model", "random:tiny")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"kvatlas: port {port} is taken by another process: choose one with --listen, or 0 for any free one"
    )
    done = kvatlas("serve", *free, "--listen", "127.0.0.1:0", "--model", str(tmp_path / "nothing.gguf"))
    assert done.returncode == 1
    assert "FILE_MISSING" in done.stderr.splitlines()[-1]


def test_a_setting_that_a_process_does_not_know_ends_serve_with_its_sentence() -> None:
    ports = ("--listen", "127.0.0.1:0", "--metrics-port", "0", "--worker-metrics-port", "0")
    done = kvatlas("serve", *FAKE, *ports, "--set-worker", "max_runing=3")
    assert done.returncode == 2
    assert "python -m worker: not understood: --max-runing 3; did you mean --max-running?" in done.stderr
    assert "worker ended before it was ready (exit code 2)" in done.stderr


@pytest.mark.slow
def test_twenty_starts_all_answer_and_all_end(start_server: Any) -> None:
    """B109: nothing is forked, so nothing hangs, however often and from whatever process it is started."""
    for _ in range(20):
        server = start_server(*FAKE)
        with Client(server.address) as client:
            assert client.generate("hello", max_tokens=2, timeout_seconds=10.0).usage.completion_tokens > 0
        assert server.stop() == 0
