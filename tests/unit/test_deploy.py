"""What lies in deploy/: units that systemd takes, as closed as they say, accounts, pins, and scripts that refuse in one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from peerload.agent.sensors.gpus import PLACES
from peerload.cli.common.agent_process import agent_options
from tests.conftest import require_program
from tests.deploy import told
from tests.each import each

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SYSTEM_UNITS = ("peerload.service", "peerload.socket", "peerload-launcher.service")
SCRIPTS = ("install", "upgrade", "uninstall")
EXPOSURE_MAX = 4.0

needs_systemd = pytest.mark.usefixtures("systemd")


@pytest.fixture(scope="module")
def systemd() -> None:
    """Its programs; nothing of it has to run."""
    for program in ("systemd-analyze", "systemd-sysusers"):
        require_program(program, "systemd")


@pytest.fixture(scope="module")
def shellcheck() -> Path:
    """What reads shell scripts with care."""
    return require_program("shellcheck", "shellcheck")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root file system with the units, and what they start, in their places."""
    units = tmp_path / "usr/local/lib/systemd/system"
    units.mkdir(parents=True)
    for name in SYSTEM_UNITS:
        shutil.copy(DEPLOY / name, units)
    for command in ("usr/local/bin/peerload", "bin/kill", "bin/sh"):
        (tmp_path / command).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / command).write_text("#!/bin/sh\n")
        (tmp_path / command).chmod(0o755)
    known = tmp_path / "usr/lib/systemd/system"
    known.mkdir(parents=True)
    for target in ("basic", "sysinit", "shutdown", "sockets", "multi-user", "network-online"):
        (known / f"{target}.target").write_text("[Unit]\nDescription=there\n")
    return tmp_path


@needs_systemd
def test_systemd_takes_the_units(root: Path) -> None:
    """Not a word about them: nothing in them is unknown to the systemd of Debian 12."""
    done = subprocess.run(
        ["systemd-analyze", "verify", f"--root={root}", "--man=no", *SYSTEM_UNITS],
        capture_output=True,
        text=True,
        check=False,
    )
    about_ours = [line for line in done.stderr.splitlines() if "peerload" in line]
    assert not about_ours
    assert done.returncode == 0, done.stderr


@needs_systemd
@pytest.mark.rule("X3")
def test_the_agent_is_not_exposed() -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(DEPLOY / "peerload.service")],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"exposure level for peerload\.service: ([0-9.]+)", done.stdout)
    assert found is not None
    assert float(found[1]) <= EXPOSURE_MAX


def test_restarting_the_agent_touches_no_task() -> None:
    """Neither its stop nor its failure reaches the launcher, whose unit holds the tasks."""
    agent, launcher = ((DEPLOY / name).read_text() for name in ("peerload.service", "peerload-launcher.service"))
    for word in ("Requires", "BindsTo", "PartOf", "Conflicts"):
        assert not re.search(rf"^{word}=.*peerload-launcher", agent, re.MULTILINE)
        assert not re.search(rf"^{word}=.*peerload\.service", launcher, re.MULTILINE)
    assert "KillMode=process\n" in agent
    assert "User=peerload\n" in agent
    assert "User=" not in launcher


@needs_systemd
def test_the_accounts_are_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "usr/lib/sysusers.d").mkdir(parents=True)
    shutil.copy(DEPLOY / "sysusers.d/peerload.conf", tmp_path / "usr/lib/sysusers.d")
    subprocess.run(["systemd-sysusers", f"--root={tmp_path}"], check=True, capture_output=True)
    user = (tmp_path / "etc/passwd").read_text().split(":")
    assert (user[0], user[5], user[6].strip()) == ("peerload", "/var/lib/peerload", "/usr/sbin/nologin")
    assert 0 < int(user[2]) < 1000
    assert {line.split(":")[0] for line in (tmp_path / "etc/group").read_text().splitlines()} == {
        "peerload",
        "peerload-admin",
    }


@each("unit", ["peerload.service", "peerload-user.service"])
def test_an_agent_that_cannot_start_yet_is_started_again_without_a_bound(unit: str) -> None:
    """Such as before the network is there, or the right time."""
    lines = (DEPLOY / unit).read_text().splitlines()
    assert "Restart=on-failure" in lines
    assert "StartLimitIntervalSec=0" in lines


