# ruff: noqa: PTH118
# os.path, since pathlib would cost every command its quick start.
"""`peerload up`, `down` and `agent`: start and stop the user's agent, run one in the foreground. `peerload launcher --system`: the
root process that starts the tasks of all users of a machine, for an agent that is not root."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from peerload.cli.common import agent_process
from peerload.cli.common.messages import CANNOT
from peerload.cli.common.options import Options
from peerload.client.connection import ANSWERS_WITHIN_S, START_HINT, AgentConnection, default_socket_path
from peerload.model.errors import AgentUnavailable, PeerloadError, UsageError
from peerload.model.text import printable
from peerload.text.format import counted, number_text, print_result, say, size_text, terminal_columns


def agent(words: list[str]) -> int:
    """Run the agent until SIGTERM, Ctrl-C or `peerload down`."""
    flags = agent_process.agent_options(
        "agent", "Run the agent in the foreground; it logs to stderr. `peerload up` starts one in the background."
    ).read(words)
    from peerload.agent.main import run

    settings = agent_process.given_settings(flags)
    code: int = run(settings, agent_process.default_places(settings))
    return code


LAUNCHER_HELP = """\
usage: peerload launcher --system [--directory DIR] [--sockets DIR] [--agent-user NAME] [--config FILE]
                                  [--config-directory DIR] [--units KIND] [--memory KIND] [--powercap DIR]

Start the tasks of all users of this machine, for the agent of its service. Runs as root, by a service of its own.
"""


def launcher(words: list[str]) -> int:  # noqa: RET503 -- execv does not return
    """Replace this process by the launcher, so that no other modules stay loaded."""
    if "--help" in words or "-h" in words:
        sys.stdout.write(LAUNCHER_HELP)
        return 0
    if words[:1] != ["--system"]:
        hint = "the launcher of one user is started by its agent:  peerload up"
        raise UsageError("this verb is only for the service of all users", why="--system is missing", hint=hint)
    if os.geteuid() != 0:
        raise PeerloadError(
            "the launcher of all users runs as root",
            hint="systemctl start peerload-launcher        for yourself:  peerload up",
        )
    from peerload.agent.launcher.process import command_line

    argv = command_line("system.service", words[1:])
    os.execv(argv[0], argv)  # noqa: S606 -- our own program, in a fresh interpreter


GONE_WITHIN_S = 10.0
"""An agent whose state directory was removed ends within this."""
SOCKET_WITHIN_S = 3.0
"""A running agent recreates a lost socket within this."""
LOOK_EVERY_S = 0.02
PEER_WITHIN_S = 3.0
"""Time without an answer of a first peer after which a message reports it."""
REFUSED_WITHIN_S = 0.3
"""Time for a peer to object that it knows another node of this name."""
OTHER_CLUSTER = "of another cluster"
_LOOPBACK = ("127.", "[::1]")
JSON_KEYS = ("pid", "launcher_pid", "socket", "listen", "node")


def up(words: list[str]) -> int:
    flags = agent_process.agent_options(
        "up", "Start an agent for me on this machine, in the background. It needs no configuration file."
    ).read(words)
    settings = _named_as_before(agent_process.located(agent_process.given_settings(flags)))
    info = _staying(agent_process.agent_info(settings["socket"], ANSWERS_WITHIN_S)) or _running(
        settings, SOCKET_WITHIN_S
    )
    already = info is not None
    if info is None:
        log_start = _log_size(settings)
        is_in_use = agent_process.is_worked_in(settings["state"])  # by an agent that did not answer at this socket
        try:
            info = agent_process.start(settings)
        except PeerloadError:
            # Another `up` may have been first, and its agent is still starting.
            info = _running(settings, SOCKET_WITHIN_S if is_in_use else agent_process.STARTS_WITHIN_S)
            if info is None:
                raise
            already = True
        if not already and (settings.get("peer") or info.get("sought")):
            info = _joined(settings, info, log_start)
    ignored = _not_in_force(agent_process.given_settings(flags), settings, info) if already else []
    if ignored:
        said = " ".join(f"--{key.replace('_', '-')}" for key in ignored)
        hint = f"stop it first:  peerload down --socket {settings['socket']}        another beside it:  --node NAME --state DIR --socket PATH"
        say(f"{said} not applied: the agent is already running", hint)
    info.setdefault("socket", settings["socket"])
    info["notices"] = [*(info.get("notices") or ()), *_shared_machine(info)]
    print_result({key: info.get(key) for key in JSON_KEYS}, _started_lines(info, already=already), as_json=flags.json)
    return CANNOT if ignored else 0


def _named_as_before(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the name of the node whose tasks are in the state directory, where none is given."""
    config, origins = agent_process.configured_with_origins(settings)
    kept = agent_process.node_of(config.state) if origins["node"] == BUILT_IN else ""
    return {**settings, "node": kept} if kept and kept != config.node else settings


