"""What becomes of a task whose attempt ended without a result: its node died under it, or was not heard of for too long.

It is queued again, after a pause that doubles with each loss, until attempts_max were lost; then it has failed. A task
under which poison_nodes different nodes went away is held until somebody has looked at it. One that may run once only
is never queued again for a loss: what became of it is unknown, and stays so until its node says more. An attempt that failed
because a device of its node did is a loss, too, but one with a result: that is kept where the task is not tried again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.membership.membership import PeerState
from peerload.core.tasks.retries import failure_pause_s
from peerload.core.tasks.work import HomePhase
from peerload.model.task import Guarantee, TaskState, how_it_ended

if TYPE_CHECKING:
    from peerload.core.membership.membership import Membership
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.work import HomeTask
    from peerload.model.task import Exit


class LostAttempts:
    """One per node; it keeps nothing of its own: how often a task was lost, and where, is in its durable record."""

    def __init__(self, state: CoreState, membership: Membership, home: Home) -> None:
        self._state = state
        self._membership = membership
        self._home = home

    def died(self, task: HomeTask, reason: str) -> None:
        """It is proven that the attempt has ended and left nothing: its machine or its launcher went down under it."""
        if task.spec.guarantee is Guarantee.ONCE:
            self._unknown(task, reason, is_gone=True)
        else:
            self._lose(task, reason, took_down=task.record.node)

    def never_started(self, task: HomeTask, reason: str, is_short: bool) -> None:
        """Nothing is lost, so one that may run once only is queued again, too; after a pause, as the next start may fail
        for the same reason. ``is_short``: this node is short of something, and pauses longer than this task then
        (`shortage.py`), which looks for a place elsewhere meanwhile."""
        self._state.count("attempts that never started here")
        rests_s = self.refused(task)
        self._home.requeue(task, reason, rests_s=rests_s if is_short else self._pause_s(task.false_starts))

    def refused(self, task: HomeTask) -> float:
        """A node had taken it, and has not started it. → how long it rests: not at all at first, since mostly a
        reservation has ended, then longer each time, as the next start may fail for the same reason."""
        task.false_starts += 1
        return self._pause_s(task.false_starts - 1) if task.false_starts > 1 else 0.0

    def device_failed(self, task: HomeTask, exit_: Exit) -> str:
        """Its current attempt has failed because a device did: queue it again, durably: → "". Else why this is its result."""
        record = task.record
        losses = record.losses + 1
        if task.spec.guarantee is Guarantee.ONCE:
            return "it may run once only"
        if losses >= self._state.config.attempts_max:
            return f"given up after {losses} lost attempts"
        self._state.count("attempts lost to a device that failed")
        reason = f"attempt {record.attempt} on {record.node}: {how_it_ended(exit_)}; it is tried again"
        self._home.mediator.task_kept_back(task)
        self._home.requeue(task, reason, rests_s=self._pause_s(losses), losses=losses)
        return ""

    def expired(self, task: HomeTask) -> None:
        """Its lease ran out: the node has frozen it for sure, and may come back with it."""
        node = task.record.node
        reason = f"{node} was not heard of until its lease ran out"
        if task.spec.guarantee is Guarantee.ONCE:
            self._unknown(task, reason, is_gone=False)
        else:
            self._lose(task, reason, took_down=node if self._hears_others(node) else "", last_node=node)

    def called_dead(self, task: HomeTask) -> None:
        """Its node is called dead, which is no proof: enough for a task that asked for it."""
        if task.spec.guarantee is Guarantee.FAST and task.phase is HomePhase.AWAY:
            node = task.record.node
            self._lose(task, f"{node} is called dead", took_down="", last_node=node, rests=False)

    def disk_lost(self, task: HomeTask) -> None:
        """Its node answers with another database than it had, and was not booted anew: what it has promised is forgotten.
        Its lease ends that, but if it was parked it has none: nobody can tell whether it runs on."""
        node = task.record.node
        if not task.record.parked_ts:
            return
        reason = f"{node} has lost its database, and whether it still runs there cannot be known"
        if task.spec.guarantee is Guarantee.ONCE:
            self._unknown(task, reason, is_gone=False)
        else:
            self._home.hold(task, reason, last_node=node)

    def rest_after_restart(self, task: HomeTask) -> bool:
        """Whether a queued task has to pause (once more): how long it has done so is not known any more."""
        record = task.record
        unsure_s = self._state.unsure_until_s - self._state.now.boot_s
        if not record.losses and not record.failures and unsure_s <= 0.0:
            return False
        pause_s = max(unsure_s, self._pause_s(record.losses) if record.losses else 0.0)
        if record.failures:
            pause_s = max(pause_s, failure_pause_s(self._state.config, record.failures))
        self._home.rest(task, pause_s)
        return True

    def _lose(self, task: HomeTask, reason: str, *, took_down: str, last_node: str = "", rests: bool = True) -> None:
        self._state.count("attempts lost")
        record = task.record
        losses = record.losses + 1
        lost_on = record.lost_on
        if took_down and took_down not in lost_on:
            lost_on = (*lost_on, took_down)
        if losses >= self._state.config.attempts_max:
            self._home.fail(task, f"given up after {losses} lost attempts; the last: {reason}")
            return
        if len(lost_on) >= self._state.config.poison_nodes:
            reason = f"{' and '.join(lost_on)} went away while it ran there"
            self._home.hold(task, reason, losses=losses, lost_on=lost_on, last_node=last_node)
        else:
            rests_s = self._pause_s(losses) if rests else 0.0
            self._home.requeue(task, reason, rests_s=rests_s, losses=losses, lost_on=lost_on, last_node=last_node)

    def _unknown(self, task: HomeTask, reason: str, *, is_gone: bool) -> None:
        """``is_gone``: its node has nothing of it left, or so a user said, so that there is nobody to ask. If it comes back
        with it all the same, it goes on (R11)."""
        self._state.count("outcomes unknown")
        name = task.uid.hex()
        node = task.record.node
        if node != self._state.node:
            self._state.clear_timer("lease", name)
            if is_gone:
                self._state.clear_timer("ask", name)
        task.enter(HomePhase.UNKNOWN)
        task.running_at = 0.0
        if task.lease is not None:
            task.lease.deadline_s = 0.0
        self._home.become(
            task,
            f"it may run once only, and {reason}",
            state=TaskState.UNKNOWN,
            node="" if is_gone else node,
            parked_ts=0.0,
            last_node=node if is_gone else "",
        )

    def _pause_s(self, losses: int) -> float:
        config = self._state.config
        doublings = min(losses - 1, 30)
        return min(config.loss_backoff_s * 2.0**doublings, config.loss_backoff_s_max)

    def _hears_others(self, node: str) -> bool:
        """Whether a node that is silent is so alone: else it may be this home that nobody hears."""
        return any(peer.state is PeerState.ALIVE and peer.identity.node != node for peer in self._membership)
