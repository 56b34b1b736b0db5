"""The door for newcomers, attacked: whoever was not invited learns nothing, changes nothing and keeps nobody out."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self
from zlib import crc32

import pytest

from peerload.agent.joining import NEWCOMERS_MAX, REFUSAL_S, REFUSALS_MAX, REQUEST_S, WITHIN_S
from peerload.model.errors import BadRequest, LinkUnavailable, PeerloadError
from peerload.security import certificates, invitations
from peerload.wire import join
from peerload.wire.token import Token, parse
from tests.integration.cluster import Agent, Cluster
from tests.support import PATIENCE_S, cluster_of, wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

USED = "the token was used before, has expired, is of another cluster, or was used by a node that is revoked"


@pytest.fixture(name="cluster", scope="module")
def fixture_cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the door answers is waited for while the machine stands still."""
    monkeypatch.setattr(invitations, "CONNECT_S", PATIENCE_S)
    monkeypatch.setattr(invitations, "ANSWERS_WITHIN_S", PATIENCE_S)


@pytest.fixture(name="agent", scope="module")
def fixture_agent(cluster: Cluster) -> Agent:
    """An agent for all of these tests: what they ask amiss comes from addresses of their own, so that none is kept out."""
    return cluster.agent("n1")


@pytest.fixture(name="fresh")
def fixture_fresh() -> Iterator[Agent]:
    """An agent that has refused nobody yet."""
    with Cluster() as made:
        yield made.agent("n1")


def refused(agent: Agent) -> int:
    """How often it has refused somebody."""
    return agent.counters().get("joins_refused_total", 0)


def invited(agent: Agent, **terms: object) -> Token:
    return parse(agent.call("invite", **terms)["token"])


def ask(token: Token, state: Path) -> invitations.Admission:
    """Ask to be let in, as the machine with this state directory, which has a name of its own."""
    state.mkdir(exist_ok=True)
    return invitations.join_cluster(token, f"ws{crc32(os.fsencode(state)):x}", state)


def refusal(token: Token, state: Path) -> str:
    """Why not."""
    with pytest.raises(PeerloadError) as caught:
        ask(token, state)
    return caught.value.why


def stranger(agent: Agent, source: str = "127.0.0.1") -> ssl.SSLSocket:
    """A connection to the door, from this address, that has said nothing yet."""
    host, _, port = agent.listen.rpartition(":")
    plain = socket.create_connection((host, int(port)), PATIENCE_S, (source, 0))
    return invitations._unproven().wrap_socket(plain)


def heard(link: ssl.SSLSocket) -> bytes:
    said = b""
    with contextlib.suppress(OSError):
        while piece := link.recv(1 << 16):
            said += piece
    return said


# -- tokens --------------------------------------------------------------------------------------------------------------


@pytest.mark.rule("J2")
@pytest.mark.bad_input("replayed-join")
def test_whatever_is_wrong_with_a_token_the_answer_is_the_same(fresh: Agent, tmp_path: Path) -> None:
    agent = fresh
    used, ended, good = invited(agent), invited(agent, ttl_s=1), invited(agent)
    ask(used, tmp_path / "first")
    ended_at = time.time() + 1
    wait_until(lambda: time.time() > ended_at, what="its end")
    wrong = [ended, good._replace(secret=os.urandom(16)), good._replace(id=os.urandom(8))]
    began_s = time.monotonic()
    assert refusal(used, tmp_path / "used") == USED
    with ThreadPoolExecutor(len(wrong)) as pool:
        answers = list(pool.map(refusal, wrong, (tmp_path / f"s{number}" for number in range(len(wrong)))))
    assert time.monotonic() - began_s >= REFUSAL_S, "nobody guesses at the pace of the network"
    assert set(answers) == {USED}
    assert refused(agent) == 4
    wait_until(
        lambda: any("its token was used before" in reason for reason in _events(agent)), what="its owner to be told why"
    )
    assert ask(good, tmp_path / "last").welcome.name == cluster_of().name


def _events(agent: Agent) -> list[str]:
    with agent.client() as client:
        return [
            event["reason"]
            for part in client.stream("events", what=["join"])
            for event in part["events"]
            if event["state"] == "refused"
        ]


