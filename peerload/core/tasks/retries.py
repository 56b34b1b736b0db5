"""Retries: what becomes of a task of this home whose attempt was lost, ran out of GPU memory, or has failed.

*Lost attempts.* It is queued again, after a pause that doubles with each loss, until attempts_max were lost; then it has failed. A task
under which poison_nodes different nodes went away is held until somebody has looked at it. One that may run once only
is never queued again for a loss: what became of it is unknown, and stays so until its node says more. An attempt that failed
because a device of its node did is a loss, too, but one with a result: that is kept where the task is not tried again.

*Out of GPU memory.* The end of such an attempt is no result: the task is queued again and asks for half as much again as the attempt could have
had, as often as it was submitted with; then once more with GPUs of its own; then the failure is its result. It never asks
for more than some node known could give; when it has had that, it gets GPUs of its own next. A home that was just started,
and does not know yet what the node has that it ran on, asks for the same again. How often, and what it asks for by now, is in
its durable record, before the node that said so is told that it was noted.

*Failures.* A task that was submitted with --retries is queued again, after a pause that doubles each time, as often as that; then
the failure is its result. Any end but exit code 0 counts: a signal and the time limit, too; but not by a signal that its user has sent it (Ctrl-C ends a
`run --retries`), and one of which the input is not kept whole cannot be tried again: such an end is its result. How often it has failed is in its durable record, before the
node that said so is told that it was noted; the output of such an attempt is not kept. One that ran out of GPU memory is
tried again with more first, which does not count; nor does one that failed because a device of its node
did, which is a loss, whether it was submitted with --retries or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.membership.peers import PeerState
from peerload.core.resources.admission import gpu_mem_bytes_max
from peerload.core.resources.devices import OUT_OF_GPU_MEMORY, has_failed
from peerload.core.work import HomePhase, with_more_memory
from peerload.model import metrics, timers
from peerload.model.resources import GpuShare
from peerload.model.task import Guarantee, TaskState, how_it_ended
from peerload.model.text import times_text

if TYPE_CHECKING:
    from peerload.core.membership.membership import Membership
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.work import HomeTask
    from peerload.model.config import CoreConfig
    from peerload.model.task import Exit

MORE = 1.5
"""Factor on the memory that was too little."""
DOUBLINGS_MAX = 30
SIGNAL_BASE = 128
"""Added to the number of a signal in the exit code of a program that ended by it."""
CUT = "it cannot be tried again, since its standard input is not kept whole"
MEANT = "it was signalled by its user, so it is not tried again"


class LostAttempts:
    """Handling of lost attempts, one object per node. It keeps no state: how often a task was lost, and where, is
    in its durable record."""

    def __init__(self, state: CoreState, membership: Membership, home: Home) -> None:
        self._state = state
        self._membership = membership
        self._home = home

    def died(self, task: HomeTask, reason: str) -> None:
        """Handle an attempt that is proven to have ended and left nothing: its machine or its launcher went down under it."""
        if task.spec.guarantee is Guarantee.ONCE:
            self._unknown(task, reason, is_gone=True)
        else:
            self._lose(task, reason, took_down=task.record.node)

    def never_started(self, task: HomeTask, reason: str, is_short: bool) -> None:
        """Queue a task again that never started, --once too, since nothing is lost; after a pause, as the next start may fail
        for the same reason. ``is_short``: this node is short of something, and pauses longer than this task then
        (`evacuation.py`), which looks for a place elsewhere meanwhile."""
        self._state.count(metrics.ATTEMPTS_NEVER_STARTED)
        rests_s = self.refused(task)
        self._home.requeue(task, reason, rests_s=rests_s if is_short else self._pause_s(task.false_starts))

    def refused(self, task: HomeTask) -> float:
        """A node had taken it, and has not started it. → how long it rests: not at all at first, since mostly a
        reservation has ended, then longer each time, as the next start may fail for the same reason."""
        task.false_starts += 1
        return self._pause_s(task.false_starts - 1) if task.false_starts > 1 else 0.0

    def device_failed(self, task: HomeTask, exit_: Exit) -> str:
        """Queue a task again, durably, after a failure of a device. → "", or the reason why the failure is its
        result."""
        record = task.record
        losses = record.losses + 1
        if task.spec.guarantee is Guarantee.ONCE:
            return "it may run once only"
        if losses >= self._state.config.attempts_max:
            return f"given up after {losses} lost attempts"
        self._state.count(metrics.ATTEMPTS_LOST_WITH_DEVICE)
        reason = f"attempt {record.attempt} on {record.node}: {how_it_ended(exit_)}; it is tried again"
        self._home.mediator.task_kept_back(task)
        self._home.requeue(task, reason, rests_s=self._pause_s(losses), losses=losses)
        return ""

    def expired(self, task: HomeTask) -> None:
        """Handle a lease that ran out: the node has frozen the task for sure, and may come back with it."""
        node = task.record.node
        reason = f"{node} was not heard of until its lease ran out"
        if task.spec.guarantee is Guarantee.ONCE:
            self._unknown(task, reason, is_gone=False)
        else:
            self._lose(task, reason, took_down=node if self._reaches_others(node) else "", last_node=node)

    def declared_dead(self, task: HomeTask) -> None:
        """Handle a node that is declared dead. That is not a proof; it is enough for a task that asked for it
        (--fast)."""
        if task.spec.guarantee is Guarantee.FAST and task.phase is HomePhase.AWAY:
            node = task.record.node
            self._lose(task, f"{node} was declared dead", took_down="", last_node=node, rests=False)

    def disk_lost(self, task: HomeTask) -> None:
        """Handle a node that answers with a new database without having been rebooted: its promises are lost. A lease
        ends the attempt; a parked attempt has none, so its state becomes unknown."""
        node = task.record.node
        if not task.record.parked_ts:
            return
        reason = f"{node} has lost its database, and whether it still runs there cannot be known"
        if task.spec.guarantee is Guarantee.ONCE:
            self._unknown(task, reason, is_gone=False)
        else:
            self._home.hold(task, reason, last_node=node)

    def rest_after_restart(self, task: HomeTask) -> bool:
        """True if a queued task has to pause (once more): how long it has done so is not known any more."""
        record = task.record
        unsure_s = self._state.unsure_until_s - self._state.now.boot_s
        if not record.losses and not record.failures and unsure_s <= 0.0:
            return False
        pause_s = max(unsure_s, self._pause_s(record.losses) if record.losses else 0.0)
        if record.failures:
            pause_s = max(pause_s, _failure_pause_s(self._state.config, record.failures))
        self._home.rest(task, pause_s)
        return True

    def _lose(self, task: HomeTask, reason: str, *, took_down: str, last_node: str = "", rests: bool = True) -> None:
        self._state.count(metrics.ATTEMPTS_LOST)
        record = task.record
        losses = record.losses + 1
        lost_on = record.lost_on
        if took_down and took_down not in lost_on:
            lost_on = (*lost_on, took_down)
        if losses >= self._state.config.attempts_max:
            self._home.fail(task, f"given up after {losses} lost attempts; the last: {reason}")
            return
        if len(lost_on) >= self._state.config.poison_nodes:
            reason = f"{' and '.join(lost_on)} failed while it ran there"
            self._home.hold(task, reason, losses=losses, lost_on=lost_on, last_node=last_node)
        else:
            rests_s = self._pause_s(losses) if rests else 0.0
            self._home.requeue(task, reason, rests_s=rests_s, losses=losses, lost_on=lost_on, last_node=last_node)

    def _unknown(self, task: HomeTask, reason: str, *, is_gone: bool) -> None:
        """Set a task to UNKNOWN. is_gone: its node has nothing left of it, or a user said so, and is not asked. If the
        node returns with it all the same, it continues (R11)."""
        self._state.count(metrics.OUTCOMES_UNKNOWN)
        node = task.record.node
        if node != self._state.node:
            self._state.clear_timer(timers.Lease(task.uid.hex()))
            if is_gone:
                self._state.clear_timer(timers.QueryDue(task.uid.hex()))
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
        return _backoff_s(self._state.config.loss_backoff_s, self._state.config.loss_backoff_s_max, losses)

    def _reaches_others(self, node: str) -> bool:
        """True if a node that is silent is so alone: else it may be this home that nobody hears."""
        return any(peer.state is PeerState.ALIVE and peer.identity.node != node for peer in self._membership)


class Retries:
    """Retries of failed tasks, one object per node. It keeps no state."""

    def __init__(self, state: CoreState, membership: Membership, home: Home, lost_attempts: LostAttempts) -> None:
        self._state = state
        self._membership = membership
        self._home = home
        self._lost_attempts = lost_attempts

    def concerns(self, task: HomeTask, exit_: Exit) -> bool:
        """True if it is a task that is tried again at all when it has ended so."""
        is_failure = exit_.exit_code != 0 and (task.terms.retries > 0 or bool(exit_.failed_device))
        return is_failure or _lacked_memory(task, exit_)

    def repeats(self, task: HomeTask, exit_: Exit) -> bool:
        """True if the end of its current attempt is a failure that is sure to lead to a retry, so that nothing of it is kept.
        Whether a device has failed under it may not be known yet; the last such loss is a result."""
        may_be_last_loss = bool(task.record.devices) and task.record.losses + 1 >= self._state.config.attempts_max
        is_over = (
            task.phase is HomePhase.OVER or task.record.input_is_cut or may_be_last_loss or _was_meant(task, exit_)
        )
        is_retried = task.record.failures < task.terms.retries or _gets_more_memory(task, exit_)
        return exit_.exit_code != 0 and is_retried and not is_over

    def again(self, task: HomeTask, exit_: Exit) -> str:
        """Queue it again, durably, if its current attempt ended so and it may be tried again: → "". Else why this is its
        result, in words (" " where there is nothing to say)."""
        if exit_.exit_code and task.record.input_is_cut and self.concerns(task, exit_):
            return CUT
        if exit_.exit_code and _was_meant(task, exit_):
            return MEANT if task.terms.retries else " "
        if exit_.failed_device:
            return self._lost_attempts.device_failed(task, exit_)
        why = self._with_more_memory(task, exit_)
        retries = task.terms.retries
        if not why or not retries or not exit_.exit_code:
            return why
        failures = task.record.failures + 1
        if failures > retries:
            return f"it was tried {times_text(failures)}"
        self._state.count(metrics.ATTEMPTS_RETRIED)
        pause_s = _failure_pause_s(self._state.config, failures)
        record = task.record
        self._home.mediator.task_kept_back(task)
        self._home.requeue(
            task,
            f"attempt {record.attempt} on {record.node} failed ({how_it_ended(exit_)}); again in {pause_s:g} s,"
            f" retry {failures} of {retries}",
            rests_s=pause_s,
            failures=failures,
        )
        return ""

    def _with_more_memory(self, task: HomeTask, exit_: Exit) -> str:
        """Queue a task again, as `again` does, after an attempt that ran out of GPU memory."""
        if not _lacked_memory(task, exit_):
            return " "
        request, record = task.spec.request, task.record
        is_alone = request.gpu_share is GpuShare.EXCLUSIVE
        is_last = record.memory_retries >= request.gpu_oom_retries
        if is_alone and (is_last or record.gpu_alone):
            return f"it was tried {times_text(record.memory_retries + 1)}"
        need_bytes, how = record.gpu_mem_bytes, "with the same, since others had taken the memory"
        if exit_.had_bytes:
            is_known = self._is_known(record.node)
            need_bytes = self._more_bytes(task, exit_) if is_known else exit_.had_bytes
            how = f"with {need_bytes / 2**30:.1f} GiB"
            if need_bytes < exit_.had_bytes or (is_known and need_bytes == exit_.had_bytes and is_alone):
                return "no node known has more"
            is_last = is_last or (is_known and need_bytes == exit_.had_bytes)  # there may be more than is promised
        if is_last:
            how += f", on {'a GPU' if request.gpus == 1 else 'GPUs'} of its own"
        self._state.count(metrics.ATTEMPTS_OUT_OF_GPU_MEMORY)
        task.spec = with_more_memory(task.spec, need_bytes, alone=is_last)
        self._home.requeue(
            task,
            f"attempt {record.attempt} on {record.node} ran {exit_.reason}; again {how}",
            gpu_mem_bytes=need_bytes,
            gpu_alone=is_last or record.gpu_alone,
            memory_retries=record.memory_retries + 1,
        )
        return ""

    def _is_known(self, node: str) -> bool:
        """True if that node's resources are known, which may not be so just after this home's start."""
        peer = self._membership.get(node)
        return node == self._state.node or (peer is not None and peer.knows_profile)

    def _more_bytes(self, task: HomeTask, exit_: Exit) -> int:
        """The memory that it asks for next: half as much again as it had, if there is so much."""
        need_bytes = int(MORE * max(exit_.had_bytes, exit_.usage.gpu_memory_bytes_max))
        most_bytes = self._most_bytes(task)
        return need_bytes if most_bytes is None else min(need_bytes, most_bytes)

    def _most_bytes(self, task: HomeTask) -> int | None:
        """Largest memory of each GPU that any known node could give the task; None: unknown."""
        state, spec = self._state, task.spec
        peers = (peer.profile for peer in self._membership if peer.state in (PeerState.ALIVE, PeerState.SUSPECT))
        sizes = [
            gpu_mem_bytes_max(profile, spec.request, spec.placement, state.node) for profile in (state.profile, *peers)
        ]
        return None if None in sizes else max(size for size in sizes if size is not None)


def _lacked_memory(task: HomeTask, exit_: Exit) -> bool:
    """True if it ran out of GPU memory, and is a task that is tried again then."""
    request = task.spec.request
    is_repeatable = task.spec.guarantee is not Guarantee.ONCE and request.gpus > 0 and request.gpu_oom_retries > 0
    return is_repeatable and exit_.out_of == OUT_OF_GPU_MEMORY


def _gets_more_memory(task: HomeTask, exit_: Exit) -> bool:
    """True if an attempt here ran out of GPU memory and is sure to be tried again, whatever other nodes have: it was promised
    memory of a card, and may have one of its own next."""
    request = task.spec.request
    is_promised = request.gpu_mem_bytes > 0 and request.gpu_share is not GpuShare.EXCLUSIVE
    return is_promised and bool(task.record.devices) and has_failed(exit_) and _lacked_memory(task, exit_)


def _was_meant(task: HomeTask, exit_: Exit) -> bool:
    """True if its current attempt ended by a signal that a user has sent it."""
    attempt, signals = task.signalled
    return attempt == task.record.attempt and (exit_.signal or exit_.exit_code - SIGNAL_BASE) in signals


def _failure_pause_s(config: CoreConfig, failures: int) -> float:
    return _backoff_s(config.failure_backoff_s, config.failure_backoff_s_max, failures)


def _backoff_s(first_s: float, most_s: float, times: int) -> float:
    """The pause after so many losses or failures: it doubles with each."""
    return min(first_s * 2.0 ** min(times - 1, DOUBLINGS_MAX), most_s)
