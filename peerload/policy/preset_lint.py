"""Lint of presets: warnings about choices that can be played but work against each other."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec

from peerload.model.load import Thresholds

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from peerload.model.load import LoadReport
    from peerload.policy.api import KnownReport, RunningView
    from peerload.policy.preset import PolicySet


class LintWarning(msgspec.Struct, frozen=True):
    """Warning of the linter: the key, the problem, and the file ("": none)."""

    key: str
    says: str
    file: str = ""

    def __str__(self) -> str:
        return f"{f'{self.file}: ' if self.file else ''}{self.key}: {self.says}"


class IdleNode:
    """View of an idle node without peers."""

    node = ""
    load_tasks = 0
    slots = 1
    cpus = 1.0
    cpus_requested = 0.0
    cpus_busy = 0.0
    cpus_foreign = 0.0
    foreign_slots = 0
    gpus = 0
    gpu_tasks = 0
    gpus_busy = 0.0
    gpus_foreign = 0.0
    speed = 1.0
    mean_s = 1.0
    waiting_s = 0.0
    running: Sequence[RunningView] = ()
    load = 0.0
    load_unit = 1.0
    thresholds = Thresholds(1.0, 1.0, 1.0, 1.0)
    peers: Sequence[str] = ()
    reports_guide_probing = False
    idle_list: Sequence[str] = ()
    busy_list: Sequence[str] = ()
    starts_here = False
    asleep: Mapping[str, float] = {}
    cpus_started = 0.0
    backlog = 0
    price = None

    def profile(self, node: str) -> None:
        """Return None: no node is known."""
        del node

    def report(self, node: str) -> KnownReport | None:
        """Return None: no peer has reported."""
        del node
        return None

    def reports(self, age_s_max: float = inf) -> Iterator[tuple[str, LoadReport]]:
        """Return nothing."""
        del age_s_max
        return iter(())


def doubts(preset: PolicySet, file: str = "", thresholds_written: Container[str] = ()) -> list[LintWarning]:
    """Lint a preset. file: where it is written; thresholds_written: the keys of its table `transfer`."""
    found = [*_about_thresholds(preset, thresholds_written), *_about_reports(preset), *_about_sharing(preset)]
    return [LintWarning(".".join(path), says, file) for path, says in found]


_Found = list[tuple[tuple[str, ...], str]]


def _about_thresholds(preset: PolicySet, thresholds_written: Container[str]) -> _Found:
    try:
        thresholds = preset.transfer.thresholds(IdleNode())
    except Exception as error:  # noqa: BLE001 -- a user's policy may fail in any way
        return [(("transfer", "policy"), f"it fails on an idle node: {error!r}")]
    goes = {"send_at": ("sends", thresholds.send_at), "give_above": ("gives", thresholds.give_above)}
    comes = {
        "accept_below": ("accepts", thresholds.accept_below),
        "receive_below": ("asks for", thresholds.receive_below),
    }
    found: _Found = []
    for take, (takes, below) in comes.items():
        for give, (gives, above) in goes.items():
            if below > above:
                both = f"between them a node both {takes} and {gives} tasks, which wander"
                says = (take, f"{below:g} lies above {give} = {above:g}: {both}")
                if give in thresholds_written and take not in thresholds_written:
                    says = (give, f"{above:g} lies below {take} = {below:g}: {both}")
                found.append((("transfer", says[0]), says[1]))
    return found


def _about_reports(preset: PolicySet) -> _Found:
    if preset.information.reports_guide_probing:
        return []
    found: _Found = []
    for kind, policy in (("transfer", preset.transfer), ("location.sender", preset.sender)):
        if getattr(policy, "wants_reports", False):
            tells = f"with information {preset.names['information']!r} hardly any are told"
            found.append(((*kind.split("."), "policy"), f"{preset.names[kind]!r} lives on reports, and {tells}"))
    return found


def _about_sharing(preset: PolicySet) -> _Found:
    sides = [kind for kind in preset.names if kind.startswith("location.")]
    shares = any(preset.names[kind] != "none" for kind in sides)
    found: _Found = []
    if preset.memory and not shares:
        found.append((("location", "memory"), "there is no search that could remember anything: no side shares"))
    if preset.migration.migrations_max == 0 and shares:
        found.append((("migration", "limit"), "0 keeps every task at its home, whatever the location policies find"))
    return found
