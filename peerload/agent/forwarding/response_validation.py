"""Validation of responses of other nodes: each is compared with the form that it has to have, and then merged.

A member may be of another version, broken or taken over. Nothing that it says may be more than a refusal of that one node:
not the end of this agent, and not an answer that the client cannot read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from peerload.model.errors import BadMessage
from peerload.wire.expected import in_words

if TYPE_CHECKING:
    from collections.abc import Mapping

NUMBER_MIN = -(1 << 63)
NUMBER_MAX = (1 << 64) - 1
"""What a frame can hold: sums stay within."""
LISTED_MAX = 1_000_000
"""Tasks that one of several nodes may list where the request names no limit."""

_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_At = Annotated[float, Meta(ge=0.0, le=1e12)] | None
_States = Annotated[dict[Annotated[str, Meta(max_length=20)], _Count], Meta(max_length=32)]


class _Task(msgspec.Struct, frozen=True):
    """What everybody who lists tasks counts on."""

    id: str
    state: str
    submitted_at: _At = None
    started_at: _At = None
    ended_at: _At = None


class _Damaged(msgspec.Struct, frozen=True):
    id: str
    why: str


class _Listing(msgspec.Struct, frozen=True):
    """A frame of what lists tasks."""

    tasks: list[_Task] = []
    damaged: list[_Damaged] = []
    truncated: bool = False
    unfinished: _States | None = None


_LISTS = ("tasks", "damaged")


class MergedListing:
    """The tasks that one of several nodes lists. ``limit``: so many of them at most."""

    def __init__(self, node: str, limit: int | None) -> None:
        self._node = node
        self._limit = LISTED_MAX if limit is None else limit
        self._count = 0

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What of one frame is passed on: the known keys, as they came. Raises BadMessage, which names the node."""
        try:
            form = msgspec.convert(body, _Listing)
        except (msgspec.ValidationError, RecursionError) as error:
            why = f"what it lists is of no form that tasks have: {in_words(error)[:200]}"
            raise BadMessage(f"{self._node} lists no tasks", why=why) from None
        self._count += len(form.tasks)
        if self._count > self._limit:
            raise BadMessage(
                f"{self._node} lists too much", why=f"it lists more than the {self._limit} tasks that were asked for"
            )
        return {key: body[key] for key in form.__struct_fields__ if key in body}


def lists_in(body: Mapping[str, Any]) -> dict[str, Any]:
    """The lists of a frame that `MergedListing` has read."""
    return {key: body[key] for key in _LISTS if body.get(key)}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two answers as one: lists one behind the other, numbers added (as far as a frame can hold them), true if either is,
    tables key by key; of anything else the first that is there. No deeper than `bounds.DEPTH_MAX`, as they are decoded."""
    together = dict(first)
    for key, value in second.items():
        there = together.get(key)
        match there, value:
            case None, _:
                together[key] = value
            case bool(), bool():
                together[key] = there or value
            case list(), list():
                together[key] = [*there, *value]
            case dict(), dict():
                together[key] = merged(there, value)
            case (int() | float(), int() | float()) if not isinstance(there, bool) and not isinstance(value, bool):
                together[key] = _sum(there, value)
    return together


def _sum(first: float, second: float) -> float:
    total = first + second
    return min(max(total, NUMBER_MIN), NUMBER_MAX) if isinstance(total, int) else total
