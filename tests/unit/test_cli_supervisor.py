"""The supervisor of `kvatlas serve`: restarts with a bound, ends in order, leaves nobody behind."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvatlas.cli import config, ports, serve
from kvatlas.cli.exits import CommandFailed
from kvatlas.cli.supervisor import RestartPolicy

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 20.0

# Two children of a test: each says what happens to it in the file `log` of the folder it runs for.
HARNESS = """
import json, os, signal, sys, threading, time
from pathlib import Path
from kvatlas.cli.supervisor import ChildSpec, RestartPolicy, Supervisor, print_log
folder = Path(sys.argv[1])
child = '''
import os, signal, sys, time
name, folder, mode = sys.argv[1:4]
def say(text):
    with open(folder + "/log", "a") as log: log.write(name + " " + text + "\\\\n")
def on_term(*_):
    say("term")
    while mode == "last" and "second term" not in open(folder + "/log").read(): time.sleep(0.01)
    if mode != "stubborn": sys.exit(0)
signal.signal(signal.SIGTERM, on_term)
if mode == "exit3": sys.exit(3)
say(f"up {os.getpid()} {os.getppid()} {os.getsid(0) == os.getpid()}")
print("hello", flush=True)
while True: time.sleep(60)
'''
def spec(name, mode, seconds, **more):
    return ChildSpec(name, [sys.executable, "-c", child, name, str(folder), mode], seconds, **more)
supervisor = Supervisor(
    [spec("first", sys.argv[2], 1.0, ends_all=True), spec("second", sys.argv[3], 5.0)],
    RestartPolicy(2, first_delay_seconds=0.01),
    environment={}, clock=time.monotonic, log=print_log)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # however the tests were started
supervisor.install_signals()
supervisor.watch_parent(os.getppid())
def ready():
    log = folder / "log"
    return log.exists() and log.read_text().count(" up ") >= 2 and sys.argv[2] != "last"
def take_a_signal():
    while not (folder / "signal").exists(): time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=take_a_signal, daemon=True).start()
def tell():
    (folder / "told").write_text(json.dumps(supervisor.process_ids()))
    (folder / "told").replace(folder / "ready")
sys.exit(supervisor.run(ready, tell, 10.0, tell))
"""


def wait_for(condition: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < limit, f"{what} did not happen"
        threading.Event().wait(0.01)


class Run:
    """A supervisor in a process of its own."""

    def __init__(self, folder: Path, first: str, second: str, program: str = HARNESS) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(folder), first, second],
            env={"PYTHONPATH": str(ROOT / "protos")},
            stderr=subprocess.PIPE,
            text=True,
        )

    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def pids(self, name: str) -> list[int]:
        return [int(line.split()[2]) for line in self.log() if line.startswith(f"{name} up")]

    def wait_ready(self) -> None:
        wait_for((self.folder / "ready").exists, "ready")

    def end(self) -> tuple[int, str]:
        _, text = self.process.communicate(timeout=WAIT_SECONDS)
        return self.process.returncode, text


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, str], Run]]:
    runs: list[Run] = []

    def begin(first: str = "good", second: str = "good") -> Run:
        runs.append(Run(tmp_path, first, second))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()
        for pid in run.pids("first") + run.pids("second"):
            assert not psutil.pid_exists(pid) or psutil.Process(pid).ppid() != run.process.pid


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_children_in_order_and_leaves_none(start: Callable[..., Run], number: int) -> None:
    run = start()
    run.wait_ready()
    run.process.send_signal(number)
    code, _ = run.end()
    assert code == 0
    assert [line for line in run.log() if "term" in line] == ["first term", "second term"]
    assert not any(psutil.pid_exists(pid) for pid in run.pids("first") + run.pids("second"))


def test_under_nohup_the_end_of_the_terminal_changes_nothing(tmp_path: Path) -> None:
    """The server that was to outlive a login ended with it."""
    run = Run(tmp_path, "good", "good", HARNESS.replace("SIGHUP, signal.SIG_DFL", "SIGHUP, signal.SIG_IGN"))
    run.wait_ready()
    run.process.send_signal(signal.SIGHUP)
    run.process.send_signal(signal.SIGTERM)
    code, text = run.end()
    assert code == 0
    assert "SIGHUP" not in text
    assert "SIGTERM: draining" in text


def test_it_goes_on_and_ends_in_order_when_nobody_reads_its_log(start: Callable[..., Run]) -> None:
    run = start("stubborn")
    run.wait_ready()
    assert run.process.stderr is not None
    run.process.stderr.close()
    run.process.stderr = None
    os.kill(run.pids("second")[0], signal.SIGKILL)
    wait_for(lambda: len(run.pids("second")) == 2, "restart")
    run.process.send_signal(signal.SIGTERM)
    run.process.wait(WAIT_SECONDS)
    assert run.log()[-1] == "second term"
    assert not any(psutil.pid_exists(pid) for pid in run.pids("first") + run.pids("second")[1:])


@pytest.mark.parametrize(
    ("answer", "is_ready"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n", True),
        (b"HTTP/1.0 503 no\r\n\r\n", False),
        (b"SSH-2.0-x\r\n", False),
        (b"", False),
    ],
)
def test_readiness_is_asked_of_the_service_itself_and_any_answer_is_understood(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, is_ready: bool
) -> None:
    """With http_proxy in the environment the proxy was asked, and a server that was ready given up."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_once() -> None:
            with server.accept()[0] as accepted:
                accepted.recv(4096)
                accepted.sendall(answer)

        thread = threading.Thread(target=answer_once)
        thread.start()
        try:
            assert serve._is_ready(server.getsockname()[1]) is is_ready
        finally:
            with socket.create_connection(server.getsockname()):  # ends the thread if nobody came
                thread.join()


