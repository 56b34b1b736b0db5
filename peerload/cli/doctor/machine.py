"""Checks of `doctor` on the machine: clock, GPUs, limits, memory, and whether an agent outlives a logout."""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path

import peerload
from peerload.cli.doctor.agent import mounted_at
from peerload.cli.doctor.facts import FAIL, OK, SKIP, WARN, DoctorInput, Finding
from peerload.text.format import counted, size_text

FILES_MIN, FILES_GOOD = 256, 1024
PROCESSES_LEFT_MIN = 256
TMP_BYTES_MIN = 256 << 20
SWAPPED_SHARE_MAX = 0.5
CLOCK_ERROR = 5
"""Answer of adjtimex if nothing synchronizes the kernel's clock."""
SMI_S_MAX = 5.0
_TIMEX_BYTES = 512
UDEV_FILE = "/etc/udev/rules.d/70-peerload-power.rules"
UDEV_RULE = 'SUBSYSTEM=="powercap", ACTION=="add", RUN+="/bin/chgrp {} /sys%p/energy_uj", RUN+="/bin/chmod g+r /sys%p/energy_uj"'
"""Lets a group read the energy counters, which tell it much of what others compute."""


def clock(facts: DoctorInput) -> Finding:
    """Check that this machine's clock is plausible and synchronized."""
    installed_at = Path(peerload.__file__).stat().st_mtime
    fix = "sudo timedatectl set-ntp true        now:  date"
    if facts.now < installed_at - 86_400:
        return Finding(FAIL, "the date is before the installation of peerload", fix)
    answer = clock_state()
    if answer == CLOCK_ERROR:
        return Finding(WARN, "not synchronized (no NTP)", fix)
    return Finding(OK, "synchronized" if answer >= 0 else "plausible; unknown whether it is synchronized")


def clock_state() -> int:
    """State of the kernel's clock: 0 to 4 if it is synchronized, CLOCK_ERROR if not, below 0 if it is not known."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))


def gpus(facts: DoctorInput) -> Finding:
    """Check that the GPUs of this machine can be used."""
    driver = facts.text("/proc/driver/nvidia/version").partition("\n")[0]
    found = facts.me.get("gpus") or []
    why = facts.info.get("no_gpus_because") if facts.info else _why_no_driver()
    fix = "nvidia-smi        dmesg | grep -i nvrm"
    sick = [gpu for gpu in found if gpu.get("health") not in ("ok", None)]
    if sick:
        says = "; ".join(f"GPU {gpu['index']} is {gpu['health']}: {gpu.get('why') or 'no reason told'}" for gpu in sick)
        return Finding(FAIL, says, fix)
    if found:
        off = _without_persistence()
        if off:
            says = f"persistence mode is off on {counted(len(off), 'GPU')}: each first use takes seconds"
            return Finding(WARN, says, "sudo nvidia-smi -pm 1")
        return Finding(OK, f"{counted(len(found), 'GPU')} in use")
    if driver and (why or facts.info):
        return Finding(FAIL, f"the driver is installed but cannot be used: {why or 'it lists no GPU'}", fix)
    return Finding(SKIP, "no GPU found")


def _why_no_driver() -> str:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "its library is not installed"
    import pynvml

    try:
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"the driver does not work: {error}"
    return ""


def _without_persistence() -> list[str]:
    """GPUs whose driver is unloaded while it is not used; none if that is not known."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(  # noqa: S603 -- the driver's own program, with our own words
            [program, "--query-gpu=index,persistence_mode", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=SMI_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.split(",")[0] for line in done.stdout.splitlines() if line.rpartition(",")[2].strip() == "Disabled"]


def power(facts: DoctorInput) -> Finding:
    """Check that the power of this machine is measured."""
    if facts.me.get("watts_quality") == "measured":
        return Finding(OK, f"measured: {facts.me['watts']:.0f} W")
    place = facts.config.energy.powercap if facts.config is not None else "/sys/class/powercap"
    counters = sorted((facts.root / place.lstrip("/")).glob("intel-rapl:*/energy_uj"))
    if not counters:
        return Finding(SKIP, "no sensor: watts and joules are estimated from the load (power_cmd: docs/energy.md)")
    if any(os.access(counter, os.R_OK) for counter in counters):
        return Finding(OK, "the energy counters are readable")
    says = "only root may read the energy counters (CVE-2020-8694): watts and joules are estimated from the load"
    rule = UDEV_RULE.format(os.getgid())
    return Finding(WARN, says, f"echo '{rule}' | sudo tee {UDEV_FILE} && sudo udevadm trigger -s powercap -c add")


def open_files(facts: DoctorInput) -> Finding:
    """Check how many files the agent and the launcher may open."""
    told = {name: _limit(facts, pid, "Max open files") for name, pid in _processes(facts).items()}
    least = min(told.values(), default=None)
    if least is None:
        return Finding(SKIP, "cannot be read")
    fix = "LimitNOFILE=65536 in the unit (systemctl --user edit peerload-user), or  ulimit -n 65536; peerload down; peerload up"
    says = ", ".join(f"{name} {limit}" for name, limit in told.items())
    if least < FILES_GOOD:
        return Finding(FAIL if least < FILES_MIN else WARN, f"{says}: each running task needs several", fix)
    return Finding(OK, says)


