"""`Sharing.acts_on` is complete: a node that is not told of an announcement would have done nothing about it.

The simulator hands an announcement only to the nodes that act on it, and notes it where all can read it. A run in which every
node handles every announcement must be the same, task by task and count by count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from peerload.core.sharing.sharing import Sharing
from peerload.model import events
from peerload.policy.registry import load_preset, presets
from peerload.sim.queueing_model import QueueingModel
from peerload.sim.replication import Replication
from peerload.sim.scenario import Scenario

ANNOUNCED = [
    name
    for name in presets()
    if load_preset(name).information.reports_guide_probing or load_preset(name).information.watches != "nothing"
]
acting_nodes = QueueingModel._who_acts


def played(name: str, **others: float) -> tuple[list[float], dict[str, float]]:
    nodes = 5
    setup = Scenario(
        policy=name, nodes=nodes, slots=2, tasks=1, warm_up=0, is_live=True, message_s=0.01,
        hot=int(others.get("hot", 0)), load=others["load"],
    ).setup()  # fmt: skip
    player = Replication(setup, 1)
    player.play(80)
    player.drain()
    return list(player.responses), player.counts()


def everybody(self: QueueingModel, event: events.Event) -> Iterator[str]:
    """Those that act on it as before; the others handle it, too, as any event: only the number of their next report, which counts
    events and seeds the hashing of who asks, stays."""
    assert isinstance(event, events.MessageReceived)
    acting = set(acting_nodes(self, event))
    for name, node in self.nodes.items():
        if name in acting:
            yield name
        elif name != event.src:
            sequence = node.sharing.information._sequence
            self._handle(name, event)
            node.sharing.information._sequence = sequence


def differs(name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    for workload in ({"hot": 1, "load": 0.6}, {"load": 0.9}):
        told = played(name, **workload)
        with monkeypatch.context() as patch:
            patch.setattr(QueueingModel, "_who_acts", everybody)
            if played(name, **workload) != told:
                return True
    return False


@pytest.mark.parametrize("name", ANNOUNCED)
def test_who_does_not_act_on_an_announcement_would_have_done_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not differs(name, monkeypatch)


def test_the_comparison_finds_a_node_that_acts_on_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    acts_on: Callable[[Sharing, str, object], bool] = lambda *_: False  # noqa: E731
    monkeypatch.setattr(Sharing, "acts_on", acts_on)
    assert differs("adaptive", monkeypatch)
