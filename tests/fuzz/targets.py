"""What reads bytes that somebody else wrote. Each target takes any bytes and raises nothing but the errors it names.

`test_targets.py` drives them with hypothesis, `run.py` (``make fuzz``) with coverage as a guide. A target's ``examples``
are well-formed: a fuzzer gets further from them than from nothing.
"""

from __future__ import annotations

import base64
import contextlib
import random
import shutil
import sqlite3
import tempfile
import unicodedata
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import msgspec

from peerload.agent.files import attempts
from peerload.agent.joining import JoiningNode, JoinServer
from peerload.agent.launcher.mps import KeeperState
from peerload.agent.mqtt import AdviceFilter, Topics
from peerload.agent.store.store import Store
from peerload.config import loader
from peerload.core.node import Node
from peerload.energy.profile import BadProfile, decoded
from peerload.launcher.record_log import RecordLog
from peerload.model import events, messages
from peerload.model.actions import PutExecution, PutFloor, PutSubmission, PutTask
from peerload.model.config import CoreConfig
from peerload.model.errors import BadRequest, ConfigError, PeerloadError, ProtocolError, StagingFailed, StoreError
from peerload.model.events import Instant, Submission
from peerload.model.gossip import (
    GossipAck,
    GossipNack,
    GossipPing,
    GossipPingRequest,
    Load,
    MembershipUpdate,
    MemberStatus,
)
from peerload.model.messages import Envelope, Identity
from peerload.model.resources import LoadReport, Profile
from peerload.model.task import ExecutionRecord, ExecutionState, Exit, TaskRecord, TaskSpec, TaskState, variables_of
from peerload.model.text import printable
from peerload.policy import registry
from peerload.policy.preset import parsed
from peerload.security import certificates, cluster_dir, node_identity_file
from peerload.security.address import parse_address
from peerload.security.invitations import Invitations
from peerload.security.revocation import TrustStore
from peerload.sim.energy_model import read_cases
from peerload.wire import control, frame, join, peer, recording, token
from peerload.wire.seal import KEY_BYTES, Sealer
from tests.fuzz import more_targets
from tests.support import cluster_of, security_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

UID = bytes(range(16))
KEY = bytes(KEY_BYTES)
SPEC = TaskSpec((b"true",), b"/tmp")
EXIT = Exit(exit_code=3, signal=0, reason="as said", started_at=1.0, ended_at=2.0)
IDENTITY = Identity("n2", "boot-2", "machine-2", "store-2", 2, "127.0.0.1:2")


RUMOURS = tuple(
    MembershipUpdate(node, "boot-2", "machine-2", "store-2", 2, 1, standing, "127.0.0.1:2", by=("n3",))
    for node, standing in (("n1", MemberStatus.SUSPECT), ("n2", MemberStatus.ALIVE), ("n3", MemberStatus.DEAD))
)
SAID = (
    GossipPing(1, "n1"),
    GossipAck(1),
    GossipPingRequest(2, "n3", "h:1"),
    GossipNack(1),
    Load.of("n2", LoadReport()),
)

BIDI_CONTROLS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


class Target(NamedTuple):
    """``reads`` takes any bytes; ``raises`` is all that may come of it; ``examples`` are what it is made for."""

    reads: Callable[[bytes], object]
    raises: tuple[type[Exception], ...]
    examples: tuple[bytes, ...]


def _user_work(raw: bytes) -> object:
    message = attempts.decode(raw)
    return attempts._converted(message.result, "place") if isinstance(message, attempts.WorkDone) else message


