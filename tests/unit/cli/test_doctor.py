"""`doctor`'s checks on machines and clusters that cannot be had at will: each in the state in which it fails."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pynvml
import pytest

from peerload.cli.doctor import cluster, machine
from peerload.cli.doctor.machine import Check, DoctorInput, Finding
from peerload.cli.verbs import doctor
from peerload.model.config import AgentConfig, HooksSettings
from peerload.security import cluster_dir
from tests.each import each
from tests.support import cluster_of

INFO = {
    "node": "ws1",
    "pid": 1,
    "launcher_pid": 1,
    "version": "0.0.9",
    "listen": "127.0.0.1:1",
    "sought": {},
    "state": "/",
}
DISK = {"state": "ok", "low_bytes": 0, "reserve_bytes": 1, "reserve_bytes_max": 1, "stalled": False}
LAUNCHER = {"pid": 5, "units": "cgroup2", "memory": "cgroup2", "unenforced": [], "silent": False}


def peer(**facts: Any) -> dict[str, Any]:
    return {"node": "p", "state": "alive", "met_s": 900.0, "datagram_age_s": 1.0, "clock_ahead_s": 0.1, **facts}


@pytest.fixture
def facts(tmp_path: Path) -> DoctorInput:
    """No agent, no settings, and a machine of which nothing is known."""
    root = tmp_path / "root"
    root.mkdir()
    environment = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    return DoctorInput(str(tmp_path / "none"), root=root, environment=environment)


def put(facts: DoctorInput, path: str, text: str) -> None:
    file = facts.root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def with_agent(facts: DoctorInput, **checkup: Any) -> DoctorInput:
    facts.info = dict(INFO)
    facts.nodes = [{"node": "ws1", "self": True, "state": "alive", "gpus": []}]
    facts.checkup = {
        "disk": DISK,
        "launcher": LAUNCHER,
        "peers": [],
        "clashes": {},
        "damaged": [],
        "frozen": [],
    } | checkup
    return facts


def test_another_version(facts: DoctorInput) -> None:
    assert machine.version(with_agent(facts)).result == "warn"


@each(("kind", "result"), [("nfs4", "fail"), ("tmpfs", "warn"), ("ext4", "ok")])
def test_file_systems(facts: DoctorInput, kind: str, result: str) -> None:
    with_agent(facts).info["state"] = "/home/me/my state"
    put(facts, "/proc/self/mounts", f"/dev/sda1 / ext4 rw 0 0\nserver:/home /home/me/my\\040state {kind} rw 0 0\n")
    found = machine.file_system(facts)
    assert found.result == result
    assert kind in found.says


@each(
    ("changed", "result"),
    [
        ({"state": "full"}, "fail"),
        ({"stalled": True}, "fail"),
        ({"state": "low"}, "warn"),
        ({"low_bytes": 1 << 62}, "warn"),
        ({"reserve_bytes": 0}, "warn"),
    ],
)
def test_room(facts: DoctorInput, changed: dict[str, Any], result: str) -> None:
    assert machine.room(with_agent(facts, disk=DISK | changed)).result == result


def test_a_disk_that_is_slow_to_keep(facts: DoctorInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_agent(facts).info["state"] = str(tmp_path)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(machine, "SLOW_SYNC_S", 0.0)
    assert machine.state(facts).result == "warn"
    (tmp_path / "file").touch()
    facts.info["state"] = str(tmp_path / "file")
    assert machine.state(facts).result == "fail"


@each("changed", [{"pid": 0}, {"silent": True}])
def test_the_launcher(facts: DoctorInput, changed: dict[str, Any]) -> None:
    assert machine.launcher(with_agent(facts)).result == "ok"
    assert machine.launcher(with_agent(facts, launcher=LAUNCHER | changed)).result == "fail"


@each("changed", [{"units": "bare", "unenforced": ["a limit"]}, {"memory": None}, {"memory": "rlimit"}])
def test_containment(facts: DoctorInput, changed: dict[str, Any]) -> None:
    assert machine.containment(with_agent(facts)).result == "ok"
    found = machine.containment(with_agent(facts, launcher=LAUNCHER | changed))
    assert found.result == "warn"
    assert "Delegate" in found.fix
    assert "--security" in found.says
    assert "a limit" not in found.says, "the list is that of --security"


def test_another_event_loop(facts: DoctorInput) -> None:
    assert machine.python(with_agent(facts, event_loop="asyncio")).result == "warn"


def test_a_python_without_packages(facts: DoctorInput, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvloop" else object())
    assert "uvloop" in machine.python(facts).says


def test_certificates_that_expire(facts: DoctorInput) -> None:
    facts.cluster = cluster_of()._replace(valid_until=datetime.now(UTC) + timedelta(days=3))
    assert cluster.cluster(facts).result == "warn"
    facts.cluster = facts.cluster._replace(valid_until=datetime.now(UTC) - timedelta(days=3))
    assert cluster.cluster(facts).result == "fail"
    facts.cluster = cluster_of()
    with_agent(facts, certificate_until=facts.now - 1).info["cluster_id"] = facts.cluster.id
    assert cluster.cluster(facts).result == "fail"


def test_a_node_that_cannot_renew_its_certificate_or_was_shut_out(facts: DoctorInput) -> None:
    facts.cluster = cluster_of()

    def found(days: float, *, issuer: bool, revoked: bool = False) -> Finding:
        until = facts.now + days * 86_400
        told = with_agent(facts, certificate_until=until, issuer=issuer, revoked=revoked)
        told.info["cluster_id"] = cluster_of().id
        return cluster.cluster(told)

    assert found(3, issuer=True).result == "ok"
    assert found(60, issuer=False).result == "ok"
    assert (found(3, issuer=False).result, found(-3, issuer=False).result) == ("warn", "fail")
    shut_out = found(60, issuer=False, revoked=True)
    assert shut_out.result == "fail"
    assert "revoked" in shut_out.says
    assert "peerload invite" in shut_out.fix


@each(
    ("own", "peers", "result", "says"),
    [
        (True, {"ws2": ("alive", False), "ws3": ("alive", False)}, "ok", "only this node can invite"),
        (True, {"ws2": ("alive", False)}, "ok", ""),
        (True, {"ws2": ("alive", True), "ws3": ("alive", False)}, "ok", ""),
        (False, {"ws2": ("alive", True), "ws3": ("alive", False)}, "ok", "only ws2 can invite"),
        (False, {"ws2": ("asleep", True)}, "ok", ""),
        (False, {"ws2": ("dead", True), "ws3": ("alive", False)}, "warn", "ws2 is dead"),
        (False, {"ws2": ("left", True), "ws3": ("alive", True)}, "ok", ""),
        (False, {"ws3": ("alive", False)}, "warn", "nobody can invite"),
        (False, {}, "ok", ""),
    ],
)
def test_members_that_can_invite(
    facts: DoctorInput, own: bool, peers: dict[str, tuple[str, bool]], result: str, says: str
) -> None:
    facts.cluster = cluster_of()
    seen = [{"node": node, "state": state, "issuer": issuer} for node, (state, issuer) in peers.items()]
    with_agent(facts, certificate_until=facts.now + 60 * 86_400, issuer=own, peers=seen)
    facts.info["cluster_id"] = cluster_of().id
    found = cluster.cluster(facts)
    assert found.result == result
    assert says in found.says
    assert ("invite" in found.says) is bool(says)


def test_a_loopback_address_in_a_cluster_of_machines(facts: DoctorInput) -> None:
    with_agent(facts).info["cluster_local"] = False
    assert cluster.listen(facts).result == "warn"
    facts.checkup["listen_absent"] = True
    assert cluster.listen(facts).result == "fail"


def test_the_cluster_that_only_the_agent_was_told_of(facts: DoctorInput) -> None:
    with_agent(facts)
    facts.cluster = None
    facts.info |= {"cluster_local": False, "cluster": "lab", "cluster_directory": "/lab"}
    assert "lab in /lab" in cluster.cluster(facts).says
    facts.checkup["certificate_until"] = facts.now - 1
    assert cluster.cluster(facts).result == "fail"
    facts.checkup["revoked"] = True
    assert "revoked" in cluster.cluster(facts).says
    facts.info["cluster_local"] = True
    assert cluster.cluster(facts).result == "fail"
    facts.checkup["revoked"] = False
    assert "none yet" in cluster.cluster(facts).says


@each(
    ("tcp", "tcp6", "udp", "result"),
    [
        ("", "", "", "fail"),
        ("0100007F:1BCD 00000000:0000 0A 0", "", "0100007F:1BCD 00000000:0000 07 0", "ok"),
        ("", "00000000000000000000000000000000:1BCD 00000000000000000000000000000000:0000 0A 0", "0:1BCD 0", "ok"),
        ("0100007F:1BCD 00000000:0000 0A 0", "", "", "fail"),
        ("0100007F:1BCD 0100007F:EB5F 01 0", "", "0:1BCD 0", "fail"),  # somebody's connection
        ("0100007F:1BCE 00000000:0000 0A 0", "", "0:1BCD 0", "fail"),
    ],
)
def test_a_port_that_is_open_or_closed(facts: DoctorInput, tcp: str, tcp6: str, udp: str, result: str) -> None:
    """It is read who listens there: who connects without a word is a stranger to an agent (rule J3)."""
    for name, table in (("tcp", tcp), ("tcp6", tcp6), ("udp", udp)):
        put(facts, f"/proc/net/{name}", f"  sl  local_address\n   0: {table}\n")
    with_agent(facts).info["listen"] = "127.0.0.1:7117"
    assert cluster.port(facts).result == result


def test_two_that_cannot_dial_each_other(facts: DoctorInput) -> None:
    def ways(*peers: dict[str, Any]) -> Finding:
        return cluster.ways(with_agent(facts, peers=list(peers)))

    def one(way: str, node: str = "p") -> dict[str, Any]:
        return peer(node=node, way=way, way_why="10.0.0.2:7117 does not answer")

    assert (ways(one("both")).result, ways(one("both")).fix) == ("ok", "")
    assert ways(one("ours")).result == "ok"
    assert ways(one("theirs")).result == "ok"
    found = ways(one("both"), one("none", "far"))
    assert found.result == "warn"
    assert all(fact in found.says for fact in ("ws1", "far", "10.0.0.2:7117"))
    assert "--advertise" in found.fix


def test_datagrams_that_do_not_come(facts: DoctorInput) -> None:
    assert cluster.datagrams(with_agent(facts, peers=[peer()])).result == "ok"
    assert cluster.datagrams(with_agent(facts, peers=[peer(met_s=2.0, datagram_age_s=None)])).result == "skip"
    found = cluster.datagrams(with_agent(facts, peers=[peer(datagram_age_s=None)]))
    assert (found.result, "UDP" in found.says) == ("fail", True)
    found = cluster.datagrams(with_agent(facts, peers=[peer(), peer(node="deaf", datagram_age_s=None)]))
    assert (found.result, "deaf" in found.says) == ("warn", True)
    found = cluster.datagrams(with_agent(facts, peers=[peer(), peer(node="mute", datagram_age_s=7200.0)]))
    assert (found.result, "mute" in found.says) == ("warn", True)


@each(("ahead_s", "result"), [(1.0, "ok"), (-30.0, "warn"), (3600.0, "fail"), (None, "skip")])
def test_clocks_of_peers(facts: DoctorInput, ahead_s: float | None, result: str) -> None:
    found = cluster.clocks(with_agent(facts, peers=[peer(clock_ahead_s=ahead_s)]))
    assert found.result == result
    assert (facts.restarts in found.fix) is (
        result in {"warn", "fail"}
    )  # its clock may have been set since: links last


def test_members_of_earlier_starts(facts: DoctorInput) -> None:
    with_agent(facts).info["remembered"] = 1
    facts.unmet = ["gone"]
    found = cluster.peers(facts)
    assert (found.result, "peerload forget gone" in found.fix) == ("warn", True)


def test_a_name_that_a_peer_refuses(facts: DoctorInput) -> None:
    with_agent(facts).info["sought"] = {"h:1": "another agent is called ws1"}
    assert cluster.names(facts).result == "fail"


@each(("changed", "result"), [({"slots": 0}, "warn"), ({"trouble": "disk full"}, "fail")])
def test_a_node_that_takes_nothing(facts: DoctorInput, changed: dict[str, Any], result: str) -> None:
    with_agent(facts).nodes[0].update(changed)
    assert cluster.drained(facts).result == result


def test_clocks_that_cannot_be_right(facts: DoctorInput, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "clock_state", lambda: machine.CLOCK_ERROR)
    assert machine.clock(facts).result == "warn"
    monkeypatch.setattr(machine, "clock_state", lambda: 0)
    assert machine.clock(facts).result == "ok"
    facts.now = 0.0
    assert machine.clock(facts).result == "fail"


def test_gpus_that_cannot_be_used(facts: DoctorInput, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.gpus(facts).result == "skip"
    put(facts, "/proc/driver/nvidia/version", "NVRM version: 550\n")
    assert machine.gpus(facts).result == "fail"
    with_agent(facts).info["no_gpus_because"] = "the driver does not work: Driver/library version mismatch"
    assert "mismatch" in machine.gpus(facts).says
    facts.nodes[0]["gpus"] = [{"index": 1, "health": "sick", "why": "Xid 79"}]
    assert (machine.gpus(facts).result, "Xid 79" in machine.gpus(facts).says) == ("fail", True)
    facts.nodes[0]["gpus"] = [{"index": 0, "health": "ok"}]
    monkeypatch.setattr(machine, "_without_persistence", lambda: 1)
    assert machine.gpus(facts).result == "warn"


def test_persistence_is_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPersistenceMode", lambda handle: int(handle == 0))
    assert machine._without_persistence() == 1


def test_persistence_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert machine._without_persistence() == 0


def test_energy_counters_that_only_root_may_read_have_a_rule_that_changes_that(
    facts: DoctorInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.power(facts).result == "skip"
    put(facts, "/sys/class/powercap/intel-rapl:0/energy_uj", "5\n")
    assert machine.power(facts).result == "ok"
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = machine.power(facts)
    assert (found.result, "CVE-2020-8694" in found.says) == ("warn", True)
    assert machine.UDEV_FILE in found.fix
    assert f'SUBSYSTEM=="powercap", ACTION=="add", RUN+="/bin/chgrp {os.getgid()} /sys%p/energy_uj"' in found.fix
    with_agent(facts).nodes[0] |= {"watts": 80.0, "watts_quality": "measured"}
    assert machine.power(facts).result == "ok"


def test_a_daemon_of_mps_that_somebody_else_has_started(facts: DoctorInput) -> None:
    assert machine.mps(facts).result == "skip"
    put(facts, "/proc/70/cmdline", "/usr/bin/nvidia-cuda-mps-control\0-d\0")
    put(facts, "/proc/70/environ", "PEERLOAD_UNIT=/run/peerload-mps0x12345678-0\0")
    put(facts, "/proc/71/cmdline", "nvidia-cuda-mps-control\0-d\0")
    put(facts, "/proc/71/cgroup", "0::/system.slice/peerload.service/peerload.1/mps0x12345678-0\n")
    put(facts, "/proc/72/cmdline", "vi\0nvidia-cuda-mps-control\0")
    with_agent(facts).nodes[0]["gpus"] = [{"index": 0, "health": "ok"}]
    assert machine.mps(facts).result == "ok"  # its own, and a program of another name
    put(facts, "/proc/73/cmdline", "nvidia-cuda-mps-control\0-d\0")
    put(facts, "/proc/73/environ", "HOME=/\0CUDA_MPS_PIPE_DIRECTORY=/tmp/its own\0")
    found = machine.mps(facts)
    assert (found.result, "pid 73" in found.says) == ("warn", True)
    assert "echo quit | " in found.fix
    assert "CUDA_MPS_PIPE_DIRECTORY='/tmp/its own' nvidia-cuda-mps-control" in found.fix


def test_no_inotify_to_be_had() -> None:
    """All descriptors are taken, which is the same error."""
    look = (
        "import os, resource\n"
        "from pathlib import Path\n"
        "from peerload.cli.doctor import machine as doctor_machine\n"
        "class F: text = staticmethod(lambda path: '128')\n"
        "import errno, ctypes\n"
        "taken = os.open('/', os.O_PATH)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, taken + 1))\n"
        "print(*doctor_machine.inotify(F))\n"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("fail ")
    assert resource.RLIMIT_NOFILE


def test_few_processes_left(facts: DoctorInput) -> None:
    put(facts, "/proc/self/limits", "Max processes             10       10      processes\n")
    facts.user_id = 12345
    put(facts, "/proc/7/task/7/stat", "")
    assert machine.processes(facts).result == "warn"
    put(facts, "/proc/self/limits", "Max processes             unlimited       10      processes\n")
    assert machine.processes(facts).result == "ok"
    put(facts, "/proc/self/cgroup", "0::/user.slice/me\n")
    put(facts, "/sys/fs/cgroup/user.slice/pids.max", "100\n")
    put(facts, "/sys/fs/cgroup/user.slice/pids.current", "100\n")
    assert machine.processes(facts).result == "fail"


def test_a_machine_that_lives_on_its_swap(facts: DoctorInput) -> None:
    put(facts, "/proc/meminfo", "SwapTotal:  1000000 kB\nSwapFree:   100000 kB\n")
    assert machine.swap(facts).result == "warn"
    put(facts, "/proc/meminfo", "SwapTotal:  1000000 kB\nSwapFree:   900000 kB\n")
    assert machine.swap(facts).result == "ok"


def test_an_agent_that_a_logout_ends(facts: DoctorInput) -> None:
    facts.user_id = 65534
    assert machine.lingering(facts).result == "skip"
    put(facts, "/run/systemd/system/x", "")
    found = machine.lingering(facts)
    assert (found.result, found.fix) == ("warn", "loginctl enable-linger")
    put(facts, "/var/lib/systemd/linger/nobody", "")
    assert machine.lingering(facts).result == "ok"


def test_a_check_that_breaks_does_not_end_the_others(facts: DoctorInput) -> None:
    def broken(_facts: DoctorInput) -> Finding:
        raise ZeroDivisionError("by itself")

    assert doctor.run_check(Check("broken", broken), facts).result == "warn"


def test_a_check_that_hangs_does_not_hang_the_others(facts: DoctorInput, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    def hangs(_facts: DoctorInput) -> Finding:
        never.wait()
        return Finding("ok", "")

    monkeypatch.setattr(doctor, "LOOK_S_MAX", 0.05)
    found = doctor.run_check(Check("hangs", hangs), facts)
    never.set()
    assert (found.result, "df" in found.fix) == ("fail", True)


def test_what_was_lost_and_what_was_removed_early(facts: DoctorInput) -> None:
    assert machine.damaged(with_agent(facts)).result == "ok"
    assert machine.damaged(with_agent(facts, lost="ws1/3 is missing")).result == "fail"
    assert machine.kept(with_agent(facts, removed_early=None)).result == "ok"
    early = {"tasks": 18, "at": 5.0, "why": "more than 30 ended tasks were kept"}
    assert machine.kept(with_agent(facts, removed_early=early)).result == "warn"


def test_a_user_of_the_service_is_not_told_to_repair_it(facts: DoctorInput, tmp_path: Path) -> None:
    """Its state and its settings are closed to users, and an agent of their own would be no repair."""
    with_agent(facts).info["mode"] = "system"
    facts.socket = str(tmp_path)
    facts.user_id = tmp_path.stat().st_uid + 1
    facts.config_error = facts.config = None
    assert facts.is_foreign
    for look in (machine.settings, machine.restart, machine.state):
        assert look(facts).result == "skip"
    facts.user_id = 0
    assert not facts.is_foreign
    assert facts.restarts == "sudo systemctl restart peerload"
    facts.info["mode"] = "user"
    assert facts.restarts == "peerload down && peerload up"


def test_doctor_makes_no_cluster_where_the_service_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    monkeypatch.setattr(cluster_dir, "SYSTEM_DIRECTORY", theirs)
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    home = tmp_path / "home"
    home.mkdir()
    facts = DoctorInput(str(tmp_path / "none"), environment={"HOME": str(home)})
    assert facts.cluster is None
    assert list(home.iterdir()) == []


def test_hooks_need_a_secret_of_their_own_and_a_program_for_mail(facts: DoctorInput, tmp_path: Path) -> None:
    def found(**settings: Any) -> Finding:
        hooks = HooksSettings(**settings)
        facts.config = AgentConfig(node="n", state="s", socket="s", hooks=hooks)
        return machine.hooks(facts)

    assert found().result == "skip"
    secret = tmp_path / "secret"
    assert found(on_end=("true",), secret_file=str(secret)).result == "fail"
    secret.touch(0o644)
    assert found(on_end=("true",), secret_file=str(secret)).result == "warn"
    secret.chmod(0o600)
    assert found(on_end=("https://host/TOKEN",), secret_file=str(secret)).result == "ok"
    lost = found(on_fail=("mail:a@b",), sendmail="/nowhere/sendmail")
    assert (lost.result, "/nowhere/sendmail" in lost.says) == ("fail", True)
