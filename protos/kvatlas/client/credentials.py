"""Who the client is and whom it trusts: the bearer token and the TLS files of its channels.

    Credentials(token_file=Path("/run/secrets/kvatlas"), ca_file=Path("ca.pem"))

A token is in no repr and in no error. It goes with each call, over TLS, to the loopback or through a
unix socket; anything else must be allowed by name.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

MAX_TOKEN_LENGTH = 4096  # as on the server

_TOKEN = re.compile(r"[!-~]+")
_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})


class CredentialsError(Exception):
    """Credentials that cannot be used; the text names the file, never what is in it."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """All empty: plaintext and nobody in particular, as on the loopback.

    `token_file` is read again with each call, so that a rotated secret is followed. The PEM files are
    read when a channel is opened. Any of them, or `use_tls` (the roots of gRPC), makes the channel TLS,
    but for a unix socket's: the same settings serve for a public address and an operator's socket.
    """

    token: str = field(default="", repr=False)
    token_file: Path | None = None
    ca_file: Path | None = None  # who signs the server's certificate
    certificate_file: Path | None = None  # chain of this client, for mTLS
    key_file: Path | None = None
    use_tls: bool = False
    server_name: str = ""  # in the server's certificate, where it is not the address's
    allows_plaintext_token: bool = False  # off the loopback, where anybody between can read it

    def __post_init__(self) -> None:
        if self.token and self.token_file:
            raise CredentialsError("a token and a token file: only one can be meant")
        if (self.certificate_file is None) != (self.key_file is None):
            raise CredentialsError("a certificate and its key: one without the other")
        if self.token:
            _checked(self.token, "the token")

    @property
    def is_tls(self) -> bool:
        """Whether channels are encrypted."""
        return self.use_tls or self.ca_file is not None or self.certificate_file is not None

    @property
    def has_token(self) -> bool:
        """Whether calls carry one."""
        return bool(self.token or self.token_file)

    def check(self, addresses: Sequence[str]) -> None:
        """Raises CredentialsError where a token would go over an open line, or a file cannot be used."""
        self.metadata()
        self.channel_credentials()
        if not self.has_token or self.is_tls or self.allows_plaintext_token:
            return
        for address in addresses:
            if not is_local(address):
                raise CredentialsError(f"a token would go to {address} in plain text: use TLS, or allow it")

    def metadata(self) -> Sequence[tuple[str, str]]:
        """What goes with each call. Raises CredentialsError for a file that holds no token."""
        token = self.token or self._token_of_file()
        return (("authorization", f"Bearer {token}"),) if token else ()

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For a secure channel; None: plaintext. Raises CredentialsError."""
        if not self.is_tls:
            return None
        ca = _pem("CA file", self.ca_file)
        key, chain = _pem("key file", self.key_file), _pem("certificate file", self.certificate_file)
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=chain)

    def _token_of_file(self) -> str:
        if self.token_file is None:
            return ""
        try:
            with self.token_file.open("rb") as file:
                text = file.read(MAX_TOKEN_LENGTH + 2).decode("ascii").strip()
        except OSError as error:
            raise CredentialsError(f"token file {self.token_file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise CredentialsError(f"token file {self.token_file} holds no token") from None
        return _checked(text, f"token file {self.token_file}")


def is_unix(address: str) -> bool:
    """Whether it is a socket of the file system, which guards it: listeners have no TLS there."""
    return address.startswith(("unix:", "unix-abstract:"))


def is_local(address: str) -> bool:
    """Whether nobody but this machine sees what goes there."""
    if is_unix(address):
        return True
    host = address.rpartition("/")[2].rpartition(":")[0].strip("[]")
    if host in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _checked(token: str, what: str) -> str:
    if len(token) > MAX_TOKEN_LENGTH or _TOKEN.fullmatch(token) is None:
        raise CredentialsError(f"{what} is not 1..{MAX_TOKEN_LENGTH} visible ASCII characters")
    return token


def _pem(what: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"{what} {path}: {error.strerror}") from None
    if b"-----BEGIN " not in content:
        raise CredentialsError(f"{what} {path} is no PEM file")
    return content
