"""The protocol between an agent and its launcher: each message as a type, and the codec that both ends share.

A frame is a length (4 bytes, big-endian) and a MessagePack list of maps. The agent sends requests (``do`` names the kind), the
launcher events (``is``). A launcher outlives the agent that started it, so messages only ever grow: fields and events that a
reader does not know are ignored, and a field with a default may be missing. An agent does not talk to a launcher older than
VERSION_MIN. The imports are few: the launcher has to stay small.
"""

import signal
from collections.abc import Callable, Iterator
from functools import partial
from types import NoneType, UnionType
from typing import Any, NamedTuple, Self, dataclass_transform, get_args, get_origin

import msgpack

VERSION = 9
"""The version of this protocol; `ListedEvent` contains the launcher's. A change that an older reader would misunderstand raises it."""
VERSION_MIN = 9
"""The oldest launcher that an agent of this version talks to: that of the first release."""
SOCKET_NAME = "launcher.sock"
FRAME_BYTES_MAX = 4 << 20
HEADER_BYTES = 4
UMASK_MAX = 0o7777
STOP_GRACE_S = 2.0
"""Time that tasks have to end when the launcher is told to stop."""
ALREADY_RUNS = 75
"""Exit code of a launcher whose directory is locked by another, which may not answer yet."""
MPS_CONTROL = "nvidia-cuda-mps-control"
"""The program of NVIDIA's driver that starts the daemon of MPS, and commands it."""
SHAPES_MAX = 16
"""Shapes of messages of one type that are remembered."""
KEY_CHARS_MAX = 128
NODE_CHARS_MAX = 64
"""Maximum length of a node's name in reasons."""
SIZE_BYTES_MAX = 1 << 60
USAGE_KEYS_MAX = 64
"""Tasks that one `UsageRequest` may name."""
_PACKER = msgpack.Packer(default=vars)
"""The packer of all messages, in one thread, since each packer allocates a MiB. Values in messages are sent as maps."""


class LauncherProtocolError(ValueError):
    """Malformed frame or message."""


REQUEST_FAILURES = (LauncherProtocolError, ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""Errors while a request is carried out, some due to bugs: they close the connection, but do not end the launcher and its tasks."""


class LauncherTooOld(LauncherProtocolError):
    """The launcher ``pid`` speaks a version below VERSION_MIN."""

    def __init__(self, pid: int, version: int) -> None:
        super().__init__(f"it speaks protocol version {version}, and at least {VERSION_MIN} is needed")
        self.pid = pid


@dataclass_transform(frozen_default=True)
class MessageType(type):
    """Makes a message class from the annotations in its body; a `NamedTuple` would take three times the memory."""

    tag: str
    """The value of ``do`` or ``is`` that identifies the type; "" for a part of other messages."""
    names: tuple[str, ...]
    types: tuple[Any, ...]
    defaults: dict[str, Any]
    known: frozenset[str]
    required: frozenset[str]
    given: set[tuple[str, ...]]
    """Combinations of fields that were passed to the constructor and are known to be valid."""
    head: dict[str, str]
    """The first field of the map that is sent."""
    converters: dict[str, tuple[Any, Callable[[Any], Any]]]
    """Of each field: the type whose values need no check, and the function that checks other received values (`_converter`)."""
    shapes: dict[tuple[str, ...], tuple[tuple[type, ...], tuple[tuple[str, Callable[[Any], Any]], ...]]]
    """Shapes of earlier messages: their keys → the types of their values, and the fields that have to be converted."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], tag: str = "") -> "MessageType":
        """A class with defaults and match arguments."""
        made = super().__new__(cls, name, bases, body)
        made.tag = tag
        # Python 3.14 has no annotations in ``body``; `inspect` and `annotationlib` take the launcher a megabyte.
        annotations = type.__dict__["__annotations__"].__get__(made)  # noqa: RUF063
        made.names, made.types = tuple(annotations), tuple(annotations.values())
        setattr(made, "__match_args__", made.names)  # noqa: B010 -- the type checker has it read-only
        made.defaults = {name: body[name] for name in made.names if name in body}
        made.known = frozenset(made.names)
        made.required = made.known - made.defaults.keys()
        made.given, made.shapes = set(), {}
        return made


class Message(metaclass=MessageType):
    """Base of the types of this protocol: immutable values, compared by their fields. The dictionary of an instance has only the
    fields that were passed, and only these are sent; the class has the defaults of the others."""

    def __init__(self, *values: object, **named: object) -> None:
        cls = type(self)
        if values:
            named.update(zip(cls.names, values, strict=False))
        if (given := tuple(named)) not in cls.given:
            if len(values) > len(cls.names) or not cls.required <= named.keys() <= cls.known:
                raise TypeError(f"{cls.__name__}: {', '.join(named)}")
            cls.given.add(given)
        self.__dict__ = named

    def fields(self) -> dict[str, Any]:
        """Name → value, including defaults."""
        return type(self).defaults | self.__dict__

    def replace(self, **changes: object) -> Self:
        return type(self)(**self.__dict__ | changes)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.fields() == other.fields()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.fields()})"


