"""What tests do to agents that they share with others: leave them idle, and acquainted after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.integration.cluster import Agent

ENDED = ("done", "failed", "cancelled")


def unfinished(agent: Agent) -> list[str]:
    """The tasks of this home that have not ended."""
    return [task for task, state in agent.states().items() if state not in ENDED]


def end_all(*agents: Agent) -> None:
    """Cancel whatever their tests have left unfinished."""
    for agent in agents:
        if left := unfinished(agent):
            agent.call("cancel", tasks=left, force=True)
    wait_until(lambda: not any(map(unfinished, agents)), what="all tasks to have ended")


def restart(agents: Sequence[Agent], which: int = 0) -> None:
    """Kill one of these, start it again, and wait until all know all."""
    agents[which].kill()
    bring_back(agents, which)


def bring_back(agents: Sequence[Agent], which: int = 0) -> None:
    """Start one of these that has ended, and wait until all know all."""
    agents[which].start()
    agents[which].cluster.await_acquainted(agents)
