"""The rules for the settings about users. They are shared by the check of configuration files, by the agent, and by the
launcher that serves all users. The imports are few."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

GUEST = "guest"
"""Each attempt runs as a uid of its own, without home directory and name."""
SAME_NAME = "same-name"
"""A task runs as the account with the same name here."""
USER_UID_MIN = 1000
"""Uids below are system accounts."""
UID_MAX = (1 << 32) - 2
USERS_MAX = 4096
PROGRAMS_MAX = 1024
PATH_CHARS_MAX = 4096
_ACCOUNT = re.compile(r"[^\x00-\x20/:,\x7f-\x9f]{1,64}\Z")
_USER_OF = re.compile(r"[a-z0-9-]{1,40}:[^\x00-\x20/:,\x7f-\x9f]{1,64}\Z")


def objection(name: str, value: object) -> str:
    """Reason why the value of a setting is invalid; "" if it is valid, or no setting about users."""
    judge = _CHECKS.get(name)
    return "" if judge is None else judge(value)


def _whether(value: object) -> str:
    return "" if type(value) is bool else "true or false is wanted"


def _number(least: int, most: int) -> Callable[[object], str]:
    def judge(value: object) -> str:
        fits = type(value) is int and least <= value <= most
        return "" if fits else f"a whole number of {least} to {most} is wanted"

    return judge


def _account(value: object) -> str:
    fits = isinstance(value, str) and _ACCOUNT.match(value)
    return "" if fits else "the name of an account (no space, / : or comma, at most 64 characters) is wanted"


def _users(value: object) -> str:
    if not isinstance(value, dict):
        return "" if value in (GUEST, SAME_NAME) else f"{GUEST!r}, {SAME_NAME!r} or a table of users is wanted"
    if len(value) > USERS_MAX:
        return f"at most {USERS_MAX} users are wanted"
    for user, account in value.items():
        if not isinstance(user, str) or not _USER_OF.match(user):
            return f"{user!r} is not a user of a node, such as ws1:alice"
        if why := _account(account):
            return f"{account!r} cannot be whom {user} is: {why}"
    return ""


def _programs(value: object) -> str:
    if not isinstance(value, list | tuple) or len(value) > PROGRAMS_MAX:
        return f"a list of at most {PROGRAMS_MAX} programs is wanted"
    for one in value:
        if not isinstance(one, str) or not one.startswith("/") or "\0" in one or len(one) > PATH_CHARS_MAX:
            return f"{one!r} is not an absolute path"
    return ""


def _uids(value: object) -> str:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(uid) is int for uid in value):  # noqa: PLR2004 -- from, to
        return "the least uid and the greatest are wanted"
    least, most = value
    fits = USER_UID_MIN <= least <= most <= UID_MAX
    return (
        "" if fits else f"the least is {USER_UID_MIN}, and the greatest no less than that: {least} to {most} cannot be"
    )


_CHECKS: dict[str, Callable[[object], str]] = {
    "accept_foreign": _whether,
    "admin_group": _account,
    "allow_root_tasks": _whether,
    "exec_allow": _programs,
    "group": _account,
    "guest_bytes_max": _number(1 << 20, 1 << 50),
    "guest_memory_bytes_max": _number(0, 1 << 50),
    "guest_network": _whether,
    "guest_uids": _uids,
    "map_administrators": _whether,
    "task_processes_max": _number(1, 1 << 22),
    "users": _users,
}
SETTINGS = tuple(_CHECKS)
"""The names of all these settings."""