def _shared_machine(info: dict[str, Any]) -> list[str]:
    """A notice if other agents of the cluster run on this machine."""
    if not info.get("peers"):
        return []
    from peerload.cli.verbs.nodes import ONE_MACHINE, on_one_machine

    with AgentConnection(info["socket"]) as client:
        shared = on_one_machine(client.call("nodes")["nodes"])
    return [f"{', '.join(names)}: {ONE_MACHINE}" for names in shared if info.get("node") in names]


def _staying(info: dict[str, Any] | None) -> dict[str, Any] | None:
    """The answer of an agent to `info`. If its state directory was removed, the agent ends soon: wait for that and return None."""
    if info is None or (state := info.get("state")) is None:
        return info
    try:
        os.stat(os.path.join(state, "peerload.db"))  # noqa: PTH116 -- as at the top
    except FileNotFoundError:
        try:
            if (ends := agent_process.watch(info.get("pid"))) is not None:
                agent_process.await_end(ends, "the agent", GONE_WITHIN_S)
        except PeerloadError:
            return info  # the agent is in a container, where this name means another directory
        tasks = f"to end the tasks that still run:  kill {info['launcher_pid']}" if info.get("launcher_pid") else ""
        say(f"the agent that ran until now has ended: its state directory {printable(state)} was removed", tasks)
        return None
    except OSError:
        pass  # we have no permission to check
    return info


def _running(settings: dict[str, Any], within_s: float) -> dict[str, Any] | None:
    """The answer to `info` of the agent that uses this state directory, once it has recreated its socket, which may have been removed
    with the runtime directory at logout. None if there is no such agent, or it listens elsewhere."""
    pause, deadline = threading.Event(), time.monotonic() + within_s
    while agent_process.is_worked_in(settings["state"]) and time.monotonic() < deadline:
        pause.wait(LOOK_EVERY_S)
        if (info := agent_process.agent_info(settings["socket"], ANSWERS_WITHIN_S)) is not None:
            return info
    return None


def _not_in_force(given: dict[str, Any], settings: dict[str, Any], info: dict[str, Any]) -> list[str]:
    """The given flags that differ from the settings of the running agent."""
    same_state = "state" not in given or os.path.realpath(settings["state"]) == os.path.realpath(str(info.get("state")))
    asked = {key: value for key, value in given.items() if key != "socket" and not (key == "state" and same_state)}
    if not asked:
        return []
    with AgentConnection(settings["socket"]) as client:
        in_force = {setting["key"]: setting["value"] for setting in client.call("settings")["settings"]}
    asked.pop("config", None)
    ignored = [key for key, value in asked.items() if _as_text(value) != _as_text(in_force.get(key))]
    if "config" in given:
        found = agent_process.settings_of_file(given)
        if any(_as_text(value) != _as_text(in_force.get(key)) for key, value in found.items()):
            ignored.append("config")
    return sorted(ignored)


def _as_text(value: object) -> list[str]:
    """A setting in a comparable form, independent of the order of a list."""
    return sorted(map(str, value)) if isinstance(value, (list, tuple)) else [str(value)]


def _log_size(settings: dict[str, Any]) -> int:
    try:
        return os.path.getsize(os.path.join(settings["state"], "agent.log"))  # noqa: PTH202 -- as at the top
    except OSError:
        return 0


