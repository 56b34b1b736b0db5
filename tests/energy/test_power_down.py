"""Power-down: a node that has nothing to do is asleep and not dead, is woken for a task, and is given up if it does not wake."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import msgspec
import pytest

from peerload.agent import energy
from peerload.agent.energy import PowerDown
from peerload.agent.views.agent import MetricsView
from peerload.core.membership.peers import PeerState
from peerload.model import actions, events, messages, timers
from peerload.model.gossip import MembershipUpdate, MemberStatus
from peerload.model.resources import LoadReport, Placement, Profile, ResourceRequest
from tests.core.given import SENDER, Given, identity, spec


def slept(given: Given, peer: str = "y", refutation: int = 1) -> None:
    given.rumour(peer, MemberStatus.ASLEEP, refutation)


def state(given: Given, peer: str = "y") -> PeerState:
    found = given.node.membership.get(peer)
    assert found is not None
    return found.state


def woken(given: Given) -> list[str]:
    return [action.node for action in given.last if isinstance(action, actions.WakePeer)]


def gate(**facts: Any) -> Given:
    return Given(slots=0, policies=SENDER, facts={"cpus": 0.0}, **facts)


def test_a_node_that_sleeps_is_not_dead_and_nobody_suspects_it() -> None:
    x = gate()
    slept(x)
    assert state(x) is PeerState.ASLEEP
    x.rumour("y", MemberStatus.SUSPECT, 1)
    x.rumour("y", MemberStatus.DEAD, 1)
    x.when(events.PeerUnreachable("y", "closed"))
    assert state(x) is PeerState.ASLEEP
    assert "y" not in x.node.membership.gossip.shared.there
    x.after(1e6).timer("gossip", "sync", "")
    assert state(x) is PeerState.ASLEEP  # however long
    figures = MetricsView(*[cast("Any", None)] * 6)
    figures._node = x.node
    assert figures._of_nodes()['peers{state="asleep"}'] == 1
    x.rumour("y", MemberStatus.ALIVE, 2)
    assert state(x) is PeerState.ALIVE


def test_the_only_node_that_fits_is_woken_at_once_and_what_that_took_is_learned() -> None:
    x = gate()
    slept(x)
    x.submit()
    assert woken(x) == ["y"]
    x.submit()
    assert woken(x) == []  # it is being woken
    x.after(7.0).rumour("y", MemberStatus.ALIVE, 2)
    assert x.node.membership.waking.took_s == {"y": 7.0}
    assert x.sent(messages.ProbeRequest)


def test_a_node_that_sleeps_and_the_time_that_it_takes_to_wake_outlive_a_restart_of_the_agent() -> None:
    asleep = Profile("y", 1, 1.0, slots_fixed=True)
    started = events.AgentStarted(known=(identity("y"),), wake_s=(("y", 7.0),), asleep=(asleep,))
    x = gate(peers=(), started=started)
    assert state(x) is PeerState.ASLEEP
    x.submit()
    assert woken(x) == ["y"]
    assert x.node.membership.waking.wake_s("y") == 7.0
    x.after(7.0).rumour("y", MemberStatus.ALIVE, 1)
    assert state(x) is PeerState.ALIVE


def test_a_home_that_hears_of_a_node_that_sleeps_asks_others_for_its_profile_and_can_wake_it() -> None:
    x, y = gate(peers=()), identity("y")
    x.meet("z", slots=0, cpus=0.0)
    told = MembershipUpdate("y", y.boot, y.machine_boot, y.store, 1, 1, MemberStatus.ASLEEP, y.address)
    x.when(events.GossipReceived("z", identity("z").boot, (told,)))
    for _ in range(2):
        x.timer("gossip", "profiles", "")
        asked = [one for one in x.last if isinstance(one, actions.Send)]
        assert [(one.dst, one.message) for one in asked] == [("z", messages.ProfileRequest(("y",)))]
        x.after(60.0)
    x.hear("z", messages.ProfileTold((messages.KnownProfile(y.boot, Profile("y", 1, 1.0)),)))
    x.submit()
    assert woken(x) == ["y"]


def test_the_profile_of_a_node_that_sleeps_is_asked_for_elsewhere_if_who_told_of_it_has_died() -> None:
    x, y = gate(peers=()), identity("y")
    for peer in ("w", "z"):
        x.meet(peer, slots=0, cpus=0.0)
    told = MembershipUpdate("y", y.boot, y.machine_boot, y.store, 1, 1, MemberStatus.ASLEEP, y.address)
    x.when(events.GossipReceived("z", identity("z").boot, (told,)))
    x.timer("gossip", "profiles", "")
    x.rumour("z", MemberStatus.DEAD)
    x.after(60.0).timer("gossip", "profiles", "")
    assert messages.ProfileRequest(("y",)) in [
        one.message for one in x.last if isinstance(one, actions.Send) and one.dst == "w"
    ]
    x.hear("w", messages.ProfileTold((messages.KnownProfile(y.boot, Profile("y", 1, 1.0)),)))
    x.submit()
    assert woken(x) == ["y"]


def test_a_node_that_never_wakes_is_asked_three_times_reported_and_avoided_until_it_is_heard_of() -> None:
    x = gate()
    x.meet("z")
    slept(x)
    slept(x, "z")
    x.submit()
    asked = woken(x)
    for _ in range(2):
        x.after(60.0).timer("wake", asked[0])
        assert woken(x) == asked
    x.after(60.0).timer("wake", asked[0])
    assert [(note.state, note.node) for note in x.notes if note.what == "node"] == [("not woken", asked[0])]
    x.timer("stranded", x.task().uid.hex())
    assert woken(x) == [{"y": "z", "z": "y"}[asked[0]]]
    x.rumour(asked[0], MemberStatus.ALIVE, 2)
    assert not x.node.membership.waking.failed


@pytest.mark.parametrize("is_asked_here", [True, False])
def test_a_node_that_is_forgotten_while_it_is_being_woken_is_woken_no_more(*, is_asked_here: bool) -> None:
    x = gate()
    x.meet("z")
    for name in ("y", "z"):
        slept(x, name)
    x.submit(spec(placement=Placement(node="y")))
    assert woken(x) == ["y"]
    if is_asked_here:
        x.when(events.ForgetRequested(77, "y"))
    else:
        x.rumour("y", MemberStatus.FORGOTTEN, 1)
    assert actions.ClearTimer(timers.WakeTimeout("y")) in x.last
    x.after(60.0).timer("wake", "y")  # one that was on its way
    assert woken(x) == []
    x.submit()
    assert woken(x) == ["z"]  # nothing is under way


def asked(given: Given) -> list[str]:
    return [one.dst for one in given.last if isinstance(one, actions.Send) and isinstance(one.message, messages.Wake)]


def test_a_home_on_another_network_asks_a_peer_on_that_of_the_sleeper() -> None:
    x = gate()
    x.node.state.identity = msgspec.structs.replace(x.node.state.identity, address="10.0.1.1:7117")
    for name, address in (("y", "10.0.2.2:7117"), ("z", "10.0.2.3:7117"), ("w", "10.0.3.1:7117")):
        x.meet(name)
        if name == "y":
            slept(x)
        peer = x.node.membership.get(name)
        assert peer is not None
        peer.identity = msgspec.structs.replace(peer.identity, address=address)
    x.submit(spec(request=ResourceRequest(), placement=Placement(node="y")))
    assert (woken(x), asked(x)) == (["y"], ["z"])
    x.after(60.0).timer("wake", "y")  # in vain: whoever is there is asked, too
    assert (woken(x), asked(x)) == (["y"], ["z", "w"])


def test_a_peer_that_is_asked_wakes_a_node_that_is_asleep_and_no_other_and_not_for_ever() -> None:
    x = Given(policies=SENDER)
    x.hear("y", messages.Wake("z"))
    assert woken(x) == []
    x.meet("z")
    slept(x, "z")
    for wanted in (["z"], []):
        x.hear("y", messages.Wake("z"))
        assert woken(x) == wanted
    x.after(1.0).hear("y", messages.Wake("z"))
    assert woken(x) == ["z"]


def test_a_task_that_can_start_wakes_nobody() -> None:
    x = Given(policies=SENDER)
    slept(x)
    x.submit()
    assert woken(x) == []
    x.submit()  # no slot is left here
    assert woken(x) == ["y"]


def test_a_node_with_tasks_does_not_sleep_and_one_without_tells_its_peers() -> None:
    x = Given(policies=SENDER)
    x.submit()
    x.when(events.MachineSleeping(is_suspended=True))
    assert not x.node.state.is_asleep
    x.end(x.task().key)
    x.when(events.MachineSleeping(is_suspended=True))
    told = [rumour for rumour in x.sent(messages.Sync).rumours if isinstance(rumour, MembershipUpdate)]
    assert [(rumour.node, rumour.standing) for rumour in told] == [("x", MemberStatus.ASLEEP)]
    x.when(events.MachineWoke())
    assert x.sent(messages.Sync).rumours[0].standing is MemberStatus.ALIVE
    assert x.sent(messages.Sync).rumours[0].refutation > told[0].refutation


def test_a_machine_that_other_programs_keep_busy_does_not_sleep() -> None:
    x = Given(policies=SENDER)
    x.when(events.LoadSampled(1.0, 1.0, 0))
    x.when(events.MachineSleeping(is_suspended=True))
    assert not x.node.state.is_asleep
    x.when(events.LoadSampled(0.0, 0.0, 0))
    x.when(events.MachineSleeping(is_suspended=True))
    assert x.node.state.is_asleep


def test_a_node_that_is_powered_off_is_asleep_and_has_not_left() -> None:
    x = Given(policies=SENDER)
    x.when(events.MachineSleeping(is_suspended=True))
    x.when(events.AgentStopping())
    assert not [one for one in x.last if isinstance(one, actions.Send) and isinstance(one.message, messages.Leaving)]
    assert x.node.membership.gossip.own.standing is MemberStatus.ASLEEP


def test_a_home_that_sleeps_elsewhere_keeps_its_leases_parked() -> None:
    x = Given(policies=SENDER)
    x.submit()
    x.submit(spec(name="second"))
    x.hear("y", messages.ProbeReply(x.sent(messages.ProbeRequest).search, True, LoadReport(slots=1, accepts=True)))
    x.hear("y", messages.Accept("x/2", x.task(2).uid, 1, 7, 1.0, "y-machine-1"))
    x.when(events.MachineSleeping(is_suspended=True))
    assert not x.node.state.is_asleep  # its tasks run elsewhere, under leases


# -- on a machine, with recorded commands --------------------------------------------------------------------------------


class Log:
    def __init__(self) -> None:
        self.states: list[str] = []

    def record(self, what: str, state: str, **facts: str) -> None:
        self.states.append(state)

    def settle(self) -> None: ...


class IdleNode:
    """What `PowerDown` looks at of a node; it takes note of events as the core does."""

    def __init__(self) -> None:
        self.has_work = False
        self.state = SimpleNamespace(is_asleep=False)
        self.events: list[str] = []

    def put(self, event: events.Event) -> None:
        self.events.append(type(event).__name__)
        self.state.is_asleep = isinstance(event, events.MachineSleeping) and not self.has_work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses."""
    monkeypatch.setattr(energy, "TELL_S", 0.0)
    monkeypatch.setattr(energy, "SUSPEND_S_MAX", 0.3)
    monkeypatch.setattr(energy, "CLOCK_EVERY_S", 0.01)
    monkeypatch.setattr(energy, "GAP_S", 600.0)  # a slow machine is not taken for one that slept


