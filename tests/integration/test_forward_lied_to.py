"""Members that misuse forwarded requests: who asks too much, or in no form, and who answers so, is cut off, and nobody else."""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Any, Self

import msgpack
import pytest

from peerload.agent.control import authorization
from peerload.agent.forwarding import tunnels
from peerload.agent.peers import streams
from peerload.model.errors import PeerloadError
from peerload.model.messages import (
    Envelope,
    Forward,
    Forwarded,
    ForwardStop,
    Hello,
    Identity,
    OutputEnd,
    OutputRequest,
    Ping,
)
from peerload.model.resources import LoadReport, Profile
from peerload.wire import control, peer
from tests.integration.cluster import Agent, Cluster
from tests.integration.fake_peer import FakePeer
from tests.support import PATIENCE_S, credentials_of, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

CUT_OFF = (ConnectionError, ssl.SSLError)


@pytest.fixture(name="agent", scope="module")
def fixture_agent() -> Iterator[Agent]:
    with Cluster() as cluster:
        yield cluster.agent("n1")


@pytest.fixture
def fresh() -> Iterator[Agent]:
    """An agent of whose memory nothing was used yet, and that nobody uses after this test."""
    with Cluster() as cluster:
        yield cluster.agent("n1")


def request(verb: str, number: int = 1, **fields: object) -> bytes:
    packed: bytes = msgpack.packb({"id": number, "verb": verb, **fields})
    return packed


def answer(asker: FakePeer) -> tuple[int, str, dict[str, object]]:
    """The next frame of an answer."""
    whole = b""
    while True:
        part = asker.expect(Forwarded)
        whole += part.answer
        if not part.continues:
            return control.decode_answer(whole)


def answer_to(asker: FakePeer, number: int) -> tuple[str, dict[str, object]]:
    """The next frame of the answer to this request; what is told meanwhile in answer to others is let go."""
    while True:
        answered, kind, body = answer(asker)
        if answered == number:
            return kind, body


# -- who asks ----------------------------------------------------------------------------------------------------------


def test_a_member_asks_in_due_form(agent: Agent) -> None:
    with FakePeer(agent.listen, "asker", stream=True) as asker:
        asker.send(Forward(request("info", 7), "me", 1000))
        number, kind, body = answer(asker)
        assert (number, kind, body["node"]) == (7, "ok", "n1")
        asker.send(Forward(request("wait", 8, tasks=["n1/99"])))
        assert answer(asker)[2]["code"] == "no-such-task"


def test_what_was_sent_on_is_not_sent_on_again(agent: Agent) -> None:
    with FakePeer(agent.listen, "third"), FakePeer(agent.listen, "asker", stream=True) as asker:
        for raw in (request("info", 1, at="third"), request("tasks", 2, cluster=True)):
            asker.send(Forward(raw))
            assert answer(asker)[2]["code"] == "bad-request"
        asker.send(Forward(request("show", 3, tasks=["third/1"])))
        assert answer(asker)[2]["code"] == "no-such-task"
        asker.send(Forward(request("info", 4), hops=2))
        number, _, body = answer(asker)
        assert (number, body["code"]) == (4, "bad-request")


def test_what_is_no_request_ends_that_stream_alone(agent: Agent) -> None:
    for raw in (b"\xc1", b"\x90", request("info")[:-3], b"\x81\xa2id\xff", b"\xff" * 1000):
        with FakePeer(agent.listen, "asker", stream=True) as asker:
            asker.send(Forward(raw))
            assert answer(asker)[1] == "error"
            with pytest.raises(CUT_OFF):
                asker.receive()
    assert agent.call("info")["node"] == "n1"


def test_requests_that_fit_no_verb_are_refused_one_by_one(agent: Agent) -> None:
    with FakePeer(agent.listen, "asker", stream=True) as asker:
        bad = [request("explode"), request("show"), request("show", tasks=["\x1b[31m"] * 3), request("info", more=1)]
        for raw in bad:
            asker.send(Forward(raw))
            number, kind, body = answer(asker)
            assert (number, kind, body["code"]) == (1, "error", "bad-request")
        asker.send(Forward(request("info", 2)))
        assert answer(asker)[:2] == (2, "ok")


