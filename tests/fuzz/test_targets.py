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


@pytest.mark.parametrize("name", TARGETS)
def test_examples_are_read(name: str) -> None:
    for raw in TARGETS[name].examples:
        tried(TARGETS[name], raw)


@pytest.mark.rule("P1")
@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes(name: str) -> None:
    @settings(max_examples=60 if name in SLOW else 250, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(st.binary(max_size=300))
    def try_it(raw: bytes) -> None:
        tried(TARGETS[name], raw)

    try_it()


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.examples])
def test_damaged_examples(name: str) -> None:
    @settings(max_examples=60 if name in SLOW else 150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(damaged(TARGETS[name].examples))
    def try_it(raw: bytes) -> None:
        tried(TARGETS[name], raw)

    try_it()