def test_the_token_of_another_cluster_says_nothing_to_this_one(agent: Agent, tmp_path: Path) -> None:
    other = bytes.fromhex(cluster_of("another").fingerprint)
    before = refused(agent)
    assert "another CA" in refusal(invited(agent)._replace(fingerprint=other), tmp_path / "s")
    assert refused(agent) == before, "no proof was shown to it"


@pytest.mark.long
@pytest.mark.rule("J2")
def test_a_thousand_guesses_are_ten_answers(fresh: Agent, tmp_path: Path) -> None:
    agent = fresh
    good = invited(agent)
    proofs = threading.Semaphore(8)
    began_s = time.monotonic()

    def guess(number: int) -> str:
        with proofs:
            try:
                _guess(agent, good)
            except (OSError, EOFError, LinkUnavailable):
                return "dropped"
            except BadRequest:
                return "refused"
            return f"let in by guess {number}"

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(guess, range(1000)))
    minutes = 1 + int((time.monotonic() - began_s) / WITHIN_S)  # on a machine that is busy it is more than one
    assert set(results) == {"refused", "dropped"}
    assert results.count("refused") <= minutes * (REFUSALS_MAX + 8), "those that were already being heard"
    counters = agent.counters()
    assert counters["joins_refused_total"] == results.count("refused")
    assert (
        counters["joins_refused_total"] + counters['join_connections_dropped_total{reason="too_many_refusals"}'] >= 990
    )
    assert len(_events(agent)) <= 1 + minutes, "and not an event each"
    wait_until(lambda: guess(1001) == "dropped", what="it to be heard no more")
    with pytest.raises(LinkUnavailable, match="ten refusals"):
        ask(good, tmp_path / "s")
    assert agent.call("info")["peers"] == 0


def _guess(agent: Agent, token: Token) -> None:
    """One wrong proof, over one connection. Raises what became of it."""
    with stranger(agent) as link:
        link.settimeout(PATIENCE_S)
        who = invitations._exchange(link, join.JoinAsk(), "door")
        assert isinstance(who, join.JoinWho)
        csr = b"none"
        answer = invitations._exchange(link, join.JoinRequest(token.id, "ws2", csr, os.urandom(64)), "door")
        assert isinstance(answer, join.JoinRefused)
        raise BadRequest(answer.code)


def test_after_a_kill_the_answer_that_was_lost_is_given_again_and_invitations_are_still_good(
    agent: Agent, tmp_path: Path
) -> None:
    token, other = invited(agent), invited(agent)
    ask(token, tmp_path / "one")  # it is on disk that it was used; the newcomer never gets to keep the answer
    agent.kill()
    with pytest.raises(PeerloadError):
        ask(other, tmp_path / "other")
    agent.start()
    token, other = (one._replace(addresses=(agent.listen,)) for one in (token, other))
    assert ask(other, tmp_path / "other").welcome.certificate, "an invitation outlives a restart"
    assert ask(token, tmp_path / "one").key, "the same machine again"
    assert refusal(token, tmp_path / "two") == USED, "no other"


# -- somebody in between ---------------------------------------------------------------------------------------------------


class Between:
    """A TLS server with a certificate of its own choice; ``handle`` is given each connection."""

    def __init__(self, pair: certificates.KeyPair, tmp_path: Path, handle: Callable[[ssl.SSLSocket], None]) -> None:
        path = tmp_path / "between.pem"
        path.write_bytes(pair.key + pair.certificate)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(path)
        self._context.set_alpn_protocols([join.PROTOCOL])
        self._handle = handle
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.heard: list[join.FromNewcomer] = []
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(PATIENCE_S)

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._socket.accept()
            except OSError:
                return
            with contextlib.suppress(OSError, EOFError), self._context.wrap_socket(plain, server_side=True) as link:
                link.settimeout(PATIENCE_S)
                self._handle(link)

    def next(self, link: ssl.SSLSocket) -> join.FromNewcomer:
        size = int.from_bytes(invitations._read(link, 4), "big")
        message = join.decode_newcomer(invitations._read(link, size))
        self.heard.append(message)
        return message


