"""How long `peerload why` takes with 300 nodes of eight GPUs each: the verb as it is typed, against a real agent that was
told of them, and the decision alone where every change is tried and none helps.

`python tests/bench/bench_why.py`. Exit code 1 if the verb takes more than 500 ms.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.core.explain import EligibilityVerdict, WaitReasons, smallest_change
from peerload.model import events
from peerload.model.gossip import Load, MembershipUpdate, MemberStatus
from peerload.model.messages import KnownProfile, ProfileRequest, ProfileTold, Sync
from peerload.model.resources import Device, DeviceLoad, DeviceMode, LoadReport, Profile, Region, ResourceRequest
from tests.bench.support import arguments, report
from tests.core.given import Given, identity, spec
from tests.integration.cluster import Cluster
from tests.integration.fake_peer import FakePeer
from tests.support import wait_until

NODES, GPUS = 300, 8
ROUNDS = 20
VERB_S_MAX = 0.5
GIB = 1 << 30


def name(number: int) -> str:
    return f"node{number}"


def profile(number: int) -> Profile:
    """A node of eight GPUs."""
    devices = tuple(
        Device(f"nvidia:GPU-{number}-{gpu}", index=gpu, model="A100", mem_bytes=80 * GIB, grantable_bytes=70 * GIB)
        for gpu in range(GPUS)
    )
    return Profile(name(number), 64, 64.0, 256 * GIB, GPUS, devices=devices, slots_fixed=True)


def full(number: int) -> LoadReport:
    """All of its GPUs are busy."""
    devices = tuple(
        DeviceLoad(device.mark, DeviceMode.TIME, 4096 + gpu, 2, 60, used_mib=70_000, tasks=3)
        for gpu, device in enumerate(profile(number).devices)
    )
    return LoadReport(
        load_tasks=24, slots=64, running=24, waiting=1, region=Region.UNDERLOADED, accepts=True, incarnation=1,
        sequence=1, gpus=GPUS, gpu_tasks=24, devices=devices,
    )  # fmt: skip


def decided(rounds: int) -> dict[str, float]:
    """The answer without the agent around it, where nothing helps."""
    x = Given(slots=4, peers=())
    for number in range(NODES):
        x.when(events.PeerMet(identity(name(number)), profile(number), full(number)))
    request = ResourceRequest(gpus=GPUS, gpu_mem_bytes=40 * GIB, gpu_prefer=("0",))
    x.submit(spec(request=request))
    times, cpu = [], []
    verdicts: list[EligibilityVerdict] = []
    for _ in range(rounds):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        reasons = WaitReasons(x.node, x.task(), x.at_s)
        verdicts = list(reasons.verdicts())
        smallest_change(x.node, reasons, x.task().spec)
        times.append(time.perf_counter() - began_s)
        cpu.append(time.process_time() - began_cpu_s)
    assert len(verdicts) == NODES + 1
    return {"p50_s": statistics.median(times), "max_s": max(times), "cpu_p50_s": statistics.median(cpu)}


def typed(rounds: int) -> dict[str, float]:
    """The verb in a process of its own."""
    with Cluster() as cluster:
        agent = cluster.agent(slots=4)
        with FakePeer(agent.listen) as ghost:
            rumours = tuple(
                MembershipUpdate(
                    who.node, who.boot, who.machine_boot, who.store, 1, 1, MemberStatus.ALIVE, "127.0.0.1:9"
                )
                for who in (identity(name(number)) for number in range(NODES))
            )
            loads = tuple(Load.of(name(number), full(number)) for number in range(NODES))
            ghost.send(Sync(rumours, loads))
            told: set[str] = set()
            while len(told) < NODES:
                asked = ghost.expect(ProfileRequest)
                numbers = [int(node.removeprefix("node")) for node in asked.nodes]
                ghost.send(ProfileTold(tuple(KnownProfile(identity(name(n)).boot, profile(n)) for n in numbers)))
                told.update(asked.nodes)
            wait_until(lambda: len(agent.call("nodes")["nodes"]) >= NODES, 20, "the nodes to be known")
            task = agent.submit("true", request={"gpus": GPUS, "gpu_mem_bytes": 40 * GIB})
            return measured(agent, task, rounds)


def measured(agent: Any, task: str, rounds: int) -> dict[str, float]:
    """Wall time of the verb, and of the agent's part of it."""
    verb, answer = [], []
    for _ in range(rounds):
        began_s = time.perf_counter()
        done = agent.cli("why", task)
        verb.append(time.perf_counter() - began_s)
        assert done.stdout.count(b"node") >= NODES, done.stdout.decode() + done.stderr.decode()
        with agent.client() as client:
            began_s = time.perf_counter()
            client.call("why", task=task)
            answer.append(time.perf_counter() - began_s)
    return {
        "verb_p50_s": statistics.median(verb),
        "verb_max_s": max(verb),
        "answer_p50_s": statistics.median(answer),
        "answer_max_s": max(answer),
    }


def main() -> int:
    """Measure and judge."""
    asked = arguments(__doc__ or "", rounds=ROUNDS)
    alone, verb = decided(asked.rounds), typed(asked.rounds)
    lines = (
        f"peerload why with {NODES} nodes of {GPUS} GPUs: p50 {verb['verb_p50_s'] * 1000:.0f} ms, "
        f"at most {verb['verb_max_s'] * 1000:.0f} ms; of that the agent's answer {verb['answer_p50_s'] * 1000:.0f} ms, "
        f"at most {verb['answer_max_s'] * 1000:.0f} ms\n"
        f"the decision where every change is tried in vain: p50 {alone['p50_s'] * 1000:.0f} ms, "
        f"at most {alone['max_s'] * 1000:.0f} ms, of the processor's time {alone['cpu_p50_s'] * 1000:.0f} ms"
    )
    figures = {
        "nodes": NODES,
        "gpus": GPUS,
        **verb,
        "decision_p50_s": alone["p50_s"],
        "decision_max_s": alone["max_s"],
        "decision_cpu_p50_s": alone["cpu_p50_s"],
    }
    report([lines], figures, as_json=asked.json)
    return int(verb["verb_p50_s"] > VERB_S_MAX or alone["max_s"] > VERB_S_MAX)


if __name__ == "__main__":
    raise SystemExit(main())
