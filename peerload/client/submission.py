# ruff: noqa: PTH109, PTH112, PTH118, PTH119, PTH123
# os.path, since directories are bytes, and it is quick.
"""Data sent along with a submission: environment variables, the lock of a software environment, and files.

All variables of the submitter travel, except those of the login session and names that look like secrets. `--export` names
variables that travel anyway; with `--export none` only named ones do.

The user's own process finds the files and sends them to the agent. `prepare` changes the spec and the terms of a `submit` request,
`send` uploads the files that the agent lacks, and `freeze` does both when the agent requests a snapshot of the working directory
(`snapshot = "auto"` of `[files]` in its settings).
"""

from __future__ import annotations

import errno
import os

import msgpack

from peerload.client.connection import AgentConnection
from peerload.model.errors import BadRequest, StagingFailed, UsageError
from peerload.model.text import printable
from peerload.text.format import size_text

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from peerload.files.tree import Found


ENVIRONMENT_BYTES_MAX = 256 << 10
"""The limit of peerload.model.task, which is not imported, since that would slow down every submit."""
LARGEST_NAMED = 3
NAMED_MAX = 1024
"""The limit of peerload.model.task."""

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


def captured_variables(
    environment: Mapping[bytes, bytes], export: Sequence[str], extra: Sequence[str], *, moved: bool
) -> tuple[dict[bytes, bytes], list[str]]:
    """The variables to send, and the names left out because they look like secrets.

    export: the words of `--export`, where `none` starts from an empty environment; extra: K=V of `--env`;
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
                f"--env takes NAME=VALUE, not {word!r}", hint=f"to send the current value:  --export {word}"
            )
        kept[name] = value
    return kept, sorted(set(secret) - {os.fsdecode(name) for name in kept})


def named_variables(export: Sequence[str], extra: Sequence[str]) -> list[bytes]:
    """The names in `--export` and `--env`: they are sent even if the task runs as another user."""
    names = [name for words in export for name in words.split(",") if name and name != "none"]
    names += [word.partition("=")[0] for word in extra]
    return [os.fsencode(name) for name in dict.fromkeys(names)][:NAMED_MAX]


def packed_variables(environment: Mapping[bytes, bytes]) -> bytes:
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
    """True for ``*TOKEN* *SECRET* *PASSWORD* *_KEY AWS_*`` in any case, except names of files with public certificates."""
    upper = name.upper()
    if upper.endswith(b"_CA_BUNDLE"):
        return False
    return upper.endswith(b"_KEY") or upper.startswith(b"AWS_") or any(part in upper for part in _SECRET_PARTS)


def _belongs_to_login(name: bytes) -> bool:
    return name in _LOGIN_NAMES or name.startswith(_LOGIN_PREFIXES)


SCRATCH = b"-"
LOCK = "lock"
"""The key of a lock in a spec, until `send` has uploaded the lock to the agent."""
SCRIPT_BYTES_MAX = 1 << 20
AUTO_BYTES_MAX, AUTO_FILES_MAX = 1 << 30, 10_000
"""A larger directory is sent only if the user requests it."""


def add_lock(spec: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Run a task in the environment of this lock file. Raises BadRequest."""
    from peerload.environments import locks  # noqa: PLC0415 -- most submissions have none

    spec[LOCK] = locks.read(path)
    spec["placement"]["builder"] = spec[LOCK].kind


def add_script(spec: dict[str, Any]) -> None:
    """Run a script with inline metadata (PEP 723) in its environment, as `uv run` does. Raises BadRequest."""
    script = spec["argv"][0]
    if LOCK in spec or not script.endswith(b".py"):
        return
    path = os.path.join(os.getcwdb() if spec["directory"] == SCRATCH else spec["directory"], script)
    try:
        with open(path, "rb") as file:
            content = file.read(SCRIPT_BYTES_MAX)
    except OSError:
        return  # the script may exist on another node
    if b"# /// script" in content:
        from peerload.environments import locks  # noqa: PLC0415 -- as above

        lock = locks.in_script(content, os.fsdecode(os.path.basename(script)))
        if lock is not None:
            spec[LOCK] = lock
            spec["placement"]["builder"] = lock.kind
            spec["argv"] = [b"python", *spec["argv"]]


