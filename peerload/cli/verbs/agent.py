"""`peerload agent`: be the agent, in the foreground. This is what the systemd unit runs."""

from __future__ import annotations

from peerload.cli.common.agent_flags import agent_options, default_places, given_settings


def main(words: list[str]) -> int:
    """Run the verb: until SIGTERM, Ctrl-C or `peerload down`."""
    flags = agent_options(
        "agent", "Be the agent, in the foreground; it logs to stderr. `peerload up` starts one in the background."
    ).read(words)
    from peerload.agent.main import run

    settings = given_settings(flags)
    code: int = run(settings, default_places(settings))
    return code
