"""Devices in the decisions: who fits where, who overtakes whom, and what other nodes make of it."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from peerload.core.resources.admission import has_room, why_never
from peerload.core.resources.devices import DeviceLedger, DeviceRequest
from peerload.core.resources.placement import Backfill, place
from peerload.model import actions, events, messages
from peerload.model.config import GpuConfig
from peerload.model.errors import NeverRunnable
from peerload.model.resources import (
    Device,
    DeviceLoad,
    DeviceMode,
    DeviceReading,
    GpuShare,
    GpuWait,
    Health,
    LoadReport,
    Nearness,
    Placement,
    Profile,
    ResourceRequest,
)
from peerload.model.task import Exit
from tests.core.given import ACCEPTS, SENDER, UID, WALL_S, Given, offer, spec
from tests.wording import Says

GIB = 1 << 30
CONFIG = GpuConfig()


def gpu(number: int, *, gib: int = 24, is_read: bool = True, **more: Any) -> Device:
    return Device(f"nvidia:GPU-{number}", index=number, model="A10", mem_bytes=gib * GIB, is_read=is_read, **more)


def ledger(*devices: Device, config: GpuConfig = CONFIG) -> DeviceLedger:
    profile = Profile("x", 8, 8.0, gpus=len(devices), devices=devices)
    found = DeviceLedger(profile, config)
    found.read([DeviceReading(device.id) for device in devices], 0.0)
    return found


def asked(gpus: int = 1, gib: float = 0.0, **more: Any) -> ResourceRequest:
    return ResourceRequest(gpus=gpus, gpu_mem_bytes=int(gib * GIB), **more)


class Cards:
    """A ledger, to which tasks come and from which they go."""

    def __init__(self, *devices: Device, config: GpuConfig = CONFIG) -> None:
        self.devices = ledger(*devices, config=config)
        self.now_s = 100.0

    def place(self, request: ResourceRequest, *, run_s: float = float("inf"), waited_s: float = 0.0) -> Any:
        ask = DeviceRequest(request, self.devices.config, run_s=run_s)
        return place(self.devices, request, ask, self.now_s, waited_s)

    def start(self, key: str, request: ResourceRequest, *, run_s: float = float("inf")) -> tuple[str, ...]:
        names: tuple[str, ...] | None = self.place(request, run_s=run_s)
        assert names is not None, "no room"
        self.devices.grant(key, names, DeviceRequest(request, self.devices.config, run_s=run_s), self.now_s)
        return names

    def read(self, number: int, **fields: Any) -> None:
        reading = DeviceReading(f"nvidia:GPU-{number}", **fields)
        self.devices.read([reading], self.now_s)

    def why_not(self, number: int, request: ResourceRequest) -> str:
        state = self.devices.states[f"nvidia:GPU-{number}"]
        return state.why_not(DeviceRequest(request, self.devices.config), self.now_s)


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(f"nvidia:GPU-{number}" for number in numbers)


# -- fit ---------------------------------------------------------------------------------------------------------------


def test_memory_is_promised_up_to_the_threshold_less_the_reserve() -> None:
    cards = Cards(gpu(0))  # 24 GiB: 21.6 - 0.5 are given
    cards.start("a", asked(gib=12))
    assert cards.why_not(0, asked(gib=9.2)) == Says.FREE_GIB(9.1, 9.2)
    assert cards.start("b", asked(gib=9)) == names(0)


def test_what_was_seen_counts_more_than_what_was_promised() -> None:
    cards = Cards(gpu(0))
    cards.start("a", asked(gib=4))
    cards.read(0, mem_used_bytes=14 * GIB, ours=(("a", 14 * GIB),))
    cards.read(0, mem_used_bytes=2 * GIB, ours=(("a", 2 * GIB),))
    assert cards.why_not(0, asked(gib=8)) == Says.FREE_GIB(7.1, 8.0)


def test_what_is_promised_and_not_used_yet_is_not_free() -> None:
    cards = Cards(gpu(0))
    cards.start("a", asked(gib=8))
    cards.read(0, mem_used_bytes=10 * GIB, mem_foreign_bytes=10 * GIB, foreign=1)
    assert cards.why_not(0, asked(gib=4)) == Says.FREE_GIB(3.1, 4.0)


def test_a_foreign_process_is_left_the_most_that_it_lately_had_and_nothing_when_it_has_left() -> None:
    cards = Cards(gpu(0))
    peak = 15 * GIB
    cards.read(0, mem_used_bytes=peak, mem_foreign_bytes=peak, foreign=1, mem_foreign_peak_bytes=peak)
    cards.now_s += 45.0
    cards.read(0, mem_used_bytes=GIB, mem_foreign_bytes=GIB, foreign=1, mem_foreign_peak_bytes=peak)
    assert cards.why_not(0, asked(gib=8)) == Says.FREE_GIB(6.1, 8.0)
    cards.read(0)
    assert not cards.why_not(0, asked(gib=21))


def test_who_shares_with_nobody_finds_nobody_and_is_joined_by_nobody() -> None:
    cards = Cards(gpu(0))
    alone = asked(gib=1, gpu_share=GpuShare.EXCLUSIVE)
    cards.start("a", asked(gib=1))
    assert cards.why_not(0, alone) == Says.ONE_TASK()
    cards.devices.take_back("a")
    cards.start("b", alone)
    assert cards.why_not(0, asked(gib=1)) == Says.EXCLUSIVE()
    cards.devices.take_back("b")
    cards.read(0, mem_used_bytes=GIB, mem_foreign_bytes=GIB, foreign=1)
    assert cards.why_not(0, alone) == Says.FOREIGN()


def test_an_unknown_need_has_an_empty_card_and_is_joined_when_it_has_shown_itself() -> None:
    cards = Cards(gpu(0))
    cards.start("a", asked())
    assert cards.why_not(0, asked()) == Says.ONE_TASK()
    assert cards.why_not(0, asked(gib=1)) == Says.NEED_UNSEEN()
    for _ in range(2):
        cards.read(0, mem_used_bytes=3 * GIB, ours=(("a", 3 * GIB),))
    assert not cards.why_not(0, asked(gib=1))
    assert cards.why_not(0, asked(gib=19)) == Says.FREE_GIB(18.1, 19.0)


def test_unknown_needs_that_share_are_apart_by_the_settle_time() -> None:
    cards = Cards(gpu(0))
    turns = asked(gpu_share=GpuShare.TIME)
    cards.start("a", turns)
    assert cards.why_not(0, turns)
    assert cards.devices.due_s(cards.now_s) == cards.now_s + CONFIG.settle_s
    cards.now_s += CONFIG.settle_s
    assert not cards.why_not(0, turns)


def test_a_card_takes_as_many_tasks_as_it_may_and_no_more_work_than_was_set() -> None:
    cards = Cards(gpu(0))
    for number in range(CONFIG.tasks_max):
        cards.start(f"{number}", asked(gib=1))
    assert cards.why_not(0, asked(gib=1)) == Says.TASKS_MAX(10, 10)
    bounded = Cards(gpu(0), config=GpuConfig(activity_max=1.5))
    for key in "abc":
        bounded.start(key, asked(gib=1))
    assert bounded.why_not(0, asked(gib=1)) == Says.WORK_MAX(1.5, 1.5)
    few = Cards(gpu(0), config=GpuConfig(tasks_max=2))
    few.start("a", asked(gpu_fraction=0.1))
    few.start("b", asked(gpu_fraction=0.1))
    assert few.why_not(0, asked(gpu_fraction=0.1)) == Says.TASKS_MAX(2, 2)


def test_a_crowded_card_is_taken_only_if_no_other_has_room() -> None:
    cards = Cards(gpu(0), gpu(1, gib=12))
    starts = [cards.start(f"{key}", asked(gib=2)) for key in range(8)]
    assert starts == [names(card) for card in (1, 1, 1, 0, 0, 0, 1, 0)]


def test_fractions_are_of_memory_too() -> None:
    cards = Cards(gpu(0))
    for key in "abc":
        cards.start(key, asked(gpu_fraction=0.25))
    assert cards.why_not(0, asked(gpu_fraction=0.25)) == Says.FREE_GIB(3.1, 6.0)
    unknown = Cards(Device("gpu:0"))
    for key in "abcd":
        unknown.start(key, asked(gpu_fraction=0.25))
    assert unknown.place(asked(gpu_fraction=0.25)) is None


def test_sick_and_unknown_cards_are_given_to_nobody() -> None:
    cards = Cards(gpu(0))
    cards.read(0, health=Health.SICK, why="XID 79")
    assert cards.why_not(0, asked()) == "XID 79"
    cards.read(0, health=Health.UNKNOWN)
    assert cards.why_not(0, asked()) == Says.NO_DRIVER()
    cards.read(0, health=Health.DEGRADED, why="hot")
    assert not cards.why_not(0, asked())


def test_cards_are_given_away_when_nothing_is_seen_on_them_or_after_a_while() -> None:
    cards = Cards(gpu(0))
    cards.start("a", asked())
    cards.devices.end("a", cards.now_s)
    assert cards.devices.was_left
    cards.now_s += 0.1
    cards.read(0, mem_used_bytes=GIB, ours=(("a", GIB),))
    assert cards.place(asked()) is None
    cards.now_s += CONFIG.release_s_max
    cards.devices.expire(cards.now_s)
    assert cards.why_not(0, asked()) == Says.FOREIGN()
    cards.read(0)
    assert cards.why_not(0, asked()) == ""


def test_a_reading_from_before_the_end_gives_nothing_away() -> None:
    cards = Cards(gpu(0))
    cards.start("a", asked())
    cards.devices.end("a", 200.0)
    cards.devices.read([DeviceReading("nvidia:GPU-0")], 199.0)
    assert cards.place(asked()) is None
    cards.devices.read([DeviceReading("nvidia:GPU-0")], 200.0)
    assert cards.place(asked()) == names(0)


# -- place -------------------------------------------------------------------------------------------------------------


def test_preferred_cards_come_first_also_beside_others() -> None:
    cards = Cards(gpu(0), gpu(1))
    cards.start("a", asked(gib=2, gpu_prefer=("1",)))
    assert cards.place(asked(gib=2, gpu_prefer=("1", "0"))) == names(1)
    assert cards.place(asked(gib=2, gpu_prefer=("GPU-1",))) == names(1)


def test_queue_waits_for_exactly_those_and_schedule_takes_others() -> None:
    cards = Cards(gpu(0), gpu(1))
    cards.start("a", asked(gpu_prefer=("0",)))
    waits = asked(gpu_prefer=("0",), gpu_wait=GpuWait.QUEUE, gpu_wait_s_max=60.0)
    assert cards.place(waits) is None
    assert cards.place(waits, waited_s=60.0) == names(1)
    assert cards.place(asked(gpu_prefer=("0",))) == names(1)


def test_models_are_preferred_by_pattern() -> None:
    cards = Cards(gpu(0), Device("nvidia:GPU-1", index=1, model="NVIDIA H200", mem_bytes=24 * GIB))
    assert cards.place(asked(gpu_prefer=("h200*",))) == names(1)


def test_a_known_need_goes_where_least_is_left_over() -> None:
    cards = Cards(gpu(0), gpu(1), gpu(2))
    cards.start("a", asked(gib=16, gpu_prefer=("1",)))
    assert cards.place(asked(gib=4)) == names(1)
    assert cards.place(asked(gib=6)) == names(0)


def test_an_unknown_need_takes_the_cooler_card() -> None:
    cards = Cards(gpu(0), gpu(1))
    cards.read(0, temperature_c=70)
    assert cards.place(asked()) == names(1)


def test_several_cards_are_near_to_each_other_or_there_are_none() -> None:
    def links(number: int) -> tuple[tuple[str, int], ...]:
        pairs = {0: 2, 2: 0, 1: 3, 3: 1}
        return ((f"nvidia:GPU-{pairs[number]}", Nearness.NVLINK),)

    cards = Cards(*(gpu(number, links=links(number)) for number in range(4)))
    assert cards.place(asked(2)) == names(0, 2)
    cards.start("a", asked(gpu_prefer=("0",)))
    assert cards.place(asked(2)) == names(1, 3)
    assert cards.place(asked(4)) is None
    assert cards.place(asked(2, gpu_prefer=("3",))) == names(3, 1)


def test_sixteen_cards_of_which_eight_are_asked_for_are_chosen_at_once() -> None:
    cards = Cards(*(gpu(number) for number in range(16)))
    assert cards.place(asked(8)) == names(*range(8))


def test_other_kinds_are_counted() -> None:
    cards = Cards(gpu(0), Device("fpga:a", "fpga"), Device("fpga:b", "fpga", 1))
    both = ResourceRequest(gpus=1, devices=(("fpga", 2),))
    assert cards.place(both) == (*names(0), "fpga:a", "fpga:b")
    cards.devices.grant("a", ("fpga:a",), DeviceRequest(both, CONFIG), 0.0)
    assert cards.place(both) is None
    cards.devices.end("a", 1.0)
    assert cards.place(both) is not None


# -- backfill ----------------------------------------------------------------------------------------------------------


def backfilled(cards: Cards, first: ResourceRequest, waited_s: float = 0.0) -> Backfill:
    found = Backfill(cards.devices, cards.now_s)
    assert found.reserve(first, DeviceRequest(first, CONFIG), waited_s) is not None
    return found


def may_start(cards: Cards, kept: Backfill, number: int, request: ResourceRequest, run_s: float = float("inf")) -> bool:
    return kept.allows(cards.devices.states[f"nvidia:GPU-{number}"], DeviceRequest(request, CONFIG, run_s=run_s))


def test_a_later_task_may_start_if_it_does_no_harm() -> None:
    cards = Cards(gpu(0), gpu(1))
    cards.start("a", asked(gib=16, gpu_prefer=("0",)), run_s=50.0)
    cards.start("b", asked(gib=16, gpu_prefer=("1",)), run_s=500.0)
    kept = backfilled(cards, asked(gib=12))  # on 0, in 50 s
    small = asked(gib=4)
    assert may_start(cards, kept, 1, small)  # another card
    assert may_start(cards, kept, 0, small, run_s=49.0)  # over by then
    assert may_start(cards, kept, 0, small)  # 21.1 - 12 are left over then
    assert not may_start(cards, kept, 0, asked(gib=10))
    assert not may_start(cards, kept, 0, asked(gpu_share=GpuShare.TIME))


def test_with_nothing_known_only_short_tasks_and_other_cards_are_left() -> None:
    cards = Cards(gpu(0))
    cards.start("a", asked(gib=16))
    kept = backfilled(cards, asked(gib=12))
    assert not may_start(cards, kept, 0, asked(gib=1))
    assert may_start(cards, kept, 0, asked(gib=1), run_s=1000.0)


def test_a_reservation_hardens() -> None:
    cards = Cards(gpu(0), gpu(1))
    cards.start("a", asked(gib=16, gpu_prefer=("0",)), run_s=50.0)
    cards.start("b", asked(gib=16, gpu_prefer=("1",)), run_s=500.0)
    kept = backfilled(cards, asked(gib=12), CONFIG.starve_after_s)
    assert not may_start(cards, kept, 0, asked(gib=1), run_s=1.0)
    assert may_start(cards, kept, 1, asked(gib=1), run_s=1.0)


def test_who_waits_for_certain_cards_keeps_only_those() -> None:
    cards = Cards(gpu(0), gpu(1))
    cards.start("a", asked(gpu_prefer=("1",)))
    kept = backfilled(cards, asked(gpu_prefer=("1",), gpu_wait=GpuWait.QUEUE), CONFIG.starve_after_s)
    assert may_start(cards, kept, 0, asked())
    assert not may_start(cards, kept, 1, asked(gib=1), run_s=1.0)


# -- in a node ---------------------------------------------------------------------------------------------------------


class Node(Given):
    """A node with so many cards that are not read."""

    def __init__(self, cards: int = 1, *, slots: int = 8, **more: Any) -> None:
        super().__init__(slots=slots, **{"peers": (), **more})
        devices = (*(gpu(number, is_read=False) for number in range(cards)), Device("fpga:a", "fpga"))
        self.when(events.DevicesFound(devices))
        self.profile = self.node.state.profile

    def spawned(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(action.task, action.devices) for action in self.last if isinstance(action, actions.SpawnTask)]


def test_the_devices_of_a_task_are_in_its_record_and_go_to_its_process() -> None:
    x = Node()
    x.submit(spec(request=asked()))
    assert x.spawned() == [("x/1", names(0))]
    assert x.task().record.devices == names(0)


def test_nobody_waits_for_cores_behind_a_task_that_waits_for_a_card_nor_the_reverse() -> None:
    x = Node(slots=2)
    x.submit(spec(request=asked()))
    x.submit(spec(request=asked()))
    assert x.spawned() == []
    x.submit()
    assert x.spawned() == [("x/3", ())]
    x.submit()
    x.submit()
    assert x.node.ledger.load_tasks == 4  # what waits for a card is no load
    x.end(x.task(1).key)
    assert x.spawned() == [("x/2", names(0))]
    x.end(x.task(3).key)
    assert x.spawned() == [("x/4", ())]


def test_a_task_whose_card_is_free_has_the_next_cores() -> None:
    x = Node(slots=2)
    x.submit()
    x.submit()
    x.submit()  # waits
    x.submit(spec(request=asked(cpus=2.0)))
    x.end(x.task(1).key)
    assert x.spawned() == [("x/3", ())]  # it came earlier
    x.submit()
    x.end(x.task(2).key)
    assert x.spawned() == []
    x.end(x.task(3).key)
    assert x.spawned() == [("x/4", names(0))]


def test_a_task_of_lower_priority_has_its_card_when_the_cores_are_no_longer_waited_for() -> None:
    x = Node(slots=2)
    x.submit()
    x.submit(spec(priority=5, request=ResourceRequest(cpus=2.0)))
    x.submit(spec(request=asked()))
    assert x.spawned() == []
    x.end(x.task(1).key)
    assert x.spawned() == [("x/2", ())]
    x.end(x.task(2).key)
    assert x.spawned() == [("x/3", names(0))]


def test_devices_that_are_read_are_looked_at_when_a_task_leaves_them() -> None:
    x = Given(slots=4, peers=())
    x.when(events.DevicesFound((gpu(0),)))
    x.when(events.DevicesSampled(x.at_s, (DeviceReading("nvidia:GPU-0"),)))
    x.submit(spec(request=asked()))
    x.submit(spec(request=asked()))
    x.after(10)
    done = x.end(x.task(1).key)
    assert "LookAtDevices" in done
    assert f"timer devices {CONFIG.release_s_max:g}" in done
    shape = x.when(events.DevicesSampled(x.at_s, (DeviceReading("nvidia:GPU-0"),)))
    assert "spawn 1" in shape


def test_who_uses_a_card_that_it_was_not_given_is_named_once() -> None:
    x = Given(slots=4, peers=())
    x.when(events.DevicesFound((gpu(0), gpu(1))))
    free = (DeviceReading("nvidia:GPU-0"), DeviceReading("nvidia:GPU-1"))
    x.when(events.DevicesSampled(x.at_s, free))
    x.submit(spec(request=asked(gpu_prefer=("0",))))
    astray = (DeviceReading("nvidia:GPU-1", mem_used_bytes=GIB, ours=((x.task().key, GIB),)),)
    x.when(events.DevicesSampled(x.at_s, astray))
    assert [(note.state, note.task, note.reason) for note in x.notes] == [
        ("strayed", "x/1", Says.STRAYED(*names(1), *names(0)))
    ]
    x.when(events.DevicesSampled(x.at_s, astray))
    assert x.notes == []
    x.submit(spec(request=asked(gpu_prefer=("1",), gpu_share=GpuShare.EXCLUSIVE)))
    assert not [action for action in x.last if isinstance(action, actions.SpawnTask)]  # it counts there


def test_waiting_for_certain_cards_ends_when_it_was_said() -> None:
    x = Node(2)
    wants = asked(gpu_prefer=("0",), gpu_wait=GpuWait.QUEUE, gpu_wait_s_max=60.0)
    x.submit(spec(request=asked(gib=20, gpu_prefer=("0",))))
    assert "timer devices 60" in x.submit(spec(request=wants))
    assert "spawn 1" in x.after(60).timer("devices")
    assert x.spawned() == [("x/2", names(1))]


def test_after_a_restart_the_devices_are_whose_they_were() -> None:
    x = Node(2)
    for number in range(1, 4):  # the same chance gives the same uids in both nodes
        x.submit()
        x.end(x.task(number).key)
    x.submit(spec(request=asked()))
    task = x.task(4)
    rows = (events.TaskRow(task.record, task.spec),)
    started = events.AgentStarted(tasks=rows, counter=4, running=((task.key, WALL_S, 0.0),))
    y = Given(slots=8, peers=(), started=started)
    y.when(events.DevicesFound((gpu(0, is_read=False), gpu(1, is_read=False))))
    assert y.node.ledger.devices.holding == {task.key: names(0)}
    y.submit(spec(request=asked()))
    assert [action.devices for action in y.last if isinstance(action, actions.SpawnTask)] == [names(1)]
    y.submit(spec(request=asked()))
    assert not [action for action in y.last if isinstance(action, actions.SpawnTask)]


def test_waiting_tasks_are_judged_again_when_the_devices_change() -> None:
    x = Node(2)
    x.submit(spec(request=asked(2)))
    x.submit(spec(request=asked(2)))
    x.submit(spec(request=asked()))
    x.submit(spec(request=asked(3)), waits_for_node=True)
    second, third, fourth = (x.task(number) for number in (2, 3, 4))
    assert (second.stranded_because, fourth.stranded_because) == ("", "2 x 24 GiB, asked 3")
    x.when(events.DevicesFound((gpu(0, is_read=False),)))
    assert second.stranded_because == "1 x 24 GiB, asked 2"
    assert (second.is_queued, third.is_queued) == (False, True)
    assert fourth.stranded_because == "1 x 24 GiB, asked 3"
    x.when(events.DevicesFound(()))
    assert {task.stranded_because for task in (second, third, fourth)} == {"no GPU"}
    assert x.when(events.DevicesFound(tuple(gpu(number, is_read=False) for number in range(3))))
    assert {task.stranded_because for task in (second, third, fourth)} == {""}
    assert x.spawned() == []  # x/2 came first and waits for two of them
    x.end(x.task(1).key)
    assert [task for task, _ in x.spawned()] == ["x/2", "x/3"]


def test_what_a_node_can_no_longer_run_goes_to_others() -> None:
    x = Given(slots=8, peers=(), policies=SENDER)
    x.when(events.DevicesFound((gpu(0, is_read=False),)))
    x.meet("y", gpus=1)
    x.submit(spec(request=asked(gpu_share=GpuShare.EXCLUSIVE)))
    x.hear("y", offer(home="y", only=True, request=asked()))
    accept = x.sent(messages.Accept)
    x.hear("y", messages.Commit("y/1", accept.uid, 1, accept.nonce, accept.ts, 60.0))
    x.submit(spec(request=asked(), placement=Placement(exclude=("y",))))
    own = x.task(2)
    did = x.when(events.DevicesFound(()))
    assert "Return to y" in did
    assert x.sent(messages.Return).reason == "no GPU"
    assert own.stranded_because == "no GPU"
    assert not own.is_queued


# -- between nodes -----------------------------------------------------------------------------------------------------


def gpus_told(free: int = 1, gpus: int = 1, tasks: int = 0) -> LoadReport:
    return LoadReport(
        slots=4,
        load_tasks=9,
        accepts=False,
        gpus=gpus,
        gpus_free=free,
        gpu_tasks=tasks,
        incarnation=1,
        sequence=tasks + 2,
    )


def test_a_probe_for_a_card_is_answered_by_whether_there_is_room() -> None:
    x = Node(1, slots=1, policies=SENDER, peers=("y",))
    x.submit()  # the only slot
    need = messages.Need(asked(cpus=0.5))
    x.hear("y", messages.ProbeRequest(7, need, LoadReport()))
    assert not x.sent(messages.ProbeReply).accepts  # no core
    x.end(x.task().key)
    x.hear("y", messages.ProbeRequest(8, need, LoadReport()))
    reply = x.sent(messages.ProbeReply)
    assert reply.accepts
    assert (reply.report.gpus, reply.report.gpus_free, reply.report.gpu_tasks) == (1, 1, 0)
    assert reply.report.devices[0].free_slots == CONFIG.tasks_max
    x.submit(spec(request=asked(cpus=0.5)))
    x.hear("y", messages.ProbeRequest(9, need, LoadReport()))
    assert not x.sent(messages.ProbeReply).accepts


def test_a_task_stays_where_its_card_is_free_however_busy_the_cores_are() -> None:
    x = Node(2, slots=2, policies=SENDER, peers=())
    x.meet("y", gpus=1)
    x.submit(spec(request=asked()))
    assert "ProbeRequest to y" not in x.submit(spec(request=asked(cpus=0.5)))
    assert "ProbeRequest to y" in x.submit(spec(request=asked()))


def test_who_waits_for_a_card_hears_of_a_free_one() -> None:
    x = Node(1, policies=SENDER, peers=())
    x.meet("y", gpus=1)
    x.submit(spec(request=asked()))
    x.submit(spec(request=asked()))
    x.hear(
        "y", messages.ProbeReply(x.sent(messages.ProbeRequest).search, accepts=False, report=gpus_told(free=0, tasks=1))
    )
    assert "ProbeRequest to y" in x.hear("y", messages.Pong(1, gpus_told(free=1, tasks=2)))


def test_room_as_it_is_told() -> None:
    shared = DeviceLoad(1, DeviceMode.TIME, free_mib=4096, free_slots=3)
    told = LoadReport(gpus=2, devices=(shared, DeviceLoad(2, DeviceMode.EXCLUSIVE)))
    assert has_room(asked(gib=4), told)
    assert not has_room(asked(gib=5), told)
    assert not has_room(asked(), told)
    assert not has_room(asked(2, gib=1), told)
    assert not has_room(asked(gib=4, gpu_share=GpuShare.EXCLUSIVE), told)


def test_room_for_a_part_of_a_card_as_it_is_told() -> None:
    told = LoadReport(gpus=1, devices=(DeviceLoad(1, DeviceMode.TIME, free_mib=4096, free_percent=30),))
    assert has_room(asked(gpu_fraction=0.3), told)
    assert not has_room(asked(gpu_fraction=0.31), told)
    assert not has_room(asked(gib=5, gpu_fraction=0.3), told)
    assert not has_room(asked(gib=1), told)  # a whole one, of whose work nothing is known


def test_what_is_told_of_a_card_counts_the_work_on_it() -> None:
    cards = Cards(gpu(0), config=GpuConfig(activity_max=1.5))
    cards.start("a", asked(gib=4))
    load = cards.devices.loads(cards.now_s)[0]
    assert (load.free_slots, load.free_percent) == (2, 71)  # 21.1 - 4 of 24 GiB
    cards.start("b", asked(gib=1))
    cards.start("c", asked(gpu_fraction=0.25))
    load = cards.devices.loads(cards.now_s)[0]
    assert (load.free_slots, load.free_percent) == (0, 25)
    assert has_room(asked(gpu_fraction=0.25), LoadReport(gpus=1, devices=(load,)))
    assert cards.place(asked(gpu_fraction=0.25)) is not None
    assert cards.place(asked(gib=1)) is None


def test_a_card_that_is_kept_for_one_that_waits_here_is_no_room_for_others() -> None:
    x = Node(2, policies=SENDER, peers=("y",))
    x.submit(spec(request=asked()))
    x.submit(spec(request=asked(2)))  # waits, and the free card is kept for it
    x.hear("y", messages.ProbeRequest(7, messages.Need(asked()), LoadReport()))
    reply = x.sent(messages.ProbeReply)
    assert not reply.accepts
    assert reply.report.gpus_free == 0
    assert not has_room(asked(), reply.report)
    assert "Decline to h" in x.hear("h", offer(request=asked()))
    x.when(events.CancelRequested(9, ("x/2",)))
    x.hear("y", messages.ProbeRequest(8, messages.Need(asked()), LoadReport()))
    assert x.sent(messages.ProbeReply).accepts


def test_a_task_that_waits_behind_a_card_kept_for_another_looks_for_one_elsewhere() -> None:
    x = Node(2, policies=SENDER, peers=())
    x.meet("y", gpus=1)
    x.submit(spec(request=asked()))
    x.submit(spec(request=asked(2)))
    assert "ProbeRequest to y" in x.submit(spec(request=asked()))


def test_a_promised_task_is_declined_if_the_card_that_it_needs_is_taken() -> None:
    x = Node(1, policies=SENDER, peers=("h",))
    x.node.sharing.donor.expect(UID)
    x.submit(spec(request=asked()))
    assert "Decline to h" in x.hear("h", offer(request=asked()))
    assert not x.node.ledger.inbound
    x.end(x.task().key)
    assert "Accept to h" in x.hear("h", offer(request=asked()))


def test_a_node_that_asks_for_work_is_given_what_its_card_has_room_for() -> None:
    x = Node(1, policies=SENDER, peers=())
    x.meet("y", gpus=1)
    x.submit(spec(request=asked()))
    x.submit(spec(request=asked()))
    search = x.sent(messages.ProbeRequest).search
    x.hear("y", messages.ProbeReply(search, accepts=False, report=gpus_told(free=0, tasks=1)))
    profile = Profile("y", 4, 4.0, gpus=1, slots_fixed=True)
    x.hear("y", messages.GiveRequest(3, gpus_told(free=0, tasks=3), profile))
    assert x.sent(messages.GiveReply).task == ""
    x.hear("y", messages.GiveRequest(4, gpus_told(free=1, tasks=4), profile))
    assert x.sent(messages.GiveReply).task == "x/2"


# -- what nobody could ever run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (asked(9), "8 x 48 GiB, asked 9"),
        (asked(2, gib=48), "8 x 48 GiB of which tasks may have 42.7 GiB, asked 48 GiB"),
        (asked(1, gpu_prefer=("8",), gpu_wait=GpuWait.QUEUE), "no GPU 8"),
        (asked(2, gpu_prefer=("7", "8"), gpu_wait=GpuWait.QUEUE), "only 1 of those GPUs"),
        (ResourceRequest(devices=(("fpga", 1),)), "no fpga"),
        (asked(8, gib=42), ""),
    ],
)
def test_why_never_in_words(request_: ResourceRequest, why: str) -> None:
    usable = int(48 * GIB * 0.9) - (512 << 20)
    devices = tuple(gpu(number, gib=48, grantable_bytes=usable) for number in range(8))
    profile = Profile("gpu1", 8, 8.0, gpus=8, devices=devices)
    assert why_never(profile, request_, Placement(), "gpu1") == why


def test_the_nearest_miss_is_named_first() -> None:
    x = Node(2, peers=())
    x.meet("y", gpus=8)
    assert x.submit(spec(request=asked(9))) == ["refuse NeverRunnable"]
    error = x.done(actions.Answer).error
    assert isinstance(error, NeverRunnable)
    assert error.why == Says.NEAREST("9 GPUs", "y: 8 GPUs, asked 9; x: 2 x 24 GiB, asked 9")
    assert "--wait-for-node" in error.hint
    x.submit(spec(request=asked(9)), waits_for_node=True)
    assert x.done(actions.Answer).reply["placeable"] == f"{Says.NOBODY_EVER()}; 2 x 24 GiB, asked 9"


@pytest.mark.parametrize("fraction", [0.85, 0.87, 0.88, 0.95])
def test_a_part_of_a_card_that_an_idle_one_has_no_room_for_is_refused(fraction: float) -> None:
    x = Node(2)  # 24 GiB, 21.1 of them for tasks: 0.879
    did = x.submit(spec(request=asked(gpu_fraction=fraction)))
    if fraction < 0.88:
        assert x.spawned() == [("x/1", names(0))]
        return
    assert did == ["refuse NeverRunnable"]
    need = f"{24 * fraction:.3g} GiB"
    lacking = f"2 x 24 GiB of which tasks may have 21.1 GiB, asked {fraction:g} of one, {need}"
    assert x.done(actions.Answer).error.why == Says.NEAREST(f"{fraction:g} of a GPU", f"x: {lacking}")
    x.meet("y", gpus=1, devices=(gpu(0, gib=96, grantable_bytes=94 * GIB),))  # more of it is for tasks
    did = x.submit(spec(request=asked(gpu_fraction=fraction)))
    assert did[:2] == ["persist submission queued", "answer"]


def test_a_request_that_makes_no_sense_is_none() -> None:
    for fields in ({"gpus": 2, "gpu_fraction": 0.3}, {"gpus": 1, "gpu_fraction": 0.5, "gpu_share": GpuShare.EXCLUSIVE}):
        with pytest.raises(ValueError, match="fraction"):
            ResourceRequest(**fields)
    with pytest.raises(ValueError, match="twice"):
        ResourceRequest(devices=(("fpga", 1), ("fpga", 2)))


@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk_keeps_every_promise(seed: int) -> None:
    from tests.gpu.walk import Walk, step

    chance = random.Random(seed)
    count = (1, 2, 4)[seed]
    walk = Walk(count=count, cpus=(64.0, 4.0, 8.0)[seed])
    for _ in range(800):
        step(walk, chance, count)
    assert walk.started > 10


@pytest.mark.parametrize(("count", "step_gib"), [(40, 0.1), (1100, 0.0)])
def test_many_that_wait_for_one_gpu_do_not_stand_before_who_waits_for_another(count: int, step_gib: float) -> None:
    x = Node(2, slots=64)
    x.submit(spec(request=asked(gib=20, gpu_prefer=("0",))))
    x.submit(spec(request=asked(gib=20, gpu_prefer=("1",))))
    for number in range(count):
        x.submit(spec(request=asked(gib=10 + number * step_gib, gpu_prefer=("0",), gpu_wait=GpuWait.QUEUE)))
    x.submit(spec(request=asked(gib=20, gpu_prefer=("1",), gpu_wait=GpuWait.QUEUE)))
    x.end(x.node.home.by_id["x/2"].key)
    assert [task for task, _ in x.spawned()] == [f"x/{count + 3}"]


# -- better GPUs elsewhere ---------------------------------------------------------------------------------------------

T4 = Device("nvidia:GPU-t", index=0, model="Tesla T4", mem_bytes=16 * GIB)
A100 = Device("nvidia:GPU-a", index=0, model="NVIDIA A100-PCIE-40GB", mem_bytes=40 * GIB)


def with_a100_elsewhere(told: DeviceLoad | None, **more: Any) -> Given:
    """x has a T4, y an A100 of which this is known."""
    x = Given(slots=8, peers=(), policies=SENDER, **more)
    x.when(events.DevicesFound((T4,)))
    x.meet("y", slots=8, cpus=8.0, gpus=1, devices=(A100,))
    if told is not None:
        report = LoadReport(slots=8, gpus=1, cpus_free=8.0, devices=(told,), incarnation=1, sequence=2)
        x.hear("y", messages.Pong(1, report))
    return x


def spawned(x: Given) -> list[str]:
    return [action.task for action in x.last if isinstance(action, actions.SpawnTask)]


FREE_A100 = DeviceLoad(A100.mark, free_mib=35_000, free_slots=10)
PREFERS = asked(gpu_prefer=("A100*",))


@pytest.mark.parametrize("told", [FREE_A100, None])
def test_a_preferred_card_that_is_idle_elsewhere_is_taken_before_another_one_here(told: DeviceLoad | None) -> None:
    x = with_a100_elsewhere(told)
    assert "ProbeRequest to y" in x.submit(spec(request=PREFERS))
    x.hear("y", messages.ProbeReply(x.sent(messages.ProbeRequest).search, accepts=True, report=ACCEPTS))
    offered = x.sent(messages.Offer)
    assert offered.spec.request.gpu_prefer == ("A100*",)
    x.hear("y", messages.Decline(offered.task, offered.uid, 1, "busy", "taken meanwhile", ACCEPTS))
    assert spawned(x) == ["x/1"], "nobody else has one: it starts here"


def test_a_task_whose_preferred_card_is_nowhere_free_starts_here_at_once() -> None:
    x = with_a100_elsewhere(DeviceLoad(A100.mark, DeviceMode.EXCLUSIVE))
    x.submit(spec(request=PREFERS))
    assert spawned(x) == ["x/1"]


@pytest.mark.parametrize(
    "request_", [asked(), asked(gpu_prefer=("0",)), asked(gpu_prefer=("T4",)), asked(gpu_prefer=("A100*", "T4"))]
)
def test_who_prefers_nothing_that_is_only_elsewhere_stays_here(request_: ResourceRequest) -> None:
    x = with_a100_elsewhere(FREE_A100)
    x.submit(spec(request=request_))
    assert spawned(x) == ["x/1"]


def test_a_card_elsewhere_that_is_not_crowded_is_taken_before_a_crowded_one_here() -> None:
    x = with_a100_elsewhere(FREE_A100)
    for number in range(1, 4):
        x.submit(spec(request=asked(gib=1)))
        assert spawned(x) == [f"x/{number}"]
    assert "ProbeRequest to y" in x.submit(spec(request=asked(gib=1)))
    x.hear("y", messages.ProbeReply(x.sent(messages.ProbeRequest).search, accepts=False, report=ACCEPTS))
    assert spawned(x) == ["x/4"]


def test_a_preferred_card_elsewhere_is_asked_for_again_when_a_task_on_it_has_ended() -> None:
    x = with_a100_elsewhere(FREE_A100)
    x.submit(spec(request=PREFERS))
    x.hear("y", messages.ProbeReply(x.sent(messages.ProbeRequest).search, accepts=True, report=ACCEPTS))
    first = x.task(1)
    x.hear("y", messages.Accept(first.task, first.uid, 1, 77, 5.0))
    busy = DeviceLoad(A100.mark, DeviceMode.EXCLUSIVE, tasks=1)
    report = LoadReport(slots=8, gpus=1, cpus_free=8.0, devices=(busy,), incarnation=1, sequence=3)
    x.hear("y", messages.Pong(2, report))
    x.submit(spec(request=PREFERS))
    assert spawned(x) == ["x/2"], "it is known to be taken"
    x.end(x.task(2).key)
    x.after(0.1).hear("y", messages.Result(first.task, first.uid, 1, Exit(0), inline=True))
    assert "ProbeRequest to y" in x.submit(spec(request=PREFERS))
    report = msgspec.structs.replace(report, sequence=4)
    x.after(0.1).hear("y", messages.ProbeReply(x.sent(messages.ProbeRequest).search, accepts=False, report=report))
    assert spawned(x) == ["x/3"], "another task has it by now"
    x.end(x.task(3).key)
    x.submit(spec(request=PREFERS))
    assert spawned(x) == ["x/4"], "which is known"
