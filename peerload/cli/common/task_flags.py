# ruff: noqa: PTH109, PTH111, PTH118
# os.path, since pathlib would cost every command its quick start.
"""The flags of `run`, `submit` and `map` beside those of the command itself: its group, what it waits for, retries and tags; what is
done when it has ended; and the GPUs and other devices that it needs. The bounds are those of peerload.model, which is not imported:
that would cost the start of every submit."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING

from peerload.cli.common.options import Options, whole
from peerload.model.errors import UsageError
from peerload.model.text import printable
from peerload.text import units

if TYPE_CHECKING:
    from argparse import Namespace

AFTER_MAX = 100
RETRIES_MAX = 100
GROUP_LENGTH_MAX = 40
GROUP_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
TAGS_MAX = 16
TAG_VALUE_LENGTH_MAX = 128
GROUP_SAYS = "letters, digits, '.', '_' and '-', at most 40, the first a letter or a digit"


def add_flags(reader: Options, *, is_map: bool = False) -> None:
    """The flags about its home: group, dependencies, tags and retries. is_map: `--tag` has another meaning there, as in GNU parallel."""
    reader.flag(
        "--after",
        action="append",
        default=[],
        metavar="ID",
        help="start after this task has ended (repeatable; an array: all of it)",
    )
    reader.flag(
        "--after-ok",
        action="append",
        default=[],
        metavar="ID",
        help="start after this task has succeeded; cancelled if it does not (repeatable)",
    )
    reader.flag("--group", metavar="G", help="the group whose slots it uses:  peerload group")
    name = "--task-tag" if is_map else "--tag"
    reader.flag(
        name,
        dest="tags",
        action="append",
        default=[],
        metavar="K=V",
        help="a tag to select it by (repeatable)",
    )
    reader.flag(
        "--retries",
        type=whole(0, RETRIES_MAX),
        default=0,
        metavar="N",
        help="run it again up to N times if it fails (PEERLOAD_ATTEMPT counts)",
    )
    add_completion_flags(reader)


def terms(flags: Namespace, verb: str) -> dict[str, object]:
    """The options as the agent takes them, without defaults. Raises UsageError."""
    if flags.retries and flags.once:
        raise UsageError(
            f"{verb}: --once and --retries contradict each other",
            hint="--once: never started twice        --retries N: started again when it has failed",
        )
    if flags.group is not None:
        flags.group = group_name(flags.group, verb)
    after, after_ok = _listed(flags.after), _listed(flags.after_ok)
    for flag, names in (("--after", after), ("--after-ok", after_ok)):
        if len(names) > AFTER_MAX:
            raise UsageError(
                f"{verb}: {flag} names {len(names)} tasks; at most {AFTER_MAX} are allowed",
                hint="the id of an array means all its members:  --after 42",
            )
    given = {
        "group": flags.group,
        "after": after,
        "after_ok": after_ok,
        "retries": flags.retries,
        "tags": _tags(flags, verb),
    }
    return {key: value for key, value in given.items() if value} | completion_terms(flags, verb)


def _tags(flags: Namespace, verb: str) -> list[str]:
    """One `key=value` for each key; the last one counts. Raises UsageError."""
    tags: dict[str, str] = {}
    for word in flags.tags:
        key, equals, value = word.partition("=")
        is_key = 0 < len(key) <= GROUP_LENGTH_MAX and GROUP_CHARACTERS.issuperset(key) and key[0] not in "._-"
        if not is_key or not equals or len(value) > TAG_VALUE_LENGTH_MAX or not (value.isprintable() or not value):
            raise UsageError(
                f"{verb}: {printable(word[:60])!r} is not a tag",
                hint=f"such as:  --tag project=mnist        the key has {GROUP_SAYS}",
            )
        tags[key] = value
    if len(tags) > TAGS_MAX:
        raise UsageError(f"{verb}: {len(tags)} tags; at most {TAGS_MAX} are allowed")
    return [f"{key}={value}" for key, value in tags.items()]


def group_name(text: str, verb: str) -> str:
    """A valid name of a group. Raises UsageError."""
    if not 0 < len(text) <= GROUP_LENGTH_MAX or not GROUP_CHARACTERS.issuperset(text) or text[0] in "._-":
        raise UsageError(f"{verb}: {text[:60]!r} is not a valid name of a group", hint=f"a name has {GROUP_SAYS}")
    return text


def _listed(values: list[str]) -> list[str]:
    return list(dict.fromkeys(name for value in values for name in value.split(",") if name))


PATH_BYTES_MAX = 4096
NOTIFY_BYTES_MAX = 64 << 10


def add_completion_flags(reader: Options) -> None:
    """The flags about what is done at home when a task has ended: `-o`, `-e` and `--notify`."""
    reader.flag(
        "-o",
        "--output",
        metavar="FILE",
        help="write its stdout to this file; %%j is its number, %%A its array's, %%a its member's, %%x its name",
    )
    reader.flag("-e", "--error", metavar="FILE", help="the same for its stderr; both may be one file")
    reader.flag(
        "--notify", metavar="CMD", help="run this line in /bin/sh on this node when it has ended (an array: all of it)"
    )


def completion_terms(flags: Namespace, verb: str) -> dict[str, object]:
    """The options that were given. Raises UsageError."""
    found: dict[str, object] = {}
    for flag, key, pattern in (("-o", "output_file", flags.output), ("-e", "error_file", flags.error)):
        if pattern is not None:
            found[key] = _absolute(pattern, f"{verb}: {flag}")
    if flags.notify is not None:
        command = os.fsencode(flags.notify)
        if not command.strip() or b"\0" in command or len(command) > NOTIFY_BYTES_MAX:
            raise UsageError(
                f"{verb}: --notify needs a command of at most {NOTIFY_BYTES_MAX} bytes",
                hint="such as:  --notify 'notify-send \"$PEERLOAD_TASK_ID $PEERLOAD_STATE\"'",
            )
        found["notify"] = command
    return found


def _absolute(pattern: str, flag: str) -> bytes:
    """The pattern as an absolute path; a % in the working directory stands for itself."""
    raw = os.path.expanduser(os.fsencode(pattern))
    if not raw or raw.endswith(b"/"):
        raise UsageError(f"{flag} {pattern!r} names no file", hint=f"such as:  {flag.rpartition(' ')[2]} out-%j.txt")
    if not raw.startswith(b"/"):
        try:
            here = os.getcwdb()
        except FileNotFoundError:
            raise UsageError(f"{flag} {pattern!r}: the current directory has been removed") from None
        raw = os.path.join(here.replace(b"%", b"%%"), raw)
    if len(raw) > PATH_BYTES_MAX:
        raise UsageError(f"{flag}: the path has {len(raw)} bytes; at most {PATH_BYTES_MAX} are allowed")
    return raw


GPUS_MAX = 1024
OOM_RETRIES_MAX = 16


def add_device_flags(reader: Options) -> None:
    """The flags by which a task asks for GPUs and other devices."""
    reader.flag("-G", "--gpus", type=gpus, metavar="N", help="GPUs, all on one node; 0.25: a fraction of one")
    reader.flag("--gpu-mem", type=units.size, metavar="12G", help="memory of each GPU")
    reader.flag(
        "--gpu-prefer",
        action="append",
        default=[],
        metavar="0,1",
        help="GPUs to take first: numbers, prefixes of names (GPU-ab12), or patterns of models (A100*)",
    )
    reader.flag(
        "--gpu-wait",
        choices=("queue", "schedule"),
        help="if these have no room: wait for them (queue), or take others (schedule)",
    )
    reader.flag("--gpu-wait-max", type=units.duration, metavar="10m", help="after this, queue becomes schedule")
    reader.flag(
        "--gpu-share", choices=("auto", "exclusive", "time"), help="whether it shares its GPUs with other tasks"
    )
    reader.flag(
        "--gpu-oom-retries",
        type=whole(0, OOM_RETRIES_MAX),
        metavar="N",
        help="retries with more GPU memory after it ran out of that (default 2, 0: never)",
    )
    reader.flag(
        "-l", "--device", action="append", default=[], type=device, metavar="KIND=N", help="other devices (repeatable)"
    )


def gpus(text: str) -> float:
    """A number of GPUs, or a fraction of one."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= GPUS_MAX:
        raise ArgumentTypeError(f"{text!r} is not a number of GPUs; such as 1, 4, or 0.25 for a fraction of one")
    if number > 1 and number != int(number):
        raise ArgumentTypeError(f"{text!r} is neither a whole number nor below 1; such as 2, or 0.5")
    return number


