"""The services of docker-compose.yml as processes of this machine, from what is written there.

Commands, environment, mounts, start order and health checks come from the compose file and the Dockerfiles
that it names; nothing is repeated here. What a container would give is put in place: a folder tree for its
mounts, a free port of the loopback for each of its ports, names of other services. Programs of foreign images
come from Debian (prometheus, prometheus-alertmanager); a service whose program is not installed is left out
and named.
Owns its processes and folders: they end with the context.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvatlas.free_ports import free_ports
from kvatlas.models.config import child_environment

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = ROOT / "docker-compose.yml"
FOREIGN_PROGRAMS = {
    "prom/prometheus": "prometheus",
    "prom/alertmanager": "prometheus-alertmanager",
    "grafana/grafana": "grafana-server",
}
POLL_SECONDS = 0.2
_PATH = re.compile(r"(?<![\w.:/])/(?!/)[\w.][\w./-]*|(?<=://)/[\w./-]+")
_ADDRESS = re.compile(r"\b(?P<host>0\.0\.0\.0|127\.0\.0\.1|[a-z]+):(?P<port>\d+)\b")


class StartFailed(Exception):
    """A service did not become healthy; the text ends with its log."""


@dataclass(slots=True)
class _Service:
    """One service of the file, in the words of this machine."""

    name: str
    said: Mapping[str, Any]
    folder: Path  # stands for the container's root
    command: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def log(self) -> Path:
        """Its standard output and error."""
        return self.folder.with_suffix(".log")


class LocalStack:
    """What runs. `address(port)` is where a port of the file is found here."""

    def __init__(
        self,
        folder: Path,
        *,
        variables: Mapping[str, str] | None = None,
        volumes: Mapping[str, Path],
        overrides: Sequence[Path] = (),
        secrets: Mapping[str, Path] | None = None,
    ) -> None:
        texts = [_substituted(path.read_text(), variables or {}) for path in (COMPOSE, *overrides)]
        text = "\n".join(texts)
        file: Mapping[str, Any] = {}
        for each in texts:
            file = _merged(file, yaml.safe_load(each))
        self._said: Mapping[str, Any] = file["services"]
        self._secrets = {
            name: (secrets or {}).get(name, ROOT / said["file"])
            for name, said in file.get("secrets", {}).items()
        }
        self._folder = folder
        self._volumes = dict(volumes)
        ports = sorted(_ports(text))
        free = [str(port) for port in free_ports(len(ports))]
        self._ports = dict(zip(ports, free, strict=True))
        self._services: dict[str, _Service] = {}
        self.left_out: list[str] = []

    def address(self, port: int) -> str:
        """host:port of this machine."""
        return f"127.0.0.1:{self._ports[str(port)]}"

    def log(self, name: str) -> str:
        """What a service has written."""
        return self._services[name].log.read_text(errors="replace")

    def start(self) -> None:
        """Starts all in the order of depends_on; returns when all are healthy. Raises StartFailed."""
        waiting = dict(self._said)
        while waiting:
            name = next(each for each in waiting if not _needs(waiting[each]).keys() & waiting.keys())
            said = waiting.pop(name)
            for other, condition in _needs(said).items():
                if other not in self.left_out:
                    self._wait(self._services[other], condition["condition"])
            self._start(name, said)
        for service in self._services.values():
            condition = (
                "service_healthy" if "healthcheck" in service.said else "service_completed_successfully"
            )
            self._wait(service, condition)

    def crash(self, name: str) -> None:
        """Kills a service and starts it again, as `restart: unless-stopped` does; healthy on return."""
        service = self._services[name]
        assert service.said["restart"] == "unless-stopped"
        assert service.process is not None
        service.process.kill()
        service.process.wait()
        _run(service)
        self._wait(service, "service_healthy")

    def stop(self) -> dict[str, int]:
        """Ends all as `docker compose down` does, those that depend on others first; exit codes."""
        for service in reversed(self._services.values()):
            if service.process is None:
                continue
            service.process.send_signal(signal.SIGTERM)
            grace = _seconds(service.said.get("stop_grace_period", "10s"))
            try:
                service.process.wait(grace)
            except subprocess.TimeoutExpired:
                service.process.kill()
                service.process.wait()
        return {each.name: each.process.returncode for each in self._services.values() if each.process}

    # One service

    def _start(self, name: str, said: Mapping[str, Any]) -> None:
        service = _Service(name, said, self._folder / name)
        program = self._program(said)
        if program is None:
            self.left_out.append(name)
            return
        service.folder.mkdir()
        image = _image_environment(said)
        self._mount(service)
        words = {**image, **said.get("environment", {})}
        changes = {key: self._here(service, text) for key, text in words.items() if key != "PATH"}
        path = f"{ROOT / 'protos'}{os.pathsep}{ROOT}"
        service.environment = child_environment({"PYTHONPATH": path, **changes})
        service.command = [*program, *(self._here(service, word) for word in said.get("command", ()))]
        _run(service)
        self._services[name] = service

    def _program(self, said: Mapping[str, Any]) -> list[str] | None:
        if "build" in said:
            words = said.get("entrypoint") or _dockerfile_words(said, "ENTRYPOINT")
            return [sys.executable if word == "python" else word for word in words]
        program = shutil.which(FOREIGN_PROGRAMS[said["image"].partition(":")[0]])
        return [program] if program else None

    def _mount(self, service: _Service) -> None:
        """Puts into its folder what a container would see there; our files in the words of this machine."""
        for volume in service.said.get("volumes", ()):
            source, target, *_ = volume.split(":")
            place = service.folder / target.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if source.startswith("./"):
                self._copy(service, ROOT / source, place)
            else:
                kept = self._volumes.setdefault(source, self._folder / "volumes" / source)
                kept.mkdir(parents=True, exist_ok=True, mode=0o700)
                place.symlink_to(kept)
        for name in service.said.get("secrets", ()):
            place = service.folder / "run" / "secrets" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(self._secrets[name])
        for mount in service.said.get("tmpfs", ()):
            if mount.partition(":")[0] != "/tmp":
                (service.folder / mount.partition(":")[0].lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _copy(self, service: _Service, source: Path, place: Path) -> None:
        if source.is_dir():
            for path in source.rglob("*"):
                if path.is_file():
                    self._copy(service, path, place / path.relative_to(source))
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(self._addresses_here(source.read_text()))

    # Words of a container → words of this machine

    def _here(self, service: _Service, text: str) -> str:
        def path_here(match: re.Match[str]) -> str:
            top = match[0].split("/")[1]
            return str(service.folder) + match[0] if (service.folder / top).exists() else match[0]

        if text in self._ports:
            return self._ports[text]
        if text == "0.0.0.0":
            return "127.0.0.1"
        return self._addresses_here(text if "http://" in text else _PATH.sub(path_here, text))

    def _addresses_here(self, text: str) -> str:
        hosts = {"0.0.0.0", "127.0.0.1", *self._said}

        def here(match: re.Match[str]) -> str:
            is_ours = match["host"] in hosts and match["port"] in self._ports
            return f"127.0.0.1:{self._ports[match['port']]}" if is_ours else match[0]

        return _ADDRESS.sub(here, text)

    # Health

    def _wait(self, service: _Service, condition: str) -> None:
        process = service.process
        assert process is not None
        if condition == "service_completed_successfully":
            if process.wait(600) != 0:
                raise StartFailed(f"{service.name}: exit {process.returncode}\n{self.log(service.name)}")
            return
        check = service.said["healthcheck"]
        patience = _seconds(check["start_period"]) + check["retries"] * _seconds(check["interval"])
        limit = time.monotonic() + patience
        while not self._is_healthy(service, check):
            if process.poll() is not None or time.monotonic() > limit:
                raise StartFailed(f"{service.name} is not healthy\n{self.log(service.name)[-4000:]}")
            threading.Event().wait(POLL_SECONDS)

    def _is_healthy(self, service: _Service, check: Mapping[str, Any]) -> bool:
        kind, *words = check["test"]
        assert kind == "CMD"
        command = [sys.executable if word == "python" else self._here(service, word) for word in words]
        limit = _seconds(check["timeout"]) + 5
        try:
            done = subprocess.run(command, env=service.environment, capture_output=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


@contextmanager
def running_stack(
    *,
    variables: Mapping[str, str] | None = None,
    volumes: Mapping[str, Path] | None = None,
    overrides: Sequence[Path] = (),
    secrets: Mapping[str, Path] | None = None,
) -> Iterator[LocalStack]:
    """All services of the compose file and what lies on top of it, healthy. Raises StartFailed.

    `variables` are those of `${NAME:-default}`; `volumes` gives a named volume a folder that stays, `secrets`
    a secret another file than the one that is named.
    """
    with ExitStack() as stack:
        # A short name: paths of sockets may have 107 bytes.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kva")))
        services = LocalStack(
            folder, variables=variables, volumes=volumes or {}, overrides=overrides, secrets=secrets
        )
        stack.callback(services.stop)
        services.start()
        yield services


def _run(service: _Service) -> None:
    with service.log.open("ab") as log:
        service.process = subprocess.Popen(
            service.command,
            cwd=service.folder,
            env=service.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _merged(below: Any, above: Any, key: str = "") -> Any:
    """As compose merges files: mappings by key, lists one after the other, but for the words of a command."""
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        return {**below, **{each: _merged(below.get(each), above[each], each) for each in above}}
    if isinstance(below, list) and isinstance(above, list) and key not in ("command", "entrypoint"):
        return [*below, *above]
    return above


def _needs(said: Mapping[str, Any]) -> Mapping[str, Any]:
    needs: Mapping[str, Any] = said.get("depends_on", {})
    return needs


def _ports(text: str) -> set[str]:
    """Every port that the file speaks of: published ones, and those of addresses and settings."""
    return {match["port"] for match in _ADDRESS.finditer(text)} | set(re.findall(r"_PORT: \"(\d+)\"", text))


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1], str(found[2])), text)


def _dockerfile(said: Mapping[str, Any]) -> str:
    """The last stage of the service's Dockerfile, continued lines joined."""
    path: str = said["build"]["dockerfile"]
    text = (ROOT / path).read_text().replace("\\\n", " ")
    return text[text.rindex("\nFROM ") :]


def _dockerfile_words(said: Mapping[str, Any], instruction: str) -> list[str]:
    [line] = re.findall(rf"^{instruction} (\[.+\])$", _dockerfile(said), re.MULTILINE)
    words: list[str] = json.loads(line)
    return words


def _image_environment(said: Mapping[str, Any]) -> dict[str, str]:
    if "build" not in said:
        return {}
    lines: Sequence[str] = re.findall(r"^ENV (.+)$", _dockerfile(said), re.MULTILINE)
    return dict(pair.split("=", 1) for line in lines for pair in line.split())


def _seconds(text: str) -> float:
    return float(text.removesuffix("s"))
