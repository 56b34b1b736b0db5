"""How `join` is given its token."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

import pytest

from peerload.agent.store.store import Store
from peerload.cli.verbs import join
from peerload.model.errors import BadRequest, UsageError
from peerload.wire.token import FINGERPRINT_BYTES, ID_BYTES, SECRET_BYTES, Token
from tests.each import each

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.rule("S13")
def test_a_token_may_come_on_stdin_as_invite_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert join.token_words(["plj1-abc", "def"]) == ["plj1-abc", "def"]
    for line in ("plj1-abcdef\n", "peerload join plj1-abcdef", "  plj1-abcdef  \nmore\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(line))
        assert join.token_words(["-"]) == ["plj1-abcdef"]


def test_no_token_on_stdin_is_a_mistake_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in ("", "\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(line))
        with pytest.raises(UsageError, match="token"):
            join.token_words(["-"])


@each(
    ("text", "kept", "words", "what"),
    [
        ('node = "other"\n', "", ["--node", "n1"], "the settings have node other"),
        ('listen = "127.0.0.1:7118"\n', "", ["--listen", "127.0.0.1:7119"], "the settings have listen 127.0.0.1:7118"),
        ("", "n2", ["--node", "n1"], "are those of node n2"),
        ('node = "other"\n', "n2", [], "are those of node n2"),
        ('node = "n2"\nlisten = "127.0.0.1:7118"\n', "n2", [], None),
        ("", "n2", [], None),
    ],
)
def test_the_token_is_kept_if_the_agent_could_not_start(
    text: str, kept: str, words: list[str], what: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file and what is in the state directory decide the name and the address, whatever was typed."""
    sent: list[str] = []

    def ask(_token: object, node: str, *_: object) -> None:
        sent.append(node)
        raise BadRequest("sent")

    for key, name in (("HOME", ""), ("XDG_CONFIG_HOME", "c"), ("XDG_STATE_HOME", "s"), ("XDG_RUNTIME_DIR", "r")):
        monkeypatch.setenv(key, str(tmp_path / name))
    for name in ("c/peerload", "s/peerload", "r"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / "c/peerload/config.toml").write_text(text)
    (tmp_path / "s/peerload/peerload.db").unlink(missing_ok=True)
    if kept:
        with contextlib.closing(Store(tmp_path / "s/peerload/peerload.db", kept)) as store:
            store.open()
    monkeypatch.setattr(join, "_ask_to_join", ask)
    token = Token(b"f" * FINGERPRINT_BYTES, b"i" * ID_BYTES, b"s" * SECRET_BYTES, ("127.0.0.1:7117",)).text()
    with pytest.raises(BadRequest, match=what or "sent"):
        join.join([token, *words])
    assert sent == ([] if what else ["n2"])
