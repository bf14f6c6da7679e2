"""`kvatlas dashboard`: becomes `python -m dashboard`. Imports nothing of it: it is a process of its own."""

import importlib.util
import os
import sys
from argparse import Namespace

from kvatlas.cli import config
from kvatlas.cli.exits import USAGE, CommandFailed

NEEDS = ("dashboard", "streamlit", "grpc", "numpy")


def run(settings: Namespace) -> int:
    """Does not return: signals and the exit code are the dashboard's own from here on."""
    for name in NEEDS:
        if importlib.util.find_spec(name) is None:
            raise CommandFailed(f"{name} is not installed: pip install 'kvatlas[dashboard]'", USAGE)
    command = command_of(settings)
    os.execve(command[0], command, config.child_environment())


def command_of(settings: Namespace) -> list[str]:
    """The command line of the process."""
    flags = {
        "server": settings.address,
        "listen": settings.listen,
        "token-file": settings.token_file,
        "server-ca": settings.ca_file,
        "certificate-file": settings.certificate_file,
        "key-file": settings.key_file,
        "grafana-url": settings.grafana_url,
        "ready-file": settings.ready_file,
        "log-level": settings.log_level,
    }
    command = [sys.executable, "-m", "dashboard"]
    for name, value in flags.items():
        if value:
            command += [f"--{name}", str(value)]
    if settings.demo:
        command.append("--demo")
    return command + config.setting_flags("--set", settings.set)
