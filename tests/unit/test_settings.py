"""How a config class is filled: every kind of value from every source, and refusals that say where."""

import ast
import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvatlas import settings
from kvatlas.settings import (
    ConfigError,
    Reader,
    as_toml,
    is_port,
    option,
    range_faults,
    socket_folder,
    state_folder,
)


@dataclass(frozen=True, slots=True)
class Oven:
    trays: int = option(2, "trays that go in", low=1, high=9)
    heat: float = option(180.0, "100% is too much", low=0.0)
    name: str = option("", "name; empty: none")
    light: bool = option(True, "a lamp")
    fan: bool | None = option(None, "a fan; default: as the oven likes")
    mode: str = option("bake", "what it does", choices=("bake", "grill"))
    dishes: tuple[str, ...] = option((), "what goes in")
    alarms: tuple[float, ...] = option((), "when it rings")
    guard: int = option(0, "who watches", low=0, bare=lambda: 7, metavar="WHO")


READER = Reader(Oven, program="oven", prefix="OVEN_", description="Bakes.")

# Nothing here is a default, and every kind of value is here.
FULL = Oven(3, 200.0, 'a"b\\\n', False, True, "grill", ("pie", "cake"), (0.5, 2.0), 4)


def test_variables_give_every_kind_of_value() -> None:
    environment = {
        "OVEN_TRAYS": "3",
        "OVEN_HEAT": "2e2",
        "OVEN_NAME": FULL.name,
        "OVEN_LIGHT": "OFF",
        "OVEN_FAN": "yes",
        "OVEN_MODE": "grill",
        "OVEN_DISHES": "pie, cake,",
        "OVEN_ALARMS": "0.5,2",
        "OVEN_GUARD": "4",
        "OVENS": "not ours",
    }
    assert READER.read([], environment) == FULL


def test_flags_give_every_kind_of_value() -> None:
    flags = "--trays=3 --heat=200 --no-light --fan --mode=grill --dishes=pie,cake --alarms=0.5,2 --guard=4"
    assert READER.read([*flags.split(), "--name", FULL.name], {}) == FULL


def test_what_is_printed_is_a_file_that_gives_every_kind_of_value(tmp_path: Path) -> None:
    file = tmp_path / "oven.toml"
    file.write_text(as_toml(FULL))
    assert READER.read([], {"OVEN_CONFIG": str(file)}) == FULL
    assert "# fan is automatic" in as_toml(Oven()).splitlines()
    assert "fan" not in tomllib.loads(as_toml(Oven()))


