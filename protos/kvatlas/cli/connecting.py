"""From settings to a connection: address, deadline, and who asks. For every command that calls."""

from argparse import Namespace
from pathlib import Path
from typing import TypeVar

from kvatlas.cli.exits import USAGE, CommandFailed
from kvatlas.client.admin_channel import AdminChannel
from kvatlas.client.credentials import Credentials, CredentialsError
from kvatlas.client.sync import Client

AdminKind = TypeVar("AdminKind", bound=AdminChannel)


def connect(settings: Namespace) -> Client:
    """A client of the service that the settings name. Raises CommandFailed for what cannot be used."""
    try:
        return Client(settings.address, credentials=credentials(settings), timeout_seconds=settings.timeout)
    except (CredentialsError, ValueError) as error:
        raise CommandFailed(str(error), USAGE) from None


def admin_connection(kind: type[AdminKind], settings: Namespace) -> AdminKind:
    """The same to AdminService: an Admin or a Recorder."""
    try:
        return kind(settings.admin_address, credentials=credentials(settings))
    except (CredentialsError, ValueError) as error:
        raise CommandFailed(str(error), USAGE) from None


def credentials(settings: Namespace) -> Credentials:
    """Token and TLS files. A file that was named wins over a token that happens to be in the environment."""
    token_file = _path(settings.token_file)
    try:
        return Credentials(
            token="" if token_file else settings.token,
            token_file=token_file,
            ca_file=_path(settings.ca_file),
            certificate_file=_path(settings.certificate_file),
            key_file=_path(settings.key_file),
            use_tls=settings.tls,
            server_name=settings.server_name,
            allows_plaintext_token=settings.plaintext_token,
        )
    except CredentialsError as error:
        raise CommandFailed(str(error), USAGE) from None


def _path(text: str) -> Path | None:
    return Path(text) if text else None
