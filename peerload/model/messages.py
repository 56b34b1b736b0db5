"""Messages between nodes, in one file because a frame is decoded into the union of all.

One struct per message, told apart by the tag ``t``.
Advice (`Advice`) may be late, lost or wrong and reserves nothing; it travels over MQTT or the peer link.
Ownership (`Ownership`) travels over the peer link only; every message of it is idempotent and repeatable.
Fields are only ever added, with a default; unknown fields are skipped. Sizes: docs/wire.md.
"""

from __future__ import annotations

from typing import Annotated, get_args

import msgspec
from msgspec import Meta

from peerload.model.gossip import Load, MembershipUpdate
from peerload.model.resources import (
    DEVICES_MAX,
    Address,
    BootId,
    DeviceId,
    LoadReport,
    Name,
    NodeName,
    Placement,
    Profile,
    ResourceRequest,
)
from peerload.model.task import (
    LEASE_S_MIN,
    Attempt,
    Digest,
    Exit,
    Nonce,
    Priority,
    TaskId,
    TaskSpec,
    Uid,
    WorkingDirectory,
)

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1

PEERS_TOLD_MAX = 300
RUMOURS_MAX = 4096
"""Members in one `Sync`."""
PROFILES_MAX = 64
RENEWALS_MAX = 4096
SIGNED_MAX = 256
"""Signed statements of the cluster's CA at a time."""
AWAITED_MAX = 1000
"""Tasks of one home whose outcome another home requests at a time."""
FORWARD_BYTES_MAX = 3 << 20
"""The largest request that is forwarded to another node."""
FORWARDED_PART_BYTES_MAX = 512 << 10
"""An answer is forwarded in parts of at most this size."""
PAIR_MOVES_MAX = 64
"""Tasks that change hands in one pairing."""
GIVEN_MAX = 64
"""Bound on the tasks that one GiveRequest gets."""

BLOCKS_MAX = 2048
SOURCES_MAX = 4
"""Nodes beside its home that an offer names as sources of a task's files."""
DECLINES = (
    "room", "directory", "cannot", "drained", "floor", "busy", "disk", "policy", "stalled", "staging", "environment",
    "cache",
)  # fmt: skip
"""Codes of declined offers: no room now, no such directory, resources or labels missing, drained, an attempt that this
node has promised not to start, too many offers pending, its disk nearly full, its policy runs no tasks of that user,
its file system has not answered whether the directory exists, the task's files are not available anywhere, its
environment cannot be built here, or its files do not fit into the cache."""
DECLINES_LASTING = ("directory", "policy", "stalled", "environment", "cache")
"""Declines that apply to every task of the same user in the same directory, with the same lock or the same files, and
are remembered for a while."""


def decline_subject(code: str, spec: TaskSpec | DirectoryTold) -> bytes:
    """The subject of a decline for a lasting reason: it holds for every task with the same subject."""
    user = spec.user.encode()
    if code in ("environment", "cache"):
        part = (spec.lock if code == "environment" else spec.files) if isinstance(spec, TaskSpec) else None
        return b"" if part is None else part.manifest
    return user if code == "policy" else spec.directory + b"\0" + user if user else spec.directory


Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
LeaseSeconds = Annotated[float, Meta(ge=LEASE_S_MIN, le=1e12)]
Reason = Annotated[str, Meta(max_length=512)]
Search = Annotated[int, Meta(ge=0, le=1 << 62)]
UNASKED = 0
"""The number of a `StateAnswer` that answers no search: an announcement to one node."""
WHY_LENGTH_MAX = 400
Captured = Annotated[bytes, Meta(max_length=64 << 10)]


