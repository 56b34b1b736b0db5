"""Bounds on what a MessagePack message costs to read: nesting depth and number of values. Checked before anything is
decoded."""

from __future__ import annotations

DEPTH_MAX = 16
"""Lists and tables within one another."""
_CONTAINERS = bytes((*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF))


def _steps() -> tuple[int, ...]:
    """Table by the first byte of a value: the number of bytes that it takes; 0 for values that carry their length."""
    steps = [1] * 256
    for head in range(0xA0, 0xC0):
        steps[head] = 1 + head - 0xA0
    for head, size in {
        0xCA: 5,
        0xCB: 9,
        0xCC: 2,
        0xCD: 3,
        0xCE: 5,
        0xCF: 9,
        0xD0: 2,
        0xD1: 3,
        0xD2: 5,
        0xD3: 9,
    }.items():
        steps[head] = size
    for head in range(0xD4, 0xD9):
        steps[head] = 2 + (1 << head - 0xD4)
    for head in (*_CONTAINERS, *_SIZES):
        steps[head] = 0
    return tuple(steps)


_SIZES = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_SIZES |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""Of bytes, extensions and texts: how long their length is, and what else comes before them."""
_STEPS = _steps()


def check(raw: bytes | bytearray | memoryview, values_max: int, depth_max: int = DEPTH_MAX) -> None:
    """Raise ValueError for a MessagePack value that is nested deeper, or has more values. The decoder rejects values
    that are cut off or invalid."""
    if len(raw) <= values_max and len(raw) - len(bytes(raw).translate(None, _CONTAINERS)) <= depth_max:
        return  # no deeper than the number of values
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
                raise ValueError(f"more than {depth_max} lists within one another")
            left, step = _within(raw, at, head)
            at += step
        if seen > values_max:
            raise ValueError(f"more than {values_max} values")


def _within(raw: bytes | bytearray | memoryview, at: int, head: int) -> tuple[int, int]:
    """→ number of values of a list or a table, and length of its header."""
    if head < 0x90:  # noqa: PLR2004 -- of MessagePack
        return 2 * (head & 15), 1
    if head < 0xA0:  # noqa: PLR2004 -- the same
        return head & 15, 1
    length = 4 if head & 1 else 2
    count = int.from_bytes(raw[at + 1 : at + 1 + length], "big")
    return count * (2 if head >= 0xDE else 1), 1 + length  # noqa: PLR2004 -- the same
