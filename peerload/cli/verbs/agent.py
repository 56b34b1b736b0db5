"""`peerload agent`: the agent in the foreground. `peerload launcher --system`: the process that starts the tasks of all users of a
machine, as root, for its agent, which is not root. Services run both."""

from __future__ import annotations

import os
import sys

from peerload.cli.common.agent_flags import agent_options, default_places, given_settings
from peerload.model.errors import PeerloadError


def main(words: list[str]) -> int:
    """Run the agent until SIGTERM, Ctrl-C or `peerload down`."""
    flags = agent_options(
        "agent", "Run the agent in the foreground; it logs to stderr. `peerload up` starts one in the background."
    ).read(words)
    from peerload.agent.main import run

    settings = given_settings(flags)
    code: int = run(settings, default_places(settings))
    return code


HELP = """\
usage: peerload launcher --system [--directory DIR] [--sockets DIR] [--agent-user NAME] [--config FILE]
                                  [--config-directory DIR] [--units KIND] [--memory KIND]

Start the tasks of all users of this machine, for the agent of its service. Runs as root, by a service of its own.
"""


def launcher(words: list[str]) -> int:  # noqa: RET503 -- execv does not return
    """Replace this process by the launcher, which has nothing else loaded."""
    if "--help" in words or "-h" in words:
        sys.stdout.write(HELP)
        return 0
    if words[:1] != ["--system"]:
        from peerload.model.errors import UsageError

        hint = "the launcher of one user is started by its agent:  peerload up"
        raise UsageError("this verb is only for the service of all users", why="--system is missing", hint=hint)
    if os.geteuid() != 0:
        raise PeerloadError(
            "the launcher of all users runs as root",
            hint="systemctl start peerload-launcher        for yourself:  peerload up",
        )
    from peerload.agent.launcher.process import command_line

    argv = command_line("system.service", words[1:])
    os.execv(argv[0], argv)  # noqa: S606 -- ourselves, with nothing loaded
