"""Settings of a program: flags over variables over a TOML file over defaults, into a frozen dataclass.

A config class makes its fields with `option()`; a `Reader` fills it. A name that does not exist and a
value of the wrong kind or out of its range are a ConfigError with a sentence. What the options mean, and
which of them fit together, only the config classes know. The environment is handed in, never read here.
"""

import argparse
import difflib
import os
import tempfile
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off"})
MAX_PORT = 65_535
LARGEST = 2.0**63  # beyond it no setting means anything, and much of what takes numbers cannot hold them


class ConfigError(Exception):
    """A setting that does not exist or is out of its range; the text is for the user."""

    reason = "INVALID_SETTING"


class OneLineParser(argparse.ArgumentParser):
    """Says in one line what is wrong, and what may have been meant; --help has the rest."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Flags that nobody knows are told by the parser of their command, which knows the others."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [each for each in self._option_string_actions if each.startswith("--")]
            meant = _meant(unknown[0].partition("=")[0], flags, "--")
            self.error(f"not understood: {' '.join(unknown)}{meant}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def no_such_setting(unknown: Collection[str], known: Iterable[str], prefix: str = "") -> str:
    """Names that nobody knows, in a sentence; of a single one what may have been meant.

    All begin with `prefix`, which makes none of them closer.
    """
    names = sorted(unknown)
    return f"no such setting: {', '.join(names)}{_meant(names[0], known, prefix) if len(names) == 1 else ''}"


def _meant(name: str, known: Iterable[str], prefix: str = "") -> str:
    endings = [each.removeprefix(prefix) for each in known]
    near = difflib.get_close_matches(name.removeprefix(prefix), endings, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    bare: Callable[[], Any] | None = None,
    metavar: str = "",
) -> Any:
    """A field of a config class; `bare` gives the value of its flag where none follows the flag."""
    limits = {"choices": choices, "low": low, "high": high}
    return field(default=default, metadata={"help": help, "bare": bare, "metavar": metavar, **limits})


@dataclass(frozen=True, slots=True)
class Reader(Generic[Config]):
    """Where the settings of one program come from."""

    config: type[Config]  # a dataclass whose fields are made by option()
    program: str  # as users call it
    prefix: str  # of its variables
    description: str

    def read(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
        """The config of a command line. Raises ConfigError; --help and bad flags end the program."""
        parsed = vars(self._parser().parse_args(arguments))
        file_name = parsed.pop("config") or environment.get(self.prefix + "CONFIG")
        parsed.pop("print_config")
        values: dict[str, Any] = self._from_file(Path(file_name)) if file_name else {}
        values |= self._from_environment(environment)
        values |= {name: value for name, value in parsed.items() if value is not None}
        return self.config(**values)

    def wants_print(self, arguments: Sequence[str]) -> bool:
        """Whether the command line asks to show the config and end."""
        return bool(self._parser().parse_args(arguments).print_config)

    def _parser(self) -> argparse.ArgumentParser:
        parser = OneLineParser(
            prog=self.program,
            allow_abbrev=False,
            description=self.description,
            epilog=f"Each flag is also a variable {self.prefix}NAME and a key of the TOML file.",
        )
        parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
        parser.add_argument(
            "--print-config", action="store_true", help="show the settings that would be used"
        )
        for setting in fields(self.config):
            _add_flag(parser, setting)
        return parser

    def _from_file(self, path: Path) -> dict[str, Any]:
        try:
            table = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"config: {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # also UTF-8's, and of what is too long or too deep
            raise ConfigError(f"config: {path}: {error}") from None
        known = {setting.name: setting.type for setting in fields(self.config)}
        if unknown := table.keys() - known.keys():
            raise ConfigError(f"config: {path}: {no_such_setting(unknown, known)}")
        return {name: _typed(known[name], value, f"config: {path}: {name}") for name, value in table.items()}

    def _from_environment(self, environment: Mapping[str, str]) -> dict[str, Any]:
        known = {self.prefix + setting.name.upper(): setting for setting in fields(self.config)}
        given = {name: text for name, text in environment.items() if name.startswith(self.prefix)}
        given.pop(self.prefix + "CONFIG", None)
        if unknown := given.keys() - known.keys():
            raise ConfigError(f"environment: {no_such_setting(unknown, known, self.prefix)}")
        return {known[name].name: _parsed(known[name].type, text, name) for name, text in given.items()}


def range_faults(config: "DataclassInstance") -> list[str]:
    """A sentence for each setting that is none of its choices or out of its range."""
    return [fault for setting in fields(config) if (fault := _fault(setting, getattr(config, setting.name)))]


def as_toml(config: "DataclassInstance") -> str:
    """One line per setting, as a TOML file that gives this config again."""
    return "\n".join(
        f"# {name} is automatic" if value is None else f"{name} = {_toml(value)}"
        for name, value in asdict(config).items()
    )


def is_port(text: str) -> bool:
    """Whether a text is the number of a port: ASCII digits and not many, all else `int` may refuse."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= MAX_PORT


