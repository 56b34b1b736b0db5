"""Who says last that it had too little GPU memory, and who says something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerload.agent.launcher.oom_output import TAIL_BYTES_MAX, reports_gpu_oom, with_shortages
from peerload.agent.output.spool import Spool
from peerload.model.task import Exit
from tests.each import each

SAID = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB",
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity)",
    "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 256.00 MiB",
    "RuntimeError: CUDA error: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.",
    "tensorflow.python.framework.errors_impl.ResourceExhaustedError: {{function_node x}} OOM when allocating tensor",
    "numba.cuda.cudadrv.driver.CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
    "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,000,000,000 bytes",
    "CUDA Error: cudaErrorMemoryAllocation out of memory",
    "ggml_cuda_init: cudaMalloc failed: out of memory",
    "MemoryError: std::bad_alloc: out_of_memory: CUDA error at: rmm/mr/device/cuda_memory_resource.hpp",
    "hipErrorOutOfMemory: out of memory",
    "GPUassert: out of memory train.cu 42",
    "cuMemAlloc_v2 failed: out of memory",
)
NOT_SAID = (
    "",
    "MemoryError: Unable to allocate 14.9 GiB for an array with shape (2000000000,)",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to",
    "Out of memory: Killed process 4242 (python3)",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "grpc._channel: StatusCode.RESOURCE_EXHAUSTED, details = 'Quota exceeded for requests'",
    "RuntimeError: CUDA error: device-side assert triggered",
)


@each("said", SAID)
def test_the_words_of_frameworks_are_known(said: str) -> None:
    assert reports_gpu_oom(f"Traceback (most recent call last):\n  ...\n{said}\n".encode())


@each("said", NOT_SAID)
def test_other_failures_are_others(said: str) -> None:
    assert not reports_gpu_oom(said.encode())


def test_the_end_of_stderr_is_looked_at_of_those_that_failed(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    words = SAID[0].encode()
    stderr = {
        "fails": words,
        "ends well": words,
        "long ago": words + b"\n" + b"." * TAIL_BYTES_MAX,
        "at the end": b"." * TAIL_BYTES_MAX + words,
        "other": b"x",
    }
    for key, said in stderr.items():
        spool.path(key, 2).write_bytes(said)
    ended = [(key, Exit(key != "ends well", stderr_bytes=len(said))) for key, said in stderr.items()]
    ended += [("nothing there", Exit(1, stderr_bytes=5)), ("silent", Exit(1))]
    found = dict(with_shortages(spool, ended))
    assert {key for key, exit_ in found.items() if exit_.out_of} == {"fails", "at the end"}
    assert {exit_.out_of for exit_ in found.values()} == {"gpu memory", ""}


@pytest.mark.long
def test_no_end_of_output_takes_long_to_look_at() -> None:
    for said in (b"RESOURCE_EXHAUSTED " * 4000, b"CUDA error: " * 6000, b"cupy." * 13_000, b"\0" * TAIL_BYTES_MAX):
        assert not reports_gpu_oom(said[:TAIL_BYTES_MAX])


def test_who_had_no_room_on_a_disk_says_so(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.path("a", 2).write_bytes(b"cp: error writing 'x': No space left on device\n")
    ended = [
        ("a", Exit(1, started_at=1.0, stderr_bytes=46)),
        ("quiet", Exit(1, started_at=1.0)),
        ("killed", Exit(137, signal=9, started_at=1.0)),
        ("known", Exit(1, started_at=1.0, reason="time limit")),
        ("well", Exit(0, started_at=1.0)),
        ("never", Exit(127, reason="")),
    ]
    assert [exit_.reason for _, exit_ in with_shortages(spool, ended)] == [
        'exit code 1; its last words: "No space left on device"', "", "", "time limit", "", "",
    ]  # fmt: skip
    missing = "the disk of ws1 was full then, so its output may be incomplete"
    assert [exit_.reason for _, exit_ in with_shortages(spool, ended, "ws1")] == [
        f"exit code 1; {missing}", f"exit code 1; {missing}", f"ended by signal 9 (KILL); {missing}",
        "time limit", f"ended; {missing}", "",
    ]  # fmt: skip
