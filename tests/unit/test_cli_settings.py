"""Settings of the command line: precedence, names that do not exist, help, and exit codes."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvatlas.cli import config, connecting, dashboard, exits
from kvatlas.cli.__main__ import EXTRAS
from kvatlas.cli.chat import Chat, Terminal
from kvatlas.cli.option import Option
from kvatlas.cli.options import COMMANDS, options_of
from kvatlas.cli.tables import print_table
from kvatlas.client import errors
from kvatlas.client.request import Options
from kvatlas.client.sync import Client

ROOT = Path(__file__).resolve().parents[2]


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "kvatlas.toml"
    file.write_text('address = "file:1"\n[generate]\ntemperature = 0.25\ntop_p = 0.5\nmax_tokens = 3\n')
    environment = {
        "KVATLAS_CONFIG": str(file),
        "KVATLAS_GENERATE_TEMPERATURE": "0.5",
        "KVATLAS_GENERATE_MAX_TOKENS": "4",
    }
    settings = config.read(["generate", "hi", "-n", "5"], environment)
    assert settings.max_tokens == 5
    assert settings.temperature == 0.5
    assert settings.top_p == 0.5
    assert settings.address == "file:1"
    assert settings.min_p is None
    assert settings.prompt == "hi"


def test_a_commands_own_variable_wins_over_the_shared_one() -> None:
    environment = {"KVATLAS_ADDRESS": "a:1", "KVATLAS_PAGES_ADDRESS": "b:2"}
    assert config.read(["pages"], environment).address == "b:2"
    assert config.read(["top"], environment).address == "a:1"


def test_booleans_can_be_turned_off_again() -> None:
    environment = {"KVATLAS_GENERATE_JSON": "yes", "KVATLAS_GENERATE_CACHE_READ": "off"}
    settings = config.read(["generate"], environment)
    assert (settings.json, settings.cache_read) == (True, False)
    settings = config.read(["generate", "--no-json", "--cache-read"], environment)
    assert (settings.json, settings.cache_read) == (False, True)


def test_lists_come_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[generate]\nstop = ["a", "b"]\n')
    assert config.read(["generate", "--config", str(file)], {}).stop == ["a", "b"]
    assert config.read(["generate"], {"KVATLAS_GENERATE_STOP": "x\ny z"}).stop == ["x", "y z"]
    assert config.read(["generate", "--stop", "1", "--stop", "2"], {}).stop == ["1", "2"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("adress = 'x'", "no such setting: adress; did you mean address?"),
        (
            "[generate]\ntemprature = 1",
            "no such setting: generate.temprature; did you mean generate.temperature?",
        ),
        ("[pages]\nwidht = 1", "no such setting: pages.widht; did you mean pages.width?"),
        ("[generate]\nmax_tokens = 'many'", "max_tokens = 'many' is not a whole number"),
        ("[generate]\nmax_tokens = true", "is not a whole number"),
        ("[generate]\nstop = 'x'", "is not a list"),
        ("generate = 3", "must be a table"),
        ("[serve]\nrunner = 'gpu'", None),
        ("a = = b", "Invalid value"),
        ("timeout = 1" + "0" * 400, "timeout: 9.22337e.18 is not in"),
        ("timeout = 1" + "0" * 5000, "c.toml: Exceeds the limit"),
        ("a = " + "[" * 3000, "c.toml: maximum recursion"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_the_name(
    tmp_path: Path, text: str, sentence: str | None
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    command = "generate"
    if sentence is None:
        command, sentence = "serve", "runner: 'gpu' is none of torch, fake"
    with pytest.raises(config.ConfigError, match=sentence):
        config.read([command, "--config", str(file)], {})


def absurd_values(option: Option) -> list[str]:
    """Texts of the option's kind that no server, sleep or picture could take."""
    return [str(2 * option.least - 1), "1" + "0" * 30, *["nan", "inf", "-inf"][: 3 * (option.kind is float)]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_number_that_cannot_be_meant_is_refused_with_its_name(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It went on to whatever could not take it: a traceback, or a loop without a pause."""
    parser = config.build_parser()
    for option in options_of(COMMANDS[command]):
        if option.kind not in (int, float):
            continue
        for text in absurd_values(option):
            with pytest.raises(SystemExit) as ended:
                parser.parse_args([command, f"{option.flag}={text}"])
            assert ended.value.code == exits.USAGE
            shown = f"{float(text):g}" if option.kind is float else text
            assert f"{option.flag}: {shown} is not in [" in capsys.readouterr().err


def test_numbers_of_variables_and_files_are_looked_at_too(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for value, sentence in (("-1", r"-1 is not in \[0, 1e\+09\]"), ("nan", "nan is not in"), ("1", "")):
        file.write_text(f"[top]\ninterval = {value}\n")
        for arguments, environment in (
            (["top"], {"KVATLAS_TOP_INTERVAL": value}),
            (["top", "--config", str(file)], {}),
        ):
            if sentence:
                with pytest.raises(config.ConfigError, match=rf"(?i)interval: {sentence}"):
                    config.read(arguments, environment)
            else:
                assert config.read(arguments, environment).interval == 1.0
    file.write_text("[generate]\nstop_token_id = [1, -1]\n")
    with pytest.raises(config.ConfigError, match=r"stop_token_id: -1 is not in \[0, 2147483647\]"):
        config.read(["generate", "--config", str(file)], {})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serve", "--lisen", "x:1"], "serve: not understood: --lisen x:1; did you mean --listen?"),
        (["pull", "--model", "x"], "pull: not understood: --model"),
        (["pages", "now"], "pages: not understood: now"),
        (["pages", "--width", "x"], "pages: argument --width: 'x' is not a whole number"),
    ],
)
def test_a_flag_that_is_not_understood_is_told_by_its_command(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        config.read(arguments, {})
    assert ended.value.code == exits.USAGE
    assert capsys.readouterr().err == f"kvatlas {sentence} (see kvatlas {arguments[0]} --help)\n"


def test_a_missing_file_and_bad_variables_are_refused() -> None:
    with pytest.raises(config.ConfigError, match=r"nowhere\.toml: No such file"):
        config.read(["pages", "--config", "nowhere.toml"], {})
    with pytest.raises(config.ConfigError, match="KVATLAS_PAGES_WIDHT"):
        config.read(["pages"], {"KVATLAS_PAGES_WIDHT": "3"})
    with pytest.raises(config.ConfigError, match="KVATLAS_PAGES_WIDTH='x' is not a whole number"):
        config.read(["pages"], {"KVATLAS_PAGES_WIDTH": "x"})


def test_variables_of_other_commands_and_processes_are_left_alone() -> None:
    config.read(["pages"], {"KVATLAS_TOP_X": "1", "KVATLAS_WORKER_SEED": "1", "KVATLAS_SERVICE_MODEL": "m"})


def test_variables_of_the_dashboard_command_do_not_reach_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m dashboard` has the same prefix and calls the service's address `server`."""
    monkeypatch.setenv("KVATLAS_DASHBOARD_ADDRESS", "127.0.0.1:7")
    monkeypatch.setenv("KVATLAS_WORKER_SEED", "7")
    command = dashboard.command_of(config.read(["dashboard"]))
    assert command[command.index("--server") + 1] == "127.0.0.1:7"
    assert "KVATLAS_DASHBOARD_ADDRESS" not in config.child_environment()
    assert config.child_environment()["KVATLAS_WORKER_SEED"] == "7"


def test_any_setting_of_a_process_is_given_as_its_flag() -> None:
    given = ["demo=on", "access_log=OFF", "theme=dark", "ttft_buckets=1,2", "note=a=b"]
    flags = ["--demo", "--no-access-log", "--theme", "dark", "--ttft-buckets", "1,2", "--note", "a=b"]
    assert config.setting_flags("--set", given) == flags
    assert config.setting_flags("--set", None) == []
    for wrong in ("x", "=on"):
        with pytest.raises(config.ConfigError, match=f"--set '{wrong}' is not NAME=VALUE"):
            config.setting_flags("--set", [wrong])


def test_a_token_comes_from_the_environment_or_a_file_and_never_from_a_flag(tmp_path: Path) -> None:
    settings = config.read(["generate"], {"KVATLAS_TOKEN": "secret-7"})
    assert connecting.credentials(settings).metadata() == (("authorization", "Bearer secret-7"),)
    assert "secret-7" not in repr(connecting.credentials(settings))
    with pytest.raises(SystemExit):
        config.read(["generate", "--token", "secret-7"], {})
    file = tmp_path / "c.toml"
    file.write_text('token = "secret-7"\n')
    with pytest.raises(config.ConfigError, match="no such setting: token"):
        config.read(["generate", "--config", str(file)], {})
    token_file = tmp_path / "token"
    token_file.write_text("other-8\n")
    both = {"KVATLAS_TOKEN": "secret-7", "KVATLAS_TOKEN_FILE": str(token_file)}
    for command in ("generate", "pages", "admin", "record"):
        named = connecting.credentials(config.read([command], both))
        assert named.metadata() == (("authorization", "Bearer other-8"),), command


@pytest.mark.parametrize(
    ("environment", "flags", "sentence"),
    [
        ({"KVATLAS_TOKEN": "t"}, ["--address", "10.0.0.1:1"], "in plain text"),
        ({"KVATLAS_TOKEN": "two words"}, [], "visible ASCII"),
        ({}, ["--token-file", "/nowhere"], "/nowhere: No such file"),
        ({}, ["--ca-file", "/nowhere"], "CA file /nowhere: No such file"),
        ({}, ["--address", ""], "the address is empty"),
        ({}, ["--address", "http://a:1/"], "gRPC's addresses have no http://, say 'a:1'"),
        ({}, ["--certificate-file", "x.pem"], "one without the other"),
        ({}, ["--address", "a:1,b:2"], "several addresses must"),
    ],
)
def test_credentials_and_addresses_that_cannot_be_used_are_wrong_usage(
    environment: dict[str, str], flags: list[str], sentence: str
) -> None:
    settings = config.read(["generate", "hi", *flags], environment)
    with pytest.raises(exits.CommandFailed, match=sentence) as caught, connecting.connect(settings) as client:
        client.generate("hi")
    assert caught.value.code == exits.USAGE
    assert "two words" not in str(caught.value)


def test_no_two_settings_of_a_command_share_a_name_or_a_letter() -> None:
    for command in COMMANDS.values():
        names = [option.name for option in options_of(command)]
        letters = [option.short for option in options_of(command) if option.short]
        assert len(set(names)) == len(names), command.name
        assert len(set(letters)) == len(letters), command.name


def test_every_command_has_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in COMMANDS.items():
        with pytest.raises(SystemExit) as end:
            config.read([name, "--help"], {})
        assert end.value.code == 0
        text = capsys.readouterr().out
        assert "examples:" in text
        assert all(example in text for example in command.examples)
        for option in options_of(command):
            is_shown = re.search(rf"{option.flag}(?![\w-])", text) is not None
            assert is_shown is not option.is_secret, (name, option.name)


def test_help_loads_nothing_slow() -> None:
    """`kvatlas --help` answers at once: neither grpc nor protobuf, numpy, rich or torch is imported."""
    code = (
        "import sys; from kvatlas.cli.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "slow = {'grpc', 'google.protobuf', 'numpy', 'rich', 'torch', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {slow}' if slow else 0)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "protos")}, timeout=60
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (config.ConfigError("x"), 2),
        (errors.RequestError("x"), 2),
        (exits.CommandFailed("x"), 1),
        (exits.CommandFailed("x", exits.USAGE), 2),
        (errors.InvalidRequest("x"), 2),
        (errors.NotFound("x"), 2),
        (errors.Unavailable("x"), 3),
        (errors.DeadlineExceeded("x"), 4),
        (errors.Refused("x"), 5),
        (errors.PermissionDenied("x"), 5),
        (errors.ServerFailure("x"), 1),
        (errors.Incomplete("x"), 1),
        (ZeroDivisionError("x"), None),
    ],
)
def test_every_kind_of_failure_has_its_exit_code(error: Exception, code: int | None) -> None:
    assert exits.code_of(error) == code


@pytest.mark.parametrize("late", ["kvatlas.cli.config", "kvatlas.cli.pages"])
def test_an_interrupt_while_modules_are_read_is_no_traceback(late: str) -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == '{late}': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from kvatlas.cli.__main__ import main\n"
        "sys.exit(main(['pages']))"
    )
    environment = {"PYTHONPATH": str(ROOT / "protos")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (exits.INTERRUPTED, "")


@pytest.mark.parametrize(("module", "extra"), [("matplotlib", "pictures"), ("grpc", "cli"), ("rich", "cli")])
def test_a_missing_package_is_told_with_the_extra_that_has_it(module: str, extra: str) -> None:
    """`kvatlas whatif --picture` was sent to kvatlas[cli], which has no matplotlib."""
    code = (
        "import sys\n"
        "from kvatlas.cli import __main__ as cli\n"
        f"def missing(name): raise ModuleNotFoundError(name='{module}.pyplot')\n"
        "cli.importlib.import_module = missing\n"
        "sys.exit(cli.main(['pages']))"
    )
    environment = {"PYTHONPATH": str(ROOT / "protos")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == exits.USAGE
    assert done.stderr == f"kvatlas: {module}.pyplot is not installed: pip install 'kvatlas[{extra}]'\n"


def test_every_extra_that_is_named_has_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for module, extra in EXTRAS.items():
        assert any(package.startswith(module) for package in extras[extra])


def test_a_piped_table_cuts_no_name_and_wraps_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The id of a recording is what `record get` is given; in 80 columns it was cut."""
    rows = [["worker-0-20261130T100231-0", "1", "a note " * 30], ["b", "22", ""]]
    print_table(("recording", "events", "note"), rows, numbers=("events",))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].split() == ["recording", "events", "note"]
    assert lines[1] == f"worker-0-20261130T100231-0       1  {'a note ' * 30}".rstrip()
    assert lines[2].split() == ["b", "22"]


def test_words_in_brackets_and_between_colons_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A note with a closing bracket ended `record list` with a traceback, other words were left out."""
    notes = ["slow [since noon]", "[/x]", ":warning: [red]hot"]
    print_table(("recording", "note"), [("r", note) for note in notes], numbers=())
    assert [line[1:].strip() for line in capsys.readouterr().out.splitlines()[1:]] == notes


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ("pull random:tiny >&- 2>&- <&-", 0, ""),
        ("pull random:tiny > /dev/full", 1, "kvatlas: [Errno 28] No space left on device\n"),
        ("load -a 127.0.0.1:1 2> /dev/full", 3, ""),  # the code still tells what the line cannot
    ],
)
def test_what_cannot_be_read_or_written_is_no_traceback(arguments: str, code: int, complaint: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"'{sys.executable}' -m kvatlas.cli {arguments}"],
        env={"PYTHONPATH": str(ROOT / "protos"), "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (code, complaint)


def test_a_question_that_is_not_utf_8_ends_no_chat(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(Client("127.0.0.1:1"), Options(), "", is_quiet=True)
    assert Terminal(chat).take("a\udcff")
    assert capsys.readouterr().err.startswith("kvatlas: the question is not UTF-8: ")
    assert chat.turns == []


def test_a_narrow_terminal_cuts_no_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "50")
    rows = [["worker-0-20261130T100231-0", "1,234,567", "a note of words"]]
    print_table(("recording", "events", "note"), rows, numbers=("events",))
    assert "worker-0-20261130T100231-0  1,234,567  a note" in capsys.readouterr().out


def test_a_complaint_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    exits.complain("first\n  second\tthird")
    assert capsys.readouterr().err == "kvatlas: first second third\n"


@pytest.mark.parametrize(
    "arguments", [["generate", "hi", "--address", "127.0.0.1:1"], ["pages", "-a", "127.0.0.1:1"]]
)
def test_without_a_server_a_command_says_so_in_one_line(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvatlas.cli", *arguments, "--timeout", "20"],
        env={"PYTHONPATH": str(ROOT / "protos")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == exits.NO_SERVER
    assert done.stderr.count("\n") == 1, done.stderr
    assert "no server answers at 127.0.0.1:1" in done.stderr


@pytest.mark.parametrize("handler", ["strict", "surrogateescape"])  # what Python's stdin does, by locale
@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["generate", b"a\xff"], b""),
        (["generate"], b"a\xff"),
        (["chat"], b"a\xff\n"),
        (["admin", "pin", "name", "--text", "-"], b"a\xff"),
    ],
)
def test_what_is_not_utf_8_is_wrong_usage(handler: str, arguments: list[str | bytes], given: bytes) -> None:
    """It was a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "kvatlas.cli", *arguments],
        env={"PYTHONPATH": str(ROOT / "protos"), "PYTHONIOENCODING": f"utf-8:{handler}"},
        input=given,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == exits.USAGE
    assert done.stderr.startswith(b"kvatlas: an argument or the input is not UTF-8: ")
    assert done.stderr.count(b"\n") == 1
