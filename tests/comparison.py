"""`python -m tests.comparison`: measure the desirable features of every preset, and write docs/comparison.md and its figure.

`make comparison` runs it. `--only a,b` plays fewer presets, a smaller `--scale` fewer tasks.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
import random
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from peerload.model import metrics
from peerload.model.config import CoreConfig
from peerload.policy.registry import load_preset, presets
from peerload.sim.bounds import mmc_response
from peerload.sim.outcome import GREW_FACTOR, GREW_SHARE
from peerload.sim.queueing_model import Arrival
from peerload.sim.replication import Replication, growth, measure
from peerload.sim.scenario import Scenario
from peerload.sim.utilization import UtilizationMonitor
from tests.chaos.engine.engine import Simulation, WorldOptions
from tests.chaos.engine.network import NetworkOptions

DOCS = Path(__file__).resolve().parents[1] / "docs"
NODES, LOAD, SEED = 20, 0.9, 1
DELAYS = {"message_s": 0.005, "transfer_s": 0.02, "head_s": 0.002}
"""In mean service times: a message between nodes, the handover of a task, the work of a head node on a message."""
SIZES = (10, 100, 1000)
LOADS = (0.8, 0.9, 0.95, 0.98)
OVERLOAD = 1.2
BURST, BURST_UNTIL_S, BURST_STEP_S, BUSY_SHARE = 10, 30.0, 0.02, 0.9
"""Tasks a slot that arrive at one node at once; how long and how often it is looked at; the share of slots that counts as all."""
BASE = 20
"""Times the shortest run: the one that gives the mean response, which M/M/1 at this load takes long to settle."""
FLOOD = 10.0
"""Times the rate of the others at which tasks arrive at one home."""
DOWN_S = 20.0
LOST_LOAD, LOST_AT, LOST_UNTIL, LOST_AROUND, LOST_UNIT_S, LOST_SEEDS = 0.7, 10.0, 20.0, 5.0, 10.0, 3
"""Loss of a node: load; so many mean service times after the first arrival; the end of arrivals; tasks that come within so
many of it count; a mean service time in seconds, since leases are in seconds; runs."""
KNOWLEDGE = {"split": "speeds", "least-joules": "power curves", "last-step": "power curves"}
RATES = ("optimal", "nash", "bargaining")


class Features(NamedTuple):
    """Measured features of one preset. NaN: it never came to that, or cannot be."""

    name: str
    classes: tuple[str, ...]
    knows: str
    response: float
    messages: float
    decisions: float
    decision_us: float
    reaction: float
    stable_to: float
    moves_overloaded: float
    messages_by_size: tuple[float, ...]
    unannounced: float
    head_down: float
    node_lost: float
    jain: float


class _Timed:
    """Location policy that counts its calls and their processor time."""

    def __init__(self, policy: Any) -> None:
        self._policy, self.calls, self.cpu_s = policy, 0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def __deepcopy__(self, memo: object) -> _Timed:
        del memo
        return self  # one for all nodes: it is a counter

    def locate(self, *arguments: Any) -> Any:
        begun_s = time.thread_time()
        try:
            return self._policy.locate(*arguments)
        finally:
            self.cpu_s += time.thread_time() - begun_s
            self.calls += 1


def scenario(policy: str, nodes: int, load: float, tasks: int, **others: Any) -> Scenario:
    fields = {**DELAYS, "is_live": True, "warm_up": tasks // 4, **others}
    return Scenario(policy=policy, nodes=nodes, load=load, tasks=tasks, **fields)


def played(asked: Scenario, *, rates: list[float] | None = None, is_announced: bool = True) -> tuple[Replication, Any]:
    setup = asked.setup()
    if rates is not None:
        setup = msgspec.structs.replace(setup, rates=rates)
    player = Replication(setup, SEED, watch=UtilizationMonitor())
    player.cluster._is_heard = is_announced
    player.play(asked.warm_up)
    return player, measure(player, asked.tasks - asked.warm_up, clock=lambda: 0.0, started_s=0.0)


def reaction(policy: str) -> float:
    """Mean service times from a burst at one node until 90 % of all slots are busy."""
    setup = scenario(policy, NODES, LOAD, 10).setup()
    ended: list[object] = []
    player = Replication(setup, SEED)
    player.cluster._ended = ended.append
    burst = (Arrival(1.0, "n1", 1000.0) for _ in range(BURST * NODES))
    player.cluster.run(burst, tasks=BURST * NODES)
    for step in range(int(BURST_UNTIL_S / BURST_STEP_S)):
        player.cluster.advance(1.0 + step * BURST_STEP_S)
        if sum(1 for _ in player.cluster.running()) >= BUSY_SHARE * NODES:
            return step * BURST_STEP_S
    return math.nan


def node_lost(policy: str) -> float:
    """Mean response of tasks that come around the loss of a node for good, over that of the same tasks without the loss, with
    leases, retries and gossip as agents have them. NaN: a central preset, whose head the engine with faults does not play."""
    preset = load_preset(policy)
    if preset.is_central:
        return math.nan
    world = WorldOptions(NetworkOptions(delay_s=DELAYS["message_s"] * LOST_UNIT_S))
    means: dict[bool, list[float]] = {False: [], True: []}
    for seed, is_lost in itertools.product(range(LOST_SEEDS), means):
        simulation = Simulation(preset, nodes=NODES, slots=1, seed=seed, world=world)
        if is_lost:
            crash = functools.partial(simulation.crash, simulation.hosts["n1"], math.inf, machine=True)
            simulation.at(LOST_AT * LOST_UNIT_S, crash)
        rng, arrivals, at_s = random.Random(seed), [], 1.0
        while at_s < LOST_UNTIL * LOST_UNIT_S:
            at_s += rng.expovariate(LOST_LOAD * NODES / LOST_UNIT_S)
            arrivals.append(Arrival(at_s, f"n{rng.randint(2, NODES)}", rng.expovariate(1 / LOST_UNIT_S)))
        simulation.run(arrivals)
        around = [
            response_s
            for task, response_s in simulation.responses_s.items()
            if abs(simulation._submitted_s[task] / LOST_UNIT_S - LOST_AT) < LOST_AROUND
        ]
        means[is_lost].append(fmean(around))
    return fmean(means[True]) / fmean(means[False])


def features(job: tuple[str, int]) -> Features:
    """Measure one preset; ``scale``: the base of the numbers of tasks."""
    name, scale = job
    preset = load_preset(name)
    _, sample = played(scenario(name, NODES, LOAD, BASE * scale))
    base = sample.values["mean_response"]
    timed = _Timed(preset.receiver if preset.names["location.sender"] == "none" else preset.sender)
    side = "receiver" if preset.names["location.sender"] == "none" else "sender"
    setup = scenario(name, NODES, LOAD, scale).setup()
    replaced = msgspec.structs.replace(setup.policies, **{side: timed})
    Replication(msgspec.structs.replace(setup, policies=replaced), SEED).play(scale)
    player, _ = played(scenario(name, NODES, LOAD, scale))
    searches = sum(player.counts().get(key, 0) for key in (metrics.SENDER_SEARCHES, metrics.RECEIVER_SEARCHES))
    stable_to = 0.0
    for load in LOADS:
        factor, share = growth([played(scenario(name, NODES, load, 3 * scale))[1]])
        if factor >= GREW_FACTOR and share >= GREW_SHARE:
            break
        stable_to = load
    _, over = played(scenario(name, NODES, OVERLOAD, scale))
    sizes = [played(scenario(name, size, LOAD, max(scale, 4 * size)))[1].values["messages_per_task"] for size in SIZES]
    each = LOAD * NODES / (NODES - 1 + FLOOD)
    _, flooded = played(scenario(name, NODES, LOAD, 2 * scale), rates=[FLOOD * each, *[each] * (NODES - 1)])
    homes = [total / count for count, total in flooded.homes[:NODES] if count]
    unannounced = math.nan
    if preset.information.watches != "nothing" and not preset.is_central:
        _, silent = played(scenario(name, NODES, LOAD, 2 * scale), is_announced=False)
        unannounced = silent.values["mean_response"] / base
    head_down = math.nan
    if preset.is_central:
        half_s = scale / NODES
        _, down = played(scenario(name, NODES, LOAD, 2 * scale, head_down=(half_s, DOWN_S)))
        head_down = down.values["mean_response"] / base
    sender = preset.names["location.sender"]
    knows = KNOWLEDGE.get(sender, "")
    if getattr(preset.sender, "by", "") in RATES:
        knows = "speeds, arrival rates"
    return Features(
        name,
        preset.classes,
        knows or "-",
        base / mmc_response(NODES, LOAD),
        sample.values["messages_per_task"],
        searches / player.last,
        1e6 * timed.cpu_s / timed.calls if timed.calls else math.nan,
        reaction(name),
        stable_to,
        over.values["transfers_per_task"],
        tuple(sizes),
        unannounced,
        head_down,
        node_lost(name),
        sum(homes) ** 2 / (len(homes) * sum(mean * mean for mean in homes)),
    )


COLUMNS: tuple[tuple[str, str], ...] = (
    ("response", ".2f"),
    ("messages", ".1f"),
    ("decisions", ".2f"),
    ("µs", ".0f"),
    ("reaction", ".2f"),
    ("stable to", ".2f"),
    ("moves", ".2f"),
    (f"messages at {' / '.join(map(str, SIZES))}", ".1f"),
    ("no broker", ".2f"),
    ("head down", ".2f"),
    ("node lost", ".2f"),
    ("Jain", ".2f"),
    ("knows", ""),
)


def page(found: list[Features]) -> str:
    """Text of docs/comparison.md."""

    def cell(value: Any, how: str) -> str:
        if isinstance(value, tuple):
            return " / ".join(cell(one, how) for one in value)
        if isinstance(value, str):
            return value
        return "-" if math.isnan(value) else format(value, how)

    rows = []
    for one in found:
        values = (
            one.response, one.messages, one.decisions, one.decision_us, one.reaction, one.stable_to, one.moves_overloaded,
            one.messages_by_size, one.unannounced, one.head_down, one.node_lost, one.jain, one.knows,
        )  # fmt: skip
        cells = [cell(value, how) for value, (_, how) in zip(values, COLUMNS, strict=True)]
        rows.append(f"| `{one.name}`{'*' if 'baseline' in one.classes else ''} | {' | '.join(cells)} |")
    heads = [name for name, _ in COLUMNS]
    return f"""# Comparison

