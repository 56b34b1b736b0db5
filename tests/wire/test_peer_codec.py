"""Every message between nodes: round trips, with `msgpack` as an independent reader and writer, and a total decode."""

from __future__ import annotations

import struct
import typing

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerload.model.errors import BadMessage, FrameTooLarge, ProtocolError
from peerload.model.gossip import Load, MembershipUpdate, MemberStatus
from peerload.model.messages import (
    TOGETHER,
    Accept,
    AwaitedTask,
    AwaitTasks,
    Blocks,
    BlocksEnd,
    BlocksRequest,
    CertificateRequest,
    CertificateTold,
    Commit,
    Decline,
    DialBack,
    Died,
    DirectoryRequest,
    DirectoryTold,
    Enough,
    Envelope,
    Footprint,
    Forward,
    Forwarded,
    ForwardStop,
    GiveReply,
    GiveRequest,
    Hello,
    Identity,
    InputChunk,
    InputEnd,
    InputRequest,
    InputWindow,
    KnownProfile,
    LeaseExtension,
    Leaving,
    Message,
    NameTaken,
    Need,
    NotDialled,
    NotStarted,
    Offer,
    OutputChunk,
    OutputEnd,
    OutputRequest,
    PairReply,
    PairRequest,
    Park,
    Parking,
    Ping,
    Pong,
    ProbeReply,
    ProbeRequest,
    ProfileRequest,
    ProfileTold,
    Query,
    Renew,
    Renewal,
    RenewOk,
    Result,
    ResultAck,
    Return,
    Revoke,
    Signal,
    Staging,
    State,
    StateAnswer,
    StateRequest,
    Sync,
    TasksTold,
    Trust,
    Unpair,
    Wake,
    WrongBoot,
)
from peerload.model.resources import LoadReport, Placement, Profile, Region, ResourceRequest
from peerload.model.task import Exit, TaskSpec, Usage
from peerload.wire import peer
from peerload.wire.frame import HEADER_BYTES, LARGE_BYTES
from tests.each import each

UID = bytes(range(16))
ATTEMPT: dict[str, typing.Any] = {"task": "ws1/42.7", "uid": UID, "attempt": 3}
IDENTITY = Identity("ws1", "b" * 32, "m" * 32, "s" * 32, 7, "127.0.0.1:7117")
PROFILE = Profile("ws1", 8, 16.0, 1 << 36, 2, ("gpu", "fast"), True, True, "for cleaning: ü", 1, 1, 5)
REPORT = LoadReport(5, 4, 4, 1, 1, 1.25, Region.NORMAL, True, True, 3.5, 1 << 30, 7, 99)
SPEC = TaskSpec(
    argv=(b"\xff\xfe", b"", b"a b"),
    directory=b"/tmp/\xff",
    environment=b"\x81\xa1A\xa1B",
    umask=0o077,
    name="n",
    request=ResourceRequest(0.5, 1 << 30, 1, 1 << 33),
    placement=Placement("ws2", ("ws3",), ("gpu",), True, 0),
    time_limit_s=3.5,
    priority=-3,
)
EXIT = Exit(137, 9, "killed", 1.5e9, 1.6e9, Usage(1.0, 2.0, 3), 10, 20)

