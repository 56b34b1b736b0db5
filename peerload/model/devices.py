"""Devices: what tasks are given one by one, such as GPUs, slices of GPUs, and anything countable that a node is told of.

What a device is (`Device`), what was last read of it (`DeviceReading`), what other nodes are told of its room
(`DeviceLoad`), and how a task may ask for it. Only the kind `gpu` is measured and may be shared; all others are counted.
"""

from __future__ import annotations

import enum
import zlib
from typing import Annotated

import msgspec
from msgspec import Meta

GPU = "gpu"
DEVICES_MAX = 64
"""Devices of one node, slices included."""
KINDS_ASKED_MAX = 16
"""Kinds other than GPUs that one task may ask for."""
PREFERRED_MAX = 64
OOM_RETRIES_MAX = 16
"""Bound on retries of a task with more memory of its GPUs."""
LINKS_MAX = DEVICES_MAX
RUNS_SEEN_MAX = 256
"""Attempts seen on one device at a time."""
MIB = 1 << 20
MPS_CAPABILITY = 7.0
"""Capability for computing of a GPU that keeps the memory of the clients of MPS apart."""

DeviceId = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]{0,30}:[!-~]{1,80}\Z")]
"""`nvidia:GPU-<uuid>`, `nvidia:MIG-<uuid>`, `fpga:<name>`: who makes it (or its kind), and its own name."""
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
    """With whom a task shares its GPUs. auto: with others, if its need is known, else a GPU of its own at first;
    exclusive: with nobody; time: with others, in turns, also if its need is not known; mps: with others at the same time, by NVIDIA's
    Multi-Process Service."""

    AUTO = "auto"
    EXCLUSIVE = "exclusive"
    TIME = "time"
    MPS = "mps"


class Health(enum.IntEnum):
    """True if a device may be given to tasks. UNKNOWN: its driver does not answer; SICK: it must not be used."""

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
    """Shown by the node itself alone; others are told TIME."""


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
    """One device of a node, as far as that does not change.

    index: the number that people know it by, among those of its kind; model: in its maker's words; mem_bytes: 0 = not
    known, then it is given to one task at a time; grantable_bytes: what of it tasks may have, all together (as others are told); is_read: there
    are readings of it; capability: of a GPU for computing, such as 9.0; capabilities: what was found to work, by trying;
    links: how near others of this node are, by id.
    """

    id: DeviceId
    kind: Kind = GPU
    index: Small = 0
    model: Word = ""
    mem_bytes: Size = 0
    grantable_bytes: Size = 0
    is_read: bool = False
    vendor: Word = ""
    bdf: Word = ""
    numa_node: Annotated[int, Meta(ge=-1, le=1 << 20)] = -1
    capability: Annotated[float, Meta(ge=0.0, le=1000.0)] = 0.0
    multiprocessors: Small = 0
    capabilities: Annotated[tuple[Word, ...], Meta(max_length=16)] = ()
    links: Annotated[tuple[tuple[DeviceId, Small], ...], Meta(max_length=LINKS_MAX)] = ()

    @property
    def name(self) -> str:
        """Its name in its driver, without that of the maker."""
        return self.id.partition(":")[2]

    @property
    def has_mps(self) -> bool:
        """True if MPS works on devices of this kind: whole NVIDIA cards since Volta."""
        return self.id.startswith("nvidia:GPU-") and self.capability >= MPS_CAPABILITY

    @property
    def mark(self) -> int:
        """32 bits that stand for its id in what other nodes are told."""
        return zlib.crc32(self.id.encode())

    def advertised(self, grantable_bytes: int) -> Device:
        """The device as other nodes see it: with what they need to know whether it could ever serve a task."""
        return Device(
            self.id, self.kind, self.index, self.model, self.mem_bytes, grantable_bytes, capability=self.capability
        )


class DeviceReading(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The last reading of one device.

    busy: share of the time at work, 0 … 1, averaged over 5 s; mem_used_bytes: by anybody; ours: (execution key, bytes) of
    each attempt of this node that is on it; mem_foreign_bytes: used by others; foreign: how many others, at least 1 where
    memory or work is there that no process explains; power_w, energy_j: None where it cannot tell. mem_foreign_peak_bytes: the
    most that the foreign processes that are there now have lately had, each by itself, added up; 0 = no more than they have now.
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
    """Load of one device as other nodes get it, in at most 64 bytes.

    mark: `Device.mark`; free_mib: memory that could be promised now; free_slots: tasks that could join, whose work is not
    known; free_percent: how much of it one that asks for a part could have; eta_s: when the
    next of its tasks is expected to end, 0 = not known; price: of a second of work, in joules, 0 = not known;
    used_mib, foreign_mib: memory in use, by anybody and by others than this node's tasks; tasks: how many it has; temperature_c:
    0 = not known.
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
        """True if a task that wants it for itself could start on it."""
        return self.mode is DeviceMode.FREE and self.health.is_usable and self.free_slots > 0
