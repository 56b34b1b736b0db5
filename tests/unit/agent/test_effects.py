"""Which way a message goes, and what is kept of those that speak over MQTT."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from peerload.agent.effects import (
    COALESCED,
    FOUND_AT_A_TIME,
    Consumer,
    PeerEffects,
    Performer,
    RecordEffects,
    TaskStarter,
    TaskVariables,
    Timers,
)
from peerload.agent.event_sources import (
    ADVICE_UNANSWERED_MAX,
    BusAdvice,
    BusEvents,
    BusPeers,
    CaMessages,
    PeerEventSource,
)
from peerload.agent.mqtt import SOURCES_MAX
from peerload.agent.runtime import TICK_S, BackgroundTasks, RunState, coalesced_s
from peerload.agent.store.write_ahead import Outbox
from peerload.model import actions, events, timers
from peerload.model.errors import StoreError
from peerload.model.events import Instant, TaskFound
from peerload.model.messages import Accept, Commit, Envelope, Leaving, Message, ProbeReply, State, Sync
from peerload.model.metrics import SPAWNS_DROPPED
from peerload.model.resources import LoadReport, Profile
from peerload.model.task import TaskFiles
from tests.core.given import UID, Given, identity, offer
from tests.core.test_executor import KEY, commit

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

ADVICE = ProbeReply(1, accepts=True, report=LoadReport())

STATE = State(identity("y"), Profile("y", 1, 1.0, slots_fixed=True), LoadReport())


def test_the_first_failure_of_a_policy_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    x, nothing = Given(), cast("Any", SimpleNamespace(perform=lambda *_: None, flush=lambda: None))
    consumer = Consumer(x.node, nothing, nothing, cast("Any", SimpleNamespace(has_failed=False)), None)
    consumer.consume([events.ClientGone(7)])
    assert caplog.messages == []
    x.node.state.policy_failed(ValueError("a load index of nan"))
    consumer.consume([events.ClientGone(7), events.ClientGone(8)])
    assert [message.rpartition("error=")[2] for message in caplog.messages] == ["ValueError: a load index of nan"]


class Routes:
    """What was sent, and which way."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        info: Any = SimpleNamespace(config=SimpleNamespace(node="x"), counters=Counter())
        self.carrying: set[str] = set()
        links: Any = SimpleNamespace(
            send=lambda dst, _message: self.sent.append(("link", dst)),
            forget=lambda _node: None,
            carries_tasks=self.carrying.__contains__,
        )
        bus: Any = SimpleNamespace(send=self._bus, publish_state=lambda _state: True)
        self.bus_peers = BusPeers()
        unused = cast("Any", None)
        node: Any = SimpleNamespace(membership=[SimpleNamespace(identity=identity("y"))])
        members: Any = SimpleNamespace(changed=lambda: None)
        self.peers = PeerEffects(info, unused, node, links, members, BusAdvice(bus, self.bus_peers), unused)

    def _bus(self, dst: str, _boot: str, _message: Message) -> bool:
        self.sent.append(("bus", dst))
        return True

    def publish(self, node: str) -> None:
        self.bus_peers.received(Envelope(1, "default", node, f"{node}-boot", 1, ADVICE))

    def announced(self) -> list[str]:
        """The peers that an announcement reaches over their links."""
        self.peers.announce(actions.Announce(STATE))
        told = [dst for _, dst in self.sent]
        self.sent.clear()
        return told

    def route(self, dst: str) -> str:
        self.peers.send(dst, ADVICE)
        route, to = self.sent.pop()
        assert to == dst
        return route


def test_only_so_many_are_remembered_to_be_on_mqtt_and_those_heard_last() -> None:
    routes = Routes()
    for number in range(SOURCES_MAX):
        routes.publish(f"n{number}")
    routes.publish("n0")
    routes.publish("late")
    assert [routes.route(node) for node in ("n0", "n1", "n2", "late")] == ["bus", "link", "bus", "bus"]


def test_advice_goes_over_the_link_while_that_carries_tasks() -> None:
    routes = Routes()
    routes.publish("y")
    assert routes.route("y") == "bus"
    routes.carrying.add("y")
    assert routes.route("y") == "link"


def test_a_peer_that_is_forgotten_is_forgotten_there_too() -> None:
    routes = Routes()
    routes.publish("y")
    routes.peers.forget(actions.ForgetPeer("y"))
    assert routes.route("y") == "link"


