"""Channel options and service configs: what every client of the server is told to use.

Owns retries and balancing; they live in the service config, so that every language has the same
(examples/service_config.json). Nothing is retried here once a stream has begun: gRPC itself stops at
the server's first initial metadata, which is sent at admission.
"""

import json
from collections.abc import Mapping
from typing import Any

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_SECONDS = 600.0
SHORT_TIMEOUT_SECONDS = 10.0
"""Deadline of calls that only look."""

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
        ("grpc.service_config", json.dumps(service_config)),
    ]
