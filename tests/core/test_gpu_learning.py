"""What is learned of the GPU memory and the durations of commands, and that it is good enough to rely on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from peerload.core.estimates import GpuHistory, GpuRuns, PastDurations
from peerload.model import actions, events, messages
from peerload.model.resources import (
    MIB,
    Device,
    DeviceLoad,
    DeviceMode,
    DeviceReading,
    GpuShare,
    LoadReport,
    ResourceRequest,
)
from peerload.model.task import SCRATCH, Exit, TaskSpec, TaskState, Usage
from tests.core.given import SENDER, WALL_S, Given
from tests.support import in_short

GIB = 1024 * MIB
KEYS = (b"line", b"shape", b"program")


def run_of(gib: float, *, model: str = "A10", seconds: float = 10.0, **more: Any) -> Exit:
    usage = Usage(memory_bytes_max=GIB, gpu_memory_bytes_max=int(gib * GIB), gpu_model=model)
    return Exit(more.pop("code", 0), started_at=WALL_S, ended_at=WALL_S + seconds, usage=usage, **more)


def taught(*gib: float, keys: tuple[bytes, ...] = KEYS, model: str = "A10") -> GpuHistory:
    known = GpuHistory(100, 50)
    for one in gib:
        known.learn(keys, run_of(one, model=model), 10.0)
    return known


# -- needs -------------------------------------------------------------------------------------------------------------


def test_of_few_runs_the_most_counts_of_many_nearly_all_each_with_a_margin() -> None:
    assert taught(4.0, 2.0, 3.0).needs(KEYS, ("A10",), 3) == {"A10": int(4 * GIB * 1.1) + 256 * MIB}
    many = taught(*[1.0] * 39, 9.0)
    assert many.needs(KEYS, ("A10",), 3) == {"A10": int(GIB * 1.1) + 256 * MIB}
    assert taught(*[1.0] * 9 + [9.0]).needs(KEYS, ("A10",), 3)["A10"] > 9 * GIB


def test_the_most_specific_that_has_run_thrice_counts_on_that_model_first() -> None:
    known = taught(8.0, 8.0, 8.0, keys=(b"other", b"shape", b"program"))
    known.learn(KEYS, run_of(1.0), 1.0)
    assert known.needs(KEYS, ("A10",), 3)["A10"] > 8 * GIB
    for _ in range(2):
        known.learn(KEYS, run_of(1.0), 1.0)
    assert known.needs(KEYS, ("A10",), 3)["A10"] < 2 * GIB
    for _ in range(3):
        known.learn(KEYS, run_of(3.0, model="H100"), 1.0)
    assert known.needs(KEYS, ("A10", "H100"), 3) == {
        "A10": int(GIB * 1.1) + 256 * MIB,
        "H100": int(3 * GIB * 1.1) + 256 * MIB,
    }
    assert known.needs((b"never", b"seen"), ("A10",), 3) == {}


def test_what_did_not_do_its_work_teaches_nothing() -> None:
    known = GpuHistory(100, 50)
    for exit_ in (run_of(1.0, code=1), run_of(0.0), msgspec.structs.replace(run_of(1.0), usage=Usage())):
        known.learn(KEYS, exit_, 10.0)
    assert len(known) == 0


def test_both_are_bounded() -> None:
    known = GpuHistory(6, 50)
    for number in range(20):
        known.learn((b"%d" % number,), run_of(1.0), 10.0)
    assert len(known) == 6
    runs = GpuRuns(50)
    for number in range(1, 200):
        runs.add(number * MIB, 1.0)
    assert len(runs) == 50
    assert runs.need_bytes == int(197 * MIB * 1.1) + 256 * MIB
    assert len(runs.durations) == 50


# -- a node that learns ------------------------------------------------------------------------------------------------


def card(number: int, gib: int = 24) -> Device:
    return Device(f"nvidia:GPU-{number}", index=number, model="A10", mem_bytes=gib * GIB, is_read=True)


def training(name: str, **request: Any) -> TaskSpec:
    argv = (b"python3", name.encode())
    return TaskSpec(argv, SCRATCH, request=ResourceRequest(cpus=0.5, gpus=1, **request))


class Shop:
    """A node with cards on which the processes of tasks grow, second by second, to what they need: a card that is full
    makes the one fail that wants more."""

    def __init__(self, cards: int = 4, past: tuple[events.PastRun, ...] = ()) -> None:
        self.x = Given(slots=32, peers=(), started=events.AgentStarted(past=past))
        self.cards = tuple(card(number) for number in range(cards))
        self.running: dict[str, list[Any]] = {}
        self.needed: dict[str, tuple[float, int]] = {}
        self.out_of_memory: list[tuple[str, int]] = []
        self.together_max = 0
        self.x.when(events.DevicesFound(self.cards))
        self.tell()

    def submit(self, task: TaskSpec, gib: float, seconds: int) -> str:
        self.x.submit(task)
        name = f"x/{self.x.requests}"
        self.needed[name] = gib, seconds
        self.spawned()
        return name

    def spawned(self) -> None:
        for action in self.x.last:
            if isinstance(action, actions.SpawnTask):
                self.running[action.key] = [action.task, action.devices[0], 0, 0]

    def tell(self) -> None:
        readings = []
        for device in self.cards:
            ours = tuple((key, used) for key, (_, name, used, _) in self.running.items() if name == device.id)
            used = sum(one for _, one in ours)
            readings.append(DeviceReading(device.id, mem_used_bytes=used, ours=ours))
            self.together_max = max(self.together_max, len(ours))
        self.x.when(events.DevicesSampled(self.x.at_s, tuple(readings)))
        self.spawned()

    def second(self) -> None:
        self.x.after(1.0)
        for key, run in list(self.running.items()):
            task, name, _, ran_s = run
            gib, seconds = self.needed[task]
            run[3] = ran_s + 1
            wanted = int(gib * GIB * min(2.0 * run[3] / seconds, 1.0))
            others = sum(other[2] for one, other in self.running.items() if other[1] == name and one != key)
            if wanted + others > self.cards[0].mem_bytes:
                self.end(key, Exit(1, out_of="gpu memory", stderr_bytes=1, started_at=WALL_S, ended_at=WALL_S + 1))
                self.out_of_memory.append((task, self.x.node.home.by_id[task].record.attempt))
            elif run[3] >= seconds:
                self.end(key, Exit(0, started_at=WALL_S, ended_at=WALL_S + seconds))
            else:
                run[2] = max(run[2], wanted)
        self.tell()
        if self.x.node.ledger.devices.due_s(self.x.at_s) <= self.x.at_s:
            self.x.timer("devices")
            self.spawned()

    def end(self, key: str, exit_: Exit) -> None:
        del self.running[key]
        self.x.when(events.TaskEnded(key, exit_))
        self.spawned()

    def work_off(self, seconds_max: int = 20_000) -> None:
        for _ in range(seconds_max):
            if not self.x.node.home.tasks:
                return
            self.second()
        raise AssertionError(f"{len(self.x.node.home.tasks)} tasks are left")


def test_a_command_runs_alone_at_first_and_with_others_when_it_is_known() -> None:
    shop = Shop(cards=1)
    for _ in range(3):
        shop.submit(training("small.py"), 4.0, 10)
    assert len(shop.running) == 1
    shop.work_off()
    for _ in range(3):
        shop.submit(training("small.py"), 4.0, 10)
    assert len(shop.running) == 3
    shop.submit(training("other.py"), 1.0, 10)
    assert len(shop.running) == 3  # nothing is known of it: a card of its own first
    shop.work_off()


def test_what_was_learned_outlives_the_agent() -> None:
    past = tuple(events.PastRun(training("small.py"), run_of(4.0)) for _ in range(3))
    shop = Shop(cards=1, past=past)
    for _ in range(5):
        shop.submit(training("small.py"), 4.0, 10)
    assert len(shop.running) == 4  # a fifth would need more than is left


def test_who_shares_though_nothing_is_known_of_it_is_taken_for_a_usual_one() -> None:
    past = tuple(events.PastRun(training("small.py"), run_of(9.0)) for _ in range(3))
    shop = Shop(cards=1, past=past)
    for name in ("one.py", "two.py", "three.py"):
        shop.submit(training(name, gpu_share=GpuShare.TIME), 9.0, 10)
    assert len(shop.running) == 2  # a third would need more than is left


def test_a_command_that_needs_nearly_all_of_a_card_has_one_for_itself() -> None:
    past = tuple(events.PastRun(training("large.py"), run_of(23.5)) for _ in range(5))
    shop = Shop(cards=2, past=past)
    names = [shop.submit(training("large.py"), 23.5, 10) for _ in range(3)]
    assert len(shop.running) == 2
    shop.work_off()
    assert not shop.out_of_memory
    assert names


@pytest.mark.parametrize("seed", in_short(range(3), 3))
@pytest.mark.parametrize(
    "noise", [pytest.param(0.03, marks=pytest.mark.long), 0.08, pytest.param(0.12, marks=pytest.mark.long)]
)
def test_few_run_out_of_memory_once_a_command_is_known_and_all_of_them_are_tried_again(seed: int, noise: float) -> None:
    rng = random.Random(f"{seed} {noise}")
    shop = Shop()
    sizes = {f"train-{number}.py": rng.uniform(0.5, 14.0) for number in range(10)}
    begun: dict[str, tuple[str, int]] = {}
    runs = dict.fromkeys(sizes, 0)
    ended: list[str] = []
    for _ in range(400):
        name = rng.choice(list(sizes))
        gib = sizes[name] * math.exp(rng.gauss(0.0, noise))
        task = shop.submit(training(name), gib, rng.randint(4, 40))
        begun[task] = name, runs[name]
        runs[name] += 1
        ended.append(task)
        while len(shop.x.node.home.tasks) > 12:
            shop.second()
    shop.work_off()
    known = [task for task in begun if begun[task][1] >= 5]
    failed = {task for task, _ in shop.out_of_memory}
    assert len(known) > 300
    assert len(failed & set(known)) <= 0.01 * len(known)
    assert shop.together_max >= 2
    assert shop.x.node.state.counts.get("attempts_out_of_gpu_memory_total", 0) == len(shop.out_of_memory)


def test_nobody_runs_out_of_memory_who_said_honestly_how_much_it_takes() -> None:
    rng = random.Random(5)
    shop = Shop()
    for _ in range(100):
        gib = rng.uniform(0.5, 20.0)
        shop.submit(training("any.py", gpu_mem_bytes=int(gib * 1.02 * GIB)), gib, rng.randint(4, 40))
        while len(shop.x.node.home.tasks) > 12:
            shop.second()
    shop.work_off()
    assert not shop.out_of_memory


def test_who_said_too_little_is_tried_again_until_it_has_enough() -> None:
    shop = Shop(cards=1)
    done = []
    changed = [shop.submit(training(f"{number}.py", gpu_mem_bytes=4 * GIB), 9.0, 10) for number in range(4)]
    while shop.x.node.home.tasks:
        shop.second()
        done += [
            action.record
            for action in shop.x.last
            if isinstance(action, actions.TaskChanged) and action.record.state.is_final
        ]
    assert shop.out_of_memory
    assert {record.state for record in done} <= {TaskState.DONE}
    assert len(changed) == 4


# -- durations ---------------------------------------------------------------------------------------------------------

Series = Callable[[random.Random], list[float]]


def steady(rng: random.Random) -> list[float]:
    return [60.0 * math.exp(rng.gauss(0.0, 0.3)) for _ in range(60)]


def drifting(rng: random.Random) -> list[float]:
    return [60.0 * 1.01**number * math.exp(rng.gauss(0.0, 0.2)) for number in range(60)]


def two_kinds(rng: random.Random) -> list[float]:
    return [rng.choice((10.0, 10.0, 10.0, 40.0)) * math.exp(rng.gauss(0.0, 0.1)) for _ in range(60)]


def heavy(rng: random.Random) -> list[float]:
    return [20.0 * rng.paretovariate(2.5) for _ in range(60)]


def changed(rng: random.Random) -> list[float]:
    return [(30.0 if number < 30 else 45.0) * math.exp(rng.gauss(0.0, 0.2)) for number in range(60)]


def pinball(said_s: float, came_s: float, share: float) -> float:
    return (came_s - said_s) * (share if came_s >= said_s else share - 1.0)


def judged(histories: Sequence[list[float]], share: float = 0.9) -> tuple[float, float, float]:
    """Over all runs from the fourth on: how often what nine of ten do not exceed was not exceeded; its pinball loss; that of
    saying what the last run took."""
    covered = loss = last_loss = count = 0.0
    for series in histories:
        known = PastDurations(50)
        for number, came_s in enumerate(series):
            if number >= 3:
                said_s = known.nearly_all_s(1.0)
                count += 1
                covered += came_s <= said_s
                loss += pinball(said_s, came_s, share)
                last_loss += pinball(series[number - 1], came_s, share)
            known.add(came_s, math.log(came_s))
    return covered / count, loss / count, last_loss / count


@pytest.mark.parametrize("kind", [steady, drifting, two_kinds, heavy, changed])
def test_durations_are_foretold_well_enough(kind: Series) -> None:
    covers, loss, last_loss = judged([kind(random.Random(seed)) for seed in range(40)])
    assert covers >= 0.85
    assert loss <= 0.9 * last_loss


# -- other nodes -------------------------------------------------------------------------------------------------------


def test_a_home_tells_other_nodes_what_it_has_learned_unless_they_could_not_promise_it() -> None:
    past = tuple(events.PastRun(training("small.py"), run_of(4.0)) for _ in range(3))
    x = Given(policies=SENDER, peers=(), slots=1, started=events.AgentStarted(past=past))
    for name, gib in (("y", 22), ("z", 4)):
        x.meet(name, gpus=1, devices=(Device(f"nvidia:{name}", model="A10", mem_bytes=gib * GIB),))
    shared = DeviceLoad(1, DeviceMode.TIME, free_mib=8 * 1024, free_slots=8, tasks=1)
    x.submit(training("small.py"))
    need = int(4 * GIB * 1.1) + 256 * MIB
    probes = [
        (act.dst, act.message)
        for act in x.last
        if isinstance(act, actions.Send) and isinstance(act.message, messages.ProbeRequest)
    ]
    asked = {to: probe.need.request.gpu_mem_bytes for to, probe in probes}
    assert asked.items() <= {"y": need, "z": 0}.items()
    assert asked
    task = x.task()
    busy = LoadReport(gpus=1, gpus_free=0, devices=(shared,), incarnation=1, sequence=2)
    offers = []
    for _ in range(2):
        for name in ("y", "z"):
            x.hear(name, messages.ProbeReply(1, accepts=name == "y", report=busy))
            sent = [action for action in x.last if isinstance(action, actions.Send)]
            offers += [(one.dst, one.message) for one in sent if isinstance(one.message, messages.Offer)]
    ((to, offered),) = offers
    assert (to, offered.spec.request.gpu_mem_bytes) == ("y", need)
    assert task.spec.request.gpu_mem_bytes == 0
