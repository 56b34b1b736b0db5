"""`make test-alone`: each test file by itself, in an order drawn from SEED, to prove that no test needs another one."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTHING_COLLECTED = 5
"""What pytest exits with where every test of a file is marked `long`."""


def test_files(paths: list[str]) -> list[Path]:
    """The test files among these files and folders, in order."""
    given = [ROOT / path for path in paths]
    return [file for path in given for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]


def played(file: Path, seed: int) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """Run one file → the command, and what came of it."""
    name = str(file.relative_to(ROOT))
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--random-order", f"--random-order-seed={seed}", name]
    environment = {**os.environ, "COLUMNS": "300"}  # the summary says what failed in one line
    return command, subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    """Exit code 0 if every file passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.alone", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="files at a time")
    parser.add_argument("paths", nargs="*", default=["tests"], help="test files or folders")
    options = parser.parse_args()
    files = test_files(options.paths)
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for command, done in pool.map(lambda file: played(file, options.seed), files):
            if done.returncode in (0, NOTHING_COLLECTED):
                continue
            failed += 1
            told = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            report = told or [*done.stdout.splitlines()[-20:], *done.stderr.splitlines()[-20:]]
            sys.stdout.write("\n".join([*report, f"  again: {' '.join(command)}", ""]))
            sys.stdout.flush()
    sys.stdout.write(f"test-alone: {len(files) - failed} of {len(files)} files passed (SEED={options.seed})\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
