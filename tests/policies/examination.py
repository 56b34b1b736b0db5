"""The contract of a policy, as checks with a name each. `examine` plays a policy in a town of real nodes, listens to every
answer it gives and to everything its node then wants done, and tells which checks it does not pass and why.

    oneself        it never names its own node
    eligible       it names only nodes that it was shown; nothing is sent to one that cannot run the task or is not there
    bounded        a search asks no node twice, no more than its `probes`, and comes to an end
    unchanged      it changes neither what it was shown nor itself
    fails          it raises nothing
    answers        its answers are of the right kind and in range
    ends           every task ends
    deterministic  equal seeds give equal traces, in another process with another hash seed, too

Whoever calls may add what it found out in another way: `Found` is check → the first evidence.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from peerload.core.resources.admission import why_never
from peerload.core.sharing.sender import STEPS_MAX
from peerload.model import actions, messages
from peerload.model.errors import ConfigError
from peerload.model.resources import Thresholds
from peerload.model.task import task_home
from peerload.policy import api
from peerload.policy.preset import PolicySet, parameters, protocol_members, why_not
from peerload.policy.registry import build_preset, policy_class
from tests.policies.town import PROFILES, TASKS, UNUSABLE, Town

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (1, 2)
TINY = 1e-9
"""Added to a bound that is itself not allowed."""
PROBES_MAX = 64
VIEW = (
    "node",
    "load_tasks",
    "slots",
    "cpus",
    "cpus_requested",
    "cpus_busy",
    "gpu_tasks",
    "thresholds",
    "reports_guide_probing",
)
SURROUNDINGS: dict[str, Any] = {
    "transfer": {"policy": "single-threshold", "threshold": 1.0},
    "information": {"policy": "region-change"},
    "location": {
        "memory": True,
        "sender": {"policy": "threshold", "probes": 2},
        "receiver": {"policy": "poll", "probes": 2, "retry_rate": 1.0},
    },
    "migration": {"policy": "controlled", "limit": 3},
}
"""What the policy under examination plays among; of the sides of location it has the field for itself."""

WITH_WAITING_GUESTS = {"policy": "single-threshold", "threshold": 4.0}
"""A priority policy has nothing to decide where no task of another home waits."""

Found = dict[str, str]


def field(kind: str) -> str:
    return kind.rpartition(".")[2]


def preset_with(kind: str, name: str, parameters: dict[str, Any] | None = None, base: Path = Path()) -> PolicySet:
    table = {key: value for key, value in SURROUNDINGS.items() if key != "location"}
    chosen = {"policy": name, **(parameters or {})}
    if kind == "priority":
        table["transfer"] = WITH_WAITING_GUESTS
    if kind.startswith("location."):
        table["location"] = {"memory": True, field(kind): chosen}
    else:
        table |= {"location": SURROUNDINGS["location"], kind: chosen}
    return build_preset("examined", table, base)


def replaced(preset: PolicySet, kind: str, policy: object) -> PolicySet:
    return msgspec.structs.replace(preset, **{field(kind): policy})


class Examiner:
    """Listens; ``found`` grows."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.found: Found = {}

    def note(self, check: str, evidence: str) -> None:
        self.found.setdefault(check, evidence)

    def watched(self, policy: Any) -> Any:
        return _Watched(self, policy)

    # -- what the policy answers -----------------------------------------------------------------------------------------

    def judge(self, policy: Any, method: str, arguments: Sequence[Any], answer: Any) -> None:
        if method == "locate":
            self._judge_step(policy, arguments, answer)
        elif not is_in_range(method, arguments, answer):
            self.note("answers", f"{method}: {answer!r}")
        elif isinstance(answer, str) and hasattr(arguments[0], "peers"):
            self._judge_names(arguments[0], (answer,))

    def _judge_names(self, view: Any, names: Sequence[str]) -> None:
        if view.node in names:
            self.note("oneself", f"{view.node} names itself: {names}")
        elif not set(names) <= set(view.peers):
            self.note("eligible", f"{view.node} names {names}, of {tuple(view.peers)}")

    def _judge_step(self, policy: Any, arguments: Sequence[Any], step: Any) -> None:
        view, of_kind, replies = arguments[0], arguments[1], arguments[2]
        if type(step).__module__ != api.__name__:
            self.note("answers", f"no step of a search: {step!r}")
            return
        if isinstance(step, api.Transfer) and not -1 <= step.load_tasks_max <= api.ANY_LOAD:
            self.note("answers", f"more tasks than any node has: {step!r}")
            return
        if isinstance(step, api.Keep) and not step.reason:
            self.note("answers", "keeps for no reason")
        chosen = step.otherwise if isinstance(step, api.Broadcast) else step
        names = getattr(step, "nodes", (chosen.to,) if isinstance(chosen, api.Transfer) else ())
        self._judge_names(view, names)
        if isinstance(step, api.Probe):
            self._judge_probes(policy, view, names, replies, of_kind if isinstance(of_kind, int) else None)
        if len(replies) >= STEPS_MAX // 2:
            self.note("bounded", f"asks on after {len(replies)} replies")

    def _judge_probes(
        self, policy: Any, view: Any, names: Sequence[str], replies: Sequence[api.Reply], probes_max: int | None
    ) -> None:
        asked = {reply.node for reply in replies}
        if not names or len(set(names)) < len(names) or asked & set(names):
            self.note("bounded", f"asks {names} after {sorted(asked)}")
        bound = getattr(policy, "probes", getattr(policy, "bidders", PROBES_MAX))
        bound = bound if probes_max is None else probes_max
        free = {*view.idle_list, *view.busy_list}
        costs = {reply.node for reply in replies if not reply.remembered} | {name for name in names if name not in free}
        if len(costs) > bound:
            self.note("bounded", f"{len(costs)} probes of {bound}")

    # -- what its node wants done ----------------------------------------------------------------------------------------

    def watch(self, node: str, action: actions.Action) -> None:
        if isinstance(action, actions.Decided) and "does not come to an end" in action.reason:
            self.note("bounded", action.reason)
        if not isinstance(action, actions.Send):
            return
        if action.dst == node:
            self.note("oneself", f"{node} sends itself {action.message!r}")
        need: Any = getattr(action.message, "need", None)
        home = node
        if isinstance(action.message, messages.Offer):
            need, home = action.message.spec, task_home(action.message.task)
        asks = need is not None or type(action.message).__name__ in ("GiveRequest", "PairRequest")
        if asks and action.dst in UNUSABLE:
            self.note("eligible", f"{node} sends {action.dst} {action.message!r}")
        if need is not None and (why := why_never(PROFILES[action.dst], need.request, need.placement, home)):
            self.note("eligible", f"{action.dst}: {why}")


