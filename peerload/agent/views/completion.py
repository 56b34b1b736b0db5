"""Completion jobs of a task, as `show` tells them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.agent.accounts.output_files import named
from peerload.agent.store import jobs
from peerload.agent.store.rows import order_of
from peerload.agent.views.task import text

if TYPE_CHECKING:
    from peerload.agent.store.reader import StoreReader
    from peerload.model.submit_options import SubmitOptions
    from peerload.model.task import TaskRecord, TaskSpec


def completion_object(
    store: StoreReader, record: TaskRecord, spec: TaskSpec, terms: SubmitOptions
) -> dict[str, object]:
    """Output files, notification command, and jobs that are still pending. The names of files are final once the task has
    ended."""
    counter, member = order_of(record.task)
    node = record.node or record.last_node
    files = [
        text(named(pattern, counter, member, spec.name, node) if pattern and record.ended_at else pattern) or None
        for pattern in (terms.output_file, terms.error_file)
    ]
    owed = jobs.jobs_of(store, counter, member) if record.ended_at and terms.chores() else []
    return {
        "output_file": files[0],
        "error_file": files[1],
        "notify": text(terms.notify) or None,
        "owed": [
            {"what": one.kind.value, "tries": one.tries, "why": one.why, "due_at": one.due_at or None} for one in owed
        ],
    }
