"""Resources: power curves and devices of nodes, the requests of tasks, the profiles of nodes, and the reports of their load.

Devices are granted to tasks one by one: GPUs, slices of GPUs, and any countable resource in a node's settings. Only the
kind `gpu` is measured and may be shared; all others are counted.
"""

from __future__ import annotations

import enum
import math
import zlib
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

POINTS_MAX = 33
"""Points of a curve that are sent to other nodes."""
SPEC_SHAPE = (0.219, 0.343, 0.394, 0.446, 0.5, 0.553, 0.617, 0.689, 0.778, 0.889, 1.0)
"""Power at 0, 10 … 100 % load over power at full load: medians of 155 SPECpower results since 2019."""
WATTS_PER_THREAD = 4.0
"""Assumed watts of a busy thread of an unknown processor."""

Watts = Annotated[float, Meta(ge=0.0, le=1e6)]


class Quality(enum.StrEnum):
    """Origin of watts and joules, the best first: read from a sensor, computed from readings, or from a model alone."""

    MEASURED = "measured"
    DERIVED = "derived"
    ESTIMATED = "estimated"

    @staticmethod
    def worst(qualities: tuple[Quality, ...]) -> Quality:
        """Quality of a sum: that of its worst part; of an empty sum: estimated."""
        return max(qualities, key=tuple(Quality).index, default=Quality.ESTIMATED)