RUMOUR = MembershipUpdate(
    "ws3", "c" * 32, "m3", "s3", 4, 1, MemberStatus.SUSPECT, "10.0.0.3:7117", 2, 1, 1, ("ws4",), 2.5
)
LOAD = Load.of("ws3", REPORT, 1.5)
SAMPLES: list[Message] = [
    Hello(IDENTITY, PROFILE, REPORT, (IDENTITY, IDENTITY), True),
    Forward(b"\x81\xa2id\x01", "me", 1000, 1),
    Forwarded(b"\x81\xa2id\x01", continues=True),
    ForwardStop(7),
    Ping(1 << 62),
    Pong(0, REPORT),
    Trust((b"signed", b"by the CA")),
    CertificateRequest(),
    CertificateTold(b"PEM"),
    Leaving(),
    Wake("ws2"),
    WrongBoot("x"),
    NameTaken(),
    DialBack(1 << 62),
    NotDialled(7, "10.0.0.1:7117 does not answer"),
    State(IDENTITY, PROFILE, REPORT),
    ProbeRequest(1, Need(SPEC.request, SPEC.placement, 2), REPORT),
    ProbeReply(1, accepts=True, report=REPORT, price_s=2.5),
    StateRequest(3, REPORT, Need(SPEC.request, SPEC.placement, 2)),
    StateAnswer(3, REPORT),
    Enough(3),
    PairRequest(4, REPORT),
    PairReply(4, accepts=True, report=REPORT, promised=(UID, UID)),
    Unpair(4, (UID,)),
    GiveRequest(2, REPORT, PROFILE, ahead=True, most=8),
    Footprint(has_room=True),
    Sync((RUMOUR,), (LOAD,), asks=True),
    ProfileRequest(("ws3",)),
    ProfileTold((KnownProfile("c" * 32, PROFILE),)),
    GiveReply(2, REPORT, "ws1/42", UID, (UID, UID)),
    Offer(**ATTEMPT, spec=SPEC, lease_s=60.0, migrations=1, migrations_max=4),
    Accept(**ATTEMPT, nonce=1 << 62, ts=1e6, files=True),
    Decline(**ATTEMPT, code="directory", reason="no such directory", report=REPORT),
    Commit(**ATTEMPT, nonce=5, ts=1e6, lease_s=60.0),
    Renew((Renewal("ws1/1", UID, 1, 2.5, 1.5e9), Renewal("ws1/2", UID, 2, 3.5))),
    RenewOk((LeaseExtension(UID, 1, 2.5, 60.0),)),
    Park((Parking(**ATTEMPT, ts=2.5),)),
    Revoke(**ATTEMPT, signal=9, reason="cancelled"),
    Signal(**ATTEMPT, signal=10),
    Query(**ATTEMPT),
    NotStarted(**ATTEMPT, reason="r"),
    Died(**ATTEMPT, reason="r"),
    Return(**ATTEMPT, to="ws9", reason="drained"),
    Result(**ATTEMPT, exit=EXIT, inline=True, stdout=b"\x00\xff", stderr=b"e"),
    ResultAck(**ATTEMPT),
    AwaitTasks(("ws1/42", "ws1/43")),
    TasksTold(
        (
            AwaitedTask("ws1/42", is_over=True, failed="ws1/42 failed (exit code 3)"),
            AwaitedTask("ws1/43", says="queued"),
        )
    ),
    DirectoryRequest(b"/tmp/\xff", "me"),
    DirectoryTold(b"/tmp/\xff", "me", "directory"),
    OutputRequest(**ATTEMPT, stdout_from=1, stderr_from=2),
    OutputChunk(2, 1 << 60, b"x" * (512 << 10)),
    OutputEnd(3, 4, True),
    InputRequest(**ATTEMPT, have=1, up_to=1 << 61, is_closed=True),
    InputChunk(1 << 60, b"x" * (512 << 10)),
    InputWindow(24, 65_535),
    InputEnd(5, gone=True),
    Staging(**ATTEMPT, done_bytes=1, size_bytes=1 << 60),
    BlocksRequest((b"d" * 32,), verify=True, task=bytes(16), manifest=b"m" * 32),
    Blocks((memoryview(b"x" * (1 << 20)), memoryview(b""))),
    BlocksEnd("it is gone"),
]


def tag(message: Message) -> str:
    return str(message.__struct_config__.tag)


def wrap(message: Message) -> Envelope:
    return Envelope(1, "lab", "ws1", "b" * 32, 9, message, "ws2", "c" * 32)


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(sample) for sample in SAMPLES} == set(typing.get_args(Message))


@each("message", SAMPLES)
def test_round_trip(message: Message) -> None:
    envelope = wrap(message)
    assert peer.decode(peer.encode(envelope)) == envelope
    frame = peer.encode_frame(envelope)
    assert len(frame) == 4 + int.from_bytes(frame[:4], "big")
    assert peer.decode(frame[4:]) == envelope


@each("message", SAMPLES)
def test_another_codec_reads_and_writes_the_same(message: Message) -> None:
    envelope = wrap(message)
    seen = msgpack.unpackb(peer.encode(envelope))
    assert seen["body"]["t"] == tag(message)
    assert seen == msgpack.unpackb(msgpack.packb(msgspec.to_builtins(envelope, builtin_types=(bytes, memoryview))))
    assert peer.decode(msgpack.packb(seen)) == envelope


