"""What the verbs share in reading their flags: argparse with our errors, sizes and times with units, ids."""

from __future__ import annotations

import argparse

from peerload.cli.main import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_SIZE_UNITS = {"B": 1} | {
    unit + suffix: factor**power
    for power, unit in enumerate("KMGT", start=1)
    for suffix, factor in (("", 1024), ("I", 1024), ("IB", 1024), ("B", 1000))
}
_TIME_UNITS = {"S": 1, "M": 60, "H": 3600, "D": 86_400, "W": 604_800}
_CLOCK_PARTS = 3
SPEED_MAX = 1000
NODE_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
NODE_NAME_LENGTH_MAX = 40
NODE_NAME_SAYS = "a-z, 0-9 and - alone, at most 40 characters"
LEASE_AUTO = -1.0
"""What `lease` makes of ``auto``."""
LEASE_S_MIN, LEASE_S_MAX = 1.0, 86_400.0


DESCRIBE = "\0describe"
"""A word that nobody can type: a verb that gets it tells what it takes (`Described`) and does nothing."""


class Described(Exception):
    """What a verb takes. flags: by name, whether it takes a value and what it is for."""

    def __init__(self, flags: dict[str, tuple[bool, str]]) -> None:
        super().__init__()
        self.flags = flags


class Options(argparse.ArgumentParser):
    """The flags of one verb. Flags are never abbreviated; a mistake raises UsageError; `--socket` is always there."""

    def __init__(self, verb: str, says: str, *, usage: str = "", epilog: str = "", json_says: str = "") -> None:
        super().__init__(
            prog=f"peerload {verb}",
            usage=f"peerload {verb} {usage}" if usage else None,
            description=says,
            epilog=epilog or None,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._verb = verb
        self._takes_value: dict[str, bool] = {"-h": False, "--help": False}
        self.flag("--socket", metavar="PATH", help="the agent's socket (default: PEERLOAD_SOCKET, else your own agent)")
        self.switch("--json", help=json_says or "print JSON, one object")

    def flag(self, *names: str, **settings: Any) -> None:  # noqa: ANN401 -- argparse's own keywords
        """A flag that takes a value."""
        self._takes_value.update(dict.fromkeys(names, True))
        self.add_argument(*names, **settings)

    def switch(self, *names: str, **settings: Any) -> None:  # noqa: ANN401 -- argparse's own keywords
        """A flag that takes none."""
        self._takes_value.update(dict.fromkeys(names, False))
        self.add_argument(*names, action="store_true", **settings)

    def at(self) -> None:
        """Lets the user name the node that is to answer."""
        self.flag("--at", type=node_name, default="", metavar="NODE", help="ask this node of the cluster, not this one")

    def read(self, words: list[str]) -> argparse.Namespace:
        """The flags and positional words in ``words``, in any order."""
        self._describe_if_asked(words)
        return self.parse_intermixed_args(self._with_negative_values(words))

    def _with_negative_values(self, words: list[str]) -> list[str]:
        """``--flag -5ms`` as ``--flag=-5ms``, lest the value be taken for a flag."""
        joined: list[str] = []
        for index, word in enumerate(words):
            if word == "--":
                return joined + words[index:]
            before = joined[-1] if joined else ""
            is_value = word[:1] == "-" and word[1:2].isdigit() and before[:2] == "--" and self._next_is_value(before)
            joined[-1:] = [f"{before}={word}"] if is_value else [*joined[-1:], word]
        return joined

    def read_command(self, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """The flags up to the first word that is none, and all the words from there on (less one `--`)."""
        self._describe_if_asked(words)
        end = self._end_of_flags(words)
        command = words[end:]
        return self.parse_args(self._with_negative_values(words[:end])), command[1:] if command[:1] == [
            "--"
        ] else command

    def _unknown(self, words: str) -> NoReturn:
        """A flag, or one word too many, that the verb does not take, and the flag that may be meant."""
        from difflib import get_close_matches

        first = words.split(" ", 1)[0].partition("=")[0]
        if not first.startswith("-"):
            what = f"{self._verb}: one word too many: {first!r}"
            raise UsageError(what, hint=f"what it takes:  peerload {self._verb} --help")
        near = get_close_matches(first, self._takes_value, n=1)
        also = f"did you mean {near[0]} ?        " if near else ""
        raise UsageError(
            f"{self._verb}: no such flag: {first}", hint=f"{also}all of them:  peerload {self._verb} --help"
        )

    def _describe_if_asked(self, words: list[str]) -> None:
        if words[:1] == [DESCRIBE]:
            helps = {name: action.help or "" for action in self._actions for name in action.option_strings}
            raise Described({name: (takes, helps.get(name, "")) for name, takes in self._takes_value.items()})

    def _end_of_flags(self, words: list[str]) -> int:
        index = 0
        while index < len(words):
            word = words[index]
            if word in ("--", "-") or not word.startswith("-"):
                return index
            index += 2 if self._next_is_value(word) else 1
        return len(words)

    def _next_is_value(self, word: str) -> bool:
        if word.startswith("--"):
            return "=" not in word and self._takes_value.get(word, False)
        for position, letter in enumerate(word[1:], start=1):
            if self._takes_value.get(f"-{letter}", False):
                return position == len(word) - 1
        return False

    def error(self, message: str) -> NoReturn:
        """Raise UsageError where argparse would print its usage and exit."""
        what, _, unknown = message.partition("unrecognized arguments: ")
        if unknown and not what:
            self._unknown(unknown)
        message = message.removeprefix("argument ").replace(
            "the following arguments are required: ", "what is missing: "
        )
        raise UsageError(f"{self._verb}: {message}", hint=f"what it takes:  peerload {self._verb} --help")


def size(text: str) -> int:
    """Bytes: ``8G`` and ``8GiB`` are 8 times 2^30 bytes, ``8GB`` is 8 times 10^9. A bare number is refused."""
    number, unit = _split_unit(text)
    if not unit and number is not None:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no unit: {text}G is {text} GiB, {text}M is {text} MiB; which is meant?"
        )
    if number is None or unit not in _SIZE_UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; such as 8G, 512M, 1.5GiB")
    amount = int(number * _SIZE_UNITS[unit])
    if not 0 < amount < 1 << 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 1 byte and 2^60")
    return amount


def duration(text: str) -> float:
    """Seconds: ``30s``, ``90m``, ``2h``, ``1d``, ``1h30m``, ``0:30:00``, ``1-12:00:00``. A bare number is refused."""
    if ":" in text:
        return _clock(text)
    number, unit = _split_unit(text)
    if not unit and number is not None:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no unit: {text}m is {text} minutes, {text}s is {text} seconds; which is meant?"
        )
    total, rest = 0.0, text.strip().upper()
    while rest or not text.strip():
        digits = len(rest) - len(rest.lstrip("0123456789."))
        unit = rest[digits : digits + 1]
        try:
            total += float(rest[:digits]) * _TIME_UNITS[unit]
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{text!r} is no time; such as 30s, 90m, 2h, 1h30m, 0:30:00") from None
        rest = rest[digits + 1 :]
    return _within(text, total)