@each("state", ["active", "inactive"])
def test_an_agent_that_was_stopped_before_the_machine_sleeps_stays_so(state: str, tmp_path: Path) -> None:
    """The commands of the unit, in the order of systemd, with a `systemctl` that notes what it is asked for."""
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\ncase "$*" in *is-active*) [ {state} = active ] ;; esac\n'
    )
    systemctl.chmod(0o755)
    lines = (DEPLOY / "peerload-sleep@.service").read_text().splitlines()
    for step in ("ExecCondition", "ExecStart", "ExecStop"):
        commands = [line.partition("=")[2] for line in lines if line.startswith(f"{step}=")]
        if any(
            subprocess.run(["sh", "-c", command], check=False, env={"PATH": f"{tmp_path}:/bin"}).returncode
            for command in commands
        ):
            break
    asked = [line.split()[-2:] for line in (tmp_path / "asked").read_text().splitlines() if "is-active" not in line]
    assert asked == (
        [["stop", "peerload-user.service"], ["start", "peerload-user.service"]] if state == "active" else []
    )


def test_users_claim_gpus_in_one_place_where_run_lock_is_roots() -> None:
    made = [line.split() for line in (DEPLOY / "tmpfiles.d/peerload.conf").read_text().splitlines()]
    assert ["d", "/run/lock/peerload", "1777"] in [line[:3] for line in made]
    assert Path("/run/lock/peerload") in PLACES


