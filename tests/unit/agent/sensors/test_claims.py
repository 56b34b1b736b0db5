"""One GPU, one agent."""

from __future__ import annotations

import os
from pathlib import Path

from peerload.agent.sensors.claims import Claims
from peerload.model.devices import Device


def test_a_card_is_claimed_by_one_agent(tmp_path: Path) -> None:
    cards = tuple(Device(f"nvidia:GPU-fake-{number}", index=number) for number in range(2))
    first, second = Claims(tmp_path), Claims(tmp_path)
    assert first.claim(cards[:1]) == cards[:1]
    assert second.claim(cards) == cards[1:]
    assert second.refused == {"nvidia:GPU-fake-0": f"process {os.getpid()}"}
    assert first.claim(cards) == cards[:1]
    first.close()
    assert second.claim(cards) == cards
    second.close()