def _envelopes() -> tuple[bytes, ...]:
    bodies: list[messages.Message] = [
        messages.Hello(IDENTITY, Profile("n2", 2, 2.0)),
        messages.Ping(1),
        messages.Offer("n2/1", UID, 1, SPEC, 60.0),
        messages.Accept("n1/1", UID, 1, 7, 12.5),
        messages.Commit("n2/1", UID, 1, 7, 12.5, 60.0),
        messages.Renew((messages.Renewal("n1/1", UID, 1, 13.0, 5.0),)),
        messages.RenewOk((messages.LeaseExtension(UID, 1, 13.0, 60.0),)),
        messages.Result("n1/1", UID, 1, EXIT, inline=True, stdout=b"out"),
        messages.OutputChunk(1, 0, b"out"),
        messages.State(IDENTITY, Profile("n2", 2, 2.0), LoadReport()),
        messages.WrongBoot("boot-1"),
        messages.NameTaken(),
        messages.DialBack(7),
        messages.NotDialled(7, "why"),
        messages.Forward(_requests()[0], "me", 1000),
        messages.Forwarded(_answers()[0], continues=True),
        messages.ForwardStop(1),
        messages.Sync(RUMOURS, (Load.of("n3", LoadReport()),), asks=True),
        messages.ProfileTold((messages.KnownProfile("boot-2", Profile("n2", 2, 2.0)),)),
    ]
    return tuple(
        peer.encode(Envelope(1, "default", "n2", "boot-2", number, body, "n1", "boot-1"))
        for number, body in enumerate(bodies)
    )


def _requests() -> tuple[bytes, ...]:
    spec = msgspec.to_builtins(SPEC, builtin_types=(bytes,))
    requests: list[dict[str, object]] = [
        {"id": 1, "verb": "info"},
        {"id": 2, "verb": "submit", "token": "12345678", "spec": spec, "array": [[1, 9, 2]]},
        {"id": 3, "verb": "tasks", "states": ["queued"], "limit": 5},
        {"id": 4, "verb": "output", "task": "n1/1.2", "streams": [1], "follow": True},
        {"id": 5, "verb": "cancel", "tasks": ["@"], "signal": 2},
    ]
    return tuple(msgpack.packb(request) for request in requests)


def _answers() -> tuple[bytes, ...]:
    bodies: tuple[dict[str, object], ...] = (
        {"ok": {"id": "n1/1"}},
        {"more": {"stream": 1, "offset": 0, "data": b"x"}},
        {"error": {"what": "no"}},
    )
    return tuple(msgpack.packb({"id": number, **body}) for number, body in enumerate(bodies))


def _mqtt_payload(raw: bytes) -> object:
    topics = Topics("default", "n1")
    me = msgspec.structs.replace(IDENTITY, node="n1", boot="boot-1")
    believed = AdviceFilter(topics, me, Sealer(KEY, "id", "n1", "boot-1", purpose="mqtt"), security_events(Counter()))
    member = Sealer(KEY, "id", "n2", "boot-2", purpose="mqtt")
    ways = [f"peerload/default/main/n2/{way}" for way in ("state", "ask", "to/n1")]
    return [
        believed.accept(way, payload) for way in ways for payload in (raw, member.seal(raw, way.encode()))
    ]  # a stranger's, and a member's


def _sealed(raw: bytes) -> object:
    return Sealer(KEY, "id", "n1", "boot-1").open(raw)


def _gossip(raw: bytes) -> object:
    """What a member says in a datagram is read, and then believed or not."""
    read = peer.decode_datagram(raw)
    me = msgspec.structs.replace(IDENTITY, node="n1", boot="boot-1")
    node = Node(CoreConfig(), more_targets.policies(), me, Profile("n1", 2, 2.0), random.Random(1))
    node.handle(Instant(1.0, 1.0), events.AgentStarted())
    node.handle(Instant(1.0, 1.0), events.PeerMet(IDENTITY, Profile("n2", 2, 2.0), LoadReport()))
    said = events.GossipReceived("n2", "boot-2", read.messages, "", read.protocol_min, read.protocol_max)
    return [node.handle(Instant(at_s, at_s), said) for at_s in (2.0, 3.0)]


def _frame(raw: bytes) -> object:
    return frame.unpack(raw)


def _recording(raw: bytes) -> object:
    return [
        (recording.decode_event(entry.event), recording.plain(entry.actions))
        for entry in recording.entries(memoryview(raw))
        if isinstance(entry, recording.Handled)
    ]


def _config(raw: bytes) -> object:
    file = more_targets.scratch() / "settings.toml"
    file.write_bytes(raw)
    return loader.load({"config": str(file)}, {"state": "/s", "socket": "/s/a"}, {"HOME": "/nowhere"})


