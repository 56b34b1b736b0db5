"""Verbs that go on as the agent's user where the agent is the machine's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from peerload.cli.as_service import become_agents_user

UID, GID = 61_001, 61_002
PROGRAM = """
import os, sys
from peerload.cli.as_service import become_agents_user
from peerload.model.errors import PeerloadError
os.environ["XDG_CONFIG_HOME"] = "/root/.config"
if len(sys.argv) > 2:
    os.setresuid(*[int(sys.argv[2])] * 3)
try:
    become_agents_user({"mode": "system", "state": sys.argv[1], "socket": "/s"}, "invite")
except PeerloadError as error:
    print(error.what, "|", error.hint)
else:
    print(os.getresuid(), os.getresgid(), os.getgroups(), os.environ["HOME"], "XDG_CONFIG_HOME" in os.environ)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.mark.parametrize("info", [None, {}, {"mode": "user", "state": "/nonexistent"}])
def test_nothing_changes_for_ones_own(info: dict[str, str] | None) -> None:
    become_agents_user(info, "invite")


def said(*words: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@needs_root
def test_root_goes_on_as_the_owner_of_the_state(tmp_path: Path) -> None:
    os.chown(tmp_path, UID, GID)
    assert said(str(tmp_path)) == f"{(UID,) * 3} {(GID,) * 3} [] {tmp_path} False"


@needs_root
def test_nobody_else_does() -> None:
    with tempfile.TemporaryDirectory() as state:  # where everybody may look, unlike below pytest's own
        os.chown(state, UID, GID)
        Path(state).chmod(0o755)
        assert said(state, "61003").startswith("only root can do this")
        assert said(state, "61003").endswith("| sudo peerload invite")
