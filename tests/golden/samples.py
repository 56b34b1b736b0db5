"""Encoded samples of every message on every wire that msgspec types describe, made from the types themselves.

Each message is made twice: with its required fields alone, and with all of its fields. The bytes are what another node or
a client reads, so that a renamed class or a moved module changes nothing here.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from peerload.agent.launcher.client import LauncherLink
from peerload.agent.launcher.process import LauncherProcess
from peerload.agent.mqtt import Topics
from peerload.agent.runtime import RunState
from peerload.launcher.protocol import Request, encode
from peerload.model import gossip as gossip_model
from peerload.model import messages
from peerload.wire import control, join, peer, recording
from peerload.wire.seal import KEY_BYTES, Sealer

WORDS = (
    "n1",
    "n1/1",
    "abcdef0123456789",
    "127.0.0.1:7077",
    "1",
    "",
    "a",
    "A",
    "ABC=1",
    "12345678",
    "gpu:0",
    "a=1",
    "user:x",
    "2026-01-01",
    "tag=1",
    "52:54:00:12:34:56",
)
"""A text is the first of these that its constraints allow."""
DEPTH_MAX = 8
HEX_BYTES_MAX = 64


def value_of(kind: Any, depth: int, *, full: bool) -> Any:  # noqa: C901, PLR0912 -- one case for each type
    """A value of a msgspec type, the same one at each call. Raises ValueError for a type that has none."""
    match kind:
        case inspect.Metadata():
            return value_of(kind.type, depth, full=full)
        case inspect.NoneType() | inspect.AnyType():
            return None
        case inspect.BoolType():
            return True
        case inspect.IntType() | inspect.FloatType():
            lowest = kind.ge if kind.ge is not None else kind.gt
            number = 3 if lowest is None else lowest + 2
            highest = kind.le if kind.le is not None else kind.lt
            if highest is not None and number > highest:
                number = highest
            return float(number) if isinstance(kind, inspect.FloatType) else int(number)
        case inspect.StrType():
            return _text(kind)
        case inspect.BytesType() | inspect.ByteArrayType() | inspect.MemoryViewType():
            return bytes(range(256))[: max(kind.min_length or 3, 1)].ljust(kind.min_length or 0, b"x")
        case inspect.RawType():
            return msgspec.Raw(b"\x81\xa1a\x01")
        case inspect.EnumType():
            return list(kind.cls)[-1]
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.UnionType():
            return _of_union(kind, depth, full=full)
        case inspect.StructType() | inspect.DataclassType() | inspect.NamedTupleType():
            return struct_of(kind, depth + 1, full=full)
        case inspect.TupleType():
            return tuple(value_of(item, depth + 1, full=full) for item in kind.item_types)
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
            return _several(kind, depth, full=full)
        case inspect.DictType():
            return {value_of(kind.key_type, depth + 1, full=full): value_of(kind.value_type, depth + 1, full=full)}
    raise ValueError(f"no sample of {kind}")


def _text(kind: inspect.StrType) -> str:
    for word in WORDS:
        long = word.ljust(kind.min_length or 0, "0")
        if kind.max_length is not None and len(long) > kind.max_length:
            continue
        if kind.pattern is None or re.search(kind.pattern, long):
            return long
    raise ValueError(f"no word matches {kind}")


def _of_union(kind: inspect.UnionType, depth: int, *, full: bool) -> Any:
    types = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
    named = [one for one in types if isinstance(one, inspect.StructType)]
    if named:
        return value_of(min(named, key=lambda one: str(one.tag)), depth, full=full)
    return value_of(types[0], depth, full=full)


def _several(kind: Any, depth: int, *, full: bool) -> Any:
    made = {inspect.ListType: list, inspect.SetType: set, inspect.FrozenSetType: frozenset}.get(type(kind), tuple)
    count = max(kind.min_length or 0, 1 if depth < DEPTH_MAX else 0)
    return made([value_of(kind.item_type, depth + 1, full=full)] * count)


def struct_of(kind: Any, depth: int, *, full: bool) -> Any:
    """An object of a struct type. A field that its own check refuses next to the others is left at its default."""
    fields = [field for field in kind.fields if field.required or (full and depth < DEPTH_MAX)]
    given = {field.name: value_of(field.type, depth, full=full) for field in fields}
    optional = [field.name for field in reversed(fields) if not field.required]
    while True:
        try:
            return kind.cls(**given)
        except (ValueError, TypeError):
            if not optional:
                raise
            given.pop(optional.pop(0))


def samples_of(union: Any, encode: Any) -> dict[str, list[str]]:
    """tag → its samples in hexadecimal, of every member of a union of structs."""
    found: dict[str, list[str]] = {}
    for member in _members(union):
        kind = inspect.type_info(member)
        assert isinstance(kind, inspect.StructType)
        both = [shortened(encode(struct_of(kind, 0, full=full))) for full in (False, True)]
        found[str(kind.tag or member.__name__)] = both
    return dict(sorted(found.items()))


def shortened(raw: bytes) -> str:
    """The bytes in hexadecimal; of many bytes the first, and the hash of all."""
    return (
        raw.hex()
        if len(raw) <= HEX_BYTES_MAX
        else f"{raw[:HEX_BYTES_MAX].hex()}… {hashlib.sha256(raw).hexdigest()[:12]}"
    )


def _members(union: Any) -> list[Any]:
    parts = get_args(union)
    return [member for part in parts for member in _members(part)] if parts else [union]


def _envelope(body: Any) -> bytes:
    return peer.encode(messages.Envelope(1, "default", "n2", "boot-2", 7, body, "n1", "boot-1"))


class _Noted(LauncherLink):
    """The agent's end of a launcher that is not there: keeps what would be sent."""

    def __init__(self) -> None:
        super().__init__(LauncherProcess(Path("/nowhere")), 1 << 20, RunState())
        self.requests: list[bytes] = []

    def _request(self, request: Request) -> None:
        self.requests.append(encode(request))


