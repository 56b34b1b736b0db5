"""A node's own certificate: what it says, and when it is made anew."""

from __future__ import annotations

import base64
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from peerload.model.errors import ConfigError
from peerload.security import certificates, cluster_dir
from peerload.security.tls import PROTOCOL, Credentials, tls_error_text
from tests.each import each
from tests.support import cluster_of
from tests.wording import Says


def made(directory: Path, node: str = "ws1", name: str = "default") -> Credentials:
    return Credentials(cluster_of(name), node, directory / "tls")


@pytest.mark.rule("J1", "S16")
def test_a_certificate_names_its_node_and_lasts_ninety_days(tmp_path: Path) -> None:
    facts = made(tmp_path).facts
    assert facts is not None
    assert facts.name == "ws1"
    assert timedelta(days=89) < facts.valid_until - datetime.now(UTC) <= timedelta(days=90)
    assert facts.valid_from < datetime.now(UTC) - timedelta(hours=23), "clocks may differ by a day"


@pytest.mark.rule("S11")
def test_it_is_the_owners_alone_and_kept(tmp_path: Path) -> None:
    first = made(tmp_path)
    (path,) = (tmp_path / "tls").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    assert made(tmp_path).facts == first.facts
    assert first.renew_if_due() is False


@pytest.mark.rule("J1")
@each(("days", "is_due"), [(59, False), (61, True), (100, True), (-2, True)])
def test_it_is_made_anew_after_two_thirds_of_its_life_or_if_the_clock_was_set_back(
    tmp_path: Path, days: int, is_due: bool
) -> None:
    credentials = made(tmp_path)
    before = credentials.facts
    assert credentials.renew_if_due(datetime.now(UTC) + timedelta(days=days)) is is_due
    assert (credentials.facts != before) is is_due


def test_another_node_or_another_cluster_gets_another(tmp_path: Path) -> None:
    first = made(tmp_path).facts
    other_name = made(tmp_path, "ws2").facts
    other_cluster = made(tmp_path, "ws2", "another").facts
    assert None not in (first, other_name, other_cluster)
    assert len({first, other_name, other_cluster}) == 3


@each("damage", [b"", b"garbage", b"\xff\x00", None])
def test_a_damaged_one_is_made_anew(tmp_path: Path, damage: bytes | None) -> None:
    made(tmp_path)
    path = tmp_path / "tls" / "node.pem"
    path.write_bytes(path.read_bytes()[:-200] if damage is None else damage)
    assert made(tmp_path).facts is not None


def test_where_it_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "tls").write_text("in the way")
    with pytest.raises(ConfigError) as caught:
        made(tmp_path)
    assert caught.value.key == "state"


@pytest.mark.rule("J3", "S10")
def test_only_tls_1_3_both_ends_and_no_tickets(tmp_path: Path) -> None:
    credentials = made(tmp_path)
    for context in (credentials.server, credentials.client):
        assert context.minimum_version == context.maximum_version == ssl.TLSVersion.TLSv1_3
        is_door = context is credentials.server  # newcomers have no certificate yet: they get to join, and nothing else
        assert context.verify_mode == (ssl.CERT_OPTIONAL if is_door else ssl.CERT_REQUIRED)
        assert len(context.get_ca_certs()) == 1, "the cluster's CA and no other"
        assert context.options & ssl.OP_NO_TICKET
    assert credentials.server.num_tickets == 0
    assert PROTOCOL == "peerload/1"


def test_no_key_is_shown(tmp_path: Path) -> None:
    assert repr(made(tmp_path)) == "Credentials('ws1' of 'default')"


def test_a_ca_that_ends_soon_ends_its_certificates() -> None:
    then = datetime.now(UTC) - certificates.CA_LIFE + timedelta(days=10)
    authority = certificates.make_ca("old", "0" * 32, then)
    pair = certificates.issue(authority, "ws1", datetime.now(UTC))
    facts = certificates.verified_info(authority, pair.certificate)
    assert facts.valid_until <= datetime.now(UTC) + timedelta(days=10)


@pytest.mark.rule("S16")
def test_another_cas_certificate_is_none_of_ours() -> None:
    now = datetime.now(UTC)
    ours, theirs = (certificates.make_ca("lab", "0" * 32, now) for _ in range(2))
    with pytest.raises(ValueError):
        certificates.verified_info(ours, certificates.issue(theirs, "ws1", now).certificate)


