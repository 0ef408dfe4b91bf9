"""What a distribution says of itself holds. `.ci/package` builds one and uses it."""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from attn_compiler.spec import tried
from attn_compiler.spec.target import INSTALL

ROOT = Path(__file__).parents[1]
#: of https://www.apache.org/licenses/LICENSE-2.0.txt
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_license_is_apaches_own_text(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["license"] == "Apache-2.0"
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2


def test_the_change_log_has_the_version_first(pyproject: dict[str, Any]) -> None:
    headings = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == pyproject["project"]["version"]
    assert f"\nversion: {headings[0]}\n" in (ROOT / "CITATION.cff").read_text()
    assert len(set(headings)) == len(headings)


def test_every_file_of_the_package_that_is_no_python_is_package_data(pyproject: dict[str, Any]) -> None:
    package = ROOT / "attn_compiler"
    patterns = pyproject["tool"]["setuptools"]["package-data"]["attn_compiler"]
    data = [str(p.relative_to(package)) for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    missing = [name for name in data if not name.endswith(".py") and not _fits(name, patterns)]
    assert missing == []
    assert all(any(_fits(name, [pattern]) for name in data) for pattern in patterns)


def _fits(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def test_the_torch_that_is_asked_for_is_the_torch_that_is_taken(pyproject: dict[str, Any]) -> None:
    (torch,) = [each for each in pyproject["project"]["dependencies"] if each.startswith("torch")]
    lowest, last = (".".join(map(str, v)) for v in (tried.OLDEST["torch"], tried.NEWEST["torch"]))
    assert torch == f"torch>={lowest}"
    assert f"| torch | {lowest} to {last} " in (ROOT / "docs/supported.md").read_text()
    for page in ("docs/start.md", "docs/supported.md"):
        assert f"torch from {lowest} to {last}," in (ROOT / page).read_text()


def test_the_image_installs_extras_that_there_are_and_asks_the_doctor(pyproject: dict[str, Any]) -> None:
    image = (ROOT / "Dockerfile").read_text()
    (python,) = re.findall(r"^FROM python:(\S+)-slim$", image, re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in pyproject["project"]["classifiers"]
    (extras,) = re.findall(r"-e '\.\[(.*)\]'", image)
    assert set(extras.split(",")) <= set(pyproject["project"]["optional-dependencies"])
    # What Inductor needs and no wheel brings (reporting/doctor.py).
    assert "g++" in image
    assert "attn-compiler doctor" in image


def test_commands_are_functions_that_there_are(pyproject: dict[str, Any]) -> None:
    for place in pyproject["project"]["scripts"].values():
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_remedies_install_what_is_on_the_index(pyproject: dict[str, Any]) -> None:
    """Nobody owns the name of this package there: a remedy that named it could install anything."""
    extras = [Requirement(one) for extra in pyproject["project"]["optional-dependencies"].values() for one in extra]
    for distribution, command in INSTALL.items():
        named = Requirement(command.removeprefix("pip install ").strip("'"))
        first = min(one.version for one in named.specifier if one.operator in ("==", ">="))
        assert named.name == distribution
        assert any(one.name == distribution and one.specifier.contains(first, prereleases=True) for one in extras)
    texts = [
        p for folder in ("attn_compiler", "docs") for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md")
    ]
    assert [p for p in texts if "attn_compiler[" in p.read_text()] == []


def test_nox_tries_the_oldest_torch_and_the_newest() -> None:
    major, minor = tried.NEWEST["torch"]
    lowest = ".".join(map(str, tried.OLDEST["torch"]))
    values = {
        target.id: node.value
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    torches = ast.literal_eval(values["TORCHES"])
    assert next(iter(torches)).startswith(f"{lowest}.")
    assert torches["newest"] == f"torch>={major}.{minor},<{major}.{minor + 1}"


def test_ci_builds_the_distributions() -> None:
    assert ".ci/package" in (ROOT / ".ci/run").read_text()


def test_only_what_a_user_could_install_and_a_person_approved_is_published() -> None:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    run = {name: " ".join(step.get("run", step.get("uses", "")) for step in job["steps"]) for name, job in jobs.items()}
    assert ".ci/package .venv/bin/python dist" in run["distributions"]
    assert [name for name, said in run.items() if "pypi-publish" in said] == ["index"]
    index = jobs["index"]
    assert (index["environment"], index["needs"], index["permissions"]) == (
        "pypi",
        "distributions",
        {"id-token": "write"},
    )
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()