@pytest.mark.rule("J2")
def test_somebody_in_between_with_a_ca_of_its_own_is_told_nothing(agent: Agent, tmp_path: Path) -> None:
    theirs = certificates.make_ca(cluster_of().name, cluster_of().id, datetime.now(UTC))
    pair = certificates.issue(theirs, "n1", datetime.now(UTC))
    for shown in (theirs.certificate, cluster_of().authority.certificate, b"none"):

        def pretend(link: ssl.SSLSocket, shown: bytes = shown) -> None:
            between.next(link)
            link.sendall(join.encode(join.JoinWho(shown, b"n" * 32)))
            between.next(link)

        with Between(pair, tmp_path, pretend) as between:
            token = invited(agent)._replace(addresses=(between.address,))
            with pytest.raises(PeerloadError):
                ask(token, tmp_path / "s")
            assert all(isinstance(message, join.JoinAsk) for message in between.heard)


@pytest.mark.rule("J2")
@pytest.mark.bad_input("replayed-join")
def test_a_member_in_between_cannot_use_what_it_hears(agent: Agent, tmp_path: Path) -> None:
    """It has a certificate of the cluster, and passes everything on to who has made the token."""
    pair = certificates.issue(cluster_of().authority, "mallory", datetime.now(UTC))
    answers: list[join.FromNode] = []

    def pass_on(link: ssl.SSLSocket) -> None:
        with stranger(agent) as door:
            while True:
                answer = invitations._exchange(door, between.next(link), "door")
                answers.append(answer)
                link.sendall(join.encode(answer))

    with Between(pair, tmp_path, pass_on) as between:
        token = invited(agent)
        assert refusal(token._replace(addresses=(between.address,)), tmp_path / "s") == USED
        assert isinstance(answers[-1], join.JoinRefused)
    assert ask(token, tmp_path / "t").key, "and the token was not used up by that"


def test_a_member_without_the_cas_key_cannot_answer_in_its_place(agent: Agent, tmp_path: Path) -> None:
    pair = certificates.issue(cluster_of().authority, "mallory", datetime.now(UTC))
    theirs = certificates.make_ca(cluster_of().name, cluster_of().id, datetime.now(UTC))

    def pretend(link: ssl.SSLSocket) -> None:
        between.next(link)
        link.sendall(join.encode(join.JoinWho(cluster_of().authority.certificate, b"n" * 32)))
        request = between.next(link)
        assert isinstance(request, join.JoinRequest)
        made = certificates.certify(theirs, request.node, certificates.requested_key(request.csr), datetime.now(UTC))
        link.sendall(join.encode(join.JoinWelcome(made, "evil", cluster_of().id, b"k" * 32)))

    with Between(pair, tmp_path, pretend) as between, pytest.raises(PeerloadError, match=Says.NOT_VALID()):
        ask(invited(agent)._replace(addresses=(between.address,)), tmp_path / "s")


# -- bytes -----------------------------------------------------------------------------------------------------------------


NO_WORDS = {
    "4 GiB": b"\xff\xff\xff\xff",
    "garbage": b"\x00\x00\x00\x05hello",
    "empty": b"\x00\x00\x00\x00",
    "too large": (join.REQUEST_BYTES_MAX + 1).to_bytes(4, "big") + b"x" * 100,
    "asked twice": join.encode(join.JoinAsk()) * 3,
    "out of turn": join.encode(join.JoinRequest(b"i" * 8, "ws2", b"", b"p" * 64)),
    "http": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.bad_input("garbage")
def test_what_is_no_word_of_joining_is_refused_and_closed(agent: Agent) -> None:
    before = refused(agent)
    with contextlib.ExitStack() as stack:
        links = {name: stack.enter_context(stranger(agent, "127.0.0.3")) for name in NO_WORDS}
        for name, link in links.items():
            link.settimeout(PATIENCE_S)
            link.sendall(NO_WORDS[name])
        for name, link in links.items():
            assert b"join-welcome" not in heard(link), name
    wait_until(lambda: refused(agent) == before + len(NO_WORDS), what="each to be counted")
    assert agent.runs


def test_requests_that_cannot_be_are_not_looked_into(agent: Agent) -> None:
    asked = [(node, b"x") for node in ("WS2", "", "a" * 41, "n1\n", "../n1")]
    asked.append(("ws2", b"x" * (join.CSR_BYTES_MAX + 1)))
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(stranger(agent, "127.0.0.4")) for _ in asked]
        for link, (node, csr) in zip(links, asked, strict=True):
            link.settimeout(PATIENCE_S)
            link.sendall(join.encode(join.JoinAsk()))
            link.recv(1 << 16)
            link.sendall(join.encode(join.JoinRequest(b"i" * 8, node, csr, b"p" * 64)))
        for link, (node, _) in zip(links, asked, strict=True):
            assert b"request" in heard(link), node


