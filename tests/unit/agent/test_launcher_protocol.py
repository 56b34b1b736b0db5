"""The codec of the protocol between agent and launcher: what one end encodes the other decodes, and nothing else."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from peerload.launcher import protocol as p
from tests.each import each

SPAWN = p.SpawnRequest("a-1", [b"true"], {b"A": b"b"}, b"/", 0o22, "out", "err", 1.5, 1 << 20)
EXIT = p.ExitRecord(137, 1.0, 2.0, 3, 4, p.ResourceUsage(0.5, 0.25, 1 << 20), signal=9, reason="why", out_of="memory")
REQUESTS: tuple[p.Request, ...] = (
    p.ListRequest(),
    SPAWN,
    SPAWN.replace(environment=None, ts=2.0, frozen_s_max=3.0, once=True, memory_bytes_max=5, node="n", input="in"),
    SPAWN.replace(
        terminal=[24, 80], run="r", inside="b-1", home="h", user="u", uid=7, kept=[b"A"], devices=True, cpus=2.0
    ),
    p.SignalRequest("a-1", 15),
    p.LeaseRequest("a-1", 1.5, 2.5),
    p.EvictRequest("a-1", "why"),
    p.ForgetRequest("a-1"),
    p.PingRequest(),
    p.StdinRequest("a-1", 10, ends=True),
    p.ResizeRequest("a-1", 24, 80),
    p.UsageRequest(1, ["a-1"]),
    p.UsageRequest(1, [], brief=True, counters=True),
    p.ListenRequest(),
    p.StopRequest(),
    p.RetireRequest(),
    p.DirectoryCheck(b"/", "h", "u", 7, 1, "n"),
    p.FileCheck([b"/a"], "h", "u", id=1, node="n"),
    p.FileAppend(b"/a", [("out", 0, 5)], 0o22, 0, True, "h", "u", 7, 1, "n"),
    p.FilesJob("/s", "a-1", b"-", True, "h", "u", 7, 1, "n"),
)
TASK = p.ListedTask("a-1", 1.0, 2.0, 3.0, is_frozen=True, ran_s=4.0)
EVENTS: tuple[p.LauncherEvent, ...] = (
    p.ListedEvent(1, False, [TASK], [("b-1", EXIT)], p.VERSION, "r", "bare", ["x"], "rlimit", False),
    p.StartedEvent("a-1", 1, 2.0),
    p.EndedEvent("a-1", EXIT),
    p.EndedEvent("a-1", EXIT, with_start=True),
    p.EndedEvent("a-1", p.ExitRecord(126, 1.0, 1.0, reason="why")),
    p.ExpiredEvent("a-1", "why", never_started=True),
    p.ExpiredEvent("a-1", "why", never_started=False, shortage="inodes"),
    p.FrozenEvent("a-1"),
    p.ThawedEvent("a-1"),
    p.StdinFed("a-1", 5, is_closed=False),
    p.UserReply(1, "why"),
    p.UsageEvent(1, 2.0, {"a-1": p.TaskUsage(0.5, -1, 2)}),
    p.UsageEvent(1, 2.0, {}, [("/sys/x", "package-0", 5, 9, 0)]),
    p.PongEvent(),
)


def body(*messages: Any) -> bytes:
    raw: bytes = msgpack.packb(list(messages))
    return raw


def test_each_message_is_what_was_encoded() -> None:
    assert {type(one) for one in REQUESTS} == set(p.REQUESTS.values())
    assert {type(one) for one in EVENTS} == set(p.EVENTS.values())
    framed = p.frame([p.encode(one) for one in REQUESTS])
    assert tuple(p.decode_requests(framed[p.HEADER_BYTES :])) == REQUESTS
    framed = p.frame([p.encode(one) for one in EVENTS])
    assert tuple(p.decode_events(framed[p.HEADER_BYTES :])) == EVENTS


def test_what_is_newer_is_ignored_or_refused() -> None:
    events = body({"is": "moved", "key": "a-1"}, {"is": "frozen", "key": "a-1", "moon": "full"})
    assert p.decode_events(events) == [p.FrozenEvent("a-1")]
    (request,) = p.decode_requests(body({"do": "forget", "key": "a-1", "moon": "full"}))
    assert request == p.ForgetRequest("a-1")
    with pytest.raises(p.LauncherProtocolError, match="move"):
        list(p.decode_requests(body({"do": "move", "key": "a-1"})))


def test_a_launcher_that_is_too_old_says_which() -> None:
    with pytest.raises(p.LauncherTooOld) as error:
        p.decode_events(body({"is": "listed", "pid": 7, "protocol": p.VERSION_MIN - 1}))
    assert error.value.pid == 7


WRONG: tuple[dict[str, Any], ...] = (
    {"key": "a/b"},
    {"argv": []},
    {"argv": ["true"]},
    {"umask": -1},
    {"output_bytes_max": 1 << 61},
    {"memory_bytes_max": -1},
    {"terminal": [24]},
)


@each(
    "raw",
    [
        b"\xc1",
        body()[:0],
        msgpack.packb({"do": "list"}),
        body(["list"]),
        body({}),
        body({"do": "signal", "key": "a-1"}),
        body({"do": "signal", "key": "a-1", "signal": 1000}),
        body({"do": "signal", "key": 1, "signal": 9}),
        body({"do": "lease", "key": "a-1", "deadline_s": "soon"}),
        body({"do": "usage", "id": 1, "keys": ["a-1"] * (p.USAGE_KEYS_MAX + 1)}),
        body({"do": "may", "directory": b"/", "home": "h", "user": "u"}),
        *(body({**msgpack.unpackb(p.encode(SPAWN)), **wrong}) for wrong in WRONG),
    ],
)
def test_a_malformed_request_is_one_error(raw: bytes) -> None:
    with pytest.raises(p.LauncherProtocolError):
        list(p.decode_requests(raw))


def test_an_environment_that_is_none_is_the_tasks_trouble_alone() -> None:
    for environment in (None, 7, {b"A": 1}, {"A": b"b"}):
        (request,) = p.decode_requests(body({**msgpack.unpackb(p.encode(SPAWN)), "environment": environment}))
        assert isinstance(request, p.SpawnRequest)
        assert request.environment is None
