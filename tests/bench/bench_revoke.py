"""How long after `peerload revoke` all other members know, and have let go of who was shut out; beside a verb that asks nobody.

.venv/bin/python tests/bench/bench_revoke.py [NODES] [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.integration.machines import Lab
from tests.support import wait_until

LIMIT_S = 10.0
"""Rule J4 of docs/security.md."""


def main(nodes: int = 8, rounds: int = 4) -> int:
    """Shut out one member after the other; the exit code says whether the slowest was within the limit."""
    with Lab() as lab:
        names = [f"ws{number}" for number in range(1, nodes + 1)]
        machines = lab.cluster(*names)
        wait_until(lambda: all(m.sees(*{*names} - {m.name}) for m in machines), 120, "all to know all")
        floor, told, let_go = [], [], []
        for _ in range(rounds):
            out, name = machines.pop(), names.pop()
            began_s = time.monotonic()
            machines[0].done("ls")
            floor.append(time.monotonic() - began_s)
            began_s = time.monotonic()
            machines[0].done("revoke", name)
            wait_until(lambda name=name: all(name in m.call("info")["revoked"] for m in machines), what="all to know")  # type: ignore[misc]
            told.append(time.monotonic() - began_s)
            wait_until(lambda: all(m.sees(*{*names} - {m.name}) for m in machines), what="all to let go of it")
            let_go.append(time.monotonic() - began_s)
            out.done("down", "--all")
        base = statistics.median(floor)
        for what, times in (("`ls`, which asks nobody", floor), ("all know", told), ("all have let go of it", let_go)):
            middle = statistics.median(times)
            sys.stdout.write(
                f"{what:24} {middle:6.2f} s [{min(times):.2f}..{max(times):.2f}]  {middle / base:5.1f} x `ls`\n"
            )
        sys.stdout.write(f"{nodes} nodes, {rounds} rounds; at most {LIMIT_S:g} s\n")
        return max(let_go) > LIMIT_S


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
