"""Names, commands, reasons and output that are made to take a terminal over: none of it reaches one, whatever the verb."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.in_process import cli
from tests.integration.cluster import Cluster, program
from tests.support import wait_until
from tests.terminal import shown_at_a_terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.cluster import Agent

HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\x1b[35mred\x9b31m\x90q\x85next\nline\rover\ttab\b\x7f"
    "\u202egpj.exe\u2066\u200bhid\u200d\ufeff\u061c\u2028\u2029\U000e0041a" + "\u0301" * 9
)
OWN_COLOURS = re.compile(r"\x1b\[(?:0|1|2|31|32|33)m")
"""What peerload itself writes on a terminal, besides the ends of lines."""
HIDDEN = re.compile(
    r"[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f]"
)
PILE = re.compile("\u0301{3}")
WITHIN_S = 60.0
COLUMNS = 200


class Scene:
    """An agent with hostile tasks in every state. ended, waits, held: their ids."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        output = HOSTILE.encode() + b"\xff\xfe" + b"x" * 10_000
        self.ended = agent.submit("printf", "%s", output, name=HOSTILE)
        self.failed = agent.submit("sh", "-c", 'printf "%s" "$0" >&2; exit 3', output, name=HOSTILE)
        self.missing = agent.submit(b"/no/such/\x1b[2J\xff" + HOSTILE.encode(), name="y" * 128)
        agent.wait(self.ended, self.failed, self.missing)
        self.runs = agent.submit("sh", "-c", "sleep 600", HOSTILE, name=HOSTILE)
        agent.await_state(self.runs, "running")
        agent.call("drain", reason=HOSTILE)
        self.waits = agent.submit("sleep", "1", HOSTILE, name=HOSTILE)
        self.held = agent.submit("sleep", "2", HOSTILE, name=HOSTILE)
        agent.call("hold", tasks=[self.held])


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Cluster() as cluster:
        agent = cluster.agent("n1")
        path = cluster.directory / "config" / "peerload" / "config.toml"
        path.parent.mkdir(parents=True)
        path.write_text(f'"{"sl" + chr(92) + "u001b[2Jots"}" = 3\n', encoding="utf-8")
        made = Scene(agent)
        wait_until(lambda: agent.show(made.held)["state"] == "held")
        yield made


def on_a_terminal(agent: Agent, *words: str) -> str:
    """What a terminal is sent by a verb, stdout and stderr together."""
    environment = {
        **agent.cluster.environment, "PEERLOAD_SOCKET": agent.socket, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)
    }  # fmt: skip
    shown = shown_at_a_terminal([*program(), *words], environment, 50, COLUMNS, WITHIN_S)
    return shown.decode("utf-8", "surrogateescape")


def verbs(scene: Scene) -> list[list[str]]:
    return [
        ["ls"],
        ["ls", "--all", "--state", "done,failed,held"],
        ["history"],
        ["show", scene.ended, scene.failed, scene.missing, scene.runs, scene.waits, scene.held],
        ["why", scene.waits],
        ["why", scene.ended],
        ["why", scene.runs],
        ["events", "--limit", "100"],
        ["nodes"],
        ["top", "--once"],
        ["wait", scene.ended, scene.failed, scene.missing],
        ["wait", scene.waits, "--timeout", "1s"],
        ["hold", scene.waits],
        ["release", scene.ended],
        ["logs", scene.ended],
        ["logs", scene.failed],
        ["retry", scene.missing],
        ["drain"],
        ["doctor"],
        ["config"],
        ["config", "check"],
        ["policy", "show", HOSTILE],
        ["show", HOSTILE],
        ["forget", HOSTILE],
        ["cancel", HOSTILE],
        [HOSTILE],
        ["ls", f"--{HOSTILE}"],
        ["ls", "--state", HOSTILE],
        ["submit", "--dry-run", "-J", HOSTILE[:100], "echo", HOSTILE],
        ["submit", "--env", HOSTILE, "true"],
        ["submit", "-w", HOSTILE, "true"],
        ["submit", "-d", f"/{HOSTILE}", "true"],
        ["submit", "-J", HOSTILE, "--held", "echo", HOSTILE],
        ["submit", f"echo {HOSTILE}"],
        ["cluster", "show", f"/{HOSTILE}"],
        ["replay", f"/{HOSTILE}"],
        ["completions", "answer", "tab", "show", ""],
        ["completions", "answer", "colon", "cancel", "n"],
        ["cancel", scene.held],
    ]


@pytest.mark.rule("T1")
@pytest.mark.bad_input("terminal-escape")
def test_no_control_reaches_a_terminal(scene: Scene) -> None:
    said: dict[str, str] = {}
    for words in verbs(scene):
        shown = OWN_COLOURS.sub("", on_a_terminal(scene.agent, *words)).replace("\r\n", "\n")
        assert shown, words
        if words[0] in ("completions", "logs"):
            shown = shown.replace("\t", " ")
        told = HIDDEN.search(shown) or PILE.search(shown) or re.search("\r", shown)
        assert told is None, (words, shown[max(told.start() - 40, 0) : told.end() + 40])
        assert not re.search("[\udc80-\udcff]", shown), words
        said[words[0]] = said.get(words[0], "") + shown
    for verb in ("ls", "history", "show", "nodes", "top", "why"):
        assert "\\x1b" in said[verb], verb
    assert "Traceback" not in "".join(said.values())


@pytest.mark.rule("T1")
def test_json_is_json_and_whole(scene: Scene) -> None:
    agent = scene.agent
    for words in verbs(scene)[:16]:
        done = cli(agent, *words, "--json")
        for line in done.stdout.splitlines():
            assert line.isascii(), words
            assert json.loads(line)["v"] == 1
    (task,) = [json.loads(line) for line in agent.cli("show", "--json", scene.ended).stdout.splitlines()]
    assert task["name"] == HOSTILE


def test_a_line_stays_within_the_terminal(scene: Scene) -> None:
    for words in (["ls"], ["history"], ["nodes"]):
        for line in OWN_COLOURS.sub("", on_a_terminal(scene.agent, *words)).splitlines():
            assert len(line) <= COLUMNS, words


def test_what_runs_in_the_foreground_says_it_harmlessly(scene: Scene) -> None:
    scene.agent.call("undrain")
    for words in (
        ["run", f"/no/such/{HOSTILE}"],
        ["map", "exit 3 #{}", ":::", HOSTILE, "b"],
        ["map", "--dry-run", "echo {}", ":::", HOSTILE],
        ["clean", "--all", "--dry-run"],
    ):
        shown = OWN_COLOURS.sub("", on_a_terminal(scene.agent, *words)).replace("\r\n", "\n")
        drawn = re.sub(r"\r|\x1b\[K|\x1b\[\?25[hl]", "", shown)  # a progress bar, and the line it stands on
        assert shown, words
        told = HIDDEN.search(drawn)
        assert told is None, (words, drawn[max(told.start() - 40, 0) : told.end() + 40])