def test_messages_that_share_a_frame_are_read_in_their_order() -> None:
    sent = [message for message in SAMPLES if type(message) in TOGETHER]
    envelopes = peer.Envelopes("lab", "ws1", "boot-of-ws1")
    frame = envelopes.frame_of([peer.encode_message(message) for message in sent], "ws2", "boot-of-ws2")
    envelope = peer.decode(memoryview(frame)[HEADER_BYTES:])
    assert [envelope.body, *envelope.others] == sent
    assert envelope == msgspec.structs.replace(
        peer.Envelopes("lab", "ws1", "boot-of-ws1").make(sent[0], "ws2", "boot-of-ws2"), others=tuple(sent[1:])
    )


@pytest.mark.rule("P1")
@each("first", [sample for sample in SAMPLES if type(sample) not in TOGETHER])
def test_a_frame_holds_no_message_beside_a_first_of_another_kind(first: Message) -> None:
    seen = msgpack.unpackb(peer.encode(wrap(first)))
    seen["others"] = [msgpack.unpackb(peer.encode(wrap(Query(**ATTEMPT))))["body"]]
    with pytest.raises(BadMessage):
        peer.decode(msgpack.packb(seen))


def test_a_frame_holds_no_message_of_another_kind_beside_the_first() -> None:
    seen = msgpack.unpackb(peer.encode(wrap(Query(**ATTEMPT))))
    for message in (Blocks((memoryview(b"x"),)), Leaving()):
        seen["others"] = [msgpack.unpackb(peer.encode(wrap(message)))["body"]]
        with pytest.raises(BadMessage):
            peer.decode(msgpack.packb(seen))


@pytest.mark.rule("P6")
@each("message", SAMPLES)
def test_unknown_fields_are_skipped(message: Message) -> None:
    envelope = wrap(message)
    seen = msgpack.unpackb(peer.encode(envelope))
    seen["later"] = seen["body"]["later"] = {"deep": [1, 2]}
    assert peer.decode(msgpack.packb(seen)) == envelope


