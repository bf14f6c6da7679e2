"""`kvatlas replay`: what a recording holds, checked; the pool at any moment. Needs the worker's code."""

import subprocess
import sys
from argparse import Namespace

from kvatlas.cli.config import child_environment
from kvatlas.cli.exits import USAGE, CommandFailed


def run(settings: Namespace) -> int:
    """Runs `python -m worker.trace.replay`; its exit code."""
    if not settings.file:
        raise CommandFailed("replay: which file? (see kvatlas replay --help)", USAGE)
    command = [sys.executable, "-m", "worker.trace.replay", settings.file]
    if settings.at is not None:
        command += ["--at", str(settings.at)]
    if not settings.check:
        command.append("--no-check")
    if settings.json:
        command.append("--json")
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
        check=False,
        process_group=0,  # Ctrl-C ends it here: it would end with a traceback itself
    )
    print(done.stdout, end="")  # here, where it is known what to do when nobody reads
    return done.returncode
