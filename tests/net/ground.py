"""The ground a scenario is played on: machines of a network, joined by invitations, and the tasks that they share."""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError
from peerload.security.address import join_address
from peerload.security.broker import MOSQUITTO_PLACE, TLS_PORT
from tests.chaos_real.broker import Broker
from tests.chaos_real.machine import spec
from tests.integration.cluster import program
from tests.integration.machines import Lab, Machine
from tests.net.topology import Sites
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

PORT = 7117
SETTINGS = "slots = 2\n"
MEET_S_MAX = 60.0
ENDED_S_MAX = 120.0
TYPED_S_MAX = 120.0
CODES = 3
"""Tasks end with the exit codes 0, 1 and 2, in turn."""


class Submitted(NamedTuple):
    """A task, and what it is to say and to end with."""

    home: str
    id: str
    says: str
    code: int
    is_pinned: bool


class Ground:
    """Use with `with`. ``sites``: as in `Sites`; brokers: machines that have a Mosquitto instead of an agent; ``mosquitto``:
    the program; settings: more lines for the configuration of each; ``kinds``: of addresses, as in `Sites`."""

    def __init__(
        self,
        sites: Mapping[str, Sequence[str]],
        brokers: Sequence[str] = (),
        mosquitto: Path | None = None,
        settings: str = "",
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        self.network = Sites(sites, kinds)
        self._settings = SETTINGS + settings
        self._broker_names = list(brokers)
        self._mosquitto = mosquitto
        self._stack = contextlib.ExitStack()
        self.machines: dict[str, Machine] = {}
        self.brokers: dict[str, Broker] = {}
        self.submitted: list[Submitted] = []
        self.ended: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self.network)
            self.lab = self._stack.enter_context(Lab())
            for member in self.network.members:
                if member not in self._broker_names:
                    self.machines[member] = self.lab.machine(member, self.network.namespace(member))
                    self.machines[member].configure(self._settings)
            for name in self._broker_names:
                assert self._mosquitto is not None
                directory = self.lab.directory / name
                directory.mkdir()
                broker = Broker(self._mosquitto, directory, self.network.namespace(name), self.network.address(name))
                self._stack.callback(broker.kill)
                broker.start()
                self.brokers[name] = broker
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    # -- joining -------------------------------------------------------------------------------------------------------

    def found(self, first: str, *more: str, listen: str = "") -> Machine:
        """This machine makes the cluster. ``listen``: an address other than its own."""
        machine = self.machines[first]
        machine.done("up", *more)
        machine.token("--listen", join_address(listen or self.network.address(first), PORT))
        return machine

    def join(self, *members: str, by: str) -> None:
        """Each is invited by that one, and joins."""
        for member in members:
            self.machines[member].done("join", self.machines[by].token())

    def all_join(self, first: str) -> None:
        """Everybody is in one cluster, and knows everybody."""
        self.found(first)
        self.join(*(member for member in self.machines if member != first), by=first)
        self.await_agreement()

    def alive(self, member: str, state: str = "alive") -> set[str]:
        """Whom a machine takes for alive, itself included; or whom for something else."""
        with contextlib.suppress(PeerloadError):
            nodes = self.machines[member].call("nodes")["nodes"]
            return {node["node"] for node in nodes if node["state"] == state}
        return set()

    def states(self, member: str) -> dict[str, str]:
        """What a machine takes each for."""
        with contextlib.suppress(PeerloadError):
            return {node["node"]: node["state"] for node in self.machines[member].call("nodes")["nodes"]}
        return {}

    def agree(self) -> bool:
        """Whether everybody takes everybody for alive."""
        return all(self.alive(member) == set(self.machines) for member in self.machines)

    def await_agreement(self, within_s: float = MEET_S_MAX) -> float:
        """Return when they do → after how many seconds."""
        started_s = time.monotonic()
        try:
            wait_until(self.agree, within_s, "all to agree")
        except AssertionError as error:
            seen = {member: self.states(member) for member in self.machines}
            raise AssertionError(f"{error}: {seen}") from None
        return time.monotonic() - started_s

    def await_lost(self, member: str, others: Sequence[str], within_s: float = 30.0) -> None:
        """Return when a machine takes all of these for dead."""
        wait_until(lambda: self.alive(member, "dead") >= set(others), within_s, f"{member} to miss {others}")

    def await_moved(self, member: str, address: str, within_s: float) -> float:
        """Return when all take it for alive at that address → after how many seconds."""
        started_s = time.monotonic()

        def told(other: str) -> str:
            with contextlib.suppress(PeerloadError):
                if other == member:
                    return str(self.machines[other].call("info")["listen"])
                peers = self.machines[other].call("checkup")["peers"]
                return next((peer["address"] for peer in peers if peer["node"] == member), "")
            return ""

        wait_until(lambda: all(told(other) == address for other in self.machines), within_s, f"{member} at {address}")
        self.await_agreement(within_s)
        return time.monotonic() - started_s

    def stay_alive(self, seconds: float) -> None:
        """For so long nobody is to take anybody for dead (a suspicion that is refuted may be)."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            dead = {member: self.alive(member, "dead") for member in self.machines}
            assert not any(dead.values()), dead
            threading.Event().wait(0.2)

    def way(self, member: str, other: str) -> str:
        """Who of the two can dial the other, as that machine says."""
        peers = self.machines[member].call("checkup")["peers"]
        return next((str(peer["way"]) for peer in peers if peer["node"] == other), "")

    def uses_broker(self, member: str) -> bool:
        """Whether its agent has one now."""
        broker = self.machines[member].call("checkup")["broker"]
        return bool(broker and broker["url"])

    def secure(self, name: str, issuer: str, *words: str, **replaced: str) -> str:
        """Have a broker serve by TLS from now on, with what `peerload cluster broker-certificate` makes at that machine, given
        these words → its address for nodes. ``replaced``: words of the configuration, and what stands there instead."""
        made = self.lab.directory / f"{name}-{secrets.token_hex(2)}"
        self.machines[issuer].done(
            "cluster", "broker-certificate", str(made), "--host", self.network.address(name), *words
        )
        text = (made / "mosquitto.conf").read_text(encoding="ascii").replace(MOSQUITTO_PLACE, str(made))
        for old, new in replaced.items():
            text = re.sub(rf"^{old} .*$", new, text, flags=re.MULTILINE)
        config = made / "test.conf"
        config.write_text(f"{text}\nuser root\n", encoding="ascii")
        broker = self.brokers[name]
        broker.kill()
        broker.configure(config)
        broker.start()
        return f"mqtts://{join_address(self.network.address(name), TLS_PORT)}"

    # -- tasks ---------------------------------------------------------------------------------------------------------

    @property
    def _ledger(self) -> Path:
        return self.lab.directory / "ledger"

    def submit(self, home: str, count: int, *, work_s: float = 0.5, **placement: object) -> None:
        """So many tasks: each notes its start, works, says its number and where it is, and ends with a code of its own."""
        self._ledger.mkdir(exist_ok=True)
        for _ in range(count):
            number, says = len(self.submitted), secrets.token_hex(4)
            code = number % CODES
            words = f"echo $PEERLOAD_NODE >>{self._ledger}/{number}; sleep {work_s}; echo {says}; exit {code}"
            task = spec(["sh", "-c", words], **({"placement": placement} if placement else {}))
            told = self.machines[home].call("submit", token=secrets.token_hex(16), spec=task)
            self.submitted.append(Submitted(home, told["id"], says, code, bool(placement)))

    def await_started(self, count: int = 1, within_s: float = 30.0) -> None:
        """Return when so many tasks were started in all."""
        wait_until(lambda: len(list(self._ledger.glob("*"))) >= count, within_s, f"{count} tasks to start")

    def await_ended(self, within_s: float = ENDED_S_MAX) -> None:
        """Return when all have."""
        wait_until(lambda: not self._unfinished(), within_s, "all tasks to end")

    def _unfinished(self) -> list[str]:
        for home in {task.home for task in self.submitted if task.id not in self.ended}:
            with contextlib.suppress(PeerloadError):
                for told in self.machines[home].call("tasks")["tasks"]:
                    if told["state"] in {"done", "failed", "cancelled"}:
                        self.ended[told["id"]] = told
        return [task.id for task in self.submitted if task.id not in self.ended]

    def ended_at(self, home: str) -> bool:
        """Whether the tasks of this home that are pinned nowhere have ended."""
        self._unfinished()
        return all(task.id in self.ended for task in self.submitted if task.home == home and not task.is_pinned)

    def check(self, *, runs_max: int = 1) -> None:
        """Every task ended once, as it was to, with its output at home. ``runs_max``: how often one may have been started
        (one that was cut off may be, again, somewhere else)."""
        for number, task in enumerate(self.submitted):
            told = self.ended[task.id]
            assert told["exit_code"] == task.code, (task, told)
            assert self.output(task.home, task.id) == f"{task.says}\n", task
            started = (self._ledger / str(number)).read_text(encoding="ascii").split()
            assert 1 <= len(started) <= runs_max, (task, started)

    def output(self, member: str, task: str) -> str:
        """What a task has said, as that machine tells."""
        with AgentConnection(self.machines[member].socket) as client:
            pieces = list(client.stream("output", task=task))
        return b"".join(piece["data"] for piece in pieces if "data" in piece).decode()

    def moved(self) -> Counter[tuple[str, str]]:
        """(home's site, site it ran at) → how many tasks."""
        place = self.network.site_of
        return Counter((place(task.home), place(self.ended[task.id]["node"])) for task in self.submitted)

    def across(self) -> int:
        """How many tasks ran at another site than their home's."""
        return sum(count for (home, ran), count in self.moved().items() if home != ran)

    # -- typed ---------------------------------------------------------------------------------------------------------

    def run_there(self, member: str, node: str) -> None:
        """`run --node NODE` with input, output on both streams and an exit code, all through."""
        words = [
            "run",
            "--node",
            node,
            "-d",
            "/",
            "sh",
            "-c",
            'read line; echo "$line $PEERLOAD_NODE"; echo err >&2; exit 7',
        ]
        done = self.typed(member, words, "hello\n")
        talk, err = done.stderr.partition("err\n")[:2]
        assert (done.returncode, done.stdout, err) == (7, f"hello {node}\n", "err\n"), (member, node, done)
        assert not talk or talk.startswith("peerload: "), "it may have waited for room, and said so"

    def typed(self, member: str, words: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
        """Type `peerload WORDS` at a machine, with this on its standard input."""
        return subprocess.run(
            ["ip", "netns", "exec", self.network.namespace(member), *program(), *words],
            env=self.machines[member].environment,
            cwd="/tmp",
            input=text,
            capture_output=True,
            text=True,
            timeout=TYPED_S_MAX,
            check=False,
        )

    def watched(self, member: str, home: str) -> None:
        """`logs -f` at a machine of a task of another home, pinned there and begun after that: forwarded, followed."""
        self.submit(home, 1, work_s=1.0, node=home)
        task = self.submitted[-1]
        done = self.typed(member, ["logs", "-f", task.id])
        assert done.stdout == f"{task.says}\n", (member, task, done)
