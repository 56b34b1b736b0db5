"""Client events: passes answers and task changes of the core to the clients that wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.agent.node_info import now
from peerload.model.task import execution_key

if TYPE_CHECKING:
    from peerload.agent.completion.saving import OutputSaver
    from peerload.agent.control.core_requests import CoreRequests, Decisions
    from peerload.agent.output.output import TaskOutputs
    from peerload.agent.requests.attach import AttachRequests
    from peerload.agent.requests.cancel_wait import CancelWaits
    from peerload.agent.requests.task_watch import TaskWatches
    from peerload.model.actions import Answer, Decided, TaskChanged


class ClientEvents:
    """Passes answers and changes on to the clients that wait for them."""

    def __init__(
        self,
        core: CoreRequests,
        decisions: Decisions,
        watches: TaskWatches,
        attach: AttachRequests,
        cancel_waits: CancelWaits,
        saving: OutputSaver,
        output: TaskOutputs,
    ) -> None:
        self._core = core
        self._decisions = decisions
        self._watches = watches
        self._attach = attach
        self._cancel_waits = cancel_waits
        self._saving = saving
        self._output = output

    def answered(self, answer: Answer) -> None:
        """A request has its answer."""
        self._core.answered(answer)

    def changed(self, action: TaskChanged) -> None:
        """A task has a new durable record, or runs."""
        self._attach.changed(action)
        self._saving.changed(action)
        record = action.record
        self._watches.changed(record, running=action.running)
        if record.state.is_final and record.exit is not None:
            key = execution_key(record.uid, record.attempt)
            self._output.ended(key, record.exit.stdout_bytes, record.exit.stderr_bytes)

    def attempt_gone(self, key: str) -> None:
        """No process of this attempt is left."""
        self._cancel_waits.attempt_gone(key)

    def restored(self) -> None:
        """The core has recovered its state after a start."""
        self._attach.restored()

    def decided(self, decision: Decided) -> None:
        """A decision was made."""
        self._decisions.add(decision, now().wall_s)

    def waits(self, task: str, why: str) -> None:
        """A task has ended elsewhere, and its result cannot be fetched for now."""
        self._watches.delayed(task, why)
