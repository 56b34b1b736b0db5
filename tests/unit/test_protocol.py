from __future__ import annotations

from typing import Any

import pytest

from peerload.client.connection import Protocol, follows, joined
from peerload.model.errors import AgentUnavailable, BadRequest, NoSuchTask
from peerload.wire import frame
from tests.each import each
from tests.wording import Says


def received(protocol: Protocol, raw: bytes, at_a_time: int = 1 << 20) -> list[tuple[int, str, dict[str, Any]]]:
    """The answers in these bytes, of which a driver gets so many at a time, and never more than it wants."""
    answers = []
    while raw:
        size = min(protocol.wanted_bytes, at_a_time)
        assert size > 0
        protocol.receive_data(raw[:size])
        raw = raw[size:]
        if (answer := protocol.next_answer()) is not None:
            answers.append(answer)
    return answers


def test_requests_are_numbered_frames() -> None:
    protocol = Protocol()
    assert [protocol.request("info", {}), protocol.request("show", {"tasks": ["1"]})] == [
        (1, frame.pack({"id": 1, "verb": "info"})),
        (2, frame.pack({"id": 2, "verb": "show", "tasks": ["1"]})),
    ]


@each("sizes", [(1 << 20, 5, 1 << 20), (10, 20), (1 << 20,), (0,)])
def test_large_blocks_of_a_request_are_not_copied(sizes: tuple[int, ...]) -> None:
    blocks = [bytes([size % 251]) * size for size in sizes]
    number, parts = Protocol().request_parts("files", {"blocks": blocks, "have": [b"x"]})
    raw = b"".join(parts)
    assert len(raw) == frame.HEADER_BYTES + int.from_bytes(raw[: frame.HEADER_BYTES], "big")
    sent = {"id": number, "verb": "files", "have": [b"x"], "blocks": blocks}
    assert frame.unpack(raw[frame.HEADER_BYTES :]) == sent
    assert all(any(part is block for part in parts) for block in blocks if len(block) >= frame.LARGE_BYTES)
    with pytest.raises(BadRequest, match="too large"):
        Protocol().request_parts("files", {"blocks": [bytes(1 << 20)] * 4})


@each("at_a_time", [1, 3, 1 << 20])
def test_answers_come_in_pieces_of_any_size(at_a_time: int) -> None:
    protocol = Protocol()
    sent = [{"id": 1, "more": {"x": [1]}}, {"id": 2, "ok": {}}, {"id": 1, "error": {"code": "no-such-task"}}]
    assert not protocol.has_answered
    assert received(protocol, b"".join(map(frame.pack, sent)), at_a_time) == [
        (1, "more", {"x": [1]}),
        (2, "ok", {}),
        (1, "error", {"code": "no-such-task"}),
    ]
    assert protocol.has_answered
    assert protocol.next_answer() is None


def test_no_more_is_read_than_one_answer() -> None:
    protocol = Protocol()
    raw = frame.pack({"id": 1, "ok": {"data": b"x" * (1 << 20)}})
    assert protocol.wanted_bytes == frame.HEADER_BYTES
    protocol.receive_data(raw[:2])
    assert protocol.wanted_bytes == frame.HEADER_BYTES - 2
    assert received(protocol, raw[2:])[0][2] == {"data": b"x" * (1 << 20)}


def test_the_end_of_the_connection() -> None:
    protocol = Protocol()
    protocol.receive_data(b"\0\0")
    with pytest.raises(AgentUnavailable, match="closed"):
        protocol.receive_data(b"")


@each("raw", [b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", frame.pack([1]), frame.pack({"id": 1}), frame.pack({"ok": 1})])
def test_what_is_no_answer_ends_the_connection(raw: bytes) -> None:
    with pytest.raises(AgentUnavailable, match=Says.AGENT_GONE()):
        received(Protocol(), raw)


def test_a_refusal_of_the_connection_is_raised() -> None:
    with pytest.raises(BadRequest) as caught:
        received(Protocol(), frame.pack({"id": 0, "error": {"code": "slow-down", "what": "too many connections"}}))
    assert caught.value.code == "slow-down"
    assert not isinstance(caught.value, NoSuchTask)


def test_requests_that_cannot_be_sent() -> None:
    for task, says in (("\udcff", "UTF-8"), ("x" * (5 << 20), "too large")):
        with pytest.raises(BadRequest, match=says):
            Protocol().request("show", {"task": task})


def test_lists_of_parts_are_joined() -> None:
    assert joined([{"a": [1], "n": 1}, {"a": [2], "b": [3]}], {"a": [4], "end": True}) == {
        "a": [1, 2, 4], "b": [3], "end": True,
    }  # fmt: skip


def test_which_answers_may_take_for_ever() -> None:
    assert follows("wait", {})
    assert follows("output", {"follow": True})
    assert not follows("output", {"follow": False})
    assert not follows("show", {})
