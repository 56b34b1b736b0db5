"""Agents with one rule left out, for campaigns that must notice: ``python -c … VARIANT agent …``."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent.launcher import process as launcher_process
from peerload.agent.launcher.client import LauncherLink
from peerload.agent.store.store import Store
from peerload.agent.store.write_ahead import Outbox
from peerload.cli import main as cli
from tests.integration.cluster import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.agent.launcher.client import LauncherOwner
    from peerload.agent.store.maintenance import MaintenanceRow
    from peerload.model.actions import Row
    from peerload.model.events import LauncherReady

SLOW_COMMIT_S = 0.03


def no_self_fence() -> None:
    """R5: the launcher lets tasks run on when their lease is over."""
    start = subprocess.Popen
    leave_out = (
        "import peerload.launcher.task as one; method = one.LeaseTimers.enforce; assert callable(method);"
        " one.LeaseTimers.enforce = lambda *_: None; "
    )

    def patched(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        places, found, rest = words[4].partition("from ")
        assert found
        return start([*words[:4], places + leave_out + found + rest, *words[5:]], **more)

    launcher_process.subprocess.Popen = patched  # type: ignore[attr-defined]


def slow_disk() -> None:
    """No rule is left out: every commit takes as long as on a disk that is busy. What is wrong about the order of disk and
    network shows on such a disk, and hardly ever on one that is done before a client has read its answer."""
    commit = Store._commit

    def slowly(self: Store, rows: list[Row | MaintenanceRow]) -> None:
        time.sleep(SLOW_COMMIT_S)
        commit(self, rows)

    Store._commit = slowly  # type: ignore[method-assign]


def ack_submit_early() -> None:
    """D1: what goes out does not wait for the disk, a slow one."""
    slow_disk()
    Outbox.when_durable = lambda self, act: act()  # type: ignore[method-assign]


def no_adopt() -> None:
    """R8: a restarted agent takes what runs for dead."""
    start = LauncherLink.start

    async def patched(self: LauncherLink, owner: LauncherOwner) -> LauncherReady:
        return msgspec.structs.replace(await start(self, owner), running=(), frozen=())

    LauncherLink.start = patched  # type: ignore[method-assign]


VARIANTS: dict[str, Callable[[], None]] = {
    "no-self-fence": no_self_fence,
    "ack-submit-early": ack_submit_early,
    "no-adopt": no_adopt,
    "slow-disk": slow_disk,
}


def broken_program(variant: str) -> tuple[str, ...]:
    """How to start peerload with that rule left out."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.chaos_real.broken import main; main()"
    return (sys.executable, "-I", "-c", code, variant)


def main() -> None:
    """Leave the rule out that the first word names, and be peerload with the others."""
    VARIANTS[sys.argv.pop(1)]()
    sys.exit(cli.main())
