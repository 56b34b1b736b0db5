"""Cards that are not there: the stand-in `libnvidia-ml.so.1` (tests/fakes/nvml.c), and the text that it reads."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from tests.fakes import nvml
from tests.integration.cluster import Agent, Cluster
from tests.support import wait_until

GIB = 1 << 30


class Cards:
    """``count`` cards of ``gib`` GiB each; every change is written at once, whole."""

    def __init__(self, directory: Path, count: int = 4, gib: float = 24.0) -> None:
        self.path = directory / "cards"
        self.prefix = f"GPU-{secrets.token_hex(4)}"
        self.cards: list[dict[str, Any]] = [
            {"uuid": self.name(number), "name": "Fake-A10", "total": int(gib * GIB), "used": 0}
            for number in range(count)
        ]
        self.processes: dict[tuple[int, int], int] = {}
        self.more: list[str] = []
        self.write()

    def name(self, number: int) -> str:
        """Other names in each test, since agents claim cards by their names."""
        return f"{self.prefix}-{number}"

    def id(self, number: int) -> str:
        return f"nvidia:{self.name(number)}"

    @property
    def environment(self) -> dict[str, str]:
        return nvml.environment(self.path)

    def set(self, number: int, **fields: Any) -> None:
        self.cards[number].update(fields)
        self.write()

    def use(self, number: int, pid: int, used_bytes: int) -> None:
        """A process has so much memory of a card; 0: none, but it is there; less: it is gone."""
        if used_bytes < 0:
            self.processes.pop((number, pid), None)
        else:
            self.processes[number, pid] = used_bytes
        self.write()

    def write(self) -> None:
        lines = []
        for number, card in enumerate(self.cards):
            mine = sum(used for (on, _), used in self.processes.items() if on == number)
            shown = {**card, "used": card["used"] + mine}
            lines.append(f"gpu {number} " + " ".join(f"{key}={value}" for key, value in shown.items()))
        lines += [f"proc {number} {pid} {used} 0" for (number, pid), used in self.processes.items()]
        scratch = self.path.with_suffix(".new")
        scratch.write_text("\n".join([*lines, *self.more]) + "\n", encoding="ascii")
        scratch.replace(self.path)


def with_cards(agent: Agent, count: int = 4) -> Agent:
    """Wait until it knows its cards: on a busy machine an agent is there before them."""

    def are_known() -> bool:
        gpus = agent.call("nodes")["nodes"][0]["gpus"]
        return len(gpus) == count and all(gpu["health"] == "ok" for gpu in gpus)

    wait_until(are_known, what=f"{agent.node} to know its cards")
    return agent


def linked(cluster: Cluster, cards: Cards, slots: int = 4) -> tuple[Agent, Agent]:
    """Two agents that know one another, of which the first has all the cards."""
    first = with_cards(cluster.agent("n1", slots=slots), len(cards.cards))
    second = cluster.agent("n2", "--peer", first.listen, slots=slots)
    cluster.await_acquainted([first, second])

    def is_told() -> bool:
        (gpus,) = (node["gpus"] for node in second.call("nodes")["nodes"] if node["node"] == "n1")
        return len(gpus) == len(cards.cards)

    wait_until(is_told, what="n2 to know of the cards of n1")
    return first, second