def test_output_and_requests_do_not_share_a_stream(agent: Agent) -> None:
    with FakePeer(agent.listen, "asker", stream=True) as asker:
        asker.send(Forward(request("info")))
        answer(asker)
        asker.send(OutputRequest("n1/1", bytes(16), 1))
        with pytest.raises(CUT_OFF):
            asker.receive()


def test_a_forward_over_a_link_is_malformed(agent: Agent) -> None:
    before = agent.counters().get("peer_bans_total", 0)
    with FakePeer(agent.listen, "blunt") as asker:
        for _ in range(3):
            asker.send(Forward(request("info")))
        with pytest.raises(CUT_OFF):
            asker.expect(Forwarded)
    wait_until(lambda: agent.counters().get("peer_bans_total", 0) == before + 1, what="it is counted")


@pytest.mark.rule("P2")
def test_so_many_clients_and_no_more(agent: Agent) -> None:
    askers = [FakePeer(agent.listen, "bomber", stream=True) for _ in range(tunnels.FORWARDS_MAX)]
    try:
        for asker in askers:
            asker.send(Forward(request("events", follow=True, limit=0)))
        for asker in askers:  # each is known by then
            asker.send(Forward(request("info", 2)))
            assert answer_to(asker, 2)[0] == "ok"
        with FakePeer(agent.listen, "bomber", stream=True) as one_more:
            one_more.send(Forward(request("info", 3)))
            number, kind, body = answer(one_more)
            assert (number, kind, body["code"]) == (0, "error", "slow-down")
        with FakePeer(agent.listen, "other", stream=True) as other:  # another node is served all the same
            other.send(Forward(request("info", 4)))
            assert answer(other)[:2] == (4, "ok")
    finally:
        for asker in askers:
            asker.close()


def test_clients_of_other_nodes_never_stand_before_outputs(agent: Agent) -> None:
    task = agent.submit("sh", "-c", "echo mine", placement={"node": "n1"})
    agent.wait(task)
    askers: list[FakePeer] = []
    try:
        for number in range(streams.FORWARDING_MAX):
            askers.append(FakePeer(agent.listen, f"crowd{number // tunnels.FORWARDS_MAX}", stream=True))
            askers[-1].send(Forward(request("events", follow=True, limit=0)))
        wait_until(lambda: answers_nothing(agent, "late"), 20, "all places to be taken")
        with FakePeer(agent.listen, "fetcher", stream=True) as fetcher:
            fetcher.send(OutputRequest(task, bytes(16), 1))
            assert isinstance(fetcher.expect(OutputEnd), OutputEnd)
    finally:
        for asker in askers:
            asker.close()
    wait_until(lambda: not answers_nothing(agent, "late"), 20, "room for a client")


def answers_nothing(agent: Agent, node: str) -> bool:
    """Whether one more client is cut off."""
    with FakePeer(agent.listen, node, stream=True) as asker:
        asker.send(Forward(request("info")))
        try:
            answer(asker)
        except CUT_OFF:
            return True
        return False


def test_of_those_who_ask_nothing_the_first_have_to_go(agent: Agent) -> None:
    idle = [FakePeer(agent.listen, "mute", stream=True) for _ in range(streams.UNASKED_MAX)]
    try:
        with FakePeer(agent.listen, "other", stream=True) as other:
            with pytest.raises(CUT_OFF):
                idle[0].receive()
            other.send(Forward(request("info")))
            assert answer(other)[1] == "ok"
    finally:
        for asker in idle:
            asker.close()


@pytest.mark.rule("P2")
def test_a_flood_of_large_requests_is_read_no_faster_than_carried_out(fresh: Agent) -> None:
    """Waits that never end, of 10,000 names each: 1 MiB of them is held, the rest stays where it came from."""
    task = fresh.submit("sleep", "60")
    raw = request("wait", tasks=[task] * 10_000)
    with FakePeer(fresh.listen, "flood", stream=True) as asker:
        asker._socket.settimeout(2.0)
        sent = _sent_until_held(asker, raw)
        assert fresh.call("info")["node"] == "n1"
        assert sent < 64 << 20
    fresh.call("cancel", tasks=[task])


