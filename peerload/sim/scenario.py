"""Scenario of a simulation as plain values, and its translation into a `Setup`."""

from __future__ import annotations

import itertools
import math
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from peerload.model.config import CoreConfig
from peerload.model.errors import ConfigError
from peerload.policy.registry import load_preset
from peerload.sim.queueing_model import IDEAL_CONFIG, Arrival, Delays
from peerload.sim.recorded import SPAN_S_MAX, TaskTrace
from peerload.sim.replication import WARM_UP_S, Replication, Setup, measure, warm_up_of
from peerload.sim.service import Draw, Modulation, ServiceTimes, TaskClass, draw_of
from peerload.sim.utilization import UtilizationMonitor, check_modelled, readings_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from peerload.policy.preset import PolicySet
    from peerload.sim.replication import Sample

SEEDS_APART = 100_000
"""Replication k of seed s uses the random seed s times this plus k, so that no two seeds share a replication."""
TASKS_LEAST, TASKS_USUAL, TASKS_MOST = 2_000, 20_000, 500_000
TASKS_AT_REST, TASKS_AT_REST_COMPARED = 2_000, 1_000
"""Default length of a replication in tasks: this over (1 - load) (the second number for several scenarios),
within the first two limits above; at least twice the warm-up. If that turns out to be too short, the
scenario is repeated, up to the third limit (`outcome.longer`)."""

