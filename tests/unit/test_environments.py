"""Lock files as they are read, and the builders of a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerload.core.resources.admission import why_never
from peerload.environments import builders, locks
from peerload.model.errors import BadRequest
from peerload.model.resources import Placement, Profile, ResourceRequest
from peerload.model.task import EnvironmentLock
from tests.each import each
from tests.wording import Says

SCRIPT = b"""\
#!/usr/bin/env python
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "one<2",
#
#   "two",
# ]
# ///
print(1)
"""


@each(
    ("name", "content", "kind", "python", "files"),
    [
        ("requirements.txt", b"one==1 --hash=sha256:00\n", "pip", "", {"requirements.txt"}),
        ("dev-requirements.in", b"one\n", "pip", "", {"requirements.txt"}),
        ("pyproject.toml", b'[project]\nrequires-python = "~=3.11"\n', "pip", "~=3.11", {"requirements.txt"}),
        ("conda-lock.yml", b"version: 1\n", "conda", "", {"conda-lock.yml"}),
        ("linux-64.txt", b"# platform: linux-64\n@EXPLICIT\nhttps://x\n", "conda", "", {"explicit.txt"}),
        ("script.py", SCRIPT, "pip", ">=3.11", {"requirements.txt"}),
    ],
)
def test_a_lock_is_known_by_its_name_and_its_content(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes, kind: str, python: str, files: set[str]
) -> None:
    path = tmp_path_factory.mktemp("lock") / name
    path.write_bytes(content)
    lock = locks.read(path)
    assert (lock.kind, lock.name, lock.python, set(lock.files)) == (kind, name, python, files)


def test_a_project_with_a_lock_of_uv_needs_uv(tmp_path: Path) -> None:
    (tmp_path / "uv.lock").write_text('requires-python = ">=3.12"\n')
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "requirements.txt").touch()
    for path in (tmp_path, tmp_path / "pyproject.toml", tmp_path / "uv.lock"):
        lock = locks.read(path)
        assert (lock.kind, lock.python, set(lock.files)) == ("uv", ">=3.12", {"uv.lock", "pyproject.toml"})


def test_the_metadata_of_a_script_are_read_as_pep_723_says() -> None:
    lock = locks.in_script(SCRIPT, "script.py")
    assert lock is not None
    assert lock.files == {"requirements.txt": b"one<2\ntwo\n"}
    assert locks.in_script(SCRIPT.replace(b"\n", b"\r\n"), "script.py") == lock
    assert locks.in_script(b"# /// other\n# x\n# ///\n", "script.py") is None
    assert locks.in_script(b"# /// script\n# ///\nprint(1)\n", "script.py") is None


@each(
    "content",
    [
        SCRIPT + SCRIPT,
        b"# /// script\n# dependencies = 3\n# ///\n",
        b"# /// script\n# dependencies = [3]\n# ///\n",
        b"# /// script\n# dependencies = [\n# ///\n",
    ],
)
def test_metadata_that_cannot_be_read_are_refused(content: bytes) -> None:
    with pytest.raises(BadRequest):
        locks.in_script(content, "script.py")


@each(
    ("name", "content", "is_refused"),
    [
        ("environment.yml", b"dependencies:\n  - numpy\n", True),
        ("poetry.lock", b"[[package]]\n", True),
        ("pyproject.toml", b'[project]\ndynamic = ["dependencies"]\n', True),
        ("pyproject.toml", b'[project]\ndynamic = ["version"]\n', False),
        ("pyproject.toml", b"[tool.poetry.dependencies]\n", True),
        ("requirements.txt", b"one\n-r base.txt\n", True),
        ("requirements.txt", b"--constraint=versions.txt\none\n", True),
        ("requirements.txt", b"one\n-e .\n", True),
        ("requirements.txt", b"./one.whl\n", True),
        ("requirements.txt", b"-r /shared/base.txt\n-c https://x/y.txt\n-e git+https://x/y\n", False),
        ("requirements.txt", b"--prefer-binary\none[all] ; python_version > '3'\n# -r no\n", False),
    ],
)
def test_what_cannot_be_built_is_refused_before_it_travels(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes, is_refused: bool
) -> None:
    path = tmp_path_factory.mktemp("lock") / name
    path.write_bytes(content)
    if is_refused:
        with pytest.raises(BadRequest):
            locks.read(path)
    else:
        locks.read(path)


@each(
    ("wanted", "does"),
    [
        ("", True),
        (">=3.11", True),
        (">=3.12", False),
        (">3.11", True),
        (">3.11.4", False),
        ("<4,>=3.8", True),
        ("<3.11", False),
        ("<=3.11", False),
        ("==3.11.*", True),
        ("==3.1.*", False),
        ("==3.11.4", True),
        ("==3.11", False),
        ("!=3.11.*", False),
        ("!=3.11.3", True),
        ("~=3.10", True),
        ("~=3.11.2", True),
        ("~=3.10.1", False),
        ("something else", True),
    ],
)
def test_which_python_a_lock_is_for(wanted: str, does: bool) -> None:
    assert builders.fits((3, 11, 4), wanted) is does


def test_the_name_of_an_environment_is_of_its_lock_and_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(builders, "_interpreter", lambda _: ("/usr/bin/python3 3.11.4", True))
    plans = [builders.plan_of(EnvironmentLock(bytes([n]) * 32, "pip", "r.txt")) for n in (1, 1, 2)]
    keys = [plan.key for plan in plans if isinstance(plan, builders.Plan)]
    assert keys[0] == keys[1] != keys[2]
    monkeypatch.setattr(builders, "_interpreter", lambda _: ("/usr/bin/python3 3.12.0", True))
    other = builders.plan_of(EnvironmentLock(b"\1" * 32, "pip", "r.txt"))
    assert isinstance(other, builders.Plan)
    assert other.key != keys[0]
    monkeypatch.setattr(builders, "_interpreter", lambda _: ("", False))
    lock = EnvironmentLock(b"\1" * 32, "pip", "r.txt", ">=3.13")
    assert builders.plan_of(lock) == Says.NO_PYTHON(">=3.13", "r.txt")
    assert "u.lock" in str(builders.plan_of(EnvironmentLock(b"\1" * 32, "uv", "u.lock")))


def test_a_node_takes_tasks_whose_environment_it_can_build() -> None:
    needs = Placement(builder="uv")
    assert "uv" in why_never(Profile("x", 1, 1.0, builders=("pip",)), ResourceRequest(), needs, "h")
    assert why_never(Profile("x", 1, 1.0, builders=("pip", "uv")), ResourceRequest(), needs, "h") == ""
