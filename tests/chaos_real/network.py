"""Machines on one wire: a network namespace for each, a bridge in one of its own, and what can go wrong between them.

A link is a pair (from, to): every fault has a direction. Loss is nft's, at the receiver, so that the sender learns
nothing; delay, repetition and reordering are done by a relay in user space (`relay.py`), through which only the links
that have such a fault are led. Nothing is seen from outside: names and addresses live in namespaces, whose own names
have this process's id and a random part. What a killed run left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from tests.chaos_real import cgroups

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFIX = "plchaos"
NAMESPACES = Path("/run/netns")
PORT = 7117
COMMAND_S_MAX = 30.0
ALL_PERCENT = 100
_SETTINGS = ("net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0", "net.ipv6.conf.all.disable_ipv6=1")


class Trouble(NamedTuple):
    """What the relay does to the packets of one link: each waits delay_s and up to jitter_s more (which reorders), and
    so many in a hundred are sent twice."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    twice_percent: int = 0


def command(*words: str, text: str = "") -> str:
    """Run a program to its end → what it said. Raises AssertionError with its complaint."""
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{text}\n{done.stderr}"
    return done.stdout


def remove_abandoned() -> None:
    """Remove the namespaces of runs whose process is no more, and what lives on in them."""
    for path in NAMESPACES.glob(f"{PREFIX}-*") if NAMESPACES.is_dir() else ():
        found = re.fullmatch(rf"{PREFIX}-(\d+)-[0-9a-f]+-.*", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            try:
                for pid in command("ip", "netns", "pids", path.name).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                command("ip", "netns", "del", path.name)
            except AssertionError:
                if path.exists():  # else another run has just removed it
                    raise
    cgroups.remove_abandoned(PREFIX)


class Network:
    """Namespaces for ``members``, each with one address; every two can reach each other."""

    def __init__(self, members: Iterable[str]) -> None:
        self.members = list(members)
        self._mark = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
        self._addresses = {member: f"10.77.0.{number}" for number, member in enumerate(self.members, 1)}
        self._lock = threading.Lock()
        self._loss: dict[tuple[str, str], int] = {}
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        remove_abandoned()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def namespace(self, member: str) -> str:
        """The name of a member's network namespace."""
        return f"{self._mark}-{member}"

    def address(self, member: str) -> str:
        """Where the others reach it."""
        return self._addresses[member]

    def _build(self) -> None:
        hub = self.namespace("hub")
        command("ip", "netns", "add", hub)
        command("ip", "-n", hub, "link", "add", "wire", "type", "bridge")
        command("ip", "-n", hub, "link", "set", "wire", "up")
        for number, member in enumerate(self.members):
            name = self.namespace(member)
            command("ip", "netns", "add", name)
            command("ip", "netns", "exec", name, "sysctl", "-q", "-w", *_SETTINGS)
            lines = [
                f"link add port{number} type veth peer name eth0 netns {name}",
                f"link set port{number} master wire",
                f"link set port{number} up",
            ]
            command("ip", "-n", hub, "-batch", "-", text="\n".join(lines))
            lines = [
                "link set lo up",
                f"address add {self.address(member)}/24 dev eth0",
                "link set eth0 up",
                "tuntap add relay mode tun",
                "link set relay up",
            ]
            command("ip", "-n", name, "-batch", "-", text="\n".join(lines))

    def close(self) -> None:
        """Remove all of it."""
        self._stop_relay()
        for name in [self.namespace(member) for member in [*self.members, "hub"]]:
            if (NAMESPACES / name).exists():
                command("ip", "netns", "del", name)

    def _stop_relay(self) -> None:
        if self._relay is not None:
            with self._relay:  # it ends when its stdin does
                pass
            self._relay = None

    # -- faults --------------------------------------------------------------------------------------------------------

    def lose(self, links: Iterable[tuple[str, str]], percent: int) -> None:
        """From now on lose so many in a hundred packets of each of these links: 100 cuts it, 0 heals it."""
        with self._lock:
            changed = set()
            for link in links:
                if percent:
                    self._loss[link] = percent
                else:
                    self._loss.pop(link, None)
                changed.add(link[1])
            for receiver in sorted(changed):
                self._filter(receiver)

    def _filter(self, receiver: str) -> None:
        rules = []
        for (sender, to), percent in sorted(self._loss.items()):
            if to == receiver:
                some = f"numgen random mod 100 < {percent} " if percent < ALL_PERCENT else ""
                rules.append(f"ip saddr {self.address(sender)} {some}drop")
        table = "table ip chaos"
        chain = f"chain incoming {{\ntype filter hook input priority 0;\n{chr(10).join(rules)}\n}}"
        text = f"{table}\ndelete {table}\n{table} {{\n{chain}\n}}\n"
        command("ip", "netns", "exec", self.namespace(receiver), "nft", "-f", "-", text=text)

    def trouble(self, links: Iterable[tuple[str, str]], trouble: Trouble | None) -> None:
        """Lead these links through the relay, which gives them this trouble; None leads them straight again."""
        with self._lock:
            relay = self._relay or self._start_relay()
            for sender, receiver in links:
                there, name = self.address(receiver), self.namespace(sender)
                if trouble is not None:
                    self._tell(relay, [self.address(sender), there, *trouble])
                    own = self.address(sender)
                    command("ip", "-n", name, "route", "replace", f"{there}/32", "dev", "relay", "src", own)
                else:
                    with contextlib.suppress(AssertionError):  # it was never led through it
                        command("ip", "-n", name, "route", "del", f"{there}/32", "dev", "relay")

    def heal(self) -> None:
        """End every fault."""
        everyone = [(one, other) for one in self.members for other in self.members if one != other]
        self.lose(everyone, 0)
        if self._relay is not None:
            self.trouble(everyone, None)

    def _start_relay(self) -> subprocess.Popen[str]:
        program = Path(__file__).with_name("relay.py")
        ends = [f"{self.address(member)}={NAMESPACES / self.namespace(member)}" for member in self.members]
        self._relay = subprocess.Popen(
            [sys.executable, "-I", str(program), *ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == "ready\n"
        return self._relay

    @staticmethod
    def _tell(relay: subprocess.Popen[str], line: list[object]) -> None:
        assert relay.stdin is not None
        relay.stdin.write(json.dumps(line) + "\n")
        relay.stdin.flush()
