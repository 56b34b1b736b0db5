"""What the CA has said: only it can say so, everybody can pass it on, nobody can take it back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peerload.model.errors import BadRequest
from peerload.security import certificates, revocation
from peerload.security.certificates import CertificateInfo, KeyPair
from peerload.security.private_files import write_private
from peerload.security.revocation import CLOCKS_S, OVERLAP_S, SPREAD_S, Revoked, SealKey, TrustStore
from peerload.wire.seal import Sealer
from tests.each import each
from tests.support import cluster_of
from tests.wording import Says

NOW = 1_800_000_000.0
YEAR_S = 365 * 86_400.0
K1, K2, K3 = (bytes((number,)) * 32 for number in (1, 2, 3))


def trust_in(directory: Path, name: str = "default") -> TrustStore:
    directory.mkdir(exist_ok=True)
    return TrustStore(cluster_of(name), directory / "trust")


def facts(node: str, issued_at: float, key: str = "k") -> CertificateInfo:
    valid_from = datetime.fromtimestamp(issued_at, UTC) - certificates.SKEW
    return CertificateInfo(node, valid_from, valid_from + timedelta(days=91), "f", key)


@pytest.mark.rule("J4")
@each("ahead_s", [0.0, 3000.0])
def test_who_is_shut_out_a_second_time_is_out_with_what_it_got_in_between(tmp_path: Path, ahead_s: float) -> None:
    one, other = trust_in(tmp_path / "1"), trust_in(tmp_path / "2")
    other.take([one.revoke("ws3", [], NOW + ahead_s)], NOW)
    anew = facts("ws3", other.certified_at("ws3", datetime.fromtimestamp(NOW, UTC)).timestamp())
    assert not other.refuses(anew)
    one.take([other.revoke("ws3", [], NOW + 1)], NOW + 1)
    for known in (one, other):
        assert known.refuses(anew)
        once_more = known.certified_at("ws3", datetime.fromtimestamp(NOW + 2, UTC))
        assert not known.refuses(facts("ws3", once_more.timestamp()))


def test_who_is_shut_out_is_out_with_every_certificate_made_until_then(tmp_path: Path) -> None:
    one = trust_in(tmp_path / "1")
    raw = one.revoke("ws3", ["stolen"], NOW)
    other = trust_in(tmp_path / "2")
    assert not other.refuses(facts("ws3", NOW - 10))
    ((_, word),) = other.take([raw], NOW + 1)
    assert isinstance(word, Revoked)
    for known in (one, other, trust_in(tmp_path / "2")):  # the last one: read again
        assert known.refuses(facts("ws3", NOW - 10))
        assert known.refuses(facts("ws3", NOW))
        assert known.refuses(facts("ws9", NOW + 100, "stolen")), "the key counts under no name"
        assert known.refuses(facts("ws3", NOW + CLOCKS_S)), (
            "made where the clock is ahead, or where it was not known yet"
        )
        anew = known.certified_at("ws3", datetime.fromtimestamp(NOW + 1, UTC))
        assert not known.refuses(facts("ws3", anew.timestamp())), "invited anew"
        assert anew - certificates.SKEW < datetime.fromtimestamp(NOW, UTC), "and good at once"
        later = datetime.fromtimestamp(NOW + 2 * CLOCKS_S, UTC)
        assert known.certified_at("ws3", later) == known.certified_at("ws9", later) == later
        assert not known.refuses(facts("ws30", NOW - 10))
        assert known.was_revoked("ws3")


@pytest.mark.rule("J4")
def test_a_member_can_neither_forge_nor_change_nor_undo_one(tmp_path: Path) -> None:
    one = trust_in(tmp_path / "1")
    raw = one.revoke("ws3", [], NOW)
    other = trust_in(tmp_path / "2")
    body, signature = msgspec.msgpack.decode(raw)
    forged = [
        msgspec.msgpack.encode((msgspec.msgpack.encode(Revoked(cluster_of().id, "ws1", NOW)), signature)),
        msgspec.msgpack.encode((body, b"s" * 64)),
        trust_in(tmp_path / "3", "another").revoke("ws1", [], NOW),
        b"",
        raw[:-1],
        raw + b"\0",
    ]
    for wrong in forged:
        with pytest.raises(BadRequest):
            other.take([raw, wrong], NOW)
        assert other.signed == (), "nothing of it is taken"
    other.take([raw], NOW)
    assert other.take([raw], NOW) == []
    assert other.take([], NOW) == []
    assert other.signed == (raw,), "there is no word that takes one back"


@pytest.mark.rule("J4")
def test_one_word_in_many_wrappings_is_no_many_words(tmp_path: Path) -> None:
    """Else whoever has seen one, at a broker say, could fill every member's file until nothing of it is read any more."""
    raw = trust_in(tmp_path / "1").revoke("ws3", [], NOW)
    body, signature = (msgspec.msgpack.encode(part) for part in msgspec.msgpack.decode(raw))
    other = trust_in(tmp_path / "2")
    for wrapped in (
        b"\x93" + body + signature + b"\x01",
        b"\xdc\x00\x02" + body + signature,
        b"\x92" + b"\xc6\x00\x00\x00" + body[1:] + signature,
    ):
        with pytest.raises(BadRequest):
            other.take([wrapped], NOW)
        write_private(tmp_path / "2" / "trust", msgspec.msgpack.encode(((wrapped, NOW), (raw, NOW))))
        assert trust_in(tmp_path / "2").signed == (raw,), "nor where it is kept from before"


