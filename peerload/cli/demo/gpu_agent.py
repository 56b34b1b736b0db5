"""Agent of `peerload demo gpu`: a normal agent with simulated GPUs. Arguments: the file that describes the GPUs,
then the flags of `peerload agent`. No verb leads here."""

from __future__ import annotations

import sys
from pathlib import Path

from peerload.agent.main import run
from peerload.cli.common.agent_process import agent_options, default_state, given_settings
from peerload.cli.demo.played_nvml import PlayedNvml


def main() -> int:
    """Run the agent until it is told to stop."""
    machine, *words = sys.argv[1:]
    settings = given_settings(agent_options("agent", "The agent of a demonstration.").read(words))
    defaults = {"state": default_state(), "socket": settings["socket"]}
    return run(settings, defaults, PlayedNvml(Path(machine)))
