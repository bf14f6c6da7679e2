"""What the client library takes from the environment, and only when it is asked to."""

import os
from collections.abc import Mapping
from pathlib import Path

from kvatlas.client.credentials import Credentials

PREFIX = "KVATLAS_"
TRUE = frozenset({"1", "true", "yes", "on"})


def credentials_from_environment(environment: Mapping[str, str] | None = None) -> Credentials:
    """KVATLAS_TOKEN or KVATLAS_TOKEN_FILE, KVATLAS_CA_FILE and the others: docs/clients.md has them.

    Raises CredentialsError for a combination that makes no sense.
    """
    given = os.environ if environment is None else environment

    def path(name: str) -> Path | None:
        text = given.get(PREFIX + name, "")
        return Path(text) if text else None

    def is_on(name: str) -> bool:
        return given.get(PREFIX + name, "").lower() in TRUE

    return Credentials(
        token=given.get(PREFIX + "TOKEN", ""),
        token_file=path("TOKEN_FILE"),
        ca_file=path("CA_FILE"),
        certificate_file=path("CERTIFICATE_FILE"),
        key_file=path("KEY_FILE"),
        use_tls=is_on("TLS"),
        server_name=given.get(PREFIX + "SERVER_NAME", ""),
        allows_plaintext_token=is_on("PLAINTEXT_TOKEN"),
    )
