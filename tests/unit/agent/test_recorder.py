from __future__ import annotations

import logging
import stat
from typing import TYPE_CHECKING

import pytest

from peerload.agent import recorder
from peerload.agent.recorder import Recorder
from peerload.model import actions, events, timers
from peerload.model.errors import ConfigError
from peerload.model.events import Instant
from peerload.wire import recording
from tests.wire.test_recording import begun
from tests.wording import Says

if TYPE_CHECKING:
    from pathlib import Path

NOW = Instant(1.0, 2.0)
EVENT = events.LoadSampled(0.5, 0.0, 7)
DONE = [actions.SetTimer(timers.RenewalDue(), 3.0)]


def entries(path: Path) -> list[recording.Entry]:
    return list(recording.entries(memoryview(path.read_bytes())))


def kinds(path: Path) -> list[str]:
    return [type(entry).__name__ for entry in entries(path)]


def test_each_start_is_a_part_of_its_own_and_only_we_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    for _ in range(2):
        kept = Recorder(str(path), begun())
        kept.handled(NOW, EVENT, DONE)
        kept.close()
        kept.handled(NOW, EVENT, DONE)  # too late
        kept.close()
    assert kinds(path) == ["Started", "Handled", "RecordingEnd"] * 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_turn_is_in_the_file_when_it_is_over(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    kept = Recorder(str(path), begun())
    kept.handled(NOW, EVENT, DONE)
    assert kinds(path) == ["Started"]
    kept.flush()
    assert kinds(path) == ["Started", "Handled"]
    kept.close()


def test_what_a_killed_agent_left_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    kept = Recorder(str(path), begun())
    kept.handled(NOW, EVENT, DONE)
    kept.flush()
    kept.close()
    whole = path.read_bytes()
    for cut in range(1, 40):
        path.write_bytes(whole[:-cut])
        again = Recorder(str(path), begun())
        again.close()
        assert kinds(path)[-2:] == ["Started", "RecordingEnd"]
        assert kinds(path)[0] == "Started"


def test_it_ends_at_its_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "recording"
    bound = 6000
    kept = Recorder(str(path), begun(), bound)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            kept.handled(NOW, EVENT, DONE)
            kept.flush()
    last = entries(path)[-1]
    assert isinstance(last, recording.RecordingEnd)
    assert str(bound) in last.reason
    assert path.stat().st_size < bound + 200
    (record,) = caplog.records
    assert record.args == (str(path), bound)
    size = path.stat().st_size
    full = Recorder(str(path), begun(), bound)
    full.handled(NOW, EVENT, DONE)
    full.close()
    assert path.stat().st_size == size


def test_another_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "letter"
    path.write_text("dear reader")
    with pytest.raises(ConfigError, match=Says.NOT_A_RECORDING()):
        Recorder(str(path), begun())
    assert path.read_text() == "dear reader"
    with pytest.raises(ConfigError, match=Says.CANNOT_BE_USED()):
        Recorder(str(tmp_path), begun())


def test_two_agents_do_not_record_in_one_file(tmp_path: Path) -> None:
    first = Recorder(str(tmp_path / "recording"), begun())
    with pytest.raises(ConfigError, match="recording"):
        Recorder(str(tmp_path / "recording"), begun())
    first.close()
    Recorder(str(tmp_path / "recording"), begun()).close()


def test_a_full_disk_ends_the_recording_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kept = Recorder("/dev/full", begun())
        kept.handled(NOW, EVENT, DONE)
        kept.flush()
        kept.close()
    (record,) = caplog.records
    assert record.message.endswith("file=/dev/full error=No space left on device")


def test_what_has_no_encoding_ends_the_recording_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "recording"
    kept = Recorder(str(path), begun())
    with caplog.at_level(logging.WARNING):
        kept.handled(NOW, events.PeerUnreachable("n", "\udcff"), DONE)
    kept.close()
    assert kinds(path) == ["Started", "RecordingEnd"]
    assert len(caplog.records) == 1


def test_much_of_one_turn_is_written_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "BUFFERED_BYTES_MAX", 1)
    path = tmp_path / "recording"
    kept = Recorder(str(path), begun())
    kept.handled(NOW, EVENT, DONE)
    assert kinds(path) == ["Started", "Handled"]
    kept.close()
