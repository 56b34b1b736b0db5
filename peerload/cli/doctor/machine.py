"""The facts for `peerload doctor`, gathered once, and the checks of this machine and its agent, which only evaluate them."""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import re
import shlex
import shutil
import stat
import sys
import time
from pathlib import Path
from typing import NamedTuple

import peerload
from peerload import __version__, notification
from peerload.client.connection import START_HINT, AgentConnection, default_socket_path, user_socket_path
from peerload.distribution import deployed
from peerload.model.errors import AgentSilent, AgentUnavailable, BadRequest, ConfigError, PeerloadError
from peerload.text.format import counted, size_text

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from peerload.model.config import AgentConfig
    from peerload.security.cluster_dir import ClusterDirectory


AGENT_S_MAX = 5.0
OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"
AS_SERVICE = (
    f"sudo peerload service install        or one of your own, with Delegate=yes:  {deployed('peerload-user.service')}"
)
"""Fix for an agent without cgroups for its tasks."""


class Finding(NamedTuple):
    """Result of one check. result: OK, WARN (works, but may not for long or not as it should), FAIL, or SKIP (does
    not apply here); fix: the command, or what else to do."""

    result: str
    says: str
    fix: str = ""


class Check(NamedTuple):
    """Check: its name, and its function."""

    name: str
    look: Callable[[DoctorInput], Finding]


