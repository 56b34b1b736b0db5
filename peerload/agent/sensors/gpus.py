"""The GPUs of this node, looked at in a thread of their own: a driver that hangs makes the GPUs unknown, and nothing else.

The thread is given one thing to do at a time. What it has not done within DEADLINE_S is waited for no longer: the GPUs are
told as unknown until it comes back. There is never a second thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent.sensors.nvml import CardReading, Nvml, find_library
from peerload.agent.sensors.owners import Owners
from peerload.model.devices import RUNS_SEEN_MAX, Device, DeviceReading, Health
from peerload.model.events import DevicesFound, DevicesSampled

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.model.events import Event

log = logging.getLogger("peerload.gpus")

DEADLINE_S = 2.0
SAMPLE_S = 1.0
LOOK_AGAIN_S = 0.05
"""After an attempt has left a GPU it is read this often, for …"""
LOOK_S = 2.0
"""… so long, since memory may be given back a moment after its process is gone."""
FIND_EVERY_S = 60.0
"""Where there is no driver, or no card, it is looked for this often."""
AVERAGE_S = 5.0
FOREIGN_BYTES = 50 << 20
FOREIGN_SHARE = 0.001
"""So much memory, or this share of all, is there by itself; more that nobody of ours has is foreign."""
FOREIGN_BUSY = 0.1
FOREIGN_READINGS = 3
"""A card that is busy in so many readings, with nobody on it, is somebody's."""
TELL_BYTES = 16 << 20
TELL_BUSY = 0.05
"""Smaller changes are not worth an event."""


class Gpus:
    """Puts DevicesFound when other GPUs are there than before, and DevicesSampled when readings have changed noticeably.
    ``library``: what speaks like `pynvml`; None: the driver of this machine is looked for. ``others``: this node's devices
    of other kinds, told along with the GPUs; ``usable(devices)``: those of the GPUs found that this agent may use."""

    def __init__(
        self,
        put: Callable[[Event], None],
        library: Any = None,  # noqa: ANN401 -- a module without types
        others: tuple[Device, ...] = (),
        usable: Callable[[tuple[Device, ...]], tuple[Device, ...]] = lambda devices: devices,
    ) -> None:
        self._put = put
        self._library = library
        self._others = others
        self._usable = usable
        self._nvml: Nvml | None = None
        self._owners = Owners()
        self._worker: _Worker | None = None
        self._wanted = asyncio.Event()
        self._look_until_s = 0.0
        self._state: dict[str, _Averaged] = {}
        self._told: dict[str, DeviceReading] = {}
        self.devices: tuple[Device, ...] = others

    async def find(self) -> tuple[Device, ...]:
        """All devices of this node; without the GPUs if their driver does not answer in time (they are told later)."""
        self._worker = self._worker or _Worker()
        try:
            await self._found(await self._worker.do(self._find))
        except TimeoutError:
            log.warning("the driver of the GPUs does not answer: there are none so far")
        return self.devices

    def look(self) -> None:
        """An attempt has left a GPU: read them all now, and again for a moment."""
        self._look_until_s = time.monotonic() + LOOK_S
        self._wanted.set()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            if self._state:
                await self._sample()
            await self._wait()
            if not self._state:
                before = self.devices
                await self.find()
                if self.devices != before:
                    self._put(DevicesFound(self.devices))

    async def _wait(self) -> None:
        is_looking = time.monotonic() < self._look_until_s
        pause_s = FIND_EVERY_S if not self._state else LOOK_AGAIN_S if is_looking else SAMPLE_S
        try:
            async with asyncio.timeout(pause_s):
                await self._wanted.wait()
        except TimeoutError:
            return
        self._wanted.clear()

    async def close(self) -> None:
        """Let go of the driver; a thread that hangs is left to itself."""
        if self._worker is not None and not self._worker.is_busy and self._nvml is not None:
            try:
                await self._worker.do(self._nvml.close)
            except TimeoutError:
                log.warning("the driver of the GPUs does not answer")
        if self._worker is not None:
            self._worker.stop()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _find(self) -> tuple[Device, ...]:
        library = self._library or find_library()
        if library is None:
            return ()
        self._nvml = Nvml(library)
        try:
            return self._nvml.find()
        except OSError as error:
            log.warning("%s", error)
            return ()

    def _read(self) -> list[tuple[CardReading, tuple[tuple[str, int | None], ...]]]:
        """What was read, and whose the memory is: (execution key or "", bytes)."""
        assert self._nvml is not None
        return [
            (card, tuple((self._owners.key_of(pid), used) for pid, used in card.used)) for card in self._nvml.read()
        ]

    # -- in the loop ---------------------------------------------------------------------------------------------------

    async def _found(self, devices: tuple[Device, ...]) -> None:
        gpus = self._usable(devices)
        self.devices = (*gpus, *self._others)
        self._state = {gpu.id: _Averaged(gpu) for gpu in gpus}
        if gpus:
            log.info("%d GPUs: %s", len(gpus), ", ".join(gpu.model for gpu in gpus))

    async def _sample(self) -> None:
        assert self._worker is not None
        read_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        is_asked = time.monotonic() < self._look_until_s
        try:
            cards = await self._worker.do(self._read)
        except TimeoutError:
            self._tell_unknown()
            await self._worker.idle()
            return  # what it has come back with is old
        except Exception:  # whatever goes wrong with a driver, the rest of the node works
            log.exception("the GPUs cannot be read")
            self._tell_unknown()
            return
        readings = [self._state[card.id].reading(card, used) for card, used in cards if card.id in self._state]
        if is_asked or any(_is_news(self._told.get(reading.id), reading) for reading in readings):
            self._tell(read_s, tuple(readings))

    def _tell(self, read_s: float, readings: tuple[DeviceReading, ...]) -> None:
        self._told = {reading.id: reading for reading in readings}
        self._put(DevicesSampled(read_s, readings))

    def _tell_unknown(self) -> None:
        log.warning("the driver of the GPUs does not answer within %g s: they are unknown until it does", DEADLINE_S)
        unknown = tuple(
            msgspec.structs.replace(
                self._told.get(name, DeviceReading(name)), health=Health.UNKNOWN, why="its driver does not answer"
            )
            for name in self._state
        )
        self._tell(time.clock_gettime(time.CLOCK_BOOTTIME), unknown)


