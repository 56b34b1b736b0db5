"""Loss, duplication, reordering, partitions and crashes by seed; the checker watches every step."""

from __future__ import annotations

import random
from functools import partial

import pytest

from peerload.model.config import CoreConfig
from peerload.model.messages import Envelope
from peerload.policy.registry import load_preset
from peerload.sim.engine import Simulation
from peerload.sim.network import NetworkOptions, Partition
from peerload.sim.workload import poisson
from peerload.wire.peer import decode, encode

SEEDS = 60
FAULTS_UNTIL_S = 20.0
CONFIG = CoreConfig(
    lease_s=2.0,
    lease_grace_s=0.5,
    reservation_s=1.0,
    offer_timeout_s=0.5,
    repeat_s=0.2,
    repeat_s_max=1.0,
    ping_s=0.5,
    suspect_after_s=1.0,
    dead_after_s=2.0,
    attempts_max=1000,
)


def codec(envelope: Envelope) -> Envelope:
    return decode(encode(envelope))


def faulty(seed: int) -> Simulation:
    rng = random.Random(f"{seed} faults")
    names = [f"n{index}" for index in range(1, 4)]
    cuts = tuple(
        Partition(start_s := rng.uniform(2.0, 15.0), start_s + rng.uniform(0.5, 5.0), (rng.choice(names),))
        for _ in range(rng.randrange(3))
    )
    network = NetworkOptions(
        jitter_s=rng.choice([0.0, 0.01, 0.3]),
        loss=rng.choice([0.0, 0.05, 0.3]),
        duplication=rng.choice([0.0, 0.2]),
        partitions=cuts,
        faults_until_s=FAULTS_UNTIL_S,
    )
    preset = load_preset(rng.choice(["symmetric", "threshold", "shortest", "receiver"]))
    simulation = Simulation(
        preset,
        nodes=3,
        slots=2,
        seed=seed,
        config=CONFIG,
        network=network,
        disk_s=rng.choice([0.0, 0.005, 0.05]),
        codec=codec,
    )
    for _ in range(rng.randrange(8)):
        host = simulation.hosts[rng.choice(names)]
        down_s, machine = rng.uniform(0.01, 6.0), rng.random() < 0.3
        simulation.at(
            rng.uniform(1.0, FAULTS_UNTIL_S),
            partial(simulation.crash, host, down_s, machine=machine),
        )
    return simulation


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_lost_doubled_or_recorded_twice(seed: int) -> None:
    simulation = faulty(seed)
    arrivals = poisson(["n1", "n1", "n2"], 5.0, 60, random.Random(seed), 0.8)
    report = simulation.run(arrivals, until_s=120.0)
    assert simulation.checker.unfinished() == [], f"seed {seed}: {report}"
    assert report.ended == report.tasks == 60, f"seed {seed}"
