"""`make gate-proof`: the gate many times in a row beside a busy loop on each core, to prove that no test depends on time."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys


def main() -> int:
    """Exit code 0 if every run passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gate_proof", description=__doc__, allow_abbrev=False)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("pytest_args", nargs="*")
    options = parser.parse_args()
    passed = 0
    for number in range(1, options.times + 1):
        hogs = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(len(os.sched_getaffinity(0)))
        ]
        try:
            done = subprocess.run([sys.executable, "-m", "pytest", "-q", *options.pytest_args], check=False)
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
        passed += done.returncode == 0
        sys.stdout.write(f"gate-proof: {passed} of {number} passed\n")
        sys.stdout.flush()
    return 0 if passed == options.times else 1


if __name__ == "__main__":
    sys.exit(main())
