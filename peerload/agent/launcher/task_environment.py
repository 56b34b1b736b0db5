"""Environment variables of tasks about their cores and devices.

GPUs are given by name, not by number, since a process that gets some of them numbers these anew. A task that asked for
no GPU sees none. Variables that are mere advice (threads, memory of frameworks) are left as the user has set them;
those that assign devices are not.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import msgspec

from peerload.model.errors import BadRequest
from peerload.model.resources import GPU, MIB, Device, DeviceMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from peerload.core.resources.devices import DeviceLedger
    from peerload.model.config import DeviceConfig
    from peerload.model.resources import ResourceRequest

IDS = "{ids}"
"""Placeholder in the variables of the config: the names of the task's devices of that kind, separated by commas."""
KNOWN_BY_NAME = "nvidia"
ADVICE = frozenset(
    {"OMP_NUM_THREADS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_FORCE_GPU_ALLOW_GROWTH"}
)
"""Variables that the submitter may override."""
SHARE_MIN = 0.01


class HeldDevices(msgspec.Struct, frozen=True):
    """The devices of one attempt. devices: in the order granted, GPUs and others. is_exclusive: its GPUs are not
    shared. promised_bytes: memory on each GPU, 0 = unknown. is_mps: it runs under MPS."""

    devices: tuple[Device, ...] = ()
    is_exclusive: bool = False
    promised_bytes: int = 0
    is_mps: bool = False

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs among the devices."""
        return tuple(device for device in self.devices if device.kind == GPU)

    @property
    def mode(self) -> DeviceMode:
        """The mode in which its GPUs are held; FREE without any."""
        if not self.gpus:
            return DeviceMode.FREE
        if self.is_mps:
            return DeviceMode.MPS
        return DeviceMode.EXCLUSIVE if self.is_exclusive else DeviceMode.TIME


def held_devices(key: str, names: Iterable[str], ledger: DeviceLedger) -> HeldDevices:
    """The devices that the attempt of this key holds, among these ids."""
    states = [ledger.states[name] for name in names if name in ledger.states]
    grants = [state.grants[key] for state in states if state.device.kind == GPU and key in state.grants]
    is_exclusive = any(grant.ask.is_exclusive for grant in grants)
    promised = [grant.promised_bytes or 0 for grant in grants]
    if is_exclusive and not all(promised):
        promised = [state.grantable_bytes for state in states if state.device.kind == GPU]
    is_mps = any(grant.mode is DeviceMode.MPS for grant in grants)
    return HeldDevices(tuple(state.device for state in states), is_exclusive, min(promised, default=0), is_mps)


def variables(
    request: ResourceRequest, held: HeldDevices, config: Sequence[DeviceConfig], own: Mapping[bytes, bytes]
) -> dict[str, str]:
    """The variables to add. own: those that the task brings. config: the `[[device]]` tables of this node."""
    found = {
        "PEERLOAD_CPUS": f"{request.cpus:g}",
        "PEERLOAD_MEM_BYTES": str(request.mem_bytes),
        "OMP_NUM_THREADS": str(max(int(request.cpus), 1)),
        **_of_gpus(held),
        **(_of_mps(request, held) if held.is_mps else {}),
        **_of_others(held, config),
    }
    return {name: value for name, value in found.items() if name not in ADVICE or name.encode() not in own}


def _of_gpus(held: HeldDevices) -> dict[str, str]:
    gpus = held.gpus
    found = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(_cuda_name(gpu) for gpu in gpus),
        "PEERLOAD_GPUS": ",".join(str(gpu.index) for gpu in gpus),
    }
    if not gpus:
        return found
    found["PEERLOAD_GPU_MODE"] = held.mode.name.lower()
    if held.promised_bytes:
        found["PEERLOAD_GPU_MEM_MB"] = str(held.promised_bytes // MIB)
    if not held.is_exclusive:
        found |= _of_sharing(held)
    return found


def _of_sharing(held: HeldDevices) -> dict[str, str]:
    """Variables that keep frameworks from taking nearly the whole card at once."""
    found = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    smallest = min((gpu.mem_bytes for gpu in held.gpus if gpu.mem_bytes), default=0)
    if held.promised_bytes and smallest:
        share = max(min(held.promised_bytes / smallest, 1.0), SHARE_MIN)
        found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{int(share * 1000) / 1000:g}"
    return found


def _of_mps(request: ResourceRequest, held: HeldDevices) -> dict[str, str]:
    """Bounds that MPS enforces. The directories of the daemon are added when it runs."""
    found = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(request.gpu_pct)} if request.gpu_pct else {}
    if held.promised_bytes:
        found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={held.promised_bytes // MIB}M"
    return found


def _cuda_name(gpu: Device) -> str:
    """The name of a GPU for CUDA; its number where the name is unknown."""
    return gpu.name if gpu.id.startswith(KNOWN_BY_NAME + ":") else str(gpu.index)


def _of_others(held: HeldDevices, config: Sequence[DeviceConfig]) -> dict[str, str]:
    """`PEERLOAD_FPGA=f0,f1` for each kind, and the variables of the config."""
    by_kind: dict[str, list[str]] = {}
    for device in held.devices:
        if device.kind != GPU:
            by_kind.setdefault(device.kind, []).append(device.name)
    found: dict[str, str] = {}
    for kind, names in by_kind.items():
        ids = ",".join(names)
        found[f"PEERLOAD_{kind.upper().replace('-', '_')}"] = ids
        for one in config:
            if one.kind == kind:
                found |= {name: value.replace(IDS, ids) for name, value in one.env.items()}
    return found


TRACEPARENT = b"TRACEPARENT"
TRACEPARENT_PARTS = 4
_TRACEPARENT = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def child_traceparent(given: bytes, key: str) -> str:
    """The W3C trace context of an attempt: the trace that its task was submitted in, and a span of its own, which its key gives.
    "" if what was given is none."""
    if not _TRACEPARENT.fullmatch(given):
        return ""
    span = hashlib.blake2b(given + key.encode(), digest_size=8).hexdigest()
    return f"{given[:35].decode()}-{span}-{given[53:].decode()}"


_decoder = msgspec.msgpack.Decoder(dict[bytes, bytes])


def variables_of(packed: bytes) -> dict[bytes, bytes]:
    """The variables. Raises BadRequest if it is no such map, or has what no process can have: an empty name, a name
    with ``=``, a NUL byte. Peers and clients are not trusted to have looked."""
    try:
        variables = _decoder.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("the environment is no map of bytes to bytes", why=str(error)[:200]) from None
    for name, value in variables.items():
        if not name or b"=" in name or b"\0" in name or b"\0" in value:
            shown = name[:80].decode("utf-8", "backslashreplace")
            raise BadRequest(f"{shown!r} cannot be an environment variable", why="it is empty, or has = or NUL in it")
    return variables
