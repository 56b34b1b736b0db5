"""The devices of this node: the holders of each, its newest reading, and whether a task fits beside them. Pure.

The claimed memory of a GPU is the sum of max(promised, peak) over its grants, plus the need of foreign processes: the
recent peak of those that are present. A process that has left claims nothing. A task fits (`why_not`) if the device is
healthy, has a slot left, enough memory by promise and by reading, and its work stays within the configured limit.
`DeviceLedger` keeps all devices; `placement.py` chooses among devices that fit, and reserves some for waiting tasks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from peerload.core.estimates import NOTHING_LEARNED
from peerload.model.bounded import BoundedDict
from peerload.model.resources import GPU, MIB, Device, DeviceLoad, DeviceMode, DeviceReading, GpuShare, Health
from peerload.model.task import TIME_LIMIT_EXIT_CODE, how_it_ended

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from peerload.model.config import GpuConfig
    from peerload.model.resources import Profile, ResourceRequest
    from peerload.model.task import Exit, TaskSpec


START = 4
GAIN_MIN, LOSS_MAX = 1.03, 0.90
NEWEST_SHARE = 0.3
"""Weight of the newest run in the average."""
COMMANDS_MAX = 64


class MpsDegree:
    """Co-run degree of a GPU under MPS: the number of tasks that pay off together (limit), learned from the run times
    of the same command.

    Additive increase, multiplicative decrease: the limit grows by one if k parallel runs achieved at least GAIN_MIN
    times the throughput of fewer. It is halved at LOSS_MAX or below, as with tasks that contend for memory bandwidth.
    """

    __slots__ = ("_most", "_seconds", "limit")

    def __init__(self, most: int) -> None:
        self.limit = min(START, most)
        self._most = most
        self._seconds: BoundedDict[tuple[bytes, ...], dict[int, float]] = BoundedDict(COMMANDS_MAX)

    def ended(self, command: tuple[bytes, ...], degree: int, seconds: float) -> None:
        """Learn from a run that has ended well, with ``degree`` runs in parallel, itself included."""
        if seconds <= 0.0:
            return
        of_degree = self._seconds.setdefault(command, {})
        before = of_degree.get(degree)
        of_degree[degree] = seconds if before is None else before + NEWEST_SHARE * (seconds - before)
        fewer = max((one for one in of_degree if one < degree), default=0)
        if degree != self.limit:
            return
        # If no lower degree is known, the limit grows by one.
        gain = (degree / of_degree[degree]) / (fewer / of_degree[fewer]) if fewer else GAIN_MIN
        if gain >= GAIN_MIN:
            self.limit = min(self.limit + 1, self._most)
        elif gain <= LOSS_MAX:
            self.limit = max(self.limit // 2, 1)


EPSILON = 1e-9
"""Tolerance: cores and parts of devices are sums of floats, and a rounding error must not refuse a task."""
NEVER_S = math.inf
STABLE_READINGS = 2
"""Consecutive equal readings of memory after which it counts as stable."""
ACTIVITY_HALF = 0.5
CROWDED = 1.5
"""A device with more work than this, in whole devices, is used only if all have more."""
LEARNED_SHARE = 0.9
"""A command that has needed more than this share of a device's memory is assumed to need all of it."""
SMALL_MAX = (1 << 31) - 1


class DeviceRequest:
    """The request of one task for each of its devices.

    need_bytes: memory as stated by its user, None = not stated; learned: what its command has needed on each GPU model;
    activity: its share of a GPU's work; activity_max: limit on the work of a shared GPU, its own included;
    is_exclusive: no task joins it; run_s: bound on its run time that nearly always holds (p90), infinite = unknown;
    owner: of the MPS daemon that it can use, None = of none; pct: its share of the multiprocessors under MPS.
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
        """The memory that it needs of this device, None = unknown: it may need all."""
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
        """True if it starts only on an empty device, whatever the device."""
        is_known = self.need_bytes is not None or self.fraction < 1.0 or bool(self.learned)
        return self.is_exclusive or (self.share is GpuShare.AUTO and not is_known)

    def wants_empty_on(self, device: Device) -> bool:
        """True if it starts on this device only if it is empty."""
        return self.is_exclusive or (self.share is GpuShare.AUTO and self.bytes_of(device) is None)


def grantable_bytes(device: Device, config: GpuConfig) -> int:
    """Bytes of a device's memory that all tasks together may get."""
    return max(int(device.mem_bytes * config.memory_share_max) - config.reserve_bytes, 0)


