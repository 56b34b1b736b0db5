"""Frames of every version that was ever spoken, as they were sent: they are understood for good (rule P6).

`frames/VERSION.txt` has a frame a line, its tag and its body in hexadecimal. A file is never changed: a version with more
messages, or fields, has a file of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from peerload.wire import peer

FILES = sorted((Path(__file__).parent / "frames").glob("*.txt"))


def frames(file: Path) -> list[tuple[str, bytes]]:
    lines = [line.split() for line in file.read_text(encoding="ascii").splitlines() if line and line[0] != "#"]
    return [(tag, bytes.fromhex(body)) for tag, body in lines]


@pytest.mark.rule("P6")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_was_said_then_is_understood(file: Path) -> None:
    told = frames(file)
    assert len(told) > 40
    for tag, raw in told:
        envelope = peer.decode(raw)
        assert envelope.body.__struct_config__.tag == tag
        again = peer.decode(peer.encode(envelope))
        assert again == envelope, tag


@pytest.mark.rule("P6")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_later_version_adds_is_skipped(file: Path) -> None:
    """A field more, and a field more of the envelope: as if they were not there."""
    for tag, raw in frames(file):
        assert raw[0] & 0xF0 == 0x80, "a small map"
        more = bytes((raw[0] + 1,)) + raw[1:] + b"\xa5later\x92\xc3\x01"
        assert peer.decode(more) == peer.decode(raw), tag