def prepare(
    spec: dict[str, Any],
    terms: dict[str, Any],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    snapshot: bool,
    files_max: int | None = None,
) -> list[Found]:
    """Set up the task to run in a new directory, with outputs copied home → the files to send; [] without files. files_max: limit
    on the files of a snapshot. Raises StagingFailed."""
    if not (inputs or outputs or snapshot):
        return []
    from peerload.files import snapshot as reading  # noqa: PLC0415 -- most submissions have none

    home = os.getcwdb() if spec["directory"] == SCRATCH else spec["directory"]
    globs = [_relative(glob, home, is_glob=True) for glob in outputs]
    paths = [_relative(path, home) for path in inputs]
    try:
        limit = {} if files_max is None else {"files_max": files_max}
        found = reading.look(home, paths, everything=snapshot, **limit)
        for glob in globs:
            _check_place(home, glob)
    except OSError as error:
        raise StagingFailed(f"{printable(home)} cannot be read", why=str(error.strerror)) from None
    terms["files_home"], spec["directory"] = home, SCRATCH
    variables = msgpack.unpackb(spec["environment"])
    if variables.pop(b"PWD", None) is not None:
        spec["environment"] = msgpack.packb(variables)
    spec["files"] = {"manifest": bytes(32), "outputs": globs, "returns_changes": snapshot and not globs}
    return found


def _check_place(home: bytes, glob: str) -> None:
    """Check before submission that outputs can be written where a glob points. Raises StagingFailed, OSError."""
    from peerload.files import tree  # noqa: PLC0415 -- most submissions have none

    is_directory = os.path.isdir(os.path.join(home, os.fsencode(glob)))
    place = tree.literal_directory(f"{glob}/" if is_directory else glob)
    base = os.open(home, tree.DIRECTORY | os.O_CLOEXEC)
    try:
        while not os.access(place or ".", os.F_OK, dir_fd=base, follow_symlinks=False):
            place = place.rpartition("/")[0]  # missing directories will be created
        fd = tree.open_beneath(base, place or ".", tree.DIRECTORY)
        why = "" if os.access(".", os.W_OK, dir_fd=fd) else "it cannot be written to"
        os.close(fd)
    except OSError as error:
        why = "its path contains a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
    finally:
        os.close(base)
    if why:
        where = printable(place or home)
        raise StagingFailed(
            f"outputs cannot be written to {where}", why=why, hint="to start from another directory:  -d DIR"
        )


def _relative(path: str, home: bytes, *, is_glob: bool = False) -> str:
    """The path relative to the working directory. Raises StagingFailed."""
    from peerload.files.manifest import objection  # noqa: PLC0415 -- most submissions have none

    if not path:
        raise StagingFailed("an empty path cannot be staged", hint="the whole directory:  .")
    inside = os.path.relpath(os.path.join(os.fsdecode(home), path), os.fsdecode(home))
    if inside == ".." or inside.startswith("../"):
        raise StagingFailed(
            f"{printable(path)} cannot be staged",
            why=f"it is outside of {printable(home)}",
            hint="name another directory to start from:  -d DIR",
        )
    if why := objection(inside) if inside != "." else "":
        what = f"the output {printable(path)} cannot be staged" if is_glob else f"{printable(path)} cannot be staged"
        raise StagingFailed(what, why=why, hint="give it another name")
    if inside == ".":
        return "**" if is_glob else ""
    return inside + ("/" if is_glob and path.endswith("/") else "")