def lease(text: str) -> float:
    """Seconds from 1 s to 24 h, or LEASE_AUTO for ``auto``."""
    if text == "auto":
        return LEASE_AUTO
    seconds = duration(text)
    if not LEASE_S_MIN <= seconds <= LEASE_S_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 1 second and 24 hours")
    return seconds


def _clock(text: str) -> float:
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or (dash and not days.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; such as 0:30:00 or 1-12:00:00")
    if len(parts) != _CLOCK_PARTS:
        raise argparse.ArgumentTypeError(
            f"{text!r} can be read in two ways: {text}:00 is hours and minutes, 0:{text} is minutes and seconds"
        )
    hours, minutes, seconds = (int(part) for part in parts)
    return _within(text, int(days or 0) * 86_400.0 + hours * 3600 + minutes * 60 + seconds)


def _within(text: str, total_s: float) -> float:
    if not 0 < total_s <= 1e9:  # noqa: PLR2004 -- the bound of TaskSpec.time_limit_s
        raise argparse.ArgumentTypeError(f"{text!r} cannot be: more than 0 s, and at most 10^9 s (31 years)")
    return total_s


def _split_unit(text: str) -> tuple[float | None, str]:
    """``("1.5", "GIB")`` as a number and the rest in capitals; None if it does not begin with a number."""
    word = text.strip().upper()
    digits = len(word) - len(word.lstrip("0123456789."))
    try:
        return float(word[:digits]), word[digits:].strip()
    except ValueError:
        return None, word


def whole(low: int, high: int) -> Any:  # noqa: ANN401 -- what argparse takes as a type
    """A type for whole numbers from ``low`` to ``high``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{number} is not between {low} and {high}")
        return number

    return read


def cpus(text: str) -> float:
    """Cores, perhaps a fraction."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of cpus") from None
    if not 0 < number <= 65_536:  # noqa: PLR2004 -- the bound of ResourceRequest.cpus
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 and at most 65536")
    return number


def is_node_name(text: str) -> bool:
    """Whether a node can be called this."""
    return 0 < len(text) <= NODE_NAME_LENGTH_MAX and NODE_NAME_CHARACTERS.issuperset(text)


def node_name(text: str) -> str:
    """The name of a node; none stands for this one."""
    if text and not is_node_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no node's name: {NODE_NAME_SAYS}")
    return text


def speed(text: str) -> float:
    """How fast a node works beside the reference machine."""
    try:
        factor = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; such as 1.5") from None
    if not 0 < factor <= SPEED_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 and at most {SPEED_MAX}")
    return factor


def signal_number(text: str) -> int:
    """A signal by name (``INT``, ``SIGINT``) or number."""
    import signal

    if text.isdecimal() and 1 <= int(text) <= 64:  # noqa: PLR2004 -- Linux has 64
        return int(text)
    name = text.upper().removeprefix("SIG")
    try:
        return int(signal.Signals[f"SIG{name}"])
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r} is no signal; such as TERM, INT, KILL, 9") from None
