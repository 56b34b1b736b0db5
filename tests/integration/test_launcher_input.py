"""The launcher and standard input: fed as far as the agent says, ended only at its word, with another agent too; terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.test_launcher import Agent, Bench, fixture_bench
from tests.support import wait_until

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["fixture_bench"]
KEY = "a-1"


def fed(agent: Agent, offset: int) -> dict[str, Any]:
    """What is told when so much was taken; whatever comes before it is let go."""
    while True:
        event = agent.next()
        if event["is"] == "fed" and event["offset"] == offset:
            return event


def reader(bench: Bench, *argv: bytes, **more: object) -> tuple[Agent, Path]:
    """A task that reads a file that does not exist yet."""
    bench.launcher()
    agent = bench.agent()
    source = bench.directory / "source"
    agent.spawn(KEY, *argv, input=str(source), **more)
    agent.started(KEY)
    return agent, source


def test_it_reads_what_the_agent_says_is_there(bench: Bench) -> None:
    agent, source = reader(bench, b"cat")
    output = bench.directory / f"{KEY}.out"
    source.write_bytes(b"abcdef and what is not whole yet")
    agent.send({"do": "input", "key": KEY, "size": 6})
    assert fed(agent, 6)["is_closed"] is False
    wait_until(lambda: output.read_bytes() == b"abcdef")
    agent.send({"do": "input", "key": KEY, "size": 10, "ends": True})
    assert agent.ended(KEY)["exit_code"] == 0
    assert output.read_bytes() == b"abcdef and"


def test_its_input_does_not_end_with_the_agent(bench: Bench) -> None:
    agent, source = reader(bench, b"cat")
    source.write_bytes(b"one")
    agent.send({"do": "input", "key": KEY, "size": 3})
    fed(agent, 3)
    agent.close()
    other = bench.agent()
    with source.open("ab") as file:
        file.write(b" two")
    other.send({"do": "input", "key": KEY, "size": 7, "ends": True})
    assert other.ended(KEY)["stdout_bytes"] == 7


def test_a_task_that_reads_no_more_is_told_of_and_holds_nothing_up(bench: Bench) -> None:
    agent, source = reader(bench, b"sh", b"-c", b"read a; exec 0<&-; sleep 60")
    size = 8 << 20
    source.write_bytes(b"line\n" + bytes(size))
    agent.send({"do": "input", "key": KEY, "size": size + 5})
    while True:
        event = agent.next()
        assert event["is"] == "fed"
        if event["is_closed"]:
            break
    assert event["offset"] < size
    agent.send({"do": "input", "key": KEY, "size": size + 5}, {"do": "ping"})
    assert agent.next()["is_closed"] is True
    assert agent.next()["is"] == "pong"
    agent.send({"do": "signal", "key": KEY, "signal": 9})
    assert agent.ended(KEY)["signal"] == 9


def test_what_is_said_of_an_unknown_input_is_let_go(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    agent.send({"do": "input", "key": "b-1", "size": 5}, {"do": "resize", "key": "b-1", "rows": 1, "columns": 1})
    agent.send({"do": "ping"})
    assert agent.next()["is"] == "pong"


def test_a_terminal_has_its_window_and_keeps_what_was_written(bench: Bench) -> None:
    script = b"stty size; tty >/dev/null && echo a tty; echo bad >&2; read a; stty size; echo $a; seq 20000 | tail -1"
    agent, source = reader(bench, b"sh", b"-c", script, terminal=[33, 99])
    output = bench.directory / f"{KEY}.out"
    wait_until(lambda: output.read_bytes().endswith(b"bad\r\n"))
    assert output.read_bytes() == b"33 99\r\na tty\r\nbad\r\n"
    agent.send({"do": "resize", "key": KEY, "rows": 40, "columns": 120})
    source.write_bytes(b"typed\n")
    agent.send({"do": "input", "key": KEY, "size": 6})
    exit_ = agent.ended(KEY)
    assert exit_["exit_code"] == 0
    assert output.read_bytes().endswith(b"typed\r\n40 120\r\ntyped\r\n20000\r\n")
    assert exit_["stdout_bytes"] == output.stat().st_size
    assert exit_["stderr_bytes"] == 0


def ended_terminal(bench: Bench, script: bytes, typed: bytes) -> tuple[dict[str, Any], bytes]:
    """A task in a terminal into which all of this is typed, then the end → how it ended, and what is on its screen."""
    agent, source = reader(bench, b"sh", b"-c", script, terminal=[24, 80])
    source.write_bytes(typed)
    agent.send({"do": "input", "key": KEY, "size": len(typed), "ends": True})
    return agent.ended(KEY), (bench.directory / f"{KEY}.out").read_bytes()


@pytest.mark.parametrize("typed", [b"", b"abc", b"abc\n", b"abc\r", b"abc\n\nabc"])
def test_the_end_of_what_is_typed_is_one_for_the_terminal_also_after_half_a_line(bench: Bench, typed: bytes) -> None:
    exit_, seen = ended_terminal(bench, b"n=$(cat | wc -c); echo; echo $n", typed)
    assert exit_["exit_code"] == 0
    assert seen.split()[-1] == b"%d" % len(typed)


def test_the_end_is_the_key_that_the_terminal_has_for_it(bench: Bench) -> None:
    bench.launcher()
    agent = bench.agent()
    source, output = bench.directory / "source", bench.directory / f"{KEY}.out"
    script = b"stty -echo eof ^A; echo set; cat | wc -c"
    agent.spawn(KEY, b"sh", b"-c", script, input=str(source), terminal=[24, 80])
    agent.started(KEY)
    wait_until(lambda: output.read_bytes() == b"set\r\n")
    source.write_bytes(b"abc")
    agent.send({"do": "input", "key": KEY, "size": 3, "ends": True})
    assert agent.ended(KEY)["exit_code"] == 0
    assert output.read_bytes().split() == [b"set", b"3"]


def test_a_task_may_close_its_terminal_and_open_it_again(bench: Bench) -> None:
    script = b"exec <&- >&- 2>&-; sleep 0.3; exec >/dev/tty; seq 20000 | tail -1; exit 3"
    exit_, seen = ended_terminal(bench, script, b"")
    assert exit_["exit_code"] == 3
    assert seen.endswith(b"20000\r\n")
