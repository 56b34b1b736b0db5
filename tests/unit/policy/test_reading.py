"""A mistake in a preset names the file, the key and what is allowed; what is no TOML, the line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from peerload.model.errors import ConfigError
from peerload.policy import describe
from peerload.policy.preset import PRESET_BYTES_MAX, why_not_fulfilled
from peerload.policy.registry import build_preset, class_from_file, load_preset
from tests.each import each

SOUND = """\
description = "Mine."  # a comment

[transfer]
policy = "double-threshold"
low = 1
high = 2.5

[location]
memory = true
[location.sender]
policy = "shortest"
probes = 5
"""


def written(directory: Path, text: str | bytes) -> str:
    path = directory / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_sound_one_is_built(tmp_path: Path) -> None:
    for text in (SOUND, SOUND.replace("\n", "\r\n"), "\ufeff" + SOUND):
        preset = load_preset(written(tmp_path, text))
        assert (preset.name, preset.description, preset.memory) == ("mine", "Mine.", True)
        assert preset.names["location.sender"] == "shortest"
    assert describe.check(written(tmp_path, SOUND)).doubts == []


@each(
    ("right", "wrong", "key", "says"),
    [
        ("low = 1", "low = ", "policy", ("not TOML", "Invalid value")),
        ("low = 1", "low = 1\nlow = 1", "policy", ("not TOML", "overwrite")),
        ("probes = 5", 'probes = """', "policy", ("not TOML",)),
        ("[transfer]", "[tranfser]", "tranfser", ("no such table", "there are load, transfer", "'transfer'?")),
        ("[transfer]", "[refrence]", "refrence", (", description, reference", "did you mean 'reference'?")),
        ("[location.sender]", "[loction.sender]", "loction", ("did you mean 'location'?",)),
        ("[location.sender]", "[location.sendre]", "location.sendre", ("location.sender", "location.receiver")),
        ("memory = true", "memroy = true", "location.memroy", ("no such key", "location.memory", "did you mean")),
        ("memory = true", 'memory = "on"', "location.memory", ('"on" is neither true nor false',)),
        ("low = 1", "lo = 1", "transfer.lo", ("'double-threshold'", "there are low, high", "did you mean 'low'?")),
        ("low = 1", 'low = "1"', "transfer.low", ('"1"', "a number, 0 … 1000000; 1.0 if left out")),
        ("low = 1", "low = true", "transfer.low", ("true is not allowed",)),
        ("low = 1", "low = nan", "transfer.low", ("not a finite number",)),
        ("low = 1", "low = -0.5", "transfer.low", ("-0.5 is not allowed",)),
        ("low = 1", "low = 3", "transfer", ("low = 3 is above high = 2.5",)),
        ("probes = 5", "probes = 65", "location.sender.probes", ("65", "a whole number, 0 … 64; 3 if left out")),
        ("probes = 5", "probes = 5.5", "location.sender.probes", ("a whole number",)),
        ("probes = 5", "probes = [5]", "location.sender.probes", ("[5] is not allowed",)),
        ("probes = 5", f'probes = "{"x" * 200}"', "location.sender.probes", ("xxx…",)),
        (
            '"shortest"',
            '"shortets"',
            "location.sender.policy",
            ("idle-first", "did you mean 'shortest'?"),
        ),
        ('"shortest"', "3", "location.sender.policy", ("3 is not a name",)),
        ('"shortest"', '"gone.py:Mine"', "location.sender.policy", ("no such file",)),
        ("[transfer]", "transfer = 2\n[load]", "transfer", ("2 is not a table", "for example")),
        ('"Mine."', "7", "description", ("7 is not a text",)),
        ("[transfer]", "location.sender = 1\n[transfer]", "policy", ("not TOML",)),
    ],
)
def test_a_mistake_is_told_with_its_place(
    tmp_path: Path, right: str, wrong: str, key: str, says: tuple[str, ...]
) -> None:
    assert right in SOUND
    name = written(tmp_path, SOUND.replace(right, wrong, 1))
    with pytest.raises(ConfigError) as caught:
        load_preset(name)
    error = caught.value
    assert (error.file, error.key) == (name, key)
    assert str(error).startswith(f"{name}:{f'{error.line}:' if key == 'policy' else ''} {key}: ")
    assert bool(error.line) == (key == "policy"), "the line of what is no TOML"
    for words in says:
        assert words in f"{error} {error.hint}"


