"""The state of this node and of its tasks as JSON at the broker, for other systems (`mqtt_publish_state`): retained topics, of the
tasks that changed last. Nothing in it is read by peerload."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import msgspec

from peerload import __version__
from peerload.agent.control.authorization import display_user
from peerload.agent.event_loop import next_tick
from peerload.agent.store.rows import order_of
from peerload.agent.views.node import nodes
from peerload.agent.views.task import task_here
from peerload.model.errors import PeerloadError

if TYPE_CHECKING:
    from peerload.agent.mqtt import MqttBus
    from peerload.agent.store.store import Store
    from peerload.core.node import Node
    from peerload.model.actions import TaskChanged
    from peerload.model.task import TaskRecord

EVERY_S = 1.0
NODE_EVERY = 5
"""The node itself is published each so many looks, if it has changed."""
TASKS_MAX = 500
"""Tasks with a topic; with one more the one that changed longest ago has none."""
AT_ONCE_MAX = 200
BYTES_MAX = 4096
NOT_PUBLISHED = ("argv", "age_s", "self", "revoked", "declines", "address", "machine")
"""Command lines may hold secrets; the others are of use to peers alone."""


class StatePublisher:
    """Publishes at most AT_ONCE_MAX topics a second. From the loop's thread only."""

    def __init__(self, node: Node, store: Store, bus: MqttBus, user: str) -> None:
        self._node = node
        self._store = store
        self._bus = bus
        self._user = user
        self._told: dict[str, TaskRecord] = {}
        self._changed: dict[str, TaskRecord] = {}
        self._node_told: dict[str, object] = {}
        self._connects = 0

    def changed(self, action: TaskChanged) -> None:
        """A task of this home has a new record, or runs."""
        self._changed.pop(action.record.task, None)
        self._changed[action.record.task] = action.record
        if len(self._changed) > TASKS_MAX:
            del self._changed[next(iter(self._changed))]

    async def run(self) -> None:
        """Publish what has changed, until cancelled."""
        for look in itertools.count():
            await next_tick(EVERY_S)
            if self._bus.connected:
                self._publish(is_of_node=look % NODE_EVERY == 0)

    def _publish(self, *, is_of_node: bool) -> None:
        if self._bus.connects != self._connects:  # the broker may have forgotten everything
            is_first = self._connects == 0
            self._connects, self._node_told, is_of_node = self._bus.connects, {}, True
            waiting = [task.record for task in self._node.home.some(TASKS_MAX)] if is_first else self._told.values()
            self._changed = {record.task: record for record in waiting} | self._changed
        for name in list(itertools.islice(self._changed, AT_ONCE_MAX)):
            if not self._bus.publish_json(_topic(name), self._task(self._changed[name])):
                return
            self._told.pop(name, None)
            self._told[name] = self._changed.pop(name)
            if len(self._told) > TASKS_MAX:
                oldest = next(iter(self._told))
                del self._told[oldest]
                self._bus.publish_json(_topic(oldest), b"")
        if is_of_node:
            told = {key: value for key, value in nodes(self._node)[0].items() if key not in NOT_PUBLISHED}
            if told != self._node_told and self._bus.publish_json("node", _encoded(told | {"version": __version__})):
                self._node_told = told

    def _task(self, record: TaskRecord) -> bytes:
        """The payload of a task; empty if it was removed meanwhile."""
        task = self._node.home.tasks.get(record.uid)
        try:
            spec = task.spec if task is not None else self._store.spec(order_of(record.task)[0])
        except PeerloadError:
            return b""
        told = task_here(self._node, record, spec, display_user(spec, self._user))
        return _encoded({key: value for key, value in told.items() if key not in NOT_PUBLISHED})


def _topic(task: str) -> str:
    return "task/" + task.partition("/")[2]


def _encoded(told: dict[str, object]) -> bytes:
    raw = msgspec.json.encode({"v": 1, "at": time.time()} | told)
    if len(raw) > BYTES_MAX:  # the broker takes no more: what has no bound of its own goes
        told = {key: value for key, value in told.items() if key not in ("gpus", "devices", "labels", "device_names")}
        raw = msgspec.json.encode({"v": 1, "at": time.time()} | told)
    return raw
