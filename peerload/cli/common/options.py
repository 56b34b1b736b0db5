"""The flags of a verb: argparse with our errors, and types for numbers, names of nodes, leases and signals.

argparse takes longer to load and to set up than the rest of a `submit`. So flags are only declared first. A valid command line of
plain flags is read without argparse. argparse reads every other one and each wrong one, so users always see its errors and help.
"""

from __future__ import annotations

import itertools

from peerload.model.errors import UsageError
from peerload.text.units import duration, invalid

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection
    from typing import Any, NoReturn

SPEED_MAX = 1000
NODE_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
NODE_NAME_LENGTH_MAX = 40
NODE_NAME_SAYS = "only a-z, 0-9 and -, at most 40 characters"
LEASE_AUTO = -1.0
LEASE_S_MIN, LEASE_S_MAX = 1.0, 86_400.0


GROUP_LENGTH_MAX = 40
GROUP_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
GROUP_SAYS = "letters, digits, '.', '_' and '-', at most 40, the first a letter or a digit"


DESCRIBE = "\0describe"
"""A word that cannot be typed. A verb that receives it raises `Described` and does nothing else."""


class Described(Exception):
    """The flags of a verb: (True if the flag takes a value, help) by name."""

    def __init__(self, flags: dict[str, tuple[bool, str]]) -> None:
        super().__init__()
        self.flags = flags


PLAIN_SETTINGS = frozenset({"action", "default", "dest", "help", "metavar", "type"})
"""A flag with only these keywords can be read without argparse, if its action is one of PLAIN_ACTIONS."""
PLAIN_ACTIONS = frozenset({"store", "append", "store_true"})


