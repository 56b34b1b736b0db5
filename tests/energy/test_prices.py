"""Price files: what is read, and each mistake with its line; the feed that reads them again."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from pathlib import Path

import pytest

from peerload.agent import energy
from peerload.agent.energy import PriceFeed
from peerload.config.loader import mistakes_in
from peerload.energy.price import read_prices
from peerload.model.errors import ConfigError
from tests.support import PutEvents

DAY = """start,end,value
2030-01-31T06:00Z,2030-01-31T07:00:00+00:00,420
2030-01-31T07:00Z,2030-01-31T09:00Z,-3.5
"""
SIX_S = 1_896_069_600.0


def test_rows_become_prices_and_the_time_around_them_is_unknown() -> None:
    found = read_prices(DAY, 0.0, "f")
    assert found == ((0.0, math.inf), (SIX_S, 420.0), (SIX_S + 3600, -3.5), (SIX_S + 3 * 3600, math.inf))


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "header"),
        ("a,b,c\n", 1, "header"),
        (DAY.splitlines()[0], 1, "no row"),
        (DAY + "2030-01-31T10:00Z,2030-01-31T11:00Z,1\n", 4, "gap"),
        (DAY + "2030-01-31T08:00Z,2030-01-31T11:00Z,1\n", 4, "overlap"),
        (DAY + "2030-01-31T05:00Z,2030-01-31T06:00Z,1\n", 4, "unsorted"),
        (DAY + "2030-01-31T09:00Z,2030-01-31T09:00Z,1\n", 4, "ends before"),
        (DAY + "2030-01-31T09:00+01:00,2030-01-31T10:00+01:00,1\n", 4, "UTC"),
        (DAY + "2030-01-31T09:00,2030-01-31T10:00,1\n", 4, "UTC"),
        (DAY + "yesterday,2030-01-31T10:00Z,1\n", 4, "not a time"),
        (DAY + "2030-01-31T09:00Z,2030-01-31T10:00Z,nan\n", 4, "not a number"),
        (DAY + "2030-01-31T09:00Z,2030-01-31T10:00Z,dear\n", 4, "not a number"),
        (DAY + "2030-01-31T09:00Z,2030-01-31T10:00Z\n", 4, "2 fields"),
    ],
)
def test_a_mistake_is_refused_with_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_prices(text, 0.0, "f")
    assert (caught.value.file, caught.value.line) == ("f", line)
    assert says in caught.value.says


def test_prices_that_are_all_in_the_past_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        read_prices(DAY, SIX_S + 3 * 3600, "f")
    assert caught.value.line == 3


class Log:
    def __init__(self) -> None:
        self.states: list[str] = []

    def record(self, what: str, state: str, **facts: str) -> None:
        self.states.append(state)


def test_a_changed_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    path, events = tmp_path / "prices.csv", Log()
    feed = PriceFeed(str(path), PutEvents(), events)  # type: ignore[arg-type]

    def look(text: str | None) -> bool:
        if text is not None:
            path.with_suffix(".new").write_text(text)
            path.with_suffix(".new").replace(path)
        return asyncio.run(feed.read()) != ()

    read = [look(None), look(DAY), look(None), look(DAY + "rubbish"), look(DAY + "\n")]
    assert read == [False, True, False, False, True]
    assert events.states == ["prices refused", "prices read", "prices refused", "prices read"]


def test_a_file_that_hangs_does_not_hold_up_the_end_of_the_agent(tmp_path: Path) -> None:
    path, put, before = tmp_path / "prices.csv", PutEvents(), set(threading.enumerate())
    os.mkfifo(path)  # to open it waits for a writer

    async def look() -> None:
        task = asyncio.create_task(PriceFeed(str(path), put, Log()).read())  # type: ignore[arg-type]
        await asyncio.sleep(0)  # it has begun
        are_daemons = [reader.daemon for reader in set(threading.enumerate()) - before]
        path.write_text(DAY)
        assert are_daemons == [True]
        assert await task

    asyncio.run(look())


def test_a_file_that_hangs_does_not_hold_up_the_start_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hung = tmp_path / "prices.csv", tmp_path / "hung"
    os.mkfifo(path)
    monkeypatch.setattr(energy, "FIRST_PRICES_S_MAX", 0.01)
    feed = PriceFeed(str(path), PutEvents(), Log())  # type: ignore[arg-type]

    async def story() -> None:
        assert await feed.first() == ()
        path.rename(hung)
        path.write_text(DAY)
        assert await feed.read()
        hung.write_text(DAY)  # the reader that hung ends

    asyncio.run(story())


def test_config_check_names_the_line_of_a_price_file(tmp_path: Path) -> None:
    prices, config = tmp_path / "prices.csv", tmp_path / "config.toml"
    prices.write_text(DAY + "rubbish\n")
    config.write_text(f'[energy]\nprice_file = "{prices}"\n')
    (mistake,) = mistakes_in(config)
    assert f"{prices}:4" in str(mistake)


def test_config_check_names_every_mistake_of_a_table(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        '[energy]\npower_cmd = 3\ncap_w = -1\nsleep_after = "10m"\nnonsense = 1\n[cpus]\nenforce = "hard"\n'
    )
    keys = ["energy.power_cmd", "energy.cap_w", "energy.nonsense", "energy.sleep_after", "cpus.enforce"]
    assert [mistake.key for mistake in mistakes_in(config)] == keys