Every preset and baseline (*), measured by the simulator: `make comparison` writes this page. {NODES} nodes of one slot, load {LOAD}, Poisson arrivals, exponential times, live model; a message takes {DELAYS["message_s"]} mean service times, a handover {DELAYS["transfer_s"]} more, a head node works {DELAYS["head_s"]} on each message. Short runs: differences of a tenth mean little; µs are those of the machine that wrote this page.

| preset | {" | ".join(heads)} |
|{"---|" * (len(heads) + 1)}
{chr(10).join(rows)}

![A figure of each feature; baselines are orange](comparison.svg)

- response: mean response over that of one queue for all slots; messages, decisions (searches): for each task; µs: of processor time for each call of the location policy.
- reaction: mean service times from a burst of {BURST * NODES} long tasks at one node until {BUSY_SHARE:.0%} of the slots are busy; "-": never.
- stable to: the largest of the loads {", ".join(map(str, LOADS))} without growth within some thousand tasks (long queues take longer to settle, so that fixed splits, which are stable below load 1, seem to grow); moves: of each task at load {OVERLOAD}.
- messages at {", ".join(map(str, SIZES))} nodes: growth of the cost.
- no broker: response when no announcement arrives, over that with them; head down: response with the head away for {DOWN_S:g} mean service times.
- node lost: response of the tasks that come within {LOST_AROUND:g} mean service times of the loss of one of the nodes for good, at load {LOST_LOAD}, over that of the same tasks without the loss. What the node ran starts again after its lease, which is {CoreConfig().lease_s / LOST_UNIT_S:g} mean service times here ([guarantees.md](guarantees.md)); tasks of its own wait for its return.
- Jain: index of the mean responses by home when one home gets {FLOOD:g} times the tasks of each other (1: all equal).
- knows: what must be known in advance.
"""


def draw(found: list[Features], path: Path) -> None:
    """A figure of each feature, and performance against overhead."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    bars = {
        "response": "mean response over one queue", "messages": "messages a task", "decisions": "searches a task",
        "decision_us": "µs a call", "reaction": "reaction to a burst", "stable_to": "largest load without growth",
        "moves_overloaded": f"moves a task at load {OVERLOAD}", "unannounced": "response without announcements",
        "head_down": "response with the head down", "node_lost": "response around the loss of a node", "jain": "Jain's index",
    }  # fmt: skip
    colours = ["#d55e00" if "baseline" in one.classes else "#0072b2" for one in found]
    with mpl.rc_context({"svg.hashsalt": "peerload", "svg.fonttype": "none", "font.size": 7}):
        figure = Figure(figsize=(13, 18), layout="constrained")
        panels = list(figure.subplots(5, 3).flat)
        for panel, (name, label) in zip(panels, bars.items(), strict=False):
            panel.barh([one.name for one in found], [getattr(one, name) for one in found], color=colours)
            panel.set(xlabel=label, xscale="log" if name in ("response", "messages", "decision_us") else "linear")
            panel.invert_yaxis()
        cost, growth_of, *unused = panels[len(bars) :]
        for one, colour in zip(found, colours, strict=True):
            cost.plot(one.messages, one.response, "o", color=colour)
            cost.annotate(one.name, (one.messages, one.response), (4, 2), textcoords="offset points", fontsize=5)
            counts = [max(count, 0.1) for count in one.messages_by_size]
            growth_of.plot(SIZES, counts, "-", color=colour, alpha=0.6)
            growth_of.annotate(one.name, (SIZES[-1], counts[-1]), fontsize=5)
        cost.set(xlabel="messages a task", ylabel="mean response over one queue", yscale="log")
        growth_of.set(xlabel="nodes", ylabel="messages a task", xscale="log", yscale="log")
        for panel in unused:
            panel.remove()
        figure.savefig(path, metadata={"Date": None})


def main(words: list[str] | None = None) -> int:
    """Measure, write, draw."""
    reader = argparse.ArgumentParser(prog="python -m tests.comparison", description=__doc__)
    reader.add_argument("--only", default="", help="presets, separated by commas")
    reader.add_argument("--scale", type=int, default=1000, help="tasks of the shortest runs")
    reader.add_argument("--out", type=Path, default=DOCS)
    reader.add_argument("--jobs", type=int, default=2)
    flags = reader.parse_args(words)
    names = [name for name in presets() if not flags.only or name in flags.only.split(",")]
    found: list[Features] = []
    with multiprocessing.get_context("spawn").Pool(flags.jobs) as pool:
        for one in pool.imap_unordered(features, [(name, flags.scale) for name in names]):
            sys.stderr.write(f"{one.name}: {one.response:.2f} times one queue, {one.messages:.1f} messages a task\n")
            found.append(one)
    found.sort(key=lambda one: one.response)
    (flags.out / "comparison.md").write_text(page(found), encoding="utf-8")
    draw(found, flags.out / "comparison.svg")
    assert fmean(one.response for one in found) > 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
