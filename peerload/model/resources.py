"""What a task needs and what a node has."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Cpus = Annotated[float, Meta(ge=0.0, le=65536.0)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
Name = Annotated[str, Meta(max_length=128)]
Speed = Annotated[float, Meta(gt=0.0, le=1000.0)]
Address = Annotated[str, Meta(max_length=300)]
BootId = Annotated[str, Meta(min_length=1, max_length=64)]
NodeName = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,40}\Z")]


class ResourceRequest(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What one task takes while it runs.

    cpus: cores, may be a fraction, > 0; mem_bytes: 0 = not stated; gpus: whole devices;
    gpu_mem_bytes: per device, 0 = not stated.
    """

    cpus: Annotated[float, Meta(gt=0.0, le=65536.0)] = 1.0
    mem_bytes: Bytes = 0
    gpus: Annotated[int, Meta(ge=0, le=1024)] = 0
    gpu_mem_bytes: Bytes = 0


class Placement(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Where a task may run. ``node`` pins it, ``exclude`` forbids nodes, every one of ``labels`` must be there,
    ``local`` keeps it at its home, ``migrations_max`` overrides the migration policy (None: as the policy says)."""

    node: NodeName | None = None
    exclude: Annotated[tuple[NodeName, ...], Meta(max_length=300)] = ()
    labels: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    local: bool = False
    migrations_max: Annotated[int, Meta(ge=0, le=1000)] | None = None


class Profile(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The static facts of a node: they decide who is *eligible*, that is, who could ever run a task.

    slots: tasks at a time (also the c of the policies); slots_fixed: the user set them; speed: how fast it works
    beside the reference machine (1.0): a task that takes t there takes t / speed here; trouble: what keeps it from
    working as it should, for people ("": nothing);
    version grows with every change. At most 4 KiB on the wire.
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
