"""Placement by load and by energy: every candidate is compared, from its power curve and its newest report ([HPE24])."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from peerload.energy.plan import Candidate, guarded, plan, sleepers
from peerload.model.resources import LOAD_MAX, TaskCost
from peerload.policy.api import Keep, Probe, Transfer

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from peerload.model.resources import LoadReport, ResourceRequest
    from peerload.policy.api import NodeView, Reply, TaskView

    Chosen = tuple[str, tuple[TaskCost, ...]]  # the node that gets the task, and the compared costs


class _Compared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks up to ``probes`` nodes in parallel, full ones last, and gives the task to the best of the accepting ones, including its
    home. This also applies to tasks that their home cannot run, and no receiver policy overrides it."""

    places_all = True
    probes: Annotated[int, Meta(ge=1, le=64, description="nodes asked in one search at most")] = 16

    def locate(
        self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random
    ) -> Probe | Transfer | Keep:
        """Ask once, then choose."""
        del rng
        last = {reply.node: reply for reply in replies}  # a refusal overrides the answer before
        if not replies:
            full = {peer for peer, report in view.reports() if not report.accepts}  # asked after all others
            if asked := tuple(sorted(view.peers, key=lambda peer: (peer in full, peer))[: self.probes]):
                return Probe(asked)
        loads: dict[str, LoadReport | None] = {
            name: reply.report for name, reply in last.items() if reply.accepts and reply.report and view.profile(name)
        }
        if view.starts_here:
            loads[view.node] = None
        if not loads:
            return Keep("no node has room for it now")
        best, compared = self._best(view, task, _candidates(view, loads, task.request))
        if best in view.asleep:
            return Keep(f"{best} is woken for it", compared, wakes=best)
        if best == view.node:
            return Keep("this node is the best for it", compared)
        return Transfer(best, compared=compared)

    def _best(self, view: NodeView, task: TaskView, candidates: list[Candidate]) -> Chosen:
        raise NotImplementedError


class LeastLoaded(_Compared, frozen=True, forbid_unknown_fields=True):
    """The node with the fewest tasks per slot gets the task; of equal ones the first by name.

    Good: every task gets the largest possible share of a node; the benchmark for energy policies.
    Bad: keeps every node awake, and does not prefer efficient nodes.
    """

    def _best(self, view: NodeView, task: TaskView, candidates: list[Candidate]) -> Chosen:
        del view, task
        return min(candidates, key=lambda one: one.busy / one.cpus).node, ()


class LastStep(_Compared, frozen=True, forbid_unknown_fields=True):
    """The published rule: the node with the smallest product of the increase in power by the task and its duration there.

    Good: simple, and close to the optimum if most nodes are busy.
    Bad: power curves are S-shaped, so an idle efficient node looks expensive and is avoided.
    """

    def _best(self, view: NodeView, task: TaskView, candidates: list[Candidate]) -> Chosen:
        work_s, cpus = task.expected_s * view.speed, task.request.cpus
        costs = [TaskCost(one.node, one.marginal_j(work_s, cpus), one.curve.quality) for one in candidates]
        return min(costs, key=lambda one: one.joules).node, tuple(costs)


class _Plan(msgspec.Struct):
    """Number of tasks still planned for each node. backlog: expected number of waiting tasks; work_s: of each, None: no plan."""

    counts: dict[str, int]
    backlog: int = 0
    work_s: float | None = None


class LeastJoules(_Compared, frozen=True, forbid_unknown_fields=True, dict=True):
    """The cheapest node among those on which the task ends at most ``slack`` later than on the quickest one. Tasks are
    placed one by one along the lower convex envelope of the power curves, or by a joint plan if more wait than run. A task
    for GPUs goes to the node with the fewest tasks per GPU, of equal ones to that with the cheapest cores.

    Good: near the optimum, also with sleeping nodes; no task waits for a cheap node while another node has room.
    Bad: depends on accurate power curves. A node without a measured one (`peerload power profile`) counts as a typical server.
    """

    slack: Annotated[float, Meta(ge=0.0, le=10.0, description="share by which a task may end later, for energy")] = 0.1

    @cached_property
    def _planned(self) -> _Plan:
        """The plan for the waiting tasks."""
        return _Plan({})

    def _best(self, view: NodeView, task: TaskView, candidates: list[Candidate]) -> Chosen:
        work_s, cpus, planned, backlog = task.expected_s * view.speed, task.request.cpus, self._planned, view.backlog
        if task.request.gpus:
            first = min(candidates, key=lambda one: (one.gpu_share, one.cost(work_s, cpus)))
            return first.node, tuple(one.told_cost(work_s, cpus) for one in candidates)
        if work_s and view.asleep:
            candidates = candidates + sleepers(view.asleep, view.profile, cpus, candidates[0].price)
        allowed = guarded(candidates, work_s, cpus, self.slack if task.slack is None else task.slack)
        is_current = (planned.backlog, planned.work_s) == (backlog, work_s)
        chosen = [one for one in allowed if is_current and planned.counts.get(one.node)]
        if not chosen:
            more_come = 0 < planned.backlog < backlog
            planned.counts, planned.backlog, planned.work_s = {}, 0, None
            if more_come or backlog > max(1.0, sum(one.busy for one in candidates) / cpus):
                counts = plan(allowed, backlog, work_s, cpus)
                planned.counts = {one.node: count for one, count in zip(allowed, counts, strict=True)}
                chosen = [one for one in allowed if planned.counts.get(one.node)]
        best = min(chosen or allowed, key=lambda one: one.cost(work_s, cpus)).node
        if chosen:
            planned.counts[best] -= 1
            planned.backlog, planned.work_s = backlog - 1, work_s
        return best, tuple(one.told_cost(work_s, cpus) for one in allowed)


def _candidates(view: NodeView, loads: Mapping[str, LoadReport | None], request: ResourceRequest) -> list[Candidate]:
    """Candidates by node. loads: reports, None for this node; GPU loads if the task requests GPUs."""
    found = []
    for name, told in sorted(loads.items()):
        if (profile := view.profile(name)) is None:
            continue
        if told is None:
            busy = view.cpus_started + view.cpus_foreign
        elif told.cpus_free < LOAD_MAX:
            busy = max(profile.cpus - told.cpus_free, 0.0) + told.cpus_foreign
        else:
            busy = told.load_tasks * profile.cpus / max(profile.slots, 1)
        one = Candidate.of(profile, told, busy, request.cpus, view.price)
        tasks, gpus = (view.load_tasks, view.slots) if told is None else (told.load_tasks, told.slots)
        found.append(one._replace(gpu_share=tasks / max(gpus, 1)) if request.gpus else one)
    return found if all(one.price is not None for one in found) else [one._replace(price=None) for one in found]
