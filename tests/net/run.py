"""`make net-test`: real agents on networks of every bad kind. Needs root, and the programs ip, nft and mosquitto."""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import SYSTEM_DIRECTORIES, require_program
from tests.net.scenarios import SCENARIOS

COLUMNS = "{:<28} {:>5} {:>6} {:>7} {:>7} {:>7}  {}\n"
HEAD = COLUMNS.format("scenario", "hosts", "tasks", "across", "heal s", "took s", "verdict")


PROGRAMS = (("ip", "iproute2"), ("nft", "nftables"), ("sysctl", "procps"), ("mosquitto", "mosquitto"))
"""What is needed, each with the Debian package that has it, from which it is installed where it is missing."""


class Held(NamedTuple):
    """A scenario that was held. said: what there is to say of one that failed."""

    number: int
    is_good: bool
    row: str
    said: str


def lacks() -> str:
    """What there is not, and cannot be installed; "" if all is there."""
    if os.geteuid() != 0:
        return "networks of one's own are root's to make: sudo make net-test"
    try:
        for program, package in PROGRAMS:
            require_program(program, package)
    except (pytest.fail.Exception, pytest.skip.Exception) as error:
        return str(error)
    return ""


def end_cleanly() -> None:
    """Have a signal end this process as an error would, so that nothing is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def held(number: int) -> Held:
    """Play one."""
    scenario, started_s, said = SCENARIOS[number], time.monotonic(), io.StringIO()
    found = shutil.which("mosquitto") or shutil.which("mosquitto", path=SYSTEM_DIRECTORIES)
    cells, is_good = ["", "", "", ""], False
    with contextlib.redirect_stdout(said):
        try:
            told = scenario.play(Path(found) if found else None)
        except SystemExit:  # a signal: what was built is removed by now, and no other is to begin
            os._exit(1)
        except Exception:  # noqa: BLE001 -- the others are to be played all the same
            said.write(traceback.format_exc())
        else:
            heal = "" if told.heal_s is None else f"{told.heal_s:.1f}"
            cells, is_good = [str(told.hosts), str(told.tasks), str(told.across), heal], True
    took = f"{time.monotonic() - started_s:.0f}"
    return Held(
        number, is_good, COLUMNS.format(scenario.name, *cells, took, "ok" if is_good else "FAILED"), said.getvalue()
    )


def main() -> int:
    """Exit code 0 if every scenario ended well."""
    parser = argparse.ArgumentParser(prog="python -m tests.net.run", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", nargs="*", default=(), metavar="WORD", help="scenarios whose names have one of these")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="scenarios at a time (default 2)")
    flags = parser.parse_args()
    chosen = [
        number
        for number, scenario in enumerate(SCENARIOS)
        if not flags.only or any(word in scenario.name for word in flags.only)
    ]
    if why := lacks():
        sys.stderr.write(f"net-test: {why}\n")
        return 2
    os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), SYSTEM_DIRECTORIES))
    end_cleanly()
    rows: dict[int, Held] = {}
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(flags.jobs, mp_context=spawning, initializer=end_cleanly) as pool:
        try:
            for done in as_completed([pool.submit(held, number) for number in chosen]):
                one = done.result()
                rows[one.number] = one
                sys.stdout.write(one.row if one.is_good else one.said + one.row)
                sys.stdout.flush()
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    sys.stdout.write("\n" + HEAD + "".join(rows[number].row for number in sorted(rows)))
    return 0 if chosen and all(one.is_good for one in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
