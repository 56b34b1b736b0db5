"""What it costs the launcher of all users to start a `/bin/true`, beside one user's own: `posix_spawn` against a child that drops
its rights and verifies that, without and with a guest's world. Run as root:  python tests/bench/bench_drop.py [COUNT]

Prints the median of paired batches: milliseconds from the start of a process to its end, and of processor time, the
launcher's own and the child's.
"""

from __future__ import annotations

import os
import select
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.launcher.process import AgentCredentials, spawn
from peerload.launcher.protocol import SpawnRequest
from peerload.launcher.system.accounts import LauncherAccount, UsersPolicy
from peerload.launcher.system.fork_server import ChildReports, ForkServer, SpawnOrder
from peerload.launcher.system.sandbox import Syscalls, guest_filter

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 25
USER = 20_001
GUEST = 61_999


def main() -> None:
    """Measure and print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    if os.geteuid() != 0:
        sys.exit("only root can be others")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        paths = [f"{name}/out", f"{name}/err"]
        words = ChildReports(select.epoll())
        forge = ForkServer(Syscalls(), AgentCredentials(0, 0), words)
        environment = {b"PATH": b"/usr/bin:/bin"}
        request = SpawnRequest(
            "k", [b"/bin/true"], environment, b"/", 0o22, paths[0], paths[1], deadline_s=0.0, output_bytes_max=1 << 20
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

        def bare() -> int:
            return spawn(request)

        def user() -> int:
            return forge.spawn(SpawnOrder(LauncherAccount("u", USER, USER, (USER,), "/"), UsersPolicy(), request))

        def guest() -> int:
            account = LauncherAccount("g", GUEST, GUEST, (GUEST,), "/tmp", is_guest=True)
            order = SpawnOrder(account, UsersPolicy(), request)
            order.hidden, order.seccomp = (), guest_filter()
            return forge.spawn(order)

        told: dict[str, list[tuple[float, float, float]]] = {"posix_spawn": [], "as a user": [], "as a guest": []}
        for _ in range(max(count // BATCH, 3)):
            for kind, make in (("posix_spawn", bare), ("as a user", user), ("as a guest", guest)):
                told[kind].append(_batch(make))
                words.read()
        first = statistics.median(batch[0] for batch in told["posix_spawn"])
        for kind, batches in told.items():
            wall, own, theirs = (statistics.median(batch[at] for batch in batches) for at in range(3))
            sys.stdout.write(
                f"{kind:12} {wall:6.2f} ms each ({wall / first:4.1f} x); processor: {own:5.2f} the launcher's,"
                f" {theirs:5.2f} the child's\n"
            )


def _batch(make: Callable[[], int]) -> tuple[float, float, float]:
    began_s, used_s, theirs_s = time.perf_counter(), time.process_time(), 0.0
    for _ in range(BATCH):
        _, status, usage = os.wait4(make(), 0)
        assert not status, status
        theirs_s += usage.ru_utime + usage.ru_stime
    wall_s, own_s = time.perf_counter() - began_s, time.process_time() - used_s
    return wall_s / BATCH * 1e3, own_s / BATCH * 1e3, theirs_s / BATCH * 1e3


if __name__ == "__main__":
    main()
