"""Sites: machines behind gates, and what gates do to packets.

Each site is a subnet of its own, its gate a router in a namespace; gates meet on one wide network, where also machines
may be that have no gate. What a gate does (address translation, a firewall, a cut, a small MTU with or without the word
that says so) is nft's and the kernel's; loss and delay between machines are those of `Network`, whose relay takes
packets from machine to machine past the gates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos_real.network import NAMESPACES, Network, command

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

WIDE = "wide"
"""The site without a gate: its machines are on the wide network themselves."""
ALL_KINDS = "46"
_SETTINGS = ("net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0")
_NO_IPV6 = "net.ipv6.conf.all.disable_ipv6=1"
_AT_ONCE = ("net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0")
"""Every address is good as soon as it is there, also those that interfaces give themselves: else a gate asks nobody for its
neighbours until it has made sure, for seconds, that no other has its own."""
_FORWARDING = ("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
_NEW = "ct state new,invalid"
_OUT, _IN = 'oifname "wide0"', 'iifname "wide0"'
"""What passes the gate; what stays within the site may be seen by its filter as well."""


class Sites(Network):
    """``sites``: name → its machines; ``kinds``: machine → "4", "6" or "46", which addresses it has (default: IPv4 alone).
    Every machine reaches every other that has one of the same kind, until a gate is told otherwise."""

    def __init__(self, sites: Mapping[str, Sequence[str]], kinds: Mapping[str, str] | None = None) -> None:
        super().__init__([member for members in sites.values() for member in members])
        self.sites = {site: list(members) for site, members in sites.items()}
        self._numbers = {site: number for number, site in enumerate(self.gated, 1)}
        self._places = {member: site for site, members in self.sites.items() for member in members}
        self._kinds = dict.fromkeys(self.members, "4") | dict(kinds or {})
        self._six: dict[str, str] = {}
        for site, members in self.sites.items():
            start = f"10.88.{self._numbers[site]}." if site != WIDE else "172.31.0.1"
            self._addresses |= {member: f"{start}{number}" for number, member in enumerate(members, 1)}
            self._six |= {member: f"{self._net_six(site)}::{number}" for number, member in enumerate(members, 1)}
        self._rules: dict[str, dict[str, list[str]]] = {site: {} for site in self.gated}
        self._own = dict.fromkeys(self.gated, "")
        self._translates: set[str] = set()
        self._moves = 0

    @property
    def gated(self) -> list[str]:
        """The sites that have a gate."""
        return [site for site in self.sites if site != WIDE]

    def _net_six(self, site: str) -> str:
        """The first half of the site's unique local addresses."""
        return f"fd88:0:0:{self._numbers.get(site, 0)}"

    def address(self, member: str) -> str:
        """Where the others reach it: by IPv6, if it has that."""
        return self._six[member] if "6" in self._kinds[member] else self._addresses[member]

    def site_of(self, member: str) -> str:
        """Where a machine is."""
        return self._places[member]

    def gate_address(self, site: str) -> str:
        """The gate's own address on the wide network: what others see of those behind it that it translates."""
        return f"172.31.0.{100 + self._numbers[site]}"

    def _gate(self, site: str) -> str:
        return self.namespace(f"gate-{site}")

    def _names(self) -> list[str]:
        return [*map(self.namespace, (*self.members, "hub")), *map(self._gate, self.gated)]

    def _build(self) -> None:
        hub = self.namespace("hub")
        for name in self._names():
            command("ip", "netns", "add", name)
            more = _AT_ONCE if self._has_six else (_NO_IPV6,)
            command("ip", "netns", "exec", name, "sysctl", "-q", "-w", *_SETTINGS, *more)
            command("ip", "-n", name, "link", "set", "lo", "up")
        self._batch(hub, "link add wire type bridge", "link set wire up")
        for site in self.gated:
            gate, number = self._gate(site), self._numbers[site]
            self._plug(hub, "wire", f"gate{number}", gate, "wide0")
            self._batch(
                gate,
                f"address add {self.gate_address(site)}/24 dev wide0",
                "link add lan type bridge",
                f"address add 10.88.{number}.254/24 dev lan",
                "link set lan up",
            )
            if self._has_six:
                wide, lan = f"{self._net_six(WIDE)}::{100 + number}", f"{self._net_six(site)}::fe"
                self._batch(
                    gate, *(f"address add {ip}/64 dev {at} nodad" for ip, at in ((wide, "wide0"), (lan, "lan")))
                )
            command(
                "ip", "netns", "exec", gate, "sysctl", "-q", "-w", *(_FORWARDING if self._has_six else _FORWARDING[:1])
            )
        for site in self.gated:
            others = [other for other in self.gated if other != site]
            self._batch(self._gate(site), *self._routes(others, ALL_KINDS if self._has_six else "4"))
        for number, member in enumerate(self.members):
            self._connect(member, number)

    @property
    def _has_six(self) -> bool:
        return any("6" in kinds for kinds in self._kinds.values())

    def _routes(self, sites: Iterable[str], kinds: str) -> list[str]:
        """Of the wide network's machines and gates to these sites."""
        four = [f"route add 10.88.{self._numbers[to]}.0/24 via {self.gate_address(to)}" for to in sites]
        gates = {to: f"{self._net_six(WIDE)}::{100 + self._numbers[to]}" for to in sites}
        six = [f"route add {self._net_six(to)}::/64 via {gate}" for to, gate in gates.items()]
        return (four if "4" in kinds else []) + (six if "6" in kinds else [])

    def _way_out(self, site: str, kinds: str, verb: str) -> list[str]:
        """Of a site's own machines."""
        gates = {"4": f"10.88.{self._numbers[site]}.254", "6": f"{self._net_six(site)}::fe"}
        return [f"route {verb} default via {gates[kind]}" for kind in kinds]

    def _connect(self, member: str, number: int) -> None:
        """Put a machine where it belongs."""
        site, name, kinds = self._places[member], self.namespace(member), self._kinds[member]
        if site == WIDE:
            self._plug(self.namespace("hub"), "wire", f"host{number}", name, "eth0")
            routes = self._routes(self.gated, kinds)
        else:
            self._plug(self._gate(site), "lan", f"host{number}", name, "eth0")
            routes = self._way_out(site, kinds, "add")
        own = {"4": f"{self._addresses[member]}/24 dev eth0", "6": f"{self._six[member]}/64 dev eth0 nodad"}
        self._batch(
            name,
            *(f"address add {own[kind]}" for kind in kinds),
            *routes,
            "tuntap add relay mode tun",
            "link set relay up",
        )

    def _plug(self, where: str, bridge: str, port: str, name: str, device: str) -> None:
        self._batch(
            where,
            f"link add {port} type veth peer name {device} netns {name}",
            f"link set {port} master {bridge}",
            f"link set {port} up",
        )
        command("ip", "-n", name, "link", "set", device, "up")

    @staticmethod
    def _batch(name: str, *lines: str) -> None:
        command("ip", "-n", name, "-batch", "-", text="\n".join(lines) + "\n")

    def close(self) -> None:
        """Remove all of it."""
        self._stop_relay()
        for name in self._names():
            if (NAMESPACES / name).exists():
                command("ip", "netns", "del", name)

    # -- gates ---------------------------------------------------------------------------------------------------------

    def masquerade(self, site: str) -> None:
        """From now on this site is behind address translation: it reaches everybody, and nobody from outside gets in."""
        self._translates.add(site)
        self.only_out(site)

    def only_out(self, site: str) -> None:
        """A firewall that lets through what was begun from within, and answers to that."""
        self._set(site, "only out", [f'iifname "wide0" {_NEW} drop'])

    def forward(self, site: str, member: str, port: int) -> None:
        """Let this port of the gate lead to a machine behind it."""
        self._own[site] += "".join(
            f'iifname "wide0" {kind} dport {port} dnat to {self.address(member)}:{port}\n' for kind in ("tcp", "udp")
        )
        self._set(site, "only out", [f'iifname "wide0" ct status dnat accept\niifname "wide0" {_NEW} drop'])

    def cut(self, site: str) -> None:
        """Nothing passes this gate any more, and nobody is told."""
        self._set(site, "cut", [f"{_OUT} drop", f"{_IN} drop"])

    def half_cut(self, site: str) -> None:
        """What leaves the site is lost, what enters it is not."""
        self._set(site, "cut", [f"{_OUT} drop"])

    def heal_cut(self, site: str) -> None:
        """End both."""
        self._set(site, "cut", [])

    def no_datagrams(self, site: str) -> None:
        """UDP does not pass."""
        self._set(site, "udp", [f"{way} meta l4proto udp drop" for way in (_OUT, _IN)])

    def no_port(self, site: str, port: int) -> None:
        """Nobody inside reaches this TCP port outside."""
        self._set(site, f"port {port}", [f"{_OUT} tcp dport {port} drop"])

    def mtu(self, site: str, size: int, *, is_told: bool) -> None:
        """Larger packets do not fit through; ``is_told``: whether their sender hears of that."""
        command("ip", "-n", self._gate(site), "link", "set", "wide0", "mtu", str(size))
        command("ip", "-n", self.namespace("hub"), "link", "set", f"gate{self._numbers[site]}", "mtu", str(size))
        if not is_told:
            text = (
                "table ip mute {\nchain said {\ntype filter hook output priority 0;\n"
                "icmp type destination-unreachable drop\n}\n}\n"
            )
            command("ip", "netns", "exec", self._gate(site), "nft", "-f", "-", text=text)

    def _set(self, site: str, what: str, rules: list[str]) -> None:
        self._rules[site][what] = rules
        # a cut comes before all that is let through
        lines = [rule for _, group in sorted(self._rules[site].items()) for rule in group]
        source = f"10.88.{self._numbers[site]}.0/24"
        masked = f'ip saddr {source} oifname "wide0" masquerade' if site in self._translates else ""
        chains = (
            ("inet", "through", "filter hook forward priority 0", "\n".join(lines)),
            ("ip", "names", "nat hook postrouting priority srcnat", masked),
            ("ip", "ports", "nat hook prerouting priority dstnat", self._own[site]),
        )
        text = "".join(f"table {kind} gate\ndelete table {kind} gate\n" for kind in ("inet", "ip"))
        text += "".join(
            f"table {kind} gate {{\nchain {name} {{\ntype {hook};\n{rules}\n}}\n}}\n"
            for kind, name, hook, rules in chains
        )
        command("ip", "netns", "exec", self._gate(site), "nft", "-f", "-", text=text)

    # -- machines ------------------------------------------------------------------------------------------------------

    def renumber(self, member: str) -> str:
        """Give a machine another address of its subnet (of IPv6, if it has that), and take the old one → the new one."""
        self._moves += 1
        old, is_six = self.address(member), "6" in self._kinds[member]
        mark, size, known = (":", "64", self._six) if is_six else (".", "24", self._addresses)
        new = f"{old.rpartition(mark)[0]}{mark}{200 + self._moves}"
        name, site = self.namespace(member), self._places[member]
        nodad = " nodad" if is_six else ""
        self._batch(name, f"address del {old}/{size} dev eth0", f"address add {new}/{size} dev eth0{nodad}")
        if site != WIDE:
            self._batch(name, *self._way_out(site, self._kinds[member], "replace"))
        known[member] = new
        return new

    def between(self, ours: Iterable[str], theirs: Iterable[str]) -> list[tuple[str, str]]:
        """The links from each of these to each of those, and back."""
        pairs = [(one, other) for one in ours for other in theirs]
        return [*pairs, *((other, one) for one, other in pairs)]