def test_another_clusters_ca_with_our_id_says_nothing(tmp_path: Path) -> None:
    ours = cluster_of()
    theirs = certificates.make_ca("lab", ours.id, datetime.now(UTC))
    raw = TrustStore(ours._replace(authority=theirs), tmp_path / "theirs").revoke("ws1", [], NOW)
    with pytest.raises(BadRequest):
        trust_in(tmp_path / "1").take([raw], NOW)


def test_a_member_without_the_cas_key_takes_and_passes_on(tmp_path: Path) -> None:
    ours = cluster_of()
    member = TrustStore(ours._replace(authority=KeyPair(ours.authority.certificate, b"")), tmp_path / "trust")
    raw = trust_in(tmp_path / "1").revoke("ws3", [], NOW)
    member.take([raw], NOW)
    assert member.signed == (raw,)
    with pytest.raises(ValueError, match=r".*"):
        member.revoke("ws1", [], NOW)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=10)
@given(st.permutations(range(6)), st.lists(st.integers(0, 5), max_size=4))
def test_in_whatever_order_and_however_often_it_comes(tmp_path: Path, order: list[int], again: list[int]) -> None:
    origin = TrustStore(cluster_of(), tmp_path / "origin")
    said = [origin.revoke(f"ws{number}", [], NOW) for number in range(3)]
    said += [origin.rotate(key, NOW, OVERLAP_S) for key in (K1, K2, K3)]
    member = TrustStore(cluster_of(), tmp_path / "member")
    for number in [*order, *again]:
        member.take([said[number]], NOW)
    assert member.digest == origin.digest
    assert member.newest_key == K3
    for name in ("origin", "member"):
        (tmp_path / name).unlink()


@pytest.mark.rule("J5")
def test_two_keys_are_valid_for_a_while(tmp_path: Path) -> None:
    one, base = trust_in(tmp_path / "1"), cluster_of().key
    assert one.keys(NOW) == (base,)
    one.rotate(K1, NOW, OVERLAP_S)
    assert one.keys(NOW) == (base, K1), "it opens at once, and seals when others have it"
    assert one.changes_at(NOW) == NOW + SPREAD_S
    assert one.keys(NOW + SPREAD_S) == (K1, base)
    assert one.keys(NOW + OVERLAP_S) == (K1,)
    assert one.changes_at(NOW + OVERLAP_S) is None
    one.rotate(K2, NOW + OVERLAP_S, 30)
    assert one.keys(NOW + OVERLAP_S + SPREAD_S) == (K2, K1)
    assert trust_in(tmp_path / "1").keys(NOW + OVERLAP_S + 30) == (K2,), "also after a restart"


def test_who_hears_late_seals_with_the_new_key_at_once(tmp_path: Path) -> None:
    raw = trust_in(tmp_path / "1").rotate(K1, NOW, OVERLAP_S)
    late = trust_in(tmp_path / "2")
    late.take([raw], NOW + 7200)
    assert late.keys(NOW + 7200) == (K1, cluster_of().key)
    revocation.save(tmp_path / "new", [raw])
    assert TrustStore(cluster_of(), tmp_path / "new").keys(NOW) == (K1,), "a newcomer never had another"


def test_old_revocations_and_keys_are_dropped(tmp_path: Path) -> None:
    one = trust_in(tmp_path / "1")
    one.revoke("ws3", [], NOW)
    for key in (K1, K2, K3):
        one.rotate(key, NOW, OVERLAP_S)
    assert sum(isinstance(word, SealKey) for word, _ in one._known.values()) == revocation.KEYS_KEPT_MAX
    one.revoke("ws4", [], NOW + CLOCKS_S + revocation.ENDS_AFTER_S + 1)
    assert {word.node for word in one.revocations} == {"ws4"}


