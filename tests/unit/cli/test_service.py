"""`peerload service` where it cannot: what it refuses, and what it tells people to type."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from peerload import distribution
from peerload.cli.verbs import service
from peerload.cli.verbs.completions import FILES, answered
from peerload.model.errors import PeerloadError, UsageError
from tests.each import each

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def fixture_able(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Root, on a machine that systemd runs; whatever would be run fails the test."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(service, "SYSTEMD", tmp_path)
    monkeypatch.setattr(service, "_run", lambda *_, **__: pytest.fail("a script would run"))


@each(
    "words",
    [
        [],
        ["start"],
        ["install", "--purge"],
        ["uninstall", "--from", "x.whl"],
        ["uninstall", "--no-start"],
        ["uninstall", "--wheels", ""],
    ],
)
def test_what_makes_no_sense_is_a_mistake(words: list[str]) -> None:
    with pytest.raises(UsageError):
        service.main(words)


@each("what", service.TAKES)
def test_anybody_but_root_is_told_what_to_type(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    words = [what, "--prefix", "/opt/two words"]
    with pytest.raises(PeerloadError) as caught:
        service.main(words)
    typed = shlex.split(caught.value.hint.partition("        ")[0])
    assert typed == ["sudo", str(Path(sys.prefix, "bin/peerload")), "service", *words]


@each("what", ["install", "upgrade"])
def test_without_systemd_there_is_no_service(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(service, "SYSTEMD", tmp_path / "none")
    with pytest.raises(PeerloadError) as caught:
        service.main([what])
    assert "--no-start" in caught.value.hint
    ran: list[tuple[Path, list[str]]] = []

    def run(script: Path, words: list[str], *, is_quiet: bool) -> int:
        assert not is_quiet
        ran.append((script, words))
        return 3

    monkeypatch.setattr(service, "_run", run)
    assert service.main([what, "--no-start"]) == 3
    assert service.main([what, "--root", "/image"]) == 3
    assert service.main(["uninstall"]) == 3, "it can be taken away everywhere"
    assert [words for _, words in ran] == [["--no-start"], ["--root", "/image"], []]
    assert {path.parent for path, _ in ran} == {ROOT / "deploy"}


def test_without_scripts_or_anything_to_install_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(service, "deploy_directory", lambda: "")
    for what in service.TAKES:
        with pytest.raises(PeerloadError) as caught:
            service.main([what])
        assert caught.value.why
        assert caught.value.hint
    monkeypatch.setattr(service, "deploy_directory", lambda: str(tmp_path))
    with pytest.raises(PeerloadError) as caught:
        service.main(["upgrade"])
    assert "upgrade --from WHEEL" in caught.value.hint


def test_the_scripts_of_a_wheel_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert distribution.deployed("install") == str(ROOT / "deploy/install"), "this runs from a source tree"
    monkeypatch.setattr(distribution, "__file__", str(tmp_path / "lib/peerload/distribution.py"))
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    assert distribution.deploy_directory() == ""
    assert distribution.deployed("mosquitto.acl") == "deploy/mosquitto.acl"
    there = tmp_path / "share/peerload/deploy"
    there.mkdir(parents=True)
    (there / "install").touch()
    assert distribution.deploy_directory() == str(there)


def test_completions_offer_what_it_takes() -> None:
    assert [word for word, _ in answered(["service", ""])] == list(service.TAKES)
    assert answered(["service", "install", "--from", ""]) == [(FILES, "")]