LOAD_MAX, DELAY_S_MAX = 10.0, 1e6
LIVE = CoreConfig()
TIMINGS_REFERENCE = ("settle_s",)
TIMINGS_LIVE = ("settle_s", "tell_s_min", "retry_s_min", "retry_s_max", "answer_backoff_s", "answer_wait_s")
"""Settings of an agent that also apply in the simulator, for each of its models; all others are those of
IDEAL_CONFIG."""
ANSWERS_LATE = 1.01
"""A search by broadcast waits for this factor times the travel time of the last answer."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a simulation. Times are in simulated seconds; without a trace the mean service time is one second.

    policy: a preset by name or file; changes: its parameters with other values; varied: further differences between compared
    scenarios, for their labels; slots, gpus: of each node; load: offered work per slot of speed 1 and second, None = as
    recorded; hot: number of nodes with arrivals (0: all); trace: recorded arrivals; service: distribution of service times, None =
    as recorded; durations: the service times of a Poisson stream are drawn from these; modulation: of its rate; classes: its mix
    of tasks; speeds: one for each node; head_s, head_down: time of a head node for a message, start and duration of its
    failure; is_live: with the timings of an agent and its whole preset, instead of the reference model's; tasks: length of a
    replication, including the warm-up.
    """

    policy: str
    changes: tuple[tuple[str, str | float | bool], ...] = ()
    varied: tuple[tuple[str, str | float | bool], ...] = ()
    nodes: int
    slots: int = 1
    gpus: int = 0
    load: float | None = None
    hot: int = 0
    trace: TaskTrace | None = None
    service: ServiceTimes | None = None
    durations: tuple[float, ...] = ()
    modulation: Modulation | None = None
    classes: tuple[TaskClass, ...] = ()
    speeds: tuple[float, ...] = ()
    transfer_s: float = 0.0
    message_s: float = 0.0
    head_s: float = 0.0
    head_down: tuple[float, ...] = ()
    is_live: bool = False
    tasks: int
    warm_up: int

    @property
    def label(self) -> str:
        """Name of the preset, with the changes."""
        changed = ",".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.changes + self.varied
        )
        return f"{self.policy}[{changed}]" if changed else self.policy

    @property
    def capacity(self) -> float:
        """Number of slots, each times its node's speed."""
        return self.slots * (sum(self.speeds) if self.speeds else float(self.nodes))

    @property
    def is_in_seconds(self) -> bool:
        """True if times are real seconds; otherwise the unit is the mean service time."""
        return self.trace is not None or bool(self.durations)

    @property
    def mean_service_s(self) -> float:
        if self.durations:
            return fmean(self.durations)
        if self.classes:
            return sum(one.share * one.mean for one in self.classes) / sum(one.share for one in self.classes)
        return fmean(self.trace.durations) if self.trace is not None else 1.0

    @property
    def _mean_slot_s(self) -> float:
        """Mean slot time of a task: a task of several cpus occupies as many slots."""
        if self.trace is not None:
            return self._work_of_trace() / len(self.trace)
        if not self.classes:
            return self.mean_service_s
        work = sum(one.share * one.mean * max(math.ceil(one.cpus), 1) for one in self.classes)
        return work / sum(one.share for one in self.classes)

    @property
    def offered_load(self) -> float:
        """The requested or recorded load (infinite if all tasks arrive at one instant)."""
        if self.load is not None or self.trace is None:
            return self.load or 0.0
        if not self.trace.span_s:
            return math.inf
        return self._work_of_trace() / (self.trace.span_s * self.capacity)

    def _work_of_trace(self) -> float:
        return sum(self._slot_times())

    @property
    def _stretch(self) -> float:
        """Factor on the gaps of the trace that results in the load."""
        if self.load is None or self.trace is None or not self.trace.span_s:
            return 1.0
        return self._work_of_trace() / (self.trace.span_s * self.capacity) / self.load

    def _slot_times(self) -> Iterator[float]:
        """Slot time of each task of the trace; if service times are drawn, its mean."""
        assert self.trace is not None
        is_drawn = self.service is not None or bool(self.durations)
        durations = itertools.repeat(self.mean_service_s) if is_drawn else self.trace.durations
        return (max(math.ceil(cpus), 1) * duration for cpus, duration in zip(self.trace.cpus, durations, strict=False))

    def _policies(self) -> PolicySet:
        return load_preset(self.policy, is_reference=not self.is_live, changes=self.changes)

    @property
    def is_central(self) -> bool:
        """True if tasks are submitted at a head node."""
        return self._policies().is_central

    def unused_readings(self) -> set[str]:
        """The GPU readings that the load policy uses, if no node has a GPU."""
        return set() if self.gpus else readings_of(self._policies(), 1) & {"gpus_busy"}

    def setup(self) -> Setup:
        """Setup of a replication. Raises ConfigError if the preset cannot be used."""
        return Setup(
            self._policies(),
            [self.slots] * self.nodes,
            self._rates(),
            self._draw(),
            Delays(self.message_s, self.transfer_s, self.head_s, *self.head_down),
            speeds=self.speeds,
            gpus=self.gpus,
            config=self._config(),
            recorded=self._recorded() if self.trace is not None else None,
            mean_slot_s=self._mean_slot_s,
            modulation=self.modulation,
            classes=self.classes,
        )

    def _config(self) -> CoreConfig:
        """Core configuration: a search by broadcast waits just long enough for all answers, since none is ever
        late."""
        names = TIMINGS_LIVE if self.is_live else TIMINGS_REFERENCE
        config = msgspec.structs.replace(IDEAL_CONFIG, **{name: getattr(LIVE, name) for name in names})
        on_the_way_s = 2 * self.message_s + config.answer_backoff_s
        return msgspec.structs.replace(config, answer_wait_s=max(config.answer_wait_s, ANSWERS_LATE * on_the_way_s))

    def _rates(self) -> list[float]:
        """Arrival rate of each node; for a trace, its work over the span, in tasks of mean slot time."""
        if self.trace is not None and not (self.trace.span_s and self._mean_slot_s):
            return [0.0] * self.nodes
        rate = self.offered_load * self.capacity / self._mean_slot_s
        if self.trace is None:
            hot = self.hot or self.nodes
            return [rate / hot] * hot + [0.0] * (self.nodes - hot)
        works, anywhere = [0.0] * self.nodes, 0.0
        for home, work in zip(self.trace.homes, self._slot_times(), strict=True):
            if home >= 0:
                works[home % self.nodes] += work
            else:
                anywhere += work
        total = sum(works) + anywhere
        return [rate * (work + anywhere / self.nodes) / total for work in works]

    def _draw(self) -> Draw:
        durations = self.durations
        if durations:
            return lambda rng: durations[int(rng.random() * len(durations))]
        service, mean_s = self.service or ServiceTimes(), self.mean_service_s
        draw = draw_of(service.name, service.parameters)
        return draw if mean_s == 1.0 else lambda rng: mean_s * draw(rng)

    def _recorded(self) -> Callable[[random.Random], Iterator[Arrival]]:
        trace = self.trace
        assert trace is not None
        drawn = self._draw() if self.service is not None or self.durations else None
        stretch = self._stretch

        def arrivals(rng: random.Random) -> Iterator[Arrival]:
            for number, at_s in enumerate(trace.arrivals):
                home = trace.homes[number]
                home = home % self.nodes if home >= 0 else rng.randrange(self.nodes)
                service_s = trace.durations[number] if drawn is None else drawn(rng)
                yield Arrival(at_s * stretch, f"n{home + 1}", service_s, trace.cpus[number], trace.gpus[number])

        return arrivals

    def check(self) -> None:
        """Validate the scenario. Raises ConfigError if a value is out of range, some task cannot run on any node, the load cannot
        be reached, or the preset cannot be used."""
        self._check_ranges()
        if self.load is not None and not self.mean_service_s:
            raise ConfigError("trace", "all durations are 0", why=f"such tasks cannot produce a load of {self.load:g}")
        if self.load is not None and self.trace is not None and not self.trace.span_s:
            raise ConfigError(
                "trace",
                f"{self.trace.source} has no pauses: all tasks arrive at once",
                why=f"scaling their arrival times cannot produce a load of {self.load:g}",
            )
        if self.trace is not None and (span_s := self.trace.arrivals[-1] * self._stretch) > SPAN_S_MAX:
            why = f"at most {SPAN_S_MAX:g} s from first to last arrival"
            raise ConfigError("load", f"{self.load:g} stretches {self.trace.source} to {span_s:g} s", why=why)
        widest = [("cpus", self.slots, one.cpus) for one in self.classes]
        for column, had, most in [*widest, *(("gpus", self.gpus, one.gpus) for one in self.classes)]:
            if most > had:
                raise ConfigError("class", f"a task of {most:g} {column}, and no node has more than {had}")
        if self.trace is not None:
            for column, had, flag in (("cpus", self.slots, "slots"), ("gpus", self.gpus, "gpus")):
                most = max(getattr(self.trace, column))
                if most > had:
                    raise ConfigError(
                        "trace",
                        f"{self.trace.source} has a task of {most:g} {column}, and no node has more than {had}",
                        hint=f"give the nodes as many:  --{flag} {math.ceil(most)}",
                    )
        check_modelled(self._policies(), self.gpus, ("cpus_busy",))

    def _check_ranges(self) -> None:
        for key, least, most in (
            ("nodes", 1, math.inf),
            ("slots", 1, math.inf),
            ("gpus", 0, math.inf),
            ("tasks", 1, math.inf),
            ("warm_up", 0, self.tasks - 1),
            ("hot", 0, self.nodes),
            ("transfer_s", 0, DELAY_S_MAX),
            ("message_s", 0, DELAY_S_MAX),
            ("head_s", 0, DELAY_S_MAX),
        ):
            value = getattr(self, key)
            if not least <= value <= most:
                upto = f" to {most:g}" if math.isfinite(most) else " or more"
                raise ConfigError(key, f"{value!r} is out of range", why=f"allowed: {least}{upto}")
        if self.load is not None:
            _check_load(self.load)
        if self.head_down and not (len(self.head_down) == 2 and all(0 <= one <= DELAY_S_MAX for one in self.head_down)):  # noqa: PLR2004 -- at, for
            raise ConfigError(
                "head_down", f"{self.head_down!r} is no outage", why=f"allowed: two times, 0 to {DELAY_S_MAX:g}"
            )
        if self.speeds and (len(self.speeds) != self.nodes or not all(0 < one < math.inf for one in self.speeds)):
            raise ConfigError(
                "speeds", f"{len(self.speeds)} for {self.nodes} nodes", why="allowed: a factor above 0 for each"
            )


