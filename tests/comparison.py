"""`python -m tests.comparison`: measure the desirable features of every preset, and write docs/comparison.md and its figure.

`make comparison` runs it. `--only a,b` plays fewer presets, a smaller `--scale` fewer tasks. Each preset that is measured is
kept in build/comparison.json until the code changes, so that a run that was interrupted, or ended with its `--budget-s`, goes on.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import random
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from peerload.model import metrics
from peerload.model.config import CoreConfig
from peerload.model.errors import ConfigError
from peerload.policy.registry import load_preset, presets
from peerload.sim.outcome import GREW_FACTOR, GREW_SHARE
from peerload.sim.queueing_model import Arrival
from peerload.sim.replication import Replication, growth, measure
from peerload.sim.scenario import Scenario
from peerload.sim.utilization import UtilizationMonitor
from tests.chaos.engine.engine import Simulation, WorldOptions
from tests.chaos.engine.network import NetworkOptions
from tests.theory.replicate import Companions

ROOT = Path(__file__).resolve().parents[1]
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DOCS, KEPT = ROOT / "docs", ROOT / "build" / "comparison.json"
SOURCES = ("peerload/core", "peerload/model", "peerload/policy", "peerload/sim", "policies", "tests/chaos/engine")
"""What a measurement depends on, beside this file."""
NODES, LOAD, SEED = 20, 0.9, 1
DELAYS = {"message_s": 0.005, "transfer_s": 0.02, "head_s": 0.002}
"""In mean service times: a message between nodes, the handover of a task, the work of a head node on a message."""
SIZES, EACH, EACH_SETTLING = (10, 100, 1000), 12, 8
"""Numbers of nodes, and tasks for each at least, of which so many come before those that are measured; beside them each node
has a task from the start. With 2 and 1 the messages of a task seemed to fall with the number of nodes."""
CUT_OFF_MAX = 0.1
"""Share of the measured tasks that may wait at the end, that the cost of a task is meaningful."""
COSTLY, COSTLY_NODES_MAX = ("marginal", "spread"), 100
"""Presets that are played with so many nodes at most, as are those with thresholds that each report changes: with 1000 one of
them took more than half an hour of processor time."""
LOADS = (0.8, 0.9, 0.95, 0.98)
OVERLOAD = 1.2
THRESHOLDS, THRESHOLDS_LOAD, MOVES_MAX = (1.0, 2.0, 3.0, 4.0, 5.0), 0.95, 1.5
"""Thresholds that are tried in turn, at that load; moves of a task that count as thrashing, as unfinished tasks that grow do."""
BURST, BURST_UNTIL_S, BURST_STEP_S, BUSY_SHARE = 10, 30.0, 0.02, 0.9
"""Tasks a slot that arrive at one node at once; how long and how often it is looked at; the share of slots that counts as all."""
BASE = 20
"""Times the shortest run: the one that gives the mean response, over that of the same tasks in one queue for all slots, so that
what is chance in both does not count."""
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
    thresholds: tuple[float, ...] | None
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


def played(
    asked: Scenario,
    *,
    rates: list[float] | None = None,
    is_announced: bool = True,
    is_full: bool = False,
    seen: Callable[[Iterator[Arrival]], Iterator[Arrival]] = iter,
) -> tuple[Replication, Any]:
    """Play a scenario; is_full: each node has a task from the start, as with the load that is to come; seen: what the arrivals go
    through."""
    setup = asked.setup()
    if rates is not None:
        setup = msgspec.structs.replace(setup, rates=rates)
    player = Replication(setup, SEED, watch=UtilizationMonitor())
    player.cluster._is_heard = is_announced
    if is_full:
        rng = random.Random(SEED)
        begun = (Arrival(0.0, f"n{number}", setup.service(rng)) for number in range(1, asked.nodes + 1))
        player._arrivals = itertools.chain(begun, player._arrivals)
    player._arrivals = seen(player._arrivals)
    player.play(asked.warm_up)
    return player, measure(player, asked.tasks - asked.warm_up, clock=lambda: 0.0, started_s=0.0)


def over_one_queue(asked: Scenario, **others: Any) -> tuple[float, Any]:
    """Mean response over that of the same tasks in one queue for all slots."""
    queue = Companions(asked.setup(), SEED, ["one_queue"])
    _, sample = played(asked, seen=queue.seen, **others)
    return sample.values["mean_response"] / fmean(queue.responses["one_queue"][asked.warm_up : asked.tasks]), sample


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


def is_growing(sample: Any) -> bool:
    factor, share = growth([sample])
    return factor >= GREW_FACTOR and share >= GREW_SHARE


def thresholds(name: str, tasks: int) -> tuple[float, ...] | None:
    """Thresholds at which the preset neither thrashes nor grows; None: it shares nothing, has no threshold, or places every task
    at once."""
    if name == "none" or not getattr(load_preset(name).transfer, "threshold", 0.0):
        return None
    found = []
    for threshold in THRESHOLDS:
        asked = scenario(name, NODES, THRESHOLDS_LOAD, tasks, changes=(("threshold", threshold),))
        try:
            _, sample = played(asked)
        except ConfigError:
            return None
        if sample.values["transfers_per_task"] <= MOVES_MAX and not is_growing(sample):
            found.append(threshold)
    return tuple(found)


def features(job: tuple[str, int]) -> Features:
    """Measure one preset; ``scale``: the base of the numbers of tasks."""
    name, scale = job
    preset = load_preset(name)
    base, sample = over_one_queue(scenario(name, NODES, LOAD, BASE * scale))
    timed = _Timed(preset.receiver if preset.names["location.sender"] == "none" else preset.sender)
    side = "receiver" if preset.names["location.sender"] == "none" else "sender"
    setup = scenario(name, NODES, LOAD, scale).setup()
    replaced = msgspec.structs.replace(setup.policies, **{side: timed})
    Replication(msgspec.structs.replace(setup, policies=replaced), SEED).play(scale)
    player, _ = played(scenario(name, NODES, LOAD, scale))
    searches = sum(player.counts().get(key, 0) for key in (metrics.SENDER_SEARCHES, metrics.RECEIVER_SEARCHES))
    stable_to = 0.0
    for load in LOADS:
        if is_growing(played(scenario(name, NODES, load, 3 * scale))[1]):
            break
        stable_to = load
    _, over = played(scenario(name, NODES, OVERLOAD, scale))
    sizes = []
    for size in SIZES:
        if size > COSTLY_NODES_MAX and (name in COSTLY or not getattr(preset.transfer, "steady", False)):
            sizes.append(math.nan)
            continue
        tasks = max(scale, EACH * size)
        warm_up = tasks * EACH_SETTLING // EACH
        _, full = played(scenario(name, size, LOAD, tasks, warm_up=warm_up), is_full=True)
        is_overloaded = full.cut_off > CUT_OFF_MAX * (tasks - warm_up)
        sizes.append(math.inf if is_overloaded else full.values["messages_per_task"])
    each = LOAD * NODES / (NODES - 1 + FLOOD)
    _, flooded = played(scenario(name, NODES, LOAD, 2 * scale), rates=[FLOOD * each, *[each] * (NODES - 1)])
    homes = [total / count for count, total in flooded.homes[:NODES] if count]
    unannounced = math.nan
    if (preset.information.watches != "nothing" or preset.information.period_s) and not preset.is_central:
        silent, _ = over_one_queue(scenario(name, NODES, LOAD, 2 * scale), is_announced=False)
        unannounced = silent / base
    head_down = math.nan
    if preset.is_central:
        half_s = scale / NODES
        down, _ = over_one_queue(scenario(name, NODES, LOAD, 2 * scale, head_down=(half_s, DOWN_S)))
        head_down = down / base
    sender = preset.names["location.sender"]
    knows = KNOWLEDGE.get(sender, "")
    if getattr(preset.sender, "by", "") in RATES:
        knows = "speeds, arrival rates"
    return Features(
        name,
        preset.classes,
        knows or "-",
        base,
        sample.values["messages_per_task"],
        searches / player.cluster.arrived,
        1e6 * timed.cpu_s / timed.calls if timed.calls else math.nan,
        reaction(name),
        stable_to,
        over.values["transfers_per_task"],
        thresholds(name, 3 * scale),
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
    ("thresholds", ".0f"),
    (f"messages at {' / '.join(map(str, SIZES))}", ".1f"),
    ("no broker", ".2f"),
    ("head down", ".2f"),
    ("node lost", ".2f"),
    ("Jain", ".2f"),
    ("knows", ""),
)


def page(found: list[Features], scale: int) -> str:
    """Text of docs/comparison.md."""

    def cell(value: Any, how: str) -> str:
        if value is None:
            return "-"
        if isinstance(value, tuple):
            return " / ".join(cell(one, how) for one in value) or "none"
        if isinstance(value, str):
            return value
        if math.isinf(value):
            return "overloaded"
        return "-" if math.isnan(value) else format(value, how)

    rows = []
    for one in found:
        values = (
            one.response, one.messages, one.decisions, one.decision_us, one.reaction, one.stable_to, one.moves_overloaded,
            one.thresholds, one.messages_by_size, one.unannounced, one.head_down, one.node_lost, one.jain, one.knows,
        )  # fmt: skip
        cells = [cell(value, how) for value, (_, how) in zip(values, COLUMNS, strict=True)]
        rows.append(f"| `{one.name}`{'*' if 'baseline' in one.classes else ''} | {' | '.join(cells)} |")
    heads = [name for name, _ in COLUMNS]
    return f"""# Comparison