class TaskCost(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Joules that a task would take on a node, by its power curve; for a task of unknown duration, for one second of
    work. price: of a kWh there now, None = unknown; wake_s: time that the node takes to wake; wake_joules: its energy
    meanwhile, not included in joules."""

    node: str
    joules: float
    quality: Quality = Quality.ESTIMATED
    price: float | None = None
    wake_s: float = 0.0
    wake_joules: float = 0.0


class PowerCurve(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, cache_hash=True):
    """Power of a node by its work rate u (0 … 1, of that with all threads busy), linear between equally spaced points.

    smt_gain: work rate of a core with all its threads busy over that with one; all_core: work rate of a core while all
    are busy over that of one core alone; off_w, wake_s: power while suspended, and how long it takes to resume; may_sleep:
    it is suspended when idle; cap_w: limit on its power for the placement of tasks, 0 = none.
    """

    watts: Annotated[tuple[Watts, ...], Meta(min_length=2, max_length=POINTS_MAX)]
    cores: Annotated[int, Meta(ge=1, le=65536)]
    threads: Annotated[int, Meta(ge=1, le=65536)]
    smt_gain: Annotated[float, Meta(ge=1.0, le=16.0)] = 1.0
    all_core: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    off_w: Watts = 0.0
    wake_s: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    may_sleep: bool = False
    cap_w: Watts = 0.0
    quality: Quality = Quality.ESTIMATED

    def __post_init__(self) -> None:
        """Raise ValueError (when decoded: ValidationError) for a decreasing curve."""
        if not all(math.isfinite(value) for value in self.watts):
            raise ValueError("a power curve has a point that is not a number")
        if any(after < before for before, after in pairwise(self.watts)):
            raise ValueError("a power curve falls: more load never takes less power")

    def rate(self, threads: float) -> float:
        """Work rate with this number of busy threads, in cores of an otherwise idle node."""
        busy = min(threads, float(self.threads))
        if busy <= self.cores:
            return busy * (1.0 - (1.0 - self.all_core) * busy / self.cores)
        return self.all_core * (self.cores + (self.smt_gain - 1.0) * (busy - self.cores))

    def thread_rate(self, threads: float) -> float:
        """Work rate of each of this number of busy threads."""
        return self.rate(threads) / threads if threads > 0 else self.rate(1.0)

    def watts_at(self, threads: float) -> float:
        """Power of the node while it is awake, with this number of busy threads."""
        return self.watts_doing(self.rate(max(threads, 0.0)))

    def watts_doing(self, rate: float) -> float:
        last = len(self.watts) - 1
        at = min(rate / self.rate(self.threads), 1.0) * last
        step = min(int(at), last - 1)
        return self.watts[step] + (self.watts[step + 1] - self.watts[step]) * (at - step)

    def settled_watts(self, threads: float) -> float:
        """Watts with this number of busy threads; an idle node that may sleep draws its power of sleep."""
        return self.off_w if self.may_sleep and threads <= 0 else self.watts_at(threads)

    def exceeds_cap(self, threads: float) -> bool:
        """True if this number of busy threads exceeds the power cap for tasks."""
        return bool(self.cap_w) and self.watts_at(threads) > self.cap_w

    def threads_under_cap(self, threads_max: float) -> float:
        """Most threads that tasks may keep busy, at most ``threads_max``."""
        if not self.exceeds_cap(threads_max):
            return threads_max
        counts = range(min(int(threads_max), self.threads), -1, -1)
        return float(next((count for count in counts if not self.exceeds_cap(count)), 0))

    def limited_as(self, other: PowerCurve | None) -> PowerCurve:
        """A copy with the fields about sleep of another curve of this node; they are not measured."""
        if other is None:
            return self
        limits = {name: getattr(other, name) for name in ("off_w", "wake_s", "may_sleep")}
        return msgspec.structs.replace(self, **limits)


def estimated_curve(threads: int, peak_w: float = 0.0) -> PowerCurve:
    """SPECpower-shaped guess for a node without measurements. peak_w: at full load, 0 = not known."""
    threads = max(threads, 1)
    peak_w = peak_w or WATTS_PER_THREAD * threads / (1.0 - SPEC_SHAPE[0])
    return PowerCurve(tuple(share * peak_w for share in SPEC_SHAPE), threads, threads)


GPU = "gpu"
DEVICES_MAX = 64
"""Devices of one node, slices included."""
KINDS_ASKED_MAX = 16
"""Kinds other than GPUs that one task may ask for."""
PREFERRED_MAX = 64
OOM_RETRIES_MAX = 16
"""Limit on retries of a task with more memory of its GPUs."""
LINKS_MAX = DEVICES_MAX
RUNS_SEEN_MAX = 256
"""Attempts seen on one device at a time."""
MIB = 1 << 20
MPS_CAPABILITY = 7.0
"""Minimum compute capability of a GPU that isolates the memory of MPS clients."""

DeviceId = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]{0,30}:[!-~]{1,80}\Z")]
"""`nvidia:GPU-<uuid>`, `nvidia:MIG-<uuid>`, `fpga:<name>`: maker (or kind), and name."""
Kind = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]{0,30}\Z")]
Word = Annotated[str, Meta(max_length=128)]
Size = Annotated[int, Meta(ge=0, le=1 << 60)]
Small = Annotated[int, Meta(ge=0, le=1 << 31)]
Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]


class GpuWait(enum.StrEnum):
    """Behaviour of a task whose preferred GPUs have no room: take any other that fits, or wait for exactly those."""

    SCHEDULE = "schedule"
    QUEUE = "queue"


class GpuShare(enum.StrEnum):
    """Sharing mode of a task's GPUs. auto: with others, if its need is known, else a GPU of its own at first;
    exclusive: never; time: with others, in turns, also if its need is not known; mps: with others at the
    same time, by NVIDIA's Multi-Process Service."""

    AUTO = "auto"
    EXCLUSIVE = "exclusive"
    TIME = "time"
    MPS = "mps"


class Health(enum.IntEnum):
    """Health of a device. UNKNOWN: its driver does not answer; SICK: it must not be used."""

    OK = 0
    DEGRADED = 1
    SICK = 2
    UNKNOWN = 3

    @property
    def is_usable(self) -> bool:
        """True if tasks may start on it."""
        return self in (Health.OK, Health.DEGRADED)


class DeviceMode(enum.IntEnum):
    """Mode in which a device is held now."""

    FREE = 0
    EXCLUSIVE = 1
    TIME = 2
    MPS = 3
    """Displayed by the node itself only; its reports to other nodes say TIME."""


class Nearness(enum.IntEnum):
    """Distance between two devices of one node, the nearest first."""

    NVLINK = 5
    INTERNAL = 10
    PIX = 20
    PXB = 30
    PHB = 40
    NODE = 45
    SYSTEM = 50


class Device(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Static facts of one device of a node.

    index: its number among devices of its kind; model: its maker's name for it; mem_bytes: 0 = unknown, then it serves
    one task at a time; grantable_bytes: the part that all tasks together may get (in reports to other nodes); is_read:
    it has readings; capability: compute capability of a GPU, such as 9.0; capabilities: features that were tried and
    work; links: distance to other devices of this node, by id.
    """

    id: DeviceId
    kind: Kind = GPU
    index: Small = 0
    model: Word = ""
    mem_bytes: Size = 0
    grantable_bytes: Size = 0
    is_read: bool = False
    bdf: Word = ""
    capability: Annotated[float, Meta(ge=0.0, le=1000.0)] = 0.0
    capabilities: Annotated[tuple[Word, ...], Meta(max_length=16)] = ()
    links: Annotated[tuple[tuple[DeviceId, Small], ...], Meta(max_length=LINKS_MAX)] = ()

    @property
    def name(self) -> str:
        """Its name in its driver, without the maker."""
        return self.id.partition(":")[2]

    @property
    def has_mps(self) -> bool:
        """True if MPS works on devices of this kind: whole NVIDIA cards since Volta."""
        return self.id.startswith("nvidia:GPU-") and self.capability >= MPS_CAPABILITY

    @property
    def mark(self) -> int:
        """32-bit hash of its id, for reports to other nodes."""
        return zlib.crc32(self.id.encode())

    def advertised(self, grantable_bytes: int) -> Device:
        """The device in profiles for other nodes: the facts that decide whether it could ever serve a task."""
        return Device(
            self.id, self.kind, self.index, self.model, self.mem_bytes, grantable_bytes, capability=self.capability
        )


class DeviceReading(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The last reading of one device.

    busy: share of the time at work, 0 … 1, averaged over 5 s; mem_used_bytes: by all programs; ours: (execution key,
    bytes) of each attempt of this node on it; mem_foreign_bytes: used by others; foreign: number of others, at least 1
    if no
    process explains the used memory or the work; power_w, energy_j: None if not known. mem_foreign_peak_bytes: sum of the recent
    peaks of the present foreign processes; 0 = no more than they have now.
    """

    id: DeviceId
    health: Health = Health.OK
    why: Word = ""
    busy: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    mem_used_bytes: Size = 0
    mem_foreign_bytes: Size = 0
    foreign: Small = 0
    ours: Annotated[tuple[tuple[Word, Size], ...], Meta(max_length=RUNS_SEEN_MAX)] = ()
    temperature_c: Small = 0
    is_throttled: bool = False
    power_w: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None
    energy_j: Annotated[float, Meta(ge=0.0, le=1e18)] | None = None
    mem_foreign_peak_bytes: Size = 0


class DeviceLoad(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Load of one device in reports to other nodes, at most 64 bytes.

    mark: `Device.mark`; free_mib: memory that could be promised now; free_slots: tasks of unknown work that could join;
    free_percent: the largest fraction that a task could get; eta_s: expected time until the next of its tasks ends, 0 = not
    known; price: of a second of work, in joules, 0 = not known; used_mib, foreign_mib: memory in use, in all and by others than
    this node's tasks; tasks: their number; temperature_c: 0 = not known.
    """

    mark: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
    mode: DeviceMode = DeviceMode.FREE
    free_mib: Small = 0
    free_slots: Small = 0
    eta_s: Small = 0
    price: Small = 0
    health: Health = Health.OK
    busy_percent: Annotated[int, Meta(ge=0, le=100)] = 0
    used_mib: Small = 0
    foreign_mib: Small = 0
    tasks: Small = 0
    free_percent: Annotated[int, Meta(ge=0, le=100)] = 0
    temperature_c: Annotated[int, Meta(ge=0, le=255)] = 0

    @property
    def is_free(self) -> bool:
        """True if a task that needs it exclusively could start on it."""
        return self.mode is DeviceMode.FREE and self.health.is_usable and self.free_slots > 0


Cpus = Annotated[float, Meta(ge=0.0, le=65536.0)]
BYTES_MAX = 1 << 60
Bytes = Annotated[int, Meta(ge=0, le=BYTES_MAX)]
Name = Annotated[str, Meta(max_length=128)]
Speed = Annotated[float, Meta(gt=0.0, le=1000.0)]
Address = Annotated[str, Meta(max_length=300)]
BootId = Annotated[str, Meta(min_length=1, max_length=64)]
NodeName = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,40}\Z")]
CardAddress = Annotated[str, Meta(pattern=r"^([0-9a-f]{2}:){5}[0-9a-f]{2}\Z")]
"""Hardware address of an Ethernet card; those of InfiniBand are longer, and no magic packet wakes them."""


OVERCOMMIT_SHARE = 0.8
"""Share of the requested cores that a task with overcommit is guaranteed."""
Builder = Literal["pip", "uv", "conda"]
BUILDERS: dict[str, str] = {"pip": "uv, or Python with venv", "uv": "uv", "conda": "micromamba, mamba or conda"}
"""Programs that build an environment, by the kind of its lock file."""


class ResourceRequest(msgspec.Struct, frozen=True, gc=False, cache_hash=True, omit_defaults=True):
    """Resources that one task takes while it runs.

    cpus: cores, may be a fraction, > 0; overcommit: OVERCOMMIT_SHARE of these is enough if no more are free; mem_bytes:
    0 = not stated; gpus: number of GPUs, all of one node; gpu_mem_bytes: of each, 0 = not stated; gpu_fraction: of the
    one requested
    GPU; gpu_prefer: preferred GPUs, the best first: a number, the beginning of a name, or a pattern of models such as
    ``A100*``; gpu_wait: behaviour when those have no room; gpu_wait_s_max: seconds until waiting for exactly those ends, 0 =
    never; gpu_oom_retries: retries with more memory of each GPU after it ran out of that; devices: number of each other kind.
    """

    cpus: Annotated[float, Meta(gt=0.0, le=65536.0)] = 1.0
    mem_bytes: Bytes = 0
    gpus: Annotated[int, Meta(ge=0, le=1024)] = 0
    gpu_mem_bytes: Bytes = 0
    gpu_fraction: Fraction = 1.0
    gpu_prefer: Annotated[tuple[Name, ...], Meta(max_length=PREFERRED_MAX)] = ()
    gpu_wait: GpuWait = GpuWait.SCHEDULE
    gpu_wait_s_max: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    gpu_share: GpuShare = GpuShare.AUTO
    gpu_pct: Annotated[int, Meta(ge=0, le=100)] = 0
    """Limit on its share of a GPU's multiprocessors under MPS, in percent; 0: none."""
    gpu_oom_retries: Annotated[int, Meta(ge=0, le=OOM_RETRIES_MAX)] = 2
    overcommit: bool = False
    devices: Annotated[
        tuple[tuple[Kind, Annotated[int, Meta(ge=1, le=1024)]], ...], Meta(max_length=KINDS_ASKED_MAX)
    ] = ()

    def __post_init__(self) -> None:
        """Raise ValueError (when decoded: ValidationError) for values that contradict each other."""
        if self.gpu_fraction < 1.0 and self.gpus != 1:
            raise ValueError(f"a fraction ({self.gpu_fraction:g}) is of one GPU, and {self.gpus} are asked for")
        if self.gpu_fraction < 1.0 and self.gpu_share is GpuShare.EXCLUSIVE:
            raise ValueError("a fraction of a GPU is shared with others, and exclusive is asked for")
        if self.gpu_share is GpuShare.MPS and self.gpus != 1:
            raise ValueError(f"MPS shares one GPU, and {self.gpus} are asked for")
        if self.gpu_pct and self.gpu_share is not GpuShare.MPS:
            raise ValueError("a share of the multiprocessors (gpu_pct) is for gpu_share mps")
        if self.devices and len({kind for kind, _ in self.devices} | {GPU}) <= len(self.devices):
            raise ValueError("a kind of device is requested twice, or gpu as another kind")

    @property
    def takes_devices(self) -> bool:
        """True if it needs more than cores and memory."""
        return self.gpus > 0 or bool(self.devices)


class Placement(msgspec.Struct, frozen=True, gc=False, cache_hash=True, omit_defaults=True):
    """Placement of a task: the nodes that it may run on. ``node`` pins it, ``exclude`` forbids nodes, ``labels`` requires each of
    these, ``local`` keeps it at its home, ``migrations_max`` overrides the migration policy (None: as the policy says);
    ``builder`` requires a node that can build an environment of this kind."""

    node: NodeName | None = None
    exclude: Annotated[tuple[NodeName, ...], Meta(max_length=300)] = ()
    labels: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    local: bool = False
    migrations_max: Annotated[int, Meta(ge=0, le=1000)] | None = None
    builder: Literal["", "pip", "uv", "conda"] = ""


class Profile(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The static facts of a node: they decide which nodes are *eligible*, that is, could ever run a task.

    slots: tasks at a time (also the c of the policies); slots_fixed: the user set them; speed: relative to the reference
    machine (1.0): a task that takes t there takes t / speed here; devices: GPUs first (if empty, only the number ``gpus`` is
    known, and they are given whole); trouble: problem of the node, for people ("": none); version grows with every change.
    """

    node: NodeName
    slots: Annotated[int, Meta(ge=0, le=65536)]
    cpus: Cpus
    mem_bytes: Bytes = 0
    gpus: Annotated[int, Meta(ge=0, le=1024)] = 0
    labels: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    slots_fixed: bool = False
    drained: bool = False
    drain_reason: Annotated[str, Meta(max_length=256)] = ""
    protocol_min: Annotated[int, Meta(ge=1, le=1000)] = 1
    protocol_max: Annotated[int, Meta(ge=1, le=1000)] = 1
    version: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    speed: Speed = 1.0
    trouble: Annotated[str, Meta(max_length=256)] = ""
    devices: Annotated[tuple[Device, ...], Meta(max_length=DEVICES_MAX)] = ()
    enforces_cores: bool = False
    """True if it enforces the processor shares of tasks, so that some may overcommit."""
    power: PowerCurve | None = None
    """Its power curve; None: not known."""
    wake: Annotated[tuple[CardAddress, ...], Meta(max_length=8)] = ()
    """Addresses of network cards for a magic packet that wakes it; (): it is never suspended."""
    issuer: bool = False
    """True if it has the key of the cluster's CA, so that it can invite others."""
    builders: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """The kinds of environments that it can build."""
    mps: Literal["", "home", "any"] = ""
    """Tasks that it runs under MPS: none, those of its own users, or any."""


Count = Annotated[int, Meta(ge=0, le=1 << 40)]
LOAD_MAX = 1e12
"""The greatest load index in reports."""
Share = Annotated[float, Meta(ge=0.0, le=LOAD_MAX)]
Price = Annotated[float, Meta(ge=-LOAD_MAX, le=LOAD_MAX)]


class Region(enum.IntEnum):
    """Region of the load index of a node: below the low threshold, above the high one, or between."""

    UNDERLOADED = 0
    NORMAL = 1
    OVERLOADED = 2


class LoadReport(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Load of a node, as it reports it.

    load_tasks: n = running + waiting + inbound + slots_foreign; load: the load index per slot, which policies compare; movable:
    waiting tasks that may go elsewhere; accepts, gives: the present decision of its transfer policy; cpu_pressure,
    mem_pressure: share of the last 10 s in which a process waited for a core, or for memory (0: or not known); gpus_free: GPUs
    that are free for exclusive use; gpus: number of GPUs; gpu_tasks: GPUs requested by the tasks here; gpu_load: their load
    index, per GPU; devices: the room of each, GPUs first; cpus_free: unreserved cores of a node with devices, or whose tasks
    request other than a core for each slot; mem_requested_bytes: memory requested by the tasks that n counts; cpus_foreign: cores
    kept busy by programs that are not tasks of this node (averaged over 15 s); slots_foreign: the slots that they occupy, 0 where
    they are ignored. Of two reports of one node the one with the greater (incarnation, sequence) is newer.
    """

    load_tasks: Count = 0
    slots: Count = 0
    running: Count = 0
    waiting: Count = 0
    movable: Count = 0
    load: Share = 0.0
    region: Region = Region.UNDERLOADED
    accepts: bool = False
    gives: bool = False
    cpus_busy: Share = 0.0
    mem_used_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    gpus_free: Count = 0
    incarnation: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    sequence: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    cpu_pressure: Share = 0.0
    mem_pressure: Share = 0.0
    gpus: Count = 0
    gpu_tasks: Count = 0
    gpu_load: Share = 0.0
    devices: Annotated[tuple[DeviceLoad, ...], Meta(max_length=DEVICES_MAX)] = ()
    cpus_free: Share = LOAD_MAX
    cpus_foreign: Share = 0.0
    slots_foreign: Count = 0
    is_asleep: bool = False
    """True if the machine is suspended, and a task wakes it."""
    watts: Watts | None = None
    """Power as sensors read it; None without a sensor."""
    price: Price | None = None
    """Present price of a kWh, or its carbon; None: not known."""
    mem_requested_bytes: Bytes = 0

    @property
    def is_overloaded(self) -> bool:
        """True if it is overloaded and has a task that may move."""
        return self.region is Region.OVERLOADED and self.movable > 0

    @property
    def has_work(self) -> bool:
        """True if it may give a task to a node that asks."""
        return self.gives or self.is_overloaded


class Thresholds(msgspec.Struct, frozen=True, gc=False):
    """The four thresholds of a transfer policy, on the load index: in tasks per slot.

    A node with c slots and a load index of n / c (tasks per slot, unless the load policy counts otherwise) *sends* an arriving
    task if n ≥ send_at·c, *accepts* one if n < accept_below·c, *asks* for one if n < receive_below·c, *gives* one if
    n > give_above·c. prefetch: number of additional tasks that it asks for, only from nodes that have more than itself even then.
    With is_pipelined it asks for at least as many as its slots are expected to finish during a handoff.
    """

    send_at: float
    accept_below: float
    receive_below: float
    give_above: float
    prefetch: float = 0.0
    is_pipelined: bool = False
