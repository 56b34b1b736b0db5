"""The start of an agent: where, and how long it may take."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from peerload.cli.common import agent_process
from peerload.cli.verbs import agent as verb
from peerload.config import loader
from peerload.model.errors import PeerloadError

if TYPE_CHECKING:
    from pathlib import Path


def test_state_and_socket_come_from_every_place_that_has_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PEERLOAD_SOCKET", "PEERLOAD_STATE", "PEERLOAD_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "mine"))
    for name in ("system", "mine/peerload/config", "other"):
        file = tmp_path / f"{name}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'state = "/of/{file.stem}"\n' + ('socket = "/of/it"\n' if name == "system" else ""), "utf-8")
    monkeypatch.setattr(loader, "SYSTEM_FILE", tmp_path / "system.toml")
    monkeypatch.setattr(loader, "SYSTEM_DIRECTORY", tmp_path / "none")

    def places(**given: str) -> tuple[str, str]:
        found = agent_process.located(given)
        assert {key: found[key] for key in given} == given
        return found["state"], found["socket"]

    assert places() == ("/of/config", "/of/it")
    assert places(config=str(tmp_path / "other.toml")) == ("/of/other", "/of/it")
    monkeypatch.setenv("PEERLOAD_STATE", "/of/variable")
    monkeypatch.setenv("PEERLOAD_SOCKET", "/of/mine")
    assert places() == ("/of/variable", "/of/mine")
    assert places(state="/of/flag", socket="/flag") == ("/of/flag", "/flag")
    monkeypatch.delenv("PEERLOAD_STATE")
    (tmp_path / "mine/peerload/config.toml").unlink()
    assert places()[0] == "/of/system"


def test_an_agent_may_take_longer_to_start_where_its_database_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "STARTS_WITHIN_S", 0.0)
    monkeypatch.setattr(agent_process, "READS_BYTES_S", 200)
    for name, size in (("peerload.db", 150), ("peerload.db-wal", 100), ("peerload.db.broken", 10_000)):
        (tmp_path / name).write_bytes(bytes(size))
    settings = {"state": str(tmp_path), "socket": str(tmp_path / "socket")}
    with pytest.raises(PeerloadError) as refused:
        agent_process.start(settings, [sys.executable, "-c", "import time; time.sleep(600)"])
    assert "within 1 s" in refused.value.why


def test_an_agent_whose_state_directory_was_removed_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as agent:
        info = {"pid": agent.pid, "launcher_pid": 77, "state": str(tmp_path / "state")}
        (tmp_path / "state").mkdir()
        (tmp_path / "state/peerload.db").touch()
        assert verb._staying(info) is info
        (tmp_path / "state/peerload.db").unlink()
        monkeypatch.setattr(verb, "GONE_WITHIN_S", 0.0)
        assert verb._staying(info) is info  # it does not end
        monkeypatch.setattr(verb, "GONE_WITHIN_S", 60.0)
        assert agent.stdin is not None
        agent.stdin.close()
        assert verb._staying(info) is None
        assert agent.wait() == 0
    assert "kill 77" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--config", "--record", "--mqtt-password-file"])
def test_files_are_passed_to_an_agent_by_absolute_paths(
    flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An agent works in /."""
    monkeypatch.chdir(tmp_path)
    given = agent_process.given_settings(agent_process.agent_options("up", "").read([flag, "my.conf"]))
    assert list(given.values()) == [str(tmp_path / "my.conf")]
