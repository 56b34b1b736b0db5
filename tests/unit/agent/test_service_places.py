"""Who starts the agent of all users by hand is told what its service would have made, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peerload.agent.systemd import SERVICE_HINT, ServiceManager, check_service_places
from peerload.model.config import AgentConfig
from peerload.model.errors import ConfigError
from tests.each import each

NOBODY = 61_003
PROGRAM = """
import os, sys
from peerload.agent.systemd import ServiceManager
from peerload.agent.systemd import check_service_places
from peerload.model.config import AgentConfig
from peerload.model.errors import ConfigError
os.setresgid(*[int(sys.argv[1])] * 3)
os.setresuid(*[int(sys.argv[1])] * 3)
config = AgentConfig(node="n1", state=sys.argv[2], socket=sys.argv[3], mode="system")
try:
    check_service_places(config, ServiceManager({}), "/nonexistent")
except ConfigError as error:
    print(error, "|", error.hint)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def check(state: Path, *, mode: str = "system", service_state: str = "/nonexistent") -> None:
    socket = str(state / "run/agent.sock")
    config = AgentConfig(node="n1", state=str(state), socket=socket, mode="system" if mode == "system" else "user")
    check_service_places(config, ServiceManager({}), service_state)


@needs_root
def test_root_does_not_write_where_the_service_does(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="root") as refused:
        check(tmp_path, service_state=str(tmp_path))
    assert refused.value.hint == SERVICE_HINT


def test_elsewhere_and_for_oneself_nothing_is_said(tmp_path: Path) -> None:
    check(tmp_path)
    check(tmp_path, mode="user", service_state=str(tmp_path))


@needs_root
@each(
    ("state", "socket", "says"),
    [
        ("/var/nowhere/state", "/tmp/agent.sock", "state: /var/nowhere/state cannot be made: /var: Permission denied"),
        ("/usr", "/tmp/agent.sock", "state: /usr cannot be used: /usr: Permission denied"),
        ("/tmp", "/usr/nowhere/agent.sock", "socket: /usr/nowhere cannot be made: /usr: Permission denied"),
        ("/tmp", "/tmp/agent.sock", ""),
    ],
)
def test_what_cannot_be_had_is_said_with_what_to_type(state: str, socket: str, says: str) -> None:
    words = [sys.executable, "-c", PROGRAM, str(NOBODY), state, socket]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    assert said == (f"{says} for uid {NOBODY} | {SERVICE_HINT}" if says else "")
