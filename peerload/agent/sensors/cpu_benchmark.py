"""How fast this node works beside the reference machine: measured once, by a process of its own, and kept.

The measurement is one second of processor time, half in the interpreter and half in a hash function, at the lowest
priority and some time after the start: it delays nobody, and a busy machine does not look slow for being busy. What was
found lies in STATE/speed; whoever removes that file has it measured again at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import peerload
from peerload.model.events import SpeedMeasured

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("peerload.agent")

MEASURE_AFTER_S = 5.0
"""After the start of the agent."""
MEASURE_S = 1.0
"""Of processor time."""
MEASURE_S_MAX = 60.0
"""Where the machine is so busy that it takes longer, it is tried again at the next start."""
UNITS_PER_S_REFERENCE = 300.0
"""What the reference machine does: one core of a 2020s server (AMD EPYC) under CPython 3.11."""
SPEED_MIN, SPEED_MAX = 0.001, 1000.0
LOWEST_PRIORITY = 19
FILE_BYTES_MAX = 64
_STEPS = 20_000
_BLOCK = bytes(range(256)) * 256
_BLOCKS = 32


# -- in the agent ------------------------------------------------------------------------------------------------------


def kept_speed(path: Path) -> float | None:
    """What was measured at an earlier start; None if nothing that can be used."""
    try:
        with path.open("rb") as file:
            return _speed(file.read(FILE_BYTES_MAX))
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be read: %s", path, error.strerror)
        return None


async def find_out(path: Path, put: Callable[[SpeedMeasured], None], after_s: float = MEASURE_AFTER_S) -> None:
    """Measure, keep, tell. Nothing depends on it: where it cannot be done the node counts as the reference machine."""
    await asyncio.sleep(after_s)
    try:
        process = _start()  # 1 ms, by vfork: once in the life of a state directory, and nothing until the kill below
    except OSError as error:
        log.warning("the speed of this node cannot be measured: %s; the next start tries again", error.strerror)
        return
    try:
        said = await asyncio.to_thread(_said, process)
    except asyncio.CancelledError:
        process.kill()  # its output ends, and with it the thread that reads it
        raise
    except OSError as error:
        log.warning("the speed of this node could not be measured: %s; the next start tries again", error.strerror)
        return
    speed = _speed(said)
    if speed is None:
        log.warning("the speed of this node could not be measured (exit code %s)", process.returncode)
        return
    try:
        await asyncio.to_thread(_keep, path, speed)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)
    log.info("this node works at %.2f times the speed of the reference machine", speed)
    put(SpeedMeasured(speed))


def _start() -> subprocess.Popen[bytes]:
    root = str(Path(peerload.__file__).resolve().parent.parent)
    places = [str(Path(peerload.__file__).parent.parent), root]
    code = f"import sys; sys.path[:0] = {places!r}; from peerload.agent.sensors.cpu_benchmark import main; main()"
    return subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _said(process: subprocess.Popen[bytes]) -> bytes:
    with process:
        try:
            return process.communicate(timeout=MEASURE_S_MAX)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return b""


def _speed(text: bytes) -> float | None:
    with contextlib.suppress(ValueError):
        speed = float(text)
        if math.isfinite(speed):
            return round(min(max(speed, SPEED_MIN), SPEED_MAX), 3)
    return None


def _keep(path: Path, speed: float) -> None:
    new = path.with_suffix(".new")
    new.write_text(f"{speed}\n", encoding="ascii")
    new.replace(path)


# -- in the process that measures --------------------------------------------------------------------------------------


def measured() -> float:
    """The speed of this processor, beside that of the reference machine."""
    units = 0
    began_s = time.process_time()
    while (passed_s := time.process_time() - began_s) < MEASURE_S:
        _work()
        units += 1
    return units / passed_s / UNITS_PER_S_REFERENCE


def _work() -> None:
    """One unit: about as long in the interpreter as in the hash function."""
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
    """Measure and print."""
    os.nice(LOWEST_PRIORITY)
    sys.stdout.write(f"{measured():.4f}\n")
