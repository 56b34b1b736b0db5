"""A mistake in a preset names the key, what is allowed, and the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerload.model.errors import ConfigError
from peerload.policy import describe
from peerload.policy.preset_loader import PRESET_BYTES_MAX
from peerload.policy.registry import build_preset, load_preset
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
    ("right", "wrong", "line", "key", "says"),
    [
        ("low = 1", "low = ", 5, "policy", ("not TOML", "Invalid value")),
        ("low = 1", "low = 1\nlow = 1", 6, "policy", ("not TOML", "overwrite")),
        ("probes = 5", 'probes = """', 13, "policy", ("not TOML",)),
        ("[transfer]", "[tranfser]", 3, "tranfser", ("no such table", "there are load, transfer", "'transfer'?")),
        ("[transfer]", "[refrence]", 3, "refrence", (", description, reference", "did you mean 'reference'?")),
        ("[location.sender]", "[loction.sender]", 10, "loction", ("did you mean 'location'?",)),
        ("[location.sender]", "[location.sendre]", 10, "location.sendre", ("location.sender", "location.receiver")),
        ("memory = true", "memroy = true", 9, "location.memroy", ("no such key", "location.memory", "did you mean")),
        ("memory = true", 'memory = "on"', 9, "location.memory", ('"on" is neither true nor false',)),
        ("low = 1", "lo = 1", 5, "transfer.lo", ("'double-threshold'", "there are low, high", "did you mean 'low'?")),
        ("low = 1", 'low = "1"', 5, "transfer.low", ('"1"', "a number, 0 … 1000000; 1.0 if left out")),
        ("low = 1", "low = true", 5, "transfer.low", ("true is not allowed",)),
        ("low = 1", "low = nan", 5, "transfer.low", ("no finite number",)),
        ("low = 1", "low = -0.5", 5, "transfer.low", ("-0.5 is not allowed",)),
        ("low = 1", "low = 3", 3, "transfer", ("low = 3 lies above high = 2.5",)),
        ("probes = 5", "probes = 65", 12, "location.sender.probes", ("65", "a whole number, 0 … 64; 3 if left out")),
        ("probes = 5", "probes = 5.5", 12, "location.sender.probes", ("a whole number",)),
        ("probes = 5", "probes = [5]", 12, "location.sender.probes", ("[5] is not allowed",)),
        ("probes = 5", f'probes = "{"x" * 200}"', 12, "location.sender.probes", ("xxx…",)),
        (
            '"shortest"',
            '"shortets"',
            11,
            "location.sender.policy",
            ("idle-first", "did you mean 'shortest'?"),
        ),
        ('"shortest"', "3", 11, "location.sender.policy", ("3 is no name",)),
        ('"shortest"', '"gone.py:Mine"', 11, "location.sender.policy", ("no such file",)),
        ("[transfer]", "transfer = 2\n[load]", 3, "transfer", ("2 is no table", "for example")),
        ('"Mine."', "7", 1, "description", ("7 is no text",)),
        ("[transfer]", "location.sender = 1\n[transfer]", 9, "policy", ("not TOML",)),
    ],
)
def test_a_mistake_is_told_with_its_place(
    tmp_path: Path, right: str, wrong: str, line: int, key: str, says: tuple[str, ...]
) -> None:
    assert right in SOUND
    name = written(tmp_path, SOUND.replace(right, wrong, 1))
    with pytest.raises(ConfigError) as caught:
        load_preset(name)
    error = caught.value
    assert (error.file, error.line, error.key) == (name, line, key)
    assert str(error).startswith(f"{name}:{line}: {key}: ")
    for words in says:
        assert words in f"{error} {error.hint}"