@pytest.mark.rule("C1")
def test_what_is_installed_is_pinned_by_its_hash_and_from_nowhere() -> None:
    pins = (DEPLOY / "requirements.txt").read_text()
    ours = (ROOT / ".ci/requirements.txt").read_text()
    assert "://" not in pins
    assert "--index" not in pins
    packages = re.findall(r"^([a-z][\w.-]*==[\w.+]+)", pins, re.MULTILINE)
    assert packages
    assert all(f"{package} " in ours for package in packages), "another version than what is tested"
    for block in re.split(r"^(?=[a-z])", pins, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in block
    project = (ROOT / "pyproject.toml").read_text()
    (runtime,) = re.findall(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    for name in re.findall(r'"([\w-]+)', runtime):
        assert any(package.startswith(f"{name}==") for package in packages), name


@each("script", SCRIPTS)
def test_scripts_are_in_order(script: str, shellcheck: Path) -> None:
    subprocess.run(["sh", "-n", str(DEPLOY / script)], check=True)
    subprocess.run([str(shellcheck), str(DEPLOY / script)], check=True)


@each(
    ("words", "says"),
    [
        (["install", "--frm", "x"], "peerload: unknown flag: --frm\n  deploy/install --help\n"),
        (["install", "--root"], "peerload: --root needs a value\n  deploy/install --help\n"),
        (["install", "--prefix", "opt"], "peerload: --prefix opt is not an absolute path\n"),
        (["install", "--root", "/nonexistent"], "peerload: /nonexistent is not a root file system: it has no etc/\n"),
        (
            ["install", "--wheels", "/boot"],
            "peerload: /boot has no packages (*.whl)\n  pip download --require-hashes -r deploy/requirements.txt -d /boot\n",
        ),
        (
            ["upgrade", "--prefix", "/nonexistent/x"],
            "peerload: nothing to upgrade: peerload is not installed in /nonexistent/x\n",
        ),
        (["install", "--from", "0.1.0"], "peerload: 0.1.0 does not exist\n  name a wheel or a source tree\n"),
        (["uninstall", "--prefix", "/"], "peerload: --prefix / is not an absolute path\n"),
        (
            ["uninstall", "--prefix", "/usr"],
            "peerload: /usr was not made by deploy/install: it has no .peerload-install\n",
        ),
    ],
)
def test_scripts_refuse_in_words(words: list[str], says: str) -> None:
    """Nothing was touched by then."""
    if subprocess.run(["id", "-u"], capture_output=True, text=True, check=True).stdout.strip() != "0":
        says = says if "unknown flag" in says or "needs a value" in says else "peerload: only root can"
    done = subprocess.run([DEPLOY / words[0], *words[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(says)
    assert not done.stdout


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can install it for everyone")
def test_an_install_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """The packages that it needs are not there; it ends with 1, one line and a hint, and what it had begun is gone."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "other-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("other-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: other\nVersion: 1\n")
        wheel.writestr("other-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("other-1.dist-info/RECORD", "")
    prefix = tmp_path / "opt/peerload"
    deploy = Path(shutil.copytree(DEPLOY, tmp_path / "deploy"))
    words = [
        str(deploy / "install"),
        "--no-start",
        "--prefix",
        str(prefix),
        "--from",
        str(wheels / "other-1-py3-none-any.whl"),
        "--wheels",
        str(wheels),
    ]
    told = tmp_path / "told"
    (tmp_path / "bin").mkdir()
    mktemp = tmp_path / "bin/mktemp"
    mktemp.write_text(f'#!/bin/sh\n{shutil.which("mktemp")} "$@" | tee -a {told}\n', encoding="utf-8")
    mktemp.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull
    script = (deploy / "install").read_text(encoding="utf-8")
    assert script.count("\nPATH=/") == 1
    (deploy / "install").write_text(script.replace("\nPATH=/", f"\nPATH={mktemp.parent}:/"), encoding="utf-8")
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "--wheels" in done.stderr
    assert not prefix.exists()
    made = told.read_text(encoding="utf-8").split()
    assert made
    assert not any(Path(path).exists() for path in made)


def test_the_compose_file_has_its_form() -> None:
    yaml = pytest.importorskip("yaml", reason="there is no reader of YAML here")
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert {"node1", "node2", "node3", "broker"} <= services.keys()
    for name, service in services.items():
        mounts = [mount.partition(":")[0] for mount in service.get("volumes", ())]
        for mount in mounts:
            assert (DEPLOY / mount).is_file() if mount.startswith(".") else mount in compose["volumes"], name
        for other in service.get("depends_on", {}):
            assert other in services
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_image_of_the_compose_file_is_built_once_and_its_keys_by_its_user() -> None:
    """Its user is another than root in whose place it runs: with root's HOME it would look where it may not."""
    compose = (DEPLOY / "compose.yaml").read_text()
    image = (DEPLOY / "Containerfile").read_text()
    assert compose.count("build:") == 1
    user = re.findall(r"setpriv --reuid=(\d+) --regid=(\d+)", compose)
    assert user
    assert set(user) == {("1000", "1000")}
    assert "useradd --create-home --uid 1000 peerload" in image
    assert "\n      HOME: /home/peerload\n" in compose
    assert image.index("-r /tmp/pins.txt") < image.index("COPY peerload "), "packages before the source"


def test_the_commands_in_the_compose_file_are_ones_that_there_are(tmp_path: Path) -> None:
    """Those that make the keys do so; the agents' flags are known."""
    compose = (DEPLOY / "compose.yaml").read_text()
    agents = [json.loads(line) for line in re.findall(r"command: (\[\"peerload\".*\])", compose)]
    assert len(agents) == 3
    for _, verb, *words in agents:
        assert agent_options(verb, verb).read(words).cluster == "/keys/cluster"
    makers = re.findall(r"--clear-groups peerload (cluster .*)", compose)
    assert [maker.split()[1] for maker in makers] == ["init", "broker-certificate"]
    environment = {**os.environ, **dict(re.findall(r"(PEERLOAD_\w+): (\S+)", compose))}
    environment = {name: value.replace("/keys", str(tmp_path)) for name, value in environment.items()}
    for maker in makers:
        words = [sys.executable, "-m", "peerload", *maker.replace("/keys", str(tmp_path)).split()]
        subprocess.run(words, check=True, capture_output=True, env=environment)
    made = {path.name for path in (tmp_path / "broker").iterdir()}
    assert {"ca.pem", "broker.pem", "broker.key", "mosquitto.acl"} <= made


def test_what_a_machine_tells_is_heard_whole_or_not_at_all(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.truncate(told.DISK_BYTES)
    assert told.heard(str(disk), 0) is None
    told.tell(str(disk), 0, {"step": "install", "passed": True, "took_s": 1.5})
    told.tell(str(disk), 1, {"step": "units", "passed": False, "journal": "x\n" * told.TEXT_CHARACTERS_MAX})
    assert told.heard(str(disk), 0) == {"step": "install", "passed": True, "took_s": 1.5}
    second = told.heard(str(disk), 1)
    assert second is not None
    assert len(second["journal"]) == told.TEXT_CHARACTERS_MAX
    with disk.open("r+b") as file:
        file.seek(told.SLOT_BYTES + told.HEAD_BYTES + 3)
        file.write(b"?")
    assert told.heard(str(disk), 1) is None
    assert told.heard(str(disk), told.SLOTS_MAX) is None
    with pytest.raises(ValueError, match="no room"):
        told.tell(str(disk), told.SLOTS_MAX, {})