def _processes(facts: DoctorInput) -> dict[str, str]:
    if facts.info:
        return {"agent": str(facts.info["pid"]), "launcher": str(facts.info["launcher_pid"])}
    return {"this shell": "self"}


def _limit(facts: DoctorInput, pid: str, name: str) -> int:
    found = re.search(rf"^{name} +(\d+|unlimited)", facts.text(f"/proc/{pid}/limits"), re.MULTILINE)
    return (1 << 62 if found[1] == "unlimited" else int(found[1])) if found is not None else 1 << 62


def inotify(facts: DoctorInput) -> Finding:
    """Check that another inotify instance is available: the agent needs one."""
    most = facts.text("/proc/sys/fs/inotify/max_user_instances").strip()
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_CLOEXEC)
    fix = "sudo sysctl fs.inotify.max_user_instances=1024        permanently: a line in /etc/sysctl.d/"
    if descriptor < 0:
        code = ctypes.get_errno()
        says = f"all {most} instances of this user are in use" if code == errno.EMFILE else os.strerror(code)
        return Finding(FAIL, says, fix)
    os.close(descriptor)
    return Finding(OK, f"available (at most {most or 'unknown'})")


def processes(facts: DoctorInput) -> Finding:
    """Check how many more processes this user, or the agent's cgroup, may start."""
    pid = str(facts.info["launcher_pid"]) if facts.info else "self"
    most = _limit(facts, pid, "Max processes")
    left = most - _running_of(facts) if facts.user_id != 0 and most < 1 << 62 else 1 << 62
    for path in _own_cgroups(facts, pid):
        limit = facts.text(f"{path}/pids.max").strip()
        if limit.isdigit():
            left = min(left, int(limit) - int(facts.text(f"{path}/pids.current").strip() or 0))
    if left < PROCESSES_LEFT_MIN:
        fix = "ulimit -u        TasksMax= of the unit:  systemctl --user edit peerload-user"
        return Finding(FAIL if left <= 0 else WARN, f"only {max(left, 0)} more can be started", fix)
    return Finding(OK, "no limit" if left >= 1 << 61 else f"{left} more can be started")


def _running_of(facts: DoctorInput) -> int:
    """Number of threads of this user."""
    count = 0
    for path in (facts.root / "proc").glob("[0-9]*"):
        try:
            if path.stat().st_uid == facts.user_id:
                count += len(list((path / "task").iterdir()))
        except OSError:
            continue  # it has ended meanwhile
    return count


def _own_cgroups(facts: DoctorInput, pid: str) -> list[str]:
    """Cgroup (version 2) of a process and those above it."""
    found = re.search(r"^0::(/.*)$", facts.text(f"/proc/{pid}/cgroup"), re.MULTILINE)
    path = found[1] if found is not None else "/"
    parts = [part for part in path.split("/") if part]
    return ["/sys/fs/cgroup/" + "/".join(parts[:size]) for size in range(len(parts), 0, -1)]


def temporary(facts: DoctorInput) -> Finding:
    """Check that there is room for temporary files."""
    place = Path(facts.environment.get("TMPDIR") or "/tmp")  # noqa: S108 -- only looked at
    fix = f"make room in {place}, or set TMPDIR before the agent is started"
    try:
        status = os.statvfs(place)
    except OSError as error:
        return Finding(FAIL, f"{place}: {error.strerror}", fix)
    free_bytes = status.f_bavail * status.f_frsize
    kind, _ = mounted_at(facts, place)
    says = f"{size_text(free_bytes)} free in {place}" + (" (in memory)" if kind in ("tmpfs", "ramfs") else "")
    return Finding(WARN, says, fix) if free_bytes < TMP_BYTES_MIN else Finding(OK, says)


def swap(facts: DoctorInput) -> Finding:
    """Check that the machine does not depend on its swap."""
    told = {
        name: int(amount) << 10
        for name, amount in re.findall(r"^(SwapTotal|SwapFree): +(\d+) kB", facts.text("/proc/meminfo"), re.MULTILINE)
    }
    total = told.get("SwapTotal", 0)
    used = total - told.get("SwapFree", 0)
    if total and used > total * SWAPPED_SHARE_MAX:
        fix = "state the memory of tasks (--mem), or run fewer at a time (peerload up --slots N)"
        return Finding(
            WARN, f"{size_text(used)} of {size_text(total)} are in use: tasks push each other out of memory", fix
        )
    return Finding(OK, f"{size_text(used)} of {size_text(total)} in use" if total else "none")


def lingering(facts: DoctorInput) -> Finding:
    """Check that a user's own agent outlives the user's session."""
    if facts.user_id == 0 or not facts.has("/run/systemd/system"):
        return Finding(SKIP, "not needed for root" if facts.user_id == 0 else "this machine has no systemd")
    try:
        name = pwd.getpwuid(facts.user_id).pw_name
    except KeyError:
        return Finding(SKIP, f"uid {facts.user_id} has no name")
    if not facts.has(f"/var/lib/systemd/linger/{name}"):
        return Finding(WARN, "your agent stops when you log out", "loginctl enable-linger")
    return Finding(OK, "your agent keeps running when you log out")
