"""What a launcher that is root does not hand on: its lock, its keys, the rights of its agent, programs that were not chosen."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from peerload.agent.accounts import append_output
from peerload.launcher.process import MPS_KEEPER, PATH_DEFAULT, AgentCredentials, SpawnRefused
from peerload.launcher.protocol import MPS_CONTROL, DirectoryCheck, SpawnRequest
from peerload.launcher.system.accounts import LauncherAccount, PolicyFiles, UsersPolicy
from peerload.launcher.system.fork_server import ChildReports, ForkServer, SpawnOrder, UserHelpers
from peerload.launcher.system.sandbox import Syscalls
from peerload.launcher.system.service import MultiUserService, _is_foreign, _is_mps_keeper, _without_code
from tests.integration.cluster import is_alive
from tests.security.users import ROOT, needs_root
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    pass

UID = 20101
USER = LauncherAccount("somebody", UID, UID, (UID,), "/")
KEYCTL_GET_ID, SESSION_KEYRING = 0, -3
LAUNCHER = f"""
import os, select, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from peerload.launcher.process import AgentCredentials
from peerload.launcher.system.fork_server import ForkServer, SpawnOrder, ChildReports
from peerload.launcher.system.sandbox import Syscalls
from peerload.launcher.system.accounts import LauncherAccount
forge = ForkServer(Syscalls(), AgentCredentials(0, 0), ChildReports(select.epoll()))
account = LauncherAccount("somebody", {UID}, {UID}, ({UID},), "/")
def work():
    forge.become(account)
    os.write(1, b"%d\\n" % os.getpid())
    signal.pause()
forge.fork(work)
signal.pause()
"""


@needs_root
@pytest.mark.rule("X6")
def test_an_errand_that_hangs_does_not_outlive_its_launcher() -> None:
    """It has what the launcher had open, the lock of its directory too: the next launcher could not start."""
    with subprocess.Popen([sys.executable, "-I", "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        helper = int(launcher.stdout.readline())
        assert is_alive(helper)
        launcher.kill()
    wait_until(lambda: not is_alive(helper), 60.0, "the helper to end")


@needs_root
@pytest.mark.rule("S4")
def test_no_two_users_have_the_launchers_keys() -> None:
    """Whoever possesses a session keyring can read what is put into it: each process has its own."""
    number = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine)
    libc = ctypes.CDLL(None, use_errno=True)

    def keyring() -> int:
        return int(libc.syscall(number, KEYCTL_GET_ID, SESSION_KEYRING, 0))

    if number is None or keyring() < 0:
        pytest.skip("the kernel has no keys for this process")
    forge = ForkServer(Syscalls(), AgentCredentials(0, 0), ChildReports(select.epoll()))
    reading, writing = os.pipe()

    def work() -> None:
        forge.become(USER)
        os.write(writing, b"%d\n" % keyring())

    for _ in range(2):
        os.waitpid(forge.fork(work, keeps=(writing,)), 0)
    found = [int(line) for line in os.read(reading, 100).split()]
    os.close(reading)
    os.close(writing)
    assert len({*found, keyring()}) == 3
    assert min(found) > 0


@pytest.mark.rule("F3")
def test_no_result_becomes_a_set_user_id_program(tmp_path: Path) -> None:
    """The file whose place it takes may be another's, who made it so."""
    source, target = tmp_path / "source", tmp_path / "target"
    size = source.write_bytes(b"#!/bin/sh\nid\n")
    target.write_bytes(b"before")
    target.chmod(0o6775)
    append_output(bytes(target), [(source, 0, size)], 0o022, 0, ends=True)
    assert target.read_bytes() == source.read_bytes()
    assert stat.S_IMODE(target.stat().st_mode) == 0o775


def test_what_is_foreign_and_what_names_code() -> None:
    """A user of another node is one where it has submitted its task, too."""
    told = [
        DirectoryCheck(b"/", home="n1", user="alice", uid=20001, node="n1"),
        DirectoryCheck(b"/", home="n2", user="alice", node="n1"),
        DirectoryCheck(b"/", home="n1", user="n2:alice", node="n1"),
    ]
    assert [_is_foreign(request) for request in told] == [False, True, True]
    given = dict.fromkeys(
        (b"LD_PRELOAD", b"BASH_ENV", b"PYTHONPATH", b"GIT_SSH_COMMAND", b"PAGER", b"PATH", b"HOME"), b"/evil"
    )
    told_of = {b"LANG": b"C", b"CUDA_VISIBLE_DEVICES": b"0", b"PEERLOAD_NODE": b"n1"}
    assert _without_code({**given, **told_of}, "/home/alice") == {
        **told_of,
        b"PATH": PATH_DEFAULT,
        b"HOME": b"/home/alice",
    }


