"""Cases of the energy simulator, format ``energy-cases/1``: nodes with power curves, tasks, and runs of a preset."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from peerload.model.errors import ConfigError
from peerload.model.resources import PowerCurve
from peerload.policy.registry import presets

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
    """Node. cores 0: it only submits."""

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
        """Power curve; ``sleeps``: it is suspended when idle, if the case says what it takes then."""
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
        """Tasks on one GPU at a time."""
        return 1 if self.gpu_share == "exclusive" else self.gpu_tasks_max or 10


class Case(_Part, frozen=True):
    """Case. until_s: where it ends, None = with its last task."""

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
    """One task of a case, in the order in which they are listed. work_s: on a core of speed 1, None = endless."""

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
    """Parse and check a file of cases. Raises ConfigError that names the case, the field and what is allowed."""
    try:
        head = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(source, "is no JSON", why=str(error)) from None
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
    """All tasks of a case."""
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
    """Tasks that a node takes at a time."""
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
        raise ConfigError(f"{where}: watts", "is no power curve", why=str(error)) from None
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
        raise ConfigError(where, "is endless, and the case has no until_s")
