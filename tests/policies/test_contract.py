"""One contract for every registered policy, and for one's own from a file; examination.py says what is checked and how.

That each check can fail is shown on the policies in bad.py: every one is found out by the check that it violates, and by
no other.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerload.model.errors import ConfigError
from peerload.model.resources import LoadReport, Placement, Profile, Region, ResourceRequest, Thresholds
from peerload.policy import api
from peerload.policy.describe import member
from peerload.policy.preset import KINDS, protocol_members
from peerload.policy.registry import DEFAULTS, build_preset, load_preset, policies, policy_class, presets
from tests.policies import examination
from tests.policies.examination import Examiner, Found, examine, examine_parameters, preset_with, replaced
from tests.policies.town import TASKS as TOWN_TASKS
from tests.policies.town import Town
from tests.wording import Says

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MEMBERS = [(kind, name) for kind, names in policies().items() for name in names]

SOME_TASKS = 20
"""In the town of the gate."""
FEW_TASKS = 8
"""In a town that plays a parameter at its bound."""

OWN = '''
"""A policy as a user may write it: no base class, no parameters, no types."""
from peerload.policy.api import Keep, Transfer

class FirstOfAll:
    def locate(self, view, task, replies, rng):
        declined = {reply.node for reply in replies}
        left = [peer for peer in view.peers if peer not in declined]
        return Transfer(left[0]) if left else Keep("nobody is left")
'''


# -- every policy passes every check -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_contract(kind: str, name: str) -> None:
    """All that is wrong with a policy is said at once."""
    found = {
        "in a town": examine(kind, name, seeds=examination.SEEDS[:1], tasks=SOME_TASKS),
        "its parameters": examine_parameters(kind, name, tasks=FEW_TASKS),
        "in any view": examine_in_views(kind, name, 12),
        "its class": examine_class(kind, name),
    }
    assert not any(found.values()), found


@pytest.mark.long
@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_contract_at_length(kind: str, name: str) -> None:
    found = {
        "in a town": examine(kind, name, seeds=examination.SEEDS[1:]),
        "its parameters": examine_parameters(kind, name),
        "in any view": examine_in_views(kind, name, 200),
    }
    assert not any(found.values()), found


@pytest.mark.long
def test_traces_are_the_same_in_processes_with_other_hash_seeds() -> None:
    elsewhere = [examination.digests_elsewhere(MEMBERS, hash_seed) for hash_seed in (1, 2)]
    here = examination.digests(MEMBERS)
    for found in elsewhere:
        assert found() == here
    assert len(set(here.values())) > len(here) // 2, "most policies do not play alike"


def own_file(directory: Path, source: str) -> Path:
    path = directory / "own.py"
    path.write_text(source, encoding="utf-8")
    return path


def test_ones_own_from_a_file_passes(tmp_path: Path) -> None:
    path = own_file(tmp_path, OWN)
    assert examine("location.sender", "own.py:FirstOfAll", base=tmp_path) == {}
    assert examine("location.sender", f"{path}:FirstOfAll") == {}


def test_the_example_of_the_documentation_passes(tmp_path: Path) -> None:
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    source = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]  # the next one keeps state
    own_file(tmp_path, source)
    assert examine("location.sender", "own.py:Believe", base=tmp_path) == {}


# -- every check can fail ------------------------------------------------------------------------------------------------

BAD = [
    ("location.sender", "NamesItself", "oneself"),
    ("location.sender", "OffersItself", "oneself"),
    ("location.sender", "NamesStrangers", "eligible"),
    ("location.receiver", "AsksStrangers", "eligible"),
    ("location.sender", "ProbesEverybody", "bounded"),
    ("location.sender", "ProbesTwice", "bounded"),
    pytest.param("location.sender", "NeverGivesUp", "bounded", marks=pytest.mark.long),
    ("location.sender", "ChangesTheMarks", "unchanged"),
    ("location.sender", "Remembers", "unchanged"),
    ("location.sender", "RemembersForAll", "unchanged"),
    ("location.sender", "Raises", "fails"),
    ("location.sender", "OwnChance", "deterministic"),
    ("location.sender", "Counts", "deterministic"),
    ("location.sender", "NoStep", "answers"),
    ("location.sender", "NoReason", "answers"),
    ("location.sender", "OffersTooMuch", "answers"),
    ("load", "NegativeLoad", "answers"),
    ("load", "NoNumber", "answers"),
    ("transfer", "NoMarks", "answers"),
    ("selection", "SelectsWhatIsNotThere", "answers"),
    ("priority", "PrefersNobody", "answers"),
    ("information", "TellsMaybe", "answers"),
]
BAD_PARAMETERS = [
    ("NoBounds", "documented"),
    ("NoMeaning", "documented"),
    ("RefusesItsBound", "bounds"),
    ("FailsAtItsBound", "bounds"),
    ("DefaultOutOfBounds", "default"),
]


@pytest.mark.parametrize(("kind", "name", "check"), BAD)
def test_a_bad_policy_is_found_out_by_the_check_that_it_violates(kind: str, name: str, check: str) -> None:
    found = examine(kind, f"bad.py:{name}", HERE, examination.SEEDS[:1])
    assert set(found) == {check}, found


@pytest.mark.parametrize(("name", "check"), BAD_PARAMETERS)
def test_a_bad_parameter_is_found_out_by_the_check_that_it_violates(name: str, check: str) -> None:
    found = examine_parameters("location.sender", f"bad.py:{name}", HERE)
    assert set(found) == {check}, found


@pytest.mark.long
def test_the_order_of_a_set_is_found_out_in_another_process() -> None:
    name = f"{HERE}/bad.py:OrderOfASet"
    assert examine("location.sender", name) == {}
    member_ = [("location.sender", name)]
    elsewhere = [examination.digests_elsewhere(member_, hash_seed)() for hash_seed in range(1, 5)]
    assert any(found != examination.digests(member_) for found in elsewhere)


# -- whatever a policy does, its node goes on ----------------------------------------------------------------------------


class Spoilt:
    """The policy inside, with every method answered by ``answer``."""

    def __init__(self, kind: str, policy: Any, answer: Callable[..., Any]) -> None:
        self._inside = (kind, policy, answer)
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        kind, policy, answer = self._inside
        value = getattr(policy, name)
        if name not in protocol_members(kind) or not callable(value):
            return value

        def called(*arguments: Any) -> Any:
            self.asked += 1
            return answer(*arguments)

        return called


def spoilt(
    kind: str, name: str, answer: Callable[..., Any], *, tasks: int = TOWN_TASKS
) -> tuple[Spoilt, Town, Examiner]:
    preset = preset_with(kind, name)
    policy = Spoilt(kind, getattr(preset, examination.field(kind)), answer)
    broken = replaced(preset, kind, policy)
    examiner = Examiner(kind)
    return policy, Town(lambda _node: broken, 1, examiner.watch, tasks=tasks).run(), examiner


def raise_it(*arguments: Any) -> Any:
    raise RuntimeError("on purpose")


SOME = [(kind, next(name for name in policies()[kind] if name != "none")) for kind in KINDS]
"""One policy of each kind: what is answered in its place is the same for all of them."""


@pytest.mark.parametrize(("kind", "name"), SOME)
def test_an_exception_is_contained_counted_and_shown(kind: str, name: str) -> None:
    policy, town, examiner = spoilt(kind, name, raise_it)
    assert len(town.ended) == town.tasks
    assert set(town.ended.values()) == {"done"}
    assert town.count("policy_errors_total") == policy.asked
    assert policy.asked or all(isinstance(member_, property) for member_ in protocol_members(kind).values())
    assert examiner.found == {}
    if kind in ("location.sender", "location.receiver"):
        assert any(Says.POLICY_FAILED() in decided.reason for decided in town.decided)


class Odd:
    """Not what anybody asked for."""

    to = nodes = reason = task = 7

    def __repr__(self) -> str:
        return "Odd()"


NONSENSE = (None, Odd(), float("nan"), -1, "n2", ("n2",), api.Transfer("x"), api.Probe(("x",)))


@pytest.mark.parametrize(("kind", "name"), SOME)
def test_nonsense_is_contained(kind: str, name: str) -> None:
    """One kind of it after the other, in one town."""
    answers = itertools.cycle(NONSENSE)
    policy, town, examiner = spoilt(kind, name, lambda *_: next(answers), tasks=2 * TOWN_TASKS)
    assert len(town.ended) == town.tasks
    assert policy.asked >= len(NONSENSE) or all(
        isinstance(member_, property) for member_ in protocol_members(kind).values()
    )
    assert examiner.found == {}


# -- any view there can be -----------------------------------------------------------------------------------------------

NAMES = tuple(f"p{number}" for number in range(9))
TASK = api.TaskView("x/1", ResourceRequest(), Placement(), 0, 1.0)


class Running:
    def __init__(self, used_s: float, durations: tuple[float, ...]) -> None:
        self.used_s, self.durations = used_s, durations


class FrozenView:
    """A node as policies see it; setting anything fails."""

    __slots__ = ("__dict__",)

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError(f"a policy set {name}")

    def profile(self, node: str) -> Profile | None:
        return Profile(node, self.__dict__["slots"], self.__dict__["cpus"]) if node in (*NAMES, "x") else None

    def report(self, node: str) -> api.KnownReport | None:
        known: api.KnownReport | None = self.__dict__["told"].get(node)
        return known

    def reports(self, age_s_max: float = inf, wanted: api.Said | None = None) -> Iterator[tuple[str, LoadReport]]:
        told = ((peer, self.report(peer)) for peer in self.__dict__["peers"])
        young = ((peer, known.report) for peer, known in told if known is not None and known.age_s <= age_s_max)
        return ((peer, report) for peer, report in young if wanted is None or getattr(report, wanted))

    def reporting(self, wanted: api.Reported) -> list[str]:
        known = {peer: self.report(peer) for peer in self.__dict__["peers"]}
        if wanted == "nothing":
            return [peer for peer, told in known.items() if told is None]
        return [peer for peer, told in known.items() if told is not None and getattr(told.report, wanted)]


class Waiting:
    def __init__(self, tasks: tuple[api.TaskView, ...]) -> None:
        self._tasks = tasks

    def oldest_first(self) -> Iterator[api.TaskView]:
        return iter(self._tasks)

    def newest_first(self) -> Iterator[api.TaskView]:
        return reversed(self._tasks)


POSITIVE = st.floats(0.001, 1e6)
ASCENDING = st.lists(POSITIVE, max_size=3).map(sorted).map(tuple)
COUNTS = st.integers(0, 1 << 40)
REPORTS = st.builds(
    LoadReport,
    load_tasks=COUNTS,
    slots=st.integers(0, 65_536),
    movable=COUNTS,
    load=st.floats(0.0, 1e12),
    region=st.sampled_from(Region),
    accepts=st.booleans(),
    gives=st.booleans(),
)
LISTS = st.lists(st.sampled_from([*NAMES, "gone"]), max_size=5, unique=True).map(tuple)
VIEWS = st.builds(
    FrozenView,
    node=st.just("x"),
    peers=st.lists(st.sampled_from(NAMES), unique=True).map(lambda names: tuple(sorted(names))),
    told=st.dictionaries(st.sampled_from(NAMES), st.builds(api.KnownReport, REPORTS, st.floats(0.0, 1e6))),
    starts_here=st.booleans(),
    asleep=st.dictionaries(st.sampled_from(NAMES), POSITIVE),
    cpus_started=st.floats(0.0, 65_536.0),
    backlog=st.integers(0, 1000),
    price=st.none() | st.floats(-1e3, 1e3),
    load_tasks=COUNTS,
    slots=st.integers(0, 65_536),
    cpus=st.just(0.0) | st.floats(0.01, 65_536.0),
    cpus_requested=st.floats(0.0, 1e6),
    cpus_busy=st.floats(0.0, 1e6),
    cpus_foreign=st.floats(0.0, 1e6),
    foreign_slots=st.integers(0, 65_536),
    gpus=st.integers(0, 1024),
    gpu_tasks=COUNTS,
    gpus_busy=st.floats(0.0, 1024.0),
    gpus_foreign=st.floats(0.0, 1024.0),
    speed=st.floats(0.001, 1000.0),
    mean_s=POSITIVE,
    waiting_s=st.floats(0.0, 1e12),
    running=st.lists(st.builds(Running, st.floats(0.0, 1e6), ASCENDING), max_size=3).map(tuple),
    load=st.floats(0.0, 1e12),
    load_mean=st.floats(0.0, 1e12),
    load_unit=POSITIVE,
    thresholds=st.builds(Thresholds, *[st.floats(0.0, 1e6)] * 4),
    reports_guide_probing=st.booleans(),
    idle_list=LISTS,
    busy_list=LISTS,
)  # fmt: skip
TASKS = st.builds(
    api.TaskView,
    task=st.integers(1, 99).map(lambda number: f"x/{number}"),
    request=st.just(ResourceRequest()),
    placement=st.just(Placement()),
    migrations=st.integers(0, 9),
    waited_s=st.floats(0.0, 1e6),
    expected_s=st.floats(0.0, 1e6),
    moved_bytes=st.integers(0, 1 << 40),
)
WAITING = st.lists(TASKS, max_size=4).map(lambda tasks: Waiting(tuple(tasks)))


def ask(kind: str, policy: Any, data: st.DataObject, rng: random.Random) -> None:
    """Every method of a kind once, with anything; a search to its end."""
    match kind:
        case "load":
            policy.load(data.draw(VIEWS))
        case "transfer":
            policy.thresholds(data.draw(VIEWS))
        case "selection":
            policy.select(data.draw(WAITING))
        case "priority":
            policy.prefer(data.draw(COUNTS), data.draw(COUNTS))
        case "information":
            policy.tells(None, data.draw(REPORTS))
            policy.tells(data.draw(REPORTS), data.draw(REPORTS))
            policy.asks(data.draw(st.none() | REPORTS), data.draw(REPORTS))
        case "location.sender":
            search(policy, data.draw(VIEWS), data.draw(TASKS), data, rng)
        case "location.receiver":
            search(policy, data.draw(VIEWS), data.draw(st.none() | st.integers(1, 4)), data, rng)
        case "location.pairing":
            policy.partner(data.draw(VIEWS), rng)
            policy.moves(data.draw(REPORTS), data.draw(REPORTS))
        case "migration":
            limit = policy.migrations_max
            assert limit is None or limit >= 0
        case _:
            raise AssertionError(f"how is a policy of kind {kind} asked?")


def search(policy: Any, view: Any, second: Any, data: st.DataObject, rng: random.Random) -> None:
    replies: list[api.Reply] = []
    for _ in range(4 * len(NAMES)):
        step = policy.locate(view, second, tuple(replies), rng)
        remembered = {*view.idle_list, *view.busy_list}
        if isinstance(step, api.Probe):
            for node in step.nodes:
                answer = data.draw(st.none() | REPORTS)
                accepts = answer is not None and data.draw(st.booleans())
                replies.append(api.Reply(node, accepts, answer, node in remembered))
        elif isinstance(step, api.Transfer):
            if data.draw(st.booleans()):
                return
            replies.append(api.Reply(step.to, accepts=False))
        elif isinstance(step, api.Keep):
            return
        else:  # everybody is asked; somebody may answer
            left = [peer for peer in view.peers if peer not in {reply.node for reply in replies}]
            if not left:
                return
            replies.append(api.Reply(data.draw(st.sampled_from(left)), accepts=True, report=data.draw(REPORTS)))
    raise AssertionError(f"the search does not end: {replies}")


def examine_in_views(kind: str, name: str, examples: int) -> Found:
    """What it does wrong in the first view, of so many, in which it does something wrong."""
    policy = getattr(preset_with(kind, name), examination.field(kind))
    examiner = Examiner(kind)

    @settings(max_examples=examples, deadline=None)
    @given(st.data(), st.integers(0, 99))
    def any_view(data: st.DataObject, seed: int) -> None:
        examiner.found = {}
        ask(kind, examiner.watched(policy), data, random.Random(seed))
        assert examiner.found == {}

    try:
        any_view()
    except AssertionError as error:
        examiner.note("bounded", str(error))
    return examiner.found


# -- the registry and the presets ----------------------------------------------------------------------------------------


def examine_class(kind: str, name: str) -> Found:
    """``frozen``, ``forbids`` (parameters that it does not have), ``documented`` (what it is, when it is good and bad)."""
    examiner = Examiner(kind)
    policy: Any = getattr(preset_with(kind, name), examination.field(kind))
    for parameter in policy.__struct_fields__:
        with contextlib.suppress(AttributeError):
            setattr(policy, parameter, None)
            examiner.note("frozen", f"{parameter} can be set")
    try:
        preset_with(kind, name, {"nonsense": 1})
        examiner.note("forbids", "nonsense is taken")
    except ConfigError as error:
        if error.key != f"{kind}.nonsense":
            examiner.note("forbids", f"nonsense is refused as {error.key}")
    told = member(kind, name, policy_class(kind, name))
    if not told.says.endswith((".", "…")):
        examiner.note("documented", f"no sentence: {told.says}")
    if not (told.good and told.bad):
        examiner.note("documented", f'the docstring of {told.target} lacks its line "Good: " or, after it, "Bad: "')
    return examiner.found


def test_every_kind_has_its_default() -> None:
    found = policies()
    assert set(DEFAULTS) == set(KINDS)
    assert all(DEFAULTS[kind] in names for kind, names in found.items())


def preset_source(name: str) -> str:
    return (ROOT / f"policies/presets/{name}.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", presets())
def test_presets_load_and_say_what_they_are(name: str) -> None:
    preset = load_preset(name)
    assert preset.name == name
    assert preset.description.endswith((".", "]"))
    assert set(preset.names) == set(KINDS)


@pytest.mark.parametrize("name", presets())
def test_every_key_of_a_preset_has_its_comment(name: str) -> None:
    """Above it, above its table, or behind it: what it does here, and why this value."""
    above = ""
    for line in preset_source(name).splitlines():
        if re.match(r"(?!description)[\w.]+ *=", line):
            assert above.startswith("#") or " # " in line, f"{name}.toml: {line}"
        above = line


@pytest.mark.parametrize("name", presets())
def test_a_town_that_plays_a_preset_keeps_the_contract(name: str) -> None:
    preset = load_preset(name)
    examiner = Examiner("location.sender")
    town = Town(lambda _node: preset, 1, examiner.watch).run()
    assert examiner.found == {}
    assert set(town.ended.values()) == {"done"}
    assert len(town.ended) == town.tasks
    assert town.count("policy_errors_total") == 0


def test_nodes_may_play_different_presets() -> None:
    names = presets()
    chosen = {f"n{number}": load_preset(names[number % len(names)]) for number in range(1, 7)}
    town = Town(chosen.__getitem__, 1).run()
    assert len(town.ended) == town.tasks


def test_found_is_what_is_noted_first() -> None:
    examiner = Examiner("load")
    examiner.note("fails", "first")
    examiner.note("fails", "second")
    found: Found = examiner.found
    assert found == {"fails": "first"}


def test_one_preset_may_name_any_policy_by_kind() -> None:
    for kind, name in MEMBERS:
        assert preset_with(kind, name).names[kind] == name
    with pytest.raises(ConfigError, match="low"):
        build_preset("t", {"transfer": {"policy": "double-threshold", "low": 3.0, "high": 1.0}})
