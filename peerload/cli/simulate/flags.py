"""Flags of `peerload sim`, and the scenarios that follow from them."""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import itertools
import math
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from peerload.cli.common.options import Options, whole
from peerload.model.errors import ConfigError, UsageError
from peerload.sim.recorded import TaskTrace, read_public, read_trace
from peerload.sim.scenario import DELAY_S_MAX, LOAD_MAX, Scenario, tasks_for
from peerload.sim.service import ServiceTimes, TaskClass, read_class, read_modulation, read_service
from peerload.text.format import counted
from peerload.text.units import duration

if TYPE_CHECKING:
    from collections.abc import Callable

NODES_MAX, SLOTS_MAX, GPUS_MAX = 100_000, 65_536, 1024
TASKS_MIN, TASKS_MAX = 10, 100_000_000
REPLICATIONS_MAX, WORKERS_MAX = 1000, 256
STEPS_MAX = 100
SPEED_MAX = 1000.0
SCENARIOS_MAX = 2000
PRECISION_MIN = 0.0001
PUBLIC = ("swf", "google", "alibaba")
POLICIES_MAX = 20
FILE_BYTES_MAX = 256 << 20
"""Maximum size of a trace or a list of speeds."""
GZIP = b"\x1f\x8b"
"""First bytes of a gzip file."""
Value = str | float | bool
"""Maximum number of values of a swept parameter."""
POLICY, NODES, LOAD, STEPS, REPLICATIONS = "adaptive", 20, 0.9, 10, 4
"""Defaults of the flags."""


def reader() -> Options:
    options = Options(
        "sim",
        "Simulate a preset of policies, with the code that agents run. Without a trace the unit of time is the mean service time.",
        epilog="compare policies and draw the figure:\n"
        "  peerload sim --compare none,threshold,receiver,adaptive --load 0.5:0.95 --plot curves.png",
    )
    options.flag("--policy NAME|FILE,…", help=f"presets to simulate, all with the same tasks (default: {POLICY})")
    options.flag("--compare A,B,…", help="the same as --policy A,B,…")
    options.flag(
        "--sweep NAME=A,B|LOW..HIGH[:STEP] …",
        type=sweep,
        help="run with each of these values of a preset parameter (threshold=1..5), of nodes, slots or a delay (repeatable)",
    )
    options.flag("--nodes N", type=whole(1, NODES_MAX), help=f"number of nodes (default: {NODES}, or as in the trace)")
    options.flag("--slots C", type=whole(1, SLOTS_MAX), default=1, help="slots of each node (default: %(default)s)")
    options.flag("--gpus G", type=whole(0, GPUS_MAX), default=0, help="GPUs of each node (default: %(default)s)")
    options.flag(
        "--load RHO|LOW:HIGH[:STEPS]",
        type=loads,
        help=f"offered load of each slot (default: {LOAD}; of a trace: as recorded), or a range in {STEPS} steps",
    )
    options.flag("--loads LOW:HIGH:STEP", type=steps, help="loads from LOW to HIGH by STEP")
    options.flag(
        "--arrivals KIND",
        type=arrivals,
        default=("poisson", ""),
        help="poisson (default), hotspot:K (all at K of the nodes), mmpp:R,L (bursts), daily:A,P, trace:FILE, swf:FILE,"
        " google:FILE, alibaba:FILE",
    )
    options.flag("--swf FILE", help="as --arrivals swf:FILE: a trace in Standard Workload Format")
    options.flag(
        "--class 'share=S mean=M …' …",
        dest="classes",
        type=task_class,
        help="a class of tasks (repeatable): share=0.2 mean=10 service=h2:4 cpus=2 gpus=1",
    )
    options.flag(
        "--service KIND",
        type=service,
        help="exp (default), det, h2:CV2, lognormal:CV2, weibull:K, bpareto:A,R, or trace:FILE (drawn from its durations)",
    )
    options.flag("--speeds FILE", help="speeds of the nodes: one factor a line, or node,factor")
    options.flag(
        "--transfer-delay D",
        type=delay,
        default=(0.0, ""),
        help="delay of a task transfer; like --message-delay in mean service times, such as 0.05, or with a trace in seconds or"
        " with a unit, such as 50ms",
    )
    options.flag("--message-delay D", type=delay, default=(0.0, ""), help="delay of every message")
    options.flag(
        "--head-cost D",
        type=delay,
        default=(0.0, ""),
        help="processing time of a message at the head node (central presets)",
    )
    options.flag("--head-down AT:FOR", type=outage, help="time at which the head node fails, and for how long")
    options.flag(
        "--model",
        choices=("reference", "live"),
        help="reference: the published model without delays (default); live: the settings of an agent (default with a trace or a"
        " message delay)",
    )
    options.flag(
        "--tasks N", type=whole(TASKS_MIN, TASKS_MAX), help="tasks of a replication (default: as many as needed)"
    )
    options.flag("--warmup N", type=whole(0, TASKS_MAX), help="tasks not counted (default: a quarter, or more)")
    options.flag(
        "--replications R",
        type=whole(1, REPLICATIONS_MAX),
        default=REPLICATIONS,
        help="replications, from which the 95 %% intervals are computed (default: %(default)s)",
    )
    options.flag(
        "--precision SHARE",
        type=share,
        help="add replications until the interval of the mean response is within this share of it, such as 1%% (default: as"
        " narrow as --replications make it)",
    )
    options.flag("--seed S", type=whole(0, 10**9), default=1, help="seed of all random numbers (default: %(default)s)")
    options.flag("--workers N", type=whole(1, WORKERS_MAX), help="worker processes (default: one for each cpu)")
    options.flag("--plot FILE", help="draw mean response over load into a .png, .svg or .pdf file")
    options.flag("--energy CASES", help="simulate the energy cases of a JSON file")
    options.switch("--classify", help="print the taxonomy of policies with every preset in its place")
    options.flag("--csv FILE", help="write a CSV file, one line for each policy and load; - is stdout")
    options.flag("--parquet FILE", help="write the same as --csv as a Parquet file")
    return options