@each("message", SAMPLES)
def test_every_truncation_is_an_error(message: Message) -> None:
    raw = peer.encode(wrap(message))
    for size in sorted({*range(min(len(raw), 300)), len(raw) // 2, len(raw) - 1}):
        with pytest.raises(BadMessage):
            peer.decode(raw[:size])


def altered(message: Message, **changes: object) -> bytes:
    seen = msgpack.unpackb(peer.encode(wrap(message)))
    seen["body"].update(changes)
    return typing.cast("bytes", msgpack.packb(seen))


@pytest.mark.rule("P1")
@each(
    "raw",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x80",
        b"\x91" * 100_000 + b"\xc0",
        b"\x81\xa4body" * 50_000 + b"\xc0",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        altered(Query(**ATTEMPT), attempt=1 << 63),
        altered(Query(**ATTEMPT), attempt=-1),
        altered(Query(**ATTEMPT), attempt=(1 << 64) - 1),
        altered(Query(**ATTEMPT), attempt=True),
        altered(Query(**ATTEMPT), uid=b"short"),
        altered(Query(**ATTEMPT), uid="a text of 16 ch."),
        altered(Query(**ATTEMPT), task="../../etc/passwd"),
        altered(Query(**ATTEMPT), task="ws1/1\x1b[2J"),
        altered(Query(**ATTEMPT), task="ws1/1\n"),
        altered(Query(**ATTEMPT), t="no such message"),
        altered(Query(**ATTEMPT), t=None),
        altered(Commit(**ATTEMPT, nonce=1, ts=1.0, lease_s=1.0), ts=float("nan")),
        altered(Commit(**ATTEMPT, nonce=1, ts=1.0, lease_s=1.0), lease_s=float("inf")),
        altered(Commit(**ATTEMPT, nonce=1, ts=1.0, lease_s=1.0), lease_s=-float("inf")),
        altered(Commit(**ATTEMPT, nonce=1, ts=1.0, lease_s=1.0), lease_s=-1.0),
        altered(Commit(**ATTEMPT, nonce=1, ts=1.0, lease_s=1.0), lease_s="60"),
        altered(Commit(**ATTEMPT, nonce=1, ts=1.0, lease_s=1.0), lease_s=0.0),
        altered(Offer(**ATTEMPT, spec=SPEC, lease_s=1.0), lease_s=0.99),
        altered(Offer(**ATTEMPT, spec=SPEC, lease_s=1.0), spec={"argv": [b"x"], "directory": b"/", "lease_s": 1e-9}),
        altered(RenewOk(()), extensions=[{"uid": UID, "attempt": 1, "ts": 1.0, "lease_s": 1e-9}]),
        altered(OutputChunk(1, 0, b""), data=b"x" * ((512 << 10) + 1)),
        altered(Result(**ATTEMPT, exit=EXIT), stdout=b"x" * ((64 << 10) + 1)),
        altered(ProbeReply(1, accepts=True, report=REPORT), report={"load": float("nan")}),
        altered(ProbeReply(1, accepts=True, report=REPORT), report={"region": 7}),
        altered(Revoke(**ATTEMPT), signal=0),
        altered(Revoke(**ATTEMPT), reason=b"\xff"),
    ],
)
def test_what_is_no_message_is_an_error(raw: bytes) -> None:
    with pytest.raises(BadMessage):
        peer.decode(raw)


@pytest.mark.rule("P1", "S18")
def test_sizes_are_bounded_before_anything_is_read() -> None:
    with pytest.raises(FrameTooLarge) as caught:
        peer.decode(bytes(peer.DATA_BYTES_MAX + 1))
    assert caught.value.size_bytes == peer.DATA_BYTES_MAX + 1
    with pytest.raises(FrameTooLarge):
        peer.decode(bytes(peer.MQTT_BYTES_MAX + 1), peer.MQTT_BYTES_MAX)
    many = TaskSpec(argv=(b"x" * peer.DATA_BYTES_MAX,), directory=b"/")
    with pytest.raises(FrameTooLarge):
        peer.encode_frame(wrap(Offer(**ATTEMPT, spec=many, lease_s=1.0)))


@each("sizes", [(1 << 20, 5, 1 << 20), (10, 20), (1 << 20,)])
def test_large_blocks_are_sent_from_where_they_are(sizes: tuple[int, ...]) -> None:
    envelope = wrap(Blocks(tuple(memoryview(bytes([size % 251]) * size) for size in sizes)))
    parts = peer.frame_parts(envelope)
    frame = b"".join(parts)
    assert len(frame) == 4 + int.from_bytes(frame[:4], "big")
    assert peer.decode(frame[4:]) == envelope
    assert isinstance(envelope.body, Blocks)
    assert all(any(part is block for part in parts) for block in envelope.body.blocks if len(block) >= LARGE_BYTES)
    with pytest.raises(FrameTooLarge):
        peer.frame_parts(wrap(Blocks(tuple(memoryview(bytes(1 << 20)) for _ in range(4)))))


def decode_is_total(raw: bytes) -> None:
    try:
        envelope = peer.decode(raw)
    except ProtocolError:
        return
    assert peer.decode(peer.encode(envelope)) == envelope


@pytest.mark.rule("P1")
@given(st.binary(max_size=300))
def test_arbitrary_bytes(raw: bytes) -> None:
    decode_is_total(raw)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(SAMPLES[:-2]), st.data())
def test_any_field_may_hold_anything(message: Message, data: st.DataObject) -> None:
    seen = msgpack.unpackb(peer.encode(wrap(message)))
    place = seen["body"] if data.draw(st.booleans()) else seen
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(ANYTHING)
    decode_is_total(msgpack.packb(seen))


@given(st.sampled_from(SAMPLES[:-2]), st.data())
def test_flipped_bytes(message: Message, data: st.DataObject) -> None:
    raw = bytearray(peer.encode(wrap(message)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    decode_is_total(bytes(raw))


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_decoded_number_is_finite(value: float) -> None:
    raw = altered(Commit(**ATTEMPT, nonce=1, ts=1.0, lease_s=1.0))
    raw = raw.replace(struct.pack(">d", 1.0), struct.pack(">d", value), 1)
    try:
        envelope = peer.decode(raw)
    except BadMessage:
        assert not 0.0 <= value <= 1e12
    else:
        assert isinstance(envelope.body, Commit)
        assert 0.0 <= value <= 1e12
