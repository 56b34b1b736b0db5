"""Environments of tasks, built by real builders from a wheel that lies on this machine: no network."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload import Executor
from peerload.client.connection import AgentConnection
from tests.integration.cluster import Agent, Cluster
from tests.integration.test_files import User
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

SAYS = "import tool; print(tool.VERSION)"
MINOR = "import sys; print(sys.version_info.minor)"


def requirement(directory: Path, version: str) -> str:
    """A line of requirements, with its hash, for a package `tool` that is made here."""
    path = directory / f"tool-{version}-py3-none-any.whl"
    about = f"tool-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tool.py", f"VERSION = '{version}'\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tool\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in wheel.namelist()))
    return f"tool @ file://{path} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def builds(agent: Agent) -> list[str]:
    """The states of the environments that were built there, as its events tell them."""
    found: list[dict[str, Any]] = agent.call("events", limit=1000, what=["environment"])["events"]
    return [event["state"] for event in found]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Cluster, list[Agent]]]:
    with Cluster() as cluster:
        yield cluster, cluster.linked(2, slots=4)


@pytest.fixture
def user(pair: tuple[Cluster, list[Agent]], tmp_path: Path) -> User:
    (tmp_path / "project").mkdir()
    return User(*pair, tmp_path / "project")


def test_many_tasks_of_one_lock_cause_one_build_on_each_node(user: User, tmp_path: Path) -> None:
    (user.directory / "requirements.txt").write_text(requirement(tmp_path, "1.0"))
    before = [len(builds(agent)) for agent in (user.here, user.there)]
    arrays = [
        user.types("submit", "--env", ".", "--node", node, "--array", "1-6", "python", "-c", SAYS).stdout.strip()
        for node in ("n1", "n2")
    ]
    assert user.types("wait", *arrays).returncode == 0
    assert [builds(agent)[count:] for agent, count in zip((user.here, user.there), before, strict=True)] == [
        ["building", "built"]
    ] * 2
    assert user.types("logs", f"{arrays[1]}.6").stdout == "1.0\n"
    assert user.task(f"{arrays[1]}.1")["lock"] == "requirements.txt"
    asked = subprocess.run(["python3", "-c", MINOR], capture_output=True, text=True, check=True)
    is_own = int(asked.stdout) == sys.version_info.minor  # functions need the minor version that this process has
    for _ in range(2):
        with Executor(user.here.socket, node="n2", env=user.directory / "requirements.txt") as executor:
            assert executor.submit(lambda: __import__("tool").VERSION).result(120) == "1.0"
    assert builds(user.there)[before[1] :] == ["building", "built"] * (1 if is_own else 2)
    (kept,) = json.loads(user.types("files", "--json").stdout)["environments"]
    assert (kept["name"], kept["in_use"], kept["bytes"] > 0) == ("requirements.txt", False, True)
    assert json.loads(user.types("files", "--gc", "--json").stdout)["environments"] == []


def test_a_script_with_inline_metadata_runs_in_its_environment(user: User, tmp_path: Path) -> None:
    line = requirement(tmp_path, "2.0").partition(" --hash")[0]
    script = f'# /// script\n# requires-python = ">=3.9"\n# dependencies = ["{line}"]\n# ///\nimport sys\n{SAYS}\nprint(sys.argv[1:])\n'
    (user.directory / "script.py").write_text(script)
    ran = user.types("run", "--node", "n2", "--snapshot", "script.py", "a b")
    assert (ran.stdout, ran.returncode) == ("2.0\n['a b']\n", 0), ran.stderr
    dry = user.types("submit", "--dry-run", "--json", "--env", "script.py", "true")
    assert json.loads(dry.stdout)["env"] == "script.py, built by pip"


def test_a_lock_that_cannot_be_resolved_is_an_error_of_the_task_with_the_words_of_the_builder(
    user: User, tmp_path: Path
) -> None:
    (user.directory / "requirements.txt").write_text("tool @ file:///none-1.0-py3-none-any.whl\n")
    before = len(builds(user.there))
    for _ in range(2):
        ran = user.types("run", "--node", "n2", "--env", "requirements.txt", "true")
        assert ran.returncode == 125
        reason = user.task()["reason"]
        assert reason.startswith(Says.NOT_BUILT("requirements.txt"))
        assert "No such file" in reason
    assert builds(user.there)[before:] == ["building", "failed"]
    assert user.types("run", "--local", "--env", "requirements.txt", "true").returncode == 125


def test_what_is_no_lock_is_refused_before_anything_is_queued(user: User) -> None:
    (user.directory / "plain.py").write_text("print(1)\n")
    for path in ("none.txt", "plain.py", "."):
        ran = user.types("submit", "--env", path, "true")
        assert ran.returncode != 0
        assert path in ran.stderr


# -- other builders, played by scripts --------------------------------------------------------------------------------

UV = """\
#!/bin/sh
[ "$1" = sync ] && [ "$2 $3" = "--frozen --no-install-project" ] && [ -f lock/uv.lock ] && [ -f lock/pyproject.toml ] || exit 9
grep -q hang lock/uv.lock && exec sleep 1000
mkdir -p "$UV_PROJECT_ENVIRONMENT/bin"
printf '#!/bin/sh\\necho of uv' > "$UV_PROJECT_ENVIRONMENT/bin/tool"
chmod +x "$UV_PROJECT_ENVIRONMENT/bin/tool"
"""
CONDA = """\
#!/bin/sh
mkdir -p "$4/bin" "$4/conda-meta"
printf '#!/bin/sh\\necho $CONDA_PREFIX; cat %s' "$PWD/$6" > "$4/bin/tool"
chmod +x "$4/bin/tool"
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """A user of an agent that has uv and micromamba, and of one that has neither."""
    top = tmp_path_factory.mktemp("played")
    with Cluster() as cluster:
        here = cluster.agent("n1")
        with builders(cluster, top):
            there = cluster.agent("n2", "--peer", here.listen)
        cluster.await_acquainted([here, there])
        yield User(cluster, [here, there], top / "project")