@pytest.mark.long
@pytest.mark.rule("L3")
def test_who_waits_for_too_many_tasks_is_told_so_until_it_gives_some_up(fresh: Agent) -> None:
    """Of an array all members count."""
    members = 100_000
    task = fresh.cli("submit", "--held", "--array", f"1-{members}", "true").stdout.decode().strip()
    room = authorization.WAITED_BY_NODE_MAX // members
    before = fresh.resident_bytes
    with FakePeer(fresh.listen, "many", stream=True) as asker:
        asker._socket.settimeout(10 * PATIENCE_S)
        for number in range(1, room + 2):
            asker.send(Forward(request("wait", number, tasks=[task])))
        number, refused, body = answer(asker)
        assert (refused, body["code"]) == ("error", "slow-down")
        assert fresh.resident_bytes - before < 512 << 20
        with FakePeer(fresh.listen, "other", stream=True) as other:
            other._socket.settimeout(PATIENCE_S)
            other.send(Forward(request("wait", 1, tasks=[task], timeout_s=0)))
            assert answer_to(other, 1) == ("ok", {"timed_out": True})
        given_up = 1 if number != 1 else 2
        asker.send(Forward(request("wait", 100, tasks=[task], timeout_s=0)))
        assert answer_to(asker, 100)[0] == "error"
        asker.send(Forward(request("show", 101, tasks=[f"{task}.1", f"{task}.2"])))
        assert answer_to(asker, 101)[0] == "ok", "what is answered at once is no matter"
        asker.send(ForwardStop(given_up))
        asked = itertools.count(102)
        wait_until(lambda: is_carried_out(asker, next(asked), task), what="room for one more")


def is_carried_out(asker: FakePeer, number: int, task: str) -> bool:
    asker.send(Forward(request("wait", number, tasks=[task], timeout_s=0)))
    return answer_to(asker, number)[0] == "ok"


def _sent_until_held(asker: FakePeer, raw: bytes) -> int:
    """How many bytes of requests are taken before it is read no further."""
    sent = 0
    try:
        while sent < 1 << 30:
            asker.send(Forward(raw))
            sent += len(raw)
    except TimeoutError:
        pass
    return sent


@pytest.mark.long
@pytest.mark.rule("P2")
def test_who_asks_and_does_not_read_is_not_listened_to_until_it_has_read(fresh: Agent) -> None:
    before = fresh.resident_bytes
    with FakePeer(fresh.listen, "deaf", stream=True) as asker:
        asker._socket.settimeout(2.0)
        asked = 0
        with contextlib.suppress(TimeoutError):
            while asked < 15_000:  # answers of 2 KB each
                asker.send(Forward(request("settings", asked + 1)))
                asked += 1
        assert fresh.call("info")["node"] == "n1"
        assert fresh.resident_bytes - before < 24 << 20
        asker._socket.settimeout(PATIENCE_S)
        answered = dict(answer(asker)[:2] for _ in range(asked))
    assert answered.keys() == set(range(1, asked + 1))
    assert (
        "ok" in answered.values()
    )  # a piece of the stream may have more requests than may be pending: the rest is refused


def test_who_does_not_read_is_waited_for_and_only_that_one(fresh: Agent) -> None:
    task = fresh.submit("sh", "-c", "head -c 16000000 /dev/zero | tr '\\0' x", placement={"node": "n1"})
    fresh.wait(task)
    with FakePeer(fresh.listen, "lazy", stream=True) as asker:
        for number in range(1, 9):
            asker.send(Forward(request("output", number, task=task)))
        assert fresh.call("info")["node"] == "n1"
        assert fresh.cli("logs", task).returncode == 0
        for number in range(1, 9):
            asker.send(ForwardStop(number))
        asker.send(ForwardStop(1 << 62))
        asker.send(Forward(request("info", 9)))
        answer_to(asker, 9)


# -- who answers -------------------------------------------------------------------------------------------------------


