"""The account that a task runs as, where the launcher serves all users: a function of the node's own policy.

`PolicyFiles` reads that policy from root's configuration files; it refuses files that others could have written. No policy
can make a task run as uid 0 or as a system account. Accounts are looked up by name or by number; after that only numbers
are used: a name made of digits is a name. Used by the launcher, and by the agent to predict the launcher's decision; the
imports are few.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import time

from peerload.launcher.process import SpawnRefused
from peerload.launcher.protocol import Message
from peerload.launcher.record_log import log_line
from peerload.launcher.system.settings_rules import GUEST, SAME_NAME, SETTINGS, UID_MAX, USER_UID_MIN, objection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


GUEST_UIDS = (61_184, 65_519)
"""The range that systemd reserves for transient users."""
NOBODY_UIDS = range(65_520, 65_536)
"""The kernel's nobody, and the 16-bit "no change"."""
GROUPS_MAX = 1024
PROCESSES_MAX = 512
"""Default bound on processes and threads of one task at a time."""
GUEST_BYTES_MAX = 1 << 30
"""Default bound on temporary files of a guest."""
GUEST_MEMORY_BYTES_MIN = 64 << 20
"""Hardly any program can start with less."""
DYNAMIC_UIDS = "/run/systemd/dynamic-uid"
"""Directory in which systemd notes the uids that it has assigned."""
GROUP = "peerload"
"""Default group whose members may use the agent."""
ADMIN_GROUP = "peerload-admin"
"""Default group of administrators."""
DEFAULTS: dict[str, Any] = {
    "allow_root_tasks": False,
    "accept_foreign": True,
    "exec_allow": (),
    "guest_uids": GUEST_UIDS,
    "task_processes_max": PROCESSES_MAX,
    "guest_bytes_max": GUEST_BYTES_MAX,
    "guest_memory_bytes_max": 0,
    "guest_network": True,
    "group": GROUP,
    "admin_group": ADMIN_GROUP,
    "map_administrators": False,
}
Entry = tuple[str, int, int, tuple[int, ...], str, str, bool, bool]
"""An account: name, uid, gid, groups, home directory, shell, whether it may use the agent, whether it is an
administrator."""


class UsersPolicy:
    """The settings of the same names; see docs/settings.md. users: GUEST, SAME_NAME, or a map of ``node:user`` to
    account names."""

    __slots__ = SETTINGS

    users: str | Mapping[str, str]
    allow_root_tasks: bool
    accept_foreign: bool
    exec_allow: tuple[str, ...]
    guest_uids: tuple[int, int]
    task_processes_max: int
    guest_bytes_max: int
    guest_memory_bytes_max: int
    guest_network: bool
    group: str
    admin_group: str
    map_administrators: bool

    def __init__(self, users: str | Mapping[str, str] = GUEST, **others: Any) -> None:  # noqa: ANN401 -- as declared above
        """Raises ValueError for an invalid setting; it names the setting."""
        for name, value in {**DEFAULTS, "users": users, **others}.items():
            if why := objection(name, value):
                raise ValueError(f"{name}: {why}")
            setattr(self, name, tuple(value) if isinstance(value, list) else value)

    def memory_bytes_max(self, asked_bytes: int, cpus: float) -> int:
        """Memory limit of a guest: the requested bytes (0 = none), else the policy's limit, else a share of the machine's
        memory by its processors."""
        if asked_bytes or self.guest_memory_bytes_max:
            return asked_bytes or self.guest_memory_bytes_max
        count = os.cpu_count() or 1
        share = min(max(cpus, 1.0) / count, 1.0)
        return max(int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * share), GUEST_MEMORY_BYTES_MIN)

    def name_for(self, node: str, home: str, user: str, uid: int) -> str:
        """The name of the account that a task of ``user`` at the node ``home`` runs as on ``node``, "" = a guest. Raises
        SpawnRefused.

        If another node submits here for one of its users, this node's own agent reports it with a ``uid`` of -1, and
        ``user`` is ``node:user``, which is not a valid account name. Claims of a node about users of a third node
        are ignored.
        """
        if home == node and uid < 0 and ":" in user:
            home, _, user = user.partition(":")
        if home == node:
            if not user:
                raise SpawnRefused("the user of the task is unknown")
            return user
        if not self.accept_foreign:
            raise SpawnRefused(f"{node} runs no tasks of other nodes")
        if self.users == GUEST:
            return ""
        if self.users == SAME_NAME:
            found = user
        else:
            assert not isinstance(self.users, str)
            found = self.users.get(f"{home}:{user}", "") if user and ":" not in user else ""
        if not found:
            raise SpawnRefused(f"{node} runs no tasks of {user or 'anybody'} at {home}")
        return found

    def maps_to(self, name: str) -> bool:
        """True if users of other nodes may be mapped to this account, and so submit as it."""
        return self.users == SAME_NAME or (not isinstance(self.users, str) and name in self.users.values())


