"""docs/clients.md tells what the code does: reasons, channel options, exit codes, variables."""

import re
from pathlib import Path

from kvatlas.cli import config
from kvatlas.cli.option import CREDENTIALS
from kvatlas.client import errors
from kvatlas.client.channel import channel_options
from kvatlas.client.config import credentials_from_environment
from kvatlas.client.errors import Reason

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "clients.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading."""
    part = TEXT[TEXT.index(heading) :]
    lines = part[part.index("\n|") :].strip().split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_reason_is_told_with_its_class() -> None:
    told = {}
    for name, reasons, _ in rows("## Errors"):
        for reason in re.findall(r"[A-Z]+(?:_[A-Z]+)+|INTERNAL|DRAINING", reasons):
            if reason != "WORKER_LOST":
                assert reason not in told
                told[reason] = getattr(errors, name.strip("`"))
    assert told == errors._BY_REASON
    assert "WORKER_LOST" in TEXT
    assert len(told) == len(Reason) - 1


def test_every_channel_option_is_told_with_its_value() -> None:
    told = {name.strip("`"): value.split(":")[0] for name, value in rows("## Options for every language")}
    wanted = {name: str(value) for name, value in channel_options({}) if name != "grpc.service_config"}
    assert told.items() >= wanted.items()
    assert told.keys() == wanted.keys() | {"grpc.service_config"}


def test_exit_codes_and_variables_are_those_of_the_command() -> None:
    told = re.findall(r"\b(\d+) [a-z]", TEXT[TEXT.index("Exit codes:") :].split("\n\n")[0])
    assert told == re.findall(r"\b(\d+) [a-z]", config.EXIT_CODES)
    variables = set(re.findall(r"KVATLAS_[A-Z_]+", " ".join(map(" ".join, rows("### Credentials")))))
    assert variables == {f"KVATLAS_{option.name.upper()}" for option in CREDENTIALS}
    for variable in variables - {"KVATLAS_TOKEN_FILE"}:
        pair = {"KVATLAS_CERTIFICATE_FILE": "x", "KVATLAS_KEY_FILE": "x"} if "_FILE" in variable else {}
        found = credentials_from_environment(pair | {variable: "1"})
        assert found != credentials_from_environment(pair) or variable in pair
