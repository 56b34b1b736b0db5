"""What every test may use: waiting without sleeping, and free ports."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def wait_until(predicate: Callable[[], object], timeout_s: float = 10.0, what: str = "") -> None:
    """Return as soon as ``predicate()`` is true; fail after ``timeout_s`` saying ``what`` was waited for."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or predicate}")
        pause.wait(0.02)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody used a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
