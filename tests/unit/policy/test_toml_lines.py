from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from peerload.policy.toml_lines import lines_of
from tests.each import each

HARD = r'''# a comment with [table] and key = 1
title = "a [string] = with # all of it \" and \\" # comment
"quoted.key" = 'C:\'
many = """
[not.a.table]
not_a_key = 1 \
    """"" # ends in two quotes of its own
literal = \'\'\'
also_not = 1
it\'s''\'\'\'

array = [ # comment with ]
  "a ] string", { inside = 1, 'in.side' = [2] }, # , comment
  [3,
   4],
]
[ location . "sender" ]   # comment
probes = 3
deep.er.'est' = { a = 1, b.c = "x", d = { e = """
f = 1""" } }
[[list]]
x = 1
[[list]]
y = 0x_ff
[a]
[a.b]
at = 2026-11-21 07:00:00Z'''.replace("\\'", "'").replace("0x_ff", "0xff")

EXPECTED = {
    ("title",): 2,
    ("quoted.key",): 3,
    ("many",): 4,
    ("literal",): 8,
    ("array",): 12,
    ("array", "inside"): 13,
    ("array", "in.side"): 13,
    ("location",): 17,
    ("location", "sender"): 17,
    ("location", "sender", "probes"): 18,
    ("location", "sender", "deep"): 19,
    ("location", "sender", "deep", "er"): 19,
    ("location", "sender", "deep", "er", "est"): 19,
    ("location", "sender", "deep", "er", "est", "a"): 19,
    ("location", "sender", "deep", "er", "est", "b"): 19,
    ("location", "sender", "deep", "er", "est", "b", "c"): 19,
    ("location", "sender", "deep", "er", "est", "d"): 19,
    ("location", "sender", "deep", "er", "est", "d", "e"): 19,
    ("list",): 21,
    ("list", "x"): 22,
    ("list", "y"): 24,
    ("a",): 25,
    ("a", "b"): 26,
    ("a", "b", "at"): 27,
}


def paths(value: Any, at: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    if isinstance(value, list):
        return set().union(*(paths(item, at) for item in value))
    if not isinstance(value, dict):
        return set()
    return set().union(*({(*at, key)} | paths(inner, (*at, key)) for key, inner in value.items()))


@each("ends", ["\n", "\r\n"])
def test_nothing_in_strings_comments_and_arrays_is_taken_for_a_key(ends: str) -> None:
    source = HARD.replace("\n", ends)
    assert paths(tomllib.loads(source)) == set(EXPECTED)
    assert lines_of(source) == EXPECTED


KEYS = st.one_of(
    st.from_regex(r"[A-Za-z0-9_-]{1,3}", fullmatch=True).filter(str.isascii),
    st.text("ab.#=[]'\" \\\t\n{}", max_size=4).map(
        lambda text: '"' + text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n").replace("\t", r"\t") + '"'
    ),
    st.text('ab.#=[]" {}\\', max_size=4).map(lambda text: f"'{text}'"),
)
TEXTS = st.text("ab#=[]{}.,\n", max_size=8)
VALUES = st.recursive(
    st.one_of(
        st.sampled_from(["1", "-2.5e3", "true", "0b1", "inf", "1979-05-27T07:32:00Z", "07:32:00"]),
        TEXTS.map(lambda text: '"' + text.replace("\n", r"\n") + r'\""'),
        TEXTS.map(lambda text: f"'{text}'".replace("\n", " ")),
        TEXTS.map(lambda text: f'"""{text}"""'),
        TEXTS.map(lambda text: f'"""{text}a"" \\\n  b"""""'),
        TEXTS.map(lambda text: f"'''{text}'''"),
    ),
    lambda values: st.one_of(
        st.lists(values, max_size=3).map(lambda items: "[" + ",\n # ] = [\n".join(items) + "\n]"),
        st.tuples(KEYS, values).map(lambda pair: f"{{ {pair[0]} = {pair[1]} }}"),
    ),
    max_leaves=4,
)
SPACE = st.sampled_from(["", " ", "\t"])
LINES = st.one_of(
    st.tuples(st.lists(KEYS, min_size=1, max_size=3), SPACE, VALUES).map(
        lambda line: f"{(line[1] + '.' + line[1]).join(line[0])}{line[1]}={line[1]}{line[2]}{line[1]}# x = [1"
    ),
    st.lists(KEYS, min_size=1, max_size=3).map(lambda keys: f"[ {' . '.join(keys)} ] # [x]"),
    st.lists(KEYS, min_size=1, max_size=2).map(lambda keys: f"[[{'.'.join(keys)}]]"),
    st.sampled_from(["", "# [comment]", "  # a = 1"]),
)


@given(st.lists(LINES, max_size=8))
def test_it_finds_the_keys_that_tomllib_reads_and_no_others(lines: list[str]) -> None:
    """Written line by line, so that each statement's place is known; statements that contradict are left out."""
    kept: list[str] = []
    where: dict[tuple[str, ...], int] = {}
    for line in lines:
        try:
            read = tomllib.loads("\n".join([*kept, line]))
        except tomllib.TOMLDecodeError:
            continue
        first = sum(text.count("\n") + 1 for text in kept) + 1
        kept.append(line)
        for path in paths(read):
            where.setdefault(path, first)
    source = "\n".join(kept)
    found = lines_of(source)
    assert set(found) == set(where)
    spans = {first: line.count("\n") for first, line in _places(kept)}
    for path, first in where.items():
        assert first <= found[path] <= first + spans[first], (path, source)


def _places(kept: list[str]) -> list[tuple[int, str]]:
    at, places = 1, []
    for line in kept:
        places.append((at, line))
        at += line.count("\n") + 1
    return places
