"""Why there is no room on this node for a task now, in words: cores, memory, devices, and whose turn it is.

Each answers "" exactly where admission finds room: the ledger, `placement.py` and the reservations are asked, not copied.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from peerload.core.resources.admission import EPSILON
from peerload.core.resources.placement import Scope, place
from peerload.model.devices import GPU

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from peerload.core.resources.admission import Ledger
    from peerload.core.resources.backfill import Backfill
    from peerload.core.resources.devices import DeviceRequest, DeviceState
    from peerload.core.tasks.queue import WaitingQueue
    from peerload.core.tasks.work import HomeTask
    from peerload.model.resources import ResourceRequest

NAMED_MAX = 4
"""Tasks, or devices, that are named in one reason."""
COUNTED_MAX = 1000
"""Tasks before one in line that are counted."""
GIB = 1 << 30
UNNAMED = "a task that is ending"


def duration_words(seconds: float) -> str:
    """``3 s``, ``4 min``, ``2.5 h``."""
    if seconds < 10:  # noqa: PLR2004 -- below that, tenths tell something
        return f"{seconds:.1f} s"
    if seconds < 120:  # noqa: PLR2004 -- the step from one unit to the next
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"  # noqa: PLR2004 -- as above


def named(names: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = len(names) - NAMED_MAX
    return ", ".join([*names[:NAMED_MAX], *([f"and {more} more"] if more > 0 else [])])


# -- cores and memory --------------------------------------------------------------------------------------------------


def cores_words(ledger: Ledger, request: ResourceRequest, names: Mapping[str, str]) -> str:
    """Why its cores and memory are not free; "" if they are."""
    if ledger.has_cores(request):
        return ""
    profile = ledger.profile
    if profile.slots_fixed and len(ledger.running) >= profile.slots:
        holders = [names.get(key, UNNAMED) for key in ledger.running]
        return (
            f"{len(ledger.running)} of {profile.slots} slot{'' if profile.slots == 1 else 's'} taken: {named(holders)}"
        )
    if ledger.cpus_running + request.cpus > profile.cpus + EPSILON:
        taken = f"{ledger.cpus_running:g} of {profile.cpus:g} cpus taken, asked {request.cpus:g}"
        return taken + _by(names, {key: one.cpus for key, (one, _) in ledger.running.items()}, "g")
    promised = f"{ledger.mem_promised_bytes / GIB:.1f} of {profile.mem_bytes / GIB:.1f} GiB of memory promised"
    held = {key: one.mem_bytes / GIB for key, (one, _) in ledger.running.items() if one.mem_bytes}
    return f"{promised}, asked {request.mem_bytes / GIB:.1f}" + _by(names, held, ".1f")


def _by(names: Mapping[str, str], held: Mapping[str, float], form: str) -> str:
    most = sorted(held, key=lambda key: (-held[key], key))
    holders = [f"{names.get(key, UNNAMED)} ({held[key]:{form}})" for key in most]
    return f": {named(holders)}" if holders else ""


# -- devices -----------------------------------------------------------------------------------------------------------


def devices_words(
    ledger: Ledger,
    request: ResourceRequest,
    ask: DeviceRequest,
    task: str,
    waited_s: float,
    kept: Backfill | None,
    names: Mapping[str, str],
) -> str:
    """Why its devices are not free; "" if they are. ``kept``: for others, as when this task was last looked at."""

    def allows(state: DeviceState, asked: DeviceRequest) -> bool:
        return kept is None or kept.allows(state, asked, task)

    if place(ledger.devices, request, ask, ledger.now_s, waited_s, allows) is not None:
        return ""
    why = partial(_why_not, ledger, ask, task, kept)
    for kind, count in request.devices:
        states = ledger.devices.of_kind(kind)
        busy = {state: words for state in states if (words := why(state))}
        if len(states) - len(busy) < count:
            return f"{len(busy)} of {len(states)} {kind} busy, asked {count}{_holders(busy, names)}"
    return _gpu_words(request, ask, Scope(ledger.devices, request, waited_s), why, names)


def _gpu_words(
    request: ResourceRequest,
    ask: DeviceRequest,
    scope: Scope,
    why: partial[str],
    names: Mapping[str, str],
) -> str:
    states = scope.all
    busy = {state: words for state in states if (words := why(state))}
    meant = named([f"GPU {state.device.index}" for state in states])
    prefix = f"it waits for exactly {meant}: " if scope.is_narrow else ""
    of_all = f"{len(busy)} of {_gpus(len(states))}"
    asked = f", asked {request.gpus}" if request.gpus > 1 else ""
    if ask.wants_empty and all(state.grants for state in busy):
        return f"{prefix}{of_all} busy{asked}{_holders(busy, names)}"
    each = [f"GPU {state.device.index}: {words}{_holders({state: words}, names, '')}" for state, words in busy.items()]
    if scope.is_narrow and len(states) == 1:
        return f"{prefix}{each[0].partition(': ')[2]}"
    return f"{prefix}{of_all} without room{asked}: {'; '.join(each[:NAMED_MAX])}" + (
        f"; and {len(each) - NAMED_MAX} more" if len(each) > NAMED_MAX else ""
    )


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _why_not(ledger: Ledger, ask: DeviceRequest, task: str, kept: Backfill | None, state: DeviceState) -> str:
    """Why this device is not to be had."""
    words = state.why_not(ask, ledger.now_s)
    if words or kept is None or kept.allows(state, ask, task):
        return words
    other = kept.kept(state.id, task)
    if other is None:
        return ""
    if other.is_hard:
        return f"kept for {other.task}, which has waited so long that nobody overtakes it"
    left_s = other.starts_s - ledger.now_s
    until = "" if math.isinf(left_s) else f" and is to start in about {duration_words(left_s)}"
    return f"kept for {other.task}, which waits longer{until}"


def _holders(busy: Mapping[DeviceState, str], names: Mapping[str, str], before: str = ": ") -> str:
    """Which tasks have them, and how many of them each; and on how many somebody else is."""
    counts = Counter(names.get(key, UNNAMED) for state in busy for key in state.grants)
    found = [f"{name} ({count})" if len(busy) > 1 else name for name, count in counts.most_common()]
    foreign = sum(bool(state.foreign) and state.device.kind == GPU for state in busy)
    if foreign and len(busy) > 1:
        found.append(f"others' programs ({foreign})")
    if not found:
        return ""
    return f"{before}{named(found)}" if before else f" ({named(found)})"


# -- whose turn it is --------------------------------------------------------------------------------------------------


def turn_words(queue: WaitingQueue, task: HomeTask) -> str:
    """Who has to start before it, though there is room for it; "" if nobody has."""
    first = queue.goes_before(task)
    if first is None:
        return ""
    if first.spec.priority > task.spec.priority:
        return f"there is room, and {first.task} (priority {first.spec.priority}) goes first"
    before = queue.count_before(task, COUNTED_MAX)
    if first.spec.request.takes_devices and not task.spec.request.takes_devices:
        return f"the next cores are kept for {first.task}, which has its devices and came before it"
    if task.spec.request.takes_devices:
        return f"its devices are free; the next cores are for {first.task}, which waits longer"
    many = f"{COUNTED_MAX} or more" if before >= COUNTED_MAX else str(max(before, 1))
    return f"{many} {'waits' if many == '1' else 'wait'} before it, {first.task} first"