def scenarios(flags: argparse.Namespace) -> list[Scenario]:
    """Scenarios, one for each policy and load, policies first. Raises UsageError or ConfigError that names the flag and what is
    allowed."""
    if flags.classes and (flags.service is not None or flags.swf or flags.arrivals[0] in ("trace", *PUBLIC)):
        raise UsageError("sim: --class is for tasks without --service and without a trace")
    if flags.loads and flags.load:
        raise UsageError("sim: --load and --loads cannot be combined")
    names = [name for name, _ in flags.sweep]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise UsageError(f"sim: --sweep {twice} is given twice", hint=f"all values in one:  --sweep {twice}=A,B,…")
    traces, durations = _Traces(flags), _durations(flags)
    made = []
    for values in itertools.product(*(values for _, values in flags.sweep)):
        changed, changes = argparse.Namespace(**vars(flags)), list(zip(names, values, strict=True))
        for name, value in changes:
            if name in SWEPT:
                setattr(changed, name, SWEPT[name](f"{value}"))
        made += [
            _scenario(changed, policy, load, traces.of(changed.slots), durations, tuple(changes))
            for policy in policies(flags)
            for load in flags.loads or flags.load or [None]
        ]
    if len(made) > SCENARIOS_MAX:
        raise UsageError(f"sim: these are {len(made)} simulations", why=f"at most {SCENARIOS_MAX}")
    labels = list(dict.fromkeys(one.label for one in made))
    made.sort(key=lambda one: labels.index(one.label))
    for scenario in {scenario.label: scenario for scenario in made}.values():
        _check(scenario)
    return made


def _check(scenario: Scenario) -> None:
    """Validate a scenario. The error for a swept parameter that its preset lacks suggests a flag."""
    try:
        scenario.check()
    except ConfigError as error:
        if error.key not in dict(scenario.changes):
            raise
        hint = error.hint or f"flags that can be swept: {', '.join(SWEPT)}"
        raise ConfigError(error.key, error.says, why=error.why, hint=hint) from None


