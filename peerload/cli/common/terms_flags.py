"""The flags of `run`, `submit` and `map` about what only the home of a task has to know: its group, what it waits for, and how
often it is tried again."""

from __future__ import annotations

from peerload.cli.common import ending_flags, options
from peerload.model.errors import UsageError
from peerload.model.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

AFTER_MAX = 100
RETRIES_MAX = 100
GROUP_LENGTH_MAX = 40
GROUP_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
"""As peerload.model.submit_options has them (not imported: it would cost the start of every submit)."""
TAGS_MAX = 16
TAG_VALUE_LENGTH_MAX = 128
GROUP_SAYS = "letters, digits, '.', '_' and '-', at most 40, the first a letter or a digit"


def add(reader: options.Options, *, is_map: bool = False) -> None:
    """The flags. is_map: `--tag` says something else there, as with GNU parallel."""
    reader.flag(
        "--after",
        action="append",
        default=[],
        metavar="ID",
        help="not before this has ended (repeatable; an array: all of it)",
    )
    reader.flag(
        "--after-ok",
        action="append",
        default=[],
        metavar="ID",
        help="not before this has succeeded; cancelled if it does not (repeatable)",
    )
    reader.flag("--group", metavar="G", help="the group whose slots it takes:  peerload group")
    name = "--task-tag" if is_map else "--tag"
    reader.flag(
        name,
        dest="tags",
        action="append",
        default=[],
        metavar="K=V",
        help="mark it with this, to select it by (repeatable)",
    )
    reader.flag(
        "--retries",
        type=options.whole(0, RETRIES_MAX),
        default=0,
        metavar="N",
        help="try it again up to N times if it fails (PEERLOAD_ATTEMPT counts)",
    )
    ending_flags.add(reader)


def terms(flags: Namespace, verb: str) -> dict[str, object]:
    """The terms as the agent takes them; only what is not as usual."""
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
                hint="of an array all members are meant by its id:  --after 42",
            )
    given = {
        "group": flags.group,
        "after": after,
        "after_ok": after_ok,
        "retries": flags.retries,
        "tags": _tags(flags, verb),
    }
    return {key: value for key, value in given.items() if value} | ending_flags.given(flags, verb)


def _tags(flags: Namespace, verb: str) -> list[str]:
    """One `key=value` for each key, the last that is given. Raises UsageError."""
    tags: dict[str, str] = {}
    for word in flags.tags:
        key, equals, value = word.partition("=")
        is_key = 0 < len(key) <= GROUP_LENGTH_MAX and GROUP_CHARACTERS.issuperset(key) and key[0] not in "._-"
        if not is_key or not equals or len(value) > TAG_VALUE_LENGTH_MAX or not (value.isprintable() or not value):
            raise UsageError(
                f"{verb}: {printable(word[:60])!r} is no tag",
                hint=f"such as:  --tag project=mnist        the key has {GROUP_SAYS}",
            )
        tags[key] = value
    if len(tags) > TAGS_MAX:
        raise UsageError(f"{verb}: {len(tags)} tags; at most {TAGS_MAX} are allowed")
    return [f"{key}={value}" for key, value in tags.items()]


def group_name(text: str, verb: str) -> str:
    """The name of a group. Raises UsageError."""
    if not 0 < len(text) <= GROUP_LENGTH_MAX or not GROUP_CHARACTERS.issuperset(text) or text[0] in "._-":
        raise UsageError(f"{verb}: {text[:60]!r} is no name of a group", hint=f"such a name has {GROUP_SAYS}")
    return text


def _listed(values: list[str]) -> list[str]:
    return list(dict.fromkeys(name for value in values for name in value.split(",") if name))
