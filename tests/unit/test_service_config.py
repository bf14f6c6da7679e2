"""Settings of the service: where they come from, what is refused."""

from pathlib import Path

import pytest

from service.config import ConfigError, ServiceConfig, from_args, wants_print


def test_flags_win_over_the_environment_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text('grace = 1\nmax_calls=11\nworkers = ["ipc:///a", "tcp://[::1]:1"]\nlog_level = "error"\n')
    environment = {"KVATLAS_SERVICE_MAX_CALLS": "22", "KVATLAS_SERVICE_LOG_LEVEL": "debug", "PATH": "/bin"}
    config = from_args(["--config", str(file), "--log-level", "warning"], environment)
    assert (config.grace, config.max_calls, config.log_level) == (1.0, 22, "warning")
    assert config.workers == ("ipc:///a", "tcp://[::1]:1")
    assert config.max_watches == ServiceConfig().max_watches


def test_the_printed_config_is_a_file_that_gives_it_again(tmp_path: Path) -> None:
    config = from_args(["--workers", "ipc:///a,ipc:///b", "--ttft-buckets", "0.1,1,2", "--no-access-log"], {})
    file = tmp_path / "again.toml"
    file.write_text(config.printable())
    assert from_args(["--config", str(file)], {}) == config
    assert wants_print(["--print-config"])


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ([], {"KVATLAS_SERVICE_NOTHING": "1"}, "KVATLAS_SERVICE_NOTHING"),
        ([], {"KVATLAS_SERVICE_GRACE": "long"}, "a number"),
        ([], {"KVATLAS_SERVICE_INSECURE": "maybe"}, "true or false"),
        (["--grace", "-1"], {}, "grace: -1.0 is less than 0"),
        (["--grace", "nan"], {}, "grace"),
        (["--address", "0.0.0.0:50051"], {}, "--insecure"),
        (["--address", "[::]:50051"], {}, "--insecure"),
        (["--address", "localhost"], {}, "not host:port"),
        (["--metrics-address", "127.0.0.1:99999"], {}, "not host:port"),
        (["--address", "127.0.0.1:²"], {}, "not host:port"),
        (["--address", "unix:"], {}, "address: no path"),
        (["--admin-address", "unix:"], {}, "admin_address: no path"),
        (["--workers", "dns://name:²"], {}, "not host:port"),
        (["--workers", "http://x"], {}, "neither ipc"),
        (["--workers", "ipc:///a,ipc:///a"], {}, "twice"),
        (["--itl-buckets", "1,1"], {}, "edges must grow"),
        (["--itl-buckets", "nan"], {}, "itl_buckets: an edge is no number of seconds"),
        (["--ttft-buckets", "1,inf"], {}, "ttft_buckets: an edge is no number of seconds"),
        (["--e2e-buckets=-1,1"], {}, "e2e_buckets: an edge is no number of seconds"),
        (["--config", "/nowhere.toml"], {}, "/nowhere.toml"),
    ],
)
def test_a_bad_setting_stops_the_program_with_its_name(
    arguments: list[str], environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words.replace("[", r"\[").replace("(", r"\(")):
        from_args(arguments, environment)


@pytest.mark.parametrize(
    "text",
    [
        "nothing = 1",
        "grace = true",
        "grace = 'x'",
        "workers = 'ipc:///a'",
        "max_calls = 1.5",
        "= 3",
        "grace = 1" + "0" * 5000,
        "x = " + "[" * 3000,
    ],
    ids=lambda text: text[:20],
)
def test_a_file_with_an_unknown_name_or_a_wrong_type_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        from_args(["--config", str(file)], {})


def test_an_open_address_is_allowed_when_asked_for_and_loopback_always() -> None:
    assert from_args(["--address", "0.0.0.0:50051", "--insecure"], {}).insecure
    for address in ("127.0.0.1:0", "localhost:1", "[::1]:1", "unix:/tmp/x.sock"):
        assert from_args(["--address", address], {}).address == address


def test_the_name_of_the_process_is_stable_over_restarts_and_differs_by_port() -> None:
    one, two = (from_args(["--address", f"127.0.0.1:{port}"], {}) for port in (1, 2))
    assert one.instance == from_args(["--address", "127.0.0.1:1"], {}).instance != two.instance
    assert from_args(["--instance-id", "me"], {}).instance == "me"