# -- values ------------------------------------------------------------------------------------------------------------


class ResourceUsage(Message):
    """Resources that an ended task has used."""

    user_s: float
    system_s: float
    memory_bytes_max: int


class ExitRecord(Message):
    """The end of a task. exit_code: what a shell would show. usage: None if it never ran. out_of: the resource that ran
    out."""

    exit_code: int
    started_at: float
    ended_at: float
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    usage: ResourceUsage | None = None
    signal: int = 0
    reason: str = ""
    out_of: str = ""


class ListedTask(Message):
    """A running task. ts, deadline_s: of its lease. ran_s: by the boot clock."""

    key: str
    started_at: float
    ts: float
    deadline_s: float
    is_frozen: bool
    ran_s: float


class TaskUsage(NamedTuple):
    """Current usage of a task; -1: unknown."""

    cpu_s: float
    memory_bytes: int
    processes: int


# -- requests ----------------------------------------------------------------------------------------------------------


class ListRequest(Message, tag="list"):
    """Send all known tasks and exits; events are sent only after that."""


class SpawnRequest(Message, tag="spawn"):
    """Start a task.

    environment: None if it cannot be read. deadline_s: CLOCK_BOOTTIME, 0 = none. ts: of the message that granted the lease.
    frozen_s_max: 0 = the launcher's own. once: its exit is on disk before it is reported. input: the file that feeds its
    stdin. terminal: rows and columns. run: the launcher run that this was meant for. inside: key of the task whose
    environment, directory and containment it shares. after: key of the attempt that has to end first. cpus, cpus_max: its
    share of the processors, and the maximum number of them (0 = no bound), where these are enforced. The rest is for a
    launcher that serves all users. home, user, uid: the submitter (uid -1: unknown); kept: names of
    variables that the task gets even if it runs as another user.
    """

    key: str
    argv: list[bytes]
    environment: dict[bytes, bytes] | None
    directory: bytes
    umask: int
    stdout: str
    stderr: str
    deadline_s: float
    output_bytes_max: int
    ts: float = 0.0
    frozen_s_max: float = 0.0
    once: bool = False
    memory_bytes_max: int = 0
    node: str = ""
    input: str = ""
    terminal: list[int] | None = None
    run: str = ""
    inside: str = ""
    after: str = ""
    home: str = ""
    user: str = ""
    uid: int = -1
    kept: list[bytes] | None = None
    devices: bool = False
    cpus: float = 1.0
    cpus_max: float = 0.0


class SignalRequest(Message, tag="signal"):
    """Send a signal to a task."""

    key: str
    signal: int


class LeaseRequest(Message, tag="lease"):
    """Move the deadline of a task (CLOCK_BOOTTIME, 0 = none), granted for the message of ``ts``."""

    key: str
    deadline_s: float
    ts: float = 0.0


class EvictRequest(Message, tag="evict"):
    """Kill a task if it is frozen."""

    key: str
    reason: str


class ForgetRequest(Message, tag="forget"):
    """Forget an exit record."""

    key: str


class PingRequest(Message, tag="ping"):
    """Answer with `PongEvent`."""


class StdinRequest(Message, tag="input"):
    """The file that feeds the stdin of a task has ``size`` bytes; ``ends``: it will not grow any more."""

    key: str
    size: int
    ends: bool = False


class ResizeRequest(Message, tag="resize"):
    """Set the window size of the terminal of a task."""

    key: str
    rows: int
    columns: int


class UsageRequest(Message, tag="usage"):
    """Answer with the `UsageEvent` of these tasks. brief: only processor time is needed, where it is counted; counters: add
    the energy counters that only root may read."""

    id: int
    keys: list[str]
    brief: bool = False
    counters: bool = False


class ListenRequest(Message, tag="listen"):
    """Make the socket again if its file is gone."""