@needs_root
@pytest.mark.rule("X2")
def test_a_program_that_was_not_chosen_is_not_run_by_whatever_name() -> None:
    """What counts is the file that a name leads to, and that very file is executed."""
    words = ChildReports(select.epoll())
    forge = ForkServer(Syscalls(), AgentCredentials(0, 0), words)
    chosen = os.path.realpath("/bin/true")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o755)
        (place / "good").symlink_to("/bin/true")
        (place / "true").symlink_to("/bin/sh")
        for name in ("/bin/true", "true", "/bin/sh", "sh", f"{place}/good", f"{place}/true"):
            paths = f"{place}/out", f"{place}/err"
            request = SpawnRequest(
                "k", [name.encode()], {}, b"/", 0o22, *paths, deadline_s=0.0, output_bytes_max=1 << 20
            )
            order = SpawnOrder(USER, UsersPolicy(), request)
            order.allowed = (chosen,)
            pid = forge.spawn(order)
            _, status = os.waitpid(pid, 0)
            is_chosen = os.path.realpath(shutil.which(name) or name) == chosen
            assert ((status == 0), words.failure_of(pid) is None) == (is_chosen, is_chosen), name


@pytest.mark.rule("X2")
def test_the_keeper_of_mps_is_exempt_with_the_control_program_of_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    control, other = tmp_path / MPS_CONTROL, tmp_path / "other" / MPS_CONTROL
    other.parent.mkdir()
    for path in (control, other):
        path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    def is_keeper(*argv: bytes) -> bool:
        return _is_mps_keeper(
            SpawnRequest("k", [*argv], {}, b"/", 0o22, "out", "err", deadline_s=0.0, output_bytes_max=1)
        )

    assert is_keeper(*MPS_KEEPER, bytes(control), b"nvidia:GPU-0", b"alice")
    assert not is_keeper(*MPS_KEEPER, bytes(other), b"nvidia:GPU-0", b"alice")
    assert not is_keeper(*MPS_KEEPER)
    assert not is_keeper(MPS_KEEPER[0], b"-c", b"", b"", bytes(control))
    control.unlink()
    assert not is_keeper(*MPS_KEEPER, bytes(control), b"nvidia:GPU-0", b"alice")


@needs_root
@pytest.mark.rule("X1")
def test_no_task_runs_as_the_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever is the agent's user may order of the launcher what it likes, and reads the keys of the cluster."""
    system = MultiUserService(str(tmp_path), str(tmp_path), (UID, UID), PolicyFiles("/nonexistent", "/nonexistent"))
    agent = LauncherAccount("peerload", UID, UID, (UID,), "/")
    monkeypatch.setattr("peerload.launcher.system.service.account_named", lambda *_, **__: agent)
    for user, uid in (("peerload", UID), ("peerload", -1)):
        with pytest.raises(SpawnRefused, match=Says.IS_THE_AGENT()):
            system.account(DirectoryCheck(b"/", "n1", user, uid, node="n1"), "key")


@needs_root
@pytest.mark.rule("X1", "X6")
def test_the_agent_cannot_make_up_users_that_it_does_not_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However it says whose task it is: who is in none of its groups runs nothing here."""
    system = MultiUserService(str(tmp_path), str(tmp_path), (UID, UID), PolicyFiles("/nonexistent", "/nonexistent"))
    entry = ("victim", 20004, 20004, (20004,), "/", "/bin/sh", False, False)
    monkeypatch.setattr(
        system, "_resolver", SimpleNamespace(entry=lambda *_: entry, is_unassigned=lambda _uid: True), raising=False
    )
    for uid in (20004, -1):
        with pytest.raises(SpawnRefused, match="peerload"):
            system.account(DirectoryCheck(b"/", "n1", "victim", uid, node="n1"), "key")
    assert system.account(DirectoryCheck(b"/", "n2", "victim", -1, node="n1"), "key").is_guest


@needs_root
def test_what_a_task_has_shut_itself_out_of_is_removed() -> None:
    """Whatever rights it has left on its directories."""
    epoll = select.epoll()
    errands = UserHelpers(epoll, [], ForkServer(Syscalls(), AgentCredentials(0, 0), ChildReports(epoll)), set())
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o755)
        left = place / "left"
        (left / "a" / "b").mkdir(parents=True)
        for path in (left / "a" / "b", left / "a", left):
            os.chown(path, UID, UID)
            path.chmod(0)
        done: list[bool] = []
        errands.empty(str(left), USER, lambda: done.append(True))
        while not done:
            errands.ready(dict(epoll.poll(60.0)))
        assert not list(left.iterdir())
