"""The service for all users of a machine: a launcher that runs as root decides which account each task runs as, starts
it as that account, and acts as users for an unprivileged agent. Used by such a launcher alone.

The agent is trusted about the owner of a task, and about nothing else: files that it names are opened with its own rights.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys

from peerload.launcher import protocol
from peerload.launcher.cgroup_limits import CgroupLimits
from peerload.launcher.powercap import PLACE, Powercap
from peerload.launcher.process import (
    MPS_KEEPER,
    NOT_EXECUTABLE,
    PATH_DEFAULT,
    AgentCredentials,
    CannotStart,
    SingleUser,
    SpawnRefused,
    find_program,
    raise_shortage,
)
from peerload.launcher.record_log import log_line
from peerload.launcher.server import Launcher, ignore_signals, lock
from peerload.launcher.system import sandbox
from peerload.launcher.system.account_resolver import AccountResolver, AccountUnanswered, DeferredRequests, agent_ids
from peerload.launcher.system.accounts import (
    DIRECTORY,
    FILE,
    Entry,
    GuestIds,
    LauncherAccount,
    PolicyError,
    PolicyFiles,
    account_named,
    check_root_owned,
    check_uid,
)
from peerload.launcher.system.fork_server import (
    DESCRIPTORS_MAX,
    ChildReports,
    ForkServer,
    HelperRequest,
    SpawnOrder,
    UserHelpers,
)
from peerload.launcher.system.sandbox import MS_NODEV, MS_NOSUID, Syscalls, guest_filter

TYPE_CHECKING = False
if TYPE_CHECKING:
    import select
    from collections.abc import Callable, Collection, Sequence
    from typing import Any

    from peerload.launcher.cgroup_clone import CgroupClone
    from peerload.launcher.containment import Units
    from peerload.launcher.powercap import Reading

SCRATCH = b"-"
"""Working directory of a task that requests a fresh one."""
SCRATCH_NAME = "scratch"
NAMES_KEPT_MAX = 1024
_ALWAYS = (b"LANG", b"LC_ALL", b"LC_CTYPE", b"TERM")
"""Variables that a task gets even if it runs as another user than its submitter."""
LOADED_FROM = tuple(
    b"LD_ GLIBC_ GCONV_ MALLOC_ NSS_ BASH_ PYTHON PERL RUBY NODE_ NPM_ LUA_ R_ JAVA_ JDK_ TCL GIT_ SSH_ SSL_ OPENSSL_ OCL_ OPENCL_ "
    b"VK_ CUDA_INJECTION NVIDIA_DRIVER XDG_ GTK_ QT_ TERMINFO LESS AWK".split()
)
LOADED_FROM_ONE = frozenset(
    b"ENV SHELLOPTS PS4 IFS CDPATH FPATH ZDOTDIR PROMPT_COMMAND _JAVA_OPTIONS CLASSPATH LOCPATH NLSPATH TERMCAP INPUTRC PAGER "
    b"MANPAGER EDITOR VISUAL SHELL BROWSER MAKEFLAGS MAKEFILES TAR_OPTIONS RSYNC_RSH CVS_RSH RUSTC_WRAPPER GOFLAGS CURL_HOME WGETRC".split()
)
"""Variables that name code, or places of code. Where only chosen programs may run, tasks of other nodes lose them, and
also PATH and HOME, since programs start others by name and read settings there."""
NO_SANDBOX = (
    "guests see the files and processes of this machine: it has no mount namespaces",
    "files of guests in temporary directories stay there, and their size is not limited",
)
FLAGS = {
    "--directory": "/var/lib/peerload-launcher",
    "--sockets": "/run/peerload-launcher",
    "--agent-user": "peerload",
    "--config": FILE,
    "--config-directory": DIRECTORY,
    "--units": "",
    "--memory": "",
    "--powercap": PLACE,
}
"""Flags and their defaults."""
NO_FILTER = "guests may make all system calls: peerload has no seccomp filter for this processor architecture"


class MultiUserService(SingleUser):
    """The `SingleUser` of a launcher for all users. directory, sockets: owned by root. agent: uid and gid of the agent's user."""

    serves_all = True
    access: AgentCredentials
    _limits: CgroupLimits

    def __init__(
        self, directory: str, sockets: str, agent: tuple[int, int], policies: PolicyFiles, powercap: str = PLACE
    ) -> None:
        """powercap: directory of the energy counters. Raises PolicyError."""
        super().__init__(directory)
        self._powercap = Powercap(powercap)
        self.sockets = sockets
        self.access = AgentCredentials(*agent)
        self._policies = policies
        self._hidden_paths = (directory, sockets)
        self._guests = GuestIds()
        self._accounts: dict[str, LauncherAccount] = {}
        self._scratches: dict[str, LauncherAccount] = {}
        self._staged: dict[str, int] = {}
        """Attempts with files, whose scratch directories outlive them → number of jobs that work in the directory."""
        self._forgotten: set[str] = set()
        """Attempts of these that the agent no longer needs, while a job still works in the directory."""
        self._kernel = Syscalls()
        self._seccomp = guest_filter()
        self._has_sandbox = self._has_networks = False
        policies.read()

    def open(
        self,
        epoll: select.epoll,
        events: list[protocol.LauncherEvent],
        units: Units,
        root_name: str,
        own_children: set[int],
        kept: Collection[str],
    ) -> None:
        """See `SingleUser`. Tests which mechanisms work here."""
        self._limits = CgroupLimits(self.directory, units, root_name)
        self.unenforced += self._limits.unenforced
        self.enforces_cores = self._limits.enforces_cores
        self.reports = ChildReports(epoll)
        self.fork_server = ForkServer(self._kernel, self.access, self.reports)
        self.helpers = UserHelpers(epoll, events, self.fork_server, own_children)
        self._resolver = AccountResolver(self.helpers)
        self._make_scratch_place(kept)
        why = self._try(self._try_sandbox)
        self._has_sandbox = not why
        if why:
            log_line(f"no sandbox for guests: error={why}")
            self.unenforced += NO_SANDBOX
        why = self._try(lambda: self._kernel.install_seccomp(self._seccomp)) if self._seccomp else "not known"
        if why:
            log_line(f"no seccomp filter for guests: error={why}")
            self._seccomp = b""
            self.unenforced += (NO_FILTER,)
        self._has_networks = not self._try(lambda: sandbox.isolate_network(self._kernel))

    def _try_sandbox(self) -> None:
        sandbox.enter(self._kernel, 1 << 20, self._hidden_paths, has_devices=False)

    def _try(self, work: Any) -> str:  # noqa: ANN401 -- a call
        """Try this in a child → the reason why it fails; "" if it works."""
        pid = self.fork_server.fork(work)
        _, status = os.waitpid(pid, 0)
        failure = self.reports.failure_of(pid)
        return failure[1] if failure is not None else "" if not status else f"it ended with {status}"

    def _make_scratch_place(self, kept: Collection[str]) -> None:
        self.scratch = f"{self.directory}/{SCRATCH_NAME}"
        os.makedirs(self.scratch, mode=0o711, exist_ok=True)
        os.chmod(self.scratch, 0o711)  # noqa: S103 -- as above; users pass through to what is theirs
        self._remove_leftovers(kept)
        os.chmod(self.directory, 0o711)  # noqa: S103 -- as above

    def _remove_leftovers(self, kept: Collection[str]) -> None:
        """Remove the directories that tasks of a killed launcher have left, each as its owner. Those of kept (ended) attempts
        stay, since the agent may not have their outputs yet."""
        least, most = self._policies.current().guest_uids
        for name in os.listdir(self.scratch):
            path = f"{self.scratch}/{name}"
            status = os.lstat(path)
            uid, gid = status.st_uid, status.st_gid
            account = LauncherAccount("left", uid, gid, (gid,), "/", is_guest=least <= uid <= most)
            if not uid:
                continue
            self._scratches[name] = account
            if account.is_guest:
                self._guests.hold(name, uid)
            self._staged[name] = 0
            if name not in kept:
                self.forget(name)

    def admits(self, connection: socket.socket) -> bool:
        """True if the peer's uid is the agent's, according to the kernel."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", raw)
        if uid != self.access.uid:
            log_line(f"connection refused, not the agent: uid={uid}")
        return bool(uid == self.access.uid)

    # -- who -----------------------------------------------------------------------------------------------------------

    def account(self, request: protocol.SpawnRequest | protocol.UserRequest, key: str) -> LauncherAccount:
        """The account of a request. key: an attempt or a helper, to which a guest's uid is assigned until it is
        released. Raises SpawnRefused, AccountPending, LauncherProtocolError."""
        node, home, user, uid = request.node, request.home, request.user, request.uid
        if not node or not home:
            raise protocol.LauncherProtocolError("node or home is missing")
        policy = self._policies.current()
        name = policy.name_for(node, home, user, uid)
        if not name and key in self._staged:
            return self._scratches[key]
        if name:

            def look(name: str, group: str, admin_group: str) -> Entry | None:
                return self._resolver.entry(name, group, admin_group, home)

            is_foreign = home != node or ":" in user
            account = account_named(name, policy, uid=uid, is_own=not is_foreign, look=look)
            if account.uid and account.uid == self.access.uid:  # it could control the launcher
                raise SpawnRefused(f"{name} is the account of the agent itself")
            return account
        if not policy.guest_network and not self._has_networks:
            raise SpawnRefused("guests must have no network here, and this machine cannot make network namespaces")
        return self._guests.take(key, policy.guest_uids, self._resolver.is_unassigned)

    def carry_out(self, request: protocol.UserRequest) -> None:
        number = request.id
        origin, holder = HelperRequest(number, _quota_key(request)), f"helper {number}"
        if isinstance(request, protocol.FilesJob) and request.directory == SCRATCH:
            holder = request.key
        try:
            account = self.account(request, holder)
        except AccountUnanswered as silence:
            self.helpers.reply(number, f"busy: {silence}")
            return
        except SpawnRefused as refusal:
            self.helpers.reply(number, f"policy: {refusal}")
            return
        match request:
            case protocol.DirectoryCheck(directory):
                self._check_directory(origin, account, directory, holder)
            case protocol.FilesJob(_, _, directory) if directory == SCRATCH:
                self._work_in_scratch(origin, account, request)
            case protocol.FileCheck() | protocol.FileAppend() | protocol.FilesJob() if account.is_guest:
                self._guests.give_back(holder)
                self.helpers.reply(number, "policy: guests have no files here")
            case protocol.FileCheck(patterns):
                self.helpers.check_files(origin, account, patterns)
            case protocol.FileAppend():
                self.helpers.append(origin, account, request)
            case protocol.FilesJob():
                self.helpers.work_with_files(origin, account, request.socket, request.directory, lambda: None)

    def _work_in_scratch(self, origin: HelperRequest, account: LauncherAccount, request: protocol.FilesJob) -> None:
        key, why = request.key, ""
        if key not in self._staged and request.makes:
            try:
                self._make_scratch(key, account)
                self._staged[key] = 0
                if account.is_guest and self._has_sandbox:
                    options = (
                        f"mode=700,uid={account.uid},gid={account.gid},size={self._policies.current().guest_bytes_max}"
                    )
                    self._kernel.mount("tmpfs", f"{self.scratch}/{key}", "tmpfs", MS_NOSUID | MS_NODEV, options)
            except (CannotStart, OSError) as error:
                why = f"busy: {error}"
        elif key not in self._staged or self._scratches[key].uid != account.uid:
            why = "its working directory is gone"
        if why:
            if key not in self._staged:
                self._guests.give_back(key)
            self.helpers.reply(origin.number, why)
            return
        self._staged[key] += 1
        path = f"{self.scratch}/{key}".encode()
        self.helpers.work_with_files(origin, account, request.socket, path, lambda: self._has_worked(key))

    def _has_worked(self, key: str) -> None:
        self._staged[key] -= 1
        if key in self._forgotten:
            self.forget(key)

    def _check_directory(self, origin: HelperRequest, account: LauncherAccount, directory: bytes, holder: str) -> None:
        if directory == SCRATCH:
            self._guests.give_back(holder)
            self.helpers.reply(origin.number, "")
            return
        hidden = self._hidden_paths if account.is_guest and self._has_sandbox else None
        self.helpers.check_directory(origin, account, directory, hidden, lambda: self._guests.give_back(holder))

    def deferring(self, carry_out: Callable[[protocol.Request], None]) -> DeferredRequests:
        self._deferred = DeferredRequests(carry_out)
        return self._deferred

    def ready(self, masks: dict[int, int]) -> None:
        if self.reports.fd in masks:
            self.reports.read()
        self.helpers.ready(masks)
        self.helpers.kill_overdue()
        self._deferred.resume(self._resolver.answered())

    def due_at_s(self) -> list[float]:
        return [due_s for due_s in (self.helpers.due_s(), self._resolver.due_s()) if due_s is not None]

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def admit(self, request: protocol.SpawnRequest) -> protocol.SpawnRequest:
        """See `SingleUser`. Also raises AccountPending."""
        account = self.account(request, request.key)
        least, most = self._policies.current().guest_uids
        if not (account.is_guest and least <= account.uid <= most):
            check_uid(account.uid, self._policies.current(), is_own=account.uid == request.uid)
        if account.is_guest:
            limit_bytes = self._policies.current().memory_bytes_max(request.memory_bytes_max, request.cpus)
            request = request.replace(memory_bytes_max=limit_bytes)
        self._accounts[request.key] = account
        return request

    def check_inside(self, key: str, inside: str) -> None:
        """See `SingleUser`. Both have to run as the same account, and not as guests, whose account is new each time."""
        own, other = self._accounts.get(key), self._accounts.get(inside)
        if own is None or other is None or own.is_guest or own.uid != other.uid:
            raise SpawnRefused("commands run only inside tasks of the same user, and not inside those of guests")

    def spawn(
        self,
        request: protocol.SpawnRequest,
        reads: int | str,
        clone: CgroupClone | None = None,  # noqa: ARG002 -- for one user
        joins: Sequence[str] = (),
    ) -> int:
        key = request.key
        account, policy = self._accounts[key], self._policies.current()
        order = SpawnOrder(account, policy, request)
        order.reads, order.joins = reads, joins
        if account.is_guest:
            order.seccomp = self._seccomp
            if self._has_sandbox:
                order.hidden = (*self._hidden_paths, os.path.dirname(os.path.dirname(request.stdout)))
        home = account.home
        if order.directory == SCRATCH:
            if order.hidden is not None:
                order.directory = sandbox.SCRATCH.encode()
                order.makes_scratch = key not in self._staged
                order.staged = "" if order.makes_scratch else f"{self.scratch}/{key}"
            else:
                order.directory = self._make_scratch(key, account)
        if account.is_guest and order.hidden is None:
            home = os.fsdecode(self._make_scratch(key, account))
        order.environment = _environment(order.environment, request, account, home)
        if policy.exec_allow and _is_foreign(request):
            if not _is_mps_keeper(request):
                order.allowed = policy.exec_allow
            order.environment = _without_code(order.environment, home)
        try:
            self._limits.enter(key, policy.task_processes_max, request.cpus, request.cpus_max)
            return self.fork_server.spawn(order)
        finally:
            self._limits.leave()

    def counters(self) -> list[Reading]:
        return self._powercap.read()

    def _make_scratch(self, key: str, account: LauncherAccount) -> bytes:
        """Make a new directory of the user, inside one of root."""
        path = f"{self.scratch}/{key}"
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if key not in self._scratches:  # left by an earlier attempt: it could not be removed
                raise CannotStart(NOT_EXECUTABLE, "its scratch directory cannot be made: one is there") from None
            return path.encode()
        except OSError as error:
            raise_shortage(error)
            raise CannotStart(NOT_EXECUTABLE, f"its scratch directory cannot be made: {error.strerror}") from None
        os.chown(path, account.uid, account.gid)
        self._scratches[key] = account
        return path.encode()

    def failure_of(self, pid: int) -> tuple[int, str] | None:
        return self.reports.failure_of(pid)

    def release(self, key: str) -> None:
        """See `SingleUser`. The uid of a guest is released."""
        self._accounts.pop(key, None)
        super().release(key)
        if key not in self._staged:
            self._release_scratch(key)

    def forget(self, key: str) -> None:
        if self._staged.get(key):
            self._forgotten.add(key)
        elif self._staged.pop(key, None) is not None:
            self._forgotten.discard(key)
            self._release_scratch(key)

    def _release_scratch(self, key: str) -> None:
        account = self._scratches.pop(key, None)
        if account is None:
            self._guests.give_back(key)
            return
        path = f"{self.scratch}/{key}"
        self.helpers.empty(path, account, lambda: self._scratch_emptied(key, path))

    def _scratch_emptied(self, key: str, path: str) -> None:
        try:
            self._kernel.unmount(path)
            os.rmdir(path)
        except OSError as error:
            log_line(
                f"cannot remove a scratch directory: path={path} error={error.strerror}"
            )  # the uid of the guest stays taken, so that the next guest does not own the directory
            return
        self._guests.give_back(key)


def _environment(
    given: dict[bytes, bytes], request: protocol.SpawnRequest, account: LauncherAccount, home: str
) -> dict[bytes, bytes]:
    """The environment of a task: all captured variables if it runs as its submitter, otherwise the basic ones and those that the
    submitter has named."""
    own = {b"HOME": os.fsencode(home), b"USER": account.name.encode(), b"LOGNAME": account.name.encode()}
    if not account.is_guest:
        own[b"SHELL"] = os.fsencode(account.shell)
    if not account.is_guest and account.name == request.user:
        return {**own, **given}
    names = {*_ALWAYS, *(request.kept or ())[:NAMES_KEPT_MAX]}
    kept = {name: value for name, value in given.items() if name in names or name.startswith(b"PEERLOAD_")}
    temporary = {b"TMPDIR": os.fsencode(home)} if account.is_guest else {}
    return {b"PATH": PATH_DEFAULT, b"LANG": b"C.UTF-8", **own, **temporary, **kept}


def _is_foreign(request: protocol.SpawnRequest | protocol.UserRequest) -> bool:
    """True if it is a task of another node, or of another node's user who has submitted it here."""
    return request.home != request.node or (request.uid < 0 and ":" in request.user)