Every preset and baseline (*), measured by the simulator: `make comparison` writes this page. {NODES} nodes of one slot, load {LOAD}, Poisson arrivals, exponential times, live model; a message takes {DELAYS["message_s"]} mean service times, a handover {DELAYS["transfer_s"]} more, a head node works {DELAYS["head_s"]} on each message. Runs of {scale} to {BASE * scale} tasks: differences of a tenth mean little; µs are those of the machine that wrote this page.

| preset | {" | ".join(heads)} |
|{"---|" * (len(heads) + 1)}
{chr(10).join(rows)}

![A figure of each feature; baselines are orange](comparison.svg)

- response: mean response over that of the same tasks in one queue for all slots; messages, decisions (searches): for each task; µs: of processor time for each call of the location policy.
- reaction: mean service times from a burst of {BURST * NODES} long tasks at one node until {BUSY_SHARE:.0%} of the slots are busy; "-": never.
- stable to: the largest of the loads {", ".join(map(str, LOADS))} without growth within some thousand tasks (long queues take longer to settle, so that fixed splits, which are stable below load 1, seem to grow); moves: of each task at load {OVERLOAD}.
- thresholds: those of {", ".join(f"{one:g}" for one in THRESHOLDS)} tasks at which, at load {THRESHOLDS_LOAD}, neither unfinished tasks grow nor a task moves more than {MOVES_MAX:g} times on average.
- messages at {", ".join(map(str, SIZES))} nodes: growth of the cost. "overloaded": more than {CUT_OFF_MAX:.0%} of the tasks do not begin, since a head node cannot serve so many messages. "-": not played, since it takes too long.
- no broker: response when no announcement arrives, over that with them; head down: response with the head away for {DOWN_S:g} mean service times.
- node lost: response of the tasks that come within {LOST_AROUND:g} mean service times of the loss of one of the nodes for good, at load {LOST_LOAD}, over that of the same tasks without the loss. The tasks that the node ran start again after their lease, which is {CoreConfig().lease_s / LOST_UNIT_S:g} mean service times here ([guarantees.md](guarantees.md)); tasks of its own wait for its return.
- Jain: index of the mean responses by home when one home gets {FLOOD:g} times the tasks of each other (1: all equal).
- knows: what must be known in advance.
"""


def _length(value: Any) -> float:
    """Length of a bar: of lists their number of entries."""
    if isinstance(value, str):
        return 0.0 if value == "-" else len(value.split(","))
    if isinstance(value, float):
        return 0.0 if math.isnan(value) else value  # a bar for each preset, in the same place in each panel
    return len(value or ())


def draw(found: list[Features], path: Path) -> None:
    """A figure of each feature, and performance against overhead."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    bars = {
        "response": "mean response over one queue", "messages": "messages a task", "decisions": "searches a task",
        "decision_us": "µs a call", "reaction": "reaction to a burst", "stable_to": "largest load without growth",
        "moves_overloaded": f"moves a task at load {OVERLOAD}", "thresholds": "thresholds without thrashing", "unannounced": "response without announcements",
        "head_down": "response with the head down", "node_lost": "response around the loss of a node", "jain": "Jain's index",
        "knows": "things known in advance",
    }  # fmt: skip
    colours = ["#d55e00" if "baseline" in one.classes else "#0072b2" for one in found]
    with mpl.rc_context({"svg.hashsalt": "peerload", "svg.fonttype": "none", "font.size": 7}):
        figure = Figure(figsize=(13, 18), layout="constrained")
        panels = list(figure.subplots(5, 3).flat)
        for panel, (name, label) in zip(panels, bars.items(), strict=False):
            lengths = [_length(getattr(one, name)) for one in found]
            panel.barh([one.name for one in found], lengths, color=colours)
            panel.set(xlabel=label, xscale="log" if name in ("response", "messages", "decision_us") else "linear")
            panel.invert_yaxis()
        cost, growth_of, *unused = panels[len(bars) :]
        for one, colour in zip(found, colours, strict=True):
            cost.plot(one.messages, one.response, "o", color=colour)
            cost.annotate(one.name, (one.messages, one.response), (4, 2), textcoords="offset points", fontsize=5)
            counts = [max(count, 0.1) if math.isfinite(count) else math.nan for count in one.messages_by_size]
            growth_of.plot(SIZES, counts, "-", color=colour, alpha=0.6)
            for last in [place for place, count in enumerate(counts) if not math.isnan(count)][-1:]:
                growth_of.annotate(one.name, (SIZES[last], counts[last]), fontsize=5)
        cost.set(xlabel="messages a task", ylabel="mean response over one queue", yscale="log")
        growth_of.set(xlabel="nodes", ylabel="messages a task", xscale="log", yscale="log")
        for panel in unused:
            panel.remove()
        figure.savefig(path, metadata={"Date": None})


