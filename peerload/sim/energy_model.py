"""Energy simulator: the real core of every node on a model of machines that share cores and GPUs and take power.

Only physics is here: how fast tasks run side by side, what a machine takes, when an idle one is suspended and how long
it wakes. Where a task goes and when it starts is decided by the core and the preset. Messages take no time.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.energy.price import integral
from peerload.model import actions, events, timers
from peerload.model.config import GpuConfig
from peerload.model.errors import InvariantBroken
from peerload.model.resources import Device, GpuShare, Profile, ResourceRequest
from peerload.model.task import SCRATCH, Exit, SubmitOptions, TaskSpec
from peerload.policy.registry import build_preset, read_preset
from peerload.sim.energy_cases import jobs_of, slots_of
from peerload.sim.queueing_model import EPOCH_S, IDEAL_CONFIG, QueueingModel

if TYPE_CHECKING:
    from peerload.model.actions import Action
    from peerload.policy.preset import PolicySet
    from peerload.sim.energy_cases import Case, CaseNode, CaseRun, Job

J_PER_WH, J_PER_KWH = 3600.0, 3.6e6
SAME_INSTANT_S = 1e-9
GPU_BYTES, TASK_BYTES = 80 << 30, 1 << 20
STEPS_MAX = 1_000_000
"""Events at one instant; more would mean that it never ends."""


class _Running:
    """Task that has a place. gpu: the number of its card; left: its work on the core that it has not done, then its
    kernels; in_kernels: it is on its card."""

    __slots__ = ("gpu", "gpu_left", "in_kernels", "job", "key", "left", "number", "sm_share")

    def __init__(self, number: int, job: Job, key: str, gpu: int | None, pct: float) -> None:
        self.number, self.job, self.key, self.gpu = number, job, key, gpu
        share = min(job.sm_share, pct / 100.0)
        self.sm_share, self.gpu_left = share, job.gpu_s * job.sm_share / share
        self.left = math.inf if job.work_s is None else job.work_s
        self.in_kernels = False


class _Machine:
    """Machine: what runs on it, how fast, and what it takes."""

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
        """Work is done until now."""
        for key, speed in self._speeds.items():
            one = self.running[key]
            done = speed * (now_s - self.now_s)
            if one.in_kernels:
                one.gpu_left -= done
            else:
                one.left -= done
        self.now_s = now_s

    def settle(self) -> None:
        """How fast everything goes from now on, and when something changes by itself."""
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
        """Tasks that have done all their work by now; others go on to their kernels."""
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
    """One run of one case."""

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
            gpu=GpuConfig(tasks_max=run.gpu_limit, memory_share_max=1.0, reserve_bytes=0),
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
        """Joules until then, at the power of now."""
        if until_s <= self._accounted_s:
            return
        self.watts = sum(machine.watts for machine in self._machines.values())
        self.joules += self.watts * (until_s - self._accounted_s)
        if self._case.price:
            self.price += self.watts * integral(self._case.price, self._accounted_s, until_s) / J_PER_KWH
        self._accounted_s = until_s

    # -- machines ------------------------------------------------------------------------------------------------------

    def _machines_reach(self, now_s: float) -> bool:
        """Everything that machines do by themselves at this instant, before any node decides. → whether there was any."""
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
                self._now.append((name, events.MachineSleeping()))
        return bool(due)

    def _begin(self, machine: _Machine, one: _Running) -> None:
        machine.running[one.key] = one
        self.schedule[one.number][0] = self.now_s

    def _spawned(self, name: str, action: actions.SpawnTask) -> None:
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
        """Tasks that come at one instant, equal ones of one node as an array."""
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
            token = f"t{numbers[first]}"
            request = numbers[first] + 1
            submitted = events.TaskSubmitted(request, token, b"", self._task_spec(job), indices, terms=terms)
            self._handle(self._names[job.node], submitted)
            rest = timers.Batch.of(request)
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

    def _perform(self, name: str, action: Action) -> None:
        match action:
            case actions.SpawnTask():
                self._spawned(name, action)
            case actions.Answer():
                if action.error is not None:
                    raise InvariantBroken(f"submission {action.request} was refused") from action.error
                task, members = str(action.reply["id"]), action.reply["members"]
                for index, number in enumerate(self._submitted):
                    self._numbers[f"{task}.{index}" if members else task] = number
            case actions.TaskChanged():
                pass
            case _:
                super()._perform(name, action)

    # -- results -------------------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """Results of the run, as the case format says."""
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
