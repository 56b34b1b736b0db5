"""The settings with which an agent starts again by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peerload.agent import main
from peerload.agent.daemon import RESTART

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from peerload.model.config import AgentConfig


def test_a_file_that_has_a_mistake_by_then_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent restarts also when its address changes: nobody is there to see an error."""
    file = tmp_path / "config.toml"
    file.write_text("slots = 3\n")
    slots = []

    def serve(config: AgentConfig, *_: Any) -> int:
        slots.append(config.slots)
        file.write_text(["slotts = 4\n", "slots = 5\n", ""][len(slots) - 1])
        return RESTART if len(slots) < 3 else 0

    for name in ("open_more_files", "_load_the_agent"):
        monkeypatch.setattr(main, name, int)
    monkeypatch.setattr(main, "_log_to", lambda _path: None)
    monkeypatch.setattr(main, "serve", serve)
    flags = {"config": str(file), "state": str(tmp_path), "socket": str(tmp_path / "s")}
    assert main.run(flags, {}) == 0
    assert slots == [3, 3, 5]
