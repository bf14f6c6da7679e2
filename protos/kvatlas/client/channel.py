"""Channel options and service configs: what every client of the server is told to use.

Owns retries and balancing; they live in the service config, so that every language has the same
(examples/service_config.json). Nothing is retried here once a stream has begun: gRPC itself stops at
the server's first initial metadata, which is sent at admission (what comes after: resume.py).
"""

import ipaddress
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvatlas.client.credentials import Credentials, CredentialsError, is_local, is_unix
from kvatlas.settings import is_port

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"
DEFAULT_TIMEOUT_SECONDS = 600.0
SHORT_TIMEOUT_SECONDS = 10.0
"""Deadline of calls that only look."""
LONG_TIMEOUT_SECONDS = 60.0
"""Deadline of calls for which a worker has to do something."""

_GENERATION = "kvatlas.v1.GenerationService"
_CACHE = "kvatlas.v1.CacheService"
_SERVER = "kvatlas.v1.ServerService"

_RETRY_POLICY: Mapping[str, Any] = {
    "maxAttempts": 4,
    "initialBackoff": "0.2s",
    "maxBackoff": "5s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_RETRY_THROTTLING: Mapping[str, Any] = {"maxTokens": 10, "tokenRatio": 0.1}

SERVICE_CONFIG: Mapping[str, Any] = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": _GENERATION},
    "methodConfig": [
        {"name": [{"service": _GENERATION}], "timeout": "600s", "retryPolicy": _RETRY_POLICY},
        {
            "name": [{"service": _GENERATION, "method": "Tokenize"}, {"service": _SERVER}],
            "waitForReady": True,
            "timeout": "5s",
        },
        {"name": [{"service": _SERVER, "method": "WatchLoad"}], "waitForReady": True},
    ],
    "retryThrottling": _RETRY_THROTTLING,
}
"""Of the channel that generates: only servers with a usable worker are asked."""

CACHE_SERVICE_CONFIG: Mapping[str, Any] = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": _CACHE},
    "methodConfig": [{"name": [{"service": _CACHE}], "retryPolicy": _RETRY_POLICY}],
    "retryThrottling": _RETRY_THROTTLING,
}
"""Of the channel that looks: a server without a usable worker still shows its map."""

INFO_SERVICE_CONFIG: Mapping[str, Any] = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [{"name": [{"service": _SERVER}], "retryPolicy": _RETRY_POLICY}],
    "retryThrottling": _RETRY_THROTTLING,
}
"""Of the channel that asks how the server is: one that starts or drains answers too."""


def channel_options(service_config: Mapping[str, Any]) -> list[tuple[str, int | str]]:
    """Options of one channel. No pings while no call runs: an idle client costs the server nothing."""
    return [
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 0),
        # A server that comes back is found within two seconds; by default it may take two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.service_config", json.dumps(service_config)),
    ]


def direct_options(addresses: Sequence[str]) -> list[tuple[str, int | str]]:
    """gRPC asks the proxy of http_proxy even for this machine, whose servers no proxy reaches."""
    return [("grpc.enable_http_proxy", 0)] if all(map(is_local, addresses)) else []


class Target:
    """Where channels go and what goes with each call: one address, or several of the same service.

    Several are `ip:port` joined by commas, or a sequence of them; gRPC balances over those that are
    healthy. Raises ValueError for addresses that cannot be mixed, CredentialsError.
    """

    def __init__(self, address: str | Sequence[str], credentials: Credentials | None = None) -> None:
        addresses = address.split(",") if isinstance(address, str) else list(address)
        self.addresses = [each.strip() for each in addresses]
        self.credentials = credentials or Credentials()
        self.credentials.check(self.addresses)
        self._name = _target_name(self.addresses)
        self._server_name = self.credentials.server_name
        if self.credentials.is_tls and len(self.addresses) > 1 and not self._server_name:
            self._server_name = _common_host(self.addresses)

    def __str__(self) -> str:
        return ",".join(self.addresses)

    def open(self, grpc_module: Any, service_config: Mapping[str, Any]) -> Any:
        """A channel of `grpc` or of `grpc.aio`. Raises CredentialsError for PEM files that cannot be read."""
        options = [*channel_options(service_config), *direct_options(self.addresses)]
        secure = self.credentials.channel_credentials()
        if secure is None or is_unix(self._name):
            return grpc_module.insecure_channel(self._name, options)
        if self._server_name:
            options.append(("grpc.ssl_target_name_override", self._server_name))
        return grpc_module.secure_channel(self._name, secure, options)

    def metadata(self) -> Sequence[tuple[str, str]]:
        """Of each call."""
        return self.credentials.metadata()


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises ValueError for what can be no address of a gRPC server, and says why."""
    if not any(addresses):
        raise ValueError("the address is empty")
    for each in addresses:
        scheme, colons, rest = each.partition("://")
        if colons and scheme.lower() in ("http", "https"):
            raise ValueError(f"{each!r}: gRPC's addresses have no {scheme}://, say {rest.rstrip('/')!r}")
        port = "" if is_unix(each) else each.rpartition(":")[2]
        if port.isdecimal() and not is_port(port):  # gRPC would take its last 16 bits, and ask somebody else
            raise ValueError(f"{each!r}: {port} is no port")


def _target_name(addresses: Sequence[str]) -> str:
    check_addresses(addresses)
    if len(addresses) == 1:
        return addresses[0]
    try:
        versions = {ipaddress.ip_address(each.rpartition(":")[0].strip("[]")).version for each in addresses}
    except ValueError:
        versions = set()
    if len(versions) != 1:
        raise ValueError(
            f"{','.join(addresses)!r}: several addresses must all be IPv4:port, or all [IPv6]:port; "
            "a name with several addresses is dns:///name:port"
        )
    return f"ipv{versions.pop()}:{','.join(addresses)}"


def _common_host(addresses: Sequence[str]) -> str:
    """What the certificates of several addresses must name: gRPC would look for the whole list in each."""
    hosts = {each.rpartition(":")[0].strip("[]") for each in addresses}
    if len(hosts) > 1:
        raise CredentialsError(
            f"TLS to {','.join(addresses)}: several hosts need a server name that all their certificates have"
        )
    return hosts.pop()
