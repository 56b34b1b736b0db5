"""Messages between nodes, in one file because a frame is decoded into the union of all.

One struct per message, told apart by the tag ``t``.
Advice (`Advice`) may be late, lost or wrong and reserves nothing; it travels over MQTT or the peer link.
Ownership (`Ownership`) travels over the peer link only; every message of it is idempotent and repeatable.
Fields are only ever added, with a default; unknown fields are skipped. Sizes: docs/wire.md.
"""

from __future__ import annotations

from typing import Annotated, TypeGuard, get_args

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
from peerload.model.task import LEASE_S_MIN, Attempt, Digest, Exit, Nonce, TaskId, TaskSpec, Uid, WorkingDirectory

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1

PEERS_TOLD_MAX = 300
RUMOURS_MAX = 4096
"""Members that one `Sync` tells of."""
PROFILES_MAX = 64
"""Profiles asked for, or told, at a time."""
RENEWALS_MAX = 4096
SIGNED_MAX = 256
"""Words of the cluster's CA that there are at a time."""
AWAITED_MAX = 1000
"""Tasks of one home that another asks after at a time."""
FORWARD_BYTES_MAX = 3 << 20
"""The largest request that is carried to another node."""
FORWARDED_PART_BYTES_MAX = 512 << 10
"""An answer is carried in parts of at most this size."""
PAIR_MOVES_MAX = 64
"""Tasks that change hands in one pairing."""

BLOCKS_MAX = 2048
"""Blocks of files that are asked for at a time."""
SOURCES_MAX = 4
"""Nodes beside its home that an offer names as sources of a task's files."""
DECLINES = (
    "room",
    "directory",
    "cannot",
    "drained",
    "floor",
    "busy",
    "disk",
    "policy",
    "stalled",
    "staging",
    "environment",
    "cache",
)
"""Why an offer is declined: no room now, no such directory, resources or labels missing, drained, an attempt this node
has promised not to start, too many offers outstanding, little room left on its disk, its policy runs no tasks of that
user, its file system has not answered whether the directory is there, the task's files cannot be had anywhere, its
environment cannot be built here, or its files do not fit into the cache."""
DECLINES_LASTING = ("directory", "policy", "stalled", "environment", "cache")
"""Declines that hold for every task of the same user in the same directory, of the same lock or the same files, and are
remembered for a while."""


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
"""The number of no search: of a `StateAnswer` that is an announcement to one node alone."""
WHY_LENGTH_MAX = 400
Captured = Annotated[bytes, Meta(max_length=64 << 10)]


