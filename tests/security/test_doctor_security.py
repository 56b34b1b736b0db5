"""`doctor --security` on members that joined as their user would: all is well, and each thing that is broken is found."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import peerload
from peerload.cli.doctor import cluster, security
from peerload.cli.doctor import machine as doctor_facts
from peerload.cli.doctor.machine import DoctorInput
from peerload.model.errors import ConfigError
from tests.integration.cluster import program
from tests.integration.machines import Lab
from tests.support import PATIENCE_S, wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from peerload.cli.doctor.machine import Finding
    from tests.integration.machines import Machine

DAY_S = 86_400.0
NOBODY = 65534


@pytest.fixture(scope="module")
def members() -> Iterator[list[Machine]]:
    with Lab() as lab:
        yield made(lab)


def made(lab: Lab) -> list[Machine]:
    """ws1 with the key of the CA, and ws2, which has joined."""
    (first,) = lab.cluster("ws1")
    second = lab.machine("ws2").configure("")
    line = first.done("invite", "--listen", "127.0.0.1:0")
    joined = subprocess.run(
        [*program(), "join", "--listen", "127.0.0.1:0", "-"],
        input=line,
        env=second.environment,
        capture_output=True,
        text=True,
        cwd="/tmp",
        timeout=60,
        check=False,
    )
    assert joined.returncode == 0, joined.stderr
    return [first, second]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that has to come is waited for, however long the machine stands still."""
    monkeypatch.setattr(doctor_facts, "AGENT_S_MAX", PATIENCE_S)


@pytest.fixture
def issuer(members: list[Machine]) -> DoctorInput:
    """What doctor gathers on the machine that has the CA's key."""
    return facts_of(members[0])


@pytest.fixture
def facts(members: list[Machine]) -> DoctorInput:
    """The same on one that has joined."""
    return facts_of(members[1])


def facts_of(machine: Machine) -> DoctorInput:
    return DoctorInput(machine.socket, environment=machine.environment)


def result(look: Callable[[DoctorInput], Finding], facts: DoctorInput, fix: str = "") -> str:
    """The result of a check. fix: part of the command that it suggests."""
    found = look(facts)
    assert fix in found.fix, found
    assert found.fix or found.result not in ("warn", "fail")
    return found.result


@contextlib.contextmanager
def mode(path: Path, bits: int) -> Iterator[None]:
    before = path.stat().st_mode
    path.chmod(bits)
    try:
        yield
    finally:
        path.chmod(before)


@contextlib.contextmanager
def process(*words: str, **more: Any) -> Iterator[int]:
    """A process in the agent's place → its pid."""
    started = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **more)
    assert started.stdout is not None
    try:
        line = Path(f"/proc/{started.pid}/cmdline")
        wait_until(lambda: words[-1].encode() in line.read_bytes(), what="it to be what it is to be")
        if words[0] == sys.executable:
            assert started.stdout.readline() == b"ready\n"
        yield started.pid
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


def in_system_mode(facts: DoctorInput, **more: Any) -> DoctorInput:
    """As if its agent said so."""
    facts.checkup["security"] |= {"mode": "system", **more}
    return facts


@pytest.mark.long
def test_members_that_have_just_joined_fail_nothing(members: list[Machine]) -> None:
    for machine in members:
        done = machine.type("doctor", "--security", "--json")
        told = json.loads(done.stdout)
        assert (done.returncode, told["failed"], told["mode"], done.stderr) == (0, 0, "user", ""), told
        assert [check["name"] for check in told["checks"]] == [check.name for check in security.CHECKS]
        assert not [check for check in told["checks"] if Says.CHECK_FAILED() in check["says"]]
        passed = {check["name"] for check in told["checks"] if check["result"] == "ok"}
        assert passed >= {"agent", "state", "cluster", "settings", "socket", "code", "certificate", "gossip key"}
    text = members[1].done("doctor", "--security", "--quiet")
    assert "0 failed" in text
    assert not text.startswith("ok")


