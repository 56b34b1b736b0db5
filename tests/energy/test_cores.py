"""Enforced cores, and tasks that overcommit: 0.8 of their request for sure, never more than all of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from peerload.launcher.cgroup_limits import CPU, NO_WEIGHT, CgroupLimits
from peerload.launcher.containment import own_cgroup
from peerload.model import events, messages
from peerload.model.resources import LoadReport, ResourceRequest
from tests.core.given import ALONE, Given, spec

OVER = ResourceRequest(overcommit=True)
NO_UNITS: Any = None


def given(*, enforced: bool = True, cores: int = 4) -> Given:
    made = Given(slots=cores, peers=(), policies=ALONE, facts={"slots_fixed": False})
    if enforced:
        made.when(events.CoresEnforced())
    return made


@pytest.mark.parametrize(("cores", "run"), [(4, 5), (96, 120), (2, 2)])
def test_as_many_overcommitting_tasks_run_as_leave_four_fifths_to_each(cores: int, run: int) -> None:
    x = given(cores=cores)
    for _ in range(run + 3):
        x.submit(spec(request=OVER))
    assert len(x.node.ledger.running) == run
    x.end(next(iter(x.node.ledger.running)))
    assert len(x.node.ledger.running) == run


def test_others_keep_their_whole_cores_beside_them() -> None:
    x = given()
    for _ in range(3):
        x.submit()
    for _ in range(3):
        x.submit(spec(request=OVER))
    assert len(x.node.ledger.running) == 4  # 3 + 0.8


def test_where_cores_are_not_enforced_nobody_overcommits() -> None:
    x = given(enforced=False)
    for _ in range(6):
        x.submit(spec(request=OVER))
    assert len(x.node.ledger.running) == 4
    x.when(events.CoresEnforced())  # what runs and waits is counted anew
    assert len(x.node.ledger.running) == 5
    for key in list(x.node.ledger.running):
        x.end(key)
    assert x.node.ledger.cpus_running == pytest.approx(0.8)


def test_a_full_node_takes_an_overcommitting_guest_while_its_share_is_free() -> None:
    x = given()
    for _ in range(4):
        x.submit(spec(request=OVER))
    x.meet("y")

    def accepts(request: ResourceRequest) -> bool:
        x.hear("y", messages.ProbeRequest(5, messages.Need(request), LoadReport(), 1.0))
        return bool(x.sent(messages.ProbeReply).accepts)

    assert (accepts(OVER), accepts(ResourceRequest())) == (True, False)


def test_a_task_gets_its_share_and_its_bound_in_cgroups_of_version_1(tmp_path: Path) -> None:
    name = f"peerload.test-{os.getpid()}"
    if not os.access(own_cgroup(CPU) or "/nowhere", os.W_OK):
        pytest.skip("no cgroup of version 1 for processors can be made here")
    limits = CgroupLimits(str(tmp_path), NO_UNITS, name, (CPU,))
    try:
        assert (limits.enforces_cores, limits.unenforced) == (True, ())
        limits.enter("a", 0, 2.0, 1.5)
        inside = Path(own_cgroup(CPU))
        limits.leave()
        assert inside.parent.name == name
        shares, quota = ((inside / file).read_text().strip() for file in ("cpu.shares", "cpu.cfs_quota_us"))
        assert (shares, quota) == ("2048", "150000")
        limits.close("a")
        limits.enter("b", 0, 0.5)
        limits.leave()
        assert (inside / "cpu.cfs_quota_us").read_text().strip() == "-1"  # used again, without the bound of before
        limits.close("b")
    finally:
        limits.remove()
    assert not inside.exists()


def test_what_cannot_be_had_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerload.launcher.cgroup_limits.own_cgroup", lambda _: "")
    limits = CgroupLimits(str(tmp_path), NO_UNITS, "peerload.test", (CPU,))
    assert (limits.enforces_cores, limits.unenforced) == (False, (NO_WEIGHT,))
    limits.enter("a", 0, 1.0)
    limits.leave()
    limits.remove()