@pytest.mark.rule("J4")
def test_a_clock_that_is_a_year_ahead_for_a_moment_lets_nobody_in_again(tmp_path: Path) -> None:
    one, other = trust_in(tmp_path / "1"), trust_in(tmp_path / "2")
    other.take([one.revoke("ws3", [], NOW)], NOW)
    other.take([one.rotate(K1, NOW + 10, OVERLAP_S)], NOW + 10 + YEAR_S)
    other.take([one.revoke("ws4", [], NOW + 20)], NOW + 20 + YEAR_S)
    for known in (other, trust_in(tmp_path / "2")):
        assert known.refuses(facts("ws3", NOW - 10))
        assert known.refuses(facts("ws4", NOW - 10))
    ahead = trust_in(tmp_path / "3")
    word = ahead.revoke("ws5", [], NOW + YEAR_S)
    other.take([word], NOW + 30)
    assert other.refuses(facts("ws3", NOW - 10)), "nor does that of whoever says it"


@pytest.mark.rule("J5")
def test_a_clock_that_is_set_back_seals_with_no_key_of_before(tmp_path: Path) -> None:
    one = trust_in(tmp_path / "1")
    one.rotate(K1, NOW, OVERLAP_S)
    assert one.keys(NOW - 10) == (cluster_of().key, K1), "a little is as if it had just come"
    assert one.keys(NOW - YEAR_S) == (K1,)


def test_who_is_shut_out_and_the_new_key_are_kept_at_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trust_in(tmp_path / "1")
    with monkeypatch.context() as patch:
        patch.setattr(revocation, "write_private", _no_room)
        with pytest.raises(OSError, match="no room"):
            one.revoke("ws3", [], NOW, key=K1)
    for known in (one, trust_in(tmp_path / "1")):
        assert known.signed == (), "said again, it is as if it had not been said"
    written: list[bytes] = []

    def write(path: Path, data: bytes) -> None:
        written.append(data)
        write_private(path, data)

    monkeypatch.setattr(revocation, "write_private", write)
    one.revoke("ws3", [], NOW, key=K1)
    assert len(written) == 1, "so that nobody is killed in between"
    known = trust_in(tmp_path / "1")
    assert known.was_revoked("ws3")
    assert known.newest_key == K1


def _no_room(*_: object) -> None:
    raise OSError(28, "no room")


def test_there_are_not_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocation, "REVOCATIONS_MAX", 3)
    one = trust_in(tmp_path / "1")
    for number in range(3):
        one.revoke(f"ws{number}", [], NOW)
    with pytest.raises(BadRequest, match="too many"):
        one.revoke("ws9", [], NOW)
    one.revoke("ws9", [], NOW + CLOCKS_S + revocation.ENDS_AFTER_S)  # those that mean nothing any more do not count
    assert [word.node for word in one.revocations] == ["ws9"]


@each("damage", [b"", b"garbage", b"\x91\x92\xc4\x03abc\xca\0\0\0\0"])
def test_a_damaged_file_is_asked_for_again(tmp_path: Path, damage: bytes) -> None:
    trust_in(tmp_path / "1").revoke("ws3", [], NOW)
    (tmp_path / "1" / "trust").write_bytes(damage)
    assert trust_in(tmp_path / "1").digest == b"", "so its peers see that it lacks something"


@pytest.mark.rule("S13")
def test_no_key_is_shown(tmp_path: Path) -> None:
    one = trust_in(tmp_path / "1")
    one.rotate(b"\xaa" * 32, NOW, OVERLAP_S)
    assert all("xaa" not in repr(word) for word, _ in one._known.values())


# -- sealing while the key changes ---------------------------------------------------------------------------------------


@pytest.mark.rule("J5")
def test_while_a_key_changes_both_open_and_each_message_counts_once() -> None:
    one, two = (Sealer(K1, "c", node, "b1") for node in ("a", "b"))
    old = one.seal(b"1", b"b")
    two.use((K1, K2))
    one.use((K2, K1))
    new = one.seal(b"2", b"b")
    assert two.open(new, b"b") == ("a", "b1", b"2")
    assert two.open(old, b"b") == ("a", "b1", b"1")
    for again in (old, new):
        with pytest.raises(Exception, match="twice"):
            two.open(again, b"b")
    two.use((K2,))
    assert two.open(one.seal(b"3", b"b"), b"b")[2] == b"3"
    one.use((K1,))
    with pytest.raises(Exception, match=Says.DOES_NOT_OPEN()):
        two.open(one.seal(b"4", b"b"), b"b")