def policies(flags: argparse.Namespace) -> list[str]:
    """The names of the policies, in the given order."""
    if flags.compare is None and flags.policy is None:
        return [POLICY]
    if flags.compare is not None and flags.policy is not None:
        raise UsageError(
            "sim: --policy and --compare cannot be combined",
            hint=f"to compare all:  --compare {flags.policy},{flags.compare}",
        )
    flag, given = ("compare", flags.compare) if flags.policy is None else ("policy", flags.policy)
    names = list(dict.fromkeys(name.strip() for name in given.split(",")))
    if not all(names):
        raise UsageError(f"sim: --{flag} {given!r} has an empty name", hint="such as:  --compare none,threshold")
    if len(names) > POLICIES_MAX:
        raise UsageError(f"sim: --{flag} names {len(names)} presets", why=f"at most {POLICIES_MAX}")
    return names


def workers(flags: argparse.Namespace) -> int:
    """Number of worker processes: as given, or one for each cpu that this process may use."""
    return flags.workers or len(os.sched_getaffinity(0))


def _scenario(
    flags: argparse.Namespace,
    policy: str,
    load: float | None,
    trace: TaskTrace | None,
    durations: tuple[float, ...],
    changes: tuple[tuple[str, Value], ...] = (),
) -> Scenario:
    kind, subject = flags.arrivals
    nodes = flags.nodes or (len(trace.names) if trace is not None else 0) or NODES
    hot = int(subject) if kind == "hotspot" else 0
    if hot > nodes:
        raise UsageError(
            f"sim: --arrivals hotspot:{hot} with {nodes} nodes", why=f"allowed: hotspot:1 to hotspot:{nodes}"
        )
    in_seconds = trace is not None or bool(durations)
    load = load if load is not None or trace is not None else LOAD
    tasks, warm_up = _lengths(flags, trace, nodes, load)
    message_s = _delay("--message-delay", flags.message_delay, in_seconds=in_seconds)
    return Scenario(
        policy=policy,
        changes=tuple(one for one in changes if one[0] not in SWEPT),
        varied=tuple(one for one in changes if one[0] in SWEPT),
        nodes=nodes,
        slots=flags.slots,
        gpus=flags.gpus,
        load=load,
        hot=hot,
        trace=trace,
        service=flags.service if isinstance(flags.service, ServiceTimes) else None,
        durations=durations,
        modulation=read_modulation(subject) if kind in ("mmpp", "daily") else None,
        classes=tuple(flags.classes),
        speeds=_speeds(flags.speeds, nodes, trace) if flags.speeds else (),
        transfer_s=_delay("--transfer-delay", flags.transfer_delay, in_seconds=in_seconds),
        message_s=message_s,
        head_s=_delay("--head-cost", flags.head_cost, in_seconds=in_seconds),
        head_down=tuple(_delay("--head-down", part, in_seconds=in_seconds) for part in flags.head_down or ()),
        is_live=(flags.model or ("live" if in_seconds or message_s else "reference")) == "live",
        tasks=tasks,
        warm_up=warm_up,
    )


def _lengths(flags: argparse.Namespace, trace: TaskTrace | None, nodes: int, load: float | None) -> tuple[int, int]:
    """Number of tasks and warm-up tasks; for a trace all tasks, and no warm-up."""
    if trace is not None:
        tasks, warm_up = len(trace), flags.warmup or 0
    elif flags.tasks is not None:
        tasks, warm_up = flags.tasks, flags.tasks // 4 if flags.warmup is None else flags.warmup
    else:
        several = len(policies(flags)) * len(flags.loads or flags.load or " ") > 1 or bool(flags.sweep)
        tasks, warm_up = tasks_for(nodes, flags.slots, load or LOAD, several=several)
        if flags.warmup is not None:
            tasks, warm_up = max(tasks, 2 * flags.warmup), flags.warmup
    if warm_up >= tasks:
        raise UsageError(f"sim: --warmup {warm_up} leaves nothing of {tasks} tasks", why=f"allowed: 0 to {tasks - 1}")
    return tasks, warm_up


