"""Retries of tasks of this home whose attempt was lost, ran out of GPU memory, or has failed.

*Lost attempts.* The task is queued again, after a pause that doubles with each loss; after attempts_max losses it has
failed. A task is held for inspection once poison_nodes different nodes failed while it ran. A task that may run only
once is never queued again after a loss: its outcome is unknown until its node reports more. An attempt that failed
because a device of its node did is a loss with a result, which is kept if the task is not retried.

*Out of GPU memory.* The task is queued again and requests 1.5 times the memory that the attempt had. This happens as
often as its submission allows, then once more with exclusive GPUs; then the failure is its result. It never requests
more than a known node could give; after an attempt with that much it gets exclusive GPUs. A home that has just started,
and does not know the node's resources yet, requests the same again. The number of retries and the request are in the
task's durable record before the node's report is acknowledged.

*Failures.* A task submitted with --retries is queued again that often, after a pause that doubles each time; then the
failure is its result. Any end except exit code 0 is a failure, also a signal or the time limit. Two kinds of end are
always a result: by a signal that its user has sent (Ctrl-C ends a `run --retries`), and of a task whose input is not
kept whole. The number of failures is in the task's durable record before the node's report is acknowledged; the output
of such an attempt is not kept. An attempt that ran out of GPU memory is first retried with more, which does not count.
An attempt that failed because a device of its node did is a loss, with or without --retries.
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
"""Factor on the GPU memory that was not enough."""
DOUBLINGS_MAX = 30
SIGNAL_BASE = 128
"""Added to a signal's number for the exit code of a program that it ended."""
CUT = "it cannot be tried again, since its standard input is not kept whole"
MEANT = "it was signalled by its user, so it is not tried again"


class LostAttempts:
    """Handling of lost attempts, one object per node. It keeps no state: the number and nodes of a task's losses are
    in its durable record."""

    def __init__(self, state: CoreState, membership: Membership, home: Home) -> None:
        self._state = state
        self._membership = membership
        self._home = home

    def died(self, task: HomeTask, reason: str) -> None:
        """Handle an attempt that surely ended and left no result: its machine or its launcher failed."""
        if task.spec.guarantee is Guarantee.ONCE:
            self._unknown(task, reason, is_gone=True)
        else:
            self._lose(task, reason, took_down=task.record.node)

    def never_started(self, task: HomeTask, reason: str, is_short: bool) -> None:
        """Queue a task again that never started, also with --once, since nothing is lost; after a pause, because the
        next start may fail for the same reason. ``is_short``: this node lacks a resource and makes a longer pause
        (`evacuation.py`) while the task looks for another node."""
        self._state.count(metrics.ATTEMPTS_NEVER_STARTED)
        rests_s = self.refused(task)
        self._home.requeue(task, reason, rests_s=rests_s if is_short else self._pause_s(task.false_starts))

    def refused(self, task: HomeTask) -> float:
        """Count a node's failure to start the task. → its pause: none at first, since usually a reservation has timed
        out, then longer each time, because the next start may fail for the same reason."""
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
        """Handle an expired lease: the node has surely frozen the task, and may return with it."""
        node = task.record.node
        reason = f"{node} was not heard of until its lease ran out"
        if task.spec.guarantee is Guarantee.ONCE:
            self._unknown(task, reason, is_gone=False)
        else:
            self._lose(task, reason, took_down=node if self._reaches_others(node) else "", last_node=node)

    def declared_dead(self, task: HomeTask) -> None:
        """Handle a node that is declared dead. That is no proof, but enough for a task that asked for it
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
        reason = f"{node} has lost its database, and it is not known whether the task still runs there"
        if task.spec.guarantee is Guarantee.ONCE:
            self._unknown(task, reason, is_gone=False)
        else:
            self._home.hold(task, reason, last_node=node)

    def rest_after_restart(self, task: HomeTask) -> bool:
        """Pause a queued task again if it has to (its past pauses are not recorded). → True if it does."""
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
        """Set a task to UNKNOWN. is_gone: its node no longer has it, or a user said so; the node is not queried. If the
        node returns with it nevertheless, it continues (R11)."""
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
        """True if only this node is silent; otherwise this home itself may be cut off."""
        return any(peer.state is PeerState.ALIVE and peer.identity.node != node for peer in self._membership)


class Retries:
    """Retries of failed tasks, one object per node. It keeps no state."""

    def __init__(self, state: CoreState, membership: Membership, home: Home, lost_attempts: LostAttempts) -> None:
        self._state = state
        self._membership = membership
        self._home = home
        self._lost_attempts = lost_attempts

    def concerns(self, task: HomeTask, exit_: Exit) -> bool:
        """True if a task with such an end is retried at all."""
        is_failure = exit_.exit_code != 0 and (task.terms.retries > 0 or bool(exit_.failed_device))
        return is_failure or _lacked_memory(task, exit_)

    def repeats(self, task: HomeTask, exit_: Exit) -> bool:
        """True if the end of its current attempt is a failure that surely leads to a retry, so that its result is not
        kept. A device failure may not be known yet; after the last such loss the result is kept."""
        may_be_last_loss = bool(task.record.devices) and task.record.losses + 1 >= self._state.config.attempts_max
        is_over = (
            task.phase is HomePhase.OVER or task.record.input_is_cut or may_be_last_loss or _was_meant(task, exit_)
        )
        is_retried = task.record.failures < task.terms.retries or _gets_more_memory(task, exit_)
        return exit_.exit_code != 0 and is_retried and not is_over

    def again(self, task: HomeTask, exit_: Exit) -> str:
        """Queue it again, durably, if its current attempt ended this way and a retry is allowed: → "". Else the reason
        why this is its result (" " if there is nothing to add)."""
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
            is_last = is_last or (is_known and need_bytes == exit_.had_bytes)  # there may be more than was promised
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
        """True if that node's resources are known; just after this home's start they may not be."""
        peer = self._membership.get(node)
        return node == self._state.node or (peer is not None and peer.knows_profile)

    def _more_bytes(self, task: HomeTask, exit_: Exit) -> int:
        """The memory of the next request: MORE times what it had or used, at most what a known node could give."""
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
    """True if it ran out of GPU memory, and such a task is retried."""
    request = task.spec.request
    is_repeatable = task.spec.guarantee is not Guarantee.ONCE and request.gpus > 0 and request.gpu_oom_retries > 0
    return is_repeatable and exit_.out_of == OUT_OF_GPU_MEMORY


def _gets_more_memory(task: HomeTask, exit_: Exit) -> bool:
    """True if an attempt here ran out of GPU memory and is surely retried, whatever other nodes have: it had a promise
    of memory of a card, and may get an exclusive one next."""
    request = task.spec.request
    is_promised = request.gpu_mem_bytes > 0 and request.gpu_share is not GpuShare.EXCLUSIVE
    return is_promised and bool(task.record.devices) and has_failed(exit_) and _lacked_memory(task, exit_)


def _was_meant(task: HomeTask, exit_: Exit) -> bool:
    """True if its current attempt was ended by a signal that a user sent."""
    attempt, signals = task.signalled
    return attempt == task.record.attempt and (exit_.signal or exit_.exit_code - SIGNAL_BASE) in signals


def _failure_pause_s(config: CoreConfig, failures: int) -> float:
    return _backoff_s(config.failure_backoff_s, config.failure_backoff_s_max, failures)


def _backoff_s(first_s: float, most_s: float, times: int) -> float:
    """The pause after this number of losses or failures: it doubles with each."""
    return min(first_s * 2.0 ** min(times - 1, DOUBLINGS_MAX), most_s)
