"""`kvatlas keys FOLDER [NAMES]`: key pairs of the seam between service and worker, for tcp addresses."""

import sys
from argparse import Namespace
from pathlib import Path

from kvatlas.cli.exits import USAGE, CommandFailed
from kvatlas.seam_keys import SeamKeyError, write_pair

DEFAULT_NAMES = "worker,service"


def run(settings: Namespace) -> int:
    """Writes a pair for each name and says who needs which file."""
    if not settings.folder:
        raise CommandFailed("keys: say into which folder", USAGE)
    for name in (settings.names or DEFAULT_NAMES).split(","):
        try:
            key, pub = write_pair(Path(settings.folder), name)
        except SeamKeyError as error:
            raise CommandFailed(str(error)) from None
        sys.stdout.write(f"{key}  for {name} alone, mode 0600\n{pub}  for the other end\n")
    return 0
