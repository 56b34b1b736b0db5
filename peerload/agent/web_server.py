"""The web server (`[web] listen`) as a child of the agent: started, watched, restarted up to a limit, ended with the agent.

Its standard input is a pipe whose other end only the agent has: if the agent is killed, the server sees the end and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING

from peerload.agent.runtime import child_environment

if TYPE_CHECKING:
    from peerload.agent.runtime import AgentInfo
    from peerload.agent.store.write_ahead import EventLog

log = logging.getLogger("peerload.agent")

STARTS_MAX = 6
"""Maximum number of successive starts that end soon; after them, the server stays off until the agent's next start."""
LIVED_S_MIN = 60.0
"""Run time below which a server counts as having ended soon."""
PAUSE_S = 1.0
"""Pause before the second start; it doubles."""
STOP_S_MAX = 3.0


class WebServer:
    """The server of one agent."""

    def __init__(self, info: AgentInfo, journal: EventLog) -> None:
        self._info = info
        self._journal = journal

    def _command_line(self) -> list[str]:
        config = self._info.config
        command = [
            sys.executable,
            "-P",
            "-m",
            "peerload",
            "web",
            "--socket",
            config.socket,
            "--listen",
            config.web.listen,
        ]
        command += ["--tokens", os.path.join(config.state, "web")]  # noqa: PTH118
        for flag, value in (("--tls-cert", config.web.tls_cert), ("--tls-key", config.web.tls_key)):
            command += [flag, value] if value else []
        return command + [part for name in config.web.host for part in ("--host", name)]

    async def run(self) -> None:
        """Keep a server running, until cancelled."""
        loop, starts = asyncio.get_running_loop(), 0
        while starts < STARTS_MAX:
            began_s = loop.time()
            code = await self._serve()
            starts = 1 if loop.time() - began_s > LIVED_S_MIN else starts + 1
            state = "ended" if starts < STARTS_MAX else "abandoned"
            log.warning("web server ended: exit_code=%d starts=%d", code, starts)
            self._journal.record(
                "web", state, reason=f"exit code {code}, start {starts} in a row; its log is the agent's"
            )
            await asyncio.sleep(PAUSE_S * 2.0**starts if starts < STARTS_MAX else 0)

    async def _serve(self) -> int:
        """Start a server, and wait for its end → exit code. Its standard output (a code for one browser) is
        discarded."""
        own = child_environment() | {"PEERLOAD_WEB_CHILD": "1"}
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command_line(), stdin=pipe, stdout=null, env=own, cwd="/"
            )
        except OSError as error:
            log.warning("cannot start the web server: error=%s", error)
            return -1
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                try:
                    async with asyncio.timeout(STOP_S_MAX):
                        await process.wait()
                except TimeoutError:
                    process.kill()
