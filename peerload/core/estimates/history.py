"""Duration estimates: how long commands took wherever this node saw them end, and what is expected of the next.

A command is known at three levels: the very command line in its directory; the program (or the script of an
interpreter) with the names of its flags, there; the program or script, anywhere. What is expected of a task is the mean
of the last runs at the most specific level that has RUNS_KNOWN_MIN of them, else at the most specific that has any.

Durations are kept in seconds of the reference machine (``Profile.speed`` 1.0): a run on a node of speed 2 counts for
twice what it took. Whatever waits for something other than the processor is so taken for longer on a fast node than it
is; the mean over nodes evens that out.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

from peerload.core.estimates.duration_estimate import PastDurations
from peerload.core.estimates.gpu_history import GpuHistory
from peerload.model.task import TIME_LIMIT_EXIT_CODE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peerload.core.work import Work
    from peerload.model.task import Exit, TaskSpec

Keys = tuple[bytes, ...]
"""Keys of a command, the most specific first; () = not worked out yet."""

RUNS_KNOWN_MIN = 3
"""Fewer runs than this of a very command line say less than more runs of commands like it."""
DURATION_S_AT_FIRST = 1.0
"""Expected duration of a task before any has ended."""
FLAGS_READ_MAX = 64
"""Words of a command line that are looked at for flags and a script."""
KEY_BYTES = 16
_INTERPRETER = re.compile(
    rb"(python|pypy|bash|dash|sh|zsh|ksh|perl|ruby|node|julia|octave|Rscript|lua|php|java)[0-9.]*\Z"
)


class DurationEstimates:
    """One per node. At most ``commands_kept_max`` keys (those not seen for longest are forgotten) with the last
    ``durations_kept_max`` runs each; ``all``: the last runs of any; ``gpu``: what those took of GPUs. ``learned(keys)`` is called when a run was added."""

    def __init__(self, commands_kept_max: int, durations_kept_max: int) -> None:
        self._commands_kept_max = commands_kept_max
        self._durations_kept_max = durations_kept_max
        self._commands: OrderedDict[bytes, PastDurations] = OrderedDict()
        self.all = PastDurations(durations_kept_max)
        self.gpu = GpuHistory(commands_kept_max, durations_kept_max)
        # All members of an array, and all tasks of many a simulation, share one spec: what was found for it is at hand.
        self._keyed: tuple[TaskSpec | None, Keys] = (None, ())
        self._taught: tuple[Keys, tuple[PastDurations, ...]] = ((), ())
        self._asked: tuple[Keys, PastDurations | None] = ((), None)
        self.learned: Callable[[Keys], None] | None = None

    def __len__(self) -> int:
        return len(self._commands)

    def learn(self, spec: TaskSpec, exit_: Exit) -> None:
        """A run has ended. One that a signal ended (a cancel, say) teaches nothing, unless it was at its time limit; nor
        does one that never got as far as running, that ran out of memory, or whose device failed."""
        duration_s = (exit_.ended_at - exit_.started_at) * exit_.speed
        is_cut = exit_.signal != 0 and exit_.exit_code != TIME_LIMIT_EXIT_CODE
        if is_cut or exit_.out_of or exit_.failed_device or exit_.started_at <= 0 or duration_s <= 0:
            return
        self.all.add(duration_s)
        keys = self.keys(spec)
        self.gpu.learn(keys, exit_, duration_s)
        if self._taught[0] is not keys:
            self._taught = keys, tuple(self._newest(key) for key in keys)
        for runs in self._taught[1]:
            runs.add(duration_s)
        if self.learned is not None:
            self.learned(keys)

    def past(self, keys: Keys) -> PastDurations | None:
        """The runs that tell most of this command; None if nothing like it was seen."""
        if not self._commands:
            return None
        if self._asked[0] is keys:
            return self._asked[1]
        some = None
        for level, key in enumerate(keys):
            runs = self._commands.get(key)
            if runs is not None and len(runs) >= RUNS_KNOWN_MIN:
                if level == 0:  # no run to come will change that
                    self._asked = keys, runs
                return runs
            some = some or runs
        return some

    def _newest(self, key: bytes) -> PastDurations:
        """The runs of a command, which is the last to be forgotten now; whatever was at hand may be forgotten."""
        self._asked = (), None
        runs = self._commands.get(key)
        if runs is not None:
            self._commands.move_to_end(key)
            return runs
        runs = self._commands[key] = PastDurations(self._durations_kept_max)
        if len(self._commands) > self._commands_kept_max:
            self._commands.popitem(last=False)
        return runs

    def expected_s(self, keys: Keys) -> float:
        """Expected duration of this command on the reference machine, 0 = not known."""
        runs = self.past(keys)
        return runs.mean_s if runs is not None else 0.0

    @property
    def mean_s(self) -> float:
        """The mean of the last ``durations_kept_max`` runs of all commands, DURATION_S_AT_FIRST before the first."""
        return self.all.mean_s if len(self.all) else DURATION_S_AT_FIRST

    def keys(self, spec: TaskSpec) -> Keys:
        """Keys of the command of a spec, the most specific first."""
        if self._keyed[0] is not spec:
            self._keyed = spec, command_keys(spec.argv, spec.directory)
        return self._keyed[1]

    def keys_of(self, work: Work) -> Keys:
        """Keys of the command of work, which keeps them."""
        if not work.keys:
            work.keys = self.keys(work.spec)
        return work.keys


def command_keys(argv: Sequence[bytes], directory: bytes) -> Keys:
    """The keys of a command, the most specific first; equal on every node, and after every start."""
    program = argv[0].rpartition(b"/")[2]
    words = argv[1 : FLAGS_READ_MAX + 1]
    script = b""
    if _INTERPRETER.match(program):
        script = next((word for word in words if not word.startswith(b"-")), b"")
    flags = sorted({word.partition(b"=")[0] for word in words if _is_flag(word)})
    shape = (directory, program, script, *flags)
    return _key(b"line", (directory, *argv)), _key(b"shape", shape), _key(b"program", (program, script))


def _is_flag(word: bytes) -> bool:
    """``-5`` is a number."""
    return word.startswith(b"-") and not word[1:2].isdigit()


def _key(level: bytes, words: Sequence[bytes]) -> bytes:
    """No word of a command line holds a NUL byte."""
    return blake2b(b"\0".join((level, *words)), digest_size=KEY_BYTES).digest()


class BacklogEstimate:
    """Expected duration of all waiting work together, on the reference machine.

    It is kept by command line, so that every change costs the same however much waits. What is expected of a command is
    looked up again whenever one of it joins and whenever one of it has ended; one not known counts as the mean of all.
    """

    __slots__ = ("_commands", "_history", "_known_s", "_unknown")

    def __init__(self, history: DurationEstimates) -> None:
        self._history = history
        self._commands: dict[bytes, _Waiting] = {}
        self._known_s = 0.0
        self._unknown = 0
        history.learned = self._learned

    def add(self, work: Work) -> None:
        """Work waits here."""
        keys = self._history.keys_of(work)
        command = self._commands.get(keys[0])
        if command is None:
            command = self._commands[keys[0]] = _Waiting()
        self._take_out(command)
        command.count += work.count
        command.expected_s = self._history.expected_s(keys)
        self._put_in(command)

    def remove(self, work: Work, number: int = 1) -> None:
        """Remove so many tasks that wait no longer."""
        key = self._history.keys_of(work)[0]
        command = self._commands[key]
        self._take_out(command)
        command.count -= number
        if command.count:
            self._put_in(command)
        else:
            del self._commands[key]
            if not self._commands:
                self._known_s = 0.0  # of sums of floats something would be left

    @property
    def expected_s(self) -> float:
        """Seconds on the reference machine."""
        return max(self._known_s, 0.0) + self._unknown * self._history.mean_s

    def _learned(self, keys: Keys) -> None:
        command = self._commands.get(keys[0])
        if command is not None:
            self._take_out(command)
            command.expected_s = self._history.expected_s(keys)
            self._put_in(command)

    def _take_out(self, command: _Waiting) -> None:
        self._known_s -= command.count * command.expected_s
        if not command.expected_s:
            self._unknown -= command.count

    def _put_in(self, command: _Waiting) -> None:
        self._known_s += command.count * command.expected_s
        if not command.expected_s:
            self._unknown += command.count


class _Waiting:
    """Waiting tasks of one command line, and their expected duration (0 = not known)."""

    __slots__ = ("count", "expected_s")

    def __init__(self) -> None:
        self.count = 0
        self.expected_s = 0.0
