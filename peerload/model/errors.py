"""The errors of peerload, in one tree.

PeerloadError
├── BadRequest          a user's mistake: what, why and the next command to type
│   ├── NoSuchTask
│   ├── NeverRunnable   no known node could ever run the request
│   ├── NotAllowed      the client is not authorized
│   ├── SlowDown        a limit is reached, which the message names
│   ├── ClientRefused   the refusal applies to the connection, such as too many clients
│   ├── StagingFailed   files of a task cannot be read, kept, fetched or written
│   ├── SnapshotWanted  the task needs a snapshot of its working directory
│   └── DiskFull        the disk has no space for it (ENOSPC)
├── UsageError          the command line makes no sense
├── ConfigError         a setting is unknown, out of range or contradicts another
├── ProtocolError       *their* bytes are malformed: dropped and counted, never fatal
│   ├── FrameTooLarge
│   ├── BadMessage
│   ├── NotAuthentic    sealed with another key, or changed in transit
│   └── Replayed        sealed correctly, but seen before or too old to check
├── OutputIncomplete    part of a task's output is missing
├── AgentUnavailable    no agent answers at the socket
│   ├── AgentGone       the connection to an agent has ended during a call
│   └── AgentSilent     an agent holds the socket but does not answer: it is stopped or stuck
├── LinkUnavailable     a peer's agent cannot be reached, or its link broke
├── StoreError          a durable write failed: the agent stops
└── InvariantBroken     *our* bug: an impossible transition, with the task's history
"""

from __future__ import annotations


class PeerloadError(Exception):
    """Root of every error raised on purpose.

    ``what`` says what happened, ``why`` the cause, ``hint`` the next command to type; the last two may be empty.
    """

    code = "error"

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(what if not why else f"{what}: {why}")
        self.what = what
        self.why = why
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error without another call of its class's `__init__`, which takes other arguments."""
        return BaseException.__new__, (type(self), *self.args), self.__dict__


class BadRequest(PeerloadError):
    """The request cannot be carried out; nothing was changed."""

    code = "bad-request"


class UsageError(PeerloadError):
    """The command line makes no sense; exit code 2."""

    code = "usage"


class NoSuchTask(BadRequest):
    """The id names no task of this node (or none that the client may see)."""

    code = "no-such-task"


class NeverRunnable(BadRequest):
    """Error: no known node could ever run the task."""

    code = "never-runnable"


class NotAllowed(BadRequest):
    """The client may not do this; nothing was changed."""

    code = "not-allowed"


class OutputIncomplete(PeerloadError):
    """Error: part of a task's output is missing: ``missing_bytes`` of the output of ``task``."""

    code = "output-incomplete"

    def __init__(self, task: str, missing_bytes: int, *, why: str) -> None:
        super().__init__(
            f"{missing_bytes} bytes of the output of {task} are missing",
            why=why,
            hint=f"what is kept of it:  peerload logs {task}",
        )
        self.task = task
        self.missing_bytes = missing_bytes


class SlowDown(BadRequest):
    """A limit is reached; ``retry_after_s``: when to try again."""

    code = "slow-down"

    def __init__(self, what: str, *, why: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(what, why=why, hint=f"try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class ClientRefused(BadRequest):
    """A refusal of the connection, not of one request; ``code`` identifies the reason."""


class StagingFailed(BadRequest):
    """Files of a task cannot be read, kept, fetched or written; the message names the file."""

    code = "staging"


class SnapshotWanted(BadRequest):
    """The working directory differs between nodes: submit it again with a snapshot, as the settings require."""

    code = "snapshot"


class DiskFull(BadRequest):
    """The disk of this node has no room for the request (ENOSPC); nothing was changed."""

    code = "disk-full"


class ConfigError(PeerloadError):
    """A setting cannot be used; ``key`` names it, ``says`` is only the mistake, ``file`` and ``line`` are its place
    ("" and 0: unknown)."""

    code = "config"

    def __init__(self, key: str, what: str, *, why: str = "", hint: str = "", file: str = "", line: int = 0) -> None:
        place = f"{file}:{line}: " if file and line else f"{file}: " if file else ""
        super().__init__(f"{place}{key}: {what}", why=why, hint=hint)
        self.key = key
        self.says = what
        self.file = file
        self.line = line


class ProtocolError(PeerloadError):
    """Malformed bytes from outside."""

    code = "protocol"


class FrameTooLarge(ProtocolError):
    """A frame announces more bytes than its kind may have; nothing was allocated for it."""

    code = "frame-too-large"

    def __init__(self, size_bytes: int, size_bytes_max: int) -> None:
        super().__init__(f"a frame of {size_bytes} bytes", why=f"at most {size_bytes_max} are allowed here")
        self.size_bytes = size_bytes
        self.size_bytes_max = size_bytes_max


class BadMessage(ProtocolError):
    """A frame of the right size whose body fits no message."""

    code = "bad-message"


class NotAuthentic(ProtocolError):
    """A sealed message of another cluster, or one that was changed or cut in transit; it is ignored."""

    code = "not-authentic"


class Replayed(ProtocolError):
    """A sealed message that came before, or is too old to check."""

    code = "replayed"


class AgentUnavailable(PeerloadError):
    """Error: no agent answers at the socket."""

    code = "agent-unavailable"


class AgentGone(AgentUnavailable):
    """The connection to an agent has ended, as during its restart."""


class AgentSilent(AgentUnavailable):
    """An agent holds the socket but does not answer: it is stopped or stuck. Another one cannot be started."""

    code = "agent-silent"


class LinkUnavailable(PeerloadError):
    """The agent of ``node`` (or of an address, while its name is unknown) cannot be reached, or the link broke. kind:
    reason for other nodes, without details of this node's network."""

    code = "link-unavailable"

    def __init__(
        self, node: str, what: str, *, why: str = "", hint: str = "", kind: str = "it cannot be dialled"
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.node = node
        self.kind = kind


class StoreError(PeerloadError):
    """A durable write failed. The agent stops, because it must not continue as if the data were stored."""

    code = "store"


class InvariantBroken(PeerloadError):
    """A bug of ours, found by a check; ``story`` is the history that led to it."""

    code = "bug"

    def __init__(self, what: str, *, story: str = "") -> None:
        super().__init__(what, why=story)
        self.story = story
