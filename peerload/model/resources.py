"""Resources: the requests of tasks, and the profiles of nodes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from peerload.model.devices import (
    DEVICES_MAX,
    GPU,
    KINDS_ASKED_MAX,
    OOM_RETRIES_MAX,
    PREFERRED_MAX,
    Device,
    Fraction,
    GpuShare,
    GpuWait,
    Kind,
)
from peerload.model.power import PowerCurve

Cpus = Annotated[float, Meta(ge=0.0, le=65536.0)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
Name = Annotated[str, Meta(max_length=128)]
Speed = Annotated[float, Meta(gt=0.0, le=1000.0)]
Address = Annotated[str, Meta(max_length=300)]
BootId = Annotated[str, Meta(min_length=1, max_length=64)]
NodeName = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,40}\Z")]


OVERCOMMIT_SHARE = 0.8
"""Share of the requested cores that is guaranteed to a task that overcommits."""
Builder = Literal["pip", "uv", "conda"]
BUILDERS: dict[str, str] = {"pip": "uv, or Python with venv", "uv": "uv", "conda": "micromamba, mamba or conda"}
"""Programs that build an environment, by the kind of its lock file."""


class ResourceRequest(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Resources that one task takes while it runs.

    cpus: cores, may be a fraction, > 0; overcommit: OVERCOMMIT_SHARE of these is enough where more is not free; mem_bytes: 0 = not stated; gpus: how many, all of one node;
    gpu_mem_bytes: of each, 0 = not stated; gpu_fraction: of the one GPU that is asked for; gpu_prefer: which are wanted,
    the best first: a number, the beginning of a name, or a pattern of models such as ``A100*``; gpu_wait: what to do when
    those have no room, and after how many seconds (0: never) "wait for exactly those" ends; gpu_oom_retries: how often it
    is tried again with more memory of each GPU when it has run out of that; devices: of other kinds, how many.
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
    """Bound on its share of a GPU's multiprocessors under MPS, in percent; 0: none."""
    gpu_oom_retries: Annotated[int, Meta(ge=0, le=OOM_RETRIES_MAX)] = 2
    overcommit: bool = False
    devices: Annotated[
        tuple[tuple[Kind, Annotated[int, Meta(ge=1, le=1024)]], ...], Meta(max_length=KINDS_ASKED_MAX)
    ] = ()

    def __post_init__(self) -> None:
        """ValueError, where it is decoded a ValidationError, for what makes no sense together."""
        if self.gpu_fraction < 1.0 and self.gpus != 1:
            raise ValueError(f"a fraction ({self.gpu_fraction:g}) is of one GPU, and {self.gpus} are asked for")
        if self.gpu_fraction < 1.0 and self.gpu_share is GpuShare.EXCLUSIVE:
            raise ValueError("a fraction of a GPU is shared with others, and exclusive is asked for")
        if self.gpu_share is GpuShare.MPS and self.gpus != 1:
            raise ValueError(f"MPS shares one GPU, and {self.gpus} are asked for")
        if self.gpu_pct and self.gpu_share is not GpuShare.MPS:
            raise ValueError("a share of the multiprocessors (gpu_pct) is for gpu_share mps")
        if self.devices and len({kind for kind, _ in self.devices} | {GPU}) <= len(self.devices):
            raise ValueError("a kind of device is asked for twice, or gpu as one of the others")

    @property
    def takes_devices(self) -> bool:
        """True if it needs more than cores and memory."""
        return self.gpus > 0 or bool(self.devices)


class Placement(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Placement of a task: the nodes that it may run on. ``node`` pins it, ``exclude`` forbids nodes, every one of ``labels`` must be there,
    ``local`` keeps it at its home, ``migrations_max`` overrides the migration policy (None: as the policy says); ``builder``: the
    node has to be able to build an environment of this kind."""

    node: NodeName | None = None
    exclude: Annotated[tuple[NodeName, ...], Meta(max_length=300)] = ()
    labels: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    local: bool = False
    migrations_max: Annotated[int, Meta(ge=0, le=1000)] | None = None
    builder: Literal["", "pip", "uv", "conda"] = ""


class Profile(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The static facts of a node: they decide who is *eligible*, that is, who could ever run a task.

    slots: tasks at a time (also the c of the policies); slots_fixed: the user set them; speed: how fast it works
    beside the reference machine (1.0): a task that takes t there takes t / speed here; devices: each one, GPUs first
    (where there are none, ``gpus`` alone is known, and they are given whole); trouble: what keeps it from
    working as it should, for people ("": nothing);
    version grows with every change.
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
    """Tasks get their shares of the processors, so that some may overcommit."""
    power: PowerCurve | None = None
    """Its power over its load; None: not told."""
    wake: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^([0-9a-f]{2}:){5}[0-9a-f]{2}\Z")], ...], Meta(max_length=8)
    ] = ()
    """Addresses of network cards that a magic packet wakes it by; (): it is never suspended."""
    issuer: bool = False
    """True if it has the key of the cluster's CA, and so can let others in."""
    builders: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """The kinds of environments that it can build."""
    mps: Literal["", "home", "any"] = ""
    """Tasks that it runs under MPS: none, those of its own users, or any."""
