# ruff: noqa: PTH100, PTH109, PTH118, PTH120, PTH123
# os.path, since pathlib would cost every command its quick start.
"""`peerload up`: start an agent for me on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import peerload
from peerload.cli.common.agent_flags import agent_options, as_words, given_settings, located, make_private
from peerload.cli.common.stale_agents import is_worked_in
from peerload.cli.verbs.down import await_end, watch
from peerload.client.connection import ANSWERS_WITHIN_S, Client, default_socket_path
from peerload.model.errors import AgentSilent, AgentUnavailable, PeerloadError
from peerload.text.format import counted, number_text, print_json, printable, say, size_text, terminal_columns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

STARTS_WITHIN_S = 60.0
"""A home with a million tasks reads for longer than ten seconds."""
SOCKET_WITHIN_S = 3.0
"""An agent that runs looks for its socket more often than that."""
LOOK_EVERY_S = 0.02
PEER_WITHIN_S = 3.0
"""So long the first peer may take to answer before it is said that there is none yet."""
REFUSED_WITHIN_S = 0.3
"""So long after it was met a peer may take to say that it knows another of this name."""
OTHER_CLUSTER = "of another cluster"
LOG_LINES_SHOWN = 10
LOG_BYTES_READ = 16 << 10
_LOOPBACK = ("127.", "[::1]")
JSON_KEYS = ("pid", "launcher_pid", "socket", "listen", "node")


def main(words: list[str]) -> int:
    """Run the verb."""
    flags = agent_options(
        "up", "Start an agent for me on this machine, in the background; no config file needed."
    ).read(words)
    settings = located(given_settings(flags))
    info = _info(settings["socket"], ANSWERS_WITHIN_S) or _running(settings)
    already = info is not None
    if info is not None and (ignored := _not_in_force(given_settings(flags), settings, info)):
        said = " ".join(f"--{key}" for key in ignored)
        sys.stderr.write(f"peerload: {said} not applied: the agent runs already\n")
        sys.stderr.write(f"  stop it first:  peerload down --socket {printable(settings['socket'])}\n")
    if info is None:
        log_start = _log_size(settings)
        info = start(settings)
        if settings.get("peer") or info.get("sought"):
            info = _joined(settings, info, log_start)
    info.setdefault("socket", settings["socket"])
    info["notices"] = [*(info.get("notices") or ()), *_shared_machine(info)]
    if flags.json:
        print_json({key: info.get(key) for key in JSON_KEYS})
    else:
        sys.stdout.write(_told(info, already=already))
    return 0


def _shared_machine(info: dict[str, Any]) -> list[str]:
    """That other agents of the cluster run on this machine."""
    if not info.get("peers"):
        return []
    from peerload.cli.verbs.nodes import ONE_MACHINE, on_one_machine

    with Client(info["socket"]) as client:
        shared = on_one_machine(client.call("nodes")["nodes"])
    return [f"{', '.join(names)}: {ONE_MACHINE}" for names in shared if info.get("node") in names]


def _running(settings: dict[str, Any]) -> dict[str, Any] | None:
    """What the agent that works in this state directory says of itself, once it has made its socket anew: the runtime
    directory may have gone when its user logged out. None if none works there, or it listens elsewhere."""
    pause, deadline = threading.Event(), time.monotonic() + SOCKET_WITHIN_S
    while is_worked_in(settings["state"]) and time.monotonic() < deadline:
        pause.wait(LOOK_EVERY_S)
        if (info := _info(settings["socket"], ANSWERS_WITHIN_S)) is not None:
            return info
    return None


def _not_in_force(given: dict[str, Any], settings: dict[str, Any], info: dict[str, Any]) -> list[str]:
    """The flags given that an agent which runs already cannot heed."""
    same_state = "state" not in given or os.path.realpath(settings["state"]) == os.path.realpath(str(info.get("state")))
    return sorted(set(given) - ({"state", "socket"} if same_state else {"socket"}))


def start(settings: dict[str, Any], program: Sequence[str] = ()) -> dict[str, Any]:
    """Start an agent in a session of its own and return what it says of itself as soon as its socket answers.
    ``program``: what takes the flags of `peerload agent`, if that is another.

    Raises PeerloadError with the last lines of its log if it ends before, or does not answer in a minute (then it is
    stopped).
    """
    make_private(settings["state"])
    make_private(os.path.dirname(settings["socket"]))
    log_path = os.path.join(settings["state"], "agent.log")
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PeerloadError(f"{log_path} cannot be written", why=error.strerror or str(error)) from None
    log_start = os.fstat(log).st_size
    command = [*(program or [*_program(), "agent"]), *as_words(settings)]
    try:
        process = subprocess.Popen(  # noqa: S603 -- our own program, with our own words
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    finally:
        os.close(log)
    pause = threading.Event()
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline:
        info = _starting(settings["socket"])
        if info is not None:
            process.returncode = 0  # it goes on without us: nothing to reap
            return info
        if process.poll() is not None:
            raise _ended(f"it ended with exit code {process.returncode}", log_path, log_start)
        pause.wait(LOOK_EVERY_S)
    process.terminate()
    process.wait()
    raise _failed(f"it did not answer within {STARTS_WITHIN_S:g} s and was stopped", log_path, log_start)


def _log_size(settings: dict[str, Any]) -> int:
    try:
        return os.path.getsize(os.path.join(settings["state"], "agent.log"))  # noqa: PTH202 -- as at the top
    except OSError:
        return 0


def _joined(settings: dict[str, Any], info: dict[str, Any], log_start: int) -> dict[str, Any]:
    """What the agent says of itself once it has met a peer that lets it stay; else, after a moment, say why it has not.
    Raises PeerloadError if it ended meanwhile: a peer knows another of its name."""
    pause = threading.Event()
    deadline = time.monotonic() + PEER_WITHIN_S
    ends = watch(info.get("pid"))
    try:
        with Client(settings["socket"]) as client:
            while not info.get("peers") and time.monotonic() < deadline:
                pause.wait(LOOK_EVERY_S)
                info = client.call("info")
            if info.get("peers"):
                pause.wait(REFUSED_WITHIN_S)
                info = client.call("info")
    except AgentUnavailable:
        if ends is not None:
            await_end(ends, "the agent")  # its last words come last
        log_path = os.path.join(settings["state"], "agent.log")
        raise _ended("it ended as soon as it met a peer", log_path, log_start) from None
    sought = info.get("sought") or {}
    if not info.get("peers") and sought:
        said = "; ".join(f"{address} ({_why(address, why)})" for address, why in sought.items())
        hint = f"trying on:  peerload nodes{_own(settings)}"
        if any(OTHER_CLUSTER in why for why in sought.values()):
            hint = "give both the same:  peerload up --cluster DIR        or let this one in:  peerload invite, there"
        say(f"no peer answered yet at {said}", hint)
    return info


def _why(address: str, why: str) -> str:
    return why.removeprefix(f"{address}: ") or f"nothing heard for {PEER_WITHIN_S:g} s"


def _own(info: dict[str, Any]) -> str:
    """What to add to a verb so that it speaks to this agent."""
    return "" if info.get("socket") == default_socket_path() else f" --socket {info.get('socket', '')}"


def _program() -> list[str]:
    """How to start peerload in a Python that heeds neither the directory it is in nor PYTHONPATH.

    Where this peerload was itself found through one of those (a checkout that is not installed), its place is named.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(peerload.__file__)))
    found_through = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if root not in map(os.path.abspath, found_through):
        return [sys.executable, "-I", "-m", "peerload"]
    start_there = f"import sys; sys.path.insert(0, {root!r}); from peerload.cli.main import main; sys.exit(main())"
    return [sys.executable, "-I", "-c", start_there]