def test_a_mistake_in_what_the_reference_model_changes_names_that_table(tmp_path: Path) -> None:
    for table, key, says in (
        ("[reference.transfer]\nlo = 1\n", "reference.transfer.lo", "did you mean 'low'?"),
        ("[reference]\ntransfer.low = 3\n", "reference.transfer", "low = 3 is above high = 2.5"),
        ("[reference.refrence]\n", "reference.refrence", "there are load, transfer"),
        ("[reference]\nlocation.memroy = true\n", "reference.location.memroy", "did you mean 'location.memory'?"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_preset(written(tmp_path, SOUND + table))
        error = caught.value
        assert error.key == key
        assert says in f"{error} {error.hint}"
        assert "description, reference" not in str(error), "it has none of its own"
    with pytest.raises(ConfigError, match=r"^reference\.transfer\.lo: "):
        build_preset("mine", {"reference": {"transfer": {"lo": 1}}})


def test_every_mistake_is_found(tmp_path: Path) -> None:
    text = SOUND.replace("low = 1", "lo = 1").replace("probes = 5", "probes = 65").replace("= true", "= 1")
    mistakes = describe.check(written(tmp_path, text + "[priority]\npolicy = 'first'\n")).mistakes
    assert {mistake.key for mistake in mistakes} == {
        "transfer.lo",
        "location.memory",
        "location.sender.probes",
        "priority.policy",
    }


def test_tables_may_be_written_in_any_way(tmp_path: Path) -> None:
    text = "transfer = { policy = 'double-threshold',  low = -1 }\nlocation.sender.policy = 'threshold'\n"
    mistakes = describe.check(written(tmp_path, text + "location.sender.'probes' = 99")).mistakes
    assert [mistake.key for mistake in mistakes] == ["transfer.low", "location.sender.probes"]


@each("raw", [b"a = '\xff'", b"x = 1\n" * PRESET_BYTES_MAX, b"a = " + b"[" * 100_000, b"\0"])
def test_what_is_no_text_of_a_preset_is_refused(tmp_path: Path, raw: bytes) -> None:
    name = written(tmp_path, raw)
    with pytest.raises(ConfigError) as caught:
        load_preset(name)
    assert caught.value.file == name


# -- policies of one's own ----------------------------------------------------------------------------------------------

OWN = '''\
"""Mine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from peerload.policy.api import Keep


class Good(msgspec.Struct, frozen=True):
    """It keeps. It does so [RM].

    Good: here.
    Bad: there.
    """

    patience: Annotated[int, Meta(ge=1, le=9, description="how long")]
    mood: Literal["calm", "wild"] = "calm"
    names: list[str] = []

    def locate(self, view, task, replies, rng):
        return Keep("mine")


class Plain:
    def locate(self, view, task, replies, rng):
        return Keep("mine")


@dataclass(frozen=True)
class Data:
    patience: int = 3

    def locate(self, view, task, replies, rng):
        return Keep("mine")


class Idle(msgspec.Struct):
    def keep(self):
        pass


class Short:
    def locate(self, view, task):
        return Keep("mine")


class NoMethod:
    locate = 3


class Fails:
    def __init__(self):
        raise RuntimeError("no mood")


class Poll:
    retry_rate = "often"
    retry_probes = 1

    def locate(self, view, probes_max, replies, rng):
        return Keep("mine")


class Moody:
    retry_probes = 1

    @property
    def retry_rate(self):
        return 1 / 0

    def locate(self, view, probes_max, replies, rng):
        return Keep("mine")


class Strange(msgspec.Struct):
    what: NoSuchType = 3


class Paced(msgspec.Struct):
    rate: float = 0.0
    retry_rate: float = 0.0
    period_s: float = 0.0
    believed_s: float = 2.0
    migrations_max: int = 1
    retry_probes = 1
    watches = "nothing"
    reports_guide_probing = False

    def partner(self, view, rng):
        return None

    def moves(self, richer, poorer):
        return False

    def locate(self, view, probes_max, replies, rng):
        return Keep("mine")

    def tells(self, told, now):
        return False

    def asks(self, before, now):
        return False
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def mistake(own: Path, kind: str, parameters: str) -> ConfigError:
    name = written(own.parent, f"\n[location.{kind}]\n{parameters}\n")
    with pytest.raises(ConfigError) as caught:
        load_preset(name)
    assert caught.value.file == name
    return caught.value


def test_ones_own_may_be_a_struct_a_dataclass_or_plain(own: Path) -> None:
    for chosen in (
        {"policy": "own.py:Good", "patience": 3, "mood": "wild"},
        {"policy": "own.py:Plain"},
        {"policy": "own.py:Data"},
    ):
        preset = build_preset("t", {"location": {"sender": chosen}}, own.parent)
        assert preset.names["location.sender"] == chosen["policy"]


@each(
    ("kind", "table", "key", "says"),
    [
        ("sender", "policy = 'own.py:Good'", "patience", "'own.py:Good' needs it: a whole number, 1 … 9"),
        ("sender", "patience = 10\npolicy = 'own.py:Good'", "patience", "1 … 9"),
        ("sender", "policy = 'own.py:Good'\npatience = 1\nmood = 'odd'", "mood", 'one of "calm", "wild"'),
        ("sender", "policy = 'own.py:Good'\npatience = 1\nnames = [1]", "names", "a list, each a text"),
        ("sender", "policy = 'own.py:Plain'\npatience = 1", "patience", "it has none"),
        ("sender", "policy = 'own.py:Data'\npatience = 'x'", "patience", "a whole number"),
        ("sender", "policy = 'own.py:Gone'", "policy", "there are Good, Plain"),
        ("sender", "policy = 'own.py:Idle'", "policy", "it has no locate(view, task, replies, rng)"),
        (
            "sender",
            "policy = 'own.py:Short'",
            "policy",
            "cannot be called with these arguments: too many positional arguments",
        ),
        ("sender", "policy = 'own.py:NoMethod'", "policy", "is not a method"),
        ("sender", "policy = 'own.py:Fails'", "policy", "RuntimeError: no mood"),
        ("sender", "policy = 'own.py:Strange'", "policy", "NoSuchType"),
        ("receiver", "policy = 'own.py:Plain'", "policy", "it has no retry_rate"),
        ("receiver", "policy = 'own.py:Poll'", "policy", 'its retry_rate is "often", which is not a number, 0 … 1000'),
        ("receiver", "policy = 'own.py:Moody'", "policy", "its retry_rate fails: ZeroDivisionError"),
    ],
)
def test_a_class_that_does_not_do_is_told(own: Path, kind: str, table: str, key: str, says: str) -> None:
    error = mistake(own, kind, table)
    assert error.key == f"location.{kind}.{key}"
    assert says in str(error)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e9])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("location.receiver", "retry_rate"),
        ("location.pairing", "rate"),
        ("information", "period_s"),
        ("information", "believed_s"),
        ("migration", "migrations_max"),
    ],
)
def test_a_value_that_is_out_of_bounds_is_told(own: Path, kind: str, name: str, value: float) -> None:
    policy = class_from_file("own.py:Paced", own.parent)
    assert why_not_fulfilled(kind, policy()) == ""
    found = why_not_fulfilled(kind, policy(**{name: value}))
    assert found.startswith(f"its {name} is "), found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\n1 / 0", "line 2: ZeroDivisionError"),
        ("\n\nclass Mine(", "line 3: SyntaxError"),
        ("raise SystemExit(3)", "line 1: SystemExit: 3"),
        ("import no_such_module", "line 1: ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_with_its_line(own: Path, text: str, says: str) -> None:
    own.write_text(text)
    assert says in mistake(own, "sender", "policy = 'own.py:Mine'").why


def test_what_is_shown_of_a_policy(own: Path) -> None:
    name = f"{own}:Plain"
    assert (describe.find_policy(name).kind, describe.find_policy(name).parameters) == ("location.sender", ())
    shown = describe.member("location.sender", "own.py:Good", type(_good(own)))
    assert (shown.says, shown.good, shown.bad, shown.sources) == (
        "It keeps. It does so [RM].",
        "here.",
        "there.",
        ("RM",),
    )
    patience, mood, names = shown.parameters
    assert (patience.required, patience.means, patience.allowed) == (True, "how long", "a whole number, 1 … 9")
    assert (mood.default, names.default) == ("calm", [])
    for wrong in (f"{own}:Good", f"{own}:Idle", f"{own}:Fails", "poll", "symetric", "locaton.sender.none", "load.none"):
        with pytest.raises(ConfigError):
            describe.find_policy(wrong)


def _good(own: Path) -> object:
    table = {"location": {"sender": {"policy": "own.py:Good", "patience": 3}}}
    return build_preset("t", table, own.parent).sender


# -- doubts -------------------------------------------------------------------------------------------------------------


@each(
    ("text", "doubts", "says"),
    [
        (
            "[transfer]\nsend_at = 1",
            2,
            "transfer.send_at: 1 is below accept_below = 2: between them a node both",
        ),
        (
            "[transfer]\naccept_below = 3",
            2,
            "transfer.accept_below: 3 is above give_above = 2: between them a node both accepts and gives",
        ),
        ("[transfer]\nreceive_below = 3\ngive_above = 3\nsend_at = 3", 0, ""),
        ("[transfer]\nreceive_below = 3", 2, "asks for and gives"),
        ("[transfer]\npolicy = 'dynamic-threshold'", 1, "needs reports"),
        ("[location.sender]\npolicy = 'least-known'", 1, "needs reports"),
        ("[location]\nmemory = true", 1, "searches are off on both sides"),
        ("[location.sender]\npolicy = 'random'\n[migration]\npolicy = 'controlled'\nlimit = 0", 1, "at its home"),
    ],
)
def test_what_works_against_itself_is_doubted_but_plays(tmp_path: Path, text: str, doubts: int, says: str) -> None:
    checked = describe.check(written(tmp_path, text))
    assert checked.preset is not None
    assert len(checked.doubts) == doubts
    assert all(str(doubt).startswith(f"{tmp_path}/mine.toml: {doubt.key}: ") for doubt in checked.doubts)
    assert not doubts or any(says in str(doubt) for doubt in checked.doubts)
