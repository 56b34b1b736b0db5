"""A device of this node: who holds it, what was last read of it, and whether a task fits beside the others.

What is claimed of a GPU's memory is the sum of max(promised, most seen) of its grants and of what foreign processes need:
the most that those that are there now have lately used. A process that has left claims nothing. A task fits (`why_not`) if
the device is sound, has a slot left, enough memory by promise and by reading, and does not get more work than the config
allows. Pure; `device_ledger.py` keeps all of them, `placement.py` chooses among those that fit, `backfill.py` keeps room for
whoever waits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from peerload.core.estimates import NOTHING_LEARNED
from peerload.core.resources.mps_degree import MpsDegree
from peerload.model.devices import GPU, Device, DeviceLoad, DeviceMode, DeviceReading, GpuShare, Health
from peerload.model.devices import MIB as _MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from peerload.model.config import GpuConfig
    from peerload.model.resources import ResourceRequest

EPSILON = 1e-9
NEVER_S = math.inf
STABLE_READINGS = 2
"""Memory that is the same in so many readings, one after the other, stands still."""
ACTIVITY_HALF = 0.5
CROWDED = 1.5
"""A device with more work than this, in whole devices, is taken only if there is none with less."""
LEARNED_SHARE = 0.9
"""A command that has needed more than this of what a device can give is taken to need all of it."""
SMALL_MAX = (1 << 31) - 1


class DeviceRequest:
    """The request of one task for each device that it is given.

    need_bytes: of memory, as its user said, None = that was not said; learned: what its command has needed of GPUs of each
    model; activity: how much of a GPU it keeps busy; activity_max: of a GPU that it shares, itself counted; is_exclusive: nobody joins it; run_s: how long it will run nearly for
    sure (p90), infinite = not known; owner: whose daemon of MPS it can use, None = nobody's; pct: its share of the multiprocessors
    under MPS.
    """

    __slots__ = (
        "_config",
        "activity",
        "activity_max",
        "fraction",
        "is_exclusive",
        "learned",
        "need_bytes",
        "owner",
        "pct",
        "run_s",
        "share",
    )

    def __init__(
        self,
        request: ResourceRequest,
        config: GpuConfig,
        learned: Mapping[str, int] = NOTHING_LEARNED,
        run_s: float = NEVER_S,
        owner: str | None = "",
    ) -> None:
        self.fraction = request.gpu_fraction
        self.need_bytes = request.gpu_mem_bytes or None
        self.learned = learned
        self.is_exclusive = request.gpu_share is GpuShare.EXCLUSIVE
        self.activity = self.fraction if self.fraction < 1.0 else config.activity_unknown
        self.activity_max = config.activity_max
        self.run_s = run_s
        self.share = request.gpu_share
        self.owner = owner
        self.pct = request.gpu_pct or 100.0 * self.activity
        self._config = config

    def bytes_of(self, device: Device) -> int | None:
        """The memory it needs of this device, None = not known: then it may need all."""
        if self.need_bytes is not None:
            return self.need_bytes
        if self.fraction < 1.0:
            return int(device.mem_bytes * self.fraction)
        need_bytes = self.learned.get(device.model) if self.learned else None
        if need_bytes is None or need_bytes > LEARNED_SHARE * grantable_bytes(device, self._config):
            return None
        return need_bytes

    @property
    def wants_empty(self) -> bool:
        """True if it starts only where nobody else is, whatever the device."""
        is_known = self.need_bytes is not None or self.fraction < 1.0 or bool(self.learned)
        return self.is_exclusive or (self.share is GpuShare.AUTO and not is_known)

    def wants_empty_on(self, device: Device) -> bool:
        """True if it starts on this one only if nobody else is there."""
        return self.is_exclusive or (self.share is GpuShare.AUTO and self.bytes_of(device) is None)


def grantable_bytes(device: Device, config: GpuConfig) -> int:
    """Bytes of a device's memory that tasks may have, all together."""
    return max(int(device.mem_bytes * config.memory_share_max) - config.reserve_bytes, 0)


