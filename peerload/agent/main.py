"""Starts the agent in this process: settings, logging, event loop."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from peerload.agent import settings
from peerload.agent.daemon import Daemon, explain
from peerload.model.errors import PeerloadError

if TYPE_CHECKING:
    from peerload.model.config import AgentConfig

CANNOT = 125
LOG_BYTES_MAX = 5 << 20
LOGS_KEPT_MAX = 5
LOG_NAME = "agent.log"


def run(flags: dict[str, Any], defaults: dict[str, Any], gpu_library: Any = None) -> int:  # noqa: ANN401 -- a module
    """Be the agent until told to stop. ``flags``: what was given on the command line; ``defaults``: where this user's
    ``state`` and ``socket`` are; ``gpu_library``: what speaks like `pynvml`, None: this machine's driver is looked for.
    → the exit code; 125 if it could not start, said on stderr."""
    code = CANNOT
    try:
        config = settings.load(flags, defaults, settings.environment_now())
        _log_to(Path(config.state) / LOG_NAME)
        code = serve(config, gpu_library)
    except* PeerloadError as group:
        for error in _leaves(group):
            sys.stderr.write(f"peerload: {explain(error)}\n")
    return code


def serve(config: AgentConfig, gpu_library: Any = None) -> int:  # noqa: ANN401 -- as above
    """Be the agent with these settings, under uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Daemon(config, gpu_library).run())


def _log_to(path: Path) -> None:
    """Log to stderr; where that is STATE/agent.log (`peerload up` arranges it), keep the file within its bound."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if path.exists() and os.path.samestat(os.fstat(sys.stderr.fileno()), path.stat()):
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES_MAX, backupCount=LOGS_KEPT_MAX - 1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


def _leaves(group: BaseExceptionGroup[PeerloadError]) -> list[PeerloadError]:
    found: list[PeerloadError] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