def test_what_went_wrong_is_said_in_words() -> None:
    assert tls_error_text(TimeoutError()) == "the handshake took too long"
    assert tls_error_text(ConnectionResetError()) == "it disconnected during the handshake"
    assert tls_error_text(ssl.SSLError(1, "x")) == "the TLS handshake failed"


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """One handshake without a network. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(5):
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)
    assert not ends


@each("years", [-30, 20])
def test_a_local_cluster_looks_at_no_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, years: int) -> None:
    then = datetime.now(UTC) + timedelta(days=365 * years)
    monkeypatch.setattr(cluster_dir, "_now", lambda: then)
    directory = cluster_dir.make(tmp_path / "local", "lab").directory
    monkeypatch.undo()
    local = cluster_dir.read(directory, is_local=True)
    now, before = Credentials(local, "ws1", tmp_path / "1"), Credentials(local, "ws2", tmp_path / "2")
    before.renew_if_due(then + timedelta(days=1000))
    shake_hands(now.client, before.server)
    shake_hands(before.client, now.server)
    with pytest.raises(ConfigError, match=Says.NOT_VALID_NOW()):
        cluster_dir.read(directory)
    dated = Credentials(local._replace(is_local=False), "ws3", tmp_path / "3")
    with pytest.raises(ssl.SSLError, match="certificate"):
        shake_hands(dated.client, now.server)


def member_of(name: str = "default") -> cluster_dir.ClusterDirectory:
    """The same cluster as a node has it that cannot make certificates."""
    whole = cluster_of(name)
    return whole._replace(authority=certificates.KeyPair(whole.authority.certificate, b""))


def let_in(directory: Path, node: str = "ws1", life: timedelta = certificates.NODE_LIFE) -> Path:
    """What `peerload join` leaves."""
    pair = certificates.issue(cluster_of().authority, node, datetime.now(UTC), life)
    (directory / "joining.pem").write_bytes(pair.key + pair.certificate)
    return directory / "joining.pem"


def test_who_cannot_make_one_uses_what_it_was_given(tmp_path: Path) -> None:
    brought = let_in(tmp_path)
    credentials = Credentials(member_of(), "ws1", tmp_path / "tls")
    assert credentials.facts is not None
    assert not brought.exists()
    assert not credentials.serves_joins
    assert credentials.server.verify_mode == ssl.CERT_REQUIRED, "nobody joins here"
    again = Credentials(member_of(), "ws1", tmp_path / "tls")
    assert again.facts == credentials.facts
    assert again.renew_if_due(datetime.now(UTC) + timedelta(days=80)) is False
    assert again.is_due(datetime.now(UTC) + timedelta(days=61))
    assert not again.is_due(datetime.now(UTC) + timedelta(days=59))
    assert again.has_ended(datetime.now(UTC) + timedelta(days=91))


@each("node", ["ws1", "ws2"])
def test_who_cannot_make_one_and_has_none_says_what_to_do(tmp_path: Path, node: str) -> None:
    if node == "ws2":
        let_in(tmp_path)
        Credentials(member_of(), "ws1", tmp_path / "tls")
    with pytest.raises(ConfigError) as caught:
        Credentials(member_of(), node, tmp_path / "tls")
    assert ("--node ws1" if node == "ws2" else "peerload invite") in caught.value.hint


def test_one_made_elsewhere_is_taken_if_it_is_ours(tmp_path: Path) -> None:
    let_in(tmp_path, life=timedelta(days=2))
    credentials = Credentials(member_of(), "ws1", tmp_path / "tls")
    assert credentials.facts is not None
    now, authority = datetime.now(UTC), cluster_of().authority
    key = certificates.key_of(credentials.certificate)
    stranger = certificates.private_key(certificates.new_key()).public_key()
    for wrong in (
        certificates.certify(authority, "ws2", key, now),
        certificates.certify(authority, "ws1", stranger, now),
        certificates.certify(cluster_of("another").authority, "ws1", key, now),
        b"garbage",
    ):
        with pytest.raises(ValueError, match=r".*"):
            credentials.install(wrong)
    before = credentials.facts
    credentials.install(certificates.certify(authority, "ws1", key, now))
    assert credentials.facts.valid_until > before.valid_until
    assert credentials.facts.key == before.key
    assert Credentials(member_of(), "ws1", tmp_path / "tls").facts == credentials.facts
    shake_hands(credentials.client, made(tmp_path / "other", "ws2").server)


@pytest.mark.rule("J1")
@each("days", [-91, 25])
def test_one_made_where_the_clock_is_wrong_does_not_take_the_place_of_a_good_one(tmp_path: Path, days: int) -> None:
    let_in(tmp_path, life=timedelta(hours=1))
    credentials = Credentials(member_of(), "ws1", tmp_path / "tls")
    before, key, now = credentials.facts, certificates.key_of(credentials.certificate), datetime.now(UTC)
    authority = cluster_of().authority
    wrong = certificates.certify(authority, "ws1", key, now + timedelta(days=days))
    with pytest.raises(ValueError, match=Says.COMPARE_CLOCKS()):
        credentials.install(wrong)
    assert credentials.facts == before
    credentials.file.write_bytes(certificates.private_key_pem(credentials.file.read_bytes()) + wrong)
    there = Credentials(member_of(), "ws1", tmp_path / "tls")  # it was taken by an earlier version
    there.install(certificates.certify(authority, "ws1", key, now))
    assert there.facts is not None
    assert there.facts.valid_from < now < there.facts.valid_until, "and one that is good takes its place"


def test_a_key_that_no_library_can_make_is_none() -> None:
    """It says X448, and is as long as one of Ed25519: the library takes that for a fault of its own."""
    der = bytes.fromhex("302e020100300506032b656f04220420") + bytes(range(32))
    pem = b"-----BEGIN PRIVATE KEY-----\n" + base64.b64encode(der) + b"\n-----END PRIVATE KEY-----\n"
    with pytest.raises(ValueError, match="not an Ed25519 key"):
        certificates.private_key(pem)


def test_a_certificate_of_a_version_that_nobody_knows_is_named_as_one() -> None:
    """What the library raises for it is no ValueError."""
    made = certificates.make_ca("lab", "0" * 32, datetime.now(UTC))
    der = certificates.der_of(made.certificate)
    version = b"\xa0\x03\x02\x01\x02"
    assert version in der[:20]
    strange = der.replace(version, b"\xa0\x03\x02\x01\x03", 1)
    pem = ssl.DER_cert_to_PEM_cert(strange).encode()
    for read in (lambda: certificates.key_of(strange), lambda: certificates.ca_info(made._replace(certificate=pem))):
        with pytest.raises(ValueError, match=Says.NOT_A_CERTIFICATE()):
            read()