def test_a_mistake_in_what_the_reference_model_changes_names_that_table(tmp_path: Path) -> None:
    for table, line, key, says in (
        ("[reference.transfer]\nlo = 1\n", 14, "reference.transfer.lo", "did you mean 'low'?"),
        ("[reference]\ntransfer.low = 3\n", 14, "reference.transfer", "low = 3 lies above high = 2.5"),
        ("[reference.refrence]\n", 13, "reference.refrence", "there are load, transfer"),
        ("[reference]\nlocation.memroy = true\n", 14, "reference.location.memroy", "did you mean 'location.memory'?"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_preset(written(tmp_path, SOUND + table))
        error = caught.value
        assert (error.key, error.line) == (key, line)
        assert says in f"{error} {error.hint}"
        assert "description, reference" not in str(error), "it has none of its own"
    with pytest.raises(ConfigError, match=r"^reference\.transfer\.lo: "):
        build_preset("mine", {"reference": {"transfer": {"lo": 1}}})


def test_every_mistake_is_found_in_order(tmp_path: Path) -> None:
    text = SOUND.replace("low = 1", "lo = 1").replace("probes = 5", "probes = 65").replace("= true", "= 1")
    mistakes = describe.check(written(tmp_path, text + "[priority]\npolicy = 'first'\n")).mistakes
    assert [(mistake.line, mistake.key) for mistake in mistakes] == [
        (5, "transfer.lo"),
        (9, "location.memory"),
        (12, "location.sender.probes"),
        (14, "priority.policy"),
    ]


def test_tables_may_be_written_in_any_way(tmp_path: Path) -> None:
    text = "transfer = { policy = 'double-threshold',  low = -1 }\nlocation.sender.policy = 'threshold'\n"
    mistakes = describe.check(written(tmp_path, text + "location.sender.'probes' = 99")).mistakes
    assert [(mistake.line, mistake.key) for mistake in mistakes] == [(1, "transfer.low"), (3, "location.sender.probes")]


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
    ("kind", "table", "line", "key", "says"),
    [
        ("sender", "policy = 'own.py:Good'", 2, "patience", "'own.py:Good' needs it: a whole number, 1 … 9"),
        ("sender", "patience = 10\npolicy = 'own.py:Good'", 3, "patience", "1 … 9"),
        ("sender", "policy = 'own.py:Good'\npatience = 1\nmood = 'odd'", 5, "mood", 'one of "calm", "wild"'),
        ("sender", "policy = 'own.py:Good'\npatience = 1\nnames = [1]", 5, "names", "a list, each a text"),
        ("sender", "policy = 'own.py:Plain'\npatience = 1", 4, "patience", "it has none"),
        ("sender", "policy = 'own.py:Data'\npatience = 'x'", 4, "patience", "a whole number"),
        ("sender", "policy = 'own.py:Gone'", 3, "policy", "there are Good, Plain"),
        ("sender", "policy = 'own.py:Idle'", 3, "policy", "it has no locate(view, task, replies, rng)"),
        ("sender", "policy = 'own.py:Short'", 3, "policy", "cannot be called so: too many positional arguments"),
        ("sender", "policy = 'own.py:NoMethod'", 3, "policy", "is no method"),
        ("sender", "policy = 'own.py:Fails'", 3, "policy", "RuntimeError: no mood"),
        ("sender", "policy = 'own.py:Strange'", 3, "policy", "NoSuchType"),
        ("receiver", "policy = 'own.py:Plain'", 3, "policy", "it has no retry_rate"),
        ("receiver", "policy = 'own.py:Poll'", 3, "policy", 'its retry_rate is "often", which is no float'),
        ("receiver", "policy = 'own.py:Moody'", 3, "policy", "its retry_rate fails: ZeroDivisionError"),
    ],
)
def test_a_class_that_does_not_do_is_told(own: Path, kind: str, table: str, line: int, key: str, says: str) -> None:
    error = mistake(own, kind, table)
    assert (error.line, error.key) == (line, f"location.{kind}.{key}")
    assert says in str(error)


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
    assert (describe.find_member(name).kind, describe.find_member(name).parameters) == ("location.sender", ())
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
            describe.find_member(wrong)


def _good(own: Path) -> object:
    table = {"location": {"sender": {"policy": "own.py:Good", "patience": 3}}}
    return build_preset("t", table, own.parent).sender


# -- doubts -------------------------------------------------------------------------------------------------------------


@each(
    ("text", "lines", "says"),
    [
        (
            "[transfer]\nsend_at = 1",
            [2, 2],
            "transfer.send_at: 1 lies below accept_below = 2: between them a node both",
        ),
        (
            "[transfer]\naccept_below = 3",
            [2, 2],
            "transfer.accept_below: 3 lies above give_above = 2: between them a node both accepts and gives",
        ),
        ("[transfer]\nreceive_below = 3\ngive_above = 3\nsend_at = 3", [], ""),
        ("[transfer]\nreceive_below = 3", [2, 2], "asks for and gives"),
        ("[transfer]\npolicy = 'dynamic-threshold'", [2], "lives on reports"),
        ("[location.sender]\npolicy = 'least-known'", [2], "lives on reports"),
        ("[location]\nmemory = true", [2], "no side shares"),
        ("[location.sender]\npolicy = 'random'\n[migration]\npolicy = 'controlled'\nlimit = 0", [5], "at its home"),
    ],
)
def test_what_works_against_itself_is_doubted_but_plays(tmp_path: Path, text: str, lines: list[int], says: str) -> None:
    checked = describe.check(written(tmp_path, text))
    assert checked.preset is not None
    assert [doubt.line for doubt in checked.doubts] == lines
    assert all(str(doubt).startswith(f"{doubt.file}:{doubt.line}: {doubt.key}: ") for doubt in checked.doubts)
    assert not lines or any(says in str(doubt) for doubt in checked.doubts)
