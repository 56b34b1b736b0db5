"""deploy/install and deploy/uninstall on a machine of their own: directories of ours in the place of the system's, and a
`systemctl` that starts what the unit would."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from peerload.agent.store.schema import VERSION
from peerload.agent.store.store import Store

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MARKER = ".peerload-install"
PLACES = ("usr/local", "opt", "var/lib", "run", "etc")
SYSTEMCTL = """#!/bin/sh
case "$*" in
--version) echo "systemd 252" ;;
"restart peerload.service") exec /usr/local/bin/peerload ;;
esac
"""
RUNUSER = '#!/bin/sh\nshift 3\nexec "$@"\n'
AGENT = f"""#!{sys.executable} -I
from pathlib import Path
from peerload.agent.store import schema
from peerload.agent.store.store import Store
if IS_NEW:
    schema.VERSION += 1
    schema.MIGRATIONS[schema.VERSION] = "CREATE TABLE later (x);"
store = Store(Path("/var/lib/peerload/peerload.db"), "ws1")
store.open()
store.next_incarnation()
store.close()
raise SystemExit(IS_NEW)
"""


def _is_able() -> bool:
    tried = ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "none", "/opt"]
    return os.geteuid() == 0 and subprocess.run(tried, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _is_able(), reason="only root can give itself other directories")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """What stands in the place of the system's directories."""
    for place in PLACES:
        (tmp_path / place).mkdir(parents=True)
    for name in ("passwd", "group", "shadow", "gshadow", "nsswitch.conf", "ld.so.cache"):
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), tmp_path / "etc")
    if Path("/etc/alternatives").exists():
        shutil.copytree("/etc/alternatives", tmp_path / "etc/alternatives", symlinks=True)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    script(tmp_path / "usr/local/bin/systemctl", SYSTEMCTL)
    script(tmp_path / "usr/local/bin/runuser", RUNUSER)
    return tmp_path


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def play(root: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one of the scripts there."""
    return play_command(root, str(DEPLOY / script), *words)


def play_verb(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `peerload service` there."""
    return play_command(root, sys.executable, "-m", "peerload", "service", *words)


def play_command(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    mounts = " && ".join(f"mount --bind {shlex.quote(str(root / place))} /{place}" for place in PLACES)
    inner = f"{mounts} && exec {shlex.join(words)}"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", inner]
    environment = {"PATH": "/etc/of-root/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)


def version(prefix: Path, name: str, *, is_new: bool) -> Path:
    """A version as install puts it there, the agent of which opens the database and, if new, does not come up."""
    there = prefix / "versions" / name
    script(there / "bin/peerload", AGENT.replace("IS_NEW", str(int(is_new))))
    script(there / "bin/python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (there / MARKER).touch()
    (prefix / MARKER).touch()
    return there


def wheel(path: Path) -> str:
    """A file to install from → the name of the version that it makes."""
    path.write_bytes(b"wheel")
    pins = (DEPLOY / "requirements.txt").read_bytes()
    return hashlib.sha256(b"wheel" + pins).hexdigest()[:12]


def test_a_version_that_does_not_come_up_changes_neither_database_nor_units(root: Path) -> None:
    prefix, state = root / "opt/peerload", root / "var/lib/peerload"
    version(prefix, "first", is_new=False)
    version(prefix, wheel(root / "opt/new.whl"), is_new=True)
    (prefix / "current").symlink_to("versions/first")
    unit = root / "usr/local/lib/systemd/system/peerload.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Unit]\nDescription=of the first\n", encoding="utf-8")
    state.mkdir()
    store = Store(state / "peerload.db", "ws1")
    store.open()
    store.close()
    done = play(root, "upgrade", "--from", "/opt/new.whl")
    assert done.returncode == 1
    assert (prefix / "current").readlink() == Path("versions/first")
    assert unit.read_text(encoding="utf-8") == "[Unit]\nDescription=of the first\n"
    assert [path.name for path in unit.parent.iterdir()] == ["peerload.service"], "what was not there is gone again"
    with closing(sqlite3.connect(state / "peerload.db")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (VERSION,)
        assert database.execute("SELECT value FROM meta WHERE key = 'incarnation'").fetchone() == (2,), done.stderr


def test_what_is_not_ours_stays(root: Path) -> None:
    prefix = root / "opt/shared"
    (prefix / "versions/mine").mkdir(parents=True)
    (root / "opt/new.whl").touch()
    for words in (("install", "--no-start", "--from", "/opt/new.whl"), ("uninstall",)):
        done = play(root, *words, "--prefix", "/opt/shared")
        assert done.returncode == 1
        assert MARKER in done.stderr
    assert [path.name for path in prefix.rglob("*")] == ["versions", "mine"]

    version(prefix, "first", is_new=False)
    version(prefix, "older", is_new=False)
    version(prefix, wheel(root / "opt/new.whl"), is_new=False)
    (prefix / "current").symlink_to("versions/first")
    done = play(root, "install", "--from", "/opt/new.whl", "--prefix", "/opt/shared")
    assert done.returncode == 0, done.stderr
    assert (prefix / "versions/mine").is_dir()
    assert (prefix / "versions/first").is_dir(), "the one before stays"
    assert not (prefix / "versions/older").exists()
    done = play(root, "uninstall", "--prefix", "/opt/shared")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in prefix.rglob("*")) == ["mine", "versions"]
    assert not (root / "usr/local/bin/peerload").is_symlink()

    version(root / "opt/peerload", wheel(root / "opt/new.whl"), is_new=False)
    done = play(root, "install", "--from", "/opt/new.whl")
    assert done.returncode == 0, done.stderr
    assert play(root, "uninstall").returncode == 0
    assert not (root / "opt/peerload").exists()


def test_the_verb_installs_upgrades_and_uninstalls(root: Path) -> None:
    prefix = root / "opt/shared"
    version(prefix, wheel(root / "opt/new.whl"), is_new=False)
    done = play_verb(root, "upgrade", "--from", "/opt/new.whl", "--prefix", "/opt/shared")
    assert done.returncode == 1, "there is none in use to be upgraded"
    assert "\n  peerload service install\n" in done.stderr
    done = play_verb(root, "install", "--from", "/opt/new.whl", "--prefix", "/opt/shared")
    assert done.returncode == 0, done.stderr
    assert (prefix / "current").is_symlink()
    assert (root / "usr/local/lib/systemd/system/peerload.service").is_file()
    broken = root / "opt/broken.whl"
    broken.write_bytes(b"broken")
    name = hashlib.sha256(b"broken" + (DEPLOY / "requirements.txt").read_bytes()).hexdigest()[:12]
    version(prefix, name, is_new=True)
    done = play_verb(root, "upgrade", "--json", "--from", "/opt/broken.whl", "--prefix", "/opt/shared")
    assert (done.returncode, json.loads(done.stdout)["exit_code"]) == (1, 1), done.stderr
    assert (prefix / "current").readlink().name != name
    done = play_verb(root, "uninstall", "--prefix", "/opt/shared")
    assert done.returncode == 0, done.stderr
    assert not prefix.exists()


def test_the_verb_uses_the_scripts_of_the_tree_to_be_installed(root: Path) -> None:
    script(root / "opt/tree/deploy/install", "#!/bin/sh\n")
    script(root / "opt/tree/deploy/upgrade", '#!/bin/sh\nprintf "%s\\n" "$@"\nexit 7\n')
    words = ["--from", "/opt/tree", "--prefix", "/opt/two words"]
    done = play_verb(root, "upgrade", *words)
    assert (done.returncode, done.stdout.splitlines()) == (7, words), done.stderr


def test_the_units_are_those_that_a_wheel_brings(root: Path) -> None:
    """An older version's script upgrades to it."""
    there = version(root / "opt/peerload", wheel(root / "opt/new.whl"), is_new=False)
    shutil.copytree(DEPLOY, there / "share/peerload/deploy")
    newer = there / "share/peerload/deploy/peerload.socket"
    newer.write_text("[Unit]\nDescription=of the newer\n", encoding="utf-8")
    done = play(root, "install", "--from", "/opt/new.whl")
    assert done.returncode == 0, done.stderr
    unit = root / "usr/local/lib/systemd/system/peerload.socket"
    assert unit.read_text(encoding="utf-8") == newer.read_text(encoding="utf-8")


def test_a_python_that_only_the_shell_of_root_finds_is_not_used(root: Path) -> None:
    """As pyenv and conda put one first: the agent's account could not run it."""
    script(root / "etc/of-root/bin/python3", "#!/bin/sh\necho used >>/opt/used\nexit 1\n")
    version(root / "opt/peerload", wheel(root / "opt/new.whl"), is_new=False)
    done = play(root, "install", "--no-start", "--from", "/opt/new.whl")
    assert done.returncode == 0, done.stderr
    assert not (root / "opt/used").exists()
