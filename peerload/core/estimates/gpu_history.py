"""GPU memory estimates: how much memory of a GPU commands took, and for how long, by the model of the GPU.

Kept of each run are the most memory of any one GPU, the largest resident set, and how long it ran. A need is what nearly all
of the last runs stayed below, and a margin: of fewer than RUNS_MANY the most, else nearly all (p95). It is known at the
levels of `history.py`, at each of GPUs of one model, and of any.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from types import MappingProxyType
from typing import TYPE_CHECKING

from peerload.core.estimates.duration_estimate import PastDurations
from peerload.model.resources import MIB
from peerload.model.task import TIME_LIMIT_EXIT_CODE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from peerload.model.task import Exit

MARGIN, MARGIN_BYTES = 1.10, 256 * MIB
"""A need is what was seen, times this, and so much."""
RUNS_MANY = 10
NEARLY_ALL_BYTES = 0.95
"""Of so many runs or more, a need is what this share of them stayed below."""
TYPICAL = 0.9
"""A task of which nothing is known is taken to need what this share of all runs stayed below."""
ANY_MODEL = ""
NOTHING_LEARNED: Mapping[str, int] = MappingProxyType({})
_Run = tuple[int, int]


class GpuRuns:
    """The last runs of one command on GPUs of one model, at most ``kept_max``."""

    __slots__ = ("_bytes", "_need", "_runs", "durations")

    def __init__(self, kept_max: int) -> None:
        self._runs: deque[_Run] = deque(maxlen=kept_max)
        self.durations = PastDurations(kept_max)
        self._bytes: list[int] = []
        self._need = 0

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, gpu_bytes: int, resident_bytes: int, run_s: float) -> None:
        """One more; the oldest goes if there are too many. run_s: on the reference machine."""
        self._runs.append((gpu_bytes, resident_bytes))
        self.durations.add(run_s)
        self._bytes = sorted(run[0] for run in self._runs)
        seen = self._bytes[-1] if len(self._bytes) < RUNS_MANY else _share(self._bytes, NEARLY_ALL_BYTES)
        self._need = int(seen * MARGIN) + MARGIN_BYTES

    @property
    def need_bytes(self) -> int:
        """The memory of each GPU that the next run needs, for nearly sure. There must be a run."""
        return self._need

    @property
    def typical_bytes(self) -> int:
        """The memory that TYPICAL of the runs stayed below, with the margin. There must be a run."""
        return int(_share(self._bytes, TYPICAL) * MARGIN) + MARGIN_BYTES

    @property
    def resident_bytes(self) -> int:
        """The largest resident set of any."""
        return max(run[1] for run in self._runs)


class GpuHistory:
    """One per node. At most ``commands_kept_max`` pairs of command and model (those not seen for longest are forgotten),
    with the last ``runs_kept_max`` runs each."""

    def __init__(self, commands_kept_max: int, runs_kept_max: int) -> None:
        self._commands_kept_max = commands_kept_max
        self._runs_kept_max = runs_kept_max
        self._commands: OrderedDict[tuple[bytes, str], GpuRuns] = OrderedDict()
        self._all: dict[str, GpuRuns] = {}

    def __len__(self) -> int:
        return len(self._commands)

    def learn(self, keys: Sequence[bytes], exit_: Exit, run_s: float) -> None:
        """A run has ended. Only one that has done its work (or ran until its time limit) tells what that takes; nor does one
        of which no memory was seen."""
        usage = exit_.usage
        is_whole = exit_.exit_code in (0, TIME_LIMIT_EXIT_CODE)
        if not usage.gpu_memory_bytes_max or not usage.gpu_model or not is_whole:
            return
        seen = usage.gpu_memory_bytes_max, usage.memory_bytes_max, run_s
        for model in (usage.gpu_model, ANY_MODEL):
            for key in keys:
                self._of(key, model).add(*seen)
        for model in (usage.gpu_model, ANY_MODEL):
            if model not in self._all and len(self._all) >= self._commands_kept_max:
                continue
            self._all.setdefault(model, GpuRuns(self._runs_kept_max)).add(*seen)

    def past(self, keys: Sequence[bytes], model: str, runs_min: int) -> GpuRuns | None:
        """The runs that tell most of this command on GPUs of this model: at the most specific level that has ``runs_min``
        of them, there or else on any model; else at the most specific that has any at all."""
        if not self._commands:
            return None
        places = [(key, one) for key in keys for one in (model, ANY_MODEL)]
        found = [runs for place in places if (runs := self._commands.get(place)) is not None]
        return next((runs for runs in found if len(runs) >= runs_min), found[0] if found else None)

    def on(self, keys: Sequence[bytes], model: str, runs_min: int) -> GpuRuns | None:
        """The runs at the most specific level that has ``runs_min`` of them on GPUs of this very model."""
        found = (self._commands.get((key, model)) for key in keys)
        return next((runs for runs in found if runs is not None and len(runs) >= runs_min), None)

    def needs(self, keys: Sequence[bytes], models: Iterable[str], runs_min: int) -> dict[str, int]:
        """The memory of a GPU of each of these models that the command needs, where that is known."""
        return self._by_model(models, lambda model: self.past(keys, model, runs_min), lambda runs: runs.need_bytes)

    def typical(self, models: Iterable[str], runs_min: int) -> dict[str, int]:
        """The memory that any task is taken to need, where at least ``runs_min`` runs are known."""

        def known(model: str) -> GpuRuns | None:
            some = (self._all.get(one) for one in (model, ANY_MODEL))
            return next((runs for runs in some if runs is not None and len(runs) >= runs_min), None)

        return self._by_model(models, known, lambda runs: runs.typical_bytes)

    @staticmethod
    def _by_model(
        models: Iterable[str], known: Callable[[str], GpuRuns | None], said: Callable[[GpuRuns], int]
    ) -> dict[str, int]:
        found = ((model, known(model)) for model in models)
        return {model: said(runs) for model, runs in found if runs is not None}

    def _of(self, key: bytes, model: str) -> GpuRuns:
        place = key, model
        runs = self._commands.get(place)
        if runs is None:
            runs = self._commands[place] = GpuRuns(self._runs_kept_max)
            if len(self._commands) > self._commands_kept_max:
                self._commands.popitem(last=False)
        self._commands.move_to_end(place)
        return runs


def _share(ascending: Sequence[int], share: float) -> int:
    return ascending[min(int(share * len(ascending)), len(ascending) - 1)]
