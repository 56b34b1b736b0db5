"""Estimates of durations and of GPU memory, from the runs of commands that this node has seen end.

A command is known at three levels: the exact command line in its directory; the program (or the script of an
interpreter) with the names of its flags, in that directory; the program or script, anywhere. The expected duration is
the mean of the last runs at the most specific level with RUNS_KNOWN_MIN of them, else at the most specific with any.

Durations are kept in seconds of the reference machine (``Profile.speed`` 1.0): a run on a node of speed 2 counts twice
its duration. A task that waits for something other than the processor is therefore overestimated after runs on a fast
node; the mean over nodes compensates.

GPU memory is known at the same levels, for GPUs of one model and for any model. A need is the maximum of the last runs
if they are fewer than RUNS_MANY, else their p95, plus a margin.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import deque
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from peerload.model.bounded import BoundedDict
from peerload.model.resources import MIB
from peerload.model.task import TIME_LIMIT_EXIT_CODE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from peerload.core.work import Work
    from peerload.model.task import Exit, TaskSpec


NEARLY_ALL = 0.9
NEWEST_SHARE = 0.3
"""Weight of the newest run in the average of the logarithms of durations."""
OLDER_SHARE = 1.0 - NEWEST_SHARE
DEVIATION_MIN = 0.25
"""Lower bound on the standard deviation of the logarithms, however alike the last runs were."""
DEVIATIONS = 1.28
"""Nine of ten values of a normal distribution lie below the mean plus this number of standard deviations."""


class PastDurations:
    """The durations of the last runs of one command, at most ``kept_max``. Their sum and their sorted order are cached,
    because they are read more often than they change."""

    __slots__ = ("_ascending", "_durations", "_kept_max", "_mean_log", "_oldest", "_sum_s", "_variance_log")

    def __init__(self, kept_max: int) -> None:
        self._durations = array("d")
        self._ascending: tuple[float, tuple[float, ...]] | None = None
        self._kept_max = kept_max
        self._oldest = 0
        self._sum_s = 0.0
        self._mean_log = 0.0
        self._variance_log = 0.0

    def __len__(self) -> int:
        return len(self._durations)

    def add(self, duration_s: float, log_s: float) -> None:
        """Add a duration, > 0, with its logarithm; the oldest is dropped if there are too many."""
        durations, oldest = self._durations, self._oldest
        if durations:  # exponential moving averages
            off = log_s - self._mean_log
            step = NEWEST_SHARE * off
            self._mean_log += step
            self._variance_log = OLDER_SHARE * (self._variance_log + step * off)
        else:
            self._mean_log = log_s
        self._ascending = None
        if len(durations) < self._kept_max:
            durations.append(duration_s)
            self._sum_s += duration_s
            return
        self._sum_s += duration_s - durations[oldest]
        durations[oldest] = duration_s
        self._oldest = (oldest + 1) % self._kept_max
        if not self._oldest:  # once a round, so that rounding errors do not accumulate
            self._sum_s = math.fsum(durations)

    @property
    def mean_s(self) -> float:
        """Mean duration (s). At least one run is required."""
        return self._sum_s / len(self._durations)

    def nearly_all_s(self, speed: float) -> float:
        """The duration that nine of ten of the next runs will not exceed on a node of this speed: the larger of the
        90th percentile and of an estimate from the moving averages, which follows growing durations. Requires a run."""
        ascending = self.ascending(speed)
        seen_s = ascending[min(int(NEARLY_ALL * len(ascending)), len(ascending) - 1)]
        deviation = max(math.sqrt(self._variance_log), DEVIATION_MIN)
        return max(seen_s, math.exp(self._mean_log + DEVIATIONS * deviation) / speed)

    def ascending(self, speed: float) -> tuple[float, ...]:
        """Durations (s) scaled to a node of this speed, ascending."""
        if self._ascending is None or self._ascending[0] != speed:
            self._ascending = speed, tuple(sorted(seen_s / speed for seen_s in self._durations))
        return self._ascending[1]


Keys = tuple[bytes, ...]
"""Keys of a command, the most specific first; () = not computed yet."""

RUNS_KNOWN_MIN = 3
"""With fewer runs of the exact command line, more runs of similar commands are the better estimate."""
DURATION_S_AT_FIRST = 1.0
"""Expected duration of a task before any has ended."""
FLAGS_READ_MAX = 64
"""Words of a command line that are searched for flags and a script."""
KEY_BYTES = 16
_INTERPRETER = re.compile(
    rb"(python|pypy|bash|dash|sh|zsh|ksh|perl|ruby|node|julia|octave|Rscript|lua|php|java)[0-9.]*\Z"
)


class DurationEstimates:
    """Past durations by command, one object per node. It keeps at most ``commands_kept_max`` keys (those not seen
    for longest are forgotten) with the last ``durations_kept_max`` runs each. ``all``: the last runs of any
    command; ``gpu``: their GPU use."""

    def __init__(self, commands_kept_max: int, durations_kept_max: int) -> None:
        self._durations_kept_max = durations_kept_max
        self._commands: BoundedDict[bytes, PastDurations] = BoundedDict(commands_kept_max)
        self.all = PastDurations(durations_kept_max)
        self.gpu = GpuHistory(commands_kept_max, durations_kept_max)
        # All members of an array, and all tasks of many simulations, share one spec: the keys of the last one are
        # cached.
        self._keyed: tuple[TaskSpec | None, Keys] = (None, ())
        self._taught: tuple[Keys, tuple[PastDurations, ...]] = ((), ())
        self._asked: tuple[Keys, PastDurations | None] = ((), None)
        self._backlog: BacklogEstimate | None = None

    def __len__(self) -> int:
        return len(self._commands)

    def learn(self, spec: TaskSpec, exit_: Exit) -> None:
        """Learn from a run that has ended, except one that ended by a signal (a cancel, say) before its time limit,
        never started running, ran out of memory, or whose device failed."""
        duration_s = (exit_.ended_at - exit_.started_at) * exit_.speed
        is_cut = exit_.signal != 0 and exit_.exit_code != TIME_LIMIT_EXIT_CODE
        if is_cut or exit_.out_of or exit_.failed_device or exit_.started_at <= 0 or duration_s <= 0:
            return
        log_s = math.log(duration_s)
        self.all.add(duration_s, log_s)
        keys = self.keys(spec)
        if exit_.usage.gpu_memory_bytes_max:
            self.gpu.learn(keys, exit_, duration_s)
        if self._taught[0] is not keys:
            self._taught = keys, tuple(self._newest(key) for key in keys)
        for runs in self._taught[1]:
            runs.add(duration_s, log_s)
        if self._backlog is not None:
            self._backlog.learned(keys)

    def backlog(self) -> BacklogEstimate:
        """The one estimate of the waiting work of this node; it follows every run that is learned."""
        if self._backlog is None:
            self._backlog = BacklogEstimate(self)
        return self._backlog

    def past(self, keys: Keys) -> PastDurations | None:
        """The runs that are the best estimate for this command; None if no similar command was seen."""
        if not self._commands:
            return None
        if self._asked[0] is keys:
            return self._asked[1]
        some = None
        for level, key in enumerate(keys):
            runs = self._commands.get(key)
            if runs is not None and len(runs) >= RUNS_KNOWN_MIN:
                if level == 0:  # later runs do not change that
                    self._asked = keys, runs
                return runs
            some = some or runs
        return some

    def _newest(self, key: bytes) -> PastDurations:
        """The runs of a command, which becomes the last to be forgotten; clears the cache."""
        self._asked = (), None
        runs = self._commands[key] = self._commands.get(key) or PastDurations(self._durations_kept_max)
        return runs

    def expected_s(self, keys: Keys) -> float:
        """Expected duration of this command on the reference machine, 0 = not known."""
        runs = self.past(keys)
        return runs.mean_s if runs is not None else 0.0

    def expected_of(self, work: Work) -> float:
        """Expected duration of work on the reference machine, 0 = not known: as its user says, else by command."""
        return work.spec.est_s or self.expected_s(self.keys_of(work))

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
        """Keys of the command of work; cached in the work."""
        if not work.keys:
            work.keys = self.keys(work.spec)
        return work.keys


def command_keys(argv: Sequence[bytes], directory: bytes) -> Keys:
    """The keys of a command, the most specific first; equal on every node and after every restart."""
    program = argv[0].rpartition(b"/")[2]
    words = argv[1 : FLAGS_READ_MAX + 1]
    script = b""
    if _INTERPRETER.match(program):
        script = next((word for word in words if not word.startswith(b"-")), b"")
    flags = sorted({word.partition(b"=")[0] for word in words if _is_flag(word)})
    shape = (directory, program, script, *flags)
    return _key(b"line", (directory, *argv)), _key(b"shape", shape), _key(b"program", (program, script))


def _is_flag(word: bytes) -> bool:
    """True for an option such as ``-x``; ``-5`` is a number."""
    return word.startswith(b"-") and not word[1:2].isdigit()


def _key(level: bytes, words: Sequence[bytes]) -> bytes:
    """Key of a command line. Its words are joined by NUL bytes, which no word contains."""
    return blake2b(b"\0".join((level, *words)), digest_size=KEY_BYTES).digest()


class BacklogEstimate:
    """Expected duration of all waiting work together, on the reference machine.

    It is kept by command line and by the users' estimates, so that a change costs the same for any number of tasks. A
    command's estimate is refreshed when one of its tasks joins or has ended; an unknown one counts as the mean.
    """

    def __init__(self, history: DurationEstimates) -> None:
        self._history = history
        self._commands: dict[tuple[bytes, float], _Waiting] = {}
        self._known_s = 0.0
        self._unknown = 0

    def add(self, work: Work) -> None:
        key = self._key(work)
        command = self._commands.get(key)
        if command is None:
            command = self._commands[key] = _Waiting()
        self._take_out(command)
        command.count += work.count
        command.expected_s = self._history.expected_of(work)
        self._put_in(command)

    def _key(self, work: Work) -> tuple[bytes, float]:
        return self._history.keys_of(work)[0], work.spec.est_s

    def remove(self, work: Work, number: int = 1) -> None:
        """Remove ``number`` tasks that no longer wait."""
        key = self._key(work)
        command = self._commands[key]
        self._take_out(command)
        command.count -= number
        if command.count:
            self._put_in(command)
        else:
            del self._commands[key]
            if not self._commands:
                self._known_s = 0.0  # a sum of floats would leave a remainder

    @property
    def expected_s(self) -> float:
        """Seconds on the reference machine."""
        return max(self._known_s, 0.0) + self._unknown * self._history.mean_s

    def learned(self, keys: Keys) -> None:
        """A run of this command was learned."""
        command = self._commands.get((keys[0], 0.0))
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


class _Waiting(msgspec.Struct):
    """Waiting tasks of one command line and one user's estimate, and their expected duration (0 = not known)."""

    count: int = 0
    expected_s: float = 0.0


