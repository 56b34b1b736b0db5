"""The cluster's directory: made once, believed only if it is whole and its owner's alone, and never shown."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from peerload.model.errors import BadRequest, ConfigError
from peerload.security import certificates, cluster_dir
from tests.each import each
from tests.support import PATIENCE_S
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def made(tmp_path: Path) -> Path:
    cluster_dir.make(tmp_path / "lab", "lab")
    return tmp_path / "lab"


def environment(base: Path) -> dict[str, str]:
    return {"HOME": str(base), "XDG_CONFIG_HOME": str(base / "config"), "XDG_STATE_HOME": str(base / "state")}


def refused(directory: Path, *words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        cluster_dir.read(directory)
    assert caught.value.key == "cluster"
    for word in words:
        assert word in f"{caught.value} {caught.value.hint}"
    return caught.value


@pytest.mark.rule("J1", "S11")
def test_what_is_made_can_be_read_by_its_owner_alone(made: Path) -> None:
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert {path.name for path in made.iterdir()} == {*cluster_dir.FILES, cluster_dir.CA_KEY}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()} == {0o600}
    read = cluster_dir.read(made)
    assert (read.name, len(read.id), len(read.key), read.is_local) == ("lab", 32, 32, False)
    assert [path.name for path in made.parent.iterdir()] == ["lab"], "nothing else is left"


@pytest.mark.rule("J6")
def test_no_two_are_alike(tmp_path: Path) -> None:
    one, two = cluster_dir.make(tmp_path / "a", "lab"), cluster_dir.make(tmp_path / "b", "lab")
    assert (one.id, one.key, one.authority, one.fingerprint) != (two.id, two.key, two.authority, two.fingerprint)
    assert one.key != two.key
    assert one.id != two.id


def test_a_copy_is_the_same_cluster(made: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(made, tmp_path / "copy")
    one, two = cluster_dir.read(made), cluster_dir.read(copy)
    assert one._replace(directory=copy) == two


@pytest.mark.rule("S13")
def test_no_key_is_shown(made: Path) -> None:
    read = cluster_dir.read(made)
    shown = f"{read!r} {read} {read.authority!r}"
    assert shown.startswith("Cluster('lab' in ")
    assert read.key.hex() not in shown
    assert "PRIVATE" not in shown


def test_one_that_exists_is_never_made_anew(made: Path, tmp_path: Path) -> None:
    before = (made / "ca.key").read_bytes()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    for there in (made, link, made / "ca.key"):
        with pytest.raises(BadRequest, match="it exists"):
            cluster_dir.make(there, "lab")
    assert (made / "ca.key").read_bytes() == before


@each("name", ["", "Lab", "a" * 41, "a/b", "a.b", 'x"\ny = "'])
def test_a_name_that_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest, match="name"):
        cluster_dir.make(tmp_path / "lab", name)
    assert list(tmp_path.iterdir()) == []


def test_where_none_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="lab"):
        cluster_dir.make(tmp_path / "file" / "lab", "lab")


@pytest.mark.rule("S11")
@each("mode", [0o755, 0o750, 0o701, 0o720])
def test_others_may_not_look_into_it(made: Path, mode: int) -> None:
    made.chmod(mode)
    refused(made, Says.OPEN_TO_OTHERS(), f"chmod -R go= {made}")


@pytest.mark.parametrize("name", cluster_dir.FILES)
def test_others_may_read_none_of_its_files(made: Path, name: str) -> None:
    (made / name).chmod(0o640)
    refused(made, name, Says.OPEN_TO_OTHERS(), f"chmod -R go= {made}")


@pytest.mark.parametrize("name", cluster_dir.FILES)
def test_a_part_that_is_missing(made: Path, name: str) -> None:
    (made / name).unlink()
    refused(made, name, "it does not exist", "copy the whole directory again")


@pytest.mark.rule("S11")
@pytest.mark.parametrize("name", cluster_dir.FILES)
def test_a_part_that_is_a_link(made: Path, tmp_path: Path, name: str) -> None:
    (made / name).rename(tmp_path / name)
    (made / name).symlink_to(tmp_path / name)
    refused(made, name, "it is a symbolic link")


def test_a_part_that_is_no_file_holds_nobody_up(made: Path) -> None:
    (made / "seal.key").unlink()
    os.mkfifo(made / "seal.key", 0o600)
    refused(made, "it is not a regular file")


def test_a_link_to_it(made: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(made)
    refused(tmp_path / "link", "it is a symbolic link, or not a directory")


def test_none_there(tmp_path: Path) -> None:
    refused(tmp_path / "none", "it does not exist", f"peerload cluster init {tmp_path / 'none'}")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_somebody_elses(made: Path) -> None:
    os.chown(made / "ca.key", 12345, 12345)
    refused(made, "it belongs to another user", "chown")
    os.chown(made, 12345, 12345)
    refused(made, "it belongs to another user", "chown")


def damaged(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / name
        path.write_bytes(change(path.read_bytes()))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        damaged("cluster.toml", lambda _: b""),
        damaged("cluster.toml", lambda _: b"\xff"),
        damaged("cluster.toml", lambda raw: raw.replace(b'"lab"', b'"Lab"')),
        damaged("cluster.toml", lambda raw: raw.replace(b'id = "', b'id = "0')),
        damaged("seal.key", lambda raw: raw[:-3]),
        damaged("seal.key", lambda _: b"not hexadecimal"),
        damaged("ca.pem", lambda raw: raw[:100]),
        damaged("ca.key", lambda raw: raw[:50]),
        damaged("ca.key", lambda _: certificates.make_ca("lab", "0" * 32, datetime.now(UTC)).key),
    ],
)
def test_a_damaged_one(made: Path, damage: Callable[[Path], None]) -> None:
    damage(made)
    refused(made, "copy the whole directory again from another member")


def test_one_of_a_later_format(made: Path) -> None:
    damaged("cluster.toml", lambda raw: raw.replace(b"format = 1", b"format = 2"))(made)
    refused(made, "it has format 2", "upgrade")


def test_a_part_that_is_too_large(made: Path) -> None:
    damaged("ca.pem", lambda raw: raw + b"\n" * cluster_dir.FILE_BYTES_MAX)(made)
    refused(made, "it is too large")


@pytest.mark.parametrize(
    ("days", "hint"), [(-2, "set this machine's clock"), (4000, "clock; if it is right, make a new cluster")]
)
def test_the_clock_is_looked_at(made: Path, monkeypatch: pytest.MonkeyPatch, days: int, hint: str) -> None:
    then = datetime.now(UTC) + timedelta(days=days)
    monkeypatch.setattr(cluster_dir, "_now", lambda: then)
    refused(made, "is not valid now", hint)


def test_a_clock_that_is_a_day_late_will_do(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = datetime.now(UTC) - timedelta(hours=23)
    monkeypatch.setattr(cluster_dir, "_now", lambda: then)
    assert cluster_dir.read(made)


# -- which one ---------------------------------------------------------------------------------------------------------


def test_the_one_named_comes_first_then_the_users_own(made: Path, tmp_path: Path) -> None:
    own = tmp_path / "config" / "peerload" / "cluster"
    cluster_dir.make(own, "own")
    assert cluster_dir.find(str(made), environment(tmp_path)).name == "lab"
    assert cluster_dir.find("", environment(tmp_path)).name == "own"


def test_one_named_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=Says.ABSENT()):
        cluster_dir.find(str(tmp_path / "none"), environment(tmp_path))


def test_the_users_own_is_not_passed_over_if_it_cannot_be_used(tmp_path: Path) -> None:
    own = tmp_path / "config" / "peerload" / "cluster"
    cluster_dir.make(own, "own")
    own.chmod(0o755)
    with pytest.raises(ConfigError, match=Says.OPEN_TO_OTHERS()):
        cluster_dir.find("", environment(tmp_path))


def test_without_one_this_users_agents_have_one_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_dir, "SYSTEM_DIRECTORY", tmp_path / "none")
    one, two = (cluster_dir.find("", environment(tmp_path)) for _ in range(2))
    assert one == two
    assert one.is_local
    assert one.directory == tmp_path / "state" / "peerload" / "local-cluster"
    assert cluster_dir.find("", environment(tmp_path / "somebody")).key != one.key


def test_agents_that_start_at_once_make_one_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_dir, "SYSTEM_DIRECTORY", tmp_path / "none")
    found: list[cluster_dir.ClusterDirectory] = []
    together = threading.Barrier(8)

    def start() -> None:
        together.wait(60)
        found.append(cluster_dir.find("", environment(tmp_path)))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 8
    assert len({one.id for one in found}) == 1
    assert [path.name for path in (tmp_path / "state" / "peerload").iterdir()] == ["local-cluster"]


def test_the_systems_is_used_by_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster_dir.make(tmp_path / "etc", "system")
    monkeypatch.setattr(cluster_dir, "SYSTEM_DIRECTORY", tmp_path / "etc")
    assert cluster_dir.find("", environment(tmp_path)).name == "system"


def test_the_cas_key_that_is_brought_is_there_whole_or_not_at_all(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cluster_dir.read(made)
    (made / "ca.key").unlink()

    def killed(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    bring = whole.name, whole.id, whole.authority, whole.key
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(ConfigError, match="No space left"):
            cluster_dir.install(made, *bring)
    assert not cluster_dir.read(made).is_issuer, "it is what it was"
    (made / "ca.key").touch(0o600)  # as a machine that lost its power may find it
    assert cluster_dir.install(made, *bring).authority == whole.authority
    assert {path.name for path in made.iterdir()} == {"cluster.toml", "ca.pem", "ca.key", "seal.key"}