class LauncherAccount(Message):
    """The account of a process: numbers, plus ``name`` and ``home`` for its environment. is_guest: it has a uid of its
    own."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str = "/bin/sh"
    is_guest: bool = False


def look_up(name: str, group: str, admin_group: str) -> Entry | None:
    """The account of this name; None if there is none. May block."""
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError, UnicodeError):  # ValueError: a NUL byte in it
        return None
    if entry.pw_name != name:
        return None
    groups = tuple(dict.fromkeys((entry.pw_gid, *os.getgrouplist(name, entry.pw_gid))))
    is_served, is_administrator = _is_in(groups, group), _is_in(groups, admin_group)
    rest = entry.pw_dir, entry.pw_shell, is_served, is_administrator
    return name, entry.pw_uid, entry.pw_gid, groups[:GROUPS_MAX], *rest


def _is_in(groups: tuple[int, ...], group: str) -> bool:
    try:
        return grp.getgrnam(group).gr_gid in groups
    except (KeyError, ValueError, UnicodeError):
        return False


def account_named(
    name: str,
    policy: UsersPolicy,
    *,
    uid: int = -1,
    is_own: bool = False,
    look: Callable[[str, str, str], Entry | None] = look_up,
) -> LauncherAccount:
    """The account of this name, if tasks may run as it. uid: the submitter's uid, -1 = unknown. is_own: a task of this
    node. look: queries the account database. Raises SpawnRefused, and the errors of ``look``."""
    entry = look(name, policy.group, policy.admin_group)
    if entry is None:
        raise SpawnRefused(f"user {name} does not exist here")
    _, number, gid, groups, home, shell, is_served, is_administrator = entry
    if uid not in {-1, number}:
        raise SpawnRefused(f"{name} is another account now: uid {number} instead of {uid}")
    check_uid(number, policy, is_own=is_own and uid >= 0)
    if gid == 0 and number != 0:
        raise SpawnRefused(f"{name} is in the group of root")
    if is_administrator and not is_own and not policy.map_administrators:
        raise SpawnRefused(
            f"{name} is in the group {policy.admin_group}: no user of another node becomes an administrator"
        )
    if is_own and number != 0 and not (is_served or is_administrator or policy.maps_to(name)):
        raise SpawnRefused(
            f"{name} is not in the group {policy.group}"
        )  # even if the agent claims that it has submitted the task
    if number != 0:
        groups = tuple(one for one in groups if one != 0)
    return LauncherAccount(name, number, gid, groups, home, shell or "/bin/sh")


def check_uid(uid: int, policy: UsersPolicy, *, is_own: bool) -> None:
    """Raises SpawnRefused if no task runs as this uid."""
    least, most = policy.guest_uids
    if uid == 0:
        if not (policy.allow_root_tasks and is_own):
            raise SpawnRefused("no task runs as root here")
    elif uid < USER_UID_MIN:
        raise SpawnRefused(f"uid {uid} is a system account")
    elif uid in NOBODY_UIDS or uid > UID_MAX or least <= uid <= most:
        raise SpawnRefused(f"uid {uid} is reserved")


class GuestIds:
    """Assigns uids (and gids) to guests: each belongs to one attempt until its processes and files are gone; the most
    recently released is reused last."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}
        self._last = -1

    def take(self, key: str, bounds: tuple[int, int], look: Callable[[int], bool] | None = None) -> LauncherAccount:
        """Assign a uid to this attempt. look: True if a number is unassigned, default `is_unassigned`. Raises
        SpawnRefused if none is free, and the errors of ``look``; nothing is assigned then."""
        look = look or is_unassigned
        least, most = bounds
        count = most - least + 1
        if self._last < 0:  # an earlier launcher may have used the first ones a moment ago
            self._last = least + int.from_bytes(os.urandom(4), "big") % count
        taken = set(self._taken.values())
        for step in range(1, count + 1):
            uid = least + (self._last - least + step) % count
            if uid not in taken and look(uid):
                self._last = self._taken[key] = uid
                return LauncherAccount(f"guest-{uid}", uid, uid, (uid,), "/tmp", is_guest=True)  # noqa: S108 -- its own
        raise SpawnRefused("all uids for guests are taken")

    def hold(self, key: str, uid: int) -> None:
        """Record that an earlier launcher has assigned this uid to an attempt."""
        self._taken[key] = uid

    def give_back(self, key: str) -> None:
        self._taken.pop(key, None)