# -- words on the command line -----------------------------------------------------------------------------------------


def loads(text: str) -> list[float]:
    """Loads from ``0.9``, or from ``0.5:0.95`` or ``0.5:0.95:4`` for evenly spaced values between two bounds."""
    parts = text.split(":")
    allowed = f"allowed: a number above 0, at most {LOAD_MAX:g}, or LOW:HIGH or LOW:HIGH:STEPS, 2 to {STEPS_MAX} steps"
    try:
        numbers = [float(part) for part in parts[:2]]
        steps = int(parts[2]) if len(parts) > 2 else STEPS  # noqa: PLR2004 -- the third
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a load; {allowed}") from None
    if len(parts) > 3 or not all(0 < number <= LOAD_MAX for number in numbers):  # noqa: PLR2004 -- three parts
        raise argparse.ArgumentTypeError(f"{text!r} is not a load; {allowed}")
    if len(numbers) == 1:
        return numbers
    low, high = numbers
    if low >= high or not 2 <= steps <= STEPS_MAX:  # noqa: PLR2004 -- two ends
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of loads; {allowed}")
    return [round(low + (high - low) * step / (steps - 1), 6) for step in range(steps)]


def steps(text: str) -> list[float]:
    """Values from ``0.5:0.95:0.1``: start, end and step."""
    try:
        low, high, step = (float(part) for part in text.split(":"))
    except ValueError:
        low = high = step = math.nan
    if not (0 < low <= high <= LOAD_MAX and step > 0 and (high - low) / step <= STEPS_MAX):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range; allowed: LOW:HIGH:STEP, such as 0.5:0.95:0.05")
    return _range(low, high, step)


def _range(low: float, high: float, step: float) -> list[float]:
    return [round(low + step * number, 9) for number in range(int((high - low) / step + 1e-9) + 1)]


def sweep(text: str) -> tuple[str, list[Value]]:
    """A name and its values from ``threshold=1..5``, ``threshold=1..2:0.5`` or ``queue=nodes,head``. Values of a flag are parsed as
    for the flag itself."""
    name, values = _swept(text)
    flag = name.replace("-", "_")
    if flag in SWEPT:
        for value in values:
            SWEPT[flag](f"{value}")
        return flag, values
    return name, values


def _swept(text: str) -> tuple[str, list[Value]]:
    name, _, rest = text.partition("=")
    wrong = argparse.ArgumentTypeError(
        f"{text!r} is not a sweep; allowed: NAME=A,B,… or NAME=LOW..HIGH or NAME=LOW..HIGH:STEP"
    )
    if not name or not rest:
        raise wrong
    low, dots, high = rest.partition("..")
    if not dots:
        return name, [_value(word) for word in rest.split(",")]
    high, _, step = high.partition(":")
    try:
        ends = float(low), float(high), float(step or 1)
    except ValueError:
        raise wrong from None
    if not (ends[0] <= ends[1] and ends[2] > 0 and (ends[1] - ends[0]) / ends[2] <= STEPS_MAX):
        raise wrong
    return name, [int(value) if value.is_integer() else value for value in _range(*ends)]


