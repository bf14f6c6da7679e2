"""Options of the gRPC server: one constant, logged at start, compared with the documented table by a test."""

from collections.abc import Sequence

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
CONNECTION_AGE_MS = 1_800_000

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_timeout_ms", 10_000),  # becomes TCP_USER_TIMEOUT
    ("grpc.http2.ping_timeout_ms", 10_000),  # without it a hung client is found after a minute
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # clients may ping this often
    ("grpc.max_connection_idle_ms", 600_000),
)


def server_options(*, processes: int, behind_balancer: bool) -> Sequence[tuple[str, int]]:
    """The constant, and what depends on how many processes and replicas there are."""
    options = [*OPTIONS, ("grpc.so_reuseport", 1 if processes > 1 else 0)]
    if behind_balancer:
        options.append(("grpc.max_connection_age_ms", CONNECTION_AGE_MS))
    return options
