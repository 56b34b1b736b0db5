"""A test that failed beside thousands of others, on a machine that stood still meanwhile, is looked at once more, alone.

    python -m tests.again STATUS        after pytest has ended with this exit status

At most SO_MANY tests, each of which has to pass TIMES times in a row with nothing beside it. What a change broke fails here
again and fails the whole; what only failed once is named as unsteady, a defect of the test or of peerload to be looked into
(as CPython does, `python -m test --fast-ci`: https://github.com/python/cpython/pull/109570)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SO_MANY = 3
TIMES = 3
TESTS_FAILED = 1
"""The exit status of pytest that says that tests failed, and nothing else went wrong."""
FAILED = Path("build/failed-tests")
"""Written by tests/conftest.py at the end of each run: a test a line."""


def main(status: int) -> int:
    """The exit status of the whole."""
    failed = FAILED.read_text(encoding="utf-8").splitlines() if FAILED.exists() else []
    if status != TESTS_FAILED or not 0 < len(failed) <= SO_MANY:
        return status
    sys.stdout.write(f"\n{len(failed)} failed beside the others; alone, {TIMES} times:\n")
    for _ in range(TIMES):
        sys.stdout.flush()
        command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", *failed]
        if (again := subprocess.run(command, env=os.environ | {"PYTEST_ADDOPTS": ""}, check=False).returncode) != 0:
            return again
    sys.stdout.write(
        "".join(f"UNSTEADY  {test}  failed once, passed alone {TIMES} times: look into it\n" for test in failed)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
