"""What a launcher does besides where it runs as root and serves all users of a machine: it decides whom each task runs as, makes
it that account, and does small errands as users for an agent that is none of them. Used by such a launcher alone.

The agent is believed about whose task it is, and about nothing else: it names files with its own rights only.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys

from peerload.launcher.fs_credentials import AgentCredentials
from peerload.launcher.process import NOT_EXECUTABLE, PATH_DEFAULT, CannotStart, SpawnRefused, raise_shortage
from peerload.launcher.protocol import DirectoryCheck, FileAppend, FileCheck, LauncherProtocolError
from peerload.launcher.record_log import say
from peerload.launcher.server import ignore_signals, locked
from peerload.launcher.system import sandbox
from peerload.launcher.system.account_resolver import AccountResolver, AccountUnanswered, agent_ids
from peerload.launcher.system.accounts import Entry, GuestIds, LauncherAccount, account_named, check_uid
from peerload.launcher.system.cgroup_limits import CgroupLimits
from peerload.launcher.system.deferred_requests import DeferredRequests
from peerload.launcher.system.fork_server import DESCRIPTORS_MAX, ChildReports, ForkServer, SpawnOrder
from peerload.launcher.system.seccomp import guest_filter
from peerload.launcher.system.syscalls import Syscalls
from peerload.launcher.system.user_helpers import HelperRequest, UserHelpers
from peerload.launcher.system.user_policy import DIRECTORY, FILE, PolicyError, PolicyFiles, check_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    import select
    from collections.abc import Callable
    from typing import Any

    from peerload.launcher.containment import Units
    from peerload.launcher.protocol import LauncherEvent, Request, SpawnRequest, UserRequest

SCRATCH = b"-"
"""What a task says for its directory that wants a fresh one."""
SCRATCH_NAME = "scratch"
NAMES_KEPT_MAX = 1024
_ALWAYS = (b"LANG", b"LC_ALL", b"LC_CTYPE", b"TERM")
"""What a task that runs as another than its submitter is told all the same."""
LOADED_FROM = tuple(
    b"LD_ GLIBC_ GCONV_ MALLOC_ NSS_ BASH_ PYTHON PERL RUBY NODE_ NPM_ LUA_ R_ JAVA_ JDK_ TCL GIT_ SSH_ SSL_ OPENSSL_ OCL_ OPENCL_ "
    b"VK_ CUDA_INJECTION NVIDIA_DRIVER XDG_ GTK_ QT_ TERMINFO LESS AWK".split()
)
LOADED_FROM_ONE = frozenset(
    b"ENV SHELLOPTS PS4 IFS CDPATH FPATH ZDOTDIR PROMPT_COMMAND _JAVA_OPTIONS CLASSPATH LOCPATH NLSPATH TERMCAP INPUTRC PAGER "
    b"MANPAGER EDITOR VISUAL SHELL BROWSER MAKEFLAGS MAKEFILES TAR_OPTIONS RSYNC_RSH CVS_RSH RUSTC_WRAPPER GOFLAGS CURL_HOME WGETRC".split()
)
"""Variables that name code, or a place where it is looked for: where only chosen programs may run, what another node says of these is
not passed on; nor are its PATH and HOME, since programs start others by name, and read their settings there."""
NO_WORLD = (
    "guests see the files and processes of the machine as they are: there are no mount namespaces here",
    "what guests leave in temporary directories of the machine stays there, and has no bound",
)
FLAGS = {
    "--directory": "/var/lib/peerload-launcher",
    "--sockets": "/run/peerload-launcher",
    "--agent-user": "peerload",
    "--config": FILE,
    "--config-directory": DIRECTORY,
    "--units": "",
    "--memory": "",
}
"""What it can be told, and what it takes for granted."""
NO_FILTER = "guests may make all system calls: there is no filter for this kind of machine"


class System:
    """``directory``, ``sockets``: the launcher's own, root's; ``agent``: the uid and gid of the one that is served."""

    def __init__(self, directory: str, sockets: str, agent: tuple[int, int], policies: PolicyFiles) -> None:
        """Raises PolicyError."""
        self.sockets = sockets
        self.access = AgentCredentials(*agent)
        self._directory = directory
        self._policies = policies
        self._hidden = (directory, sockets)
        self._guests = GuestIds()
        self._accounts: dict[str, LauncherAccount] = {}
        self._scratches: dict[str, LauncherAccount] = {}
        self._kernel = Syscalls()
        self._calls = guest_filter()
        self._has_world = self._has_networks = False
        self.unenforced: tuple[str, ...] = ()
        policies.read()

    def open(
        self, epoll: select.epoll, events: list[LauncherEvent], units: Units, root_name: str, own_children: set[int]
    ) -> None:
        """See `MultiUser`. Finds out what works here."""
        self._shares = CgroupLimits(self._directory, units, root_name)
        self.unenforced += self._shares.unenforced
        self.words = ChildReports(epoll)
        self.forge = ForkServer(self._kernel, self.access, self.words)
        self.errands = UserHelpers(epoll, events, self.forge, own_children)
        self._lookups = AccountResolver(self.errands)
        self._make_scratch_place()
        why = self._try(self._try_world)
        self._has_world = not why
        if why:
            say(f"guests have no world of their own: {why}")
            self.unenforced += NO_WORLD
        why = self._try(lambda: self._kernel.filter_calls(self._calls)) if self._calls else "not known"
        if why:
            say(f"the system calls of guests are not filtered: {why}")
            self._calls = b""
            self.unenforced += (NO_FILTER,)
        self._has_networks = not self._try(lambda: sandbox.leave_network(self._kernel))

    def _try_world(self) -> None:
        sandbox.enter(self._kernel, 1 << 20, self._hidden, has_devices=False)

    def _try(self, work: Any) -> str:  # noqa: ANN401 -- a call
        """Whether this works in a child → why not; "" if it does."""
        pid = self.forge.child(work)
        _, status = os.waitpid(pid, 0)
        said = self.words.of(pid)
        return said[1] if said is not None else "" if not status else f"it ended with {status}"

    def _make_scratch_place(self) -> None:
        self.scratch = f"{self._directory}/{SCRATCH_NAME}"
        os.makedirs(self.scratch, mode=0o711, exist_ok=True)  # noqa: PTH103 -- pathlib costs the launcher a megabyte
        os.chmod(self.scratch, 0o711)  # noqa: PTH101, S103 -- as above; users pass through to what is theirs
        self._sweep_left()
        os.chmod(self._directory, 0o711)  # noqa: PTH101, S103 -- as above

    def _sweep_left(self) -> None:
        """What tasks of an earlier launcher, which was killed, have left: removed as whose it is."""
        for name in os.listdir(self.scratch):  # noqa: PTH208 -- as above
            status = os.lstat(f"{self.scratch}/{name}")
            account = LauncherAccount("left", status.st_uid, status.st_gid, (status.st_gid,), "/")
            if account.uid:
                path = f"{self.scratch}/{name}"
                self.errands.sweep(path, account, lambda path=path: self._swept("", path))  # type: ignore[misc]

    def admits(self, connection: socket.socket) -> bool:
        """Whether who is at the other end is the agent: the kernel says so, and nobody else."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", raw)
        if uid != self.access.uid:
            say(f"uid {uid} is not the agent's: it is not listened to")
        return bool(uid == self.access.uid)

    # -- who -----------------------------------------------------------------------------------------------------------

    def account(self, request: SpawnRequest | UserRequest, key: str) -> LauncherAccount:
        """Whom what is asked runs as; ``key``: an attempt or an errand, which has a uid of its own if it is a guest's, until that
        is given back. Raises NotAllowed, NotKnownYet, LauncherProtocolError."""
        node, home, user, uid = request.node, request.home, request.user, request.uid
        if not node or not home:
            raise LauncherProtocolError("node or home is missing")
        policy = self._policies.now()
        name = policy.name_for(node, home, user, uid)
        if name:

            def look(name: str, group: str, admin_group: str) -> Entry | None:
                return self._lookups.entry(name, group, admin_group, home)

            is_foreign = home != node or ":" in user
            account = account_named(name, policy, uid=uid, is_own=not is_foreign, look=look)
            if account.uid and account.uid == self.access.uid:  # it could order of us whatever it likes
                raise SpawnRefused(f"{name} is the account of the agent itself")
            return account
        if not policy.guest_network and not self._has_networks:
            raise SpawnRefused("guests are to have no network here, and nothing on this machine can keep it from them")
        return self._guests.take(key, policy.guest_uids, self._lookups.is_nobodys)

    def carry_out(self, request: UserRequest) -> None:
        """See `MultiUser`."""
        number = request.id
        asked, errand = HelperRequest(number, _share(request)), f"errand {number}"
        try:
            account = self.account(request, errand)
        except AccountUnanswered as silence:
            self.errands.refuse(number, f"busy: {silence}")
            return
        except SpawnRefused as refusal:
            self.errands.refuse(number, f"policy: {refusal}")
            return
        match request:
            case DirectoryCheck(directory):
                self._check_directory(asked, account, directory, errand)
            case FileCheck() | FileAppend() if account.is_guest:
                self._guests.give_back(errand)
                self.errands.refuse(number, "policy: guests have no files here")
            case FileCheck(patterns):
                self.errands.check(asked, account, patterns)
            case FileAppend():
                self.errands.append(asked, account, request)

    def _check_directory(self, asked: HelperRequest, account: LauncherAccount, directory: bytes, errand: str) -> None:
        if directory == SCRATCH:
            self._guests.give_back(errand)
            self.errands.refuse(asked.number, "")
            return
        world = self._hidden if account.is_guest and self._has_world else None
        self.errands.look(asked, account, directory, world, lambda: self._guests.give_back(errand))

    def deferring(self, carry_out: Callable[[Request], None]) -> DeferredRequests:
        """See `MultiUser`."""
        self._waits = DeferredRequests(carry_out)
        return self._waits

    def ready(self, masks: dict[int, int]) -> None:
        """What epoll said of children, and what is due."""
        if self.words.fd in masks:
            self.words.hear()
        self.errands.ready(masks)
        self.errands.give_up()
        self._waits.resume(self._lookups.settled())

    def dues_s(self) -> list[float]:
        """When something is to be given up, by the monotonic clock."""
        return [due_s for due_s in (self.errands.due_s(), self._lookups.due_s()) if due_s is not None]

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def admit(self, request: SpawnRequest) -> SpawnRequest:
        """See `MultiUser`. Raises AccountPending, too."""
        account = self.account(request, request.key)
        least, most = self._policies.now().guest_uids
        if not (account.is_guest and least <= account.uid <= most):
            check_uid(account.uid, self._policies.now(), is_own=account.uid == request.uid)
        if account.is_guest:
            limit_bytes = self._policies.now().memory_bytes_max(request.memory_bytes_max, request.cpus)
            request = request.replace(memory_bytes_max=limit_bytes)
        self._accounts[request.key] = account
        return request

    def check_inside(self, key: str, inside: str) -> None:
        """Raises NotAllowed unless both run as one and the same account, which is no guest's: that has another each time."""
        own, other = self._accounts.get(key), self._accounts.get(inside)
        if own is None or other is None or own.is_guest or own.uid != other.uid:
            raise SpawnRefused("commands go inside of tasks of the same user alone, and not of guests'")

    def spawn(self, request: SpawnRequest, reads: int | str) -> int:
        """See `MultiUser`."""
        key = request.key
        account, policy = self._accounts[key], self._policies.now()
        order = SpawnOrder(account, policy, request)
        order.reads = reads
        if account.is_guest:
            order.calls = self._calls
            if self._has_world:
                order.world = (*self._hidden, os.path.dirname(os.path.dirname(request.stdout)))  # noqa: PTH120 -- as above
        home = account.home
        if order.directory == SCRATCH:
            if order.world is not None:
                order.directory, order.makes_scratch = sandbox.SCRATCH.encode(), True
            else:
                order.directory = self._make_scratch(key, account)
        if account.is_guest and order.world is None:
            home = os.fsdecode(self._make_scratch(key, account))
        order.environment = _environment(order.environment, request, account, home)
        if policy.exec_allow and _is_foreign(request):
            order.allowed = policy.exec_allow
            order.environment = _without_code(order.environment, home)
        try:
            self._shares.enter(key, policy.task_processes_max, request.cpus)
            return self.forge.task(order)
        finally:
            self._shares.leave()

    def close(self) -> None:
        """No task is left."""
        self._shares.remove()

    def _make_scratch(self, key: str, account: LauncherAccount) -> bytes:
        """A fresh directory of its user's, in one of root's."""
        path = f"{self.scratch}/{key}"
        try:
            os.mkdir(path, 0o700)  # noqa: PTH102 -- as above
        except FileExistsError:
            if key not in self._scratches:  # an earlier attempt's, which could not be removed
                raise CannotStart(NOT_EXECUTABLE, "its scratch directory cannot be made: one is there") from None
            return path.encode()
        except OSError as error:
            raise_shortage(error)
            raise CannotStart(NOT_EXECUTABLE, f"its scratch directory cannot be made: {error.strerror}") from None
        os.chown(path, account.uid, account.gid)
        self._scratches[key] = account
        return path.encode()

    def said(self, pid: int) -> tuple[int, str] | None:
        """Why this process, which has ended, never was its command: exit code and reason; None if it was."""
        return self.words.of(pid)

    def release(self, key: str) -> None:
        """Nothing of the attempt is left: its uid may be another's."""
        self._accounts.pop(key, None)
        self._shares.close(key)
        account = self._scratches.pop(key, None)
        if account is None:
            self._guests.give_back(key)
            return
        path = f"{self.scratch}/{key}"
        self.errands.sweep(path, account, lambda: self._swept(key, path))

    def _swept(self, key: str, path: str) -> None:
        try:
            os.rmdir(path)  # noqa: PTH106 -- as above
        except OSError as error:
            say(f"{path} stays: {error.strerror}")  # and with it the uid of a guest, which would be the next one's
            return
        self._guests.give_back(key)


