"""A home that has had many tasks: its database and spool as they would lie there, made without running any."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from peerload.agent.store.store import Store
from peerload.model.actions import PutSubmission, PutTask
from peerload.model.events import Submission
from peerload.model.task import Exit, TaskRecord, TaskSpec, TaskState, Usage, execution_key
from tests.bench.support import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS_AT_A_TIME = 2_000
OUTPUT = b"a line of output\n" * 6


def fill(state: Path, node: str, count: int, *, in_one_array: bool = False, aged_s: float = 0.0) -> None:
    """So many ended tasks with a little output each, the newest ended ``aged_s`` ago, a hundredth of a second apart."""
    (state / "spool").mkdir(parents=True, mode=0o700)
    state.chmod(0o700)
    store = Store(state / "peerload.db", node)
    store.open()
    store.start_writer(Owner())
    spec = TaskSpec(argv=(b"convert", b"in.png", b"out.png"), directory=b"/tmp", environment=ENVIRONMENT)
    now = time.time() - aged_s
    first = now - count / 100
    rows: list[PutSubmission | PutTask] = []
    if in_one_array:
        rows.append(PutSubmission(Submission(1, "t" * 8, b"d" * 32, spec, tuple(range(1, count + 1)), first)))
    for number in range(1, count + 1):
        ended_at = first + number / 100
        task = f"{node}/1.{number}" if in_one_array else f"{node}/{number}"
        uid = os.urandom(16)
        if not in_one_array:
            rows.append(PutSubmission(Submission(number, f"token-{number}", b"d" * 32, spec, (), ended_at - 2)))
        exit_ = Exit(
            0, started_at=ended_at - 1, ended_at=ended_at, usage=Usage(0.5, 0.1, 1 << 20), stdout_bytes=len(OUTPUT)
        )
        rows.append(
            PutTask(
                TaskRecord(
                    task, uid, TaskState.DONE, ended_at - 2, 1, node, started_at=ended_at - 1, ended_at=ended_at,
                    exit=exit_, reason="exit code 0",
                ),
                ended_at,
                "exit code 0",
            )
        )  # fmt: skip
        (state / "spool" / f"{execution_key(uid, 1)}.out").write_bytes(OUTPUT)
        if len(rows) >= ROWS_AT_A_TIME:
            _keep(store, rows)
            rows = []
    _keep(store, rows)
    store.close()


def _keep(store: Store, rows: list[PutSubmission | PutTask]) -> None:
    kept = threading.Event()
    store.persist(tuple(rows), kept.set)
    kept.wait()


class Owner:
    """Does all in the writer's thread."""

    def committed(self, done: list[Callable[[], None]]) -> None:
        for call in done:
            call()

    def failed(self, error: Exception) -> None:
        raise SystemExit(str(error))
