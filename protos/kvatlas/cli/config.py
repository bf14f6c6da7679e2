"""Settings of a command: flags over variables over a TOML file over defaults.

The only file of the command line that reads or sets the environment. A name that does not exist and a
value of the wrong kind are a ConfigError with a sentence.
"""

import argparse
import os
import shutil
import sys
import tempfile
import tomllib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvatlas.cli.option import Command, Option
from kvatlas.cli.options import COMMANDS, SHARED, options_of
from kvatlas.settings import LARGEST, OneLineParser, no_such_setting

PREFIX = "KVATLAS_"
DASHBOARD_PREFIX = f"{PREFIX}DASHBOARD_"
TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off"})
MAX_SOCKET_PATH = 107  # bytes of a unix socket's path on Linux

EXIT_CODES = """\
exit codes: 0 done · 1 failed · 2 wrong usage, settings or request · 3 no server, or not ready
            4 deadline · 5 refused by a limit or for want of rights · 130 interrupted"""

PRECEDENCE = """\
settings: a flag wins over KVATLAS_<COMMAND>_<NAME> in the environment, that over the file named by
          --config or KVATLAS_CONFIG (tables [generate], [serve], ...), that over the default;
          KVATLAS_ADDRESS, KVATLAS_TIMEOUT, KVATLAS_TOKEN_FILE, KVATLAS_CA_FILE and their like hold for
          all commands. A token itself is taken from KVATLAS_TOKEN only: others can see flags."""


class ConfigError(Exception):
    """A setting that does not exist or does not fit; the text is for the user."""