def suspends(node: IdleNode, command: str) -> list[str]:
    events_kept: Any = Log()
    machine: Any = node
    asyncio.run(PowerDown(1.0, command, machine, node, events_kept).sleep())
    return list(events_kept.states)


def test_the_suspend_command_is_run_and_a_machine_that_slept_is_awake_again(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    is_stopped = "grep -q '^State:.T' /proc/$PPID/status"
    stop = f"echo 1 >> {ran}; (until {is_stopped}; do sleep 0.05; done; sleep 0.6; kill -CONT $PPID) & kill -STOP $PPID"
    code = "import asyncio, sys; sys.path[:0] = sys.argv[2:]; from tests.energy import test_power_down as t; t.in_child(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, stop, *sys.path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["asleep", "awake"], done.stderr
    assert ran.read_text() == "1\n"


def in_child(command: str) -> None:
    """In a process of its own, since it is stopped for a while."""
    for name, value in (("TELL_S", 0.0), ("SUSPEND_S_MAX", 30.0), ("CLOCK_EVERY_S", 0.05), ("GAP_S", 0.3)):
        setattr(energy, name, value)
    print(*suspends(IdleNode(), command))  # noqa: T201 -- what the test reads


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("command", ["exit 3", "true"])
def test_a_command_that_does_not_suspend_is_told(command: str) -> None:
    node = IdleNode()
    assert suspends(node, command) == ["asleep", "not asleep"]
    assert node.events == ["MachineSleeping", "MachineWoke"]


@pytest.mark.usefixtures("clock")
def test_work_that_comes_meanwhile_keeps_the_machine_awake(tmp_path: Path) -> None:
    node, ran = IdleNode(), tmp_path / "ran"
    put = node.put
    node.put = lambda event: (put(event), setattr(node, "has_work", True))[0]  # type: ignore[method-assign, func-returns-value]
    assert suspends(node, f"touch {ran}") == []
    assert (node.events, ran.exists()) == (["MachineSleeping", "MachineWoke"], False)


def test_a_magic_packet_names_the_card_sixteen_times() -> None:
    packet = energy.magic_packet("01:23:45:67:89:ab")
    assert packet == b"\xff" * 6 + bytes.fromhex("0123456789ab") * 16
    sent: list[tuple[bytes, object]] = []

    class Socket:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...
        def setsockopt(self, *_: object) -> None: ...
        def sendto(self, data: bytes, to: object) -> None:
            sent.append((data, to))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("socket.socket", lambda *_: Socket())
        patched.setattr(energy, "_broadcasts", lambda: ["10.0.0.255", "255.255.255.255"])
        energy.Waker("").wake(Profile("y", 1, 1.0, wake=("01:23:45:67:89:ab",)))
    assert sent == [(packet, ("10.0.0.255", 9)), (packet, ("255.255.255.255", 9))]
    assert "255.255.255.255" in energy._broadcasts()


def test_addresses_that_no_magic_packet_can_name_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ib = "80:00:02:08:fe:80:00:00:00:00:00:00:00:02:c9:03:00:17:ac:11"
    for name, address in (("eno1", "01:23:45:67:89:ab"), ("ib0", ib), ("rmnet0", "")):
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "address").write_text(f"{address}\n")
    monkeypatch.setattr(energy, "NET", tmp_path)
    told = Profile("y", 1, 1.0, wake=energy.cards())
    assert msgspec.convert(msgspec.to_builtins(told), Profile).wake == ("01:23:45:67:89:ab",)


def test_the_resume_command_is_run_with_the_name_of_the_node(tmp_path: Path) -> None:
    async def story() -> None:
        waker = energy.Waker(f'echo "$PEERLOAD_NODE" > {tmp_path / "woken"}')
        waker.wake(Profile("y", 1, 1.0))
        await asyncio.gather(*waker._running)

    asyncio.run(story())
    assert (tmp_path / "woken").read_text() == "y\n"


@pytest.mark.parametrize(("command", "code"), [("sleep 600", energy.TIMED_OUT), ("exit 3", 3)])
def test_a_command_that_hangs_is_killed_and_has_a_code(
    command: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "COMMAND_S_MAX", 0.0 if code == energy.TIMED_OUT else 60.0)
    assert asyncio.run(energy._run(command, {})) == code


def test_a_command_that_cannot_be_started_has_a_code() -> None:
    assert asyncio.run(energy._run("true", {"A": "x" * (1 << 21)})) == energy.NOT_RUN
