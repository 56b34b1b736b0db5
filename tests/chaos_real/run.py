"""`make chaos-real`: one campaign of faults on real processes. Needs root, and the programs ip, nft, mosquitto and cc."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from pathlib import Path

from tests.chaos_real.campaign import Options, hold
from tests.chaos_real.faults import KINDS
from tests.conftest import SYSTEM_DIRECTORIES


def main() -> int:
    """Exit code 0 if nothing was lost, overlapped or recorded twice."""
    default = Options()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos_real.run", description=__doc__, allow_abbrev=False)
    parser.add_argument("--tasks", type=int, default=default.tasks)
    parser.add_argument("--faults", type=int, default=default.faults)
    parser.add_argument("--seconds", type=float, default=default.seconds)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--machines", type=int, default=default.machines)
    parser.add_argument("--slots", type=int, default=default.slots)
    parser.add_argument("--kinds", nargs="*", choices=[*KINDS], default=(), help="these faults only", metavar="KIND")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left behind
    options = Options(**vars(parser.parse_args()))
    found = shutil.which("mosquitto") or shutil.which("mosquitto", path=SYSTEM_DIRECTORIES)
    return 0 if hold(options, Path(found) if found else None).is_good else 1


if __name__ == "__main__":
    sys.exit(main())
