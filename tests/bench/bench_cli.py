"""How quick the command line is, against a bare Python: medians, and how many times as long.

Run it with `python tests/bench/bench_cli.py`; it needs no agent (an echo of one answers `submit`).
Exit code 1 if `--version` or `--help` takes more than 3 times as long as `python -I -c pass`, `submit` more than 6.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from peerload.wire import frame  # noqa: E402 -- the checkout comes first
from tests import frames  # noqa: E402 -- as above

ROUNDS = 15
LIMITS = {"--version": 3.0, "--help": 3.0, "submit true": 6.0}
START = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from peerload.cli.main import main; sys.exit(main())"


def elapsed_s(words: list[str], variables: dict[str, str]) -> float:
    """One run."""
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-I", *words], env=variables, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began_s


def answer_submits(listener: socket.socket) -> None:
    """Say "submitted" to every request until the listener is shut down."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            request = frames.read(connection)
            reply = {"id": "ws1/1", "members": None, "directory_here": True, "placeable": None}
            connection.sendall(frame.pack({"id": request["id"], "ok": reply}))


def main() -> int:
    """Measure in turn, so that a noisy moment hits all alike; print a table."""
    directory = tempfile.mkdtemp(dir="/tmp", prefix="pl-")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/s")
        listener.listen()
        thread = threading.Thread(target=answer_submits, args=(listener,))
        thread.start()
        variables = {**os.environ, "PEERLOAD_SOCKET": f"{directory}/s"}
        runs: dict[str, list[float]] = {name: [] for name in ("pass", *LIMITS)}
        for _ in range(ROUNDS):
            runs["pass"].append(elapsed_s(["-c", "pass"], variables))
            for name in LIMITS:
                runs[name].append(elapsed_s(["-c", START, *name.split()], variables))
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    shutil.rmtree(directory)
    bare_s = statistics.median(runs["pass"])
    code = 0
    for name, seconds in runs.items():
        median_s = statistics.median(seconds)
        limit = LIMITS.get(name)
        code |= limit is not None and median_s / bare_s > limit
        print(  # noqa: T201 -- a measurement is its own report
            f"{name:12} {median_s * 1000:6.1f} ms  {median_s / bare_s:4.1f} x"
            + (f"  (at most {limit:g})" if limit else "")
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