def launcher() -> dict[str, list[str]]:
    """What an agent sends to its launcher about a task that runs. `session.launcher_talk` has what real ones say."""

    async def said() -> list[bytes]:
        link = _Noted()
        link.signal("n1/1.1", 15)
        link.feed("n1/1.1", 10, has_ended=True)
        link.resize("n1/1.1", 24, 80)
        link.set_lease("n1/1.1", 12.5, 10.0)
        link.evict("n1/1.1", "why")
        link.look_for_socket()
        link.forget("n1/1.1")
        return link.requests

    return {msgspec.msgpack.decode(raw)["do"]: [raw.hex()] for raw in asyncio.run(said())}


def mqtt() -> dict[str, list[str]]:
    """Topics, and what is published on them."""
    topics = Topics("default", "n1")
    sealer = Sealer(bytes(KEY_BYTES), "cluster-id", "n1", "boot-1", purpose="mqtt")
    state = value_of(inspect.type_info(messages.State), 0, full=True)
    return {
        "topics": [topics.state, topics.ask, topics.to("n2"), *topics.subscriptions],
        "state, sealed": [shortened(sealer.seal(_envelope(state), topics.state.encode()))],
    }


def every_wire() -> dict[str, dict[str, list[str]]]:
    """wire → message → its samples."""
    sealer = Sealer(bytes(KEY_BYTES), "cluster-id", "n1", "boot-1")
    return {
        "peer": samples_of(messages.Message, _envelope),
        "gossip": samples_of(gossip_model.GossipMessage, lambda message: peer.encode_datagram((message,))),
        "gossip, sealed": {"ping": [sealer.seal(peer.encode_datagram((gossip_model.GossipPing(1, "n1"),))).hex()]},
        "mqtt": mqtt(),
        "launcher request": launcher(),
        "join": samples_of(join.FromNewcomer | join.FromNode, join.encode),
        "control request": samples_of(control.Request, control.encode_request),
        "control answer": {"ok": [control.encode({"id": 1, "ok": {"id": "n1/1", "members": None}}).hex()]},
        "recording": samples_of(recording.Started | recording.RecordingEnd, recording.encode),
    }
