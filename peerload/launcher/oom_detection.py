"""Out-of-memory detection: whether an attempt ended for want of memory, and the words for its exit record. Used by the
launcher alone."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from peerload.launcher.memory_limits import MemoryUse
    from peerload.launcher.protocol import ExitRecord

REFUSED_SHARE = 0.97
"""A process that failed with this share of its limit in use counts as refused memory."""
TAIL_BYTES = 4096
"""Bytes of the end of stderr that are searched."""
SAYINGS = (b"memoryerror", b"bad_alloc", b"cannot allocate", b"out of memory", b"not enough memory")
"""Messages of programs, in lower case, when memory is refused to them."""
NOT_OF_MEMORY = (b"cuda", b"gpu", b"hip error", b"rocm", b"heap")
"""Words in such a message that rule it out: memory of a GPU, or a heap limit of a runtime (Java, JavaScript)."""
_GIVES_UP = {0, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGTRAP}
"""Ways in which programs end that are refused memory: an exit code, or one of these signals. Others come from outside.
"""


def with_shortage(record: ExitRecord, use: MemoryUse, node: str, stderr: str) -> ExitRecord:
    """An exit record with the peak memory of the whole task, as far as it is known, and with the shortage if it ended
    for want of memory on ``node``. stderr: the file of its captured stderr."""
    assert record.usage is not None
    if use.peak_bytes:
        record = record.replace(usage=record.usage.replace(memory_bytes_max=use.peak_bytes))
    if use.kills:
        words = _words(use, node, use.peak_bytes) if use.is_own else "killed: the machine ran out of memory"
        return _because(record, words)
    if use.is_refused and use.limit_bytes and record.exit_code and record.signal in _GIVES_UP:
        assert record.usage is not None
        peak_bytes = record.usage.memory_bytes_max
        if peak_bytes >= use.limit_bytes * REFUSED_SHARE:
            return _because(record, _words(use, node, peak_bytes))
        if _says_so(stderr):
            return _because(record, f"{_words(use, node, peak_bytes)}, and was refused more")
    return record


def _because(record: ExitRecord, words: str) -> ExitRecord:
    """Add the shortage. A task that has succeeded has only lost a process to it."""
    if record.exit_code:
        return record.replace(out_of="memory", reason=words)
    return record.replace(reason=f"ended; a process of it was killed: {words.removeprefix('killed: ')}")


def _words(use: MemoryUse, node: str, peak_bytes: int) -> str:
    where = f" on {node}" if node else ""
    peak = f", peak {size_words(peak_bytes)}" if peak_bytes else ""
    return f"out of memory{where}: limit {size_words(use.limit_bytes)}{peak}"


def size_words(size_bytes: int) -> str:
    """Size in GiB or MiB: ``2.0 GiB``."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / 2**20:.1f} MiB"


def _says_so(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        size = os.fstat(fd).st_size
        tail = os.pread(fd, TAIL_BYTES, max(size - TAIL_BYTES, 0)).lower()
    except OSError:  # it is no file any more
        return False
    finally:
        os.close(fd)
    return any(word in tail for word in SAYINGS) and not any(word in tail for word in NOT_OF_MEMORY)
