"""More of what reads bytes that somebody else wrote: whole connections, what members say to the core, files of the state.

As in `targets.py`, which has these too.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import tomllib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import msgpack
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerload.agent.control.connection import Connection, LocalConnection
from peerload.agent.energy import PowerControls
from peerload.agent.forwarding.request_router import MergedListing, merged
from peerload.agent.launcher.client import LOST, EventFrames, LauncherLink, exit_of
from peerload.agent.peers.connection import PeerConnection
from peerload.agent.peers.membership import AddressFile
from peerload.agent.sensors.cpu_benchmark import stored_speed
from peerload.agent.sensors.nvml import GpuFaults
from peerload.config import loader
from peerload.files import manifest
from peerload.files.manifest import FileEntry
from peerload.launcher.protocol import decode_exit
from peerload.launcher.server import AgentSocket, _starts_with_list
from peerload.launcher.system.accounts import policy_of
from peerload.model import messages
from peerload.model.errors import BadRequest, PeerloadError, ProtocolError, StagingFailed
from peerload.model.resources import Profile
from peerload.policy import registry
from peerload.security import certificates, revocation
from peerload.security.invitations import InvitationRefused, Invitations
from peerload.security.revocation import TrustStore
from peerload.web import routes
from peerload.web.http import Request
from peerload.wire import control, join, peer
from tests.core import given
from tests.support import cluster_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from peerload.model.messages import Envelope, Hello
    from peerload.policy.preset import PolicySet

MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError)
"""What the launcher takes for no request, and the agent for no launcher's words."""
STEP_BYTES = 7
"""What comes over a connection comes in pieces of this size."""


def feed(connection: asyncio.BufferedProtocol, data: bytes) -> None:
    """Have a connection receive this."""
    while data:
        room = memoryview(connection.get_buffer(len(data)))
        count = min(len(room), len(data))
        room[:count] = data[:count]
        connection.buffer_updated(count)
        data = data[count:]


