"""Who is there: probes, suspicion, refutation, and what follows for what this node does with its peers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from peerload.core.membership.gossip_state import transmissions
from peerload.core.membership.peers import PeerState
from peerload.model import actions, events, messages, metrics
from peerload.model.config import CoreConfig
from peerload.model.gossip import (
    CLAIM_MAX,
    LAN,
    OUTDO_MAX,
    GossipAck,
    GossipNack,
    GossipPing,
    GossipPingRequest,
    Load,
    MembershipUpdate,
    MemberStatus,
)
from peerload.model.messages import Identity
from peerload.model.resources import LoadReport, Profile
from peerload.wire import peer as wire
from tests.core.given import ACCEPTS, SENDER, Given, identity, spec

CALM = msgspec.structs.replace(LAN, corroborators=0, suspicion_mult=1.8)
"""Nobody follows up the suspicions of others."""


def given(*peers: str, **preset: Any) -> Given:
    gossip = msgspec.structs.replace(CALM, **preset)
    x = Given(peers=peers, config=CoreConfig(gossip=gossip), policies=SENDER)
    x.shows_gossip = True
    for _ in range(9):  # what was new at the start has been told
        x.timer("gossip", "spread")
    return x


def rumour(
    node: str, standing: MemberStatus = MemberStatus.ALIVE, refutation: int = 0, start: int = 1, **more: Any
) -> MembershipUpdate:
    who = identity(node, start)
    said = MembershipUpdate(node, who.boot, who.machine_boot, who.store, start, refutation, standing, who.address)
    return msgspec.structs.replace(said, **more)


def says(x: Given, src: str, *said: Any, start: int = 1) -> list[str]:
    return x.when(events.GossipReceived(src, f"{src}-boot-{start}", said))


def state(x: Given, node: str) -> PeerState:
    peer = x.node.membership.get(node)
    assert peer is not None
    return peer.state


def sequence(x: Given) -> int:
    """Of the ping just sent."""
    sent = [said for act in x.last if isinstance(act, actions.SendGossip) for said in act.messages]
    return next(said.sequence for said in sent if isinstance(said, GossipPing))


# -- probes ------------------------------------------------------------------------------------------------------------


def test_a_turn_pings_one_member_and_an_ack_ends_it() -> None:
    x = given("y")
    assert x.timer("gossip", "turn") == ["timer turn 1", "ping+load to y", "timer ack 0.4"]
    assert says(x, "y", GossipAck(sequence(x))) == ["clear ack"]
    assert x.timer("gossip", "ack", "1") == []


def test_a_ping_is_answered_with_this_nodes_load_by_whom_it_is_for() -> None:
    x = given("y")
    assert says(x, "y", GossipPing(7, "x")) == ["ack+load to y"]
    assert says(x, "y", GossipPing(8, "z")) == []


def test_without_an_answer_helpers_and_the_link_try_and_then_it_is_suspected() -> None:
    x = given("y", "a", "b", helpers=2)
    x.node.membership.gossip.detector.probe("y")
    x.timer("gossip", "turn")
    number = "1"
    done = x.after(0.4).timer("gossip", "ack", number)
    assert sorted(done[:2]) == ["ask to a", "ask to b"]
    assert done[2:] == ["Ping to y", "timer verdict 0.5"]
    assert says(x, "a", GossipNack(1)) == []
    assert says(x, "b", GossipNack(1)) == []
    done = x.after(0.5).timer("gossip", "verdict", number)
    assert done[0].startswith("timer suspect ")
    assert state(x, "y") is PeerState.SUSPECT
    assert not x.node.membership.is_usable("y")
    assert x.node.membership.gossip.shared.health.score == 0  # both helpers were heard


def test_helpers_that_are_not_heard_either_make_this_node_doubt_itself() -> None:
    x = given("y", "a", "b", helpers=2)
    x.timer("gossip", "turn")
    x.after(0.4).timer("gossip", "ack", "1")
    x.after(0.5).timer("gossip", "verdict", "1")
    assert x.node.membership.gossip.shared.health.score == 2
    assert "timer turn 3" in x.timer("gossip", "turn")
    assert "timer ack 1.2" in _shapes(x)


def _shapes(x: Given) -> list[str]:
    return [x._shape(action) for action in x.last]


@pytest.mark.parametrize("way", ["late", "helper", "link"])
def test_any_sign_of_life_ends_the_probe(way: str) -> None:
    x = given("y", "a", helpers=1)
    x.node.membership.gossip.detector.probe("y")
    x.timer("gossip", "turn")
    x.after(0.4).timer("gossip", "ack", "1")
    match way:
        case "late":
            assert says(x, "y", GossipAck(1)) == ["clear verdict"]
        case "helper":
            assert says(x, "a", GossipAck(1)) == ["clear verdict"]
        case _:
            assert "clear verdict" in x.hear("y", messages.Pong(1, LoadReport()))
    x.after(0.5).timer("gossip", "verdict", "1")
    assert state(x, "y") is PeerState.ALIVE


def test_an_ack_of_another_start_or_of_a_stranger_counts_for_nothing() -> None:
    x = given("y")
    x.timer("gossip", "turn")
    assert says(x, "y", GossipAck(1), start=2) == []
    assert says(x, "z", GossipAck(1)) == []
    assert "Ping to y" in x.after(0.4).timer("gossip", "ack", "1")


def test_a_helper_pings_and_passes_on_what_it_hears_or_that_it_hears_nothing() -> None:
    x = given("y", "a")
    assert says(x, "y", GossipPingRequest(70, "a", "a:1")) == ["ping+load to a", "timer nack 0.32"]
    number = sequence(x)
    assert x.after(0.32).timer("gossip", "nack", str(number)) == ["nack to y"]
    assert says(x, "a", GossipAck(number)) == ["ack+a=alive to y"]  # which may not hear it otherwise
    assert says(x, "a", GossipAck(number)) == []


def test_a_broken_link_is_asked_about_at_once_and_requeues_nothing() -> None:
    x = given("y")
    assert x.when(events.PeerUnreachable("y", "reset")) == ["ping+load to y", "timer ack 0.4"]
    assert x.when(events.PeerUnreachable("y", "reset")) == []  # that is being done
    assert state(x, "y") is PeerState.ALIVE


def answered_through(x: Given, node: str, helper: str) -> set[str]:
    """Have a node answer the next probe of it through a helper alone → the helpers that were asked."""
    pinged: list[str] = []
    while node not in pinged:
        x.after(1.0).timer("gossip", "turn")
        pinged = [act.node for act in x.last if isinstance(act, actions.SendGossip)]
        if node not in pinged:
            says(x, pinged[0], GossipAck(sequence(x)))
    number = sequence(x)
    x.after(0.4).timer("gossip", "ack", str(number))
    asked = {act.node for act in x.last if isinstance(act, actions.SendGossip)}
    says(x, helper, GossipAck(number))
    return asked


def told(x: Given) -> set[str]:
    """The members that hear the next news first."""
    says(x, "a", rumour("a", refutation=x.node.membership.gossip.shared.members["a"].rumour.refutation + 1))
    x.timer("gossip", "spread")
    return {act.node for act in x.last if isinstance(act, actions.SendGossip)}


def test_news_is_sent_besides_to_one_of_the_members_whose_datagrams_do_not_come_here() -> None:
    x = given("y", "a", "b", fanout=2)
    gossip = x.node.membership.gossip.shared
    for _ in range(2):  # one may be lost
        assert len(told(x)) == 2
        answered_through(x, "y", "b")
    assert told(x) == {"y", "a", "b"}
    while gossip.news.rumours:
        x.timer("gossip", "spread")
    says(x, "a", rumour("a", refutation=gossip.members["a"].rumour.refutation + 1))
    sent: Counter[str] = Counter()
    while gossip.news.rumours:
        x.timer("gossip", "spread")
        sent.update(act.node for act in x.last if isinstance(act, actions.SendGossip))
    assert sent["a"] + sent["b"] == transmissions(gossip.preset.retransmit_mult, 4)
    says(x, "y", GossipPing(1, "x"))
    assert len(told(x)) == 2


def test_where_no_datagrams_come_from_anybody_news_is_sent_to_all() -> None:
    x = given("y", "a")
    for _ in range(2):
        answered_through(x, "y", "a")
        answered_through(x, "a", "y")
    assert told(x) == {"y", "a"}


def test_the_helper_that_reached_a_member_is_asked_again() -> None:
    x = given("y", "a", "b", "c", helpers=3)
    answered_through(x, "y", "c")
    x.node.membership.gossip.shared.preset = msgspec.structs.replace(CALM, helpers=1)
    assert [answered_through(x, "y", "c") for _ in range(9)] == [{"c"}] * 9


def test_every_second_probe_is_of_the_neighbour_and_the_others_of_everybody_in_turn() -> None:
    x = given("a", "b", "c", "d", "e")
    probed = []
    for _ in range(20):
        x.after(1.0).timer("gossip", "turn")
        (to,) = [act.node for act in x.last if isinstance(act, actions.SendGossip)]
        says(x, to, GossipAck(sequence(x)))
        probed.append(to)
    assert len(set(probed[::2])) == 1
    assert sorted(probed[1:11:2]) == sorted(probed[11::2]) == ["a", "b", "c", "d", "e"]


# -- suspicion ---------------------------------------------------------------------------------------------------------


def test_a_suspect_that_does_not_refute_it_is_called_dead() -> None:
    x = given("y")
    died: list[str] = []
    x.node.handoff.leases.peer_died = died.append  # type: ignore[assignment,method-assign]
    assert says(x, "z", rumour("y", MemberStatus.SUSPECT, by=("z",)))[0] == "timer suspect 1.8"
    x.after(1.8)
    done = x.timer("gossip", "suspect", "y")
    assert state(x, "y") is PeerState.DEAD
    assert died == ["y"]
    assert [shape for shape in done if shape.startswith("timer")] == [done[-1]]  # it is looked for, for ever
    assert x.timer("gossip", "turn") == []  # and not probed


def test_a_later_word_of_its_own_clears_it() -> None:
    x = given("y")
    says(x, "z", rumour("y", MemberStatus.SUSPECT, by=("z",)))
    assert says(x, "z", rumour("y", MemberStatus.ALIVE, refutation=0)) == []  # that is what was suspected
    assert "clear suspect" in says(x, "z", rumour("y", MemberStatus.ALIVE, refutation=1))
    assert state(x, "y") is PeerState.ALIVE
    assert says(x, "z", rumour("y", MemberStatus.DEAD, refutation=0)) == []  # late


def test_confirmations_shorten_the_time() -> None:
    x = given("y", "a", "b", "c", "d")
    assert says(x, "a", rumour("y", MemberStatus.SUSPECT, by=("a",)))[0] == "timer suspect 7.2"
    assert says(x, "a", rumour("y", MemberStatus.SUSPECT, by=("a",))) == []  # the same again
    assert says(x, "b", rumour("y", MemberStatus.SUSPECT, by=("b",)))[0] == "timer suspect 4.5"
    says(x, "c", rumour("y", MemberStatus.SUSPECT, by=("a", "c")))
    assert says(x, "d", rumour("y", MemberStatus.SUSPECT, by=("d",)))[0] == "timer suspect 1.8"


def test_a_node_in_doubt_about_itself_waits_longer() -> None:
    x = given("y")
    says(x, "z", rumour("y", MemberStatus.SUSPECT, by=("z",)))
    x.node.membership.gossip.shared.health.worse()
    assert x.after(1.8).timer("gossip", "suspect", "y") == ["timer suspect 1.8"]
    assert state(x, "y") is PeerState.SUSPECT


def test_a_suspect_hears_of_it_with_the_next_ping() -> None:
    x = given("y")
    says(x, "z", rumour("y", MemberStatus.SUSPECT, by=("z",)))
    for _ in range(9):
        x.timer("gossip", "spread")
    assert x.timer("gossip", "turn")[1] == "ping+y=suspect+load to y"


def test_who_hears_of_a_suspicion_follows_it_up() -> None:
    x = given("y", "a", "b", corroborators=6)
    done = says(x, "a", rumour("y", MemberStatus.SUSPECT, by=("a",)))
    assert "ping+y=suspect+load to y" in done


def test_this_node_refutes_what_is_said_of_it() -> None:
    x = given("y", "z")
    done = says(x, "y", rumour("x", MemberStatus.SUSPECT, by=("z",)))
    assert done[-2:] == ["x=alive to y", "x=alive to z"]
    (said,) = x.done(actions.SendGossip).messages
    assert said.refutation == 1
    says(x, "z", rumour("x", MemberStatus.SUSPECT, by=("z",)))  # it has not heard the answer
    assert x.done(actions.SendGossip).messages[0] == said
    assert x.done(actions.SendGossip).node == "z"
    assert x.node.membership.gossip.shared.health.score == 1


def test_after_its_database_was_lost_a_node_counts_on_from_where_it_was() -> None:
    x = given("y")
    says(x, "y", rumour("x", MemberStatus.DEAD, start=57))
    assert x.node.state.identity.incarnation == 58
    says(x, "y", rumour("x", MemberStatus.ALIVE, start=60))  # two agents of one name do not chase each other
    assert x.node.state.identity.incarnation == 58


# -- standing still ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False])
def test_a_node_that_did_not_run_calls_nobody_dead_before_a_fresh_probe(told: bool) -> None:
    x = given("y")
    says(x, "z", rumour("y", MemberStatus.SUSPECT, by=("z",)))
    if told:
        x.after(2.0).when(events.LoopLagged(2.0))
    else:
        x.after(4.0)
    done = x.timer("gossip", "suspect", "y")
    assert done == ["ping+y=suspect+load to y", "timer ack 0.8", "timer suspect 1"]
    assert state(x, "y") is PeerState.SUSPECT
    x.after(0.8).timer("gossip", "ack", "1")
    (due, *_) = x.after(1.0).timer("gossip", "verdict", "1")
    x.after(float(due.removeprefix("timer suspect ")))
    x.timer("gossip", "suspect", "y")
    assert state(x, "y") is PeerState.DEAD


def test_a_node_that_did_not_run_gives_up_its_probes() -> None:
    x = given("y")
    x.timer("gossip", "turn")
    assert x.after(3.0).timer("gossip", "ack", "1") == []
    assert x.node.membership.gossip.shared.health.score == 1


# -- what follows ------------------------------------------------------------------------------------------------------


def test_another_start_takes_the_place_of_the_dead_one() -> None:
    x = given("y")
    says(x, "z", rumour("y", MemberStatus.DEAD))
    says(x, "z", rumour("y", start=2))
    y = x.node.membership.get("y")
    assert y is not None
    assert (y.state, y.identity.boot, y.knows_profile) == (PeerState.ALIVE, "y-boot-2", False)
    says(x, "z", rumour("y", MemberStatus.DEAD, refutation=9))  # of the start before
    assert state(x, "y") is PeerState.ALIVE


def test_a_member_that_others_tell_of_is_asked_what_it_has_and_then_used() -> None:
    x = given("y")
    says(x, "y", rumour("z"))
    assert x.node.membership.could_ever(spec(), "x")
    assert x.timer("gossip", "profiles") == ["ProfileRequest to y", "timer profiles 1"]
    assert "z" not in x.node.membership.eligible(messages.Need(), "x")
    told = messages.KnownProfile("z-boot-1", Profile("z", 1, 1.0, slots_fixed=True))
    x.hear("y", messages.ProfileTold((told,)))
    assert "z" in x.node.membership.eligible(messages.Need(), "x")


def test_a_profile_is_taken_from_whom_it_was_asked_and_from_its_node() -> None:
    x, drained = given("y", "z"), Profile("y", 0, 0.0, drained=True, version=1 << 40)
    x.hear("z", messages.ProfileTold((messages.KnownProfile("y-boot-1", drained),)))
    assert x.node.membership.is_usable("y")
    assert x.node.state.counts[metrics.PROFILES_UNASKED] == 1
    says(x, "z", rumour("y", refutation=1, profile_version=1 << 40))
    assert x.timer("gossip", "profiles")[0] == "ProfileRequest to z"
    x.hear("z", messages.ProfileTold((messages.KnownProfile("y-boot-1", drained),)))
    assert not x.node.membership.is_usable("y")
    x.meet("y")  # it says something else itself, and is asked
    assert x.after(1.0).timer("gossip", "profiles")[0] == "ProfileRequest to y"
    x.hear("y", messages.ProfileTold((messages.KnownProfile("y-boot-1", Profile("y", 1, 1.0)),)))
    assert x.node.membership.is_usable("y")


@pytest.mark.parametrize("lie", [{"sequence": 1 << 40}, {"incarnation": 1 << 40}])
def test_what_others_tell_of_a_load_does_not_keep_its_nodes_own_word_out(lie: dict[str, int]) -> None:
    x = given("y", "z")
    told = msgspec.structs.replace(ACCEPTS, load_tasks=99, **lie)
    says(x, "z", Load.of("y", told))
    later = msgspec.structs.replace(ACCEPTS, sequence=2)
    says(x, "z", Load.of("y", later))
    known = x.node.membership.report("y")
    assert known is not None
    assert known.report == told
    says(x, "y", Load.of("y", later))
    known = x.node.membership.report("y")
    assert known is not None
    assert known.report == later


def test_a_nodes_own_word_that_is_late_is_not_believed_again() -> None:
    x = given("y", "z")
    newer = msgspec.structs.replace(ACCEPTS, sequence=9)
    says(x, "z", Load.of("y", newer))
    says(x, "y", Load.of("y", ACCEPTS))
    known = x.node.membership.report("y")
    assert known is not None
    assert known.report == newer


def test_a_profile_that_was_not_told_is_asked_of_the_node_itself() -> None:
    x = given("y")
    says(x, "y", rumour("z"))
    x.timer("gossip", "profiles")
    assert x.after(1.0).timer("gossip", "profiles") == ["ProfileRequest to z", "timer profiles 2"]


def test_a_profile_of_a_node_that_cannot_be_reached_is_asked_of_others_until_it_is_the_newest() -> None:
    x = given("y", "z")
    says(x, "y", rumour("z", refutation=1, profile_version=7))
    x.timer("gossip", "profiles")
    for version in (0, 6):
        older = messages.KnownProfile("z-boot-1", Profile("z", 1, 1.0, slots_fixed=True, version=version))
        x.hear("y", messages.ProfileTold((older,)))
    x.when(events.SendFailed("z", messages.Ping(1)))
    x.node.membership.gossip.shared.members["z"].helper = "y"
    assert x.after(1.0).timer("gossip", "profiles")[0] == "ProfileRequest to y"
    drained = Profile("z", 1, 1.0, slots_fixed=True, drained=True, version=7)
    x.hear("y", messages.ProfileTold((messages.KnownProfile("z-boot-1", drained),)))
    assert not x.node.membership.is_usable("z")
    assert x.after(60.0).timer("gossip", "profiles") == []


def test_a_helper_that_does_not_know_a_profile_is_not_the_only_one_asked() -> None:
    x = given("y", "z", "w")
    says(x, "y", rumour("z", refutation=1, profile_version=7))
    x.timer("gossip", "profiles")
    x.when(events.SendFailed("z", messages.Ping(1)))
    x.node.membership.gossip.shared.members["z"].helper = "y"
    asked = {x.after(60.0).timer("gossip", "profiles")[0] for _ in range(12)}
    assert asked == {"ProfileRequest to y", "ProfileRequest to w"}


def test_this_node_tells_the_profiles_that_it_knows() -> None:
    x = given("y")
    assert x.hear("z", messages.ProfileRequest(("x", "y", "nobody"))) == ["ProfileTold to z"]
    assert [known.profile.node for known in x.sent(messages.ProfileTold).profiles] == ["x", "y"]


def test_a_load_that_came_by_gossip_counts_like_any_other() -> None:
    x = given("y")
    assert says(x, "z", Load.of("y", ACCEPTS)) == []
    known = x.node.membership.report("y")
    assert known is not None
    assert known.report == ACCEPTS
    news = msgspec.structs.replace(ACCEPTS, sequence=2)
    assert says(x, "z", Load.of("y", news, 30.0, is_news=True)) == ["timer loads 1"]
    assert says(x, "z", Load.of("y", ACCEPTS, is_news=True)) == []  # older
    known = x.node.membership.report("y")
    assert known is not None
    assert known.age_s == 30.0


def test_this_nodes_load_goes_to_all_unless_there_is_a_broker() -> None:
    x = given("y")
    x.when(events.BusChanged(connected=False))
    x.node.state.actions = []
    x.node.sharing.information.announce()
    for _ in range(7):
        assert x.after(1.0).timer("gossip", "loads") == ["load to y", "timer loads 1"]
    assert x.after(1.0).timer("gossip", "loads") == ["load to y"]  # that was often enough
    x.when(events.BusChanged(connected=True))
    assert x.after(1.0).timer("gossip", "loads") == []


def test_a_retained_state_of_a_known_run_is_no_sign_of_life_after_a_restart() -> None:
    """Its node may have died long ago: it would be called alive and dead again at each restart."""
    x = Given(peers=(), started=events.AgentStarted(known=(identity("y"),)))
    x.meet("y", retained=True)
    assert x.node.membership.get("y") is None
    assert "y" in x.node.membership.gossip.anti_entropy.known
    x.meet("y", start=2, retained=True)
    assert state(x, "y") is PeerState.ALIVE


def test_a_retained_state_does_not_bring_back_the_dead() -> None:
    x = given("y")
    says(x, "z", rumour("y", MemberStatus.DEAD))
    x.meet("y", retained=True)
    assert state(x, "y") is PeerState.DEAD
    x.meet("y", start=2, retained=True)
    assert state(x, "y") is PeerState.ALIVE


def test_who_speaks_although_it_is_called_dead_is_told_so() -> None:
    x = given("y")
    says(x, "z", rumour("y", MemberStatus.DEAD))
    assert x.hear("y", messages.ProbeRequest(1, messages.Need(), ACCEPTS))[0] == "Sync to y"
    assert says(x, "y", GossipPing(1, "x")) == ["ack+load+y=dead to y"]
    assert says(x.after(1.0), "y", GossipPing(1, "x"))[0] == "y=dead to y"
    x.hear("y", messages.Sync((rumour("y", refutation=1),)))
    assert state(x, "y") is PeerState.ALIVE


# -- joining, leaving, finding again -----------------------------------------------------------------------------------


def test_a_start_looks_for_the_members_of_the_last_one_and_for_its_seeds() -> None:
    started = events.AgentStarted(known=(identity("y"),), seeds=("far:1",))
    x = Given(peers=(), started=started)
    assert [type(action).__name__ for action in x.last if isinstance(action, actions.Dial | actions.DialAddress)] == [
        "Dial",
        "DialAddress",
    ]
    x.shows_gossip = True
    assert x.after(1.0).timer("gossip", "join") == ["Dial", "DialAddress", "timer join 2"]
    x.meet("y")
    assert x.after(2.0).timer("gossip", "join") == []
    assert x.timer("gossip", "again")[0] == "DialAddress"  # nobody known is there


def test_a_new_link_exchanges_everything_once() -> None:
    x = given()
    assert x.meet("y")[-1:] == ["Sync to y"] or "Sync to y" in x.meet("z")
    assert "Sync to y" not in x.meet("y")
    assert x.hear("y", messages.Sync((rumour("z"),), asks=True))[-1] == "Sync to y"
    told = x.sent(messages.Sync)
    assert [said.node for said in told.rumours][:2] == ["x", "y"]
    assert not told.asks
    assert state(x, "z") is PeerState.ALIVE


def test_everything_is_exchanged_now_and_then() -> None:
    x = given("y")
    done = x.timer("gossip", "sync")
    assert done[0] == "Sync to y"
    assert 27.0 <= float(done[1].removeprefix("timer sync ")) <= 33.0


@pytest.mark.parametrize("back", ["link", "exchange"])
def test_everything_is_exchanged_with_a_member_that_can_be_reached_while_others_are_tried(back: str) -> None:
    x = given("y", "z")
    x.when(events.SendFailed("z", messages.Ping(1)))
    for _ in range(9):
        assert x.after(30.0).timer("gossip", "sync")[:2] == ["Sync to y", "Sync to z"]
    x.when(events.SendFailed("y", messages.Ping(2)))
    x.when(events.SendFailed("z", messages.Sync()))
    assert x.after(30.0).timer("gossip", "sync")[0] in ("Sync to y", "Sync to z")
    if back == "link":
        x.meet("z")
    else:
        x.hear("z", messages.Sync())
    assert x.after(30.0).timer("gossip", "sync")[:2] == ["Sync to z", "Sync to y"]


def test_the_dead_are_looked_for_for_ever() -> None:
    x = given("y")
    says(x, "z", rumour("y", MemberStatus.DEAD))
    for _ in range(50):
        done = x.after(60.0).timer("gossip", "again")
        assert done[:3] == ["Dial", "y=dead to y", "Sync to y"]
        assert 15.0 <= float(done[3].removeprefix("timer again ")) <= 45.0


def test_a_node_that_has_lost_all_others_looks_for_them_soon() -> None:
    """They were called dead one after the other: what was set at the first, one of fifty, is not what is waited for."""
    names = [f"z{number}" for number in range(50)]
    x = given("y", *names)
    due_s = [
        float(shape.removeprefix("timer again "))
        for name in (*names, "y")
        for shape in says(x, "y", rumour(name, MemberStatus.DEAD))
        if shape.startswith("timer again ")
    ]
    assert due_s == sorted(due_s, reverse=True)
    assert due_s[0] > 15.0 * 51
    assert 15.0 <= due_s[-1] <= 45.0
    assert "Dial" in x.after(due_s[-1]).timer("gossip", "again")


def test_members_of_members_are_contacts() -> None:
    x = given()
    y = Profile("y", 1, 1.0, slots_fixed=True)
    x.when(events.PeerMet(identity("y"), y, LoadReport(), (identity("x"), identity("y"), identity("z"))))
    assert list(x.node.membership.gossip.anti_entropy.known) == ["z"]
    assert not x.node.membership.meet(identity("x"), y, None)


def test_stopping_says_good_bye() -> None:
    x = given("y", "z")
    done = x.when(events.AgentStopping())
    assert done[:2] == ["Leaving to y", "Leaving to z"]
    assert sorted(done[2:]) == ["x=left to y", "x=left to z"]
    assert says(x, "y", rumour("x", MemberStatus.SUSPECT)) == []  # it does not matter any more


def test_good_bye_is_said_over_the_links_too_where_no_datagrams_arrive() -> None:
    names = [f"y{number}" for number in range(9)]
    done = given(*names).when(events.AgentStopping())
    assert {f"Leaving to {name}" for name in names} < set(done)


def test_who_left_is_not_probed_nor_looked_for_and_is_forgotten_after_a_day() -> None:
    x = given("y", "z")
    x.hear("y", messages.Leaving())
    assert state(x, "y") is PeerState.LEFT
    assert not any("y" in shape.split(" to ")[-1:] for _ in range(4) for shape in x.timer("gossip", "turn"))
    assert x.timer("gossip", "again") == []
    x.after(86_401.0).timer("gossip", "sync")
    assert x.node.membership.get("y") is None
    assert says(x, "z", rumour("y", MemberStatus.LEFT, age_s=90_000.0)) == []
    assert x.node.membership.get("y") is None


@pytest.mark.parametrize("claim", [CLAIM_MAX, CLAIM_MAX + 1, OUTDO_MAX, OUTDO_MAX + 1, 1 << 62])
@pytest.mark.parametrize("what", ["incarnation", "refutation"])
def test_whatever_is_claimed_of_a_node_it_can_be_heard_again(what: str, claim: int) -> None:
    """z lies to both x and y about x; x hears what is believed of it, and its answer is believed at y."""
    lie = msgspec.structs.replace(rumour("x", MemberStatus.DEAD), **{what: claim})
    x = given("y", "z")
    y = Given(node="y", peers=("x", "z"), config=CoreConfig(gossip=CALM))
    says(x, "z", lie)
    says(y, "z", lie)
    believed = y.node.membership.gossip.shared.members["x"].rumour
    says(x.after(100.0), "y", believed)
    own = x.node.membership.gossip.own
    assert wire.decode_datagram(wire.encode_datagram([own])).messages == (own,)
    says(y, "x", own)
    assert state(y, "x") is PeerState.ALIVE
    says(y, "z", lie)
    assert state(y, "x") is PeerState.ALIVE


def test_a_number_that_a_node_has_said_itself_is_believed_of_others_too() -> None:
    x = given("y", "z")
    beyond = rumour("y", refutation=CLAIM_MAX + 7)
    says(x, "z", beyond)
    assert x.node.membership.gossip.shared.members["y"].rumour.refutation == 0
    says(x, "y", beyond)
    says(x, "z", msgspec.structs.replace(beyond, standing=MemberStatus.SUSPECT, by=("z",)))
    assert state(x, "y") is PeerState.SUSPECT


def test_forgetting_is_for_the_gone_and_for_all() -> None:
    x = given("y", "z")
    assert not x.node.membership.forget("nobody")
    assert not x.node.membership.forget("y")
    says(x, "z", rumour("y", MemberStatus.DEAD))
    x.node.state.actions = []
    assert x.node.membership.forget("y")
    assert actions.ForgetPeer("y") in x.node.state.actions
    assert x.node.membership.get("y") is None
    assert x.timer("gossip", "spread")[0] == "y=forgotten to z"
    says(x, "z", rumour("y", MemberStatus.DEAD))  # a late word
    assert x.node.membership.get("y") is None
    x.meet("y", start=2)  # it was not gone after all
    assert state(x, "y") is PeerState.ALIVE


DAY_S = 86_400.0


def told_late(x: Given, standing: MemberStatus, age_s: float) -> None:
    """A machine that was asleep says what it knew of y before."""
    x.hear("z", messages.Sync((rumour("y", standing, age_s=age_s),)))


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("has_left", [False, True])
def test_late_news_brings_nobody_back_who_is_gone(*, has_left: bool, restarts: bool) -> None:
    x = Given(peers=("y", "z"))
    if has_left:
        x.hear("y", messages.Leaving())
    else:
        x.rumour("y", MemberStatus.DEAD)
        x.when(events.ForgetRequested(77, "y"))
    x.after(1.5 * DAY_S).timer("gossip", "sync")
    if restarts:
        (gone,) = (one.rumour for one in x.node.membership.gossip.shared.members.values() if one.is_gone)
        x = Given(peers=("z",), started=events.AgentStarted(gone=(msgspec.structs.replace(gone, age_s=1.5 * DAY_S),)))
        assert not [note for note in x.notes if note.state == "forgotten"]
    for days in (0.0, 20.0, 8.0):
        x.after(days * DAY_S).timer("gossip", "sync")
        for standing in (MemberStatus.ALIVE, MemberStatus.DEAD):
            told_late(x, standing, 40 * DAY_S)
            assert x.node.membership.get("y") is None, (days, standing)
    x.meet("y", start=2)
    assert state(x, "y") is PeerState.ALIVE


def test_what_is_remembered_of_those_that_left_is_no_news_after_a_restart() -> None:
    gone = tuple(rumour(node, MemberStatus.LEFT, age_s=age_s) for node, age_s in (("y", 60.0), ("z", 1.5 * DAY_S)))
    x = Given(peers=(), started=events.AgentStarted(gone=gone))
    assert not [note for note in x.notes if note.node in ("y", "z")]
    y = x.node.membership.get("y")
    assert y is not None
    assert (y.state, x.at_s - y.heard_s) == (PeerState.LEFT, 60.0)
    assert x.node.membership.get("z") is None  # it is listed no more, and does not come back
    told_late(x, MemberStatus.ALIVE, 0.0)
    assert state(x, "y") is PeerState.LEFT


@pytest.mark.parametrize("standing", [MemberStatus.DEAD, MemberStatus.LEFT])
@pytest.mark.parametrize(("age_s", "is_news"), [(60.0, True), (2 * 3600.0, False)])
def test_a_node_that_was_lost_long_ago_is_no_news_to_a_new_member(
    standing: MemberStatus, age_s: float, *, is_news: bool
) -> None:
    x = Given(peers=("z",))
    told_late(x, standing, age_s)
    y = x.node.membership.get("y")
    assert y is not None
    assert x.at_s - y.heard_s == age_s
    assert bool([note for note in x.notes if note.node == "y"]) is is_news


def test_a_tombstone_goes_in_the_end_and_news_that_is_older_is_none() -> None:
    x = Given(peers=("y", "z"))
    x.hear("y", messages.Leaving())
    x.after(1.5 * DAY_S).timer("gossip", "sync")
    assert "y" in x.node.membership.gossip.shared.members
    x.after(29 * DAY_S).timer("gossip", "sync")
    assert "y" not in x.node.membership.gossip.shared.members
    told_late(x, MemberStatus.DEAD, 31 * DAY_S)
    assert x.node.membership.get("y") is None
    told_late(x, MemberStatus.DEAD, 29 * DAY_S)  # the members of a cluster know those that it misses
    assert state(x, "y") is PeerState.DEAD


def test_a_machine_whose_disk_was_replaced_comes_back_after_it_was_forgotten() -> None:
    x = Given(peers=("z",))
    says(x, "z", rumour("y", MemberStatus.FORGOTTEN, start=7))
    new = Identity("y", "new", "machine", "another-store", 1, "y:1")
    x.when(events.PeerMet(new, Profile("y", 1, 1.0), LoadReport()))
    x.hear("y", messages.Sync((), asks=True))
    told = {one.node: one for one in x.sent(messages.Sync).rumours}
    assert told["y"].standing is MemberStatus.FORGOTTEN  # so that it counts on from there
    x.hear("y", messages.Sync((rumour("y", start=8, boot="new"),)))
    assert state(x, "y") is PeerState.ALIVE


def test_a_member_of_an_earlier_start_can_be_forgotten() -> None:
    x = given("z")
    x.node.membership.start([identity("y")], [], [])
    assert x.node.membership.get("y") is None
    assert x.node.membership.forget("y")
    assert not x.node.membership.gossip.anti_entropy.known
    assert "y=forgotten to z" in x.timer("gossip", "spread")
    assert not x.node.membership.forget("y")
    says(x, "z", rumour("y", MemberStatus.DEAD))  # z has known it, too
    assert x.node.membership.get("y") is None


@pytest.mark.parametrize("is_of_earlier_start", [False, True])
def test_who_heard_later_of_a_forgotten_run_does_not_bring_it_back(*, is_of_earlier_start: bool) -> None:
    """A machine that was cut off together with it, or any after a restart of this agent, which keeps no refutation numbers."""
    x = given("z")
    if is_of_earlier_start:
        x.node.membership.start([identity("y")], [], [])
    else:
        says(x, "z", rumour("y", MemberStatus.DEAD, 3))
    assert x.node.membership.forget("y")
    tombstone = x.node.membership.gossip.shared.members["y"].rumour
    for standing in (MemberStatus.ALIVE, MemberStatus.DEAD):
        says(x, "z", rumour("y", standing, 9))
        assert x.node.membership.get("y") is None
    y = Given(node="y", peers=("x",))
    says(y, "x", tombstone)  # it is not gone after all
    objection = y.node.membership.gossip.own
    assert objection.is_credible(None)
    says(x, "z", objection)
    assert state(x, "y") is PeerState.ALIVE


def test_a_full_table_drops_whoever_was_lost_longest() -> None:
    x = Given(peers=("a", "b"), config=CoreConfig(peers_max=2))
    assert x.rumour("c", MemberStatus.ALIVE) == []
    assert x.node.membership.get("c") is None
    x.rumour("b", MemberStatus.DEAD)
    x.rumour("c", MemberStatus.ALIVE)
    assert x.node.membership.get("c") is not None
    assert x.node.membership.get("b") is None


def test_names_of_the_forgotten_keep_nobody_out() -> None:
    x = Given(peers=("y",), config=CoreConfig(peers_max=10))
    for number in range(40):
        x.rumour(f"old{number:02}", MemberStatus.FORGOTTEN)
    members = x.node.membership.gossip.shared.members
    assert len(members) == 20
    assert "old18" in members  # the first that came: further ones are not kept
    for number in range(12):
        x.after(1.0).meet(f"new{number:02}")
    assert state(x, "new08") is PeerState.ALIVE
    assert x.node.membership.get("new09") is None  # as ten peers are all
    assert len(members) == 20
    assert "old00" not in members  # the longest known have made room
    assert "old18" in members
    assert x.node.state.counts[metrics.MEMBERS_REFUSED] == 24


def test_whoever_comes_and_goes_has_one_turn_a_round() -> None:
    x = given("y", "z")
    order = x.node.membership.gossip.detector._order
    for number in range(1, 101):
        says(x, "z", rumour("q", MemberStatus.ALIVE, number))
        says(x, "z", rumour("q", MemberStatus.DEAD, number))
        says(x, "z", rumour(f"q{number}"))
        says(x, "z", rumour(f"q{number}", MemberStatus.LEFT))
    assert set(order) <= {"y", "z"}
    says(x, "z", rumour("q", MemberStatus.ALIVE, 101))
    assert order.count("q") == 1


@pytest.mark.rule("P6")
def test_a_datagram_of_other_versions_only_is_not_looked_at() -> None:
    x = given("y")
    assert x.when(events.GossipReceived("y", "y-boot-1", (GossipPing(1, "x"),), "", 2, 3)) == []
    assert x.when(events.GossipReceived("x", "other", (GossipPing(1, "x"),))) == []
    assert x.node.state.counts[metrics.GOSSIP_OTHER_VERSION] == 1


def test_a_peer_with_another_database_is_met_although_it_counts_from_one_again() -> None:
    x = given()
    x.meet("y", start=5)
    new = Identity("y", "y-new", "m", "another-store", 1, "y:1")
    x.when(events.PeerMet(new, Profile("y", 1, 1.0), LoadReport()))
    y = x.node.membership.get("y")
    assert y is not None
    assert y.identity == new


def test_a_submission_and_gossip_do_not_meet() -> None:
    x = given("y")
    says(x, "z", rumour("y", MemberStatus.DEAD))
    assert "ProbeRequest to y" not in [*x.submit(spec()), *x.submit(spec())]


def rows(x: Given) -> list[actions.Row]:
    return [row for action in x.last if isinstance(action, actions.Persist) for row in action.rows]


def test_a_run_that_outdoes_a_later_one_comes_back_as_a_still_later_one() -> None:
    x = given("y")
    says(x, "y", rumour("x", MemberStatus.ALIVE, 0, 5))  # y was told by a run whose database was put back since
    (kept,) = rows(x)
    assert isinstance(kept, actions.PutRun)
    assert kept.incarnation == x.node.state.identity.incarnation == 6
    says(x, "y", rumour("x", MemberStatus.ALIVE, 0, 5))
    assert rows(x) == []
    x.after(11)
    says(x, "y", rumour("x", MemberStatus.ALIVE, 0, 8))
    (again,) = rows(x)
    assert isinstance(again, actions.PutRun)
    assert (again.incarnation, again.store) == (9, kept.store)


@pytest.mark.parametrize("is_same", [True, False])
def test_who_has_an_older_copy_of_its_database_promises_nothing_in_the_name_of_the_database_that_it_was(
    is_same: bool,
) -> None:
    x = given("y")
    earlier = rumour("x", MemberStatus.ALIVE, 0, 5)
    says(x, "y", earlier if is_same else msgspec.structs.replace(earlier, store="one that was lost"))
    x.hear("y", messages.Query("y/1", bytes(16), 1))
    said = x.sent(messages.NotStarted)
    assert (said.store == "x-store") == (not is_same)
    assert x.node.state.identity.store == "x-store"  # links of this run are those of one database