MARGIN, MARGIN_BYTES = 1.10, 256 * MIB
"""A need is the observed memory times the first plus the second."""
RUNS_MANY = 10
NEARLY_ALL_BYTES = 0.95
"""With at least RUNS_MANY runs an estimated need is this quantile; with fewer, their maximum."""
TYPICAL = 0.9
"""An unknown task is assumed to need the memory that this share of all runs stayed below."""
ANY_MODEL = ""
NOTHING_LEARNED: Mapping[str, int] = MappingProxyType({})


class GpuRuns:
    """The last runs of one command on GPUs of one model, at most ``kept_max``."""

    __slots__ = ("_bytes", "_runs", "durations", "need_bytes")

    def __init__(self, kept_max: int) -> None:
        self._runs: deque[int] = deque(maxlen=kept_max)
        self.durations = PastDurations(kept_max)
        self._bytes: list[int] = []
        self.need_bytes = 0
        """The memory of each GPU that nearly every next run will not exceed; 0 before the first run."""

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, gpu_bytes: int, run_s: float) -> None:
        """Add a run; the oldest is dropped if there are too many. run_s: on the reference machine."""
        self._runs.append(gpu_bytes)
        self.durations.add(run_s, math.log(run_s))
        self._bytes = sorted(self._runs)
        seen = self._bytes[-1] if len(self._bytes) < RUNS_MANY else _share(self._bytes, NEARLY_ALL_BYTES)
        self.need_bytes = int(seen * MARGIN) + MARGIN_BYTES

    @property
    def typical_bytes(self) -> int:
        """The memory that TYPICAL of the runs stayed below, with the margin. Requires a run."""
        return int(_share(self._bytes, TYPICAL) * MARGIN) + MARGIN_BYTES