class StopRequest(Message, tag="stop"):
    """End all tasks, then the launcher."""


class RetireRequest(Message, tag="retire"):
    """End the launcher when no task is left, unless an agent has connected by then."""


class DirectoryCheck(Message, tag="may"):
    """Check, as a user, that the directory may be entered. Answered by `UserReply`, as all requests for a user are."""

    directory: bytes
    home: str
    user: str
    uid: int = -1
    id: int = 0
    node: str = ""


class FileCheck(Message, tag="check"):
    """Check, as a user, that files of these names can be written."""

    patterns: list[bytes]
    home: str
    user: str
    uid: int = -1
    id: int = 0
    node: str = ""


class FileAppend(Message, tag="append"):
    """As a user, write parts (captured file, first byte, end) of captured output to a file, from the offset ``at`` on. ends: sync
    the file to disk afterwards."""

    path: bytes
    parts: list[tuple[str, int, int]]
    umask: int
    at: int
    ends: bool
    home: str
    user: str
    uid: int = -1
    id: int = 0
    node: str = ""


class FilesJob(Message, tag="files"):
    """As a user, carry out the agent's requests at its ``socket`` with the files in ``directory``. "-" is the scratch directory of
    the attempt ``key``; ``makes`` creates it, and it is kept until `ForgetRequest`."""

    socket: str
    key: str
    directory: bytes
    makes: bool
    home: str
    user: str
    uid: int = -1
    id: int = 0
    node: str = ""


UserRequest = DirectoryCheck | FileCheck | FileAppend | FilesJob
Request = (
    ListRequest | SpawnRequest | SignalRequest | LeaseRequest | EvictRequest | ForgetRequest | PingRequest
    | StdinRequest | ResizeRequest | UsageRequest | ListenRequest | StopRequest | RetireRequest | UserRequest
)  # fmt: skip


# -- events ------------------------------------------------------------------------------------------------------------


class ListedEvent(Message, tag="listed"):
    """A part of the list. run: the name of this run of the launcher. units, memory: the containment and memory
    backends. unenforced: sentences about what cannot be enforced. system: it serves all users. cores: CPU shares of tasks are
    enforced."""

    pid: int
    more: bool
    running: list[ListedTask]
    ended: list[tuple[str, ExitRecord]]
    protocol: int
    run: str
    units: str
    unenforced: list[str]
    memory: str
    system: bool
    cores: bool = False


class StartedEvent(Message, tag="started"):
    """A task runs."""

    key: str
    pid: int
    started_at: float


class EndedEvent(Message, tag="ended"):
    """A task has ended. with_start: its start was not reported before; see `ExitRecord.started_at`."""

    key: str
    exit: ExitRecord
    with_start: bool = False


class ExpiredEvent(Message, tag="expired"):
    """A task has no process and no exit: its lease had run out, it was evicted, or its process could not be made. shortage: the
    resource that this machine is short of."""

    key: str
    reason: str
    never_started: bool
    shortage: str = ""


class FrozenEvent(Message, tag="frozen"):
    """A task was frozen, since its lease ran out."""

    key: str


class ThawedEvent(Message, tag="thawed"):
    """A frozen task has a new lease."""

    key: str


class StdinFed(Message, tag="fed"):
    """A task has read ``offset`` bytes of its stdin; is_closed: it has closed its stdin."""

    key: str
    offset: int
    is_closed: bool


class UserReply(Message, tag="told"):
    """The outcome of a `UserRequest`: the reason why it failed, "" if it succeeded."""

    id: int
    why: str


class UsageEvent(Message, tag="used"):
    """Usage of running tasks at CLOCK_BOOTTIME ``at_s``. counters: see `powercap.Reading`."""

    id: int
    at_s: float
    of: dict[str, TaskUsage]
    counters: list[tuple[str, str, int, int, int]] = []  # noqa: RUF012 -- nobody changes it


class PongEvent(Message, tag="pong"):
    """The answer to a ping."""


LauncherEvent = (
    ListedEvent | StartedEvent | EndedEvent | ExpiredEvent | FrozenEvent | ThawedEvent | StdinFed | UserReply
    | UsageEvent | PongEvent
)  # fmt: skip

REQUESTS: dict[str, type[Request]] = {kind.tag: kind for kind in get_args(Request)}
EVENTS: dict[str, type[LauncherEvent]] = {kind.tag: kind for kind in get_args(LauncherEvent)}
for _message in (*REQUESTS.values(), *EVENTS.values()):
    _message.head = {"do" if _message.tag in REQUESTS else "is": _message.tag}