def _cluster_directory(raw: bytes) -> object:
    """The first byte chooses the file that the rest takes the place of."""
    place = more_targets.scratch() / "cluster"
    if not place.exists():
        shutil.copytree(cluster_of().directory, place)
    file = place / cluster_dir.FILES[raw[0] % len(cluster_dir.FILES) if raw else 0]
    sound = file.read_bytes()
    file.write_bytes(raw[1:])
    try:
        return cluster_dir.read(place)
    finally:
        file.write_bytes(sound)


def _preset(raw: bytes) -> object:
    table, _ = parsed(raw, "p.toml")
    if any("file" in str(value) or ".py" in str(value) for value in table.values()):
        return None  # a preset may name a file of the user's own to be run: that is not for strangers to write
    return registry.build_preset("p", table)


def _exit_records(raw: bytes) -> object:
    with tempfile.NamedTemporaryFile() as file:
        file.write(raw)
        file.flush()
        log = RecordLog(file.name)
        try:
            records = log.read()
            assert log.read() == records, "what was read is not what stays"
            return records
        finally:
            log.close()


def _printable(raw: bytes) -> object:
    shown = printable(raw)
    for character in shown:
        assert unicodedata.category(character) not in {"Cc", "Zl", "Zp", "Cs"}, repr(shown)
        assert unicodedata.bidirectional(character) not in BIDI_CONTROLS, repr(shown)
    return shown


def _token(raw: bytes) -> object:
    """As it stands, and with the checksum that it would need."""
    digits = base64.b32encode(raw + token._checksum(raw)).decode().rstrip("=")
    words = (raw.decode("utf-8", "replace"), token.PREFIX + digits.lower())
    read: list[object] = []
    for word in words:
        try:
            read.append(token.parse(word))
        except BadRequest:
            read.append(None)
    return read


def _join_words() -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """What a newcomer says, and what it is told."""
    newcomer: tuple[join.FromNewcomer, ...] = (join.JoinAsk(), join.JoinRequest(b"t" * 8, "n3", b"csr", b"p" * 64))
    node: tuple[join.FromNode, ...] = (
        join.JoinWho(b"-----BEGIN", b"n" * join.NONCE_BYTES),
        join.JoinWelcome(b"-----BEGIN", "n3", "main", KEY, peers=("h:1",)),
        join.JoinRefused("token", "no"),
    )
    return tuple(join.encode(said)[4:] for said in newcomer), tuple(join.encode(said)[4:] for said in node)


def _door(raw: bytes) -> object:
    """What a stranger sends, in pieces, to the door of a node; its clock stands still."""
    return more_targets.in_a_loop(lambda: _at_the_door(raw))


def _at_the_door(raw: bytes) -> object:
    class Door:
        def admit(self, request: join.JoinRequest, certificate: bytes, nonce: bytes) -> join.JoinWelcome:
            invites = Invitations(
                more_targets.scratch() / "invites", TrustStore(cluster_of(), more_targets.scratch() / "trust-none")
            )
            invites.redeem(request, certificate, nonce, 0.0, lambda *_, **__: "")
            return join.JoinWelcome(b"-----BEGIN", "n3", "main", KEY)

    authority: Any = SimpleNamespace(certificate=b"ca")
    tls: Any = SimpleNamespace(certificate=b"certificate", cluster=SimpleNamespace(authority=authority))
    events: Any = SimpleNamespace(record=lambda *_, **__: None)
    enrollment: Any = Door()
    door = JoinServer(enrollment, tls, events, security_events(Counter()))
    newcomer = JoiningNode(door, lambda _newcomer: None)
    newcomer.connection_made(more_targets.Deaf())
    for first in range(0, len(raw), 7):
        newcomer.data_received(raw[first : first + 7])
    newcomer.connection_lost(None)
    return door.newcomers


def _joined(raw: bytes) -> object:
    (more_targets.scratch() / node_identity_file.NAME).write_bytes(raw)
    return node_identity_file.read(more_targets.scratch())


def _address(raw: bytes) -> object:
    return parse_address("listen", raw.decode("utf-8", "replace"), loopback_only=False)