class GpuHistory:
    """Past GPU use by command and model, one object per node. It keeps at most ``commands_kept_max`` pairs (those
    not seen for longest are forgotten), with the last ``runs_kept_max`` runs each."""

    def __init__(self, commands_kept_max: int, runs_kept_max: int) -> None:
        self._commands_kept_max = commands_kept_max
        self._runs_kept_max = runs_kept_max
        self._commands: BoundedDict[tuple[bytes, str], GpuRuns] = BoundedDict(commands_kept_max)
        self._all: dict[str, GpuRuns] = {}

    def __len__(self) -> int:
        return len(self._commands)

    def learn(self, keys: Sequence[bytes], exit_: Exit, run_s: float) -> None:
        """Learn from an ended run, if it was complete (or reached its time limit) and its memory use was seen."""
        usage = exit_.usage
        is_whole = exit_.exit_code in (0, TIME_LIMIT_EXIT_CODE)
        if not usage.gpu_memory_bytes_max or not usage.gpu_model or not is_whole:
            return
        seen = usage.gpu_memory_bytes_max, run_s
        for model in (usage.gpu_model, ANY_MODEL):
            for key in keys:
                self._of(key, model).add(*seen)
        for model in (usage.gpu_model, ANY_MODEL):
            if model not in self._all and len(self._all) >= self._commands_kept_max:
                continue
            self._all.setdefault(model, GpuRuns(self._runs_kept_max)).add(*seen)

    def past(self, keys: Sequence[bytes], model: str, runs_min: int) -> GpuRuns | None:
        """The runs that are the best estimate for this command on GPUs of this model: at the most specific level that
        has ``runs_min`` of them, on this model or else on any; else at the most specific level that has any."""
        if not self._commands:
            return None
        places = [(key, one) for key in keys for one in (model, ANY_MODEL)]
        found = [runs for place in places if (runs := self._commands.get(place)) is not None]
        return next((runs for runs in found if len(runs) >= runs_min), found[0] if found else None)

    def on(self, keys: Sequence[bytes], model: str, runs_min: int) -> GpuRuns | None:
        """The runs at the most specific level that has ``runs_min`` of them on GPUs of exactly this model."""
        found = (self._commands.get((key, model)) for key in keys)
        return next((runs for runs in found if runs is not None and len(runs) >= runs_min), None)

    def needs(self, keys: Sequence[bytes], models: Iterable[str], runs_min: int) -> dict[str, int]:
        """The memory that the command needs of a GPU of each of these models, where it is known."""
        found = ((model, self.past(keys, model, runs_min)) for model in models)
        return {model: runs.need_bytes for model, runs in found if runs is not None}

    def typical(self, models: Iterable[str], runs_min: int) -> dict[str, int]:
        """The memory that an unknown task is assumed to need, for models with at least ``runs_min`` known runs."""
        needs = {}
        for model in models:
            some = (self._all.get(one) for one in (model, ANY_MODEL))
            runs = next((runs for runs in some if runs is not None and len(runs) >= runs_min), None)
            if runs is not None:
                needs[model] = runs.typical_bytes
        return needs

    def _of(self, key: bytes, model: str) -> GpuRuns:
        runs = self._commands[key, model] = self._commands.get((key, model)) or GpuRuns(self._runs_kept_max)
        return runs


def _share(ascending: Sequence[int], share: float) -> int:
    return ascending[min(int(share * len(ascending)), len(ascending) - 1)]