def _environment(
    given: dict[bytes, bytes], request: SpawnRequest, account: LauncherAccount, home: str
) -> dict[bytes, bytes]:
    """What a task is told: all that was captured if it runs as who submitted it, else what it needs, and what its submitter has
    named."""
    own = {b"HOME": os.fsencode(home), b"USER": account.name.encode(), b"LOGNAME": account.name.encode()}
    if not account.is_guest:
        own[b"SHELL"] = os.fsencode(account.shell)
    if not account.is_guest and account.name == request.user:
        return {**own, **given}
    names = {*_ALWAYS, *(request.kept or ())[:NAMES_KEPT_MAX]}
    kept = {name: value for name, value in given.items() if name in names or name.startswith(b"PEERLOAD_")}
    temporary = {b"TMPDIR": os.fsencode(home)} if account.is_guest else {}
    return {b"PATH": PATH_DEFAULT, b"LANG": b"C.UTF-8", **own, **temporary, **kept}


def _is_foreign(request: SpawnRequest | UserRequest) -> bool:
    """Whether it is a task of another node, or of another node's user, who has submitted it here."""
    return request.home != request.node or (request.uid < 0 and ":" in request.user)


def _share(request: UserRequest) -> str:
    """Whose errands count together: those of a user of this node, or of all that another node says are its users."""
    if _is_foreign(request):
        return (request.user.partition(":")[0] if request.home == request.node else request.home) + ":"
    return request.user