class _Rows:
    """A database with one row of each kind; the fuzzer's bytes take the place of one value after the other."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._path = Path(self._directory.name) / "peerload.db"
        store = Store(self._path, "n1")
        store.open()
        record = TaskRecord("n1/1", UID, TaskState.QUEUED, 1.0)
        store._commit(
            [
                PutSubmission(Submission(1, "12345678", b"d" * 32, SPEC, (), 1.0)),
                PutTask(record, 1.0, "submitted"),
                PutExecution(ExecutionRecord("n2/1", UID, 1, "n2", ExecutionState.START, SPEC, 1.0, 60.0)),
                PutFloor(UID, 1, 1.0),
            ]
        )
        store.close()
        self._sound = self._path.read_bytes()
        with contextlib.closing(sqlite3.connect(self._path)) as connection:
            tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            self.columns = [
                (table, column[1]) for table in tables for column in connection.execute(f"PRAGMA table_info({table})")
            ]

    def read(self, raw: bytes) -> object:
        """The first byte chooses the column, the second the type of the value."""
        if len(raw) < 2:
            return None
        table, column = self.columns[raw[0] % len(self.columns)]
        rest = raw[2:]
        value = (rest, rest.decode("utf-8", "replace"), int.from_bytes(rest[:8], "big", signed=True), None)[raw[1] % 4]
        self._path.write_bytes(self._sound)
        for suffix in ("-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(self._path)) as connection:
            try:
                connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
            except sqlite3.Error:
                return None  # the schema itself does not allow it
            finally:
                connection.commit()
        store = Store(self._path, "n1")
        try:
            store.open()
            return store.recover(), store.list_tasks(0.0, 10), store.history("n1/1")
        finally:
            store.close()


def targets() -> dict[str, Target]:
    """All of them by name."""
    rows = _Rows()
    protocol = (ProtocolError,)
    return {
        "peer": Target(peer.decode, protocol, _envelopes()),
        "sealed": Target(_sealed, protocol, (Sealer(KEY, "id", "n2", "boot-2").seal(b"hello"),)),
        "gossip": Target(_gossip, protocol, (peer.encode_datagram(SAID), peer.encode_datagram(RUMOURS))),
        "mqtt": Target(_mqtt_payload, (), _envelopes()),
        "request": Target(control.decode_request, protocol, _requests()),
        "answer": Target(control.decode_answer, protocol, _answers()),
        "frame": Target(_frame, (ValueError,), _requests()),
        "recording": Target(_recording, protocol, ()),
        "config": Target(_config, (ConfigError,), (b'node = "a"\nslots = 3\n', b'peer = ["h:1"]\nlease_s = 2.5\n')),
        "cluster": Target(
            _cluster_directory,
            (ConfigError,),
            tuple(
                bytes((number,)) + (cluster_of().directory / name).read_bytes()
                for number, name in enumerate(cluster_dir.FILES)
            ),
        ),
        "preset": Target(
            _preset, (PeerloadError,), (b"[transfer]\nthreshold = 2\n", b'[location.sender]\npolicy = "random"\n')
        ),
        "exit-record": Target(_exit_records, (), (_records(),)),
        "row": Target(rows.read, (StoreError,), tuple(bytes((n, 0)) + b"\x80" for n in range(len(rows.columns)))),
        "text": Target(_printable, (), ("\x1b[31m\u202e\u2028é".encode(), b"\xff\xfe\x00")),
        "join-newcomer": Target(join.decode_newcomer, protocol, _join_words()[0]),
        "join-node": Target(join.decode_node, protocol, _join_words()[1]),
        "join-door": Target(
            _door, (), tuple(len(said).to_bytes(4, "big") + said for said in (*_join_words()[0], *_join_words()[1]))
        ),
        "join-csr": Target(certificates.requested_key, (ValueError, PeerloadError), (b"\x30\x03\x02\x01\x00",)),
        "token": Target(
            _token, (), (token.Token(b"f" * 32, b"i" * 8, b"s" * 16, ("h:1",)).text().encode(), b"", b"\x01" * 60)
        ),
        "joined": Target(
            _joined, (ConfigError,), (b'cluster = "c"\nnode = "a"\nlisten = "h:1"\npeer = ["h:2"]\n', b"a")
        ),
        "control-link": Target(more_targets.control_connection, (), _framed(_requests())),
        "peer-link": Target(more_targets.peer_connection, (), _framed(_envelopes())),
        "member": Target(more_targets.member, (), _envelopes()),
        "launcher-request": Target(more_targets.launcher_request, more_targets.MALFORMED, _framed((_LIST, _EXIT))),
        "launcher-event": Target(more_targets.launcher_event, (), _framed((_EXIT, _LIST))),
        "exit": Target(
            more_targets.exit_as_told, more_targets.MALFORMED, (msgpack.packb({"exit_code": 1, "signal": 9}),)
        ),
        "environment": Target(variables_of, (BadRequest,), (msgpack.packb({b"A": b"b"}),)),
        "listing": Target(more_targets.listing, protocol, _answers()),
        "trust": Target(more_targets.trust_words, (), more_targets.words()),
        "state": Target(more_targets.state_file, (), more_targets.files()),
        "certificate": Target(
            more_targets.certificate, (), (cluster_of().authority.certificate, cluster_of().authority.key)
        ),
        "settings": Target(more_targets.settings_text, (), (b'node = "a"\nslots = 3\n', b"[gpu]\nx = 1\n")),
        "manifest": Target(more_targets.manifest_of, (), more_targets.manifests()),
        "user-work": Target(
            _user_work,
            (StagingFailed,),
            tuple(
                msgpack.packb(words)
                for words in (
                    ("read", [bytes(32)], 9),
                    ("put", [b"x"]),
                    ("done", [["a"], {"b": bytes(32)}]),
                    ("failed", 28, "", "", ""),
                )
            ),
        ),
        "energy-cases": Target(
            lambda raw: read_cases(raw, "cases.json"),
            (ConfigError,),
            (
                b'{"format":"energy-cases/1","cases":[{"id":"a","nodes":[{"name":"n","cores":1,"watts":[1,2]}],"tasks":[],"runs":[]}]}',
            ),
        ),
        "mps-keeper": Target(
            msgspec.json.Decoder(KeeperState).decode,
            (msgspec.DecodeError, UnicodeDecodeError),
            (b'{"device":"nvidia:GPU-1","at":1.5,"places":{"CUDA_MPS_PIPE_DIRECTORY":"/a"},"clients":[7],"faults":1}',),
        ),
        "power-profile": Target(
            lambda raw: decoded(raw, "cpu"),
            (BadProfile,),
            (
                b'{"curve":{"watts":[1,2.5,3],"cores":1,"threads":2},"cpu":"cpu"}',
                b'{"curve":{"watts":[1]},"cpu":"cpu"}',
            ),
        ),
        "web-body": Target(more_targets.web_body, (), (b'{"task": "n1/1"}',)),
        "users-policy": Target(
            more_targets.users_policy,
            (ValueError, TypeError),
            (b'users = "guest"\n', b'users = { "ws1:alice" = "bob" }\n'),
        ),
        "address": Target(_address, (ConfigError, BadRequest), (b"127.0.0.1:7000", b"[::1]:0", b"host:99999")),
    }


def _framed(bodies: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(len(body).to_bytes(4, "big") + body for body in bodies)


_LIST: bytes = msgpack.packb([{"do": "list"}, {"do": "lease", "key": "a-1", "deadline_s": 1.0}])
_EXIT: bytes = msgpack.packb(
    [
        {"is": "ended", "key": "a-1", "exit": {"exit_code": 0, "started_at": 1.0, "ended_at": 2.0}},
        {"is": "started", "key": "a-1", "pid": 1, "started_at": 1.0},
        {"is": "fed", "key": "a-1", "offset": 1, "is_closed": False},
        {"is": "frozen", "key": "a-1"},
    ]
)


def _records() -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        log = RecordLog(file.name)
        log.append([{"key": "a-1", "exit_code": 0}, ["b", 2]])
        log.close()
        return Path(file.name).read_bytes()
