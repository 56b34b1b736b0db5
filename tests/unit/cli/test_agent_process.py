"""The start of an agent: how long it may take."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from peerload.cli.common import agent_process
from peerload.model.errors import PeerloadError

if TYPE_CHECKING:
    from pathlib import Path


def test_an_agent_may_take_longer_to_start_where_its_database_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "STARTS_WITHIN_S", 0.0)
    monkeypatch.setattr(agent_process, "READS_BYTES_S", 200)
    for name, size in (("peerload.db", 150), ("peerload.db-wal", 100), ("peerload.db.broken", 10_000)):
        (tmp_path / name).write_bytes(bytes(size))
    settings = {"state": str(tmp_path), "socket": str(tmp_path / "socket")}
    with pytest.raises(PeerloadError) as refused:
        agent_process.start(settings, [sys.executable, "-c", "import time; time.sleep(600)"])
    assert "within 1 s" in refused.value.why
