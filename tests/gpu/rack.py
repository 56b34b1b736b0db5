"""A witness of its own beside every scheduler: what runs where, whether that can be, and how long GPUs stood idle.

It knows the machines and the tasks, and nothing of the code that decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from peerload.model.config import GpuConfig
from peerload.model.resources import GpuShare, Profile
from peerload.sim.replication import quantile
from tests.gpu.device_model import DeviceArrival

EPSILON = 1e-6


class Wrong(AssertionError):
    """A task was started where it must not be, or not once."""


class Outcome(msgspec.Struct, frozen=True):
    """Of one play of a trace. Times in s; idle_while_waiting: the share of all GPU time up to the end in which a GPU had
    nobody on it although a task waited, anywhere, that could have started on the free GPUs and cores of its node;
    transfers: tasks that ran elsewhere than at home."""

    makespan_s: float
    mean_wait_s: float
    p95_wait_s: float
    mean_wait_gpu_s: float
    mean_wait_cpu_s: float
    idle_while_waiting: float
    transfers: int
    tasks: int
    waits: dict[str, float]


class _Card:
    """One GPU: the tasks on it by number."""

    def __init__(self, mem_bytes: int) -> None:
        self.mem_bytes = mem_bytes
        self.tasks: dict[int, DeviceArrival] = {}


class Rack:
    """The machines with what is on them."""

    def __init__(self, profiles: Sequence[Profile], config: GpuConfig | None = None) -> None:
        self.config = config or GpuConfig()
        self.now_s = 0.0
        self.cpus = {profile.node: profile.cpus for profile in profiles}
        self.cpus_free = dict(self.cpus)
        self.cards = {
            profile.node: {device.id: _Card(device.mem_bytes) for device in profile.devices} for profile in profiles
        }
        self.waiting: dict[int, DeviceArrival] = {}
        self.running: dict[int, tuple[str, tuple[str, ...]]] = {}
        self.began: dict[int, tuple[DeviceArrival, float]] = {}
        self.over: set[int] = set()
        self.transfers = 0
        self.idle_s = 0.0
        self._asked: dict[tuple[int, float, int], int] = {}

    # -- what happens --------------------------------------------------------------------------------------------------

    def comes(self, number: int, arrival: DeviceArrival) -> None:
        self.pass_time(arrival.at_s)
        self.waiting[number] = arrival
        self._count(arrival, 1)

    def begins(self, now_s: float, number: int, arrival: DeviceArrival, node: str, devices: Sequence[str]) -> None:
        """Raises Wrong."""
        self.pass_time(now_s)
        request = arrival.request
        if self.waiting.pop(number, None) is not arrival:
            raise Wrong(f"task {number} starts and was not waiting")
        self._count(arrival, -1)
        if len(devices) != request.gpus or len(set(devices)) != len(devices):
            raise Wrong(f"task {number} asked for {request.gpus} GPUs and has {devices}")
        self.cpus_free[node] -= request.cpus
        if self.cpus_free[node] < -EPSILON:
            raise Wrong(f"{node} has {self.cpus_free[node]:g} cores left")
        for device in devices:
            card = self.cards[node][device]
            card.tasks[number] = arrival
            self._look_at(device, card)
        self.running[number] = node, tuple(devices)
        self.began[number] = arrival, now_s
        self.transfers += node != arrival.node

    def ends(self, now_s: float, number: int) -> None:
        """Raises Wrong."""
        self.pass_time(now_s)
        if number in self.over or number not in self.running:
            raise Wrong(f"task {number} ends and did not run")
        node, devices = self.running.pop(number)
        self.over.add(number)
        self.cpus_free[node] += self.began[number][0].request.cpus
        for device in devices:
            del self.cards[node][device].tasks[number]

    def _look_at(self, device: str, card: _Card) -> None:
        tasks = list(card.tasks.values())
        if len(tasks) > self.config.tasks_max:
            raise Wrong(f"{device} has {len(tasks)} tasks")
        if len(tasks) > 1 and any(one.request.gpu_share is GpuShare.EXCLUSIVE for one in tasks):
            raise Wrong(f"{device} is shared with a task that shares it with nobody")
        used = sum(one.gpu_bytes for one in tasks)
        most = card.mem_bytes * self.config.memory_share_max - self.config.reserve_bytes
        if used > most:
            raise Wrong(f"{device}: its tasks have {used} bytes, {most:.0f} may be given")

    # -- how long GPUs stand idle --------------------------------------------------------------------------------------

    def _count(self, arrival: DeviceArrival, by: int) -> None:
        """The sizes that wait, each with their number."""
        request = arrival.request
        if request.gpus:
            size = request.gpus, request.cpus, request.gpu_mem_bytes or arrival.gpu_bytes
            self._asked[size] = self._asked.get(size, 0) + by
            if not self._asked[size]:
                del self._asked[size]

    def pass_time(self, now_s: float) -> None:
        passed_s = now_s - self.now_s
        if passed_s > 0:
            self.idle_s += passed_s * self._idle_gpus()
            self.now_s = now_s

    def _idle_gpus(self) -> int:
        """GPUs without a task, of nodes where one that waits could start on such GPUs alone."""
        if not self._asked:
            return 0
        idle = 0
        for node, cards in self.cards.items():
            free = [card.mem_bytes for card in cards.values() if not card.tasks]
            if free and any(self._could(node, free, *size) for size in self._asked):
                idle += len(free)
        return idle

    def _could(self, node: str, free: Sequence[int], gpus: int, cpus: float, need_bytes: int) -> bool:
        share, reserve = self.config.memory_share_max, self.config.reserve_bytes
        large = sum(need_bytes <= size * share - reserve for size in free)
        return large >= gpus and self.cpus_free[node] + EPSILON >= cpus

    # -- what came of it -----------------------------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        """Raises Wrong if a task was left."""
        if self.waiting or self.running:
            raise Wrong(f"{len(self.waiting)} tasks wait and {len(self.running)} run at the end")
        waited = [(arrival, began_s - arrival.at_s) for arrival, began_s in self.began.values()]
        waits = sorted(wait_s for _, wait_s in waited)
        by_command: dict[str, list[float]] = {}
        for arrival, wait_s in waited:
            by_command.setdefault(arrival.command, []).append(wait_s)
        count = sum(len(cards) for cards in self.cards.values())
        return Outcome(
            makespan_s=self.now_s - min(arrival.at_s for arrival, _ in waited),
            mean_wait_s=fmean(waits),
            p95_wait_s=quantile(waits, 0.95),
            mean_wait_gpu_s=fmean([wait_s for arrival, wait_s in waited if arrival.gpus] or [0.0]),
            mean_wait_cpu_s=fmean([wait_s for arrival, wait_s in waited if not arrival.gpus] or [0.0]),
            idle_while_waiting=self.idle_s / (self.now_s * count),
            transfers=self.transfers,
            tasks=len(self.over),
            waits={command: fmean(each) for command, each in sorted(by_command.items())},
        )
