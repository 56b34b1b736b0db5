"""The clients of one run: they submit with a token until they are answered, and now and then want something of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.model import events
from peerload.model.errors import NoSuchTask
from peerload.model.resources import Placement, ResourceRequest
from peerload.model.task import SCRATCH, Guarantee, SubmitOptions, TaskSpec

if TYPE_CHECKING:
    from peerload.model.actions import Answer
    from tests.chaos.cluster import Cluster
    from tests.chaos.machine import Machine
    from tests.chaos.plan import Job

GIB = 1 << 30
CLIENT_S = 0.0002
"""A word between client and agent takes so long."""
ASK_AGAIN_S = 2.0
"""A client without an answer submits again, with the same token."""


def spec_of(job: Job) -> TaskSpec:
    """The spec of a job: what its process does is in its argv."""
    argv = (
        b"task",
        repr(job.service_s).encode(),
        str(job.exit_code).encode(),
        b"stubborn" if job.stubborn else b"obeys",
        *([str(int(job.gpu_gib * GIB)).encode()] if job.gpu_gib else []),
    )
    request = ResourceRequest(gpus=1, gpu_mem_bytes=GIB) if job.gpu_gib else ResourceRequest()
    placement = Placement(node=job.only or None, exclude=(job.exclude,) if job.exclude else ())
    return TaskSpec(
        argv,
        SCRATCH,
        request=request,
        placement=placement,
        guarantee=Guarantee(job.guarantee),
        lease_s=job.lease_s,
        lease_auto=job.lease_auto,
    )


def _is_over(machine: Machine, name: str) -> bool:
    record = machine.disk.tasks.get(name)
    return record is not None and record.state.is_final


class Clients:
    """Every job of the plan by its number, which is also its token."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._jobs = cluster.plan.jobs
        self._specs = [spec_of(job) for job in self._jobs]
        self._open: dict[int, tuple[int, bool]] = {}
        self._verbs: dict[int, tuple[str, str]] = {}
        self._request = 0
        self._forgetting: dict[int, tuple[str, str]] = {}
        self._forgotten: set[tuple[str, str]] = set()
        self._ids: dict[int, str] = {}
        self._terms: dict[int, SubmitOptions] = {}
        self.answered_jobs: set[int] = set()
        self.names: dict[str, list[str]] = {}
        """The ids that clients were told, by home."""
        for number, job in enumerate(self._jobs):
            cluster.at(job.at_s, self._submit, number)

    def _submit(self, number: int) -> None:
        if number in self.answered_jobs:
            return
        job = self._jobs[number]
        machine = self._cluster.machines[job.node]
        if machine.is_gone or machine.disk.number > 1:
            self.answered_jobs.add(number)  # nobody submits there any more
            return
        if machine.node is not None:
            self._ask(number, machine)
            if job.client == "dies":
                self.answered_jobs.add(number)
                self._cluster.gauges.count("row client dies before SUBMITTED")
                return
        self._cluster.after(ASK_AGAIN_S, self._submit, number)

    def _ask(self, number: int, machine: Machine) -> None:
        self._request += 1
        self._open[self._request] = (number, self._jobs[number].client == "dies")
        token = f"t{number}"
        indices = tuple(range(self._jobs[number].members))
        event = events.TaskSubmitted(
            self._request,
            token,
            token.encode(),
            self._specs[number],
            indices,
            before=machine.disk.submission_of(token, machine.name),
            held=self._jobs[number].held,
            terms=self._terms.setdefault(number, self._terms_of(number)),
        )
        machine.later(CLIENT_S, machine.handle, event)

    def _terms_of(self, number: int) -> SubmitOptions:
        """The options of a job, with the ids of the jobs that it waits for as far as they are known by now."""
        job = self._jobs[number]
        after, after_ok = (
            tuple(self._ids[other] for other in others if other in self._ids) for others in (job.after, job.after_ok)
        )
        return SubmitOptions(group=job.group, after=after, after_ok=after_ok, retries=job.retries)

    def verb(self, verb: str, nth: int) -> bool:
        """A user wants something of a task that is not over; False if there is none."""
        found = [
            (machine, name)
            for machine in self._cluster.machines.values()
            if machine.node is not None and not machine.is_asleep
            for name in self.names.get(machine.name, ())
            if not _is_over(machine, name)
        ]
        if not found:
            return False
        self._request += 1
        machine, task = found[nth % len(found)]
        self._verbs[self._request] = (verb, task)
        event: events.Event
        match verb:
            case "cancel":
                event = events.CancelRequested(self._request, (task,))
            case "hold":
                event = events.HoldRequested(self._request, (task,))
            case "release":
                event = events.ReleaseRequested(self._request, (task,))
            case "prio":
                event = events.PriorityRequested(self._request, (task,), nth % 3)
            case _:
                raise AssertionError(verb)
        machine.later(CLIENT_S, machine.handle, event)
        return True

    def drain(self, machine: Machine, *, begins: bool) -> None:
        """A user drains a node, or ends that."""
        self._request += 1
        if begins:
            machine.deliver(events.DrainRequested(self._request, "a test"))
        else:
            machine.deliver(events.UndrainRequested(self._request))

    def set_group(self, machine: Machine, group: str, slots: int, paused: int) -> None:
        """A user sets a group of a node."""
        self._request += 1
        wanted = None if slots < 0 else slots
        event = events.GroupRequested(self._request, group, wanted, None if paused < 0 else bool(paused))
        machine.later(CLIENT_S, machine.handle, event)

    def go_on(self, machine: Machine) -> None:
        """No group of a node is to be paused any more: asked for until that is durable."""
        paused = [name for name, group in machine.disk.groups.items() if group.is_paused]
        if not paused:
            return
        for name in paused:
            self.set_group(machine, name, -1, 0)
        self._cluster.after(ASK_AGAIN_S, self.go_on, machine)

    def forget(self, machine: Machine, node: str) -> None:
        """A user says at this node that another one is gone for good, until that is accepted: not while it is only
        suspected."""
        if (machine.name, node) in self._forgotten:
            return
        self._request += 1
        self._forgetting[self._request] = (machine.name, node)
        machine.deliver(events.ForgetRequested(self._request, node))
        self._cluster.after(ASK_AGAIN_S, self.forget, machine, node)

    def answered(self, machine: Machine, answer: Answer) -> None:
        """The agent says something to a client."""
        forgetting = self._forgetting.pop(answer.request, None)
        if forgetting is not None and (answer.error is None or answer.reply["was"] is None):
            self._forgotten.add(forgetting)
        verb = self._verbs.pop(answer.request, None)
        if verb is not None:
            self._told(machine, answer, *verb)
            return
        number, is_dead = self._open.pop(answer.request, (-1, True))
        if isinstance(answer.error, NoSuchTask):
            self.answered_jobs.add(number)  # what it was to wait for is lost with its home: nobody submits it
        if is_dead or number < 0 or answer.error is not None:
            return
        name = str(answer.reply["id"])
        if number in self.answered_jobs:
            if name not in self.names.get(machine.name, ()):
                self._cluster.checker.broken_token(number, name)
            return
        self.answered_jobs.add(number)
        self._ids[number] = name
        self.names.setdefault(machine.name, []).append(name)
        self._cluster.checker.acknowledge(machine, name)
        if self._jobs[number].client == "repeats":
            self._cluster.gauges.count("submits repeated")
            self._cluster.after(1.0, self._repeat, number, machine)

    def _repeat(self, number: int, machine: Machine) -> None:
        if machine.node is not None and machine.disk.number == 1:
            self._ask(number, machine)

    def _told(self, machine: Machine, answer: Answer, verb: str, task: str) -> None:
        if verb == "cancel" and task in answer.reply.get("cancelled", ()):  # type: ignore[operator]
            self._cluster.checker.cancelled(machine, task)