class Values:
    """The flags of a command line, with the interface of `argparse.Namespace`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__ = values


class Options:
    """The flags of one verb. Abbreviations are not allowed; a mistake raises UsageError; every verb has `--socket` and `--json`."""

    def __init__(self, verb: str, says: str, *, usage: str = "", epilog: str = "", json_says: str = "") -> None:
        self._verb = verb
        self._usage, self._says = f"peerload {verb} {usage}" if usage else None, says
        self.epilog = epilog
        self._arguments: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        self.takes_value: dict[str, bool] = {"-h": False, "--help": False}
        """For each flag, True if it takes a value."""
        self.flag("--socket PATH", help="the agent's socket (default: PEERLOAD_SOCKET, else your own agent)")
        self.switch("--json", help=json_says or "print JSON, one object")

    def add_argument(self, *names: str, **settings: Any) -> None:  # noqa: ANN401 -- argparse's own keywords
        self._arguments.append((names, settings))

    def parser(self) -> argparse.ArgumentParser:
        import argparse

        fail = self.error

        class Parser(argparse.ArgumentParser):
            def error(self, message: str) -> NoReturn:
                fail(message)

        parser = Parser(
            prog=f"peerload {self._verb}",
            usage=self._usage,
            description=self._says,
            epilog=self.epilog or None,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for names, settings in self._arguments:
            parser.add_argument(*names, **settings)
        return parser

    def flag(self, *declared: str, **settings: Any) -> None:  # noqa: ANN401 -- argparse's own keywords
        """Declare a flag with a value, in the form of the help: ``-o, --output FILE``; `` …`` at the end makes it repeatable."""
        names, metavar = self._declared(declared, takes_value=True)
        if metavar.endswith("…") and metavar[-2:-1] in ("", " "):
            metavar, settings = metavar[:-1].rstrip(), {"action": "append", "default": [], **settings}
        if metavar:
            settings["metavar"] = metavar
        self.add_argument(*names, **settings)

    def switch(self, *declared: str, **settings: Any) -> None:  # noqa: ANN401 -- argparse's own keywords
        """Declare a flag without a value: ``-f, --follow``."""
        self.add_argument(*self._declared(declared, takes_value=False)[0], action="store_true", **settings)

    def _declared(self, declared: tuple[str, ...], *, takes_value: bool) -> tuple[list[str], str]:
        """Names of a flag, and the placeholder of its value."""
        words = ", ".join(declared).split(" ")
        names = [word.rstrip(",") for word in words if word.startswith("-")]
        self.takes_value.update(dict.fromkeys(names, takes_value))
        return names, " ".join(words[len(names) :])

    def at(self) -> None:
        self.flag("--at NODE", type=node_name, default="", help="ask this node of the cluster, not this one")

    def read(self, words: list[str]) -> argparse.Namespace:
        """The flags and positional words in ``words``, in any order."""
        self._describe_if_asked(words)
        return self.parser().parse_intermixed_args(self._with_negative_values(words))

    def _with_negative_values(self, words: list[str]) -> list[str]:
        """Convert ``--flag -5ms`` to ``--flag=-5ms``, so that argparse does not read the value as a flag."""
        joined: list[str] = []
        for index, word in enumerate(words):
            if word == "--":
                return joined + words[index:]
            before = joined[-1] if joined else ""
            is_value = word[:1] == "-" and word[1:2].isdigit() and before[:2] == "--" and self._next_is_value(before)
            joined[-1:] = [f"{before}={word}"] if is_value else [*joined[-1:], word]
        return joined

    def read_command(self, words: list[str], separators: Collection[str] = ()) -> tuple[argparse.Namespace, list[str]]:
        """The flags up to the first word that is not a flag, and the words from there on, without a first `--`. separators: words
        after which long flags are read again, unless a `--` directly follows the separator."""
        self._describe_if_asked(words)
        end = self._end_of_flags(words)
        late, command = self._late_flags(words[end:], separators)
        flags = self._with_negative_values([*words[:end], *late])
        plain: Any = self._plain(flags)
        return plain or self.parser().parse_args(flags), command[1:] if command[:1] == ["--"] else command

    def _plain(self, words: list[str]) -> Values | None:
        """The flags in ``words`` if these are only plain, valid flags; else None: argparse reads them."""
        table: dict[str, tuple[str, str, Any]] = {}
        values: dict[str, Any] = {}
        for names, settings in self._arguments:
            action, read = settings.get("action", "store"), settings.get("type", str)
            if not names[0].startswith("-") or settings.get("required"):
                return None
            name = next((name for name in names if name.startswith("--")), names[0])
            target = settings.get("dest") or name.lstrip("-").replace("-", "_")
            default = settings.get("default", False if action == "store_true" else None)
            values[target] = read(default) if isinstance(default, str) else default
            if settings.keys() <= PLAIN_SETTINGS and action in PLAIN_ACTIONS:
                table |= dict.fromkeys(names, (target, action, read))
        rest = iter(words)
        for word in rest:
            name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
            if name not in table:
                return None
            target, action, read = table[name]
            if action == "store_true":
                if equals:
                    return None
                values[target] = True
                continue
            given = value if equals else next(rest, "-")
            if given.startswith("-") and not equals:
                return None
            try:
                found = read(given)
            except Exception:  # noqa: BLE001 -- argparse reports the error
                return None
            values[target] = [*(values[target] or ()), found] if action == "append" else found
        return Values(values)

    def _unknown(self, words: str) -> NoReturn:
        """Raise the error for an unknown flag or an unexpected word, with a suggestion."""
        from difflib import get_close_matches

        first = words.split(" ", 1)[0].partition("=")[0]
        if not first.startswith("-"):
            what = f"{self._verb}: unexpected argument: {first!r}"
            raise UsageError(what, hint=f"what it takes:  peerload {self._verb} --help")
        other_case = first.swapcase()
        names = {name.lstrip("-"): name for name in self.takes_value if name.startswith("--")}
        near = get_close_matches(first.lstrip("-"), names, n=1, cutoff=0.55) if len(first) > 2 else []  # noqa: PLR2004 -- -x
        meant = other_case if other_case in self.takes_value else names[near[0]] if near else ""
        also = f"did you mean {meant} ?        " if meant else ""
        raise UsageError(
            f"{self._verb}: no such flag: {first}", hint=f"{also}all of them:  peerload {self._verb} --help"
        )

    def _describe_if_asked(self, words: list[str]) -> None:
        if words[:1] == [DESCRIBE]:
            helps = {name: settings.get("help") or "" for names, settings in self._arguments for name in names}
            helps |= dict.fromkeys(("-h", "--help"), "show this help message and exit")
            raise Described({name: (takes, helps.get(name, "")) for name, takes in self.takes_value.items()})

    def _end_of_flags(self, words: list[str]) -> int:
        index = 0
        while index < len(words):
            word = words[index]
            if word in ("--", "-") or not word.startswith("-"):
                return index
            index += 2 if self._next_is_value(word) else 1
        return len(words)

    def _late_flags(self, words: list[str], separators: Collection[str]) -> tuple[list[str], list[str]]:
        """The long flags, with their values, after a separator, and the other words."""
        late: list[str] = []
        kept: list[str] = []
        takes_flags, before = False, ""
        rest = iter(words)
        for word in rest:
            if word in separators:
                takes_flags = True
            elif word == "--" and before in separators:
                takes_flags = False
            if takes_flags and word.startswith("--") and word.partition("=")[0] in self.takes_value:
                late += [word, *itertools.islice(rest, int(self._next_is_value(word)))]
            else:
                kept.append(word)
            before = word
        return late, kept

    def _next_is_value(self, word: str) -> bool:
        if word.startswith("--"):
            return "=" not in word and self.takes_value.get(word, False)
        for position, letter in enumerate(word[1:], start=1):
            if self.takes_value.get(f"-{letter}", False):
                return position == len(word) - 1
        return False

    def error(self, message: str) -> NoReturn:
        """Raise UsageError where argparse would print its usage and exit."""
        what, _, unknown = message.partition("unrecognized arguments: ")
        if unknown and not what:
            self._unknown(unknown)
        message = message.removeprefix("argument ").replace(
            "the following arguments are required: ", "missing argument: "
        )
        own = f"my last task:  peerload {self._verb} @        " if message == "missing argument: ID" else ""
        raise UsageError(f"{self._verb}: {message}", hint=f"{own}what it takes:  peerload {self._verb} --help")


def lease(text: str) -> float:
    """Seconds from 1 s to 24 h, or LEASE_AUTO for ``auto``."""
    if text == "auto":
        return LEASE_AUTO
    seconds = duration(text)
    if not LEASE_S_MIN <= seconds <= LEASE_S_MAX:
        raise invalid(f"{text!r} is not between 1 second and 24 hours")
    return seconds


def instant(text: str) -> float:
    """Unix time in the future: from a duration from now (``8h``), a time of day (``06:00``), or a date, local unless it has a zone."""
    from datetime import datetime, timedelta

    now = datetime.now()  # noqa: DTZ005 -- a time of day is local: its offset from UTC is that of its own day
    try:
        if "T" in text or "-" in text:
            when = datetime.fromisoformat(text)
        elif ":" in text:
            hour, minute = map(int, text.split(":"))
            when = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
            when += timedelta(days=when <= now)
        else:
            when = now.astimezone() + timedelta(seconds=duration(text))
        at = when.timestamp()
    except (ValueError, OverflowError):
        raise invalid(f"{text!r} is not a time; such as 8h, 06:00, 2030-01-31T06:00") from None
    if at <= now.timestamp():
        raise invalid(f"{text!r} is in the past")
    return at


def past_instant(text: str) -> float:
    """Unix time in the past: from a duration before now (``90m``, ``2h``, ``7d``), or a day or time in local time."""
    import argparse
    import time
    from datetime import datetime

    try:
        if "-" in text:
            return max(datetime.fromisoformat(text).timestamp(), 0.0)
        return max(time.time() - duration(text), 0.0)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or a day or moment: 2026-11-20, 2026-11-20T14:30") from None
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time; such as 2h (ago), 2026-11-20 or 2026-11-20T14:30"
        ) from None


def whole(low: int, high: int) -> Any:  # noqa: ANN401 -- what argparse takes as a type
    """A type for whole numbers from ``low`` to ``high``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise invalid(f"{text!r} is not a whole number") from None
        if not low <= number <= high:
            raise invalid(f"{number} is not between {low} and {high}")
        return number

    return read


