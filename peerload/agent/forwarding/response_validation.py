"""Validation and merging of responses of other nodes.

A member may have another version, or be broken or compromised. An invalid response becomes an error of that node alone:
it neither stops this agent nor reaches the client.
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
"""Range of integers in a frame; sums are clamped to it."""
LISTED_MAX = 1_000_000
"""Tasks that one node may list if the request has no limit."""

_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_At = Annotated[float, Meta(ge=0.0, le=1e12)] | None
_States = Annotated[dict[Annotated[str, Meta(max_length=20)], _Count], Meta(max_length=32)]


class _Task(msgspec.Struct, frozen=True):
    """The fields of a listed task that clients rely on."""

    id: str
    state: str
    submitted_at: _At = None
    started_at: _At = None
    ended_at: _At = None


class _Damaged(msgspec.Struct, frozen=True):
    id: str
    why: str


class _Listing(msgspec.Struct, frozen=True):
    """A frame of a response that lists tasks."""

    tasks: list[_Task] = []
    damaged: list[_Damaged] = []
    truncated: bool = False
    unfinished: _States | None = None


_LISTS = ("tasks", "damaged")


class MergedListing:
    """The response of one of several nodes that list tasks. ``limit``: the most tasks it may list."""

    def __init__(self, node: str, limit: int | None) -> None:
        self._node = node
        self._limit = LISTED_MAX if limit is None else limit
        self._count = 0

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Validate one frame → its known keys. Raises BadMessage, which names the node."""
        try:
            form = msgspec.convert(body, _Listing)
        except (msgspec.ValidationError, RecursionError) as error:
            why = f"its list of tasks is malformed: {in_words(error)[:200]}"
            raise BadMessage(f"{self._node} sent an invalid response", why=why) from None
        self._count += len(form.tasks)
        if self._count > self._limit:
            raise BadMessage(
                f"{self._node} sent an invalid response",
                why=f"it lists more than the {self._limit} tasks that were requested",
            )
        return {key: body[key] for key in form.__struct_fields__ if key in body}


def lists_in(body: Mapping[str, Any]) -> dict[str, Any]:
    """The lists of a validated frame."""
    return {key: body[key] for key in _LISTS if body.get(key)}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two responses: lists are concatenated, numbers added within the range of a frame, Booleans or-ed, tables merged
    by key; of anything else the first is kept. The depth is bounded by `bounds.DEPTH_MAX` in the decoder."""
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