def _sources() -> str:
    """Digest of the code that a measurement depends on."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(
        path for part in SOURCES for path in (ROOT / part).rglob("*") if path.suffix in (".py", ".toml")
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _kept() -> dict[str, Features]:
    """What earlier runs have measured with the same code, by preset and scale."""
    try:
        told = json.loads(KEPT.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return msgspec.convert(told["presets"], dict[str, Features]) if told["sources"] == _sources() else {}


def _measured(names: list[str], scale: int, jobs: int, budget_s: float | None) -> Iterator[Features]:
    """Measure presets side by side; those that are not begun after the budget are left out."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        left: set[Future[Features]] = {pool.submit(features, (name, scale)) for name in names}
        try:
            for done in as_completed(list(left), budget_s):
                left.discard(done)
                yield done.result()
        except TimeoutError:
            begun = [future for future in left if not future.cancel()]
            yield from (future.result() for future in as_completed(begun))


def main(words: list[str] | None = None) -> int:
    """Measure, write, draw."""
    reader = argparse.ArgumentParser(prog="python -m tests.comparison", description=__doc__)
    reader.add_argument("--only", default="", help="presets, separated by commas")
    reader.add_argument("--scale", type=int, default=400, help="tasks of the shortest runs")
    reader.add_argument("--out", type=Path, default=DOCS)
    reader.add_argument("--jobs", type=int, default=2)
    reader.add_argument("--budget-s", type=float, default=None, help="after this, no further preset is begun")
    flags = reader.parse_args(words)
    names = [name for name in presets() if not flags.only or name in flags.only.split(",")]
    kept = _kept()
    left = [name for name in names if f"{name} {flags.scale}" not in kept]
    for one in _measured(left, flags.scale, flags.jobs, flags.budget_s):
        sys.stderr.write(f"{one.name}: {one.response:.2f} times one queue, {one.messages:.1f} messages a task\n")
        kept[f"{one.name} {flags.scale}"] = one
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps({"sources": _sources(), "presets": kept}), encoding="utf-8")
    found = [kept[key] for name in names if (key := f"{name} {flags.scale}") in kept]
    if len(found) < len(names):
        sys.stderr.write(f"{len(names) - len(found)} of {len(names)} presets are left; the same command goes on\n")
        return 1
    found.sort(key=lambda one: one.response)
    (flags.out / "comparison.md").write_text(page(found, flags.scale), encoding="utf-8")
    draw(found, flags.out / "comparison.svg")
    assert fmean(one.response for one in found) > 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
