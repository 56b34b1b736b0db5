"""Frames: a 4-byte big-endian length and a MessagePack body, and bounds on what a body costs to read (nesting depth and
number of values), checked before decoding. Imports only msgpack, so that clients start fast."""

from __future__ import annotations

import msgpack

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    Buffer = bytes | bytearray | memoryview


HEADER_BYTES = 4
CONTROL_BYTES_MAX = 4 << 20
"""The largest frame on the control socket, either way."""
LARGE_BYTES = 64 << 10
"""Blocks of files from this size on are sent without a copy into a frame."""

LAST_WORDS_ENDING = ".why"
"""Suffix of the file beside its socket in which an agent that had to end leaves the reason: one line for the problem,
one for the remedy."""
LAST_WORDS_BYTES_MAX = 2000
"""Bound on the bytes of that file."""


def pack(body: object, size_bytes_max: int = CONTROL_BYTES_MAX) -> bytes:
    """Encode one frame. Raises ValueError if its body is larger than ``size_bytes_max``."""
    raw: bytes = msgpack.packb(body)
    if len(raw) > size_bytes_max:
        raise ValueError(f"a frame of {len(raw)} bytes; at most {size_bytes_max} are allowed")
    return len(raw).to_bytes(HEADER_BYTES, "big") + raw


def pack_parts(body: dict[str, Any]) -> list[Buffer]:
    """`pack` in parts, with ``blocks`` as from `block_parts`. Raises ValueError as `pack` does."""
    blocks = body.get("blocks")
    if not blocks:
        return [pack(body)]
    others = {key: value for key, value in body.items() if key != "blocks"}
    head = msgpack.packb({**others, "blocks": []})[:-1]
    first, *more = block_parts(blocks)
    size = len(head) + len(first) + sum(map(len, more))
    if size > CONTROL_BYTES_MAX:
        raise ValueError(f"a frame of {size} bytes; at most {CONTROL_BYTES_MAX} are allowed")
    return [size.to_bytes(HEADER_BYTES, "big") + head + first, *more]


def block_parts(blocks: Sequence[Buffer]) -> list[Buffer]:
    """The MessagePack list of these blocks in parts, to send one after the other: large blocks are not copied."""
    part = bytearray(b"\xdd" + len(blocks).to_bytes(4, "big"))
    parts: list[Buffer] = [part]
    for block in blocks:
        part += b"\xc6" + len(block).to_bytes(4, "big")
        if len(block) < LARGE_BYTES:
            part += block
        else:
            part = bytearray()
            parts += block, part
    return list(filter(None, parts))


def unpack(raw: bytes) -> Any:  # noqa: ANN401 -- whatever the agent said
    """The body of one frame. Raises ValueError (also msgpack's own errors are ValueErrors) if it is malformed."""
    return msgpack.unpackb(raw)


DEPTH_MAX = 16
"""Nesting depth of lists and tables."""
_CONTAINERS = bytes((*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF))
_SIZES = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_SIZES |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""Bytes of the length, and of the rest of the header, of bytes, extensions and texts."""


def _steps() -> tuple[int, ...]:
    """Table by the first byte of a value: the size of the value in bytes; 0 for values that carry their length."""
    steps = [1] * 256
    steps[0xA0:0xC0] = range(1, 33)  # short texts
    steps[0xCA:0xD4] = 5, 9, 2, 3, 5, 9, 2, 3, 5, 9  # numbers
    steps[0xD4:0xD9] = 3, 4, 6, 10, 18  # extensions of a fixed size
    for head in (*_CONTAINERS, *_SIZES):
        steps[head] = 0
    return tuple(steps)


_STEPS = _steps()


def check_bounds(raw: Buffer, values_max: int, depth_max: int = DEPTH_MAX) -> None:
    """Raise ValueError for a MessagePack value that is nested deeper, or has more values. The decoder rejects values
    that are cut off or invalid."""
    if len(raw) <= values_max and len(raw) - len(bytes(raw).translate(None, _CONTAINERS)) <= depth_max:
        return  # the depth never exceeds the number of values
    at, size, left, seen = 0, len(raw), 1, 0
    above: list[int] = []
    steps = _STEPS
    while at < size:
        while not left:
            if not above:
                return
            left = above.pop()
        left -= 1
        seen += 1
        head = raw[at]
        step = steps[head]
        if step:
            at += step
        elif head in _SIZES:
            length, more = _SIZES[head]
            at += 1 + length + more + int.from_bytes(raw[at + 1 : at + 1 + length], "big")
        else:
            above.append(left)
            if len(above) > depth_max:
                raise ValueError(f"more than {depth_max} lists nested")
            left, step = _contents(raw, at, head)
            at += step
        if seen > values_max:
            raise ValueError(f"more than {values_max} values")


def _contents(raw: Buffer, at: int, head: int) -> tuple[int, int]:
    """→ number of values of a list or a table, and length of its header."""
    if head < 0x90:  # noqa: PLR2004 -- of MessagePack
        return 2 * (head & 15), 1
    if head < 0xA0:  # noqa: PLR2004 -- the same
        return head & 15, 1
    length = 4 if head & 1 else 2
    count = int.from_bytes(raw[at + 1 : at + 1 + length], "big")
    return count * (2 if head >= 0xDE else 1), 1 + length  # noqa: PLR2004 -- the same
