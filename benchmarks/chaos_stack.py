"""Workers and services of a chaos run: processes that are killed, paused, drained and cut off, and come back.

Owns processes, network namespaces and the folder of logs; all of it ends with the `async with` block. Each
worker lives in a network namespace of its own, joined to ours by a pair of virtual interfaces, where that is
allowed; else on the loopback, and nothing can be cut.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from kvatlas.client.aio import AsyncClient
from kvatlas.client.errors import KvatlasError
from kvatlas.free_ports import free_ports
from kvatlas.seam_keys import write_pair
from kvatlas.v1 import server_pb2

ROOT = Path(__file__).resolve().parents[1]
NUM_SERVICES = 2
READY_SECONDS = 180.0
END_SECONDS = 60.0
POLL_SECONDS = 0.1
LOG_LINES = 30


class ChaosFailed(Exception):
    """The run cannot go on; the text is for the user."""


class Namespace:
    """A network of one worker: 198.18.x.y/30 (RFC 2544), not routed anywhere."""

    def __init__(self, number: int) -> None:
        self.name = f"kva{os.getpid() % 100_000}-{number}"
        base = f"198.18.{os.getpid() % 256}.{4 * number}".rsplit(".", 1)
        self._outside, self.address = (f"{base[0]}.{int(base[1]) + host}" for host in (1, 2))
        self._interface = self.name.replace("kva", "kv")

    def create(self) -> None:
        """Raises CalledProcessError where that is not allowed."""
        _ip("netns", "add", self.name)
        _ip("link", "add", self._interface, "type", "veth", "peer", "name", "inner", "netns", self.name)
        _ip("addr", "add", f"{self._outside}/30", "dev", self._interface)
        _ip("link", "set", self._interface, "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/30", "dev", "inner")
        for interface in ("lo", "inner"):
            _ip("-n", self.name, "link", "set", interface, "up")

    def cut(self) -> None:
        """Packets vanish in both directions; nobody is told."""
        _ip("-n", self.name, "link", "set", "inner", "down")

    def join(self) -> None:
        """Takes the cut back."""
        _ip("-n", self.name, "link", "set", "inner", "up")

    def remove(self) -> None:
        """Interfaces go with it."""
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)


def why_no_network() -> str:
    """Empty where namespaces can be made."""
    if shutil.which("ip") is None:
        return "no ip command"
    probe = Namespace(63)
    try:
        probe.create()
    except subprocess.CalledProcessError as error:
        return str(error.stderr or error).strip()
    finally:
        probe.remove()
    return ""


@dataclass
class Node:
    """One process that comes back when it is started again, with the same command."""

    name: str
    command: Sequence[str]
    log_path: Path
    process: "subprocess.Popen[bytes] | None" = None
    exit_codes: list[int] = field(default_factory=list)  # of orderly ends

    def start(self) -> None:
        """Begins a life."""
        assert self.process is None, f"{self.name} runs already"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT
            )

    def signal(self, number: int) -> None:
        """To the process; nothing where it has ended."""
        if self.process is not None:
            self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and waits."""
        if self.process is not None:
            self.process.kill()
            await self._wait()

    async def drain(self, seconds: float = END_SECONDS) -> None:
        """SIGTERM, and waits for its exit code. Raises ChaosFailed where it does not end."""
        self.signal(signal.SIGTERM)
        process = self.process
        await until(lambda: process is None or process.poll() is not None, f"{self.name} to end", seconds)
        self.exit_codes.append(await self._wait())

    def check_alive(self) -> None:
        """Raises ChaosFailed where it has ended though nobody wanted that."""
        if self.process is not None and (code := self.process.poll()) is not None:
            raise ChaosFailed(f"{self.name} ended by itself with code {code}:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """What it said last."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-LOG_LINES:])

    async def _wait(self) -> int:
        process, self.process = self.process, None
        assert process is not None
        return await asyncio.to_thread(process.wait)


class ChaosStack:
    """Two workers and two services. `workers` and `services` are theirs to disturb."""

    def __init__(
        self,
        *,
        model: str,
        worker_settings: Mapping[str, object],
        service_settings: Mapping[str, object],
        with_network: bool = True,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvatlas-chaos-"))
        self.namespaces = [Namespace(number) for number in range(2)] if with_network else []
        keys = self._keys() if with_network else {"worker": {}, "service": {}}
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(NUM_SERVICES)]
        engines = [self._engine(number) for number in range(2)]
        self.workers = [
            self._node(
                f"worker-{number}",
                "worker",
                {
                    "model": model,
                    "worker-id": f"worker-{number}",
                    "engine-address": engines[number],
                    "pages-address": self._pages(number),
                    "metrics-port": -1,
                    "recordings": self.folder / f"recordings-{number}",
                    **keys["worker"],
                    **worker_settings,
                },
                self.namespaces[number].name if with_network else "",
            )
            for number in range(2)
        ]
        self.services = [
            self._node(
                f"service-{number}",
                "service",
                {
                    "model": model,
                    "address": address,
                    "workers": ",".join(engines),
                    "metrics-address": "",
                    "no-access-log": None,
                    **keys["service"],
                    **service_settings,
                },
            )
            for number, address in enumerate(self.addresses)
        ]
        self._clients: list[AsyncClient] = []

    @property
    def nodes(self) -> list[Node]:
        """All processes."""
        return [*self.workers, *self.services]

    async def epochs(self, service: int) -> dict[str, int]:
        """Present life of each worker that this service can use; empty while it does not answer."""
        try:
            info = await self._clients[service].server_info()
        except KvatlasError:
            return {}
        serving = server_pb2.SERVER_STATE_SERVING
        return {worker.worker_id: worker.epoch for worker in info.workers if worker.state == serving}

    async def known_epochs(self) -> dict[str, int]:
        """The same from any service that answers."""
        known: dict[str, int] = {}
        for service in range(len(self.services)):
            known |= await self.epochs(service)
        return known

    async def healed(self, other_than: Mapping[str, int] | None = None) -> float:
        """Waits until every service can use every worker, in another life than `other_than`; its seconds."""
        began = monotonic()
        for service in range(len(self.services)):
            await self._until_usable(service, other_than or {}, began + READY_SECONDS)
        return monotonic() - began

    async def _until_usable(self, service: int, old: Mapping[str, int], limit: float) -> None:
        while True:
            epochs = await self.epochs(service)
            if len(epochs) == len(self.workers) and not any(epochs[name] == old[name] for name in old):
                return
            for node in self.nodes:
                node.check_alive()
            if monotonic() > limit:
                raise ChaosFailed(
                    f"after {READY_SECONDS:g} s service-{service} can use {sorted(epochs)} only\n"
                    + "\n".join(f"--- {node.name}\n{node.log_tail()}" for node in self.nodes)
                )
            await asyncio.sleep(POLL_SECONDS)

    async def __aenter__(self) -> Self:
        try:
            for namespace in self.namespaces:
                namespace.create()
            for node in self.nodes:
                node.start()
            self._clients = [AsyncClient(address) for address in self.addresses]
            await self.healed()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends everything, services first; kills what does not end. Logs stay where something failed."""
        for client in self._clients:
            await client.close()
        for node in [*self.services, *self.workers]:
            node.signal(signal.SIGCONT)
            with contextlib.suppress(ChaosFailed):
                if node.process is not None:
                    await node.drain()
            await node.kill()
        for namespace in self.namespaces:
            namespace.remove()

    def remove_logs(self) -> None:
        """After a good run."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _keys(self) -> dict[str, dict[str, object]]:
        """Settings of both ends: off the loopback the seam wants keys."""
        files = {name: write_pair(self.folder / "keys", name) for name in ("worker", "service")}
        return {
            "worker": {"seam-key": files["worker"][0], "seam-peers": files["service"][1]},
            "service": {"seam-key": files["service"][0], "seam-peers": files["worker"][1]},
        }

    def _engine(self, number: int) -> str:
        if self.namespaces:
            return f"tcp://{self.namespaces[number].address}:7001"
        return f"ipc://{self.folder}/engine-{number}"

    def _pages(self, number: int) -> str:
        if self.namespaces:
            return f"tcp://{self.namespaces[number].address}:7002"
        return f"ipc://{self.folder}/pages-{number}"

    def _node(self, name: str, module: str, flags: Mapping[str, object], namespace: str = "") -> Node:
        command = ["ip", "netns", "exec", namespace] if namespace else []
        command += ["env", f"PYTHONPATH={ROOT / 'protos'}{os.pathsep}{ROOT}", sys.executable, "-m", module]
        command.append("--parent-watch")  # it ends with us, whatever becomes of us
        for flag, value in flags.items():
            command += [f"--{flag}"] if value is None else [f"--{flag}", str(value)]
        return Node(name, command, self.folder / f"{name}.log")


async def until(condition: Callable[[], object], what: str, seconds: float) -> None:
    """Waits for a condition. Raises ChaosFailed."""
    limit = monotonic() + seconds
    while not condition():
        if monotonic() > limit:
            raise ChaosFailed(f"{what}: not within {seconds:g} s")
        await asyncio.sleep(0.02)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