def read(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Namespace:
    """The settings of a command line; `command` says which. --help and bad flags end as argparse does."""
    environment = os.environ if environment is None else environment
    given = vars(build_parser().parse_args(arguments))
    command = COMMANDS[given["command"]]
    file_name = given.pop("config", None) or environment.get(PREFIX + "CONFIG")
    values: dict[str, Any] = {option.name: option.default for option in options_of(command)}
    if file_name:
        values |= _from_file(Path(file_name), command)
    values |= _from_environment(environment, command)
    values |= given
    return Namespace(**values)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Flags that are not given leave no trace."""
    parser = OneLineParser(
        prog="kvatlas",
        description="An LLM token server that shows you its KV cache.",
        epilog=f"kvatlas COMMAND --help has examples.\n\n{PRECEDENCE}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS.values():
        _add_command(commands, command)
    return parser


def prepare_environment() -> None:
    """What gRPC and the terminal need before they are loaded: no log lines of C-core among our own."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets ?, not a traceback


def terminal_width() -> int:
    """Columns of the terminal; COLUMNS wins, 80 where there is none."""
    return shutil.get_terminal_size((80, 24)).columns


def child_environment() -> dict[str, str]:
    """Environment of a process that we start: our own import path, so that it runs from a checkout too.

    Without the variables of `kvatlas dashboard`, which are flags by now: `python -m dashboard` has the same
    prefix, and knows some of them by other names.
    """
    environment = {name: text for name, text in os.environ.items() if not name.startswith(DASHBOARD_PREFIX)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def setting_flags(flag: str, given: Sequence[str] | None) -> list[str]:
    """NAME=VALUE as users wrote them after `flag`, as flags of a process."""
    flags = []
    for setting in given or ():
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"{flag} {setting!r} is not NAME=VALUE")
        name = name.replace("_", "-")
        if value.lower() in ("on", "true", "off", "false"):
            flags.append(f"--{'' if value.lower() in TRUE else 'no-'}{name}")
        else:
            flags += [f"--{name}", value]
    return flags


def make_runtime_folder() -> Path:
    """A new folder for sockets, mode 0700, where their paths are short enough."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if base and os.access(base, os.W_OK | os.X_OK) and len(os.fsencode(base)) < MAX_SOCKET_PATH - 32:
            return Path(tempfile.mkdtemp(prefix="kvatlas-", dir=base))
    raise ConfigError("no folder for sockets: neither XDG_RUNTIME_DIR, TMPDIR nor /tmp can be written")


class _Version(argparse.Action):
    """Prints the version; looks it up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and leave")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"kvatlas {version('kvatlas')}")
        except PackageNotFoundError:
            print("kvatlas (not installed, run from a checkout)")
        parser.exit()


def _add_command(commands: Any, command: Command) -> None:
    examples = "\n".join(f"  {example}" for example in command.examples)
    parser = commands.add_parser(
        command.name,
        help=command.summary,
        usage=" ".join([f"kvatlas {command.name} [options]", *(f"[{a.name}]" for a in command.arguments)]),
        description=command.description,
        epilog=f"examples:\n{examples}\n\n{PRECEDENCE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for argument in command.arguments:
        parser.add_argument(argument.name, nargs="?", default=None, help=argument.help)
    for option in options_of(command):
        if not option.is_secret:
            _add_flag(parser, option)
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")


def _add_flag(parser: argparse.ArgumentParser, option: Option) -> None:
    names = [f"-{option.short}"] if option.short else []
    names.append(option.flag)
    shown = "" if option.default in (None, "", False) else f" (default: {_shown(option.default)})"
    text = (option.help + shown).replace("%", "%%")
    if option.kind is bool:
        parser.add_argument(*names, dest=option.name, action=argparse.BooleanOptionalAction, help=text)
    elif option.choices:
        parser.add_argument(*names, dest=option.name, choices=tuple(option.choices), help=text)
    else:
        parser.add_argument(
            *names,
            dest=option.name,
            action="append" if option.is_list else "store",
            type=lambda given: _from_flag(option, given),
            metavar=option.metavar,
            help=text,
        )


def _from_flag(option: Option, text: str) -> Any:
    try:
        value = option.kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {_KIND_NAMES[option.kind]}") from None
    if why := option.wrong(value):
        raise argparse.ArgumentTypeError(why)
    return value


def _shown(default: Any) -> str:
    return "on" if default is True else f"{default:g}" if isinstance(default, float) else str(default)


def _from_file(path: Path, command: Command) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also UTF-8's, and of what is too long or too deep
        raise ConfigError(f"config {path}: {error}") from None
    shared = {option.name: option for option in SHARED if not option.is_secret}
    given = table.keys() - COMMANDS.keys()
    known = set(shared)
    for name, other in COMMANDS.items():
        given |= {f"{name}.{key}" for key in _table(table, name, path)}
        known |= {f"{name}.{option.name}" for option in options_of(other) if not option.is_secret}
    if unknown := given - known:
        raise ConfigError(f"config {path}: {no_such_setting(unknown, known)}")
    options = {option.name: option for option in options_of(command) if not option.is_secret}
    values = {key: value for key, value in table.items() if key in shared and key in options}
    values |= _table(table, command.name, path)
    return {key: _typed(options[key], value, f"config {path}: {key}") for key, value in values.items()}


def _table(table: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    part = table.get(name, {})
    if not isinstance(part, dict):
        raise ConfigError(f"config {path}: {name} must be a table: [{name}]")
    return part


def _from_environment(environment: Mapping[str, str], command: Command) -> dict[str, Any]:
    own = f"{PREFIX}{command.name.upper()}_"
    options = options_of(command)
    known = {f"{own}{option.name.upper()}": option for option in options}
    if unknown := {name for name in environment if name.startswith(own)} - known.keys():
        raise ConfigError(f"environment: {no_such_setting(unknown, known, own)}")
    shared = {f"{PREFIX}{option.name.upper()}": option for option in SHARED if option in options}
    return {
        option.name: _parsed(option, environment[name], name)
        for name, option in (shared | known).items()
        if name in environment
    }


def _typed(option: Option, value: Any, where: str) -> Any:
    """A value of TOML; whole numbers pass where a number is wanted."""
    if option.is_list and isinstance(value, list):
        single = replace(option, is_list=False)
        return [_typed(single, item, where) for item in value]
    if option.kind is float and type(value) is int:
        value = float(max(-LARGEST, min(value, LARGEST)))  # a float may hold no more; it is out of range
    if option.is_list or type(value) is not option.kind:
        wanted = "a list" if option.is_list else _KIND_NAMES[option.kind]
        raise ConfigError(f"{where} = {value!r} is not {wanted}")
    return _fitting(option, value, where)


def _parsed(option: Option, text: str, where: str) -> Any:
    """A value of the environment."""
    if option.is_list:
        single = replace(option, is_list=False)
        return [_parsed(single, line, where) for line in text.splitlines()]
    if option.kind is bool:
        if text.lower() not in TRUE | FALSE:
            raise ConfigError(f"{where}={text!r} is not true or false")
        return text.lower() in TRUE
    try:
        value = option.kind(text)
    except ValueError:
        raise ConfigError(f"{where}={text!r} is not {_KIND_NAMES[option.kind]}") from None
    return _fitting(option, value, where)


def _fitting(option: Option, value: Any, where: str) -> Any:
    if why := option.wrong(value):
        raise ConfigError(f"{where}: {why}")
    return value


_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
