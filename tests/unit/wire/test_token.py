"""The join token: one word, whole or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerload.model.errors import BadRequest
from peerload.wire.token import ADDRESSES_MAX, FINGERPRINT_BYTES, ID_BYTES, PREFIX, SECRET_BYTES, Token, parse
from tests.each import each

ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
TOKEN = Token(b"f" * FINGERPRINT_BYTES, b"i" * ID_BYTES, b"s" * SECRET_BYTES, ("192.0.2.7:7117",), "ws2")

tokens = st.builds(
    Token,
    st.binary(min_size=FINGERPRINT_BYTES, max_size=FINGERPRINT_BYTES),
    st.binary(min_size=ID_BYTES, max_size=ID_BYTES),
    st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES),
    st.lists(st.text("0123456789.:[]abc", min_size=1, max_size=60), min_size=1, max_size=ADDRESSES_MAX).map(tuple),
    st.text("abcxyz019-", max_size=40),
)


@given(tokens)
def test_it_says_what_was_put_in(token: Token) -> None:
    assert parse(token.text()) == token
    assert parse(f" {token.text().upper()[:20]}\n  {token.text()[20:]} ") == token, "however a mail has broken it"


@given(st.integers(0, len(TOKEN.text()) - 1), st.sampled_from(ALPHABET))
def test_one_wrong_character_is_noticed(place: int, letter: str) -> None:
    text = TOKEN.text()
    mistyped = text[:place] + letter + text[place + 1 :]
    if mistyped != text:
        with pytest.raises(BadRequest):
            parse(mistyped)


@each("cut", [1, 2, 7, 8, 50])
def test_a_part_of_it_is_none(cut: int) -> None:
    with pytest.raises(BadRequest, match="incomplete"):
        parse(TOKEN.text()[:-cut])


@given(st.text() | st.text(ALPHABET).map(lambda text: PREFIX + text))
def test_whatever_it_is_it_is_refused_in_words(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(text)
    assert caught.value.why
    assert "peerload invite" in caught.value.hint or "upgrade" in caught.value.hint


@pytest.mark.rule("S13")
def test_no_secret_is_shown() -> None:
    assert repr(TOKEN) == f"Token({TOKEN.id.hex()})"
