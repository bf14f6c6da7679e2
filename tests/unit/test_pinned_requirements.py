"""What the images install: every dependency of pyproject.toml pinned within its range, with hashes."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGES = {
    "service": ("service", "cli", "hub", "tracing"),
    "dashboard": ("dashboard",),
    "worker": ("worker", "hub"),
}


def needed(extras: tuple[str, ...]) -> Iterator[Requirement]:
    """Direct dependencies, those of extras that extras name included."""
    for text in PROJECT["dependencies"]:
        yield Requirement(text)
    for extra in extras:
        for text in PROJECT["optional-dependencies"][extra]:
            requirement = Requirement(text)
            if requirement.name == "kvatlas":
                yield from needed(tuple(requirement.extras))
            else:
                yield requirement


def pinned(image: str) -> dict[str, list[Version]]:
    found: dict[str, list[Version]] = {}
    for name, version in re.findall(
        r"^([a-z0-9._-]+)==([^ ;\\]+)", (FOLDER / f"{image}.txt").read_text(), re.M
    ):
        found.setdefault(name, []).append(Version(version))
    return found


@pytest.mark.parametrize("image", IMAGES)
def test_each_dependency_is_pinned_within_its_range(image: str) -> None:
    """If not: deploy/requirements/lock.sh."""
    known = pinned(image)
    for requirement in needed(IMAGES[image]):
        if requirement.name == "torch":  # comes from an index of its own
            continue
        versions = known.get(requirement.name.lower().replace("_", "-"), [])
        assert versions, f"{requirement.name} is not in {image}.txt"
        assert all(version in requirement.specifier for version in versions), (requirement, versions)


@pytest.mark.parametrize("image", IMAGES)
def test_each_pin_has_hashes_and_none_is_torchs_own(image: str) -> None:
    text = (FOLDER / f"{image}.txt").read_text()
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.M)[1:]
    assert len(entries) > 20
    assert [entry.split("==")[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert [name for name in pinned(image) if re.match(r"torch$|triton|nvidia|cuda", name)] == []


@pytest.mark.parametrize("image", IMAGES)
def test_the_image_installs_nothing_else(image: str) -> None:
    lines = (ROOT / "deploy/docker" / f"{image}.Dockerfile").read_text()
    assert f"--require-hashes --no-deps -r requirements/{image}.txt" in lines
    installs = re.findall(r"pip install ([^\n\\]+)", lines)
    assert all("--require-hashes" in each or "--no-deps ." in each or "torch==" in each for each in installs)
    assert "pip check" in lines, "nothing is missing either"
