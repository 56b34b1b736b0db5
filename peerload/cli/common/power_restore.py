"""`peerload power restore`: put back what the controls of an agent have changed, whether it runs or not."""

from __future__ import annotations

from pathlib import Path

from peerload.cli.common.agent_process import located
from peerload.cli.common.options import Options
from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentUnavailable, PeerloadError
from peerload.text.format import print_json, say


def restore(words: list[str]) -> int:
    """Run `power restore` in this process, which needs the rights to set power controls."""
    from peerload.agent.energy import FILE, PowerControls

    flags = Options("power restore", "Put back what the power controls of an agent have changed.").read(words)
    try:
        with AgentConnection(flags.socket) as client:
            state = client.call("info")["state"]
    except AgentUnavailable:
        state = located({})["state"]
    file = Path(state) / FILE
    was_there = file.exists()
    left = PowerControls(file).restore()
    if flags.json:
        print_json({"restored": was_there and not left, "left": left})
    elif not was_there:
        say("nothing is changed on this machine")
    elif not left:
        say("restored")
    if left:
        raise PeerloadError(left[0], hint="as the user of the agent that set it, or as root:  peerload power restore")
    return 0