def cpus(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise invalid(f"{text!r} is not a number of cpus") from None
    if not 0 < number <= 65_536:  # noqa: PLR2004 -- the bound of ResourceRequest.cpus
        raise invalid(f"{text} is out of range: more than 0, at most 65536")
    return number


def is_node_name(text: str) -> bool:
    return 0 < len(text) <= NODE_NAME_LENGTH_MAX and NODE_NAME_CHARACTERS.issuperset(text)


def node_name(text: str) -> str:
    """The name of a node; "" stands for this node."""
    if text and not is_node_name(text):
        raise invalid(f"{text!r} is not a valid node name: {NODE_NAME_SAYS}")
    return text


def group_name(text: str, verb: str) -> str:
    if not 0 < len(text) <= GROUP_LENGTH_MAX or not GROUP_CHARACTERS.issuperset(text) or text[0] in "._-":
        raise UsageError(f"{verb}: {text[:60]!r} is not a valid name of a group", hint=f"a name has {GROUP_SAYS}")
    return text


def speed(text: str) -> float:
    """The speed of a node relative to the reference machine."""
    try:
        factor = float(text)
    except ValueError:
        raise invalid(f"{text!r} is not a number; such as 1.5") from None
    if not 0 < factor <= SPEED_MAX:
        raise invalid(f"{text} is out of range: more than 0, at most {SPEED_MAX}")
    return factor


def signal_number(text: str) -> int:
    import signal

    if text.isdecimal() and 1 <= int(text) <= 64:  # noqa: PLR2004 -- Linux has 64
        return int(text)
    name = text.upper().removeprefix("SIG")
    try:
        return int(signal.Signals[f"SIG{name}"])
    except KeyError:
        raise invalid(f"{text!r} is not a signal; such as TERM, INT, KILL, 9") from None
