"""Energy simulator: the real core of every node on a model of machines with shared cores and GPUs and power consumption.

This module models only physics: the speed of concurrent tasks, the power of a machine, when an idle machine is suspended, and how
long it takes to wake. The core and the preset decide where a task runs and when it starts. Messages take no time.

Cases have the format ``energy-cases/1``: nodes with power curves, tasks, and runs of a preset.
"""

from __future__ import annotations

import heapq
import math
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from peerload.energy.price import integral
from peerload.model import actions, events, timers
from peerload.model.config import GpuConfig
from peerload.model.errors import ConfigError, InvariantBroken
from peerload.model.resources import Device, GpuShare, PowerCurve, Profile, ResourceRequest
from peerload.model.task import SCRATCH, Exit, SubmitOptions, TaskSpec
from peerload.policy.registry import build_preset, presets, read_preset
from peerload.sim.queueing_model import EPOCH_S, IDEAL_CONFIG, QueueingModel

if TYPE_CHECKING:
    from peerload.policy.preset import PolicySet


FORMAT = "energy-cases/1"
CASES_MAX, NODES_MAX, TASKS_MAX = 10_000, 1000, 1_000_000
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Positive = Annotated[float, Meta(gt=0.0, le=1e9)]
Watts = Annotated[float, Meta(ge=0.0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=65_536)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a case: an unknown field is an error."""


class CaseNode(_Part, frozen=True):
    """Node. cores 0: it only submits tasks."""

    name: Name
    cores: Count
    threads: Count = 0
    smt_gain: Annotated[float, Meta(ge=1.0, le=16.0)] = 1.0
    all_core: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    speed: Annotated[float, Meta(gt=0.0, le=1000.0)] = 1.0
    watts: Annotated[tuple[Watts, ...], Meta(max_length=33)] = ()
    tdp_w: Watts = 0.0
    off_w: Watts | None = None
    wake_s: Seconds = 0.0
    sleep_after_s: Seconds = 0.0
    gpus: Annotated[int, Meta(ge=0, le=64)] = 0
    gpu_static_w: Watts = 0.0

    def curve(self, *, sleeps: bool) -> PowerCurve:
        """Power curve; ``sleeps``: the node is suspended while idle, if the case specifies its power in that state."""
        return PowerCurve(
            self.watts,
            self.cores,
            self.threads or self.cores,
            self.smt_gain,
            self.all_core,
            self.off_w or 0.0,
            self.wake_s,
            may_sleep=sleeps and self.off_w is not None,
            cap_w=self.tdp_w,
        )


class CaseTask(_Part, frozen=True):
    """Equal tasks, or ``each`` with its own time and work. work_s null: endless."""

    node: Name
    count: Annotated[int, Meta(ge=1, le=TASKS_MAX)] = 1
    each: Annotated[tuple[tuple[Seconds, Positive], ...], Meta(max_length=TASKS_MAX)] = ()
    at_s: Seconds = 0.0
    cpus: Annotated[float, Meta(gt=0.0, le=65_536.0)] = 1.0
    work_s: Positive | msgspec.UnsetType | None = msgspec.UNSET
    slack_s: Seconds | None = None
    host_s: Seconds = 0.0
    gpu_s: Seconds = 0.0
    sm_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    gpu_j: Watts = 0.0


class CaseRun(_Part, frozen=True):
    """Run of a preset over the case."""

    name: Name
    preset: Name
    slots: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    guarantee: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    slack: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.1
    sleep: bool = False
    gpu_share: Literal["exclusive", "time", "mps"] = "exclusive"
    gpu_tasks_max: Annotated[int, Meta(ge=1, le=48)] | None = None
    gpu_pct: Annotated[float, Meta(gt=0.0, le=100.0)] = 100.0
    defer: bool = False

    @property
    def gpu_limit(self) -> int:
        return 1 if self.gpu_share == "exclusive" else self.gpu_tasks_max or 10


class Case(_Part, frozen=True):
    """Case. until_s: its end, None = with its last task."""

    id: Name
    nodes: Annotated[tuple[CaseNode, ...], Meta(min_length=1, max_length=NODES_MAX)]
    tasks: Annotated[tuple[CaseTask, ...], Meta(min_length=1)]
    runs: Annotated[tuple[CaseRun, ...], Meta(min_length=1)]
    until_s: Positive | None = None
    price: tuple[tuple[float, float], ...] = ()


class _File(msgspec.Struct, frozen=True):
    format: str
    cases: Annotated[tuple[Case, ...], Meta(max_length=CASES_MAX)]
    reference: dict[str, Any] = {}


class Job(msgspec.Struct, frozen=True):
    """Task of a case, in the order of the file. work_s: on a core of speed 1, None = endless."""

    node: str
    at_s: float
    cpus: float
    work_s: float | None
    slack_s: float | None
    gpu_s: float = 0.0
    sm_share: float = 1.0
    gpu_j: float = 0.0
    takes_gpu: bool = False

    @property
    def length_s(self) -> float:
        """Work and kernels together, 0 = endless."""
        return 0.0 if self.work_s is None else self.work_s + self.gpu_s


def read_cases(text: bytes, source: str) -> tuple[Case, ...]:
    """Parse and check a file of cases. Raises ConfigError with the case, the field and the allowed values."""
    try:
        head = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(source, "it is not JSON", why=str(error)) from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        found = head.get("format") if isinstance(head, dict) else None
        raise ConfigError(source, f"is not in the format {FORMAT!r}", why=f'its "format" is {found!r}')
    try:
        cases = msgspec.convert(head, _File).cases
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(source, "has a case that cannot be played", why=str(error)) from None
    seen: set[str] = set()
    for case in cases:
        if case.id in seen:
            raise ConfigError(source, f"has two cases {case.id!r}")
        seen.add(case.id)
        _check(case, f"{source}: case {case.id!r}")
    return cases


def jobs_of(case: Case) -> list[Job]:
    jobs: list[Job] = []
    for task in case.tasks:
        if task.each:
            jobs += [Job(task.node, at_s, task.cpus, work_s, task.slack_s) for at_s, work_s in task.each]
            continue
        takes_gpu = task.work_s is msgspec.UNSET
        work_s = task.host_s if isinstance(task.work_s, msgspec.UnsetType) else task.work_s
        job = Job(
            task.node, task.at_s, task.cpus, work_s, task.slack_s, task.gpu_s, task.sm_share, task.gpu_j, takes_gpu
        )
        jobs += [job] * task.count
    return jobs


def _check(case: Case, where: str) -> None:  # noqa: C901 PLR0912 -- one line a rule
    names = [node.name for node in case.nodes]
    if len(set(names)) < len(names):
        raise ConfigError(where, "has two nodes of one name")
    if not any(node.cores for node in case.nodes):
        raise ConfigError(where, "has no node with cores")
    for node in case.nodes:
        _check_node(node, f"{where}: node {node.name!r}")
    for number, task in enumerate(case.tasks):
        _check_task(case, task, f"{where}: tasks[{number}]")
    runs = [run.name for run in case.runs]
    if len(set(runs)) < len(runs):
        raise ConfigError(where, "has two runs of one name")
    for run in case.runs:
        if run.preset not in presets():
            allowed = ", ".join(presets())
            raise ConfigError(f"{where}: run {run.name!r}", f"no preset {run.preset!r}", why=f"there are {allowed}")
        if run.defer and not case.price:
            raise ConfigError(f"{where}: run {run.name!r}", "defers, and the case has no price")
        for number, job in enumerate(jobs_of(case)):
            if not any(_could_run(node, run, job) for node in case.nodes):
                raise ConfigError(f"{where}: run {run.name!r}", f"no node can ever run task {number}")
    if any(after[0] <= before[0] for before, after in pairwise(case.price)):
        raise ConfigError(where, "price: the times do not ascend")
    for at_s, value in case.price:
        if not (abs(at_s) < 1e12 and abs(value) < 1e12):  # noqa: PLR2004 -- refuses NaN, too
            raise ConfigError(where, f"price: {at_s!r}, {value!r} cannot be used")


def _could_run(node: CaseNode, run: CaseRun, job: Job) -> bool:
    return bool(node.cores) and job.cpus <= slots_of(node, run) and (not job.takes_gpu or node.gpus > 0)


def slots_of(node: CaseNode, run: CaseRun) -> int:
    return run.slots or int((node.threads or node.cores) / run.guarantee + 1e-9) if node.cores else 0


def _check_node(node: CaseNode, where: str) -> None:
    if not node.cores:
        return
    if node.threads and node.threads < node.cores:
        raise ConfigError(where, f"has {node.threads} threads on {node.cores} cores")
    try:
        node.curve(sleeps=True)
        msgspec.convert(list(node.watts), Annotated[list[float], Meta(min_length=2)])
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{where}: watts", "is not a power curve", why=str(error)) from None
    if node.tdp_w and node.watts[0] > node.tdp_w:
        raise ConfigError(f"{where}: tdp_w", f"{node.tdp_w:g} W is less than its idle power, {node.watts[0]:g} W")


def _check_task(case: Case, task: CaseTask, where: str) -> None:
    if task.node not in {node.name for node in case.nodes}:
        raise ConfigError(f"{where}: node", f"no node {task.node!r}")
    is_gpu = bool(task.host_s or task.gpu_s)
    has_work = task.work_s is not msgspec.UNSET
    if task.each and (task.count != 1 or task.at_s or has_work or is_gpu):
        raise ConfigError(where, '"each" stands in place of count, at_s, work_s, host_s and gpu_s')
    if not task.each and has_work == is_gpu:
        raise ConfigError(where, "has either work_s, or host_s and gpu_s, or each")
    if task.gpu_j and not task.gpu_s:
        raise ConfigError(where, "has gpu_j, and no gpu_s")
    if task.work_s is None and case.until_s is None:
        raise ConfigError(where, "never ends, and the case has no until_s")


J_PER_WH, J_PER_KWH = 3600.0, 3.6e6
SAME_INSTANT_S = 1e-9
GPU_BYTES, TASK_BYTES = 80 << 30, 1 << 20
STEPS_MAX = 1_000_000
"""Maximum number of events at one instant; more would mean an endless loop."""


class _Running:
    """Task that has started. gpu: the number of its GPU; left: remaining work on its core, then remaining kernel time;
    in_kernels: it uses the GPU now."""

    __slots__ = ("gpu", "gpu_left", "in_kernels", "job", "key", "left", "number", "sm_share")

    def __init__(self, number: int, job: Job, key: str, gpu: int | None, pct: float) -> None:
        self.number, self.job, self.key, self.gpu = number, job, key, gpu
        share = min(job.sm_share, pct / 100.0)
        self.sm_share, self.gpu_left = share, job.gpu_s * job.sm_share / share
        self.left = math.inf if job.work_s is None else job.work_s
        self.in_kernels = False


class _Machine:
    """Machine: its running tasks, their speed, and its power."""

    def __init__(self, node: CaseNode, run: CaseRun) -> None:
        self.node, self.run = node, run
        self.curve = node.curve(sleeps=run.sleep) if node.cores else None
        self.running: dict[str, _Running] = {}
        self.waking: list[_Running] = []
        self.awake_s = 0.0
        self.is_asleep = False
        self.idle_since_s = 0.0
        self.now_s = 0.0
        self.watts = 0.0
        self.next_s = math.inf
        self._speeds: dict[str, float] = {}
        self.settle()

    def pass_to(self, now_s: float) -> None:
        """Advance all work to this time."""
        for key, speed in self._speeds.items():
            one = self.running[key]
            done = speed * (now_s - self.now_s)
            if one.in_kernels:
                one.gpu_left -= done
            else:
                one.left -= done
        self.now_s = now_s

    def settle(self) -> None:
        """Compute the speeds from now on, and the time of the next change."""
        on_cores = [one for one in self.running.values() if not one.in_kernels]
        busy = sum(one.job.cpus for one in on_cores)
        rate = self.node.speed * self.curve.thread_rate(busy) if self.curve is not None and busy else 0.0
        self._speeds = {one.key: rate for one in on_cores}
        gpu_w = self.node.gpus * self.node.gpu_static_w
        for number in range(self.node.gpus):
            here = [one for one in self.running.values() if one.in_kernels and one.gpu == number]
            shared = sum(one.sm_share for one in here) if self.run.gpu_share == "mps" else float(len(here))
            for one in here:
                speed = self._speeds[one.key] = 1.0 / max(shared, 1.0)
                gpu_w += one.job.gpu_j * speed * one.sm_share / (one.job.gpu_s * one.job.sm_share)
        self.next_s = min(
            (self.now_s + max(self._left(key), 0.0) / speed for key, speed in self._speeds.items()), default=math.inf
        )
        if self.curve is None:
            self.watts = gpu_w
        elif self.is_asleep:
            self.watts = self.curve.off_w + gpu_w
        else:
            self.watts = self.curve.watts_at(busy) + gpu_w
        if self.waking:
            self.next_s = min(self.next_s, self.awake_s)
        elif not self.running and not self.is_asleep and self.curve is not None and self.curve.may_sleep:
            self.next_s = self.idle_since_s + self.node.sleep_after_s

    def _left(self, key: str) -> float:
        one = self.running[key]
        return one.gpu_left if one.in_kernels else one.left

    def ended(self) -> list[_Running]:
        """Tasks that have done all their work. Tasks with remaining kernels start these."""
        done = []
        for key, speed in list(self._speeds.items()):
            one = self.running[key]
            if self._left(key) > speed * SAME_INSTANT_S:
                continue
            if not one.in_kernels and one.gpu_left > 0.0:
                one.in_kernels = True
                continue
            del self.running[key]
            done.append(one)
        if done and not self.running:
            self.idle_since_s = self.now_s
        return done


class EnergyModel(QueueingModel):
    """Model of one run of a case."""

    def __init__(self, case: Case, run: CaseRun) -> None:
        self._case, self._run = case, run
        self._jobs = jobs_of(case)
        self._names = {node.name: f"n{number:06}" for number, node in enumerate(case.nodes)}
        self._case_names = {name: node for node, name in self._names.items()}
        self._machines = {self._names[node.name]: _Machine(node, run) for node in case.nodes}
        self._numbers: dict[str, int] = {}
        self._submitted: list[int] = []
        self._left = len(self._jobs)
        self.schedule: list[list[Any]] = [[None, None, None, None] for _ in self._jobs]
        self.joules = self.price = 0.0
        self.watts = 0.0
        self._accounted_s = 0.0
        config = msgspec.structs.replace(
            IDEAL_CONFIG,
            searches_in_flight_max=1,
            probes_per_search_max=64,
            # Kernels of one task fill a card: the core takes the card with the fewest tasks.
            gpu=GpuConfig(tasks_max=run.gpu_limit, memory_share_max=1.0, reserve_bytes=0, activity_unknown=1.0),
        )
        profiles = [_profile(self._names[node.name], node, run) for node in case.nodes]
        super().__init__(_policies(run), profiles, seed=1, ended=lambda _task: None, config=config)
        if case.price:
            prices = tuple((EPOCH_S + at_s, value) for at_s, value in case.price)
            for name in self.nodes:
                self._handle(name, events.PricesRead(prices))

    def play(self) -> None:  # noqa: C901 -- one line a kind of event
        """Play until the last task has ended, or until_s."""
        end_s = self._case.until_s or math.inf
        arrivals = sorted(range(len(self._jobs)), key=lambda number: (self._jobs[number].at_s, number))
        arrived = 0
        steps, at_s = 0, -1.0
        while self._left or self._case.until_s is not None:
            next_s = min(one.next_s for one in self._machines.values())
            if arrived < len(arrivals):
                next_s = min(next_s, self._jobs[arrivals[arrived]].at_s)
            if self._heap:
                next_s = min(next_s, self._heap[0][0])
            if next_s > end_s or next_s == math.inf:
                break
            steps = steps + 1 if next_s <= at_s else 0
            at_s = next_s
            if steps > STEPS_MAX:
                raise InvariantBroken(f"case {self._case.id!r}, run {self._run.name!r}: no end at {at_s:g} s")
            self._account(next_s)
            self._move_to(next_s)
            if self._machines_reach(next_s):
                self._finish_instant()
            elif self._heap and self._heap[0][0] <= next_s and not self._is_arriving(arrivals, arrived, next_s):
                _, _, name, event = heapq.heappop(self._heap)
                if not isinstance(event, events.TimerExpired) or self._is_due(name, event.timer, next_s):
                    self._handle(name, event)
                    self._finish_instant()
            else:
                first = arrived
                while arrived < len(arrivals) and self._jobs[arrivals[arrived]].at_s <= next_s:
                    arrived += 1
                self._submit(arrivals[first:arrived])
                self._finish_instant()
        if self._case.until_s is not None:
            self._account(self._case.until_s)
            self._move_to(self._case.until_s)

    def _is_arriving(self, arrivals: list[int], arrived: int, now_s: float) -> bool:
        return arrived < len(arrivals) and self._jobs[arrivals[arrived]].at_s <= now_s

    def _account(self, until_s: float) -> None:
        """Add the joules until then, at the current power."""
        if until_s <= self._accounted_s:
            return
        self.watts = sum(machine.watts for machine in self._machines.values())
        self.joules += self.watts * (until_s - self._accounted_s)
        if self._case.price:
            self.price += self.watts * integral(self._case.price, self._accounted_s, until_s) / J_PER_KWH
        self._accounted_s = until_s

    # -- machines ------------------------------------------------------------------------------------------------------

    def _machines_reach(self, now_s: float) -> bool:
        """Handle the machines' own events at this instant, before any node decides → True if there were any."""
        due = [(name, one) for name, one in self._machines.items() if one.next_s <= now_s + SAME_INSTANT_S]
        for name, machine in due:
            machine.pass_to(now_s)
            if machine.waking and machine.awake_s <= now_s + SAME_INSTANT_S:
                for one in machine.waking:
                    self._begin(machine, one)
                machine.waking = []
            for one in machine.ended():
                self.schedule[one.number][1] = now_s
                self._left -= 1
                started_at = EPOCH_S + self.schedule[one.number][0]
                ended = events.TaskEnded(one.key, Exit(0, started_at=started_at, ended_at=EPOCH_S + now_s))
                self._now.append((name, ended))
            is_idle = not machine.running and not machine.waking and not machine.is_asleep
            machine.settle()
            if is_idle and machine.next_s <= now_s + SAME_INSTANT_S and not self.nodes[name].ledger.load_tasks:
                machine.is_asleep = True
                machine.settle()
                if not self.nodes[name].has_work:  # otherwise it is still the home of tasks
                    self._now.append((name, events.MachineSleeping()))
        return bool(due)

    def _begin(self, machine: _Machine, one: _Running) -> None:
        machine.running[one.key] = one
        self.schedule[one.number][0] = self.now_s

    def _spawn(self, name: str, action: actions.SpawnTask) -> None:
        machine, number = self._machines[name], self._numbers[action.task]
        job = self._jobs[number]
        gpu = int(action.devices[0].rpartition("-")[2]) if job.takes_gpu else None
        self.schedule[number][2:] = self._case_names[name], gpu
        one = _Running(number, job, action.key, gpu, self._run.gpu_pct if self._run.gpu_share == "mps" else 100.0)
        machine.pass_to(self.now_s)
        if machine.is_asleep:
            machine.is_asleep = False
            machine.awake_s = self.now_s + machine.node.wake_s
            self._now.append((name, events.MachineWoke()))
        if machine.awake_s > self.now_s:
            machine.waking.append(one)
        else:
            self._begin(machine, one)
        machine.settle()

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _submit(self, numbers: list[int]) -> None:
        """Submit the tasks of this instant, equal ones of one node as an array."""
        first = 0
        while first < len(numbers):
            job, last = self._jobs[numbers[first]], first + 1
            while last < len(numbers) and self._jobs[numbers[last]] is job:
                last += 1
            self._submitted = numbers[first:last]
            indices = tuple(range(last - first)) if last - first > 1 else ()
            terms = SubmitOptions()
            if self._run.defer and job.slack_s is not None:
                terms = SubmitOptions(start_by=EPOCH_S + job.at_s + job.slack_s)
            if self.nodes[self._names[job.node]].state.is_asleep:  # a submission wakes the agent, not the cores
                self._handle(self._names[job.node], events.MachineWoke())
            token = f"t{numbers[first]}"
            request = numbers[first] + 1
            submitted = events.TaskSubmitted(request, token, b"", self._task_spec(job), indices, terms=terms)
            self._handle(self._names[job.node], submitted)
            rest = timers.Batch(str(request))
            while self._timers[self._names[job.node]].pop(rest, None) is not None:  # a long array takes several steps
                self._handle(self._names[job.node], events.TimerExpired(rest))
            first = last

    def _task_spec(self, job: Job) -> TaskSpec:
        request = ResourceRequest(cpus=job.cpus)
        if job.takes_gpu:
            is_alone = self._run.gpu_share == "exclusive"
            share = GpuShare.EXCLUSIVE if is_alone else GpuShare.TIME
            request = ResourceRequest(cpus=job.cpus, gpus=1, gpu_mem_bytes=TASK_BYTES, gpu_share=share)
        return TaskSpec((b"task",), SCRATCH, request=request, est_s=job.length_s)

    def _answer(self, _name: str, action: actions.Answer) -> None:
        if action.error is not None:
            raise InvariantBroken(f"submission {action.request} was refused") from action.error
        task, members = str(action.reply["id"]), action.reply["members"]
        for index, number in enumerate(self._submitted):
            self._numbers[f"{task}.{index}" if members else task] = number

    def _changed(self, name: str, action: actions.TaskChanged) -> None:
        """Do nothing: energy cases are measured only by starts and ends."""

    # -- results -------------------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """Results of the run in the case format."""
        jobs, end_s = self._jobs, self._accounted_s
        finished = [(job, row) for job, row in zip(jobs, self.schedule, strict=True) if row[1] is not None]
        responses = [row[1] - job.at_s for job, row in finished]
        slowdowns = [(row[1] - job.at_s) / job.length_s for job, row in finished if job.length_s]
        begun = zip(jobs, self.schedule, strict=True)
        late = sum(
            job.slack_s is not None and (end_s if row[0] is None else row[0]) > job.at_s + job.slack_s + SAME_INSTANT_S
            for job, row in begun
        )
        for row in self.schedule:
            if row[0] is not None and row[1] is None:
                row[1] = end_s
        return {
            "makespan_s": max((row[1] for row in self.schedule if row[1] is not None), default=0.0),
            "wh": self.joules / J_PER_WH,
            "joules_per_task": self.joules / len(jobs),
            "mean_response_s": sum(responses) / len(responses) if responses else None,
            "mean_slowdown": sum(slowdowns) / len(slowdowns) if slowdowns else None,
            "watts_at_end": self.watts,
            "price": self.price if self._case.price else None,
            "late": late,
            "schedule": self.schedule,
        }


def play_case(case: Case, run: CaseRun) -> dict[str, Any]:
    """Play one run of a case → its result."""
    model = EnergyModel(case, run)
    model.play()
    return model.result()


def _policies(run: CaseRun) -> PolicySet:
    name, table, base, places = read_preset(run.preset)
    if table.get("location", {}).get("sender", {}).get("policy") == "least-joules":
        table["location"]["sender"]["slack"] = run.slack
    return build_preset(name, table, base, places)


def _profile(name: str, node: CaseNode, run: CaseRun) -> Profile:
    if not node.cores:
        return Profile(name, 0, 0.0, slots_fixed=True)
    slots = slots_of(node, run)
    devices = tuple(
        Device(f"nvidia:GPU-{number}", index=number, mem_bytes=GPU_BYTES, grantable_bytes=GPU_BYTES)
        for number in range(node.gpus)
    )
    curve = node.curve(sleeps=run.sleep)
    return Profile(
        name, slots, float(slots), gpus=node.gpus, slots_fixed=True, speed=node.speed, devices=devices, power=curve
    )
