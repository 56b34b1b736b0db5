"""Traces of tasks: two formats, what may be left out, and what a mistake says."""

from __future__ import annotations

import pytest

from peerload.model.errors import ConfigError
from peerload.sim import recorded
from peerload.sim.recorded import read_trace

CSV = """arrival,duration,cpus,gpus,node
1700000002.5,10,2,0,ws2
1700000000,5,1,1,ws1
1700000004,1.5,,,
"""
JSON_LINES = """{"arrival": 102.5, "duration": 10, "cpus": 2, "node": "ws2"}

{"arrival": 100, "duration": 5, "gpus": 1, "node": "ws1", "exit": 0}
{"arrival": 104, "duration": 1.5, "node": null}
"""


@pytest.mark.parametrize("text", [CSV, JSON_LINES, "\n" + CSV.replace("\n", "\r\n")])
def test_tasks_are_read_in_the_order_of_arrival(text: str) -> None:
    trace = read_trace("mine", text)
    assert len(trace) == 3
    assert list(trace.arrivals) == [0.0, 2.5, 4.0]
    assert list(trace.durations) == [5.0, 10.0, 1.5]
    assert (list(trace.cpus), list(trace.gpus)) == ([1.0, 2.0, 1.0], [1, 0, 0])
    assert trace.names == ("ws1", "ws2")
    assert list(trace.homes) == [0, 1, -1]


def test_columns_may_stand_in_any_order_and_others_are_ignored() -> None:
    trace = read_trace("mine", "user,duration, Arrival \nben,3,7\n")
    assert (list(trace.arrivals), list(trace.durations), list(trace.cpus)) == ([0.0], [3.0], [1.0])


def test_the_span_is_that_of_the_arrivals_and_a_pause() -> None:
    trace = read_trace("mine", "arrival,duration\n0,4\n10,4\n20,4\n")
    assert trace.span_s == 30.0, "two pauses of 10 s and one more"
    assert read_trace("mine", "arrival,duration\n5,1\n").span_s == 0.0


def test_durations_alone_are_enough_to_draw_from() -> None:
    assert list(read_trace("mine", "duration\n3\n4\n", ("duration",)).durations) == [3.0, 4.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "mine has no tasks"),
        ("arrival,duration\n", "mine has no tasks"),
        ("arrival\n1\n", "mine:1: no column duration"),
        ("1,2\n3,4\n", "mine:1: no column arrival and no column duration"),
        ("arrival,duration\n1,2\n3\n", "mine:3: 1 columns: its header has 2"),
        ("arrival,duration\n1,2\n\n3,long\n", "mine:4: duration is 'long': allowed: a number from 0 to 1e+09"),
        ("arrival,duration\n1,\n", "mine:2: duration is missing"),
        ("arrival,duration\n1,nan\n", "mine:2: duration is 'nan'"),
        ("arrival,duration\n-1,2\n", "mine:2: arrival is '-1'"),
        ("arrival,duration\n1e12,2\n", "mine:2: arrival is '1e12'"),
        ("arrival,duration\n0,2\n2e9,2\n", "mine spans 2e+09 s"),
        ("arrival,duration,cpus\n1,2,0\n", "mine:2: cpus is 0: allowed: more than 0"),
        ("arrival,duration,gpus\n1,2,0.5\n", "mine:2: gpus is 0.5: allowed: whole devices"),
        ("arrival,duration,node\n1,2," + "n" * 200 + "\n", "mine:2: node has 200 characters"),
        ('{"arrival": 1, "duration": 2}\n{"arrival": 1,\n', "mine:2: no JSON"),
        ('{"arrival": 1, "duration": 2}\n[1, 2]\n', "mine:2: not a JSON object"),
        ('{"arrival": 1, "duration": true}\n', "mine:1: duration is True"),
    ],
)
def test_a_mistake_names_line_and_column_and_what_is_allowed(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_trace("mine", text)
    assert says in str(raised.value)


def test_the_number_of_tasks_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "TASKS_MAX", 2)
    with pytest.raises(ConfigError, match="more than 2 tasks"):
        read_trace("mine", CSV)


def test_the_first_tasks_are_taken_from_a_trace_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "TASKS_MAX", 2)
    first = read_trace("mine", CSV, tasks=1)
    assert (list(first.durations), first.names) == ([5.0], ("ws1", "ws2")), "the nodes are those of all"
    assert list(read_trace("mine", CSV, tasks=2).arrivals) == [0.0, 2.5]
    with pytest.raises(ConfigError, match="more than 2 tasks"):
        read_trace("mine", CSV, tasks=3)
