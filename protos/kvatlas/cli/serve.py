"""`kvatlas serve`: one worker and one service on this machine, supervised.

Starts both as modules in processes of their own and imports none of them. Owns the folder of their
sockets (mode 0700) and their ports.
"""

import http.client
import json
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvatlas.cli import config
from kvatlas.cli.exits import USAGE, CommandFailed
from kvatlas.cli.ports import choose_ports, split_address
from kvatlas.cli.pull import pull
from kvatlas.cli.supervisor import ChildSpec, RestartPolicy, Supervisor, print_log
from kvatlas.settings import MAX_PORT

WORKER_END_SECONDS = 15.0
MARGIN_SECONDS = 10.0  # beyond what the service itself allows for its drain
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """Where everything of one run is."""

    folder: Path
    address: str  # gRPC
    admin_address: str
    metrics_port: int
    worker_metrics_port: int


def run(settings: Namespace) -> int:
    """Serves until a signal."""
    started = time.monotonic()
    if settings.ready_file:
        _forget_ready(Path(settings.ready_file))
    pull(settings.model)
    place = _choose_place(settings)
    try:
        supervisor = Supervisor(
            [_service(settings, place), _worker(settings, place)],
            RestartPolicy(settings.max_restarts),
            environment=config.child_environment(),
            clock=time.monotonic,
            log=print_log,
        )
        supervisor.install_signals()
        if settings.parent_watch:
            supervisor.watch_parent(settings.parent_watch)

        ready = Path(settings.ready_file) if settings.ready_file else None

        def on_ready() -> None:
            print_log(_ready_line(place, time.monotonic() - started))
            if ready is not None:
                _write_ready(ready, place, supervisor.process_ids())

        def on_change() -> None:
            if ready is not None:
                _renew_ready(ready, place, supervisor.process_ids())

        return supervisor.run(
            lambda: _is_ready(place.metrics_port), on_ready, settings.ready_timeout, on_change
        )
    finally:
        shutil.rmtree(place.folder, ignore_errors=True)


def _choose_place(settings: Namespace) -> Place:
    wanted = {
        "--metrics-port": (LOOPBACK, settings.metrics_port),
        "--worker-metrics-port": (LOOPBACK, settings.worker_metrics_port),
    }
    is_unix = settings.listen.startswith("unix:")
    if not is_unix:
        host, port = split_address(settings.listen)
        wanted["--listen"] = (host, port)
        wanted["--admin-port"] = _admin_place(settings, port)
    ports = choose_ports(wanted)
    host = settings.listen.rpartition(":")[0]
    return Place(
        folder=config.make_runtime_folder(),
        address=settings.listen if is_unix else f"{host}:{ports['--listen']}",
        admin_address=f"{settings.listen}.admin" if is_unix else f"{LOOPBACK}:{ports['--admin-port']}",
        metrics_port=ports["--metrics-port"],
        worker_metrics_port=ports["--worker-metrics-port"],
    )


def _admin_place(settings: Namespace, port: int) -> tuple[str, int]:
    """What was asked for, or the port after the listener's; any free one beside any free one, or the last."""
    if settings.admin_port is not None:
        return LOOPBACK, int(settings.admin_port)
    return LOOPBACK, port + 1 if 0 < port < MAX_PORT else 0


def _worker(settings: Namespace, place: Place) -> ChildSpec:
    flags = {
        "model": settings.model,
        "runner": settings.runner,
        "device": settings.device,
        "page-size": settings.page_size or None,
        "num-pages": settings.num_pages or None,
        "max-running": settings.max_running or None,
        "engine-address": f"ipc://{place.folder}/engine",
        "pages-address": f"ipc://{place.folder}/pages",
        "metrics-host": LOOPBACK,
        "metrics-port": place.worker_metrics_port,
        "parent-watch": os.getpid(),
        "log-level": settings.log_level,
    }
    return ChildSpec("worker", _command("worker", flags, settings.set_worker), WORKER_END_SECONDS)


def _service(settings: Namespace, place: Place) -> ChildSpec:
    flags = {
        "address": place.address,
        "admin-address": place.admin_address,
        "workers": f"ipc://{place.folder}/engine",
        "model": settings.model,
        "metrics-address": f"{LOOPBACK}:{place.metrics_port}",
        "grace": settings.grace,
        "drain-listen": settings.drain_listen,
        "parent-watch": os.getpid(),
        "log-level": settings.log_level,
    }
    more = list(settings.set_service or ())
    if settings.insecure:
        more.append("insecure=on")
    patience = settings.grace + settings.drain_listen + MARGIN_SECONDS
    command = _command("service", flags, more)
    return ChildSpec("service", command, patience, ends_all=True)  # an operator has drained it


def _command(module: str, flags: dict[str, object], more: Sequence[str] | None) -> list[str]:
    """`python -m module --flag value ...`; `more` are NAME=V as the user wrote them."""
    command = [sys.executable, "-m", module]
    for name, value in flags.items():
        if value is not None:
            command += [f"--{name}", str(value)]
    return command + config.setting_flags(f"--set-{module}", more)


def _is_ready(metrics_port: int) -> bool:
    """The service says that a worker is warm: it answers 200 on /readyz. Without the environment's proxy."""
    connection = http.client.HTTPConnection(LOOPBACK, metrics_port, timeout=1)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (http.client.HTTPException, OSError):
        return False
    finally:
        connection.close()


def _ready_line(place: Place, seconds: float) -> str:
    return (
        f"ready after {seconds:.1f} s · gRPC {place.address} · metrics"
        f" http://{LOOPBACK}:{place.metrics_port}/metrics and :{place.worker_metrics_port}/metrics"
    )


def _forget_ready(path: Path) -> None:
    """Who waits for the file would take that of a run before for ours. Raises CommandFailed."""
    if not path.absolute().parent.is_dir():
        raise CommandFailed(f"cannot write {path}: no such folder", USAGE)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror}", USAGE) from None


def _write_ready(path: Path, place: Place, process_ids: dict[str, int]) -> None:
    """Appears whole: written aside and renamed."""
    facts = asdict(place) | {"folder": str(place.folder), "process_ids": process_ids, "pid": os.getpid()}
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(json.dumps(facts) + "\n")
        aside.replace(path)
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror}", USAGE) from None


def _renew_ready(path: Path, place: Place, process_ids: dict[str, int]) -> None:
    """Who reads it later finds the processes of now. Not where it was taken away: nobody wants it."""
    if path.exists():
        try:
            _write_ready(path, place, process_ids)
        except CommandFailed as error:  # what serves goes on
            print_log(str(error))
