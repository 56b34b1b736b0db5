"""What tests need from the system: programs, found or (as root on Debian) installed once a session; and less search for
garbage than Python does by itself, which in simulations is a seventh of all work."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTALL_TIMEOUT_S = 300
SYSTEM_DIRECTORIES = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where daemons lie; they are not on an ordinary user's PATH."""
GARBAGE_AFTER = 20_000
"""So many new objects before garbage is looked for (Python: 700)."""
LONG_S_MAX = 1800
"""Limit of a test of the long tier; it may be played beside other work. In the gate it is pytest's `timeout`."""

settings.register_profile(
    "busy", settings(), derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")  # how long an example takes, and to draw it, says something about the machine alone
# Hypothesis draws numbers and words from the modules that are loaded: which those are depends on the other tests of the
# same process, and with them the examples.
providers._get_local_constants = lambda: providers._local_constants

for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        # So a shell, or nohup, starts what runs in the background; programs that the tests interrupt would inherit it.
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


gc.disable()  # until all tests are collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give long tests more time before they count as hung."""
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S_MAX))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """What there is by now stays: it is not searched again and again."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(GARBAGE_AFTER, 20, 20)


def _find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=SYSTEM_DIRECTORIES)


def _apt_get(*arguments: str) -> str:
    """Run apt-get. Returns "" if all went well, else the end of what it said."""
    done = subprocess.run(
        ["apt-get", "-qq", "-o", f"DPkg::Lock::Timeout={INSTALL_TIMEOUT_S}", *arguments],  # another worker may be at it
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * INSTALL_TIMEOUT_S,
        check=False,
    )
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip()[-300:] or "apt-get failed"


def require_program(program: str, package: str) -> Path:
    """The path of a system program, installed from its Debian package if we may. Without it the test is skipped with
    the reason, or fails where nothing may be skipped (CI=true)."""
    if found := _find(program):
        return Path(found)
    why = "install it to run this test"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        why = _apt_get("update") or _apt_get("install", "-y", "--no-install-recommends", package)
        if found := _find(program):
            return Path(found)
    reason = f"no {program} here (Debian package {package}): {why}"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def mosquitto() -> Path:
    """The Mosquitto broker's program."""
    return require_program("mosquitto", "mosquitto")


@pytest.fixture(scope="session")
def tmux() -> Path:
    """The terminal multiplexer, in which programs for terminals are driven."""
    return require_program("tmux", "tmux")


@pytest.fixture(scope="session")
def strace() -> Path:
    """The program that makes system calls fail."""
    return require_program("strace", "strace")


@pytest.fixture(autouse=True)
def _databases_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the databases that a test leaves open: Python 3.13 warns of them in whichever test its collector runs."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def connected(*arguments: Any, **named: Any) -> sqlite3.Connection:
        opened.append(connect(*arguments, **named))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", connected)
    yield
    for connection in opened:
        with contextlib.suppress(sqlite3.ProgrammingError):  # of another thread
            connection.close()
