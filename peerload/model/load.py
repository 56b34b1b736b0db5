"""Load of a node, and the report of it that others get."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from peerload.model.devices import DEVICES_MAX, DeviceLoad
from peerload.model.power import Watts

Count = Annotated[int, Meta(ge=0, le=1 << 40)]
LOAD_MAX = 1e12
"""A greater load index is not told."""
Share = Annotated[float, Meta(ge=0.0, le=LOAD_MAX)]
Price = Annotated[float, Meta(ge=-LOAD_MAX, le=LOAD_MAX)]


class Region(enum.IntEnum):
    """Region of the load index of a node: below the low threshold, above the high one, or between."""

    UNDERLOADED = 0
    NORMAL = 1
    OVERLOADED = 2


class LoadReport(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A node's own word on its load.

    load_tasks: n = running + waiting + inbound + slots_foreign; load: the load index per slot (what policies compare);
    movable: waiting tasks that may go elsewhere; accepts / gives: what its transfer policy says now; cpu_pressure, mem_pressure: the
    share of the last 10 s in which somebody had to wait for a core, or for memory (0: or it cannot be told); gpus_free: GPUs that a task which
    wants one for itself could have; gpus: how many there are; gpu_tasks: how many are
    asked for by the tasks here; gpu_load: their load index, per GPU; devices: the room of each, GPUs first; cpus_free: of a
    node with devices the cores that nobody has or is about to have; cpus_foreign: cores that programs keep busy which are no
    tasks of this node (averaged over 15 s); slots_foreign: the slots that they occupy, 0 where they are ignored.
    Of two reports of one node the one with the greater (incarnation, sequence) is the newer.
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
    """True if the machine is suspended, and is woken by a task."""
    watts: Watts | None = None
    """Power as sensors read it; None: there is none."""
    price: Price | None = None
    """Price of a kWh there now, or its carbon; None: not known."""

    @property
    def is_overloaded(self) -> bool:
        """True if it has a task too many that may go."""
        return self.region is Region.OVERLOADED and self.movable > 0

    @property
    def has_work(self) -> bool:
        """True if it may give a task to a node that asks."""
        return self.gives or self.is_overloaded


class Thresholds(msgspec.Struct, frozen=True, gc=False):
    """The four thresholds of a transfer policy, on the load index: in tasks per slot.

    On a node with c slots and a load index of n / c, which is the tasks per slot unless the load policy counts otherwise: it *sends* an arriving task if n ≥ send_at·c, *accepts* one if
    n < accept_below·c, *asks* for one if n < receive_below·c, *gives* one if n > give_above·c. prefetch: it asks for so
    many tasks more, but only of nodes that have more than itself even then.
    """

    send_at: float
    accept_below: float
    receive_below: float
    give_above: float
    prefetch: float = 0.0