def _joined(settings: dict[str, Any], info: dict[str, Any], log_start: int) -> dict[str, Any]:
    """The answer of the agent to `info` once a peer has accepted it; else report after PEER_WITHIN_S why none has.
    Raises PeerloadError if the agent ended meanwhile, because a peer knows another node of its name."""
    pause = threading.Event()
    deadline = time.monotonic() + PEER_WITHIN_S
    ends = agent_process.watch(info.get("pid"))
    try:
        with AgentConnection(settings["socket"]) as client:
            while not info.get("peers") and time.monotonic() < deadline:
                pause.wait(LOOK_EVERY_S)
                info = client.call("info")
            if info.get("peers"):
                pause.wait(REFUSED_WITHIN_S)
                info = client.call("info")
    except AgentUnavailable:
        if ends is not None:
            agent_process.await_end(ends, "the agent")  # its error is the last line of its log
        log_path = os.path.join(settings["state"], "agent.log")
        raise agent_process.ended_at_once("it stopped when it connected to a peer", log_path, log_start) from None
    sought = info.get("sought") or {}
    if not info.get("peers") and sought:
        said = "; ".join(f"{address} ({_why(address, why)})" for address, why in sought.items())
        hint = f"it keeps trying:  peerload nodes{_socket_flag(settings)}"
        if any(OTHER_CLUSTER in why for why in sought.values()):
            hint = "use one cluster on both:  peerload up --cluster DIR        or there:  peerload invite"
        say(f"no peer answered yet at {said}", hint)
    return info


def _why(address: str, why: str) -> str:
    return why.removeprefix(f"{address}: ") or f"no answer within {PEER_WITHIN_S:g} s"


def _socket_flag(info: dict[str, Any]) -> str:
    """The `--socket` flag for commands to this agent; "" if it is the default one."""
    return "" if info.get("socket") == default_socket_path() else f" --socket {info.get('socket', '')}"


def _how_to_add(info: dict[str, Any]) -> str:
    """The commands that add another machine, or another node on this machine."""
    address, own = printable(info.get("listen", "HOST:PORT")), printable(_socket_flag(info))
    invite = f"peerload invite{own}"
    if info.get("cluster_local"):
        return f"{invite}        another agent here:  peerload up --peer {address} …"
    if not info.get("issuer"):
        return "peerload invite, on the machine where the cluster was made"
    if not address.startswith(_LOOPBACK):
        return invite
    return f"{invite}        other machines can reach it after:  peerload up --listen ADDRESS:PORT"


def _cluster_text(info: dict[str, Any]) -> str:
    """A sentence about the number of known nodes."""
    peers, remembered = int(info.get("peers") or 0), int(info.get("remembered") or 0)
    if remembered:
        return f"{peers + remembered + 1} nodes known, looking for {remembered} of them."
    alone = "No peer met yet." if info.get("sought") else "A cluster of one."
    return f"{peers + 1} nodes known." if peers else alone


def _labelled(label: str, *commands: str) -> str:
    """Commands after a label, on one line if the terminal is wide enough, else on one line each."""
    line = f"{label:16}{'        '.join(commands)}"
    columns = terminal_columns()
    return f"{label:16}" + f"\n{'':16}".join(commands) if 0 < columns < len(line) else line


def _started_lines(info: dict[str, Any], *, already: bool) -> list[str]:
    cpus = info.get("cpus")
    facts = [f"node {printable(info.get('node', ''))}", f"{number_text(cpus)} cpu{'' if cpus == 1 else 's'}"]
    if info.get("mem_bytes"):
        facts.append(size_text(info["mem_bytes"]))
    if info.get("slots") is not None:
        facts.append(f"{counted(info['slots'], 'task')} at a time")
    verb = "an agent is already running" if already else "agent started"
    own = printable(_socket_flag(info))
    return [
        f"{verb}: {', '.join(facts)}. {_cluster_text(info)}",
        *(f"Note:           {printable(notice)}" for notice in info.get("notices") or ()),
        _labelled("Try:", f"peerload run{own} hostname", f"peerload submit{own} sleep 5", f"peerload top{own}"),
        f"Add a machine:  {_how_to_add(info)}",
        f"Stop it:        peerload down{own}",
    ]


