"""Invitations: good for those invited, as often as said, for as long as said, and kept without the secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from peerload.model.errors import BadRequest
from peerload.security import certificates, invitations
from peerload.security.invitations import InvitationRefused, Invitations
from peerload.security.revocation import TrustStore
from peerload.wire import join
from tests.each import each
from tests.support import cluster_of
from tests.wording import Says

NOW = 1_800_000_000.0
NONCE = b"n" * join.NONCE_BYTES
SHOWN = b"the certificate of who lets in"


def asked(
    token: tuple[bytes, bytes], node: str = "ws2", key: bytes = b"", *, shown: bytes = SHOWN, nonce: bytes = NONCE
) -> join.JoinRequest:
    token_id, secret = token
    csr = certificates.request(key or certificates.new_key(), node)
    proof = join.proof_key(token_id, secret).sign(join.transcript(shown, nonce, token_id, node, csr))
    return join.JoinRequest(token_id, node, csr, proof)


def redeem(kept: Invitations, request: join.JoinRequest, now: float = NOW, why_not: str = "") -> str:
    """Use one → "", or the code of the refusal."""
    try:
        kept.redeem(request, SHOWN, NONCE, now, lambda *_, **__: why_not)
    except InvitationRefused as refusal:
        return refusal.code if refusal.code != "token" or not refusal.what else "token, and why"
    return ""


def opened(directory: Path) -> Invitations:
    """The invitations that a node keeps in a directory, with what the CA has said."""
    return Invitations(directory / "invites", trust_in(directory))


def trust_in(directory: Path) -> TrustStore:
    return TrustStore(cluster_of(), directory / "trust")


@pytest.fixture
def kept(tmp_path: Path) -> Invitations:
    return opened(tmp_path)


@pytest.mark.rule("J2")
def test_it_is_good_once(kept: Invitations, tmp_path: Path) -> None:
    token = kept.make(NOW, life_s=900, uses=1)
    assert redeem(kept, asked(token)) == ""
    assert redeem(kept, asked(token)) == "token"
    assert redeem(opened(tmp_path), asked(token)) == "token", "also after a restart"


def test_who_used_it_may_again_until_it_ends(kept: Invitations, tmp_path: Path) -> None:
    token, key = kept.make(NOW, life_s=900, uses=1), certificates.new_key()
    assert redeem(kept, asked(token, key=key)) == ""
    assert redeem(opened(tmp_path), asked(token, key=key), NOW + 899) == "", "its answer was lost"
    assert redeem(kept, asked(token, "ws3", key=key)) == "token", "by the same name alone"
    assert redeem(kept, asked(token, key=key), NOW + 901) == "token"


@pytest.mark.rule("J4")
@pytest.mark.parametrize("is_linked", [True, False])
def test_who_is_revoked_cannot_use_its_invitation_again_nor_what_is_left_of_it(tmp_path: Path, is_linked: bool) -> None:
    """The revocation names its key only if it was linked then."""
    key, kept = certificates.new_key(), opened(tmp_path)
    token, other = (kept.make(NOW, life_s=900, uses=5) for _ in range(2))
    assert redeem(kept, asked(token, key=key)) == ""
    assert redeem(kept, asked(other, "ws3")) == ""
    fingerprint = certificates.key_fingerprint(certificates.private_key(key).public_key())
    kept._trust.revoke("ws2", [fingerprint] if is_linked else [], NOW + 10)
    for known in (kept, opened(tmp_path)):
        assert redeem(known, asked(token, key=key), NOW + 20) == "token"
        assert redeem(known, asked(token, "ws4"), NOW + 20) == "token", "under another name"
        assert redeem(known, asked(other, key=key), NOW + 20) == ("token" if is_linked else "")
    anew = kept.make(NOW + 20, life_s=900, uses=1)
    for _ in range(2):
        assert redeem(kept, asked(anew, key=(later := certificates.new_key())), NOW + 30) == ""
        assert redeem(kept, asked(anew, key=later), NOW + 40) == "", "invited anew, and its answer was lost"
        kept._trust.revoke("ws2", [], NOW + 50)
        assert redeem(kept, asked(anew, key=later), NOW + 60) == "token"
        anew = kept.make(NOW + 60, life_s=900, uses=1)


def test_as_often_as_it_says(kept: Invitations) -> None:
    token = kept.make(NOW, life_s=900, uses=3)
    assert [redeem(kept, asked(token, f"ws{number}")) for number in range(5)] == ["", "", "", "token", "token"]


@pytest.mark.rule("J2")
@pytest.mark.parametrize("later_s", [900, 1e6, -100, -1e6])
def test_in_its_time_alone_whatever_the_clock_does(kept: Invitations, later_s: float) -> None:
    token = kept.make(NOW, life_s=900, uses=1)
    assert redeem(kept, asked(token), NOW + later_s) == "token"
    assert redeem(kept, asked(token), NOW + 1) == "", "and it is not used up by that"


def test_another_secret_or_another_token_is_no_proof(kept: Invitations) -> None:
    token_id, secret = kept.make(NOW, life_s=900, uses=1)
    other = kept.make(NOW, life_s=900, uses=1)
    for wrong in ((token_id, os.urandom(16)), (os.urandom(8), secret), (token_id, other[1]), (other[0], secret)):
        assert redeem(kept, asked(wrong)) == "token"
    assert redeem(kept, asked((token_id, secret))) == ""


def test_a_machine_whose_name_is_taken_is_told_how_its_agent_of_all_users_or_its_user_starts_again() -> None:
    refused = join.JoinRefused("name", "a member is called so")
    own, system = (str(invitations._refusal(refused, "h:1", is_system=mode).hint) for mode in (False, True))
    assert "peerload down ; peerload up --peer h:1  " in own
    assert 'peer = ["h:1"]' in system
    assert "sudo systemctl restart peerload" in system
    assert "peerload down" not in system


@pytest.mark.rule("J2", "P5")
def test_a_proof_is_good_for_one_node_one_connection_and_one_request(kept: Invitations) -> None:
    token = kept.make(NOW, life_s=900, uses=1)
    assert redeem(kept, asked(token, shown=b"somebody in between")) == "token"
    assert redeem(kept, asked(token, nonce=b"another connection".ljust(32))) == "token"
    good = asked(token)
    for changed in (
        {"node": "ws9"},
        {"csr": certificates.request(certificates.new_key(), "ws2")},
        {"proof": b"p" * 64},
    ):
        fields = {name: getattr(good, name) for name in good.__struct_fields__} | changed
        assert redeem(kept, join.JoinRequest(**fields)) == "token"
    assert redeem(kept, good) == ""


def test_a_name_that_cannot_be_does_not_use_it_up(kept: Invitations) -> None:
    token = kept.make(NOW, life_s=900, uses=1, node="ws2")
    assert redeem(kept, asked(token, "ws3")) == "name"
    assert redeem(kept, asked(token), why_not="a member is called so") == "name"
    assert redeem(kept, asked(token)) == ""
    meant: list[bool] = []

    def objection(_node: str, _at: float, /, *, is_meant: bool) -> str:
        meant.append(is_meant)
        return "no"

    for node in ("", "ws2"):
        with pytest.raises(InvitationRefused):
            kept.redeem(
                asked(kept.make(NOW, life_s=900, uses=1, node=node)),
                SHOWN,
                NONCE,
                NOW,
                objection,
            )
    assert meant == [False, True], "whether the invitation names that name"


@pytest.mark.parametrize("csr", [b"", b"garbage", b"\x30\x82\xff\xff", b"\x00" * 2000])
def test_a_request_that_is_none(kept: Invitations, csr: bytes) -> None:
    token_id, secret = kept.make(NOW, life_s=900, uses=1)
    proof = join.proof_key(token_id, secret).sign(join.transcript(SHOWN, NONCE, token_id, "ws2", csr))
    assert redeem(kept, join.JoinRequest(token_id, "ws2", csr, proof)) == "request"


@pytest.mark.rule("J2", "S13")
def test_nothing_on_disk_lets_anybody_in(kept: Invitations, tmp_path: Path) -> None:
    token_id, secret = kept.make(NOW, life_s=900, uses=1)
    path = tmp_path / "invites"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    raw = path.read_bytes()
    assert secret not in raw
    assert join.proof_key(token_id, secret).private_bytes_raw() not in raw
    assert join.proof_key(token_id, secret).public_key().public_bytes_raw() in raw


def test_a_use_that_cannot_be_kept_is_none(kept: Invitations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = kept.make(NOW, life_s=900, uses=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(invitations, "write_private", full)
    with pytest.raises(OSError, match="No space"):
        kept.redeem(asked(token), SHOWN, NONCE, NOW, lambda *_, **__: "")
    monkeypatch.undo()
    assert redeem(kept, asked(token)) == ""
    assert redeem(opened(tmp_path), asked(token)) == "token"


def test_there_are_not_too_many(kept: Invitations) -> None:
    for _ in range(invitations.INVITES_MAX):
        kept.make(NOW, life_s=900, uses=1)
    with pytest.raises(BadRequest, match=Says.INVITATIONS_MAX()):
        kept.make(NOW, life_s=900, uses=1)
    assert kept.make(NOW + 901, life_s=900, uses=1), "those that have ended make room"


@each("damage", [b"", b"garbage", b"\xff" * 1000])
def test_a_damaged_file_lets_nobody_in(tmp_path: Path, damage: bytes) -> None:
    token = opened(tmp_path).make(NOW, life_s=900, uses=1)
    (tmp_path / "invites").write_bytes(damage)
    assert redeem(opened(tmp_path), asked(token)) == "token"
