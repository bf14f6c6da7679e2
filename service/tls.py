"""TLS of the listeners: certificates from files, read again when they change, without a restart.

Owns no socket. A pair that cannot be used leaves the old one in force; running connections keep theirs.
"""

import logging
import ssl
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
        """What gRPC takes. Raises OSError, ValueError for files that it would refuse without a reason."""
        certificate, key = self.certificate.read_bytes(), self.key.read_bytes()
        ca = self.client_ca.read_bytes() if self.client_ca else None
        self._check()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=ca)

    def _check(self) -> None:
        """Raises ssl.SSLError, an OSError: no PEM, or a key of another certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key, password="")  # or it would ask the terminal
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of one listener that follow the files: looked at in each handshake.

    gRPC takes the first configuration once, so a second listener would get none and could not be bound: each
    has credentials of its own. Raises OSError, ValueError.
    """
    known = files.stamp()
    refused: tuple[object, ...] = ()

    def renewed() -> Any:
        """A new configuration, or None: the old one stays. Called on a thread of gRPC's."""
        nonlocal known, refused
        stamp = files.stamp()
        if stamp == known:
            return None
        try:
            configuration = files.configuration()
        except (OSError, ValueError) as error:
            if (why := (stamp, str(error))) != refused:  # once, however many connect meanwhile
                refused = why
                log.error('event=certificate_refused kept=old why="%s"', error)
            return None
        known, refused = stamp, ()
        log.info("event=certificate_read path=%s", files.certificate)
        return configuration

    credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
        files.configuration(), renewed, require_client_authentication=files.client_ca is not None
    )
    return credentials