def is_in_range(method: str, arguments: Sequence[Any], answer: Any) -> bool:
    """Whether an answer of any method but `locate` is what its kind may answer."""
    match method:
        case "load":
            return isinstance(answer, float | int) and math.isfinite(answer) and answer >= 0
        case "thresholds":
            values = msgspec.structs.astuple(answer) if isinstance(answer, Thresholds) else (math.nan,)
            return all(math.isfinite(value) and value >= 0 for value in values)
        case "select":
            return answer is None or answer in list(arguments[0].oldest_first())
        case "prefer":
            return answer in ("local", "remote", "first")
        case "tells" | "asks" | "moves":
            return isinstance(answer, bool)
        case _:
            return answer is None or isinstance(answer, str)


class _Watched:
    """A policy that answers as the one inside it does; the examiner hears it."""

    def __init__(self, examiner: Examiner, policy: Any) -> None:
        self._examiner = examiner
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._policy, name)
        if name not in protocol_members(self._examiner.kind) or not callable(value):
            return value
        examiner, policy = self._examiner, self._policy

        def called(*arguments: Any) -> Any:
            before = [shown(argument) for argument in (*arguments, policy)]
            try:
                answer = value(*arguments)
            except Exception as error:
                examiner.note("fails", f"{name}: {error!r}")
                raise
            after = [shown(argument) for argument in (*arguments, policy)]
            for old, new in zip(before, after, strict=True):
                if old != new:
                    examiner.note("unchanged", f"{name}: {old} became {new}")
            examiner.judge(policy, name, arguments, answer)
            return answer

        return called


def shown(value: Any) -> Any:
    """Everything of an argument, or of a policy, that must be the same afterwards; chance is there to be used up."""
    if isinstance(value, random.Random):
        return None
    if hasattr(value, "peers"):
        facts = [getattr(value, name, None) for name in VIEW]
        lists = [tuple(value.peers), tuple(value.idle_list), tuple(value.busy_list)]
        return (*facts, *lists, *(value.report(peer) for peer in value.peers))  # what these hold is frozen
    if hasattr(value, "oldest_first"):
        return tuple(value.oldest_first())
    if isinstance(value, msgspec.Struct | tuple | int | float | str | None):
        own = {} if not isinstance(value, msgspec.Struct) else data_of(type(value))
        return f"{value!r} {own}"
    return repr({**data_of(type(value)), **getattr(value, "__dict__", {})})


def data_of(kind: type) -> dict[str, str]:
    """What a class itself holds besides methods."""
    return {
        name: repr(value)
        for name, value in vars(kind).items()
        if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__")
    }


# -- examinations --------------------------------------------------------------------------------------------------------


def play(kind: str, preset: PolicySet, seed: int, examiner: Examiner, tasks: int = TASKS) -> Town:
    """One town of one seed, whose nodes all play this preset."""
    policy = getattr(preset, field(kind))
    watched = replaced(preset, kind, examiner.watched(policy))
    town = Town(lambda _node: watched, seed, examiner.watch, tasks).run()
    total = len(town.ended)
    if total < town.tasks:
        examiner.note("ends", f"{total} of {town.tasks} tasks had ended after {town.now_s:g} s (seed {seed})")
    return town


def examine(kind: str, name: str, base: Path = Path(), seeds: Sequence[int] = SEEDS, tasks: int = TASKS) -> Found:
    """Everything that can be found out in this process."""
    examiner = Examiner(kind)
    preset = preset_with(kind, name, base=base)
    for seed in seeds:
        digest = play(kind, preset, seed, examiner, tasks).digest
        if Town(lambda _node: preset, seed, tasks=tasks).run().digest != digest:
            examiner.note("deterministic", f"seed {seed} gave two traces")
    return examiner.found