FLAG, BUILT_IN = "flag", "built-in"
"""The origins of settings given by flags, and given nowhere."""


def down(words: list[str]) -> int:
    reader = Options(
        "down", "Stop my agent. Running tasks go on, and `peerload up` finds them again; with --all they end, too."
    )
    reader.switch("--all", help="also end the running tasks and the launcher, even if the agent has ended")
    reader.flag("--state DIR", help="state directory of an agent that has ended (default: your own agent's)")
    flags = reader.read(words)
    try:
        client = AgentConnection(flags.socket)
    except AgentUnavailable as error:
        if flags.all and _orphans_ended(flags.socket, flags.state, as_json=flags.json):
            return 0
        raise _none_runs(error, ends_tasks=flags.all, is_named=bool(flags.socket and not flags.state)) from None
    with client:
        info = client.call("info")
        back = "" if flags.all or flags.json else _back_again(client)
        watched = {
            key: agent_process.watch(info.get(key)) for key in (("pid", "launcher_pid") if flags.all else ("pid",))
        }
        running = None
        try:
            running = client.call("stop", all=flags.all).get("running")
        except AgentUnavailable:
            if watched["pid"] is None:
                raise  # without its process, its end cannot be detected
    for key, descriptor in watched.items():
        if descriptor is not None:
            agent_process.await_end(descriptor, f"{'the agent' if key == 'pid' else 'the launcher'} (pid {info[key]})")
    again = "" if flags.all else f".  Start it again:  {back}"
    text = f"agent of {printable(info.get('node', ''))} stopped; {_left_text(running, ends_tasks=flags.all)}{again}"
    told = {"pid": info.get("pid"), "node": info.get("node"), "all": flags.all, "running": running}
    print_result(told, [text], as_json=flags.json)
    return 0


def _left_text(running: int | None, *, ends_tasks: bool) -> str:
    """Text about the tasks that were running at the stop; ``running``: their number, None = not known."""
    if running == 0:
        return "no task was running"
    number = "its running tasks" if running is None else counted(running, "running task")
    is_one = running == 1
    if ends_tasks:
        return f"{number} {'was' if is_one else 'were'} ended"
    return f"{number} {'goes' if is_one else 'go'} on"


def _none_runs(error: AgentUnavailable, *, ends_tasks: bool, is_named: bool) -> AgentUnavailable:
    """The error with a hint. is_named: its socket was named, and not its state directory."""
    if error.hint == START_HINT:
        end = f"        to end the tasks that it left:  peerload down --all{' --state DIR' if is_named else ''}"
        left = "" if ends_tasks and not is_named else end
        error.hint = f"one with another socket:  peerload down --socket PATH{left}"
    return error


def _back_again(client: AgentConnection) -> str:
    """The command that starts this agent with the same flags, without the password of a broker."""
    import shlex

    settings = client.call("settings")["settings"]
    own_places = {"state": agent_process.default_state(), "socket": default_socket_path()}
    flags = {one["key"]: one["value"] for one in settings if one["origin"] == FLAG}
    flags |= agent_process.given_to(settings, agent_process.default_state(), dict(os.environ))
    given = {key: value for key, value in flags.items() if value != own_places.get(key)}
    return printable(shlex.join(["peerload", "up", *agent_process.as_words(given)]))


def _orphans_ended(socket_path: str | None, state: str | None, *, as_json: bool) -> bool:
    """End the launcher of an agent that has ended, with its tasks → False if there is none."""
    if socket_path is not None and state is None:
        return False  # another agent than the user's own: its state directory is not known
    found = agent_process.end_launcher(agent_process.located({"state": state} if state else {})["state"])
    if found is None:
        return False
    agent_process.await_end(found, "the launcher")
    print_result(
        {"pid": None, "node": None, "all": True},
        ["the agent had ended before; its launcher was ended, and with it any task that was still running"],
        as_json=as_json,
    )
    return True
