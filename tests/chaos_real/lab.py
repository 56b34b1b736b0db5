"""A lab: machines on one network, perhaps a broker, one ledger for all; what is left at the end is removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.chaos_real.broker import Broker
from tests.chaos_real.cgroups import FREEZERS
from tests.chaos_real.ledger import Ledger, build
from tests.chaos_real.machine import MARK, Machine, remove_abandoned_disks, spec
from tests.chaos_real.network import PORT, Network
from tests.integration.cluster import PATH, program
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

ACQUAINTED_S_MAX = 60.0


class Lab:
    """``count`` machines n1, n2, …, of which the others know n1; with ``mosquitto`` (its path) they share a broker.

    leases_s are given to the machines in turn (empty: the default); so are disks_bytes, each the size of a disk of
    their own for their state, 0 for none, and the ways of freezing tasks that there are. ``spare`` members of the network have no machine. ``start``: how to
    start peerload, if not as installed.
    """

    def __init__(
        self,
        count: int,
        *,
        slots: int = 4,
        mosquitto: Path | None = None,
        leases_s: Sequence[float] = (),
        disks_bytes: Sequence[int] = (0,),
        spare: Iterable[str] = (),
        start: Sequence[str] = (),
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"{MARK}-{os.getpid()}-", dir="/tmp"))
        self.machines: list[Machine] = []
        self.broker: Broker | None = None
        self.ledger = Ledger(self.directory / "ledger")
        self.program = build(self.directory, "work")
        self._wall = build(self.directory, "wall", "-shared", "-fPIC")
        self._cluster = self.directory / "cluster"
        self._nodes = [f"n{number}" for number in range(1, count + 1)]
        self._spare = list(spare)
        self._start = start
        self._slots = slots
        self._mosquitto = mosquitto
        self._leases_s = leases_s
        self._disks_bytes = disks_bytes
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def _set_up(self) -> None:
        remove_abandoned_disks()
        environment = {"PATH": PATH, "HOME": str(self.directory)}
        words = [*program(), "cluster", "init", str(self._cluster), "--name", "chaos"]
        subprocess.run(words, env=environment, cwd="/", check=True, capture_output=True)
        self.network = self._stack.enter_context(Network([*self._nodes, *self._spare, "broker"]))
        if self._mosquitto is not None:
            namespace = self.network.namespace("broker")
            self.broker = Broker(self._mosquitto, self.directory, namespace, self.network.address("broker"))
            self._stack.callback(self.broker.kill)
            self.broker.start()
        for number, node in enumerate(self._nodes):
            machine = self.machine(node, number)
            self.machines.append(machine)
            machine.boot()
            machine.spawn()
        for machine in self.machines:
            machine.start()

    def machine(self, member: str, number: int = 0, *, node: str = "") -> Machine:
        """A further machine, switched off, at that member of the network; its agent goes by the name ``node``. It has the
        cluster's directory by a copy, as a machine of its own would."""
        shutil.copytree(self._cluster, self.directory / f"cluster-{member}", dirs_exist_ok=True)
        words = ["--cluster", str(self.directory / f"cluster-{member}")]
        words += ["--listen", f"{self.network.address(member)}:{PORT}", "--slots", str(self._slots)]
        if member != self._nodes[0]:
            words += ["--peer", f"{self.network.address(self._nodes[0])}:{PORT}"]
        if self.broker is not None:
            words += ["--mqtt", self.broker.url]
        if self._leases_s:
            config = self.directory / f"{member}.toml"
            config.write_text(f"lease_s = {self._leases_s[number % len(self._leases_s)]}\n", encoding="ascii")
            words += ["--config", str(config)]
        disk_bytes = self._disks_bytes[number % len(self._disks_bytes)]
        namespace = self.network.namespace(member)
        machine = Machine(
            self.directory / member,
            node or member,
            namespace,
            words,
            disk_bytes=disk_bytes,
            freezer=FREEZERS[number % len(FREEZERS)],
            start=self._start,
            wall=self._wall,
        )
        self._stack.callback(machine.close)
        return machine

    def await_acquainted(self) -> None:
        """Return when every agent believes all the others to be alive."""
        for machine in self.machines:
            self._await_all_alive(machine)

    def _await_all_alive(self, machine: Machine) -> None:
        def alive() -> set[str]:
            return {node["node"] for node in machine.call("nodes")["nodes"] if node["state"] == "alive"}

        wait_until(lambda: alive() >= set(self._nodes), ACQUAINTED_S_MAX, f"{machine.node} to meet all")

    def work(self, milliseconds: int, **fields: object) -> dict[str, object]:
        """A task's spec: work for so long, told in the ledger."""
        return spec([str(self.program), str(self.ledger.path), str(milliseconds), "0"], **fields)
