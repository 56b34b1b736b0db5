"""The scenarios: what is wrong with the network, and what must work all the same."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos_real.network import Trouble
from tests.net.ground import PORT, SETTINGS, Ground
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROUNDS_MAX = 5
HEALED_S_MAX = 90.0
"""After a cut has healed all believe all to be alive again within this (docs/network.md). Most often links that have outlived
the cut do that at once; where none has, whoever lost at least half of all tries one of them within 1.5 times `reconnect_s` by
that share."""
LEASES_HOLD_S = 30.0
"""A cut that was over by then has cost no task its lease of 60 s, which is renewed long before its end."""
TWO_SITES = {"east": ["e1", "e2"], "west": ["w1", "w2"]}


class Outcome(NamedTuple):
    """hosts: how many machines; tasks: how many were submitted, and how many ran at another site; heal_s: until all agreed
    again after the cut, None: there was none."""

    hosts: int
    tasks: int
    across: int
    heal_s: float | None


class Scenario(NamedTuple):
    """``play`` holds it, given the program of a broker; raises AssertionError."""

    name: str
    play: Callable[[Path | None], Outcome]


def share(ground: Ground, *homes: str, count: int = 6) -> None:
    """More tasks at these homes than they have slots, so that others take some."""
    for home in homes:
        ground.submit(home, count)
    ground.await_ended()
    ground.check()


def crossed(ground: Ground) -> None:
    """Some ran at another site than their home's. A site that is soon done with its own may do without, so it gets more."""
    for _ in range(ROUNDS_MAX):
        if ground.across():
            return
        share(ground, *{task.home for task in ground.submitted}, count=12)
    assert ground.across(), ground.moved()


def went(ground: Ground, home: str, *sites: str) -> None:
    """Some of this machine's tasks ran at one of these sites; it gets more until they have."""
    site = ground.network.site_of(home)
    for _ in range(ROUNDS_MAX):
        if any(ground.moved()[site, other] for other in sites):
            return
        share(ground, home, count=12)
    assert any(ground.moved()[site, other] for other in sites), ground.moved()


def check_after(ground: Ground, away_s: float) -> None:
    """Every task has ended as it was to; what was away for longer than its lease may have been started again."""
    ground.await_ended()
    ground.check(runs_max=1 if away_s < LEASES_HOLD_S else 2)


def there_and_back(ground: Ground, one: str, other: str) -> None:
    """`run`, with its input, and forwarded `logs -f`, both ways."""
    for member, node in ((one, other), (other, one)):
        ground.run_there(member, node)
        ground.watched(member, node)
    ground.await_ended()


def lose_and_heal(ground: Ground, site: str, outside: str) -> float:
    """Cut a site off with tasks on their way until it is missed, then heal → seconds until all agree."""
    inside = [member for member in ground.network.sites[site] if member in ground.machines]
    before = len(ground.submitted)
    for home, elsewhere in ((outside, inside[0]), (inside[0], outside)):
        ground.submit(home, 3, work_s=2.0)
        ground.submit(home, 1, work_s=2.0, node=elsewhere)
    ground.await_started(before + 4)
    cut_at = time.monotonic()
    ground.network.cut(site)
    ground.await_lost(outside, inside)
    ground.network.heal_cut(site)
    heal_s = ground.await_agreement(HEALED_S_MAX)
    check_after(ground, time.monotonic() - cut_at)
    return heal_s


def outcome(ground: Ground, heal_s: float | None = None) -> Outcome:
    """What is told of it at the end."""
    crossed(ground)
    return Outcome(len(ground.machines), len(ground.submitted), ground.across(), heal_s)


# -- the scenarios -------------------------------------------------------------------------------------------------------


def plain(_: Path | None) -> Outcome:
    """Two subnets and two routers between them, nothing wrong."""
    with Ground({"east": ["e1", "e2", "e3"], "west": ["w1", "w2"]}) as ground:
        ground.all_join("e1")
        share(ground, "e1", "w1")
        there_and_back(ground, "e1", "w1")
        crossed(ground)
        return outcome(ground, lose_and_heal(ground, "west", "e1"))


