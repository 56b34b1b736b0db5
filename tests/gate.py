"""Plugin of `make test`: runs lint beside the tests, and compiles them once for all processes that read them.

What lint finds is shown before the closing line, which counts it, and makes the run fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).resolve().parents[1]
STALE_MAX = 20
"""Processes that each compile so many files themselves cost less than one more that reads all tests."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    config.pluginmanager.register(Lint(), "lint-beside")
    if not sys.dont_write_bytecode and len(stale := stale_files()) > STALE_MAX:
        words = [sys.executable, "-m", "pytest", "--collect-only", "-qqq", "-p", "no:cacheprovider", "-m", ""]
        subprocess.run([*words, *map(str, stale)], cwd=ROOT, capture_output=True, check=False)  # the tests say why not


def stale_files() -> list[Path]:
    """Test files that are newer than what pytest has compiled of them, or of which it has compiled nothing."""
    stale = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = f"{path.stem}.{sys.implementation.cache_tag}-pytest-{pytest.__version__}.pyc"
        compiled = path.parent / "__pycache__" / name
        if not compiled.exists() or compiled.stat().st_mtime < path.stat().st_mtime:
            stale.append(path)
    return stale


class Lint:
    """`make lint` in a process group of its own, started with the tests and waited for at their end."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the session lasts
        self._process = subprocess.Popen(
            ["make", "--no-print-directory", "lint"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR) and self._process.wait():
            session.exitstatus = exitstatus or pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._process.poll():
            terminalreporter.section("lint failed", red=True, bold=True)
            self._said.seek(0)
            terminalreporter.write(self._said.read().decode(errors="backslashreplace"))
            terminalreporter.stats["lint failed"] = [None]

    def pytest_unconfigure(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()
        self._said.close()
