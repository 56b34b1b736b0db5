"""The main loop of `map`: it submits tasks in batches and receives their results.

One connection carries all requests: for each batch a `submit`, with a command line for each task, and a `wait`, whose
answer has the end of each task with its output. There is no request for a single task. At most SUBMITTED_MAX tasks are unfinished,
so endless inputs are read at the pace of the work. If the agent disconnects, the loop reconnects, submits unanswered batches again
with the same tokens, which queues no task twice, and sends `wait` again for the others.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import time
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from peerload.cli.common import command
from peerload.cli.common.command import say_declining
from peerload.cli.common.messages import say_unknown
from peerload.cli.common.output import write_all
from peerload.cli.map.template import WORD_BYTES, BadInput, shown
from peerload.client import connection
from peerload.model.errors import AgentUnavailable, BadRequest, PeerloadError, SlowDown, SnapshotWanted, UsageError
from peerload.model.text import printable
from peerload.text.format import counted, say, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from peerload.cli.map.template import CommandTemplate, MapInputs


HEADER = b"Seq\tHost\tStarttime\tJobRuntime\tSend\tReceive\tExitval\tSignal\tCommand\n"
COLUMNS = 9
SEQUENCE_MAX = 10_000_000
"""The largest sequence number of a task."""


class Joblog:
    """The log of `map --joblog`: one line for each ended task, with the columns of GNU parallel.

    Seq, Host, Starttime (Unix s), JobRuntime (s), Send (always 0), Receive (bytes of stdout), Exitval, Signal, Command. In a
    command a line break is written as NUL. Each line is appended by one write, after the output of its task was printed, so
    after a crash `--resume` loses no output; an incomplete last line is dropped when the file is read. ``resumes``: read the log
    and append to it, else overwrite it; ``again_failed``: failed tasks count as not done. skipped, skipped_failed: the number of
    tasks that are not run again, and of the failed ones among them. Raises UsageError if the file cannot be used."""

    def __init__(self, path: str, *, resumes: bool = False, again_failed: bool = False) -> None:
        self._path = path
        self._done = array("Q")
        """Sequence number → checksum of its command; 0: not done yet."""
        self._failed: set[int] = set()
        self.skipped = 0
        self.skipped_failed = 0
        kept = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            if resumes:
                kept = self._read(again_failed=again_failed)
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                os.ftruncate(self._file, kept)
            if not kept:
                os.write(self._file, HEADER)
        except OSError as error:
            raise UsageError(
                f"map: --joblog {printable(path)} cannot be used", why=error.strerror or str(error)
            ) from None

    def has(self, number: int, command: bytes) -> bool:
        """True if this task is done. Raises UsageError if the log has another command under its number."""
        mark = self._done[number] if number < len(self._done) else 0
        if not mark:
            return False
        if mark != _mark(command):
            raise UsageError(
                f"map: task {number} in {printable(self._path)} had another command than now",
                why=f"now it would be {printable(command[:200])}",
                hint="--resume goes on with the same command and inputs; for others take another --joblog",
            )
        self.skipped += 1
        self.skipped_failed += number in self._failed
        return True

    def add(self, number: int, ended: dict[str, object], command: bytes) -> None:
        """Record the end of a task. ``ended``: the part of the answer to `wait`. Raises PeerloadError if the log cannot be written."""
        started_at, ended_at = _number(ended.get("started_at")), _number(ended.get("ended_at"))
        code, signal = ended.get("exit_code"), ended.get("signal") or 0
        exit_code = 0 if signal else code if isinstance(code, int) else 125
        fields = (
            str(number),
            str(ended.get("node") or "-"),
            f"{started_at:.3f}",
            f"{max(ended_at - started_at, 0.0) if started_at else 0.0:10.3f}",
            "0",
            str(ended.get("stdout_bytes") or 0),
            str(exit_code),
            str(signal),
        )
        line = "\t".join(fields).encode() + b"\t" + command.replace(b"\n", b"\0") + b"\n"
        try:
            write_all(self._file, line)
        except OSError as error:
            raise PeerloadError(
                f"--joblog {printable(self._path)} cannot be written", why=error.strerror or str(error)
            ) from None

    def _read(self, *, again_failed: bool) -> int:
        """Read which tasks are done → the number of bytes in complete lines."""
        kept = 0
        for line in self._lines():
            kept += len(line)
            if line == HEADER:
                continue
            fields = line[:-1].split(b"\t", COLUMNS - 1)
            try:
                number, exit_code, signal = int(fields[0]), int(fields[6]), int(fields[7])
                command = fields[8]
            except (ValueError, IndexError):
                raise self._no_joblog(line) from None
            if not 0 < number <= SEQUENCE_MAX:
                raise self._no_joblog(line)
            if number >= len(self._done):
                self._done.frombytes(bytes(8 * (number + 1 - len(self._done))))
            has_failed = bool(exit_code or signal)
            self._done[number] = 0 if has_failed and again_failed else _mark(command)
            (self._failed.add if has_failed else self._failed.discard)(number)
        return kept

    def _no_joblog(self, line: bytes) -> UsageError:
        return UsageError(
            f"map: {printable(self._path)} is not a joblog",
            why=f"it has the line {printable(line[:80])}",
            hint="another:  --joblog FILE",
        )

    def _lines(self) -> Iterator[bytes]:
        os.lseek(self._file, 0, os.SEEK_SET)
        rest = b""
        while data := os.read(self._file, 1 << 20):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line + b"\n"


def _mark(command: bytes) -> int:
    """A checksum of a command, never 0, and the same in every process."""
    from zlib import adler32, crc32

    written = command.replace(b"\n", b"\0")
    return (crc32(written) << 32 | adler32(written)) or 1


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


ARGV_BYTES_MAX = 1 << 20
"""The limit of peerload.model.task."""


class MapTask(NamedTuple):
    """A task that was submitted and has not ended."""

    number: int
    values: tuple[bytes, ...]
    argv: list[bytes]


class MapBatch:
    """Tasks that were submitted together, by member number. ``id``: "" until the agent has answered."""

    __slots__ = ("argv", "id", "left", "token")

    def __init__(self, tasks: list[MapTask]) -> None:
        self.token = os.urandom(16).hex()
        self.left = dict(enumerate(tasks, start=1))
        self.argv = [task.argv for task in tasks]
        self.id = ""


def checked_size(number: int, argv: list[bytes]) -> int:
    """The size of the command line of a task. Raises BadInput if no process can be started with it."""
    size = sum(len(word) + WORD_BYTES for word in argv)
    if size > ARGV_BYTES_MAX:
        raise BadInput(
            f"map: the command of task {number} is too large",
            why=f"{size} bytes; at most {ARGV_BYTES_MAX} can travel",
            hint="put large values into a file that the command reads",
        )
    if any(b"\0" in word for word in argv):
        raise BadInput(
            f"map: input {number} has a NUL byte in it",
            why="no word of a command can have one",
            hint="inputs that end with NUL instead of a line break:  -0",
        )
    return size


PERCENT_AFTER = 3
"""A percentage takes effect only after this many tasks have ended."""
_COUNTED = ("fail", "success", "done")


class Halt:
    """The condition of `--halt`. ``is_now``: running tasks are stopped too. Raises UsageError."""

    def __init__(self, text: str = "never") -> None:
        when, comma, what = text.partition(",")
        counted, _, limit = what.partition("=")
        self.is_now = when == "now"
        self._counted = counted
        self._number = self._share = 0.0
        if text == "never":
            return
        digits = limit.removesuffix("%")
        is_sound = comma and when in ("now", "soon") and counted in _COUNTED and digits.isascii() and digits.isdecimal()
        if not is_sound or not int(digits):
            raise UsageError(
                f"map: --halt {text!r} cannot be understood",
                hint="such as:  --halt now,fail=1  or  soon,fail=10%  or  now,success=1  or  never",
            )
        if digits == limit:
            self._number = int(digits)
        else:
            self._share = int(digits) / 100

    def is_due(self, *, failed: int, succeeded: int) -> bool:
        ended = failed + succeeded
        count = {"fail": failed, "success": succeeded, "done": ended}.get(self._counted, 0)
        if self._number:
            return count >= self._number
        return bool(self._share) and ended >= PERCENT_AFTER and count >= self._share * ended


class MapResult(NamedTuple):
    """A task that has ended: its number, its inputs, and its part of the answer to `wait`."""

    number: int
    tag: bytes
    body: dict[str, Any]


class MapView:
    """The display of a running map. This base class shows nothing."""

    @property
    def is_full(self) -> bool:
        return False

    def ended(self, task: MapResult) -> None:
        """Show the end of a task, then call `Mapping.note_printed`."""

    def skipped(self, number: int) -> None:
        """Record that a task was done in an earlier run."""

    def progress(self) -> None:
        """Update the bar; called often."""


SUBMITTED_MAX = 2000
"""Maximum number of unfinished submitted tasks."""
BATCHES_MAX = 500
"""Maximum number of batches. Each is a pending request, and an agent limits the pending requests of one client."""
BATCH_TASKS_MAX = 250
BATCH_BYTES_MAX = 1 << 20
"""Maximum size of one submission; a frame may be larger."""
FULL_RETRY_S = 1.0
"""Pause before a submission to a full queue is retried."""
LOOK_EVERY_S = 1.0
"""Interval between two updates of the bar while nothing happens."""
FAILURES_KEPT_MAX = 1000
"""Maximum number of failed tasks stored by id; the rest are only counted."""


class Mapping:
    """Run of `map`. As a context manager it handles signals: signals that end it cancel its tasks if ``attended``; otherwise
    the tasks go on. ``fields``: the part of the request that all tasks share."""

    def __init__(
        self,
        socket_path: str | None,
        fields: dict[str, Any],
        template: CommandTemplate,
        inputs: MapInputs,
        *,
        halt: Halt,
        joblog: Joblog | None = None,
        at_a_time: int | None = None,
    ) -> None:
        self._socket_path = socket_path
        self._client = connection.AgentConnection(socket_path)
        self._fields = fields
        terms = fields.get("terms", {})
        self._has_files = bool(terms.get("output_file") or terms.get("error_file"))
        self._template = template
        self._inputs = inputs
        self._halt = halt
        self._joblog = joblog
        self._at_a_time = min(at_a_time or SUBMITTED_MAX, SUBMITTED_MAX)
        self._room_min = 1 if at_a_time else BATCH_TASKS_MAX
        self._view = MapView()
        self._number = 0
        self._unfinished = 0
        self._batches: dict[str, MapBatch] = {}
        self._said_declining = False
        self._asked: dict[int, tuple[str, MapBatch | None]] = {}
        self._held_back: list[MapTask] = []
        self._batch_max = BATCH_TASKS_MAX
        self._is_slowed = self._said_waiting = False
        self._retry_at_s = 0.0
        self._signals: list[int] = []
        self._before: dict[int, Any] = {}
        self._wake_read, self._wake_write = -1, -1
        self._stops = False
        self._to_stop: list[str] = []
        self.done = 0
        self.succeeded = 0
        self.failed = 0
        self.cancelled = 0
        self.halted_by: dict[str, Any] | None = None
        self.problem: PeerloadError | None = None
        self.failures: list[tuple[dict[str, Any], bytes]] = []
        self.failed_batches: dict[str, None] = {}
        self.incomplete: dict[str, str] = {}
        self.incomplete_count = 0
        self._not_fetched: set[str] = set()
        self.kept_beside = 0

    # -- context -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        ends_tasks = (signal.SIGTERM, signal.SIGHUP) if self._fields.get("attended") else ()
        for number in (signal.SIGINT, *ends_tasks):
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup, or in the background of a script
                self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._client.close()

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            raise KeyboardInterrupt
        os.write(self._wake_write, b"\0")

    @property
    def signal(self) -> int:
        """The first signal received; 0 if none was."""
        return self._signals[0] if self._signals else 0

    @property
    def total(self) -> int | None:
        """The number of tasks, without tasks done in an earlier run; None while not known."""
        total = self._inputs.total
        skipped = self._joblog.skipped if self._joblog is not None else 0
        return total - skipped if total is not None else None

    # -- work ----------------------------------------------------------------------------------------------------------

    def run(self, view: MapView) -> None:
        """Submit tasks until all have ended, and show them in ``view``. Raises the agent's
        refusal if nothing was submitted; AgentUnavailable if the agent does not return; KeyboardInterrupt at a second signal, after
        killing the remaining tasks."""
        self._view = view
        try:
            while True:
                try:
                    self._fill()
                    self._stop_batches()
                    is_saved = not self._has_files or not self._batches
                    is_all = self._inputs.is_over and not self._held_back
                    if not self._unfinished and is_saved and (is_all or self._stops):
                        break
                    self._step()
                except AgentUnavailable as error:
                    self._reconnect(error)
                view.progress()
        except (KeyboardInterrupt, BrokenPipeError):
            self._cancel_at_once()
            raise
        if self.problem is not None and not self.done and not self._number:
            raise self.problem

    def _fill(self) -> None:
        if self._stops or self._view.is_full or time.monotonic() < self._retry_at_s:
            return
        while (room := self._at_a_time - self._unfinished) >= self._room_min and len(self._batches) < BATCHES_MAX:
            if self._is_slowed and any(what == "submit" for what, _ in self._asked.values()):
                return  # one attempt at a time
            tasks = self._next_tasks(room)
            if not tasks:
                return
            self._submit(MapBatch(tasks))

    def _next_tasks(self, room: int) -> list[MapTask]:
        room = min(room, self._batch_max)
        tasks = self._held_back[:room]
        del self._held_back[: len(tasks)]
        size = 0
        try:
            while not tasks or (len(tasks) < room and size < BATCH_BYTES_MAX):
                values = self._inputs.next()
                if values is None:
                    break
                self._number += 1
                argv = self._template.argv(self._number, values)
                if self._joblog is not None and self._joblog.has(self._number, shown(argv)):
                    self._view.skipped(self._number)
                    continue
                size += checked_size(self._number, argv)
                tasks.append(MapTask(self._number, values, argv))
        except PeerloadError as error:
            self._give_up(error)
        return tasks

    def _give_up(self, error: PeerloadError) -> None:
        """Read no more inputs; submitted tasks go on."""
        if self.problem is None:
            self.problem = error
        self._stops = True
        self._inputs.stop()

    def _submit(self, batch: MapBatch) -> None:
        if batch.token not in self._batches:
            self._batches[batch.token] = batch
            self._unfinished += len(batch.left)
        request = self._client.send("submit", token=batch.token, each=batch.argv, **self._fields)
        self._asked[request] = ("submit", batch)

    def _step(self) -> None:
        """Wait for a signal, an answer or input, and handle it."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        agent = self._client.fileno()
        poll.register(agent, select.POLLIN)
        takes_more = not self._stops and not self._view.is_full and self._unfinished < self._at_a_time
        source = self._inputs.descriptor if takes_more else None
        if source is not None:
            poll.register(source, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(LOOK_EVERY_S * 1000)}
        if self._wake_read in ready:
            self._interrupted()
        if agent in ready:
            self._take()
        if source in ready:
            try:
                self._inputs.read()
            except BadInput as error:
                self._give_up(error)

    def _take(self) -> None:
        answered, kind, body = self._client.receive(may_last=True)
        what, batch = self._asked.get(answered, ("", None))
        if kind != "more":
            self._asked.pop(answered, None)
        if batch is None:
            if kind == "error" and what == "cancel":
                say(f"not cancelled: {body.get('what', '')} {body.get('why', '')}")
        elif what == "submit":
            self._submitted(batch, kind, body)
        elif kind == "more":
            self._told(batch, body)
        elif batch.left:
            self._lost(batch, kind, body)
        elif self._has_files:
            del self._batches[batch.token]
            if kind == "error":
                self.note_incomplete(batch.id, f"its files: {body.get('what') or 'not known'}")

    def _told(self, batch: MapBatch, body: dict[str, Any]) -> None:
        """Handle one part of the answer to `wait`."""
        if "files" in body:
            self._file_tried(body["files"])
        elif body.get("state") == "unknown":
            say_unknown(body)
        else:
            self._one_ended(batch, body)

    def _file_tried(self, files: dict[str, Any]) -> None:
        """Record a task whose output is not in its file."""
        if files.get("state") not in ("", "saved"):
            again = "; it will be tried again" if files.get("state") == "postponed" else ""
            self.note_incomplete(str(files.get("id")), f"not saved: {files.get('why')}{again}")

    def _wait(self, batch: MapBatch) -> None:
        """Request the ends of these tasks with their outputs, and the states of their output files."""
        files = {"files": True} if self._has_files else {}
        self._asked[self._client.send("wait", tasks=[batch.id], outputs=True, **files)] = ("wait", batch)

    def _submitted(self, batch: MapBatch, kind: str, body: dict[str, Any]) -> None:
        if kind == "error":
            self._not_submitted(batch, body)
            return
        if body.get("declining") and not self._said_declining:
            self._said_declining = True
            say_declining(body)
        if not batch.id and body.get("placeable") and len(self._batches) == 1:
            say(f"{body['id']} waits: {body['placeable']}", f"why:  peerload why {body['id']}")
        batch.id = str(body["id"])
        self._batch_max = min(2 * self._batch_max, BATCH_TASKS_MAX)
        self._is_slowed = False
        self._wait(batch)
        if self._signals or self.halted_by is not None:
            self._to_stop.append(batch.id)

    def _not_submitted(self, batch: MapBatch, body: dict[str, Any]) -> None:
        """Handle a refusal. After a full queue or an exceeded quota, retry with half as many tasks; any other refusal ends the map,
        unless it is already ending."""
        del self._batches[batch.token]
        self._unfinished -= len(batch.left)
        if self._stops:
            return  # the batch is no longer needed
        code = body.get("code")
        if code in (SlowDown.code, SnapshotWanted.code):
            self._held_back = sorted([*batch.left.values(), *self._held_back], key=lambda task: task.number)
            if code == SlowDown.code:
                self._slow_down(batch, body)
                return
            self._retry_at_s = 0.0
            if self._fields.pop("freezes", False):
                with connection.AgentConnection(self._socket_path) as client:
                    command.freeze_directory(client, self._fields["spec"], self._fields["terms"])
            return
        self._number -= len(batch.left) if self._number == len(batch.left) else 0
        self._give_up(connection.refusal(body))

    def _slow_down(self, batch: MapBatch, body: dict[str, Any]) -> None:
        """Retry with half as many tasks. Reports once if even a single task is refused while no task of this map runs."""
        self._batch_max = max(len(batch.left) // 2, 1)
        self._is_slowed = True
        self._retry_at_s = time.monotonic() + FULL_RETRY_S
        if len(batch.left) == 1 and not self._unfinished and not self._said_waiting:
            self._said_waiting = True
            say(f"{self.done} tasks have ended, the next ones wait: {body.get('what')} ({body.get('why')})")

    def _one_ended(self, batch: MapBatch, body: dict[str, Any]) -> None:
        member = str(body.get("id", "")).rpartition(".")[2]
        task = batch.left.pop(int(member), None) if member.isdecimal() else None
        if task is None:
            return  # already seen before a reconnection
        self._unfinished -= 1
        self.done += 1
        is_cancelled = body.get("state") == "cancelled"
        line = shown(task.argv)
        self.kept_beside += int(body.get("kept_beside") or 0)
        if body.get("state") == "done":
            self.succeeded += 1
        elif is_cancelled:
            self.cancelled += 1
            self._remember_failed(batch)
        else:
            self.failed += 1
            self._remember_failed(batch)
            if len(self.failures) < FAILURES_KEPT_MAX:
                told = {key: value for key, value in body.items() if key not in ("stdout", "stderr")}
                self.failures.append((told, line))
        if missing_bytes := body.get("missing_bytes"):
            self.note_incomplete(str(body["id"]), f"{size_text(missing_bytes)} of its output are missing")
        self._view.ended(MapResult(task.number, b" ".join(task.values), {**body, "command": line}))
        if not batch.left and not self._has_files:
            del self._batches[batch.token]
        if not self._stops and self._halt.is_due(failed=self.failed, succeeded=self.succeeded):
            self._halts(body)

    def note_printed(self, task: MapResult) -> None:
        """Add a task with printed output to the joblog, except a cancelled task or one with incomplete output, which
        `--resume` runs again."""
        if task.body["id"] in self._not_fetched:
            self._not_fetched.remove(task.body["id"])
        elif self._joblog is not None and task.body.get("state") != "cancelled":
            self._joblog.add(task.number, task.body, task.body["command"])

    def _remember_failed(self, batch: MapBatch) -> None:
        if len(self.failed_batches) < FAILURES_KEPT_MAX:
            self.failed_batches[batch.id] = None

    def _lost(self, batch: MapBatch, kind: str, body: dict[str, Any]) -> None:
        """Give up a batch that the agent can no longer read."""
        del self._batches[batch.token]
        self._unfinished -= len(batch.left)
        why = str(body.get("what") or "") if kind == "error" else "the agent does not wait for them any more"
        self._give_up(
            PeerloadError(
                f"{counted(len(batch.left), 'task')} of {batch.id} {'is' if len(batch.left) == 1 else 'are'} lost",
                why=why,
                hint=f"peerload show {batch.id}",
            )
        )

    # -- the end -------------------------------------------------------------------------------------------------------

    def _halts(self, body: dict[str, Any]) -> None:
        self.halted_by = body
        self._stops = True
        self._inputs.stop()
        self._to_stop = [batch.id for batch in self._batches.values() if batch.id]

    def _stop_batches(self) -> None:
        """Stop the batches in ``_to_stop``: all at the halt; later, batches that get an id or may have missed the first request."""
        names = self._to_stop
        if not names:
            return
        if not self._signals and not self._halt.is_now:
            try:
                names = self._hold_waiting(names)
            except BadRequest as error:
                if connection.is_worth_another_try(error):
                    return
                raise
        self._to_stop = []
        self._cancel(names)

    def _hold_waiting(self, names: list[str]) -> list[str]:
        """Hold the waiting tasks of these arrays → the held tasks."""
        with connection.AgentConnection(self._socket_path) as client:
            client.call("hold", tasks=names)
            held = {"tasks": names, "states": ["held"], "limit": SUBMITTED_MAX, "ended_within_s": 0.0}
            return [task["id"] for task in client.call("tasks", **held)["tasks"]]

    def _cancel(self, names: list[str]) -> None:
        if names:
            self._asked[self._client.send("cancel", tasks=names)] = ("cancel", None)

    def _interrupted(self) -> None:
        """Handle the first signal: cancel the unfinished tasks and wait for their ends."""
        os.read(self._wake_read, 64)
        self._stops = True
        self._inputs.stop()
        say(f"cancelling {counted(self._unfinished, 'task')}", "again, to leave at once")
        self._cancel([batch.id for batch in self._batches.values() if batch.id])

    def _cancel_at_once(self) -> None:
        """Kill the unfinished tasks without waiting, over a new connection."""
        names = [batch.id for batch in self._batches.values() if batch.id]
        unknown = sum(not batch.id for batch in self._batches.values())
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        if names:
            try:
                with connection.AgentConnection(self._socket_path) as client:
                    client.call("cancel", tasks=names, force=True)
            except PeerloadError as error:
                say(f"not cancelled: {error}", f"peerload cancel {' '.join(names[:5])}")
        if unknown:
            say("some submissions were not answered; their tasks may run", "see:  peerload ls")

    def _reconnect(self, error: AgentUnavailable) -> None:
        """Wait for an unavailable agent, then continue. Raises AgentUnavailable if it does not return in time."""
        self._client.close()
        if not self._number:
            raise error
        going_on = f"; {counted(self._unfinished, 'task')} go on without it" if self._unfinished else ""
        say(
            f"lost the agent{going_on}",
            f"waiting for it to come back, {connection.RECONNECT_S_MAX:g} s at most        start it:  peerload up",
        )
        until_s = time.monotonic() + connection.RECONNECT_S_MAX
        while True:
            try:
                self._client = connection.AgentConnection(self._socket_path, room_s=0.0)
                self._client.call("info")
                break
            except PeerloadError as still:
                if not connection.is_worth_another_try(still) or time.monotonic() > until_s or self._signals:
                    raise self._gone(still) from None
                connection.readable_within(self._wake_read, connection.RECONNECT_EVERY_S)
        self._asked.clear()
        for batch in list(self._batches.values()):
            if batch.id:
                for member in batch.left if self._fields.get("attended") else ():
                    self._client.send("attend", task=f"{batch.id}.{member}")
                self._wait(batch)
            else:
                self._submit(batch)
        if self._signals or self.halted_by is not None:
            self._to_stop = [batch.id for batch in self._batches.values() if batch.id]

    def _gone(self, error: PeerloadError) -> AgentUnavailable:
        names = [batch.id for batch in self._batches.values() if batch.id]
        later = [f"when it is back:  peerload wait {' '.join(names[:5])}"] if names else []
        if self._joblog is not None:
            later.append("then the rest:  the same with --resume")
        what = f"while {counted(self._unfinished, 'task')} had not ended" if names else "between two inputs"
        return AgentUnavailable(f"lost the agent {what}", why=error.what, hint="        ".join(later))

    def output(self, task: str) -> Iterator[dict[str, Any]]:
        """The whole output of an ended task, over a separate connection, resumed after a disconnection. Missing output is
        recorded."""
        gaps = connection.OutputGaps()
        end: dict[str, Any] = {}
        came = {1: 0, 2: 0}
        until_s = 0.0
        while True:
            try:
                with connection.AgentConnection(self._socket_path) as client:
                    for piece in client.stream("output", task=task, done_with=True):
                        until_s = 0.0
                        if "data" in piece and (new := connection.beyond(piece, came)):
                            gaps.add(new)
                            yield new
                    end = client.last
                break
            except PeerloadError as error:
                until_s = until_s or time.monotonic() + connection.RECONNECT_S_MAX
                if not connection.is_worth_another_try(error) or time.monotonic() > until_s or self._signals:
                    self.note_incomplete(task, error.what)
                    self._not_fetched.add(task)
                    return
                connection.readable_within(self._wake_read, connection.RECONNECT_EVERY_S)
        gaps.end(end)
        if gone := end.get("output_gone_why"):
            self.note_incomplete(task, f"its output was removed ({gone})")
        elif gaps.missing_bytes:
            self.note_incomplete(task, f"{size_text(gaps.missing_bytes)} of its output are missing")

    def note_incomplete(self, task: str, why: str) -> None:
        """Record that the output of a task is incomplete; the first reason is kept."""
        if task in self.incomplete:
            return
        self.incomplete_count += 1
        if len(self.incomplete) < FAILURES_KEPT_MAX:
            self.incomplete[task] = why