def one_way(_: Path | None) -> Outcome:
    """A firewall lets through only what is begun inside: west dials east, east cannot dial west."""
    with Ground(TWO_SITES) as ground:
        ground.network.only_out("west")
        ground.all_join("e1")
        share(ground, "e1", "w1")
        there_and_back(ground, "e1", "w1")
        went(ground, "e1", "west")
        return outcome(ground, lose_and_heal(ground, "west", "e1"))


def translated(_: Path | None) -> Outcome:
    """Address translation in front of one site."""
    with Ground(TWO_SITES) as ground:
        ground.network.masquerade("west")
        ground.all_join("e1")
        share(ground, "e1", "w1")
        there_and_back(ground, "e1", "w1")
        went(ground, "e1", "west")
        return outcome(ground, lose_and_heal(ground, "west", "e1"))


def small_packets(_: Path | None) -> Outcome:
    """A tunnel of 1280 bytes between the sites, and nobody says so: what is larger vanishes."""
    with Ground(TWO_SITES) as ground:
        ground.network.mtu("west", 1280, is_told=False)
        ground.all_join("e1")
        share(ground, "e1", "w1")
        there_and_back(ground, "e1", "w1")
        for home, node in (("e1", "w1"), ("w1", "e1")):  # far more than one packet, each way
            done = ground.typed(home, ["run", "--node", node, "-d", "/", "head", "-c", "3000000", "/dev/zero"])
            assert (done.returncode, len(done.stdout)) == (0, 3_000_000), done.stderr
        heal_s = lose_and_heal(ground, "west", "e1")
        counters = ground.machines["e1"].counters()
        assert counters["gossip_datagrams_received_total"], counters
        return outcome(ground, heal_s)


def far(_: Path | None) -> Outcome:
    """100 ms each way, and 5 % of all packets are lost."""
    with Ground(TWO_SITES, settings='gossip = "wan"\n') as ground:
        links = ground.network.between(TWO_SITES["east"], TWO_SITES["west"])
        ground.network.trouble(links, Trouble(delay_s=0.1))
        ground.network.lose(links, 5)
        ground.all_join("e1")
        share(ground, "e1", count=16)
        share(ground, "w1", count=4)
        there_and_back(ground, "e1", "w1")
        crossed(ground)
        ground.submit("e1", 4, work_s=2.0)
        ground.submit("e1", 1, work_s=2.0, node="w1")
        ground.await_started(len(ground.submitted) - 1)
        cut_at = time.monotonic()
        ground.network.lose(links, 100)
        ground.await_lost("e1", TWO_SITES["west"], 60.0)
        ground.network.lose(links, 5)
        heal_s = ground.await_agreement(HEALED_S_MAX)
        check_after(ground, time.monotonic() - cut_at)
        return outcome(ground, heal_s)


def moved(_: Path | None) -> Outcome:
    """A machine gets another address while it runs a task of another, and while one of its own runs there."""
    with Ground(TWO_SITES) as ground:
        ground.all_join("e1")
        share(ground, "e1")
        ground.submit("e1", 1, work_s=12.0, node="w1")
        ground.submit("w1", 1, work_s=12.0, node="e1")
        ground.await_started(len(ground.submitted))
        new = ground.network.renumber("w1")
        heal_s = ground.await_moved("w1", f"{new}:{PORT}", HEALED_S_MAX)
        ground.await_ended()
        ground.check()
        there_and_back(ground, "e1", "w1")
        ground.machines["w1"].done("down")
        new = ground.network.renumber("w1")  # while no agent runs
        ground.machines["w1"].done("up")
        ground.await_moved("w1", f"{new}:{PORT}", HEALED_S_MAX)
        share(ground, "w1")
        return outcome(ground, heal_s)