class _Averaged:
    """From what is read of one card to its `DeviceReading`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._busy: float | None = None
        self._read_s = 0.0
        self._unexplained = 0

    def reading(self, card: CardReading, used: tuple[tuple[str, int | None], ...]) -> DeviceReading:
        """``used``: (execution key or "", bytes) of each process."""
        ours, foreign, foreign_bytes = self._shared_out(card, used)
        busy = self._average(card.busy or 0.0)
        self._unexplained = self._unexplained + 1 if not used and (card.busy or 0.0) > FOREIGN_BUSY else 0
        limit = max(FOREIGN_BYTES, int(FOREIGN_SHARE * self._device.mem_bytes))
        is_there = foreign_bytes > limit or self._unexplained >= FOREIGN_READINGS
        return DeviceReading(
            card.id,
            card.health,
            card.why,
            busy,
            card.mem_used_bytes,
            foreign_bytes,
            max(foreign, 1) if is_there else 0,
            tuple(sorted(ours.items())[:RUNS_SEEN_MAX]),
            card.temperature_c,
            card.is_throttled,
        )

    def _shared_out(
        self, card: CardReading, used: tuple[tuple[str, int | None], ...]
    ) -> tuple[dict[str, int], int, int]:
        """Memory by attempt, the number of foreign processes, and their memory: at least what none of ours explains."""
        ours: dict[str, int] = {}
        untold = [key for key, size in used if key and size is None]
        for key, size in used:
            if key:
                ours[key] = ours.get(key, 0) + (size or 0)
        foreign = [size or 0 for key, size in used if not key]
        rest = max(card.mem_used_bytes - sum(ours.values()), 0)
        if not untold:
            return ours, len(foreign), max(sum(foreign), rest)
        left = max(rest - sum(foreign), 0)  # nobody can tell whose that is: those have it who cannot be read
        for key in untold:
            ours[key] += left // len(untold)
        return ours, len(foreign), sum(foreign)

    def _average(self, now: float) -> float:
        moment_s = time.monotonic()
        weight = 1.0 - math.exp(-(moment_s - self._read_s) / AVERAGE_S)
        self._busy = now if self._busy is None else self._busy + weight * (now - self._busy)
        self._read_s = moment_s
        return min(max(self._busy, 0.0), 1.0)


def _is_news(told: DeviceReading | None, now: DeviceReading) -> bool:
    if told is None:
        return True
    if (told.health, told.why, told.foreign, told.is_throttled) != (now.health, now.why, now.foreign, now.is_throttled):
        return True
    if abs(told.busy - now.busy) >= TELL_BUSY or abs(told.mem_used_bytes - now.mem_used_bytes) >= TELL_BYTES:
        return True
    before, after = dict(told.ours), dict(now.ours)
    return before.keys() != after.keys() or any(abs(before[key] - after[key]) >= TELL_BYTES for key in after)


class _Worker:
    """A thread that does one thing at a time. It is no reason to keep a process that ends."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done: asyncio.Future[Any] | None = None
        threading.Thread(target=self._run, name="gpus", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether it has not come back from the last call."""
        return self._done is not None and not self._done.done()

    async def do(self, call: Callable[[], Any]) -> Any:  # noqa: ANN401 -- what the call returns
        """What the call returns. Raises TimeoutError if it has not within DEADLINE_S, or the last one has not."""
        if self.is_busy:
            raise TimeoutError
        self._done = self._loop.create_future()
        self._work.put(call)
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.shield(self._done)

    async def idle(self) -> None:
        """Return when it has come back from the last call, whenever that is."""
        if self._done is not None:
            await asyncio.wait((self._done,))

    def stop(self) -> None:
        """It ends when it comes back."""
        self._work.put(None)

    def _run(self) -> None:
        while (call := self._work.get()) is not None:
            try:
                result, error = call(), None
            except Exception as failure:  # noqa: BLE001 -- it is the caller's, in the loop
                result, error = None, failure
            try:
                self._loop.call_soon_threadsafe(self._hand_over, result, error)
            except RuntimeError:  # the loop is closed: nobody waits for it any more
                return

    def _hand_over(self, result: object, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(result)
        else:
            self._done.set_exception(error)
