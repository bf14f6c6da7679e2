"""TLS of the listeners: certificates from files, read again when they change, without a restart.

Owns no socket. A pair that cannot be read leaves the old one in force; running connections keep theirs.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvatlas.file_stamp import Stamp, file_stamp

log = logging.getLogger("service.tls")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca` every client must show a certificate that it signed (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def stamp(self) -> tuple[Stamp, ...]:
        """Changes with any of the files."""
        return tuple(file_stamp(path) for path in (self.certificate, self.key, self.client_ca) if path)

    def configuration(self) -> Any:
        """What gRPC takes. Raises OSError, ValueError for what is no PEM."""
        certificate, key = self.certificate.read_bytes(), self.key.read_bytes()
        if b"-----BEGIN CERTIFICATE-----" not in certificate or b"PRIVATE KEY-----" not in key:
            raise ValueError("no certificate or no private key in PEM")
        ca = self.client_ca.read_bytes() if self.client_ca else None
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=ca)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow the files: looked at in each handshake. Raises OSError, ValueError."""
    known = files.stamp()

    def renewed() -> Any:
        """A new configuration, or None: the old one stays. Called on a thread of gRPC's."""
        nonlocal known
        try:
            stamp = files.stamp()
            if stamp == known:
                return None
            configuration = files.configuration()
        except (OSError, ValueError) as error:
            log.error('event=certificate_refused kept=old why="%s"', error)
            return None
        known = stamp
        log.info("event=certificate_read path=%s", files.certificate)
        return configuration

    credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
        files.configuration(), renewed, require_client_authentication=files.client_ca is not None
    )
    return credentials