def one_sided_broker(mosquitto: Path | None) -> Outcome:
    """A broker that only one site reaches."""
    sites = {"east": ["e1", "e2", "b1"], "west": ["w1", "w2"]}
    with Ground(sites, ["b1"], mosquitto) as ground:
        ground.network.no_port("west", 1883)
        for machine in ground.machines.values():
            machine.configure(f'{SETTINGS}mqtt = ["{ground.brokers["b1"].url}"]\n')
        ground.all_join("e1")
        wait_until(lambda: ground.uses_broker("e1") and ground.uses_broker("e2"), 30.0, "east to use it")
        share(ground, "e1", "w1")
        there_and_back(ground, "e1", "w1")
        crossed(ground)
        assert not ground.uses_broker("w1")
        return outcome(ground, lose_and_heal(ground, "west", "e1"))


def two_brokers(mosquitto: Path | None) -> Outcome:
    """Each site has a broker of its own, and no bridge joins them."""
    sites = {"east": ["e1", "e2", "b1"], "west": ["w1", "w2", "b2"]}
    with Ground(sites, ["b1", "b2"], mosquitto) as ground:
        ground.network.no_port("west", 1883)
        ground.network.no_port("east", 1883)
        for member, machine in ground.machines.items():
            url = ground.brokers["b1" if member.startswith("e") else "b2"].url
            machine.configure(f'{SETTINGS}mqtt = ["{url}"]\n')
        ground.all_join("e1")
        wait_until(lambda: all(map(ground.uses_broker, ground.machines)), 30.0, "each site to use its own")
        share(ground, "e1", "w1")
        there_and_back(ground, "e1", "w1")
        crossed(ground)
        heal_s = lose_and_heal(ground, "west", "e1")
        ground.brokers["b2"].kill()
        share(ground, "w1")
        return outcome(ground, heal_s)


def no_datagrams(_: Path | None) -> Outcome:
    """UDP does not pass between the sites."""
    with Ground(TWO_SITES) as ground:
        ground.network.no_datagrams("west")
        ground.all_join("e1")
        share(ground, "e1", "w1")
        there_and_back(ground, "e1", "w1")
        crossed(ground)
        ground.stay_alive(12.0)
        return outcome(ground, lose_and_heal(ground, "west", "e1"))


def half_open(_: Path | None) -> Outcome:
    """What leaves one site vanishes, what enters it does not; connections stay half open."""
    with Ground(TWO_SITES) as ground:
        ground.all_join("e1")
        ground.submit("e1", 2, work_s=2.0, node="w1")
        ground.submit("w1", 2, work_s=2.0, node="e1")
        ground.await_started(2)
        cut_at = time.monotonic()
        ground.network.half_cut("west")
        ground.await_lost("e1", ["w1", "w2"])
        ground.submit("e1", 4)
        ground.submit("w1", 4)
        wait_until(lambda: ground.ended_at("e1") and ground.ended_at("w1"), 60.0, "both sites to go on by themselves")
        ground.network.heal_cut("west")
        heal_s = ground.await_agreement(HEALED_S_MAX)
        check_after(ground, time.monotonic() - cut_at)
        there_and_back(ground, "e1", "w1")
        return outcome(ground, heal_s)


def two_translated(_: Path | None) -> Outcome:
    """Two sites, each behind address translation of its own, and one machine that both reach."""
    sites = {"wide": ["m1"], "east": ["e1", "e2"], "west": ["w1"]}
    with Ground(sites) as ground:
        ground.network.masquerade("east")
        ground.network.masquerade("west")
        ground.all_join("m1")
        share(ground, "m1", "e1", "w1")
        there_and_back(ground, "m1", "w1")
        there_and_back(ground, "e1", "m1")
        went(ground, "m1", "east", "west")
        moves = ground.moved()
        assert not moves["east", "west"], moves
        assert not moves["west", "east"], moves
        ground.stay_alive(12.0)
        said = ground.typed("e1", ["doctor"]).stdout
        assert "w1" in said, said
        assert "neither can dial the other" in said, said
        return outcome(ground, lose_and_heal(ground, "west", "m1"))


