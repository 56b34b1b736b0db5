"""The settings with which an agent starts again by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from peerload.agent import main
from peerload.agent.daemon import RESTART

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from peerload.model.config import AgentConfig
    from peerload.policy.registry import LivePreset


@pytest.fixture
def serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., int]], dict[str, str]]:
    """Has this run in the place of the agent → the flags to start it with."""

    def use(serve: Callable[..., int]) -> dict[str, str]:
        for name in ("open_more_files", "_load_the_agent"):
            monkeypatch.setattr(main, name, int)
        monkeypatch.setattr(main, "_log_to", lambda _path: None)
        monkeypatch.setattr(main, "serve", serve)
        return {"state": str(tmp_path), "socket": str(tmp_path / "s")}

    return use


def test_a_file_that_has_a_mistake_by_then_changes_nothing(tmp_path: Path, serves: Any) -> None:
    """An agent restarts also when its address changes: nobody is there to see an error."""
    file = tmp_path / "config.toml"
    file.write_text("slots = 3\n")
    slots = []

    def serve(config: AgentConfig, *_: Any) -> int:
        slots.append(config.slots)
        file.write_text(["slotts = 4\n", "slots = 5\n", ""][len(slots) - 1])
        return RESTART if len(slots) < 3 else 0

    assert main.run({"config": str(file), **serves(serve)}, {}) == 0
    assert slots == [3, 3, 5]


def test_nor_does_a_preset_that_has_one(tmp_path: Path, serves: Any) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[transfer]\nthreshold = 3\n")
    texts = []

    def serve(_config: AgentConfig, preset: LivePreset, *_: Any) -> int:
        texts.append(preset.source.text)
        file.write_text(["[transfer\n", "[transfer]\nthreshold = 5\n", ""][len(texts) - 1])
        return RESTART if len(texts) < 3 else 0

    assert main.run({"policy": str(file), **serves(serve)}, {}) == 0
    assert texts == ["[transfer]\nthreshold = 3\n"] * 2 + ["[transfer]\nthreshold = 5\n"]
