"""Placement independent of loads: fixed, round robin, or random with shares that follow from capacities and arrival
rates ([RM]; [TT85], [GC05], [GCL02] for the shares, which `peerload.policy.flows` computes)."""

from __future__ import annotations

import re
import zlib
from bisect import bisect_left
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from peerload.policy.api import ANY_LOAD, Keep, Transfer
from peerload.policy.flows import SHARES

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from peerload.policy.api import NodeView, Reply, TaskView


def _step(view: NodeView, replies: Sequence[Reply], to: str) -> Transfer | Keep:
    if to == view.node:
        return Keep("the task belongs here")
    return Keep(f"{to} has declined") if replies else Transfer(to, ANY_LOAD)


def _nodes(view: NodeView) -> list[str]:
    return sorted({*view.peers, view.node})


def _slots(view: NodeView, node: str) -> int:
    """Slots of a node; an unknown node counts with one."""
    profile = view.profile(node)
    return profile.slots if profile is not None else 1


class Fixed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fixed map, by the order of the nodes' names: from the home to the node ``shift`` places after it, or from the task's
    class, which is its resource request, to a node.

    Good: no message and no knowledge; a class has its files and caches on its node.
    Bad: all tasks of one home wait at one node.
    """

    by: Annotated[Literal["home", "class"], Meta(description="what decides: the home, or what the task asks for")] = (
        "home"
    )
    shift: Annotated[int, Meta(ge=0, le=1000, description="places between home and node; 0: the home itself")] = 1

    def locate(self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random) -> Transfer | Keep:
        """Look the node up."""
        del rng
        nodes, request = _nodes(view), task.request
        place = nodes.index(view.node) + self.shift
        if self.by == "class":
            asked = f"{request.cpus:g} {request.mem_bytes} {request.gpus} {task.placement.labels}"
            place = zlib.crc32(asked.encode()) + self.shift
        return _step(view, replies, nodes[place % len(nodes)])


class RoundRobin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each home gives its tasks to all nodes in turn, by task number, starting with itself.

    Good: no message and no knowledge; smoother than random placement.
    Bad: slow nodes get as many tasks as fast ones, and queues are ignored.
    """

    def locate(self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random) -> Transfer | Keep:
        """Name the next node."""
        del rng
        nodes = [node for node in _nodes(view) if _slots(view, node)]
        turn = sum(map(int, re.findall(r"\d+", task.task.rpartition("/")[2]))) - 1  # of an array: ws1/7.2
        if not nodes:
            return Keep("no node to name")
        return _step(view, replies, nodes[(bisect_left(nodes, view.node) + turn) % len(nodes)])


class _Known:
    """Shares of this home, and their inputs. works: the work that arrives at each home per mean service time."""

    def __init__(self) -> None:
        self.works: Mapping[str, float] = {}
        self.transfer = 0.0
        self.peers: Sequence[str] | None = None
        self.nodes: list[str] = []
        self.sums: list[float] = []


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Each task goes to a node drawn at random, with fixed shares. ``by``: "proportional" to slots times speed; "optimal", the
    least mean response of all [TT85]; "nash", at which no home gains by another split [GC05]; "bargaining", the Nash
    bargaining solution, with equal mean response at all nodes in use [GCL02]. Nodes count as M/M/1 of their capacity.
    The simulator supplies the arrival rates; an agent assumes equal rates at all homes, with ``load`` in total.

    Good: no message; the optimum without knowledge of loads.
    Bad: needs the rates in advance, and a wrong rate overloads a node.
    """

    by: Annotated[
        Literal["proportional", "optimal", "nash", "bargaining"], Meta(description="what the shares are to achieve")
    ] = "proportional"
    load: Annotated[float, Meta(ge=0.01, le=0.99, description="load of the system if the rates are not known")] = 0.7

    @cached_property
    def _known(self) -> _Known:
        return _Known()

    def inform(self, works: Mapping[str, float], transfer: float) -> None:
        """Receive a-priori knowledge: the work that arrives at each home per mean service time, and the time of a transfer."""
        self._known.works, self._known.transfer, self._known.peers = works, transfer, None

    def locate(self, view: NodeView, task: TaskView, replies: Sequence[Reply], rng: random.Random) -> Transfer | Keep:
        """Draw a node."""
        del task
        if replies or not view.peers:
            return Keep(f"{replies[-1].node} has declined" if replies else "no other node")
        known = self._known
        if known.peers != view.peers:
            known.peers, known.nodes = None, _nodes(view)
            profiles = [view.profile(node) for node in known.nodes]
            rates = tuple(one.slots * one.speed if one is not None else 1.0 for one in profiles)
            if not any(rates):
                return Keep("no node has slots")
            each = self.load * sum(rates) / len(rates)
            works = tuple(known.works.get(node, 0.0) if known.works else each for node in known.nodes)
            shares = SHARES[self.by](rates, works, known.transfer)[known.nodes.index(view.node)]
            known.peers, known.sums = view.peers, list(accumulate(shares))
        return _step(view, replies, rng.choices(known.nodes, cum_weights=known.sums)[0])
