"""How fast this node works: measured once, kept, set by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import uvloop

from peerload.agent.sensors import cpu_benchmark
from peerload.model.events import SpeedMeasured
from tests.each import each
from tests.support import PutEvents


def quick(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """In the place of the measurement."""
    monkeypatch.setattr(cpu_benchmark, "_command", lambda: [sys.executable, "-I", "-S", "-c", code])


@pytest.mark.long
def test_the_measurement_is_a_process_that_prints_a_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shorter = f"import sys; sys.path[:0] = {sys.path!r}; from peerload.agent.sensors import cpu_benchmark as speed; speed.MEASURE_S = 0.05; speed.main()"
    quick(monkeypatch, shorter)
    monkeypatch.setattr(
        cpu_benchmark, "MEASURE_S_MAX", 600.0
    )  # it has the lowest priority, and this machine may be busy
    told = PutEvents()
    uvloop.run(cpu_benchmark.measure_speed(tmp_path / "speed", told, after_s=0.0))
    (event,) = told
    assert 0.01 < event.speed < 100.0
    assert cpu_benchmark.stored_speed(tmp_path / "speed") == pytest.approx(event.speed, abs=0.001)


@each(("printed", "found"), [("1.25", 1.25), ("1e9", 1000.0), ("0", 0.001)])
def test_what_was_found_is_kept_and_told(
    printed: str, found: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quick(monkeypatch, f"print({printed!r})")
    told = PutEvents()
    uvloop.run(cpu_benchmark.measure_speed(tmp_path / "speed", told, after_s=0.0))
    assert told == [SpeedMeasured(found)]
    assert cpu_benchmark.stored_speed(tmp_path / "speed") == found
    assert [path.name for path in tmp_path.iterdir()] == ["speed"]


@pytest.mark.parametrize("code", ["print('nan')", "print('inf')", "raise SystemExit(3)", "print('quick')"])
def test_a_measurement_that_fails_changes_nothing(
    code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quick(monkeypatch, code)
    told = PutEvents()
    uvloop.run(cpu_benchmark.measure_speed(tmp_path / "speed", told, after_s=0.0))
    assert told == []
    assert not list(tmp_path.iterdir())
    assert len(caplog.records) == 1


def test_a_directory_that_cannot_be_written_costs_only_the_keeping(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quick(monkeypatch, "print(2)")
    told = PutEvents()
    uvloop.run(cpu_benchmark.measure_speed(tmp_path / "none" / "speed", told, after_s=0.0))
    assert told == [SpeedMeasured(2.0)]
    assert len(caplog.records) == 1


def test_a_measurement_that_takes_too_long_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quick(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(cpu_benchmark, "MEASURE_S_MAX", 0.01)
    told = PutEvents()
    uvloop.run(cpu_benchmark.measure_speed(tmp_path / "speed", told, after_s=0.0))
    assert told == []
    assert len(caplog.records) == 1


@each("text", ["", "fast", "nan", "\xff"])
def test_a_file_that_says_nothing_is_measured_again(text: str, tmp_path: Path) -> None:
    (tmp_path / "speed").write_text(text, encoding="latin-1")
    assert cpu_benchmark.stored_speed(tmp_path / "speed") is None


def test_a_file_that_cannot_be_read_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "speed").mkdir()
    assert cpu_benchmark.stored_speed(tmp_path / "speed") is None
    assert len(caplog.records) == 1
