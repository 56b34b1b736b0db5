"""The recording in README.md: real commands typed at a real terminal, on two agents of this machine.

`make recording` types them and prints what is shown; `python -m tests.recording --write` puts that into README.md.
"""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING

from tests.integration.cluster import ROOT, Cluster, program
from tests.terminal import shown_at_a_terminal

if TYPE_CHECKING:
    from tests.integration.cluster import Agent

TYPED = (
    "seq 3 | peerload run --node ws2 sh -c 'cat; echo on $PEERLOAD_NODE >&2; exit 7'; echo $?",
    "peerload map --no-bar 'sleep {}; echo {} on $PEERLOAD_NODE' ::: 0.6 0.2 0.4",
    "peerload submit --array 1-5 sleep 30",
    "peerload submit --name big -c 2 sleep 60",
    "peerload why @",
    "peerload top --once",
    "peerload cancel 3 @",
    "peerload logs 2.1",
)
COLUMNS, LINES = 110, 40
WITHIN_S = 60.0
README = ROOT / "README.md"
BEGIN, END = "<!-- recording: make recording -->\n```text\n", "```\n<!-- end of the recording -->"
_COLOUR = re.compile(r"\x1b\[\d+m")


def recorded() -> str:
    """What a terminal shows when all of it is typed. Fails if something is left over."""
    with Cluster() as cluster:
        ws1 = cluster.agent("ws1", slots=2)
        ws2 = cluster.agent("ws2", "--peer", ws1.listen, slots=3)
        cluster.await_acquainted([ws1, ws2])
        script = cluster.directory / "bin" / "peerload"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\nexec {shlex.join(program())} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        return "".join(f"$ {command}\n{_typed(ws1, command)}" for command in TYPED)


def _typed(agent: Agent, command: str) -> str:
    """What one line shows."""
    path = f"{agent.cluster.directory}/bin:{agent.cluster.environment['PATH']}"
    environment = {**agent.cluster.environment, "PATH": path, "PEERLOAD_SOCKET": agent.socket, "TERM": "xterm"}
    shown = shown_at_a_terminal(["bash", "-c", command], environment, LINES, COLUMNS, WITHIN_S)
    text = _COLOUR.sub("", shown.decode()).replace("\r\n", "\n")
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def in_readme() -> str:
    """The recording that README.md has."""
    text = README.read_text(encoding="utf-8")
    start = text.index(BEGIN) + len(BEGIN)
    return text[start : text.index(END, start)]


def main(words: list[str]) -> None:
    """Print it, or put it in its place."""
    made = recorded()
    if words == ["--write"]:
        text = README.read_text(encoding="utf-8")
        start = text.index(BEGIN) + len(BEGIN)
        README.write_text(text[:start] + made + text[text.index(END, start) :], encoding="utf-8")
    else:
        sys.stdout.write(made)


if __name__ == "__main__":
    main(sys.argv[1:])
