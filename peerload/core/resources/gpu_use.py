"""GPU usage of attempts that have ended here, and detection of ends for want of GPU memory.

The most memory of each grant is what the readings have shown while it ran. An attempt has run out of GPU memory only if the
last words of its stderr say that an allocation was refused (the agent looks: `Exit.out_of`). How much it had used is no
evidence: a task that uses all that it was promised may fail for any reason. An attempt that failed on a card that is sick by
now, which it was not when it was given, or under MPS whose server has ended, failed because of that. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.model.devices import GPU, Health
from peerload.model.task import TIME_LIMIT_EXIT_CODE, how_it_ended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.core.resources.device_ledger import DeviceLedger
    from peerload.core.resources.devices import DeviceGrant, DeviceState
    from peerload.model.resources import ResourceRequest
    from peerload.model.task import Exit

OUT_OF_GPU_MEMORY = "gpu memory"
NEARLY_ALL = 0.97
"""Others who have left this share of a promise free have not taken it."""
STOPPED_BY = (1, 2, 9, 15)
"""Signals that somebody else sends; what they end has not failed."""
MODEL_CHARS_MAX = 96
REASON_CHARS_MAX = 512
DEVICE_CHARS_MAX = 128


def with_gpu_use(devices: DeviceLedger, key: str, names: Sequence[str], request: ResourceRequest, exit_: Exit) -> Exit:
    """The exit of an attempt that still holds ``names``, with what it has used, and what it had too little of. After a
    start of the agent what was read before is not known any more; of an attempt that ended meanwhile nothing is."""
    states = [state for name in names if (state := devices.states.get(name)) is not None and state.device.kind == GPU]
    if not states:
        return msgspec.structs.replace(exit_, out_of="") if exit_.out_of == OUT_OF_GPU_MEMORY else exit_
    state = max(states, key=lambda one: _peak_bytes(one.grants.get(key)))  # of equal ones the first that was given
    grant = state.grants.get(key)
    peak_bytes = _peak_bytes(grant)
    usage = msgspec.structs.replace(
        exit_.usage, gpu_memory_bytes_max=peak_bytes, gpu_model=state.device.model[:MODEL_CHARS_MAX]
    )
    exit_ = msgspec.structs.replace(exit_, usage=usage)
    if _has_failed(exit_):
        for one in states:
            if one.reading.health is Health.SICK:
                return _by_device(exit_, one, one.reading.why or "it is sick")
            if key in one.grants and one.grants[key].fault:
                return _by_device(exit_, one, f"MPS: {one.grants[key].fault}")
    promised_bytes = grant.promised_bytes if grant is not None else request.gpu_mem_bytes or None
    limit_bytes = promised_bytes or state.device.mem_bytes
    if exit_.out_of != OUT_OF_GPU_MEMORY or not _has_failed(exit_):
        return msgspec.structs.replace(exit_, out_of="") if exit_.out_of == OUT_OF_GPU_MEMORY else exit_
    words = _words(state, limit_bytes, peak_bytes)
    return msgspec.structs.replace(
        exit_,
        out_of=OUT_OF_GPU_MEMORY,
        had_bytes=_had_bytes(state, grant, promised_bytes),
        reason=(f"{words}; {exit_.reason}" if exit_.reason else words)[:REASON_CHARS_MAX],
    )


def _has_failed(exit_: Exit) -> bool:
    """By itself: nobody has stopped it, it was not over its time, and the machine had memory for it."""
    is_stopped = exit_.exit_code == TIME_LIMIT_EXIT_CODE or exit_.signal in STOPPED_BY
    return exit_.exit_code != 0 and not is_stopped and exit_.out_of in ("", OUT_OF_GPU_MEMORY)


def _by_device(exit_: Exit, state: DeviceState, why: str) -> Exit:
    """The exit of an attempt that failed because this card did, or its MPS."""
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
    """The memory of the card that it could have had; 0 if others have taken what was promised to it, or was to be its own."""
    others_bytes = max(state.reading.mem_used_bytes - (grant.now_bytes if grant is not None else 0), 0)
    left_bytes = max(state.device.mem_bytes - others_bytes, 0)
    if promised_bytes is not None:
        return promised_bytes if not state.device.mem_bytes or left_bytes >= NEARLY_ALL * promised_bytes else 0
    was_alone = grant is not None and grant.ask.wants_empty_on(state.device)
    return 0 if was_alone and left_bytes < NEARLY_ALL * state.device.mem_bytes else left_bytes


def _words(state: DeviceState, limit_bytes: int, peak_bytes: int) -> str:
    limit = f"limit {_gib(limit_bytes)} GiB" if limit_bytes else "limit not known"
    peak = f"peak {_gib(peak_bytes)}" if peak_bytes else "peak not seen"
    return f"out of GPU memory on gpu{state.device.index}: {limit}, {peak}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