class Identity(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Identity of a sender: the node, and ids of this start of its agent, this boot of its machine, this database file.

    incarnation: grows with every start of the agent; address: HOST:PORT of its peer link, "" if it cannot be dialled.
    """

    node: NodeName
    boot: BootId
    machine_boot: BootId
    store: BootId
    incarnation: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    address: Address = ""


class _Message(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="t"):
    """Root of all messages."""


class _OfAttempt(_Message, frozen=True):
    """Root of messages about one attempt of a task."""

    task: TaskId
    uid: Uid
    attempt: Attempt


# -- membership ------------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """The first frame on a peer link, from both ends. ``peers`` are addresses of other members, so that knowing any
    one member is enough."""

    identity: Identity
    profile: Profile
    report: LoadReport = LoadReport()
    peers: Annotated[tuple[Identity, ...], Meta(max_length=PEERS_TOLD_MAX)] = ()
    stream: bool = False
    """True if the connection carries one output stream, or the requests of one client, and is not a link."""
    refutation: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    """Refutations of this run in gossip so far (`MembershipUpdate.refutation`)."""
    trust: Annotated[bytes, Meta(max_length=16)] = b""
    """Digest of the signed statements that the sender knows (`Trust`)."""
    wall_at: Seconds = 0.0
    """Time by the sender's clock, so that `doctor` can report a wrong one; 0: not sent. No decision uses it."""
    up_s: Seconds = 0.0
    """Uptime of the agent; 0: not sent. Of two agents with copies of one state directory the younger ends."""
    back: Search = 0
    """Number of the `DialBack` that requested this stream; 0: none did. The node that requested it sends its request over it."""


class Ping(_Message, frozen=True, tag="ping"):
    """Liveness probe."""

    sequence: Search


class Pong(_Message, frozen=True, tag="pong"):
    """Answer to a Ping, with the load of its sender."""

    sequence: Search
    report: LoadReport


class Sync(_Message, frozen=True, tag="sync"):
    """Anti-entropy: all that the sender knows about members and loads. asks: the receiver answers with the same."""

    rumours: Annotated[tuple[MembershipUpdate, ...], Meta(max_length=RUMOURS_MAX)] = ()
    loads: Annotated[tuple[Load, ...], Meta(max_length=RUMOURS_MAX)] = ()
    asks: bool = False


class ProfileRequest(_Message, frozen=True, tag="profile-request"):
    """Request for the profiles of these nodes. Any node that knows them may answer."""

    nodes: Annotated[tuple[NodeName, ...], Meta(max_length=PROFILES_MAX)]


class KnownProfile(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The profile of one run of a node."""

    boot: BootId
    profile: Profile


class ProfileTold(_Message, frozen=True, tag="profile-told"):
    """The requested profiles that the sender knows."""

    profiles: Annotated[tuple[KnownProfile, ...], Meta(max_length=PROFILES_MAX)]


class Trust(_Message, frozen=True, tag="trust"):
    """Signed statements of the cluster's CA: which nodes are revoked, and which keys seal gossip. Each is signed by the CA, and
    any node may pass it on (security/revocation.py)."""

    signed: Annotated[tuple[Annotated[bytes, Meta(max_length=1024)], ...], Meta(max_length=SIGNED_MAX)]


class CertificateRequest(_Message, frozen=True, tag="certificate-request"):
    """Request to renew the certificate with which this link was made, for the same key and name."""


class CertificateTold(_Message, frozen=True, tag="certificate"):
    """The renewed certificate (PEM)."""

    certificate: Annotated[bytes, Meta(max_length=8192)]


class Wake(_Message, frozen=True, tag="wake"):
    """Request to send a magic packet to this sleeping node, which is on the receiver's network."""

    node: NodeName


class Leaving(_Message, frozen=True, tag="leaving"):
    """Notice that the sender stops on purpose. Its running tasks run on."""


# -- advice ----------------------------------------------------------------------------------------------------------


class State(_Message, frozen=True, tag="state"):
    """An announcement of load. Over MQTT it is retained under the sender's own topic (at most 4 KiB)."""

    identity: Identity
    profile: Profile
    report: LoadReport


class Need(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The request of one task to the node that may run it, without its command."""

    request: ResourceRequest = ResourceRequest()
    placement: Placement = Placement()
    migrations: Annotated[int, Meta(ge=0, le=1000)] = 0


class ProbeRequest(_Message, frozen=True, tag="probe"):
    """Question whether the receiver would accept this task now. search: number that the reply repeats. expected_s:
    expected run time on the reference machine; 0 = no bid is wanted."""

    search: Search
    need: Need
    report: LoadReport
    expected_s: Seconds = 0.0


class ProbeReply(_Message, frozen=True, tag="probe-reply"):
    """The answer to a Probe; it reserves nothing. price_s: the bid: estimated seconds from now until the task would
    have ended there; 0 if no bid was wanted."""

    search: Search
    accepts: bool
    report: LoadReport
    price_s: Seconds = 0.0


class GiveRequest(_Message, frozen=True, tag="give-request"):
    """Request for waiting tasks, from a node with room. profile: of the sender, so that the receiver chooses tasks that
    it can run. ahead: the sender has no free slot yet: a receiver gives a task only if it has more tasks than the
    sender would then have. most: how many are wanted."""

    search: Search
    report: LoadReport
    profile: Profile
    ahead: bool = False
    most: Annotated[int, Meta(ge=1, le=GIVEN_MAX)] = 1


class Footprint(_Message, frozen=True, tag="footprint"):
    """Hint left at nodes that a failed search has asked at random: the sender has room, or has tasks to give."""

    has_room: bool


class GiveReply(_Message, frozen=True, tag="give-reply"):
    """Answer to a GiveRequest: the task that its home will offer, and the uids of others after it; ``task`` is empty if there is
    none."""

    search: Search
    report: LoadReport
    task: Annotated[str, Meta(max_length=80)] = ""
    uid: Annotated[bytes, Meta(max_length=16)] = b""
    others: Annotated[tuple[Uid, ...], Meta(max_length=GIVEN_MAX)] = ()


class StateRequest(_Message, frozen=True, tag="state-request"):
    """Request to all nodes for load reports. With a ``need``, nodes answer that would accept that task now; else,
    if the asker has room, nodes that give tasks; if it has too many tasks, nodes that accept one. Only these
    answer, each after a random pause. expected_s: as in `ProbeRequest`."""

    request: Search
    report: LoadReport
    need: Need | None = None
    expected_s: Seconds = 0.0


class StateAnswer(_Message, frozen=True, tag="state-answer"):
    """Answer of a node that is useful to the requester; it reserves nothing. request: UNASKED for an unrequested announcement to
    one node; price_s: as in `ProbeReply`."""

    request: Search
    report: LoadReport
    price_s: Seconds = 0.0


class Enough(_Message, frozen=True, tag="enough"):
    """Message to all nodes: no more answers to this request are wanted."""

    request: Search


class PairRequest(_Message, frozen=True, tag="pair-request"):
    """Request to pair, to even out the loads of both nodes."""

    pairing: Search
    report: LoadReport


class PairReply(_Message, frozen=True, tag="pair-reply"):
    """Answer to a PairRequest. The node with more load gives: promised are the tasks that it will offer. The other one is
    paired until `Unpair`."""

    pairing: Search
    accepts: bool
    report: LoadReport
    promised: Annotated[tuple[Uid, ...], Meta(max_length=PAIR_MOVES_MAX)] = ()


class Unpair(_Message, frozen=True, tag="unpair"):
    """End of a pairing; the promised tasks will be offered."""

    pairing: Search
    promised: Annotated[tuple[Uid, ...], Meta(max_length=PAIR_MOVES_MAX)] = ()


# -- ownership -------------------------------------------------------------------------------------------------------


class Offer(_OfAttempt, frozen=True, tag="offer"):
    """home → x: offer of attempt n. Accept reserves resources for 10 s.

    migrations_max: -1 = no limit; only: no other node could ever run it, so that it may wait in x's queue;
    load_tasks_max: with n at most this, x accepts regardless of its thresholds (-1: only its thresholds decide).
    sources: other nodes that have the task's files."""

    spec: TaskSpec
    lease_s: LeaseSeconds
    migrations: Annotated[int, Meta(ge=0, le=1000)] = 0
    migrations_max: Annotated[int, Meta(ge=-1, le=1000)] = -1
    only: bool = False
    load_tasks_max: Annotated[int, Meta(ge=-1, le=1 << 40)] = -1
    sources: Annotated[tuple[NodeName, ...], Meta(max_length=SOURCES_MAX)] = ()


class Accept(_OfAttempt, frozen=True, tag="accept"):
    """x → home: resources are reserved. Repeated until COMMIT comes or the reservation ends. ts: x's own clock at
    sending; home returns it and never reads it. machine_boot, store: x's at that time. files: they are there."""

    nonce: Nonce
    ts: Seconds
    machine_boot: Annotated[str, Meta(max_length=64)] = ""
    store: Annotated[str, Meta(max_length=64)] = ""
    files: bool = False


class Staging(_OfAttempt, frozen=True, tag="staging"):
    """x → home: progress of staging the files of the offered task, in bytes; builds: its environment is being built.
    The offer stays pending meanwhile."""

    done_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    builds: bool = False


class Decline(_OfAttempt, frozen=True, tag="decline"):
    """x → home: the offer is declined. code: one of `DECLINES`; home remembers those in `DECLINES_LASTING`."""

    code: Annotated[str, Meta(max_length=20)]
    reason: Reason
    report: LoadReport


class Commit(_OfAttempt, frozen=True, tag="commit"):
    """home → x: order to run the attempt. The lease lasts until ``ts + lease_s`` on x's clock."""

    nonce: Nonce
    ts: Seconds
    lease_s: LeaseSeconds


class Renewal(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A lease within a batch of renewals. started_at: 0 while the task waits in x's queue; deadline_ts: the newest ts
    whose answer set the present deadline, 0 while there is none (the home has parked it); ran_s: run time so far, if
    its lease grows with that; devices: ids of its granted devices, not in every renewal; output_waits_because:
    reason why the output files of its ended process wait at x."""

    task: TaskId
    uid: Uid
    attempt: Attempt
    ts: Seconds
    started_at: Seconds = 0.0
    deadline_ts: Seconds = 0.0
    ran_s: Seconds = 0.0
    devices: Annotated[tuple[DeviceId, ...], Meta(max_length=DEVICES_MAX)] = ()
    output_waits_because: Annotated[str, Meta(max_length=WHY_LENGTH_MAX)] = ""


class Renew(_Message, frozen=True, tag="renew"):
    """x → home: request to renew the leases of these attempts."""

    renewals: Annotated[tuple[Renewal, ...], Meta(max_length=RENEWALS_MAX)]


class LeaseExtension(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A renewed lease: it lasts until ``ts + lease_s`` on x's clock. A ts that was answered before renews
    nothing. priority: the present priority of a task that waits in x's queue; null: as it was submitted."""

    uid: Uid
    attempt: Attempt
    ts: Seconds
    lease_s: LeaseSeconds
    priority: Priority | None = None


class RenewOk(_Message, frozen=True, tag="renew-ok"):
    """home → x: the renewed leases."""

    extensions: Annotated[tuple[LeaseExtension, ...], Meta(max_length=RENEWALS_MAX)]


class Parking(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A parked attempt. ts: the newest time of x's clock that home has received for it."""

    task: TaskId
    uid: Uid
    attempt: Attempt
    ts: Seconds


class Park(_Message, frozen=True, tag="park"):
    """home → x: the home leaves for a while; these attempts have no deadline until it renews them for a newer ts."""

    parkings: Annotated[tuple[Parking, ...], Meta(max_length=RENEWALS_MAX)]


class Revoke(_OfAttempt, frozen=True, tag="revoke"):
    """home → x: order to end this attempt: the task was cancelled, or has another attempt. ``signal`` is sent first, then SIGKILL."""

    signal: Annotated[int, Meta(ge=1, le=64)] = 15
    reason: Reason = ""


class Signal(_OfAttempt, frozen=True, tag="signal"):
    """home → x: order to send this signal to the running task, which may continue."""

    signal: Annotated[int, Meta(ge=1, le=64)]


class Query(_OfAttempt, frozen=True, tag="query"):
    """home → x: question for the state of this attempt. Answered by Renew, Result, Died or NotStarted."""


class NotStarted(_OfAttempt, frozen=True, tag="not-started"):
    """x → home: a durable promise that this attempt never started here and never will. store: the database with the
    promise; home ignores a promise of another store than that of the ACCEPT, because it may have been forgotten."""

    reason: Reason = ""
    store: Annotated[str, Meta(max_length=64)] = ""


class Died(_OfAttempt, frozen=True, tag="died"):
    """x → home: the attempt started and has no result; its processes are gone. Also sent for an attempt that an earlier
    start of x's agent refused, if x no longer knows that: in both cases it does not run and never will. store: as in
    NotStarted."""

    reason: Reason = ""
    store: Annotated[str, Meta(max_length=64)] = ""


class Return(_OfAttempt, frozen=True, tag="return"):
    """x → home: an unrequested NotStarted: x drains, or the peer ``to`` suits better."""

    to: Annotated[str, Meta(max_length=40)] = ""
    reason: Reason = ""
    store: Annotated[str, Meta(max_length=64)] = ""


class Result(_OfAttempt, frozen=True, tag="result"):
    """x → home: the end of the attempt; repeated until ResultAck. It carries output of at most 64 KiB in all (inline); home
    fetches larger output."""

    exit: Exit
    inline: bool = False
    stdout: Captured = b""
    stderr: Captured = b""


class ResultAck(_OfAttempt, frozen=True, tag="result-ack"):
    """home → x: the result, or the death of the attempt, is recorded: x may forget it, but keeps its fence."""


class AwaitTasks(_Message, frozen=True, tag="await-tasks"):
    """home → another home: question about the state of its tasks or arrays that tasks of the sender depend on.
    TasksTold answers immediately, and again when one has ended; repeated until all have ended."""

    tasks: Annotated[tuple[TaskId, ...], Meta(max_length=AWAITED_MAX)]


class AwaitedTask(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The state of one of these tasks. is_known: there is, or was, such a task; is_over: all of it has ended; failed:
    its failures, "" = none so far; says: its state in a few words."""

    task: TaskId
    is_known: bool = True
    is_over: bool = False
    failed: Reason = ""
    says: Annotated[str, Meta(max_length=128)] = ""


class TasksTold(_Message, frozen=True, tag="tasks-told"):
    """home → the other home: answer to AwaitTasks, for all of these tasks or some."""

    tasks: Annotated[tuple[AwaitedTask, ...], Meta(max_length=AWAITED_MAX)]


# -- working directories ---------------------------------------------------------------------------------------------


class DirectoryRequest(_Message, frozen=True, tag="directory-request"):
    """home → any: question whether the receiver would run a task of this user in this directory. DirectoryTold answers."""

    directory: WorkingDirectory
    user: Name = ""


class DirectoryTold(_Message, frozen=True, tag="directory-told"):
    """The answer to a DirectoryRequest. ``code``: "" if the directory is there, else the one of `DECLINES_LASTING` with
    which an offer would be declined. ``identity``: the same as at home if it is the same directory; "" = not known."""

    directory: WorkingDirectory
    user: Name = ""
    code: Annotated[str, Meta(max_length=20)] = ""
    identity: Annotated[str, Meta(max_length=64)] = ""


# -- output streams: a connection of their own, so that a long output never stands before a lease ---------------------


class OutputRequest(_OfAttempt, frozen=True, tag="output-request"):
    """home → x: request for the output of this attempt from these offsets on. follow: until it has ended; else the output so far.
    paced: backpressure: the task waits for its reader."""

    stdout_from: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    stderr_from: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    follow: bool = True
    paced: bool = False


class OutputChunk(_Message, frozen=True, tag="output-chunk"):
    """A piece of output at its offset; the capture limit has cut the bytes between two pieces."""

    stream: Annotated[int, Meta(ge=1, le=2)]
    offset: Annotated[int, Meta(ge=0, le=1 << 60)]
    data: Annotated[bytes, Meta(max_length=512 << 10)]


class OutputEnd(_Message, frozen=True, tag="output-end"):
    """End of the output, with the final sizes. gone: x does not know the attempt (any more)."""

    stdout_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    stderr_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    gone: bool = False


# -- input streams: as output, the other way ---------------------------------------------------------------------------


class InputRequest(_OfAttempt, frozen=True, tag="input-request"):
    """x → home: request for the standard input of this attempt up to the offset ``up_to``; repeated over the same
    connection as the task reads on. have: bytes that x has for good; is_closed: the task reads no more."""

    have: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    up_to: Annotated[int, Meta(ge=0, le=1 << 61)] = 0
    is_closed: bool = False


class InputChunk(_Message, frozen=True, tag="input-chunk"):
    """Piece of input at its offset, which continues the piece before."""

    offset: Annotated[int, Meta(ge=0, le=1 << 60)]
    data: Annotated[bytes, Meta(max_length=512 << 10)]


class InputWindow(_Message, frozen=True, tag="input-window"):
    """The window of the client of a task with a terminal."""

    rows: Annotated[int, Meta(ge=1, le=65_535)]
    columns: Annotated[int, Meta(ge=1, le=65_535)]


class InputEnd(_Message, frozen=True, tag="input-end"):
    """End of a stream, with its size. gone: home has no such attempt there (any more); its input may be incomplete."""

    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    gone: bool = False


# -- files: streams to any member that has them ------------------------------------------------------------------------


class BlocksRequest(_Message, frozen=True, tag="blocks-request"):
    """any → any: request for the blocks with these BLAKE3 digests. A node that knows a digest may have its block.
    verify: the receiver checks that they are intact, because one was not. A node that serves all users of its machine
    searches only the files of one user: the user of the task with the uid ``task`` that needs them, if it is between
    both nodes, otherwise the user whose files include ``manifest``, which names the blocks."""

    digests: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=BLOCKS_MAX)]
    verify: bool = False
    task: Annotated[bytes, Meta(max_length=16)] = b""
    manifest: Annotated[bytes, Meta(max_length=32)] = b""


class Blocks(_Message, frozen=True, tag="blocks"):
    """The next blocks, in the order they were asked for."""

    blocks: Annotated[
        tuple[Annotated[memoryview, Meta(max_length=1 << 20)], ...], Meta(min_length=1, max_length=BLOCKS_MAX)
    ]


class BlocksEnd(_Message, frozen=True, tag="blocks-end"):
    """End of the blocks. why: reason why the next one cannot be sent, "" if all were."""

    why: Annotated[str, Meta(max_length=WHY_LENGTH_MAX)] = ""


# -- requests of clients: a connection of their own for each client and node ------------------------------------------


class Forward(_Message, frozen=True, tag="forward"):
    """any → any: a request of a client of the sender. request: the body of a frame of the control socket, whose number
    the answers repeat; user, uid: the client's user at the sender; hops: number of nodes that have forwarded it, this
    one included."""

    request: Annotated[bytes, Meta(min_length=1, max_length=FORWARD_BYTES_MAX)]
    user: Annotated[str, Meta(max_length=64)] = ""
    uid: Annotated[int, Meta(ge=0, le=1 << 32)] = 0
    hops: Annotated[int, Meta(ge=1, le=1000)] = 1


class Forwarded(_Message, frozen=True, tag="forwarded"):
    """The answer: the body of a frame of the control socket; with ``continues`` a part of it, and the next follows."""

    answer: Annotated[bytes, Meta(max_length=FORWARDED_PART_BYTES_MAX)]
    continues: bool = False


class ForwardStop(_Message, frozen=True, tag="forward-stop"):
    """Cancellation of the request of this number: its answer is no longer wanted; the others continue."""

    number: Search


class WrongBoot(_Message, frozen=True, tag="wrong-boot"):
    """Notice that the frame was for another start of this agent and was ignored."""

    boot: BootId


class NameTaken(_Message, frozen=True, tag="name-taken"):
    """Notice before the link closes: another linked agent has the receiver's name. at: its address (HOST:PORT), if it has the
    receiver's database, too: the receiver contacts it, since a member's claim alone does not end an agent."""

    at: Address = ""


class DialBack(_Message, frozen=True, tag="dial-back"):
    """Request over a link to open a stream to the sender, which may be unable to dial the receiver. The Hello of the stream
    repeats this number; `NotDialled` answers if that fails."""

    number: Annotated[int, Meta(ge=1, le=1 << 62)]


class NotDialled(_Message, frozen=True, tag="not-dialled"):
    """Notice that the sender cannot dial the receiver: for the stream requested under this number, or (0) at its address."""

    number: Search
    why: Annotated[str, Meta(max_length=WHY_LENGTH_MAX)] = ""


Membership = (
    Hello | Ping | Pong | Sync | ProfileRequest | ProfileTold | Trust | CertificateRequest | CertificateTold | Wake
    | Leaving | WrongBoot | NameTaken | DialBack | NotDialled | DirectoryRequest | DirectoryTold
)  # fmt: skip
Broadcast = State | StateRequest | Enough
Advice = (
    Broadcast | StateAnswer | ProbeRequest | ProbeReply | GiveRequest | GiveReply | Footprint | PairRequest
    | PairReply | Unpair
)  # fmt: skip
Ownership = (
    Offer | Accept | Staging | Decline | Commit | Renew | RenewOk | Park | Revoke | Signal | Query | NotStarted | Died
    | Return | Result | ResultAck | AwaitTasks | TasksTold
)  # fmt: skip
Output = OutputRequest | OutputChunk | OutputEnd
Input = InputRequest | InputChunk | InputWindow | InputEnd
Files = BlocksRequest | Blocks | BlocksEnd
Forwarding = Forward | Forwarded | ForwardStop
LinkMessage = Membership | Advice | Ownership
"""Messages over links."""
Message = LinkMessage | Output | Input | Files | Forwarding

STREAMED: tuple[type, ...] = get_args(Output | Input | Files | Forwarding)
"""Messages over streams only."""
BROADCAST: tuple[type, ...] = get_args(Broadcast)
ADVICE: tuple[type, ...] = get_args(Advice)
OWNERSHIP: frozenset[type] = frozenset(get_args(Ownership))
TOGETHER: frozenset[type] = OWNERSHIP | frozenset(ADVICE)
"""Messages that may share a frame."""
TOGETHER_MAX = 1024
"""Bound on the further messages in a frame."""


def needs_no_row(message: Message) -> bool:
    """True if a message makes no durable promise, so that it need not wait for rows that are being written: advice, and
    OFFER and ACCEPT of a task without files, which only reserve. COMMIT does wait."""
    if isinstance(message, ADVICE):
        return True
    if isinstance(message, Offer):
        return not message.spec.is_staged
    return isinstance(message, Accept) and not message.files


class Envelope(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Envelope of every message between nodes.

    v: protocol version; dst and dst_boot are empty if the sender does not know them yet (Hello) or means all (State);
    seq: per (src, src_boot), to drop duplicates; others: further messages, in order, if the first is of TOGETHER.
    """

    v: Annotated[int, Meta(ge=1, le=1000)]
    cluster: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,40}\Z")]
    src: NodeName
    src_boot: BootId
    seq: Annotated[int, Meta(ge=0, le=1 << 62)]
    body: Message
    dst: Annotated[str, Meta(max_length=40)] = ""
    dst_boot: Annotated[str, Meta(max_length=64)] = ""
    others: Annotated[tuple[Advice | Ownership, ...], Meta(max_length=TOGETHER_MAX)] = ()