class FakeHome:
    """A member that listens: whoever asks it something over a stream gets what the test says."""

    def __init__(self, agent: Agent, frames: Sequence[bytes], *, node: str = "liar") -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._frames = frames
        self._node = node
        self._threads = [threading.Thread(target=target) for target in (self._serve, self._live)]
        address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._link = FakePeer(agent.listen, node, at=address)
        self.identity = Identity(node, "boot", "machine", "store", 1, address)
        for thread in self._threads:
            thread.start()
        wait_until(lambda: node in agent.peers_alive(), what="it to be known")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._link.hang_up()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self._link.close()

    def _live(self) -> None:
        """Answer when it is asked whether it is there: who does not counts as dead before long."""
        with contextlib.suppress(OSError):
            self._link.expect(OutputEnd, math.inf)

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listening.accept()
            except OSError:
                return
            plain.settimeout(60)
            try:
                with credentials_of(self._node).server.wrap_socket(plain, server_side=True) as stream:
                    self._answer(stream)
            except (OSError, ValueError):
                continue  # it was cut off

    def _answer(self, stream: ssl.SSLSocket) -> None:
        hello = Hello(self.identity, Profile(self._node, 8, 8.0), LoadReport(), stream=True)
        asker = self._read(stream)
        self._send(stream, hello, asker)
        self._read(stream)
        for frame in self._frames:
            self._send(stream, Forwarded(frame), asker)
        while stream.recv(1 << 16):
            pass

    def _read(self, stream: ssl.SSLSocket) -> Envelope:
        raw = b""
        while len(raw) < 4 or len(raw) < 4 + int.from_bytes(raw[:4], "big"):
            more = stream.recv(4 if len(raw) < 4 else 4 + int.from_bytes(raw[:4], "big") - len(raw))
            if not more:
                raise ConnectionError
            raw += more
        return peer.decode(raw[4:])

    def _send(self, stream: ssl.SSLSocket, message: Hello | Forwarded, asker: Envelope) -> None:
        boot = asker.src_boot if isinstance(message, Forwarded) else ""
        to = asker.src if isinstance(message, Forwarded) else ""
        envelope = Envelope(1, "default", self._node, "boot", 1, message, to, boot)
        stream.sendall(peer.encode_frame(envelope))


def refusal(agent: Agent, *frames: bytes, node: str = "liar") -> str:
    """What a user is told who shows a task of a home that answers so."""
    with FakeHome(agent, frames, node=node):
        done = agent.cli("show", f"{node}/1")
    assert done.returncode == 125
    assert done.stdout == b""
    assert b"\x1b" not in done.stderr
    assert b"Traceback" not in done.stderr
    assert agent.call("info")["node"] == "n1"
    return done.stderr.decode()


def test_answers_that_are_none(agent: Agent) -> None:
    packed = [
        msgpack.packb({"id": 1}),
        msgpack.packb({"id": 1, "ok": {}, "more": {}}),
        msgpack.packb([1]),
        b"\xc1",
        b"",
    ]
    extension = msgpack.packb({"id": 1, "ok": {"tasks": msgpack.ExtType(5, b"x")}})
    deep = b"\x82\xa2id\x01\xa2ok\x81\xa1a" + b"\x91" * 5000 + b"\xc0"
    for number, raw in enumerate(
        [*packed, extension, deep, msgpack.packb({"id": 1, "ok": {"a": "\ud800"}}, unicode_errors="surrogatepass")]
    ):
        assert refusal(agent, raw, node=f"liar{number}").startswith("peerload: ")


@pytest.mark.rule("T1")
def test_an_error_in_hostile_words_is_cut_and_escaped(agent: Agent) -> None:
    words = "\x1b]0;owned\x07\u202e\n" + "x" * 100_000
    said = refusal(agent, msgpack.packb({"id": 1, "error": {"what": words, "why": 7, "hint": None}}), node="wordy")
    assert said.startswith("peerload: \\x1b]0;owned\\x07\\u202e\\x0ax")
    assert len(said) < 5000


def test_an_answer_without_an_end_is_given_up(agent: Agent) -> None:
    endless = [Forwarded(b"x" * (512 << 10), continues=True)] * 12

    class Endless(FakeHome):
        def _send(self, stream: ssl.SSLSocket, message: Hello | Forwarded, asker: Envelope) -> None:
            super()._send(stream, message, asker)
            if isinstance(message, Forwarded):
                for part in endless:
                    super()._send(stream, part, asker)

    with Endless(agent, [msgpack.packb({"id": 77, "ok": {}})], node="endless"):
        done = agent.cli("show", "endless/1")
    assert (done.returncode, b"endless" in done.stderr) == (125, True)