def joining_there(_: Path | None) -> Outcome:
    """The node that lets others in is behind address translation: by a forwarded port it can; a member that does not
    have the CA's key cannot, and says who can."""
    with Ground({"wide": ["m1", "m2"], "west": ["w1", "w2"]}) as ground:
        network = ground.network
        network.masquerade("west")
        ground.found("w1")
        refused = ground.machines["m1"].type("join", ground.machines["w1"].token())
        assert refused.returncode, refused
        assert "does not answer" in refused.stderr, refused
        network.forward("west", "w1", PORT)
        outside = f"{network.gate_address('west')}:{PORT}"
        ground.machines["w1"].done("down")
        ground.machines["w1"].configure(f'{SETTINGS}advertise = "{outside}"\n')
        ground.machines["w1"].done("up")
        ground.join("m1", by="w1")
        ground.join("w2", by="w1")  # within the site, where the gate leads nowhere
        told = ground.machines["m1"].type("invite")
        assert "on w1:  peerload invite" in told.stderr, told
        ground.join("m2", by="w1")
        ground.await_agreement()
        share(ground, "m1", "w2")
        there_and_back(ground, "m1", "w2")
        there_and_back(ground, "m2", "w1")
        return outcome(ground, lose_and_heal(ground, "west", "m1"))


def newer_addresses(mosquitto: Path | None) -> Outcome:
    """Two sites have IPv6 alone, with a broker; one machine outside has IPv4 alone, and one has both and makes the cluster.
    What each has to do with another follows from that: the one with both works with all."""
    sites = {"wide": ["d1", "f1"], "east": ["e1", "e2", "b1"], "west": ["w1"]}
    kinds = dict.fromkeys(("e1", "e2", "b1", "w1"), "6") | {"d1": "46", "f1": "4"}
    with Ground(sites, ["b1"], mosquitto, kinds=kinds) as ground:
        six = ("d1", "e1", "e2", "w1")
        for member in six:
            ground.machines[member].configure(f'{SETTINGS}mqtt = ["{ground.brokers["b1"].url}"]\n')
        ground.found("d1", listen="::")
        ground.join("e1", "e2", "f1", "w1", by="d1")
        ground.await_agreement()
        assert ground.machines["w1"].call("info")["listen"] == f"[{ground.network.address('w1')}]:{PORT}"
        wait_until(lambda: all(map(ground.uses_broker, six)), 30.0, "the broker to be used by IPv6")
        share(ground, "e1", "w1", "f1")
        for one, other in (("e1", "w1"), ("d1", "e1"), ("d1", "f1")):
            there_and_back(ground, one, other)
        crossed(ground)
        assert not [
            task
            for task in ground.submitted
            if {task.home, ground.ended[task.id]["node"]} in ({"f1", node} for node in ("e1", "e2", "w1"))
        ], ground.moved()
        counters = ground.machines["w1"].counters()
        assert counters["gossip_datagrams_received_total"], counters
        said = ground.typed("f1", ["doctor"]).stdout
        assert "neither can dial the other" in said, said
        new = ground.network.renumber("w1")
        ground.await_moved("w1", f"[{new}]:{PORT}", HEALED_S_MAX)
        there_and_back(ground, "e1", "w1")
        return outcome(ground, lose_and_heal(ground, "west", "e1"))


SCENARIOS = (
    Scenario("two subnets", plain),
    Scenario("one-way firewall", one_way),
    Scenario("NAT before a site", translated),
    Scenario("1280 bytes, nobody says so", small_packets),
    Scenario("100 ms and 5 % loss", far),
    Scenario("another address", moved),
    Scenario("broker for one site", one_sided_broker),
    Scenario("a broker each", two_brokers),
    Scenario("no UDP", no_datagrams),
    Scenario("half-open connections", half_open),
    Scenario("two sites behind NAT", two_translated),
    Scenario("issuer behind NAT", joining_there),
    Scenario("IPv6, IPv4 and both", newer_addresses),
)
