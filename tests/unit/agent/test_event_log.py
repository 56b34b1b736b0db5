"""Notes ride along with rows, before them; alone they wait for a second at most; followers hear of every commit."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from peerload.agent.runtime import RunState
from peerload.agent.store.write_ahead import EventLog, Outbox
from peerload.cli.verbs.ls import WHAT
from peerload.model.actions import EVENTS, PutEvent, PutFloor, Row
from peerload.model.errors import StoreError
from tests.support import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
FLOOR = PutFloor(bytes(16), 1, 0.0)


def noted(number: int) -> PutEvent:
    return PutEvent(float(number), "node", "alive", node=f"n{number}")


class Disk:
    """Everything is durable at once."""

    def __init__(self) -> None:
        self.commits: list[list[Row]] = []

    def persist(self, rows: Sequence[Row], done: Callable[[], None]) -> None:
        self.commits.append(list(rows))
        done()


def test_notes_ride_along_with_the_next_rows_and_before_them() -> None:
    async def story() -> None:
        disk = Disk()
        release = Outbox(disk, RunState())
        kept = EventLog(release, RunState())
        kept.note(noted(1))
        release.flush()
        assert disk.commits == []
        release.keep((FLOOR,))
        kept.note(noted(2))
        release.flush()
        assert disk.commits == [[noted(1), noted(2), FLOOR]]
        kept.settle()
        assert len(disk.commits) == 1

    asyncio.run(story())


def test_notes_alone_are_kept_after_a_while_and_nothing_waits_for_them() -> None:
    async def story() -> None:
        disk = Disk()
        release = Outbox(disk, RunState())
        kept = EventLog(release, RunState())
        with kept.followed() as news:
            kept.note(noted(1))
            gone: list[str] = []
            release.when_durable(lambda: gone.append("at once"))
            assert gone == ["at once"]
            kept.note(noted(2))
            await asyncio.wait_for(news.wait(), PATIENCE_S)
        assert disk.commits == [[noted(1), noted(2)]]

    asyncio.run(story())


def test_a_store_that_is_stuck_is_told_of() -> None:
    class Stuck:
        def persist(self, rows: Sequence[Row], done: Callable[[], None]) -> None:
            raise StoreError("the disk does not keep up")

    async def story() -> None:
        run = RunState()
        kept = EventLog(Outbox(Stuck(), run), run)
        kept.note(noted(1))
        kept.settle()
        assert run.has_failed

    asyncio.run(story())


def test_what_can_happen_is_what_the_code_notes() -> None:
    assert tuple(EVENTS) == WHAT
    literal = re.compile(r'(?:\.note|\.note_remote|\.record)\(\s*(?:(?:remote|work), )?"(\w+)"(?:,\s*"(\w+)")?')
    seen = set()
    for room in ("core", "agent"):
        for path in [
            path for path in sorted((ROOT / "peerload" / room).rglob("*.py")) if path.parent.name != "sensors"
        ]:
            for first, second in literal.findall(path.read_text(encoding="utf-8")):
                what, state = ("attempt", first) if not second and first not in EVENTS else (first, second)
                assert what in EVENTS, f"{path.name}: {what}"
                if state:
                    assert state in EVENTS[what], f"{path.name}: {what} {state}"
                    seen.add((what, state))
    assert {("task", "running"), ("attempt", "returned"), ("agent", "draining"), ("launcher", "lost")} <= seen