class DoctorInput:
    """Input of the checks. root: parent of /proc, /etc and the like; socket: of the agent, None: the clients' default."""

    def __init__(
        self, socket: str | None = None, *, root: Path = Path("/"), environment: Mapping[str, str] | None = None
    ) -> None:
        self.environment = dict(os.environ if environment is None else environment)
        self.root = root
        self.now = time.time()
        self.user_id = os.getuid()
        self.config: AgentConfig | None = None
        self.config_error: PeerloadError | None = None
        self.cluster: ClusterDirectory | None = None
        self.cluster_error: PeerloadError | None = None
        self.agent_error: PeerloadError | None = None
        self.info: dict[str, Any] = {}
        self.nodes: list[dict[str, Any]] = []
        self.unmet: list[str] = []
        self.checkup: dict[str, Any] = {}
        self.settings: list[dict[str, Any]] = []
        self.answered_s = 0.0
        self._configure()
        self.socket = socket or self._default_socket()
        self._ask()

    @property
    def state(self) -> Path | None:
        """State directory of the running agent, or of one that would be started."""
        named = self.info.get("state") or (self.config.state if self.config is not None else "")
        return Path(str(named)) if named else None

    @property
    def is_service(self) -> bool:
        """True if the agent serves all users of this machine."""
        return self.info.get("mode") == "system"

    @property
    def is_foreign(self) -> bool:
        """True if the agent is a service, and this user is neither root nor its user."""
        if not self.is_service or self.user_id == 0:
            return False
        try:
            return os.stat(self.socket).st_uid != self.user_id  # noqa: PTH116 -- costs no import
        except OSError:
            return True

    @property
    def restarts(self) -> str:
        """The command that restarts the agent."""
        return "sudo systemctl restart peerload" if self.is_service else "peerload down && peerload up"

    @property
    def security(self) -> dict[str, Any]:
        """Security facts reported by the agent; empty without an agent, or if it reports none."""
        return dict(self.checkup.get("security") or {})

    @property
    def me(self) -> dict[str, Any]:
        """This node's own entry in its node list; empty without an agent."""
        return next((node for node in self.nodes if node.get("self")), {})

    def peers(self, *states: str) -> list[dict[str, Any]]:
        return [peer for peer in self.checkup.get("peers") or [] if peer["state"] in states]

    def text(self, path: str) -> str:
        """Content of a small file below the root; "" if it does not exist or cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def settings_files(self, named: str | None) -> list[Path]:
        """Configuration files of an agent of this user; named: the value of its `--config`. Raises ConfigError."""
        from peerload.config import loader

        return loader.files(named, self.environment)

    def has(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()

    def _default_socket(self) -> str:
        try:
            configured = self.config.socket if self.config is not None else ""
            found = default_socket_path()
        except PeerloadError as error:
            self.agent_error = error
            return ""
        is_named = configured and configured != user_socket_path()
        return configured if is_named and "PEERLOAD_SOCKET" not in self.environment else found

    def _configure(self, flags: dict[str, Any] | None = None) -> None:
        """Load the settings of an agent that is started with these flags, and its cluster directory."""
        from peerload.cli.common.agent_process import default_places
        from peerload.config import loader
        from peerload.security import cluster_dir as cluster

        given = flags or {}
        try:
            self.config = loader.load(given, default_places(given), {} if self.is_service else self.environment)
        except PeerloadError as error:
            self.config_error = error
        if self.is_service:  # the cluster of this user's own agents takes no part in it
            self.cluster = self.cluster_error = None
            return
        try:
            self.cluster = _existing(self.config.cluster if self.config is not None else "", self.environment, cluster)
        except ConfigError as error:
            self.cluster_error = error

    def _ask(self) -> None:
        if not self.socket:
            return
        began_s = time.monotonic()
        try:
            with AgentConnection(self.socket, timeout_s=AGENT_S_MAX, awaits_start=False) as client:
                self.info = client.call("info")
                self.answered_s = time.monotonic() - began_s
                reply = client.call("nodes")
                self.nodes, self.unmet = reply["nodes"], reply.get("unmet", [])
                self.checkup = client.call("checkup")
                self.settings = client.call("settings")["settings"]
        except (AgentUnavailable, BadRequest) as error:
            self.agent_error = error
        if self.is_foreign:
            self.config = self.config_error = self.cluster = self.cluster_error = None
            return
        given = self._given()
        if given or self.is_service:
            self.config = self.config_error = None
            self._configure(given)

    def _given(self) -> dict[str, Any]:
        """Flags that make an agent read the files of the running one: `join` writes settings into its state directory."""
        from peerload.cli.common.agent_process import given_to

        state = self.info.get("state")
        if self.is_service:
            return {"mode": "system", "state": state}
        return given_to(self.settings, self.config.state, self.environment) if self.config is not None and state else {}


def _existing(named: str, environment: dict[str, str], cluster: Any) -> ClusterDirectory | None:  # noqa: ANN401 -- a module
    """The cluster of an agent started here; None if it would create a cluster of this user. Raises ConfigError."""
    home = Path(environment.get("HOME", "/"))
    base = Path(environment.get("XDG_STATE_HOME") or home / ".local" / "state") / "peerload" / "local-cluster"
    own = Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "peerload" / "cluster"
    is_there = cluster.is_ours(cluster.SYSTEM_DIRECTORY) or any(os.path.lexists(place) for place in (own, base))
    if not is_there and not named:
        return None
    found: ClusterDirectory = cluster.find(named, environment)
    return found


def needs_agent(look: Callable[[DoctorInput], Finding]) -> Callable[[DoctorInput], Finding]:
    """Skip a check unless an agent runs."""

    def looked(facts: DoctorInput) -> Finding:
        return look(facts) if facts.checkup else Finding(SKIP, "no agent runs")

    return looked


FILES_MIN, FILES_GOOD = 256, 1024
PROCESSES_LEFT_MIN = 256
TMP_BYTES_MIN = 256 << 20
SWAPPED_SHARE_MAX = 0.5
CLOCK_ERROR = 5
"""Answer of adjtimex if nothing synchronizes the kernel's clock."""
_TIMEX_BYTES = 512
MPS_CONTROL, MPS_PIPES = "nvidia-cuda-mps-control", "/tmp/nvidia-mps"  # noqa: S108 -- NVIDIA's own choice
UDEV_FILE = "/etc/udev/rules.d/70-peerload-power.rules"
UDEV_RULE = 'SUBSYSTEM=="powercap", ACTION=="add", RUN+="/bin/chgrp {} /sys%p/energy_uj", RUN+="/bin/chmod g+r /sys%p/energy_uj"'
"""Command that lets a group read the energy counters, which reveal a lot about other users' computations."""


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
        says = "; ".join(f"GPU {gpu['index']} is {gpu['health']}: {gpu.get('why') or 'unknown reason'}" for gpu in sick)
        return Finding(FAIL, says, fix)
    if found:
        off = _without_persistence()
        if off:
            says = f"persistence mode is off on {counted(off, 'GPU')}: each first use takes seconds"
            return Finding(WARN, says, "sudo nvidia-smi -pm 1")
        return Finding(OK, f"{counted(len(found), 'GPU')} in use")
    if driver and (why or facts.info):
        return Finding(FAIL, f"the driver is installed but cannot be used: {why or 'it lists no GPU'}", fix)
    return Finding(SKIP, "no GPU found")


