"""What becomes of a task of this home whose attempt ran out of GPU memory: it is tried again with more.

The end of such an attempt is no result: the task is queued again and asks for half as much again as the attempt could have
had, as often as it was submitted with; then once more with GPUs of its own; then the failure is its result. It never asks
for more than some node known could give; when it has had that, it gets GPUs of its own next. A home that was just started,
and does not know yet what the node has that it ran on, asks for the same again. How often, and what it asks for by now, is in
its durable record, before the node that said so is told that it was noted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.membership.membership import PeerState
from peerload.core.resources.admission import gpu_mem_bytes_max
from peerload.core.resources.gpu_use import OUT_OF_GPU_MEMORY
from peerload.core.tasks.work import with_more_memory
from peerload.model.devices import GpuShare
from peerload.model.task import Guarantee

if TYPE_CHECKING:
    from peerload.core.membership.membership import Membership
    from peerload.core.state import CoreState
    from peerload.core.tasks.home import Home
    from peerload.core.tasks.work import HomeTask
    from peerload.model.task import Exit

MORE = 1.5
"""So many times what was too little."""


class MemoryRetries:
    """One per node; it keeps nothing of its own."""

    def __init__(self, state: CoreState, membership: Membership, home: Home) -> None:
        self._state = state
        self._membership = membership
        self._home = home

    @staticmethod
    def concerns(task: HomeTask, exit_: Exit) -> bool:
        """Whether it is a task that is tried again at all when it ran out of GPU memory, as it did."""
        request = task.spec.request
        is_repeatable = task.spec.guarantee is not Guarantee.ONCE and request.gpus > 0 and request.gpu_oom_retries > 0
        return is_repeatable and exit_.out_of == OUT_OF_GPU_MEMORY

    def again(self, task: HomeTask, exit_: Exit) -> str:
        """Queue it again, durably, if its current attempt ended so and it may be tried again: → "". Else why this is its
        result, in words (" " where there is nothing to say)."""
        if not self.concerns(task, exit_):
            return " "
        request, record = task.spec.request, task.record
        is_alone = request.gpu_share is GpuShare.EXCLUSIVE
        is_last = record.memory_retries >= request.gpu_oom_retries
        if is_alone and (is_last or record.gpu_alone):
            return f"it was tried {record.memory_retries + 1} times"
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
        self._state.count("attempts out of GPU memory")
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
        """Whether it is known what that node has; not, perhaps, at once after this home's start."""
        peer = self._membership.get(node)
        return node == self._state.node or (peer is not None and peer.knows_profile)

    def _more_bytes(self, task: HomeTask, exit_: Exit) -> int:
        """What it asks for next: half as much again as it had, if there is so much."""
        need_bytes = int(MORE * max(exit_.had_bytes, exit_.usage.gpu_memory_bytes_max))
        most_bytes = self._most_bytes(task)
        return need_bytes if most_bytes is None else min(need_bytes, most_bytes)

    def _most_bytes(self, task: HomeTask) -> int | None:
        """The most memory that it could get of each GPU on any node known, None = nobody knows."""
        state, spec = self._state, task.spec
        peers = (peer.profile for peer in self._membership if peer.state in (PeerState.ALIVE, PeerState.SUSPECT))
        sizes = [
            gpu_mem_bytes_max(profile, spec.request, spec.placement, state.node) for profile in (state.profile, *peers)
        ]
        return None if None in sizes else max(size for size in sizes if size is not None)
