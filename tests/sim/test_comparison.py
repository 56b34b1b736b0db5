"""What `make comparison` measures, in short."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from peerload.policy.registry import presets
from tests import comparison
from tests.comparison import Features, draw, features, page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "SIZES", (3, 5))
    monkeypatch.setattr(comparison, "LOADS", (0.5,))
    monkeypatch.setattr(comparison, "NODES", 5)


@pytest.mark.usefixtures("_short")
@pytest.mark.long
def test_features_tell_presets_apart(tmp_path: Path) -> None:
    found = {name: features((name, 60)) for name in ("none", "adaptive", "central-fcfs", "non-cooperative")}
    assert math.isnan(found["none"].reaction)
    assert found["none"].messages == 0.0
    assert found["adaptive"].reaction < 1.0
    assert found["adaptive"].decision_us > 0.0
    assert found["central-fcfs"].head_down > 1.0
    assert math.isnan(found["adaptive"].head_down)
    assert found["adaptive"].unannounced > 0.0
    assert "arrival rates" in found["non-cooperative"].knows
    assert all(0 < one.jain <= 1 + 1e-9 for one in found.values())
    assert found["central-fcfs"].thresholds is not None
    assert found["non-cooperative"].thresholds is None
    text = page(list(found.values()), 60)
    assert {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| `")} == {
        "`none`*", "`adaptive`", "`central-fcfs`*", "`non-cooperative`*",
    }  # fmt: skip
    rows = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert len(set(rows)) == 1
    draw(list(found.values()), tmp_path / "figure.svg")
    assert b"adaptive" in (tmp_path / "figure.svg").read_bytes()


def test_the_page_has_every_feature() -> None:
    assert len(Features._fields) == len(comparison.COLUMNS) + 2


@pytest.mark.skipif(not (comparison.DOCS / "comparison.md").exists(), reason="`make comparison` has not been run")
def test_the_committed_table_has_every_preset_and_baseline() -> None:
    text = (comparison.DOCS / "comparison.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1].strip().removesuffix("*").strip("`") for line in text.splitlines() if line.startswith("| `")
    ]
    assert sorted(rows) == sorted(presets())


def test_an_interrupted_comparison_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(names: list[str], *_rest: object) -> Iterator[Features]:
        for name in names[:1]:  # as if the budget was over then
            measured.append(name)
            numbers: dict[str, Any] = dict.fromkeys(Features._fields, math.nan)
            yield Features(
                **numbers
                | {
                    "name": name,
                    "classes": (),
                    "knows": "-",
                    "response": 1.5,
                    "thresholds": (1.0,),
                    "messages_by_size": (1.0,),
                }
            )

    monkeypatch.setattr(comparison, "KEPT", tmp_path / "kept.json")
    monkeypatch.setattr(comparison, "_measured", measure)
    monkeypatch.setattr(comparison, "draw", lambda *_: None)
    words = ["--only", "none,threshold", "--out", str(tmp_path)]
    assert comparison.main(words) == 1
    assert not (tmp_path / "comparison.md").exists()
    assert comparison.main(words) == 0
    assert sorted(measured) == ["none", "threshold"]
    assert "`threshold`" in (tmp_path / "comparison.md").read_text(encoding="utf-8")
