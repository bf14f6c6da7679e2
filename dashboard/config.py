"""DashboardConfig: every setting of the dashboard, frozen, checked once.

Flags win over KVATLAS_DASHBOARD_* variables, those over a TOML file, that over the defaults. This is the
only file of the dashboard that reads the environment.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvatlas.client.channel import DEFAULT_ADDRESS, check_addresses
from kvatlas.settings import ConfigError, Reader, as_toml, is_port, option, range_faults

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
__all__ = ["ConfigError", "DashboardConfig", "from_args", "wants_print"]


@dataclass(frozen=True, slots=True)
class DashboardConfig:
    """Settings of one dashboard process."""

    server: str = option(DEFAULT_ADDRESS, "address of the service: host:port, dns:///name:port, unix:/path")
    listen: str = option("127.0.0.1:8501", "host:port where browsers come; port 0: any free one")
    base_path: str = option("", "path under which a proxy shows the dashboard, e.g. kvatlas")
    allowed_origins: tuple[str, ...] = option(
        (), "origins beside our own that may open the page, e.g. https://ours.example, joined by commas"
    )
    token_file: str = option("", "file with the bearer token for the service", metavar="FILE")
    admin_server: str = option(
        "", "address of AdminService, to save the last minutes as a recording; empty: not offered"
    )
    server_ca: str = option(
        "", "PEM of who signed the service's certificate: TLS; empty: plaintext", metavar="FILE"
    )
    certificate_file: str = option(
        "", "PEM chain of this dashboard, where the service asks for one (mTLS)", metavar="FILE"
    )
    key_file: str = option("", "its key, PEM", metavar="FILE")
    grafana_url: str = option("", "where Grafana is, for links; empty: no links", metavar="URL")
    demo: bool = option(False, "show a simulated pool; no server is asked")
    demo_pages: int = option(4096, "pages of the simulated pool", low=64, high=1 << 21)
    history_seconds: int = option(600, "how far back the map can be shown", low=10, high=3600)
    max_viewers: int = option(64, "open page feeds at most", low=1, high=1024)
    theme: str = option("auto", "colours", choices=("auto", "light", "dark"))
    ready_file: str = option("", "write the address there, as JSON, when ready", metavar="FILE")
    parent_watch: int = option(
        0,
        "end when the process of this id is no longer the parent; 0: off",
        low=0,
        bare=os.getppid,  # a bare flag watches the parent of this moment
        metavar="PID",
    )
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        faults = range_faults(self)
        try:
            check_addresses([self.server])
        except ValueError as error:
            faults.append(f"server: {error}")
        host, _, port = self.listen.rpartition(":")
        if not host or not is_port(port):
            faults.append(f"listen: {self.listen!r} is not host:port")
        for name in ("token_file", "server_ca", "certificate_file", "key_file"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                faults.append(f"{name}: no file {path!r}")
        faults += [
            f"allowed_origins: {origin!r} is not http://host or https://host"
            for origin in self.allowed_origins
            if not _is_origin(origin)
        ]
        if self.ready_file and not Path(self.ready_file).absolute().parent.is_dir():
            faults.append(f"ready_file: no folder for {self.ready_file!r}")
        if bool(self.certificate_file) != bool(self.key_file):
            faults.append("certificate_file and key_file: one without the other")
        if self.certificate_file and not self.server_ca:
            faults.append("certificate_file: needs server_ca, a certificate is shown over TLS only")
        if faults:
            raise ConfigError("; ".join(faults))

    @property
    def host(self) -> str:
        """Where to listen."""
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Where to listen; 0: any free one."""
        return int(self.listen.rpartition(":")[2])

    @property
    def prefix(self) -> str:
        """The base path as the beginning of a URL's path: "" or "/name"."""
        path = self.base_path.strip("/")
        return f"/{path}" if path else ""

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Names by which browsers may call us; empty: any. On loopback only its own and those of allowed
        origins: a foreign name that resolves to it is an attack (DNS rebinding)."""
        if self.host not in LOOPBACK_HOSTS:
            return ()
        named = {urlsplit(origin).hostname or "" for origin in self.allowed_origins}
        return tuple(sorted((LOOPBACK_HOSTS | named) - {""}))

    def read_token(self) -> str:
        """The token, or "". Read again for each call, so that it can be replaced."""
        return Path(self.token_file).read_text().strip() if self.token_file else ""

    def read_server_ca(self) -> bytes:
        """Authorities that the service's certificate may be of; empty: plaintext."""
        return Path(self.server_ca).read_bytes() if self.server_ca else b""

    def read_identity(self) -> tuple[bytes, bytes] | None:
        """Key and certificates of this client; None: it has none."""
        if not self.certificate_file:
            return None
        return Path(self.key_file).read_bytes(), Path(self.certificate_file).read_bytes()

    def printable(self) -> str:
        """One line per setting, as a TOML file that gives this config again."""
        return as_toml(self)


_READER = Reader(
    DashboardConfig,
    program="python -m dashboard",
    prefix="KVATLAS_DASHBOARD_",
    description="The kvatlas dashboard: the KV cache of a running server, live, in a browser.",
)


def from_args(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> DashboardConfig:
    """The config of a command line. Raises ConfigError; --help and bad flags end the program."""
    return _READER.read(arguments, os.environ if environment is None else environment)


def wants_print(arguments: Sequence[str]) -> bool:
    """Whether the command line asks to show the config and end."""
    return _READER.wants_print(arguments)


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # brackets of an IPv6 address that is none
        return False