# -- codec -------------------------------------------------------------------------------------------------------------


def claim_name(what: str, store: str) -> str:
    """Name of the abstract socket with which a process of this kind claims a database."""
    return f"\0peerload-{what}-{store}"


def frame(messages: list[bytes]) -> bytes:
    body: bytes = _PACKER.pack_array_header(len(messages)) + b"".join(messages)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def packed(value: Any) -> bytes:  # noqa: ANN401 -- any MessagePack value, with messages in it
    raw: bytes = _PACKER.pack(value)
    return raw


def encode(message: Request | LauncherEvent) -> bytes:
    fields = _listed_fields(message) if isinstance(message, ListedEvent) else message.__dict__
    return packed(type(message).head | fields)


def _listed_fields(event: ListedEvent) -> dict[str, Any]:
    tasks = event.running
    return {
        **event.fields(),
        "running": [[task.key, task.started_at] for task in tasks],
        "leases": [[task.ts, task.deadline_s, task.is_frozen] for task in tasks],
        "ran_s": [task.ran_s for task in tasks],
    }


def decode_requests(body: bytes) -> Iterator[Request]:
    """The requests in a frame's body, one by one. Raises LauncherProtocolError."""
    for raw in _maps(body):
        tag = raw.pop("do", None)
        kind = REQUESTS.get(_of(str, tag))
        if kind is None:
            raise LauncherProtocolError(f"unknown request {str(tag)[:40]!r}")
        request = _built(kind, raw)
        yield request if kind is ForgetRequest else _checked(request)  # no check needed, and as frequent as tasks


def decode_events(body: bytes) -> list[LauncherEvent]:
    """The events in a frame's body, without unknown ones of a newer launcher. Raises LauncherProtocolError."""
    events: list[LauncherEvent] = []
    for raw in _maps(body):
        kind = EVENTS.get(_of(str, raw.pop("is", None)))
        if kind is ListedEvent:
            events.append(_listed(raw))
        elif kind is not None:
            events.append(_built(kind, raw))
    return events


def decode_exit(raw: object) -> ExitRecord:
    """An exit record. Raises LauncherProtocolError."""
    record: ExitRecord = _built(ExitRecord, _of(dict, raw))
    return record


def _maps(body: bytes) -> list[dict[str, Any]]:
    try:
        found = msgpack.unpackb(body)
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise LauncherProtocolError(f"{type(error).__name__}: {error}") from None
    if not isinstance(found, list) or not all(isinstance(raw, dict) for raw in found):
        raise LauncherProtocolError("not a list of maps")
    return found