class Identity(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Identity of a sender: a node, this start of its agent, this start of its machine, this database file.

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
    """This connection is for one output stream, or for one client's requests, alone; it is no link."""
    refutation: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    """Refutations of this run in gossip so far (`MembershipUpdate.refutation`)."""
    trust: Annotated[bytes, Meta(max_length=16)] = b""
    """A digest of what the cluster's CA has said, as far as it is known here (`Trust`)."""
    forwards: bool = False
    """`Forward` is understood here."""
    wall_at: Seconds = 0.0
    """Time by its clock, so that people can be told of a wrong one; 0: not told. Nothing is decided by it."""
    dials_back: bool = False
    """`DialBack` and `NotDialled` are understood here."""
    up_s: Seconds = 0.0
    """Uptime: of two agents with copies of one state directory the younger ends; 0: not told."""
    back: Search = 0
    """This stream is the one that was asked for by a `DialBack` of this number: who asked for it asks over it, too."""


class Ping(_Message, frozen=True, tag="ping"):
    """Are you there?"""

    sequence: Search


class Pong(_Message, frozen=True, tag="pong"):
    """I am; and this is my load."""

    sequence: Search
    report: LoadReport


class Sync(_Message, frozen=True, tag="sync"):
    """All that this node knows of the members, and their loads. asks: tell me all that you know, too."""

    rumours: Annotated[tuple[MembershipUpdate, ...], Meta(max_length=RUMOURS_MAX)] = ()
    loads: Annotated[tuple[Load, ...], Meta(max_length=RUMOURS_MAX)] = ()
    asks: bool = False


class ProfileRequest(_Message, frozen=True, tag="profile-request"):
    """Request for the profiles of these nodes. Anybody who knows them may answer."""

    nodes: Annotated[tuple[NodeName, ...], Meta(max_length=PROFILES_MAX)]


class KnownProfile(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The profile of one run of a node."""

    boot: BootId
    profile: Profile


class ProfileTold(_Message, frozen=True, tag="profile-told"):
    """The profiles asked for, as far as they are known."""

    profiles: Annotated[tuple[KnownProfile, ...], Meta(max_length=PROFILES_MAX)]


class Trust(_Message, frozen=True, tag="trust"):
    """Signed statements of the cluster's CA since it was made: who is shut out, and with which keys is sealed. Each is signed by
    it, whoever passes it on (security/revocation.py)."""

    signed: Annotated[tuple[Annotated[bytes, Meta(max_length=1024)], ...], Meta(max_length=SIGNED_MAX)]


class CertificateRequest(_Message, frozen=True, tag="certificate-request"):
    """My certificate ends soon: make the one anew that this link was made with, for the same key and name."""


class CertificateTold(_Message, frozen=True, tag="certificate"):
    """The certificate (PEM)."""

    certificate: Annotated[bytes, Meta(max_length=8192)]


class Wake(_Message, frozen=True, tag="wake"):
    """This node is asleep, and you are on its network: send it a magic packet."""

    node: NodeName


class Leaving(_Message, frozen=True, tag="leaving"):
    """The agent stops on purpose. Its running tasks run on."""


# -- advice ----------------------------------------------------------------------------------------------------------


class State(_Message, frozen=True, tag="state"):
    """An announcement of load. Over MQTT it is retained under the sender's own topic (at most 4 KiB)."""

    identity: Identity
    profile: Profile
    report: LoadReport


class Need(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The request of one task to the node that may run it; it stands for the task where the command does not matter."""

    request: ResourceRequest = ResourceRequest()
    placement: Placement = Placement()
    migrations: Annotated[int, Meta(ge=0, le=1000)] = 0


class ProbeRequest(_Message, frozen=True, tag="probe"):
    """Would you accept this task now? ``search`` comes back in the reply. expected_s: how long the task is expected to
    take on the reference machine, as its home knows it; 0 = no bid is wanted."""

    search: Search
    need: Need
    report: LoadReport
    expected_s: Seconds = 0.0


class ProbeReply(_Message, frozen=True, tag="probe-reply"):
    """The answer to a Probe; nothing is reserved by it. price_s: when the task would have ended there, in seconds from
    now, as far as that node can tell: its bid, 0 if none was wanted."""

    search: Search
    accepts: bool
    report: LoadReport
    price_s: Seconds = 0.0


class GiveRequest(_Message, frozen=True, tag="give-request"):
    """I have room: give me a waiting task. ``profile`` lets the asked node choose one that the asker can run.
    ahead: it is not needed yet, so give it only if you have more tasks than I would have then."""

    search: Search
    report: LoadReport
    profile: Profile
    ahead: bool = False


class Footprint(_Message, frozen=True, tag="footprint"):
    """My search found nothing, and you were asked in it at random: remember that I have room (or else work)."""

    has_room: bool


class GiveReply(_Message, frozen=True, tag="give-reply"):
    """PROMISED: the task's home will offer it (``task`` and ``uid`` set), or NONE (``task`` empty)."""

    search: Search
    report: LoadReport
    task: Annotated[str, Meta(max_length=80)] = ""
    uid: Annotated[bytes, Meta(max_length=16)] = b""


class StateRequest(_Message, frozen=True, tag="state-request"):
    """Request to all nodes for load reports. With a ``need``, nodes answer that would accept that task now; else,
    if the asker has room, nodes that give tasks; if it has too many tasks, nodes that accept one. Only these
    answer, each after a random pause. expected_s: as in `ProbeRequest`."""

    request: Search
    report: LoadReport
    need: Need | None = None
    expected_s: Seconds = 0.0


class StateAnswer(_Message, frozen=True, tag="state-answer"):
    """I am useful to you; nothing is reserved by it. request: UNASKED for an announcement to one node alone, which it has not
    asked for; price_s: as in `ProbeReply`."""

    request: Search
    report: LoadReport
    price_s: Seconds = 0.0


class Enough(_Message, frozen=True, tag="enough"):
    """Message to all nodes: no more answers to this request are wanted."""

    request: Search


class PairRequest(_Message, frozen=True, tag="pair-request"):
    """Shall we even out our loads?"""

    pairing: Search
    report: LoadReport


class PairReply(_Message, frozen=True, tag="pair-reply"):
    """Yes or no. The richer of two nodes gives: it says which tasks will be offered (``promised``). A poorer one is
    paired until `Unpair`."""

    pairing: Search
    accepts: bool
    report: LoadReport
    promised: Annotated[tuple[Uid, ...], Meta(max_length=PAIR_MOVES_MAX)] = ()


class Unpair(_Message, frozen=True, tag="unpair"):
    """The pair is broken; these tasks will be offered."""

    pairing: Search
    promised: Annotated[tuple[Uid, ...], Meta(max_length=PAIR_MOVES_MAX)] = ()


# -- ownership -------------------------------------------------------------------------------------------------------


class Offer(_OfAttempt, frozen=True, tag="offer"):
    """home → x: would you run attempt n? The answer reserves room for 10 s.

    migrations_max: -1 = no limit; only: no other node could ever run it, so that it may wait in x's queue;
    load_tasks_max: with n at most this x accepts whatever its thresholds say (-1: its thresholds alone decide). sources: other
    nodes that have the task's files."""

    spec: TaskSpec
    lease_s: LeaseSeconds
    migrations: Annotated[int, Meta(ge=0, le=1000)] = 0
    migrations_max: Annotated[int, Meta(ge=-1, le=1000)] = -1
    only: bool = False
    load_tasks_max: Annotated[int, Meta(ge=-1, le=1 << 40)] = -1
    sources: Annotated[tuple[NodeName, ...], Meta(max_length=SOURCES_MAX)] = ()


class Accept(_OfAttempt, frozen=True, tag="accept"):
    """x → home: room is reserved. ``ts`` is x's own clock at sending; home hands it back and never reads it. machine_boot,
    store: x's, as of this reservation; said again until the COMMIT comes or the reservation ends. input: of a task that takes
    input, or a terminal: x knows how; one of an earlier version would run it without. files: those of the task are there."""

    nonce: Nonce
    ts: Seconds
    machine_boot: Annotated[str, Meta(max_length=64)] = ""
    store: Annotated[str, Meta(max_length=64)] = ""
    input: bool = False
    files: bool = False


class Staging(_OfAttempt, frozen=True, tag="staging"):
    """x → home: the files of the offered task are on their way here, so many bytes of so many; or its environment is being built
    (builds). The offer stands meanwhile."""

    done_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    builds: bool = False


class Decline(_OfAttempt, frozen=True, tag="decline"):
    """x → home: no. ``code`` is one of `DECLINES`; those of `DECLINES_LASTING` are remembered for a while."""

    code: Annotated[str, Meta(max_length=20)]
    reason: Reason
    report: LoadReport


class Commit(_OfAttempt, frozen=True, tag="commit"):
    """home → x: run it. The lease lasts until ``ts + lease_s`` on x's clock."""

    nonce: Nonce
    ts: Seconds
    lease_s: LeaseSeconds


class Renewal(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A lease within a batch of renewals. started_at: 0 while the task waits in x's queue; deadline_ts: the
    newest ts whose answer set the present deadline, 0 while there is none (the home has parked it); ran_s: run
    time so far, if its lease grows with that; devices: the ids of those that it was given; not in every renewal."""

    task: TaskId
    uid: Uid
    attempt: Attempt
    ts: Seconds
    started_at: Seconds = 0.0
    deadline_ts: Seconds = 0.0
    ran_s: Seconds = 0.0
    devices: Annotated[tuple[DeviceId, ...], Meta(max_length=DEVICES_MAX)] = ()


class Renew(_Message, frozen=True, tag="renew"):
    """x → home: these attempts are still with me; give me more time."""

    renewals: Annotated[tuple[Renewal, ...], Meta(max_length=RENEWALS_MAX)]


class LeaseExtension(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A renewed lease: it lasts until ``ts + lease_s`` on x's clock. A ts that was answered before renews
    nothing. priority: the present priority of a task that waits in x's queue; null: as it was submitted."""

    uid: Uid
    attempt: Attempt
    ts: Seconds
    lease_s: LeaseSeconds
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] | None = None


class RenewOk(_Message, frozen=True, tag="renew-ok"):
    """home → x: granted."""

    extensions: Annotated[tuple[LeaseExtension, ...], Meta(max_length=RENEWALS_MAX)]


class Parking(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A parked attempt. ts: the newest that home has heard of x for it, on x's clock."""

    task: TaskId
    uid: Uid
    attempt: Attempt
    ts: Seconds


class Park(_Message, frozen=True, tag="park"):
    """home → x: I go away for a while; these run on without a deadline until I renew them for a newer ts."""

    parkings: Annotated[tuple[Parking, ...], Meta(max_length=RENEWALS_MAX)]


class Revoke(_OfAttempt, frozen=True, tag="revoke"):
    """home → x: end this attempt (cancelled, or another attempt has it). ``signal`` is sent first, then SIGKILL."""

    signal: Annotated[int, Meta(ge=1, le=64)] = 15
    reason: Reason = ""


class Signal(_OfAttempt, frozen=True, tag="signal"):
    """home → x: send this signal to the running task; it may go on."""

    signal: Annotated[int, Meta(ge=1, le=64)]


class Query(_OfAttempt, frozen=True, tag="query"):
    """home → x: what became of this attempt? Answered by Renew, Result, Died or NotStarted."""


class NotStarted(_OfAttempt, frozen=True, tag="not-started"):
    """x → home: a durable promise that this attempt never started here and never will. store: the one that it is kept
    in; a promise of another store than that of the ACCEPT is worth nothing, as it may have been forgotten."""

    reason: Reason = ""
    store: Annotated[str, Meta(max_length=64)] = ""


class Died(_OfAttempt, frozen=True, tag="died"):
    """x → home: the attempt started and has no result; its processes are gone. Also said of one that an earlier start
    of x's agent refused, where x cannot tell any more: either way it does not run and never will. store: as with
    NotStarted."""

    reason: Reason = ""
    store: Annotated[str, Meta(max_length=64)] = ""


class Return(_OfAttempt, frozen=True, tag="return"):
    """x → home: NotStarted, volunteered (a better peer ``to``, drain)."""

    to: Annotated[str, Meta(max_length=40)] = ""
    reason: Reason = ""
    store: Annotated[str, Meta(max_length=64)] = ""


class Result(_OfAttempt, frozen=True, tag="result"):
    """x → home: how the attempt ended; repeated until ResultAck. Output of at most 64 KiB in all rides along
    (``inline``); larger output is fetched."""

    exit: Exit
    inline: bool = False
    stdout: Captured = b""
    stderr: Captured = b""


class ResultAck(_OfAttempt, frozen=True, tag="result-ack"):
    """home → x: recorded (a result, or that the attempt died): x may forget it but for its floor."""


class AwaitTasks(_Message, frozen=True, tag="await-tasks"):
    """home → another home: tasks here wait for these of yours (ids of tasks or of arrays): what has become of them?
    Answered by TasksTold at once, and again when one has ended; repeated until all have."""

    tasks: Annotated[tuple[TaskId, ...], Meta(max_length=AWAITED_MAX)]


class AwaitedTask(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The state of one of these tasks. is_known: whether there is, or was, such a task; is_over: all of it has ended; failed:
    what of it has not succeeded, "" = nothing so far; says: where it stands, in a few words."""

    task: TaskId
    is_known: bool = True
    is_over: bool = False
    failed: Reason = ""
    says: Annotated[str, Meta(max_length=128)] = ""


class TasksTold(_Message, frozen=True, tag="tasks-told"):
    """home → the other home: that is what has become of your AwaitTasks, or of some of it."""

    tasks: Annotated[tuple[AwaitedTask, ...], Meta(max_length=AWAITED_MAX)]


# -- working directories ---------------------------------------------------------------------------------------------


class DirectoryRequest(_Message, frozen=True, tag="directory-request"):
    """home → any: would you run a task of this user of mine in this directory? Answered by DirectoryTold."""

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
    """home → x: send the output of this attempt from these offsets on: as it comes until it has ended (``follow``), or
    what there is now. paced: as it comes, the task waits for who reads it."""

    stdout_from: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    stderr_from: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    follow: bool = True
    paced: bool = False


class OutputChunk(_Message, frozen=True, tag="output-chunk"):
    """A piece of output at its offset; what lies between two pieces was cut out by the capture limit."""

    stream: Annotated[int, Meta(ge=1, le=2)]
    offset: Annotated[int, Meta(ge=0, le=1 << 60)]
    data: Annotated[bytes, Meta(max_length=512 << 10)]


class OutputEnd(_Message, frozen=True, tag="output-end"):
    """All there is was sent; the final sizes. ``gone``: x knows no such attempt (any more)."""

    stdout_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    stderr_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    gone: bool = False


# -- input streams: as output, the other way ---------------------------------------------------------------------------


class InputRequest(_OfAttempt, frozen=True, tag="input-request"):
    """x → home: send the standard input of this attempt up to ``up_to``; said again, over the same connection, as the task
    reads on. ``have``: so many bytes are here, and will not be asked for again; is_closed: the task reads no more."""

    have: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    up_to: Annotated[int, Meta(ge=0, le=1 << 61)] = 0
    is_closed: bool = False


class InputChunk(_Message, frozen=True, tag="input-chunk"):
    """A piece of input at its offset, the next after what was sent before."""

    offset: Annotated[int, Meta(ge=0, le=1 << 60)]
    data: Annotated[bytes, Meta(max_length=512 << 10)]


class InputWindow(_Message, frozen=True, tag="input-window"):
    """The window of the client of a task with a terminal."""

    rows: Annotated[int, Meta(ge=1, le=65_535)]
    columns: Annotated[int, Meta(ge=1, le=65_535)]


class InputEnd(_Message, frozen=True, tag="input-end"):
    """End of a stream, after so many bytes. ``gone``: home has no such attempt there (any more), which says nothing about its
    input."""

    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    gone: bool = False


# -- files: streams as well, to any member that has them ---------------------------------------------------------------


class BlocksRequest(_Message, frozen=True, tag="blocks-request"):
    """any → any: send the blocks with these BLAKE3 digests. Who knows a digest may have its block. verify: make sure that
    they are intact: one was not. A node that serves all users of its machine looks among the files of one user: of the task
    with the uid ``task`` that needs them, if it is between both nodes, else of who has ``manifest``, which names them."""

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
    """All were sent; or no more, since the next one is not there, or cannot be read: ``why``."""

    why: Annotated[str, Meta(max_length=WHY_LENGTH_MAX)] = ""


# -- requests of clients: a connection of their own for each client and node ------------------------------------------


class Forward(_Message, frozen=True, tag="forward"):
    """any → any: one of your clients, so to say, asks this. ``request``: the body of a frame of the control socket, whose
    number is that of the answers; ``user`` and ``uid``: who asks, at the node that sends it; ``hops``: how many nodes it has
    come through with this one."""

    request: Annotated[bytes, Meta(min_length=1, max_length=FORWARD_BYTES_MAX)]
    user: Annotated[str, Meta(max_length=64)] = ""
    uid: Annotated[int, Meta(ge=0, le=1 << 32)] = 0
    hops: Annotated[int, Meta(ge=1, le=1000)] = 1


class Forwarded(_Message, frozen=True, tag="forwarded"):
    """The answer: the body of a frame of the control socket, or with ``continues`` a part of one, the next of which
    follows at once."""

    answer: Annotated[bytes, Meta(max_length=FORWARDED_PART_BYTES_MAX)]
    continues: bool = False


class ForwardStop(_Message, frozen=True, tag="forward-stop"):
    """End of interest in the answer to the request of this number; the others go on."""

    number: Search


class WrongBoot(_Message, frozen=True, tag="wrong-boot"):
    """The frame was for another start of this agent and was ignored."""

    boot: BootId


class NameTaken(_Message, frozen=True, tag="name-taken"):
    """Said before the link closes: another agent, with which there is a link, is called as you are. ``at`` (HOST:PORT): where
    it is, if it has your database, too: look at it yourself; a member's word alone ends no agent."""

    at: Address = ""


class DialBack(_Message, frozen=True, tag="dial-back"):
    """Said over a link: make a stream to me, since I could perhaps not make it to you, and say this number in its
    introduction. Answered by that, or by `NotDialled`."""

    number: Annotated[int, Meta(ge=1, le=1 << 62)]


class NotDialled(_Message, frozen=True, tag="not-dialled"):
    """I cannot dial you: for the stream that you have asked for under this number, or (0) at the address that you tell."""

    number: Search
    why: Annotated[str, Meta(max_length=WHY_LENGTH_MAX)] = ""


Membership = (
    Hello
    | Ping
    | Pong
    | Sync
    | ProfileRequest
    | ProfileTold
    | Trust
    | CertificateRequest
    | CertificateTold
    | Wake
    | Leaving
    | WrongBoot
    | NameTaken
    | DialBack
    | NotDialled
    | DirectoryRequest
    | DirectoryTold
)
Broadcast = State | StateRequest | Enough
Advice = (
    Broadcast
    | StateAnswer
    | ProbeRequest
    | ProbeReply
    | GiveRequest
    | GiveReply
    | Footprint
    | PairRequest
    | PairReply
    | Unpair
)
Ownership = (
    Offer
    | Accept
    | Staging
    | Decline
    | Commit
    | Renew
    | RenewOk
    | Park
    | Revoke
    | Signal
    | Query
    | NotStarted
    | Died
    | Return
    | Result
    | ResultAck
    | AwaitTasks
    | TasksTold
)
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


def is_link_message(message: Message) -> TypeGuard[LinkMessage]:
    """True of a message that goes over a link, not over a stream."""
    return not isinstance(message, STREAMED)


class Envelope(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Envelope of every message between nodes.

    v: protocol version; dst and dst_boot are empty when the sender does not know them yet (Hello) or means all (State);
    seq: per (src, src_boot), for dropping what was seen.
    """

    v: Annotated[int, Meta(ge=1, le=1000)]
    cluster: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,40}\Z")]
    src: NodeName
    src_boot: BootId
    seq: Annotated[int, Meta(ge=0, le=1 << 62)]
    body: Message
    dst: Annotated[str, Meta(max_length=40)] = ""
    dst_boot: Annotated[str, Meta(max_length=64)] = ""