def is_unassigned(uid: int, *, asks: bool = True) -> bool:
    """True if no account, group or service has this number. asks: also query the account database, which may block."""
    if asks:
        try:
            pwd.getpwuid(uid)
        except KeyError:
            pass
        else:
            return False
        try:
            grp.getgrgid(uid)
        except KeyError:
            pass
        else:
            return False
    return not os.path.lexists(f"{DYNAMIC_UIDS}/{uid}")


def policy_of(settings: Mapping[str, Any]) -> UsersPolicy:
    """The policy in the settings of a configuration file, among settings of other parts. Raises ValueError, which names
    the setting."""
    return UsersPolicy(**{name: value for name, value in settings.items() if name in SETTINGS})


FILE = "/etc/peerload/peerload.toml"
DIRECTORY = "/etc/peerload/conf.d"
CHECK_EVERY_S = 1.0
"""Minimum interval of checks for changed files, which happen with the next task."""
BYTES_MAX = 1 << 20


class PolicyError(Exception):
    """A file is not owned by root, or its content is invalid. The message names the file."""


class PolicyFiles:
    """The policy in ``file`` and all ``*.toml`` of ``directory``. Later files override; all files may be absent."""

    def __init__(self, file: str = FILE, directory: str = DIRECTORY) -> None:
        self._file = file
        self._directory = directory
        self._seen: Any = None
        self._is_missing = False
        self._checked_s = 0.0
        self._policy = UsersPolicy()

    def read(self) -> UsersPolicy:
        """Read the policy. Raises PolicyError."""
        self._seen = self._file_stats()
        settings: dict[str, Any] = {}
        for path, *_ in self._seen:
            settings |= _settings(path)
        try:
            self._policy = policy_of(settings)
        except (ValueError, TypeError) as error:
            raise PolicyError(f"{self._file}: {error}") from None
        self._checked_s = time.monotonic()
        return self._policy

    def current(self) -> UsersPolicy:
        """The policy in force, read again if a file has changed. Invalid files are ignored, and logged once."""
        if time.monotonic() >= self._checked_s + CHECK_EVERY_S:
            self._checked_s = time.monotonic()
            found = self._file_stats()
            is_missing = not {path for path, *_ in self._seen or ()} <= {path for path, *_ in found}
            was_missing, self._is_missing = self._is_missing, is_missing
            if (
                is_missing and not was_missing
            ):  # an editor may be replacing the file: its rules stay in force until then
                return self._policy
            if found != self._seen:
                try:
                    self.read()
                    log_line("policy about users reloaded")
                except PolicyError as error:
                    log_line(f"policy about users not reloaded: error={error}")
        return self._policy

    def _file_stats(self) -> list[tuple[str, int, int, int]]:
        """The files, each with values that differ after a change."""
        try:
            names = sorted(name for name in os.listdir(self._directory) if name.endswith(".toml"))
        except OSError:
            names = []
        found = []
        for path in (self._file, *(f"{self._directory}/{name}" for name in names)):
            try:
                status = os.stat(path)
            except OSError:
                continue
            found.append((path, status.st_ino, status.st_mtime_ns, status.st_size))
        return found


def check_root_owned(path: str) -> None:
    """Raises PolicyError if any user but root could write to this file or directory, or replace it."""
    at = os.path.realpath(path)
    while True:
        status = os.stat(at)
        is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_uid != 0 or (status.st_mode & 0o022 and not is_sticky):
            raise PolicyError(f"{path} is refused: users other than root can write to {at}")
        if at == "/":
            return
        at = os.path.dirname(at)


def _settings(path: str) -> dict[str, Any]:
    import tomllib  # noqa: PLC0415 -- it costs memory, and is needed once

    try:
        check_root_owned(path)
        with open(path, "rb") as file:
            return tomllib.loads(file.read(BYTES_MAX).decode())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path}: {error}") from None
