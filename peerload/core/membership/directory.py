"""Knowledge of members: their reports of load as they were heard, and a directory of many members that is kept once for all.

In real life nodes meet one by one, and each keeps what it knows of each other: N² entries in all. Where N nodes live in
one process and were introduced before anything happened, they share one `Directory` instead, and each keeps of its own
only what it has heard since (`membership.py`). What a member tells everybody stands in the `Directory`, once: only the
nodes that do something about it have to be told (`Sharing.heeds`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import msgspec

from peerload.core.resources.admission import why_never
from peerload.model.load import LoadReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from peerload.model.messages import Identity, Need
    from peerload.model.resources import Profile

AHEAD_MAX = 1000
"""Bound on reports that others tell of a node: they are no further ahead of the node's own word than this many reports, or it is not true."""


class HeardReport(msgspec.Struct, frozen=True, gc=False):
    """A report and the boot time when it came; by_itself: from the node that it is about."""

    report: LoadReport
    at_s: float
    by_itself: bool = True

    def gives_way_to(self, other: HeardReport, incarnation: int) -> bool:
        """True if the other is to be believed instead: the newest (incarnation, sequence), but nothing that others tell
        keeps the node's own word out for long. incarnation: that of the run that is believed in now."""
        mine, its = self.report, other.report
        if (its.incarnation, its.sequence) > (mine.incarnation, mine.sequence):
            return True
        if self.by_itself or not other.by_itself or its.incarnation != incarnation:
            return False
        return mine.incarnation > its.incarnation or mine.sequence > its.sequence + AHEAD_MAX


ELIGIBLE_KEPT_MAX = 1024
"""Distinct needs whose eligible nodes are remembered."""


class NamesWithout(Sequence[str]):
    """Names in order, without one of them, which costs nothing to leave out; that a name is in is found by bisection."""

    __slots__ = ("_all", "_count", "_skipped")

    def __init__(self, names: tuple[str, ...], without: str = "") -> None:
        self._all = names
        place = bisect_left(names, without)
        self._skipped = place if place < len(names) and names[place] == without else len(names)
        self._count = len(names) - (self._skipped < len(names))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        if index < 0:
            index += self._count
            if index < 0:
                raise IndexError(index)
        return self._all[index if index < self._skipped else index + 1]

    def __iter__(self) -> Iterator[str]:
        yield from self._all[: self._skipped]
        yield from self._all[self._skipped + 1 :]

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        place = bisect_left(self._all, name)
        return place < len(self._all) and self._all[place] == name and place != self._skipped


class Directory:
    """All nodes by name, which never change. announced: the report that each told everybody last."""

    __slots__ = ("_eligible", "announced", "members", "names")

    def __init__(self, members: Iterable[tuple[Identity, Profile]]) -> None:
        self.members: Mapping[str, tuple[Identity, Profile]] = {
            identity.node: (identity, profile) for identity, profile in members
        }
        self.names = tuple(sorted(self.members))
        self.announced: dict[str, HeardReport] = {}
        self._eligible: dict[tuple[Need, str], tuple[str, ...]] = {}

    def eligible(self, need: Need, home: str) -> tuple[str, ...]:
        """The members that could ever run this, by name."""
        key = (need, home if need.placement.local else "")
        found = self._eligible.get(key)
        if found is None:
            found = tuple(name for name in self.names if _could_run(self.members[name][1], need, home))
            if len(self._eligible) >= ELIGIBLE_KEPT_MAX:
                self._eligible.clear()
            self._eligible[key] = found
        return found


def _could_run(profile: Profile, need: Need, home: str) -> bool:
    return not profile.drained and not why_never(profile, need.request, need.placement, home)


NOBODY = Directory(())
"""The directory of a node that meets its peers one by one."""
