"""Links that nobody uses are closed, over real sockets; those in use, and a few others, stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from peerload.agent.peers import links
from peerload.model.messages import Ping, Query, Sync
from tests.integration.broker_fixtures import loop_thread  # noqa: F401 -- a fixture
from tests.integration.test_peer_link import LinkNode, Nodes, nodes  # noqa: F401 -- a fixture
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

CLOSED = "peer_links_idle_closed_total"
QUERY = Query("a/1", b"u" * 16, 1)


@pytest.fixture
def hub(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[LinkNode, list[LinkNode]]]:  # noqa: F811
    """One node with a link to each of some others, and with little patience; the others have more. ``looks``: by itself."""
    monkeypatch.setattr(links, "IDLE_KEPT_MAX", 2)
    monkeypatch.setattr(links, "IDLE_S", 1.0)
    monkeypatch.setattr(links, "QUIET_S", 0.0)

    def make(count: int, *, looks: bool = True) -> tuple[LinkNode, list[LinkNode]]:
        monkeypatch.setattr(links, "IDLE_CHECK_S", 1000.0)
        others = [nodes(f"n{number}") for number in range(count)]
        if looks:
            monkeypatch.setattr(links, "IDLE_CHECK_S", 0.05)
        one = nodes("hub")
        for other in others:
            one.dial(other.address)
        wait_until(lambda: len(one.met) == count)
        return one, others

    return make


def linked(node: LinkNode) -> set[str]:
    """With whom it has a link."""

    async def look() -> set[str]:
        return {name for name, peer in node.links._table.entries.items() if peer.links}

    return node.loop.run(look())


def test_links_that_are_not_used_are_closed_but_for_a_few(
    hub: Callable[..., tuple[LinkNode, list[LinkNode]]],
) -> None:
    one, others = hub(5)
    wait_until(lambda: one.counters[CLOSED] == 3)
    assert len(linked(one)) == 2
    assert one.lost == []  # nobody is gone
    wait_until(lambda: sum(bool(other.lost) for other in others) == 3)  # they look for it, once


def test_comparing_what_is_known_is_no_use_of_a_link_but_what_concerns_a_task_is(
    hub: Callable[..., tuple[LinkNode, list[LinkNode]]],
) -> None:
    one, _ = hub(6, looks=False)

    def use_and_look() -> None:
        """In one turn of the loop: however long the machine stands still, no time passes between use and look."""
        for name in ("n2", "n3", "n4"):
            one.links.send(name, QUERY)
        one.links._check_idle()

    def talk() -> bool:
        for name in ("n0", "n1"):
            one.send(name, Sync((), (), asks=False))
            one.send(name, Ping(1))
        one.loop.call(use_and_look)
        return one.counters[CLOSED] > 0

    # n2 … n4 are in use; of the idle ones n5 and another are kept.
    wait_until(talk)
    assert {"n2", "n3", "n4"} <= linked(one)


def test_a_link_that_was_closed_is_made_again_for_the_next_message(
    hub: Callable[..., tuple[LinkNode, list[LinkNode]]],
) -> None:
    one, others = hub(3)
    wait_until(lambda: one.counters[CLOSED] >= 1)
    (away,) = {f"n{number}" for number in range(3)} - linked(one)
    one.send(away, QUERY)
    other = next(other for other in others if other.identity.node == away)
    wait_until(lambda: ("hub", QUERY) in other.heard)
    assert one.failed == []