def _is_mps_keeper(request: protocol.SpawnRequest) -> bool:
    """True if the command is the keeper of an MPS daemon, with the control program that the launcher itself finds: with
    another program, the agent could run any command."""
    command, rest = tuple(request.argv[: len(MPS_KEEPER)]), request.argv[len(MPS_KEEPER) :]
    try:
        return command == MPS_KEEPER and rest[0] == find_program(protocol.MPS_CONTROL.encode(), dict(os.environb))
    except (CannotStart, IndexError):
        return False


def _quota_key(request: protocol.UserRequest) -> str:
    """The quota that a request counts toward: that of a user of this node, or of all users that another node names."""
    if _is_foreign(request):
        return (request.user.partition(":")[0] if request.home == request.node else request.home) + ":"
    return request.user


def _without_code(environment: dict[bytes, bytes], home: str) -> dict[bytes, bytes]:
    """The environment without variables that make a program run other code, which would bypass the list of programs."""
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(LOADED_FROM) and name not in LOADED_FROM_ONE
    }
    return {**kept, b"PATH": PATH_DEFAULT, b"HOME": os.fsencode(home)}


def prepared(directory: str, sockets: str, user: str, files: PolicyFiles, powercap: str = PLACE) -> MultiUserService:
    """Service of a launcher in these directories (made if absent), for the agent that runs as ``user``. Raises
    PolicyError if another user could write there, ProcessLookupError if the user does not exist, OSError."""
    ids = agent_ids(user)
    for path, mode in ((directory, 0o711), (sockets, 0o755)):
        os.makedirs(path, mode=mode, exist_ok=True)
        check_root_owned(path)
        os.chmod(path, mode)
    return MultiUserService(directory, sockets, ids, files, powercap)


def main() -> None:
    """``[--directory DIR] [--sockets DIR] [--agent-user NAME] [--config FILE] [--config-directory DIR] [--units KIND]
    [--memory KIND] [--powercap DIR]``: run the launcher of a machine, as root, until it is asked to stop."""
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    if len(sys.argv) % 2 == 0 or flags.keys() - FLAGS.keys():
        sys.exit(f"usage: launcher --system {' '.join(f'[{flag} …]' for flag in FLAGS)}")
    if os.getuid() != 0 or os.geteuid() != 0:
        sys.exit("the launcher of all users runs as root")
    given = {**FLAGS, **flags}
    directory = os.path.abspath(given["--directory"])
    files = PolicyFiles(given["--config"], given["--config-directory"])
    os.umask(0o022)
    os.setgroups(())
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, DESCRIPTORS_MAX), hard))
    try:
        sockets = os.path.abspath(given["--sockets"])
        system = prepared(directory, sockets, given["--agent-user"], files, given["--powercap"])
    except (PolicyError, OSError) as error:
        sys.exit(f"the launcher does not start: {error}")
    lock(directory)
    ignore_signals()
    Launcher(system, given["--units"], given["--memory"]).run()
