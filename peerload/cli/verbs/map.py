"""`peerload map`: a task for each input, like GNU parallel."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from peerload.cli.common import command, options
from peerload.cli.common.messages import CANNOT, exit_code_of, report
from peerload.cli.common.output import Bar, write_all
from peerload.cli.map.run import Halt, Joblog, Mapping, MapResult, MapView
from peerload.cli.map.template import SEPARATORS, CommandTemplate, opened, shown, split
from peerload.client.connection import AgentConnection
from peerload.client.submission import may_freeze
from peerload.model.errors import UsageError
from peerload.model.text import printable
from peerload.text.format import counted, print_json, say, shortened, size_text
from peerload.text.tasks import beyond_code

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

from peerload.cli.map.template import MapInputs

FAILURES_NAMED_MAX = 20
"""Maximum number of failures listed by name; the rest are only counted."""
ARRAYS_NAMED_MAX = 10
"""Maximum number of arrays in the retry command."""
COUNTED_FAILURES_MAX = 100
"""The largest number of failed tasks that is reported as the exit code; 101 means more."""
LINE_WIDTH_MAX = 240
JSON_OUTPUT_BYTES_MAX = 64 << 20
"""Maximum output of one task in an object of `--json`."""
COMMAND_WIDTH_MAX = 100
KEPT_BYTES_MAX = 64 << 20
"""Maximum output kept in memory for --keep-order. More output is fetched again when it is due."""
KEPT_TASKS_MAX = 10_000
"""Maximum number of ended tasks whose output is not due yet; at this limit no more tasks are submitted."""
_JSON_KEYS = ("id", "state", "exit_code", "signal", "node", "out_of", "started_at", "ended_at")
_JSON_KEYS_OF_OUTPUT = ("stdout_bytes", "stderr_bytes", "stdout", "stderr")

EPILOG = """\
The flags end at the first word that is not a flag; long ones may also follow the inputs. One word is a line for /bin/sh, in
which inputs are quoted (put no quotes around {} yourself); several words are a command and its arguments.
  :::  a b c     these inputs            ::::  FILE     the lines of FILE (- is standard input)
  :::  -- --tag  words that look like flags of map: after this -- all are inputs
  :::+, ::::+    are paired with the previous source; other sources are combined, each value with each
