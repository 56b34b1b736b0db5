"""The endings of an agent, alone and together."""

from __future__ import annotations

import asyncio

from peerload.agent.runtime import Ending, RunState
from peerload.model.errors import ConfigError


def test_it_runs_until_it_is_told_to_stop() -> None:
    async def test() -> None:
        run = RunState()
        assert (run.ending, run.is_stopping, run.has_failed, run.ends_tasks, run.leaves) == (None, *[False] * 4)
        run.stop()
        await run.stopping()
        assert (run.ending, run.has_failed, run.ends_tasks) == (Ending.STOP, False, False)

    asyncio.run(test())


def test_a_stop_outdoes_a_restart_whichever_comes_first() -> None:
    for endings in ((Ending.RESTART, Ending.STOP), (Ending.STOP, Ending.RESTART)):
        run = RunState()
        for ending in endings:
            run.stop(ending)
        assert run.ending is Ending.STOP


def test_tasks_that_were_to_end_do_so_when_the_agent_fails_too() -> None:
    run = RunState()
    run.stop(Ending.END_TASKS)
    run.fail("the store failed")
    assert (run.ending, run.has_failed, run.ends_tasks) == (Ending.FAILED, True, True)


def test_it_leaves_also_where_its_tasks_are_to_end() -> None:
    run = RunState()
    run.stop(Ending.LEAVE)
    run.stop(Ending.END_TASKS)
    assert (run.ending, run.leaves, run.ends_tasks) == (Ending.END_TASKS, True, True)


def test_an_agent_that_is_refused_ends_its_tasks_and_says_why() -> None:
    run, error = RunState(), ConfigError("state", "it is a copy")
    run.refuse(error)
    assert (run.ending, run.refusal, run.has_failed, run.ends_tasks) == (Ending.REFUSED, error, True, True)
