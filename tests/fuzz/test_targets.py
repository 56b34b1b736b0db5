"""Any bytes, and well-formed ones with something wrong: nothing but the errors that are said."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import Target, targets

TARGETS = targets()
SLOW = ("row", "exit-record", "cluster", "join-door", "gossip", "member", "preset")
"""Each try writes a file, or makes a node."""


def tried(target: Target, raw: bytes) -> None:
    try:
        target.reads(raw)
    except target.raises:
        return


@st.composite
def damaged(draw: st.DrawFn, examples: tuple[bytes, ...]) -> bytes:
    """An example, cut, lengthened, with bytes changed, or with a piece of another one in it."""
    raw = bytearray(draw(st.sampled_from(examples)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(raw)))
        match draw(st.integers(0, 3)):
            case 0:
                del raw[place : place + draw(st.integers(1, 8))]
            case 1:
                raw[place:place] = draw(st.binary(min_size=1, max_size=12))
            case 2 if place < len(raw):
                raw[place] = draw(st.integers(0, 255))
            case _:
                other = draw(st.sampled_from(examples))
                start = draw(st.integers(0, len(other)))
                raw[place:place] = other[start : start + draw(st.integers(1, 40))]
    return bytes(raw)


def fuzzed(name: str, examples: int) -> None:
    """Its examples as they are, so many drawn bytes, and as many damaged examples."""
    target = TARGETS[name]
    told = settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    for raw in target.examples:
        tried(target, raw)
    told(given(st.binary(max_size=300))(lambda raw: tried(target, raw)))()
    if target.examples:
        told(given(damaged(target.examples))(lambda raw: tried(target, raw)))()


@pytest.mark.rule("P1")
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_the_errors_that_are_said(name: str) -> None:
    fuzzed(name, 10 if name in SLOW else 30)


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_the_errors_that_are_said_at_length(name: str) -> None:
    fuzzed(name, 200 if name in SLOW else 1000)
