"""CPU benchmark: the speed of this node relative to the reference machine, measured once by a separate process, and
stored.

It takes one second of processor time, half in the interpreter and half in a hash function, at the lowest priority and
some time after the start. So it delays no other work, and load does not change the result. The result is in STATE/speed;
remove that file to have it measured again at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import peerload
from peerload.agent.runtime import run_command
from peerload.model.events import SpeedMeasured
from peerload.security.private_files import write_private

if TYPE_CHECKING:
    from peerload.agent.runtime import EventSink

log = logging.getLogger("peerload.agent")

MEASURE_AFTER_S = 5.0
"""Delay after the start of the agent."""
MEASURE_S = 1.0
"""Processor time of the benchmark."""
MEASURE_S_MAX = 60.0
"""Timeout on a busy machine; it is tried again at the next start."""
UNITS_PER_S_REFERENCE = 300.0
"""Result of the reference machine: one core of a 2020s server (AMD EPYC) under CPython 3.11."""
SPEED_MIN, SPEED_MAX = 0.001, 1000.0
LOWEST_PRIORITY = 19
FILE_BYTES_MAX = 64
_STEPS = 20_000
_BLOCK = bytes(range(256)) * 256
_BLOCKS = 32


# -- in the agent ------------------------------------------------------------------------------------------------------


def stored_speed(path: Path) -> float | None:
    """The stored speed; None if there is no valid one."""
    try:
        with path.open("rb") as file:
            return _speed(file.read(FILE_BYTES_MAX))
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("cannot read the stored speed: path=%s error=%s", path, error.strerror)
        return None


async def measure_speed(path: Path, inbox: EventSink, after_s: float = MEASURE_AFTER_S) -> None:
    """Measure the speed, store it, and put it into the inbox. Without it, the node counts as the reference machine."""
    await asyncio.sleep(after_s)
    try:
        code, output = await run_command(_command(), MEASURE_S_MAX, output_bytes_max=FILE_BYTES_MAX)
    except OSError as error:  # a TimeoutError is one
        log.warning("cannot measure the speed, the next start tries again: error=%s", error.strerror or "timeout")
        return
    speed = _speed(output)
    if speed is None:
        log.warning("cannot measure the speed: exit_code=%s", code)
        return
    try:
        text = f"{speed}\n".encode()
        await asyncio.to_thread(write_private, path, text, is_durable=False)
    except OSError as error:
        log.warning("cannot store the speed: path=%s error=%s", path, error.strerror)
    log.info("speed measured: speed=%.2f (reference machine: 1)", speed)
    inbox.put(SpeedMeasured(speed))


def _command() -> list[str]:
    root = str(Path(peerload.__file__).resolve().parent.parent)
    places = [str(Path(peerload.__file__).parent.parent), root]
    code = f"import sys; sys.path[:0] = {places!r}; from peerload.agent.sensors.cpu_benchmark import main; main()"
    return [sys.executable, "-I", "-c", code]


def _speed(text: bytes) -> float | None:
    with contextlib.suppress(ValueError):
        speed = float(text)
        if math.isfinite(speed):
            return round(min(max(speed, SPEED_MIN), SPEED_MAX), 3)
    return None


# -- in the process that measures --------------------------------------------------------------------------------------


def measured() -> float:
    """The speed of this processor, relative to the reference machine."""
    units = 0
    began_s = time.process_time()
    while (passed_s := time.process_time() - began_s) < MEASURE_S:
        _work()
        units += 1
    return units / passed_s / UNITS_PER_S_REFERENCE


def _work() -> None:
    """Do one unit of work, about half in the interpreter and half in the hash function."""
    number = 1
    last_seen = {}
    for step in range(_STEPS):
        number = (number * 1_103_515_245 + 12_345) & 0x7FFF_FFFF
        last_seen[number & 255] = step
    digest = hashlib.blake2b()
    for _ in range(_BLOCKS):
        digest.update(_BLOCK)
    digest.digest()


def main() -> None:
    os.nice(LOWEST_PRIORITY)
    sys.stdout.write(f"{measured():.4f}\n")
