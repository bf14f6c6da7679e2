"""The manifests: built by kustomize, speaking of processes as they are, as hardened as the compose file."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboard import config as dashboard_config
from kvatlas.seam_keys import write_pair
from service import config as service_config
from worker import config as worker_config
from worker.link.addresses import AddressError, IpcGuard

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "k8s"
READERS: dict[str, Any] = {
    "worker": worker_config.from_args,
    "service": service_config.from_args,
    "dashboard": dashboard_config.from_args,
}
needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl")


def documents() -> list[dict[str, Any]]:
    return [
        each for path in (FOLDER / "base").glob("*.yaml") for each in yaml.safe_load_all(path.read_text())
    ]


def pods() -> list[dict[str, Any]]:
    return [each["spec"]["template"]["spec"] for each in documents() if each["kind"] == "Deployment"]


def containers() -> dict[str, dict[str, Any]]:
    return {
        each["name"]: each for pod in pods() for each in (*pod.get("initContainers", ()), *pod["containers"])
    }


def settings(name: str) -> dict[str, str]:
    return {each["name"]: each["value"] for each in containers()[name]["env"]}


@needs_kubectl
@pytest.mark.parametrize(("overlay", "tag"), [("base", "0.1.0"), ("gpu", "0.1.0-cuda")])
def test_kustomize_builds_it(overlay: str, tag: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / overlay)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    [deployment] = [
        each
        for each in yaml.safe_load_all(done.stdout)
        if each["kind"] == "Deployment" and each["metadata"]["name"] == "kvatlas"
    ]
    worker = deployment["spec"]["template"]["spec"]["containers"][0]
    assert worker["image"] == f"kvatlas-worker:{tag}"
    assert ("nvidia.com/gpu" in worker["resources"]["limits"]) == (overlay == "gpu")
    assert {"name": "KVATLAS_WORKER_METRICS_HOST", "value": "0.0.0.0"} in worker["env"], "nothing is lost"


@pytest.fixture(scope="module")
def fleet() -> dict[tuple[str, str], dict[str, Any]]:
    """What kustomize makes of deploy/k8s/fleet, by kind and name."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / "fleet")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout)}


@needs_kubectl
def test_in_a_fleet_both_ends_of_the_seam_take_their_keys_and_find_each_other(
    fleet: dict[tuple[str, str], dict[str, Any]], tmp_path: Path
) -> None:
    secrets = {name: write_pair(tmp_path, name) for name in ("worker", "service")}
    readers = {
        "worker": (fleet["StatefulSet", "kvatlas-worker"], worker_config.from_args),
        "service": (fleet["Deployment", "kvatlas"], service_config.from_args),
    }
    for name, (owner, read) in readers.items():
        pod = owner["spec"]["template"]["spec"]
        [container] = pod["containers"]
        [keys] = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "keys"]
        mounted = {f"/etc/kvatlas/seam/{item['path']}" for item in keys["items"]}
        assert keys["defaultMode"] == 0o440, "what is accepted of a key file"
        assert not any(f"{other}.key" in path for other in secrets if other != name for path in mounted)
        environment = {"PATH": "/bin"}
        for each in container["env"]:
            if each["name"].startswith("KVATLAS_"):
                value = each.get("value", "kvatlas-worker-0").replace("$(POD_IP)", "10.1.2.3")
                if value.startswith("/etc/kvatlas/seam/"):
                    assert value in mounted
                    value = str(tmp_path / Path(value).name)
                elif value.startswith("/etc/"):
                    (tmp_path / each["name"]).touch()
                    value = str(tmp_path / each["name"])
                environment[each["name"]] = value
        config = read([], environment)
        assert config.seam_files is not None
        assert config.seam_files.read()
        assert not config.insecure
    [worker] = config.workers
    service = fleet["Service", "kvatlas-worker"]
    assert worker == f"dns://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert service["spec"]["clusterIP"] == "None"


