"""What other homes wait for is kept from removal until they were told."""

from __future__ import annotations

from peerload.model import events
from peerload.model.messages import AwaitTasks, TasksTold
from tests.core.given import Given


def test_a_task_is_watched_until_its_end_was_told() -> None:
    x = Given(slots=4)
    x.submit()
    inquiries = x.node.eligibility.remote_status
    assert not inquiries.is_watched("x/1")
    x.hear("y", AwaitTasks(("x/1", "x/2")))
    assert inquiries.is_watched("x/1")
    assert inquiries.is_watched("x/2.3")  # a member of what is asked after
    assert not inquiries.is_watched("x/3")
    x.end(x.task().key, 0)
    assert inquiries.is_watched("x/1")
    found = (events.TaskFound("x/1", is_known=True, is_over=True), events.TaskFound("x/2", is_known=False))
    x.when(events.TasksFound(found))
    assert len(x.sent(TasksTold).tasks) == 2
    assert not inquiries.is_watched("x/1")
    assert not inquiries.is_watched("x/2.3")
