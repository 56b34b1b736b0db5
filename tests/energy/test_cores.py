"""Enforced cores, and tasks that overcommit: 0.8 of their request for sure, never more than all of it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerload.agent.launcher.client import LauncherLink
from peerload.agent.runtime import RunState
from peerload.launcher.cgroup_limits import CPU, NO_WEIGHT, CgroupLimits
from peerload.launcher.containment import Cgroup2, own_cgroup
from peerload.model import actions, events, messages
from peerload.model.resources import LoadReport, ResourceRequest
from tests.core.given import ALONE, SENDER, Given, spec

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


def test_a_task_that_is_offered_elsewhere_meanwhile_is_counted_too() -> None:
    x = Given(slots=4, policies=SENDER, facts={"slots_fixed": False})
    x.meet("y", slots=4, cpus=4.0)
    x.submit(spec(request=ResourceRequest(cpus=4.0)))
    x.submit(spec(request=ResourceRequest(cpus=3.0)))
    x.hear("y", messages.ProbeReply(1, accepts=True, report=LoadReport()))
    assert x.task(2).withheld
    x.when(events.CoresEnforced())
    assert (x.node.ledger.load_tasks, x.node.ledger.cpus_requested) == (7, 7.0)


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


class PlayedUnits(Cgroup2):
    """Units in a directory that the test made."""

    has_memory = True

    def __init__(self, root: Path) -> None:
        self.root = str(root)

    def path(self, key: str) -> str:
        return f"{self.root}/{key}"


def test_a_task_gets_its_share_and_its_bound_in_its_cgroup_of_version_2(tmp_path: Path) -> None:
    root, unit = tmp_path / "own/peerload.1", tmp_path / "own/peerload.1/a"
    unit.mkdir(parents=True)
    for place in (root.parent, root):
        (place / "cgroup.controllers").write_text("cpu memory pids\n")
        (place / "cgroup.subtree_control").touch()
    for file in ("cpu.weight", "cpu.max"):
        (unit / file).touch()
    limits = CgroupLimits(str(tmp_path), PlayedUnits(root), "peerload.1", (CPU,))
    assert (limits.enforces_cores, limits.unenforced) == (True, ())
    limits.enter("a", 0, 2.0, 1.5)
    assert [(unit / file).read_text() for file in ("cpu.weight", "cpu.max")] == ["200", "150000 100000"]
    for file in ("cpu.weight", "cpu.max"):
        (unit / file).write_text("")
    limits.enter("a", 0, 0.5)
    assert [(unit / file).read_text() for file in ("cpu.weight", "cpu.max")] == ["50", "max 100000"]


@pytest.mark.parametrize(
    ("enforce", "bounds"),
    [("off", [(1.0, 0.0), (1.0, 0.0)]), ("share", [(2.0, 0.0), (2.0, 2.0)]), ("limit", [(2.0, 2.0), (2.0, 2.0)])],
)
def test_a_node_enforces_nothing_or_shares_or_bounds(enforce: str, bounds: list[tuple[float, float]]) -> None:
    """Of a task that does not overcommit, and of one that does, which is never given more than its request."""
    process: Any = SimpleNamespace(directory=Path("/nowhere"), serves_node="")
    link, asked = LauncherLink(process, 1 << 20, RunState(), enforce=enforce), list[Any]()
    link._request = asked.append  # type: ignore[method-assign, assignment]
    for overcommit in (False, True):
        task = spec(request=ResourceRequest(2.0, overcommit=overcommit))
        link.spawn(actions.SpawnTask("a-1", "x/1", 1, "x", task), Path("/o"), Path("/e"), {}, "", -1)
    assert [(one.cpus, one.cpus_max) for one in asked] == bounds


def test_what_cannot_be_had_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerload.launcher.cgroup_limits.own_cgroup", lambda _: "")
    limits = CgroupLimits(str(tmp_path), NO_UNITS, "peerload.test", (CPU,))
    assert (limits.enforces_cores, limits.unenforced) == (False, (NO_WEIGHT,))
    limits.enter("a", 0, 1.0)
    limits.leave()
    limits.remove()