Without a source, inputs are the lines of standard input.
  {}  the input   {.}  without its extension   {/}  its last part   {//}  its directory   {/.}  last part, no extension
  {#}  the number of the task   {1} {2} {1.} {2/}  one of several inputs
Inputs are appended to a command with none of these.
Exit code: 0 if all succeeded, else the number of failed tasks, 101 for more than 100; with --halt the exit code of the task that
caused it; 125 if the output of a task is incomplete."""


def main(words: list[str]) -> int:
    reader = _reader()
    flags, rest = reader.read_command(words, SEPARATORS)
    line, sources = split(rest)
    shell = flags.shell is not None or len(line) == 1
    if not line and flags.shell is None:
        raise UsageError("map: the command is missing", hint="such as:  peerload map 'gzip {}' ::: *.log")
    if len(line) == 1 and flags.shell is None:
        flags.shell, line = line[0], []
    spec, secret = command.specification(flags, line, "map")
    spec["followed"] = True  # its complete output is needed here
    halt = Halt(flags.halt)
    inputs = opened(sources, end=b"\0" if flags.null else b"\n")
    template = CommandTemplate(spec["argv"][-1:] if shell else spec["argv"], is_shell=shell, inputs=inputs.width)
    fields = _fields(flags, spec)
    found = command.prepare_files(flags, spec, fields["terms"])
    if not flags.dry_run:
        with AgentConnection(flags.socket) as client:  # without an agent an existing log is not touched
            command.send_files(client, spec, fields["terms"], found)
        fields |= {"freezes": True} if may_freeze(spec) else {}
    joblog = _joblog(flags)
    if flags.dry_run:
        for what, value in command.described_files(found, spec).items():
            say(f"{what}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
        return _dry_run(flags, template, inputs, joblog)
    if not sources and sys.stdin is not None and sys.stdin.isatty():
        say(
            "inputs are read from the terminal, a line each, until Ctrl-D",
            "words:  ::: a b c        a file:  :::: FILE",
        )
    del secret  # `submit` reports them on a terminal only
    mapping = Mapping(flags.socket, fields, template, inputs, halt=halt, joblog=joblog, at_a_time=flags.jobs)
    with mapping:
        code = _run(mapping, flags)
    if joblog is not None and joblog.skipped_failed:
        many = counted(joblog.skipped_failed, "task")
        say(f"{many} of the skipped tasks had failed", "run them again:  the same with --resume-failed")
    return code


def _reader() -> options.Options:
    reader = command.command_options(
        "map",
        "Run a command once for each input, wherever there is room.",
        usage="[flags] COMMAND ... ::: INPUT ...",
        epilog=EPILOG,
    )
    reader.flag("-j, --jobs N", help="keep at most N tasks unfinished at a time", type=options.whole(1, 1_000_000))
    reader.switch("-k, --keep-order", help="print outputs in the order of the inputs")
    reader.switch("--tag", help="begin each line of output with its input and a tab")
    reader.switch("--bar", help="show a progress bar with the time left (default: on a terminal)")
    reader.switch("--no-bar", help="show no bar")
    reader.flag("--joblog FILE", help="write a line for each ended task, with the columns of GNU parallel")
    reader.switch("--resume", help="skip tasks that the joblog has")
    reader.switch("--resume-failed", help="skip tasks that the joblog has as succeeded")
    reader.flag("--halt WHEN", help="now,fail=1: stop all at the first failure; soon,fail=10%%; never", default="never")
    reader.switch("--keep", help="let submitted tasks go on when this command is killed")
    reader.switch("-0, --null", help="inputs of files end with NUL instead of a line break")
    return reader


def _joblog(flags: Namespace) -> Joblog | None:
    resumes = flags.resume or flags.resume_failed
    if flags.joblog is None:
        if resumes:
            raise UsageError("map: --resume needs the joblog of the run before", hint="--joblog FILE --resume")
        return None
    if flags.dry_run and not resumes:
        return None
    return Joblog(flags.joblog, resumes=resumes, again_failed=flags.resume_failed)


def _fields(flags: Namespace, spec: dict[str, Any]) -> dict[str, Any]:
    terms = command.terms(flags, "map")
    more = {"wait_for_node": True} if flags.wait_for_node else {}
    more |= {} if flags.keep else {"attended": True}
    return {"spec": spec, **more, "terms": terms}


def _dry_run(flags: Namespace, template: CommandTemplate, inputs: MapInputs, joblog: Joblog | None) -> int:
    number = 0
    while not inputs.is_over:
        values = inputs.next()
        if values is None:
            if inputs.descriptor is not None:
                inputs.read()
            continue
        number += 1
        argv = template.argv(number, values)
        if joblog is not None and joblog.has(number, shown(argv)):
            continue
        if flags.json:
            print_json({"seq": number, "argv": argv})
        elif sys.stdout.isatty():
            sys.stdout.write(f"{printable(shown(argv))}\n")
        else:
            sys.stdout.buffer.write(shown(argv) + b"\n")
    return 0


def _run(mapping: Mapping, flags: Namespace) -> int:
    view = _View(mapping, flags)
    try:
        mapping.run(view)
        view.outputs.finish()
    finally:
        view.end()
    return _report(mapping)


class Outputs:
    """Prints outputs byte for byte, stdout on 1 and stderr on 2, without mixing the outputs of tasks.

    ``fetch(id)``: the pieces of an output that the answer does not include. ``before``: called before anything is printed.
    ``printed``: called with each task whose output was printed.
    """

    def __init__(
        self,
        fetch: Callable[[str], Iterator[dict[str, Any]]],
        *,
        keeps_order: bool = False,
        tags: bool = False,
        before: Callable[[], None] = lambda: None,
        printed: Callable[[MapResult], None] = lambda _: None,
    ) -> None:
        self._fetch = fetch
        self._keeps_order = keeps_order
        self._tags = tags
        self._before = before
        self._printed = printed
        self._next = 1
        self._waiting: dict[int, MapResult | None] = {}
        self._kept_bytes = 0

    def ended(self, task: MapResult) -> None:
        """Print the output of a task, or keep it until it is due."""
        if not self._keeps_order:
            self._print(task)
            return
        size = _size(task.body)
        if size and self._kept_bytes + size > KEPT_BYTES_MAX:
            task.body.pop("stdout")
            task.body.pop("stderr")
            size = 0
        self._kept_bytes += size
        self._waiting[task.number] = task
        self._print_ready()

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= KEPT_TASKS_MAX

    def skipped(self, number: int) -> None:
        """Record that a task was done in an earlier run, so that no output is expected."""
        if self._keeps_order:
            self._waiting[number] = None
            self._print_ready()

    def finish(self) -> None:
        """Print all outputs that are still kept."""
        for number in sorted(self._waiting):
            self._release(self._waiting.pop(number))

    def _print_ready(self) -> None:
        while self._next in self._waiting:
            self._release(self._waiting.pop(self._next))
            self._next += 1

    def _release(self, task: MapResult | None) -> None:
        if task is not None:
            self._kept_bytes -= _size(task.body)
            self._print(task)

    def _print(self, task: MapResult) -> None:
        if task.body.get("stdout_bytes") or task.body.get("stderr_bytes"):
            self._print_output(task)
        self._printed(task)

    def _print_output(self, task: MapResult) -> None:
        self._before()
        tag = task.tag if self._tags else b""
        written = {stream: _Tagged(stream, tag) for stream in (1, 2)} if self._tags else {}
        for stream, data in self._pieces(task.body):
            if written:
                written[stream].write(data)
            else:
                write_all(stream, data)

    def _pieces(self, body: dict[str, Any]) -> Iterator[tuple[int, bytes]]:
        if "stdout" in body:
            for stream, key in ((1, "stdout"), (2, "stderr")):
                if body[key]:
                    yield stream, body[key]
            return
        for piece in self._fetch(body["id"]):
            if "data" in piece:
                yield piece["stream"], piece["data"]


class _Tagged:
    """A stream with a tag before each line."""

    def __init__(self, stream: int, tag: bytes) -> None:
        self._stream = stream
        self._tag = printable(tag).encode("utf-8", "backslashreplace") + b"\t"
        self._is_at_start = True

    def write(self, data: bytes) -> None:
        lines = data.split(b"\n")
        ends_line = not lines[-1]
        text = (b"\n" + self._tag).join(lines[:-1] if ends_line else lines) + (b"\n" if ends_line else b"")
        write_all(self._stream, (self._tag if self._is_at_start else b"") + text)
        self._is_at_start = ends_line


def _size(body: dict[str, Any]) -> int:
    return len(body.get("stdout") or b"") + len(body.get("stderr") or b"")


class _View(MapView):
    """Outputs or JSON on stdout, and the bar on stderr."""

    def __init__(self, mapping: Mapping, flags: Namespace) -> None:
        self._mapping = mapping
        self._is_json = flags.json
        self._bar = Bar() if flags.bar or (sys.stderr.isatty() and not flags.no_bar) else None
        self.outputs = Outputs(
            mapping.output,
            keeps_order=flags.keep_order,
            tags=flags.tag,
            before=self._bar.clear if self._bar is not None and sys.stdout.isatty() else lambda: None,
            printed=mapping.note_printed,
        )

    @property
    def is_full(self) -> bool:
        return self.outputs.is_full

    def ended(self, task: MapResult) -> None:
        if self._is_json:
            _print_ended(self._mapping, task)
            self._mapping.note_printed(task)
        else:
            self.outputs.ended(task)

    def skipped(self, number: int) -> None:
        self.outputs.skipped(number)

    def progress(self, *, at_once: bool = False) -> None:
        if self._bar is not None:
            self._bar.show(self._mapping.done, self._mapping.failed, self._mapping.total, at_once=at_once)

    def end(self) -> None:
        self.progress(at_once=True)
        if self._bar is not None and sys.stderr.isatty():
            sys.stderr.write("\n")


def _print_ended(mapping: Mapping, task: MapResult) -> None:
    body = {key: task.body.get(key) for key in (*_JSON_KEYS, *_JSON_KEYS_OF_OUTPUT)}
    sizes = int(body["stdout_bytes"] or 0), int(body["stderr_bytes"] or 0)
    if "stdout" not in task.body and any(sizes):
        body |= _fetched(mapping, str(body["id"]), sizes)
    print_json({"seq": task.number, "command": task.body["command"], **body})


def _fetched(mapping: Mapping, task: str, sizes: tuple[int, int]) -> dict[str, Any]:
    """The output of an ended task as stdout and stderr; or `output_missing`: the reason why it is incomplete, which is also recorded."""
    if sum(sizes) > JSON_OUTPUT_BYTES_MAX:
        why = f"{size_text(sum(sizes))} of output are more than one object holds, {size_text(JSON_OUTPUT_BYTES_MAX)}"
        mapping.note_incomplete(task, why)
        return {"output_missing": why}
    came = {1: bytearray(), 2: bytearray()}
    for piece in mapping.output(task):
        came[piece["stream"]] += piece["data"]
    if (len(came[1]), len(came[2])) == sizes:
        return {"stdout": bytes(came[1]), "stderr": bytes(came[2])}
    why = f"{size_text(sum(sizes) - len(came[1]) - len(came[2]))} of its output are missing"
    mapping.note_incomplete(task, why)
    return {"output_missing": mapping.incomplete.get(task, why)}


def _report(mapping: Mapping) -> int:
    """Report failures on stderr, and what to type next → the exit code."""
    _name_failures(mapping)
    if mapping.kept_beside:
        kept = counted(mapping.kept_beside, "output")
        say(f"stored next to files that were changed here meanwhile: {kept}", "find them:  find . -name '*.peerload-*'")
    hint = _retry_hint(mapping)
    if mapping.signal:
        say(f"cancelled {counted(mapping.cancelled, 'task')}; {mapping.succeeded} had succeeded", hint)
        return 128 + mapping.signal
    if mapping.problem is not None:
        report(mapping.problem)
        return CANNOT
    if mapping.halted_by is not None:
        name = mapping.halted_by.get("id", "")
        say(f"--halt: stopped after {name}; {counted(mapping.cancelled, 'task')} cancelled", hint)
        code = exit_code_of(mapping.halted_by)
        if code or not mapping.incomplete:
            return code
    failed = mapping.failed + (mapping.cancelled if mapping.halted_by is None else 0)
    if mapping.incomplete:
        _name_incomplete(mapping)
        hint = hint or f"the kept part:  peerload logs {next(iter(mapping.incomplete))}"
        what = f"the output of {counted(mapping.incomplete_count, 'task')} is not complete"
        say(f"exit code {CANNOT}: {what}" + (f", and {failed} failed" if failed else ""), hint)
        return CANNOT
    if failed:
        also = f", {mapping.cancelled} cancelled by others" if mapping.cancelled else ""
        say(f"{mapping.failed} of {counted(mapping.done, 'task')} failed{also}", hint)
    return min(failed, COUNTED_FAILURES_MAX + 1)


def _name_failures(mapping: Mapping) -> None:
    for body, line in mapping.failures[:FAILURES_NAMED_MAX]:
        sys.stderr.write(f"  {shortened(failure_text(body, line), LINE_WIDTH_MAX)}\n")
    more = mapping.failed - FAILURES_NAMED_MAX
    if more > 0:
        sys.stderr.write(f"  and {more} more\n")


def failure_text(body: dict[str, Any], line: bytes) -> str:
    signal_ = body.get("signal")
    how = f"signal {signal_}" if signal_ else f"exit {exit_code_of(body)}"
    if (body.get("exit_code") is None and not signal_) or body.get("out_of"):
        how, why = f"{how} ({body.get('reason') or body.get('state')})", ""
    else:
        why = beyond_code(body)
    where = f"on {body['node']}" if body.get("node") else ""
    said = ": ".join(filter(None, (where, why, str(body.get("error_line") or ""))))
    command_line = shortened(printable(line), COMMAND_WIDTH_MAX)
    return f"{printable(body.get('id', ''))}  {printable(how)}  {command_line}" + (
        f"  ({printable(said)})" if said else ""
    )


def _name_incomplete(mapping: Mapping) -> None:
    for task, why in list(mapping.incomplete.items())[:FAILURES_NAMED_MAX]:
        sys.stderr.write(f"  {printable(task)}  {shortened(printable(why), LINE_WIDTH_MAX)}\n")
    more = mapping.incomplete_count - FAILURES_NAMED_MAX
    if more > 0:
        sys.stderr.write(f"  and {more} more\n")


def _retry_hint(mapping: Mapping) -> str:
    """The command that runs failed tasks again."""
    arrays = list(mapping.failed_batches)
    if not arrays:
        return ""
    named = " ".join(arrays[:ARRAYS_NAMED_MAX]) if len(arrays) <= ARRAYS_NAMED_MAX else ""
    flag = " --failed" if not mapping.cancelled or not named else ""
    logs = f"        the output of one:  peerload logs {mapping.failures[0][0].get('id')}" if mapping.failures else ""
    return f"again:  peerload retry{flag} {named}".rstrip() + logs
