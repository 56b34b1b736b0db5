"""Policies that break the contract in one way each; the suite must find out each of them, and by the right check."""

from __future__ import annotations

import itertools
import random
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from peerload.model.resources import Thresholds
from peerload.policy.api import Keep, Probe, Transfer

COUNTER = itertools.count()


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class NamesItself(Struct, frozen=True):
    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        return Keep("asked it") if replies else Probe((view.node,))


class OffersItself(Struct, frozen=True):
    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        return Transfer(view.node)


class NamesStrangers(Struct, frozen=True):
    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        return Transfer("n5")


class AsksStrangers(Struct, frozen=True):
    retry_rate = 0.0
    retry_probes = 1

    def locate(self, view: Any, probes_max: Any, replies: Any, rng: Any) -> Any:
        return Keep("asked it") if replies else Probe(("n6",))


class ProbesEverybody(Struct, frozen=True):
    probes: int = 1

    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        asked = {reply.node for reply in replies}
        left = [peer for peer in view.peers if peer not in asked]
        return Probe((left[0],)) if left else Keep("nobody is left")


class ProbesTwice(Struct, frozen=True):
    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        return Probe((view.peers[0],)) if view.peers else Keep("nobody")


class NeverGivesUp(Struct, frozen=True):
    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        return Transfer(view.peers[0]) if view.peers else Keep("nobody")


class ChangesTheMarks(Struct, frozen=True):
    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        view.thresholds = Thresholds(9.0, 9.0, 9.0, 9.0)
        return Keep("changed")


class Remembers(msgspec.Struct):
    searches: int = 0

    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        self.searches += 1
        return Keep("counted")


class RemembersForAll:
    seen: list[str] = []  # noqa: RUF012 -- what is wrong with it

    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        self.seen.append(task.task)
        return Keep("written down")


class Raises(Struct, frozen=True):
    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        return Transfer(view.peers[len(view.peers)])


class OwnChance(Struct, frozen=True):
    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        if replies or not view.peers:
            return Keep("once")
        return Transfer(random.choice(view.peers))


class Counts(Struct, frozen=True):
    """State outside of itself, where nobody looks for it."""

    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        if replies or not view.peers:
            return Keep("once")
        return Transfer(view.peers[next(COUNTER).bit_count() % len(view.peers)])  # no period


class OrderOfASet(Struct, frozen=True):
    """Equal in one process, since that has one hash seed."""

    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        if replies or not view.peers:
            return Keep("once")
        return Transfer(next(iter(set(view.peers))))


class NoStep(Struct, frozen=True):
    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        return tuple(view.peers)


class OffersTooMuch(Struct, frozen=True):
    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        return Transfer(view.peers[0], 1 << 70) if view.peers else Keep("nobody is there")


class NoReason(Struct, frozen=True):
    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        return Keep("")


class NegativeLoad(Struct, frozen=True):
    def load(self, view: Any) -> float:
        return float(-view.load_tasks)


class NoNumber(Struct, frozen=True):
    def load(self, view: Any) -> float:
        return float("nan")


class NoMarks(Struct, frozen=True):
    def thresholds(self, view: Any) -> Any:
        return Thresholds(1.0, 1.0, float("nan"), 1.0)


class SelectsWhatIsNotThere(Struct, frozen=True):
    def select(self, waiting: Any) -> Any:
        task = next(waiting.oldest_first(), None)
        return None if task is None else msgspec.structs.replace(task, task="x/1")


class PrefersNobody(Struct, frozen=True):
    def prefer(self, local_tasks: int, remote_tasks: int) -> str:
        return "nobody"


class TellsMaybe(Struct, frozen=True):
    watches = "region"
    reports_guide_probing = False
    period_s = 0.0

    def tells(self, told: Any, now: Any) -> Any:
        return "perhaps" if told is not None else True

    def asks(self, told: Any, now: Any) -> bool:
        return False


# -- what their parameters say is not so ----------------------------------------------------------------------------------


class Stay(Struct, frozen=True):
    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        return Keep("no search")


class NoBounds(Stay, frozen=True):
    patience: Annotated[int, Meta(description="how long")] = 3


class NoMeaning(Stay, frozen=True):
    patience: Annotated[int, Meta(ge=0, le=9)] = 3


class RefusesItsBound(Stay, frozen=True):
    patience: Annotated[int, Meta(ge=0, le=9, description="how long")] = 3

    def __post_init__(self) -> None:
        if self.patience == 9:
            raise ValueError("9 is too long after all")


class FailsAtItsBound(Struct, frozen=True):
    patience: Annotated[int, Meta(ge=0, le=9, description="how long")] = 3

    def locate(self, view: Any, task: Any, replies: Any, rng: Any) -> Any:
        return Keep(f"{1 // self.patience} is no reason")


class DefaultOutOfBounds(Stay, frozen=True):
    patience: Annotated[int, Meta(ge=0, le=9, description="how long")] = 10
