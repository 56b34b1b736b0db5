"""`peerload down`: stop my agent."""

from __future__ import annotations

import sys

from peerload.cli.common.agent_process import await_end, watch
from peerload.cli.common.options import Options
from peerload.client.connection import START_HINT, Client
from peerload.model.errors import AgentUnavailable, BadRequest
from peerload.model.text import printable
from peerload.text.format import print_json

FLAG = "flag"
"""The origin of settings given by flags."""


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "down", "Stop my agent. Running tasks go on, and `peerload up` finds them again; with --all they end, too."
    )
    reader.switch("--all", help="also end the running tasks and the launcher, even if the agent is gone")
    reader.flag("--state", metavar="DIR", help="state directory of an agent that is gone (default: your own agent's)")
    flags = reader.read(words)
    try:
        client = Client(flags.socket)
    except AgentUnavailable as error:
        if flags.all and _orphans_ended(flags.socket, flags.state, as_json=flags.json):
            return 0
        raise _none_runs(error, ends_tasks=flags.all) from None
    with client:
        info = client.call("info")
        back = "" if flags.all or flags.json else _back_again(client)
        watched = {key: watch(info.get(key)) for key in (("pid", "launcher_pid") if flags.all else ("pid",))}
        try:
            client.call("stop", all=flags.all)
        except AgentUnavailable:
            if watched["pid"] is None:
                raise  # without its process nothing shows whether it stops
    for key, descriptor in watched.items():
        if descriptor is not None:
            await_end(descriptor, f"{'the agent' if key == 'pid' else 'the launcher'} (pid {info[key]})")
    node = printable(info.get("node", ""))
    if flags.json:
        print_json({"pid": info.get("pid"), "node": info.get("node"), "all": flags.all})
    elif flags.all:
        sys.stdout.write(f"agent of {node} stopped; its tasks were ended\n")
    else:
        sys.stdout.write(f"agent of {node} stopped; running tasks go on.  Start it again:  {back}\n")
    return 0


def _none_runs(error: AgentUnavailable, *, ends_tasks: bool) -> AgentUnavailable:
    """The error that there is no agent to stop, with what to type."""
    if error.hint == START_HINT:
        left = "" if ends_tasks else "        to end the tasks that one has left:  peerload down --all"
        error.hint = f"one with another socket:  peerload down --socket PATH{left}"
    return error


def _back_again(client: Client) -> str:
    """The command that starts this agent with the same flags. It has no password of a broker."""
    import shlex

    words = ["peerload", "up"]
    try:
        settings = client.call("settings")["settings"]
    except BadRequest:  # an agent of an earlier version
        settings = []
    for setting in settings:
        if setting["origin"] == FLAG:
            values = setting["value"] if isinstance(setting["value"], list) else [setting["value"]]
            own = own_place(setting["key"])
            words += [word for value in values if value != own for word in (f"--{setting['key']}", str(value))]
    return printable(shlex.join(words))


def own_place(key: str) -> str | None:
    """The default of `peerload up` for the state directory and the socket; None for other settings."""
    from peerload.cli.common.agent_flags import default_state
    from peerload.client.connection import default_socket_path

    return {"state": default_state(), "socket": default_socket_path()}.get(key)


def _orphans_ended(socket_path: str | None, state: str | None, *, as_json: bool) -> bool:
    """End the launcher of an agent that is gone, with its tasks. False if there is none."""
    from peerload.cli.common.agent_flags import located
    from peerload.cli.common.agent_process import end_launcher

    if socket_path is not None and state is None:
        return False  # another agent than the user's own: its state directory is not known
    found = end_launcher(located({"state": state} if state else {})["state"])
    if found is None:
        return False
    await_end(found, "the launcher")
    if as_json:
        print_json({"pid": None, "node": None, "all": True})
    else:
        sys.stdout.write("the agent was gone; the tasks that still ran were ended\n")
    return True