def test_an_answer_of_another_kind_cuts_the_stream(agent: Agent) -> None:
    class Blunt(FakeHome):
        def _send(self, stream: ssl.SSLSocket, message: Hello | Forwarded, asker: Envelope) -> None:
            if isinstance(message, Forwarded):
                stream.sendall(
                    peer.encode_frame(Envelope(1, "default", self._node, "boot", 1, Ping(1), asker.src, asker.src_boot))
                )
            else:
                super()._send(stream, message, asker)

    with Blunt(agent, [b"x"], node="blunt2"):
        done = agent.cli("show", "blunt2/1")
    assert (done.returncode, b"blunt2" in done.stderr) == (125, True)


def test_decode_answer_is_total() -> None:
    for raw in (b"", b"\x80", b"\xc1" * 9, msgpack.packb({"ok": 1})):
        with pytest.raises(PeerloadError):
            control.decode_answer(raw)


def listed_with(agent: Agent, node: str, *frames: bytes, **fields: object) -> dict[str, Any]:
    """What `ls --cluster` is told beside a member that answers so."""
    with FakeHome(agent, frames, node=node):
        reply = agent.call("tasks", cluster=True, **fields)
    assert agent.call("info")["node"] == "n1"
    return reply


def why_missing(reply: dict[str, Any], node: str) -> str:
    (why,) = [lacking["why"] for lacking in reply["missing"] if lacking["node"] == node]
    return str(why)


NO_LISTS: dict[str, dict[str, object]] = {
    "huge": {"unfinished": {"queued": 2**64 - 1}},
    "table": {"unfinished": ["queued"]},
    "words": {"tasks": ["n1/1"]},
    "nameless": {"tasks": [{"state": "done"}]},
    "when": {"tasks": [{"id": "when/1", "state": "done", "submitted_at": "yesterday"}]},
    "keys": {"tasks": [{"id": "keys/1", "state": "done", 7: 7}]},
}
"""node → what it answers"""


def test_what_is_no_list_of_tasks_is_left_out_and_its_node_named(agent: Agent) -> None:
    held = {"spec": agent.cluster.spec("true"), "held": True}
    waiting = [agent.call("submit", token=secrets.token_hex(16), **held)["id"] for _ in range(2)]
    for node, told in NO_LISTS.items():
        reply = listed_with(agent, node, msgpack.packb({"id": 1, "ok": told}), limit=1, states=["held"])
        assert [task["id"].partition("/")[0] for task in reply["tasks"]] == ["n1"], node
        assert reply["unfinished"]["held"] == 2, node
        assert why_missing(reply, node)
    agent.call("cancel", tasks=waiting)


def test_a_list_within_lists_without_end_is_left_out(agent: Agent) -> None:
    deep = b"\x82\xa2id\x01\xa2ok\x81\xaaunfinished" + b"\x81\xa1a" * 900 + b"\xc0"
    reply = listed_with(agent, "deeper", deep)
    assert why_missing(reply, "deeper")


def test_who_lists_more_than_was_asked_for_is_stopped(agent: Agent) -> None:
    one = {"id": "endless/1", "state": "done"}
    frames = [msgpack.packb({"id": 1, "more": {"tasks": [one] * 6}})] * 3
    reply = listed_with(agent, "lister", *frames, limit=10)
    assert "10" in why_missing(reply, "lister")
    assert len([task for task in reply["tasks"] if task["id"] == one["id"]]) == 6


@pytest.mark.long
def test_empty_frames_without_end_are_stopped(agent: Agent) -> None:
    frames = [msgpack.packb({"id": 1, "more": {}})] * (tunnels.ANSWER_BYTES_MAX // tunnels.FRAME_BYTES_MIN + 1)
    reply = listed_with(agent, "empty", *frames)
    assert why_missing(reply, "empty")


@pytest.mark.long
def test_an_answer_that_is_gathered_has_a_bound(agent: Agent) -> None:
    raw = msgpack.packb({"id": 1, "more": {"tasks": [b"x" * 500_000]}})
    said = refusal(agent, *[raw] * (tunnels.ANSWER_BYTES_MAX // len(raw) + 1), node="vast")
    assert "MiB" in said
