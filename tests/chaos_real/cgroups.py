"""A control group for each boot of a machine, as its kernel would have: what a crash leaves there goes with it.

Machines differ in what their launchers find to freeze tasks with: cgroup v2, or nothing.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from peerload.launcher.containment import own_cgroup
from tests.support import wait_until

FREEZERS = ("cgroup2", "bare")
GONE_S_MAX = 30.0


def _mounted() -> list[str]:
    """Where control groups are mounted."""
    found = []
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, place, system, *_ = line.split()
        if system in {"cgroup", "cgroup2"}:
            found.append(place)
    return found


def to_hide(freezer: str) -> list[str]:
    """The mounts that a machine must not see so that its launcher freezes by ``freezer``, at best."""
    match freezer:
        case "bare":
            return _mounted()
        case _:
            return []


def remove_abandoned(prefix: str) -> None:
    """Remove the groups of runs whose process is no more. Their names are ``prefix``, that process, and more."""
    if own := own_cgroup():
        for place in Path(own).glob(f"{prefix}-*"):
            if not Path(f"/proc/{place.name.split('-')[1]}").exists():
                _removed(place)


class Cgroups:
    """The control groups of one machine, made anew at each boot, below this process's own; none where that fails."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.places: list[Path] = []

    def make(self) -> None:
        """For a boot."""
        self.remove()
        if own := own_cgroup():
            place = Path(own) / self._name
            with contextlib.suppress(OSError):
                place.mkdir()
                self.places.append(place)

    def enter(self, *words: str) -> list[str]:
        """The command line that runs ``words`` in them."""
        files = [str(place / "cgroup.procs") for place in self.places]
        script = f'for file in {" ".join(files)}; do echo 0 >"$file"; done; exec "$@"'
        return ["sh", "-c", script, "enter", *words]

    def remove(self) -> None:
        """After all of its processes have ended."""
        for place in self.places:
            wait_until(lambda place=place: _removed(place), GONE_S_MAX, f"{place} to be empty")  # type: ignore[misc]
        self.places.clear()


def _removed(place: Path) -> bool:
    """Remove a group with all below; False as long as something of it has not ended."""
    for path in sorted((path for path in place.rglob("*") if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            path.rmdir()
    with contextlib.suppress(OSError):
        place.rmdir()
    return not place.exists()
