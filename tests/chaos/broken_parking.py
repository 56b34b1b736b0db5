"""R12 with one of its rules left out, and what else only shows while a home is away."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from peerload.core.handoff.executor import ExecutorHandoff, ExecutorLeases
from peerload.core.handoff.home import TaskParking
from peerload.core.work import HomeTask, RemotePhase, RemoteTask
from peerload.model import actions, messages
from tests.chaos.broken_drivers import goes_out_early
from tests.chaos.launcher import Launcher


def park_not_durable(patch: pytest.MonkeyPatch) -> None:
    """PARK is said before PARKED is on disk."""
    goes_out_early(patch, messages.Park)


def park_no_confirm(patch: pytest.MonkeyPatch) -> None:
    """Home takes itself for back as soon as it answers a RENEW."""

    def is_answered(self: TaskParking, task: HomeTask, src: str, renewal: messages.Renewal) -> bool:
        if task.record.parked_ts and renewal.ts > task.record.parked_ts:
            self._home.become(task, f"{src} was answered", parked_ts=0.0)
        return not task.record.parked_ts

    patch.setattr(TaskParking, "is_answered", is_answered)


def park_flag(patch: pytest.MonkeyPatch) -> None:
    """Any deadline that is stated confirms, for whichever ts it was given."""

    def is_answered(self: TaskParking, task: HomeTask, src: str, renewal: messages.Renewal) -> bool:
        parked_ts = task.record.parked_ts
        if parked_ts and renewal.ts <= parked_ts:
            return False
        if parked_ts and renewal.deadline_ts:
            self._home.become(task, f"{src} has a deadline", parked_ts=0.0)
        return True

    patch.setattr(TaskParking, "is_answered", is_answered)


def _parks(patch: pytest.MonkeyPatch, *, late: bool = False, strict: bool = False) -> None:
    def park(self: ExecutorLeases, guest: RemoteTask, ts: float) -> None:
        if (ts < guest.ts and not late) or (strict and ts == guest.ts):
            return
        if guest.phase in (RemotePhase.WAITING, RemotePhase.HERE):
            guest.ts, guest.deadline_s, guest.is_parked = max(guest.ts, ts), float("inf"), True
            if guest.phase is RemotePhase.HERE:
                self._state.actions.append(actions.SetLease(guest.key, 0.0, guest.ts))

    patch.setattr(ExecutorLeases, "park", park)


def park_late(patch: pytest.MonkeyPatch) -> None:
    """The executor applies a PARK that is older than what it was granted since."""
    _parks(patch, late=True)


def park_strict(patch: pytest.MonkeyPatch) -> None:
    """The executor ignores a PARK of the same age as what it was granted last: no task is ever parked."""
    _parks(patch, strict=True)


def park_ts_volatile(patch: pytest.MonkeyPatch) -> None:
    """The newest ts that was applied is forgotten when the agent ends."""
    listing = Launcher.listing

    def forgetful(self: Launcher) -> Any:
        ready = listing(self)
        running = tuple((key, started_at, 0.0) for key, started_at, _ in ready.running)
        return msgspec.structs.replace(ready, running=running)

    patch.setattr(Launcher, "listing", forgetful)


def revoke_forgets(patch: pytest.MonkeyPatch) -> None:
    """R9: REVOKE removes the START record, and a QUERY about it has no answer."""
    revoke_received, refuse = ExecutorHandoff.revoke_received, ExecutorHandoff._refuse

    def forget(self: ExecutorHandoff, src: str, revoke: messages.Revoke) -> None:
        guest = self.by_uid.get(revoke.uid)
        revoke_received(self, src, revoke)
        if guest is not None and guest.phase is RemotePhase.HERE and guest.attempt == revoke.attempt:
            self._state.persist(actions.DropExecution(guest.uid, guest.attempt))

    def says_nothing(self: ExecutorHandoff, src: str, task: str, uid: bytes, attempt: int, reason: str) -> None:
        if self.fences.attempt(uid) < attempt or self.fences.was_refused(uid, attempt):
            refuse(self, src, task, uid, attempt, reason)

    patch.setattr(ExecutorHandoff, "revoke_received", forget)
    patch.setattr(ExecutorHandoff, "_refuse", says_nothing)
