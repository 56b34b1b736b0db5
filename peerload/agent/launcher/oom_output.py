"""Detection of GPU memory and disk shortages in the last output of a program, by the messages of drivers and
frameworks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from peerload.model.task import how_it_ended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peerload.agent.output.spool import Spool
    from peerload.model.task import Exit

TAIL_BYTES_MAX = 64 << 10
"""Number of bytes at the end of stderr that are searched."""
STDERR = 2
_NO_ROOM = re.compile(rb"No space left on device|Disk quota exceeded")
"""Messages of the system for ENOSPC and EDQUOT."""
_WORDS = re.compile(
    rb"CUDA out of memory|HIP out of memory|XPU out of memory"  # PyTorch
    rb"|torch\.(?:cuda\.|xpu\.)?OutOfMemoryError"
    rb"|(?:CUDA|HIP|cuda|hip) (?:runtime |driver )?error\W{1,4}(?:\w+\W{1,3})?out of memory"  # PyTorch, GROMACS, llama.cpp
    rb"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory|hipErrorMemoryAllocation"
    rb"|(?:cuda|hip)Malloc\w* (?:retry )?failed: out of memory"  # MXNet, ggml
    rb"|GPUassert: out of memory|cuMem\w*(?:Alloc|Create)\w*[^\n]{0,40}out of memory"  # programs in CUDA C++
    rb"|CU(?:BLAS|DNN|FFT|SPARSE)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|NCCL WARN Cuda failure [^\n]{0,20}out of memory"
    rb"|RESOURCE_EXHAUSTED\W[^\n]{0,200}(?:[Oo]ut of memory|OOM|allocat)"  # XLA, TensorFlow
    rb"|ResourceExhaustedError\W[^\n]{0,200}(?:OOM|allocat)"
    rb"|cupy[\w.]*\.OutOfMemoryError|out_of_memory: CUDA error"  # CuPy, RMM
    rb"|VK_ERROR_OUT_OF_DEVICE_MEMORY|CL_MEM_OBJECT_ALLOCATION_FAILURE"
)


def reports_gpu_oom(stderr: bytes) -> bool:
    """True if the end of a program's stderr reports a lack of GPU memory."""
    return _WORDS.search(stderr) is not None


def with_shortages(spool: Spool, ended: Sequence[tuple[str, Exit]], full: str = "") -> tuple[tuple[str, Exit], ...]:
    """The exits, with a shortage of GPU memory or disk space if the stderr of a failed attempt shows one (it is not checked
    whether it had a GPU). full: the name of this node if its disk is full, so that output may be lost. Reads files.
    """
    return tuple((key, _without_room(spool, key, _with_shortage(spool, key, exit_), full)) for key, exit_ in ended)


def _with_shortage(spool: Spool, key: str, exit_: Exit) -> Exit:
    if not exit_.exit_code or not exit_.stderr_bytes or exit_.out_of:
        return exit_
    if not reports_gpu_oom(spool.read_tail(key, STDERR, TAIL_BYTES_MAX)):
        return exit_
    return msgspec.structs.replace(exit_, out_of="gpu memory")


def _without_room(spool: Spool, key: str, exit_: Exit, full: str) -> Exit:
    """Add the full disk as the reason, if there is no other one."""
    if exit_.reason or exit_.out_of or not exit_.started_at:
        return exit_
    how = "ended" if exit_.exit_code == 0 else how_it_ended(exit_)
    if full:
        reason = f"{how}; the disk of {full} was full then, so its output may be incomplete"
        return msgspec.structs.replace(exit_, reason=reason)
    if exit_.exit_code and not exit_.signal and exit_.stderr_bytes:
        match = _NO_ROOM.search(spool.read_tail(key, STDERR, TAIL_BYTES_MAX))
        if match is not None:
            return msgspec.structs.replace(exit_, reason=f'{how}; its last words: "{match[0].decode()}"')
    return exit_