class DeviceGrant:
    """One device given to one attempt. ends_s: when that is expected to be over nearly for sure, infinite = not known;
    leaves_s: since when the attempt is over, though its processes may still be on the device; 0 = it runs. stable: how
    many readings in a row have seen the same memory of it. mode: how it is held; others: tasks under MPS that were there before;
    fault: what has happened to MPS under it."""

    __slots__ = (
        "ask",
        "ends_s",
        "fault",
        "key",
        "leaves_s",
        "mode",
        "now_bytes",
        "others",
        "peak_bytes",
        "promised_bytes",
        "since_s",
        "stable",
    )

    def __init__(
        self,
        key: str,
        ask: DeviceRequest,
        device: Device,
        now_s: float,
        mode: DeviceMode = DeviceMode.TIME,
        others: int = 0,
    ) -> None:
        self.mode = mode
        self.others = others
        self.fault = ""
        self.key = key
        self.ask = ask
        self.promised_bytes = ask.bytes_of(device)
        self.since_s = now_s
        self.ends_s = now_s + ask.run_s
        self.now_bytes = 0
        self.peak_bytes = 0
        self.stable = 0
        self.leaves_s = 0.0

    def saw(self, used_bytes: int) -> None:
        """Note a reading of memory."""
        self.stable = self.stable + 1 if used_bytes == self.now_bytes and used_bytes else 0
        self.now_bytes = used_bytes
        self.peak_bytes = max(self.peak_bytes, used_bytes)

    def is_settled(self, now_s: float, settle_s: float) -> bool:
        """True if it is known by now how much it takes."""
        return (
            self.promised_bytes is not None
            or now_s - self.since_s >= settle_s - EPSILON
            or self.stable >= STABLE_READINGS - 1
        )