def _info(socket_path: str, within_s: float) -> dict[str, Any] | None:
    """What an agent at this socket says of itself; None if there is none. Raises AgentSilent if one is that says
    nothing for so long: it is in the way of another."""
    try:
        with Client(socket_path, timeout_s=within_s) as client:
            return client.call("info")
    except AgentSilent:
        raise
    except AgentUnavailable:
        return None


def _starting(socket_path: str) -> dict[str, Any] | None:
    """What the agent just started says of itself; None if it does not yet."""
    try:
        return _info(socket_path, STARTS_WITHIN_S)
    except AgentSilent:
        return None


def _last_lines(log_path: str, log_start: int) -> list[str]:
    with open(log_path, "rb") as log:
        size = os.fstat(log.fileno()).st_size
        log.seek(max(log_start, size - LOG_BYTES_READ))
        return log.read().decode("utf-8", "replace").splitlines()[-LOG_LINES_SHOWN:]


def _ended(reason: str, log_path: str, log_start: int) -> PeerloadError:
    """In the words with which the agent ended; ``reason`` and what it has logged where it had none."""
    lines = _last_lines(log_path, log_start)
    for number, line in enumerate(lines):
        if line.startswith("peerload: "):
            hint = "".join(lines[number + 1 : number + 2]).strip()
            return PeerloadError("the agent did not start", why=line.removeprefix("peerload: "), hint=hint)
    return _failed(reason, log_path, log_start)


