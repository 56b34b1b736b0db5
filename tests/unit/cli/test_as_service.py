"""Verbs that go on as the agent's user where the agent is the machine's, whatever an agent says of itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peerload.cli.verbs.join import become_agents_user

UID, GID, OTHER = 61_001, 61_002, 61_003
AGENT = """
import os, socket, sys
listening = socket.socket(fileno=int(sys.argv[1]))
os.setgroups([])
os.setresgid(*[int(sys.argv[3])] * 3)
os.setresuid(*[int(sys.argv[2])] * 3)
while True:
    with listening.accept()[0] as link:
        link.recv(1)
        link.sendall(b"x")
"""
PROGRAM = """
import os, sys
from peerload.cli.verbs.join import become_agents_user
from peerload.model.errors import PeerloadError
path, mode, state, uid = sys.argv[1:]
os.environ["XDG_CONFIG_HOME"] = "/root/.config"
if int(uid):
    os.setresuid(*[int(uid)] * 3)
try:
    become_agents_user({"mode": mode, "state": state, "socket": "/s"}, "invite", path)
except PeerloadError as error:
    print(error.what, "|", error.hint)
else:
    print(os.getresuid(), os.getresgid(), os.getgroups(), os.environ["HOME"], "XDG_CONFIG_HOME" in os.environ)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def test_nothing_changes_where_no_agent_runs() -> None:
    become_agents_user(None, "invite")


Say = Callable[..., str]


@pytest.fixture(name="say")
def agent_of_a_user(state: Path) -> Iterator[Say]:
    """`say(mode, state, uid)`: what the verb comes to, typed by that uid, where the agent at the socket, which root made as a
    service manager does, runs as UID and says that."""
    path = state.parent / "agent.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        path.chmod(0o666)
        listening.listen()
        words = [sys.executable, "-c", AGENT, str(listening.fileno()), str(UID), str(GID)]
        agent = subprocess.Popen(words, pass_fds=[listening.fileno()])

        def say(mode: str, told: Path, uid: int = 0) -> str:
            words = [sys.executable, "-c", PROGRAM, str(path), mode, str(told), str(uid)]
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

        yield say
        agent.kill()
        agent.wait()


@pytest.fixture(name="state")
def state_of_the_agent() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:  # where everybody may look, unlike below pytest's own
        Path(directory).chmod(0o755)
        state = Path(directory) / "state"
        state.mkdir()
        os.chown(state, UID, GID)
        yield state


@needs_root
def test_root_goes_on_as_the_user_of_the_agent(say: Say, state: Path) -> None:
    assert say("system", state) == f"{(UID,) * 3} {(GID,) * 3} [] {state} False"


@needs_root
@pytest.mark.parametrize("owner", [0, OTHER])
def test_a_state_that_is_not_the_agents_is_refused(say: Say, state: Path, owner: int) -> None:
    os.chown(state, owner, owner)
    assert str(state) in say("system", state)


@needs_root
def test_an_agent_that_says_it_is_its_users_own_is_not_root_s(say: Say, state: Path) -> None:
    assert f"is uid {UID}'s own | sudo -u" in say("user", state)


@needs_root
def test_nobody_else_does(say: Say, state: Path) -> None:
    state.chmod(0o755)
    assert say("system", state, OTHER).endswith("| sudo peerload invite")