class DeviceState:
    """One device with its grants, by execution key."""

    __slots__ = ("_config", "degree", "device", "grants", "mps_why", "reading")

    def __init__(self, device: Device, config: GpuConfig) -> None:
        self.device = device
        self.reading = DeviceReading(device.id)
        if device.is_read:
            self.reading = DeviceReading(device.id, Health.UNKNOWN, "it was not read so far")
        self.grants: dict[str, DeviceGrant] = {}
        self.degree = MpsDegree(config.tasks_max)
        self.mps_why = ""
        """The reason why MPS does not work here now."""
        self._config = config

    @property
    def id(self) -> str:
        """The id of the device."""
        return self.device.id

    @property
    def is_held_alone(self) -> bool:
        """True if somebody has it who shares it with nobody."""
        return any(grant.ask.is_exclusive for grant in self.grants.values())

    @property
    def mode(self) -> DeviceMode:
        """The mode in which it is held."""
        if not self.grants and not self.foreign:
            return DeviceMode.FREE
        if self.is_held_alone or self.device.kind != GPU:
            return DeviceMode.EXCLUSIVE
        modes = [grant.mode for grant in self.grants.values()]
        return DeviceMode.MPS if modes and set(modes) == {DeviceMode.MPS} else DeviceMode.TIME

    def mode_for(self, ask: DeviceRequest, without: Sequence[str] = ()) -> DeviceMode:
        """The mode in which it would hold this task beside the others."""
        if ask.is_exclusive or self.device.kind != GPU:
            return DeviceMode.EXCLUSIVE
        others = [grant for key, grant in self.grants.items() if key not in without]
        if ask.share is GpuShare.AUTO and ask.owner is not None and not ask.wants_empty_on(self.device):
            joins = all(grant.mode is DeviceMode.MPS for grant in others)
            return DeviceMode.MPS if joins and (others or not self._why_no_mps(ask, others)) else DeviceMode.TIME
        return DeviceMode.MPS if ask.share is GpuShare.MPS else DeviceMode.TIME

    def _why_not_so(self, mode: DeviceMode, ask: DeviceRequest, others: Sequence[DeviceGrant]) -> str:
        """The reason why it cannot hold a task in this mode beside these."""
        if mode is DeviceMode.MPS:
            return self._why_no_mps(ask, others)
        if any(grant.mode is DeviceMode.MPS for grant in others):
            return "held under MPS"
        is_short = mode is DeviceMode.TIME and not ask.wants_empty_on(self.device)
        return "it is shared under MPS alone" if is_short and self._config.mps == "require" else ""

    def _why_no_mps(self, ask: DeviceRequest, others: Sequence[DeviceGrant]) -> str:
        """The reason why a task cannot run under MPS beside these."""
        if self._config.mps == "off" or not self.device.has_mps:
            return "there is no MPS on it"
        if self.mps_why:
            return f"MPS does not work: {self.mps_why}"
        if ask.owner is None:
            return "MPS is for tasks of this node's users"
        if any(grant.mode is not DeviceMode.MPS for grant in others) or (self.foreign and not others):
            return "others use it without MPS"
        if any(grant.ask.owner != ask.owner for grant in others):
            return "another user has its MPS"
        if len(others) >= self.degree.limit:
            return f"{_number(len(others), 'task')} under MPS; more have not paid off"
        pct, pct_max = sum(grant.ask.pct for grant in others), 100.0 * self._config.pct_oversubscribe
        if pct + ask.pct > pct_max + EPSILON:
            return f"{pct:g} % of its multiprocessors promised, asked {ask.pct:g} of {pct_max:g}"
        return ""

    @property
    def activity(self) -> float:
        """The estimated work of its grants, in whole GPUs."""
        return sum(grant.ask.activity for grant in self.grants.values())

    @property
    def unknown_bytes(self) -> int:
        """Memory of attempts that hold no grant (any more)."""
        return sum(used for key, used in self.reading.ours if key not in self.grants)

    @property
    def foreign(self) -> int:
        """Tenants that are none of ours."""
        return self.reading.foreign + sum(key not in self.grants for key, _ in self.reading.ours)

    @property
    def grantable_bytes(self) -> int:
        """Bytes of its memory that tasks may have, all together."""
        return grantable_bytes(self.device, self._config)

    # -- what was read -------------------------------------------------------------------------------------------------

    def read(self, reading: DeviceReading) -> None:
        """The newest reading."""
        self.reading = reading
        seen = dict(reading.ours)
        for key, grant in self.grants.items():
            grant.saw(seen.get(key, 0))

    @property
    def foreign_bytes(self) -> int:
        """Memory that foreign processes are taken to need: the most that those that are there now have lately used."""
        return max(self.reading.mem_foreign_bytes, self.reading.mem_foreign_peak_bytes) + self.unknown_bytes

    # -- what is claimed -----------------------------------------------------------------------------------------------

    def claimed_bytes(self, now_s: float, without: Iterable[str] = ()) -> int:
        """The memory that its grants, but for those ``without``, and others are taken to need; all of it while one of them has not
        shown yet what it takes."""
        claimed = self.foreign_bytes
        for key, grant in self.grants.items():
            if key in without:
                continue
            if not grant.is_settled(now_s, self._config.settle_s):
                return max(self.device.mem_bytes, claimed)
            claimed += max(grant.promised_bytes or 0, grant.peak_bytes)
        return claimed

    def free_bytes(self, now_s: float, without: Iterable[str] = ()) -> int:
        """The memory that may still be promised, ≥ 0."""
        by_promise = self.grantable_bytes - self.claimed_bytes(now_s, without)
        leaving = sum(grant.now_bytes for key, grant in self.grants.items() if key in without)
        unused = sum(
            max((grant.promised_bytes or 0) - grant.now_bytes, 0)
            for key, grant in self.grants.items()
            if key not in without
        )
        by_reading = self.device.mem_bytes - self.reading.mem_used_bytes + leaving - unused
        return max(min(by_promise, by_reading), 0)

    def why_not(self, ask: DeviceRequest, now_s: float, without: Sequence[str] = ()) -> str:
        """The reason why it has no room for this task, as if the grants ``without`` were over; "" if it has."""
        reading = self.reading
        if not reading.health.is_usable:
            return reading.why or ("its driver does not answer" if reading.health is Health.UNKNOWN else "sick")
        count = len(self.grants) - sum(key in self.grants for key in without)
        if self.device.kind != GPU:
            return "taken" if count else ""
        return self._why_no_room(ask, now_s, without, count)

    def _why_no_room(self, ask: DeviceRequest, now_s: float, without: Sequence[str], count: int) -> str:
        foreign, config = self.foreign, self._config
        others = [grant for key, grant in self.grants.items() if key not in without]
        if any(grant.ask.is_exclusive for grant in others):
            return "held by a task that shares it with nobody"
        if ask.wants_empty_on(self.device) and (count or foreign):
            return f"{_number(count, 'task')} on it" if count else "others use it"
        if count + foreign >= config.tasks_max:
            return f"{_number(count + foreign, 'task')} on it, at most {config.tasks_max}"
        if not self.device.mem_bytes:  # nothing is known of it: parts of it, as they add up
            taken = sum(grant.ask.fraction for grant in others)
            return f"{taken:g} of it taken" if taken + ask.fraction > 1.0 + EPSILON else ""
        if why := self._why_not_so(self.mode_for(ask, without), ask, others):
            return why
        activity = sum(grant.ask.activity for grant in others)
        if activity + ask.activity > ask.activity_max + EPSILON:
            return f"too much work on it ({activity:g} of {ask.activity_max:g})"
        unsettled = any(not grant.is_settled(now_s, config.settle_s) for grant in others)
        if unsettled:
            return "a task on it has not shown yet how much memory it takes"
        need, free = ask.bytes_of(self.device), self.free_bytes(now_s, without)
        if need is None:
            return "" if free else "no memory free"
        return f"{free / 2**30:.1f} GiB free, asked {need / 2**30:.1f}" if need > free else ""

    def load(self, now_s: float) -> DeviceLoad:
        """The state that other nodes get."""
        reading, count = self.reading, len(self.grants)
        usable = reading.health.is_usable and not self.is_held_alone
        ends_s = min((grant.ends_s for grant in self.grants.values()), default=NEVER_S)
        slots, share = self._left(now_s) if usable else (0, 0.0)
        return DeviceLoad(
            self.device.mark,
            min(self.mode, DeviceMode.TIME),
            free_mib=min(self.free_bytes(now_s) // _MIB, SMALL_MAX) if usable else 0,
            free_slots=slots,
            eta_s=min(max(math.ceil(ends_s - now_s), 1), SMALL_MAX) if ends_s < NEVER_S else 0,
            health=reading.health,
            busy_percent=round(reading.busy * 100),
            used_mib=min(reading.mem_used_bytes // _MIB, SMALL_MAX),
            foreign_mib=min((reading.mem_foreign_bytes + self.unknown_bytes) // _MIB, SMALL_MAX),
            tasks=count,
            free_percent=int(share * 100 + EPSILON),
            temperature_c=min(reading.temperature_c, 255),
        )

    def _left(self, now_s: float) -> tuple[int, float]:
        """The number of tasks of unknown work that could join, and the largest part of it that one could have."""
        config, count = self._config, len(self.grants) + self.foreign
        if self.device.kind != GPU:
            return (0, 0.0) if count else (1, 1.0)
        slots = max(config.tasks_max - count, 0)
        work = max(config.activity_max - self.activity, 0.0)
        size = self.device.mem_bytes
        memory = self.free_bytes(now_s) / size if size else 1.0 - sum(one.ask.fraction for one in self.grants.values())
        share = min(memory, work, 1.0) if slots else 0.0
        return min(slots, int(work / config.activity_unknown + EPSILON)), max(share, 0.0)


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
