"""Power-down: suspend this machine when it has had nothing to do for long enough, and wake other machines.

A node that is to be suspended has told its peers before, so that none calls it dead, and has told them the addresses of its
network cards: any peer on its network can wake it. A suspend command that fails, or after which the machine did not sleep, is
told, and tried again later and later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from peerload.agent.runtime import next_tick
from peerload.model.events import MachineSleeping, MachineWoke

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.store.write_ahead import EventLog
    from peerload.core.node import Node
    from peerload.model.events import Event
    from peerload.model.resources import Profile

log = logging.getLogger("peerload.agent")

LOOK_EVERY_S = 1.0
TELL_S = 1.0
"""Time for what peers are told to be sent."""
SUSPEND_S_MAX = 60.0
"""A machine that does not sleep so long after its command is awake."""
CLOCK_EVERY_S = 0.3
GAP_S = 1.5
"""A pause of the event loop by so much means that the machine slept."""
RETRIES_FACTOR_MAX = 64
COMMAND_S_MAX = 60.0
NOT_RUN, TIMED_OUT = 126, 124
PORT = 9
NET = Path("/sys/class/net")
CARDS_MAX = 8
NETWORKS_MAX = 16


def cards() -> tuple[str, ...]:
    """Addresses of the network cards of this machine, without those that are no cards."""
    found = []
    for path in sorted(NET.glob("*/address")):
        with contextlib.suppress(OSError):
            address = path.read_text().strip()
            if (path.parent / "device").exists() and address.strip("0:"):
                found.append(address)
    return tuple(found[:CARDS_MAX])


def magic_packet(card: str) -> bytes:
    """The packet that wakes the machine with this network card."""
    return b"\xff" * 6 + bytes.fromhex(card.replace(":", "")) * 16


def _broadcasts() -> list[str]:
    """Broadcast addresses of the networks of this machine. That of "all" reaches only the one with the default route."""
    found = [one.broadcast for card in psutil.net_if_addrs().values() for one in card if one.family == socket.AF_INET]
    return sorted({"255.255.255.255", *filter(None, found)})[:NETWORKS_MAX]


class Waker:
    """Wakes other nodes. resume_cmd: run instead of sending magic packets, with PEERLOAD_NODE in its environment."""

    def __init__(self, resume_cmd: str) -> None:
        self._resume_cmd = resume_cmd
        self._running: set[asyncio.Task[None]] = set()

    def wake(self, profile: Profile) -> None:
        """Wake the node of this profile."""
        if self._resume_cmd:
            task = asyncio.get_running_loop().create_task(self._resume(profile.node))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return
        why = "there is no network"
        for place in _broadcasts():  # one of them may be down
            try:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                    sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                    for card in profile.wake:
                        sender.sendto(magic_packet(card), (place, PORT))
                why = ""
            except OSError as error:
                why = why and str(error.strerror)
        if why:
            log.warning("cannot send a magic packet: node=%s error=%s", profile.node, why)

    async def _resume(self, node: str) -> None:
        code = await _run(self._resume_cmd, {"PEERLOAD_NODE": node})
        if code:
            log.warning("resume_cmd failed: node=%s exit_code=%s", node, code)


class PowerDown:
    """Suspends this machine after ``sleep_after_s`` without work."""

    def __init__(
        self, sleep_after_s: float, suspend_cmd: str, node: Node, put: Callable[[Event], None], event_log: EventLog
    ) -> None:
        """sleep_after_s: 0 = never."""
        self._sleep_after_s = sleep_after_s
        self._suspend_cmd = suspend_cmd
        self._node = node
        self._put = put
        self._event_log = event_log
        self._idle_since_s = time.monotonic()
        self._factor = 1

    async def run(self) -> None:
        """Look every LOOK_EVERY_S, for ever."""
        while self._sleep_after_s and self._suspend_cmd:
            await next_tick(LOOK_EVERY_S)
            if self._node.has_work:
                self._idle_since_s, self._factor = time.monotonic(), 1
            elif time.monotonic() - self._idle_since_s >= self._sleep_after_s * self._factor:
                await self.sleep()
                self._idle_since_s = time.monotonic()

    async def sleep(self) -> None:
        """Tell the peers, suspend, and tell them again when the machine is back."""
        self._put(MachineSleeping(is_suspended=True))
        await asyncio.sleep(TELL_S)
        if not self._node.state.is_asleep:  # work came
            return
        try:
            if self._node.has_work:
                return
            self._event_log.record("energy", "asleep", reason=f"nothing to do for {self._sleep_after_s:g} s")
            self._event_log.settle()
            began_s = time.monotonic()
            code, slept_s = await self._suspend()
            if code or not slept_s:
                why = (
                    f"suspend_cmd failed with exit code {code}" if code else "suspend_cmd did not suspend this machine"
                )
                self._event_log.record("energy", "not asleep", reason=why)
                self._factor = min(self._factor * 2, RETRIES_FACTOR_MAX)
            else:
                self._event_log.record("energy", "awake", reason=f"after {slept_s:.0f} s")
                log.info("awake: slept_s=%.1f command_s=%.1f", slept_s, time.monotonic() - began_s)
        finally:
            self._put(MachineWoke())

    async def _suspend(self) -> tuple[int, float]:
        """Run the command → its exit code, and for how long the machine slept (0: it did not). While it sleeps nothing runs, so
        that one look at the clock comes late."""
        command = asyncio.get_running_loop().create_task(_run(self._suspend_cmd, {}))
        looked_s = began_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        slept_s = 0.0
        while not (command.done() and (command.result() or slept_s)) and looked_s - began_s < SUSPEND_S_MAX + slept_s:
            await asyncio.sleep(CLOCK_EVERY_S)
            now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            slept_s = max(slept_s, now_s - looked_s if now_s - looked_s > GAP_S else 0.0)
            looked_s = now_s
        if not command.done():
            command.cancel()
            return (0 if slept_s else -1), slept_s
        return command.result(), slept_s


async def _run(command: str, variables: dict[str, str]) -> int:
    """Run a line in a shell → its exit code; NOT_RUN if it cannot be started, TIMED_OUT if it had to be killed."""
    null = asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            command,
            env=os.environ | variables,
            stdin=null,
            stdout=null,
            stderr=null,
            start_new_session=True,
        )
    except OSError as error:  # such as no process to be had
        log.warning("cannot start a command of [energy]: error=%s", error.strerror)
        return NOT_RUN
    try:
        return await asyncio.wait_for(process.wait(), COMMAND_S_MAX)
    except TimeoutError:
        return TIMED_OUT
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