def _value(word: str) -> Value:
    if word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def share(text: str) -> float:
    """A fraction from ``1%`` or ``0.01``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not PRECISION_MIN <= value <= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a precision; allowed: {PRECISION_MIN:.2%} to 100%, such as 1%"
        )
    return value


def arrivals(text: str) -> tuple[str, str]:
    """The kind and the argument of ``poisson``, ``hotspot:K`` or ``trace:FILE``."""
    kind, _, subject = text.partition(":")
    is_known = (kind == "poisson" and not subject) or (kind in ("trace", *PUBLIC) and subject)
    if kind in ("mmpp", "daily"):
        try:
            return kind, str(read_modulation(text))
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix("arrivals: ")) from None
    if not is_known and not (kind == "hotspot" and subject.isdecimal() and int(subject) > 0):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a kind of arrivals; allowed: poisson, hotspot:K (K from 1), mmpp:R,L,"
            f" daily:A,P, trace:FILE, {', '.join(f'{name}:FILE' for name in PUBLIC)}"
        )
    return kind, subject


def task_class(text: str) -> TaskClass:
    try:
        return read_class(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("class: ")) from None


def service(text: str) -> ServiceTimes | str:
    """A distribution, or the name of a file with durations to draw from."""
    if text.startswith("trace:") and text != "trace:":
        return text.removeprefix("trace:")
    try:
        return read_service(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error}, trace:FILE".removeprefix("service: ")) from None


def delay(text: str) -> tuple[float, str]:
    """The value and the unit of a number (``0.05``), or one with a unit (``50ms``, ``2s``)."""
    if text.startswith("-"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a delay; allowed: 0 to {DELAY_S_MAX:g}, such as 0.05, or with a trace 50ms"
        )
    unit = text.lstrip("0123456789.+-e")
    try:
        number = float(text.removesuffix(unit) if unit else text)
    except ValueError:
        number = math.nan
    if unit == "ms":
        number /= 1000
    elif unit:
        number = duration(text)
    if not 0 <= number <= DELAY_S_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a delay; allowed: 0 to {DELAY_S_MAX:g}, such as 0.05 or 50ms"
        )
    return number, unit


def outage(text: str) -> tuple[tuple[float, str], ...]:
    """A start and a duration from ``100:20``, each as for `delay`."""
    parts = tuple(delay(part) for part in text.split(":"))
    if len(parts) != 2:  # noqa: PLR2004 -- two
        raise argparse.ArgumentTypeError(f"{text!r} is not an outage; allowed: AT:FOR, such as 100:20")
    return parts


def _delay(flag: str, given: tuple[float, str], *, in_seconds: bool) -> float:
    number, unit = given
    if unit and not in_seconds:
        raise UsageError(
            f"sim: {flag} has the unit {unit!r}",
            why="without a trace there are no seconds: times are in mean service times",
            hint=f"a twentieth of a mean service time:  {flag} 0.05",
        )
    return number


# -- files -------------------------------------------------------------------------------------------------------------


def _text(flag: str, name: str, errors: str = "strict") -> str:
    """Text of a file, unpacked if it is a gzip file. errors: as for `bytes.decode`."""
    path = Path(name)
    try:
        with path.open("rb") as file:
            is_too_large = os.fstat(file.fileno()).st_size > FILE_BYTES_MAX
            raw = b"" if is_too_large else file.read(FILE_BYTES_MAX + 1)
        if raw.startswith(GZIP):
            with gzip.open(io.BytesIO(raw)) as packed:
                raw = packed.read(FILE_BYTES_MAX + 1)
        text = raw.decode("utf-8-sig", errors)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"sim: {flag}: {name} cannot be read", why=why) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"sim: {flag}: {name} is not a text file", why=str(error)) from None
    if is_too_large or len(raw) > FILE_BYTES_MAX:  # the size of a device or a pipe is not known before
        raise UsageError(f"sim: {flag}: {name} is too large", why=f"at most {FILE_BYTES_MAX >> 20} MiB")
    return text


class _Traces:
    """The trace named by the flags, if any. Of a public one, only tasks that fit into the given number of slots."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags = flags
        self._kind, self._name = flags.arrivals
        if flags.swf and self._kind == "poisson":
            self._kind, self._name = "swf", flags.swf
        elif flags.swf:
            raise UsageError("sim: --swf and --arrivals cannot be combined")
        if self._kind in PUBLIC:  # comments and unused names may be Latin-1
            self._text = _text("--arrivals", self._name, errors="replace")
        elif self._kind == "trace":
            self._text = _text("--arrivals", self._name)
        self._read: dict[int, TaskTrace] = {}

    def of(self, slots: int) -> TaskTrace | None:
        if self._kind in PUBLIC:
            if slots not in self._read:
                self._read[slots] = read_public(
                    self._name, self._text, self._kind, slots, self._flags.gpus, tasks=self._flags.tasks
                )
            return self._read[slots]
        if self._kind != "trace":
            return None
        if not self._read:
            self._read[0] = read_trace(self._name, self._text, tasks=self._flags.tasks)
        return self._read[0]


