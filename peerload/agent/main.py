"""Starts the agent in this process: settings, logging, event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from peerload.agent.peers.addresses import with_current_addresses
from peerload.agent.runtime import share_heap
from peerload.agent.systemd import ServiceManager, check_service_places
from peerload.config import loader
from peerload.model.errors import PeerloadError
from peerload.model.text import printable
from peerload.policy.registry import LivePreset

if TYPE_CHECKING:
    from types import TracebackType

    from peerload.agent.systemd import Load
    from peerload.model.config import AgentConfig

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MESSAGE_CHARS_MAX = 4000
"""Maximum length of a message; a longer one is cut off."""
TRACEBACK_LINES_MAX = 200
INDENT = "    "
"""Start of traceback lines; no record begins like this, so that an exception's text cannot forge a record."""


class LogLines(logging.Formatter):
    """Formats a record as one line, with an indented traceback below it."""

    def __init__(self) -> None:
        super().__init__(FORM)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- the base class's
        """The line, with foreign characters escaped."""
        record.message = printable(record.message[:MESSAGE_CHARS_MAX])
        return super().formatMessage(record)

    def formatException(  # noqa: N802 -- the base class's
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        """The traceback, with each line escaped and indented."""
        lines = super().formatException(ei).split("\n")[:TRACEBACK_LINES_MAX]
        return "\n".join(INDENT + printable(line) for line in lines)


log = logging.getLogger("peerload.agent")

CANNOT = 125
LOG_BYTES_MAX = 5 << 20
LOGS_KEPT_MAX = 5
LOG_NAME = "agent.log"


def run(flags: dict[str, Any], defaults: dict[str, Any], gpu_library: Any = None) -> int:  # noqa: ANN401 -- a module
    """Run the agent until a request or signal stops it. ``flags``: values from the command line; ``defaults``:
    this user's ``state`` and ``socket``; ``gpu_library``: a module with the interface of `pynvml`, None: the driver of this
    machine. → the exit code; 125 if it could not start, with the error on stderr."""
    code = CANNOT
    share_heap()
    files_max = open_more_files()
    try:
        manager = ServiceManager(os.environ)

        def load() -> tuple[AgentConfig, dict[str, str]]:
            found, origins = loader.load_with_origins(flags, defaults, dict(os.environ))
            return with_current_addresses(found, origins), origins

        config, origins = load()
        check_service_places(config, manager, defaults.get("state", ""))
        _log_to(Path(config.state) / LOG_NAME)
        _load_the_agent()
        from peerload.agent.daemon import RESTART  # noqa: PLC0415 -- as there

        preset = LivePreset.read(config.policy)
        while (code := serve(config, preset, gpu_library, origins, files_max, manager, load)) == RESTART:
            config, origins, preset = _after_restart(load, config, origins, preset)
    except* PeerloadError as group:
        for error in _leaves(group):
            sys.stderr.write(f"peerload: {error}\n" + (f"  {error.hint}\n" if error.hint else ""))
    except* Exception as bugs:
        log.exception("the agent crashed", exc_info=bugs)
        raise
    return code


def _after_restart(
    load: Load, config: AgentConfig, origins: dict[str, str], preset: LivePreset
) -> tuple[AgentConfig, dict[str, str], LivePreset]:
    """The settings and policies for a restart. If the present ones cannot be used, the previous ones: it may be nobody who
    asked for the restart."""
    try:
        found, places = load()
        return found, places, LivePreset.read(found.policy)
    except PeerloadError as error:
        log.warning("settings not read, keeping the previous ones: error=%s hint=%s", error, error.hint)
        return with_current_addresses(config, origins), origins, preset


def open_more_files() -> int:
    """Raise the limit of open files to its maximum, since clients, peers and streams take one each → the previous limit, which
    applies to tasks."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:
        log.warning("cannot raise the limit of open files: limit=%d error=%s", before, error)
    return before


def serve(
    config: AgentConfig,
    preset: LivePreset,
    gpu_library: Any = None,  # noqa: ANN401 -- as above
    origins: dict[str, str] | None = None,
    files_max: int = 0,
    manager: ServiceManager | None = None,
    load: Load | None = None,
) -> int:
    """Run the agent with these settings, under uvloop. files_max, manager, load: see `Daemon`."""
    from peerload.agent.daemon import Daemon  # noqa: PLC0415 -- as in `run`

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Daemon(config, preset, gpu_library, origins, files_max, manager, load).run())


def _load_the_agent() -> None:
    """Import the agent (three quarters of its modules), after its settings were checked. Garbage collection is off
    meanwhile: it would find no garbage, and takes an eighth of the start time."""
    gc.disable()
    import peerload.agent.daemon  # noqa: F401, PLC0415

    gc.freeze()
    gc.enable()


def _log_to(path: Path) -> None:
    """Log to stderr; if that is STATE/agent.log (set up by `peerload up`), limit the size of the file."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if path.exists() and os.path.samestat(os.fstat(sys.stderr.fileno()), path.stat()):
        from logging.handlers import RotatingFileHandler  # noqa: PLC0415 -- half a MiB, which a service does not need

        handler = RotatingFileHandler(path, maxBytes=LOG_BYTES_MAX, backupCount=LOGS_KEPT_MAX - 1)
    handler.setFormatter(LogLines())
    logging.basicConfig(handlers=[handler], level=logging.INFO)


def _leaves(group: BaseExceptionGroup[PeerloadError]) -> list[PeerloadError]:
    found: list[PeerloadError] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
