"""What is distributed: its name, its extras, what its packages say of themselves."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from peerload import distribution

ROOT = Path(__file__).resolve().parents[2]


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
            assert f"install {distribution.NAME}=" not in text, path
            assert f"{distribution.NAME}[" not in text, path
