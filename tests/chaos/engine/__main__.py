"""`python -m peerload.sim`: a burst of equal tasks at one node, or Poisson arrivals everywhere, under one preset."""

from __future__ import annotations

import argparse
import random
import sys

from peerload.model.errors import PeerloadError
from peerload.policy.registry import load_preset
from tests.chaos.engine.engine import Simulation
from tests.chaos.engine.trace import Trace
from tests.workloads import burst, poisson


def main(words: list[str] | None = None) -> int:
    """Run one simulation and print its report."""
    reader = argparse.ArgumentParser(prog="python -m peerload.sim", description=__doc__)
    reader.add_argument("--policy", default="adaptive", help="a preset's name or file")
    reader.add_argument("--nodes", type=int, default=3)
    reader.add_argument("--slots", type=int, default=2)
    reader.add_argument("--tasks", type=int, default=120)
    reader.add_argument("--seed", type=int, default=1)
    reader.add_argument("--service", type=float, default=0.2, help="seconds a task takes")
    reader.add_argument("--load", type=float, default=0.0, help="Poisson arrivals at this load per slot; 0 = a burst")
    reader.add_argument("--trace", action="store_true", help="every event and action on stderr")
    flags = reader.parse_args(words)
    write = (lambda line: print(line, file=sys.stderr)) if flags.trace else None  # noqa: T201 -- asked for
    try:
        policies = load_preset(flags.policy)
    except PeerloadError as error:
        sys.stderr.write(f"{error}\n{error.hint}\n")
        return 2
    simulation = Simulation(policies, nodes=flags.nodes, slots=flags.slots, seed=flags.seed, trace=Trace(write))
    if flags.load:
        rate = flags.load * flags.nodes * flags.slots / flags.service
        rng = random.Random(f"{flags.seed} workload")
        arrivals = poisson(list(simulation.hosts), rate, flags.tasks, rng, flags.service)
    else:
        arrivals = burst("n1", flags.tasks, flags.service)
    sys.stdout.write(simulation.run(arrivals).text() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