LATE = """
import os, sys, types
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, 15)  # Python clears modules last, when its handlers of signals are gone
sys.modules["late"] = types.ModuleType("late")
sys.modules["late"].late = Late()
"""


def test_a_signal_that_comes_while_it_exits_changes_nothing(tmp_path: Path) -> None:
    """A second Ctrl-C just when the first has ended everything: 0 all the same."""
    run = Run(tmp_path, "good", "good", LATE + HARNESS)
    run.wait_ready()
    run.process.send_signal(signal.SIGTERM)
    code, text = run.end()
    assert code == 0, text


def test_before_they_are_ready_all_children_are_told_at_once(start: Callable[..., Run]) -> None:
    run = start("last")  # ends once the second was told, and is never ready
    wait_for(lambda: run.pids("first") and run.pids("second"), "both are up")
    run.process.send_signal(signal.SIGINT)
    code, text = run.end()
    assert code == 130
    assert sorted(line for line in run.log() if "term" in line) == ["first term", "second term"]
    assert "killed" not in text


def test_a_signal_that_does_not_wake_the_main_thread_is_heard_soon(start: Callable[..., Run]) -> None:
    """As one does that comes between the last look for signals and the wait for events."""
    run = start()
    run.wait_ready()
    (run.folder / "signal").touch()
    code, _ = run.end()
    assert code == 0
    assert [line for line in run.log() if "term" in line] == ["first term", "second term"]


def test_children_are_in_sessions_of_their_own_so_that_ctrl_c_does_not_reach_them(
    start: Callable[..., Run],
) -> None:
    run = start()
    run.wait_ready()
    run.process.send_signal(signal.SIGTERM)
    run.end()
    assert all(line.endswith("True") for line in run.log() if " up " in line)