def test_without_an_agent_it_fails(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    facts = DoctorInput(str(tmp_path / "none"), environment=environment)
    found = {check.name: check.look(facts) for check in security.CHECKS}
    assert found["agent"].fix == "peerload up"
    assert [name for name, finding in found.items() if finding.result == "fail"] == ["agent"]


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_ca_key_that_others_may_read(issuer: DoctorInput) -> None:
    assert result(security.ca_key, issuer, "--slots 0") == "warn"
    place = security.cluster_directory(issuer)
    assert place is not None
    with mode(place / "ca.key", 0o644):
        assert result(security.ca_key, issuer, "chmod go=") == "fail"


@pytest.mark.parametrize(
    ("name", "bits"),
    [("", 0o755), ("", 0o777), ("tls/node.pem", 0o640), ("trust", 0o602), ("launcher/launcher.sock", 0o777)],
)
def test_a_state_directory_that_is_open(facts: DoctorInput, name: str, bits: int) -> None:
    assert result(security.state, facts) == "ok"
    assert facts.state is not None
    path = facts.state / name
    if not path.exists():
        path.write_bytes(b"")
        path.chmod(0o600)
    with mode(path, bits):
        assert result(security.state, facts, "chmod go") == "fail"


def test_a_state_directory_that_others_may_replace(facts: DoctorInput) -> None:
    assert facts.state is not None
    with mode(facts.state.parent, 0o777):
        assert result(security.state, facts, "chmod go-w") == "fail"
        assert security.state(facts).fix == f"chmod go-w {facts.state.parent}"


def test_a_link_is_not_mended_by_its_mode(tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path)
    fault = security.exposed(linked, os.getuid())
    assert fault is not None
    assert "chmod" not in fault.fix


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_somebody_else_is_not_mended_by_its_mode(facts: DoctorInput) -> None:
    assert facts.state is not None
    trust = facts.state / "trust"
    kept = trust.read_bytes() if trust.exists() else None
    trust.write_bytes(kept or b"")
    os.chown(trust, 65534, -1)
    try:
        assert result(security.state, facts, "chown") == "fail"
        assert "chown" in security.state(facts).fix
    finally:
        os.chown(trust, 0, -1)
        if kept is None:
            trust.unlink()


def test_settings_that_others_may_change(facts: DoctorInput, members: list[Machine]) -> None:
    config = members[1].directory / "config" / "peerload" / "config.toml"
    assert result(security.settings, facts) == "ok"
    with mode(config, 0o666):
        assert result(security.settings, facts, "chmod go") == "fail"
        assert security.settings(facts).fix == f"chmod go-w {config}"


@pytest.mark.parametrize("name", ["", "seal.key", "ca.pem"])
def test_a_cluster_directory_that_is_open(facts: DoctorInput, name: str) -> None:
    assert result(security.cluster, facts) == "ok"
    place = security.cluster_directory(facts)
    assert place is not None
    with mode(place / name, 0o755):
        assert result(security.cluster, facts, "chmod go=") == "fail"


def test_a_cluster_directory_with_a_link_in_it(facts: DoctorInput) -> None:
    place = security.cluster_directory(facts)
    assert place is not None
    key = place / "seal.key"
    key.rename(place / "kept")
    key.symlink_to(place / "kept")
    try:
        assert result(security.cluster, facts, "ls -l") == "fail"
    finally:
        key.unlink()
        (place / "kept").rename(key)


def test_a_key_of_gossip_that_is_old(issuer: DoctorInput, tmp_path: Path) -> None:
    assert result(security.gossip_key, issuer) == "ok"
    place = security.cluster_directory(issuer)
    assert place is not None
    copy = tmp_path / "copy"
    shutil.copytree(place, copy)
    issuer.info["cluster_directory"] = str(copy)
    os.utime(copy / "seal.key", (1.0, 1.0))
    assert result(security.gossip_key, issuer, "rotate") == "warn"


def test_code_that_others_may_change(facts: DoctorInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert result(security.code, facts) == "ok"
    package = tmp_path / "peerload"
    package.mkdir()
    module = package / "__init__.py"
    module.write_bytes(b"")
    monkeypatch.setattr(peerload, "__file__", str(module))
    assert result(security.code, facts) == "ok"
    module.chmod(0o666)
    assert result(security.code, facts, "chmod go") == "fail"
    module.chmod(0o644)
    if os.getuid() == 0:
        os.chown(module, 65534, -1)
        assert result(security.code, facts) == "fail"
    module.unlink()
    library = tmp_path / "library"
    library.mkdir()
    (library / "__init__.py").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(security, "PACKAGES", ("library",))
    assert result(security.code, facts) == "ok"
    library.chmod(0o777)
    assert result(security.code, facts, "chmod go") == "fail"


# -- dates -------------------------------------------------------------------------------------------------------------


def test_dates_of_the_certificate(facts: DoctorInput) -> None:
    assert result(security.certificate, facts) == "ok"
    facts.security["certificate"]["due_at"] = facts.now - DAY_S
    assert result(security.certificate, facts, "CA's key") == "warn"
    facts.checkup["certificate_until"] = facts.now - 1
    assert result(security.certificate, facts, "peerload join") == "fail"
    facts.info["cluster_local"] = True
    assert result(security.certificate, facts) == "skip"


def test_a_certificate_that_cannot_be_read(facts: DoctorInput) -> None:
    assert facts.state is not None
    path = facts.state / "tls/node.pem"
    sound = path.read_bytes()
    try:
        for damage in (b"", sound[:-100], b"\0" * 100):
            path.write_bytes(damage)
            assert result(security.certificate, facts, "peerload invite") == "fail"
            facts.checkup, told = {}, facts.checkup  # no agent runs
            assert result(security.certificate, facts, "peerload invite") == "fail"
            facts.checkup = told
        path.unlink()
        assert result(security.certificate, facts, "peerload invite") == "fail"
    finally:
        path.write_bytes(sound)
        path.chmod(0o600)
    assert result(security.certificate, facts) == "ok"


# -- the local socket --------------------------------------------------------------------------------------------------


@pytest.mark.rule("L1")
def test_a_socket_that_others_may_use(facts: DoctorInput) -> None:
    assert result(security.socket, facts) == "ok"
    path = Path(facts.socket)
    if os.getuid() == 0:
        in_system_mode(facts)
        with mode(path, 0o660):
            os.chown(path, -1, 65534)
            assert result(security.socket, facts, "chgrp") == "fail"
            os.chown(path, -1, 0)
        facts.checkup["security"]["mode"] = "user"
    with mode(path, 0o666):
        assert result(security.socket, facts, "chmod") == "fail"
    with mode(path.parent, 0o777):
        assert result(security.socket, facts, "chmod go-w") == "fail"


@pytest.mark.rule("L1")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can ask as somebody else")
def test_another_user_is_refused_though_the_socket_is_open(members: list[Machine]) -> None:
    path = Path(members[1].socket)
    with contextlib.ExitStack() as stack:
        for above in (path, *[part for part in path.parents if part.is_relative_to(members[1].directory.parent)]):
            stack.enter_context(mode(above, 0o777))
        told = asked_as(NOBODY, str(path))
    assert Says.OWN_USER_ONLY().encode() in told
    assert b"\xa2ok" not in told


def asked_as(user_id: int, path: str) -> bytes:
    """What the agent answers to another user who asks for `info`."""
    info = bytes.fromhex("82a2696401a476657262a4696e666f")  # {"id": 1, "verb": "info"}
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child makes system calls alone
        child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(user_id, user_id, user_id)
            os.setresuid(user_id, user_id, user_id)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                client.sendall(len(info).to_bytes(4, "big") + info)
                os.write(writing, client.recv(65536))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return told


# -- rights, and what is not enforced ----------------------------------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="this test has to be root to see what root must not be")
def test_an_agent_with_too_many_rights(facts: DoctorInput) -> None:
    assert result(security.users, facts, "service install") == "warn"
    in_system_mode(facts)
    assert result(security.users, facts, "systemctl") == "fail"
    assert result(security.hardening, facts, "systemctl") == "fail"


@pytest.mark.parametrize(
    ("administrators", "named", "expected"),
    [
        ({"may_be": False, "named": []}, "4711", "ok"),
        ({"may_be": False, "named": ["eve", "mallory"]}, "eve, mallory", "warn"),
        ({"may_be": True, "named": []}, "map_administrators", "warn"),
        ({"may_be": True, "named": ["eve"]}, "eve", "warn"),
    ],
)
def test_users_of_other_nodes_who_would_be_administrators(
    facts: DoctorInput, administrators: dict[str, object], named: str, expected: str
) -> None:
    in_system_mode(facts, user_id=4711, administrators=administrators)
    assert result(security.users, facts) == expected
    assert named in security.users(facts).says


@pytest.mark.skipif(os.getuid() != 0, reason="what root alone may change is to be root's")
def test_a_policy_that_others_may_change(facts: DoctorInput, tmp_path: Path) -> None:
    in_system_mode(facts)
    config = tmp_path / "peerload.toml"
    config.write_text("", encoding="utf-8")
    flags = ("--config-directory", "--directory", "--sockets")
    words = ("--config", str(config), *(word for flag in flags for word in (flag, str(tmp_path))))
    sock = tmp_path / "launcher.sock"
    sock.touch(mode=0o600)
    with process("sh", "-c", "sleep 60; :", *words) as facts.info["launcher_pid"]:
        assert result(security.settings, facts) == "ok"
        with mode(config, 0o666):
            assert result(security.settings, facts, "chmod go") == "fail"
        with mode(tmp_path, 0o777):
            assert result(security.settings, facts, "chmod go") == "fail"
        with mode(sock, 0o777):
            assert result(security.settings, facts, "launcher.sock") == "fail"
        os.chown(config, 65534, -1)
        assert result(security.settings, facts, "chown") == "fail"


def test_what_may_not_be_looked_at_is_no_fault(facts: DoctorInput) -> None:
    def closed(_facts: DoctorInput) -> Finding:
        raise PermissionError(13, "Permission denied", "/there")

    found = security.permitted(closed)(facts)
    assert (found.result, "/there" in found.says) == ("skip", True)


def test_what_is_not_enforced(facts: DoctorInput) -> None:
    facts.checkup["launcher"] |= {"unenforced": ["a process that leaves"]}
    assert result(security.enforcement, facts, "service install") == "warn"
    assert "a process that leaves" in security.enforcement(facts).says
    facts.checkup["launcher"] |= {"unenforced": []}
    assert result(security.enforcement, facts) == "ok"


def test_a_core_file_that_a_service_would_write(facts: DoctorInput) -> None:
    in_system_mode(facts)
    code = """
import ctypes, os, resource, sys, time
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
resource.setrlimit(resource.RLIMIT_CORE, (int(sys.argv[1]), int(sys.argv[1])))
if not os.getuid():
    os.setuid(65534)  # and no capabilities
print('ready', flush=True)
time.sleep(60)
"""
    with process(sys.executable, "-c", code, "0") as facts.info["pid"]:
        assert result(security.hardening, facts) == "ok"
    with process(sys.executable, "-c", code, "8") as facts.info["pid"]:
        assert result(security.hardening, facts, "LimitCORE=0") == "fail"


# -- brokers -----------------------------------------------------------------------------------------------------------


def test_a_broker_that_is_not_spoken_to_by_tls(facts: DoctorInput) -> None:
    assert result(security.broker, facts) == "skip"
    for url, expected in (
        ("mqtt://127.0.0.1:9", "ok"),
        ("mqtts://broker.lab", "ok"),
        ("mqtt://me:***@broker.lab", "fail"),
    ):
        facts.checkup["broker"] = {"urls": [url], "url": None, "why": ""}
        assert result(security.broker, facts) == expected
        assert "me" not in security.broker(facts).says.partition("broker.lab")[0].split()


def test_a_broker_by_tls_where_the_cluster_cannot_be_read() -> None:
    with pytest.raises(ConfigError):
        cluster.BrokerAccess().tls(shows_us=False).context()
    assert cluster.probe_broker("mqtts://127.0.0.1:9").why