def _durations(flags: argparse.Namespace) -> tuple[float, ...]:
    if not isinstance(flags.service, str):
        return ()
    durations = tuple(read_trace(flags.service, _text("--service", flags.service), ("duration",)).durations)
    if not sum(durations):
        raise ConfigError("service", f"all durations of {flags.service} are 0")
    return durations


def _speeds(name: str, nodes: int, trace: TaskTrace | None) -> tuple[float, ...]:
    """Speed factors of the nodes: one for each in order, or factors of the listed nodes and 1.0 for the others."""
    numbers = {f"n{index + 1}": index for index in range(nodes)}
    if trace is not None:
        numbers |= {node: index % nodes for index, node in enumerate(trace.names)}
    rows = _rows_of_speeds(name)
    is_list = bool(rows) and len(rows[0][1]) == 1
    if not rows or (is_list and len(rows) < nodes):
        raise UsageError(f"sim: --speeds: {name} has {counted(len(rows), 'line')}", why=f"{nodes} factors are needed")
    speeds: dict[int, float] = {}
    lines: dict[int, int] = {}
    for place, (line, cells) in enumerate(rows):
        where, written = f"{name}:{line}", ",".join(cells)
        number = numbers.get(cells[0], -1) if len(cells) > 1 else place
        if len(cells) <= 2 and is_list != (len(cells) == 1):  # noqa: PLR2004 -- node,factor
            raise UsageError(
                f"sim: --speeds: {where}: {written!r} is not of the same kind as the line before",
                why="allowed: a factor in each line, or node,factor in each",
            )
        if not 0 <= number < nodes or len(cells) > 2:  # noqa: PLR2004 -- node,factor
            raise UsageError(
                f"sim: --speeds: {where}: no node for {written!r}",
                why=f"allowed: {counted(nodes, 'line')} of one factor, or n1 … n{nodes} (or a node of the trace), comma,"
                " factor",
            )
        if number in speeds:
            raise UsageError(
                f"sim: --speeds: {where}: {cells[0]!r} is the node of line {lines[number]}",
                why="allowed: one factor a node",
            )
        speeds[number], lines[number] = _speed(where, cells[-1]), line
    return tuple(speeds.get(number, 1.0) for number in range(nodes))


def _rows_of_speeds(name: str) -> list[tuple[int, list[str]]]:
    """(line, cells) of each row that is not empty, a comment or a header."""
    reader = csv.reader(io.StringIO(_text("--speeds", name)))
    try:
        rows = [
            (reader.line_num, [cell.strip() for cell in cells])
            for cells in reader
            if any(cell.strip() for cell in cells) and not cells[0].lstrip().startswith("#")
        ]
    except csv.Error as error:
        raise UsageError(f"sim: --speeds: {name}:{reader.line_num}: not CSV", why=str(error)) from None
    return rows[1:] if rows and rows[0][1] == ["node", "factor"] else rows


def _speed(where: str, text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor <= SPEED_MAX:
        raise UsageError(
            f"sim: --speeds: {where}: {text!r} is not a factor", why=f"allowed: more than 0, at most {SPEED_MAX:g}"
        )
    return factor


SWEPT: dict[str, Callable[[str], object]] = {
    "nodes": whole(1, NODES_MAX),
    "slots": whole(1, SLOTS_MAX),
    "transfer_delay": delay,
    "message_delay": delay,
    "head_cost": delay,
}
"""Flags that can be swept like parameters of a preset, and their parsers."""