def socket_folder(worker_id: str, environment: Mapping[str, str]) -> Path:
    """Folder of a worker's ipc sockets, private to the user: both ends look there by default."""
    base = environment.get("XDG_RUNTIME_DIR")
    root = Path(base) / "kvatlas" if base else Path(tempfile.gettempdir()) / f"kvatlas-{os.getuid()}"
    return root / worker_id


def state_folder(environment: Mapping[str, str]) -> Path:
    """Folder of what a process leaves behind for its user, as the XDG base directories have it."""
    base = environment.get("XDG_STATE_HOME")
    home = Path(environment.get("HOME") or tempfile.gettempdir())
    return (Path(base) if base else home / ".local" / "state") / "kvatlas"


def _add_flag(parser: argparse.ArgumentParser, setting: Any) -> None:
    flag = "--" + setting.name.replace("_", "-")
    text = setting.metadata["help"].replace("%", "%%")
    choices, bare = setting.metadata["choices"] or None, setting.metadata["bare"]
    metavar = None if choices else setting.metadata["metavar"] or _METAVARS.get(setting.type)
    if setting.type in (bool, bool | None):
        shown = "" if setting.default is None else f" (default: {'on' if setting.default else 'off'})"
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text + shown)
    elif bare:
        parser.add_argument(
            flag, nargs="?", type=_flag_value(setting.type), const=bare(), metavar=metavar, help=text
        )
    else:
        shown = f" (default: {setting.default})" if setting.default not in ("", ()) else ""
        parser.add_argument(
            flag, type=_flag_value(setting.type), choices=choices, metavar=metavar, help=text + shown
        )


def _flag_value(kind: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return _KINDS[kind](text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {_KIND_NAMES[kind]}") from None

    return read


def _texts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in _texts(text))


def _flag(text: str) -> bool:
    if text.lower() not in TRUE | FALSE:
        raise ValueError(text)
    return text.lower() in TRUE


# What a text of a flag or a variable becomes, and what a user is told that it should be.
_KINDS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    str: str,
    bool: _flag,
    bool | None: _flag,
    tuple[str, ...]: _texts,
    tuple[float, ...]: _numbers,
}
_KIND_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    bool | None: "true or false",
    tuple[str, ...]: "a list",
    tuple[float, ...]: "a list",
}
_METAVARS: dict[Any, str] = {
    int: "N",
    float: "X",
    str: "TEXT",
    tuple[str, ...]: "LIST",
    tuple[float, ...]: "LIST",
}
_LIST_PARTS: dict[Any, type] = {tuple[str, ...]: str, tuple[float, ...]: float}


def _typed(kind: Any, value: Any, where: str) -> Any:
    """A value of TOML; whole numbers pass where a number is wanted."""
    if kind in _LIST_PARTS and isinstance(value, list):
        return tuple(_typed(_LIST_PARTS[kind], item, where) for item in value)
    if kind is float and type(value) is int:
        return float(max(-LARGEST, min(value, LARGEST)))  # a float may hold no more; it is out of range
    if type(value) is kind or (kind == bool | None and type(value) is bool):
        return value
    raise ConfigError(f"{where} = {value!r} is not {_KIND_NAMES[kind]}")


def _parsed(kind: Any, text: str, name: str) -> Any:
    """A value of the environment."""
    try:
        return _KINDS[kind](text)
    except ValueError:
        raise ConfigError(f"environment: {name}={text!r} is not {_KIND_NAMES[kind]}") from None


def _fault(setting: Any, value: Any) -> str | None:
    choices, low, high = (setting.metadata[key] for key in ("choices", "low", "high"))
    if choices and value not in choices:
        return f"{setting.name}: {value!r} is none of {', '.join(choices)}"
    if isinstance(value, int | float) and not abs(value) < LARGEST:  # true for NaN
        return f"{setting.name}: {value} is out of range"
    if low is not None and not value >= low:
        return f"{setting.name}: {value} is less than {low}"
    if high is not None and not value <= high:
        return f"{setting.name}: {value} is more than {high}"
    return None


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return str(value)
