"""A preset that is played for a moment tells of policies that fail, and of state that nodes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerload.sim.rehearsal import TASKS, rehearse

COUNTS = """
import itertools
import random
from peerload.policy.api import Keep, Transfer

CONSTANT = {"looked at": ["and", "not", "changed"]}
SEEN = set()


class Base:
    names = []


class Counts(Base):
    shared = itertools.count()

    def __init__(self):
        self.own = []

    def locate(self, view, task, replies, rng):
        self.own.append(view.node)
        assert set(self.own) == {view.node}, "another node has used this instance"
        %s
        return Keep("declined") if replies else Transfer(view.peers[len(self.own) %% len(view.peers)])
"""


@pytest.mark.parametrize(
    ("does", "shared"),
    [
        ("pass", ()),
        ("SEEN.add(view.node)", ("SEEN",)),
        ("self.names.append(view.node)", ("Base.names",)),
        ("next(Counts.shared)", ("Counts.shared",)),
        ("global CONSTANT; CONSTANT = len(self.own)", ("CONSTANT",)),
    ],
)
def test_state_in_an_instance_is_a_nodes_own_and_other_state_is_shared(
    does: str, shared: tuple[str, ...], tmp_path: Path
) -> None:
    played = rehearse(preset(tmp_path, does))
    assert (set(played.shared), played.policy_errors, played.tasks) == (set(shared), 0, TASKS)
    assert played.is_good is (not shared)


def test_chance_from_elsewhere_and_failures_are_found(tmp_path: Path) -> None:
    played = rehearse(preset(tmp_path, "self.own = self.own * random.randint(1, 2) if len(self.own) < 1000 else []"))
    assert (played.repeats, played.is_good) == (False, False)
    played = rehearse(preset(tmp_path, "1 / 0"))
    assert played.policy_errors > 0
    assert played.policy_failure.startswith("ZeroDivisionError: ")
    assert not played.is_good


def test_a_shipped_preset_is_good() -> None:
    assert rehearse("threshold").is_good


def preset(directory: Path, does: str) -> str:
    (directory / "mine.py").write_text(COUNTS % does, encoding="utf-8")
    path = directory / "mine.toml"
    path.write_text('[transfer]\nthreshold = 1.0\n[location.sender]\npolicy = "mine.py:Counts"\n', encoding="utf-8")
    return str(path)