def test_a_flag_names_the_file_before_a_variable_does(tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text("trays = 1\nheat = 100")
    two.write_text("trays = 9")
    config = READER.read(["--config", str(one)], {"OVEN_CONFIG": str(two)})
    assert (config.trays, config.heat) == (1, 100.0)
    assert type(config.heat) is float


def test_a_bare_flag_asks_for_its_value_only_when_it_is_given() -> None:
    assert READER.read(["--guard", "--fan"], {}).guard == 7
    assert READER.read(["--guard", "5"], {}).guard == 5
    assert READER.read([], {}).guard == 0


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"OVEN_TRAY": "1", "OVEN_A": "1"}, "environment: no such setting: OVEN_A, OVEN_TRAY"),
        ({"OVEN_TRAY": "1"}, "environment: no such setting: OVEN_TRAY; did you mean OVEN_TRAYS?"),
        ({"OVEN_ROOF": "1"}, "environment: no such setting: OVEN_ROOF"),
        ({"OVEN_TRAYS": "1.5"}, "environment: OVEN_TRAYS='1.5' is not a whole number"),
        ({"OVEN_HEAT": "hot"}, "environment: OVEN_HEAT='hot' is not a number"),
        ({"OVEN_LIGHT": ""}, "environment: OVEN_LIGHT='' is not true or false"),
        ({"OVEN_FAN": "2"}, "environment: OVEN_FAN='2' is not true or false"),
        ({"OVEN_ALARMS": "1,x"}, "environment: OVEN_ALARMS='1,x' is not a list"),
        ({"OVEN_CONFIG": "/nowhere/o.toml"}, "config: /nowhere/o.toml: No such file or directory"),
    ],
)
def test_a_bad_variable_is_refused_with_a_sentence(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        READER.read([], environment)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tray = 1\nb = 2", "no such setting: b, tray"),
        ("trays = true", "trays = True is not a whole number"),
        ("trays = 1.0", "trays = 1.0 is not a whole number"),
        ("heat = false", "heat = False is not a number"),
        ("name = 3", "name = 3 is not a text"),
        ("light = 1", "light = 1 is not true or false"),
        ("fan = 'on'", "fan = 'on' is not true or false"),
        ("dishes = 'pie'", "dishes = 'pie' is not a list"),
        ("alarms = [1, 'x']", "alarms = 'x' is not a number"),
    ],
)
def test_a_bad_file_is_refused_with_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "oven.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        READER.read(["--config", str(file)], {})
    assert str(caught.value) == f"config: {file}: {sentence}"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--tray", "1"], "not understood: --tray 1; did you mean --trays?"),
        (["--tray=1"], "not understood: --tray=1; did you mean --trays?"),
        (["--zzz"], "not understood: --zzz"),
        (["pie"], "not understood: pie"),
        (["--trays", "x"], "argument --trays: 'x' is not a whole number"),
        (["--alarms", "x"], "argument --alarms: 'x' is not a list"),
        (["--trays"], "argument --trays: expected one argument"),
        (["--mode", "fry"], "argument --mode: invalid choice: 'fry' (choose from 'bake', 'grill')"),
    ],
)
def test_a_bad_flag_ends_the_program_as_wrong_usage_with_one_line(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        READER.read(flags, {})
    assert end.value.code == 2
    said = capsys.readouterr().err.replace("(choose from bake, grill)", "(choose from 'bake', 'grill')")
    assert said == f"oven: {sentence} (see oven --help)\n"


def test_every_option_out_of_its_range_is_named() -> None:
    assert range_faults(FULL) == []
    assert range_faults(Oven(trays=0, heat=float("nan"), mode="fry", guard=-1)) == [
        "trays: 0 is less than 1",
        "heat: nan is out of range",
        "mode: 'fry' is none of bake, grill",
        "guard: -1 is less than 0",
    ]
    assert range_faults(Oven(trays=10)) == ["trays: 10 is more than 9"]
    assert range_faults(Oven(heat=float(10**30))) == ["heat: 1e+30 is out of range"]
    assert range_faults(Oven(guard=10**30)) == [f"guard: {10**30} is out of range"]


def test_help_shows_flags_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        READER.read(["--help"], {})
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    for part in ("100% is too much (default: 180.0)", "a lamp (default: on)", "OVEN_NAME", "[WHO]", "{bake,"):
        assert part in text
    assert "name; empty: none --light" in text, "an empty default is not shown"


def test_a_number_that_no_float_holds_is_out_of_range(tmp_path: Path) -> None:
    path = tmp_path / "oven.toml"
    path.write_text(f"heat = -1{'0' * 400}")
    assert "heat: -9.223372036854776e+18 is out of range" in range_faults(
        READER.read(["--config", str(path)], {})
    )


def test_a_file_that_is_not_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "oven.toml"
    path.write_bytes(b"trays = \xff")
    with pytest.raises(ConfigError, match=r"oven\.toml"):
        READER.read(["--config", str(path)], {})


def test_a_port_is_a_number_that_a_socket_takes() -> None:
    assert [text for text in ("0", "80", "00080", "65535") if not is_port(text)] == []
    for text in ("", "65536", "-1", "+1", "1_0", " 1", "²", "٨٠", "x", "9" * 5000):
        assert not is_port(text), text


def test_only_a_flag_asks_to_print() -> None:
    assert READER.wants_print(["--print-config", "--trays", "1"])
    assert not READER.wants_print(["--trays", "1"])


def test_both_ends_find_the_sockets_of_a_worker() -> None:
    assert socket_folder("w", {"XDG_RUNTIME_DIR": "/run/user/1"}) == Path("/run/user/1/kvatlas/w")
    fallback = socket_folder("w", {"XDG_RUNTIME_DIR": ""})
    assert fallback.is_absolute()
    assert fallback == socket_folder("w", {})
    assert fallback.name == "w"


def test_the_module_needs_the_standard_library_alone() -> None:
    tree = ast.parse(Path(settings.__file__).read_text())
    plain = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    named = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in plain | named}
    assert roots - sys.stdlib_module_names == {"_typeshed"}, "for type checkers only"


def test_what_tests_leave_behind_is_not_left_with_the_user() -> None:
    """Recordings of audits that tests let fail lay among the user's own."""
    assert Path.home() not in state_folder(os.environ).parents
