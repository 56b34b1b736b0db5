"""`doctor --security` on members that joined as their user would: all is well, and each thing that is broken is found."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from ssl import TLSVersion
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

import peerload
from peerload.cli.doctor import (
    broker,
    security_access,
    security_files,
    security_link,
    security_messages,
    security_processes,
)
from peerload.cli.doctor import facts as doctor_facts
from peerload.cli.doctor.facts import DoctorInput
from peerload.cli.doctor.security import LOOKS, examine, permitted
from peerload.cli.doctor.security_rules import RULES
from peerload.model.errors import ConfigError
from peerload.security import certificates
from tests.integration.cluster import program
from tests.integration.machines import Lab
from tests.security import careless
from tests.support import PATIENCE_S, kept_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from peerload.cli.doctor.facts import Finding
    from tests.integration.machines import Machine

files, link, access = security_files, security_link, security_access
messages, processes = security_messages, security_processes
NOW = datetime.now(UTC)
DAY = timedelta(days=1)


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
    for module, name in (
        (doctor_facts, "AGENT_S_MAX"),
        (access, "TRY_S_MAX"),
        (link, "CONNECT_S_MAX"),
        (broker, "ANSWERS_WITHIN_S"),
        (broker, "ECHO_WITHIN_S"),
    ):
        monkeypatch.setattr(module, name, PATIENCE_S)


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


def result(look: Callable[[DoctorInput], Finding], facts: DoctorInput, says: str = "") -> str:
    found = look(facts)
    assert says in found.says, found
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
@pytest.mark.rule("C2")
def test_members_that_have_just_joined_fail_nothing(members: list[Machine]) -> None:
    for machine in members:
        done = machine.type("doctor", "--security", "--json")
        told = json.loads(done.stdout)
        assert (done.returncode, told["failed"], done.stderr) == (0, 0, ""), told
        assert [check["name"] for check in told["checks"]] == list(RULES)
        found = {check["name"]: check for check in told["checks"]}
        assert not [check for check in told["checks"] if "could not be looked at" in check["says"]]
        passed = {rule for rule, check in found.items() if check["result"] == "pass"}
        assert passed >= {
            "J2",
            "J3",
            "J4",
            "J5",
            "J6",
            "L1",
            "L3",
            "X7",
            "F1",
            "T1",
            "C1",
            "C2",
            "S2",
            "S11",
            "S13",
            "S16",
        }
        untested = {rule for rule, check in found.items() if not check["tests"]}
        assert not [rule for rule in untested if found[rule]["result"] == "tested"]
    text = members[1].done("doctor", "--security", "--quiet")
    assert "0 failed" in text
    assert "pass" not in text.splitlines()[0]


@pytest.mark.rule("C2")
def test_without_an_agent_it_fails(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    found = {one.rule: one for one in examine(DoctorInput(str(tmp_path / "none"), environment=environment))}
    assert found["C2"].result == "fail"
    assert found["C2"].fix == "peerload up"
    assert {one.rule for one in found.values() if one.result == "fail"} == {"C2"}


def test_every_look_is_at_a_rule() -> None:
    assert set(LOOKS) <= set(RULES)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_ca_key_that_others_may_read(issuer: DoctorInput) -> None:
    assert result(files.ca_key, issuer, "any member") == "warn"
    place = files.cluster_directory(issuer)
    assert place is not None
    with mode(place / "ca.key", 0o644):
        assert result(files.ca_key, issuer, "others may read it") == "fail"


@pytest.mark.parametrize(
    ("name", "bits"),
    [("", 0o755), ("", 0o777), ("tls/node.pem", 0o640), ("trust", 0o602), ("launcher/launcher.sock", 0o777)],
)
def test_a_state_directory_that_is_open(facts: DoctorInput, name: str, bits: int) -> None:
    assert result(files.state, facts) == "ok"
    assert facts.state is not None
    path = facts.state / name
    if not path.exists():
        path.write_bytes(b"")
        path.chmod(0o600)
    with mode(path, bits):
        assert result(files.state, facts, "others may") == "fail"


def test_a_state_directory_that_others_may_replace(facts: DoctorInput) -> None:
    assert facts.state is not None
    with mode(facts.state.parent, 0o777):
        assert result(files.state, facts, "put another in its place") == "fail"
        assert files.state(facts).fix == f"chmod go-w {facts.state.parent}"


def test_a_link_is_not_mended_by_its_mode(tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path)
    fault = files.exposed(linked, os.getuid())
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
        assert result(files.state, facts, "somebody else's") == "fail"
        assert "chown" in files.state(facts).fix
    finally:
        os.chown(trust, 0, -1)
        if kept is None:
            trust.unlink()


def test_settings_that_others_may_change(facts: DoctorInput, members: list[Machine]) -> None:
    config = members[1].directory / "config" / "peerload" / "config.toml"
    assert result(files.policy, facts) == "ok"
    with mode(config, 0o666):
        assert result(files.policy, facts, "others may change it") == "fail"
        assert files.policy(facts).fix == f"chmod go-w {config}"


@pytest.mark.parametrize("name", ["", "seal.key", "ca.pem"])
def test_a_cluster_directory_that_is_open(facts: DoctorInput, name: str) -> None:
    assert result(files.cluster, facts) == "ok"
    place = files.cluster_directory(facts)
    assert place is not None
    with mode(place / name, 0o755):
        assert result(files.cluster, facts, "others may read it") == "fail"


def test_a_cluster_directory_with_a_link_in_it(facts: DoctorInput) -> None:
    place = files.cluster_directory(facts)
    assert place is not None
    key = place / "seal.key"
    key.rename(place / "kept")
    key.symlink_to(place / "kept")
    try:
        assert result(files.cluster, facts, "it is a link") == "fail"
    finally:
        key.unlink()
        (place / "kept").rename(key)


def test_invitations_that_others_may_read(issuer: DoctorInput) -> None:
    assert result(files.invitations, issuer) == "ok"
    assert issuer.state is not None
    with mode(issuer.state / "invites", 0o644):
        assert result(files.invitations, issuer, "others may read it") == "fail"


def test_a_key_of_gossip_that_is_old_or_made_up(issuer: DoctorInput, tmp_path: Path) -> None:
    assert result(files.seal_key, issuer) == "ok"
    place = files.cluster_directory(issuer)
    assert place is not None
    copy = tmp_path / "copy"
    shutil.copytree(place, copy)
    issuer.info["cluster_directory"] = str(copy)
    os.utime(copy / "seal.key", (1.0, 1.0))
    assert result(files.seal_key, issuer, "old") == "warn"
    (copy / "seal.key").write_text("ab" * 32 + "\n", encoding="ascii")
    assert result(files.seal_key, issuer, "made up") == "fail"


def test_a_node_without_a_cluster_that_others_reach(facts: DoctorInput) -> None:
    assert result(files.alone_stays_alone, facts) == "ok"
    facts.info |= {"cluster_local": True, "listen": "192.0.2.1:7117"}
    assert result(files.alone_stays_alone, facts, "192.0.2.1") == "fail"


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "set-uid"])
def test_a_spool_with_something_else_in_it(facts: DoctorInput, tmp_path: Path, kind: str) -> None:
    assert result(files.spool, facts) == "ok"
    assert facts.state is not None
    odd = facts.state / "spool" / "odd.out"
    if kind == "link":
        odd.symlink_to("/etc/passwd")
    elif kind == "hard link":
        (facts.state / "other").write_bytes(b"")
        os.link(facts.state / "other", odd)
    elif kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.write_bytes(b"")
        odd.chmod(0o4700)
    try:
        assert result(files.spool, facts, "odd.out") == "fail"
    finally:
        odd.unlink()


def test_a_log_with_controls_or_a_key_in_it(facts: DoctorInput) -> None:
    assert result(files.log_is_plain, facts) == "ok"
    assert result(files.secrets_in_logs, facts) == "ok"
    assert facts.state is not None
    log, place = facts.state / "agent.log", files.cluster_directory(facts)
    assert place is not None
    before = log.read_bytes()
    try:
        log.write_bytes(before + b"a name: \x1b]52;c;aGk=\x07\n")
        assert result(files.log_is_plain, facts, "\\x1b") == "fail"
        log.write_bytes(before + (place / "seal.key").read_bytes())
        assert result(files.secrets_in_logs, facts, "the key of gossip") == "fail"
        log.write_bytes(before + b"peerload join plj1-abcdef\n")
        assert result(files.secrets_in_logs, facts, "a token") == "fail"
    finally:
        log.write_bytes(before)


def test_code_that_others_may_change(facts: DoctorInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert result(files.code, facts) == "ok"
    package = tmp_path / "peerload"
    package.mkdir()
    module = package / "__init__.py"
    module.write_bytes(b"")
    monkeypatch.setattr(peerload, "__file__", str(module))
    assert result(files.code, facts) == "ok"
    module.chmod(0o666)
    assert result(files.code, facts, "others may change it") == "fail"
    module.chmod(0o644)
    if os.getuid() == 0:
        os.chown(module, 65534, -1)
        assert result(files.code, facts, "somebody else's") == "fail"
    module.unlink()
    monkeypatch.setattr(files, "_stood_on", lambda: [tmp_path / "library"])
    (tmp_path / "library").mkdir(mode=0o777)
    (tmp_path / "library").chmod(0o777)
    assert result(files.code, facts, "others may change it") == "fail"


# -- the peer link -----------------------------------------------------------------------------------------------------


def shown(members: list[Machine], tmp_path: Path, pair: certificates.KeyPair | None = None) -> Path:
    """A file with a certificate and its key; without a pair: what ws2 has."""
    path = tmp_path / "pair.pem"
    own = (members[1].state / "tls" / "node.pem").read_bytes()
    path.write_bytes(own if pair is None else pair.key + pair.certificate)
    return path


def authority(members: list[Machine]) -> certificates.KeyPair:
    place = members[0].directory / "config" / "peerload" / "cluster"
    return certificates.KeyPair((place / "ca.pem").read_bytes(), (place / "ca.key").read_bytes())


def test_a_port_that_answers_without_tls(facts: DoctorInput, monkeypatch: pytest.MonkeyPatch) -> None:
    with careless.listening(careless.talks) as facts.info["listen"]:
        assert result(link.plain_is_closed, facts, "is answered") == "fail"
    monkeypatch.setattr(link, "CLOSED_WITHIN_S", 0.2)
    monkeypatch.setattr(link, "LATE_S", 0.2)
    with careless.listening(careless.waits) as facts.info["listen"]:
        assert result(link.plain_is_closed, facts, "is open") == "fail"
        assert result(link.silence_is_closed, facts, "is open") == "fail"


def test_a_port_that_lets_anybody_in(facts: DoctorInput, members: list[Machine], tmp_path: Path) -> None:
    context = careless.anybody(shown(members, tmp_path))
    with careless.listening(careless.talks, context) as facts.info["listen"]:
        assert result(link.nobody_is_refused, facts, "is spoken to") == "fail"
        assert result(link.a_stranger_is_refused, facts, "is spoken to") == "fail"
        assert result(link.old_tls_is_refused, facts) == "ok"
        assert result(link.certificate, facts) == "ok"
    context = careless.anybody(shown(members, tmp_path), oldest=TLSVersion.TLSv1_2)
    with careless.listening(careless.talks, context) as facts.info["listen"]:
        assert result(link.old_tls_is_refused, facts, "is spoken to") == "fail"


def test_a_certificate_that_is_not_as_it_should_be(facts: DoctorInput, members: list[Machine], tmp_path: Path) -> None:
    ca = authority(members)
    looks: dict[str, certificates.KeyPair] = {
        "refused": certificates.issue(certificates.make_ca("x", "00" * 16, NOW), "ws2", NOW),
        "expired": certificates.issue(ca, "ws2", NOW - 100 * DAY),
        "is for ws9": certificates.issue(ca, "ws9", NOW),
        "more than 90 days": certificates.issue(ca, "ws2", NOW, 400 * DAY),
    }
    for says, pair in looks.items():
        context = careless.anybody(shown(members, tmp_path, pair))
        with careless.listening(careless.closes, context) as facts.info["listen"]:
            assert result(link.certificate, facts, says) == "fail"
            if says == "is for ws9":
                facts.info["node"] = "ws9"
                assert result(link.certificate_says_node, facts) == "ok"
                facts.info["node"] = "ws2"
    late = certificates.issue(ca, "ws2", NOW - 80 * DAY)
    with careless.listening(careless.closes, careless.anybody(shown(members, tmp_path, late))) as facts.info["listen"]:
        assert result(link.certificate, facts, "should have been made anew") == "warn"


def test_a_certificate_that_has_expired_is_told_where_nothing_can_be_read(facts: DoctorInput) -> None:
    facts.checkup["certificate_until"] = facts.now - 1
    facts.info["cluster_directory"] = "/nonexistent"
    assert result(link.certificate, facts, "expired") == "fail"


def of_two_names(ca: certificates.KeyPair) -> certificates.KeyPair:
    """What no CA of ours makes: a certificate that is for two nodes."""
    key = Ed25519PrivateKey.generate()
    issuer = x509.load_pem_x509_certificate(ca.certificate)
    signer = certificates.private_key(ca.key)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    made = (
        certificates._builder(issuer.subject, issuer.subject, key.public_key(), NOW - DAY, NOW + DAY)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("ws2"), x509.DNSName("ws3")]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, None)
    )
    return certificates.KeyPair(made.public_bytes(Encoding.PEM), certificates._key_pem(key))


def test_a_certificate_that_says_more_than_one_node(facts: DoctorInput, members: list[Machine], tmp_path: Path) -> None:
    assert result(link.certificate_says_node, facts, "names ws2") == "ok"
    for pair, says in ((of_two_names(authority(members)), "more than which node"), (authority(members), "is refused")):
        context = careless.anybody(shown(members, tmp_path, pair))
        with careless.listening(careless.closes, context) as facts.info["listen"]:
            assert result(link.certificate_says_node, facts, says) == "fail"
            assert result(link.certificate, facts) == "fail"


def test_a_datagram_that_is_answered(facts: DoctorInput, monkeypatch: pytest.MonkeyPatch) -> None:
    assert result(link.datagrams_unanswered, facts) == "ok"
    monkeypatch.setattr(link, "NO_ANSWER_S", PATIENCE_S)
    with careless.echoing() as facts.info["listen"]:
        assert result(link.datagrams_unanswered, facts, "is answered") == "fail"


# -- the local socket --------------------------------------------------------------------------------------------------


@pytest.mark.rule("L1")
def test_a_socket_that_others_may_use(facts: DoctorInput) -> None:
    assert result(access.socket, facts) == "ok"
    path = Path(facts.socket)
    if os.getuid() == 0:
        in_system_mode(facts)
        with mode(path, 0o660):
            os.chown(path, -1, 65534)
            assert result(access.socket, facts, "is not the group") == "fail"
            os.chown(path, -1, 0)
        facts.checkup["security"]["mode"] = "user"
    with mode(path, 0o666):
        assert result(access.socket, facts, "others may connect") == "fail"
    with mode(path.parent, 0o777):
        assert result(access.socket, facts, "put another in its place") == "fail"


@pytest.mark.rule("L1")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can ask as somebody else")
def test_another_user_is_refused_though_the_socket_is_open(members: list[Machine]) -> None:
    path = Path(members[1].socket)
    with contextlib.ExitStack() as stack:
        for above in (path, *[part for part in path.parents if part.is_relative_to(members[1].directory.parent)]):
            stack.enter_context(mode(above, 0o777))
        told = access.asked_as(access.NOBODY, str(path))
        assert b"serves its own user only" in told
        assert b"\xa2ok" not in told


@pytest.mark.skipif(os.getuid() != 0, reason="only root can ask as somebody else")
def test_a_server_that_serves_everybody(facts: DoctorInput) -> None:
    def serves(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"\0\0\0\x06\x82\xa2id\x01\xa2ok\x80")

    # Not below the directory of this test, which others may not enter.
    path = f"/tmp/pl-open-{os.getpid()}"
    try:
        with careless.listening(serves, path=path) as facts.socket:
            Path(path).chmod(0o666)
            assert result(access.others_are_refused, facts, "is served") == "fail"
    finally:
        Path(path).unlink()


def test_somebody_else_at_the_socket(facts: DoctorInput, tmp_path: Path) -> None:
    assert result(access.who_answers, facts) == "ok"
    assert result(access.requests_are_bounded, facts) == "ok"
    with careless.listening(careless.closes, path=str(tmp_path / "sock")) as facts.socket:
        assert result(access.who_answers, facts, f"pid {os.getpid()}") == "fail"
        assert result(access.requests_are_bounded, facts, "is not refused") == "fail"


# -- processes ---------------------------------------------------------------------------------------------------------

LISTENS = "import socket, sys, time\ns = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
READY = "print('ready', flush=True)\ntime.sleep(60)\n"


def test_a_socket_too_many(facts: DoctorInput) -> None:
    assert result(processes.listening, facts, "and nowhere else") == "ok"
    name = f"pl-test-{os.getpid()}"
    with kept_port() as port:
        facts.info["listen"] = f"127.0.0.1:{port}"
        for more, says in (
            ("u = socket.create_server(('127.0.0.1', 0))\n", "tcp 127.0.0.1:"),
            ("u = socket.socket(type=socket.SOCK_DGRAM); u.bind(('', 0))\n", "udp 0.0.0.0:"),
            (f"u = socket.socket(socket.AF_UNIX); u.bind('\\0{name}'); u.listen()\n", f"unix @{name}"),
        ):
            with process(sys.executable, "-c", LISTENS + more + READY, str(port)) as facts.info["pid"]:
                assert result(processes.listening, facts, says) == "fail"


def test_a_socket_at_every_address(facts: DoctorInput) -> None:
    code = LISTENS.replace("127.0.0.1", "") + READY
    with kept_port() as port:
        facts.info["listen"] = f"127.0.0.1:{port}"
        with process(sys.executable, "-c", code, str(port)) as facts.info["pid"]:
            assert result(processes.listening, facts, "0.0.0.0") == "fail"


def test_a_descriptor_that_would_be_passed_on(facts: DoctorInput) -> None:
    assert result(processes.descriptors, facts, "close when a task starts") == "ok"
    reading, writing = os.pipe()
    try:
        with process("sleep", "60", pass_fds=(reading,)) as facts.info["pid"]:
            assert result(processes.descriptors, facts, f"descriptor {reading}") == "fail"
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.skipif(os.getuid() != 0, reason="this test has to be root to see what root must not be")
def test_an_agent_with_too_many_rights(facts: DoctorInput) -> None:
    assert result(processes.whose_tasks, facts, "as root") == "warn"
    in_system_mode(facts)
    assert result(processes.whose_tasks, facts, "as root") == "fail"
    assert result(processes.hardening, facts, "could gain rights") == "fail"
    assert result(processes.launcher, facts, "runs as 0") == "fail"
    assert result(processes.memory_of_keys, facts) in ("ok", "fail")
    with process("sh", "-c", "sleep 60; :") as facts.info["launcher_pid"]:
        wait_until(lambda: processes.running_tasks(facts).result != "skip", what="its child")
        assert result(processes.running_tasks, facts, "rights it should not have") == "fail"


@pytest.mark.parametrize(
    ("administrators", "says", "expected"),
    [
        ({"may_be": False, "named": []}, "the agent is uid 4711", "ok"),
        ({"may_be": False, "named": ["eve", "mallory"]}, "administrators: eve, mallory; nothing runs as them", "warn"),
        ({"may_be": True, "named": []}, "may be administrators here", "warn"),
        ({"may_be": True, "named": ["eve"]}, "(map_administrators = true): eve", "warn"),
    ],
)
def test_users_of_other_nodes_who_would_be_administrators(
    facts: DoctorInput, administrators: dict[str, object], says: str, expected: str
) -> None:
    in_system_mode(facts, user_id=4711, administrators=administrators)
    assert result(processes.whose_tasks, facts, says) == expected


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
        assert result(files.policy, facts) == "ok"
        with mode(config, 0o666):
            assert result(files.policy, facts, "others may change it") == "fail"
        with mode(tmp_path, 0o777):
            assert result(files.policy, facts, "others may") == "fail"
        with mode(sock, 0o777):
            assert result(files.policy, facts, "launcher.sock: others may change it") == "fail"
        os.chown(config, 65534, -1)
        assert result(files.policy, facts, "somebody else's") == "fail"


def test_what_may_not_be_looked_at_is_no_fault(facts: DoctorInput) -> None:
    def closed(_facts: DoctorInput) -> Finding:
        raise PermissionError(13, "Permission denied", "/there")

    found = permitted(closed)(facts)
    assert (found.result, "/there may not be looked at" in found.says) == ("skip", True)


def test_no_launcher_or_one_that_heeds_the_environment(facts: DoctorInput) -> None:
    assert result(processes.isolated, facts) == "ok"
    with process("sleep", "60") as facts.info["launcher_pid"]:
        assert result(processes.isolated, facts, "PYTHONPATH") == "fail"
    facts.info["launcher_pid"] = 0
    assert result(processes.launcher, facts, "no launcher") == "fail"


def test_what_is_not_held_and_not_told(facts: DoctorInput) -> None:
    facts.checkup["launcher"] |= {"units": "bare", "unenforced": []}
    assert result(processes.containment, facts, "not told") == "fail"
    facts.checkup["launcher"] |= {"unenforced": ["a process that leaves"]}
    assert result(processes.containment, facts, "said so") == "warn"


def test_a_password_on_the_command_line(facts: DoctorInput) -> None:
    assert result(processes.command_lines, facts) == "ok"
    for word in ("mqtt://me:secret@127.0.0.1", "plj1-abcdef"):
        with process("sh", "-c", "sleep 60; :", word) as facts.info["pid"]:
            assert result(processes.command_lines, facts, "a secret is on the agent's") == "fail"


def test_a_core_file_that_a_service_would_write(facts: DoctorInput) -> None:
    assert result(processes.memory_of_keys, facts) in ("ok", "warn")
    in_system_mode(facts)
    with process("sh", "-c", "ulimit -c 0; sleep 60; :") as facts.info["pid"]:
        wait_until(lambda: processes.memory_of_keys(facts).result == "ok", what="its limit")
    with process("sh", "-c", "ulimit -c 8; sleep 60; :") as facts.info["pid"]:
        wait_until(lambda: processes.memory_of_keys(facts).result == "fail", what="its limit")


# -- what is said ------------------------------------------------------------------------------------------------------


def test_a_password_in_an_answer(facts: DoctorInput, members: list[Machine]) -> None:
    assert result(messages.secrets_in_answers, facts) == "ok"
    members[1].configure('mqtt = ["mqtt://me:hunter2@192.0.2.1"]\n')
    try:
        again = facts_of(members[1])
        assert result(messages.secrets_in_answers, again) == "ok"
        again.checkup["broker"] = {"why": "hunter2 is refused", "urls": []}
        assert result(messages.secrets_in_answers, again, "a broker's password") == "fail"
    finally:
        members[1].configure("")


def test_a_broker_that_takes_from_anybody(
    facts: DoctorInput, mosquitto: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert result(messages.broker, facts, "no broker") == "skip"
    with kept_port() as port:
        look_at_a_broker(facts, mosquitto, tmp_path, monkeypatch, port)


def test_a_broker_by_tls_where_the_cluster_cannot_be_read(facts: DoctorInput) -> None:
    facts.checkup["broker"] = {"urls": ["mqtts://127.0.0.1:9"], "url": None, "why": ""}
    facts.cluster = None
    assert result(messages.broker, facts, "cannot be read") == "skip"
    with pytest.raises(ConfigError):
        broker.Way().tls(shows_us=False).context()


def look_at_a_broker(
    facts: DoctorInput, mosquitto: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """One at this port, which lets anybody in, and is gone at the end."""
    configuration = tmp_path / "mosquitto.conf"
    configuration.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nuser root\n", encoding="utf-8")
    with process(str(mosquitto), "-c", str(configuration), stderr=subprocess.DEVNULL):
        facts.checkup["broker"] = {"urls": [f"mqtt://127.0.0.1:{port}"], "url": None, "why": ""}
        wait_until(lambda: "lets anybody publish" in messages.broker(facts).says, 30, "the broker")
        assert result(messages.broker, facts) == "warn"
        monkeypatch.setattr(messages, "_is_here", lambda _url: False)
        assert result(messages.broker, facts, "lets anybody publish") == "fail"
    assert result(messages.broker, facts, "is not encrypted") == "fail"


# -- on machines of its own, since it cannot be undone: other tests may come later -------------------------------------


@pytest.mark.long
def test_a_node_that_was_shut_out() -> None:
    with Lab() as lab:
        members = made(lab)
        assert result(files.revocations, facts_of(members[1])) == "ok"
        members[0].done("revoke", "ws2")
        wait_until(lambda: facts_of(members[1]).checkup.get("revoked"), 20, "it to hear of that")
        assert result(files.revocations, facts_of(members[1]), "was shut out") == "fail"
        assert members[1].type("doctor", "--security").returncode == 1
