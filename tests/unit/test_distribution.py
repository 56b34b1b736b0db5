"""What is distributed: its name, its extras, what its packages say of themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from peerload import distribution

ROOT = Path(__file__).resolve().parents[2]
UNTRIED = "3.14"
"""Version of Python that is tried, and not promised yet."""


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        told: dict[str, Any] = tomllib.load(file)["project"]
    return told


def test_the_name_and_the_extras_are_those_of_the_build() -> None:
    told = project()
    assert told["name"] == distribution.NAME
    for extra, packages in distribution.EXTRAS.items():
        assert tuple(told["optional-dependencies"][extra]) == packages
        assert packages[0] in distribution.how_to_add(extra)


def test_nobody_is_told_to_install_a_name_that_is_not_registered() -> None:
    if distribution.IS_REGISTERED:
        return
    places = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "deploy").iterdir(),
        *(ROOT / "peerload").rglob("*.py"),
    ]
    for path in places:
        if path.is_file() and path.name != "distribution.py":
            text = path.read_text(encoding="utf-8")
            assert not re.search(rf"(?:pipx?|uv tool) install (?:-\S+ )*'?{distribution.NAME}(?![-\w./])", text), path
            assert f"{distribution.NAME}[" not in text, path


@pytest.mark.long
def test_wheel_and_sdist_have_what_belongs_to_them(tmp_path: Path) -> None:
    """The files of git, and nothing that lies about; the wheel has the units and the documents beside the program."""
    tree = tmp_path / "tree"
    copied = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in copied.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    build = "import setuptools.build_meta as b, sys; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=tree, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        has = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "tests/conftest.py",
        "docs/cli.md",
        "docs/adr/0001-dependencies.md",
        "deploy/install",
        "CHANGELOG.md",
        "Makefile",
    ):
        assert name in has
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = {name.partition("/data/share/peerload/")[2] for name in archive.namelist()}
        install = next(info for info in archive.infolist() if info.filename.endswith("share/peerload/deploy/install"))
    assert install.external_attr >> 16 & 0o100, "it can be run"
    deployed = {name for name in copied.split("\0") if name.startswith("deploy/")}
    assert deployed <= carried
    assert {"docs/cli.md", "docs/security.md", "docs/adr/0018-system-service.md", "README.md"} <= carried


def test_every_dependency_has_an_upper_bound_that_the_pins_keep() -> None:
    pins = dict(re.findall(r"^([a-z][\w.-]*)==([\w.+]+)", (ROOT / ".ci/requirements.txt").read_text(), re.MULTILINE))
    for requirement in project()["dependencies"]:
        found = re.fullmatch(r"([\w-]+)>=([\d.]+),<([\d.]+)", requirement)
        assert found, requirement
        low, pin, high = ([int(part) for part in text.split(".")] for text in (found[2], pins[found[1]], found[3]))
        assert low <= pin < high, requirement


def test_the_workflow_names_what_there_is() -> None:
    yaml = pytest.importorskip("yaml", reason="there is no reader of YAML here")
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    told = {text.rsplit(" ", 1)[1] for text in project()["classifiers"] if re.search(r":: 3\.\d+$", text)}
    for job in (jobs["gate"], jobs["packages"]):
        assert told | {UNTRIED} == set(job["strategy"]["matrix"]["python"])
        assert f"'{UNTRIED}'" in job["continue-on-error"]
    commands = " ".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    for target in re.findall(r"\bmake ([a-z-]+)", commands):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    for name in re.findall(r"(?<!/)\b((?:\.ci|deploy)/[\w.-]+)", commands):
        assert (ROOT / name).is_file(), name


def test_what_others_publish_is_named_by_its_digest() -> None:
    used = re.findall(r"uses: (\S+)", (ROOT / ".github/workflows/ci.yml").read_text())
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []
    images = re.findall(r"^FROM (\S+)", (ROOT / "deploy/Containerfile").read_text(), re.MULTILINE)
    images += re.findall(r"image: (?!peerload-)(\S+)", (ROOT / "deploy/compose.yaml").read_text())
    assert len(images) == 2
    assert [name for name in images if not re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", name)] == []
