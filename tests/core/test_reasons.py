"""Why a task waits: what is said of each node is what admission there says."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peerload.core.explain import EligibilityVerdict, WaitReasons, smallest_change, turn_reason
from peerload.core.work import HomePhase
from peerload.model import actions, events, messages
from peerload.model.gossip import MemberStatus
from peerload.model.messages import Need
from peerload.model.resources import (
    Device,
    DeviceReading,
    GpuShare,
    GpuWait,
    Health,
    LoadReport,
    Placement,
    PowerCurve,
    Profile,
    Region,
    ResourceRequest,
)
from peerload.model.task import PRIORITY_MAX, Exit, TaskSpec
from tests.core.given import ALONE, RECEIVER, SENDER, WALL_S, Given, identity, spec
from tests.wording import Says

GIB = 1 << 30
WAITS = (HomePhase.WAITING, HomePhase.OFFERED, HomePhase.RESTING)


def gpu(number: int, gib: int = 24) -> Device:
    return Device(f"nvidia:GPU-{number}", index=number, model="A10", mem_bytes=gib * GIB, is_read=True)


def node(gpus: int = 0, peers: tuple[str, ...] = (), **more: Any) -> Given:
    """A node with GPUs that have been read."""
    x = Given(peers=peers, **more)
    if gpus:
        x.when(events.DevicesFound(tuple(gpu(number) for number in range(gpus))))
        x.when(events.DevicesSampled(x.at_s, tuple(DeviceReading(f"nvidia:GPU-{number}") for number in range(gpus))))
    return x


def asks(gpus: int = 0, gib: float = 0.0, **more: Any) -> TaskSpec:
    placement = Placement(**more.pop("placement", {}))
    priority = more.pop("priority", 0)
    request = ResourceRequest(gpus=gpus, gpu_mem_bytes=int(gib * GIB), **more)
    return spec(request=request, placement=placement, priority=priority)


def verdicts(x: Given, number: int = 1) -> dict[str, EligibilityVerdict]:
    reasons = WaitReasons(x.node, x.task(number), x.at_s)
    return {verdict.node: verdict for verdict in reasons.verdicts()}


def here(x: Given, number: int = 1) -> str:
    verdict = verdicts(x, number)["x"]
    assert (verdict.can_ever, verdict.now) == (True, False)
    return verdict.reason


def change(x: Given, number: int = 1) -> str:
    found = smallest_change(x.node, WaitReasons(x.node, x.task(number), x.at_s), x.task(number).spec)
    return f"{found.words} on {found.node}" if found else ""


def test_a_node_that_lacks_the_directory_can_never_run_it_as_submit_says_and_one_that_is_silent_about_it_can() -> None:
    x = node(peers=("y", "z"))
    x.hear("y", messages.DirectoryTold(b"/data", code="directory"))
    x.hear("z", messages.DirectoryTold(b"/data", code="stalled"))
    x.submit()
    x.submit(spec(directory=b"/data"))
    found = verdicts(x, 2)
    assert (found["y"].can_ever, found["y"].reason) == (False, Says.NO_DIRECTORY_THERE("/data"))
    assert (found["z"].can_ever, found["z"].now) == (True, False)
    assert verdicts(x, 1)["y"].can_ever


# -- this node ---------------------------------------------------------------------------------------------------------


def test_slots_cores_and_memory_are_told_with_who_has_them() -> None:
    x = node(slots=2)
    for _ in range(4):
        x.submit()
    assert here(x, 3) == f"{Says.SLOTS_TAKEN(2, 2)}: x/1, x/2"
    x = node(slots=8, facts={"slots_fixed": False, "mem_bytes": 64 * GIB})
    x.submit(asks(cpus=5, mem_bytes=60 * GIB))
    x.submit(asks(cpus=2))
    x.submit(asks(cpus=3))
    assert here(x, 3) == Says.CPUS_TAKEN(7, 8, 3, "x/1 (5), x/2 (2)")
    assert change(x, 3) == "with -c 1 on x"
    x.submit(asks(cpus=1, mem_bytes=8 * GIB, priority=1))
    assert here(x, 4) == Says.MEMORY_PROMISED(60.0, 64.0, 8.0, "x/1 (60.0)")
    assert change(x, 4) == "with --mem 4G on x"


def test_who_goes_first_is_named() -> None:
    x = node(slots=4)
    x.submit(asks(cpus=3))
    x.submit(asks(cpus=2))
    x.submit(asks(cpus=1))
    assert here(x, 3) == Says.FIRST_IN_LINE("x/2")
    assert change(x, 3) == "with --prio 1 on x"
    x.submit(asks(cpus=2, priority=5))
    assert here(x, 3) == Says.OVERTAKEN("x/4", 5)


def test_the_gpus_that_are_busy_are_told_with_who_has_them() -> None:
    x = node(4, slots=16)
    x.submit(asks(2))
    x.submit(asks(1))
    x.submit(asks(3))
    assert here(x, 3) == Says.GPUS_BUSY(3, "4 GPUs", 3, "x/1 (2), x/2 (1)")
    assert change(x, 3) == "with -G1 on x"


def test_a_queue_waits_for_exactly_its_gpus() -> None:
    x = node(2, slots=16)
    x.submit(asks(1, 12, gpu_prefer=("0",)))
    x.submit(asks(1, 12, gpu_prefer=("0",), gpu_wait=GpuWait.QUEUE))
    assert here(x, 2) == Says.GPU_AWAITED(0, f"{Says.FREE_GIB(9.1, 12.0)} (x/1)")
    assert change(x, 2) == "with --gpu-wait schedule on x"


def test_less_memory_is_proposed() -> None:
    x = node(1, slots=16)
    x.submit(asks(1, 12))
    x.submit(asks(1, 10))
    assert here(x, 2) == Says.GPUS_FULL(1, "1 GPU", f"GPU 0: {Says.FREE_GIB(9.1, 10.0)} (x/1)")
    assert change(x, 2) == "with --gpu-mem 9G on x"
    x.submit(asks(1))
    assert change(x, 3) == ""  # what is left over is kept for x/2
    x.when(events.CancelRequested(99, ("x/2",), 15, force=False))
    assert change(x, 3) == "with --gpu-mem 9G, if that is enough for it, on x"


def test_what_is_kept_for_who_waits_longer_is_told() -> None:
    x = node(2, slots=16)
    x.submit(asks(1, 1, gpu_prefer=("0",)))
    x.submit(asks(2))
    x.submit(asks(1, gpu_prefer=("1",)))
    assert here(x, 2) == Says.GPUS_BUSY(1, "2 GPUs", 2, "x/1")
    assert here(x, 3) == Says.GPUS_FULL(2, "2 GPUs", f"GPU 1: {Says.KEPT('x/2')}; GPU 0: {Says.ONE_TASK()} (x/1)")


def test_when_who_waits_longer_is_to_start_is_told() -> None:
    x = node(2, slots=16)
    x.submit(msgspec.structs.replace(asks(1, gpu_prefer=("0",)), time_limit_s=600.0))
    x.after(120)
    x.submit(asks(2))
    x.submit(asks(1, gpu_prefer=("1",), gpu_wait=GpuWait.QUEUE))
    assert here(x, 3) == Says.GPU_AWAITED(1, Says.KEPT_UNTIL("x/2", 8))
    x.submit(msgspec.structs.replace(asks(1), time_limit_s=60.0))
    assert x.task(4).phase is HomePhase.HERE  # it ends before that


def test_what_was_kept_for_who_goes_first_is_told_after_a_starving_task_has_the_device() -> None:
    x = node(1, slots=16)
    x.submit(asks(1, 10))
    x.submit(asks(1, gpu_share=GpuShare.EXCLUSIVE))
    x.after(x.node.ledger.devices.config.starve_after_s)
    x.submit(asks(1, 20, priority=1))
    x.submit(asks(1, 9, priority=1))
    assert x.task(4).phase is HomePhase.WAITING
    assert here(x, 4) == Says.GPUS_FULL(1, "1 GPU", f"GPU 0: {Says.KEPT('x/3')} (x/1)")
    x.submit(asks(1, 9))
    assert here(x, 5) == Says.GPUS_FULL(1, "1 GPU", f"GPU 0: {Says.STARVING('x/2')} (x/1)")


def test_others_programs_and_sick_cards_are_told() -> None:
    x = node(2, slots=16)
    x.when(
        events.DevicesSampled(
            x.at_s,
            (
                DeviceReading("nvidia:GPU-0", Health.SICK, "XID 79"),
                DeviceReading("nvidia:GPU-1", mem_used_bytes=GIB, mem_foreign_bytes=GIB, foreign=1),
            ),
        )
    )
    x.submit(asks(1))
    assert here(x) == Says.GPUS_FULL(2, "2 GPUs", f"GPU 0: XID 79; GPU 1: {Says.FOREIGN()}")


def test_other_devices_are_told() -> None:
    x = Given(slots=4, peers=())
    x.when(events.DevicesFound((Device("fpga:a", kind="fpga"), Device("fpga:b", kind="fpga"))))
    x.submit(asks(devices=(("fpga", 1),)))
    x.submit(asks(devices=(("fpga", 2),)))
    assert here(x, 2) == Says.GPUS_BUSY(1, "2 fpga", 2, "x/1")


def test_a_drained_node_and_one_that_cannot() -> None:
    x = node(slots=4, peers=("y",))
    x.when(events.DrainRequested(9, "new PSU"))
    x.submit(asks(placement={"local": True}))
    assert here(x) == 'drained: "new PSU"'
    assert verdicts(x)["y"].reason == Says.STAYS_HOME()
    assert verdicts(x)["y"].can_ever is False
    x.submit(asks(1), waits_for_node=True)
    assert verdicts(x, 2)["x"].reason == "no GPU, drained"


# -- the others --------------------------------------------------------------------------------------------------------


def told(x: Given, number: int = 1) -> tuple[bool | None, bool | None, str]:
    verdict = verdicts(x, number)["y"]
    return verdict.can_ever, verdict.now, verdict.reason


def says(x: Given, sequence: int = 1, **report: Any) -> None:
    """y tells its load; a greater sequence is newer."""
    region = Region.OVERLOADED if report.get("load_tasks", 0) >= 4 else Region.UNDERLOADED
    told_now = LoadReport(
        **{"region": region, "slots": 4, "accepts": True, "incarnation": 1, "sequence": sequence, **report}
    )
    x.when(events.PeerMet(identity("y"), Profile("y", 4, 4.0, slots_fixed=True), told_now))


def waiting(**more: Any) -> Given:
    """A home with a task that it has no room for, and would give to a node that asks, and a peer y."""
    x = Given(slots=1, peers=(), **{"policies": RECEIVER, **more})
    x.submit()
    x.submit(asks(cpus=1))
    return x


def test_a_peer_that_is_full_or_not() -> None:
    x = waiting()
    says(x, load_tasks=4, running=4, accepts=False)
    assert told(x, 2) == (True, False, f"full: {Says.SLOTS_TAKEN(4, 4)}")
    says(x, 2, load_tasks=5, running=4, waiting=1)
    assert told(x, 2) == (True, False, f"full: {Says.SLOTS_TAKEN(4, 4)}, {Says.ONE_MORE_WAITS()}")
    says(x, 3, load_tasks=1, running=1)
    assert told(x, 2) == (True, True, f"room: {Says.SLOTS_TAKEN(1, 4)}")
    says(x, 4, load_tasks=1, running=1, accepts=False)
    assert told(x, 2) == (True, False, Says.TAKES_NONE())
    x.after(x.node.state.config.report_age_s_max + 1)
    assert told(x, 2)[:2] == (True, None)
    assert "old" in told(x, 2)[2]


def test_a_peer_that_is_not_there() -> None:
    x = waiting()
    says(x)
    x.rumour("y", MemberStatus.SUSPECT)
    assert told(x, 2) == (True, False, Says.SUSPECT(0.0))
    x.after(30).rumour("y", MemberStatus.DEAD)
    x.after(240)
    assert told(x, 2) == (True, False, Says.DEAD(4))
    x.rumour("y", MemberStatus.LEFT)
    assert "y" not in verdicts(x, 2), "who has left is no node any more"


def test_what_keeps_a_task_from_a_peer_with_room() -> None:
    x = waiting()
    says(x)
    x.submit(asks(placement={"exclude": ("y",)}))
    x.submit(asks(placement={"migrations_max": 0}))
    assert told(x, 3) == (False, None, Says.EXCLUDED())
    assert change(x, 3) == "without -x y on y"
    assert told(x, 4) == (True, False, Says.MOVES_MAX(0, 0))
    drained = Profile("y", 4, 4.0, slots_fixed=True, drained=True, drain_reason='a "new" disk', version=9)
    x.when(events.PeerMet(identity("y"), drained, LoadReport(incarnation=1, sequence=99)))
    assert told(x, 2) == (True, False, 'drained: "a "new" disk"')


def test_how_old_the_facts_are() -> None:
    x = waiting()
    says(x)
    x.after(2.5)
    assert verdicts(x, 2)["y"].age_s == pytest.approx(2.5)
    assert verdicts(x, 2)["x"].age_s is None


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_task_that_waits_for_memory_is_told_which_nodes_have_it(gpus: int) -> None:
    x = node(gpus, peers=(), slots=16, policies=RECEIVER, facts={"mem_bytes": 16 * GIB})
    x.submit(asks(mem_bytes=16 * GIB))
    x.submit(asks(gpus, mem_bytes=8 * GIB))
    assert change(x, 2) == ""
    for name, taken in (("z", 60), ("y", 50)):
        y = node(gpus, node=name, slots=16, facts={"mem_bytes": 64 * GIB})
        y.submit(asks(mem_bytes=taken * GIB))
        report = msgspec.structs.replace(y.node.sharing.shown(), incarnation=1, sequence=9)
        x.when(events.PeerMet(identity(name), y.node.state.profile, report))
        assert name == "y" or change(x, 2) == "with --mem 4G on z"
    found = verdicts(x, 2)
    assert {name: verdict.now for name, verdict in found.items()} == {"x": False, "y": True, "z": False}
    assert found["z"].reason == "room: 1 of 1 GPU; " * gpus + Says.MEMORY_REQUESTED("60.0", "64.0", "8.0")


# -- what the policies send --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policies", "kept"),
    [
        (ALONE, Says.SENDS_NONE("x", "given")),
        (SENDER, Says.LOOKS_NO_MORE("x", "given")),
        ({**RECEIVER, "transfer": {"threshold": 2.0}}, Says.KEEPS("x", 2, 2)),
        (RECEIVER, ""),
        ({"location": {"pairing": {"policy": "pairing"}}}, ""),
    ],
    ids=["none", "sender", "below its threshold", "receiver", "pairing"],
)
def test_a_task_that_its_policies_keep_at_home_is_not_said_to_go_to_a_node_with_room(
    policies: dict[str, Any], kept: str
) -> None:
    x = waiting(policies=policies)
    says(x)
    room = f"room: {Says.SLOTS_TAKEN(0, 4)}"
    assert told(x, 2) == (True, not kept, f"{room}; {kept}" if kept else room)


def test_another_node_is_only_proposed_if_such_a_task_would_get_there() -> None:
    bound = asks(placement={"exclude": ("y",)})
    for policies, words in ((ALONE, ""), (SENDER, "without -x y on y"), (RECEIVER, "without -x y on y")):
        x = Given(slots=1, peers=(), policies=policies)
        says(x)
        x.submit(bound)
        x.submit(bound)
        assert change(x, 2).replace("with --prio 1 on x", "") == words


def test_no_priority_above_the_highest_is_proposed() -> None:
    x = node(slots=4)
    for cpus, priority in ((3, 0), (2, PRIORITY_MAX), (1, PRIORITY_MAX)):
        x.submit(asks(cpus=cpus, priority=priority))
    assert here(x, 3) == Says.FIRST_IN_LINE("x/2")
    assert change(x, 3) == ""


# -- what is said is so ------------------------------------------------------------------------------------------------


def drawn(rng: random.Random) -> ResourceRequest:
    """What a task might ask for."""
    gpus = rng.choice([0, 0, 1, 1, 1, 2])
    share = rng.choice([GpuShare.AUTO, GpuShare.AUTO, GpuShare.TIME, GpuShare.EXCLUSIVE])
    is_part = gpus == 1 and share is not GpuShare.EXCLUSIVE
    return ResourceRequest(
        cpus=rng.choice([0.5, 1.0, 1.0, 2.0]),
        mem_bytes=rng.choice([0, 0, 8, 16]) * GIB,
        gpus=gpus,
        gpu_mem_bytes=rng.choice([0, 3, 3, 9, 18]) * GIB if gpus else 0,
        gpu_fraction=rng.choice([1.0, 1.0, 0.25]) if is_part else 1.0,
        gpu_prefer=rng.choice([(), (), ("0",), ("1",)]),
        gpu_wait=rng.choice(list(GpuWait)),
        gpu_share=share,
    )


def somewhere(rng: random.Random, name: str) -> Given:
    """A node with or without GPUs, fixed slots, memory."""
    capped = PowerCurve((0.0, 80.0), 8, 8, cap_w=rng.choice([10.0, 20.0]))
    room: list[dict[str, Any]] = [
        {},
        {"mem_bytes": 32 * GIB},
        {"power": capped},
        {"mem_bytes": 32 * GIB, "power": capped},
    ]
    facts = {"slots_fixed": rng.random() < 0.3, **rng.choice(room)}
    return node(rng.choice([0, 2, 3, 3]), node=name, slots=rng.choice([2, 4, 8]), facts=facts)


def happens(x: Given, rng: random.Random, submits: float) -> None:
    """Something: a task comes (that likely), or ends, or time goes by; then the cards are read."""
    running = list(x.node.runs.works())
    if rng.random() < submits:
        x.submit(spec(request=drawn(rng), priority=rng.choice([0, 0, 0, 1])), waits_for_node=True)
    elif running and rng.random() < 0.6:
        work = rng.choice(running)
        x.when(events.TaskEnded(work.key, Exit(0, started_at=WALL_S, ended_at=WALL_S + 1.0)))
    else:
        x.after(rng.choice([1.0, 6.0, 1000.0])).timer("devices")
    seen = tuple(DeviceReading(name) for name in x.node.ledger.devices.states)
    x.when(events.DevicesSampled(x.at_s, seen))


SEEDS = st.integers(0, 1 << 32)


def comes(x: Given, number: int, rng: random.Random) -> None:
    """A task of x, or of h, that asks for one core or two."""
    task = asks(cpus=rng.choice([1, 2]), priority=rng.choice([0, 0, 1]))
    if rng.random() < 0.5:
        x.submit(task)
        return
    uid = number.to_bytes(16)
    x.hear("h", messages.Offer(f"h/{number}", uid, 1, task, 60.0, only=True))
    accept = x.sent(messages.Accept)
    x.hear("h", messages.Commit(f"h/{number}", uid, 1, accept.nonce, accept.ts, 60.0))


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(["fcfs", "selfish", "altruistic"]))
def test_tasks_start_in_the_order_that_is_told(seed: int, priority: str) -> None:
    rng = random.Random(seed)
    x = Given(slots=4, peers=("h",), policies={**ALONE, "priority": {"policy": priority}}, facts={"slots_fixed": False})
    x.submit(asks(cpus=3, priority=1))
    for number in range(rng.randint(3, 14)):
        comes(x, number, rng)
    waits = [task for task in x.node.home.tasks.values() if task.phase is HomePhase.WAITING]
    said = {task.task: turn_reason(x.node.queue, task) for task in waits}
    started: list[TaskSpec] = []
    names: list[str] = []
    while x.node.ledger.running:
        x.end(next(iter(x.node.ledger.running)))
        spawned = [action for action in x.last if isinstance(action, actions.SpawnTask)]
        started += [action.spec for action in spawned]
        names += [action.task for action in spawned]
    for task in waits:
        place = names.index(task.task)
        same = [name for name, one in zip(names, started, strict=True) if one.priority == task.spec.priority]
        urgent = [name for name, one in zip(names, started, strict=True) if one.priority > task.spec.priority]
        before = same.index(task.task)
        if urgent:
            expected = Says.OVERTAKEN(urgent[0], 1)
        elif before > 1:
            expected = Says.SEVERAL_IN_LINE(before, same[0])
        else:
            expected = Says.FIRST_IN_LINE(same[0]) if before else ""
        assert said[task.task] == expected, (place, names)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
@example(4148)
@example(4711)
@example(6782)
def test_no_task_waits_where_it_is_said_to_have_room(seed: int) -> None:
    rng = random.Random(seed)
    x = somewhere(rng, "x")
    for _ in range(rng.randint(6, 24)):
        happens(x, rng, 0.75)
    for task in x.node.home.tasks.values():
        if task.phase in WAITS and not task.withheld:
            (verdict,) = WaitReasons(x.node, task, x.at_s).verdicts()
            assert not verdict.now, verdict
            assert verdict.reason


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_what_is_said_to_help_does(seed: int) -> None:
    rng = random.Random(seed)
    x = somewhere(rng, "x")
    for _ in range(rng.randint(4, 16)):
        happens(x, rng, 0.75)
    last = spec(request=drawn(rng), priority=-1)  # behind all others, and so is what replaces it
    x.submit(last, waits_for_node=True)
    task = list(x.node.home.tasks.values())[-1]
    if task.phase not in WAITS:
        return
    found = smallest_change(x.node, WaitReasons(x.node, task, x.at_s), last)
    if found is None:
        return
    assert found.node == "x"
    x.when(events.CancelRequested(1000, (task.task,), 15, force=False))
    x.submit(typed(last, found.words), waits_for_node=True)
    assert list(x.node.home.tasks.values())[-1].phase is HomePhase.HERE, found.words


def typed(task: TaskSpec, words: str) -> TaskSpec:
    """The task with this flag."""
    _, flag, *rest = words.replace(",", "").split()
    value = rest[0] if rest else flag.removeprefix("-G")
    if flag == "--prio":
        return msgspec.structs.replace(task, priority=int(value))
    changes: dict[str, Any]
    match flag:
        case "-c":
            changes = {"cpus": float(value)}
        case "--mem":
            changes = {"mem_bytes": int(float(value[:-1]) * GIB)}
        case "--gpu-mem":
            changes = {"gpu_mem_bytes": int(float(value[:-1]) * GIB)}
        case "--gpu-wait":
            changes = {"gpu_wait": GpuWait(value)}
        case _:
            changes = {"gpus": int(value)}
    return msgspec.structs.replace(task, request=msgspec.structs.replace(task.request, **changes))


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_a_peer_said_to_have_room_admits_it_and_one_said_to_have_none_does_not(seed: int) -> None:
    rng = random.Random(seed)
    y = somewhere(rng, "y")
    x = waiting()
    for step in range(rng.randint(2, 12)):
        happens(y, rng, 0.6)
        report = msgspec.structs.replace(y.node.sharing.shown(), incarnation=1, sequence=step + 1)
        x.when(events.PeerMet(identity("y"), y.node.state.profile, report))
        reasons = WaitReasons(x.node, x.task(2), x.at_s)
        for request in [drawn(rng) for _ in range(12)]:
            verdict = list(reasons.verdicts(spec(request=request)))[1]
            admits = y.node.sharing.admission.would_accept("x", Need(request))
            if verdict.now:
                assert admits, (verdict.reason, request)
            elif verdict.can_ever is False or (verdict.now is False and not y.node.ledger.devices.kept):
                assert not (admits and y.node.ledger.fits(request)), (verdict.reason, request)


def test_asking_changes_nothing() -> None:
    x = node(2, slots=4, peers=("y",))
    x.submit(asks(2))
    x.submit(asks(2))
    before = dict(x.node.state.counts), x.node.sharing.shown(), x.node.state.rng.getstate()
    verdicts(x, 2)
    change(x, 2)
    assert before == (dict(x.node.state.counts), x.node.sharing.shown(), x.node.state.rng.getstate())


# -- the devices of tasks elsewhere come home --------------------------------------------------------------------------


def test_the_devices_of_a_task_at_another_node_come_home_with_its_start() -> None:
    x = node(1, slots=4)
    guest = asks(1, 4)
    x.meet("h")
    x.hear("h", messages.Offer("h/1", bytes(16), 1, guest, 60.0))
    accept = x.sent(messages.Accept)
    x.hear("h", messages.Commit("h/1", bytes(16), 1, accept.nonce, accept.ts, 60.0))
    key = f"{bytes(16).hex()}-1"
    x.when(events.TaskStarted(key, WALL_S))
    (renewal,) = x.sent(messages.Renew).renewals
    assert renewal.devices == ("nvidia:GPU-0",)
    x.after(15).timer("renew")
    (renewal,) = x.sent(messages.Renew).renewals
    assert renewal.devices == ()
    x.hear("h", messages.Query("h/1", bytes(16), 1))
    assert x.sent(messages.Renew).renewals[0].devices == ("nvidia:GPU-0",)
