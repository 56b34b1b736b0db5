"""The accounts of this machine: the name and the groups of a uid, as the account database has them.

Asked by number alone, since that is what the operating system vouches for. The groups are those that the database gives
the account now, not those that a process has: a user who was taken out of a group is out of it here within KEPT_S,
whatever is still running, and one who was put in need not log in anew.
"""

from __future__ import annotations

import grp
import os
import pwd
import time
from typing import NamedTuple

from peerload.model.bounded import BoundedDict

KEPT_S = 10.0
"""An answer of the database counts for so long: it may be far away, and the loop waits for it."""
ACCOUNTS_KEPT_MAX = 1024
SYSTEM_UIDS_BELOW = 1000
"""Accounts below are those of the system and its services, not of people."""


class Account(NamedTuple):
    """One account. name: "" where the database has none for this uid; groups: their numbers, the primary one too."""

    uid: int
    name: str
    groups: frozenset[int]


class Accounts:
    """Looks accounts up; for one thread alone."""

    def __init__(self) -> None:
        self._kept: BoundedDict[int, tuple[float, Account]] = BoundedDict(ACCOUNTS_KEPT_MAX)

    def of(self, uid: int) -> Account:
        """The account of a uid."""
        now_s = time.monotonic()
        kept = self._kept.get(uid)
        if kept is not None and now_s - kept[0] < KEPT_S:
            return kept[1]
        account = _looked_up(uid)
        self._kept[uid] = now_s, account
        return account

    def named(self, name: str) -> Account | None:
        """The account of this very name; None if there is none."""
        try:
            found = pwd.getpwnam(name)
        except (KeyError, ValueError, UnicodeError):  # ValueError: a NUL byte in it
            return None
        account = self.of(found.pw_uid)
        return account if account.name == name == found.pw_name else None


def group_number(name: str) -> int | None:
    """The number of a group; None if there is none of this name."""
    try:
        return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError, UnicodeError):
        return None


def members(group: str) -> frozenset[str]:
    """The members of a group, as the database lists them."""
    try:
        return frozenset(grp.getgrnam(group).gr_mem)
    except (KeyError, ValueError, UnicodeError):
        return frozenset()


def _looked_up(uid: int) -> Account:
    try:
        found = pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        return Account(uid, "", frozenset())
    return Account(uid, found.pw_name, frozenset(os.getgrouplist(found.pw_name, found.pw_gid)))
