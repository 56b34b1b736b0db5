"""The environment variables that travel with a task.

All variables of the submitter travel, except those of the login session and names that look like secrets. `--export` names
variables that travel anyway; with `--export none` only named ones do.
"""

from __future__ import annotations

import os

import msgpack

from peerload.model.errors import BadRequest, UsageError
from peerload.model.text import printable
from peerload.text.format import size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ENVIRONMENT_BYTES_MAX = 256 << 10
"""The bound of peerload.model.task, which is not imported: that would slow down every submit."""
LARGEST_NAMED = 3
NAMED_MAX = 1024
"""The bound of peerload.model.task."""

_LOGIN_NAMES = frozenset(
    b"COLORTERM COLUMNS DESKTOP_SESSION DISPLAY GPG_AGENT_INFO GPG_TTY INVOCATION_ID JOURNAL_STREAM KRB5CCNAME LINES"
    b" LISTEN_FDNAMES LISTEN_FDS LISTEN_PID MAIL MAINPID MANAGERPID NOTIFY_SOCKET OLDPWD SESSION_MANAGER SHLVL"
    b" SSH_ASKPASS STY SUDO_COMMAND SUDO_GID SUDO_UID SUDO_USER SYSTEMD_EXEC_PID TERM_PROGRAM TERM_PROGRAM_VERSION"
    b" TMUX TMUX_PANE VTE_VERSION WATCHDOG_PID WATCHDOG_USEC WAYLAND_DISPLAY WINDOWID WINDOWPATH XAUTHORITY"
    b" XDG_ACTIVATION_TOKEN XDG_RUNTIME_DIR XDG_SEAT XDG_SEAT_PATH XDG_SESSION_CLASS XDG_SESSION_DESKTOP"
    b" XDG_SESSION_ID XDG_SESSION_PATH XDG_SESSION_TYPE XDG_VTNR _".split()
)
_LOGIN_PREFIXES = (b"DBUS_", b"SSH_", b"PEERLOAD_", b"GNOME_", b"KDE_SESSION", b"GDM", b"VSCODE_", b"BASH_FUNC_")
_SECRET_PARTS = (b"TOKEN", b"SECRET", b"PASSWORD")


def captured(
    environment: Mapping[bytes, bytes], export: Sequence[str], extra: Sequence[str], *, moved: bool
) -> tuple[dict[bytes, bytes], list[str]]:
    """The variables to send, and the names left out because they look like secrets.

    export: the words of `--export`, in which `none` stands for an empty start; extra: K=V of `--env`;
    moved: the task runs in another directory, so that PWD would be wrong. Raises UsageError for a word that fits
    neither form, BadRequest for a name that is not set.
    """
    names = [os.fsencode(name) for words in export for name in words.split(",") if name]
    nothing = b"none" in names
    kept: dict[bytes, bytes] = {}
    secret: list[str] = []
    for name, value in () if nothing else environment.items():
        if _belongs_to_login(name) or (moved and name == b"PWD"):
            continue
        if looks_secret(name):
            secret.append(os.fsdecode(name))
        else:
            kept[name] = value
    for name in names:
        if name == b"none":
            continue
        if b"=" in name:
            raise UsageError(
                f"--export takes names, not {os.fsdecode(name)!r}", hint="to give a value:  --env NAME=VALUE"
            )
        if name not in environment:
            raise BadRequest(
                f"--export {os.fsdecode(name)}", why="it is not set here", hint="to give a value:  --env NAME=VALUE"
            )
        kept[name] = environment[name]
    for word in extra:
        name, equals, value = os.fsencode(word).partition(b"=")
        if not name or not equals:
            raise UsageError(
                f"--env takes NAME=VALUE, not {word!r}", hint=f"to send what is set here:  --export {word}"
            )
        kept[name] = value
    return kept, sorted(set(secret) - {os.fsdecode(name) for name in kept})


def named(export: Sequence[str], extra: Sequence[str]) -> list[bytes]:
    """The names in `--export` and `--env`: they travel even where the task runs as another user."""
    names = [name for words in export for name in words.split(",") if name and name != "none"]
    names += [word.partition("=")[0] for word in extra]
    return [os.fsencode(name) for name in dict.fromkeys(names)][:NAMED_MAX]


def packed(environment: Mapping[bytes, bytes]) -> bytes:
    """The MessagePack map that travels. Raises BadRequest naming the largest variables if it is too large."""
    raw: bytes = msgpack.packb(dict(environment))
    if len(raw) <= ENVIRONMENT_BYTES_MAX:
        return raw
    largest = sorted(environment, key=lambda name: len(environment[name]), reverse=True)[:LARGEST_NAMED]
    named = ", ".join(f"{printable(name)} ({size_text(len(environment[name]))})" for name in largest)
    raise BadRequest(
        f"the environment is {size_text(len(raw))}",
        why=f"at most {size_text(ENVIRONMENT_BYTES_MAX)} travel with a task; the largest: {named}",
        hint="unset them here, or send only what is needed:  --export none,PATH,HOME",
    )


def looks_secret(name: bytes) -> bool:
    """``*TOKEN* *SECRET* *PASSWORD* *_KEY AWS_*``, in whatever case, less the names of files with public certificates."""
    upper = name.upper()
    if upper.endswith(b"_CA_BUNDLE"):
        return False
    return upper.endswith(b"_KEY") or upper.startswith(b"AWS_") or any(part in upper for part in _SECRET_PARTS)


def _belongs_to_login(name: bytes) -> bool:
    return name in _LOGIN_NAMES or name.startswith(_LOGIN_PREFIXES)