@needs_kubectl
def test_in_a_fleet_only_services_reach_the_seam_and_every_pod_is_hardened(
    fleet: dict[tuple[str, str], dict[str, Any]],
) -> None:
    assert ("PersistentVolumeClaim", "kvatlas-models") not in fleet
    rules = fleet["NetworkPolicy", "kvatlas-worker"]["spec"]["ingress"]
    [seam] = [rule for rule in rules if {"port": "engine"} in rule["ports"]]
    assert seam["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kvatlas"}}}]
    for kind, name in (("StatefulSet", "kvatlas-worker"), ("Deployment", "kvatlas")):
        spec = fleet[kind, name]["spec"]
        pod = spec["template"]["spec"]
        assert spec["replicas"] == 2
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        templates = {each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", ())}
        known = {volume["name"] for volume in pod["volumes"]} | templates
        for container in (*pod["initContainers"], *pod["containers"]):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert re.search(r":\d+\.\d+\.\d+$", container["image"])
            assert {mount["name"] for mount in container["volumeMounts"]} <= known


@pytest.mark.parametrize("name", READERS)
def test_each_process_takes_its_variables(name: str, tmp_path: Path) -> None:
    """Read by the process's own config; files that a secret brings are put in place first."""
    environment = settings(name)
    for variable, value in environment.items():
        if value.startswith("/etc/"):
            (tmp_path / variable).write_text("")
            environment[variable] = str(tmp_path / variable)
    READERS[name]([], environment)


def test_both_ends_of_the_seam_are_in_one_folder_of_the_pods_memory() -> None:
    assert (
        settings("service")["KVATLAS_SERVICE_WORKERS"] == settings("worker")["KVATLAS_WORKER_ENGINE_ADDRESS"]
    )
    places = [
        mount["mountPath"]
        for name in ("worker", "service")
        for mount in containers()[name]["volumeMounts"]
        if mount["name"] == "seam"
    ]
    assert places == ["/run/kvatlas"] * 2
    assert settings("worker")["KVATLAS_WORKER_ENGINE_ADDRESS"].startswith("ipc:///run/kvatlas/")


def test_the_worker_takes_the_folder_that_is_made_for_its_sockets(tmp_path: Path) -> None:
    """Kubernetes makes an emptyDir that everyone may write (mode 2777): too open for the worker."""
    mounted = tmp_path / "run" / "kvatlas"
    mounted.mkdir(parents=True)
    mounted.chmod(0o2777)
    address = settings("worker")["KVATLAS_WORKER_ENGINE_ADDRESS"].replace("/run", str(tmp_path / "run"), 1)
    with pytest.raises(AddressError):
        IpcGuard().take(address)
    command = [word.replace("/run", str(tmp_path / "run"), 1) for word in containers()["seam"]["command"]]
    subprocess.run(command, check=True, timeout=10)
    guard = IpcGuard()
    guard.take(address)
    guard.release()


def test_tokens_are_never_in_plaintext_between_pods() -> None:
    assert "KVATLAS_SERVICE_INSECURE" not in settings("service")
    assert {"KVATLAS_SERVICE_AUTH_FILE", "KVATLAS_SERVICE_TLS_CERTIFICATE"} <= settings("service").keys()
    assert {"KVATLAS_DASHBOARD_TOKEN_FILE", "KVATLAS_DASHBOARD_SERVER_CA"} <= settings("dashboard").keys()


@pytest.mark.parametrize("name", ["model", "seam", *READERS])
def test_every_container_is_hardened_and_bounded(name: str) -> None:
    each = containers()[name]
    assert each["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert each["resources"]["limits"]["memory"]
    if name in READERS:
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= each.keys()
        ports = {port["name"] for port in each["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert each[probe]["httpGet"]["port"] in ports


def test_pods_are_not_root_and_hold_no_key_of_the_cluster() -> None:
    assert len(pods()) == 2
    for pod in pods():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        mounted = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        modes = [volume["secret"]["defaultMode"] for volume in pod["volumes"] if "secret" in volume]
        assert modes
        assert set(modes) == {0o440}, "what the service accepts for its auth file"


def test_a_drain_fits_into_the_time_before_a_kill() -> None:
    [server] = [pod for pod in pods() if len(pod["containers"]) == 2]
    config = service_config.ServiceConfig()
    assert server["terminationGracePeriodSeconds"] >= config.grace + config.drain_listen