class DeviceGrant:
    """A device granted to one attempt. ends_s: when the grant is almost surely over, infinite = unknown;
    stable: number of consecutive readings with the same memory. mode: how it is held; others: number of tasks
    under MPS that were there before; fault: an MPS fault during it."""

    __slots__ = (
        "ask",
        "ends_s",
        "fault",
        "key",
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

    def saw(self, used_bytes: int) -> None:
        self.stable = self.stable + 1 if used_bytes == self.now_bytes and used_bytes else 0
        self.now_bytes = used_bytes
        self.peak_bytes = max(self.peak_bytes, used_bytes)

    def is_settled(self, now_s: float, settle_s: float) -> bool:
        """True if its memory use is known by now."""
        return (
            self.promised_bytes is not None
            or now_s - self.since_s >= settle_s - EPSILON
            or self.stable >= STABLE_READINGS - 1
        )


class DeviceState:
    """A device with its grants, by execution key."""

    __slots__ = ("_config", "degree", "device", "grants", "mps_why", "reading")

    def __init__(self, device: Device, config: GpuConfig) -> None:
        self.device = device
        self.reading = DeviceReading(device.id)
        if device.is_read:
            self.reading = DeviceReading(device.id, Health.UNKNOWN, "it was not read yet")
        self.grants: dict[str, DeviceGrant] = {}
        self.degree = MpsDegree(config.tasks_max)
        self.mps_why = ""
        """The reason why MPS does not work here now, or ""."""
        self._config = config

    @property
    def id(self) -> str:
        return self.device.id

    @property
    def is_held_alone(self) -> bool:
        """True if an attempt holds it exclusively."""
        return any(grant.ask.is_exclusive for grant in self.grants.values())

    @property
    def mode(self) -> DeviceMode:
        if not self.grants and not self.foreign:
            return DeviceMode.FREE
        if self.is_held_alone or self.device.kind != GPU:
            return DeviceMode.EXCLUSIVE
        modes = [grant.mode for grant in self.grants.values()]
        return DeviceMode.MPS if modes and set(modes) == {DeviceMode.MPS} else DeviceMode.TIME

    def mode_for(self, ask: DeviceRequest, without: Sequence[str] = ()) -> DeviceMode:
        """The mode in which it would hold this task beside its other tasks."""
        if ask.is_exclusive or self.device.kind != GPU:
            return DeviceMode.EXCLUSIVE
        others = [grant for key, grant in self.grants.items() if key not in without]
        if ask.share is GpuShare.AUTO and ask.owner is not None and not ask.wants_empty_on(self.device):
            joins = all(grant.mode is DeviceMode.MPS for grant in others)
            return DeviceMode.MPS if joins and (others or not self._why_no_mps(ask, others)) else DeviceMode.TIME
        return DeviceMode.MPS if ask.share is GpuShare.MPS else DeviceMode.TIME

    def _why_not_so(self, mode: DeviceMode, ask: DeviceRequest, others: Sequence[DeviceGrant]) -> str:
        """The reason why it cannot hold a task in this mode beside these grants; "" if it can."""
        if mode is DeviceMode.MPS:
            return self._why_no_mps(ask, others)
        if any(grant.mode is DeviceMode.MPS for grant in others):
            return "held under MPS"
        is_short = mode is DeviceMode.TIME and not ask.wants_empty_on(self.device)
        return "it is shared only under MPS" if is_short and self._config.mps == "require" else ""

    def _why_no_mps(self, ask: DeviceRequest, others: Sequence[DeviceGrant]) -> str:
        """The reason why a task cannot run under MPS beside these grants; "" if it can."""
        if self._config.mps == "off" or not self.device.has_mps:
            return "there is no MPS on it"
        if self.mps_why:
            return f"MPS does not work: {self.mps_why}"
        if ask.owner is None:
            return "guests get no MPS: each runs as another user, and MPS serves one user at a time"
        if any(grant.mode is not DeviceMode.MPS for grant in others) or (self.foreign and not others):
            return "other programs use it without MPS"
        if any(grant.ask.owner != ask.owner for grant in others):
            return "another user has its MPS"
        if len(others) >= self.degree.limit:
            return f"{counted(len(others), 'task')} under MPS; more have not paid off"
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
        """Number of foreign processes, and of attempts without a grant."""
        return self.reading.foreign + sum(key not in self.grants for key, _ in self.reading.ours)

    @property
    def grantable_bytes(self) -> int:
        """Bytes of its memory that all tasks together may get."""
        return grantable_bytes(self.device, self._config)

    # -- readings ------------------------------------------------------------------------------------------------------

    def read(self, reading: DeviceReading) -> None:
        """Store the newest reading."""
        self.reading = reading
        seen = dict(reading.ours)
        for key, grant in self.grants.items():
            grant.saw(seen.get(key, 0))

    @property
    def foreign_bytes(self) -> int:
        """Memory that foreign processes are assumed to need: the recent peak of those that are present."""
        return max(self.reading.mem_foreign_bytes, self.reading.mem_foreign_peak_bytes) + self.unknown_bytes

    # -- claims --------------------------------------------------------------------------------------------------------

    def claimed_bytes(self, now_s: float, without: Iterable[str] = ()) -> int:
        """The memory that its grants, except ``without``, and foreign processes are assumed to need; all of it while
        the use of a grant is not known yet."""
        claimed = self.foreign_bytes
        for key, grant in self.grants.items():
            if key in without:
                continue
            if not grant.is_settled(now_s, self._config.settle_s):
                return max(self.device.mem_bytes, claimed)
            claimed += max(grant.promised_bytes or 0, grant.peak_bytes)
        return claimed

    def free_bytes(self, now_s: float, without: Iterable[str] = ()) -> int:
        """The memory that can still be promised, ≥ 0."""
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
        """The reason why it has no room for this task, with the grants ``without`` ended; "" if it has."""
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
            return "held exclusively by another task"
        if ask.wants_empty_on(self.device) and (count or foreign):
            return f"{counted(count, 'task')} on it" if count else "other programs use it"
        if count + foreign >= config.tasks_max:
            return f"{counted(count + foreign, 'task')} on it, at most {config.tasks_max}"
        if not self.device.mem_bytes:  # its memory is unknown: count the fractions
            taken = sum(grant.ask.fraction for grant in others)
            return f"{taken:g} of it taken" if taken + ask.fraction > 1.0 + EPSILON else ""
        if why := self._why_not_so(self.mode_for(ask, without), ask, others):
            return why
        activity = sum(grant.ask.activity for grant in others)
        if activity + ask.activity > ask.activity_max + EPSILON:
            return f"too much work on it ({activity:g} of {ask.activity_max:g})"
        unsettled = any(not grant.is_settled(now_s, config.settle_s) for grant in others)
        if unsettled:
            return "the memory use of a task on it is not known yet"
        need, free = ask.bytes_of(self.device), self.free_bytes(now_s, without)
        if need is None:
            return "" if free else "no memory free"
        return f"{free / 2**30:.1f} GiB free, asked {need / 2**30:.1f}" if need > free else ""

    def load(self, now_s: float) -> DeviceLoad:
        """The state that is reported to other nodes."""
        reading, count = self.reading, len(self.grants)
        usable = reading.health.is_usable and not self.is_held_alone
        ends_s = min((grant.ends_s for grant in self.grants.values()), default=NEVER_S)
        slots, share = self._left(now_s) if usable else (0, 0.0)
        return DeviceLoad(
            self.device.mark,
            min(self.mode, DeviceMode.TIME),
            free_mib=min(self.free_bytes(now_s) // MIB, SMALL_MAX) if usable else 0,
            free_slots=slots,
            eta_s=min(max(math.ceil(ends_s - now_s), 1), SMALL_MAX) if ends_s < NEVER_S else 0,
            health=reading.health,
            busy_percent=round(reading.busy * 100),
            used_mib=min(reading.mem_used_bytes // MIB, SMALL_MAX),
            foreign_mib=min((reading.mem_foreign_bytes + self.unknown_bytes) // MIB, SMALL_MAX),
            tasks=count,
            free_percent=int(share * 100 + EPSILON),
            temperature_c=min(reading.temperature_c, 255),
        )

    def _left(self, now_s: float) -> tuple[int, float]:
        """The number of tasks of unknown work that could join, and the largest share of it that one could get."""
        config, count = self._config, len(self.grants) + self.foreign
        if self.device.kind != GPU:
            return (0, 0.0) if count else (1, 1.0)
        slots = max(config.tasks_max - count, 0)
        work = max(config.activity_max - self.activity, 0.0)
        size = self.device.mem_bytes
        memory = self.free_bytes(now_s) / size if size else 1.0 - sum(one.ask.fraction for one in self.grants.values())
        share = min(memory, work, 1.0) if slots else 0.0
        return min(slots, int(work / config.activity_unknown + EPSILON)), max(share, 0.0)


def counted(count: int, what: str) -> str:
    """A number with its noun, as text."""
    return f"{count} {what}{'' if count == 1 else 's'}"


STRAYS_MAX = 1024
MPS_FAULTS_MAX = 2


class DeviceLedger:
    """Ledger of this node's devices, in the order of their numbers; `holding`: the devices of each attempt. version:
    grows with every change that may let a waiting task start."""

    def __init__(self, profile: Profile, config: GpuConfig) -> None:
        self.config = config
        self.states: dict[str, DeviceState] = {}
        self.holding: dict[str, tuple[str, ...]] = {}
        self.version = 0
        self.was_left = False
        """True if an attempt has ended and its devices must be read."""
        self.strays: BoundedDict[tuple[str, str], None] = BoundedDict(STRAYS_MAX)
        """(execution key, device id) of attempts seen on devices that they were not granted: the newest STRAYS_MAX."""
        self.kept: Mapping[str, object] = {}
        """Ids of devices reserved for a waiting task."""
        self._leaving: dict[str, float] = {}
        self._present: tuple[str, ...] = ()
        self._mps_faults: BoundedDict[tuple[bytes, ...], int] = BoundedDict(STRAYS_MAX)
        """Number of attempts during which MPS has failed, by command."""
        self.models: tuple[str, ...] = ()
        self._told: tuple[tuple[int, int, tuple[str, ...]], tuple[DeviceLoad, ...]] = (-1, 0, ()), ()
        self.set_devices(
            profile.devices or tuple(Device(f"gpu:{number}", index=number) for number in range(profile.gpus))
        )

    def keep(self, devices: Mapping[str, object]) -> None:
        """Reserve the devices with these ids, now and whenever the map changes, for waiting tasks."""
        self.kept = devices

    def set_devices(self, devices: Iterable[Device]) -> None:
        """Replace the node's devices. A device that has disappeared while an attempt holds it stays, and is not granted
        again."""
        before, self.states = self.states, {}
        for device in devices:
            state = before.pop(device.id, None)
            if state is None:
                state = DeviceState(device, self.config)
            elif device.id not in self._present:  # it has returned: its last reading is void
                state.reading = DeviceState(device, self.config).reading
            state.device = device
            self.states[device.id] = state
        self._present = tuple(self.states)
        self.models = tuple(dict.fromkeys(state.device.model for state in self.of_kind(GPU)))
        for state in before.values():
            if state.grants:
                self.states[state.id] = self._gone(state)
        self.version += 1

    def _gone(self, state: DeviceState) -> DeviceState:
        state.reading = DeviceReading(state.id, Health.SICK, "it is not present")
        return state

    def of_grant(self, key: str) -> list[DeviceState]:
        """The GPUs that this attempt holds, in the order granted."""
        held = (self.states[name] for name in self.holding.get(key, ()))
        return [state for state in held if state.device.kind == GPU]

    def of_kind(self, kind: str) -> list[DeviceState]:
        return [state for state in self.states.values() if state.device.kind == kind]

    def read(self, readings: Iterable[DeviceReading], read_s: float) -> list[tuple[str, str]]:
        """Store the readings of ``read_s``, and end the grants of ended attempts that are no longer seen. → attempts
        seen for the first time on a device that they were not granted, as (execution key, device id)."""
        strays = []
        for reading in readings:
            state = self.states.get(reading.id)
            if state is None:
                continue
            state.read(reading)
            strays += [
                (key, reading.id)
                for key, _ in reading.ours
                if (key, reading.id) not in self.strays and key not in state.grants
            ]
        for stray in strays:
            self.strays[stray] = None
        for key in [key for key, left_s in self._leaving.items() if read_s >= left_s and not self._is_seen(key)]:
            self._release(key)
        self.version += 1
        return strays

    def _is_seen(self, key: str) -> bool:
        """True if processes of the attempt may still be on a device."""
        states = [self.states[name] for name in self.holding[key]]
        return any(
            state.reading.health is Health.UNKNOWN or any(key == seen for seen, _ in state.reading.ours)
            for state in states
        )

    # -- grants --------------------------------------------------------------------------------------------------------

    def grant(self, key: str, names: Sequence[str], ask: DeviceRequest, now_s: float) -> None:
        """Grant devices to an attempt; a device that is missing is recorded as well."""
        for name in names:
            state = self.states.get(name)
            if state is None:
                state = self.states[name] = self._gone(DeviceState(Device(name, kind=_kind_of(name)), self.config))
            mode, others = state.mode_for(ask), len(state.grants)
            state.grants[key] = DeviceGrant(key, ask, state.device, now_s, mode, others)
        if names:
            self.version += 1
            self.holding[key] = tuple(names)
            self._leaving.pop(key, None)

    def take_back(self, key: str) -> None:
        """Undo a trial grant."""
        self.version += 1
        for name in self.holding.pop(key, ()):
            del self.states[name].grants[key]

    def end(self, key: str, now_s: float) -> None:
        """Handle the end of an attempt. A device with readings is free once a reading no longer shows it."""
        names = self.holding.get(key)
        if names is None:
            return
        if not any(self.states[name].device.is_read for name in names):
            self._release(key)
            return
        self._leaving[key] = now_s
        self.was_left = True

    def _release(self, key: str) -> None:
        self.version += key in self.holding
        for name in self.holding.pop(key, ()):
            state = self.states[name]
            state.grants.pop(key, None)
            if not state.grants and state.reading.health is Health.SICK and not state.device.is_read:
                del self.states[name]
        self._leaving.pop(key, None)

    def expire(self, now_s: float) -> None:
        """Let remains of ended attempts count as foreign after release_s_max."""
        for key in [key for key, left_s in self._leaving.items() if now_s >= left_s + self.config.release_s_max]:
            self._release(key)
        self.version += 1

    def due_s(self, now_s: float) -> float:
        """The time of the next change without an event; infinite = never."""
        dues = [left_s + self.config.release_s_max for left_s in self._leaving.values()]
        for state in self.states.values():
            dues += [
                grant.since_s + self.config.settle_s
                for grant in state.grants.values()
                if not grant.is_settled(now_s, self.config.settle_s)
            ]
        return min(dues, default=NEVER_S)

    # -- MPS -----------------------------------------------------------------------------------------------------------

    def mps_owner(self, spec: TaskSpec, home: str) -> str | None:
        """Owner of the MPS daemon that a task could use: its account, or "" if all tasks run under one. None: it is a
        guest with a separate account, or its command has broken MPS before and does not ask for MPS. home: its home
        node, "" = this node, where a user may also come from another node (`node:user`)."""
        if self._mps_faults.get(spec.argv, 0) >= MPS_FAULTS_MAX and spec.request.gpu_share is not GpuShare.MPS:
            return None
        if not self.config.mps_by_user:
            return ""
        users, user = self.config.mps_users, spec.user
        if not home and ":" in user:
            home, _, user = user.partition(":")
        if not home:
            return user
        return (
            users.get(f"{home}:{user}") if isinstance(users, dict) else user or None if users == "same-name" else None
        )

    def mps_reported(self, name: str, why: str, *, is_fault: bool) -> None:
        """Record whether MPS of a device works. Tasks that wait for its daemon, and can do without, share by time."""
        state = self.states.get(name)
        if state is None:
            return
        state.mps_why = why
        self.version += 1
        for grant in state.grants.values() if why else ():
            if grant.mode is DeviceMode.MPS and is_fault:
                grant.fault = why
            elif grant.ask.share is GpuShare.AUTO and grant.mode is DeviceMode.MPS:
                grant.mode = DeviceMode.TIME

    def mps_ended(self, key: str, command: tuple[bytes, ...], exit_: Exit) -> None:
        """Learn from the exit of an attempt under MPS: its fault, or its duration. Called while it still holds its
        devices."""
        for state in self.of_grant(key) if key in self.holding else ():
            grant = state.grants[key]
            if grant.mode is DeviceMode.MPS and grant.fault and exit_.failed_device:
                self._mps_faults[command] = self._mps_faults.get(command, 0) + 1
            elif grant.mode is DeviceMode.MPS and not exit_.exit_code:
                degree = round((grant.others + 1 + len(state.grants)) / 2)
                state.degree.ended(command, degree, exit_.ended_at - exit_.started_at)

    # -- totals --------------------------------------------------------------------------------------------------------

    def advertised(self) -> tuple[Device, ...]:
        """Devices as this node's profile lists them."""
        return tuple(self.states[name].device.advertised(self.states[name].grantable_bytes) for name in self._present)

    def loads(self, now_s: float) -> tuple[DeviceLoad, ...]:
        """The state of each device for load reports, refreshed once a second or after a change. A device that is
        reserved has no room for other tasks."""
        moment = self.version, int(now_s), tuple(self.kept)
        if self._told[0] != moment:
            self._told = moment, tuple(self._load(state, now_s) for state in self.states.values())
        return self._told[1]

    def _load(self, state: DeviceState, now_s: float) -> DeviceLoad:
        load = state.load(now_s)
        return (
            load
            if state.id not in self.kept
            else msgspec.structs.replace(load, free_mib=0, free_slots=0, free_percent=0)
        )

    @property
    def gpus_busy(self) -> float:
        """Number of GPUs kept busy by all programs: for each the larger share of its time and of its memory."""
        return sum(_busy(state) for state in self.of_kind(GPU))

    @property
    def gpus_foreign(self) -> float:
        """GPUs that foreign programs keep busy."""
        return sum(_busy(state) for state in self.of_kind(GPU) if state.foreign and not state.grants)

    def gpus_free(self) -> int:
        """Number of GPUs that one more task could have exclusively now."""
        return sum(
            state.mode is DeviceMode.FREE and state.reading.health.is_usable and state.id not in self.kept
            for state in self.of_kind(GPU)
        )


def _busy(state: DeviceState) -> float:
    size = state.device.mem_bytes
    return max(state.reading.busy, min(state.reading.mem_used_bytes / size, 1.0) if size else 0.0)


def _kind_of(name: str) -> str:
    maker = name.partition(":")[0]
    return GPU if maker in ("nvidia", "amd", "intel", GPU) else maker


OUT_OF_GPU_MEMORY = "gpu memory"
NEARLY_ALL = 0.97
"""If others leave this share of a promise free, it counts as not taken."""
STOPPED_BY = (1, 2, 9, 15)
"""Signals that others send; an attempt that they end has not failed."""
MODEL_CHARS_MAX = 96
REASON_CHARS_MAX = 512
DEVICE_CHARS_MAX = 128


def with_gpu_use(devices: DeviceLedger, key: str, names: Sequence[str], request: ResourceRequest, exit_: Exit) -> Exit:
    """The exit of an attempt that still holds ``names``, with its GPU use and the resource that it ran out of. Readings
    from before a restart of the agent are lost; for an attempt that ended meanwhile there are none.

    The peak memory of each grant comes from the readings while it ran. An attempt has run out of GPU memory only if the
    end of its stderr says that an allocation was refused (the agent checks: `Exit.out_of`). Its memory use is no
    evidence: a task that uses all its promised memory may fail for any reason. An attempt that failed has failed
    because of its device if the card is sick now, or if its MPS server has ended.
    """
    states = [state for name in names if (state := devices.states.get(name)) is not None and state.device.kind == GPU]
    if not states:
        return msgspec.structs.replace(exit_, out_of="") if exit_.out_of == OUT_OF_GPU_MEMORY else exit_
    state = max(states, key=lambda one: _peak_bytes(one.grants.get(key)))  # the first of equals
    grant = state.grants.get(key)
    peak_bytes = _peak_bytes(grant)
    usage = msgspec.structs.replace(
        exit_.usage, gpu_memory_bytes_max=peak_bytes, gpu_model=state.device.model[:MODEL_CHARS_MAX]
    )
    exit_ = msgspec.structs.replace(exit_, usage=usage)
    if has_failed(exit_):
        for one in states:
            if one.reading.health is Health.SICK:
                return _by_device(exit_, one, one.reading.why or "it is sick")
            if key in one.grants and one.grants[key].fault:
                return _by_device(exit_, one, f"MPS: {one.grants[key].fault}")
    promised_bytes = grant.promised_bytes if grant is not None else request.gpu_mem_bytes or None
    limit_bytes = promised_bytes or state.device.mem_bytes
    if exit_.out_of != OUT_OF_GPU_MEMORY or not has_failed(exit_):
        return msgspec.structs.replace(exit_, out_of="") if exit_.out_of == OUT_OF_GPU_MEMORY else exit_
    limit = f"limit {limit_bytes / 2**30:.1f} GiB" if limit_bytes else "limit not known"
    peak = f"peak {peak_bytes / 2**30:.1f}" if peak_bytes else "peak not seen"
    words = f"out of GPU memory on gpu{state.device.index}: {limit}, {peak}"
    return msgspec.structs.replace(
        exit_,
        out_of=OUT_OF_GPU_MEMORY,
        had_bytes=_had_bytes(state, grant, promised_bytes),
        reason=(f"{words}; {exit_.reason}" if exit_.reason else words)[:REASON_CHARS_MAX],
    )


def has_failed(exit_: Exit) -> bool:
    """True if the attempt failed by itself: not stopped, within its time limit, and not out of the machine's memory."""
    is_stopped = exit_.exit_code == TIME_LIMIT_EXIT_CODE or exit_.signal in STOPPED_BY
    return exit_.exit_code != 0 and not is_stopped and exit_.out_of in ("", OUT_OF_GPU_MEMORY)


def _by_device(exit_: Exit, state: DeviceState, why: str) -> Exit:
    """The exit of an attempt that failed because of this card or its MPS."""
    name = f"GPU {state.device.index}" + (f" ({state.device.model})" if state.device.model else "")
    return msgspec.structs.replace(
        exit_,
        out_of="",
        failed_device=name[:DEVICE_CHARS_MAX],
        reason=f"{name} failed under it: {why}; {how_it_ended(exit_)}"[:REASON_CHARS_MAX],
    )


def _peak_bytes(grant: DeviceGrant | None) -> int:
    return grant.peak_bytes if grant is not None else 0


def _had_bytes(state: DeviceState, grant: DeviceGrant | None, promised_bytes: int | None) -> int:
    """The memory of the card that it could have had; 0 if others have taken its promised or exclusive memory."""
    others_bytes = max(state.reading.mem_used_bytes - (grant.now_bytes if grant is not None else 0), 0)
    left_bytes = max(state.device.mem_bytes - others_bytes, 0)
    if promised_bytes is not None:
        return promised_bytes if not state.device.mem_bytes or left_bytes >= NEARLY_ALL * promised_bytes else 0
    was_alone = grant is not None and grant.ask.wants_empty_on(state.device)
    return 0 if was_alone and left_bytes < NEARLY_ALL * state.device.mem_bytes else left_bytes