def _check_load(load: float) -> None:
    if not 0 < load <= LOAD_MAX:
        raise ConfigError("load", f"{load!r} is out of range", why=f"allowed: more than 0, at most {LOAD_MAX:g}")


def tasks_for(nodes: int, slots: int, load: float, *, several: bool = False) -> tuple[int, int]:
    """Default length of a replication → number of tasks, and of warm-up tasks among them. Raises ConfigError for an invalid load."""
    _check_load(load)
    rate = nodes * slots * load
    usual = (TASKS_AT_REST_COMPARED if several else TASKS_AT_REST) / max(1 - load, 1e-9)
    tasks = int(max(min(max(usual, TASKS_LEAST), TASKS_USUAL), 2 * WARM_UP_S * rate))
    return tasks, warm_up_of(tasks, rate)


def play(
    scenario: Scenario, seed: int, replication: int, *, clock: Callable[[], float], passed: Callable[[int], object]
) -> Sample:
    """Run one replication. ``clock`` returns the time in s, for the record; ``passed`` is called with the number of
    tasks that have arrived since its last call."""
    started_s = clock()
    player = Replication(scenario.setup(), seed * SEEDS_APART + replication, watch=UtilizationMonitor(), passed=passed)
    player.play(scenario.warm_up)
    return measure(player, scenario.tasks - scenario.warm_up, clock=clock, started_s=started_s)