def _listed(raw: dict[str, Any]) -> ListedEvent:
    version = _of(int, raw.get("protocol", 1))
    if version < VERSION_MIN:
        raise LauncherTooOld(_of(int, raw.get("pid", 0)), version)
    try:
        running = [
            dict(zip(ListedTask.names, (*task, *lease[:3], ran_s), strict=True))
            for task, lease, ran_s in zip(raw["running"], raw["leases"], raw["ran_s"], strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise LauncherProtocolError(f"listed: {type(error).__name__}: {error}") from None
    listed: ListedEvent = _built(ListedEvent, {**raw, "running": running})
    return listed


def _built(kind: Any, raw: dict[str, Any]) -> Any:  # noqa: ANN401 -- an instance of ``kind``
    """A message of this type; ``raw`` becomes its dictionary. Raises LauncherProtocolError."""
    keys, types = tuple(raw), tuple(map(type, raw.values()))
    found = kind.shapes.get(keys)
    if found is None or found[0] != types:  # rare: the first message of its shape
        raw = _converted(kind, raw)
    else:
        for name, converted in found[1]:
            raw[name] = converted(raw[name])
    message = object.__new__(kind)
    message.__dict__ = raw
    return message


def _converted(kind: Any, raw: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 -- see `_built`
    """The fields of a message, without unknown ones; notes its shape. Raises LauncherProtocolError."""
    values: dict[str, Any] = {}
    inside = []
    for name, (simple, converted) in kind.converters.items():
        if name not in raw:
            continue
        value = raw[name]
        if type(value) is not simple:
            inside.append((name, converted))
            try:
                value = converted(value)
            except LauncherProtocolError as error:
                raise LauncherProtocolError(f"{name}: {error}") from None
        values[name] = value
    if not kind.required <= values.keys():
        raise LauncherProtocolError(f"{', '.join(kind.required - values.keys())} is missing")
    if len(kind.shapes) < SHAPES_MAX and len(values) == len(raw):
        kind.shapes[tuple(raw)] = tuple(map(type, raw.values())), tuple(inside)
    return values


def _checked(request: Request) -> Request:
    """Check that the values of a request are in range → the request. Raises LauncherProtocolError."""
    match request:
        case SpawnRequest() | FilesJob() if not _is_named(request):
            raise LauncherProtocolError("invalid key or argv")
        case SpawnRequest():
            is_small = 0 <= request.memory_bytes_max < SIZE_BYTES_MAX and 0 <= request.output_bytes_max < SIZE_BYTES_MAX
            if not is_small or not 0 <= request.umask <= UMASK_MAX:
                raise LauncherProtocolError("invalid window size or umask")
            if request.terminal is not None and len(request.terminal) != 2:  # noqa: PLR2004 -- rows, columns
                raise LauncherProtocolError("terminal")
        case SignalRequest(_, number) if not 0 <= number < signal.NSIG:
            raise LauncherProtocolError(f"signal {number}")
        case StdinRequest(_, size, _) if not 0 <= size < SIZE_BYTES_MAX:
            raise LauncherProtocolError("size")
        case UsageRequest(_, keys, _, _) if len(keys) > USAGE_KEYS_MAX:
            raise LauncherProtocolError("too many keys")
        case DirectoryCheck() | FileCheck() | FileAppend() | FilesJob() if request.id < 1:
            raise LauncherProtocolError("id is missing")
        case FileAppend() if not 0 <= request.at < SIZE_BYTES_MAX or not 0 <= request.umask <= UMASK_MAX:
            raise LauncherProtocolError("invalid offset or umask")
    return request


def _is_named(request: SpawnRequest | FilesJob) -> bool:
    """True if the key is valid as a file name, and the command line is not empty."""
    key = request.key
    is_name = 0 < len(key) <= KEY_CHARS_MAX and key.isprintable() and "/" not in key and not key.startswith(".")
    return is_name and (isinstance(request, FilesJob) or bool(request.argv))


def _of(kind: Any, value: object) -> Any:  # noqa: ANN401 -- the value, which is of ``kind``
    if not isinstance(value, kind):
        raise LauncherProtocolError(f"not of type {getattr(kind, '__name__', kind)}")
    return value


def _converter(kind: Any) -> Callable[[Any], Any]:  # noqa: ANN401 -- any type of a field
    """A function that checks and converts a received value of this type. It raises LauncherProtocolError."""
    if kind == dict[bytes, bytes] | None:
        return _environment
    inner, origin = [_converter(one) for one in get_args(kind) if one is not NoneType], get_origin(kind) or kind
    if origin is UnionType:  # a union with None; None is the default and never sent
        return inner[0]
    if origin is list:
        return lambda value: [inner[0](one) for one in _of(list, value)]
    if origin is dict:
        return lambda value: {inner[0](key): inner[1](one) for key, one in _of(dict, value).items()}
    if isinstance(kind, MessageType):
        return lambda value: _built(kind, _of(dict, value))
    if issubclass(origin, tuple):
        return _tuple_converter(inner or [_converter(one) for one in kind.__annotations__.values()], origin)
    if kind is float:
        return lambda value: float(_of(int | float, value))
    return bool if kind is bool else partial(_of, kind)


def _tuple_converter(inner: list[Callable[[Any], Any]], kind: Any) -> Callable[[Any], Any]:  # noqa: ANN401 -- `tuple`, or a named one
    def convert(value: object) -> Any:  # noqa: ANN401 -- as above
        if len(_of(list, value)) != len(inner):
            raise LauncherProtocolError(f"not {len(inner)} values")
        found = [convert(one) for convert, one in zip(inner, value, strict=True)]  # type: ignore[call-overload]
        return tuple(found) if kind is tuple else kind(*found)

    return convert


def _environment(value: object) -> dict[bytes, bytes] | None:
    """Decode an environment; None if it is malformed: it came from the home, so only its task fails, with a reason."""
    if not isinstance(value, dict) or not {*map(type, value), *map(type, value.values())} <= {bytes}:
        return None
    return value


for _kind in (*REQUESTS.values(), *EVENTS.values(), ExitRecord, ResourceUsage, ListedTask):
    _wanted = zip(_kind.names, _kind.types, strict=True)
    _kind.converters = {name: (kind, _converter(kind)) for name, kind in _wanted}