def test_what_children_print_gets_their_name(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_ready()
    run.process.send_signal(signal.SIGTERM)
    _, text = run.end()
    assert "first   | hello\n" in text
    assert "second  | hello\n" in text


def test_a_killed_child_is_started_again_and_the_other_stays(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_ready()
    os.kill(run.pids("second")[0], signal.SIGKILL)
    wait_for(lambda: len(run.pids("second")) == 2, "restart")
    run.process.send_signal(signal.SIGTERM)
    code, text = run.end()
    assert (code, len(run.pids("first"))) == (0, 1)
    assert "second ended (signal KILL); again in 0.01 s" in text


def test_who_runs_is_told_again_when_a_child_was_started_again(start: Callable[..., Run]) -> None:
    """The ready file of `kvatlas serve` went on naming a process that was gone."""
    run = start()
    run.wait_ready()

    def told() -> dict[str, int]:
        running: dict[str, int] = json.loads((run.folder / "ready").read_text())
        return running

    (first,), (second,) = run.pids("first"), run.pids("second")
    assert told() == {"first": first, "second": second}
    os.kill(second, signal.SIGKILL)
    wait_for(lambda: len(run.pids("second")) == 2, "restart")
    wait_for(lambda: told() == {"first": first, "second": run.pids("second")[1]}, "news of the restart")
    run.process.send_signal(signal.SIGTERM)
    run.end()


def test_a_drained_service_ends_it_all_and_a_worker_that_ended_comes_back(start: Callable[..., Run]) -> None:
    """Only an operator's drain ends a service with code 0; its restart would take the drain back."""
    run = start()
    run.wait_ready()
    os.kill(run.pids("second")[0], signal.SIGTERM)
    wait_for(lambda: len(run.pids("second")) == 2, "restart")
    os.kill(run.pids("first")[0], signal.SIGTERM)
    code, text = run.end()
    assert (code, len(run.pids("first"))) == (0, 1)
    assert "second ended (exit code 0); again in 0.01 s" in text
    assert "first has drained and ended: ending the rest" in text
    assert run.log()[-1] == "second term"


def test_a_child_that_dies_again_and_again_ends_it_all(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_ready()
    for number in range(1, 4):
        wait_for(lambda number=number: len(run.pids("first")) == number, "restart")
        os.kill(run.pids("first")[-1], signal.SIGKILL)
    code, text = run.end()
    assert code == 1
    assert "first ended (signal KILL), 3 times within 60 s: giving up" in text
    assert run.log()[-1] == "second term"


def test_a_child_that_cannot_start_is_not_tried_again(start: Callable[..., Run]) -> None:
    run = start("good", "exit3")
    code, text = run.end()
    assert code == 1
    assert "second ended before it was ready (exit code 3)" in text
    assert run.pids("second") == []


def test_a_child_that_does_not_end_is_killed_in_time(start: Callable[..., Run]) -> None:
    run = start("stubborn")
    run.wait_ready()
    run.process.send_signal(signal.SIGTERM)
    code, text = run.end()
    assert code == 0
    assert "first did not end within 1 s: killed" in text
    assert run.log()[-1] == "second term"
    assert not psutil.pid_exists(run.pids("first")[0])


def test_it_ends_in_order_when_whoever_started_it_is_gone(tmp_path: Path) -> None:
    launcher = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    command = [sys.executable, "-c", launcher, sys.executable, "-c", HARNESS, str(tmp_path), "good", "good"]
    parent = subprocess.Popen(command, env={"PYTHONPATH": str(ROOT / "protos")}, stderr=subprocess.DEVNULL)
    log = tmp_path / "log"
    try:
        wait_for((tmp_path / "ready").exists, "ready")
        (supervisor,) = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: log.read_text().splitlines()[-2:] == ["first term", "second term"], "the end in order")
    wait_for(lambda: not supervisor.is_running() or supervisor.status() == psutil.STATUS_ZOMBIE, "its end")


def test_restarts_come_ever_later_and_have_a_bound() -> None:
    policy = RestartPolicy(limit=4, window_seconds=60.0, first_delay_seconds=0.5, last_delay_seconds=3.0)
    assert [policy.delay([100.0] * count, 100.0) for count in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, None]
    assert policy.delay([0.0, 0.0, 0.0, 0.0, 100.0], 100.0) == 0.5  # the old ones no longer count


def test_a_busy_port_is_told_with_the_flag_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            CommandFailed, match=f"port {port} is taken by another process: choose one with --listen"
        ):
            ports.choose_ports({"--listen": ("127.0.0.1", port)})


def test_all_busy_ports_are_told_at_once() -> None:
    """Whoever starts a second server had to try once for each of its four ports."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        first, second = one.getsockname(), other.getsockname()
        with pytest.raises(CommandFailed) as refused:
            ports.choose_ports({"--listen": first, "--a": ("127.0.0.1", 0), "--metrics-port": second})
    assert str(refused.value) == (
        f"ports {first[1]} and {second[1]} are taken, perhaps by another server: choose others with --listen"
        " and --metrics-port, or 0 for any free ones"
    )
    assert refused.value.code == 2


def test_port_0_gives_different_free_ports() -> None:
    chosen = ports.choose_ports({"--a": ("127.0.0.1", 0), "--b": ("127.0.0.1", 0)})
    assert len({*chosen.values(), 0}) == 3


@pytest.mark.parametrize(("listen", "admin"), [("host:0", 0), ("host:7", 8), ("host:65535", 0)])
def test_the_admin_port_follows_the_listeners_where_there_is_one(listen: str, admin: int) -> None:
    """After the last port there was a traceback."""
    settings = config.read(["serve", "--listen", listen], {})
    assert serve._admin_place(settings, ports.split_address(listen)[1]) == ("127.0.0.1", admin)


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:x", "host:70000", "host:²", ":1"])
def test_an_address_without_a_port_is_refused(address: str) -> None:
    with pytest.raises(CommandFailed, match="is not host:port"):
        ports.split_address(address)


def test_the_folder_of_sockets_is_private() -> None:
    folder = config.make_runtime_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(os.fsencode(f"{folder}/engine")) <= config.MAX_SOCKET_PATH
    finally:
        folder.rmdir()


def test_the_processes_are_started_as_modules_that_watch_their_parent() -> None:
    """B109: by exec, from the interpreter, never by forking a process that has loaded gRPC."""
    settings = config.read(
        ["serve", "--set-worker", "max_context=128", "--set-worker", "prefix-cache=off"], {}
    )
    place = serve.Place(Path("/tmp/x"), "127.0.0.1:1", "127.0.0.1:2", 3, 4)
    worker = serve._worker(settings, place)
    assert list(worker.command[:3]) == [sys.executable, "-m", "worker"]
    assert list(worker.command[-3:]) == ["--max-context", "128", "--no-prefix-cache"]
    assert "--parent-watch" in worker.command
    service = serve._service(settings, place)
    assert list(service.command[:3]) == [sys.executable, "-m", "service"]
    assert service.end_seconds > settings.grace


def test_a_ready_file_that_cannot_be_is_told_before_anything_starts(tmp_path: Path) -> None:
    settings = config.read(["serve", "--ready-file", str(tmp_path / "none" / "ready.json")], {})
    with pytest.raises(CommandFailed, match=r"cannot write .*none/ready\.json: no such folder"):
        serve.run(settings)


def test_a_ready_file_of_a_run_before_is_gone_before_anything_starts(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    ready.write_text("{}")
    with pytest.raises(CommandFailed, match="no-such-shape"):
        serve.run(config.read(["serve", "--model", "random:no-such-shape", "--ready-file", str(ready)], {}))
    assert not ready.exists()
    with pytest.raises(CommandFailed, match="cannot write"):
        serve.run(config.read(["serve", "--ready-file", str(tmp_path)], {}))


def test_a_ready_file_appears_whole(tmp_path: Path) -> None:
    place = serve.Place(Path("/tmp/x"), "127.0.0.1:1", "127.0.0.1:2", 3, 4)
    serve._write_ready(tmp_path / "ready.json", place, {"worker": 5})
    facts = json.loads((tmp_path / "ready.json").read_text())
    assert (facts["address"], facts["process_ids"], facts["pid"]) == (
        "127.0.0.1:1",
        {"worker": 5},
        os.getpid(),
    )
    assert [path.name for path in tmp_path.iterdir()] == ["ready.json"]


def test_a_ready_file_is_renewed_where_it_is_and_costs_nothing_where_it_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready, place = tmp_path / "ready.json", serve.Place(Path("/tmp/x"), "127.0.0.1:1", "127.0.0.1:2", 3, 4)
    serve._renew_ready(ready, place, {"worker": 6})
    assert not ready.exists(), "somebody has taken it away"
    serve._write_ready(ready, place, {"worker": 5})
    serve._renew_ready(ready, place, {"worker": 6})
    assert json.loads(ready.read_text())["process_ids"] == {"worker": 6}
    (tmp_path / "ready.json.part").mkdir()
    serve._renew_ready(ready, place, {"worker": 7})
    assert "cannot write" in capsys.readouterr().err
