"""The agent's wait for the end of a launcher, where many descriptors are open."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

from peerload.agent.launcher import process
from peerload.client.connection import readable_within

if TYPE_CHECKING:
    from collections.abc import Iterator

import pytest

FIRST_UNSELECTABLE = 1024
"""`select` takes no descriptors from here on."""


@pytest.fixture(autouse=True)
def _room() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * FIRST_UNSELECTABLE), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def high(descriptor: int) -> int:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_UNSELECTABLE)
    finally:
        os.close(descriptor)


def test_the_end_of_a_launcher_is_seen_with_more_descriptors_than_select_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", lambda pid: high(opened(pid)))
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        process.wait_gone(gone.pid, 60.0)
        assert not process.is_alive(gone.pid)
    process.wait_gone(os.getpid(), 0.0)


def test_a_client_waits_for_a_descriptor_that_select_does_not_take() -> None:
    wake = high(os.eventfd(0))
    assert not readable_within(wake, 0)
    os.eventfd_write(wake, 1)
    assert readable_within(wake, 60.0)
    os.close(wake)