def device(text: str) -> tuple[str, int]:
    """``fpga=2``; ``fpga`` alone is one."""
    name, equals, number = text.partition("=")
    count = number if equals else "1"
    if not name or not count.isdecimal() or not 1 <= int(count) <= GPUS_MAX:
        raise ArgumentTypeError(f"{text!r} is not KIND=N; such as fpga=1")
    if name == "gpu":
        raise ArgumentTypeError("GPUs are requested with -G")
    return name, int(count)


def device_request(flags: Namespace, verb: str) -> dict[str, object]:
    """The part of a request about devices. Raises UsageError if flags contradict each other."""
    about_gpus = ("gpu_mem", "gpu_prefer", "gpu_wait", "gpu_wait_max", "gpu_share")
    given = [name for name in about_gpus if getattr(flags, name)]
    given += ["gpu_oom_retries"] if flags.gpu_oom_retries is not None else []
    if given and not flags.gpus:
        raise UsageError(f"{verb}: --{given[0].replace('_', '-')} needs GPUs, and none is requested", hint="add  -G 1")
    if len({name for name, _ in flags.device}) < len(flags.device):
        raise UsageError(f"{verb}: the same kind of device is given twice", hint="such as:  -l fpga=2")
    found: dict[str, object] = {"devices": flags.device or None}
    if not flags.gpus:
        return found
    is_part = flags.gpus < 1
    if is_part and flags.gpu_share == "exclusive":
        raise UsageError(f"{verb}: a fraction of a GPU cannot be exclusive (--gpu-share)")
    if flags.gpu_wait_max and flags.gpu_wait != "queue":
        raise UsageError(f"{verb}: --gpu-wait-max is only for --gpu-wait queue", hint="add  --gpu-wait queue")
    return found | {
        "gpus": 1 if is_part else int(flags.gpus),
        "gpu_fraction": flags.gpus if is_part else None,
        "gpu_mem_bytes": flags.gpu_mem,
        "gpu_prefer": [name for value in flags.gpu_prefer for name in value.split(",") if name] or None,
        "gpu_wait": flags.gpu_wait,
        "gpu_wait_s_max": flags.gpu_wait_max,
        "gpu_share": flags.gpu_share,
        "gpu_oom_retries": flags.gpu_oom_retries,
    }