def _without_code(environment: dict[bytes, bytes], home: str) -> dict[bytes, bytes]:
    """Without the variables that have a program run something else than itself: else any is all."""
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(LOADED_FROM) and name not in LOADED_FROM_ONE
    }
    return {**kept, b"PATH": PATH_DEFAULT, b"HOME": os.fsencode(home)}


def prepared(directory: str, sockets: str, user: str, files: PolicyFiles) -> System:
    """The `System` of a launcher in these directories, made if absent, for the agent that runs as ``user``. Raises PolicyError,
    ProcessLookupError, OSError: somebody else could write there, there is no such user, …"""
    ids = agent_ids(user)
    for path, mode in ((directory, 0o711), (sockets, 0o755)):
        os.makedirs(path, mode=mode, exist_ok=True)  # noqa: PTH103 -- as above
        check_own(path)
        os.chmod(path, mode)  # noqa: PTH101 -- as above
    return System(directory, sockets, ids, files)


def main() -> None:
    """``[--directory DIR] [--sockets DIR] [--agent-user NAME] [--config FILE] [--config-directory DIR] [--units KIND]
    [--memory KIND]``: run the launcher of a machine, as root, until it is told to stop."""
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    if len(sys.argv) % 2 == 0 or flags.keys() - FLAGS.keys():
        sys.exit(f"usage: launcher --system {' '.join(f'[{flag} …]' for flag in FLAGS)}")
    if os.getuid() != 0 or os.geteuid() != 0:
        sys.exit("the launcher of all users runs as root")
    given = {**FLAGS, **flags}
    directory = os.path.abspath(given["--directory"])  # noqa: PTH100 -- as above
    files = PolicyFiles(given["--config"], given["--config-directory"])
    os.umask(0o022)
    os.setgroups(())
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, DESCRIPTORS_MAX), hard))
    try:
        system = prepared(directory, os.path.abspath(given["--sockets"]), given["--agent-user"], files)  # noqa: PTH100 -- as above
    except (PolicyError, OSError) as error:
        sys.exit(f"the launcher does not start: {error}")
    launcher = locked(directory, given["--units"], given["--memory"], system)
    ignore_signals()
    launcher.open()
    launcher.run()