def send(
    client: AgentConnection,
    spec: dict[str, Any],
    terms: dict[str, Any],
    found: Sequence[Found],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Upload the files and the lock to the agent and set their ids in the spec. progress: called with the number of bytes sent.
    Raises PeerloadError."""
    if hasattr(spec.get(LOCK), "put"):
        spec[LOCK] = spec[LOCK].put(lambda **fields: client.call("files", **fields))
    if "files" not in spec:
        return
    from peerload.files import snapshot as reading  # noqa: PLC0415 -- as above

    try:
        taken = reading.take(terms["files_home"], found, lambda **fields: client.call("files", **fields), progress)
    except OSError as error:
        where = printable(error.filename or terms["files_home"])
        raise StagingFailed(f"{where} cannot be read", why=str(error.strerror)) from None
    spec["files"] |= {"manifest": taken.id, "size_bytes": taken.manifest.size_bytes, "count": len(taken.manifest.files)}


def size_of(found: Sequence[Found]) -> int:
    return sum(item.status.st_size for item in found if item.status is not None and not item.target)


def may_freeze(spec: dict[str, Any]) -> bool:
    """True if the agent may request a snapshot of the working directory."""
    return "files" not in spec and spec["directory"] != SCRATCH


def freeze(
    client: AgentConnection,
    spec: dict[str, Any],
    terms: dict[str, Any],
    progress: Callable[[int], None] = lambda _: None,
) -> str:
    """Send the working directory along → "" if it was sent, else the reason why not. Raises PeerloadError."""
    before = dict(spec), dict(terms)
    try:
        found = prepare(spec, terms, (), (), snapshot=True, files_max=AUTO_FILES_MAX)
        size = size_of(found)
        if size <= AUTO_BYTES_MAX:
            send(client, spec, terms, found, progress)
            return ""
        why = f"its files have {size_text(size)}; at most {size_text(AUTO_BYTES_MAX)} are sent without --snapshot"
    except StagingFailed as error:
        why = str(error)
    for now, was in zip((spec, terms), before, strict=True):
        now.clear()
        now.update(was)
    return why


# -- for Python programs ----------------------------------------------------------------------------------------------


def listed(given: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None) -> list[str]:
    """Convert paths or texts to a list of texts; a single one becomes a list of one."""
    if given is None or isinstance(given, (str, os.PathLike)):
        return [os.fspath(given)] if given else []
    return [os.fspath(one) for one in given]


def sender(fields: dict[str, Any], wanted: Mapping[str, Any]) -> Callable[[str], None] | None:
    """A function that sends the files of a submission to the agent at a socket; None without files. Raises StagingFailed."""
    spec, terms = fields["spec"], fields.get("terms", {})
    if wanted.get("env") is not None:
        add_lock(spec, wanted["env"])
    else:
        add_script(spec)
    inputs, outputs = listed(wanted.get("in_")), listed(wanted.get("out"))
    found = prepare(spec, terms, inputs, outputs, snapshot=wanted.get("snapshot", False))
    fields |= {"freezes": True} if may_freeze(spec) and wanted.get("snapshot") is None else {}
    if "files" not in spec and LOCK not in spec:
        return None
    fields["terms"] = terms

    def bring(path: str) -> None:
        with AgentConnection(path) as client:
            send(client, spec, terms, found)

    return bring


def freeze_fields(path: str, fields: dict[str, Any]) -> None:
    """Apply `freeze` to the fields of a submission, after the agent at this socket has requested a snapshot. Raises
    PeerloadError."""
    spec, terms = dict(fields["spec"]), dict(fields.get("terms", {}))
    with AgentConnection(path) as client:
        why = freeze(client, spec, terms)
    fields["spec"], fields["terms"] = spec, terms
    fields.pop("freezes", None)
    if why:
        import warnings  # noqa: PLC0415 -- as above

        warnings.warn(f"{printable(spec['directory'])} is not sent with the task: {why}", stacklevel=2)