@pytest.mark.long
@pytest.mark.rule("J3")
@pytest.mark.bad_input("slow-loris")
def test_who_speaks_too_slowly_is_closed_and_members_are_not_kept_out(fresh: Agent) -> None:
    agent, cluster = fresh, fresh.cluster
    assert REQUEST_S <= 5.0, "who says nothing is shut out within 5 s"
    slow = []

    def there_are_too_many() -> bool:
        """Whether somebody was turned away, with as many more at the door as may be there: the first may have gone."""
        for _ in range(NEWCOMERS_MAX + 4):
            link = stranger(agent)
            with contextlib.suppress(OSError):
                link.sendall(b"\x00")
            slow.append(link)
        return agent.counters().get('join_connections_dropped_total{reason="too_many_newcomers"}', 0) >= 4

    wait_until(there_are_too_many, what="there is a bound")
    member = cluster.agent("n2", "--peer", agent.listen)
    cluster.await_acquainted([agent, member])
    for link in slow:
        link.settimeout(PATIENCE_S)
        with link, contextlib.suppress(ConnectionError, ssl.SSLError):
            assert link.recv(1) == b"", "it is closed, and nothing was said"


@pytest.mark.long
@pytest.mark.rule("J2", "J3")
def test_who_has_one_address_keeps_nobody_waiting_who_has_another(fresh: Agent, tmp_path: Path) -> None:
    agent = fresh
    token, crowd = invited(agent), []
    is_over = threading.Event()

    def silent() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError), stranger(agent, "127.0.0.2") as link:
                link.settimeout(PATIENCE_S)
                heard(link)

    for _ in range(NEWCOMERS_MAX + 4):
        crowd.append(threading.Thread(target=silent, daemon=True))
        crowd[-1].start()
    try:
        dropped = 'join_connections_dropped_total{reason="too_many_newcomers"}'
        wait_until(lambda: agent.counters().get(dropped, 0) >= 4, what="there is no place for another from there")
        assert ask(token, tmp_path / "s").key
    finally:
        is_over.set()
        for one in crowd:
            one.join(PATIENCE_S)


def test_a_frame_cut_off_anywhere_leaves_nothing(agent: Agent, tmp_path: Path) -> None:
    whole = join.encode(join.JoinAsk())
    before = refused(agent)
    for size in range(len(whole)):
        with stranger(agent) as link:
            link.sendall(whole[:size])
    assert ask(invited(agent), tmp_path / "s").key
    assert refused(agent) == before


@pytest.mark.rule("J2", "J3")
def test_a_newcomer_hears_nothing_a_member_would(agent: Agent) -> None:
    """Without a certificate there is joining and nothing else, whatever is offered to be spoken."""
    host, _, port = agent.listen.rpartition(":")
    why = 'peer_frames_dropped_total{reason="handshake_failed"}'
    before = agent.counters().get(why, 0)
    for offered in (["peerload/1"], ["http/1.1"], []):
        context = invitations._unproven()
        if offered:
            context.set_alpn_protocols(offered)
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        with socket.create_connection((host, int(port)), PATIENCE_S) as plain, context.wrap_socket(plain) as link:
            with contextlib.suppress(OSError):
                link.sendall(join.encode(join.JoinAsk()))
            assert heard(link) == b""
    wait_until(lambda: agent.counters().get(why, 0) == before + 3, what="each is counted")