@pytest.mark.parametrize("is_told_over_the_link", [True, False])
def test_a_peer_that_is_not_on_mqtt_any_more_hears_announcements_over_its_link(*, is_told_over_the_link: bool) -> None:
    routes = Routes()
    routes.publish("y")
    assert routes.announced() == []
    if is_told_over_the_link:
        unused = cast("Any", None)
        messages: Any = SimpleNamespace(received=lambda _src, _message: None)
        ca = CaMessages(unused, unused, unused)
        source = PeerEventSource(unused, ca, messages, unused, unused, routes.bus_peers)
        source.deliver("y", STATE)
    else:
        for _ in range(ADVICE_UNANSWERED_MAX):
            assert routes.route("y") == "bus"
    assert routes.announced() == ["y"]
    assert routes.route("y") == "link"
    routes.publish("y")
    assert routes.announced() == []


@pytest.mark.parametrize("message", [Leaving(), Sync()])
def test_news_of_members_over_a_link_is_written_down(message: Leaving | Sync) -> None:
    """That a node has left, too: where no datagrams arrive, nothing else tells it."""
    written: list[bool] = []
    unused, messages = cast("Any", None), cast("Any", SimpleNamespace(received=lambda _src, _message: None))
    members = cast("Any", SimpleNamespace(changed=lambda: written.append(True)))
    source = PeerEventSource(unused, CaMessages(unused, unused, unused), messages, members, unused, unused)
    source.deliver("y", message)
    assert written


def test_what_promises_nothing_overtakes_what_waits_for_the_disk() -> None:
    gone: list[Message] = []
    peers: Any = SimpleNamespace(send=lambda _dst, message: gone.append(message))
    disk: Any = SimpleNamespace(persist=lambda _rows, done: done())
    outbox, unused = Outbox(disk, RunState()), cast("Any", None)
    performer = Performer(outbox, unused, unused, unused, peers, unused, unused)
    row: Any = SimpleNamespace()
    waits = [Commit("x/1", UID, 1, 7, 5.0, 60.0), offer(files=TaskFiles(b"m" * 32))]
    overtakes = [ADVICE, offer(), Accept("y/1", UID, 1, 7, 5.0)]
    performer.perform(
        events.TimerExpired(timers.RetryDue()),
        [actions.Persist((row,)), *(actions.Send("y", message) for message in (*waits, *overtakes))],
    )
    assert gone == overtakes
    outbox.flush()
    assert gone == [*overtakes, *waits]


@pytest.mark.parametrize("retained", [False, True])
def test_a_state_over_mqtt_carries_its_report_unless_it_is_retained(retained: bool) -> None:
    put: list[Any] = []
    inbox: Any = SimpleNamespace(put=put.append)
    trust: Any = SimpleNamespace(admits=lambda _node, _boot: True)
    links: Any = SimpleNamespace(learn=lambda _identity: False)
    unused = cast("Any", None)
    bus = BusEvents(inbox, trust, links, unused, unused, unused, BusPeers())
    x = Given(peers=("y",))
    report = LoadReport(load_tasks=3, slots=1, incarnation=1, sequence=9)
    state = State(identity("y"), Profile("y", 1, 1.0, slots_fixed=True), report)
    bus.from_bus(Envelope(1, "default", "y", "y-boot-1", 1, state), retained=retained)
    for event in put:
        x.when(event)
    known = x.node.membership.last_report("y")
    assert (known is not None and known.report == report) is not retained


def test_many_that_are_looked_up_come_a_few_at_a_time_and_each_once() -> None:
    looked_up: list[str] = []
    told: list[tuple[str, ...]] = []
    turns: list[int] = []

    def found(task: str) -> TaskFound:
        if task == "x/7":
            raise StoreError("x/7 cannot be read from the database")
        looked_up.append(task)
        return TaskFound(task, is_known=False)

    async def story() -> None:
        store: Any = SimpleNamespace(found=found)
        inbox: Any = SimpleNamespace(put=lambda event: told.append(tuple(one.task for one in event.found)))
        unused = cast("Any", None)
        records = RecordEffects(store, unused, inbox, unused, unused, unused, BackgroundTasks(RunState()))
        names = tuple(f"x/{number}" for number in range(1, 3 * FOUND_AT_A_TIME + 1))
        records.find(names)
        records.find(names[-2:])
        assert looked_up == []
        while len(looked_up) < len(names) - 1:
            await asyncio.sleep(0)
            turns.append(len(looked_up))
        records.find(names[:1])
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(story())
    assert turns == sorted(set(turns))
    assert len(turns) == 3
    assert [task for some in told for task in some] == looked_up
    assert len(looked_up) == 3 * FOUND_AT_A_TIME
    assert looked_up[0] == looked_up[-1] == "x/1"