def digests(members: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The trace of each."""
    return {
        f"{kind} {name}": play(kind, preset_with(kind, name), SEEDS[0], Examiner(kind)).digest for kind, name in members
    }


def digests_elsewhere(members: Sequence[tuple[str, str]], hash_seed: int) -> Callable[[], dict[str, str]]:
    """The same in a process of its own with this PYTHONHASHSEED: started at once; call it for what it found."""
    program = (
        "import json, sys; from tests.policies.examination import digests;"
        "print(json.dumps(digests(json.loads(sys.argv[1]))))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(list(members))],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )

    def result() -> dict[str, str]:
        with process:
            told, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        found: dict[str, str] = json.loads(told)
        return found

    return result


# -- parameters ----------------------------------------------------------------------------------------------------------


def examine_parameters(kind: str, name: str, base: Path = Path(), tasks: int = TASKS) -> Found:
    """Whether the parameters are what they say: ``documented`` (each has a meaning, and each number bounds),
    ``default`` (within them), ``bounds`` (values there are taken, and pass the examination with so many tasks),
    ``outside`` (others are refused, by name)."""
    examiner = Examiner(kind)
    policy = policy_class(kind, name, base)
    told: Any = msgspec.inspect.type_info(policy) if issubclass(policy, msgspec.Struct) else None
    for parameter in told.fields if told is not None else ():
        declared = _number_or_switch(parameter.type)
        if not next(one.means for one in parameters(policy) if one.name == parameter.name):
            examiner.note("documented", f"{parameter.name} has no meaning")
        inside, outside = _edges(declared)
        if inside is None or outside is None:
            examiner.note("documented", f"{parameter.name} has no bounds")
            continue
        if parameter.default is not None and why_not(policy, parameter.name, parameter.default):
            examiner.note("default", f"{parameter.name} = {parameter.default!r}")
        for value in inside:
            _plays_at(examiner, kind, name, {parameter.name: value}, base, tasks)
        for value in outside:
            _is_refused(examiner, kind, name, parameter.name, value, base)
    return examiner.found


def _number_or_switch(declared: Any) -> Any:
    """The type inside ``Annotated`` and ``| None``."""
    while isinstance(declared, msgspec.inspect.Metadata):
        declared = declared.type
    if isinstance(declared, msgspec.inspect.UnionType):
        return _number_or_switch(next(one for one in declared.types if not isinstance(one, msgspec.inspect.NoneType)))
    return declared


def _edges(declared: Any) -> tuple[list[Any] | None, list[Any] | None]:
    """Values at the bounds, and values just outside; None where it has none."""
    match declared:
        case msgspec.inspect.BoolType():
            return [False, True], [1, "yes"]
        case msgspec.inspect.LiteralType():
            return list(declared.values), ["nonsense", 7]
        case msgspec.inspect.IntType(ge=int() as low, le=int() as high):
            return [low, high], [low - 1, high + 1, low + 0.5, "many"]
        case msgspec.inspect.FloatType(ge=float() | int() as low, le=float() | int() as high):
            beyond = math.nextafter(low, -math.inf)
            return [low, high], [beyond, math.nextafter(high, math.inf), math.nan, math.inf, True, "many"]
        case msgspec.inspect.FloatType(gt=float() | int() as low, le=float() | int() as high):
            return [low + TINY, high], [low, math.nextafter(high, math.inf), math.nan, math.inf, True, "many"]
        case _:
            return None, None


def _plays_at(examiner: Examiner, kind: str, name: str, values: dict[str, Any], base: Path, tasks: int) -> None:
    try:
        preset = _preset_at(kind, name, values, base)
    except ConfigError as error:
        examiner.note("bounds", f"{values}: {error}")
        return
    inner = Examiner(kind)
    play(kind, preset, SEEDS[0], inner, tasks)
    for check, evidence in inner.found.items():
        examiner.note("bounds", f"{values}: {check}: {evidence}")


def _preset_at(kind: str, name: str, values: dict[str, Any], base: Path) -> PolicySet:
    """Two parameters may be bound to one another (low ≤ high); then another goes along to the same end."""
    try:
        return preset_with(kind, name, values, base)
    except ConfigError as error:
        ((own, value),) = values.items()
        if error.key != kind:
            raise
        policy = policy_class(kind, name, base)
        for other in parameters(policy):
            if other.name != own and not why_not(policy, other.name, value):
                with contextlib.suppress(ConfigError):
                    return preset_with(kind, name, {own: value, other.name: value}, base)
        raise


def _is_refused(examiner: Examiner, kind: str, name: str, parameter: str, value: Any, base: Path) -> None:
    try:
        preset_with(kind, name, {parameter: value}, base)
    except ConfigError as error:
        if error.key != f"{kind}.{parameter}":
            examiner.note("outside", f"{parameter} = {value!r} is refused as {error.key}")
    else:
        examiner.note("outside", f"{parameter} = {value!r} is taken")
