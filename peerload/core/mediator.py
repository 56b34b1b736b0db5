"""The calls between machines of one node that do not hold each other.

Machines are built one after the other, each with those before it. A call the other way goes through the node's mediator
(the Mediator of Gamma et al., Design Patterns, 1994), which `Node` implements: all such calls are listed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from peerload.core.work import HomeTask, Offering, RemoteTask, Work
    from peerload.model.actions import Row
    from peerload.model.events import TaskSubmitted
    from peerload.model.gossip import Load
    from peerload.model.messages import Offer
    from peerload.model.resources import LoadReport
    from peerload.model.task import Exit, TaskRecord


class Mediator(Protocol):
    """Calls of a machine to machines that are built after it."""

    # -- tasks of this home --------------------------------------------------------------------------------------------

    def task_arrives(self, task: HomeTask, /) -> None:
        """A task may run from now on: it is queued, and considered for other nodes."""

    def task_requeued(self, task: HomeTask, reason: str, /) -> None:
        """A task is back in the queue, which counts as an arrival."""

    def task_placed(self, task: HomeTask, node: str, /) -> None:
        """A task needs no place any more: ``node`` has it, or "", since it is over."""

    def task_kept_back(self, task: HomeTask, /) -> None:
        """A task waits no more, and is not leased, either."""

    def task_left_gate(self, task: HomeTask, /) -> None:
        """A task waits at the gate no more, and has not passed."""

    def rows_at_end(self, record: TaskRecord, /) -> Sequence[Row]:
        """The rows that are made durable together with the end of this task."""

    def task_ended(self, record: TaskRecord, /) -> None:
        """A task has ended, and its end is on its way to the disk."""

    def is_awaited(self, array: str, /) -> bool:
        """True if other tasks, or other homes, are told when members of this array end."""

    def task_left(self, task: HomeTask, /) -> None:
        """A task is over and leaves memory."""

    def submission_checked(self, event: TaskSubmitted, /) -> None:
        """All tasks that a submission waits for are known to exist."""

    def awaited_task_heard(self, name: str, /) -> None:
        """Something was heard of a task that others wait for."""

    # -- attempts ------------------------------------------------------------------------------------------------------

    def offer_declined(self, task: HomeTask, offering: Offering, reason: str, /) -> None:
        """An offer came to nothing."""

    def may_regain_lease(self, task: HomeTask, /) -> bool:
        """True if a task that was held may be leased again."""

    def run_again(self, task: HomeTask, exit_: Exit, /) -> str:
        """The process of a task has ended. Why it runs again; "": it does not."""

    def attempt_lost(self, task: HomeTask, reason: str, /) -> None:
        """An attempt on this node has left no result."""

    def attempt_never_started(self, task: HomeTask, reason: str, is_short: bool, /) -> None:
        """An attempt on this node has had no process; ``is_short``: for want of memory or files."""

    def process_gone(self, key: str, /) -> None:
        """The process of a task that was cancelled here is gone."""

    # -- tasks of other homes ------------------------------------------------------------------------------------------

    def is_own_task(self, uid: bytes, /) -> bool:
        """True if an unfinished task of this home has this uid."""

    def is_ending(self, key: str, /) -> bool:
        """True if the launcher still has an attempt that nobody here knows, and is ending it."""

    def accepts_offer(self, offer: Offer, /) -> bool:
        """True if the transfer policy accepts an offer."""

    def guest_arrived(self, guest: RemoteTask, /) -> None:
        """A task of another home was committed, and waits here."""

    # -- load ----------------------------------------------------------------------------------------------------------

    def running_tasks(self) -> Iterable[Work]:
        """The tasks that run here."""

    def slot_freed(self) -> None:
        """A task has ended here, and the next has been started."""

    def own_report(self) -> LoadReport:
        """This node's load report."""

    def ask_for_states(self, report: LoadReport, /) -> None:
        """Ask other nodes for their states, as the information policy wants."""

    def peer_load_heard(self, load: Load, src: str, /) -> bool:
        """``src`` told the load of a peer by gossip. Whether it was news."""

    # -- peers ---------------------------------------------------------------------------------------------------------

    def peer_died(self, node: str, /) -> None:
        """A peer is declared dead."""

    def peer_came_back_older(self, node: str, /) -> None:
        """A peer has started with a database from before its last start: it was restored from a copy, and what it has
        promised since is not in it."""