async def _expired(*due: timers.Timer) -> tuple[list[timers.Timer], int]:
    """These timers expire while the disk is behind → the events that come of them at once, and how many wait for room."""
    put: list[timers.Timer] = []
    waits: list[Any] = []
    outbox: Any = SimpleNamespace(when_room=waits.append)
    inbox: Any = SimpleNamespace(put=lambda event: put.append(event.timer))
    made = Timers(inbox, outbox, lambda: Instant(5.0, 0.0))
    for timer in due:
        made.set(actions.SetTimer(timer, 5.0))
        made._expire(timer, 5.0)
    at_once = list(put)
    for act in waits:
        act()
    assert set(put) == set(due)
    made.close()
    return at_once, len(waits)


def test_what_goes_on_for_many_tasks_waits_for_the_disk_and_leases_do_not() -> None:
    assert asyncio.run(_expired(timers.Batch("1"), timers.Lease("00"), timers.EligibilityDue())) == (
        [timers.Lease("00")],
        2,
    )


def test_a_timer_that_expires_early_is_set_again() -> None:
    """The loop's clock and the boot clock are two: the second decides."""
    put: list[events.Event] = []
    moment_s = 4.0
    timer = timers.Lease("00")

    async def story() -> None:
        nonlocal moment_s
        inbox: Any = SimpleNamespace(put=put.append)
        made = Timers(inbox, cast("Any", None), lambda: Instant(moment_s, 0.0))
        made.set(actions.SetTimer(timer, 5.0))
        first = made._timers[timer]
        made._expire(timer, 5.0)
        assert put == []
        assert made._timers[timer] is not first
        moment_s = 5.0
        made._expire(timer, 5.0)
        assert put == [events.TimerExpired(timer)]
        assert not made._timers
        first.cancel()
        made.close()

    asyncio.run(story())


def test_periodic_timers_and_retries_come_at_a_tick_and_all_that_wait_for_an_answer_are_exact() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        made = Timers(cast("Any", None), cast("Any", None), lambda: Instant(5.0, 0.0))
        for kind in timers.GossipTimerKind:
            made.set(actions.SetTimer(timers.GossipDue(kind), 6.3))
        made.set(actions.SetTimer(timers.Lease("00"), 6.3))
        made.set(actions.SetTimer(timers.RetryDue(), 6.3))
        now_s = loop.time()
        exact = [
            timer for timer, handle in made._timers.items() if handle.when() - now_s == pytest.approx(1.3, abs=1e-9)
        ]
        assert timers.RetryDue() not in exact
        at_ticks = {handle.when() for timer, handle in made._timers.items() if timer not in exact}
        assert len(exact) == 1 + len(timers.GossipTimerKind) - len(COALESCED)
        assert len(at_ticks) == 1
        assert abs(at_ticks.pop() - now_s - 1.3) <= TICK_S / 2
        made.close()

    with_still_clock(story)


def test_a_period_of_coalesced_pauses_is_kept_however_late_each_begins() -> None:
    async def story() -> None:
        clock = cast("StillClock", asyncio.get_running_loop())
        clock.at_s += coalesced_s(3.0)
        began_s = clock.at_s
        for late_s in (0.0, 0.004, 0.3, 0.49):
            clock.at_s += late_s
            clock.at_s += coalesced_s(3.0)
        assert clock.at_s == pytest.approx(began_s + 4 * 3.0)
        assert coalesced_s(TICK_S / 2) == TICK_S / 2

    with_still_clock(story)


class StillClock(asyncio.SelectorEventLoop):
    """A loop whose clock stands still."""

    at_s = 100.7

    def time(self) -> float:
        return self.at_s


def with_still_clock(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=StillClock) as runner:
        runner.run(story())


def test_what_was_reported_dead_before_its_turn_to_be_spawned_is_not_spawned() -> None:
    """The order to start it waits for its row to be durable; meanwhile its launcher has gone, and the next has nothing."""
    x = Given(peers=("h",))
    x.hear("h", offer())
    x.hear("h", commit(x))
    order = x.done(actions.SpawnTask)
    spawned: list[str] = []
    info: Any = SimpleNamespace(config=SimpleNamespace(node="x", device=(), mode="system"), counters=Counter())
    spool: Any = SimpleNamespace(names=lambda key: (f"{key}.out", f"{key}.err"))
    stdin: Any = SimpleNamespace(source=lambda _action: None)
    launcher: Any = SimpleNamespace(spawn=lambda action, *_: spawned.append(action.key))
    environments: Any = SimpleNamespace(variables=lambda *_: {})
    mps: Any = SimpleNamespace(variables=lambda _key: {})
    variables = TaskVariables(info, x.node, environments, mps)
    starter = TaskStarter(info, x.node, spool, stdin, launcher, variables, cast("Any", None))
    starter.start(order)
    assert spawned == [KEY]
    x.when(events.LauncherLost())
    assert "Died to h" in x.when(events.LauncherReady())
    starter.start(order)
    assert spawned == [KEY]
    assert info.counters[SPAWNS_DROPPED] == 1