@contextlib.contextmanager
def builders(cluster: Cluster, top: Path) -> Iterator[None]:
    """Agents that are started here find uv and micromamba, and a project lies beside those."""
    for name, text in (("uv", UV), ("micromamba", CONDA)):
        (top / "bin" / name).parent.mkdir(exist_ok=True)
        (top / "bin" / name).write_text(text)
        (top / "bin" / name).chmod(0o755)
    (top / "project").mkdir()
    (top / "project/pyproject.toml").touch()
    plain = cluster.environment["PATH"]
    cluster.environment["PATH"] = f"{top}/bin:{plain}"
    yield
    cluster.environment["PATH"] = plain


def test_a_task_goes_where_its_environment_can_be_built(played: User) -> None:
    (played.directory / "uv.lock").write_text("version = 1\n")
    (played.directory / "conda-lock.yml").write_text("said by conda\n")
    ran = played.types("run", "--env", "pyproject.toml", "tool")
    assert ran.stdout == "of uv\n", ran.stderr
    said = played.types("run", "--env", "conda-lock.yml", "tool").stdout
    assert said.startswith(str(played.there.state / "environments"))
    assert said.endswith("/env\nsaid by conda\n")
    refused = played.types("submit", "--node", "n1", "--env", "uv.lock", "tool")
    assert (refused.returncode, "uv" in refused.stderr) == (125, True)
    played.types("submit", "-x", "n2", "--wait-for-node", "--env", "uv.lock", "tool")
    why = json.loads(played.types("why", "--json", "@").stdout)
    assert [one["node"] for one in why["nodes"] if "uv" in one["reason"] and not one.get("can_ever")] == ["n1"], why
    played.types("cancel", "@")


def test_a_builder_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[files]\nbuild_s_max = 1.0\n")
    with Cluster() as cluster:
        with builders(cluster, tmp_path):
            user = User(cluster, [cluster.agent("n1", "--config", str(tmp_path / "config.toml"))], tmp_path / "project")
        (user.directory / "uv.lock").write_text("hang = true\n")
        ran = user.types("run", "--env", "uv.lock", "tool")
        assert ran.returncode == 125
        assert "ended after 1 s" in user.task()["reason"]
        wait_until(lambda: not sleeping(user), what="the builder to be gone")
        (user.directory / "uv.lock").write_text("hang = 2\n")
        task = user.types("submit", "--env", "uv.lock", "tool").stdout.strip()
        with AgentConnection(user.here.socket) as client:
            told = list(client.stream("output", task=task, follow=True, tells_start=True))
        assert not any("running" in piece for piece in told), "it never started"


def sleeping(played: User) -> bool:
    """True if a process of the builder is there."""
    mark = str(played.there.state / "environments").encode()
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if os.fsencode(path.readlink()).startswith(mark):
                return True
        except OSError:
            continue
    return False
