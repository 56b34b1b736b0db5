"""The line that installs this peerload on another machine and has it join."""

from __future__ import annotations

import subprocess
import zipfile
from typing import TYPE_CHECKING

import pytest

from peerload import distribution
from peerload.cli.verbs.join import install_lines, install_lines_for

if TYPE_CHECKING:
    from pathlib import Path

JOIN = "peerload join plj1-secret"


def test_a_release_of_an_index_is_installed_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_lines_for(JOIN, "peerload==1.2", {}, is_system=False) == [], "the name may be another's"
    monkeypatch.setattr(distribution, "IS_REGISTERED", True)
    pipx, uv = install_lines_for(JOIN, "peerload==1.2", {}, is_system=False)
    assert pipx == ("pipx install peerload==1.2 && ~/.local/bin/peerload join plj1-secret", False)
    assert uv == ("uv tool install peerload==1.2 && ~/.local/bin/peerload join plj1-secret", False)


def test_a_commit_or_an_archive_is_installed_from_its_address() -> None:
    vcs = {"vcs": "git", "commit_id": "abc"}
    pipx, _ = install_lines_for(JOIN, "peerload==1.2", {"url": "https://x.test/p", "vcs_info": vcs}, is_system=False)
    assert "pipx install git+https://x.test/p@abc && " in pipx.text
    pipx, _ = install_lines_for(JOIN, "peerload==1.2", {"url": "https://x.test/p.whl"}, is_system=False)
    assert "pipx install https://x.test/p.whl && " in pipx.text


def test_a_file_is_carried_there(tmp_path: Path) -> None:
    wheel = tmp_path / "my wheel.whl"
    wheel.write_bytes(b"wheel")
    pipx, _ = install_lines_for(JOIN, "peerload==1.2", {"url": wheel.as_uri()}, is_system=False)
    assert pipx.is_typed_here
    assert played(tmp_path, pipx.text) == ["install ./my wheel.whl", "join plj1-secret"]
    assert (tmp_path / "there" / "my wheel.whl").read_bytes() == b"wheel"
    wheel.unlink()
    assert install_lines_for(JOIN, "peerload==1.2", {"url": wheel.as_uri()}, is_system=False) == []


def test_a_source_tree_is_carried_there(tmp_path: Path) -> None:
    tree = tmp_path / "my tree"
    (tree / ".venv").mkdir(parents=True)
    (tree / "Makefile").write_text("setup:\n\tmkdir -p .venv/bin && cp ../bin/peerload .venv/bin/\n", encoding="utf-8")
    (line,) = install_lines_for(
        JOIN, "peerload==1.2", {"url": tree.as_uri(), "dir_info": {"editable": True}}, is_system=False
    )
    assert line.is_typed_here
    assert played(tmp_path, line.text) == ["join plj1-secret"]
    (line,) = install_lines_for(JOIN, "peerload==1.2", {"url": tree.as_uri()}, is_system=True)
    assert "ssh -t OTHER 'sudo peerload/deploy/install && sudo peerload join" in line.text


def test_a_service_is_made_from_the_wheel_that_was_kept(tmp_path: Path) -> None:
    wheel = tmp_path / "peerload-1.2-py3-none-any.whl"
    told = f'echo install "$@" >> {tmp_path}/told\n'
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("peerload-1.2.data/data/share/peerload/deploy/install", told)
    gone: dict[str, object] = {"url": "file:///tmp/peerload-install.x/peerload-1.2-py3-none-any.whl"}
    assert install_lines_for(JOIN, "peerload==1.2", gone, is_system=True) == []
    (line,) = install_lines_for(JOIN, "peerload==1.2", gone, is_system=True, kept_wheel=str(wheel))
    assert line.is_typed_here
    assert played(tmp_path, line.text) == ["install --from peerload-1.2-py3-none-any.whl", "join plj1-secret"]
    assert (tmp_path / "there" / wheel.name).read_bytes() == wheel.read_bytes()
    (line,) = install_lines_for(JOIN, "peerload==1.2", {"url": wheel.as_uri()}, is_system=True)
    assert str(wheel) in line.text
    pipx, _ = install_lines_for(JOIN, "peerload==1.2", gone, is_system=False, kept_wheel=str(wheel))
    assert "pipx install" in pipx.text


def test_this_very_one_is_found() -> None:
    assert all("join plj1-secret" in line.text for line in install_lines(JOIN, is_system=False))


def played(directory: Path, line: str) -> list[str]:
    """Type the line where ssh leads to another directory → what was asked of pipx and peerload there."""
    there = directory / "there"
    for place in (directory / "bin", there / ".local" / "bin", there / "bin"):
        place.mkdir(parents=True)
    scripts = {
        directory / "bin" / "sudo": 'exec "$@"',
        directory
        / "bin"
        / "ssh": f'[ "$1" != -t ] || shift; shift; cd {there}; HOME={there} PATH={there}/bin:{directory}/bin:$PATH exec sh -c "$*"',
        there / "bin" / "pipx": f'echo "$*" >> {directory}/told',
        there / "bin" / "peerload": f'echo "$*" >> {directory}/told',
        there / ".local" / "bin" / "peerload": f'echo "$*" >> {directory}/told',
    }
    for script, text in scripts.items():
        script.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        script.chmod(0o755)
    path = f"{directory}/bin:/usr/local/bin:/usr/bin:/bin"
    subprocess.run(["sh", "-ec", line], env={"PATH": path}, check=True, timeout=60)
    return (directory / "told").read_text(encoding="utf-8").splitlines()
