"""A node with cards and tasks that come, grow and go, a step at a time; after each step every promise is looked at.

python -m tests.gpu.walk --steps 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

from peerload.core.node import Node
from peerload.core.resources.devices import DeviceState
from peerload.core.resources.placement import Scope, place
from peerload.core.work import HomePhase, HomeTask
from peerload.model import actions, events, timers
from peerload.model.config import CoreConfig
from peerload.model.events import Instant
from peerload.model.messages import Identity
from peerload.model.resources import (
    Device,
    DeviceReading,
    GpuShare,
    GpuWait,
    Health,
    Nearness,
    Profile,
    ResourceRequest,
)
from peerload.model.task import SCRATCH, Exit, TaskSpec
from peerload.policy.registry import build_preset

GIB = 1 << 30
WALL_S = 1_000_000.0
WAITING_MAX = 24


class Broken(AssertionError):
    """A promise was broken."""


def cards(count: int, gib: int, *, is_read: bool) -> tuple[Device, ...]:
    names = [f"nvidia:GPU-{number:02d}" for number in range(count)]

    def links(number: int) -> tuple[tuple[str, int], ...]:
        ways = {
            other: Nearness.PIX if other // 2 == number // 2 else Nearness.SYSTEM
            for other in range(count)
            if other != number
        }
        return tuple((names[other], int(way)) for other, way in ways.items())

    return tuple(
        Device(name, index=number, model="Fake-A10", mem_bytes=gib * GIB, is_read=is_read, links=links(number))
        for number, name in enumerate(names)
    )


class Walk:
    """``count`` cards of 24 GiB, two FPGAs, and enough cores, or few (``cpus``). Without ``checks`` nothing is looked at."""

    def __init__(
        self,
        *,
        count: int = 4,
        cpus: float = 64.0,
        is_read: bool = True,
        config: CoreConfig | None = None,
        checks: bool = True,
    ) -> None:
        self.devices = (*cards(count, 24, is_read=is_read), Device("fpga:a", "fpga"), Device("fpga:b", "fpga", 1))
        self.config = config or CoreConfig()
        self.checks = checks
        slots = max(int(cpus), 1)
        profile = Profile("x", slots, cpus, mem_bytes=1 << 40, gpus=count, devices=self.devices)
        identity = Identity("x", "boot", "machine", "store", 1, "x:1")
        self.node = Node(self.config, build_preset("alone", {}), identity, profile, random.Random(1))
        self.now_s = 100.0
        self.number = 0
        self.running: dict[str, HomeTask] = {}
        self.held: dict[bytes, tuple[tuple[str, ...], int]] = {}
        self.foreign: dict[str, int] = {}
        self.used: dict[tuple[str, str], int] = {}
        self.sick: set[str] = set()
        self.started = 0
        self.handle(events.AgentStarted())
        if is_read:
            self.read()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> None:
        done = self.node.handle(Instant(self.now_s, WALL_S + self.now_s), event)
        if not self.checks:
            self.running |= {
                action.key: self.node.home.by_id[action.task]
                for action in done
                if isinstance(action, actions.SpawnTask)
            }
            return
        for action in done:
            if isinstance(action, actions.SpawnTask):
                task = self.node.home.by_id[action.task]
                self.running[action.key] = task
                self.started += 1
                self.check_started(task, action)
                self.held.pop(task.uid, None)
        self.check(done)

    def states(self) -> list[DeviceState]:
        return list(self.node.ledger.devices.states.values())

    def submit(self, request: ResourceRequest, name: str = "a") -> None:
        self.number += 1
        spec = TaskSpec((name.encode(),), SCRATCH, request=request)
        self.handle(events.TaskSubmitted(self.number, f"token {self.number}", b"digest", spec))

    def end(self, place_in_order: int) -> None:
        if not self.running:
            return
        key = list(self.running)[place_in_order % len(self.running)]
        del self.running[key]
        self.used = {(device, of): used for (device, of), used in self.used.items() if of != key}
        self.handle(events.TaskEnded(key, Exit(0, started_at=WALL_S + self.now_s - 10.0, ended_at=WALL_S + self.now_s)))
        self.read()

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.handle(events.TimerExpired(timers.Devices()))

    def read(self) -> None:
        """As a sensor would: what tasks have, and others."""
        readings = []
        for device in self.devices:
            if device.is_read:
                ours = tuple((key, used) for (on, key), used in sorted(self.used.items()) if on == device.id)
                foreign = self.foreign.get(device.id, 0)
                reading = DeviceReading(
                    device.id,
                    Health.SICK if device.id in self.sick else Health.OK,
                    mem_used_bytes=foreign + sum(used for _, used in ours),
                    mem_foreign_bytes=foreign,
                    foreign=int(foreign > 0),
                    ours=ours,
                )
                readings.append(reading)
        self.handle(events.DevicesSampled(self.now_s, tuple(readings)))

    def grow(self, place_in_order: int, share: float) -> None:
        """A task takes a part of what it was promised, on all its cards."""
        keys = [key for key in self.running if self.node.ledger.devices.holding.get(key)]
        if not keys:
            return
        key = keys[place_in_order % len(keys)]
        for name in self.node.ledger.devices.holding[key]:
            state = self.node.ledger.devices.states[name]
            if state.device.is_read:
                promised = state.grants[key].promised_bytes
                room = (
                    state.device.mem_bytes
                    - self.foreign.get(name, 0)
                    - sum(used for (on, of), used in self.used.items() if on == name and of != key)
                )
                wanted = int((state.device.mem_bytes if promised is None else promised) * share)
                self.used[name, key] = max(min(wanted, room), 0)
        self.read()

    def others(self, number: int, gib: float) -> None:
        """Programs that are none of ours take so much of a card."""
        device = self.devices[number % (len(self.devices) - 2)]
        ours = sum(used for (on, _), used in self.used.items() if on == device.id)
        self.foreign[device.id] = min(int(gib * GIB), device.mem_bytes - ours)
        self.read()

    def ail(self, number: int) -> None:
        device = self.devices[number % (len(self.devices) - 2)]
        if device.is_read:
            self.sick ^= {device.id}
            self.read()

    # -- promises ------------------------------------------------------------------------------------------------------

    def check_started(self, task: HomeTask, action: actions.SpawnTask) -> None:
        request, names = task.spec.request, action.devices
        states = self.node.ledger.devices.states
        gpus = [states[name] for name in names if states[name].device.kind == "gpu"]
        if len(gpus) != request.gpus or len(set(names)) != len(names):
            raise Broken(f"{action.task} asked for {request.gpus} GPUs and has {names}")
        for kind, count in request.devices:
            if sum(states[name].device.kind == kind for name in names) != count:
                raise Broken(f"{action.task} asked for {count} {kind} and has {names}")
        waited_s = self.now_s - task.arrived_s
        scope = {state.id for state in Scope(self.node.ledger.devices, request, waited_s).all}
        if not {state.id for state in gpus} <= scope:
            raise Broken(f"{action.task} may have {sorted(scope)} and has {names}")
        for name in names:
            if name in self.sick:
                raise Broken(f"{action.task} was given {name}, which is sick")
            others = set(states[name].grants) - {action.key}
            if others and (request.gpu_share is GpuShare.EXCLUSIVE or states[name].device.kind != "gpu"):
                raise Broken(f"{action.task} shares {name} with {others}")
        for uid, (kept, order) in self.held.items():
            first = [name for name in kept if name in names and name not in self.kept_before(order, name)]
            if uid != task.uid and order < task.order and first and not self.sick & set(kept):
                raise Broken(f"{action.task} was given {names}, kept for another")

    def kept_before(self, order: int, name: str) -> set[str]:
        """The device, if it is kept for one that came earlier than this."""
        return {name} if any(name in kept and before < order for kept, before in self.held.values()) else set()

    def check(self, done: list[Any]) -> None:
        config = self.config.gpu
        for state in self.states():
            grants = list(state.grants.values())
            if state.device.kind != "gpu":
                if len(grants) > 1:
                    raise Broken(f"{state.id} has {len(grants)} tasks")
                continue
            if len(grants) > config.tasks_max:
                raise Broken(f"{state.id} has {len(grants)} tasks")
            if state.is_held_alone and len(grants) > 1:
                raise Broken(f"{state.id} is held alone, by {len(grants)}")
            promised = sum(grant.promised_bytes or 0 for grant in grants)
            if promised > state.grantable_bytes:
                raise Broken(f"{state.id}: {promised} bytes promised of {state.grantable_bytes}")
            if sum(grant.ask.activity for grant in grants) > config.activity_max + 1e-6:
                raise Broken(f"{state.id} has too much work")
        self.check_waiting()

    def waiting(self) -> list[HomeTask]:
        return [
            work
            for work in self.node.queue.oldest_first()
            if isinstance(work, HomeTask) and work.phase is HomePhase.WAITING
        ]

    def check_waiting(self) -> None:
        """The first in line never waits for what is there; and what has hardened stays."""
        works = self.waiting()
        with_devices = [work for work in works if work.spec.request.takes_devices]
        held = {work.uid: (work.reserved, work.order) for work in with_devices if work.reserved}
        self.held = held
        if with_devices:
            first = with_devices[0]
            ledger = self.node.ledger
            ask = _ask(self.node, first)
            waited_s = self.now_s - first.arrived_s
            names = place(ledger.devices, first.spec.request, ask, self.now_s, waited_s)
            if names is not None and ledger.has_cores(first.spec.request) and not _overdue_before(self, first, works):
                raise Broken(f"{first.task} waits, and {names} are free")
        plain = [work for work in works if not work.spec.request.takes_devices]
        if plain and self.node.ledger.fits(plain[0].spec.request):
            earlier = [work for work in with_devices if work.order < plain[0].order]
            if not any(_lacks_cores(self, work) for work in earlier):
                raise Broken(f"{plain[0].task} waits for cores that are free")


def _ask(node: Node, work: HomeTask) -> Any:
    from peerload.core.resources.devices import DeviceRequest

    devices = node.ledger.devices
    learned = node.state.learned_gpu_bytes(work, devices.models)
    return DeviceRequest(work.spec.request, devices.config, learned, node.state.run_s_max(work, devices.models))


def _lacks_cores(walk: Walk, work: HomeTask) -> bool:
    ledger = walk.node.ledger
    waited_s = walk.now_s - work.arrived_s
    names = place(ledger.devices, work.spec.request, _ask(walk.node, work), walk.now_s, waited_s)
    return names is not None and not ledger.has_cores(work.spec.request)


def _overdue_before(walk: Walk, first: HomeTask, works: list[HomeTask]) -> bool:
    starve_s = walk.config.gpu.starve_after_s
    return any(
        work.order < first.order and not work.spec.request.takes_devices and walk.now_s - work.arrived_s >= starve_s
        for work in works
    )


def random_request(chance: random.Random, count: int) -> ResourceRequest:
    kind = chance.random()
    cpus = chance.choice((0.5, 1.0, 1.0, 2.0, 4.0))
    if kind < 0.15:
        return ResourceRequest(cpus)
    if kind < 0.25:
        return ResourceRequest(cpus, devices=(("fpga", chance.choice((1, 1, 2))),), gpus=chance.choice((0, 0, 1)))
    prefer = tuple(str(number) for number in chance.sample(range(count), min(chance.choice((0, 0, 1, 2)), count)))
    wait = chance.choice((GpuWait.SCHEDULE, GpuWait.QUEUE))
    gpus = min(chance.choice((1, 1, 1, 2, 3)), count)
    if wait is GpuWait.QUEUE and prefer:
        gpus = min(gpus, len(prefer))
    more: dict[str, Any] = {
        "gpu_prefer": prefer,
        "gpu_wait": wait,
        "gpu_wait_s_max": chance.choice((0.0, 0.0, 30.0)),
        "gpu_mem_bytes": int(chance.choice((0, 0, 1, 4, 12, 20)) * GIB),
        "gpu_share": chance.choice((GpuShare.AUTO, GpuShare.AUTO, GpuShare.TIME, GpuShare.EXCLUSIVE)),
    }
    if gpus == 1 and more["gpu_share"] is not GpuShare.EXCLUSIVE and chance.random() < 0.3:
        more["gpu_fraction"] = chance.choice((0.1, 0.25, 0.5))
    return ResourceRequest(cpus, gpus=gpus, **more)


def step(walk: Walk, chance: random.Random, count: int) -> None:
    what = chance.random()
    if what < 0.3:
        if len(walk.waiting()) < WAITING_MAX:
            walk.submit(random_request(chance, count), chance.choice("abc"))
    elif what < 0.6:
        walk.end(chance.randrange(1000))
    elif what < 0.75:
        walk.grow(chance.randrange(1000), chance.choice((0.0, 0.3, 1.0, 1.0, 1.3)))
    elif what < 0.9:
        walk.pass_time(chance.choice((0.1, 1.0, 5.0, 60.0, 600.0)))
    elif what < 0.97:
        walk.others(chance.randrange(count), chance.choice((0, 0, 1, 10, 20)))
    else:
        walk.ail(chance.randrange(count))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    began_s = time.monotonic()
    done = started = round_number = 0
    while done < flags.steps:
        seed = flags.seed * 1_000_003 + round_number
        chance = random.Random(seed)
        count = chance.choice((1, 2, 4, 8))
        walk = Walk(count=count, cpus=chance.choice((2.0, 8.0, 64.0)), is_read=chance.random() < 0.8)
        for number in range(min(2000, flags.steps - done)):
            try:
                step(walk, chance, count)
            except Broken as broken:
                sys.stdout.write(f"round {round_number} (seed {seed}), step {number}: {broken}\n")
                return 1
            done += 1
        started += walk.started
        round_number += 1
    sys.stdout.write(f"{done} steps, {started} tasks started, nothing broken, {time.monotonic() - began_s:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
