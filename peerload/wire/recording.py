"""Recordings of a node: its configuration, then every event with the actions that followed, as bytes.

A file is MAGIC and frames: a 4-byte length and a MessagePack body, one of `Started`, `Handled` and `RecordingEnd`. Each
start of an agent adds a `Started` with what follows from it. A file may break off anywhere (its agent was killed):
an incomplete frame is the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from peerload.model.config import CoreConfig
from peerload.model.errors import BadMessage, PeerloadError
from peerload.model.events import Event, Instant
from peerload.model.messages import Identity
from peerload.model.resources import Profile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peerload.model.actions import Action

MAGIC = b"peerload recording 1\n"
"""First bytes of a recording, with the number of the format; other formats are refused."""
HEADER_BYTES = 4
RECORDING_BYTES_MAX = 256 << 20
SEED_BITS = 128


class Started(msgspec.Struct, frozen=True, tag="started", kw_only=True):
    """Arguments of a `Node`. version: of peerload; preset: its name, its text, and the directory to which the paths of
    its policies are relative; seed: of its random generator, in hexadecimal."""

    version: Annotated[str, Meta(max_length=100)]
    config: CoreConfig
    preset: str
    preset_text: str
    preset_directory: str
    identity: Identity
    profile: Profile
    seed: Annotated[str, Meta(pattern=r"^[0-9a-f]+$", max_length=SEED_BITS // 4)]


class Handled(msgspec.Struct, frozen=True, tag="handled", omit_defaults=True):
    """Event, its time, and the actions that followed, each in its own encoding. failure: error of the core, if there
    was one; then there are no actions."""

    now: Instant
    event: msgspec.Raw
    actions: msgspec.Raw
    failure: str = ""


class RecordingEnd(msgspec.Struct, frozen=True, tag="ended"):
    """Regular end of a recording."""

    reason: str


Entry = Started | Handled | RecordingEnd


def _foreign(value: Any) -> object:  # noqa: ANN401 -- msgspec hands over what it does not know
    """Encode an Answer's error by its texts."""
    if isinstance(value, PeerloadError):
        return {"error": type(value).__name__, "what": value.what, "why": value.why, "hint": value.hint}
    if isinstance(value, Exception):
        return {"error": type(value).__name__, "what": str(value)}
    raise TypeError(f"{type(value).__name__} cannot be recorded")


_encoder = msgspec.msgpack.Encoder(enc_hook=_foreign)
_entries = msgspec.msgpack.Decoder(Entry)
_events = msgspec.msgpack.Decoder(Event)


def encode(entry: Entry) -> bytes:
    raw = _encoder.encode(entry)
    return len(raw).to_bytes(HEADER_BYTES, "big") + raw


def encode_handled(now: Instant, event: Event, actions: Sequence[Action], failure: str = "") -> bytes:
    raw_event = msgspec.Raw(_encoder.encode(event))
    return encode(Handled(now, raw_event, msgspec.Raw(encode_actions(actions)), failure))


def encode_actions(actions: Sequence[Action]) -> bytes:
    return _encoder.encode(actions)


def decode_event(raw: msgspec.Raw) -> Event:
    """Decode the event of a `Handled`. Raises BadMessage."""
    event: Event = _decoded(_events, bytes(raw), "not an event")
    return event


def plain(raw: bytes | msgspec.Raw) -> Any:  # noqa: ANN401 -- whatever was encoded
    """Decode any part of a recording into dictionaries, lists and numbers. Raises BadMessage."""
    return _decoded(_anything, bytes(raw), "not MessagePack")


_anything: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


def encode_plain(value: Any) -> bytes:  # noqa: ANN401 -- what `plain` gave
    return _encoder.encode(value)


def whole_bytes(data: memoryview) -> int:
    """Number of bytes of a recording that are complete frames, with MAGIC; the rest was cut off. Raises BadMessage
    if it is not a recording of this format."""
    _check_magic(data)
    place = len(MAGIC)
    while (end := _frame_end(data, place)) is not None:
        place = end
    return place


def entries(data: memoryview) -> Iterator[Entry]:
    """Complete entries of a recording. Raises BadMessage for anything that no agent would write."""
    _check_magic(data)
    place = len(MAGIC)
    while (end := _frame_end(data, place)) is not None:
        raw = bytes(data[place + HEADER_BYTES : end])
        yield _decoded(_entries, raw, f"damaged at byte {place}")
        place = end


def _check_magic(data: memoryview) -> None:
    head = bytes(data[: len(MAGIC)])
    if head != MAGIC:
        kind = MAGIC.rpartition(b" ")[0]
        why = "it is of another version" if head.startswith(kind) else "it does not begin as one"
        raise BadMessage("not a recording", why=why)


def _frame_end(data: memoryview, place: int) -> int | None:
    """End of the frame that begins at ``place``; None if it is incomplete."""
    start = place + HEADER_BYTES
    size = int.from_bytes(data[place:start], "big")
    return start + size if size and start + size <= len(data) else None


def _decoded(decoder: msgspec.msgpack.Decoder[Any], raw: bytes, what: str) -> Any:  # noqa: ANN401 -- the caller's type
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(what, why=str(error)[:300]) from None