def mps(facts: DoctorInput) -> Finding:
    """Check that all control daemons of MPS on this machine belong to peerload."""
    daemons = _other_mps_daemons(facts)
    if not daemons:
        has_gpus, control = bool(facts.me.get("gpus")), shutil.which(MPS_CONTROL)
        says = f"{MPS_CONTROL} is in PATH" if control else f"{MPS_CONTROL} is not in PATH: tasks share GPUs in turns"
        return Finding(OK if has_gpus else SKIP, says if has_gpus else "no GPU found")
    pid, user, pipe = daemons[0]
    others = f" (and {len(daemons) - 1} more)" if len(daemons) > 1 else ""
    says = (
        f"pid {pid} of {user}{others} is an MPS control daemon that peerload did not start, in {pipe}: CUDA programs that find "
        f"it there join it, tasks of its user too, and peerload starts no MPS on a GPU with its server"
    )
    end = f"echo quit | sudo -u {shlex.quote(user)} CUDA_MPS_PIPE_DIRECTORY={shlex.quote(pipe)} {MPS_CONTROL}"
    return Finding(WARN, says, f"{end}        or leave its GPUs to it:  [gpu] exclude")


def _other_mps_daemons(facts: DoctorInput) -> list[tuple[int, str, str]]:
    """MPS control daemons that peerload does not keep: pid, user, and directory of its pipes (NVIDIA's own if that cannot be
    read)."""
    found = []
    for directory in sorted((facts.root / "proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        pid = directory.name
        if os.path.basename(facts.text(f"/proc/{pid}/cmdline").partition("\0")[0]) != MPS_CONTROL:  # noqa: PTH119
            continue
        variables = dict(line.partition("=")[::2] for line in facts.text(f"/proc/{pid}/environ").split("\0"))
        pipe = variables.get("CUDA_MPS_PIPE_DIRECTORY", MPS_PIPES)
        is_kept = "PEERLOAD_UNIT" in variables or "/peerload." in facts.text(f"/proc/{pid}/cgroup")
        if is_kept:
            continue
        try:
            user_id = directory.stat().st_uid
        except OSError:  # it has ended meanwhile
            continue
        try:
            user = pwd.getpwuid(user_id).pw_name
        except KeyError:
            user = f"#{user_id}"
        found.append((int(pid), user, pipe))
    return found


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


def _without_persistence() -> int:
    """Number of GPUs whose driver is unloaded while it is not used; 0 if that is not known."""
    import pynvml

    try:
        pynvml.nvmlInit()
        cards = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return sum(pynvml.nvmlDeviceGetPersistenceMode(card) == 0 for card in cards)
    except pynvml.NVMLError:
        return 0


def power(facts: DoctorInput) -> Finding:
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
    """Check the limit of open files of the agent and the launcher."""
    told = {name: _limit(facts, pid, "Max open files") for name, pid in _processes(facts).items()}
    least = min(told.values(), default=None)
    if least is None:
        return Finding(SKIP, "cannot be read")
    fix = "LimitNOFILE=65536 in the unit (systemctl --user edit peerload-user), or  ulimit -n 65536; peerload down; peerload up"
    says = ", ".join(f"{name} {limit}" for name, limit in told.items())
    if waiting := facts.checkup.get("ends_waiting"):
        number = counted(waiting["attempts"], "ended task")
        return Finding(FAIL, f"{says}: {number} cannot be reported: {waiting['why']}", fix)
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
    """Check how many more processes this user or the agent's cgroup may start."""
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
    """Cgroup (version 2) of a process and its parent groups."""
    found = re.search(r"^0::(/.*)$", facts.text(f"/proc/{pid}/cgroup"), re.MULTILINE)
    path = found[1] if found is not None else "/"
    parts = [part for part in path.split("/") if part]
    return ["/sys/fs/cgroup/" + "/".join(parts[:size]) for size in range(len(parts), 0, -1)]


def temporary(facts: DoctorInput) -> Finding:
    """Check the free space for temporary files."""
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


SLOW_SYNC_S = 0.2
"""A disk that takes longer to sync a small file makes every submit slow."""
SYNCS = 3
PYTHON_MIN = (3, 11)
INODES_MIN = 10_000
LOW_WITHOUT_AGENT_BYTES = 1 << 30
REMOTE = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "9p", "ceph", "fuse.glusterfs", "lustre", "afs", "beegfs",
)  # fmt: skip
"""Network file systems, on which a database's locks and log are not reliable."""
VOLATILE = ("tmpfs", "ramfs")


FOREIGN = "for root and the service's own user:  sudo peerload doctor"
"""Reason why a check is skipped for normal users of the service."""


def settings(facts: DoctorInput) -> Finding:
    """Check that an agent started now would accept its settings."""
    if facts.is_foreign:
        return Finding(SKIP, FOREIGN)
    if facts.config_error is not None:
        error = facts.config_error
        return Finding(FAIL, str(error), error.hint or "peerload config check")
    return Finding(OK, "valid")


def restart(facts: DoctorInput) -> Finding:
    """Check that the agent runs with the settings in its files."""
    if not facts.settings or facts.config is None:
        says = (
            FOREIGN if facts.is_foreign else "unknown until the settings are valid" if facts.info else "no agent runs"
        )
        return Finding(SKIP, says)
    from peerload.cli.common.agent_process import compared

    changed = [one["key"] for one in compared(facts.settings, facts.config) if one["needs_restart"]]
    if changed:
        says = f"changed since the agent was started: {', '.join(changed)}"
        return Finding(WARN, says, f"{facts.restarts}        details:  peerload config show --origin")
    return Finding(OK, "the agent uses the current settings")


def hooks(facts: DoctorInput) -> Finding:
    """Check that the node's hooks have their secret and their mail program."""
    settings = facts.config.hooks if facts.config is not None else None
    if settings is None or not settings.targets():
        return Finding(SKIP, "no hooks are configured")
    if path := settings.secret_file:
        try:
            mode = os.stat(path).st_mode  # noqa: PTH116
        except OSError as error:
            return Finding(FAIL, f"secret_file {path} cannot be read: {error.strerror}", "webhooks are not sent")
        if mode & 0o077:
            return Finding(WARN, f"others may read the secret {path}", f"chmod go= {path}")
    is_mailing = any(notification.kind_of(target) == "mail" for target in settings.targets())
    if is_mailing and shutil.which(settings.sendmail or "sendmail", path=notification.SENDMAIL_PATH) is None:
        says = f"{settings.sendmail or 'sendmail in ' + notification.SENDMAIL_PATH} does not exist: no mail is sent"
        return Finding(FAIL, says, "sudo apt install msmtp-mta        or  [hooks] sendmail")
    return Finding(OK, f"{counted(len(settings.targets()), 'target')}; failures:  peerload events --what hook")


def agent(facts: DoctorInput) -> Finding:
    if facts.info:
        says = (
            f"node {facts.info.get('node')} answers in {facts.answered_s * 1000:.0f} ms (pid {facts.info.get('pid')})"
        )
        return Finding(OK, says)
    error = facts.agent_error
    if isinstance(error, AgentSilent):
        return Finding(FAIL, str(error), error.hint or "see its log:  tail STATE/agent.log")
    hint = error.hint if error is not None else ""
    fix = "peerload up" if hint in ("", START_HINT) else hint
    return Finding(FAIL, str(error or "no agent is running here"), fix)


def version(facts: DoctorInput) -> Finding:
    """Check that agent and command line are of one version."""
    if not facts.info:
        return Finding(SKIP, "no agent runs")
    theirs = str(facts.info.get("version"))
    if theirs != __version__:
        says = f"the agent is of version {theirs}, this command of {__version__}"
        return Finding(WARN, says, f"{facts.restarts}        running tasks go on meanwhile")
    return Finding(OK, f"agent and command line are {__version__}")


def state(facts: DoctorInput) -> Finding:
    """Check that the state directory belongs to this user, is writable, and stores data durably."""
    if facts.is_foreign:
        return Finding(SKIP, FOREIGN)
    if facts.state is None:
        return Finding(SKIP, "unknown until the settings are valid")
    place = facts.state
    if not os.path.lexists(place):
        return Finding(OK, f"{place} will be created when an agent starts")
    try:
        status = place.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return Finding(FAIL, f"{place} is not a directory", "peerload up --state DIR")
        if facts.user_id not in (status.st_uid, 0):
            return Finding(FAIL, f"{place} belongs to another user (uid {status.st_uid})", "peerload up --state DIR")
        if status.st_mode & 0o022:
            return Finding(FAIL, f"other users can write to {place}", f"chmod 700 {shlex.quote(str(place))}")
        took_s = sorted(_synced_s(place) for _ in range(SYNCS))[SYNCS // 2]
    except OSError as error:
        says = f"{place} cannot be written: {error.strerror}"
        return Finding(FAIL, says, f"ls -ld {shlex.quote(str(place))}        df {shlex.quote(str(place))}")
    if took_s > SLOW_SYNC_S:
        says = f"{place} needs {took_s:.2g} s to sync a small file: each submit waits for it"
        return Finding(WARN, says, "use a faster disk:  peerload up --state DIR")
    return Finding(OK, f"{place} syncs a small file in {took_s * 1000:.1f} ms")


def _synced_s(place: Path) -> float:
    """Time until a small file is on disk. Raises OSError."""
    path = place / f"doctor-{os.getpid()}"
    began_s = time.monotonic()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b"peerload doctor\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        path.unlink(missing_ok=True)
    return time.monotonic() - began_s


def file_system(facts: DoctorInput) -> Finding:
    """Check that the state directory lies on a disk of this machine."""
    if facts.state is None:
        return Finding(SKIP, "the state directory is unknown until the settings are valid")
    kind, mounted = mounted_at(facts, facts.state)
    if kind in REMOTE:
        says = f"{facts.state} is on {kind} ({mounted}), where locks of the database do not work"
        return Finding(FAIL, says, "peerload down; peerload up --state DIR      with DIR on a disk of this machine")
    if kind in VOLATILE:
        says = f"{facts.state} is in memory ({kind} at {mounted}): all tasks are lost when the machine restarts"
        return Finding(WARN, says, "peerload down; peerload up --state DIR      with DIR on a disk")
    return Finding(OK, f"{kind or 'local'}, mounted at {mounted or '/'}")


def mounted_at(facts: DoctorInput, path: Path) -> tuple[str, str]:
    """The kind of file system that a path lies on, and where it is mounted; empty if unknown."""
    real = os.path.realpath(path)
    found = ("", "")
    for line in facts.text("/proc/self/mounts").splitlines():
        words = line.split()
        if len(words) > 2:  # noqa: PLR2004 -- what, where, kind
            where = words[1].encode().decode("unicode_escape")
            if real == where or real.startswith(where.rstrip("/") + "/"):
                found = (words[2], where) if len(where) >= len(found[1]) else found
    return found


def room(facts: DoctorInput) -> Finding:
    """Check the free space for the output of tasks and for the reserve."""
    if facts.state is None:
        return Finding(SKIP, "the state directory is unknown until the settings are valid")
    place = next(path for path in (facts.state, *facts.state.parents) if path.exists())
    status = os.statvfs(place)
    free_bytes = status.f_bavail * status.f_frsize
    disk = facts.checkup.get("disk") or {}
    low_bytes = disk.get("low_bytes", min(LOW_WITHOUT_AGENT_BYTES, status.f_blocks * status.f_frsize // 20))
    fix = f"make room:  peerload clean --outputs --older 1d        du -xh --max-depth 1 {shlex.quote(str(place))} | sort -h"
    if status.f_files and status.f_favail < INODES_MIN:
        is_full = disk.get("state") == "full"
        says = "no inodes are left: submissions are refused and no task starts" if is_full else "few inodes are left"
        return Finding(FAIL if is_full else WARN, f"{says}; {status.f_favail} more files can be created", fix)
    if waiting := facts.checkup.get("outputs_waiting"):
        why = f": {waiting['why']}" if waiting["why"] else ""
        return Finding(
            FAIL, f"the output files of {counted(waiting['attempts'], 'ended task')} wait for room{why}", fix
        )
    if disk.get("state") == "full" or disk.get("stalled"):
        return Finding(FAIL, f"the disk is full: submissions are refused; {size_text(free_bytes)} free", fix)
    if free_bytes < low_bytes or disk.get("state") == "low":
        says = f"{size_text(free_bytes)} free of {size_text(status.f_blocks * status.f_frsize)}: this node takes no tasks of other nodes"
        return Finding(FAIL if not free_bytes else WARN, says, fix)
    if disk and disk["reserve_bytes"] < disk["reserve_bytes_max"]:
        return Finding(WARN, "the reserve for a full disk is not filled", fix)
    return Finding(OK, f"{size_text(free_bytes)} free")


@needs_agent
def damaged(facts: DoctorInput) -> Finding:
    """Check that all tasks can be read from the database."""
    rows = facts.checkup["damaged"]
    if lost := facts.checkup.get("lost"):
        fix = "check the disk (dmesg); submit the missing tasks again; held tasks:  peerload ls, peerload release ID"
        return Finding(FAIL, str(lost), fix)
    if rows:
        says = f"{counted(len(rows), 'task')} cannot be read: {rows[0]['id']} ({rows[0]['why']})"
        fix = f"copy {shlex.quote(str(facts.info['state']))} elsewhere, check the disk (dmesg), submit the tasks again"
        return Finding(FAIL, says, fix)
    return Finding(OK, "every task can be read")


@needs_agent
def kept(facts: DoctorInput) -> Finding:
    """Check that ended tasks and their outputs were not removed soon after their end because of full storage."""
    early = facts.checkup.get("removed_early")
    if early:
        says = f"{counted(early['tasks'], 'task')} or outputs were removed within a day of their end: {early['why']}"
        fix = (
            "peerload events --what store        keep more: ended_tasks_max, ended_output_bytes_max in the config file"
        )
        return Finding(WARN, says, fix)
    return Finding(OK, "ended tasks are kept for at least a day")


@needs_agent
def launcher(facts: DoctorInput) -> Finding:
    told = facts.checkup["launcher"]
    if not told["pid"]:
        is_service = facts.info.get("mode") == "system"
        fix = "systemctl status peerload-launcher" if is_service else "peerload down && peerload up"
        return Finding(FAIL, "it does not run: no task starts", fix)
    if told["silent"]:
        says = f"pid {told['pid']} does not answer: no task starts, and leases are not enforced"
        return Finding(
            FAIL,
            says,
            f"kill -CONT {told['pid']}        if that does not help:  kill -9 {told['pid']}, which ends its tasks",
        )
    return Finding(OK, f"pid {told['pid']} answers")


@needs_agent
def containment(facts: DoctorInput) -> Finding:
    """Check that tasks have cgroups, which also limit their memory; `--security` lists what is not enforced."""
    told = facts.checkup["launcher"]
    units, memory = told["units"], told["memory"]
    if units == "bare" or memory in (None, "rlimit"):
        lacks = "this agent has no cgroups for tasks" if units == "bare" else "its cgroups do not limit memory"
        held = "holds for each process, not for a whole task" if memory else "is not enforced"
        return Finding(WARN, f"{lacks}: --mem {held} (more:  peerload doctor --security)", AS_SERVICE)
    limits = f"; not enforced: {'; '.join(told['unenforced'])}" if told["unenforced"] else ""
    return Finding(OK, f"tasks are contained by {units}, their memory is limited by {memory}{limits}")


def python(facts: DoctorInput) -> Finding:
    """Check that this Python is new enough, and that the agent runs on uvloop."""
    from importlib.util import find_spec

    fix = "in a source tree:  make setup        else with Python 3.11 or newer:  pipx install peerload-VERSION.whl"
    if sys.version_info[:2] < PYTHON_MIN:
        return Finding(FAIL, f"Python {sys.version.split()[0]} is too old", fix)
    missing = [name for name in ("uvloop", "msgspec", "aiomqtt", "psutil", "cryptography") if find_spec(name) is None]
    if missing:
        return Finding(FAIL, f"packages are missing: {', '.join(missing)}", fix)
    loop = facts.checkup.get("event_loop", "uvloop")
    if loop != "uvloop":
        return Finding(WARN, f"the agent runs on {loop}, not on uvloop", fix)
    return Finding(OK, f"Python {sys.version.split()[0]}, uvloop")
