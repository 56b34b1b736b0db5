"""Queueing model with GPUs: the nodes have devices, and their sensor readings are simulated.

A task's memory appears on its GPUs in the seconds after its start and is gone with it. A node is read as often as an
agent reads: every second while a task holds a GPU there, and soon after one has left. Other programs use nothing.
Tasks that share a GPU do not slow each other down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from peerload.model import actions, events
from peerload.model.resources import DeviceReading, ResourceRequest
from peerload.model.task import SCRATCH, TaskSpec
from peerload.sim.queueing_model import IDEAL_CONFIG, Arrival, Delays, QueueingModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.model.config import CoreConfig
    from peerload.model.resources import Profile
    from peerload.policy.preset import PolicySet

READ_S = 1.0
"""A node is read this often while a task holds a GPU there."""
LEFT_S = 0.05
"""A GPU that a task has left is read after this."""
LOADING_S = 3.0
"""A task's memory grows for so long, steadily. A task of unknown need that stood still first and grew later would be taken
for smaller than it is, here as anywhere."""


class DeviceArrival(Arrival, frozen=True, gc=False):
    """Submission with everything that it asks for, and its command, by which similar tasks are known. gpu_bytes: the
    memory that it will really use on each of its GPUs."""

    request: ResourceRequest = ResourceRequest()
    command: str = "task"
    gpu_bytes: int = 0


class TaskObserver(Protocol):
    """Observer of all tasks, by their numbers 1, 2, … in the order of arrival. Times in simulated seconds."""

    def comes(self, number: int, arrival: DeviceArrival) -> None:
        """The task was submitted."""

    def begins(self, now_s: float, number: int, arrival: DeviceArrival, node: str, devices: Sequence[str]) -> None:
        """The task's process starts on this node, with these devices."""

    def ends(self, now_s: float, number: int) -> None:
        """The task's process has ended."""


class _Attempt:
    """Running task, with the GPUs that it was given."""

    __slots__ = ("arrival", "devices", "number", "since_s")

    def __init__(self, number: int, arrival: DeviceArrival, devices: Sequence[str], since_s: float) -> None:
        self.number = number
        self.arrival = arrival
        self.devices = devices
        self.since_s = since_s

    def used_bytes(self, now_s: float) -> int:
        """Memory used on each of its GPUs."""
        return int(self.arrival.gpu_bytes * min((now_s - self.since_s) / LOADING_S, 1.0))


class DeviceModel(QueueingModel):
    """Nodes with devices that are read. All arrivals are `DeviceArrival`; ``witness`` is told of all."""

    def __init__(
        self,
        policies: PolicySet,
        profiles: Sequence[Profile],
        witness: TaskObserver,
        *,
        seed: int,
        message_s: float = 0.0,
        config: CoreConfig = IDEAL_CONFIG,
    ) -> None:
        self._witness = witness
        self._running: dict[str, dict[str, _Attempt]] = {profile.node: {} for profile in profiles}
        self._read = {profile.node: [device.id for device in profile.devices if device.is_read] for profile in profiles}
        self._reads_at: dict[str, float] = {}
        self._specs_of: dict[tuple[str, ResourceRequest], TaskSpec] = {}
        super().__init__(
            policies, profiles, seed=seed, ended=lambda _task: None, delays=Delays(message_s), config=config
        )
        for name in self._read:
            self._look(name, message_s)

    def _arrive(self, arrival: Arrival) -> None:
        assert isinstance(arrival, DeviceArrival)
        self._witness.comes(self.arrived + 1, arrival)
        super()._arrive(arrival)

    def _spec(self, arrival: Arrival) -> TaskSpec:
        assert isinstance(arrival, DeviceArrival)
        key = arrival.command, arrival.request
        spec = self._specs_of.get(key)
        if spec is None:
            spec = self._specs_of[key] = TaskSpec((arrival.command.encode(),), SCRATCH, request=arrival.request)
        return spec

    def _look(self, name: str, in_s: float) -> float:
        """Schedule a reading of this node's devices → when."""
        at_s = self.now_s + in_s
        self._at(at_s, name, events.DevicesSampled(at_s, ()))
        return at_s

    def _handle(self, name: str, event: events.Event) -> None:
        match event:
            case events.DevicesSampled():
                if self._reads_at.get(name) == event.at_s:
                    del self._reads_at[name]
                    self._read_on(name)
                event = events.DevicesSampled(self.now_s, self._readings(name))
            case events.TaskEnded():
                attempt = self._running[name].pop(event.key)
                self._witness.ends(self.now_s, attempt.number)
                if attempt.devices:
                    self._look(name, LEFT_S)
            case _:
                pass
        super()._handle(name, event)

    def _spawn(self, name: str, action: actions.SpawnTask) -> None:
        super()._spawn(name, action)
        task = self._unfinished[action.task]
        arrival = task.arrival
        assert isinstance(arrival, DeviceArrival)
        self._running[name][action.key] = _Attempt(task.number, arrival, action.devices, self.now_s)
        self._witness.begins(self.now_s, task.number, arrival, name, action.devices)
        self._read_on(name)

    def _read_on(self, name: str) -> None:
        """Schedule the next reading, while a task holds a GPU there."""
        if name not in self._reads_at and any(attempt.devices for attempt in self._running[name].values()):
            self._reads_at[name] = self._look(name, READ_S)

    def _readings(self, name: str) -> tuple[DeviceReading, ...]:
        """Sensor readings of a node's devices at this moment."""
        ours: dict[str, list[tuple[str, int]]] = {device: [] for device in self._read[name]}
        for key, attempt in self._running[name].items():
            for device in attempt.devices:
                if device in ours:
                    ours[device].append((key, attempt.used_bytes(self.now_s)))
        return tuple(
            DeviceReading(device, mem_used_bytes=sum(used for _, used in seen), ours=tuple(seen))
            for device, seen in ours.items()
        )
