"""What is tried of the services: installed, used, restarted, reloaded, hung, asked, upgraded, killed, removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.deploy.trial_tools import (
    CONFIG,
    DROP_IN,
    HERE,
    a_task,
    cgroup,
    is_up,
    main_pid,
    no_more,
    of,
    sh,
    systemd_version,
    task_pid,
    until,
    value,
    wheel,
)

TYPES_OF_RELOAD = 253
"""The first systemd that knows Type=notify-reload."""


def install() -> str:
    """A clean machine gets it with one command, and runs the first task with the second."""
    sh("useradd", "--create-home", "--shell", "/bin/bash", "alice")
    sh("useradd", "--create-home", "--shell", "/bin/bash", "bob")
    first = wheel("first")
    began_s = time.monotonic()
    sh(f"{HERE}/install", "--from", first, "--wheels", "/trial/wheels")
    installed_s = time.monotonic() - began_s
    assert is_up()
    sh("usermod", "-aG", "peerload", "alice")
    began_s = time.monotonic()
    assert sh("peerload", "run", "id", "-un", user="alice") == "alice\n"
    return f"installed in {installed_s:.1f} s, the first task took {time.monotonic() - began_s:.1f} s"


def units() -> str:
    """Verified by the systemd that runs them, and how exposed they are."""
    places = [
        f"/usr/local/lib/systemd/system/{name}"
        for name in ("peerload.service", "peerload.socket", "peerload-launcher.service")
    ]
    said = subprocess.run(["systemd-analyze", "verify", *places], capture_output=True, text=True, check=False)
    about_ours = [line for line in said.stderr.splitlines() if "peerload" in line]
    assert not about_ours, said.stderr
    assert said.returncode == 0, said.stderr
    assert of("peerload.service", "Type") == ("notify-reload" if reload_waits() else "notify")
    exposure = sh("systemd-analyze", "security", "peerload.service").strip().splitlines()[-1]
    return f"{sh('systemctl', '--version').splitlines()[0]}; {exposure.strip()}"


def reload_waits() -> bool:
    """Whether `systemctl reload` returns when the settings are in force."""
    return systemd_version() >= TYPES_OF_RELOAD


def status() -> str:
    """It says how it goes; who runs what is as it should be."""
    assert of("peerload.service", "User") == "peerload"
    owner = Path(f"/proc/{main_pid()}/status").read_text()
    assert "\nCapEff:\t0000000000000000" in owner
    assert Path(f"/proc/{main_pid('peerload-launcher.service')}").stat().st_uid == 0
    return of("peerload.service", "StatusText")


def who_is_not_in_the_group() -> str:
    """It cannot even connect."""
    said = sh("peerload", "ls", user="bob", fails=True)
    assert Path("/run/peerload/agent.sock").stat().st_mode & 0o777 == 0o660
    return said.splitlines()[0]


def doctor() -> str:
    """What it says about how tasks are held here."""
    return sh(
        "sh", "-c", "peerload doctor 2>&1 | grep -iE 'cgroup|memory|launcher|user' | head -n 6 || true", user="alice"
    )


def shown_running() -> None:
    """Alice is told that her task runs."""
    until(lambda: "running" in sh("peerload", "ls", user="alice"), "it to be shown as running")


def restart() -> str:
    """The agent stops and starts; a task does not notice."""
    task, before = a_task("3001"), main_pid()
    sh("systemctl", "restart", "peerload.service")
    assert is_up()
    assert main_pid() != before
    assert task_pid("3001") == task
    shown_running()
    return f"task {task} runs on under agent {main_pid()}"


def crash() -> str:
    """Killed, it is back at once; the task runs on."""
    task, before = task_pid("3001"), main_pid()
    os.kill(before, 9)
    until(lambda: is_up() and main_pid() != before, "the agent to be back")
    assert task_pid("3001") == task
    return f"{of('peerload.service', 'NRestarts')} restarts"


def reload_settings() -> str:
    """What may change does; a file with a mistake changes nothing."""
    was = CONFIG.read_text()
    agent = main_pid()
    CONFIG.write_text(was + "clients_max = 77\n")
    sh("systemctl", "reload", "peerload.service")
    if reload_waits():
        assert "clients_max" in of("peerload.service", "StatusText"), "the reload has ended too early"
    until(lambda: "clients_max" in of("peerload.service", "StatusText"), "the settings to be in force")
    CONFIG.write_text(was + "clients_max = 'many'\n")
    sh("systemctl", "reload", "peerload.service")
    until(lambda: "not reloaded" in of("peerload.service", "StatusText"), "the mistake to be told")
    said = of("peerload.service", "StatusText")
    assert "clients_max" in sh("peerload", "config", "check", str(CONFIG), fails=True)
    CONFIG.write_text(was)
    sh("systemctl", "reload", "peerload.service")
    until(lambda: "not reloaded" not in of("peerload.service", "StatusText"), "the settings to be as they were")
    assert main_pid() == agent
    return f"{'waits; ' if reload_waits() else ''}{said}"


def watchdog() -> str:
    """One that hangs is ended and started anew."""
    DROP_IN.parent.mkdir(exist_ok=True)
    DROP_IN.write_text("[Service]\nWatchdogSec=10\n")
    sh("systemctl", "daemon-reload")
    sh("systemctl", "restart", "peerload.service")
    task, before = task_pid("3001"), main_pid()
    os.kill(before, 19)
    began_s = time.monotonic()
    until(lambda: is_up() and main_pid() not in (0, before), "the watchdog to have it started anew")
    took_s = time.monotonic() - began_s
    assert task_pid("3001") == task
    assert "watchdog" in sh("journalctl", "--unit", "peerload.service", "--no-pager").lower()
    DROP_IN.unlink()
    sh("systemctl", "daemon-reload")
    sh("systemctl", "restart", "peerload.service")
    return f"back after {took_s:.1f} s; the task runs on"


def activation() -> str:
    """Stopped, it is started by whoever asks for it."""
    task = task_pid("3001")
    subprocess.run(["systemctl", "stop", "peerload.service"], check=True, capture_output=True)
    assert of("peerload.service", "ActiveState") == "inactive"
    assert of("peerload.socket", "ActiveState") == "active"
    sh("peerload", "ls", user="alice")  # the one question that has it started
    shown_running()
    assert is_up()
    assert task_pid("3001") == task
    return "the socket has started it"


def upgrade() -> str:
    """Another version takes its place while a task runs."""
    task, launcher, before = task_pid("3001"), main_pid("peerload-launcher.service"), main_pid()
    sh(f"{HERE}/upgrade", "--from", wheel("second"), "--wheels", "/trial/wheels")
    assert is_up()
    assert main_pid() != before
    assert main_pid("peerload-launcher.service") == launcher
    assert task_pid("3001") == task
    assert sh("peerload", "--version") == "peerload 0.1.1\n"
    return f"task {task} runs on under 0.1.1"


def upgrade_that_fails() -> str:
    """One whose agent does not come up: the version before is back."""
    task = task_pid("3001")
    DROP_IN.write_text("[Unit]\nStartLimitBurst=2\nStartLimitIntervalSec=600\n[Service]\nTimeoutStartSec=60\n")
    sh("systemctl", "daemon-reload")
    said = sh(f"{HERE}/upgrade", "--from", wheel("broken"), "--wheels", "/trial/wheels", fails=True)
    assert "is in use again" in said, said
    DROP_IN.unlink()
    sh("systemctl", "daemon-reload")
    until(is_up, "the version before to be up")
    assert sh("peerload", "--version") == "peerload 0.1.1\n"
    assert task_pid("3001") == task
    shown_running()
    return said.strip().splitlines()[-2]


def launcher_killed() -> str:
    """Its tasks end with it; it is back, and the task is run again."""
    before, task = main_pid("peerload-launcher.service"), task_pid("3001")
    os.kill(before, 9)
    until(lambda: main_pid("peerload-launcher.service") not in (0, before), "the launcher to be back")
    until(lambda: task_pid("3001") not in (0, task), "the task to run again")
    no_more("3001")
    limited = a_task("3002", "--mem", "64M")
    assert value(limited, "memory.max") == str(64 << 20)
    where = cgroup(limited)
    no_more("3002")
    return f"the task was started anew; the next one's limits are held by {where.parent.name}"


def uninstall() -> str:
    """Nothing of it is left, of its accounts neither."""
    shutil.rmtree(DROP_IN.parent, ignore_errors=True)  # it is this trial's
    sh(f"{HERE}/uninstall")
    assert Path("/var/lib/peerload").is_dir()
    assert not Path("/usr/local/bin/peerload").exists()
    sh(f"{HERE}/uninstall", "--purge")
    left = sh("find", "/etc", "/usr", "/var/lib", "/opt", "/run", "-xdev", "-name", "*peerload*").split()
    left = [path for path in left if "/var/lib/systemd/" not in path and not path.startswith("/run/systemd/")]
    assert not left, left
    assert not sh("sh", "-c", "getent passwd peerload; getent group peerload peerload-admin; true")
    return "nothing is left"