def _failed(reason: str, log_path: str, log_start: int) -> PeerloadError:
    for line in _last_lines(log_path, log_start):
        sys.stderr.write(f"  {printable(line)}\n")
    return PeerloadError("the agent did not start", why=reason, hint=f"its log:  {log_path}")


def _how_to_add(info: dict[str, Any]) -> str:
    """What to type for one more machine, and for one more node on this one."""
    address, own = printable(info.get("listen", "HOST:PORT")), printable(_own(info))
    invite = f"peerload invite{own}"
    if info.get("cluster_local"):
        return f"{invite}        on this one too:  peerload up --peer {address} …"
    if not info.get("issuer"):
        return "peerload invite, on the machine where the cluster was made"
    if not address.startswith(_LOOPBACK):
        return invite
    return f"{invite}        from other machines: once this one is started with  --listen ADDRESS:PORT"


def _cluster_told(info: dict[str, Any]) -> str:
    """How many nodes there are, as far as is known."""
    peers, remembered = int(info.get("peers") or 0), int(info.get("remembered") or 0)
    if remembered:
        return f"{peers + remembered + 1} nodes known, looking for {remembered} of them."
    alone = "No peer met yet." if info.get("sought") else "A cluster of one."
    return f"{peers + 1} nodes known." if peers else alone


def _beside(label: str, *commands: str) -> str:
    """Commands behind a label, on one line where the terminal has room for them, else each on its own."""
    line = f"{label:16}{'        '.join(commands)}"
    columns = terminal_columns()
    return f"{label:16}" + f"\n{'':16}".join(commands) if 0 < columns < len(line) else line


def _told(info: dict[str, Any], *, already: bool) -> str:
    cpus = info.get("cpus")
    facts = [f"node {printable(info.get('node', ''))}", f"{number_text(cpus)} cpu{'' if cpus == 1 else 's'}"]
    if info.get("mem_bytes"):
        facts.append(size_text(info["mem_bytes"]))
    if info.get("slots") is not None:
        facts.append(f"{counted(info['slots'], 'task')} at a time")
    notices = "".join(f"Note:           {printable(notice)}\n" for notice in info.get("notices") or ())
    verb = "an agent is already running" if already else "agent started"
    own = printable(_own(info))
    return (
        f"{verb}: {', '.join(facts)}. {_cluster_told(info)}\n"
        f"{notices}"
        f"{_beside('Try:', f'peerload run{own} hostname', f'peerload submit{own} sleep 5', f'peerload top{own}')}\n"
        f"Add a machine:  {_how_to_add(info)}\n"
        f"Stop it:        peerload down{own}\n"
    )
