"""Loss, duplication, reordering, partitions and crashes by seed; the checker watches every step."""

from __future__ import annotations

import random
from functools import partial

import msgspec
import pytest

from peerload.model.config import CoreConfig
from peerload.model.gossip import LOCAL
from peerload.model.messages import Envelope
from peerload.policy.registry import load_preset
from peerload.wire.peer import decode, encode
from tests.chaos.engine.engine import Simulation, WorldOptions
from tests.chaos.engine.network import Clog, NetworkOptions, Partition
from tests.chaos.engine.report import Report
from tests.support import in_short
from tests.workloads import poisson

SEEDS = 60
FAULTS_UNTIL_S = 40.0
CONFIG = CoreConfig(
    lease_s=2.0,
    lease_grace_s=0.5,
    reservation_s=1.0,
    offer_timeout_s=0.5,
    repeat_s=0.2,
    repeat_s_max=1.0,
    gossip=msgspec.structs.replace(LOCAL, reconnect_s=1.0, sync_s=2.0),
    attempts_max=1000,
    loss_backoff_s=0.1,
    loss_backoff_s_max=0.1,
    poison_nodes=1000,
)


def codec(envelope: Envelope) -> Envelope:
    return decode(encode(envelope))


def faulty(seed: int) -> Simulation:
    rng = random.Random(f"{seed} faults")
    names = [f"n{index}" for index in range(1, 4)]
    cuts = tuple(
        Partition(start_s := rng.uniform(2.0, FAULTS_UNTIL_S), start_s + rng.uniform(0.5, 8.0), (rng.choice(names),))
        for _ in range(rng.randrange(6))
    )
    clogs = tuple(
        Clog(start_s := rng.uniform(2.0, FAULTS_UNTIL_S), start_s + rng.uniform(0.5, 8.0), *rng.sample(names, 2))
        for _ in range(rng.randrange(4))
    )
    network = NetworkOptions(
        jitter_s=rng.choice([0.0, 0.01, 0.3]),
        loss=rng.choice([0.0, 0.05, 0.3]),
        duplication=rng.choice([0.0, 0.2]),
        replay=rng.choice([0.0, 0.05, 0.4]),
        replay_s=10.0,
        output_loss=rng.choice([0.0, 0.5]),
        partitions=cuts,
        clogs=clogs,
        faults_until_s=FAULTS_UNTIL_S,
    )
    preset = load_preset(rng.choice(["adaptive", "symmetric", "threshold", "shortest", "receiver", "random"]))
    simulation = Simulation(
        preset,
        nodes=3,
        slots=2,
        seed=seed,
        config=CONFIG,
        world=WorldOptions(network, codec, disk_s=rng.choice([0.0, 0.005, 0.05])),
    )
    for _ in range(rng.randrange(12)):
        host = simulation.hosts[rng.choice(["n1", *names])]
        down_s, machine = rng.choice([0.05, 1.0, 6.0]), rng.random() < 0.3
        simulation.at(
            rng.uniform(1.0, FAULTS_UNTIL_S),
            partial(simulation.crash, host, down_s, machine=machine),
        )
    return simulation


def run(seed: int) -> tuple[Simulation, Report]:
    """Short tasks, or fewer that need their leases renewed, with room left for second copies, under these faults."""
    simulation = faulty(seed)
    rng = random.Random(f"{seed} workload")
    arrivals = poisson(["n1"], 0.5, 20, rng, 5.0) if seed % 4 else poisson(["n1", "n1", "n2"], 5.0, 60, rng, 0.8)
    return simulation, simulation.run(arrivals, until_s=300.0)


@pytest.mark.parametrize("seed", in_short(range(SEEDS), 6))
def test_nothing_is_lost_doubled_or_recorded_twice(seed: int) -> None:
    simulation, report = run(seed)
    assert simulation.checker.unfinished() == [], f"seed {seed}: {report}"
    assert report.ended == report.tasks, f"seed {seed}"
