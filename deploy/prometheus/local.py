"""A Prometheus and an Alertmanager of this machine, for a while: real scrapes, real rules, real alerts.

Needs the Debian packages `prometheus` and `prometheus-alertmanager`. Owns the processes and their folder of
data; each ends with its context. Used by what checks the rules and dashboards against a running server.
"""

import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from kvatlas.free_ports import free_ports

READY_SECONDS = 90.0
END_SECONDS = 30.0
TIMEOUT_SECONDS = 10.0
PROGRAMS = ("prometheus", "prometheus-alertmanager")


def missing_programs(*others: str) -> list[str]:
    """Packages that would have to be installed; `others`: more programs that are named as theirs."""
    return [name for name in (*PROGRAMS, *others) if not shutil.which(name)]


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of an answer: its labels, and its values by time."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]

    @property
    def value(self) -> float:
        """The newest one."""
        return self.points[-1][1]


class Prometheus:
    """Queries of one server."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}"

    def query(self, expression: str) -> list[Sample]:
        """The answer as of now: one point a series, or all scraped ones for a selector with a range."""
        result = self._get("query", query=expression)["result"]
        return [
            Sample(
                series["metric"],
                [(float(at), float(text)) for at, text in series.get("values", [series.get("value")])],
            )
            for series in result
        ]

    def alerts(self, state: str = "firing") -> list[Mapping[str, str]]:
        """Labels of the alerts in a state: pending or firing."""
        return [each["labels"] for each in self._get("alerts")["alerts"] if each["state"] == state]

    def exemplars(self, expression: str, since: float) -> list[Mapping[str, str]]:
        """Labels of all exemplars since a moment of Unix time."""
        now = time.time_ns() / 1e9
        found = self._get("query_exemplars", query=expression, start=since, end=now)
        return [exemplar["labels"] for series in found for exemplar in series["exemplars"]]

    def _get(self, what: str, **arguments: object) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{arguments}: {error.read().decode(errors='replace')}") from error
        return body["data"]


@contextmanager
def running_prometheus(
    folder: Path,
    targets: Mapping[str, Sequence[str]],
    *,
    rules: Sequence[Path] = (),
    scrape_seconds: float = 1.0,
    alertmanager: str = "",
) -> Iterator[Prometheus]:
    """A server that scrapes `targets` (job → addresses) and evaluates `rules` as often as it scrapes."""
    pace = f"{round(scrape_seconds * 1000)}ms"
    config: dict[str, Any] = {
        "global": {"scrape_interval": pace, "scrape_timeout": pace, "evaluation_interval": pace},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
            for job, addresses in targets.items()
        ],
    }
    if alertmanager:
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [
        "prometheus",
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    ]
    with _running(command, folder / "prometheus.log", f"http://{address}/-/ready"):
        yield Prometheus(address)


@contextmanager
def running_alertmanager(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """An Alertmanager with this configuration; its address."""
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump(dict(config)))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [
        "prometheus-alertmanager",
        f"--config.file={path}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
        "--log.level=warn",
    ]
    with _running(command, folder / "alertmanager.log", f"http://{address}/-/ready"):
        yield address


@contextmanager
def receiving_alerts(keep: Callable[[str, Mapping[str, Any]], None]) -> Iterator[str]:
    """A webhook receiver: `keep(path, alert)` for each alert of each notification; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for alert in body["alerts"]:
                keep(self.path, alert)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _running(command: Sequence[str], log_path: Path, ready_url: str) -> Iterator[None]:
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _wait_until_ready(process, ready_url, log_path)
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, log_path: Path) -> None:
    limit = time.monotonic() + READY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=1.0):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{process.args!r}: {log_path.read_text(errors='replace')}") from None
            threading.Event().wait(0.05)