class Deaf(asyncio.Transport):
    """A connection into nowhere."""

    is_over = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("192.0.2.1", 1) if name == "peername" else default

    def is_closing(self) -> bool:
        return self.is_over

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)

    def write_eof(self) -> None:
        pass

    def close(self) -> None:
        self.is_over = True

    def abort(self) -> None:
        self.is_over = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class _Server:
    """Serves local clients: each request has an answer."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.read_buffer = bytearray(STEP_BYTES)

    def admit(self, _connection: object) -> None:
        return None

    def disconnected(self, _connection: object) -> None:
        return None

    def refused(self, _connection: Connection, _name: str, _rule: str, _what: str) -> None:
        return None

    def handle(self, connection: Connection, request: control.Request) -> None:
        connection.ok(request.id, {})

    def broke(self, why: str) -> None:
        raise AssertionError(why)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def in_a_loop(act: Callable[[], object]) -> object:
    async def story() -> object:
        return act()

    return _loop().run_until_complete(story())


def control_connection(raw: bytes) -> object:
    """What a local client sends, in pieces."""

    def act() -> None:
        client = LocalConnection(_Server(), cast("Any", _Server()))
        client._transport = Deaf()
        for first in range(0, len(raw), STEP_BYTES):
            feed(client, raw[first : first + STEP_BYTES])
        assert len(client._buffer) <= len(raw)
        client._transport.close()

    return in_a_loop(act)


class _Owner:
    """Takes a peer in, and three malformed frames from it."""

    def __init__(self) -> None:
        self.errors = 0
        self.node = given.Given(peers=("n2",), node="n1")

    def opened(self, _: PeerConnection) -> None:
        return None

    def hello_received(self, _connection: PeerConnection, _hello: Hello) -> bool:
        return True

    def received(self, _: PeerConnection, envelope: Envelope) -> None:
        assert envelope.src == "n2"

    def malformed(self, _: PeerConnection, __: PeerloadError) -> bool:
        self.errors += 1
        assert self.errors <= 3, "it was cut off"
        return self.errors < 3

    def refused(self, connection: PeerConnection, _reason: str, _detail: str = "") -> None:
        assert not connection.is_closed

    def writable(self, _: PeerConnection) -> None:
        return None

    def closed(self, _: PeerConnection, _reason: str) -> None:
        return None


@functools.cache
def _tls() -> Any:
    return SimpleNamespace(cluster=SimpleNamespace(name="default"), refuses=lambda _facts: False)


@functools.cache
def _owner() -> _Owner:
    return _Owner()


def peer_connection(raw: bytes) -> object:
    """What a member sends over its link, in pieces: as it stands, and after a sound introduction."""

    def act() -> None:
        for before in (b"", _INTRODUCTION):
            owner = _owner()
            owner.errors = 0
            link = PeerConnection(owner, _tls(), cast("Any", None), dialled=False)
            link._transport, link.certified = Deaf(), "n2"
            for piece in (before, *(raw[first : first + STEP_BYTES] for first in range(0, len(raw), STEP_BYTES))):
                feed(link, piece)
            link._transport.close()
            link.connection_lost(None)

    return in_a_loop(act)


def member(raw: bytes) -> object:
    """What a member says in due form is dealt with by a node that has tasks of its own, one elsewhere, and a guest."""
    try:
        message: Any = peer.decode(raw).body
    except ProtocolError:
        return None
    with mock.patch.object(given, "build_preset", return_value=policies()):
        x = given.Given(peers=("y", "n2"), node="n1", slots=1)
    x.submit()
    x.submit()
    x.hear("n2", given.offer(home="n2"))
    for src in ("n2", "y"):
        x.hear(src, message)
    x.after(70.0)
    return x.hear("n2", message)


@functools.cache
def policies() -> PolicySet:
    """Made once: it takes longer than all else."""
    return registry.build_preset("given", dict(given.SENDER))


def launcher_request(raw: bytes) -> object:
    """What the launcher hears on its socket: carried out, or the connection ends."""
    link = AgentSocket.__new__(AgentSocket)
    link._received, link._agent = bytearray(), None
    link._carry_out = lambda request: None
    for first in range(0, len(raw), STEP_BYTES):
        link._process(raw[first : first + STEP_BYTES])
    return _starts_with_list(raw[4:])


def launcher_event(raw: bytes) -> object:
    """What the agent hears from its launcher."""

    async def story() -> None:
        link = LauncherLink.__new__(LauncherLink)
        link._owner = cast("Any", SimpleNamespace(received=lambda _event: None))
        frames = EventFrames()
        frames.connection_made(cast("Any", SimpleNamespace(close=lambda: None)))
        link._heartbeat = cast("Any", SimpleNamespace(received=lambda: None))
        frames.deliver_to(link)
        frames.data_received(raw)
        frames.connection_lost(None)
        if not isinstance(frames.lost.result(), LOST):
            raise frames.lost.result()

    return _loop().run_until_complete(story())


def listing(raw: bytes) -> object:
    """What another node lists is read, and put together with what a third does."""
    _, kind, body = control.decode_answer(raw)
    if kind == "error":
        return None
    together = merged(body, merged(body, {}))
    return MergedListing("n2", 5).read(together)


@functools.cache
def scratch() -> Path:
    """A directory for files of a state, in memory where there is such a place."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    kept = tempfile.TemporaryDirectory(dir=place)
    _KEPT.append(kept)
    return Path(kept.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _ca() -> tuple[Any, Ed25519PrivateKey]:
    made = cluster_of()
    return made, certificates.private_key(made.authority.key)


def trust_words(raw: bytes) -> object:
    """What is passed on as the CA's words: as it stands, and signed by the CA itself."""
    made, key = _ca()
    known = TrustStore(made, scratch() / "trust-none")
    known._worth_keeping = lambda _held, _now: {}  # type: ignore[method-assign, assignment]
    signed = msgspec.msgpack.encode((raw, key.sign(revocation._CONTEXT + raw)))
    read: list[object] = []
    for word in (raw, signed):
        try:
            read.append(known.take((word,), 1e9))
        except BadRequest:
            read.append(None)
    return read


def state_file(raw: bytes) -> object:
    """The first byte chooses the file of a state that the rest is what it holds."""
    file = scratch() / "file"
    file.write_bytes(raw[1:])
    match raw[0] % 6 if raw else 0:
        case 0:
            return AddressFile(file).port_of("127.0.0.1")
        case 1:
            return TrustStore(_ca()[0], file).signed
        case 2:
            ill = GpuFaults("boot", file)
            ill.load("driver")
            return ill.error_of("card")
        case 3:
            return stored_speed(file)
        case 4:
            with suppress(ValueError):  # a damaged file, named
                return PowerControls(file)._changed()
            return None
        case _:
            return _redeemed(Invitations(file, TrustStore(_ca()[0], scratch() / "trust-none")))


def _redeemed(invites: Invitations) -> object:
    request = join.JoinRequest(_TOKEN, "n3", b"csr", b"p" * 64)
    try:
        return invites.redeem(request, b"c", b"n" * 32, 1.5, lambda *_, **__: "")
    except InvitationRefused:
        return invites._invites


def certificate(raw: bytes) -> object:
    """A certificate, as DER and as PEM."""
    for read in (certificates.proven_info, certificates.der_of, certificates.private_key):
        try:
            read(raw)
        except ValueError:
            continue
    return None


def settings_text(raw: bytes) -> object:
    """A configuration file, of which every mistake is looked for."""
    file = scratch() / "config.toml"
    file.write_bytes(raw)
    return loader.mistakes_in(file)


def users_policy(raw: bytes) -> object:
    """Which account a task runs as, in root's own file."""
    return policy_of(tomllib.loads(raw.decode()))


def exit_as_told(raw: bytes) -> object:
    """An exit as a launcher tells it."""
    return exit_of(decode_exit(msgpack.unpackb(raw)))


def manifest_of(raw: bytes) -> object:
    """A manifest of files from another node: the bytes are its only part."""
    root = msgpack.packb([manifest.FORMAT, 0, 0, [manifest.digest_of(raw)]])
    for first in (root, raw):
        blocks = {b"": first}
        try:
            manifest.decode(b"", lambda digest, blocks=blocks: blocks.get(digest, raw))  # type: ignore[misc]
        except StagingFailed:
            continue
    return None


def manifests() -> tuple[bytes, ...]:
    """The blocks of a manifest."""
    file = FileEntry("a/b", 0o644, 3, 1, (bytes(32),))
    return tuple(manifest.encode(manifest.Manifest((file,), (("c", "a/b"),), (("a", 0o755), ("d", 0o700))))[1])


def web_body(raw: bytes) -> object:
    """The body of a request to the web server."""
    return routes._body(Request("POST", "/", {}, {}, raw, is_local=True))


def words() -> tuple[bytes, ...]:
    """Words of the CA, not signed."""
    made, _ = _ca()
    said: tuple[revocation.Statement, ...] = (
        revocation.Revoked(made.id, "n2", 1.0, ("ab",)),
        revocation.SealKey(made.id, 1, bytes(32), 1.0),
    )
    return tuple(msgspec.msgpack.encode(word) for word in said)


def files() -> tuple[bytes, ...]:
    """Files of a state, each with the byte that chooses it."""
    ca = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    invite = msgspec.msgpack.encode(((_TOKEN, ca, 1.0, 2.0, 1, "", False),))
    addresses = msgspec.msgpack.encode({"listen": "127.0.0.1:1", "peers": []})
    return (
        b"\0" + addresses,
        b"\1\x90",
        b'\2{"boot": "boot", "driver": "driver", "ill": {}}',
        b"\x031.5\n",
        b'\4[["cpu governor", "/sys/x", "powersave"]]',
        b"\5" + invite,
    )


def _introduction() -> bytes:
    told = messages.Identity("n2", "boot-2", "machine-2", "store-2", 2, "127.0.0.1:2")
    hello = messages.Hello(told, Profile("n2", 2, 2.0))
    return bytes(peer.encode_frame(messages.Envelope(1, "default", "n2", "boot-2", 1, hello)))


_TOKEN = b"t" * 8
_INTRODUCTION = _introduction()
