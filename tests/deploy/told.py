"""How a machine that is tried out tells what it has seen: in slots of a disk that it shares with whoever has started it. A serial
line may lose what is said on it; what was written here and synced is there, also if the machine is switched off at once.

Used at both ends; there with Debian's Python alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

SLOT_BYTES = 64 << 10
SLOTS_MAX = 128
DISK_BYTES = SLOT_BYTES * SLOTS_MAX
HEAD_BYTES = 64
"""A slot begins with the number of its bytes and with what they hash to."""
TEXT_CHARACTERS_MAX = 8_000
"""Of each thing that is told."""


def tell(path: str, number: int, said: dict[str, Any]) -> None:
    """Write the ``number``-th thing, and wait until it is on the disk ``path``. Raises OSError, ValueError (more than fits)."""
    short = {name: value[:TEXT_CHARACTERS_MAX] if isinstance(value, str) else value for name, value in said.items()}
    raw = json.dumps(short).encode("ascii")
    if number >= SLOTS_MAX or len(raw) > SLOT_BYTES - HEAD_BYTES:
        raise ValueError(f"there is no room for what is told as number {number}")
    slot = _head(raw).ljust(HEAD_BYTES, b" ") + raw
    disk = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(disk, slot.ljust(SLOT_BYTES, b"\0"), number * SLOT_BYTES)
        os.fsync(disk)
    finally:
        os.close(disk)


def heard(path: str, number: int) -> dict[str, Any] | None:
    """The ``number``-th thing that was told on this disk; None if it is not there, or not whole yet. Raises OSError."""
    if number >= SLOTS_MAX:
        return None
    disk = os.open(path, os.O_RDONLY)
    try:
        slot = os.pread(disk, SLOT_BYTES, number * SLOT_BYTES)
    finally:
        os.close(disk)
    head = slot[:HEAD_BYTES].rstrip(b" ")
    length = head.partition(b" ")[0]
    if not length.isdigit():
        return None
    raw = slot[HEAD_BYTES : HEAD_BYTES + int(length)]
    if _head(raw) != head:
        return None
    said: dict[str, Any] = json.loads(raw)
    return said


def _head(raw: bytes) -> bytes:
    return b"%d %s" % (len(raw), hashlib.sha256(raw).hexdigest()[:40].encode("ascii"))
