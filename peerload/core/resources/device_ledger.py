"""All devices of this node: what is granted to whom, what others have of them, and what other nodes are told of it.

Each of them is a `DeviceState` of `devices.py`. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.core.resources.devices import NEVER_S, DeviceGrant, DeviceState
from peerload.model.bounded import BoundedDict
from peerload.model.devices import GPU, Device, DeviceLoad, DeviceMode, DeviceReading, GpuShare, Health

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from peerload.core.resources.devices import DeviceRequest
    from peerload.model.config import GpuConfig
    from peerload.model.resources import Profile
    from peerload.model.task import Exit, TaskSpec

STRAYS_MAX = 1024
MPS_FAULTS_MAX = 2


class DeviceLedger:
    """All devices of this node, in the order in which they are numbered; `holding` names the devices of an attempt.
    version grows with whatever may give a waiting task room."""

    def __init__(self, profile: Profile, config: GpuConfig) -> None:
        self.config = config
        self.states: dict[str, DeviceState] = {}
        self.holding: dict[str, tuple[str, ...]] = {}
        self.version = 0
        self.was_left = False
        """An attempt is over whose devices have to be read."""
        self.strays: dict[tuple[str, str], None] = {}
        """(execution key, device id) of attempts seen on devices that they were not given, as long as they hold others or
        none: the newest STRAYS_MAX."""
        self.kept: Mapping[str, object] = {}
        """Ids of those that are kept for somebody who waits for them."""
        self._leaving: dict[str, float] = {}
        self._present: tuple[str, ...] = ()
        self._mps_faults: BoundedDict[tuple[bytes, ...], int] = BoundedDict(STRAYS_MAX)
        """By command: attempts under which MPS has failed."""
        self.models: tuple[str, ...] = ()
        """Of the GPUs that are there."""
        self._told: tuple[tuple[int, int, tuple[str, ...]], tuple[DeviceLoad, ...]] = (-1, 0, ()), ()
        self.set_devices(
            profile.devices or tuple(Device(f"gpu:{number}", index=number) for number in range(profile.gpus))
        )

    def set_devices(self, devices: Iterable[Device]) -> None:
        """These are the node's devices. One that is gone but was given to somebody stays, and is not given again."""
        before, self.states = self.states, {}
        for device in devices:
            state = before.pop(device.id, None)
            if state is None:
                state = DeviceState(device, self.config)
            elif device.id not in self._present:  # it is back: what was said of it holds no more
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
        state.reading = DeviceReading(state.id, Health.SICK, "it is not there (any more)")
        return state

    def of_grant(self, key: str) -> list[DeviceState]:
        """The GPUs that this attempt holds, in the order granted."""
        held = (self.states[name] for name in self.holding.get(key, ()))
        return [state for state in held if state.device.kind == GPU]

    def of_kind(self, kind: str) -> list[DeviceState]:
        """The devices of one kind, in order."""
        return [state for state in self.states.values() if state.device.kind == kind]

    def read(self, readings: Iterable[DeviceReading], read_s: float) -> list[tuple[str, str]]:
        """Take in the readings of ``read_s``; grants of attempts that are over end when nothing is seen of them any more. → who is
        seen where it has no business for the first time, as (execution key, device id)."""
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
            if len(self.strays) > STRAYS_MAX:
                del self.strays[next(iter(self.strays))]
        for key in [key for key, left_s in self._leaving.items() if read_s >= left_s and not self._is_seen(key)]:
            self._release(key)
        self.version += 1
        return strays

    def _is_seen(self, key: str) -> bool:
        """True if its processes are on a device still, or nobody can tell."""
        states = [self.states[name] for name in self.holding[key]]
        return any(
            state.reading.health is Health.UNKNOWN or any(key == seen for seen, _ in state.reading.ours)
            for state in states
        )

    # -- grants --------------------------------------------------------------------------------------------------------

    def grant(self, key: str, names: Sequence[str], ask: DeviceRequest, now_s: float) -> None:
        """These devices are this attempt's from now on; one that is not there (any more) is noted all the same."""
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
        """Undo a grant of a trial."""
        self.version += 1
        for name in self.holding.pop(key, ()):
            del self.states[name].grants[key]

    def end(self, key: str, now_s: float) -> None:
        """The attempt is over. A device that is read is given away when a reading shows nothing of it there any more."""
        names = self.holding.get(key, ())
        if not any(self.states[name].device.is_read for name in names):
            self._release(key)
            return
        self._leaving[key] = now_s
        self.was_left = True
        for name in names:
            self.states[name].grants[key].leaves_s = now_s

    def _release(self, key: str) -> None:
        self.version += key in self.holding
        for name in self.holding.pop(key, ()):
            state = self.states[name]
            state.grants.pop(key, None)
            if not state.grants and state.reading.health is Health.SICK and not state.device.is_read:
                del self.states[name]
        self._leaving.pop(key, None)

    def expire(self, now_s: float) -> None:
        """Time has passed: what an ended attempt has left on a device counts as foreign from now on."""
        for key in [key for key, left_s in self._leaving.items() if now_s >= left_s + self.config.release_s_max]:
            self._release(key)
        self.version += 1

    def due_s(self, now_s: float) -> float:
        """The time at which time alone will have changed something; infinite = never."""
        if not self._leaving and not self.states:
            return NEVER_S  # asked after every event
        dues = [left_s + self.config.release_s_max for left_s in self._leaving.values()]
        for state in self.states.values():
            dues += [
                grant.since_s + self.config.settle_s
                for grant in state.grants.values()
                if not grant.is_settled(now_s, self.config.settle_s)
            ]
        return min(dues, default=NEVER_S)

    # -- MPS -----------------------------------------------------------------------------------------------------------

    def mps_owner(self, spec: TaskSpec, *, is_local: bool) -> str | None:
        """Owner of the MPS daemon that a task could use. None: there is no such daemon, or its command has broken MPS before and it
        does not ask for MPS."""
        if self.config.mps_by_user and not is_local:
            return None
        is_broken = self._mps_faults.get(spec.argv, 0) >= MPS_FAULTS_MAX and spec.request.gpu_share is not GpuShare.MPS
        return None if is_broken else spec.user if self.config.mps_by_user else ""

    def mps_reported(self, name: str, why: str, *, is_fault: bool) -> None:
        """MPS of a device works, or not. Tasks that wait for its daemon, and can do without, share in turns."""
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
        """Learn from the end of an attempt that still holds its devices."""
        for state in self.of_grant(key):
            grant = state.grants[key]
            if grant.mode is DeviceMode.MPS and grant.fault and exit_.failed_device:
                self._mps_faults[command] = self._mps_faults.get(command, 0) + 1
            elif grant.mode is DeviceMode.MPS and not exit_.exit_code:
                degree = round((grant.others + 1 + len(state.grants)) / 2)
                state.degree.ended(command, degree, exit_.ended_at - exit_.started_at)

    # -- summed up -----------------------------------------------------------------------------------------------------

    def advertised(self) -> tuple[Device, ...]:
        """All devices, as the profile of this node tells them."""
        return tuple(self.states[name].device.advertised(self.states[name].grantable_bytes) for name in self._present)

    def loads(self, now_s: float) -> tuple[DeviceLoad, ...]:
        """The state of each device, as load reports tell it; worked out anew once a second, or when something has changed. One that is kept
        for somebody has no room for others."""
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
        """GPUs kept busy by anybody: of each the share of its time, or of its memory, whichever is larger."""
        return sum(_busy(state) for state in self.of_kind(GPU))

    @property
    def gpus_foreign(self) -> float:
        """GPUs that foreign programs keep busy."""
        return sum(_busy(state) for state in self.of_kind(GPU) if state.foreign and not state.grants)

    def gpus_free(self) -> int:
        """GPUs that one more task could have for itself now."""
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
