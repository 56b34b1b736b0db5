"""Starts the agent in this process: settings, logging, event loop."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING, Any

import uvloop

from peerload.agent import settings
from peerload.agent.daemon import Daemon, explain
from peerload.model.errors import PeerloadError

if TYPE_CHECKING:
    from peerload.model.config import AgentConfig

CANNOT = 125


def run(flags: dict[str, Any], defaults: dict[str, Any]) -> int:
    """Be the agent until told to stop. ``flags``: what was given on the command line; ``defaults``: where this user's
    ``state`` and ``socket`` are. → the exit code; 125 if it could not start, said on stderr."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    code = CANNOT
    try:
        code = serve(settings.load(flags, defaults, settings.environment_now()))
    except* PeerloadError as group:
        for error in _leaves(group):
            sys.stderr.write(f"peerload: {explain(error)}\n")
    return code


def serve(config: AgentConfig) -> int:
    """Be the agent with these settings, under uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Daemon(config).run())


def _leaves(group: BaseExceptionGroup[PeerloadError]) -> list[PeerloadError]:
    found: list[PeerloadError] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
