"""One suite for every registered policy and preset: propose only what may be, within bounds, the same for a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peerload.model.errors import ConfigError
from peerload.model.load import LoadReport, Marks, Region
from peerload.model.resources import Placement, ResourceRequest
from peerload.policy.api import Keep, KnownReport, Probe, Reply, TaskView, Transfer
from peerload.policy.preset import KINDS
from peerload.policy.registry import DEFAULTS, build_preset, load_preset, policies, policy_class, presets

PROBES_MAX = 64
MEMBERS = [(kind, name) for kind, names in policies().items() for name in names]
TASK = TaskView("x/1", ResourceRequest(), Placement(), 0, 1.0)


class FrozenView:
    """A node as policies see it; setting anything fails."""

    __slots__ = ("__dict__",)

    def __init__(self, peers: Sequence[str], load_tasks: int, *, guided: bool) -> None:
        self.__dict__.update(
            node="x", peers=tuple(peers), load_tasks=load_tasks, slots=2, cpus=2.0, cpus_requested=float(load_tasks),
            cpus_busy=1.0, load=load_tasks / 2, marks=Marks(2.0, 2.0, 2.0, 2.0), reports_guide_probing=guided,
            idle_list=(), busy_list=(), speed=2.0, mean_s=3.0, waiting_s=4.0, running=(),
        )  # fmt: skip

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError(f"a policy set {name}")

    def report(self, node: str) -> KnownReport | None:
        number = int(node[1:])
        if number % 3 == 0:
            return None
        return KnownReport(LoadReport(load_tasks=number, accepts=number % 3 == 1, gives=number % 3 == 2), 1.0)


class Waiting:
    def __init__(self, count: int) -> None:
        self._tasks = [msgspec.structs.replace(TASK, task=f"x/{number}") for number in range(count)]

    def oldest_first(self) -> Iterator[TaskView]:
        return iter(self._tasks)

    def newest_first(self) -> Iterator[TaskView]:
        return reversed(self._tasks)


def made(kind: str, name: str) -> Any:
    policy: Any = msgspec.convert({}, policy_class(kind, name))
    assert isinstance(policy, KINDS[kind])
    return policy


def search(policy: Any, kind: str, seed: int) -> list[object]:
    """Play one search to its end, answered by chance; every step is checked."""
    rng, world = random.Random(seed), random.Random(f"{seed} world")
    peers = [f"p{number}" for number in range(world.randrange(12))]
    view = FrozenView(peers, world.randrange(8), guided=world.random() < 0.5)
    replies: list[Reply] = []
    steps: list[object] = []
    for _ in range(PROBES_MAX + len(peers) + 1):
        shown = tuple(replies)
        step = policy.locate(view, TASK if kind == "location.sender" else None, shown, rng)
        assert shown == tuple(replies)
        steps.append(step)
        match step:
            case Keep():
                assert step.reason
                return steps
            case Transfer():
                assert kind == "location.sender"
                assert step.to in peers
                if world.random() < 0.5:
                    return steps
                replies.append(Reply(step.to, accepts=False))
            case Probe():
                assert step.nodes
                assert len(set(step.nodes)) == len(step.nodes)
                assert set(step.nodes) <= set(peers) - {reply.node for reply in replies}
                for node in step.nodes:
                    accepts = kind == "location.sender" and world.random() < 0.4
                    report = LoadReport(load_tasks=world.randrange(4)) if world.random() < 0.8 else None
                    replies.append(Reply(node, accepts, report))
            case _:
                raise AssertionError(step)
    raise AssertionError(f"the search does not end: {steps}")


LOCATIONS = [(kind, name) for kind, name in MEMBERS if kind.startswith("location.")]


@pytest.mark.parametrize(("kind", "name"), LOCATIONS)
def test_searches_end_within_bounds_and_name_only_eligible_peers(kind: str, name: str) -> None:
    policy = made(kind, name)
    for seed in range(200):
        steps = search(policy, kind, seed)
        assert steps == search(policy, kind, seed)
        probed = sum(len(step.nodes) for step in steps if isinstance(step, Probe))
        assert probed <= getattr(policy, "probes", 0)


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_policies_are_frozen_and_refuse_unknown_parameters(kind: str, name: str) -> None:
    policy = made(kind, name)
    for field in policy.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(policy, field, None)
    with pytest.raises(ConfigError, match="nonsense"):
        build_preset("t", _table(kind, {"policy": name, "nonsense": 1}))


def _table(kind: str, table: dict[str, Any]) -> dict[str, Any]:
    outer, _, inner = kind.partition(".")
    return {outer: {inner: table}} if inner else {outer: table}


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_answers_are_in_range(kind: str, name: str) -> None:
    policy = made(kind, name)
    for load_tasks in range(6):
        view = FrozenView(("p1",), load_tasks, guided=False)
        match kind:
            case "load":
                assert policy.load(view) >= 0.0
            case "transfer":
                marks = policy.marks(view)
                assert min(marks.send_at, marks.accept_below, marks.receive_below, marks.give_above) > 0
            case "selection":
                chosen = policy.select(Waiting(load_tasks))
                assert (chosen is None) is (load_tasks == 0)
            case "priority":
                assert policy.prefer(load_tasks, 3) in ("local", "remote", "first")
            case "migration":
                assert policy.migrations_max is None or policy.migrations_max >= 0
            case "information":
                now = LoadReport(load_tasks=load_tasks, region=Region.NORMAL)
                assert policy.tells(None, now)
                assert policy.tells(now, now) is False
                assert policy.asks(None, now) in (True, False)
                assert policy.period_s >= 0


def test_every_kind_has_its_default() -> None:
    found = policies()
    assert all(DEFAULTS[kind] in names for kind, names in found.items())


@pytest.mark.parametrize("name", presets())
def test_presets_load_and_say_what_they_are(name: str) -> None:
    preset = load_preset(name)
    assert preset.name == name
    assert preset.description
    assert set(preset.names) == set(KINDS)


def test_thresholds_of_two_marks_must_not_cross() -> None:
    with pytest.raises(ConfigError, match="low"):
        build_preset("t", {"transfer": {"policy": "double-threshold", "low": 3.0, "high": 1.0}})


@pytest.mark.parametrize(
    ("table", "key", "why"),
    [
        ({"load": {"policy": "taks"}}, "load.policy", "tasks"),
        ({"loda": {}}, "loda", "load"),
        ({"location": {"middle": {}}}, "location.middle", "location.sender"),
        ({"location": {"sender": {"policy": "threshold", "probes": "many"}}}, "location.sender", "probes"),
        ({"location": {"sender": {"policy": "threshold", "probes": 1000}}}, "location.sender", "probes"),
    ],
)
def test_a_wrong_preset_names_the_key_and_what_is_allowed(table: dict[str, Any], key: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_preset("t", table)
    assert caught.value.key == key
    assert why in caught.value.why


def test_a_preset_that_is_not_there_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="symetric"):
        load_preset("symetric")
    with pytest.raises(ConfigError, match="no such file"):
        load_preset(str(tmp_path / "gone.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("= 1")
    with pytest.raises(ConfigError, match="not TOML"):
        load_preset(str(broken))


OWN = """
import msgspec
from peerload.policy.api import Keep

class Mine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    patience: int = 3

    def locate(self, view, task, replies, rng):
        return Keep("mine")

class Wrong:
    pass
"""


def test_a_users_own_policy_plays(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    preset = build_preset("t", {"location": {"sender": {"policy": f"{path}:Mine", "patience": 5}}})
    assert search(preset.sender, "location.sender", 1) == [Keep("mine")]
    for wrong in (f"{path}:Wrong", f"{path}:Gone", f"{tmp_path}/gone.py:Mine"):
        with pytest.raises(ConfigError):
            build_preset("t", {"location": {"sender": {"policy": wrong}}})
    path.write_text("1 / 0")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build_preset("t", {"location": {"sender": {"policy": f"{path}:Mine"}}})
